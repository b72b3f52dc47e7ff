"""Distributed training from scratch. The listing of this folder is the syllabus: one idea, one file.

    mesh.py  comm.py        ranks as a grid; every message, metered
    allreduce.py            ring, tree, halving-doubling, from send and recv
    ddp.py  horovod.py      data parallelism, and its Horovod-style face
    sampler.py              every sample exactly once per epoch; exact distributed evaluation
    trainer.py              all of the above behind one train_step

    run/      from a notebook cell to ranks        measure/  time, memory, the machine
    models/   plain torch, unaware of ranks        show/     pictures, tables, widgets

Imports go downward only:

    show -> run -> {trainer, measure, models}      measure -> comm
    trainer -> {ddp, horovod, sampler, ...} -> {mesh, comm} -> torch
"""


def load_ipython_extension(shell):
    """`%load_ext labkit` adds the `%%torchrun` cell magic."""
    from labkit.run.magic import TorchrunMagic

    shell.register_magics(TorchrunMagic)

"""Distributed training from scratch: a small core to read, and a folder for each idea to use.

    ideas/      every algorithm in its plainest correct form: read this first
    messages    comm  comm_log  mesh  allreduce/  hierarchical  replicas
    ddp/  zero/  fsdp/  amp/  recompute/  offload/  memory/  compression/  local_sgd  horovod
    tensor_parallel/  attention/  pipeline/  moe/  parallelize/
    sampler  learning_rate  lamb  checkpoint/  preempt  watchdog  trainer  train  convert

    run/        from a notebook cell to ranks        measure/   time, memory, traffic, faults
    models/     plain torch, unaware of ranks        show/      pictures, tables, widgets
    scale/      GPUs that are not here: simulated, predicted, planned
    cluster/    where one machine ends: Slurm, Kubernetes, placement of jobs

A folder holds what only it uses, the class in the file of the same name: labkit/ddp/ddp.py has DDP,
and `from labkit.ddp import DDP` finds it. README's table has a line for each file and folder.

Imports go downward only (tests/house/test_import_rule.py has the order):

    show -> run -> {trainer, measure, models}     {show, run} -> cluster -> scale -> measure -> comm
    trainer -> {parallelize, ..., fsdp, zero, ddp} -> {ideas, mesh, comm} -> torch    ideas -> comm
"""


def load_ipython_extension(shell):
    """`%load_ext labkit` adds the `%%torchrun` cell magic."""
    from labkit.run.magic import TorchrunMagic

    shell.register_magics(TorchrunMagic)

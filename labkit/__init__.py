"""Distributed training from scratch. This folder's listing is the syllabus: one idea, one file.

What is indented is in parts/: what the file above it stands on, and others may share.

    mesh.py                 ranks as a grid: one process group per axis
    comm.py                 every message goes through here, and into a log
    meter.py                the log: what was sent, when, and who waited for it
    progress.py             who has not arrived: by process group, number and pair of ranks
    gloo.py                 what gloo is made to do in fewer bytes or copies
    allreduce.py            ring, tree, halving-doubling, from send and recv; on
        segments.py         one segment is added while the next is on its way
    hierarchical.py         the same in two levels: inside each node first, then between nodes
    ddp.py                  data parallelism: average the gradients; it stands on
        bucket.py           many small gradients travel as one message
        reducer.py          a bucket leaves the moment it is full: overlap
        replicas.py         the same model on all ranks, or a clear error
        join.py             ranks that run out of data
        wrapper.py          a module around a module, under the same names
        no_sync.py          several backwards add up on a rank, and are averaged once
        unused.py           a gradient that does not come: an error, or nobody waits for it
        static_graph.py     the same gradients in every backward: known after the first
        hook_failure.py     a comm hook that raises on one rank ends the step on all
        portable.py         moved, copied and pickled: what lies by the parameters is made anew
        pickling.py         what can be pickled, and what says which state to save instead
    horovod.py              the same averaging, as an optimizer
    zero.py                 ZeRO-1, ZeRO-2: shard optimizer states, then gradients; on
        shard.py            many tensors as one flat buffer, cut evenly among the ranks
        scatter.py          each rank gets the mean of the gradients of its part only
        consolidate.py      states of shards as states of the whole, and back
        sharded_optimizer.py  an optimizer of pieces, from outside: groups, names, whole states
        elementwise.py      which optimizers may work on a shard
    fsdp.py                 ZeRO-3: shard the parameters too, gather them unit by unit; on
        units.py            what is gathered together: which parts of a model are units
        unit.py             a unit in a step: when its backward begins, when it is done
        unit_gradients.py   each unit's gradients leave as it is done; all are there at the end
        sharding.py         over which ranks shards are cut, over which they are held alike
        call_order.py       which unit comes next: gather it ahead
        flat_param.py       a unit's parameters as one tensor: a shard at rest, whole in use
        full_state.py       a model of shards from outside: names, whole state dicts, moves
        clip.py             the global norm of gradients that are shards
    amp.py                  mixed precision: dynamic loss scaling, agreed by all ranks; on
        autocast.py         each operation in the precision that suits it
        precision.py        which operations run low, which in fp32
        unscale.py          gradients divided by the scale, and searched for inf, in one pass
        scaler_state.py     what a loss scaler is set to, and what a checkpoint keeps of it
        master_weights.py   fp32 masters of a 16-bit model
        fp8.py              products in eight bits, emulated: a scale for every tensor
    recompute.py            activation checkpointing: forward again, instead of keeping; on
        surroundings.py     random state and autocast as they were the first time
        keep.py             what is held, because it is expensive to compute again
    offload.py              optimizer states and activations in host memory or in a file; on
        expected_states.py  what an optimizer will hold, before its first step
        host.py             pinned memory, a mapped file, and copies beside the arithmetic
    budget.py               where every byte goes, before anything is run; a strategy that fits; on
        account.py          bytes by kind at every moment of a step
        rehearsal.py        one step on tensors without data: what would live, and when
        holdings.py         what DDP and ZeRO keep of parameters, gradients and states
        gathered.py         what FSDP does, unit by unit
        batch_size.py       the largest batch that fits
    compression/            gradients that travel as few bytes: comm hooks for DDP
    local_sgd.py            talk every H steps only: local SGD, DiLoCo
    attention.py            tile by tile: the matrix of all scores is never there as a whole; on
        tiles.py            a tile of scores: masked, dropped, and the same again in backward
    tensor_parallel.py      every rank has all tokens and a part of every matrix; on
        layouts.py          whole, shard or summand: how a tensor and its gradient lie on ranks
        split_layers.py     linear layers and embeddings of which each rank holds a part
        on_shards.py        norms and dropout on a rank's tokens, with parameters that are whole
        split_loss.py       cross entropy of logits that are never gathered
        split_state.py      parameters that are slices, and state dicts of the whole
        plan.py             patterns of names, and what is to be done with whom they meet
        draws.py            dropout: other numbers where tensors are split, the same where whole
    sequence_parallel.py    between the split layers each rank has a part of the tokens
    context_parallel.py     attention over a sequence that no rank holds whole
    pipeline.py             each rank has some layers: micro-batches pass through them all; on
        schedules.py        who does what in which order, written before anything runs
        dependencies.py     a schedule checked and played: what each action waits for
        messages.py         who sends what to whom, read off the schedule
        split_backward.py   the gradient that others wait for first, those of weights later
        stages.py           a rank's part of the model, by name; tied parameters
    moe.py                  a token goes to k of E networks, which the ranks share out; on
        routing.py          which experts a token goes to, with which weights; groups
        row_exchange.py     rows to the ranks that want them, gradients the way back
    composition.py          a mesh of axes: who gets which group, and what all must see together; on
        axes.py             which axes can be together, and what each needs of the module
        mesh_state.py       a model on a mesh, from outside: which elements of which whole
        score.py            a metric of a batch that several ranks compute together
    sampler.py              every sample exactly once per epoch; exact distributed evaluation
    learning_rate.py        a larger batch: the rate scaled, warmed up, brought down to zero
    trainer.py              all of the above behind one train_step
        metered.py          PyTorch's fully_shard, counted as ours is
    checkpoint.py           each rank writes what it holds: a killed run loses nothing; on
        pieces.py           a state as ranges of named wholes, whatever has cut them
        places.py           which elements of a whole a tensor is; columns, which are none in a row
        sharded_parts.py    FSDP, tensor parallelism and meshes inside wrappers and containers
        rows.py             what PyTorch's fully_shard has cut: rows are elements in a row
        as_it_is.py         what is neither a module nor a plain optimizer
        share_out.py        what several ranks hold alike is written once
        tensor_file.py      a file of tensors that executes nothing: safetensors
        tree.py             what is no tensor, as text
        manifest.py         which elements are in which file, and what its bytes were
        saved.py            any range of any whole, from the files that have it
        staying.py          which checkpoints stay
        store.py            a directory behind any URL: a file is there whole, or not there
        lease.py            a lock where no file can be locked: renewed while its holder lives
        together.py         what goes wrong on one rank is raised on all
        random_state.py     dropout goes on as it would have
    convert.py              a checkpoint in other people's formats, both ways; on
        sources.py          three formats, one way to read any range of any tensor
        dcp_folder.py       what torch.distributed.checkpoint wrote; nothing in it is executed
    preempt.py              told to stop, all ranks stop after the same step
    watchdog.py             who is stopped or stuck is named and ended; the others leave at once
    train.py                the command: an Experiment, trained until it is done or told to stop

    run/      from a notebook cell to ranks        measure/  time, memory, traffic, a run, faults
    models/   plain torch, unaware of ranks        show/     pictures, tables, widgets
    scale/    rehearsals, simulations, predictions, plans: GPUs that are not here

Imports go downward only:

    show -> run -> {trainer, measure, models}     {show, run} -> scale -> measure -> comm
    trainer -> composition -> {ddp, zero, fsdp, ...} -> parts -> {mesh, comm} -> torch
"""


def load_ipython_extension(shell):
    """`%load_ext labkit` adds the `%%torchrun` cell magic."""
    from labkit.run.magic import TorchrunMagic

    shell.register_magics(TorchrunMagic)

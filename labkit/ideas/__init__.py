"""The small labkit: every algorithm of the course in its plainest correct form, for one evening.

In this order:

    all_reduce                  sum a tensor over ranks: naive, ring, halving-doubling, tree
    data_parallel               average gradients: after backward, during backward, in buckets
    zero                        shard optimizer states (ZeRO-1), then gradients (ZeRO-2)
    fsdp                        shard parameters too: gather each unit when it runs (ZeRO-3)
    mixed_precision             cast the inputs of each operation; scale the loss
    recompute_and_offload       drop activations and compute them again, or move them away
    attention_and_context       attention tile by tile; over a sequence that is sharded
    two_levels_and_local_sgd    all-reduce inside a node first; average weights, not gradients
    compression                 send gradients in fewer bytes, and keep what was not sent
    checkpoint                  save and load shards so that a killed run can resume
    tensor_and_sequence         split the matrices of a layer; split the tokens between layers
    pipeline                    split the layers; micro-batches pass through the stages
    experts                     compute each token by k of E networks

These files import torch, Python's standard library and labkit.comm, which sends every message
(fsdp also imports zero). comm.exchange sends to one rank while it receives from another.
`group` is a process group, None for all ranks; ranks count within it. A function changes its
tensors in place if PyTorch's collective of the same kind does. All ranks start with equal weights.

Tests compare these functions with one process and with the drop-in classes. They are not fast, and
they handle no special case. The classes do: labkit.ddp.DDP, labkit.zero.ZeRO1,
labkit.fsdp.FSDP, and so on, are drop-in replacements for PyTorch's and survive a real job.
"""

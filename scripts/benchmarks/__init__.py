"""Ours against PyTorch's, one file for each thing that is timed. scripts/bench.py runs them and prints the table.

protocol.py        what a ratio must be to be claimed; labkit.measure.interleaved_timing times the variants
data_parallel.py   a training step: our DDP, PyTorch's DDP, and no communication at all as the floor
all_reduce.py      our rings and halving-doubling against gloo's own
launching.py       from a notebook cell to the first finished all-reduce, warm against a bare torchrun
overlap.py         a step with emulated compute against the sooner of what compute and network allow
compression.py     our comm hooks against PyTorch's, and the selection of the largest elements
network.py         all-reduce between two nodes on a shaped link: bytes on the wire, use of the link
slow_link.py       over a slow link: a training step, top-k against no compression; gathers against their bytes' time
attention.py       tiles against all scores at once and PyTorch's kernel; what a ring waits for
tensor_parallel.py GPT blocks split over ranks: our parallelize_module, and PyTorch's on DTensor
pipeline.py        a step of stages: our schedules against torch.distributed.pipelining, and their bubbles
experts.py         a mixture of experts against one network of the same work per token, emulated compute
simulated.py       steps of emulated compute over shaped links against labkit.scale's simulation of them
one_rank.py        of attention, recomputation and mixed precision what one rank can time; for `lab gpu`
exact.py           what is counted, not timed: bytes sent, bytes held
"""

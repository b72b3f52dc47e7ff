"""Benchmarks of labkit against PyTorch, one file per topic. scripts/bench.py runs them and prints the table.

protocol.py        when a ratio supports a claim; labkit.measure.interleaved_timing times the variants
data_parallel.py   a training step: labkit's DDP, PyTorch's DDP, and a step without communication
all_reduce.py      labkit's rings and halving-doubling against gloo's all-reduce
launching.py       from a notebook cell to the first finished all-reduce, warm against a bare torchrun
overlap.py         a step with emulated compute against the lower bound from compute and network
compression.py     labkit's comm hooks against PyTorch's, and the selection of the largest elements
network.py         all-reduce between two nodes on a shaped link: bytes on the link, use of the link
slow_link.py       over a slow link: a training step, top-k against no compression; gathers against their bytes' time
attention.py       tiled attention against full scores and PyTorch's kernel; the waiting time of a ring
tensor_parallel.py GPT blocks sharded over ranks: labkit's parallelize_module, and PyTorch's on DTensor
pipeline.py        a pipeline step: labkit's schedules against torch.distributed.pipelining, and their bubbles
experts.py         a mixture of experts against one network with the same work per token, emulated compute
simulated.py       steps of emulated compute over shaped links against labkit.scale's simulation of them
one_rank.py        the rows of attention, recomputation and mixed precision that one rank can time; for `lab gpu`
exact.py           counts instead of times: bytes sent, bytes held
"""

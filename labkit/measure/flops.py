"""The arithmetic of a training step, and how much the machine could have done in its time.

    forward     Y  = X W        X [m, k], W [k, n]: m n sums of k products, so 2 m n k FLOPs
    backward    dX = dY W^T     2 m n k        together 6 for each weight and token: "6 N"
                dW = X^T dY     2 m n k        (N: the weights of all matrix products)

    attention   scores Q K^T and their product with V: 2 x 2 s h forward for a token of s, in a
                layer of width h; twice that backward; in L layers: 12 L h s

                   FLOPs of the model in a step / time of the step
    MFU  =  -------------------------------------------------------------      a ratio, from 0 to 1
             FLOP/s that the same ranks reach together in matrix products

The FLOPs are the model's: what is computed a second time (recomputation, scores in a fused
backward) is not counted. The peak is measured, never looked up, with all ranks at work at once:
they may share cores.
Kaplan et al., Scaling Laws for Neural Language Models, 2020, arXiv:2001.08361, section 2.1 (6 N);
Chowdhery et al., PaLM, 2022, arXiv:2204.02311, appendix B (the term of attention, and MFU).
"""

from math import nan
from time import perf_counter

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from labkit import comm

LONG = 0.02  # seconds that a product must take, so that starting it costs nothing beside it


def step_flops(module, input, target, loss):
    """FLOPs of the products and convolutions of one forward and backward, counted by PyTorch.

    All may be on the meta device, where nothing is computed. Attention is taken as its products:
    the fused kernel of a CPU has no formula in the counter, that of a GPU counts scores twice.
    As in the papers, the half that a causal mask hides counts; norms and the optimizer do not.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss(module(input), target).backward()
    return counter.get_total_flops()


def token_flops(weights, layers, width, context):
    """FLOPs of a transformer per token, forward and backward, by the closed form 6 N + 12 L h s.

    weights: N, those that a token is multiplied with, the output layer's included.
    """
    return 6 * weights + 12 * layers * width * context


def peak_flops(device, dtype, working=True, repetitions=5):
    """FLOP/s of all ranks together, each in matrix products of its own. Collective.

    The best of a few. working=False: this rank waits. Of a dtype of 16 bits: that of fp32 where it
    is higher, as on a processor without arithmetic of 16 bits.
    """
    dtypes = {dtype, torch.float32} if dtype.itemsize == 2 else {dtype}
    in_order = sorted(dtypes, key=str)  # of all ranks the same
    return max(measured_peak(device, one, working, repetitions) for one in in_order)


def measured_peak(device, dtype, working, repetitions):
    """One clock for all ranks, from the first that begins to the last that is done.

    A rank may begin after the others: where they share cores, that is when another has ended. The
    first to leave the barrier before sees all of them begin, and leaves the one after when all are
    done.
    """
    size, best = 256, 0.0
    while repetitions:
        matrix = torch.randn(size, size, device=device).to(dtype) if working else None
        comm.barrier()
        start = perf_counter()
        if working:
            matrix @ matrix
            synchronize(device)
        comm.barrier()
        seconds = torch.tensor([perf_counter() - start], device=device)
        flops = torch.tensor([2.0 * size**3 * working], device=device)
        comm.all_reduce(seconds, op=dist.ReduceOp.MAX)
        comm.all_reduce(flops)
        best = max(best, (flops / seconds).item())
        if seconds < LONG:
            size *= 2
        else:
            repetitions -= 1
    return best


def synchronize(device):
    """On CUDA a product has only been enqueued when the call returns."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def mfu(flops, step_ms, peak):
    """Model FLOPs utilization of a step, at most 1: NaN where there is no time or no peak.

    And where it would be above 1: then the peak was not one.
    """
    share = flops / (1e-3 * step_ms * peak) if step_ms > 0 and peak > 0 else nan
    return share if share <= 1 else nan

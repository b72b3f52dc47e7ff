"""FLOPs of a training step, and model FLOPs utilization (MFU).

    forward     Y  = X W        X [m, k], W [k, n]: m n sums of k products, so 2 m n k FLOPs
    backward    dX = dY W^T     2 m n k        together 6 for each weight and token: "6 N"
                dW = X^T dY     2 m n k        (N: the weights of all matrix products)

    attention   scores Q K^T and their product with V: 2 x 2 s h forward for a token of s, in a
                layer of width h; twice that backward; in L layers: 12 L h s

                   FLOPs of the model in a step / time of the step
    MFU  =  -------------------------------------------------------------      a ratio, from 0 to 1
             FLOP/s that the same ranks reach together in matrix products

The FLOPs are the model's: recomputed operations (activations, scores in a fused backward) do not
count. The peak is measured, not looked up, with all ranks working at once, because they may share
cores.
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

LONG = 0.02  # seconds that a product must take, so that its launch time is negligible


def step_flops(module, input, target, loss):
    """Return the FLOPs of matrix products and convolutions in one forward and backward.

    Counted by PyTorch's FlopCounterMode. All tensors may be on the meta device, where nothing is
    computed. Attention counts as its products, because the counter has no formula for the fused CPU
    kernel and counts scores twice for the GPU's. As in the papers, scores that a causal mask hides
    count; norms and the optimizer do not.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss(module(input), target).backward()
    return counter.get_total_flops()


def token_flops(weights, layers, width, context):
    """Return FLOPs of a transformer per token, forward and backward: 6 N + 12 L h s.

    weights: N, the number of weights that a token is multiplied with, including the output layer.
    layers: L. width: h. context: s, the length of the sequence in tokens.
    """
    return 6 * weights + 12 * layers * width * context


def peak_flops(device, dtype, working=True, repetitions=5):
    """Return the FLOP/s of all ranks together in matrix products. Collective.

    The best of several repetitions. working=False: this rank waits. For a 16-bit dtype, the result
    of fp32 if it is higher, as on a processor without 16-bit arithmetic.
    """
    dtypes = {dtype, torch.float32} if dtype.itemsize == 2 else {dtype}
    in_order = sorted(dtypes, key=str)  # the same order on all ranks
    return max(measured_peak(device, dtype, working, repetitions) for dtype in in_order)


def measured_peak(device, dtype, working, repetitions):
    """Return FLOP/s of one dtype, from the start of the first rank to the end of the last.

    If ranks share cores, one may start only after another has ended. The first rank to leave the
    barrier starts before all others, and leaves the next barrier when all have ended.
    """
    size = 256
    best = 0.0
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
    """Wait for the device: on CUDA, a call returns when its product is only enqueued."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def mfu(flops, step_ms, peak):
    """Return the model FLOPs utilization of a step; NaN without a time or a peak.

    Also NaN if it would exceed 1, because then the peak was not one.
    """
    share = flops / (1e-3 * step_ms * peak) if step_ms > 0 and peak > 0 else nan
    return share if share <= 1 else nan

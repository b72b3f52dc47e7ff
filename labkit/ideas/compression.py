"""Gradient compression: send fewer bytes, and add what was not sent to the next gradient.

    residual += gradient          what earlier steps did not send is not lost (error feedback)
    message = compress(residual)  fewer bits an element, fewer elements, or thin matrices
    residual -= message           kept for the next step
    average = mean of all ranks' messages

                           message for N fp32 elements          the ranks' messages are
    16 bits                N x 2 bytes                          added on the way (all_reduce)
    quantized, 8 bits      N bytes and a scale                  gathered: each is sent n-1 times
    one bit                N/8 bytes and a magnitude            gathered
    top-k                  k values and k indices               gathered: indices differ per rank
    random-k               k values                             added: all ranks know the indices
    PowerSGD, rank r       r (rows + columns) x 4 bytes         added, twice

All but PowerSGD need flat tensors; 16 and 8 bits have no error feedback. Karimireddy et al., Error
Feedback Fixes SignSGD, ICML 2019, algorithm 2; each function names its own paper.
"""

import torch
import torch.distributed as dist

from labkit import comm


def half_precision_mean(gradient, dtype=torch.float16, group=None):
    """Average in 16 bits. Divide first: a sum of 16-bit numbers could overflow."""
    message = gradient.to(dtype) / dist.get_world_size(group)
    comm.all_reduce(message, group=group)
    return message.to(gradient.dtype)


def quantized_mean(gradient, noise, bits=8, group=None):
    """Round to 2^bits - 1 levels of a scale. Alistarh et al., QSGD, NeurIPS 2017, section 3.1.

    noise: torch.rand_like(gradient) rounds at random, and is then unbiased; 0.5 to the nearest.
    """
    levels, n = 2 ** (bits - 1) - 1, dist.get_world_size(group)
    scale = gradient.abs().max().view(1)
    codes = (gradient / scale * levels + noise).floor().to(torch.int8)
    scales, all_codes = scale.new_empty(n), codes.new_empty(n * len(codes))
    comm.all_gather(scales, scale, group=group)
    comm.all_gather(all_codes, codes, group=group)
    return (all_codes.view(n, -1) * (scales.view(n, 1) / levels)).mean(0)


def one_bit_mean(gradient, residual, group=None):
    """Send signs and one magnitude. Seide et al., 1-Bit SGD, Interspeech 2014, section 3.

    Here a sign takes a byte; the class packs eight of them into one.
    """
    residual += gradient
    magnitude, positive = residual.abs().mean().view(1), residual >= 0
    residual -= torch.where(positive, magnitude, -magnitude)
    n = dist.get_world_size(group)
    magnitudes, signs = magnitude.new_empty(n), positive.new_empty(n * len(positive))
    comm.all_gather(magnitudes, magnitude, group=group)
    comm.all_gather(signs, positive, group=group)
    return torch.where(signs.view(n, -1), magnitudes.view(n, 1), -magnitudes.view(n, 1)).mean(0)


def top_k_mean(gradient, residual, k, group=None):
    """Send the k largest elements of each rank, with their indices. Aji and Heafield, EMNLP 2017.

    Indices differ from rank to rank, so the values must not be added by an all_reduce.
    """
    residual += gradient
    indices = residual.abs().topk(k).indices
    values = residual[indices]
    residual[indices] = 0
    n = dist.get_world_size(group)
    all_values, all_indices = values.new_empty(n * k), indices.new_empty(n * k)
    comm.all_gather(all_values, values, group=group)
    comm.all_gather(all_indices, indices, group=group)
    return torch.zeros_like(gradient).index_add_(0, all_indices, all_values / n)


def random_k_mean(gradient, residual, indices, group=None):
    """Send the same random elements on all ranks. Stich et al., Sparsified SGD, NeurIPS 2018.

    indices: drawn from a seed that all ranks share, so they need not be sent.
    """
    residual += gradient
    values = residual[indices]
    residual[indices] = 0
    comm.all_reduce(values, group=group)
    average = torch.zeros_like(gradient)
    average[indices] = values / dist.get_world_size(group)
    return average


def dgc_mean(gradient, velocity, residual, k, momentum=0.9, group=None):
    """Top-k of the momentum, not of the gradient. Lin et al., Deep Gradient Compression, ICLR 2018.

    Sent elements lose their momentum, which would be stale (section 3.3).
    """
    velocity.mul_(momentum).add_(gradient)
    average = top_k_mean(velocity, residual, k, group)
    velocity[residual == 0] = 0
    return average


def powersgd_mean(gradient, residual, q, group=None):
    """Send a product of two thin matrices. Vogels et al., PowerSGD, NeurIPS 2019, algorithm 1.

    gradient, residual: [rows, columns]. q: [columns, rank], from the previous step. Returns the
    average and the next step's q.
    """
    n = dist.get_world_size(group)
    residual += gradient
    p = residual @ q  # [rows, rank]
    comm.all_reduce(p, group=group)
    p = torch.linalg.qr(p / n).Q
    q = residual.t() @ p  # [columns, rank]
    residual -= p @ q.t()
    q = q.contiguous()
    comm.all_reduce(q, group=group)
    q /= n
    return p @ q.t(), q


@torch.no_grad()
def one_bit_adam_step(p, m, v, residual, lr=1e-3, b1=0.9, eps=1e-8, group=None):
    """Step Adam after its warm-up: v is fixed, m is averaged in one bit. Tang et al., ICML 2021."""
    m.copy_(one_bit_mean(b1 * m + (1 - b1) * p.grad, residual, group))
    p -= lr * m / (v.sqrt() + eps)

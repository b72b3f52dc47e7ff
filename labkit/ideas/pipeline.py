"""Pipeline parallelism: each rank has some layers (a stage); micro-batches pass through the stages.

    gpipe         rank 0   F0 F1 F2 F3 .. .. B0 B1 B2 B3           F: forward of a micro-batch
                  rank 1   .. F0 F1 F2 F3 B0 B1 B2 B3 ..           B: its backward
    one_f_one_b   rank 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3           ..: idle, the bubble
                  rank 1   .. F0 B0 F1 B1 F2 B2 F3 B3 ..

Idle part of a step, p equal stages and M micro-batches: (p-1) / (M + p-1), plus messages, for both.
Held per rank, in activations of a micro-batch: M with gpipe, min(p - rank, M) with one_f_one_b.
Huang et al., GPipe, NeurIPS 2019; Narayanan et al., PipeDream, SOSP 2019.
"""

import torch
import torch.distributed as dist

from labkit import comm


def gpipe(rank, ranks, micro_batches):
    """The actions of a rank: all forwards, then all backwards."""
    return [("F", m) for m in range(micro_batches)] + [("B", m) for m in range(micro_batches)]


def one_f_one_b(rank, ranks, micro_batches):
    """The actions of a rank: enough forwards to fill the pipeline, then a backward after each."""
    ahead = min(ranks - 1 - rank, micro_batches)
    actions = [("F", m) for m in range(ahead)]
    for m in range(ahead, micro_batches):
        actions += [("F", m), ("B", m - ahead)]
    return actions + [("B", m) for m in range(micro_batches - ahead, micro_batches)]


def run_actions(actions, stage, inputs, targets, loss, group=None):
    """Run this rank's stage in the order of its actions; return the losses (on the last rank).

    inputs, targets: a tensor for each micro-batch. Rank 0 reads inputs, the last rank targets; on
    other ranks, inputs only give the shape that arrives. Parameters' gradients add up.
    """
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    saved, losses, sending = {}, [], []

    def send(tensor, dst):  # do not wait here: the other rank may be sending, too
        sending.append((comm.send(tensor, dst, group, async_op=True), tensor))

    for kind, m in actions:
        if kind == "F":
            x = inputs[m].detach()
            if rank > 0:
                x = torch.empty_like(x)
                comm.recv(x, rank - 1, group)
                x.requires_grad_()
            y = stage(x)
            if rank < last:
                send(y.detach(), rank + 1)
            else:
                y = loss(y, targets[m]) / len(targets)
                losses.append(y.detach())
            saved[m] = x, y
        else:
            (x, y), gradient = saved.pop(m), None
            if rank < last:
                gradient = torch.empty_like(y)
                comm.recv(gradient, rank + 1, group)
            y.backward(gradient)
            if rank > 0:
                send(x.grad, rank - 1)
    for work, _ in sending:
        work.wait()
    return losses

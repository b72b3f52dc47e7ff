"""Slow networks: all-reduce inside a node first, or average weights after every H steps.

    node 0   rank 0, rank 1    1  reduce_scatter inside each node   fast links
    node 1   rank 2, rank 3    2  all_reduce of the parts           slow links: one part per rank
                               3  all_gather inside each node       fast links

    local SGD   H steps alone, then average the weights
    DiLoCo      H steps alone, then treat the averaged movement as a gradient of an outer optimizer

Sent over the slow links per node and step, of m nodes and n ranks: 2 (m-1)/m x gradient bytes, by
one ring of all ranks 2 (n-1)/n, by local SGD 1/H of the ring's. Goyal et al., Accurate, Large
Minibatch SGD, 2017, section 4; Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019;
Douillard et al., DiLoCo, 2023, algorithm 1.
"""

import torch
import torch.distributed as dist

from labkit import comm


def hierarchical_all_reduce(tensor, inside, across):
    """Sum a contiguous tensor over all ranks, in place.

    inside: the group of this node's ranks, whose number must divide the number of elements.
    across: the group of the ranks that have the same position in their nodes.
    """
    part = tensor.new_empty(tensor.numel() // dist.get_world_size(inside))
    comm.reduce_scatter(part, tensor.view(-1), group=inside)
    comm.all_reduce(part, group=across)
    comm.all_gather(tensor.view(-1), part, group=inside)


@torch.no_grad()
def average_weights(parameters, group=None):
    """Average the weights (local SGD). Call it after every H local steps."""
    for p in parameters:
        comm.all_reduce(p, group=group)
        p /= dist.get_world_size(group)


@torch.no_grad()
def diloco_outer_step(parameters, anchors, outer, group=None):
    """Step the outer optimizer by the mean movement (DiLoCo). Call it after every H local steps.

    parameters, anchors: lists; the anchors are the parameters after the last outer step. outer: the
    optimizer of the anchors.
    """
    for p, anchor in zip(parameters, anchors, strict=True):
        anchor.grad = anchor - p  # minus the movement of this rank
        comm.all_reduce(anchor.grad, group=group)
        anchor.grad /= dist.get_world_size(group)
    outer.step()
    for p, anchor in zip(parameters, anchors, strict=True):
        p.copy_(anchor)

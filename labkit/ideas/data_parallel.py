"""Data parallelism: each rank holds the full model, gets its share of a batch, averages gradients.

    naive        |--- forward ---|--- backward ---| l1 | l2 | l3 | l4 |- step -|    after backward
    overlapped   |--- forward ---|--- backward ---|          |- step -|    each gradient when ready
                                   | l4 | l3 | l2 | l1 |
    bucketed     |--- forward ---|--- backward ---|       |- step -|       several in one message
                                     | l4 l3 | l2 l1 |

Sent per rank and step, on n ranks: 2 (n-1)/n x gradient bytes. Held: the full model, its gradients
and optimizer states. Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel
Training, VLDB 2020, section 3.2.
"""

import torch
import torch.distributed as dist

from labkit import comm


def average_gradients(parameters, group=None):
    """Average the gradients one by one. Call it between backward() and step()."""
    for p in parameters:
        if p.grad is not None:
            comm.all_reduce(p.grad, group=group)
            p.grad /= dist.get_world_size(group)


def average_during_backward(parameters, group=None):
    """Start the all-reduce of each gradient as soon as backward() has computed it.

    Returns a function: call it between backward() and step().
    """
    pending = []

    def start(p):
        pending.append((p, comm.all_reduce(p.grad, group=group, async_op=True)))

    def wait():
        while pending:
            p, work = pending.pop()
            work.wait()
            p.grad.div_(dist.get_world_size(group))

    for p in parameters:
        p.register_post_accumulate_grad_hook(start)
    return wait


def average_in_buckets(parameters, cap_bytes, group=None):
    """Start one all-reduce for a bucket of gradients as soon as backward() has computed them all.

    cap_bytes: of buckets_of(). Returns a function: call it between backward() and step().
    """
    pending = []

    def watch(bucket):
        ready = []

        def count(p):
            ready.append(p)
            if len(ready) == len(bucket):
                message = torch.cat([p.grad.flatten() for p in bucket])
                work = comm.all_reduce(message, group=group, async_op=True)
                pending.append((bucket, message, work))
                ready.clear()

        for p in bucket:
            p.register_post_accumulate_grad_hook(count)

    def wait():
        while pending:
            bucket, message, work = pending.pop()
            work.wait()
            message /= dist.get_world_size(group)
            for p, mean in zip(bucket, message.split([p.numel() for p in bucket]), strict=True):
                p.grad = mean.view_as(p)

    for bucket in buckets_of(parameters, cap_bytes):
        watch(bucket)
    return wait


def buckets_of(parameters, cap_bytes):
    """Group parameters, the last layers first, into lists of at most cap_bytes or one parameter."""
    buckets = [[]]
    for p in reversed(list(parameters)):
        if buckets[-1] and sum(q.nbytes for q in buckets[-1]) + p.nbytes > cap_bytes:
            buckets.append([])
        buckets[-1].append(p)
    return buckets

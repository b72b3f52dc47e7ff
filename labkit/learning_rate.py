"""The learning rate: scale it to a larger batch, warm it up, and decay it to zero.

    rate |        .-------.             scaled   more ranks: larger batches, fewer and better steps
         |     .-'         '-.          warm-up  at first the model changes too fast for large steps
         |  .-'               '-.       cosine   at the end small steps converge
         +--+------+-------------+--
            0   warm-up        steps    continuous: each part starts where the previous ends

A batch k times as large: linear, k x the rate (Goyal et al., Accurate, Large Minibatch SGD, 2017,
section 2.1), with warm-up (section 2.2), for batches up to about 8,192 (figure 1); square root
(Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014, section 5).
Cosine: Loshchilov and Hutter, SGDR, ICLR 2017, section 3, one period of it.
"""

from functools import partial
from math import cos, pi

from torch.optim.lr_scheduler import LambdaLR

# k: batch / reference batch; most: the largest k for the linear rule
LR_RULES = {
    "none": lambda k, most: 1.0,
    "linear": lambda k, most: k,
    "sqrt": lambda k, most: k**0.5,
    "linear_sqrt": lambda k, most: min(k, (k * most) ** 0.5),  # equal at k = most
}


def scaled_lr(lr, batch_size, reference_batch, rule, linear_until=8192):
    """Scale lr from reference_batch to batch_size. rule: a key of LR_RULES.

    linear_until: batch size from which linear_sqrt uses the square root.
    """
    if rule not in LR_RULES:
        raise ValueError(
            f"unknown learning-rate rule {rule!r}: choose one of {', '.join(LR_RULES)}"
        )
    most = max(1.0, linear_until / reference_batch)
    return lr * LR_RULES[rule](batch_size / reference_batch, most)


def warmup(optimizer, steps, cosine_steps=None):
    """Return a schedule that raises the learning rate in equal steps from lr / (steps + 1) to lr.

    cosine_steps: steps in which it then falls to 0 along half a cosine; None: it stays.
    """
    return LambdaLR(optimizer, partial(schedule_factor, steps, cosine_steps))


def schedule_factor(warmup_steps, cosine_steps, step):
    """Return the factor of the learning rate in a step, counted from 0."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if cosine_steps is None:
        return 1.0
    return (1 + cos(pi * min(1.0, (step - warmup_steps) / cosine_steps))) / 2

"""The learning rate: scaled to a larger batch, warmed up, and brought down to zero.

    rate |        .-------.             scaled   more ranks make a larger batch: fewer, surer steps
         |     .-'         '-.          warm-up  at first the model changes too fast for long steps
         |  .-'               '-.       cosine   at the end short steps settle
         +--+------+-------------+--
            0   warm-up        steps    nowhere a jump: one part ends where the next begins

A batch k times as large: linear, k x the rate (Goyal et al., Accurate, Large Minibatch SGD, 2017,
section 2.1), with warm-up (section 2.2), for batches up to about 8,192 (figure 1); square root
(Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014, section 5).
Cosine: Loshchilov and Hutter, SGDR, ICLR 2017, section 3, one period of it.
"""

from functools import partial
from math import cos, pi

from torch.optim.lr_scheduler import LambdaLR

# k: batch / reference batch; most: the largest k for which the linear rule is trusted
LR_RULES = {
    "none": lambda k, most: 1.0,
    "linear": lambda k, most: k,
    "sqrt": lambda k, most: k**0.5,
    "linear_sqrt": lambda k, most: min(k, (k * most) ** 0.5),  # the two meet where k is most
}


def scaled_lr(lr, batch_size, reference_batch, rule, linear_until=8192):
    """The learning rate for batch_size, if lr suits reference_batch. rule: a key of LR_RULES.

    linear_until: the batch from which on linear_sqrt goes with the square root.
    """
    if rule not in LR_RULES:
        raise ValueError(f"unknown learning-rate rule {rule!r}: known are {', '.join(LR_RULES)}")
    most = max(1.0, linear_until / reference_batch)
    return lr * LR_RULES[rule](batch_size / reference_batch, most)


def warmup(optimizer, steps, cosine_steps=None):
    """A schedule: the learning rate rises in equal steps from lr / (steps + 1) to lr, and stays.

    cosine_steps: instead of staying, it falls in so many steps along half a cosine to 0.
    """
    return LambdaLR(optimizer, partial(schedule_factor, steps, cosine_steps))


def schedule_factor(warmup_steps, cosine_steps, step):
    """What the learning rate is multiplied by in a step, counted from 0."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if cosine_steps is None:
        return 1.0
    return (1 + cos(pi * min(1.0, (step - warmup_steps) / cosine_steps))) / 2

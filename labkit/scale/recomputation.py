"""What recomputation repeats and what it still keeps, by the meaning that a stack gives to it.

    recompute     repeated of a forward     kept of a layer's activations
    full          1                         its input
    half          1/2                       1/2: every second layer
    selective     "op": 1/4                 1/2: all but the inputs of every second product
                  "attention": its core     all but the scores, which fused attention never stores

Korthikanti et al., MLSys 2023, section 5 (the core of attention); pytorch/torchtitan,
distributed/activation_checkpoint.py (by op).
"""

REPEATED = {"none": 0, "full": 1, "half": 0.5, "selective": 0.25}  # of a forward
KEPT = {"none": 1.0, "full": 0.0, "half": 0.5, "selective": 0.5}  # of what a layer saves


def of_attention(job):
    """Return whether only the core of attention is computed again."""
    return job.recompute == "selective" and job.stack.selective == "attention"


def repeated(job):
    """Return the share of a forward, its attention's core aside, that is computed again."""
    return 0 if of_attention(job) else REPEATED[job.recompute]


def kept_share(job):
    """Return the share of a layer's activations, scores aside, that stays until its backward."""
    return 1.0 if of_attention(job) else KEPT[job.recompute]

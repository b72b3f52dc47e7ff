"""A metric of a batch that several ranks compute together: every rank gets the sum.

    tp   every rank has the whole output               nothing
    cp   a rank has the output of its tokens           all_reduce
    pp   a last stage has it, by micro-batches         all_reduce

Sent per rank and batch, besides what forward sends: 8 bytes.
"""

import torch

from labkit import comm


def score(model, metric, input, target):
    """Return the metric of a batch, a scalar; float64 if it was summed over ranks.

    model: a labkit.parallelize.Composed. metric: (output, target) -> a sum. Collective, over the
    ranks that have this batch.
    """
    if model.pipeline:
        return through_stages(model, metric, input, target)
    value = metric(model(model.own_tokens(input)), model.own_tokens(target))
    if model.size["cp"] > 1:
        value = value.double()
        comm.all_reduce(value, group=model.mesh.group("cp"))
    return value


def through_stages(model, metric, input, target):
    """Return the metric of a batch that passes through a pipeline: a scalar, float64. Collective.

    The batch is padded to equal micro-batches; the added rows do not count.
    """
    pipeline = model.pipeline
    size = -(-len(input) // pipeline.micro_batches)
    missing = size * pipeline.micro_batches - len(input)
    full = torch.cat([input, input[:1].expand(missing, *input.shape[1:])])
    targets = list(target.split(size))
    targets += [target[:0]] * (pipeline.micro_batches - len(targets))

    def of_rows(output, target):
        none = output.new_zeros((), dtype=torch.float64)
        return metric(output[: len(target)], target).double() if len(target) else none

    pipeline.evaluate(full, targets, of_rows)
    told = torch.zeros((), dtype=torch.float64, device=input.device)
    told += sum(pipeline.losses)  # empty except on ranks with the last stage
    comm.all_reduce(told, group=model.mesh.group("pp"))
    return told

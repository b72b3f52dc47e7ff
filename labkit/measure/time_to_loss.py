"""Time to a given loss: train a few steps, stop the clock, evaluate, until the loss is reached.

    clock      |== lap ==|           |== lap ==|           |== lap ==|
    off it                evaluate ?            evaluate ?            evaluate: reached

The cost of a method is not its time per step but its time to a loss. Ranks evaluate after the same
steps and end together: the worst loss of all ranks counts. Evaluation is neither timed nor counted.
Coleman et al., DAWNBench: An End-to-End Deep Learning Benchmark and Competition, 2017 (time to
accuracy).
"""

from itertools import islice

import torch
import torch.distributed as dist

from labkit import comm
from labkit.measure.timeline import Timeline


def laps(trainer, batches, test, target, lap=1):
    """Yield a dict before training and after each lap, until loss <= target. Collective.

    trainer: its train_step, model and loss are used.
    batches: (input, target) of each step, as many on every rank; an incomplete lap is left out.
    test: (input, target) for evaluation. lap: steps between two evaluations.
    The dict: step, seconds (on the clock so far), loss (the worst rank's), messages and sent_bytes
    (of this rank, so far).
    """
    batches = iter(batches)
    step = 0
    seconds = 0.0
    log = []
    timeline = Timeline(device=next(trainer.model.parameters(), torch.empty(0)).device)
    while True:
        loss = worst_loss(trainer, *test)
        sent = sum(event.sent_bytes for event in log)
        yield {
            "step": step,
            "seconds": seconds,
            "loss": loss,
            "messages": len(log),
            "sent_bytes": sent,
        }
        lap_batches = list(islice(batches, lap))  # loading is off the clock
        if loss <= target or len(lap_batches) < lap:
            return
        comm.barrier()  # the caller's work on the last dict is off the clock on all ranks
        with comm.record(log), timeline.span("lap"):
            for batch in lap_batches:
                trainer.train_step(*batch)
        timeline.clock.resolve()
        seconds += timeline.spans[-1].end - timeline.spans[-1].start
        step += lap


@torch.no_grad()
def worst_loss(trainer, input, target):
    """Return the largest loss of all ranks. Collective."""
    trainer.model.eval()
    loss = trainer.loss(trainer.model(input), target)
    trainer.model.train()
    comm.all_reduce(loss, op=dist.ReduceOp.MAX)
    return loss.item()

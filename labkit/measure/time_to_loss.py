"""Time to a given loss: train some steps, stop the clock, evaluate, until the loss is low enough.

    clock      |== lap ==|           |== lap ==|           |== lap ==|
    off it                evaluate ?            evaluate ?            evaluate: reached

What a method costs is not the time of its step but that of its steps to a loss. Ranks evaluate in
the same moments and end together: the worst loss of them all decides, which is a message of its
own, off the clock and not counted.
Coleman et al., DAWNBench: An End-to-End Deep Learning Benchmark and Competition, 2017 (time to
accuracy).
"""

from itertools import islice

import torch
import torch.distributed as dist

from labkit import comm
from labkit.measure.timeline import Timeline


def laps(trainer, batches, test, target, lap=1):
    """Yield a dict after each lap, the first before any training, until loss <= target. Collective.

    trainer: its train_step, model and loss are used.
    batches: (input, target) of each step, as many on every rank; the race ends with them.
    test: (input, target), to evaluate on. lap: steps between two evaluations.
    The dict: step, seconds (on the clock so far), loss (the worst of the ranks'), messages and
    sent_bytes (of this rank, so far).
    """
    batches, step, seconds, log = iter(batches), 0, 0.0, []
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
        at_hand = list(islice(batches, lap))  # loading them is off the clock
        if loss <= target or len(at_hand) < lap:
            return
        comm.barrier()  # what the caller did with the last lap is off the clock on all ranks
        with comm.record(log), timeline.span("lap"):
            for batch in at_hand:
                trainer.train_step(*batch)
        timeline.clock.resolve()
        seconds += timeline.spans[-1].end - timeline.spans[-1].start
        step += lap


@torch.no_grad()
def worst_loss(trainer, input, target):
    """The largest of the ranks' losses. Collective."""
    trainer.model.eval()
    loss = trainer.loss(trainer.model(input), target)
    trainer.model.train()
    comm.all_reduce(loss, op=dist.ReduceOp.MAX)
    return loss.item()

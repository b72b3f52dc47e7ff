"""Time experiments in shuffled, interleaved rounds, so that noise slows all of them.

    round 0    | torch_ddp 3 steps | single 3 steps | ddp_naive 3 steps |
    round 1    | ddp_naive 3 steps | torch_ddp 3 steps | single 3 steps |   each |: a barrier

All experiments start from the same weights and use the same global batch in step i, so their losses
can be compared number by number. Each one first warms up; memory and traffic are counted in a step
that is not timed, because counting is slow. Each round begins with matrix products. MFU is relative
to the highest FLOP/s that the ranks reach in them over all rounds. `Participant.step_row` documents
the rows. With links, node_sent_bytes counts the bytes of a step on this node's link, with headers.
"""

import os
from math import nan

import torch
import torch.distributed as dist

from labkit.cluster.network_namespaces import FOLDER, counters
from labkit.measure.flops import mfu, peak_flops
from labkit.measure.stats import shuffled_rounds
from labkit.run.experiment import Experiment
from labkit.run.experiment_runner import Participant
from labkit.run.launch import launch
from labkit.trainer import LOW

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, **LOW}  # of the matrix products


def compare(experiments, nproc=2, rounds=10, steps_per_round=3, **options):
    """Train all experiments in interleaved rounds; return a Run with a row per step and rank.

    experiments: a list of Experiment, labelled by strategy, or a dict of label -> Experiment.
    options: those of launch (device, nodes, link_mbit ...). Raises ValueError for duplicate labels.
    """
    count = len(experiments)
    if not isinstance(experiments, dict):
        experiments = {experiment.strategy: experiment for experiment in experiments}
    if len(experiments) < count:
        raise ValueError(
            "two experiments have the same strategy: pass a dict of label -> Experiment"
        )
    for experiment in experiments.values():
        experiment.check_ranks(nproc * options.get("nodes", 1))
        check_constant(experiment)
    fields = {label: experiment.to_dict() for label, experiment in experiments.items()}
    turns = {"experiments": fields, "rounds": rounds, "steps_per_round": steps_per_round}
    return launch("labkit.run.compare:take_turns", nproc=nproc, **options, **turns)


def check_constant(experiment):
    """Raise ValueError for a curriculum, whose steps cannot be compared with each other."""
    if experiment.curriculum != "none":
        raise ValueError(
            f"Experiment(curriculum={experiment.curriculum!r}): compare and sweep need steps of "
            "equal length; use curriculum='none', or labkit.train"
        )


def train(context, **fields):
    """Train one experiment, with a row per step: launch("labkit.run.compare:train", steps=50)."""
    experiment = Experiment.from_dict(fields)
    experiment.check_ranks(context.world_size)
    peak = peak_for(context, experiment)
    participant = Participant(context, experiment)
    for done in range(experiment.steps):
        if participant.takes_part:
            row = participant.step()
            context.record(**row, mfu=mfu(participant.flops, row["step_ms"], peak))
        context.progress(done + 1, experiment.steps)
    dist.barrier()


def take_turns(context, experiments, rounds, steps_per_round):
    """Run the rounds of `compare` on one rank."""
    experiments = {label: Experiment.from_dict(fields) for label, fields in experiments.items()}
    participants = {
        label: Participant(context, experiment) for label, experiment in experiments.items()
    }
    counted = {}
    peaks = {}
    measured = []
    for label, participant in participants.items():
        counted[label] = participant.prepare()
        dist.barrier()
    for done, (turn, label) in enumerate(shuffled_rounds(participants, rounds)):
        participant = participants[label]
        if done % len(participants) == 0:
            peaks = higher_peaks(context, experiments.values(), peaks)
        dist.barrier()
        before = sent_by_node()
        rows = [participant.step() for _ in range(steps_per_round if participant.takes_part else 0)]
        dist.barrier()
        left = {
            name: (size - before[name]) // steps_per_round for name, size in sent_by_node().items()
        }
        about = {"label": label, "round": turn, **counted[label], **left}
        measured += [{**about, **row} for row in rows]
        context.progress(done + 1, rounds * len(participants))
    for row in measured:  # after all rounds, because the highest peak may come in the last one
        peak = peaks.get(kind(experiments[row["label"]]), nan)
        context.record(**row, mfu=mfu(row["flops"], row["step_ms"], peak))


def higher_peaks(context, experiments, before, repetitions=1):
    """Return {kind: FLOP/s that its ranks reach}, the higher of now and before. Collective."""
    peaks = {}
    first = context.rank == 0
    for dtype, alone in dict.fromkeys(kind(e) for e in experiments if e.compute == "real"):
        now = peak_flops(context.device, dtype, working=first or not alone, repetitions=repetitions)
        peaks[dtype, alone] = max(now, before.get((dtype, alone), 0.0))
    return peaks


def peak_for(context, experiment):
    """Return the FLOP/s that the ranks of one experiment reach; NaN if its compute is emulated."""
    return higher_peaks(context, [experiment], {}, repetitions=5).get(kind(experiment), nan)


def kind(experiment):
    """Return (dtype of the matrix products, whether one rank trains alone); a kind has one peak."""
    return DTYPES[experiment.precision], experiment.strategy == "single"


def sent_by_node():
    """Return {"node_sent_bytes": bytes that left this rank's node}; {} without a link."""
    return {"node_sent_bytes": counters()[0]} if FOLDER in os.environ else {}

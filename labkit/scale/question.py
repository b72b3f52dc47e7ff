"""A question to the planner: a model on a cluster, with a batch that its GPUs can divide.

    model_of    a name, a config.json, columns      ->  row of model_row.py
    Question    row, cluster, batch, length, stack  ->  solve: all layouts that fit, the best first
    with_batch  a batch that no layout divides      ->  the nearest that one does

A batch that is given must be divided by a layout of all GPUs. One that is only usual is rounded to
a multiple of the GPUs if it is near, or else if no layout divides it.
"""

import sys
from dataclasses import dataclass, field, replace
from functools import cached_property

from labkit.scale import constants
from labkit.scale.cluster import Cluster
from labkit.scale.cost import predict_step
from labkit.scale.huggingface import config_text, is_config, row_of_config
from labkit.scale.memory_model import predict_memory
from labkit.scale.model_row import check_columns, row_of, whole
from labkit.scale.plan import REACH, by_size, nowhere
from labkit.scale.search import Found, most, recommended, search, space_of

STEP_TOKENS = 2**22  # 4M tokens a step: Touvron et al., LLaMA, 2023, table 2
LENGTH = 8192
NEAR = 0.03  # of a usual batch: it is rounded by at most half of that


@dataclass(frozen=True)
class Question:
    """What is asked. row: of model_row.py. batch: sequences a step. given: fixed axes."""

    row: dict
    cluster: Cluster
    batch: int
    length: int
    precision: str
    stack: str
    spare: float = 0.1
    given: dict = field(default_factory=dict)

    @cached_property
    def space(self):
        """The Space of search.py."""
        return space_of(
            self.row | {"seq_len": self.length},
            self.cluster,
            global_batch=self.batch,
            precision=self.precision,
            stack=self.stack,
            spare=self.spare,
            uneven=True,
            **self.given,
        )

    @property
    def network(self):
        """Gbit/s of each GPU."""
        return self.cluster.device.network_gbps / self.cluster.gpus_per_node

    def with_network(self, gbps):
        """Return the question with another network, in Gbit/s of each GPU."""
        network = gbps * self.cluster.gpus_per_node
        return replace(self, cluster=replace(self.cluster, network_gbps=network, confirmed=True))


class NothingFits(ValueError):
    """Raised if no layout fits. least: GiB of the smallest."""

    def __init__(self, message, least):
        super().__init__(message)
        self.least = least


@dataclass(frozen=True)
class Solved:
    """A Question with the Found that fit, and the (Peak, Job) that do not.

    fit: the recommended one (search.recommended), then the others, fastest first.
    """

    question: Question
    fit: list
    refused: list

    @property
    def best(self):
        return self.fit[0]

    def distinct(self, count):
        """Return the first `count` Found that differ in an axis or in ZeRO's stage."""
        found = {}
        for one in self.fit:
            job = one.job
            axes = (job.dp, job.tp, job.pp, job.cp, job.ep, job.replicas, job.zero)
            found.setdefault(axes, one)
            if len(found) == count:
                break
        return list(found.values())

    @cached_property
    def too_large(self):
        """The smallest of the faster jobs that do not fit, as a Found, or None."""
        c = constants.values()
        for peak, job in by_size(self.refused):
            step = predict_step(job, c)
            if step.seconds < self.best.seconds:
                return Found(job, step, peak)
        return None


def solve(question, like=()):
    """Return the Solved of a Question. Raises ValueError if nothing fits.

    like: jobs of a similar question. If one of them also fits here, only faster ones are searched.
    """
    space, n, c = question.space, question.cluster.gpus, constants.values()
    known = [found for job in like if (found := moved(question, job, c))]
    within = min((found.seconds for found in known), default=float("inf"))
    fit, refused = search(space, n, c, within)
    fit += known
    if not fit and not refused:
        most(space, 0)  # raises ValueError: no layout
    if not fit:
        missing = min(peak.total for peak, _ in refused)
        raise NothingFits(nowhere(space, n, refused, c, REACH * n), missing)
    best = recommended(fit)
    fit = sorted(fit, key=lambda found: (found is not best, found.seconds))
    return Solved(question, fit, refused)


def moved(question, job, c):
    """Return the Found of a job of another question in this one, or None if it does not fit."""
    part = job.dp * job.replicas * job.micro_batch
    asked = question.space.job
    job = replace(
        job,
        network_gbps=asked.network_gbps,
        oversubscription=asked.oversubscription,
        context=question.length,
        documents=asked.documents,
        grad_accum=question.batch // part,
    )
    interleaved = job.vpp > 1 and job.grad_accum % job.pp
    if question.batch % part or interleaved or question.length % job.cp:
        return None
    peak = predict_memory(job, c)
    return Found(job, predict_step(job, c), peak) if question.space.fits(peak) else None


def with_batch(question, given):
    """Return the question with a batch that a layout of all GPUs divides.

    given: whether the user has given the batch. Then it is not changed, and ValueError is raised,
    with the nearest batches, if no layout divides it.
    """
    n, batch = question.cluster.gpus, question.batch
    parts = batch_parts(question)
    if any(batch % part == 0 for part in parts) and (given or batch % n == 0 or n > NEAR * batch):
        return question
    if not parts:
        most(question.space, n)  # raises ValueError: no layout
    if given:
        near = " or ".join(map(str, nearest_batches(batch, parts)))
        fewer = next((m for m in range(n - 1, 0, -1) if divides(question, m)), None)
        raise ValueError(
            f"batch={batch}: no layout of {n} GPUs with {question.stack} divides it; use a batch "
            f"of {near}" + (f", or {fewer} GPUs" if fewer else "")
        )
    near = nearest_batches(batch, {n} if n <= batch else parts)
    return replace(question, batch=min(near, key=lambda other: abs(other - batch)))


def batch_parts(question, n=None):
    """Return the numbers into which the layouts of n GPUs divide a batch."""
    n = n or question.cluster.gpus
    micro = question.given.get("micro_batch", 1)
    space = replace(question.space, global_batch=n)  # all of them divide it
    return {layout.dp * layout.replicas * micro for layout in space.layouts(n)}


def divides(question, n):
    return any(question.batch % part == 0 for part in batch_parts(question, n))


def nearest_batches(batch, parts):
    """Return the nearest smaller and larger batches that one of the parts divides."""
    below = max(batch // part * part for part in parts)
    above = min(-(-batch // part) * part for part in parts)
    return sorted({below, above} - {0})


def usual_batch(gpus, length):
    """Return the sequences of 4M tokens, a multiple of the GPUs if there are as many."""
    usual = max(1, round(STEP_TOKENS / length))
    return usual if usual < gpus else max(1, round(usual / gpus)) * gpus


def usual_precision(gpu):
    return next(name for name in ("bf16", "fp16", "fp32") if gpu.has(name))


def model_of(said, stdin=None):
    """Return (name, row) of a model: a name, a config.json, columns as text, or a mapping."""
    if not isinstance(said, str):
        row = dict(said)
        check_columns(row)
        return row.get("model", "the model"), row
    if is_config(said):
        text, name = config_text(said, stdin or sys.stdin)
        return name, row_of_config(text, name)
    row = dict(row_of(said))
    return (row.get("model") or "the model"), row


def sizes_of(row):
    """Return the published (batch, length) of a row; None if it has none."""
    return whole(row, "global_batch"), whole(row, "seq_len")

"""Answer the planner's question: which technique, for which model, on how many GPUs, which network?

    from labkit.scale.answer import answer
    found = answer("llama3-8b", 64, "h100", network=400)
    found.sentences()         found.rows()          found.to_json()

    model, GPUs, network  ->  search.py for each stack  ->  three layouts that fit, the best first
                          ->  again, with one thing changed: network, batch, length, stack
                          ->  launch_options.py: the options that run the layout

`./scripts/lab plan` and the dashboard ask this function. All figures are predicted.
"""

import json
from dataclasses import dataclass, replace
from functools import cached_property

from labkit.scale import constants
from labkit.scale.answer_text import sentences
from labkit.scale.bert_shapes import Encoder
from labkit.scale.cluster import Cluster
from labkit.scale.cost import predict_step
from labkit.scale.failures import Fleet, daly, expected, published
from labkit.scale.intervals import interval
from labkit.scale.launch_options import launch_options
from labkit.scale.messages import all_trained, uplinks
from labkit.scale.model_row import whole
from labkit.scale.plan import bill
from labkit.scale.quantities import amount, days_until
from labkit.scale.quantities import price as price_of
from labkit.scale.question import (
    LENGTH,
    Question,
    Solved,
    model_of,
    nearest_batches,
    sizes_of,
    solve,
    usual_batch,
    usual_precision,
    with_batch,
)
from labkit.scale.search import Found
from labkit.scale.stacks import find_stack
from labkit.scale.validate_args import check_precision
from labkit.scale.vit_shapes import ViT

STACKS_TRIED = ("megatron", "torchtitan", "torch-fsdp")
SHOWN = 3
LIKE = 10  # of the fastest layouts, tried first when one thing changes
SAVE, RESTART = 30.0, 600.0  # seconds: a save blocks the run, a restart after a failure; assumed
FLEET = "Llama 3 405B"  # the row of published/interruptions.csv that has the failure rate


@dataclass(frozen=True)
class Change:
    """The best layout if one thing were different. found: None if nothing fits, with the why."""

    what: str
    found: Found | None
    why: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer. solved: of the fastest stack. changes: a list of Change.

    others: {stack: Found}, the fastest of each other stack. tokens: of the whole run. price: of a
    GPU-hour. deadline: in days. enough: the fewest GPUs that meet it, or None.
    """

    name: str
    solved: Solved
    changes: list
    others: dict
    notes: list
    tokens: float
    price: float | None = None
    deadline: float | None = None
    enough: int | None = None

    @property
    def question(self):
        return self.solved.question

    @property
    def best(self):
        """The recommended layout, a Found: of those nearly as fast, that with fewest stages."""
        return self.solved.best

    @cached_property
    def ranked(self):
        """Up to three Found with different axes, the best first."""
        return self.solved.distinct(SHOWN)

    @property
    def too_large(self):
        """The smallest of the faster layouts that do not fit, a Found, or None."""
        return self.solved.too_large

    @cached_property
    def packing(self):
        """What packing saves in the fastest layout, {name: number}, or None without documents.

        padded_tokens_per_second_per_gpu: of documents, without padding, if each had a sequence.
        """
        job = self.best.job
        if not job.documents:
            return None
        alone = predict_step(replace(job, documents=None), constants.values())
        wasted = job.documents.wasted(job.context)
        return {
            "document_tokens": job.documents.mean,
            "attention_reach": job.documents.reach,
            "padding": wasted,
            "padded_tokens_per_second_per_gpu": (1 - wasted) * alone.tokens_per_second,
        }

    def figures(self, found):
        """Return the figures of a Found, all predicted: {name: number or text}."""
        job, cost = found.job, bill(found, self.tokens, self.price)
        speed, share = found.step.tokens_per_second, useful_share(found.job.n_gpus)
        low, high, _, _ = interval(job)
        tflops = speed * model_flops(job) / 1e12
        axes = ("dp", "tp", "pp", "cp", "ep", "vpp", "replicas", "zero", "micro_batch")
        return {
            "stack": job.stack.name,
            "gpus": job.n_gpus,
            **{name: getattr(job, name) for name in axes},
            "micro_batches": job.grad_accum,
            "recompute": job.recompute,
            "precision": job.precision,
            "tokens_per_second_per_gpu": speed,
            "low": low,
            "high": high,
            "tokens_per_day": 86400 * share * speed * job.n_gpus,
            "tflops_per_gpu": tflops,
            "mfu": tflops / job.gpu.tflops.get(job.dtype, job.gpu.tflops["bf16"]),
            "memory_gib": found.peak.total,
            "gpu_memory_gib": job.gpu.memory_gib,
            "step_seconds": found.seconds,
            "useful_share": share,
            "days": cost["days"] / share,
            "gpu_hours": cost["gpu_hours"] / share,
            "mwh": cost["kwh"] / share / 1000,
            "cost": cost["money"] and cost["money"] / share,
        }

    def rows(self):
        """Return the figures of the ranked layouts, a list of dicts with their rank."""
        return [{"rank": i} | self.figures(found) for i, found in enumerate(self.ranked, 1)]

    def options(self):
        """Return the lines that run the fastest layout on its stack."""
        return launch_options(self.best.job)

    def sentences(self):
        """Return the answer as a list of sentences."""
        return sentences(self)

    def to_json(self):
        """Return the answer as JSON text."""
        job, question = self.best.job, self.question
        changes = [
            {"what": one.what, "why": one.why} | (self.figures(one.found) if one.found else {})
            for one in self.changes
        ]
        told = {
            "kind": "predicted",
            "model": self.name,
            "parameters": job.shape.parameters,
            "trained_parameters": round(all_trained(job)[0]),
            "gpu": job.gpu.name,
            "gpus": question.cluster.gpus,
            "network_gbps_per_gpu": question.network,
            "batch": question.batch,
            "length": job.context,
            "packing": self.packing,
            "tokens": self.tokens,
            "layouts": self.rows(),
            "too_large": self.too_large and self.figures(self.too_large),
            "changes": changes,
            "other_stacks": {name: self.figures(one) for name, one in self.others.items()},
            "deadline_days": self.deadline,
            "gpus_for_deadline": self.enough,
            "options": self.options(),
            "sentences": self.sentences(),
        }
        return json.dumps(told, indent=1)


def answer(model, gpus=None, gpu=None, network=None, *, cluster=None, tokens=1e12, batch=None,
           length=None, precision=None, stack=None, price=None, deadline=None, spare=0.1,
           gpus_per_node=None, lora=None, train=None, documents=None, changes=True,
           stdin=None, **given):  # fmt: skip
    """Return the Answer for a model on GPUs of one kind.

    model: a name of models.csv, a config.json (a path, its text, or "-" for stdin), the columns of
    model_row.py as "layers=32,hidden=4096,...", or a mapping of them. network: Gbit/s of each GPU.
    cluster: a Cluster, instead of gpus, gpu and network. tokens: of the whole run. batch: sequences
    a step, by default the published ones or 4M tokens. length: tokens of a sequence. precision: by
    default bf16, or fp16 if the GPU lacks it. stack: of stacks.py; by default the fastest of
    STACKS_TRIED. price: of a GPU-hour. deadline: days, or a date. spare: the share of memory that
    stays free. lora: the rank of adapters on all matrices; the model itself is frozen. train:
    "all", "decoder" (all but an image encoder), "head" (only the output layer) or "last:4" (also 4
    layers); the rest is frozen.
    documents: tokens of the documents that are packed into a sequence, a number or a file of their
    lengths (documents.py); by default a sequence is one document.
    changes: whether to plan again with other figures. given: fixed axes and settings, as in
    plan.py. Raises ValueError, one line, for invalid input, if nothing fits, and if no layout of
    all GPUs divides the batch that is given.
    """
    name, row = model_of(model, stdin)
    part = {"lora": lora, "train": train, "documents": documents}
    row |= {column: value for column, value in part.items() if value is not None}
    cluster = cluster or Cluster.from_dict(
        {"gpu": gpu, "gpus": gpus, "gpus_per_node": gpus_per_node, "network": network}
    )
    precision = check_precision(precision or usual_precision(cluster.device), cluster.device)
    tokens, days = amount(tokens), None if deadline is None else days_until(deadline)
    sizes = {"batch": batch, "length": length}
    batch, length = whole(sizes, "batch"), whole(sizes, "length")
    usual, published_length = sizes_of(row)
    length = length or published_length or LENGTH
    said = batch or usual or usual_batch(cluster.gpus, length)
    tried = [find_stack(stack).name] if stack else STACKS_TRIED
    asked = Question(row, cluster, said, length, precision, tried[0], spare, given)
    solved = best_of_stacks(asked, tried, given=batch is not None)
    first, *others = sorted(solved, key=lambda one: -one.best.step.tokens_per_second)
    question = first.question
    notes = []
    if batch is None and usual and question.batch != usual:
        notes.append(f"The published batch of {usual:,} is rounded so that all GPUs share it.")
    return Answer(
        name=name,
        solved=first,
        changes=changes_of(first) if changes else [],
        others={one.question.stack: one.best for one in others},
        notes=notes,
        tokens=tokens,
        price=None if price is None else price_of(price),
        deadline=days,
        enough=None if days is None else fewest(question, tokens, days),
    )


def best_of_stacks(asked, stacks, given):
    """Return the Solved of each stack that runs the model. Raises the first error if none does."""
    found, errors = [], []
    for stack in stacks:
        try:
            found.append(solve(with_batch(replace(asked, stack=stack), given)))
        except ValueError as error:
            errors.append(error)
    if not found:
        raise min(errors, key=lambda error: getattr(error, "least", 0.0))
    return found


def changes_of(solved):
    """Return the Changes: another network, batch and length, one at a time."""
    question, best = solved.question, solved.best
    n, batch, length = question.cluster.gpus, question.batch, question.length
    asked = {}
    if n > best.job.gpus_per_node:
        for factor in (0.5, 2):
            gbps = factor * question.network
            asked[f"a network of {gbps:g} Gbit/s a GPU"] = question.with_network(gbps)
    if uplinks(best.job, n) > 1:
        full = replace(question.cluster, oversubscription=1.0)
        asked["a network without oversubscription"] = replace(question, cluster=full)
    batches = {2 * batch, *([batch // 2] if batch % 2 == 0 else [])}
    batches |= set(nearest_batches(batch, {n})) if batch % n and n < batch else set()
    for other in sorted(batches - {batch}):
        asked[f"a batch of {other:,}"] = replace(question, batch=other)
    if not isinstance(best.job.shape, ViT):
        for other in (length // 2, 2 * length):
            sequences = max(1, batch * length // other)
            longer = replace(question, length=other, batch=sequences)
            asked[f"{other:,} tokens a sequence, {sequences:,} a step"] = longer
    like = [found.job for found in solved.distinct(LIKE)]
    return [changed(what, other, like) for what, other in asked.items()]


def changed(what, question, like):
    try:
        return Change(what, solve(question, like).best)
    except ValueError as error:
        return Change(what, None, str(error))


def fewest(question, tokens, days):
    """Return the fewest GPUs that finish in time: one node, doubled until it is, or None."""
    n = question.cluster.gpus_per_node
    while n <= 2**17:
        tried = replace(question, cluster=replace(question.cluster, gpus=n))
        try:
            found = solve(with_batch(tried, given=False)).best
            if bill(found, tokens)["days"] / useful_share(n) <= days:
                return n
        except ValueError:
            pass  # too few GPUs
        n *= 2
    return None


def useful_share(gpus):
    """Return the share of a run that is useful work, with the published failure rate of FLEET."""
    rate = next(row["per_gpu_hour"] for row in published() if row["job"] == FLEET)
    fleet = Fleet(gpus, rate, save=SAVE, restart=RESTART)
    return expected(fleet, daly(fleet.save, fleet.between))


def model_flops(job):
    """Return the FLOPs of a token, forward and backward, without recomputation.

    Attention is counted without the mask's saving: Chowdhery et al., PaLM, 2022, appendix B; of
    packed documents only inside each. With LoRA, weights have no gradient, and adapters are left
    out. Frozen layers before all that are trained have no backward.
    """
    shape, context = job.shape, job.reach
    scores = shape.layers * shape.attention_flops(context)
    forward = shape.forward_flops(context) + (0 if isinstance(shape, Encoder) else scores)
    images = image_flops(job)
    if job.last is not None:
        head = 2 * shape.head_weights
        back = 2 * (forward - head) * job.last / shape.layers
        return forward + back + (job.head_passes - 1) * head + images
    spared = shape.forward_flops(context) - scores if job.lora else 0
    return 3 * forward - spared + images


def image_flops(job):
    """Return the FLOPs of a job's images, forward and backward, divided over all its tokens."""
    encoder = job.shape.vision
    if not encoder:
        return 0.0
    each = (1 if job.part else 3) * encoder.image_flops() + 6 * encoder.tokens * encoder.projector
    return job.shape.images * each / job.context

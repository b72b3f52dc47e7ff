"""Write the planner's answer in sentences.

1. FSDP over 64 GPUs, micro-batch 2, selective recomputation: 7,070 tokens/s a GPU, 6,300 to
   7,900; 45 % MFU; 61 of 79 GiB; 4.1 days for 1T tokens with failures and saves.
"""

from labkit.scale.explain import KINDS
from labkit.scale.intervals import interval
from labkit.scale.job_config import SCHEDULES
from labkit.scale.messages import all_trained, uplinks
from labkit.scale.vit_shapes import ViT

RECOMPUTE = {
    "none": "no recomputation",
    "selective": "selective recomputation",
    "half": "every second layer recomputed",
    "full": "full recomputation",
}
SHARDED = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "FSDP"}


def layout(job):
    """Return a job's layout as a phrase."""
    parts = []
    if job.tp > 1:
        parts.append(f"tensor parallelism over {job.tp}")
    if job.pp > 1:
        parts.append(pipeline(job))
    if job.cp > 1:
        parts.append(f"context parallelism over {job.cp}")
    if job.ep > 1:
        parts.append(f"experts over {job.ep}")
    parts.append(data(job))
    batch = f"micro-batch {job.micro_batch}"
    batch += f" ({job.grad_accum} a step)" if job.grad_accum > 1 else ""
    offload = ", optimizer states in host memory" if job.offload else ""
    return (
        f"{', '.join(part for part in parts if part)}, {batch}, {RECOMPUTE[job.recompute]}{offload}"
    )


def pipeline(job):
    kind = "" if job.schedule == "1f1b" else f", {SCHEDULES[job.schedule]}"
    chunks = f", {job.vpp} stages a GPU" if job.vpp > 1 else ""
    layers = [has[0] for has in job.stages]
    uneven = "" if min(layers) == max(layers) else f" of {max(layers)} or {min(layers)} layers"
    return f"pipeline over {job.pp}{uneven}{chunks}{kind}"


def data(job):
    """Return the phrase of data parallelism."""
    if job.replicas > 1:
        return f"HSDP: {job.replicas} replicas of FSDP over {job.dp * job.cp} GPUs"
    if job.dp == 1:
        return "one GPU" if job.n_gpus == 1 else SHARDED[job.zero] if job.zero else ""
    return f"{SHARDED[job.zero]} over {job.dp * job.cp if job.zero == 3 else job.dp} GPUs"


def sentences(answer):
    """Return the sentences of an Answer."""
    lines = [heading(answer)]
    lines += [ranked(answer, rank) for rank in range(len(answer.ranked))]
    lines += [packed(answer)] if answer.packing else []
    lines += [large(answer)] if answer.too_large else []
    lines += [change(answer, one) for one in answer.changes]
    lines += [stack(answer, name, one) for name, one in answer.others.items()]
    lines += [due(answer)] if answer.deadline else []
    return [*lines, known(answer), *answer.notes]


def heading(answer):
    job, question = answer.best.job, answer.question
    active = job.shape.active_parameters
    size = f"{billions(job.shape.parameters)} parameters"
    size += f" ({billions(active)} of them met by a token)" if job.shape.experts > 1 else ""
    if job.shape.vision:
        size += f" ({billions(job.shape.vision.parameters)} of them in the image encoder)"
    if job.part == "decoder":
        size += f", of which {billions(all_trained(job)[0])}, all but the encoder, are trained"
    elif job.part:
        size += f", frozen, with {billions(all_trained(job)[0])} {part(job)}"
    gpus = question.cluster.gpus
    nodes = f"{job.gpus_per_node} a node, {question.network:g} Gbit/s a GPU"
    leaves = uplinks(job, gpus)
    where = f"{gpus:,} x {job.gpu.name}" + (f", {nodes}" if gpus > job.gpus_per_node else "")
    where += f", {job.leaf} nodes a leaf switch, oversubscribed {leaves:g}:1" if leaves > 1 else ""
    samples = "images" if isinstance(job.shape, ViT) else "sequences"
    return (
        f"{answer.name}, {size}, on {where}: {question.batch:,} {samples} of {job.context:,} "
        f"tokens a step{images(job.shape)}, {job.precision}, {job.stack.name}. "
        "All figures are predicted."
    )


def images(shape):
    """Return the phrase of a sequence's images."""
    if not shape.vision:
        return ""
    count = "an image" if shape.images == 1 else f"{shape.images} images"
    return f", each with {count} of {shape.vision.tokens} tokens"


def part(job):
    """Return the phrase of the part of a model that is trained."""
    if job.lora:
        return f"in LoRA adapters of rank {job.lora}"
    layers = "the last layer" if job.last == 1 else f"the last {job.last} layers"
    parts = [layers] * (job.last > 0) + ["the output layer"] * (job.shape.own_head > 0)
    return f"trained in {' and '.join(parts)}"


def ranked(answer, rank):
    found = answer.ranked[rank]
    told = answer.figures(found)
    said = f"{rank + 1}. {capital(layout(found.job))}: {speed(told)}; {memory(told)}; "
    said += time(answer, told)
    if rank == 0:
        return f"{said}."
    return f"{said}; {loses(answer, found)}."


def speed(told):
    return (
        f"{told['tokens_per_second_per_gpu']:,.0f} tokens/s a GPU, {told['low']:,.0f} to "
        f"{told['high']:,.0f}; {told['tflops_per_gpu']:,.0f} TFLOP/s, {told['mfu']:.0%} MFU"
    )


def memory(told):
    return f"{told['memory_gib']:.0f} of {told['gpu_memory_gib']:.0f} GiB"


def time(answer, told):
    """Return the days, GPU-hours and money of the run."""
    days = f"{told['days']:,.0f}" if told["days"] >= 100 else f"{told['days']:.3g}"
    said = f"{days} days for {short(answer.tokens)} tokens with failures and saves"
    said += f", {told['gpu_hours']:,.0f} GPU-hours"
    return said + (f", {told['cost']:,.0f} in money" if told["cost"] else "")


def loses(answer, found):
    """Return by how much a layout is slower than the first, and the part of a step that is."""
    mine, theirs = answer.best.step.parts, found.step.parts
    part = max(mine, key=lambda name: theirs[name] - mine[name])
    slower = found.seconds / answer.best.seconds - 1
    if slower < 0:
        return f"takes {-slower:.1%} less time, within the error, but has more pipeline stages"
    return f"loses {slower:.1%} of a step, most to {part} ({theirs[part] - mine[part]:+.2g} s)"


def packed(answer):
    """Return the sentence about packed documents, and what padding would cost instead."""
    told, base = answer.packing, answer.best.step.tokens_per_second
    job, padded = answer.best.job, told["padded_tokens_per_second_per_gpu"]
    share = job.shape.attention_flops(job.reach) / job.shape.attention_flops(job.context)
    return (
        f"Packed: {job.context / told['document_tokens']:.3g} documents of "
        f"{told['document_tokens']:,.0f} tokens a sequence; attention inside each takes "
        f"{share:.2g} of its FLOPs. One document a sequence, padded, would waste "
        f"{told['padding']:.0%} of the tokens: {padded:,.0f} useful tokens/s a GPU "
        f"({padded / base - 1:+.0%})."
    )


def large(answer):
    found, best = answer.too_large, answer.best
    needed = round(found.peak.total, 1)
    usable = round((1 - answer.question.spare) * found.peak.memory, 1)
    kind = max(KINDS, key=lambda name: getattr(found.peak, name))
    return (
        f"Too large: {layout(found.job)} would take {1 - found.seconds / best.seconds:.1%} less "
        f"time, but needs {needed:.1f} GiB, {needed - usable:.1f} more than the {usable:.1f} to "
        f"be used; {getattr(found.peak, kind):.1f} are {kind}."
    )


def change(answer, one):
    if one.found is None:
        return f"With {one.what}: {one.why}."
    told, base = answer.figures(one.found), answer.best.step.tokens_per_second
    now = told["tokens_per_second_per_gpu"]
    same = layout(one.found.job) == layout(answer.best.job)
    where = "with the same layout" if same else f"with {layout(one.found.job)}"
    return f"With {one.what}: {now:,.0f} tokens/s a GPU ({now / base - 1:+.1%}), {where}."


def stack(answer, name, found):
    told, base = answer.figures(found), answer.best.step.tokens_per_second
    now = told["tokens_per_second_per_gpu"]
    return f"On {name}: {now:,.0f} tokens/s a GPU ({now / base - 1:+.1%}), {layout(found.job)}."


def due(answer):
    days = answer.figures(answer.best)["days"]
    on_time = "is in time" if days <= answer.deadline else "is too late"
    enough = (
        f"{answer.enough:,} GPUs are enough" if answer.enough else "no number of GPUs is enough"
    )
    return f"The deadline is in {answer.deadline:g} days: this plan {on_time}; {enough}."


def known(answer):
    """Return the sentence about the interval, and what to mind."""
    _, _, rows, warning = interval(answer.best.job)
    said = f"The range of tokens/s is made from {rows}. "
    said += "Such ranges contain about 80 % of the published rows that they were not made from."
    return f"{said} Mind: {warning}." if warning else said


def capital(text):
    return text[:1].upper() + text[1:]


def billions(count):
    return f"{count / 1e9:.4g} billion" if count >= 1e9 else f"{count / 1e6:.4g} million"


def short(count):
    """Return 1e12 as "1T"."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return f"{count:g}"

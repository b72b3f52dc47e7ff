"""The interval of a predicted speed, from published rows that are not in the fit.

    class of a job      stack, generation of the GPU, size of the job, length of the sequence
    ratios              published / predicted of the class's rows that were kept out of the fit
    interval            predicted x the ratios that hold 8 of 10 of them

A class with fewer than 8 rows takes those of a wider class: of any size, then of any length, then
of any stack with the same kernels, of Hopper for Blackwell, then all. The interval says which.
It leaves out floor(0.1 (n + 1)) - 1 of n ratios at each end: order statistics, so that a further
row of the class lies in it with a probability of at least 0.8 (from 9 rows on).
Vovk et al., Algorithmic Learning in a Random World, 2005 (conformal prediction).
"""

from functools import cache

from labkit.scale import constants
from labkit.scale.memory_model import predict_memory
from labkit.scale.published_rows import kept_out, published, speed, with_figure

LEAST_ROWS = 8
LONG = 16384  # tokens
SIZES = (32, 128, 512)  # GPUs: the largest of a class
CRAWL = 0.9  # of memory
CRAWLED = "above 0.9 of memory, 14 of 17 published jobs ran at less than 2/3 of the speed predicted"


def class_of(job):
    """Return (stack, generation and kernels, size, length) of a job."""
    size = next((f"up to {most} GPUs" for most in SIZES if job.n_gpus <= most), "more GPUs")
    generation = job.gpu.generation + (", fused kernels" if job.fused else "")
    length = "16k tokens or more" if job.context >= LONG else "less than 16k tokens"
    return job.stack.name, generation, size, length


def wider(name):
    """Yield the classes of a job from the narrowest to all rows: tuples with None for any."""
    stack, generation, _, length = name
    yield name
    yield stack, generation, None, length
    yield stack, generation, None, None
    yield None, generation, None, None
    yield None, generation.replace("blackwell", "hopper"), None, None
    yield None, None, None, None


@cache
def kept_ratios():
    """Return [(row, class, published / predicted)] of the rows kept out of the fit."""
    c = constants.values()
    rows = [row for row in with_figure(published(), "tok_s_gpu") if kept_out(row, "tok_s_gpu")]
    return [
        (row, class_of(row["job"]), float(row["tok_s_gpu"]) / speed(row["job"], c)) for row in rows
    ]


def ratios_of(name, without):
    """Return (the narrowest class with enough rows, its sorted ratios)."""
    for broad in wider(name):
        ratios = sorted(
            ratio
            for row, its, ratio in kept_ratios()
            if row is not without and all(b in (None, i) for b, i in zip(broad, its, strict=True))
        )
        if len(ratios) >= LEAST_ROWS:
            return broad, ratios
    raise AssertionError("fewer than 8 published rows in all")


def interval(job, c=None, without=None):
    """Return (low, high, rows, warning): tokens/s and GPU that hold 8 of 10 of the class's rows.

    rows: a sentence part that says which and how many rows it is from. warning: "" or what to
    mind: no row of the job's class, nearly full memory. without: a row to leave out, for scores.
    """
    c = c or constants.values()
    name = class_of(job)
    broad, ratios = ratios_of(name, without)
    cut = max(0, int(0.1 * (len(ratios) + 1)) - 1)
    predicted = speed(job, c)
    known = ", ".join(part for part in broad if part) or "all stacks and GPUs"
    rows = f"{len(ratios)} published rows kept out of the fit: {known}"
    warnings = []
    if broad != name:
        few = f"fewer than {LEAST_ROWS} published rows are like this job ({', '.join(name)})"
        warnings.append(f"{few}, so rows of a wider class are used")
    if job.shape.experts > 1:
        warnings.append("no published row has experts")
    if job.part:
        warnings.append("no published row trains a part of the model")
    if job.shape.vision:
        warnings.append("no published row has an image encoder")
    if job.documents:
        warnings.append("no published row says how long its packed documents are")
    if predict_memory(job, c).total > CRAWL * job.gpu.memory_gib:
        warnings.append(CRAWLED)
    return predicted * ratios[cut], predicted * ratios[-1 - cut], rows, "; ".join(warnings)

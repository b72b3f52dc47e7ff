"""Predict published training jobs and compare the predictions with the reported speeds.

    cases.csv   model, GPUs, layout      ->  cost.py, memory_model.py  ->  predicted tokens/s a GPU
                reported figure          ->  one unit                  ->  published tokens/s a GPU

    tokens/s = FLOP/s of a GPU / FLOPs of a token         tokens/s = tokens / (GPU-hours x 3600)

    FLOPs of a token   3 times the forward of all layers; 4 times if recomputation is counted
                       attention: not counted, only the unmasked half, or all of it

If a paper does not say how it counts attention, its speed lies between two figures. If a paper does
not publish the layout, the planner chooses it. Narayanan et al., Efficient Large-Scale Language
Model Training on GPU Clusters, SC 2021, equation 3 (hardware FLOPs); Chowdhery et al., PaLM, 2022,
appendix B (model FLOPs and MFU).
"""

import csv
from dataclasses import dataclass
from pathlib import Path

from labkit.scale import constants
from labkit.scale.cluster import Cluster
from labkit.scale.cost import predict_step
from labkit.scale.job_config import Job, job_of
from labkit.scale.memory_model import predict_memory
from labkit.scale.plan import plan, row_of

CASES = Path(__file__).with_name("published") / "cases.csv"
RUNS = Path(__file__).with_name("published") / "runs.csv"
MASKED = {"none": 0, "causal": 2, "full": 4}  # FLOPs of a forward / (context x width of attention)


@dataclass(frozen=True)
class Case:
    """A row of cases.csv: its job, the reported figure and its unit, and the assumptions made.

    counted: "hardware" FLOPs, recomputation included, or "model" FLOPs. attention: a key of
    MASKED, or "" if the source does not say.
    """

    name: str
    job: Job
    reported: float
    unit: str
    counted: str
    attention: str
    assumed: str
    source: str

    @property
    def published(self):
        """(least, most) tokens per second and GPU that correspond to the reported figure."""
        if self.unit == "tokens/s":
            return self.reported, self.reported
        if self.unit.startswith("GPU-hours"):
            return (1e12 / self.reported / 3600,) * 2
        ways = [self.attention] if self.attention else ["full", "none"]
        again = self.counted == "hardware" and self.job.recompute == "full"
        each = [token_flops(self.job.shape, self.job.context, way, again) for way in ways]
        return 1e12 * self.reported / each[0], 1e12 * self.reported / each[-1]

    def predicted(self, c):
        """Return the (Step, Peak) of the job. c: constants, name to value."""
        return predict_step(self.job, c), predict_memory(self.job, c)


def token_flops(shape, context, attention="none", recomputed=False):
    """Return the FLOPs of a token, forward and backward: 6 per weight, plus attention.

    attention: a key of MASKED. recomputed: whether a second forward of all layers is counted.
    """
    width = (shape.query_width + shape.value_width) / 2
    forward = 2 * shape.layer_products + MASKED[attention] * context * width
    return (3 + recomputed) * shape.layers * forward + 6 * shape.embedding_parameters


def achieved(shape, tokens, gpu_hours):
    """Return the model FLOP/s of a GPU over a whole run, without attention."""
    return token_flops(shape, 0) * tokens / gpu_hours / 3600


def table(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read(path=CASES):
    """Return {name: Case}. Rows without a layout get the planner's fastest, which takes seconds."""
    return {row["case"]: case_of(row) for row in table(path)}


def case_of(row):
    filled = {column: value for column, value in row.items() if value}
    job = job_of(dict(row_of(row["model"])) | filled) if row["tp"] else planned(row).fastest.job
    words = {name: row[name] for name in ("unit", "counted", "attention", "assumed", "source")}
    return Case(row["case"], job, float(row["reported"]), **words)


def planned(row, **given):
    """Return the Plan of a row's model on its GPUs, with cp=1 and all other axes free."""
    cluster = Cluster(row["gpu"], int(row["n_gpus"]))
    batch = {"global_batch": int(row["global_batch"]), "seq_len": int(row["seq_len"])}
    return plan(row["model"], cluster, **batch, precision=row["precision"], cp=1, **given)


def ratios(cases, c=None):
    """Return {name: (least, most) of predicted / published}."""
    c = c or constants.values()
    found = {}
    for name, case in cases.items():
        speed = case.predicted(c)[0].tokens_per_second
        least, most = case.published
        found[name] = speed / most, speed / least
    return found


def runs():
    """Return {name: (Shape, GPU name, GPUs or None, tokens, GPU-hours, source)} of whole runs."""
    found = {}
    for row in table(RUNS):
        shape = job_of(dict(row_of(row["model"])) | {"gpu": row["gpu"]}).shape
        gpus = int(row["gpus"]) if row["gpus"] else None
        numbers = float(row["tokens"]), float(row["gpu_hours"])
        found[row["run"]] = (shape, row["gpu"], gpus, *numbers, row["source"])
    return found

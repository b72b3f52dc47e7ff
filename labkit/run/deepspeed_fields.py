"""DeepSpeed's JSON: from its values to fields of an Experiment, and back.

    stages and offload        labkit.run.deepspeed_zero
    a step's batch            train_batch_size = micro-batch per GPU x accumulation x ranks
    torch_autocast            precision: fp32 weights, products in 16 bits
    bf16, fp16                near: weights in 16 bits and fp32 copies of them in the optimizer
    curriculum_learning       labkit.run.deepspeed_curriculum

Adam is AdamW unless adam_w_mode is false. Rajbhandari et al., ZeRO, SC 2020, has the stages.
"""

import json

from labkit.run.deepspeed_curriculum import curriculum_of
from labkit.run.deepspeed_zero import (
    OFFLOADED,
    STRATEGIES,
    nvme_path_of,
    offload_sections,
    zero_strategy,
)
from labkit.run.framework_values import Parts, number, refuse, whole

NAME = "DeepSpeed"
FORM = "JSON"
AUTO = "Hugging Face's Trainer replaces it before DeepSpeed reads the file"
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}
WHY = {"curriculum": "as 0.19.8 has removed the section curriculum_learning"}
SCHEDULES = {None: "constant", "WarmupLR": "constant", "WarmupCosineLR": "cosine"}
HALVES = {"float16": "fp16", "bfloat16": "bf16"}
MIB = 2**20 / 4  # elements of fp32 in a MiB
# What an Experiment may have if it is written; other fields must have their defaults.
# The first two lines of names are not in the file, and steps only with a cosine: the program has
# them, which the table says of each that is not its default.
WRITES = dict.fromkeys(("model", "size", "data", "seed", "steps", "recompute", "attention"), any)
WRITES |= dict.fromkeys(("depth", "width"), any)
WRITES |= dict.fromkeys(("batch_size", "accumulation", "lr", "weight_decay", "momentum"), any)
WRITES |= dict.fromkeys(("clip", "warmup_steps", "bucket_cap_mb", "nvme_path"), any)
WRITES |= {
    "strategy": (*STRATEGIES.values(), *OFFLOADED.values()),
    "optimizer": ("sgd", "adamw"),
    "schedule": ("constant", "cosine"),
    "precision": ("fp32", "bf16", "fp16"),
}


def to_experiment(values, written, ranks):
    """Return {field of Experiment: value}.

    values: {field: value}, defaults included. written: the names of those that the file has.
    Raises ValueError.
    """
    parts = Parts()
    parts.add(batch_of, values, ranks)
    parts.add(strategy_of, values)
    parts.add(precision_of, values)
    parts.add(bucket_of, values)
    parts.add(clip_of, values)
    if "optimizer.type" in written:
        parts.add(optimizer_of, values)
    parts.add(schedule_of, values)
    parts.add(curriculum_of, values)
    return parts.result()


def batch_of(values, ranks):
    """Return {field: value} of a step's batch; DeepSpeed needs two of three sizes, or one."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch, micro, accumulation = (values[name] for name in names)
    for name, value in zip(names, (batch, micro, accumulation), strict=True):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name}={value!r}: must be a whole number of at least 1")
    if batch is None and micro is None:
        raise ValueError(f"{names[0]} or {names[1]} must be there: DeepSpeed has no default")
    if batch is None:
        accumulation = accumulation or 1
        batch = micro * accumulation * ranks
    if accumulation is None:
        accumulation = batch // (micro * ranks) if micro else 1
    if micro is None and batch % (accumulation * ranks):
        raise ValueError(
            f"train_batch_size={batch} must be a multiple of {accumulation * ranks}: "
            f"gradient_accumulation_steps={accumulation} x {ranks} ranks"
        )
    if micro is not None and batch != micro * accumulation * ranks:
        raise ValueError(
            f"train_batch_size={batch} must be the product of micro-batch {micro}, "
            f"gradient_accumulation_steps={accumulation} and {ranks} ranks"
        )
    return {"batch_size": batch, "accumulation": accumulation}


def bucket_of(values):
    return {"bucket_cap_mb": values["zero_optimization.reduce_bucket_size"] / MIB}


def clip_of(values):
    return {"clip": float(values["gradient_clipping"])}


def strategy_of(values):
    zero = "zero_optimization"
    stage = f"{zero}.stage"
    parts = [f"{zero}.offload_{part}" for part in ("param", "optimizer")]
    devices = {f"{part}.device": values[f"{part}.device"] for part in parts}
    paths = {f"{part}.nvme_path": values[f"{part}.nvme_path"] for part in parts}
    strategy = zero_strategy(stage, values[stage], devices)
    return {"strategy": strategy} | nvme_path_of(strategy, paths)


def precision_of(values):
    """Return {"precision": value}; raise ValueError if the file turns on two."""
    dtype = str(values["torch_autocast.dtype"]).removeprefix("torch.")
    turned_on = [name for name in ("bf16", "fp16", "torch_autocast") if values[f"{name}.enabled"]]
    if len(turned_on) > 1:
        raise ValueError(f"{' and '.join(turned_on)} are both enabled: use one of them")
    if not turned_on:
        return {"precision": "fp32"}
    if turned_on != ["torch_autocast"]:
        return {"precision": turned_on[0]}
    if dtype not in HALVES:
        raise ValueError(f"torch_autocast.dtype={dtype!r}: must be {' or '.join(HALVES)}")
    return {"precision": HALVES[dtype]}


def optimizer_of(values):
    """Return {field: value} of the section `optimizer`."""
    kind = str(values["optimizer.type"]).lower()
    if kind not in OPTIMIZERS:
        known = "Adam, AdamW, SGD"
        raise ValueError(f"optimizer.type={values['optimizer.type']!r}: this lab has {known}")
    if kind == "adam" and values["optimizer.params.adam_w_mode"] is False:
        raise ValueError(
            "optimizer.params.adam_w_mode=false: this lab has AdamW, not Adam with L2 decay"
        )
    found = {"optimizer": OPTIMIZERS[kind], "lr": float(values["optimizer.params.lr"])}
    found["weight_decay"] = float(values["optimizer.params.weight_decay"])
    if kind == "sgd":
        found["momentum"] = float(values["optimizer.params.momentum"])
    return found


def unread(written):
    """Return the names of the written fields that belong to a scheduler that is refused."""
    if written.get("scheduler.type") in tuple(SCHEDULES):
        return []
    return [name for name in written if name.startswith("scheduler.params.")]


def defaults_of(written):
    """Return {field: default} of defaults that depend on other fields."""
    found = {"zero_optimization.overlap_comm": written.get("zero_optimization.stage") == 3}
    adam = OPTIMIZERS.get(str(written.get("optimizer.type")).lower()) == "adamw"
    if adam and written.get("optimizer.params.torch_adam"):
        found["optimizer.params.weight_decay"] = 0.01  # of torch.optim.AdamW
    return found


def schedule_of(values):
    """Return {field: value} of the section `scheduler`."""
    kind = values["scheduler.type"]
    if not isinstance(kind, str | None) or kind not in SCHEDULES:
        known = ", ".join(name for name in SCHEDULES if name)
        raise ValueError(f"scheduler.type={kind!r}: this lab has {known}")
    if kind is None:
        return {}
    parts = Parts({"schedule": SCHEDULES[kind]})
    parts.add(warm_up_of, values)
    parts.add(cosine_of if kind == "WarmupCosineLR" else rate_of, values)
    return parts.result()


def warm_up_of(values):
    """Return {"warmup_steps": value} of a linear warm-up."""
    if values["scheduler.params.warmup_type"] != "linear":
        raise ValueError(
            "scheduler.params.warmup_type is log, also where it is not written: this lab warms up "
            'linearly; write "linear"'
        )
    name = "scheduler.params.warmup_num_steps"
    return {"warmup_steps": whole(name, values[name])}


def cosine_of(values):
    """Return {"steps": value} of WarmupCosineLR."""
    if values["scheduler.params.cos_min_ratio"] != 0:
        raise ValueError(
            "scheduler.params.cos_min_ratio is 0.0001 where it is not written: here the rate "
            "falls to 0; write 0"
        )
    total = values["scheduler.params.total_num_steps"]
    if total is None:
        raise ValueError("scheduler.params.total_num_steps must be there for WarmupCosineLR")
    return {"steps": whole("scheduler.params.total_num_steps", total)}


def rate_of(values):
    """Return {"lr": value} of WarmupLR; nothing if it is the optimizer's rate."""
    rate = values["scheduler.params.warmup_max_lr"]
    return {} if rate is None else {"lr": number("scheduler.params.warmup_max_lr", rate)}


def from_experiment(e, ranks):
    """Return the JSON's mapping, with every field that decides the result."""
    stage = {name: stage for stage, name in STRATEGIES.items()}.get(e.strategy, 3)
    zero = {"stage": stage, "reduce_bucket_size": round(e.bucket_cap_mb * MIB)}
    zero |= offload_sections(e, NAME)
    params = {"lr": e.lr, "weight_decay": e.weight_decay}
    if e.optimizer == "adamw":
        named = {"type": "AdamW", "params": params | {"torch_adam": True}}
    else:
        named = {"type": "SGD", "params": params | {"momentum": e.momentum}}
    config = {
        "train_batch_size": e.batch_size,
        "gradient_accumulation_steps": e.accumulation,
        "gradient_clipping": e.clip,
        "optimizer": named,
        "zero_optimization": zero,
    }
    if e.precision != "fp32":
        dtypes = {name: dtype for dtype, name in HALVES.items()}
        config["torch_autocast"] = {"enabled": True, "dtype": dtypes[e.precision]}
    if e.warmup_steps or e.schedule == "cosine":
        if e.warmup_steps < 2:  # DeepSpeed refuses 0, and takes 2 for 1
            other = "at least 2" if e.schedule == "cosine" else "0 or at least 2"
            refuse("warmup_steps", e.warmup_steps, NAME, other)
        config["scheduler"] = scheduler_of(e)
    return config


def scheduler_of(e):
    """Return the section `scheduler`. WarmupLR has the lab's rates; the cosine is a step ahead."""
    warm = {"warmup_num_steps": e.warmup_steps, "warmup_type": "linear"}
    if e.schedule == "cosine":
        params = {"total_num_steps": e.steps, "cos_min_ratio": 0, "warmup_min_ratio": 0}
        return {"type": "WarmupCosineLR", "params": params | warm}
    params = {"warmup_min_lr": e.lr / (e.warmup_steps + 1), "warmup_max_lr": e.lr}
    return {"type": "WarmupLR", "params": params | warm}


def text(config):
    """Return the JSON."""
    return json.dumps(config, indent=2) + "\n"

"""torchtitan's Trainer.Config, in Python: from its values to fields of an Experiment, and back.

    parallelism    replicate ddp_bucketed, shard fsdp; tensor, pipeline, context
    training       a step's batch, clipping, offload; mixed_precision_param is bf16 by default
    optimizer      default_adamw: AdamW, whose second beta is 0.95 by default

A file is a function that returns Trainer.Config(...); labkit.run.torchtitan_files reads it. Source:
torchtitan 0.3.0, config/configs.py, trainer.py and components/optimizer.
"""

from labkit.run.framework_values import (
    NO_RECOMPUTE,
    Parts,
    accumulation_of,
    chosen,
    data_ranks,
    number,
    refuse,
    whole,
)

NAME = "torchtitan"
FORM = "Python"
AUTO = ""
DEGREES = {"tensor": "parallelism.tensor_parallel_degree"}
DEGREES |= {"pipeline": "parallelism.pipeline_parallel_degree"}
DEGREES |= {"context": "parallelism.context_parallel_degree"}
REPLICAS = "parallelism.data_parallel_replicate_degree"
SHARDS = "parallelism.data_parallel_shard_degree"
RECOMPUTE = "activation_checkpoint.mode"
AFTER = "parallelism.fsdp_reshard_after_forward"
MICRO = "parallelism.pipeline_parallel_microbatch_size"
BATCH = ("training.global_batch_size", "training.local_batch_size")
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}
UNITS = {"none": "none", "full": "every", "selective": "matmul"}
CLASSES = {"none": None, "full": "FullAC", "selective": "SelectiveAC"}
# The first two lines of names are of the program, or do not change the result.
WRITES = dict.fromkeys(("size", "data", "momentum", "attention", "bucket_cap_mb"), any)
WRITES |= dict.fromkeys(("depth", "width"), any)
WRITES |= dict.fromkeys(("batch_size", "accumulation", "lr", "weight_decay", "clip"), any)
WRITES |= dict.fromkeys(("warmup_steps", "steps", "seed", *DEGREES), any)
WRITES |= {
    "model": ("gpt",),
    "strategy": ("ddp_bucketed", "ddp_naive", "fsdp", "fsdp_grad_op", "fsdp_offload"),
    "optimizer": ("adamw",),
    "schedule": ("constant", "cosine"),
    "precision": tuple(PRECISIONS.values()),
    "recompute": tuple(UNITS.values()),
    "sequence_parallel": ("off", "on"),
}


def to_experiment(values, written, ranks):
    """Return {field of Experiment: value}; arguments as in deepspeed_fields. Raises ValueError."""
    parts = Parts({"model": "gpt"})
    parts.add(degrees_of, values)
    parts.add(layout_of, values, parts.fields, ranks)
    parts.add(recompute_of, values, parts.fields)
    parts.add(precision_of, values, written, parts.fields)
    parts.add(training_of, values)
    parts.add(seed_of, values)
    parts.add(optimizer_of, values, written)
    parts.add(schedule_of, values, written)
    return parts.result()


def replaced(written, e):
    """Return {field: what the lab has in place of its value}."""
    from labkit.run.experiment_mesh import gpt_sizes  # imports torch

    tokens = gpt_sizes(e)["context"]
    found = {"model_spec": "the lab's GPT"} if "model_spec" in written else {}
    if written.get("training.seq_len", tokens) != tokens:
        found["training.seq_len"] = f"the lab's GPT has {tokens}"
    if e.axes and written.get(RECOMPUTE, "selective") != "none":
        found[RECOMPUTE] = NO_RECOMPUTE
    return found


def degrees_of(values):
    """Return {axis: ranks along it} of the axes beside data parallelism."""
    return {name: whole(there, values[there]) for name, there in DEGREES.items()}


def layout_of(values, found, ranks):
    """Return {field: value} of data parallelism and of a step's batch. found: with the axes."""
    copies = data_ranks(ranks, {there: found[name] for name, there in DEGREES.items()})
    shares = values["parallelism.enable_sequence_parallel"] and found["tensor"] > 1
    # with a context axis, the lab's sequences are sharded already
    parts = Parts({"sequence_parallel": "on" if shares and found["context"] == 1 else "off"})
    parts.add(strategy_of, values, copies, found["pipeline"])
    parts.add(batch_of, values, copies, found["pipeline"])
    return parts.result()


def recompute_of(values, found):
    """Return {"recompute": value}; with other axes the lab runs nothing again."""
    units = chosen(RECOMPUTE, values[RECOMPUTE], UNITS)
    return {"recompute": "none" if any(found[axis] > 1 for axis in DEGREES) else units}


def precision_of(values, written, found):
    """Return {"precision": value}. found: with the axes."""
    name = "training.mixed_precision_param"
    precision = chosen(name, values[name], PRECISIONS)
    if precision != "fp32" and found["pipeline"] > 1:
        raise ValueError(
            f"{name} is {values[name]}{not_written(name, written)}: with a pipeline, this lab has "
            "float32"
        )
    return {"precision": precision}


def not_written(name, written):
    """Return words for an error about a default."""
    return "" if name in written else ", also where it is not written"


def training_of(values):
    clip = number("training.max_norm", values["training.max_norm"])
    return {"clip": clip, "steps": whole("training.steps", values["training.steps"])}


def seed_of(values):
    seed = values["debug.seed"]
    return {} if seed is None else {"seed": whole("debug.seed", seed, least=0)}


def strategy_of(values, copies, pipeline):
    """Return {"strategy": value} along the data-parallel axis of `copies` ranks."""
    replicas, shards = whole(REPLICAS, values[REPLICAS]), values[SHARDS]
    shards = copies // replicas if shards == -1 else whole(SHARDS, shards)
    if replicas * shards != copies:
        raise ValueError(
            f"{REPLICAS}={replicas} x {SHARDS}={shards}: must be the {copies} data-parallel ranks"
        )
    after = chosen(AFTER, values[AFTER], {"default": pipeline == 1, "always": True, "never": False})
    offload = values["training.enable_cpu_offload"]
    if replicas == copies and (copies > 1 or values[SHARDS] == 1):
        if offload:
            raise ValueError("training.enable_cpu_offload: this lab offloads with FSDP only")
        return {"strategy": "ddp_naive" if pipeline > 1 else "ddp_bucketed"}
    if replicas > 1:
        raise ValueError(f"{REPLICAS}={replicas} with {SHARDS}={shards}: HSDP is not in this lab")
    if pipeline > 1:
        raise ValueError(
            f"{SHARDS}={values[SHARDS]} with {DEGREES['pipeline']}={pipeline}: this lab's pipeline "
            f"has no FSDP; write {REPLICAS}={copies} and {SHARDS}=1"
        )
    if offload:
        return {"strategy": "fsdp_offload"}
    return {"strategy": "fsdp" if after else "fsdp_grad_op"}


def batch_of(values, copies, pipeline):
    """Return {field: value}; a pipeline divides its local batch into micro-batches once more."""
    total, local = values[BATCH[0]], whole(BATCH[1], values[BATCH[1]])
    total = local * copies if total == -1 else total
    times = accumulation_of(BATCH, total, local, copies)
    if pipeline > 1:
        micro = whole(MICRO, values[MICRO])
        if local % micro:
            raise ValueError(f"{BATCH[1]}={local}: must be a multiple of {MICRO}={micro}")
        times *= local // micro
    return {"batch_size": total, "accumulation": times}


def optimizer_of(values, written):
    """Return {field: value} of the section `optimizer`; nothing if it is absent."""
    if not any(name.startswith("optimizer.") for name in written):
        return {}
    if list(values["optimizer.betas"]) != [0.9, 0.999]:
        raise ValueError(
            f"optimizer.betas is {values['optimizer.betas']}"
            f"{not_written('optimizer.betas', written)}: write betas=(0.9, 0.999)"
        )
    found = {"optimizer": chosen("optimizer.name", values["optimizer.name"], {"AdamW": "adamw"})}
    found["lr"] = number("optimizer.lr", values["optimizer.lr"])
    decay = number("optimizer.weight_decay", values["optimizer.weight_decay"])
    return found | {"weight_decay": decay}


def schedule_of(values, written):
    """Return {field: value} of the learning rate.

    torchtitan's last step of the warm-up has the full rate, the lab's first step after it has.
    """
    warm = whole("lr_scheduler.warmup_steps", values["lr_scheduler.warmup_steps"], least=0)
    found = {"warmup_steps": max(0, warm - 1)}
    ratio, kind = values["lr_scheduler.decay_ratio"], values["lr_scheduler.decay_type"]
    if ratio == 0:
        return found | {"schedule": "constant"}
    if ratio is not None:
        raise ValueError(
            f"lr_scheduler.decay_ratio={ratio!r}: this lab has 0, and with cosine none"
        )
    if kind != "cosine":
        raise ValueError(
            f"lr_scheduler.decay_type is {kind}{not_written('lr_scheduler.decay_type', written)}: "
            "this lab has cosine, and decay_ratio=0.0 for a constant rate"
        )
    return found | {"schedule": "cosine"}


def from_experiment(e, ranks):
    """Return {section: {field: value}}, with every field that decides the result."""
    if e.strategy == "ddp_naive" and e.pipeline == 1:
        refuse("strategy", e.strategy, f"{NAME} without a pipeline", "'ddp_bucketed'")
    copies = ranks // e.tensor // e.pipeline // e.context
    local = e.batch_size // copies
    pipelined = e.pipeline > 1
    training = {
        "local_batch_size": local if pipelined else local // e.accumulation,
        "global_batch_size": e.batch_size,
        "max_norm": e.clip,
        "steps": e.steps,
        "enable_cpu_offload": e.strategy == "fsdp_offload",
        "mixed_precision_param": {ours: name for name, ours in PRECISIONS.items()}[e.precision],
    }
    if pipelined:
        training["disable_cuda_graphs"] = True  # torchtitan requires it
    return {
        "training": training,
        "parallelism": parallelism(e, copies, local),
        "optimizer": {"lr": e.lr, "betas": [0.9, 0.999], "weight_decay": e.weight_decay},
        "lr_scheduler": scheduler(e),
        "activation_checkpoint": {"mode": {o: name for name, o in UNITS.items()}[e.recompute]},
        "debug": {"seed": e.seed},
    }


def parallelism(e, copies, local):
    shards = e.strategy.startswith("fsdp")
    found = {
        "data_parallel_replicate_degree": 1 if shards else copies,
        "data_parallel_shard_degree": -1 if shards else 1,
        "fsdp_reshard_after_forward": "never" if e.strategy == "fsdp_grad_op" else "always",
    }
    found |= {there.partition(".")[2]: getattr(e, name) for name, there in DEGREES.items()}
    found["enable_sequence_parallel"] = e.sequence_parallel == "on"
    if e.pipeline > 1:
        found["pipeline_parallel_microbatch_size"] = local // e.accumulation
    return found


def scheduler(e):
    found = {"warmup_steps": e.warmup_steps + 1 if e.warmup_steps else 0}
    if e.schedule == "constant":
        return found | {"decay_ratio": 0.0}
    return found | {"decay_type": "cosine", "min_lr_factor": 0.0}


HEAD = '''\
"""Run it: torchrun ... -m torchtitan.train --module FILE --config config (torchtitan 0.3)."""

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
{policy}from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer


def config():
    return Trainer.Config(
        model_spec=model_registry("debugmodel"),  # yours; add dataloader, loss and hf_assets_path
'''
CALLS = {"training": "TrainingConfig", "parallelism": "ParallelismConfig", "debug": "DebugConfig"}
CALLS |= {"optimizer": "default_adamw", "lr_scheduler": "LRSchedulersContainer.Config"}


def text(config):
    """Return a Python file whose function config returns the Trainer.Config."""
    policy = CLASSES[config["activation_checkpoint"]["mode"]]
    line = f"from torchtitan.distributed.activation_checkpoint import {policy}\n"
    lines = [HEAD.format(policy=line if policy else "")]
    for section, call in CALLS.items():
        lines.append(f"        {section}={call}(\n")
        for name, value in config[section].items():
            lines.append(f"            {name}={tuple(value) if name == 'betas' else value!r},\n")
        lines.append("        ),\n")
    named = f"{policy}.Config()" if policy else None
    return "".join([*lines, f"        activation_checkpoint={named},\n    )\n"])

"""Megatron-LM's arguments: from their values to fields of an Experiment, and back.

    tensor, pipeline, context, expert     the axes, in ranks; experts
    --use-distributed-optimizer           zero1
    --use-megatron-fsdp                   by --data-parallel-sharding-strategy: zero1, zero2, fsdp
    --use-torch-fsdp2                     fsdp or fsdp_grad_op
    a step's batch                        --global-batch-size, over all ranks and micro-batches
    --bf16, --fp16                        near: 16-bit weights, fp32 copies in the optimizer
    layers, hidden size and heads         size, depth and width, with heads of 16, 32 or 64 channels

The lab has its own GPT: `replaced` names each argument of the model that it cannot have. The files
are read by labkit.run.megatron_shell. Source:
Megatron-LM core_v0.16.1, megatron/training/arguments.py and training.py (names and defaults),
initialize.py (seed), core/optimizer_param_scheduler.py (learning rate).
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

NAME = "Megatron-LM"
FORM = "arguments"
AUTO = ""
SIZED = ("num-layers", "hidden-size", "num-attention-heads")
SIZED += ("seq-length", "max-position-embeddings", "vocab-size")
AXES = {
    "tensor": "tensor-model-parallel-size",
    "pipeline": "pipeline-model-parallel-size",
    "context": "context-parallel-size",
}
RECOMPUTE = ("recompute-granularity", "recompute-activations", "recompute-method")
RECOMPUTE += ("recompute-num-layers",)
OPTIMIZERS = {"adam": "adamw", "sgd": "sgd"}
STYLES = {"constant": "constant", "cosine": "cosine"}
SHARDED = {"no_shard": "ddp_bucketed", "optim": "zero1", "optim_grads": "zero2"}
SHARDED |= {"optim_grads_params": "fsdp"}
ELEMENTS = 2**20 / 4  # fp32 elements of a MiB
# Arguments of layers, with what the lab's GPT has: Megatron's defaults.
FLAGS = ("group-query-attention", "use-rotary-position-embeddings", "no-position-embedding")
FLAGS += ("swiglu", "squared-relu", "quick-geglu", "openai-gelu", "disable-bias-linear")
FLAGS += ("untie-embeddings-and-output-weights", "multi-latent-attention", "qk-layernorm")
FLAGS += ("qk-l2-norm", "apply-layernorm-1p", "apply-residual-connection-post-layernorm")
FLAGS += ("fp32-residual-connection", "attention-output-gate")
LAYERS = dict.fromkeys(FLAGS, False)
LAYERS |= dict.fromkeys(("window-size", "experimental-attention-variant", "spec"))
LAYERS |= {"position-embedding-type": "learned_absolute", "normalization": "LayerNorm"}
LAYERS |= {"softmax-type": "vanilla", "norm-epsilon": 1e-5, "init-method-std": 0.02}
LAYERS |= {"moe-layer-freq": 1, "moe-router-score-function": "softmax"}
BATCH = ("global-batch-size", "micro-batch-size")
# A GPT of the lab; `any`: the file or the program has it.
WRITES = dict.fromkeys(("size", "data", "seed", "steps", "attention", "batch_size"), any)
WRITES |= dict.fromkeys(("accumulation", "lr", "momentum", "weight_decay", "clip"), any)
WRITES |= dict.fromkeys(("depth", "width"), any)
WRITES |= dict.fromkeys(("warmup_steps", "bucket_cap_mb", *AXES, "expert", "experts"), any)
WRITES |= {
    "model": ("gpt",),
    "strategy": ("ddp_bucketed", "ddp_naive", "zero1", "zero2", "fsdp"),
    "optimizer": ("adamw", "sgd"),
    "schedule": ("constant", "cosine"),
    "precision": ("fp32", "bf16", "fp16"),
    "recompute": ("none", "every"),
    "sequence_parallel": ("off", "on"),
}


def ranks_of(config):
    """Return the ranks of torchrun's options in a script, or None."""
    counts = getattr(config, "counts", {})
    each = counts.get("nproc_per_node")
    if each in (None, "auto", "cpu", "gpu"):
        return None
    return whole("nproc_per_node", each) * nodes_of(config)


def nodes_of(config):
    """Return the nodes of torchrun's options in a script, or 1."""
    return whole("nnodes", getattr(config, "counts", {}).get("nnodes", 1))


def to_experiment(values, written, ranks):
    """Return {field of Experiment: value}; arguments as in deepspeed_fields. Raises ValueError."""
    parts = Parts({"model": "gpt"})
    parts.add(model_of, values)
    parts.add(axes_of, values)
    parts.add(batch_of, values, parts.fields, ranks)
    parts.add(strategy_of, values, parts.fields)
    parts.add(precision_of, values)
    parts.add(recompute_of, values, parts.fields)
    parts.add(rest_of, values)
    parts.add(optimizer_of, values)
    parts.add(schedule_of, values, written)
    return parts.result()


def model_of(values):
    """Return {field: value} of the sizes, or {} if the lab's GPT has no such heads or layers."""
    from labkit.models.sizes import SIZES  # imports torch

    for name in SIZED:
        if values[name] is not None and "$" not in str(values[name]):
            whole(name, values[name])
    layers, width, heads = (values[name] for name in SIZED[:3])
    if any(type(number) is not int for number in (layers, width, heads)):
        return {}
    for size, usual in SIZES["gpt"].items():
        if width * usual["heads"] == usual["width"] * heads:  # heads of one width
            found = {"size": size, "depth": layers * (layers != usual["layers"])}
            return found | {"width": width * (width != usual["width"])}
    return {}


def replaced(values, e):
    """Return {argument: what the lab has in place of its value}."""
    shape = shape_arguments(e)
    width = shape["hidden-size"]
    ours = shape | LAYERS | {"kv-channels": width // shape["num-attention-heads"]}
    ours |= dict.fromkeys(("ffn-hidden-size", "moe-ffn-hidden-size"), 4 * width)
    differ = [name for name, value in ours.items() if values.get(name) not in (None, value)]
    runs_again = any(values.get(name) for name in RECOMPUTE[:2])
    dropped = [name for name in RECOMPUTE if e.axes and runs_again and values.get(name)]
    return dict.fromkeys(dropped, NO_RECOMPUTE) | {
        name: f"the lab's GPT has {ours[name]}" if ours[name] else "not in the lab's GPT"
        for name in differ
    }


def axes_of(values):
    """Return {field: value} of the axes and the experts."""
    found = {name: whole(there, values[there]) for name, there in AXES.items()}
    found["expert"] = whole("expert-model-parallel-size", values["expert-model-parallel-size"])
    # with a context axis, the lab's sequences are sharded already
    shares = values["sequence-parallel"] and found["tensor"] > 1 and found["context"] == 1
    found["experts"] = values["num-experts"] or 0
    if found["experts"]:
        shares = False
        usual = {"moe-aux-loss-coeff": 0.01, "moe-router-load-balancing-type": "aux_loss"}
        for name, value in usual.items():
            if values[name] != value:
                raise ValueError(f"{name}={values[name]!r}: with num-experts it is {value} here")
    return found | {"sequence_parallel": "on" if shares else "off"}


def rest_of(values):
    """Return {field: value} of seed, clipping and buckets."""
    found = {
        "seed": whole("seed", values["seed"]),
        "clip": number("clip-grad", values["clip-grad"]),
    }
    size = values["ddp-bucket-size"]
    return found | ({"bucket_cap_mb": whole("ddp-bucket-size", size) / ELEMENTS} if size else {})


def batch_of(values, found, ranks):
    """Return {field: value} of the batch of all ranks and its micro-batches. found: the axes."""
    copies = data_ranks(ranks, {there: found[name] for name, there in AXES.items()})
    if copies % found["expert"]:
        raise ValueError(
            f"expert-model-parallel-size={found['expert']}: must divide the {copies} "
            "data-parallel ranks"
        )
    micro = values[BATCH[1]]
    if micro is None:
        raise ValueError(f"{BATCH[1]} must be there: Megatron-LM has no default")
    total = values[BATCH[0]]
    total = whole(BATCH[1], micro) * copies if total is None else total
    return {"batch_size": total, "accumulation": accumulation_of(BATCH, total, micro, copies)}


def strategy_of(values, found):
    """Return {"strategy": value} of the data-parallel axis. found: the sizes of the others."""
    sharding = chosen(
        "data-parallel-sharding-strategy", values["data-parallel-sharding-strategy"], SHARDED
    )
    if values["use-torch-fsdp2"]:
        after = not values["torch-fsdp2-no-reshard-after-forward"]
        return {"strategy": "fsdp" if after else "fsdp_grad_op"}
    if values["use-megatron-fsdp"]:
        strategy = sharding
    else:
        strategy = "zero1" if values["use-distributed-optimizer"] else "ddp_bucketed"
    along = [there for name, there in AXES.items() if found[name] > 1]
    along += ["num-experts"] if found["experts"] else []
    if strategy.startswith("zero") and along:
        name = "use-megatron-fsdp" if values["use-megatron-fsdp"] else "use-distributed-optimizer"
        raise ValueError(
            f"{name} with {along[0]}: this lab's {strategy} has no other axes; without it, the "
            "results are the same and need more memory"
        )
    if found["pipeline"] > 1 and strategy == "ddp_bucketed":
        strategy = "ddp_naive"
    return {"strategy": strategy}


def precision_of(values):
    if values["bf16"] and values["fp16"]:
        raise ValueError("bf16 and fp16 are both there: use one of them")
    return {"precision": "bf16" if values["bf16"] else "fp16" if values["fp16"] else "fp32"}


def recompute_of(values, found):
    """Return {"recompute": the units that run again}; with other axes the lab runs none again."""
    kind = "selective" if values["recompute-activations"] else values["recompute-granularity"]
    if kind is None or found["experts"] or any(found[name] > 1 for name in AXES):
        return {"recompute": "none"}
    if kind == "selective":
        raise ValueError(
            "recompute-granularity='selective' runs the core of attention again: this lab has full"
        )
    chosen("recompute-granularity", kind, {"full": "every"})
    method = values["recompute-method"], values["recompute-num-layers"]
    if method != ("uniform", 1):
        raise ValueError(
            f"recompute-method={method[0]!r} with recompute-num-layers={method[1]!r}: this lab "
            "has uniform with 1"
        )
    return {"recompute": "every"}


def optimizer_of(values):
    found = {"optimizer": chosen("optimizer", values["optimizer"], OPTIMIZERS)}
    found["weight_decay"] = number("weight-decay", values["weight-decay"])
    if found["optimizer"] == "sgd":
        found["momentum"] = number("sgd-momentum", values["sgd-momentum"])
    return found


def schedule_of(values, written):
    """Return {field: value} of steps and learning rate."""
    found = {}
    if values["train-iters"] is not None:
        found["steps"] = whole("train-iters", values["train-iters"])
    if "lr" in written:
        found["lr"] = number("lr", values["lr"])
    style = values["lr-decay-style"]
    if style not in STYLES:
        where = "" if "lr-decay-style" in written else ", also where it is not written"
        raise ValueError(f"lr-decay-style is {style}{where}: this lab has constant and cosine")
    if values["lr-decay-iters"] not in (None, values["train-iters"]):
        raise ValueError(
            f"lr-decay-iters={values['lr-decay-iters']}: here it is train-iters; remove it"
        )
    warm = whole("lr-warmup-iters", values["lr-warmup-iters"], least=0)
    return found | {"schedule": STYLES[style], "warmup_steps": warm}


def from_experiment(e, ranks):
    """Return {argument: value}, with every argument that decides the result; true: a flag."""
    copies = ranks // e.tensor // e.pipeline // e.context
    if e.strategy == "ddp_naive" and e.pipeline == 1:
        refuse("strategy", e.strategy, f"{NAME} without a pipeline", "'ddp_bucketed'")
    found = model_arguments(e) | {there: getattr(e, name) for name, there in AXES.items()}
    found |= {"micro-batch-size": e.batch_size // e.accumulation // copies}
    found |= {"global-batch-size": e.batch_size, "train-iters": e.steps}
    found |= {"seed": max(1, e.seed)}  # it refuses 0
    found |= strategy_arguments(e) | {"ddp-bucket-size": round(e.bucket_cap_mb * ELEMENTS)}
    if e.sequence_parallel == "on":
        found["sequence-parallel"] = True
    if e.precision != "fp32":
        found[e.precision] = True
    if e.recompute == "every":
        found |= {"recompute-granularity": "full", "recompute-method": "uniform"}
        found["recompute-num-layers"] = 1
    return found | optimizer_arguments(e)


def shape_arguments(e):
    """Return the arguments of the sizes of the lab's GPT."""
    from labkit.run.experiment_mesh import gpt_sizes  # imports torch

    gpt = gpt_sizes(e)
    found = {"num-layers": gpt["layers"], "hidden-size": gpt["width"]}
    found |= {"num-attention-heads": gpt["heads"], "seq-length": gpt["context"]}
    return found | {"max-position-embeddings": gpt["context"], "vocab-size": gpt["vocab"]}


def model_arguments(e):
    """Return the arguments of the lab's GPT: its sizes, and its experts."""
    found = shape_arguments(e) | {"hidden-dropout": 0.0, "attention-dropout": 0.0}
    if e.experts:
        found |= {"num-experts": e.experts, "expert-model-parallel-size": e.expert}
        found |= {"moe-router-topk": 2, "moe-aux-loss-coeff": 0.01}
        found |= {"moe-router-load-balancing-type": "aux_loss"}
    return found


def strategy_arguments(e):
    if e.strategy == "zero1":
        return {"use-distributed-optimizer": True}
    if e.strategy not in ("zero2", "fsdp"):
        return {}
    kept = {strategy: there for there, strategy in SHARDED.items()}
    found = {"use-megatron-fsdp": True, "use-distributed-optimizer": True}
    found["data-parallel-sharding-strategy"] = kept[e.strategy]
    return found | {"ckpt-format": "fsdp_dtensor"}  # the only one that it accepts


def optimizer_arguments(e):
    """Return the arguments of optimizer and learning rate; the warm-up has the lab's rates."""
    name = {ours: there for there, ours in OPTIMIZERS.items()}[e.optimizer]
    found = {"optimizer": name, "lr": e.lr, "weight-decay": e.weight_decay}
    if e.optimizer == "sgd":
        found["sgd-momentum"] = e.momentum
    found |= {"clip-grad": e.clip, "lr-decay-style": e.schedule, "min-lr": 0.0}
    if e.warmup_steps:
        found |= {"lr-warmup-iters": e.warmup_steps}
        found |= {"lr-warmup-init": e.lr / (e.warmup_steps + 1)}
    return found


def text(config):
    """Return the arguments as text, one on a line."""
    return "".join(
        f"--{name}{'' if value is True else f' {value}'}\n" for name, value in config.items()
    )

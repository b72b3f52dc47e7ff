"""Accelerate's default_config.yaml: from its values to fields of an Experiment, and back.

    distributed_type    NO single, MULTI_GPU ddp_bucketed, FSDP fsdp, DEEPSPEED zero1 or zero2
    parallelism_config  tensor and context, with FSDP of version 2
    mixed_precision     autocast; with FSDP and DeepSpeed near: they hold or gather 16-bit weights

The program has the batch size, the optimizer and its learning rate, so that an Experiment keeps
its own. Source: Accelerate 1.15, commands/config/config_args.py, commands/launch.py,
utils/launch.py and utils/dataclasses.py.
"""

import yaml

from labkit.run.deepspeed_zero import nvme_path_of, zero_strategy
from labkit.run.framework_values import (
    NO_RECOMPUTE,
    Parts,
    Refused,
    chosen,
    data_ranks,
    number,
    refuse,
    whole,
)

NAME = "Accelerate"
FORM = "YAML"
AUTO = "Accelerate replaces it by a value of the program"
PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}
SHARDED = {"FULL_SHARD": "fsdp", "SHARD_GRAD_OP": "fsdp_grad_op", "NO_SHARD": "ddp_bucketed"}
NUMBERED = {1: "FULL_SHARD", 2: "SHARD_GRAD_OP", 3: "NO_SHARD"}  # torch's ShardingStrategy
STAGES = {"zero1": 1, "zero2": 2}
FSDP_STRATEGIES = ("fsdp", "fsdp_grad_op", "fsdp_offload")
KINDS = {"NO": "single", "MULTI_GPU": "ddp_bucketed", "MULTI_CPU": "ddp_bucketed"}
KINDS |= {"FSDP": None, "DEEPSPEED": None}  # their sections say it
AXES = {"tensor": "parallelism_config_tp_size", "context": "parallelism_config_cp_size"}
FSDP = "fsdp_config.fsdp_"
RECOMPUTE = f"{FSDP}activation_checkpointing"
ZERO = "deepspeed_config."
SIZES = "parallelism_config.parallelism_config_"
# deepspeed_config_file has these instead
IN_FILE = ("zero_stage", "gradient_accumulation_steps", "gradient_clipping")
IN_FILE += ("offload_optimizer_device", "offload_param_device", "zero3_save_16bit_model")
IN_FILE += ("offload_optimizer_nvme_path", "offload_param_nvme_path")
CURRICULUM = ("curriculum", "curriculum_from", "curriculum_steps")
# The program has these, which the table says of each that is not its default.
WRITES = dict.fromkeys(("model", "size", "data", "seed", "steps", "attention", "batch_size"), any)
WRITES |= dict.fromkeys(("accumulation", "optimizer", "lr", "momentum", "weight_decay"), any)
WRITES |= dict.fromkeys(("reference_batch", "lr_rule", "linear_until", "warmup_steps"), any)
WRITES |= dict.fromkeys(("schedule", "bucket_cap_mb", "depth", "width", *CURRICULUM), any)
# The file has these, with FSDP or DeepSpeed.
WRITES |= dict.fromkeys(("clip", "recompute", "tensor", "context"), any)
WRITES |= {
    "strategy": ("single", "ddp_bucketed", *STAGES, *FSDP_STRATEGIES),
    "precision": tuple(PRECISIONS.values()),
}


def ranks_of(config):
    """Return num_processes, which is of all machines together, or None."""
    count = config.get("num_processes")
    return None if count in (None, -1) else whole("num_processes", count)


def nodes_of(config):
    """Return num_machines."""
    return whole("num_machines", config.get("num_machines", 1))


def file_behind(config):
    """Return the path of the DeepSpeed file that a configuration names, or None.

    Raises Refused if the configuration has a field that belongs into that file.
    """
    section = config.get("deepspeed_config")
    file = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    if file is None:
        return None
    if not isinstance(file, str):
        raise ValueError(f"{ZERO}deepspeed_config_file={file!r}: must be the path of a file")
    own = {f"{ZERO}{name}" for name in section if name in IN_FILE}
    own |= {"mixed_precision"} & set(config)
    if own:
        raise Refused(f"{name}: remove it, the value of {file} holds" for name in sorted(own))
    return file


def to_experiment(values, written, ranks):
    """Return {field of Experiment: value}; arguments as in deepspeed_fields. Raises ValueError."""
    parts = Parts()
    parts.add(check_machines, values, ranks)
    parts.add(precision_of, values)
    parts.add(strategy_of, values, written, ranks)
    return parts.result()


def replaced(written, e):
    """Return {field: what the lab has in place of its value}."""
    return {RECOMPUTE: NO_RECOMPUTE} if e.axes and written.get(RECOMPUTE) else {}


def check_machines(values, ranks):
    """Raise ValueError if processes or machines do not fit the run. Returns no field."""
    count = ranks_of(values)
    if count not in (None, ranks):
        raise ValueError(
            f"num_processes={count}: must be the number of ranks of the run, {ranks}, "
            "on all machines together"
        )
    machines = nodes_of(values)
    if ranks % machines:
        raise ValueError(f"num_machines={machines}: must divide the {ranks} processes")
    if whole("machine_rank", values["machine_rank"], least=0) >= machines:
        raise ValueError(
            f"machine_rank={values['machine_rank']}: must be less than num_machines={machines}"
        )
    return {}


def precision_of(values):
    precision = values["mixed_precision"] or "no"
    return {"precision": chosen("mixed_precision", precision, PRECISIONS)}


def strategy_of(values, written, ranks):
    """Return {field: value} of distributed_type and of the section that belongs to it."""
    kind = values["distributed_type"]
    if kind is False:
        raise ValueError("distributed_type=false: YAML reads an unquoted NO as false; write 'NO'")
    if any(name.startswith(SIZES) for name in written) and kind != "FSDP":
        raise ValueError(f"parallelism_config with distributed_type={kind!r}: it needs FSDP")
    if kind == "MEGATRON_LM":
        raise ValueError(f"distributed_type={kind!r}: read Megatron's own arguments")
    strategy = chosen("distributed_type", kind, KINDS)
    if kind == "FSDP":
        return fsdp_of(values, ranks)
    if kind == "DEEPSPEED":
        return deepspeed_of(values, written)
    if strategy == "single" and ranks > 1:
        raise ValueError(f"distributed_type='NO': is for one process, not {ranks}")
    return {"strategy": strategy}


def fsdp_of(values, ranks):
    """Return {field: value} of fsdp_config and parallelism_config."""
    parts = Parts()
    parts.add(offload_of, values)
    parts.add(axes_of, values, ranks)
    parts.add(recompute_of, values, parts.fields)
    return parts.result()


def offload_of(values):
    """Return {"strategy": value}, which says where FSDP keeps its shards."""
    strategy = sharding_of(values)
    if not values[f"{FSDP}offload_params"]:
        return {"strategy": strategy}
    if strategy != "fsdp":
        raise ValueError(
            f"{FSDP}offload_params with {strategy}: this lab offloads the shards of fsdp only; "
            "remove it, or write FULL_SHARD, in version 2 fsdp_reshard_after_forward: true"
        )
    return {"strategy": "fsdp_offload"}


def recompute_of(values, found):
    """Return {"recompute": value}; with other axes the lab runs nothing again."""
    runs_again = values[RECOMPUTE] and not any(name in found for name in AXES)
    return {"recompute": "every" if runs_again else "none"}


def sharding_of(values):
    """Return the strategy. Version 1 never reads fsdp_reshard_after_forward, version 2 only it."""
    version = chosen(f"{FSDP}version", values[f"{FSDP}version"], {1: 1, 2: 2})
    after = values[f"{FSDP}reshard_after_forward"]
    if version == 2:
        after = True if after is None else after
        if type(after) is not bool:
            raise ValueError(
                f"{FSDP}reshard_after_forward={after!r}: must be true or false in version 2"
            )
        return "fsdp" if after else "fsdp_grad_op"
    sharding = values[f"{FSDP}sharding_strategy"] or "FULL_SHARD"
    sharding = NUMBERED.get(sharding, sharding) if type(sharding) is int else sharding
    if after is not None and after != sharding:
        raise ValueError(
            f"{FSDP}reshard_after_forward={after!r}: FSDP of version 1 does not read it and uses "
            f"{FSDP}sharding_strategy={sharding}; make them equal"
        )
    return chosen(f"{FSDP}sharding_strategy", sharding, SHARDED)


def axes_of(values, ranks):
    """Return {field: value} of parallelism_config, whose sizes must multiply to the ranks."""
    sizes = {f"{SIZES}{name}_size": values[f"{SIZES}{name}_size"] for name in ("tp", "cp")}
    tensor, context = sizes.values()
    sharded = data_ranks(ranks, sizes)
    if tensor == context == 1:
        return {}
    if values[f"{FSDP}version"] == 1:
        raise ValueError("parallelism_config: needs fsdp_config.fsdp_version=2")
    if values[f"{SIZES}dp_shard_size"] != sharded:
        raise ValueError(
            f"{SIZES}dp_shard_size={values[f'{SIZES}dp_shard_size']}: must be {sharded}, "
            f"{ranks} ranks / tp_size {tensor} / cp_size {context}"
        )
    return {"model": "gpt", "tensor": tensor, "context": context}


def deepspeed_of(values, written):
    """Return {field: value} of deepspeed_config."""
    parts = Parts()
    parts.add(stage_of, values)
    parts.add(clip_of, values)
    parts.add(accumulation_of, values, written)
    return parts.result()


def stage_of(values):
    parts = [f"{ZERO}offload_{part}" for part in ("param", "optimizer")]
    devices = {f"{part}_device": values[f"{part}_device"] for part in parts}
    paths = {f"{part}_nvme_path": values[f"{part}_nvme_path"] for part in parts}
    stage = f"{ZERO}zero_stage"
    strategy = zero_strategy(stage, values[stage], devices)
    return {"strategy": strategy} | nvme_path_of(strategy, paths)


def clip_of(values):
    clip = number(f"{ZERO}gradient_clipping", values[f"{ZERO}gradient_clipping"])
    if clip == 0:
        raise ValueError(
            f"{ZERO}gradient_clipping=0: Accelerate leaves a 0 out, and DeepSpeed then clips to "
            "1.0; write 1.0"
        )
    return {"clip": clip}


def accumulation_of(values, written):
    name = f"{ZERO}gradient_accumulation_steps"
    return {"accumulation": whole(name, values[name])} if name in written else {}


def from_experiment(e, ranks):
    """Return the YAML's mapping, with every field that decides the result."""
    if e.strategy == "single" and ranks > 1:
        refuse("strategy", e.strategy, f"{NAME} on {ranks} ranks", "'ddp_bucketed' or 'fsdp'")
    precision = {there: name for name, there in PRECISIONS.items()}[e.precision]
    config = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": precision}
    config["num_processes"] = ranks
    if e.strategy in FSDP_STRATEGIES:
        return config | {"distributed_type": "FSDP"} | fsdp_config(e, ranks)
    for name in AXES:
        if getattr(e, name) > 1:
            refuse(name, getattr(e, name), f"{NAME} with {e.strategy}", "strategy='fsdp'")
    if e.strategy in STAGES:
        return config | {"distributed_type": "DEEPSPEED", "deepspeed_config": zero_config(e)}
    kind = "NO" if e.strategy == "single" else "MULTI_GPU"
    return config | {"distributed_type": kind}


def on_nodes(config, nodes):
    """Return a configuration of `nodes` machines, each of which starts its own processes.

    The launch command has what differs: --machine_rank, --main_process_ip, --main_process_port.
    """
    found = config | {"num_machines": nodes}
    if "deepspeed_config" in config:  # other launchers reach the machines by SSH
        section = {"deepspeed_multinode_launcher": "standard"}
        found["deepspeed_config"] = config["deepspeed_config"] | section
    return found


def fsdp_config(e, ranks):
    """Return the sections of FSDP; it can run every unit again in backward, or none."""
    if e.recompute not in ("none", "every"):
        refuse("recompute", e.recompute, f"{NAME} with FSDP", "'none' or 'every'")
    section = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": e.strategy != "fsdp_grad_op",
        "fsdp_offload_params": e.strategy == "fsdp_offload",
        "fsdp_activation_checkpointing": e.recompute == "every",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    }
    sizes = {there: getattr(e, name) for name, there in AXES.items() if getattr(e, name) > 1}
    if not sizes:
        return {"fsdp_config": section}
    sharded = ranks // e.tensor // e.context
    sizes = {"parallelism_config_dp_shard_size": sharded} | sizes
    return {"fsdp_config": section, "parallelism_config": sizes}


def zero_config(e):
    """Return the section of DeepSpeed, which always clips."""
    if e.clip == 0:
        refuse("clip", e.clip, f"{NAME} with DeepSpeed", "a clip above 0, as a 0 becomes 1.0")
    return {
        "zero_stage": STAGES[e.strategy],
        "gradient_accumulation_steps": e.accumulation,
        "gradient_clipping": e.clip,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
    }


def text(config):
    """Return the YAML."""
    return yaml.safe_dump(config, sort_keys=False)

"""torchtitan's files as {section: {field: value}}; see labkit.run.torchtitan_fields.

Python, since 0.3    a function that returns Trainer.Config(...): its literal values are read from
                     the syntax tree; nothing is run
TOML, up to 0.2      sections and fields get the names of 0.3, and refusals those of 0.2; source:
                     config/job_config.py of 0.2
"""

import ast
import tomllib

from labkit.run.framework_values import Renamed, chosen
from labkit.run.torchtitan_fields import CALLS, CLASSES

USUAL = ("training", "parallelism", "optimizer", "lr_scheduler")
SECTIONS = CALLS | {"compile": "CompileConfig", "comm": "CommConfig"}
GROUPS = "OptimizersContainer.Config"
# Of activation_checkpoint in 0.2, beside mode and its option: for other modes, or of no result.
OF_POLICY = ("memory_budget", "visualize_memory_budget_pareto", "preserve_rng_state", "early_stop")
OF_POLICY += ("determinism_check", "per_op_sac_force_recompute_mm_shapes_by_fqns", "debug")
RENAMED = {"job": "dump_folder", "model": "model_spec", "profiling": "profiler"}
RENAMED |= {"validation": "validator"}
UNUSED = ("float8", "mx", "quantize", "memory_estimation")  # without a converter, or of no run
MOVED = {
    ("training", "seed"): ("debug", "seed"),
    ("training", "deterministic"): ("debug", "deterministic"),
    ("training", "compile"): ("compile", "enable"),
    ("training", "dataset"): ("dataloader", "dataset"),
    ("training", "dataset_path"): ("dataloader", "dataset_path"),
    ("parallelism", "enable_async_tensor_parallel"): ("compile", "enable_async_tensor_parallel"),
    ("lr_scheduler", "lr_min"): ("lr_scheduler", "min_lr_factor"),
    ("optimizer", "implementation"): ("optimizer", "fused"),
}
# Names of 0.3 that 0.2 does not have, and advice for Python: in refusals of TOML.
OLD_NAMES = {new: old for old, new in RENAMED.items()}
OLD_NAMES |= {
    "dataloader.dataset": "training.dataset",
    "dataloader.dataset_path": "training.dataset_path",
    "compile.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "optimizer.fused": "optimizer.implementation",
    "optimizer.betas": "optimizer.[beta1, beta2]",
    "betas=(0.9, 0.999)": "beta2 = 0.999",
}


def from_toml(text):
    """Return {section: {field: value}} of a TOML file of torchtitan 0.2, with the names of 0.3.

    Raises ValueError, also for converters of the model and for a policy that this lab lacks.
    """
    try:
        config = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"is not TOML: {error}") from None
    sections = {name: found for name, found in config.items() if isinstance(found, dict)}
    outside = [name for name in config if name not in sections]
    if outside:
        raise ValueError(f"has {outside[0]} in no section: write it into one, such as [training]")
    if not set(sections) & set(USUAL):
        raise ValueError("is TOML without a section of torchtitan, such as [training]")
    if sections.get("model", {}).get("converters"):
        raise ValueError("has model.converters: this lab has no float8 and no other converter")
    found = {"optimizer": {"name": "AdamW"}}
    found["activation_checkpoint"] = policy_of(sections.pop("activation_checkpoint", {}))
    names = dict(OLD_NAMES)
    for section, values in sections.items():
        if section not in UNUSED:
            for name, value in values.items():
                usual = RENAMED.get(section, section), name
                place, field = MOVED.get((section, name), usual)
                found.setdefault(place, {})[field] = value
                names[f"{place}.{field}"] = f"{section}.{name}"
    rates = found["optimizer"]
    if "beta1" in rates or "beta2" in rates:
        rates["betas"] = [rates.pop("beta1", 0.9), rates.pop("beta2", 0.95)]
    return Renamed(found, names)


def policy_of(section):
    """Return {"mode": value} of the section activation_checkpoint of torchtitan 0.2.

    Unknown fields stay, and are refused with the others.
    """
    mode = section.get("mode", "selective")
    option = section.get("selective_ac_option", "2")
    if mode == "selective" and option != "op":
        raise ValueError(
            f"has activation_checkpoint.selective_ac_option={option!r}, which is 2 where it is not "
            'written: this lab has mode = "none" or "full", or the option "op"'
        )
    known = ("mode", "selective_ac_option", *OF_POLICY)
    unknown = {name: value for name, value in section.items() if name not in known}
    return unknown | {"mode": mode}


def parse(text):
    """Return {section: {field: value}} of a Python file that has one Trainer.Config(...).

    Nothing is run: values must be literals, except in sections of the program. Raises ValueError.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"is not Python: {error.msg}, line {error.lineno}") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [node for node in calls if ast.unparse(node.func) == "Trainer.Config"]
    if len(found) != 1:
        raise ValueError(f"has {len(found)} calls of Trainer.Config: keep one in the file")
    for node in ast.walk(tree):
        if changes_later(node):
            raise ValueError(f"has {ast.unparse(node)}: write it into Trainer.Config(...)")
    return {name: section_of(name, node) for name, node in keywords(found[0]).items()}


def changes_later(node):
    """Return whether a statement or call may change a configuration that was made before."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).rpartition(".")[2] in ("setattr", "replace")
    if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = [part for target in targets for part in ast.walk(target)]
    return any(isinstance(part, ast.Attribute) for part in parts)


def keywords(call):
    """Return {name: syntax tree of its value} of a call."""
    if call.args or any(one.arg is None for one in call.keywords):
        raise ValueError(f"{ast.unparse(call)}: must have names and values only")
    return {one.arg: one.value for one in call.keywords}


def section_of(name, node):
    """Return a section's {field: value}; of one that belongs to the program, its source."""
    if name == "activation_checkpoint":
        policy = ast.unparse(node).removesuffix(".Config()")
        known = {str(policy): mode for mode, policy in CLASSES.items()}
        return {"mode": chosen("activation_checkpoint", policy, known)}
    if name not in SECTIONS:  # of the program
        return ast.unparse(node)
    call = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    if name == "optimizer" and is_named(call, GROUPS):
        return group_of(node)
    if not is_named(call, SECTIONS[name]):
        raise ValueError(
            f"{name}={ast.unparse(node)}: must be {SECTIONS[name]}(...) with names and values"
        )
    found = {field: literal(f"{name}.{field}", value) for field, value in keywords(node).items()}
    return {"name": "AdamW"} | found if name == "optimizer" else found


def is_named(call, name):
    """Return whether a call is of this name, also behind a module's."""
    return f".{call}".endswith(f".{name}")


def group_of(node):
    """Return the section `optimizer` of an OptimizersContainer with one group of parameters."""
    groups = keywords(node).get("param_groups")
    if groups is None:
        raise ValueError(
            f"optimizer={ast.unparse(node)}: has no param_groups; write default_adamw(lr=...)"
        )
    if not isinstance(groups, ast.List) or len(groups.elts) != 1:
        raise ValueError("optimizer.param_groups: this lab has one group of parameters")
    group = groups.elts[0]
    found = keywords(group) if isinstance(group, ast.Call) else {}
    if "optimizer_name" not in found:
        raise ValueError(
            f"optimizer.param_groups=[{ast.unparse(group)}]: must be a ParamGroupConfig(...) with "
            "optimizer_name"
        )
    options = {}
    if "optimizer_kwargs" in found:
        options = literal("optimizer.optimizer_kwargs", found["optimizer_kwargs"])
    if not isinstance(options, dict):
        raise ValueError(
            f"optimizer.optimizer_kwargs={options!r}: must be a dict, such as {{'lr': 1e-3}}"
        )
    # a group has torch.optim's defaults, not those of default_adamw
    options = {"betas": [0.9, 0.999], "weight_decay": 0.01, "lr": 1e-3} | options
    return {"name": literal("optimizer.optimizer_name", found["optimizer_name"])} | options


def literal(name, node):
    try:
        value = ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{name}={ast.unparse(node)}: must be a literal value") from None
    return list(value) if isinstance(value, tuple) else value

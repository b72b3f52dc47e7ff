"""A plan for a model: patterns of module names, and a style for the modules that match.

"blocks.*.attention.query"    each part between dots is matched against names of children, with
                              * ? [] as in a shell: * is one level. "": the module itself
"""

import re
from difflib import get_close_matches
from fnmatch import fnmatch

import torch

from labkit import comm
from labkit.fsdp.sharding_strategy import compute_device
from labkit.replicas import broadcast_tensors
from labkit.tensor_parallel.tp_state_dict import cuts_of


class Style:
    """A rule of a plan. use_local_output is PyTorch's argument; every tensor here is local."""

    def check(self, name, module, axis):
        """Raise ValueError if the ranks do not divide the module's sizes."""

    def layer(self, module):
        """Return the class of the sharded layer that the module becomes, or None."""

    def cuts_heads(self):
        """Return whether the module around the layer sees only a part of its heads."""
        return False

    def leaves_shards(self, module):
        """Return whether each rank draws its own random numbers after the module."""
        return False

    def apply(self, module, axis):
        """Shard the module in place over the ranks of an Axis."""
        raise NotImplementedError


def matches(module, plan):
    """Return [(name, module, value)] of all modules that match patterns of plan.

    plan: {pattern: value}. Raises ValueError for a pattern that matches none, with similar names.
    """
    return [
        (name, part, value)
        for pattern, value in plan.items()
        for name, part in met(module, pattern) or missing(module, pattern)
    ]


def met(module, pattern):
    modules = [("", module)]
    for token in pattern.split(".") if pattern else []:
        modules = [
            (f"{name}.{child}".lstrip("."), part)
            for name, parent in modules
            for child, part in parent.named_children()
            if fnmatch(child, token)
        ]
    return modules


def missing(module, pattern):
    names = [name for name, _ in module.named_modules() if name]
    if "*" in pattern:
        names = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names))
    close = get_close_matches(pattern, names, 3, 0.5) or names[:3]
    raise ValueError(
        f"pattern {pattern!r} of the plan matches no module of this {type(module).__name__}; "
        f"similar names are {', '.join(map(repr, close))}"
    )


def check_run(module, chosen):
    """Return the modules whose forward ends the sharded part: the module, or those in a list.

    Raises ValueError for a layer directly in a list that leaves shards, because no forward ends
    them. chosen: the result of matches().
    """
    run = []
    candidates = [module]
    for candidate in candidates:
        if runs(candidate):
            run.append(candidate)
        else:
            candidates += candidate.children()
    for name, part, style in chosen:
        if part in run and part is not module and style.leaves_shards(part):
            kind = type(module).__name__
            raise ValueError(
                f"{name} leaves shards that no forward ends, because this {kind} has no forward: "
                "shard the module that runs its layers"
            )
    return run


def runs(module):
    """Return whether a module has a forward; lists and dicts of modules have none."""
    return getattr(module.forward, "__func__", None) is not torch.nn.Module.forward


def check_heads(module, chosen, axis):
    """Raise ValueError if heads are not divisible by the ranks. chosen: from matches()."""
    cut = [(name, part) for name, part, style in chosen if style.cuts_heads() and style.layer(part)]
    for parent in sorted({name.rpartition(".")[0] for name, _ in cut}):
        for word, heads in vars(module.get_submodule(parent)).items():
            if word.endswith("heads") and isinstance(heads, int) and heads % axis.size:
                raise ValueError(f"{parent}: {word}={heads} must be divisible by {axis.size} ranks")
    for name, part in cut:
        length = vars(module.get_submodule(name.rpartition(".")[0])).get("head_dim")
        features = getattr(part, "out_features", 0)
        if isinstance(length, int) and features % length == 0 and features // length % axis.size:
            raise ValueError(
                f"{name}: {features // length} heads of {length} must be divisible by "
                f"{axis.size} ranks"
            )


def check_ties(module, chosen):
    """Raise ValueError unless each parameter is sharded once, and one way. chosen: matches()."""
    dims_of = {}  # parameter -> {which module and name: dim}
    planned = {}
    for name, part, style in chosen:
        if style.layer(part):
            if part in planned:
                raise ValueError(f"two patterns of the plan match {name!r}: remove one of them")
            planned[part] = style.layer(part)
    for name, part in module.named_modules():
        layer = planned.get(part, part)
        for word, parameter in part._parameters.items():
            if parameter is not None:
                where = f"{name}.{word}".lstrip(".")
                dims_of.setdefault(parameter, {})[where] = getattr(layer, "cuts", {}).get(word)
    for dims in dims_of.values():
        if len(set(dims.values())) > 1:
            how = {dim: "full" if dim is None else f"along dim {dim}" for dim in dims.values()}
            uses = ", ".join(f"{where!r} ({how[dim]})" for where, dim in dims.items())
            raise ValueError(f"a tied parameter cannot be sharded in two ways: {uses}")


def same_on_all(module, axis):
    """Broadcast replicated values and the random state from the group's rank 0."""
    cuts = cuts_of(module)
    device = compute_device(module, axis.group)
    tensors = [p.data for p in module.parameters() if p not in cuts] + list(module.buffers())
    states = [torch.get_rng_state().to(device)]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).to(device))
    values = [t for t in tensors if device.type == "meta" or not t.is_meta]
    broadcast_tensors([*values, *states], 0, axis.group)
    if device.type != "meta":
        torch.set_rng_state(states[0].cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1].cpu(), device)


class InitialValues:
    """A forward pre-hook that checks once how a module from the meta device was initialised.

    Replicated parameters must be the same on all ranks, and slices must differ: an initialiser that
    sees slices draws the same numbers on every rank. Collective. Raises RuntimeError on all ranks.
    """

    def __init__(self, axis):
        self.axis = axis
        self.checked = axis.size == 1

    def __call__(self, module, inputs):
        parameters = dict(module.named_parameters())
        if self.checked or any(p.is_meta for p in parameters.values()):
            return
        sums = torch.stack([fingerprint(p) for p in parameters.values()])
        every = sums.new_empty(self.axis.size, *sums.shape)
        comm.all_gather(every, sums, group=self.axis.group)
        same = (every == every[0]).all(-1).all(0).tolist()
        cuts = cuts_of(module)
        for (name, p), (_, low, high), equal in zip(parameters.items(), sums, same, strict=True):
            if equal and p in cuts and low != high:
                raise RuntimeError(
                    f"{name!r} was initialised with the same values on every rank: call "
                    "module.apply(initialiser), reset_parameters() of its layer, or initialise "
                    "inside `with whole_parameters(module)`"
                )
            if not equal and p not in cuts:
                raise RuntimeError(
                    f"{name!r} was initialised with different values on each rank: set the same "
                    "seed on all ranks"
                )
        self.checked = True


def fingerprint(parameter):
    """Return [3]: the sum of the values, the lowest and the highest, in fp64."""
    values = parameter.detach().double()
    if not values.numel():
        return values.new_zeros(3)
    return torch.stack([values.sum(), *values.aminmax()])

"""A plan for a model: patterns of module names, and what is to be done with the modules they meet.

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
    """What a plan says of a module. use_local_output is PyTorch's: every tensor here is local."""

    def check(self, name, module, axis):
        """Raise ValueError where the ranks cannot share the module."""

    def layer(self, module):
        """The class of a split layer that the module becomes, or None."""

    def cuts_heads(self):
        """Whether a module around the layer sees some of its heads, not those of all ranks."""
        return False

    def leaves_shards(self, module):
        """Whether each rank draws its own random numbers behind the module."""
        return False

    def apply(self, module, axis):
        """Change the module, in place, for the ranks of an Axis."""
        raise NotImplementedError


def matches(module, plan):
    """[(name, module, value)] of all modules that patterns in plan (dict pattern -> value) meet.

    Raises ValueError for a pattern that meets none, with the names nearest to it.
    """
    return [
        (name, part, value)
        for pattern, value in plan.items()
        for name, part in met(module, pattern) or missing(module, pattern)
    ]


def met(module, pattern):
    found = [("", module)]
    for token in pattern.split(".") if pattern else []:
        found = [
            (f"{name}.{child}".lstrip("."), part)
            for name, parent in found
            for child, part in parent.named_children()
            if fnmatch(child, token)
        ]
    return found


def missing(module, pattern):
    names = [name for name, _ in module.named_modules() if name]
    if "*" in pattern:
        names = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names))
    close = get_close_matches(pattern, names, 3, 0.5) or names[:3]
    raise ValueError(
        f"{pattern!r} in the plan meets no module of this {type(module).__name__}; "
        f"near it are {', '.join(map(repr, close))}"
    )


def check_run(module, chosen):
    """The modules whose end is the end of shards: this one, or those in a list, which never runs.

    Raises ValueError for a layer right in a list that leaves shards: what runs, ends before them.
    chosen: of matches().
    """
    run, lists = [], [module]
    for one in lists:
        if runs(one):
            run.append(one)
        else:
            lists += one.children()
    for name, part, style in chosen:
        if part in run and part is not module and style.leaves_shards(part):
            kind = type(module).__name__
            raise ValueError(
                f"{name} leaves shards, and nothing tells where they end: this {kind} is never "
                "run, so split the module that runs its layers"
            )
    return run


def runs(module):
    """Whether it has a forward; lists and dicts of modules have none."""
    return getattr(module.forward, "__func__", None) is not torch.nn.Module.forward


def check_heads(module, chosen, axis):
    """A module whose linear layers are cut has whole heads on each rank. chosen: of matches()."""
    cut = [(name, part) for name, part, style in chosen if style.cuts_heads() and style.layer(part)]
    for parent in sorted({name.rpartition(".")[0] for name, _ in cut}):
        for word, heads in vars(module.get_submodule(parent)).items():
            if word.endswith("heads") and isinstance(heads, int) and heads % axis.size:
                raise ValueError(f"{parent}: {axis.size} ranks cannot share {word}={heads}")
    for name, part in cut:
        length = vars(module.get_submodule(name.rpartition(".")[0])).get("head_dim")
        features = getattr(part, "out_features", 0)
        if isinstance(length, int) and features % length == 0 and features // length % axis.size:
            raise ValueError(
                f"{name}: {axis.size} ranks cannot share {features // length} heads of {length}"
            )


def check_ties(module, chosen):
    """A layer is cut once, and whoever holds its parameters knows how. chosen: of matches()."""
    ways = {}  # parameter -> {which module and name: dim}
    planned = {}
    for name, part, style in chosen:
        if style.layer(part):
            if part in planned:
                raise ValueError(f"two patterns of the plan split {name!r}: leave out one of them")
            planned[part] = style.layer(part)
    for name, part in module.named_modules():
        layer = planned.get(part, part)
        for word, parameter in part._parameters.items():
            if parameter is not None:
                where = f"{name}.{word}".lstrip(".")
                ways.setdefault(parameter, {})[where] = getattr(layer, "cuts", {}).get(word)
    for dims in ways.values():
        if len(set(dims.values())) > 1:
            how = {dim: "whole" if dim is None else f"along dim {dim}" for dim in dims.values()}
            told = ", ".join(f"{where!r} ({how[dim]})" for where, dim in dims.items())
            raise ValueError(f"a tied parameter cannot be cut in two ways: {told}")


def same_on_all(module, axis):
    """Values that are not split yet, and the random state, become those of the group's rank 0."""
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
    """A forward pre-hook that checks, once, how a module from the meta device was initialised.

    Parameters that are not split must be the same on all ranks, and slices must not: an initialiser
    that is given slices draws the same numbers on every rank. Collective. Raises RuntimeError, on
    all ranks.
    """

    def __init__(self, axis):
        self.axis, self.checked = axis, axis.size == 1

    def __call__(self, module, inputs):
        parameters = dict(module.named_parameters())
        if self.checked or any(p.is_meta for p in parameters.values()):
            return
        sums = torch.stack([fingerprint(p) for p in parameters.values()])
        every = sums.new_empty(self.axis.size, *sums.shape)
        comm.all_gather(every, sums, group=self.axis.group)
        same = (every == every[0]).all(-1).all(0).tolist()
        cuts = cuts_of(module)
        for (name, p), (_, low, high), alike in zip(parameters.items(), sums, same, strict=True):
            if alike and p in cuts and low != high:
                raise RuntimeError(
                    f"{name!r} was initialised with the same values on every rank: call "
                    "module.apply(initialiser), reset_parameters() of its layer, or initialise "
                    "inside `with whole_parameters(module)`"
                )
            if not alike and p not in cuts:
                raise RuntimeError(
                    f"{name!r} was initialised with other values on each rank: set one seed on all "
                    "ranks"
                )
        self.checked = True


def fingerprint(parameter):
    """[3]: the sum of its values, the lowest and the highest, in fp64."""
    values = parameter.detach().double()
    if not values.numel():
        return values.new_zeros(3)
    return torch.stack([values.sum(), *values.aminmax()])

"""The shards that a rank saves: a name, and which elements of the full tensor it holds.

    DDP    every rank   w1 [............]        replicated: it needs writing once
    FSDP   rank 0       w1 [.....       ]        elements 0 to 5 of 12, a range
           rank 1       w1 [     .......]        elements 5 to 12
    ZeRO   rank 1       w1/exp_avg [...  ]       a piece of a state, named after its parameter

Readers request names and ranges, independent of how the tensors were sharded. So a checkpoint
of one strategy on n ranks can be loaded by another strategy on m ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from labkit.checkpoint import state_json
from labkit.checkpoint.dtensor_ranges import Piece, local, span
from labkit.checkpoint.generic_state import TreeHolder
from labkit.checkpoint.shard_ranges import Place
from labkit.checkpoint.sharded_parts import of_all_ranks, places_in, unwrapped
from labkit.ddp.wrapper import is_extra, without_wrappers
from labkit.zero import ZeRO1
from labkit.zero.zero_state_dict import options_of


def holders(state):
    """Return {name: an object that takes and gives its state}. state: {name: has state_dict()}."""
    plain = {key: unwrapped(thing) for key, thing in state.items()}
    places, everyone, of_modules = {}, list, {}
    for key, thing in plain.items():
        if isinstance(thing, nn.Module):
            of_modules[key] = ModuleHolder(thing)
            cut = of_modules[key].cut
            places |= places_of(thing, key, cut)
            if None in cut.values():  # other ranks have different names
                everyone = partial(of_all_ranks, device=next(thing.parameters()).device)
    return {
        key: of_modules.get(key) or holder(thing, places, everyone) for key, thing in plain.items()
    }


def holder(thing, places, everyone=list):
    """Return the holder for one object that is not a module.

    places: {parameter: Place} of the modules in the state. everyone: see OptimizerHolder.
    """
    if isinstance(thing, OtherStates):
        return thing
    if isinstance(thing, ZeRO1) and thing.has_ranges():
        optimizer, groups, cut = thing.parts()
        wholes = named(groups, places)
        if split := [place.name for place in wholes.values() if place.columns]:
            raise ValueError(
                f"ZeRO shards the columns of {split[0]!r}, which cannot be saved: "
                "use FSDP or an optimizer that is not sharded"
            )
        own = {piece: part_of(wholes[p], *where) for p, (piece, *where) in cut.items()}
        return OptimizerHolder(optimizer, groups, wholes, own, thing.load_parts)
    # Optimizers with their own state_dict() (masters, anchors) use TreeHolder.
    if isinstance(thing, torch.optim.Optimizer) and (
        type(thing).state_dict is torch.optim.Optimizer.state_dict
    ):
        wholes = named(thing.param_groups, places)
        load = thing.load_state_dict
        return OptimizerHolder(thing, thing.param_groups, wholes, wholes, load, everyone)
    return TreeHolder(thing)


def named(groups, places):
    """Return {parameter: Place}; a parameter that no module has is named by its number."""
    everyone = [p for group in groups for p in group["params"]]
    return {p: places.get(p) or Place(f"parameter {i}", *span(p)) for i, p in enumerate(everyone)}


def places_of(module, key, cut):
    """Return {parameter: its Place}. key: prefix, as other modules may have the same names."""
    found = {}
    for own_name, p in module.named_parameters():
        name = without_wrappers(own_name)
        found[p] = Place(f"{key}.{name}", *(cut.get(name) or span(p)))
    return found


def part_of(place, start, stop):
    """Return elements start to stop of a Place without columns, counted within it."""
    first, end = place.start, place.stop
    return place._replace(start=min(first + start, end), stop=min(first + stop, end))


@dataclass
class ModuleHolder:
    """A module's state dict: parameters and buffers by name. left: names that are not loaded."""

    module: nn.Module
    left: frozenset = frozenset()

    def __post_init__(self):
        self.cut = places_in(self.module)
        named = self.module.named_buffers(remove_duplicate=False)
        self.buffers = {without_wrappers(name) for name, _ in named}

    def named(self):
        """Return {name in a checkpoint: (name in the state dict, value)}."""
        state = self.module.state_dict()
        return {without_wrappers(name): (name, value) for name, value in state.items()}

    def take(self):
        """Return ({name: Piece}, the text of values that are not tensors)."""
        pieces, rest, named = {}, {}, self.named()
        self.check_names(named)
        for name, (_, value) in named.items():
            if isinstance(value, torch.Tensor):
                pieces[name] = self.place(name, value).take(value)
            else:
                rest[name] = value
        return pieces, state_json.plain(rest, "extra state")

    def check_names(self, named):
        """Raise ValueError if a hook has renamed a sharded tensor, whose place is then unknown."""
        if not self.cut:
            return
        parameters = self.module.named_parameters(remove_duplicate=False)
        known = self.cut.keys() | self.buffers | {without_wrappers(name) for name, _ in parameters}
        for name in named:
            if name not in known and not is_extra(name):
                raise ValueError(
                    f"a state_dict hook renamed {name!r} of a sharded model: remove the hook, "
                    "as the checkpoint needs the names of the parameters"
                )

    def place(self, name, value):
        return Place(name, *(self.cut.get(name) or span(value)))

    def other_names(self, saved):
        """Return (missing names of tensors, unexpected names of tensors)."""
        named, there = self.named(), saved.shapes.keys() | saved.text.keys()
        tensors = [name for name, (_, value) in named.items() if isinstance(value, torch.Tensor)]
        extra = {name for name in named if is_extra(name)}
        known = self.cut.keys() | extra | set(tensors)
        missing = [name for name in tensors if name not in there and name not in self.left]
        return missing, [name for name in saved.shapes if name not in known]

    def problems(self, saved):
        missing, unexpected = self.other_names(saved)
        found = [f"it does not contain {name!r}" for name in missing]
        found += [f"the model does not contain {name!r}" for name in unexpected]
        for name, (_, value) in self.named().items():
            if name not in saved.shapes or is_extra(name) or not isinstance(value, torch.Tensor):
                continue
            shape = self.place(name, value).shape
            if tuple(saved.shapes[name]) != tuple(shape):
                there = saved.shapes[name]
                found.append(f"{name!r} has shape {there} in it, {list(shape)} in the model")
        for name in set(saved.foreign) - self.buffers:
            found.append(f"{name!r} is per-rank state: load it with the same number of ranks")
        return found

    def give(self, saved):
        named, text = self.named(), saved.text
        given = {named[name][0] if name in named else name: text[name] for name in text}
        for name, (own_name, value) in named.items():
            if is_extra(name) and name in saved.shapes:
                given[own_name] = saved.read(name).view(saved.shapes[name])
            elif isinstance(value, torch.Tensor) and name in saved.shapes:
                given[own_name] = self.place(name, value).read(saved, name, value)
        self.module.load_state_dict(given, strict=not self.left)


@dataclass
class OptimizerHolder:
    """An optimizer's states, named after its parameters.

    groups, wholes: the parameter groups of all ranks and their Places. own: the Places of the
    tensors that this rank updates. load: loads a state dict of the optimizer.
    everyone: adds the names of other ranks to a list of names.
    """

    optimizer: torch.optim.Optimizer
    groups: list
    wholes: dict
    own: dict
    load: Callable
    everyone: Callable = list

    def take(self):
        pieces, state = {}, self.optimizer.state_dict()["state"]
        kept = [value for one in state.values() for value in one.values()]
        if not all(isinstance(value, torch.Tensor) for value in kept):
            return TreeHolder(self.optimizer).take()
        for i, p in enumerate(self.numbered()):
            place = self.own[p]
            for key, value in state.get(i, {}).items():
                if value.shape == p.shape and (p.dim() or key != "step"):
                    piece = place.take(value)
                    if not piece.shape:  # the state of a 0-d parameter is saved as 1-d
                        piece = piece._replace(shape=(1,))
                else:
                    piece = Piece(local(value.detach()).reshape(-1), 0, tuple(value.shape))
                pieces[f"{place.name}/{key}"] = piece
        return pieces, state_json.plain(self.described(), "a parameter group")

    def numbered(self):
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def described(self):
        """Return the type, and each group's current options and the names of all its parameters."""
        groups = [
            {
                "options": {key: as_number(one) for key, one in options_of(group).items()},
                "params": self.everyone([self.wholes[p].name for p in whole["params"]]),
            }
            for group, whole in zip(self.optimizer.param_groups, self.groups, strict=True)
        ]
        return {"type": type(self.optimizer).__name__, "groups": groups}

    def problems(self, saved):
        if "groups" not in saved.text:
            return TreeHolder(self.optimizer).problems(saved)
        ours, theirs = self.described(), saved.text
        if theirs["type"] not in (ours["type"], None):  # other formats do not store the type
            return [f"it was saved from {theirs['type']}, not from {ours['type']}"]
        if differing := [name for name in saved.foreign if name in saved.shapes]:
            return [f"{differing[0]} is per-rank state: load it with the same number of ranks"]
        ours, theirs = ([set(g["params"]) for g in one["groups"]] for one in (ours, theirs))
        if ours != theirs:
            differ = set().union(*ours) ^ set().union(*theirs)
            names = ", ".join(sorted(differ)) or "the same names, in other groups"
            return [f"its parameters differ: {names}"]
        return []

    def give(self, saved):
        if "groups" not in saved.text:
            return TreeHolder(self.optimizer).give(saved)
        state = {}
        for name in saved.shapes:
            owner, key = name.rsplit("/", 1)
            state.setdefault(owner, []).append(key)
        numbers = {p: i for i, p in enumerate(self.numbered())}
        given = {
            i: {key: self.values(saved, p, key) for key in state[self.own[p].name]}
            for p, i in numbers.items()
            if self.own[p].name in state
        }
        groups = [
            {key: as_now(one, own.get(key)) for key, one in group["options"].items()}
            | {"params": [numbers[p] for p in own["params"]]}
            for group, own in zip(saved.text["groups"], self.optimizer.param_groups, strict=True)
        ]
        self.load({"state": given, "param_groups": groups})

    def values(self, saved, p, key):
        place = self.own[p]
        name, shape = f"{place.name}/{key}", tuple(saved.shapes[f"{place.name}/{key}"])
        if shape == (place.shape or (1,)):
            return place.read(saved, name, p)
        return saved.read(name).view(shape)


def as_number(option):
    """Convert an option of a parameter group (lr, betas), which may be a tensor, to numbers."""
    if isinstance(option, tuple | list):
        return type(option)(map(as_number, option))
    number = isinstance(option, torch.Tensor) and option.numel() == 1
    return option.item() if number else option


def as_now(option, own):
    """Convert a saved option to the optimizer's current type: a tensor if `own` is one."""
    if isinstance(own, tuple | list) and isinstance(option, tuple | list):
        return type(own)(map(as_now, option, own))
    return torch.full_like(own, option) if isinstance(own, torch.Tensor) else option


@dataclass
class OtherStates:
    """An optimizer's states from another format, read one by one while they are saved."""

    source: object

    def take(self):
        shapes = {name: tuple(shape) for name, shape in self.source.shapes.items()}
        pieces = {name: Piece(self.source.read(name), 0, shape) for name, shape in shapes.items()}
        return pieces, state_json.plain(self.source.text, "a parameter group")

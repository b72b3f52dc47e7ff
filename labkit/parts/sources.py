"""Where weights come from: three formats, one way to read any range of any tensor of them.

    gpt.safetensors     .shapes  .dtypes                   TensorFile
    gpt/.metadata       .read(name, start, stop)           DcpFolder
    runs/gpt/step-*     .text: what is no tensor           Saved, of a step that is whole

A format is told by what is there, names as they stand in it. Read: headers and indices; of our own
checkpoints everything once, to compare it with its SHA-256, which the other two do not have.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from labkit.parts import manifest
from labkit.parts.dcp_folder import DcpFolder
from labkit.parts.saved import Reader
from labkit.parts.staying import folder_of, latest_first, manifests_in, steps_in
from labkit.parts.store import Store
from labkit.parts.tensor_file import TensorFile
from labkit.parts.wrapper import without_wrappers

PREFIXES = ("", "model.", "module.", "model.module.")


@dataclass
class Source:
    """model: its tensors; optimizer: or None; about: what it is, and what is left out, in words."""

    model: Any
    optimizer: Any = None
    about: str = ""


class Renamed:
    """Some tensors and objects of a source, under other names. names: {new: old}."""

    foreign = ()

    def __init__(self, weights, names):
        self.weights, self.names = weights, names
        tensors = {new: old for new, old in names.items() if old in weights.shapes}
        self.shapes = {new: weights.shapes[old] for new, old in tensors.items()}
        self.dtypes = {new: weights.dtypes[old] for new, old in tensors.items()}

    @property
    def text(self):
        objects = {new: old for new, old in self.names.items() if old in self.weights.objects}
        return {new: self.weights.object(old) for new, old in objects.items()}

    def read(self, name, start=0, stop=None):
        return self.weights.read(self.names[name], start, stop)


class States(Renamed):
    """The states of an optimizer in a DCP folder, under the names that our checkpoints give them.

    shapes: {parameter: of the model beside it}. ValueError where they are not by parameter's name.
    """

    def __init__(self, folder, shapes):
        names, groups = {}, {}
        for name, path in folder.paths.items():
            match path:
                case "optimizer", "state", str(owner), str(key) if name in folder.shapes:
                    names[f"model.{owner}/{key}"] = name
                case "optimizer", "param_groups", int(number), str(option):
                    groups.setdefault(number, {})[option] = name
                case "optimizer", *_:
                    raise ValueError(f"{name!r} is no tensor of a parameter's name, and no option")
        super().__init__(folder, names)
        for name in names:
            owner, _, key = name.removeprefix("model.").rpartition("/")
            if key != "step" and shapes.get(owner) == self.shapes[name] == ():
                self.shapes[name] = (1,)  # a number's state: no number
        self.groups = [self.described(group) for _, group in sorted(groups.items())]

    @property
    def text(self):
        return {"type": None, "groups": self.groups}  # such a folder does not tell a type

    def described(self, group):
        options = {option: self.value(name) for option, name in group.items()}
        names, _ = options.pop("params", None), options.pop("param_names", None)
        if type(names) is not list or not all(type(name) is str for name in names):
            raise ValueError("its optimizer's states do not go by parameters' names")
        return {"options": options, "params": [f"model.{name}" for name in names]}

    def value(self, name):
        if name in self.weights.objects:
            return self.weights.object(name)
        return self.weights.read(name).view(self.weights.shapes[name])


@contextmanager
def opened_weights(url):
    """A TensorFile or a DcpFolder. ValueError where it is neither."""
    parent, _, name = str(url).rpartition("/")
    if name.endswith(".safetensors"):
        with Store(parent or ".").open(name) as file:
            yield TensorFile(file)
        return
    store = Store(url)
    if steps_in(store):
        raise ValueError("it is a directory of checkpoints: load it with labkit.checkpoint")
    if not store.has(".metadata"):
        raise ValueError(
            "its name does not end in .safetensors, and it is no folder of "
            "torch.distributed.checkpoint, which has a .metadata"
        )
    yield DcpFolder(store.open)


@contextmanager
def opened(url, step=None):
    """A Source, of any of the three formats. ValueError where there is none, or not that step."""
    steps = [] if str(url).endswith(".safetensors") else steps_in(Store(url))
    if not steps:
        if step is not None:
            raise ValueError("it is no directory of checkpoints, and has no steps")
        with opened_weights(url) as weights:
            model, about = Renamed(weights, model_in(weights)), ""
            try:
                optimizer = optimizer_in(weights)
            except ValueError as error:
                optimizer, about = None, f"without the optimizer: {error}"
            yield Source(model, optimizer, about)
        return
    step, found = whole_step(Store(url), steps, step)
    with Reader(Store(url), folder_of(step), found, rank=0, world_size=None) as reader:
        model, optimizer = reader.of("model"), reader.of("optimizer")
        if not model.there:
            raise ValueError(f"step {step} has no 'model'; it has {', '.join(found['plain'])}")
        described = optimizer.there and "groups" in optimizer.text
        words = [f"step {step}"]
        if model.foreign:
            words.append(f"rank 0's, for ranks differ: {', '.join(model.foreign)}")
        yield Source(model, optimizer if described else None, "; ".join(words))


def whole_step(store, steps, step):
    """(step, manifest): that one, or the latest that is whole."""
    if step is not None and step not in steps:
        raise ValueError(f"it has no step {step}; it has {', '.join(map(str, steps))}")
    reasons = []
    for candidate in latest_first(manifests_in(store)) if step is None else [step]:
        found, why = manifest.checked(store, folder_of(candidate))
        if found:
            return candidate, found
        reasons.append(f"step {candidate}: {why}")
    raise ValueError("; ".join(reasons))


def model_in(weights):
    """{name: its name in the source}: of {"model": ...}, if such a dict was saved; or of all."""
    paths = getattr(weights, "paths", {})
    below = {name: path for name, path in paths.items() if len(path) > 1 and path[0] == "model"}
    names = {".".join(map(str, path[1:])): name for name, path in below.items()}
    return names or {name: name for name in weights.shapes}


def optimizer_in(weights):
    """States, if a dict {"model": ..., "optimizer": ...} was saved, or None. ValueError: other."""
    if not any(path and path[0] == "optimizer" for path in getattr(weights, "paths", {}).values()):
        return None
    return States(weights, Renamed(weights, model_in(weights)).shapes)


def fitting(weights, module):
    """The same, under the names of a module's own state, as far as they are there."""
    own = {without_wrappers(name) for name in module.state_dict()}
    theirs = {without_wrappers(name): name for name in (*weights.shapes, *weights.objects)}
    prefix = max(PREFIXES, key=lambda prefix: sum(prefix + name in theirs for name in own))
    names = {
        name.removeprefix(prefix): old for name, old in theirs.items() if name.startswith(prefix)
    }
    names = {new: old for new, old in names.items() if new in own or old in weights.shapes}
    tied = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        tied.setdefault(p, []).append(without_wrappers(name))
    for twins in tied.values():
        if there := [names[name] for name in twins if name in names]:
            names |= {name: there[0] for name in twins if name not in names}
    return Renamed(weights, names)

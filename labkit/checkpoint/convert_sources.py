"""Sources of weights: four formats, one interface to read any range of any tensor.

    gpt.safetensors     .shapes  .dtypes                   TensorFile
    gpt/model.safetensors.index.json                       TensorFiles
    gpt/.metadata       .read(name, start, stop)           DcpFolder
    runs/gpt/step-*     .text: values without tensors      Saved, of a valid step

The format is detected from the files that are present; names are returned unchanged. Read:
headers and indices; of labkit's checkpoints everything once, to verify their hashes, which the
other formats do not have.
"""

from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from labkit.checkpoint import metadata
from labkit.checkpoint.dcp_folder import DcpFolder
from labkit.checkpoint.reader import Reader
from labkit.checkpoint.retention import folder_of, latest_first, manifests_in, steps_in
from labkit.checkpoint.storage import Store
from labkit.checkpoint.tensor_file import INDEX, TensorFile, TensorFiles
from labkit.ddp.wrapper import is_extra, without_wrappers

OPTIMIZERS = ("optimizer", "optim")  # keys of an optimizer next to a model
PREFIXES = ("", "model.", "module.", "model.module.")


@dataclass
class Source:
    """A checkpoint to convert: tensors of the model, optimizer or None, and a description.

    beside: names of other contents, such as a schedule, a sampler and random states, which are not
    converted.
    """

    model: Any
    optimizer: Any = None
    about: str = ""
    beside: tuple = ()


class Renamed:
    """Some tensors and objects of a source under other names. names: {new: old}."""

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

    def without(self, names):
        """Return the same source without these names."""
        rest = {new: old for new, old in self.names.items() if new not in names}
        return Renamed(self.weights, rest)

    def read(self, name, start=0, stop=None):
        return self.weights.read(self.names[name], start, stop)


class States(Renamed):
    """The states of an optimizer in a DCP folder, under the names of labkit's checkpoints.

        nested   state / w1 / exp_avg     param_groups / 0 / lr     a group's "params" are names
        flat     state.w1.exp_avg         param_groups.w1.lr        flatten_optimizer_state_dict

    root: the keys that lead to it. shapes: {parameter: shape}, of the model next to it. Raises
    ValueError if they are not named after parameters.
    """

    def __init__(self, folder, root, shapes):
        names, groups, flat = {}, {}, {}
        for name in folder.paths:
            path = below(folder.paths[name], root)
            if len(path) == 1:
                kind, _, rest = str(path[0]).partition(".")
                path = (f"{kind}.", *rest.rpartition(".")[::2])
            match path:
                case ():
                    pass
                case "state" | "state.", str(owner), str(key) if name in folder.shapes:
                    names[f"model.{owner}/{key}"] = name
                case "param_groups", int(number), str(option):
                    groups.setdefault(number, {})[option] = name
                case "param_groups.", str(owner), str(option):
                    flat.setdefault(owner, {})[option] = name
                case _:
                    raise ValueError(
                        f"{name!r} is neither an optimizer state of a parameter nor an option"
                    )
        super().__init__(folder, names)
        for name in names:
            owner, _, key = name.removeprefix("model.").rpartition("/")
            if key != "step" and shapes.get(owner) == self.shapes[name] == ():
                self.shapes[name] = (1,)  # the state of a 0-d parameter is saved as 1-d
        self.groups = [self.described(group) for _, group in sorted(groups.items())]
        for owner, options in flat.items():
            self.join_group(owner, {option: self.value(name) for option, name in options.items()})

    def join_group(self, owner, options):
        """Add a parameter to the group with the same options, or to a new one."""
        same = [group for group in self.groups if group["options"] == options]
        if not same:
            same = [{"options": options, "params": []}]
            self.groups += same
        same[0]["params"].append(f"model.{owner}")

    @property
    def text(self):
        return {"type": None, "groups": self.groups}  # DCP does not store the type

    def described(self, group):
        options = {option: self.value(name) for option, name in group.items()}
        names, _ = options.pop("params", None), options.pop("param_names", None)
        if type(names) is not list or not all(type(name) is str for name in names):
            raise ValueError("its optimizer states are not named after parameters")
        return {"options": options, "params": [f"model.{name}" for name in names]}

    def value(self, name):
        if name in self.weights.objects:
            return self.weights.object(name)
        value = self.weights.read(name).view(self.weights.shapes[name])
        return value.item() if value.numel() == 1 else value


@contextmanager
def opened_weights(url):
    """Open a TensorFile, TensorFiles or a DcpFolder. ValueError if the URL is none of them."""
    parent, _, name = str(url).rpartition("/")
    if name.endswith(".safetensors"):
        with Store(parent or ".").open(name) as file:
            yield TensorFile(file)
        return
    store = Store(url)
    if steps_in(store):
        raise ValueError("it is a directory of labkit checkpoints: load it with labkit.checkpoint")
    if store.has(".metadata"):
        yield DcpFolder(store.open)
    elif store.has(INDEX):
        with closing(TensorFiles(store.open)) as files:
            yield files
    else:
        raise ValueError(
            "unknown format: expected a .safetensors file, a folder of "
            f"torch.distributed.checkpoint with .metadata, or a folder with {INDEX}"
        )


@contextmanager
def opened(url, step=None):
    """Open a Source of any format. ValueError if there is none, or not that step."""
    steps = [] if str(url).endswith(".safetensors") else steps_in(Store(url))
    if not steps:
        if step is not None:
            raise ValueError(f"step={step} needs a directory of labkit checkpoints: remove step")
        with opened_weights(url) as weights:
            model, about = Renamed(weights, model_in(weights)), ""
            try:
                optimizer = optimizer_in(weights)
            except ValueError as error:
                optimizer, about = None, f"without the optimizer: {error}"
            yield Source(model, optimizer, about, beside(weights))
        return
    step, manifest = whole_step(Store(url), steps, step)
    with Reader(Store(url), folder_of(step), manifest, rank=0, world_size=None) as reader:
        model, optimizer = reader.of("model"), reader.of("optimizer")
        if not model.there:
            names = ", ".join(manifest["plain"])
            raise ValueError(f"step {step} has no 'model'; it has {names}")
        described = optimizer.there and "groups" in optimizer.text
        about = [f"step {step}"]
        if model.foreign:
            about.append(f"per-rank state of rank 0: {', '.join(model.foreign)}")
        taken = ("model", "optimizer") if described else ("model",)
        left = [name for name in manifest["plain"] if name not in taken]
        yield Source(model, optimizer if described else None, "; ".join(about), left)


def whole_step(store, steps, step):
    """Return (step, manifest) of that step, or of the latest valid one."""
    if step is not None and step not in steps:
        raise ValueError(f"it has no step {step}; choose one of {', '.join(map(str, steps))}")
    reasons = []
    for candidate in latest_first(manifests_in(store)) if step is None else [step]:
        manifest, why = metadata.checked(store, folder_of(candidate))
        if manifest:
            return candidate, manifest
        reasons.append(f"step {candidate}: {why}")
    raise ValueError("; ".join(reasons))


def path_of(weights, name):
    """Return the keys that led to a value in the dict that was saved."""
    return getattr(weights, "paths", {}).get(name, (name,))


def below(path, root):
    """Return the keys below `root`; () if the path is not below it."""
    return path[len(root) :] if path[: len(root)] == root else ()


def dotted(path):
    return ".".join(map(str, path))


def model_path(weights):
    """Return the keys that lead to the model in the saved dict; () if it is at the top level.

    Raises ValueError if several keys are possible.
    """
    tensors = [path_of(weights, name) for name in weights.shapes]
    found = {path[: path.index("model") + 1] for path in tensors if "model" in path[:-1]}
    if not found and all(len(path) > 1 for path in tensors):
        found = {path[:1] for path in tensors if path[0] not in OPTIMIZERS}
    nearest = [path for path in found if len(path) == min(map(len, found))]
    if len(nearest) > 1:
        names = ", ".join(sorted(map(dotted, nearest)))
        raise ValueError(f'cannot find the model among {names}: save it as {{"model": ...}}')
    return nearest[0] if nearest else ()


def optimizer_path(weights):
    """Return the keys of the optimizer next to the model; None if there is none."""
    parent = model_path(weights)[:-1]
    names = {*weights.shapes, *weights.objects}
    inside = [below(path_of(weights, name), parent) for name in names]
    there = {path[0] for path in inside if len(path) > 1}
    return next(((*parent, key) for key in OPTIMIZERS if key in there), None)


def model_in(weights):
    """Return {name: its name in the source} of the model in a saved dict."""
    root, names = model_path(weights), {}
    for name in (*weights.shapes, *weights.objects):
        path = below(path_of(weights, name), root)
        on_top = len(path) == 1 and (name in weights.shapes or is_extra(name))
        if on_top or (root and path):
            names[dotted(path)] = name
    return names


def beside(weights):
    """Return the names of values saved next to the model and its optimizer."""
    taken, optimizer = set(model_in(weights).values()), optimizer_path(weights)
    parent, left = model_path(weights)[:-1], {}
    for name in (*weights.shapes, *weights.objects):
        path = path_of(weights, name)
        depth = len(parent) + 1 if below(path, parent) else 1
        if name not in taken and path[:depth] != optimizer:
            left[dotted(path[:depth])] = None
    return list(left)


def optimizer_in(weights):
    """Return the optimizer's States; None if there is none. ValueError if unsupported."""
    root = optimizer_path(weights)
    if root is None:
        return None
    return States(weights, root, Renamed(weights, model_in(weights)).shapes)


def fitting(weights, module):
    """Return the weights under the names of a module's own state, as far as they match."""
    own = {without_wrappers(name) for name in module.state_dict()}
    theirs = {without_wrappers(new): name for new, name in model_in(weights).items()}
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

"""Convert checkpoints: one safetensors file, Hugging Face, torch.distributed.checkpoint, and back.

    runs/gpt              labkit: step-000000300/manifest.json, rank-0.safetensors, ...
    gpt.safetensors       one file, the full model, under the module's own names
    gpt                   Hugging Face's folder, to read: model.safetensors.index.json, its files
    gpt                   torch.distributed.checkpoint (DCP): .metadata, __0_0.distcp, ...

    python -m labkit.convert runs/gpt gpt.safetensors --step 300
    python -m labkit.convert runs/gpt gpt                       model and optimizer
    python -m labkit.convert gpt runs/new --to checkpoint       the same, as step 0

    load_weights(model, "gpt")     a module, DDP, FSDP: each rank reads only its shard
    load_weights(model, "gpt", optimizer)     and the optimizer's states, such as AdamW's

Every format can be source or target, on a disk or at an fsspec URL (DCP is written to a disk only).
Reading executes nothing. A DCP folder is written as {"model": by name, "optimizer": {"state": by
name, "param_groups"}}, like torch.distributed.checkpoint.state_dict. It is read in that layout, as
{"app": {"model", "optim"}} of PyTorch's recipe, with the model's tensors at the top level and the
optimizer next to them (torchtitan), and with flatten_optimizer_state_dict. Other entries are
skipped and reported.

Memory: one tensor, and of a DCP source a part of it, twice; with --to checkpoint all of it, twice.
"""

import argparse
import sys
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from labkit.checkpoint import CheckpointError, Checkpoints, tensor_file
from labkit.checkpoint.convert_sources import fitting, opened, opened_weights, optimizer_in
from labkit.checkpoint.sharded_state import OptimizerHolder, OtherStates, holders
from labkit.checkpoint.storage import Store
from labkit.collective_errors import Together


class Keys(NamedTuple):
    """The names that load_weights(strict=False) has not loaded, as in Module.load_state_dict()."""

    missing_keys: list
    unexpected_keys: list


def load_weights(model, url, optimizer=None, strict=True):
    """Load a file or folder of these formats into a module, however it is wrapped. Collective.

    Accepts names unchanged or prefixed with "model." or "module."; a tied parameter needs only one
    of its names. Values take the model's dtype. optimizer: the model's, from a DCP folder with
    parameter names. strict=False: missing parameters keep their values and other tensors are
    skipped; both are returned as Keys. Raises CheckpointError on all ranks; before anything is
    changed if names (with strict=False: all names) or shapes differ.
    """
    together, failed = Together(CheckpointError), f"{url} was not loaded"
    state = {"model": model} | ({} if optimizer is None else {"optimizer": optimizer})
    parts = holders(state)
    with ExitStack() as stack:
        stack.callback(together.close)
        with together.agreed(failed):
            weights = stack.enter_context(opened_weights(url))
            found = {"model": fitting(weights, parts["model"].module)}
            keys = Keys(*parts["model"].other_names(found["model"]))
            if not strict:
                found["model"] = found["model"].without(keys.unexpected_keys)
                parts["model"].left = frozenset(keys.missing_keys)
                if not found["model"].shapes:
                    raise ValueError("no name of a tensor in it matches the model")
            if optimizer is not None:
                found["optimizer"] = states_for(parts["optimizer"], weights)
            problems = [text for name in parts for text in parts[name].problems(found[name])]
            if problems:
                more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
                raise ValueError("; ".join(problems[:8]) + more)
        with together.agreed(failed):
            for name, part in parts.items():
                part.give(found[name])
    return keys


def states_for(holder, weights):
    if not isinstance(holder, OptimizerHolder):
        raise ValueError(
            f"cannot load into {type(holder.thing).__name__}: it keeps extra state that the "
            "source does not contain"
        )
    states = optimizer_in(weights)
    if states is None:
        raise ValueError("it contains no optimizer next to the model")
    return states


def convert(url, target, step=None, to=None):
    """Write a checkpoint, of a step or the latest, in another format. Returns a summary in words.

    to: a name of WRITERS; None: by the target's name. Raises ValueError, OSError, CheckpointError.
    """
    to = to or ("safetensors" if str(target).endswith(".safetensors") else "dcp")
    with opened(url, step) as source:
        left = [*["optimizer"] * bool(source.optimizer and to == "safetensors"), *source.beside]
        written = f"{target}: {WRITERS[to](source, str(target))}"
        words = [written, source.about, left and f"left out: {', '.join(left)}"]
        return "; ".join(filter(None, words))


def without_data(weights):
    """Return {name: meta tensor of its shape and dtype}."""
    shapes, dtypes = weights.shapes, weights.dtypes
    return {n: torch.empty(tuple(shapes[n]), dtype=dtypes[n], device="meta") for n in shapes}


def read_as(weights, tensors, name):
    return weights.read(name).view(tensors[name].shape)


def to_safetensors(source, target):
    parent, _, name = target.rpartition("/")
    tensors = without_data(source.model)
    read = partial(read_as, source.model, tensors)
    Store(parent or ".").write(name, partial(tensor_file.write, tensors=tensors, read=read))
    left = f", without {', '.join(source.model.text)}" if source.model.text else ""
    return f"model, {len(tensors)} tensors{left}"


def to_dcp(source, target):
    """Write a DCP folder with PyTorch's writer, which requests one tensor at a time."""
    if "://" in target:
        raise ValueError(f"a DCP folder must be on a local disk, not at {target}")
    if Path(target, ".metadata").exists():
        raise ValueError(f"{target} already has a checkpoint: choose another folder")
    model, optimizer = source.model, source.optimizer
    tensors = without_data(model)
    state = {"model": tensors | model.text}
    reads = {f"model.{name}": partial(read_as, model, tensors, name) for name in tensors}
    if optimizer:
        state["optimizer"], more = optimizer_state(optimizer, tensors)
        reads |= more
    with warnings.catch_warnings():  # no_dist=True warns that there is only one process
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        writer = dcp.FileSystemWriter(
            target, single_file_per_rank=False
        )  # one file per rank would be held in memory
        dcp.save(state, storage_writer=writer, planner=OneByOne(reads), no_dist=True)
    return f"model{' and optimizer' if optimizer else ''}, {len(reads)} tensors"


def optimizer_state(optimizer, parameters):
    """Return (its state dict by names, without data; {flat name: function -> tensor})."""
    kept, reads, states = without_data(optimizer), {}, {}
    for key in kept:
        owner, _, part = key.removeprefix("model.").rpartition("/")
        number = owner in parameters and parameters[owner].dim() == 0
        if number and kept[key].numel() == 1:  # saved by labkit as 1-d
            kept[key] = kept[key].view(())
        states.setdefault(owner, {})[part] = kept[key]
        reads[f"optimizer.state.{owner}.{part}"] = partial(read_as, optimizer, kept, key)
    groups = [
        group["options"] | {"params": [name.removeprefix("model.") for name in group["params"]]}
        for group in optimizer.text["groups"]
    ]
    return {"state": states, "param_groups": groups}, reads


class OneByOne(dcp.DefaultSavePlanner):
    """A planner that reads each tensor when it is saved. reads: {flat name: function -> tensor}."""

    def __init__(self, reads):
        super().__init__()
        self.reads = reads

    def lookup_object(self, index):
        read = self.reads.get(index.fqn)
        return read() if read else super().lookup_object(index)


def to_checkpoint(source, target):
    checkpoints = Checkpoints(target)
    try:
        if steps := checkpoints.steps():
            raise ValueError(
                f"{target} has a checkpoint of step {steps[-1]}: choose another directory"
            )
        tensors = without_data(source.model)
        state = {"model": Tensors({n: read_as(source.model, tensors, n) for n in tensors})}
        if source.optimizer:
            state["optimizer"] = OtherStates(source.optimizer)
        checkpoints.save(0, state)
    finally:
        checkpoints.close()
    count = len(tensors) + len(source.optimizer.shapes if source.optimizer else ())
    return f"{' and '.join(state)}, {count} tensors, as step 0"


class Tensors(nn.Module):
    """A state dict without its module."""

    def __init__(self, tensors):
        super().__init__()
        self.tensors = tensors

    def state_dict(self):
        return self.tensors


WRITERS = {"safetensors": to_safetensors, "dcp": to_dcp, "checkpoint": to_checkpoint}


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="labkit.convert", description=__doc__.partition("\n")[0])
    parser.add_argument("source", help="directory of checkpoints, .safetensors file or DCP folder")
    parser.add_argument("target")
    parser.add_argument("--step", type=int, help="which of a directory of checkpoints (the latest)")
    parser.add_argument("--to", choices=WRITERS, help="(safetensors or dcp, by the target's name)")
    options = parser.parse_args(arguments)
    try:
        print(convert(options.source, options.target, options.step, options.to))
    except (ValueError, TypeError, OSError, ImportError, CheckpointError) as error:
        sys.exit(f"labkit.convert: {options.source}: {error}")


if __name__ == "__main__":
    main()

"""A wrapper around a module that keeps the module's own parameter names.

    wrapped = Wrapper(net)   net.state_dict()       layer.weight          layer.bias
                             wrapped.state_dict()   layer.weight          layer.bias
                             (torch DDP:            module.layer.weight   module.layer.bias)

So a checkpoint that was saved with the wrapper loads without it, and vice versa. One of PyTorch's
DDP loads, too. The wrapper adds no time per step.
"""

from dataclasses import fields, is_dataclass

import torch
from torch import nn

ADDED = ("_orig_mod", "_checkpoint_wrapped_module")  # by torch.compile, by checkpoint_wrapper


class Wrapper(nn.Module):
    """Base of wrappers around self.module with its names. Subclasses implement forward()."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.register_load_state_dict_pre_hook(_insert_module)

    def named_parameters(self, *args, **kwargs):
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args, **kwargs):
        return self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args, **kwargs):
        return self.module.named_modules(*args, **kwargs)

    def get_submodule(self, target):
        return self.module.get_submodule(target)

    def state_dict(self, *args, **kwargs):
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, strict=True, assign=False):
        """Load the module's state dict; names may begin with "module.", as from PyTorch's DDP.

        Raises ValueError with assign=True, which would replace the parameters that this wrapper
        has registered.
        """
        if assign:
            raise ValueError(
                "assign=True replaces the parameters: load into the module before wrapping it"
            )
        own = self.module.state_dict().keys()
        plain = {plain_name(name, own): value for name, value in state_dict.items()}
        return self.module.load_state_dict(plain, strict)


def plain_name(name, own):
    """Return the name without the "module." of PyTorch's DDP, unless `own` contains the name."""
    short = name.removeprefix("module.")
    return short if name not in own and short in own else name


def without_wrappers(name):
    """Return the name of a parameter without the parts that PyTorch's wrappers add."""
    return ".".join(part for part in name.split(".") if part not in ADDED)


def is_extra(name):
    """Return whether a name is of a module's extra state, whose shape may change."""
    return name.rpartition(".")[2] == "_extra_state"


def _insert_module(wrapper, state_dict, prefix, *_):
    """Add "module." to the names if the wrapper is a part of the model that is loaded."""
    own = wrapper.module.state_dict().keys()
    for name in [name for name in state_dict if name.startswith(prefix)]:
        short = name.removeprefix(prefix)
        state_dict[f"{prefix}module.{plain_name(short, own)}"] = state_dict.pop(name)


def find_tensors(value):
    """Return the tensors, in order, in nested dicts, lists, (named) tuples and dataclasses only."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from find_tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from find_tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from find_tensors(getattr(value, field.name))

"""A wrapper that the model does not notice: a module around a module, whose names everything keeps.

    wrapped = Wrapper(net)   net.state_dict()       layer.weight          layer.bias
                             wrapped.state_dict()   layer.weight          layer.bias
                             (torch DDP:            module.layer.weight   module.layer.bias)

So a checkpoint written through the wrapper loads without it and the other way round, and one that
PyTorch's DDP has written loads too. The wrapper costs nothing per step.
"""

from dataclasses import fields, is_dataclass

import torch
from torch import nn

ADDED = ("_orig_mod", "_checkpoint_wrapped_module")  # by torch.compile, by checkpoint_wrapper


class Wrapper(nn.Module):
    """Base of what wraps a module, in self.module, with its names. Subclasses write forward()."""

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
        """The module's load_state_dict, also for the names of PyTorch's DDP, "module." first.

        Raises ValueError with assign=True, which would replace the parameters that this wrapper
        looks after.
        """
        if assign:
            raise ValueError(
                "assign=True replaces the parameters: load into the module before wrapping it"
            )
        own = self.module.state_dict().keys()
        plain = {plain_name(name, own): value for name, value in state_dict.items()}
        return self.module.load_state_dict(plain, strict)


def plain_name(name, own):
    """The name without the "module." of PyTorch's DDP, unless `own` has it as it is."""
    short = name.removeprefix("module.")
    return short if name not in own and short in own else name


def without_wrappers(name):
    """The name of a parameter without what PyTorch's wrappers have put into it."""
    return ".".join(part for part in name.split(".") if part not in ADDED)


def is_extra(name):
    """Return whether a name is of a module's extra state, whose shape may change."""
    return name.rpartition(".")[2] == "_extra_state"


def _insert_module(wrapper, state_dict, prefix, *_):
    """Loading a model that contains the wrapper goes by modules, where ours is called "module"."""
    own = wrapper.module.state_dict().keys()
    for name in [name for name in state_dict if name.startswith(prefix)]:
        short = name.removeprefix(prefix)
        state_dict[f"{prefix}module.{plain_name(short, own)}"] = state_dict.pop(name)


def find_tensors(value):
    """The tensors, in order, in nested dicts, lists, (named) tuples, dataclasses; in no others."""
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

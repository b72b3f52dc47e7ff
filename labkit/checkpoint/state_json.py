"""Splits a state dict into JSON text, which says how it is nested, and its tensors by path.

    {"lr": 0.1, "state": {0: {"step": tensor(3.)}}}

    --->  {"dict": [["lr", 0.1],
                    ["state", {"dict": [[0, {"dict": [["step", {"tensor": PATH}]]}]]}]]}
          {PATH: tensor(3.)}        PATH: "state/0/step float32[]"

JSON keeps every digit of a float, but supports neither numbers as keys nor tuples: both are
spelled out. Unlike a pickle, the text executes nothing when it is read.
"""

import torch

PLAIN = (bool, int, float, str, type(None))


def split(value, path=""):
    """Return (a value for json.dumps, {path: tensor}). TypeError names an unsupported value."""
    if isinstance(value, torch.Tensor):
        # Ranks may have different tensors at one path: dtype and shape make the paths unique.
        path += f" {value.dtype}{list(value.shape)}".replace("torch.", "")
        return {"tensor": path}, {path: value.detach()}
    if isinstance(value, PLAIN):
        return value, {}
    if isinstance(value, dict):
        kind, keys, values = "dict", list(value), list(value.values())
    elif type(value) in (list, tuple):
        kind, keys, values = type(value).__name__, range(len(value)), value
    else:
        raise TypeError(
            f"cannot save {path or 'the state'} of type {type(value).__name__}: use tensors, "
            "numbers and text in dicts, lists and tuples"
        )
    tensors, inside = {}, []
    for key, one in zip(keys, values, strict=True):
        skeleton, found = split(one, f"{path}/{key}" if path else str(key))
        inside.append([key, skeleton] if kind == "dict" else skeleton)
        if twice := tensors.keys() & found.keys():
            raise TypeError(f"two tensors of the state have the same path {twice.pop()}")
        tensors |= found
    return {kind: inside}, tensors


def plain(value, of):
    """Return the text of a value; TypeError if it has a tensor. of: its name in the message."""
    skeleton, tensors = split(value)
    if tensors:
        raise TypeError(f"{of} must hold numbers, but holds the tensor {next(iter(tensors))}")
    return skeleton


def join(skeleton, tensors):
    """Rebuild the value. tensors: function path -> tensor."""
    if not isinstance(skeleton, dict):
        return skeleton
    ((kind, inside),) = skeleton.items()
    if kind == "tensor":
        return tensors(inside)
    if kind == "dict":
        return {key: join(one, tensors) for key, one in inside}
    return (tuple if kind == "tuple" else list)(join(one, tensors) for one in inside)

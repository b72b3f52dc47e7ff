"""A state dict as two things: text that says how it is nested, and its tensors by path.

    {"lr": 0.1, "state": {0: {"step": tensor(3.)}}}

    --->  {"dict": [["lr", 0.1],
                    ["state", {"dict": [[0, {"dict": [["step", {"tensor": PATH}]]}]]}]]}
          {PATH: tensor(3.)}        PATH: "state/0/step float32[]"

The text is JSON, which keeps every digit of a float, but neither numbers as keys nor tuples: they
are spelt out. Reading it back executes nothing, which a pickle does.
"""

import torch

PLAIN = (bool, int, float, str, type(None))


def split(value, path=""):
    """(what json.dumps takes, {path: tensor}). TypeError names what is neither."""
    if isinstance(value, torch.Tensor):
        # Ranks may have different tensors at one place: by its look each has a path of its own.
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
            f"{path or 'the state'} is a {type(value).__name__}: a checkpoint holds tensors, "
            "numbers and text, in dicts, lists and tuples"
        )
    tensors, inside = {}, []
    for key, one in zip(keys, values, strict=True):
        skeleton, found = split(one, f"{path}/{key}" if path else str(key))
        inside.append([key, skeleton] if kind == "dict" else skeleton)
        if twice := tensors.keys() & found.keys():
            raise TypeError(f"two tensors of the state are {twice.pop()}")
        tensors |= found
    return {kind: inside}, tensors


def plain(value, of):
    """The text of what has no tensors; TypeError where it has. of: whose, in words."""
    skeleton, tensors = split(value)
    if tensors:
        raise TypeError(f"{of} has a tensor where numbers are expected: {next(iter(tensors))}")
    return skeleton


def join(skeleton, tensors):
    """The value again. tensors: function path -> tensor."""
    if not isinstance(skeleton, dict):
        return skeleton
    ((kind, inside),) = skeleton.items()
    if kind == "tensor":
        return tensors(inside)
    if kind == "dict":
        return {key: join(one, tensors) for key, one in inside}
    return (tuple if kind == "tuple" else list)(join(one, tensors) for one in inside)

"""Sizes of the models by name, and models of another depth or width.

              depth                   width
    mlp       hidden layers           of a hidden layer
    resnet    6n + 2: 8, 14, 20 ...   of the first stage
    gpt       layers                  of a token

A GPT of another width has heads as wide as those of its size: 16, 32 and 64 channels.
"""

from labkit.models.names import known
from labkit.models.resnet import check_depth

SIZES = {
    "mlp": {
        "tiny": {"sizes": (64, 256, 256, 10)},
        "small": {"sizes": (64, 576, 576, 576, 576, 10)},
        "medium": {"sizes": (64, 1536, 1536, 1536, 1536, 1536, 10)},
    },
    "resnet": {
        "tiny": {"depth": 8, "width": 4},
        "small": {"depth": 20, "width": 32},
        "medium": {"depth": 20, "width": 96},
    },
    "gpt": {
        "tiny": {"layers": 2, "heads": 2, "width": 32},
        "small": {"layers": 4, "heads": 4, "width": 128},
        "medium": {"layers": 6, "heads": 6, "width": 384},
    },
}


def arguments_of(model, size="tiny", depth=0, width=0):
    """Return {argument: value} of the class of a model. depth, width: 0 for those of the size.

    Raises ValueError for an unknown model or size, and for a depth or width that the model cannot
    have.
    """
    usual = known("size", size, known("model", model, SIZES))
    return RESIZE[model](usual, depth, width)


def resize_mlp(usual, depth, width):
    if depth == 1:
        raise ValueError("depth=1 must be at least 2: a unit is a layer that keeps its width")
    pixels, *hidden, classes = usual["sizes"]
    layers = [width or hidden[0]] * (depth or len(hidden))
    return {"sizes": (pixels, *layers, classes)}


def resize_resnet(usual, depth, width):
    check_depth(depth or usual["depth"])
    return {"depth": depth or usual["depth"], "width": width or usual["width"]}


def resize_gpt(usual, depth, width):
    head = usual["width"] // usual["heads"]
    if width % head:
        raise ValueError(f"width={width} must be a multiple of {head}, the width of a head")
    width = width or usual["width"]
    return {"layers": depth or usual["layers"], "heads": width // head, "width": width}


RESIZE = {"mlp": resize_mlp, "resnet": resize_resnet, "gpt": resize_gpt}

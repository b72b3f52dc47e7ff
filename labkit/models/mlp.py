"""A multi-layer perceptron: linear layers with a ReLU between them, the smallest layered model.

    [B, 64] -- linear -- relu -- linear -- relu -- linear -- [B, 10]

Parameters: sum of (inputs + 1) x outputs over the layers.
Multiply-adds of a forward: one per weight and sample.
Rumelhart, Hinton, Williams, Learning representations by back-propagating errors, Nature 1986; He et
al., Delving Deep into Rectifiers, ICCV 2015, section 2.2.
"""

from itertools import pairwise

from torch import nn


class MLP(nn.Module):
    """`sizes`: of input, hidden layers, and classes; `dtype`: of the parameters (None: torch's).

    he: draw weights so that a ReLU keeps the variance, instead of torch's initialisation.
    forward: inputs [B, sizes[0]], or images with that many pixels -> logits [B, sizes[-1]].
    Raises ValueError for fewer than two sizes.
    """

    def __init__(self, sizes=(64, 256, 256, 10), dtype=None, he=False):
        super().__init__()
        if len(sizes) < 2:
            raise ValueError(
                f"sizes={tuple(sizes)} must have at least two entries, for input and output"
            )
        layers = [nn.Linear(sizes[0], sizes[1], dtype=dtype)]
        for inputs, outputs in pairwise(sizes[1:]):
            layers += [nn.ReLU(), nn.Linear(inputs, outputs, dtype=dtype)]
        self.layers = nn.Sequential(*layers)
        for layer in layers[::2] if he else ():
            nn.init.kaiming_normal_(layer.weight)

    def forward(self, inputs):  # [B, ...]
        return self.layers(inputs.flatten(1))  # [B, classes]


def is_hidden(module):
    """Return whether it is a hidden layer that keeps its width: a unit of FSDP and emulation."""
    return isinstance(module, nn.Linear) and module.in_features == module.out_features

"""A ResNet's shape is compared with the lab's ResNet, one built here, the memory planner and the known counts."""

import pytest
import torch
from autograd_bytes import kept_bytes
from torch import nn
from torch.nn import functional as F

from labkit import models
from labkit.measure.flops import step_flops
from labkit.memory import estimate
from labkit.models.resnet import ResNet
from labkit.scale.resnet_shapes import DEPTHS, ResNetShape

KNOWN = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}
PRODUCTS = {18: 1.81, 34: 3.66, 50: 4.09, 101: 7.80, 152: 11.51}  # 10^9 an image, as torchvision lists them


def normed(inputs, outputs, kernel, stride=1):
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.first, self.second = normed(inputs, width, 1), normed(width, width, 3, stride)
        self.third = normed(width, 4 * width, 1)
        same = inputs == 4 * width and stride == 1
        self.shortcut = nn.Identity() if same else normed(inputs, 4 * width, 1, stride)

    def forward(self, x):
        y = F.relu(self.second(F.relu(self.first(x))))
        return F.relu(self.third(y) + self.shortcut(x))


class Basic(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.first, self.second = normed(inputs, width, 3, stride), normed(width, width, 3)
        same = inputs == width and stride == 1
        self.shortcut = nn.Identity() if same else normed(inputs, width, 1, stride)

    def forward(self, x):
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


def large(shape):
    """The module of a shape that is not small."""
    kind, wider = (Bottleneck, 4) if shape.bottleneck else (Basic, 1)
    layers, inputs = [normed(3, shape.width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], shape.width
    for stage, count in enumerate(shape.blocks):
        for index in range(count):
            width = shape.width * 2**stage
            layers.append(kind(inputs, width, 2 if stage and not index else 1))
            inputs = wider * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, shape.classes))


def small(depth, width):
    blocks = ((depth - 2) // 6,) * 3
    return ResNetShape(blocks, bottleneck=False, width=width, classes=10, side=32, small=True)


def channels(shape):
    return sum(c.outputs for block in shape.layers for c in block.convolutions)


def test_the_known_counts():
    shapes = {depth: ResNetShape.of_depth(depth) for depth in DEPTHS}
    assert {depth: shape.parameters for depth, shape in shapes.items()} == KNOWN
    assert {depth: round(shape.forward_flops / 2e9, 2) for depth, shape in shapes.items()} == PRODUCTS


@pytest.mark.parametrize("depth", [18, 50])
def test_parameters_and_flops_are_those_of_the_module(depth):
    shape = ResNetShape.of_depth(depth)
    with torch.device("meta"):
        module, images = large(shape), torch.zeros(1, 3, 224, 224)
        target = torch.zeros(1, dtype=torch.int64)
    assert sum(p.numel() for p in module.parameters()) == shape.parameters
    assert step_flops(module, images, target, F.cross_entropy) == shape.step_flops


def test_the_lab_s_own_resnet_is_a_small_one():
    for size in ("tiny", "small"):
        shape = small(**models.SIZES["resnet"][size])
        with torch.device("meta"):
            module, images = models.build("resnet", size), torch.zeros(2, 3, 32, 32)
            target = torch.zeros(2, dtype=torch.int64)
        assert sum(p.numel() for p in module.parameters()) == shape.parameters
        assert step_flops(module, images, target, F.cross_entropy) == 2 * shape.step_flops


SIDE = 45  # odd from the second stage on


@pytest.mark.parametrize(
    ("shape", "module"),
    [
        (ResNetShape((1, 2), True, 4, 7, SIDE), large),
        (ResNetShape((2, 1), False, 4, 7, SIDE), large),
        (small(8, 4), lambda _: ResNet(8, 4)),
    ],
    ids=["bottleneck", "basic", "the lab's"],
)
def test_it_keeps_the_bytes_that_are_counted(shape, module):
    images, module = torch.randn(2, 3, shape.side, shape.side), module(shape)
    statistics = 4 * 4 * channels(shape)  # of a norm: the batch's mean and deviation, and the running ones
    assert kept_bytes(module, images) == 2 * shape.saved_bytes(width=4) + statistics
    assert step_flops(module, images, torch.zeros(2, dtype=torch.int64), F.cross_entropy) == 2 * shape.step_flops


def test_blocks_more_are_what_the_budget_says():
    def most(depth):
        images, target = torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64)
        found = estimate(ResNet(depth, 4), images, F.cross_entropy, target=target)
        assert found.held["parameters"] == 4 * small(depth, 4).parameters
        return max(kinds["activations"] for _, kinds in found.samples)

    few, many = small(8, 4), small(14, 4)
    statistics = 2 * 4 * (channels(many) - channels(few))  # the running ones are buffers
    assert most(14) - most(8) == 2 * (many.saved_bytes(4) - few.saved_bytes(4)) + statistics


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"blocks": ()}, "blocks is empty"),
        ({"blocks": (3, 0)}, "blocks must be a whole number of at least 1, got 0"),
        ({"side": float("nan")}, "side must be a whole number of at least 1, got nan"),
        ({"width": float("inf")}, "width must be a whole number of at least 1, got inf"),
        ({"classes": -10}, "classes must be a whole number of at least 1, got -10"),
    ],
)
def test_an_impossible_resnet_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        ResNetShape(**wrong)
    with pytest.raises(ValueError, match="depth must be one of 18, 34, 50, 101, 152, got 20"):
        ResNetShape.of_depth(20)

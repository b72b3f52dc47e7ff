"""The shape of a ResNet: its parameters, FLOPs and activation bytes, block by block.

    image --- stem ---- blocks ---- blocks ---- blocks ---- blocks ---- mean, linear --- classes
             w, S/4     w, S/4     2w, S/8     4w, S/16    8w, S/32

    basic         conv 3x3 - norm - relu - conv 3x3 - norm ------------------------- + - relu
    bottleneck    conv 1x1 - norm - relu - conv 3x3 - norm - relu - conv 1x1 - norm - + - relu
    shortcut      the input; conv 1x1 - norm if the shape changes

    a convolution of k x k from c to d channels, with s x s output pixels:
    parameters    k^2 c d + 2 d                    with the norm's two, no bias
    FLOPs         2 k^2 c d s^2 an image           backward twice that; the stem's without dx
    kept          d s^2 by the norm, and d s^2 by the relu (shared with the next convolution)

In ResNet-50 most activations are in the first stages and most weights in the last. A bottleneck's
stride is in its 3x3 convolution, as in torchvision; in the paper it is in the first 1x1, which
needs fewer FLOPs (3.8 instead of 4.1 billion multiply-adds).
He, Zhang, Ren, Sun, Deep Residual Learning for Image Recognition, CVPR 2016, table 1 and sections
4.1 and 4.2.
"""

from dataclasses import dataclass
from functools import cached_property
from math import isfinite

DEPTHS = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}
CHANNELS, INDEX = 3, 8  # of an image; bytes of the index that max pooling keeps for each output


@dataclass(frozen=True)
class Convolution:
    """A convolution without bias and the norm after it. side: width of its output in pixels."""

    inputs: int
    outputs: int
    kernel: int
    side: int

    @property
    def weights(self):
        return self.inputs * self.outputs * self.kernel**2

    @property
    def parameters(self):
        return self.weights + 2 * self.outputs

    @property
    def elements(self):
        """Elements of the output for one image."""
        return self.outputs * self.side**2

    @property
    def flops(self):
        """Forward FLOPs of one image."""
        return 2 * self.weights * self.side**2


@dataclass(frozen=True)
class Block:
    """The stem or a block.

    projected: whether the last convolution is in the shortcut. pooled: elements after max pooling.
    """

    convolutions: tuple
    projected: bool = False
    pooled: int = 0

    @property
    def parameters(self):
        return sum(convolution.parameters for convolution in self.convolutions)

    @property
    def flops(self):
        """Forward FLOPs of one image."""
        return sum(convolution.flops for convolution in self.convolutions)

    def saved_bytes(self, width=2):
        """Return the bytes per image kept for the backward, with elements of `width` bytes.

        Each norm keeps its input and each relu its output. A pool keeps the indices of its maxima;
        its output is kept by the next convolution. The previous block counts the block's input.
        """
        outputs = [convolution.elements for convolution in self.convolutions]
        rectified = sum(outputs[:-1] if self.projected else outputs)
        return width * (sum(outputs) + rectified + self.pooled) + INDEX * self.pooled


@dataclass(frozen=True)
class ResNetShape:
    """The numbers of a ResNet's configuration, by default ResNet-50 with images of 224 pixels.

    blocks: of each stage. width: channels of the first stage; each next stage has twice as many.
    side: width of an image in pixels. small: a 3x3 stem that keeps the size, as for CIFAR, instead
    of a 7x7 convolution and a pool that reduce the side to a quarter. Raises ValueError for numbers
    that are not positive integers.
    """

    blocks: tuple = (3, 4, 6, 3)
    bottleneck: bool = True
    width: int = 64
    classes: int = 1000
    side: int = 224
    small: bool = False

    def __post_init__(self):
        if not self.blocks:
            raise ValueError("blocks is empty: say how many each stage has, as (3, 4, 6, 3)")
        numbers = {name: getattr(self, name) for name in ("width", "classes", "side")}
        for name, number in (*numbers.items(), *(("blocks", count) for count in self.blocks)):
            if not isfinite(number) or number < 1 or number != int(number):
                raise ValueError(f"{name} must be a whole number of at least 1, got {number}")

    @classmethod
    def of_depth(cls, depth, **others):
        """Return ResNet-18, 34, 50, 101 or 152. Raises ValueError for another depth."""
        if depth not in DEPTHS:
            raise ValueError(f"depth must be one of {', '.join(map(str, DEPTHS))}, got {depth}")
        blocks, bottleneck = DEPTHS[depth]
        return cls(blocks=blocks, bottleneck=bottleneck, **others)

    @cached_property
    def layers(self):
        """The stem and every block, in order: [Block]."""
        side = self.side if self.small else halved(self.side)
        stem = Convolution(CHANNELS, self.width, 3 if self.small else 7, side)
        side = side if self.small else halved(side)
        found = [Block((stem,), pooled=0 if self.small else self.width * side**2)]
        inputs = self.width
        for stage, count in enumerate(self.blocks):
            for index in range(count):
                block = self.block(inputs, self.width * 2**stage, side, bool(stage and not index))
                found.append(block)
                last = block.convolutions[-1]
                inputs, side = last.outputs, last.side
        return found

    def block(self, inputs, width, side, halves):
        """Return a Block whose input has `inputs` channels of side x side pixels."""
        after = halved(side) if halves else side
        outputs = 4 * width if self.bottleneck else width
        convolutions = (
            (
                Convolution(inputs, width, 1, side),
                Convolution(width, width, 3, after),
                Convolution(width, outputs, 1, after),
            )
            if self.bottleneck
            else (Convolution(inputs, width, 3, after), Convolution(width, outputs, 3, after))
        )
        projected = halves or inputs != outputs
        shortcut = (Convolution(inputs, outputs, 1, after),) if projected else ()
        return Block((*convolutions, *shortcut), projected)

    @property
    def features(self):
        """Input channels of the linear layer at the end."""
        return self.layers[-1].convolutions[-1].outputs

    @property
    def parameters(self):
        return sum(b.parameters for b in self.layers) + (self.features + 1) * self.classes

    @property
    def forward_flops(self):
        """Forward FLOPs of one image: convolutions and the linear layer."""
        return sum(block.flops for block in self.layers) + 2 * self.features * self.classes

    @property
    def step_flops(self):
        """FLOPs of forward and backward of one image, without the gradient of the image itself."""
        return 3 * self.forward_flops - self.layers[0].flops

    def saved_bytes(self, width=2):
        """Return the bytes per image that the network keeps, with the image and the features."""
        ends = width * (CHANNELS * self.side**2 + self.features)
        return sum(block.saved_bytes(width) for block in self.layers) + ends


def halved(side):
    return (side + 1) // 2

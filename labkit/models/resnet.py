"""A residual network for small images: blocks that add a correction to their own input.

    [B, 3, 32, 32] -- conv -- n blocks -- n blocks -- n blocks -- mean, linear -- [B, 10]
                              32x32, w    16x16, 2w   8x8, 4w

    block    x ---- conv - norm - relu - conv - norm ---- + -- relu --
              \\____________ shortcut _________________/

Depth 6n + 2.  Parameters: about 0.27 million x ((depth - 2) / 18) x (width / 16)^2.
He, Zhang, Ren, Sun, Deep Residual Learning for Image Recognition, CVPR 2016, section 4.2 (shortcut
B: 1x1 convolution).
"""

from torch import nn
from torch.nn import functional as F

from labkit.models.names import known

GROUPS = 4  # of channels, for GroupNorm: divides every width used here


def normalisation(kind, channels):
    """Return BatchNorm ("batch": over a rank's batch) or GroupNorm ("group": over each image)."""
    known("norm", kind, ("batch", "group"))
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(GROUPS, channels)


def check_depth(depth):
    """Raise ValueError for a depth that three equal stages cannot have."""
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"depth={depth} must be 6n + 2 (8, 14, 20, 26, ...)")


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, a shortcut: [B, inputs, H, W] -> [B, outputs, H/stride, W/stride]."""

    def __init__(self, inputs, outputs, stride=1, norm="batch"):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = normalisation(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = normalisation(norm, outputs)
        self.keeps_shape = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity()
        if not self.keeps_shape:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, normalisation(norm, outputs))

    def forward(self, x):  # [B, inputs, H, W]
        correction = F.relu(self.norm1(self.conv1(x)))  # [B, outputs, H / stride, W / stride]
        correction = self.norm2(self.conv2(correction))
        return F.relu(correction + self.shortcut(x))


class ResNet(nn.Module):
    """`depth` 6n + 2 (8, 14, 20, ...), first stage of `width` channels, `norm` "batch" or "group".

    forward: images [B, 3, H, W] -> logits [B, classes]. Raises ValueError for another depth or
    norm, and with norm="group" for a width that is not divisible by the number of groups.
    """

    def __init__(self, depth=8, width=16, classes=10, norm="batch"):
        super().__init__()
        check_depth(depth)
        if norm == "group" and width % GROUPS:
            raise ValueError(f'width={width} must be divisible by {GROUPS} with norm="group"')
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = normalisation(norm, width)
        blocks = []
        channels = width
        for stage in range(3):
            for index in range((depth - 2) // 6):
                outputs = width * 2**stage
                blocks.append(
                    BasicBlock(channels, outputs, stride=2 if stage and not index else 1, norm=norm)
                )
                channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images):  # [B, 3, H, W]
        x = F.relu(self.norm(self.stem(images)))  # [B, width, H, W]
        x = self.blocks(x)  # [B, 4 width, H / 4, W / 4]
        return self.head(x.mean(dim=(2, 3)))  # [B, classes]


def is_plain_block(module):
    """Return whether the module is a block that keeps its input's shape: a unit of emulation."""
    return isinstance(module, BasicBlock) and module.keeps_shape

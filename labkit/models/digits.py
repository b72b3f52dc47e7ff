"""Handwritten digits: 1797 real images of 8x8 pixels, without a download.

    "flat"  [64]            for an MLP
    "image" [1, 8, 8]       unchanged
    "rgb"   [3, 32, 32]     resized, the grey in all three channels: for a CIFAR model

Held per process: 0.1 MB, or 1.8 MB as "rgb" (one channel is stored, the others are views of it).
digits.csv.gz is a copy of scikit-learn's file: its packages would take 200 MB in every .venv.
Alpaydin and Kaynak, Optical Recognition of Handwritten Digits,
UCI Machine Learning Repository, 1998, license CC BY 4.0.
"""

from pathlib import Path

import torch
from torch.nn.functional import interpolate

from labkit.models.images import Images
from labkit.models.names import known

FILE = Path(__file__).with_name("digits.csv.gz")
SPLITS = {"train": slice(0, 1500), "test": slice(1500, None)}  # in the order of the file


def digits(image="flat", split="train"):
    """Return the digits as `Images`: the first 1500 to train, the last 297 (split="test") to test.

    image: "flat" -> [64], "image" -> [1, 8, 8], "rgb" -> [3, 32, 32]; float32, -1 to 1.
    Labels int64. ValueError for another image or split.
    """
    share = known("split", split, SPLITS)
    known("image", image, ("flat", "image", "rgb"))
    pixels, labels = read_digits()
    if image == "image":
        pixels = pixels.view(-1, 1, 8, 8)
    elif image == "rgb":
        large = interpolate(
            pixels.view(-1, 1, 8, 8).float(), size=(32, 32), mode="bilinear", align_corners=False
        )
        pixels = large.round().to(torch.uint8).expand(-1, 3, -1, -1)
    pixels, labels = pixels[share], labels[share]
    shape = "x".join(map(str, pixels.shape[1:]))
    return Images(
        pixels, labels, f"{len(labels)} handwritten digits of scikit-learn ({split}), {shape}"
    )


def read_digits():
    """Return all digits: pixels [1797, 64] uint8 from 0 to 255, labels [1797] int64."""
    import numpy

    # [1797, 65], pixels 0 to 16
    table = torch.from_numpy(numpy.loadtxt(FILE, delimiter=",", dtype=numpy.int64))
    return (table[:, :64] * 255 // 16).to(torch.uint8), table[:, 64].contiguous()

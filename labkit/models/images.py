"""Labelled images as bytes, converted to floats one at a time: a quarter of the memory of floats.

    pixels [N, C, H, W] or [N, features] uint8
    item i -> (pixels[i] / 127.5 - 1 float32, labels[i] int64)

Held: C x H x W + 8 bytes per image.
"""

import torch
from torch.utils.data import Dataset


class Images(Dataset):
    """Pixels [N, ...] uint8, labels [N] int64 -> items (floats from -1 to 1, scalar int64 label).

    `str(dataset)` describes them. Raises ValueError if the numbers of images and labels differ.
    """

    def __init__(self, pixels, labels, description):
        if len(pixels) != len(labels):
            raise ValueError(f"{len(pixels)} images but {len(labels)} labels")
        self.pixels = pixels
        self.labels = labels
        self.description = description

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.pixels[index].to(torch.float32) / 127.5 - 1, self.labels[index].to(torch.int64)

    def __getitems__(self, indices):
        """Return many items at once for a DataLoader, with one conversion for all of them."""
        pixels, labels = self[indices]
        return list(zip(pixels.unbind(), labels.unbind(), strict=True))

    def __str__(self):
        return self.description

"""Python's standard library as text: windows of bytes, each with the bytes that follow.

    ...import os\\nimport sys\\n\\ndef main...      item i: tokens  bytes [i T, i T + T)
       [ tokens: T bytes  ]                             target  bytes [i T + 1, i T + T + 1)
        [ target: T bytes  ]

Held: one byte per token. A window is used once per epoch: N bytes make (N - 1) // T items.
Byte-level modelling as in Al-Rfou et al., Character-Level Language Modeling with Deeper
Self-Attention, AAAI 2019.
"""

import os
import platform
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset

from labkit.models.names import known

# Other packages, tests (half of the library's bytes), and files that differ between builds.
LEFT_OUT = (
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "turtledemo",
)
BUILD_DEPENDENT = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")
TRAINING_SHARE = 0.9


class Text(Dataset):
    """Bytes [N] uint8 -> items (tokens, the next tokens), each [context] int64 from 0 to 255.

    `str(dataset)` describes it. Raises ValueError if the bytes do not fill one window.
    """

    def __init__(self, corpus, context, description):
        if len(corpus) <= context:
            raise ValueError(
                f"{len(corpus)} bytes of text must be more than one window of {context} bytes"
            )
        self.corpus = corpus
        self.context = context
        self.description = description

    def __len__(self):
        return (len(self.corpus) - 1) // self.context

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context
        window = self.corpus[start : start + self.context + 1].to(torch.int64)
        return window[:-1], window[1:]

    def __str__(self):
        return self.description


def stdlib_text(context=64, split="train", max_bytes=4 * 2**20):
    """Return the standard library of the running Python as `Text`: complete files, up to max_bytes.

    Files are sorted, so the same Python version gives the same bytes. The first nine tenths are
    split="train", the rest "test". Raises ValueError for another split, FileNotFoundError for a
    Python without its source.
    """
    known("split", split, ("train", "test"))
    folder = Path(sysconfig.get_path("stdlib"))
    chunks = []
    size = 0
    for path in source_files(folder):
        chunk = path.read_bytes()
        if size + len(chunk) > max_bytes:
            break
        chunks.append(chunk)
        size += len(chunk)
    if not size:
        raise FileNotFoundError(f"no Python source of at most {max_bytes} bytes in {folder}")
    corpus = torch.frombuffer(bytearray(b"".join(chunks)), dtype=torch.uint8)
    boundary = int(size * TRAINING_SHARE)
    corpus = corpus[:boundary] if split == "train" else corpus[boundary:]
    version = platform.python_version()
    source = f"Python {version}'s standard library: {len(chunks)} files, {size} bytes"
    return Text(
        corpus, context, f"{source}; {len(corpus)} of them ({split}) in windows of {context}"
    )


def source_files(folder):
    """Return the library's .py files, sorted by their path below `folder`."""
    paths = []
    for place, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if name not in LEFT_OUT and not name.startswith(BUILD_DEPENDENT)
        ]
        paths += [
            Path(place, name)
            for name in files
            if name.endswith(".py") and not name.startswith(BUILD_DEPENDENT)
        ]
    return sorted(paths, key=lambda path: path.relative_to(folder).as_posix())

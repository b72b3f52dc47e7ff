"""CIFAR-10: the official archive, downloaded only on request, verified, unpacked once, and mapped.

    cifar-10-binary.tar.gz -- MD5 as published? --> train.bin  50,000 records --> mapped: all ranks
                                                    test.bin   10,000 records     share the pages
    record: 1 byte label, 1024 bytes red, 1024 green, 1024 blue (rows of 32)      3073 bytes

Disk: 170 MB archive and 184 MB unpacked.
Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009;
https://www.cs.toronto.edu/~kriz/cifar.html.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tarfile
import urllib.request
import zlib
from http.client import HTTPException
from pathlib import Path

import torch
from tqdm.auto import tqdm

from labkit.models.digits import digits
from labkit.models.images import Images
from labkit.models.names import known

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # published with it; detects damage
ARCHIVE_BYTES = 170_052_171
FOLDER = Path(__file__).resolve().parents[2] / "data"  # next to labkit, in the clone
MEMBERS = {
    "train": [f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6)],
    "test": ["cifar-10-batches-bin/test_batch.bin"],
}
RECORDS = 10_000  # images in each of the six files
RECORD_BYTES = 1 + 3 * 32 * 32
CHUNK = 2**20


class CorruptArchive(ValueError):
    """Raised if the archive, or a file unpacked from it, differs from the published one."""


def cifar10(root=None, download=False, split="train"):
    """Return CIFAR-10 as `Images` [3, 32, 32]: 50,000 for training, 10,000 for testing.

    root: the folder; None is data/ of the clone.
    download: True downloads the archive if it is missing; without a network it prints one line and
        returns the digits as [3, 32, 32] instead.
    Several processes may call it at once: one works, the others wait. Raises FileNotFoundError if
    the archive is missing without download=True, CorruptArchive if it is damaged, ValueError for an
    unknown split. No half-written file remains.
    """
    members = known("split", split, MEMBERS)
    root = FOLDER if root is None else Path(root)
    archive = root / "cifar-10-binary.tar.gz"
    unpacked = root / f"cifar-10-{split}.bin"
    if unpacked.exists():
        return read(unpacked, split)
    if not archive.exists() and not download:
        raise FileNotFoundError(
            f"{archive} does not exist: call cifar10(download=True) to download it (170 MB), "
            f"or save {URL} there"
        )
    root.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(root):
        if not archive.exists():
            try:
                fetch(URL, archive)
            except ConnectionError as error:
                print(
                    f"CIFAR-10 could not be downloaded ({error}): using digits at 3x32x32 instead.",
                    flush=True,
                )
                return digits("rgb", split)
        if not unpacked.exists():
            unpack(archive, unpacked, members)
    return read(unpacked, split)


@contextlib.contextmanager
def one_at_a_time(folder):
    """Hold a lock for one process of this machine; it is released when the process ends."""
    with open(folder / ".lock", "ab") as file:  # appending changes nothing in an existing file
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def whole_or_nothing(path):
    """Open a file that gets the name `path` if the block succeeds, and is removed otherwise."""
    partial = path.with_name(path.name + ".part")
    try:
        partial.unlink(missing_ok=True)
        with open(partial, "xb") as file:  # exclusive: a new file, so no link leads elsewhere
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def fetch(url, path):
    """Download `url` to `path` with a progress bar; keep only the published archive.

    Raises ConnectionError for network errors, CorruptArchive for other content.
    """
    try:
        response = urllib.request.urlopen(url, timeout=30)
    except OSError as error:
        raise ConnectionError(f"{url}: {error}") from error
    total = int(response.headers["Content-Length"] or ARCHIVE_BYTES)
    # disable=None: no bar if stderr is not a terminal
    bar = tqdm(total=total, unit="B", unit_scale=True, desc=path.name, disable=None)
    with response, bar, whole_or_nothing(path) as file:
        for chunk in received(response, url):
            file.write(chunk)
            bar.update(len(chunk))
        if file.tell() < total:  # a connection that closes early looks like the end of the file
            raise ConnectionError(
                f"{url}: the connection closed after {file.tell()} of {total} bytes"
            )
        file.flush()
        verify(Path(file.name), f"the content of {url}", "It was not kept.")


def received(response, url):
    try:
        while chunk := response.read(CHUNK):
            yield chunk
    except (OSError, HTTPException) as error:
        raise ConnectionError(f"{url}: {error}") from error


def verify(path, name, way_out):
    """Raise CorruptArchive about `name`, ending with `way_out`, unless the MD5 is as published."""
    with open(path, "rb") as file:
        actual = hashlib.file_digest(file, "md5").hexdigest()
    if actual != MD5:
        size = path.stat().st_size
        raise CorruptArchive(
            f"{name} is damaged or incomplete: {size} bytes with MD5 {actual}, "
            f"expected {ARCHIVE_BYTES} bytes with MD5 {MD5}. {way_out}"
        )


def unpack(archive, path, members):
    """Write the records of `members` in order to `path`; names in the archive become no paths.

    Raises CorruptArchive unless the archive is the published one.
    """
    way_out = f"Delete it and call cifar10(download=True), or download {URL} again."
    verify(archive, archive, way_out)
    size = RECORDS * RECORD_BYTES
    try:
        with tarfile.open(archive, "r:gz") as tar, whole_or_nothing(path) as file:
            for name in members:
                member = tar.getmember(name)
                if not member.isreg() or member.size != size:
                    raise CorruptArchive(
                        f"{archive}: {name} is not a file of {size} bytes. {way_out}"
                    )
                shutil.copyfileobj(tar.extractfile(member), file, CHUNK)
    except (KeyError, EOFError, tarfile.TarError, zlib.error) as error:
        raise CorruptArchive(f"{archive} cannot be unpacked: {error}. {way_out}") from error


def read(path, split):
    """Map the records of `path`. Raises CorruptArchive unless size and labels are CIFAR-10's."""
    size = path.stat().st_size
    expected = len(MEMBERS[split]) * RECORDS * RECORD_BYTES
    if size != expected:
        raise CorruptArchive(
            f"{path} has {size} bytes, expected {expected}. Delete it to unpack it again."
        )
    records = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).view(
        -1, RECORD_BYTES
    )
    labels = records[:, 0].to(torch.int64)
    if labels.max() > 9:
        raise CorruptArchive(
            f"{path} has the label {labels.max()}, expected 0 to 9. Delete it to unpack it again."
        )
    pixels = records[:, 1:].view(-1, 3, 32, 32)
    return Images(pixels, labels, f"{len(labels)} photographs of CIFAR-10 ({split}), 3x32x32")

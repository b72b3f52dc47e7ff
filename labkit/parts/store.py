"""A directory, here or behind any fsspec URL: a file in it is there whole, or not there.

    here      write NAME.part, fsync, rename to NAME, fsync the directory
    s3://     an object has its name once all of it has arrived
    memory:// likewise, for this process alone

After fsync a power cut cannot take the bytes back; after rename nobody can see half of them.
"""

import fcntl
import os
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Store:
    """url: a path, or what fsspec understands. Raises OSError where it cannot be written."""

    def __init__(self, url):
        self.url = str(url)
        self.fs, self.root = fsspec.core.url_to_fs(self.url)
        self.local = isinstance(self.fs, LocalFileSystem)
        self.fs.makedirs(self.root, exist_ok=True)

    def path(self, name):
        return f"{self.root}/{name}"

    def lock(self):
        """Hold the directory until close() or death; BlockingIOError where another process does."""
        if self.local:
            self._lock = open(self.path("lock"), "w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, name, fill):
        """fill(file) writes the file; returns what it returns."""
        if not self.local:
            self.fs.makedirs(self.path(name).rpartition("/")[0], exist_ok=True)
            with self.fs.open(self.path(name), "wb") as file:
                return fill(file)
        final = Path(self.path(name))
        final.parent.mkdir(exist_ok=True)
        part = final.with_name(f"{final.name}.part")
        try:
            with open(part, "wb") as file:
                result = fill(file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(final)
        finally:
            part.unlink(missing_ok=True)
        for directory in (final.parent, final.parent.parent):
            sync(directory)
        return result

    def open(self, name):
        return self.fs.open(self.path(name), "rb")

    def names(self, folder=""):
        """What the directory holds, or a folder in it."""
        self.fs.invalidate_cache()
        place = self.path(folder).rstrip("/")
        return [path.rpartition("/")[2] for path in self.fs.ls(place, detail=False)]

    def has(self, name):
        return self.fs.exists(self.path(name))

    def remove(self, name):
        if self.has(name):
            self.fs.rm(self.path(name), recursive=True)

    def close(self):
        if self.local:
            self._lock.close()


def sync(directory):
    """What has been renamed in it stays so."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

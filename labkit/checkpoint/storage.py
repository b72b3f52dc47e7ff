"""A directory, here or behind any fsspec URL: a file in it is there whole, or not there.

    here      write NAME.part, fsync, rename to NAME, fsync the directory
    s3://     an object has its name once all of it has arrived; a directory is only a name
    others    write NAME.part, move to NAME

After fsync a power cut cannot take the bytes back; after rename nobody can see half of them.
Where it can be, it is held by one run at a time: here with flock, on S3 with a lease (lease.py),
which needs a server that puts on a condition. Credentials and endpoint of S3 are the
environment's: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL. Held besides there: 50
MB of a file.
"""

import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from labkit.checkpoint.storage_lock import Lease
from labkit.own_files import lock_file, new_file, no_link


def without_password(url):
    """The URL as messages show it, without the user and password that may stand in it."""
    return re.sub("(?<=://)[^/@]*@", "", str(url))


class Store:
    """url: a path, or what fsspec understands. Its file system may raise more than OSError."""

    def __init__(self, url):
        self.url, self._lock = str(url), None
        self.s3 = self.url.startswith(("s3://", "s3a://"))
        # Its own connection, as the environment is now; and no memory of what was there before.
        fresh = {"skip_instance_cache": True, "use_listings_cache": False} if self.s3 else {}
        self.fs, self.root = fsspec.core.url_to_fs(self.url, **fresh)
        self.local = isinstance(self.fs, LocalFileSystem)

    def make(self):
        """On S3 there is nothing to make, and a bucket of a mistyped name shall not come to be."""
        if not self.s3:
            self.fs.makedirs(self.root, exist_ok=True)

    def path(self, name):
        return f"{self.root}/{name}"

    def lock(self):
        """Hold the directory until close() or death; BlockingIOError where another process does."""
        if self.local:
            lock = lock_file(self.path("lock"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._lock = lock
        elif self.s3:
            lease = Lease(self.fs, self.path("lock"))
            lease.take()
            self._lock = lease

    def write(self, name, fill):
        """fill(file) writes the file; returns what it returns."""
        if self.local:
            return self._write_here(Path(self.path(name)), fill)
        if self.s3:
            return self._write_object(self.path(name), fill)
        final = self.path(name)
        self.fs.makedirs(final.rpartition("/")[0], exist_ok=True)
        with self.fs.open(f"{final}.part", "wb") as file:
            result = fill(file)
        self.fs.mv(f"{final}.part", final)
        return result

    def _write_here(self, final, fill):
        final.parent.mkdir(exist_ok=True)
        no_link(final.parent)
        part = final.with_name(f"{final.name}.part")
        try:
            with new_file(part) as file:
                result = fill(file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(final)
        finally:
            part.unlink(missing_ok=True)
        for directory in (final.parent, final.parent.parent):
            sync(directory)
        return result

    def _write_object(self, path, fill):
        if self._lock:
            self._lock.check()
        file = self.fs.open(path, "wb")
        try:
            result = fill(file)
            file.close()
        except BaseException:
            file.closed = True  # closing it would make an object of what has been written so far
            with suppress(Exception):
                file.discard()
            raise
        return result

    def open(self, name):
        return self.fs.open(self.path(name), "rb")

    def size(self, name):
        """Bytes of a file; of what is no file, such as a device, 0."""
        self.fs.invalidate_cache()
        return self.fs.size(self.path(name))

    def names(self, folder=""):
        """What the directory holds, or a folder in it."""
        self.fs.invalidate_cache()
        try:
            paths = self.fs.ls(self.path(folder).rstrip("/"), detail=False)
        except FileNotFoundError:
            return []
        return [path.rpartition("/")[2] for path in paths]

    def has(self, name):
        return self.fs.exists(self.path(name))

    def remove(self, name):
        if self.local:
            no_link(Path(self.path(name)).parent)
            no_link(self.path(name))
        if self.has(name):
            self.fs.rm(self.path(name), recursive=True)

    def close(self):
        if self._lock:
            self._lock.close()


def sync(directory):
    """What has been renamed in it stays so."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

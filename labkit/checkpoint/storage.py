"""A directory, local or at any fsspec URL, with atomic writes: a file is complete or absent.

    local     write NAME.part by pieces, fsync, rename to NAME, fsync the directory
    s3://     an object gets its name when its upload is complete; a directory is only a prefix
    others    write NAME.part, move to NAME

fsync protects against power cuts; rename hides partial files. One run at a time may lock the
directory: locally with flock, on S3 with a lease (storage_lock.py), which needs a server with
conditional writes. S3 credentials and endpoint come from the environment: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL. Extra memory on S3: 50 MB of a file. S3 needs s3fs.
"""

import fcntl
import os
import re
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from labkit.checkpoint.storage_lock import Lease
from labkit.open_without_links import lock_file, new_file, no_link


def without_password(url):
    """Return the URL for messages, without user and password."""
    return re.sub("(?<=://)[^/@]*@", "", str(url))


PIECE = 8 << 20  # bytes


class Piecewise:
    """An open file whose pieces go to the disk while the next ones are hashed and written.

    Otherwise the disk would be idle until fsync. Only Linux can be asked for it.
    """

    def __init__(self, file):
        self.file = file
        self.begun = 0

    def write(self, data):
        self.file.write(data)
        end = self.file.tell()
        if end - self.begun >= PIECE and hasattr(os, "posix_fadvise"):
            self.file.flush()
            piece = self.begun, end - self.begun
            with suppress(OSError):  # it is only advice
                os.posix_fadvise(self.file.fileno(), *piece, os.POSIX_FADV_DONTNEED)
            self.begun = end


class Store:
    """A directory. url: a path or an fsspec URL. Its file system may raise more than OSError."""

    def __init__(self, url):
        self.url, self._lock = str(url), None
        self.s3 = self.url.startswith(("s3://", "s3a://"))
        if self.s3 and find_spec("s3fs") is None:
            install = f"{sys.executable} -m pip install s3fs=={fsspec.__version__}"
            raise ModuleNotFoundError(f"s3fs is not installed: {install}")
        # A new connection with today's environment, and no cached listings.
        fresh = {"skip_instance_cache": True, "use_listings_cache": False} if self.s3 else {}
        self.fs, self.root = fsspec.core.url_to_fs(self.url, **fresh)
        self.local = isinstance(self.fs, LocalFileSystem)

    def make(self):
        """Create the directory; not on S3, where a mistyped name must not create a bucket."""
        if not self.s3:
            self.fs.makedirs(self.root, exist_ok=True)

    def path(self, name):
        return f"{self.root}/{name}"

    def lock(self):
        """Hold the directory until close() or exit. BlockingIOError if another process holds it."""
        if self.local:
            lock = lock_file(self.path("lock"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._lock = lock
        elif self.s3:
            lease = Lease(self.fs, self.path("lock"))
            lease.take()
            self._lock = lease

    def write(self, name, fill, durable=True):
        """Write a file atomically: fill(file) writes its content. Returns the result of fill.

        durable=False: a power cut may remove the file's name again, until the next durable write
        into the same folder.
        """
        if self.local:
            return self._write_here(Path(self.path(name)), fill, durable)
        if self.s3:
            return self._write_object(self.path(name), fill)
        final = self.path(name)
        self.fs.makedirs(final.rpartition("/")[0], exist_ok=True)
        with self.fs.open(f"{final}.part", "wb") as file:
            result = fill(file)
        self.fs.mv(f"{final}.part", final)
        return result

    def _write_here(self, final, fill, durable):
        final.parent.mkdir(exist_ok=True)
        no_link(final.parent)
        part = final.with_name(f"{final.name}.part")
        try:
            with new_file(part) as file:
                result = fill(Piecewise(file))
                file.flush()
                os.fsync(file.fileno())
            part.replace(final)
        finally:
            part.unlink(missing_ok=True)
        for directory in (final.parent, final.parent.parent) if durable else ():
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
            file.closed = True  # closing it would create an object of the partial content
            with suppress(Exception):
                file.discard()
            raise
        return result

    def open(self, name):
        return self.fs.open(self.path(name), "rb")

    def size(self, name):
        """Return the size of a file in bytes; 0 if it is not a regular file, such as a device."""
        self.fs.invalidate_cache()
        return self.fs.size(self.path(name))

    def names(self, folder=""):
        """Return the names in the directory, or in a folder of it."""
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
    """Flush a directory, so that a rename in it survives a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

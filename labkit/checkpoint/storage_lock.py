"""A lock where no file can be locked: an object with a name in it, renewed while its holder lives.

    run A    put, if none ... renew ... renew ... killed
    run B         refused: it is renewed              looks ... looks ... put, if unchanged
                                                      |---- LEASE ----|

A put on a condition (If-None-Match: *, If-Match: the version seen) is atomic: of all that try at
once, one gets it. Nobody's clock is compared with another's: who comes looks for LEASE seconds.

Not guaranteed: that a holder which stood still for longer (stopped, cut off) stops at once when it
goes on. It asks before it begins a file; the file that it was in may still become one.
Gray and Cheriton, Leases: An Efficient Fault-Tolerant Mechanism, SOSP 1989.
"""

import os
import socket
import threading
import time
import uuid
from contextlib import suppress

RENEW, LEASE = 10.0, 30.0  # seconds


class Lease:
    """path: of the object. fs: an s3fs file system. Raises what it raises."""

    def __init__(self, fs, path):
        self.fs = fs
        bucket, key, _ = fs.split_path(path)
        self.path, self._object = path, {"Bucket": bucket, "Key": key}
        self.token, self._count = uuid.uuid4().hex, 0
        self._version, self._renewed = None, 0.0
        self._one_at_a_time, self._closing = threading.Lock(), threading.Event()

    def take(self):
        """Hold it until close(); BlockingIOError where another renews it."""
        if not self._put(IfNoneMatch="*"):
            version, holder = self._look()
            self._watch(version, holder)
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _watch(self, version, holder):
        words = f"{holder.get('host')}, process {holder.get('pid')}"
        print(f"{self.path} is of {words}: looks for {LEASE:.0f} s if that lives", flush=True)
        end = time.monotonic() + LEASE
        while version and time.monotonic() < end:
            time.sleep(RENEW / 4)
            now, _ = self._look()
            if now not in (None, version):
                raise BlockingIOError(words)
            version = now
        if not self._put(**({"IfMatch": version} if version else {"IfNoneMatch": "*"})):
            raise BlockingIOError("a run that came at the same time")

    def check(self):
        """OSError where another holds it now."""
        if time.monotonic() - self._renewed > 2 * RENEW:
            self.renew()
        if self._version is None:
            raise OSError("another run has taken over the directory: this one stood still too long")

    def renew(self):
        with self._one_at_a_time:
            if self._version is None:
                return
            try:
                ours = self._put(IfMatch=self._version)
            except FileNotFoundError:  # removed by hand
                ours = self._put(IfNoneMatch="*")
            if not ours:
                self._version = None

    def close(self):
        self._closing.set()
        self._thread.join()
        if self._version:
            with suppress(Exception):  # else it ends by itself, a lease later
                self.fs.call_s3("delete_object", **self._object, IfMatch=self._version)

    def _keep(self):
        while not self._closing.wait(RENEW):
            with suppress(Exception):  # tried again; a write that needs it says why it fails
                self.renew()

    def _put(self, **condition):
        """Whether it is ours now. A put that has arrived, but not its answer, counts as well."""
        self._count += 1
        mine = {"token": self.token, "count": str(self._count)}
        about = mine | {"host": socket.gethostname(), "pid": str(os.getpid())}
        body, began = f"{self.token} {self._count}".encode(), time.monotonic()
        try:
            put = {"Body": body, "Metadata": about, **condition}
            self._version = self.fs.call_s3("put_object", **self._object, **put)["ETag"]
        except OSError:
            version, holder = self._look()
            if version and holder.get("token") != self.token:
                return False
            if not version or mine.items() - holder.items():
                raise  # it was refused, and not because of another
            self._version = version
        self._renewed = began
        return True

    def _look(self):
        """(version, what its holder says of itself), or (None, {})."""
        try:
            answer = self.fs.call_s3("head_object", **self._object)
        except FileNotFoundError:
            return None, {}
        return answer["ETag"], answer["Metadata"]

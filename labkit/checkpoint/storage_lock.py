"""A lock for S3, which cannot lock files: an object that its holder renews while it lives.

    run A    put, if none ... renew ... renew ... killed
    run B         refused: it is renewed              looks ... looks ... put, if unchanged
                                                      |---- LEASE ----|

A conditional put (If-None-Match: *, If-Match: the version seen) is atomic: of concurrent puts,
one succeeds. Clocks are not compared: a newcomer watches the object for LEASE seconds.

Not guaranteed: a holder that was frozen or disconnected for longer may continue for a moment. It
checks before it begins a file; the file that it was writing may still be completed.
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
    """A lease on the object at `path`. fs: an s3fs file system, whose errors it raises."""

    def __init__(self, fs, path):
        self.fs = fs
        bucket, key, _ = fs.split_path(path)
        self.path, self._object = path, {"Bucket": bucket, "Key": key}
        self.token, self._count = uuid.uuid4().hex, 0
        self._version, self._renewed = None, 0.0
        self._one_at_a_time, self._closing = threading.Lock(), threading.Event()

    def take(self):
        """Hold the lease until close(). BlockingIOError if another process renews it."""
        if not self._put(IfNoneMatch="*"):
            version, holder = self._look()
            self._watch(version, holder)
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _watch(self, version, holder):
        owner = f"{holder.get('host')}, process {holder.get('pid')}"
        print(f"{self.path} is held by {owner}: waiting {LEASE:.0f} s for a renewal", flush=True)
        end = time.monotonic() + LEASE
        while version and time.monotonic() < end:
            time.sleep(RENEW / 4)
            now, _ = self._look()
            if now not in (None, version):
                raise BlockingIOError(owner)
            version = now
        if not self._put(**({"IfMatch": version} if version else {"IfNoneMatch": "*"})):
            raise BlockingIOError("another run took the lease at the same time")

    def check(self):
        """Raise OSError if another process holds the lease now."""
        if time.monotonic() - self._renewed > 2 * RENEW:
            self.renew()
        if self._version is None:
            raise OSError("another run has taken over the directory: this run was frozen too long")

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
            with suppress(Exception):  # otherwise it expires after LEASE seconds
                self.fs.call_s3("delete_object", **self._object, IfMatch=self._version)

    def _keep(self):
        while not self._closing.wait(RENEW):
            with suppress(Exception):  # tried again; a later write raises the reason
                self.renew()

    def _put(self, **condition):
        """Try a conditional put. Returns whether this process holds the lease.

        A put that has arrived without its answer counts as well.
        """
        self._count += 1
        identity = {"token": self.token, "count": str(self._count)}
        about = identity | {"host": socket.gethostname(), "pid": str(os.getpid())}
        body = f"{self.token} {self._count}".encode()
        began = time.monotonic()
        try:
            put = {"Body": body, "Metadata": about, **condition}
            self._version = self.fs.call_s3("put_object", **self._object, **put)["ETag"]
        except OSError:
            version, holder = self._look()
            if version and holder.get("token") != self.token:
                return False
            if not version or identity.items() - holder.items():
                raise  # refused for another reason than a second holder
            self._version = version
        self._renewed = began
        return True

    def _look(self):
        """Return (version, the holder's metadata), or (None, {})."""
        try:
            answer = self.fs.call_s3("head_object", **self._object)
        except FileNotFoundError:
            return None, {}
        return answer["ETag"], answer["Metadata"]

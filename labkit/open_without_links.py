"""Creates files in folders where other users may write, without following their links.

A folder of another user may contain a link instead of a lock or a partial file. Opening it as usual
would truncate or overwrite the link's target.
"""

import errno
import os


def new_file(path):
    """Open a new file for writing bytes. Replaces an existing file; removes a link."""
    if os.path.lexists(path):
        os.unlink(path)
    return open(path, "xb")  # exclusive creation follows no link


def lock_file(path):
    """Open the file to lock, without changing it. OSError if it is a link."""
    no_link(path)
    return open(path, "ab", opener=lambda name, how: os.open(name, how | os.O_NOFOLLOW, 0o666))


def no_link(path):
    """Raise OSError if the path is a link: writing or removing would affect its target."""
    if os.path.islink(path):
        raise OSError(errno.ELOOP, "unsafe symbolic link: remove it", os.fspath(path))

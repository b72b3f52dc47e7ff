"""Create files in folders where other users may write, without following their links.

A folder that comes from somebody else may hold a link in the place of a lock or of a half-written
file; opened as usual, it would empty or overwrite what the link leads to.
"""

import errno
import os


def new_file(path):
    """A new file, for writing bytes, in the place of whatever has this name; a link is removed."""
    if os.path.lexists(path):
        os.unlink(path)
    return open(path, "xb")  # exclusive: it makes the file, and follows no link


def lock_file(path):
    """The file to lock; nothing in it is changed. OSError where a link stands in its place."""
    no_link(path)
    return open(path, "ab", opener=lambda name, how: os.open(name, how | os.O_NOFOLLOW, 0o666))


def no_link(path):
    """Raise OSError where this is a link: what is written or removed would be what it leads to."""
    if os.path.islink(path):
        words = "it is a link, which may lead anywhere: remove it"
        raise OSError(errno.ELOOP, words, os.fspath(path))

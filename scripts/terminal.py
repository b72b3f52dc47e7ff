"""Output of the commands: one-line errors, aligned tables, and a line that is redrawn during a run."""

import errno
import os
import shutil
import signal
import sys
import time

OUTSIDE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)  # errors of the disk, not of the program


class UserError(Exception):
    """An error that the user can fix, in one line. `main` prints it and exits with 2."""


def say(text=""):
    print(text, flush=True)


def main(command, arguments):
    """Run a command and return its exit code; a UserError is printed as one line, Ctrl-C returns 130."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also ends child processes
    try:
        return command(arguments)
    except UserError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in OUTSIDE:
            raise
        print(f"lab: {error.strerror}: {error.filename or 'the disk'}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nlab: interrupted", file=sys.stderr)
        return 130


def table(rows, header=None):
    """Format rows of cells as aligned text: numbers to the right, words to the left."""
    rows = [[str(cell) for cell in row] for row in ([header] if header else []) + list(rows)]
    if not rows:
        return ""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    body = columns if not header else [column[1:] for column in columns]
    right = [all(is_number(cell) for cell in column) for column in body]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    if header:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def is_number(cell):
    try:
        float(cell.replace(",", "").rstrip("%"))
    except ValueError:
        return cell in ("", "-", "NaN")
    return True


class Line:
    """`label: detail, 12 s`, redrawn in place on a terminal; in a log, printed at the start and every minute."""

    def __init__(self, label):
        self.label = label
        self.start = time.monotonic()
        self.logged = None
        self.live = sys.stdout.isatty()

    @property
    def seconds(self):
        return time.monotonic() - self.start

    def show(self, detail=""):
        text = f"{self.label}  {detail}  {self.seconds:.0f} s"
        if self.live:
            sys.stdout.write(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}")
            sys.stdout.flush()
        elif self.logged is None or self.seconds - self.logged > 60:
            self.logged = self.seconds
            say(text)

    def clear(self):
        if self.live:
            sys.stdout.write("\r\033[K")

    def above(self, text):
        """Print a permanent line; the next show() is below it."""
        self.clear()
        say(text)

    def close(self, result):
        """Print the last, permanent line."""
        self.above(f"{self.label}  {result}  {self.seconds:.1f} s")

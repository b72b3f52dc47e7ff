"""Output while ranks run: complete lines that begin with their rank, and one progress bar.

[rank 0] step 10  loss 2.31
[rank 1] step 10  loss 2.29
[rank 0] … 4,812 more lines: run.logs[0]
"""

import sys
import time

from tqdm import tqdm

LINES_AT_ONCE = 200
LINES_PER_SECOND = 20
LINE_LENGTH = 500
LOOK_BYTES = 1 << 20  # of each log per poll: a rank may print faster than anybody reads
BAR_DELAY = 2.0  # seconds: shorter runs need no bar


class Tail:
    """Reader of the complete lines that were added to a file since the last call.

    longest: bytes to keep of a line that has not ended; LOOK_BYTES are read per call. None: no
    limit.
    """

    def __init__(self, path, longest=None):
        self.path = path
        self.longest = longest
        self.position = 0
        self.begun = b""

    def lines(self, final=False):
        """Yield the new lines.

        final: the writer has ended, so yield everything, also an incomplete line.
        """
        while added := self.read():
            *whole, rest = (self.begun + added).split(b"\n")
            self.begun = rest[: self.longest]
            yield from in_text(whole)
            if not final:
                return
        if final and self.begun:
            yield from in_text([self.begun])
            self.begun = b""

    def read(self):
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                added = file.read(LOOK_BYTES if self.longest else -1)
        except FileNotFoundError:
            return b""
        self.position += len(added)
        return added


def in_text(lines):
    """Yield text lines; a line that was redrawn in place (\\r) becomes several."""
    for line in lines:
        yield from line.decode(errors="replace").splitlines() or [""]


class Console:
    """Printer of the ranks' logs as they grow.

    Lines beyond the limit are counted and stay in the log.
    """

    def __init__(self, logs, quiet):
        self.tails = [Tail(path, longest=4 * LINE_LENGTH) for path in logs]
        self.left_out = [0] * len(logs)
        self.quiet = quiet
        self.budget = float(LINES_AT_ONCE)
        self.filled = time.monotonic()

    def show(self, final=False):
        now = time.monotonic()
        self.budget = min(LINES_AT_ONCE, self.budget + LINES_PER_SECOND * (now - self.filled))
        self.filled = now
        for rank, tail in enumerate(self.tails):
            for line in () if self.quiet else tail.lines(final):
                if self.budget >= 1:
                    self.budget -= 1
                    cut = line if len(line) <= LINE_LENGTH else line[:LINE_LENGTH] + " …"
                    print(f"[rank {rank}] {cut}", flush=True)
                else:
                    self.left_out[rank] += 1
            if final and self.left_out[rank]:
                print(
                    f"[rank {rank}] … {self.left_out[rank]:,} more lines: run.logs[{rank}]",
                    flush=True,
                )


class Bar:
    """A progress bar with the time left, in a notebook or terminal; removed after the run."""

    def __init__(self, quiet):
        self.quiet = quiet
        self.start = time.monotonic()
        self.shown = False
        self.handle = None

    def update(self, step, total):
        elapsed = time.monotonic() - self.start
        if self.quiet or elapsed < BAR_DELAY:
            return
        self.draw(tqdm.format_meter(step, total, elapsed, ncols=78, unit="step"))

    def record(self, row):
        """Ignore a row of run.records; show/live.py draws it."""

    def close(self):
        if self.shown:
            self.draw("")

    def draw(self, text):
        self.shown = True
        if not in_notebook():
            if sys.stderr.isatty():
                print(f"\r{text:78}", end="" if text else "\r", file=sys.stderr, flush=True)
            return
        from IPython.display import display

        content = {"text/plain": text}
        if self.handle is None:
            self.handle = display(content, raw=True, display_id=True)
        else:
            self.handle.update(content, raw=True)


def in_notebook():
    """Return True in a Jupyter kernel, where an output can be redrawn in place."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")

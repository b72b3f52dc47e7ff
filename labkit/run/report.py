"""Find which rank failed first, and why, from what the ranks left behind.

When one rank fails, its peers fail a moment later in a collective ("Connection closed by peer"),
and on gloo rank 0 is often the first to raise. So each rank is classified by what is known of it:

    raised     an exception of its own           -> the cause; the earliest one counts
    died       no report and no final event      -> the cause: killed, crashed, or left by os._exit
    finished   ended while others waited         -> the cause, if they lost their connection to it
    stopped    alive until launch stopped it     -> the cause, if the others timed out waiting for
    it frozen     by SIGSTOP                        -> the cause
    echo       an exception that another rank's end explains
"""

import itertools
import json
import os
import re
import signal
import traceback
from dataclasses import dataclass

from labkit import progress

ECHO = re.compile(
    r"onnection (closed|reset|was|refused)|roken pipe|remote process exited|ncclRemoteError"
    r"|hook of rank \d",
    re.I,
)
# Exit codes of ranks that end because of another rank: stopped by torchrun or by labkit.watchdog.
BECAUSE = (-signal.SIGTERM, os.EX_TEMPFAIL)
MILLISECONDS = re.compile(r"(\d+) ?m(?:s|illiseconds)")  # in gloo's and NCCL's messages
TIMEOUT = re.compile(r"tim(ed|ing) ?out|timeout", re.I)


@dataclass
class RankEnd:
    """How one rank ended. state: as above, or timeout (its wait timed out) or absent."""

    rank: int
    state: str
    error: dict
    rows: list  # its last operation in each group: progress.Row as dicts
    stack: str
    exit_code: int | None

    def waiting_in(self):
        row = progress.latest(self.rows)
        return named(row) if row else "no collective through labkit.comm yet"


def named(row):
    return f"collective {row['at']}: {row['op']} of {row['bytes']:,} bytes"


def read_exits(folder):
    """Return {pid: exit code} of ended ranks; None for a plain torchrun, which hides them."""
    file = folder / "exits.jsonl"
    if not file.exists():
        return None
    lines = file.read_text().splitlines()
    return {entry["pid"]: entry["exit_code"] for entry in map(json.loads, lines)}


def read_ends(folder, nproc, events, exits, frozen=()):
    """Return one RankEnd per rank, from events, black box, stack, and exit codes before any stop.

    frozen: ranks that were stopped by SIGSTOP.
    """
    ends = []
    for rank in range(nproc):
        kinds = {event["kind"]: event for event in events[rank]}
        stack = folder / f"rank-{rank}.stack"
        stack_text = stack.read_text() if stack.exists() else ""
        # An error that a frozen rank reports while it is continued and terminated is not the cause.
        error = {} if rank in frozen else kinds.get("error", {})
        exit_code = exits.get(kinds["start"]["pid"]) if exits and "start" in kinds else None
        if rank in frozen:
            state = "frozen"
        elif error:
            text = error["message"]
            state = "echo" if ECHO.search(text) else "timeout" if TIMEOUT.search(text) else "raised"
        elif "done" in kinds:
            state = "finished"
        elif "start" not in kinds:
            state = "absent"
        elif stack_text or (exits is not None and exit_code is None):
            # "leaving": stopped during its exit
            state = "finished" if "leaving" in kinds else "stopped"
        else:
            state = "died"
        rows = progress.read(folder / f"rank-{rank}.box")
        ends.append(RankEnd(rank, state, error, rows, stack_text, exit_code))
    return ends


def explain(ends, timed_out=None, broken=None):
    """Return (cause, message); cause: the RankEnd that failed first, None if no single rank did.

    broken: a sentence about a known fault below the ranks, of a node or its link (node_agents.py).
    """
    by_state = {
        state: [end for end in ends if end.state == state] for state in {end.state for end in ends}
    }
    waiting = [end for end in ends if end.state in ("echo", "timeout")]
    frozen = by_state.get("frozen")
    stopped = by_state.get("stopped")
    innocent = (None, *BECAUSE) if frozen else (os.EX_TEMPFAIL,) if stopped else ()
    died = [end for end in by_state.get("died", ()) if end.exit_code not in innocent]
    if raised := by_state.get("raised"):
        cause = min(raised, key=lambda end: end.error["time"])
        headline = f"rank {cause.rank} raised {cause.error['type']}: {cause.error['message']}"
    elif broken:
        cause = None
        headline = broken
    elif clash := mismatch(ends):
        cause = None
        headline = clash
    elif died:
        cause = min(died, key=lambda end: 2 * (not end.exit_code) + (end.exit_code in BECAUSE))
        headline = f"rank {cause.rank} {manner_of_death(cause)}"
    elif frozen:
        cause = frozen[0]
        ranks = ", ".join(str(end.rank) for end in frozen)
        headline = f"rank {ranks} is frozen: stopped by a signal (SIGSTOP)"
    elif timed_out:
        cause = None
        headline = (
            f"stopped after {timed_out:g} s, the limit of this launch (timeout={timed_out:g})"
        )
    elif waiting and by_state.get("finished"):
        cause = first_late(by_state["finished"], ends)
        headline = (
            f"rank {cause.rank} finished early, "
            f"while rank {waiting[0].rank} was still waiting for it"
        )
    elif stopped and (waiting or by_state.get("died")):
        cause = first_late(stopped, ends)
        headline = f"rank {cause.rank} hangs: the others were still waiting for it"
    elif waiting:
        cause = None
        headline = "the ranks were waiting for each other" + different_lines(waiting)
    elif absent := by_state.get("absent"):
        cause = absent[0]
        headline = f"rank {absent[0].rank} never started"
    else:
        cause = None
        headline = "the launcher failed"
    return cause, "\n".join([headline, *details(ends, cause)])


def first_late(candidates, ends):
    """Return the candidate that others wait for and that waits for none; else the first."""
    late = progress.late({end.rank: end.rows for end in ends})
    return next((end for end in candidates if end.rank in late), candidates[0])


def launcher_died(status):
    """Return a sentence if a signal killed torchrun, which takes the ranks with it, or None."""
    return f"torchrun died of {named_signal(status)}" if status < 0 else None


def named_signal(exit_code):
    return f"{signal.Signals(-exit_code).name} (signal {-exit_code})"


def mismatch(ends):
    """Return a sentence about a collective that two ranks of a group called differently, or None.

    Point-to-point messages always differ, and a killed rank may have been anywhere. A rank that
    finished (possible with a smaller tensor than its peers') or was stopped counts only together
    with a rank that waited.
    """
    aborted = any(end.exit_code == -signal.SIGABRT for end in ends)
    if any(end.state == "died" and end.exit_code not in (None, -signal.SIGABRT) for end in ends):
        return None
    waited = ("echo", "timeout", "died", *(["stopped"] if aborted else []))
    known = [end for end in ends if end.state in (*waited, "finished", "stopped")]
    for first, second in itertools.combinations(known, 2):
        if first.state not in waited and second.state not in waited:
            continue
        if rows := progress.differ(first.rows, second.rows):
            first_row, second_row = map(named, rows)
            return (
                f"ranks {first.rank} and {second.rank} called different collectives: "
                f"rank {first.rank} is in {first_row}; rank {second.rank} is in {second_row}"
            )
    return None


def different_lines(waiting):
    lines = {end.error["line"]: end.rank for end in waiting}
    if len(lines) < 2:
        return ""
    return ", at different lines: " + "; ".join(
        f"rank {rank} at `{line}`" for line, rank in lines.items()
    )


def manner_of_death(end):
    if end.exit_code is None:
        return "died without a Python exception (killed, or crashed in native code)"
    if end.exit_code == 0:
        return "left early with exit code 0, before its work was done"
    if end.exit_code > 0:
        return f"left early with exit code {end.exit_code}"
    killed = end.exit_code == -signal.SIGKILL
    hint = ": killed from outside, often because memory ran out" if killed else ""
    return f"died of {named_signal(end.exit_code)}{hint}"


def details(ends, cause):
    """Yield the cause's line, last collective and traceback, and one line for each other rank."""
    if cause is not None:
        if cause.error.get("line"):
            yield f"    at line {cause.error['lineno']}: {cause.error['line']}"
        yield f"    last collective of rank {cause.rank}: {cause.waiting_in()}"
    for end in ends:
        if end is cause:
            continue
        if end.state in ("echo", "timeout"):
            yield f"    {its_wait(end)}"
        elif end.state == "raised":
            yield f"    rank {end.rank} raised {end.error['type']}: {end.error['message']}"
        else:
            yield (
                f"    rank {end.rank} {'was running' if end.state == 'stopped' else end.state} "
                f"({end.waiting_in()})"
            )
    for end in ends:
        reports = traceback.__file__ in end.stack  # it was stopped while it wrote its own error
        if end.stack and end.state == "stopped" and not reports:
            yield f"\nrank {end.rank} was here when it was stopped:\n{own_frames(end.stack)}"
    if cause is not None and cause.error:
        yield f"\n{cause.error['traceback']}"


def its_wait(end):
    """Return where a rank waited for others, in which collective, and how its wait ended."""
    where = f"at `{end.error['line']}` ({end.waiting_in()})"
    if end.state == "echo":
        return f"rank {end.rank} waited {where} until another rank ended"
    limit = MILLISECONDS.search(end.error["message"])
    seconds = f"{int(limit[1]) / 1e3:.3g} s " if limit else ""
    return f"rank {end.rank} waited {seconds}{where} and timed out"


def own_frames(stack):
    """Return the innermost frame and the frames of a cell; the frames between them do not help."""
    lines = [line for line in stack.splitlines() if line.startswith("  File")]
    shown = lines[:1] + [line for line in lines[1:] if "<cell>" in line]
    return "\n".join(re.sub(r'"[^"]*/', '"', line) for line in shown)

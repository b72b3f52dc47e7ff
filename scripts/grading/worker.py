"""Runs in the sandbox: reads requests from stdin, a JSON line each, and answers each but the first with one on stdout.

{"limits": {...}}                                   the limits of this process and of all that it starts
{"cells": [...], "name": ...}                       the source of an answer, or why there is none
{"cells": ..., "name": ..., "ranks": 2, ...}        that answer on two ranks: its cases
"""

import json
import os
import resource
import sys
import time

from grading import answers, cases
from labkit.run import client
from labkit.run.exercise import is_stub
from labkit.run.launch import LaunchError, launch
from labkit.run.report import ECHO, TIMEOUT

LONGEST = 1_000  # characters of a message or a line
HINTS = {"[Errno 27]": " (an answer may print or write 67 MB)", "[Errno 28]": " (an answer may write 268 MB)"}
MOST = 12  # failed cases that are reported
EMPTY = {"passed": 0, "tried": 0, "failed": [], "rank": 0}  # of an answer that did not run


def main():
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what labkit prints does not belong among the answers
    for line in sys.stdin:
        request = json.loads(line)
        if "limits" in request:
            limit(request["limits"])
            continue
        start = time.monotonic()
        try:
            result = launched(request) if "ranks" in request else source(request)
        except Exception as error:  # of this file or labkit: the row says so, and the next request is read
            result = {"finished": False, "error": f"{type(error).__name__}: {error}"}
        result = EMPTY | shortened(result) | {"seconds": round(time.monotonic() - start, 2)}
        channel.write(json.dumps(result) + "\n")


def limit(limits):
    """Set resource limits, {"AS": bytes, "NPROC": number ...}.

    The soft limit only for FSIZE: the checker of a checkpoint raises and lowers it, to stop a write half way.
    """
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1] if name == "FSIZE" else value
        resource.setrlimit(number, (value, hard))


def shortened(result):
    short = {name: result[name][:LONGEST] for name in ("error", "line") if name in result}
    return result | short | {"failed": [why[:LONGEST] for why in result.get("failed", [])[:MOST]]}


def source(request):
    """Return {"finished", "answer": source, "line": where it begins}; with "error" if there is nothing to run."""
    try:
        pieces = answers.pieces(request["cells"], request["name"])
    except answers.Unreadable as error:
        return {"finished": False, "error": str(error), "line": error.line}
    answer = next(piece for piece in reversed(pieces) if f"def {request['name']}(" in piece.text)
    begin = f"{answers.where(answer.cell, answer.line)}: {answer.text.strip().splitlines()[0]}"
    found = {"line": begin, "answer": "\n\n".join(piece.text for piece in pieces)[: 20 * LONGEST]}
    return found | ({"finished": False, "error": "not solved yet"} if is_stub(answer.text) else {"finished": True})


def launched(request):
    """Return the result of one run: finished, passed, tried, by_rank (cases tried), failed; rank, error and line."""
    pieces = answers.pieces(request["cells"], request["name"])
    words = (request[name] for name in ("name", "checker", "source", "cpu_seconds"))
    text, places = cases.program(pieces, *words)
    if "torch.optim" in text:  # only before the first run: the agent stays
        client.COMMAND = [sys.executable, "-m", "grading.agent", "torch._dynamo"]
    failure = None
    try:
        run = launch(text, nproc=request["ranks"], quiet=True, device="cpu", **request["options"])
    except LaunchError as error:
        run, failure = error.run, error
    except SyntaxError as error:  # such as `return` outside a function: it parses, and does not compile
        return {"finished": False, "error": f"SyntaxError: {error.msg}"}
    rows = run.rows()
    ranks = [[row for row in rows if row["rank"] == rank] for rank in range(request["ranks"])]
    finished = failure is None and all(any("end" in row for row in of) for of in ranks)
    tried = [[row for row in of if "case" in row] for of in ranks]
    if finished:
        return counted(tried, tried) | {"finished": True}
    stopped = first_stopped(tried, failure)
    return counted(tried, [tried[stopped]]) | {"finished": False, "rank": stopped} | described(failure, places)


def counted(tried, counting):
    """Return the cases: tried by each rank; passed and tried by the ranks that count; the words of failed ones."""
    rows = [row for of in counting for row in of]
    steps = range(max(map(len, counting)))
    failed = [row for step in steps for row in at(tried, step) if not row["case"]]
    counts = {"passed": sum(row["case"] for row in rows), "tried": len(rows), "by_rank": [len(of) for of in tried]}
    return counts | {"failed": list(dict.fromkeys(row["why"] for row in failed))}


def at(tried, step):
    return [of[step] for of in tried if step < len(of)]


def first_stopped(tried, failure):
    """Return the rank whose cases count after a failure: the first that raised, else the one that got least far.

    The first by its number, and not by time, which is a matter of milliseconds: two gradings must give the same points.
    """
    raised = errors(failure)
    return min(raised) if raised else min(range(len(tried)), key=lambda rank: len(tried[rank]))


def errors(failure):
    """Return {rank: its error event} of the ranks that raised an error of their own, not because of another rank."""
    last = {} if failure is None else {rank: of[-1] for rank, of in enumerate(failure.run.events) if of}
    found = {rank: event for rank, event in last.items() if event["kind"] == "error"}
    own = {rank: event for rank, event in found.items() if not (ECHO.search(event["message"]) or is_late(event))}
    return own if getattr(failure, "cause", None) is not None else {}


def is_late(event):
    return bool(TIMEOUT.search(event["message"]))


def described(failure, places):
    """Return {"error", "line"} of a failed run: the line is the learner's, if the error was raised there."""
    if failure is None:
        return {"error": "the answer ended the process before the checker was done"}
    raised = errors(failure)
    if not raised:
        return {"error": str(failure).splitlines()[0]}
    event = raised[min(raised)]
    text = event["message"] if event["type"] == "AssertionError" else f"{event['type']}: {event['message']}"
    text += "".join(hint for sign, hint in HINTS.items() if sign in text)
    number = event["lineno"] or 0
    for first, count, piece in places:
        if first <= number < first + count:
            return {"error": text, "line": f"{answers.where(piece.cell, piece.line + number - first)}: {event['line']}"}
    return {"error": text}


if __name__ == "__main__":
    main()

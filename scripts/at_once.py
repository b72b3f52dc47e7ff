"""Several notebooks at once, each in a process of its own: forked from one that has imported papermill, so it starts
at once, and what it sets (the folder of its figures is a variable of the environment) is set for it alone."""

import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time

import batch
import results
from terminal import Line

FORK = multiprocessing.get_context("fork")
COURSE = batch.ROOT / "figures" / "course.json"  # what each notebook took once: how long it is beside the others


def run(jobs, folder, limit, timeout, records):
    """Run the jobs, at most `limit` at once; records[job.name] is filled as they end.

    Ctrl-C and SIGTERM end all of them with their kernels and ranks, and so does the death of this process.
    """
    import nbconvert  # noqa: F401  for the processes that are forked from here
    import papermill  # noqa: F401

    line, pace = Line("jobs"), Pace(jobs)
    ours, held_open = os.pipe()  # nobody writes into it: it ends with this process
    waiting, running = list(jobs), {}
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                job = waiting.pop(0)
                results.clear(folder, job)
                facts = {"at_once": min(limit, len(jobs))}
                child = FORK.Process(target=work, args=(job, folder, timeout, facts, ours, held_open))
                child.start()
                running[child.sentinel] = child, job, time.monotonic()
            line.show(f"{len(jobs) - len(waiting) - len(running)} of {len(jobs)} {pace.bar(running)}")
            for sentinel in multiprocessing.connection.wait(list(running), timeout=0.5):
                child, job, started = running.pop(sentinel)
                child.join()
                seconds = time.monotonic() - started
                lost = {"error": f"its process ended with {child.exitcode}", "seconds": seconds}
                record = records[job.name] = results.read(folder, job) or lost
                pace.add(job, seconds)
                line.above(f"{job.name}  {record['error'] or 'ok'}  {record['seconds']:.1f} s")
    except BaseException:
        stop([child for child, _, _ in running.values()])
        raise
    finally:
        line.clear()
        os.close(ours)
        os.close(held_open)


def work(job, folder, timeout, facts, ours, held_open):
    """One job, in its own process: run it, and write its record last."""
    os.setpgrp()  # Ctrl-C at the terminal reaches the parent alone, which passes it on once
    os.close(held_open)
    threading.Thread(target=end_with_parent, args=(ours,), daemon=True).start()
    place = folder / job.name
    try:
        try:
            outcome = batch.execute(job.path, place, job.values, timeout=timeout, progress=False)
            facts |= {"error": outcome.error, "seconds": round(outcome.seconds, 1)} | batch.headline(place, job.path)
        except Exception as error:
            place.mkdir(parents=True, exist_ok=True)
            facts |= {"error": batch.one_line(error), "seconds": 0.0}
        results.write(folder, job, facts)
    except OSError as error:
        sys.exit(f"lab: {error.strerror}: {error.filename or place}")
    except KeyboardInterrupt:
        sys.exit(130)


def end_with_parent(ours):
    os.read(ours, 1)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def stop(children):
    held = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for child in children:
        os.kill(child.pid, signal.SIGINT)
    for child in children:
        child.join(4 * batch.GRACE)
        child.kill()  # its kernel, if it has one still, ends with it
        child.join()
    signal.signal(signal.SIGINT, held[0])
    signal.signal(signal.SIGTERM, held[1])


class Pace:
    """How far the jobs are. A job counts by the time that its notebook took in the course, if that is known."""

    def __init__(self, jobs):
        course = json.loads(COURSE.read_text()) if COURSE.exists() else {}
        known = [facts["seconds"] for facts in course.values()]
        usual = sum(known) / len(known) if known else 1.0
        self.share = {job.name: course.get(job.path.stem, {}).get("seconds", usual) for job in jobs}
        self.done = self.took = 0.0

    def add(self, job, seconds):
        self.done += self.share[job.name]
        self.took += seconds

    def bar(self, running):
        """`|#####     | about 3 min left`, once one job has ended."""
        total = sum(self.share.values())
        drawn = f"|{'#' * int(20 * self.done / total):20}|"
        if not self.done:
            return drawn
        now = time.monotonic()
        left = (total - self.done) * self.took / self.done - sum(now - started for _, _, started in running.values())
        left = max(left, 0.0) / max(len(running), 1)
        return f"{drawn} about {left:.0f} s left" if left < 100 else f"{drawn} about {left / 60:.0f} min left"

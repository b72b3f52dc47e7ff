"""Run several notebooks in parallel, each in its own process.

A process is forked from one that has imported papermill, so it starts at once, and its environment variables (such as
the folder of its figures) are its own.
"""

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
COURSE = batch.ROOT / "figures" / "course.json"  # seconds of each notebook, which weigh the progress bar


def run(jobs, folder, limit, timeout, records):
    """Run the jobs, at most `limit` in parallel; records[job.name] is filled as they end.

    Ctrl-C, SIGTERM and the death of this process end all of them, with their kernels and ranks.
    """
    import nbconvert  # noqa: F401  imported before forking
    import papermill  # noqa: F401

    line = Line("jobs")
    pace = Pace(jobs)
    ours, held_open = os.pipe()  # nothing is written to it: it closes with this process
    waiting = list(jobs)
    running = {}
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
    """Run one job in its own process, and write its record last."""
    os.setpgrp()  # Ctrl-C at the terminal reaches only the parent, which forwards it once
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
        child.kill()  # its kernel, if it still has one, ends with it
        child.join()
    signal.signal(signal.SIGINT, held[0])
    signal.signal(signal.SIGTERM, held[1])


class Pace:
    """The progress of the jobs, weighted by the time of each notebook in the course, if known."""

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
        """Return `|#####     | about 3 min left`, after one job has ended."""
        total = sum(self.share.values())
        drawn = f"|{'#' * int(20 * self.done / total):20}|"
        if not self.done:
            return drawn
        now = time.monotonic()
        left = (total - self.done) * self.took / self.done - sum(now - started for _, _, started in running.values())
        left = max(left, 0.0) / max(len(running), 1)
        return f"{drawn} about {left:.0f} s left" if left < 100 else f"{drawn} about {left / 60:.0f} min left"

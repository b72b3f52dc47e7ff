"""The folder of a batch: one folder a job, and in it result.json, written last.

A job is finished where its result.json says so for these parameters and this notebook. Everything else is run again:
what failed, what is half-written, what a changed notebook left.
"""

import fcntl
import json
import shutil

from terminal import UserError

FORMAT = 1  # of a folder; one of another format is refused
MARK = "lab-run.json"  # makes a folder ours; locked while a command works in it
RECORD = "result.json"


def claim(folder):
    """Lock the folder, made if need be; UserError if it is not ours. Returns the open file that holds the lock."""
    mark = folder / MARK
    if folder.is_dir() and not mark.exists():
        for other in folder.iterdir():
            raise UserError(f"--out {folder} holds something else ({other.name}): name a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"--out {folder}: a file is in its place; name another folder") from None
    lock = mark.open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"--out {folder} is in use by another lab run: wait for it, or name another folder") from None
    lock.seek(0)
    written = lock.read()
    if not written:
        lock.write(json.dumps({"format": FORMAT}))
        lock.flush()
    elif written != json.dumps({"format": FORMAT}):
        raise UserError(f"--out {folder} was written by another version of lab run: name a new folder")
    return lock


def identity(job):
    return {"sha256": job.sha256, "parameters": job.values}


def read(folder, job):
    """The job's record; None where there is none that can be read."""
    try:
        record = json.loads((folder / job.name / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def finished(folder, job):
    """The record of a finished job; None if it is to be run."""
    record = read(folder, job)
    if not record or record.get("error") or not (folder / job.name / f"{job.path.stem}.html").exists():
        return None
    return record if record.items() >= json.loads(json.dumps(identity(job))).items() else None


def clear(folder, job):
    """Remove what an earlier run of the job has left."""
    if (folder / job.name).exists():
        shutil.rmtree(folder / job.name)


def write(folder, job, facts):
    """The record, in one step: a killed command leaves it whole or not at all."""
    record = folder / job.name / RECORD
    half = record.with_suffix(".half")
    half.write_text(json.dumps(identity(job) | facts, indent=1) + "\n")
    half.replace(record)

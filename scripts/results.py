"""The folder of a batch: one folder per job with result.json, which is written last.

A job is finished if its result.json has these parameters and this notebook. Other jobs run again: failed ones, half-
written ones, and those of a changed notebook.
"""

import fcntl
import json
import shutil

from terminal import UserError

FORMAT = 1  # of a folder; other formats are refused
MARK = "lab-run.json"  # marks a folder of `lab run`; locked while a command works in it
RECORD = "result.json"


def claim(folder):
    """Lock the folder, and make it if needed; UserError if it has other files. Returns the locked file."""
    mark = folder / MARK
    if folder.is_dir() and not mark.exists():
        for other in folder.iterdir():
            raise UserError(f"--out {folder} has other files ({other.name}): use a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"--out {folder} is a file: use another folder") from None
    lock = mark.open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"--out {folder} is in use by another lab run: wait for it, or use another folder") from None
    lock.seek(0)
    written = lock.read()
    if not written:
        lock.write(json.dumps({"format": FORMAT}))
        lock.flush()
    elif written != json.dumps({"format": FORMAT}):
        raise UserError(f"--out {folder} was written by another version of lab run: use a new folder")
    return lock


def identity(job):
    return {"sha256": job.sha256, "parameters": job.values}


def read(folder, job):
    """Return the job's record; None without a readable one."""
    try:
        record = json.loads((folder / job.name / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def finished(folder, job):
    """Return the record of a finished job; None if it must run."""
    record = read(folder, job)
    if not record or record.get("error") or not (folder / job.name / f"{job.path.stem}.html").exists():
        return None
    return record if record.items() >= json.loads(json.dumps(identity(job))).items() else None


def clear(folder, job):
    """Remove the results of an earlier run of the job."""
    if (folder / job.name).exists():
        shutil.rmtree(folder / job.name)


def write(folder, job, facts):
    """Write the record atomically."""
    record = folder / job.name / RECORD
    half = record.with_suffix(".half")
    half.write_text(json.dumps(identity(job) | facts, indent=1) + "\n")
    half.replace(record)

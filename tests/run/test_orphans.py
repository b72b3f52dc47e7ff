"""Whatever ends a launch, in a program or a notebook, and at whatever moment: two seconds later nothing of it is left.

python tests/run/test_orphans.py 100 7      that many endings at random moments; another seed draws others
"""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager, suppress

import psutil
import pytest
from jupyter_client import KernelManager

AFTER, LATE = 2.0, 20.0  # seconds: on a machine of one's own, and where others are at work, too
LIMIT = 90.0  # seconds for a kernel or a program to begin, or to end by itself
MARK = "LABKIT_TEST_TRIAL"  # in the environment of all that descend from a trial: orphans have other parents

ENDLESS = {
    "in collectives": "launch('while True: comm.barrier()', quiet=True)",
    "deaf to SIGTERM": "launch('import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(90)', quiet=True)",
    "with children": 'launch(\'import subprocess; subprocess.run(["sleep", "90"])\', nproc=3, quiet=True)',
    "again and again": "launch('raise ValueError', restarts=10**6, quiet=True)",
    "cold": "launch('while True: comm.barrier()', cold=True, quiet=True)",
    "short ones": "while True: launch('record(x=1)', quiet=True)",
}
PROGRAM = """
import torch  # interrupted in the middle, it cannot be imported again
from labkit.run import launch
if {warm}:
    launch("record(x=1)", quiet=True)
open({begun!r}, "w").close()
{endless}
"""


def program(endless, warm, folder):
    return PROGRAM.format(endless=ENDLESS[endless], warm=warm, begun=str(folder / "begun"))


def marked(mark):
    """All living processes of a trial."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def all_gone(mark, allowed=set):
    """Wait until nothing of a trial is there, but for the pids that are allowed() to be; returns the seconds."""
    start = time.monotonic()
    while found := [process for process in marked(mark) if process.pid not in allowed()]:
        assert time.monotonic() < start + LATE, found
        time.sleep(0.02)
    return time.monotonic() - start


def wait_for(condition):
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def running(code, folder, **environment):
    """(process, mark) of a Python program, once it has begun its launches."""
    mark = uuid.uuid4().hex
    environment |= {MARK: mark}
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | environment, stderr=subprocess.DEVNULL)
    try:
        wait_for((folder / "begun").exists)
        yield process, mark
    finally:
        clear_away(process.kill, mark)
        process.wait()


@contextmanager
def notebook(code, folder):
    """(manager of a kernel, its client, mark); the kernel has begun the launches."""
    mark, manager = uuid.uuid4().hex, KernelManager()
    manager.start_kernel(env=os.environ | {MARK: mark})
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=LIMIT)
        client.execute(code, stop_on_error=False)  # else what follows is not done
        wait_for((folder / "begun").exists)
        yield manager, client, mark
    finally:
        client.stop_channels()
        clear_away(lambda: manager.shutdown_kernel(now=True), mark)


def clear_away(end, mark):
    end()
    for process in marked(mark):
        with suppress(psutil.Error):
            process.kill()


def pid(manager):
    return manager.provisioner.pid


def kernel_and_agent(manager):
    """The kernel's pid, and those of its own children: the warm agent may stay for the next launch."""
    with suppress(psutil.Error):
        kernel = psutil.Process(pid(manager))
        return {kernel.pid, *(child.pid for child in kernel.children())}
    return set()


def a_program(numbers, code, folder, wait):
    with running(code, folder) as (process, mark):
        wait()
        for number in numbers:
            process.send_signal(number)
        seconds = all_gone(mark, lambda: {process.pid})  # Python with torch takes its own time to go
        process.wait(LIMIT)
        return seconds


def a_kernel_is_interrupted(code, folder, wait):
    """The kernel and one agent stay, and the next launch works."""
    with notebook(code, folder) as (manager, client, mark):
        wait()
        manager.interrupt_kernel()
        seconds = all_gone(mark, lambda: kernel_and_agent(manager))
        again = "from labkit.run import launch\nassert launch('record(x=1)', quiet=True).records['x'].sum() == 2"
        answer = client.execute_interactive(again, output_hook=lambda message: None, timeout=LIMIT)
        assert answer["content"]["status"] == "ok", answer["content"]
        assert len(kernel_and_agent(manager)) == 2
        return seconds


def a_kernel_is_killed(code, folder, wait):
    with notebook(code, folder) as (manager, _, mark):
        wait()
        os.kill(pid(manager), signal.SIGKILL)
        return all_gone(mark)


def a_kernel_is_restarted(now, code, folder, wait):
    with notebook(code, folder) as (manager, _, mark):
        wait()
        manager.restart_kernel(now=now)
        return all_gone(mark, lambda: kernel_and_agent(manager))


WAYS = {
    "a program is interrupted": lambda *trial: a_program([signal.SIGINT], *trial),
    "a program is interrupted twice": lambda *trial: a_program([signal.SIGINT] * 2, *trial),
    "a program is killed": lambda *trial: a_program([signal.SIGKILL], *trial),
    "a kernel is interrupted": a_kernel_is_interrupted,
    "a kernel is killed": a_kernel_is_killed,
    "a kernel is restarted": lambda *trial: a_kernel_is_restarted(False, *trial),
    "a kernel is restarted at once": lambda *trial: a_kernel_is_restarted(True, *trial),
}


def try_to_end(way, folder, seed):
    """One trial: (what it was, in words; how many seconds it took)."""
    chance = random.Random(f"{way} {seed}")
    endless, warm = chance.choice([*ENDLESS]), chance.random() < 0.5
    seconds = chance.uniform(0, 1.5 if warm else 5)
    words = f"{way}; {endless}, {'warm' if warm else 'from its start'}, after {seconds:.2f} s"
    try:
        return words, WAYS[way](program(endless, warm, folder), folder, lambda: time.sleep(seconds))
    except AssertionError as error:
        raise AssertionError(f"{words}: {error}") from None


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_seconds_after_its_end_nothing_of_a_launch_is_left(tmp_path, way):
    try_to_end(way, tmp_path, seed=0)


KEPT = """
import time
from labkit.run import launch
try:
    launch("pass", device="cpu")
except KeyboardInterrupt as error:
    kept = error  # as a notebook keeps it, and with it all that was under way
    time.sleep(90)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_agent_that_still_imports_ends_at_once(tmp_path, number):
    (tmp_path / "torch.py").write_text(f"import time\nopen({str(tmp_path / 'begun')!r}, 'w')\ntime.sleep(90)\n")
    with running(KEPT, tmp_path, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}") as (process, mark):
        process.send_signal(number)
        all_gone(mark, lambda: {process.pid})


if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    signal.signal(signal.SIGINT, signal.default_int_handler)
    count, seed = (int(word) for word in [*sys.argv[1:], "0"][:2])
    late = 0
    for trial in range(count):
        way = [*WAYS][trial % len(WAYS)]
        with tempfile.TemporaryDirectory() as folder:
            words, seconds = try_to_end(way, Path(folder), seed * count + trial)
        late += seconds > AFTER
        print(trial, words, f"gone in {seconds:.2f} s", "LATE" * (seconds > AFTER), flush=True)
    sys.exit(f"{late} of {count} later than {AFTER:g} s" if late else 0)

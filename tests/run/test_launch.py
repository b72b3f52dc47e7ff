"""The launcher on real ranks: its results, and the message of each kind of failure."""

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from functools import partial
from threading import Event
from unittest import mock

import psutil
import pytest
import torch

from labkit.run import LaunchError, console, launch, launch_monitor
from labkit.run import warm_agent as run_agent
from labkit.run.client import AgentClient, agent
from labkit.run.launch_monitor import has_left
from labkit.run.report import RankEnd, explain, its_wait, read_ends
from labkit.run.warm_agent import end_descendants, say

QUICK = {"collective_timeout": 30, "timeout": 100, "quiet": True}
HANGS = {"collective_timeout": 5}  # seconds, from when all ranks are there


def below_agent():
    return psutil.Process(agent().process.pid).children(recursive=True)


def failure(source, **options):
    with pytest.raises(LaunchError) as caught:
        launch(source, **{**QUICK, **options})
    assert below_agent() == []
    return str(caught.value)


def interrupt_what_runs():
    """Ctrl-C, once the agent has a job and two ranks below it."""

    def interrupt():
        while len(below_agent()) < 3:
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    agent()
    threading.Thread(target=interrupt, daemon=True).start()


def wait_until_gone(folder):
    end = time.monotonic() + 30
    while folder.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def double(context, value):
    context.record(doubled=2 * value, rank_of=context.rank)


def test_a_cell_runs_on_every_rank_and_records_come_back():
    run = launch("x = torch.tensor([rank + 1.0]); comm.all_reduce(x); record(total=x.item())", nproc=3, quiet=True)
    assert run.records["total"].tolist() == [6.0, 6.0, 6.0]
    assert run.records["rank"].tolist() == [0, 1, 2]


def test_a_function_travels_as_source_or_by_name():
    for target in (double, "test_launch:double"):
        assert launch(target, value=21, quiet=True).records["doubled"].tolist() == [42, 42]


@pytest.mark.slow
def test_what_the_first_optimizer_imports_is_imported_once_for_all_later_jobs():
    launch("torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)", quiet=True)
    run = launch("import sys; record(imported='torch._dynamo' in sys.modules)", quiet=True)
    assert run.records["imported"].tolist() == [True, True]


@pytest.mark.slow
def test_ranks_that_leave_at_once_do_not_cut_off_slower_ones():
    for _ in range(6):
        launch("pass", nproc=4, quiet=True)


def test_a_script_runs_as_torchrun_runs_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import argparse, os, torch, torch.distributed as dist\n"
        "parser = argparse.ArgumentParser(); parser.add_argument('--max-steps', type=int)\n"
        "dist.init_process_group('gloo')\n"
        "print('steps', parser.parse_args().max_steps, 'of rank', dist.get_rank(), 'of', dist.get_world_size())\n"
    )
    run = launch(str(script), max_steps=7)
    assert run.logs[1].read_text().strip().endswith("steps 7 of rank 1 of 2")


@pytest.mark.slow
def test_the_shell_command_does_the_same():
    run = launch("test_launch:double", value=21, quiet=True)
    assert run.command.startswith("torchrun --nproc-per-node 2 --rdzv-backend c10d --rdzv-conf store_type=file")
    assert run.command.endswith(" -m labkit.run.worker test_launch:double value=21")
    folder = os.path.dirname(__file__)
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    environment = os.environ | {"PYTHONPATH": folder, "PATH": path}
    done = subprocess.run(["sh", "-c", run.command], capture_output=True, text=True, cwd=folder, env=environment)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(row["rank_of"] for row in rows) == [0, 1], done.stderr


@pytest.mark.slow
def test_the_cold_path_gives_the_same_run():
    assert launch("record(sum=rank)", cold=True, quiet=True).records["sum"].tolist() == [0, 1]


LISTENING = """
import psutil
family = [psutil.Process(), *psutil.Process().parents()[:2]]
found = [one.laddr.ip for process in family for one in process.net_connections("inet") if one.status == "LISTEN"]
record(elsewhere=[ip for ip in found if ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")])
"""


@pytest.mark.slow
@pytest.mark.parametrize("cold", [False, True])
def test_nothing_of_a_launch_listens_to_other_machines(cold):
    """A store of torchelastic unpickles whatever it is sent: any user who reaches it runs code as this one."""
    run = launch(LISTENING, quiet=True, cold=cold)
    assert run.records["elsewhere"].tolist() == [[], []]


def test_lines_come_whole_and_with_their_rank(capfd):
    launch("print('one'); print('two ' * 300)")
    lines = capfd.readouterr().out.splitlines()
    assert lines.count("[rank 0] one") == 1 and lines.count("[rank 1] one") == 1
    assert all(line.startswith("[rank ") and len(line) < 600 for line in lines)


def test_a_flood_of_lines_is_counted_and_kept_in_the_log(capfd):
    run = launch("for i in range(5000): print('line', i)", nproc=1)
    shown = capfd.readouterr().out.splitlines()
    assert len(shown) < 1000 and "more lines: run.logs[0]" in shown[-1]
    assert len(run.logs[0].read_text().splitlines()) == 5000


def test_what_a_rank_has_started_ends_with_the_job_and_leaves_no_zombie():
    launch("import subprocess; subprocess.Popen(['sleep', '60'])", quiet=True)
    assert below_agent() == []


def test_the_folder_of_a_run_goes_with_the_first_launch_after_the_run():
    folder = launch("pass", quiet=True).folder
    assert folder.exists()
    kept = launch("pass", quiet=True)
    wait_until_gone(folder)
    assert kept.folder.exists()


def test_the_folder_of_a_run_is_gone_before_another_is_made(monkeypatch):
    folder, make, there = launch("pass", quiet=True).folder, tempfile.TemporaryDirectory, []

    def made(*given, **named):
        there.append(folder.exists())
        return make(*given, **named)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", made)
    launch("pass", quiet=True)
    assert there == [False]


def test_a_log_that_grows_without_end_is_stopped_before_the_disk_is_full(monkeypatch):
    monkeypatch.setattr(launch_monitor, "LONGEST_LOG", 2**20)
    message = failure("while rank: print('x' * 10000)")
    assert message.startswith("rank 1 printed more than 1 MiB and was stopped")


def test_a_rank_reads_nothing_that_was_meant_for_the_agent():
    assert "EOFError" in failure("input()", nproc=1)
    assert launch("record(rank_of=rank)", quiet=True).records["rank_of"].tolist() == [0, 1]


def test_who_is_begun_while_the_others_are_killed_is_killed_too(monkeypatch):
    first, second = mock.Mock(), mock.Mock()
    generations = [[first], [first], [second], []]
    monkeypatch.setattr(run_agent, "descendants", lambda: generations.pop(0))
    end_descendants(grace=0.0)
    first.send_signal.assert_called_once_with(signal.SIGKILL)
    second.send_signal.assert_called_once_with(signal.SIGKILL)


def test_nobody_else_can_read_what_ranks_print():
    run = launch("print('a secret')", nproc=1, **QUICK)
    files = [run.folder, *run.logs]
    assert [path.stat().st_mode & 0o077 for path in files] == [0] * len(files)


FULL = """
import os, sys, tempfile
from pathlib import Path
from labkit import comm
from labkit.run import LaunchError, launch

BIG = Path(tempfile.gettempdir(), "big")

def fill(context):
    if context.rank == 1:
        with open(BIG, "wb", buffering=0) as file:
            while file.write(bytes(65536)):
                pass
    comm.barrier()

if __name__ == "__main__":
    try:
        launch("full:fill", nproc=2, quiet=True)
    except LaunchError as error:
        print(error)
    BIG.unlink()
    print(launch("print(1)", nproc=2, quiet=True).world_size)
"""


@pytest.mark.slow
def test_on_a_full_disk_the_rank_that_filled_it_is_named_and_the_next_launch_works(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk]).returncode:
        pytest.skip("a file system of its own needs root")
    (tmp_path / "full.py").write_text(FULL)
    try:
        environment = os.environ | {"TMPDIR": str(disk)}
        done = subprocess.run(
            [sys.executable, "full.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
        )
    finally:
        subprocess.run(["umount", disk], check=True)
    assert done.stdout.startswith("rank 1 raised OSError: [Errno 28] No space left on device"), done.stderr
    assert done.stdout.endswith("\n2\n"), done.stderr


def test_an_interrupt_while_a_folder_is_removed_is_heard_and_it_is_removed(monkeypatch):
    run = launch("pass", quiet=True)
    folder, remove = run.folder, shutil.rmtree

    def interrupted(*given, **named):
        signal.raise_signal(signal.SIGINT)
        remove(*given, **named)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        del run
        launch("pass", quiet=True)
        time.sleep(5)
    wait_until_gone(folder)


def test_a_message_of_the_agent_is_one_write_even_where_python_does_not_buffer(monkeypatch):
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # keeps writes apart
    with ours, io.TextIOWrapper(io.FileIO(its.detach(), "w"), write_through=True) as unbuffered:
        monkeypatch.setattr(sys, "stdout", unbuffered)
        say(ended=0)
        assert ours.recv(99) == b'{"ended": 0}\n'


def test_ranks_use_one_thread_and_loopback():
    source = "import os; record(threads=torch.get_num_threads(), interface=os.environ['GLOO_SOCKET_IFNAME'])"
    records = launch(source, quiet=True).records
    assert set(records["threads"]) == {1}
    assert set(records["interface"]) <= {"lo", "lo0"}


def test_a_rank_that_raises_is_named_with_its_own_line():
    text = failure("if rank == 1:\n    raise ValueError('bad batch')\ncomm.all_reduce(torch.ones(4))")
    assert text.startswith("rank 1 raised ValueError: bad batch\n    at line 2: raise ValueError('bad batch')")


def test_the_echo_of_another_rank_is_not_blamed():
    text = failure("if rank == 1:\n    raise ValueError('bad batch')\ndist.all_reduce(torch.ones(4))")
    assert text.startswith("rank 1 raised ValueError") and text.count("Traceback") == 0


@pytest.mark.parametrize("echo", ["Connection closed by peer [127.0.0.1]", "Connection reset by peer", "Broken pipe"])
def test_an_echo_that_comes_first_is_not_blamed(tmp_path, echo):
    def error(time, message):
        return {
            "kind": "error",
            "time": time,
            "type": "E",
            "message": message,
            "line": "x",
            "lineno": 1,
            "traceback": "",
        }

    starts = [{"kind": "start", "pid": pid} for pid in (1, 2)]
    events = [[starts[0], error(1.0, echo)], [starts[1], error(2.0, "bad batch")]]
    cause, text = explain(read_ends(tmp_path, 2, events, {1: 1, 2: 1}))
    assert cause.rank == 1 and text.startswith("rank 1 raised E: bad batch")


def test_a_killed_torchrun_is_named_and_no_collective_blamed():
    """Its ranks go with it, and were in different collectives then: of other groups, here."""
    source = "comm.all_reduce(torch.ones(1 + rank), group=dist.new_group([rank], use_local_synchronization=True))\n"
    source += "import time, os, signal\nif rank == 0:\n    time.sleep(0.5); os.kill(os.getppid(), signal.SIGKILL)\n"
    assert failure(source + "time.sleep(60)").startswith("torchrun died of SIGKILL (signal 9)\n")


def test_of_two_ranks_that_raise_the_first_is_the_cause():
    def end(rank, time):
        error = {"time": time, "type": "ValueError", "message": f"bad batch {rank}", "traceback": ""}
        return RankEnd(rank, "raised", error, [], "", 1)

    cause, text = explain([end(0, 2.0), end(1, 1.0)])
    assert cause.rank == 1
    assert text.startswith("rank 1 raised ValueError: bad batch 1")


def test_a_killed_rank_is_named_with_its_signal_and_last_collective():
    text = failure(
        "import os\ncomm.barrier()\nif rank == 1:\n    os.kill(os.getpid(), 9)\ncomm.all_reduce(torch.ones(4))"
    )
    assert text.startswith("rank 1 died of SIGKILL (signal 9)")
    assert "last collective of rank 1: collective 1: barrier" in text


@pytest.mark.slow
@pytest.mark.parametrize("leave", ["import os; os._exit(0)", "import sys; sys.exit(0)"])
def test_an_early_clean_exit_is_named_as_such(leave):
    text = failure(f"if rank == 1:\n    {leave}\ncomm.all_reduce(torch.ones(4))", **HANGS)
    assert text.startswith(("rank 1 left early with exit code 0", "rank 1 finished early"))


def test_a_rank_has_left_whose_process_ended_before_its_last_word():
    start, done, died = {"kind": "start", "pid": 7}, {"kind": "done"}, [{"kind": "start", "pid": 8}]
    assert has_left([[start], died], {7: 0}) and has_left([[start, done], died], {7: 1})
    assert not has_left([[start, done], died], {7: 0}) and not has_left([[start], died], {})
    assert not has_left([[], died], {7: 0})  # nothing was heard of it yet


@pytest.mark.parametrize("who", ["True", "rank == 1"])
def test_ranks_that_leave_by_os_exit_0_are_named_at_once(who):
    """torchelastic waits for a result that such a rank never delivers."""
    source = f"import os, time\nif {who}:\n    os._exit(0)\ntime.sleep(90)"
    start = time.monotonic()
    text = failure(source)
    named = "rank 0" if who == "True" else "rank 1"
    assert text.startswith(f"{named} left early with exit code 0, before its work was done")
    assert time.monotonic() - start < 40  # QUICK's own limit is 100


def test_a_rank_that_is_stopped_on_its_way_out_finished_early():
    slowly = "lambda leave=dist.destroy_process_group: (leave(), __import__('time').sleep(9))"
    text = failure(
        f"if rank == 1:\n    dist.destroy_process_group = {slowly}\nelse:\n    comm.all_reduce(torch.ones(4))"
    )
    assert text.startswith("rank 1 finished early, while rank 0 was still waiting for it")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hang", "told"),
    [
        ("import time; time.sleep(100)", "rank 1 hangs"),
        ("import time\n    while True: pass", "rank 1 hangs"),
        ("import os; os.kill(os.getpid(), 19)", "rank 1 is frozen: stopped by a signal (SIGSTOP)"),
    ],
    ids=["asleep", "endless", "stopped"],
)
def test_a_hanging_or_frozen_rank_is_named_within_the_limit(hang, told):
    start = time.monotonic()
    text = failure(f"if rank == 1:\n    {hang}\ncomm.all_reduce(torch.ones(4))", **HANGS)
    assert text.startswith(told)
    assert time.monotonic() - start < 35  # 5 s for the collective; torchelastic alone takes 35 s more


@pytest.mark.slow
def test_where_all_are_stopped_nobody_times_out_and_they_are_named():
    text = failure("import os; os.kill(os.getpid(), 19)", **HANGS)
    assert text.startswith("rank 0, 1 is frozen: stopped by a signal (SIGSTOP)")


@pytest.mark.slow
def test_what_is_stopped_before_any_rank_has_begun_ends_within_the_limit(tmp_path):
    agent()

    def stop_the_job(begun, over):
        while not (below := below_agent()) and not over.is_set():
            time.sleep(0.002)
        with contextlib.suppress(IndexError, psutil.NoSuchProcess):
            below[0].suspend()
            if below_agent()[1:] or begun.exists():
                below[0].resume()  # it was too late

    for number in range(30):
        begun, over = tmp_path / f"{number}", threading.Event()
        stopper = threading.Thread(target=stop_the_job, args=(begun, over))
        stopper.start()
        start = time.monotonic()
        try:
            launch(f"open({str(begun)!r}, 'w').close(); comm.all_reduce(torch.ones(4))", **{**QUICK, **HANGS})
        except LaunchError as error:
            text = str(error)
            break
        finally:
            over.set()
            stopper.join()
    assert text.startswith("rank 0 never started")
    assert time.monotonic() - start < 35


def test_what_a_stopped_rank_says_when_it_is_told_to_end_is_not_the_cause(tmp_path):
    error = {"kind": "error", "time": 1.0, "type": "E", "message": "timed out", "line": "x", "lineno": 1}
    error["traceback"] = "E: timed out"
    events = [[{"kind": "start", "pid": pid}, error] for pid in (1, 2)]
    cause, text = explain(read_ends(tmp_path, 2, events, {1: 1}, frozen=[1]))
    assert cause.rank == 1 and text.startswith("rank 1 is frozen") and "E: timed out" not in text


@pytest.mark.parametrize("because", [-signal.SIGTERM, os.EX_TEMPFAIL, 0, None])
def test_who_was_ended_because_of_another_is_not_the_cause(because):
    ends = [RankEnd(rank, "died", {}, [], "", code) for rank, code in enumerate((because, -signal.SIGKILL, because))]
    cause, text = explain(ends)
    assert cause.rank == 1 and text.startswith("rank 1 died of SIGKILL")


def test_who_left_because_of_another_is_not_the_cause_where_that_one_was_not_seen_to_die():
    ends = [RankEnd(rank, "died", {}, [], "", os.EX_TEMPFAIL) for rank in range(3)]
    ends[1] = RankEnd(1, "stopped", {}, [], "", None)
    cause, text = explain(ends)
    assert cause.rank == 1 and text.startswith("rank 1 hangs: the others were still waiting for it")


@pytest.mark.parametrize(("frame", "shown"), [("/lib/traceback.py", True), (traceback.__file__, False)])
def test_where_a_rank_was_stopped_is_shown_unless_it_was_reporting_its_own_error(frame, shown):
    stack = f'  File "{frame}", line 364 in get\n  File "<cell>", line 3 in <module>\n'
    _, text = explain([RankEnd(0, "died", {}, [], "", -9), RankEnd(1, "stopped", {}, [], stack, None)])
    assert ("rank 1 was here when it was stopped" in text) == shown


LATE = """
import time
from types import SimpleNamespace
from labkit.run.worker import join_group

dist.destroy_process_group()
time.sleep(3 * rank)
context = SimpleNamespace(rank=rank, world_size=world_size)
join_group({"device": "cpu", "threads": 1, "collective_timeout": 1}, f"file://{store}", context)
began, seconds = time.monotonic(), 0.0
try:
    dist.all_reduce(torch.ones(4)) if rank == 0 else time.sleep(8)
except RuntimeError:
    seconds = time.monotonic() - began
record(waited=seconds)
"""


@pytest.mark.slow
def test_a_rank_may_come_late_to_the_start_and_to_nothing_after(tmp_path):
    waited = launch(LATE, store=str(tmp_path / "store"), **QUICK).records["waited"]
    assert 0.9 < waited[0] < 7  # of its own timeout, not of the start's


@pytest.mark.slow
def test_a_group_made_later_waits_no_longer_than_the_one_of_all():
    source = "group = dist.new_group()\nif rank == 1:\n    import time; time.sleep(100)\n"
    text = failure(source + "comm.all_reduce(torch.ones(4), group=group)", **HANGS)  # torch's own default is 30 minutes
    assert text.startswith("rank 1 hangs")


@pytest.mark.slow
def test_another_order_of_collectives_is_named():
    text = failure("x = torch.ones(4)\nif rank:\n    comm.broadcast(x)\nelse:\n    comm.all_reduce(x)", **HANGS)
    assert text.startswith("ranks 0 and 1 called different collectives") and "broadcast of 16 bytes" in text


def test_another_shape_is_named():
    text = failure("comm.all_reduce(torch.ones(4 + rank))")
    assert text.startswith("ranks 0 and 1 called different collectives")
    assert "all_reduce of 16 bytes" in text and "all_reduce of 20 bytes" in text


def test_a_rank_that_came_through_with_another_shape_is_not_said_to_have_left_early():
    def end(rank, state, size):
        row = {"group": "0", "ranks": [0, 1], "message": False, "scheduled": 1, "awaited": 0, "completed": 1}
        rows = [row | {"op": "all_reduce", "bytes": size, "at": 1}]
        return RankEnd(rank, state, {"line": "comm.all_reduce(x)"} if state == "echo" else {}, rows, "", None)

    cause, text = explain([end(0, "finished", 16), end(1, "echo", 28)])
    assert cause is None and text.startswith("ranks 0 and 1 called different collectives")


@pytest.mark.parametrize(
    "state, message, words",
    [
        ("timeout", "Timed out waiting 4000ms for recv operation", "rank 0 waited 4 s at {} and timed out"),
        ("timeout", "ran for 4012 milliseconds before timing out.", "rank 0 waited 4.01 s at {} and timed out"),
        ("timeout", "wait timeout", "rank 0 waited at {} and timed out"),
        ("echo", "Connection closed by peer", "rank 0 waited at {} until another rank ended"),
    ],
)
def test_a_wait_is_reported_with_its_length_its_place_and_its_end(state, message, words):
    rows = [{"op": "all_reduce", "bytes": 16, "at": 1}]
    end = RankEnd(0, state, {"line": "comm.all_reduce(x)", "message": message}, rows, "", None)
    assert its_wait(end) == words.format("`comm.all_reduce(x)` (collective 1: all_reduce of 16 bytes)")


@pytest.mark.slow
def test_another_order_is_named_even_without_our_collectives():
    text = failure("x = torch.ones(4)\nif rank:\n    dist.broadcast(x, 0)\nelse:\n    dist.all_reduce(x)", **HANGS)
    assert "at different lines: rank 0 at `dist.all_reduce(x)`; rank 1 at `dist.broadcast(x, 0)`" in text


@pytest.mark.slow
def test_the_wall_clock_limit_ends_the_run():
    text = failure("import time; time.sleep(60)", timeout=2)
    assert text.startswith("stopped after 2 s, the limit of this launch")


@pytest.mark.slow
def test_a_rank_that_does_not_hear_the_stop_is_not_blamed_for_it():
    deaf = "import signal, time\nif rank:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"
    assert failure(deaf, timeout=2).startswith("stopped after 2 s, the limit of this launch")


def test_a_wrong_parameter_name_is_told_with_the_right_ones():
    assert "double() has no parameter 'valeu'; its parameters are value" in failure(double, valeu=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nproc": 0}, "nproc=0"),
        ({"nproc": "2"}, "nproc='2'"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"target": "absent.py"}, "no such script: absent.py"),
        ({"target": lambda context: None}, "lambda"),
        ({"target": partial(double, value=1)}, "^cannot run an object of type partial on ranks: pass a plain function"),
        ({"target": double.__call__}, "^cannot run an object of type method-wrapper"),
        ({"target": torch.ones(3)}, "^cannot run an object of type Tensor on ranks: pass a plain function"),
        ({"target": Event}, "^cannot run an object of type type"),
        ({"target": eval("double.__class__(double.__code__.replace(co_filename='?'), {})")}, "source of double"),
        ({"x": torch.ones(3)}, r"^parameter x is of type Tensor: pass numbers, .* such as x.tolist\(\)"),
        ({"x": [1, {"y": object()}]}, "^parameter x is of type list"),
        ({"x": {"a": {1, 2}}}, "^parameter x is of type dict"),
    ],
)
def test_arguments_that_cannot_be_are_refused_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        launch(**{"target": "pass", **arguments})


def test_a_cell_that_does_not_compile_never_reaches_the_ranks():
    with pytest.raises(SyntaxError):
        launch("x = = 1")


def test_more_ranks_than_gpus_is_one_clear_line():
    with pytest.raises(ValueError, match="1000 ranks on cuda need 1000 GPUs"):
        launch("pass", nproc=1000, device="cuda")


def test_an_unrecordable_value_is_named():
    assert "record() takes numbers, strings, lists and dicts, not object" in failure("record(x=object())")


def test_a_reserved_field_is_named():
    assert "record() adds the rank itself" in failure("record(rank=rank)")


def test_an_interrupt_leaves_no_rank_and_the_next_launch_works(capfd):
    interrupt_what_runs()
    with pytest.raises(KeyboardInterrupt):
        launch("import time; time.sleep(100)")
    assert below_agent() == []
    assert "all 2 ranks have ended" in capfd.readouterr().out
    assert launch("record(x=1)", quiet=True).records["x"].sum() == 2


@pytest.mark.slow
def test_two_presses_of_the_stop_button_leave_no_rank_and_the_next_launch_works(monkeypatch):
    stop, stopped = AgentClient.stop, []

    def interrupted_stop(client):
        client.send(stop=client.job)
        stopped.append(client.job)
        raise KeyboardInterrupt  # the second press, while the first is being obeyed

    monkeypatch.setattr(AgentClient, "stop", interrupted_stop)
    interrupt_what_runs()
    with pytest.raises(KeyboardInterrupt):
        launch("import time; time.sleep(100)")
    monkeypatch.setattr(AgentClient, "stop", stop)
    assert len(stopped) == 1
    for _ in range(2):
        assert launch("comm.barrier(); record(x=1)", quiet=True).records["x"].sum() == 2
    assert below_agent() == []


def test_stopping_what_has_not_begun_or_has_ended_returns_at_once():
    for _ in range(2):
        agent().stop()
        assert launch("record(x=1)", quiet=True).records["x"].sum() == 2


@pytest.mark.slow
def test_an_agent_that_cannot_end_its_job_is_killed_and_no_error_of_its_own_is_told(monkeypatch, capfd):
    client = agent()
    monkeypatch.setattr("labkit.run.client.STOP_LIMIT", 0.0)
    client.stop()
    assert client.process.returncode == -signal.SIGKILL
    assert "the job did not end within 0 s: killed it and its agent" in capfd.readouterr().out
    assert launch("record(x=1)", quiet=True).records["x"].sum() == 2
    assert agent() is not client


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["kernel", "agent"])
def test_no_rank_and_no_file_outlives_a_killed_kernel_or_agent(victim, tmp_path):
    program = "from labkit.run import launch\nlaunch('import time; print(\"up\"); time.sleep(60)')"
    elsewhere = {"env": os.environ | {"TMPDIR": str(tmp_path)}, "stderr": subprocess.DEVNULL}
    kernel = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, **elsewhere)
    for _ in range(2):
        assert b"up" in kernel.stdout.readline()
    family = psutil.Process(kernel.pid).children(recursive=True)
    assert len(family) == 4  # agent, job, two ranks
    (kernel if victim == "kernel" else family[0]).kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    if victim == "kernel":
        kernel.kill()
    kernel.wait(timeout=60)
    assert alive == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_notebooks_at_once():
    program = (
        "from labkit.run import launch\nprint(launch('comm.barrier(); record(x=rank)', quiet=True).records['x'].sum())"
    )
    kernels = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(2)]
    assert [kernel.communicate(timeout=200)[0].strip() for kernel in kernels] == [b"1", b"1"]


def test_a_line_without_an_end_is_read_once(tmp_path):
    """Gigabytes printed without a newline cost no more at the thousandth look than at the first."""
    path = tmp_path / "log"
    tail = console.Tail(path, longest=2000)
    read = 0
    with open(path, "ab", buffering=0) as file:
        for _ in range(20):
            file.write(b"x" * 3_000_000)
            before = tail.position
            assert list(tail.lines()) == []
            read += tail.position - before
        assert read == 20 * console.LOOK_BYTES and len(tail.begun) <= 2000
        file.write(b"\nand\r\rthen\n\nlast")
    assert len(tail.begun) == 2000
    *shown, second, redrawn, third, fourth, last = tail.lines(final=True)
    assert all(line.startswith("x") for line in shown) and len(shown) == 1
    assert (second, redrawn, third, fourth, last) == ("and", "", "then", "", "last")
    assert tail.position == path.stat().st_size and list(tail.lines(final=True)) == []

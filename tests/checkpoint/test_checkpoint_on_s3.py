"""Checkpoints on S3: moto's server on loopback, in a process of its own; refusals, slowness, breaks, two runs."""

import multiprocessing
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from pool import forked
from s3 import CREDENTIALS, proxy, s3_server
from torch import nn
from train_command import command, steady

from labkit.checkpoint import CheckpointError, Checkpoints, storage_lock, tensor_file
from labkit.checkpoint.storage import Store
from labkit.convert import convert, load_weights
from labkit.fsdp import FSDP
from labkit.run import launch
from labkit.run.options import WRONG

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("s3fs", reason="S3 needs s3fs: pip install -r tests/requirements.txt")
pytest.importorskip("moto", reason="S3 is tested with moto: pip install -r tests/requirements.txt")

RENEW, LEASE = 0.2, 5.0  # seconds; a holder or a server may freeze for some of these


@pytest.fixture(scope="module")
def server():
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(server, monkeypatch, request):
    """The URL of an empty bucket; the environment leads to its server."""
    for name, value in (CREDENTIALS | {"AWS_ENDPOINT_URL": server}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(storage_lock, "RENEW", RENEW)
    monkeypatch.setattr(storage_lock, "LEASE", LEASE)
    name = f"b{abs(hash(request.node.name)):x}"
    fresh("mkdir", name)
    return f"s3://{name}"


def fresh(method, *arguments, **more):
    """Of a file system that remembers nothing."""
    fs = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    return getattr(fs, method)(*arguments, **more)


def environment():
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def filled(value, size=40):
    model = nn.Linear(size, size)
    with torch.no_grad():
        model.weight.fill_(value)
    return {"model": model}


# ---- through ranks


def saves(rank, world_size, url, env):
    os.environ.update(env)
    model = FSDP(nn.Linear(200, 100))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(f"{url}/run", keep=2, best=(min, "loss"))
    for step in (1, 2, 3, 4):
        model(torch.ones(2, 200)).sum().backward()
        optimizer.step()
        checkpoints.save(step, {"model": model, "optimizer": optimizer}, loss=abs(1.0 - step))
    checkpoints.wait()
    assert checkpoints.steps() == [1, 3, 4]
    checkpoints.close()
    return model.full_state_dict()["weight"]


def loads(rank, world_size, url, env):
    os.environ.update(env)
    model = FSDP(nn.Linear(200, 100))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(f"{url}/run")
    assert checkpoints.load({"model": model, "optimizer": optimizer}) == 4
    assert {state["step"].item() for state in optimizer.state.values()} == {4}
    checkpoints.close()
    return model.full_state_dict()["weight"]


@pytest.mark.slow
def test_two_ranks_save_and_three_load(ranks, bucket):
    saved = ranks(2, saves, url=bucket, env=environment())
    for found in (*ranks(2, loads, url=bucket, env=environment()), *ranks(3, loads, url=bucket, env=environment())):
        assert torch.equal(found, saved[0])
    names = [path.partition("/run/")[2] for path in fresh("find", f"{bucket}/run")]
    assert names == [
        f"step-{step:09d}/{name}" for step in (1, 3, 4) for name in ("manifest.json", *rank_files)
    ]  # and no lock


rank_files = ("rank-0.safetensors", "rank-1.safetensors")


TRAINING = ("--strategy", "fsdp", "--batch-size", "12", "--optimizer", "adamw", "--steps", "4", "--log")


def trained_warm(*options):
    """labkit.train on warm ranks: what rank 0 printed."""
    arguments = [*TRAINING, *map(str, options)]
    run = launch("labkit.run.training:launched", nproc=2, arguments=arguments, quiet=True)
    return run.logs[0].read_text()


@pytest.mark.slow
def test_a_training_goes_on_from_there(bucket, tmp_path):
    trained_warm(tmp_path / "whole.jsonl")
    save = ("--checkpoint-dir", f"{bucket}/run", "--checkpoint-every", "2")
    (tmp_path / "stop").write_text("")
    first = trained_warm(tmp_path / "broken.jsonl", *save, "--stop-file", tmp_path / "stop")
    assert "run the same command to resume" in first
    again = command("--nproc", 2, *TRAINING, tmp_path / "broken.jsonl", *save, "--resume", "must")
    assert "resumes after step 1" in again.stdout, again.stderr
    last = [steady(tmp_path / f"{name}.jsonl")[-1] for name in ("whole", "broken")]
    assert last[0] == last[1] and last[0]["step"] == 4
    nowhere = command("--nproc", 2, *TRAINING, tmp_path / "no.jsonl", "--checkpoint-dir", "s3://no-such-bucket/run")
    assert nowhere.returncode == WRONG
    line = "labkit.train: cannot write to s3://no-such-bucket/run: The specified bucket does not exist"
    assert line in nowhere.stderr.splitlines()


@pytest.mark.slow
def test_there_and_back_in_another_format(bucket, tmp_path):
    state, other = filled(3.0), nn.Linear(40, 40)
    checkpoints = Checkpoints(f"{bucket}/run")
    checkpoints.save(1, state)
    checkpoints.wait()
    convert(f"{bucket}/run", f"{bucket}/one.safetensors")  # while a training holds the directory
    load_weights(other, f"{bucket}/one.safetensors")
    assert torch.equal(other.weight, state["model"].weight)
    convert(f"{bucket}/one.safetensors", f"{bucket}/new", to="checkpoint")
    convert(f"{bucket}/new", tmp_path / "folder")
    checkpoints.close()
    fresh("put", str(tmp_path / "folder"), f"{bucket}/", recursive=True)
    load_weights(nn.Linear(40, 40), f"{bucket}/folder")
    with pytest.raises(CheckpointError, match=f"{bucket}/nothing was not loaded: rank 0: unknown format"):
        load_weights(other, f"{bucket}/nothing")


# ---- refusals


def test_no_bucket_is_said_and_none_comes_to_be(bucket):
    with pytest.raises(CheckpointError, match=r"cannot write to s3://mistyped/run: .*bucket does not exist"):
        Checkpoints("s3://mistyped/run")
    assert not fresh("exists", "mistyped")


@pytest.mark.slow
def test_no_credentials(bucket, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(CheckpointError, match=r"cannot write to .*: .*[Uu]nable to locate credentials$"):
        Checkpoints(f"{bucket}/run")


def test_nobody_is_there(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(CheckpointError, match=r"cannot write to .*: Could not connect to the endpoint URL.*"):
        Checkpoints(f"{bucket}/run")


BUSY = (503, "SlowDown", "Please reduce your request rate.")
DENIED = (403, "AccessDenied", "Access Denied")


class Faults:
    """What the proxy asks: .now(method, path, length) may be set at any time."""

    def __init__(self):
        self.now, self.seen = lambda *request: None, 0

    def __call__(self, *request):
        self.seen += 1
        return self.now(*request)


@pytest.fixture
def faults(bucket, server, monkeypatch):
    """The server is behind a proxy with faults."""
    found = Faults()
    with proxy(server, found) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
        yield found


def writing(*request):
    """Of a rank's file."""
    return request[0] == "PUT" and "rank-" in request[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "words"), [(BUSY, "Please reduce your request rate"), (DENIED, "Access Denied"), ("break", "onnection")]
)
def test_a_refused_save_is_said_and_the_next_goes_on(bucket, faults, answer, words):
    checkpoints = Checkpoints(f"{bucket}/run")
    checkpoints.save(1, filled(1.0))
    checkpoints.wait()
    faults.now = lambda *request: answer if writing(*request) else None
    checkpoints.save(2, filled(2.0))
    with pytest.raises(CheckpointError, match=f"step 2 was not saved: rank 0: .*{words}"):
        checkpoints.wait()
    state = filled(0.0)
    assert checkpoints.load(state) == 1 and bool((state["model"].weight == 1).all())
    faults.now = lambda *request: None
    checkpoints.save(3, filled(3.0))
    checkpoints.wait()
    assert checkpoints.steps() == [1, 3]
    checkpoints.close()


@pytest.mark.slow
def test_refused_for_a_moment_it_tries_again(bucket, faults):
    times = iter(range(2))
    faults.now = lambda *request: BUSY if writing(*request) and next(times, None) is not None else None
    checkpoints = Checkpoints(f"{bucket}/run")
    checkpoints.save(1, filled(1.0))
    checkpoints.wait()
    assert next(times, None) is None and checkpoints.steps() == [1]
    checkpoints.close()


@pytest.mark.slow
def test_refused_on_reading(bucket, faults, capsys):
    checkpoints = Checkpoints(f"{bucket}/run")
    for step in (1, 2):
        checkpoints.save(step, filled(step))
    checkpoints.wait()
    faults.now = lambda method, path, length: DENIED if method == "GET" and "2/rank-0" in path else None
    state = filled(0.0)
    assert checkpoints.load(state) == 1 and bool((state["model"].weight == 1).all())
    assert "skipped the checkpoint of step 2: cannot read rank-0.safetensors: Access" in capsys.readouterr().out
    faults.now = lambda method, path, length: DENIED if method == "GET" and "list-type" in path else None
    with pytest.raises(CheckpointError, match=r"cannot read .*/run: rank 0: Access Denied"):
        checkpoints.load(state)
    faults.now = lambda *request: None
    checkpoints.close()


# ---- slow, and broken in the middle


@pytest.mark.slow
def test_training_goes_on_while_a_slow_server_is_written_to(bucket, faults):
    go = threading.Event()
    faults.now = lambda *request: go.wait(60) and None if writing(*request) else None
    checkpoints = Checkpoints(f"{bucket}/run")
    state = filled(1.0)
    checkpoints.save(1, state)
    with torch.no_grad():  # save() has returned, and nothing has arrived
        state["model"].weight.fill_(7.0)
    assert fresh("find", f"{bucket}/run/step-000000001") == []
    go.set()
    checkpoints.wait()
    assert checkpoints.load(state) == 1 and bool((state["model"].weight == 1).all())
    checkpoints.close()


@pytest.mark.slow
def test_what_has_no_manifest_yet_is_passed_over_and_said(bucket, faults, capsys):
    checkpoints = Checkpoints(f"{bucket}/run")
    checkpoints.save(1, filled(1.0))
    checkpoints.wait()
    faults.now = lambda *request: "break" if request[0] == "PUT" and "manifest" in request[1] else None
    checkpoints.save(2, filled(2.0))
    with pytest.raises(CheckpointError, match="step 2 was not saved"):
        checkpoints.wait()
    faults.now = lambda *request: None
    state = filled(0.0)
    assert checkpoints.load(state) == 1 and bool((state["model"].weight == 1).all())
    said = "skipped the checkpoint of step 2: it has no manifest: saving was interrupted"
    assert said in capsys.readouterr().out
    checkpoints.close()


@pytest.mark.slow
def test_an_upload_that_breaks_in_the_middle_leaves_nothing(bucket, faults, monkeypatch):
    monkeypatch.setitem(fsspec.config.conf, "s3", {"default_block_size": 5 * 2**20})
    monkeypatch.setattr(tensor_file, "CHUNK", 2**20)
    checkpoints = Checkpoints(f"{bucket}/run")
    checkpoints.save(1, filled(1.0, 2000))  # 16 MB: in parts
    checkpoints.wait()
    faults.now = lambda *request: "break" if writing(*request) and "partNumber=2" in request[1] else None
    checkpoints.save(2, filled(2.0, 2000))
    with pytest.raises(CheckpointError, match="step 2 was not saved"):
        checkpoints.wait()
    assert fresh("find", f"{bucket}/run/step-000000002") == []
    uploads = fresh("call_s3", "list_multipart_uploads", Bucket=bucket.removeprefix("s3://"))
    assert not uploads.get("Uploads")
    state = filled(0.0, 2000)
    assert checkpoints.load(state) == 1 and bool((state["model"].weight == 1).all())
    checkpoints.close()


def test_what_is_half_written_never_has_its_name(bucket):
    store = Store(f"{bucket}/run")
    store.write("step/one", lambda file: file.write(b"old"))

    def breaks(file):
        file.write(b"new")
        raise OSError("the model is gone")

    with pytest.raises(OSError, match="the model is gone"):
        store.write("step/one", breaks)
    assert fresh("cat", f"{bucket}/run/step/one") == b"old"


# ---- two runs


def hold(url, env, connection):
    """Save once; once more when told to, and say what came of it."""
    os.environ.update(env)
    storage_lock.RENEW, storage_lock.LEASE = RENEW, LEASE
    checkpoints = Checkpoints(url)
    checkpoints.save(1, {"model": nn.Linear(40, 40)})
    checkpoints.wait()
    connection.send("holds")
    connection.recv()
    try:
        checkpoints.save(2, {"model": nn.Linear(40, 40)})
        checkpoints.wait()
        connection.send("saved")
    except CheckpointError as error:
        connection.send(str(error))


@pytest.fixture
def holder(bucket):
    """(a process that writes into the directory, the connection to it)."""
    ours, theirs = multiprocessing.Pipe()
    process = forked(hold, f"{bucket}/run", environment(), theirs)
    theirs.close()
    assert ours.recv() == "holds"
    yield process, ours
    process.kill()
    process.join()


@pytest.mark.slow
def test_two_runs_in_one_directory(bucket, holder, capsys):
    with pytest.raises(CheckpointError, match=f"another run writes checkpoints into {bucket}/run"):
        Checkpoints(f"{bucket}/run")
    process, connection = holder
    assert f"process {process.pid}: waiting {LEASE:.0f} s for a renewal" in capsys.readouterr().out
    connection.send("go on")
    assert connection.recv() == "saved"


@pytest.mark.slow
def test_a_holder_that_died_is_followed(bucket, holder):
    process, _ = holder
    process.kill()
    process.join()
    checkpoints = Checkpoints(f"{bucket}/run")
    assert checkpoints.steps() == [1]
    checkpoints.save(2, filled(2.0))
    checkpoints.close()
    Checkpoints(f"{bucket}/run").close()


@pytest.mark.slow
def test_a_holder_that_stood_still_writes_nothing_more(bucket, holder):
    process, connection = holder
    os.kill(process.pid, signal.SIGSTOP)
    checkpoints = Checkpoints(f"{bucket}/run")
    os.kill(process.pid, signal.SIGCONT)
    connection.send("go on")
    said = connection.recv()
    assert "step 2 was not saved: rank 0: another run has taken over the directory" in said
    assert checkpoints.steps() == [1]
    checkpoints.save(3, filled(3.0))
    checkpoints.close()


@pytest.mark.slow
def test_a_lock_that_was_removed_by_hand_is_put_again(bucket):
    checkpoints = Checkpoints(f"{bucket}/run")
    fresh("rm", f"{bucket}/run/lock")
    checkpoints.store._lock.renew()
    with pytest.raises(CheckpointError, match="another run writes"):
        Checkpoints(f"{bucket}/run")
    checkpoints.save(1, filled(1.0))
    checkpoints.close()
    assert not fresh("exists", f"{bucket}/run/lock")


@pytest.mark.slow
def test_of_many_that_come_at_once_one_gets_it(bucket):
    fs = Store(bucket).fs
    got = []

    def comes():
        one = storage_lock.Lease(fs, f"{bucket}/lock")
        try:
            one.take()
            got.append(one)
        except BlockingIOError:
            pass

    threads = [threading.Thread(target=comes) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    got[0].close()
    assert not fresh("exists", f"{bucket}/lock")


def test_an_answer_that_got_lost_is_no_refusal(bucket, faults, capsys):
    """The put arrives, its answer does not: tried again, it meets itself."""
    lost = iter(range(1))

    def lose(method, path, length):
        if method == "PUT" and path.endswith("/lock") and next(lost, None) is not None:
            return "lose"

    faults.now = lose
    held = storage_lock.Lease(Store(bucket).fs, f"{bucket}/lock")
    held.take()
    assert next(lost, None) is None
    held.check()
    assert capsys.readouterr().out == ""  # it has not waited for itself
    held.close()


def one_side_cannot_begin(rank, world_size, url, env):
    os.environ.update(env)
    storage_lock.RENEW, storage_lock.LEASE = RENEW, LEASE
    with pytest.raises(CheckpointError, match=r"cannot write to .*: Protocol not known"):
        Checkpoints(f"{url}/run" if rank == 0 else "unknown://run")
    Checkpoints(f"{url}/run").close()  # rank 0 does not hold it any more


@pytest.mark.slow
def test_where_one_rank_cannot_begin_nobody_holds_it(ranks, bucket):
    ranks(2, one_side_cannot_begin, url=bucket, env=environment())


def one_side_fails(rank, world_size, url, env):
    os.environ.update(env)
    if rank == 1:
        os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"
    checkpoints = Checkpoints(f"{url}/run")
    checkpoints.save(1, {"model": FSDP(nn.Linear(100, 100))})
    with pytest.raises(CheckpointError, match=r"step 1 was not saved: rank 1: Could not connect"):
        checkpoints.wait()
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"cannot read .*: rank 1: Could not connect"):
        checkpoints.load({"model": FSDP(nn.Linear(100, 100))})
    checkpoints.close()


@pytest.mark.slow
def test_a_rank_that_reaches_nobody_is_named_by_all(ranks, bucket):
    ranks(2, one_side_fails, url=bucket, env=environment() | {"AWS_MAX_ATTEMPTS": "1"})

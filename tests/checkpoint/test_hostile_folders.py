"""Folders that come from others: what is in them leads neither the writer nor the reader elsewhere."""

import hashlib
import json
import re
import shutil
from io import BytesIO

import pandas as pd
import pytest
import torch

from labkit.checkpoint import CheckpointError, Checkpoints, metadata, tensor_file
from labkit.models import cifar
from labkit.open_without_links import new_file
from labkit.run import sweep

PRECIOUS = b"precious"


@pytest.fixture
def precious(tmp_path):
    """A file of the person's own, that a stranger's links lead to."""
    path = tmp_path / "precious"
    path.write_bytes(PRECIOUS)
    return path


@pytest.fixture
def places(tmp_path):
    folder = tmp_path / "places"
    folder.mkdir()
    return folder


def state():
    return {"model": torch.nn.Linear(2, 3)}


def test_a_lock_that_is_a_link_is_refused(places, precious):
    (places / "lock").symlink_to(precious)
    with pytest.raises(CheckpointError, match="unsafe symbolic link"):
        Checkpoints(places)
    assert precious.read_bytes() == PRECIOUS


def test_no_message_has_a_password():
    with pytest.raises(CheckpointError) as caught:
        Checkpoints("unknown://me:secret@host/runs")
    assert str(caught.value).startswith("cannot write to unknown://host/runs")


def test_a_lock_is_not_emptied(places):
    (places / "lock").write_bytes(PRECIOUS)
    Checkpoints(places).close()
    assert (places / "lock").read_bytes() == PRECIOUS


def test_a_half_written_file_that_is_a_link_is_not_written_through(places, precious):
    (places / "step-000000007").mkdir()
    (places / "step-000000007" / "rank-0.safetensors.part").symlink_to(precious)
    (places / "step-000000007" / "manifest.json.part").hardlink_to(precious)
    checkpoints = Checkpoints(places)
    checkpoints.save(7, state())
    checkpoints.close()
    assert precious.read_bytes() == PRECIOUS
    assert Checkpoints(places).load(state()) == 7


def test_a_step_folder_that_is_a_link_loses_nothing(places, tmp_path):
    other = Checkpoints(tmp_path / "other")
    other.save(7, state())
    other.close()
    whole = {path.name: path.read_bytes() for path in (tmp_path / "other" / "step-000000007").iterdir()}
    (places / "step-000000007").symlink_to(tmp_path / "other" / "step-000000007")
    checkpoints = Checkpoints(places, keep=1)
    checkpoints.save(7, state())
    with pytest.raises(CheckpointError, match="unsafe symbolic link"):
        checkpoints.wait()
    for step in (8, 9):  # pruned, it would take the files of the other with it
        checkpoints.save(step, state())
        try:
            checkpoints.wait()
        except CheckpointError as error:
            assert "unsafe symbolic link" in str(error)
    checkpoints.close()
    assert {path.name: path.read_bytes() for path in (tmp_path / "other" / "step-000000007").iterdir()} == whole


def test_a_sweep_s_lock_and_half_written_file_are_no_way_out(places, precious):
    (places / "lock").symlink_to(precious)
    with pytest.raises(OSError, match="unsafe symbolic link"), sweep.alone(places):
        pass
    (places / "a.csv.part").symlink_to(precious)
    with new_file(places / "a.csv.part") as file:
        pd.DataFrame({"a": [1]}).to_csv(file, index=False)
    assert precious.read_bytes() == PRECIOUS and (places / "a.csv.part").read_text() == "a\n1\n"


def test_a_download_is_no_way_out(places, precious):
    (places / "archive.part").symlink_to(precious)
    with cifar.whole_or_nothing(places / "archive") as file:
        file.write(b"new")
    assert precious.read_bytes() == PRECIOUS and (places / "archive").read_bytes() == b"new"
    (places / ".lock").symlink_to(precious)
    with cifar.one_at_a_time(places):
        assert precious.read_bytes() == PRECIOUS


# ---- manifests


@pytest.fixture
def saved(places):
    """A checkpoint of step 7, and a function that rewrites its manifest as a stranger could, signed."""
    checkpoints = Checkpoints(places)
    checkpoints.save(7, state())
    checkpoints.close()

    def rewrite(change):
        path = places / "step-000000007" / metadata.NAME
        found = json.loads(path.read_bytes().partition(b"\n")[2])
        text = json.dumps(change(found) or found)
        path.write_bytes(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}".encode())

    return rewrite


def passed_over(places, capsys):
    """What is said of a checkpoint that is not loaded."""
    checkpoints = Checkpoints(places)
    assert checkpoints.load(state()) is None
    checkpoints.close()
    return capsys.readouterr().out


def test_a_name_that_leads_out_of_the_folder(places, saved, capsys):
    private = places.parent / "private.safetensors"
    shutil.copy(places / "step-000000007" / "rank-0.safetensors", private)

    def elsewhere(found):
        found["files"][0]["name"] = "../../private.safetensors"
        for entry in found["index"].values():
            entry["parts"] = [["../../private.safetensors", *part[1:]] for part in entry["parts"]]

    saved(elsewhere)
    assert "'../../private.safetensors' is not the name of a file in its folder" in passed_over(places, capsys)


def test_a_part_in_a_file_that_nobody_hashes(places, saved, capsys):
    def unlisted(found):
        found["files"] = []

    saved(unlisted)
    assert "which is not in its list of files" in passed_over(places, capsys)


@pytest.mark.parametrize(
    ("start", "stop", "words"),
    [
        (0, 3, "overlap"),
        (3, 9, "has 6 elements, but its parts have 9"),
        (0, 2**70, "too short|overlap"),
        (-1, 6, "must be an integer"),
    ],
)
def test_parts_that_do_not_cover_a_tensor_once(places, saved, capsys, start, stop, words):
    """Two halves that lie over each other satisfied the count, and left the other half as it was in memory."""

    def overlapping(found):
        entry = found["index"]["model:weight"]
        name = entry["parts"][0][0]
        entry["parts"] = [[name, 0, 3, None], [name, start, stop, None]]

    saved(overlapping)
    assert re.search(words, passed_over(places, capsys))


def test_a_file_that_never_ends(places, saved, capsys):
    path = places / "step-000000007" / "rank-0.safetensors"
    for size in (0, path.stat().st_size):

        def declared(found, size=size):
            found["files"][0]["bytes"] = size
            found["index"] = {}

        saved(declared)
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/zero")
        assert "skipped the checkpoint of step 7" in passed_over(places, capsys)


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "[]", '{"format": 1, "files": 3}', "null"])
def test_a_manifest_of_another_shape(places, saved, capsys, text):
    path = places / "step-000000007" / metadata.NAME
    path.write_bytes(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}".encode())
    told = passed_over(places, capsys)
    assert "its manifest is invalid" in told and told.count("\n") == 1


def test_a_part_that_its_file_has_not(places, saved):
    def other(found):
        for entry in found["index"].values():
            entry["parts"] = [[name, 0, stop, None] for name, _, stop, _ in entry["parts"]]
        found["index"]["model:weight"]["dtype"] = "I32"

    saved(other)
    checkpoints = Checkpoints(places)
    module = torch.nn.Linear(2, 3)
    module.weight = torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.int32), requires_grad=False)
    before = module.weight.detach().clone()
    with pytest.raises(CheckpointError, match="does not contain 'weight' at its offset"):
        checkpoints.load({"model": module})
    assert torch.equal(module.weight, before)


# ---- files of tensors


def tensor_file_of(header, data=b"\0" * 64):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return BytesIO(len(text).to_bytes(8, "little") + text + data)


def tensor(begin, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": tensor(0, 64, [16]), "b": tensor(32, 64, [8])},  # over another
        {f"t{i}": tensor(0, 64, [16]) for i in range(1000)},  # a kilobyte that declares many
        {"a": tensor(0, 2**70, [2**68])},
        {"a": tensor(2**70, 2**70 + 64, [16])},
        {"a": tensor(0, 128, [32])},  # beyond the end
        {"a": tensor(0, 64, [16], "F99")},
        {"a": tensor(0, 64, [-16, -1])},
        b"[" * 100_000,
        b'{"a": ' * 100_000,
        {},
    ],
    ids=range(10),
)
def test_a_header_that_promises_what_is_not_there(header):
    if header == {}:
        assert tensor_file.read(tensor_file_of(header)) == {}
        return
    for read in (tensor_file.read, tensor_file.TensorFile):
        with pytest.raises(ValueError, match=r"not a safetensors file: .* in its header"):
            read(tensor_file_of(header))


def test_empty_tensors_share_a_place():
    header = {"a": tensor(0, 0, [0]), "b": tensor(0, 64, [16]), "c": tensor(64, 64, [3, 0])}
    assert {name: list(t.shape) for name, t in tensor_file.read(tensor_file_of(header)).items()} == {
        "a": [0],
        "b": [16],
        "c": [3, 0],
    }

"""Folders that come from others: what is in them leads neither the writer nor the reader elsewhere."""

import pandas as pd
import pytest
import torch

from labkit.checkpoint import CheckpointError, Checkpoints
from labkit.models import cifar
from labkit.parts.own_files import new_file
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
    with pytest.raises(CheckpointError, match="it is a link, which may lead anywhere"):
        Checkpoints(places)
    assert precious.read_bytes() == PRECIOUS


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
    with pytest.raises(CheckpointError, match="it is a link"):
        checkpoints.wait()
    for step in (8, 9):  # pruned, it would take the files of the other with it
        checkpoints.save(step, state())
        try:
            checkpoints.wait()
        except CheckpointError as error:
            assert "it is a link" in str(error)
    checkpoints.close()
    assert {path.name: path.read_bytes() for path in (tmp_path / "other" / "step-000000007").iterdir()} == whole


def test_a_sweep_s_lock_and_half_written_file_are_no_way_out(places, precious):
    (places / "lock").symlink_to(precious)
    with pytest.raises(OSError, match="it is a link"), sweep.alone(places):
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
    with pytest.raises(OSError, match="it is a link"), cifar.one_at_a_time(places):
        pass
    assert precious.read_bytes() == PRECIOUS

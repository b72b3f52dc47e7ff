"""Sweeps: what is run, what is kept, what is refused. The cells run on real ranks."""

import fcntl
import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest

from labkit.run import LaunchError, sweep

GRID = {"strategy": ["ddp_bucketed", "zero1"], "batch_size": [8, 16], "size": "tiny", "nproc": [1, 2]}
REFUSED = "needs one of the strategies ddp_naive, ddp_overlapped, ddp_bucketed, torch_ddp, not fsdp"
FEW = {"rounds": 2, "steps_per_round": 1, "device": "cpu", "quiet": True}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    return folder, sweep.sweep(GRID, folder, **FEW)


@pytest.fixture
def no_launch(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("nothing was to be run")

    monkeypatch.setattr(sweep, "compare", refuse)


def test_a_grid_is_the_product_of_its_lists():
    possible, refused = sweep.cells(GRID)
    assert len(possible) == len({cell.key for cell in possible}) == 8 and not refused
    assert {(cell.experiment.strategy, cell.experiment.batch_size, cell.nproc) for cell in possible} == {
        (strategy, batch, nproc) for strategy in GRID["strategy"] for batch in (8, 16) for nproc in (1, 2)
    }


def test_a_list_of_grids_has_the_cells_of_any_of_them():
    """Weak scaling is no product: the batch grows with the ranks."""
    weak = [{"batch_size": 8 * n, "nproc": n} for n in (1, 2, 4)]
    possible, _ = sweep.cells([*weak, {"batch_size": 8, "nproc": [1, 2]}])
    pairs = [(cell.experiment.batch_size, cell.nproc) for cell in possible]
    assert pairs == [(8, 1), (16, 2), (32, 4), (8, 2)]  # (8, 1) is in both, and there once


def test_what_cannot_be_is_left_out_and_told(capsys, tmp_path, no_launch):
    grid = {"strategy": ["ddp_bucketed", "fsdp"], "comm_hook": ["none", "fp16"], "batch_size": [4, 5], "nproc": 2}
    possible, refused = sweep.cells(grid)
    assert [(cell.experiment.strategy, cell.experiment.comm_hook) for cell in possible] == [
        ("ddp_bucketed", "none"),
        ("ddp_bucketed", "fp16"),
        ("fsdp", "none"),
    ]
    assert len(refused) == 5
    with pytest.raises(AssertionError, match="nothing was to be run"):
        sweep.sweep(grid, tmp_path, **FEW | {"quiet": False})
    told = capsys.readouterr().out
    assert "cells: 3, measured before: 0, launches to go: 1" in told
    assert "invalid cells: 3, batch_size=5 must be a multiple" in told


def test_a_list_of_grids_is_their_union_each_cell_once():
    base = {"batch_size": 8, "nproc": 2}
    grids = [base, base | {"strategy": ["zero1", "ddp_bucketed"]}, base | {"strategy": "fsdp", "comm_hook": "fp16"}]
    possible, refused = sweep.cells(grids)
    assert [cell.experiment.strategy for cell in possible] == ["ddp_bucketed", "zero1"]
    assert [why for _, why in refused] == ["Experiment(comm_hook='fp16'): " + REFUSED]
    assert sweep.cells([base])[0] == sweep.cells(base)[0]


def test_cells_of_several_models_have_launches_and_a_first_of_their_own():
    grids = [
        {"model": ["mlp", "gpt"], "batch_size": 8},
        {"model": ["gpt", "mlp"], "batch_size": 8, "strategy": "zero1"},
    ]
    planned = sweep.launches(sweep.cells(grids)[0], set())
    assert [[(c.experiment.model, c.experiment.strategy) for c in group] for group in planned] == [
        [(model, "ddp_bucketed"), (model, "zero1")] for model in ("mlp", "gpt")
    ]


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ({}, "the grid is empty"),
        ([], "the grid is empty"),
        ([{"batch_size": [8]}, {}], "the grid is empty"),
        ([{"batch_size": [8]}, {"stratgy": ["zero1"]}], "unknown name in the grid: 'stratgy'"),
        ({"strategy": []}, "the grid is empty"),
        ({"stratgy": ["zero1"]}, "unknown name in the grid: 'stratgy'; valid names are model"),
        ({"batch_size": [3, 5]}, "no cell of the grid is valid; the first error: batch_size=3 must be a multiple"),
        ({"link_mbit": [10]}, "need a link between nodes"),
        ({"nproc": ["two"]}, "nproc='two': must be a whole number"),
        ({"lr": ["fast"]}, "must be of type float"),
    ],
)
def test_bad_grids_in_one_line(tmp_path, no_launch, grid, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        sweep.sweep(grid, tmp_path / "results", **FEW)
    assert not (tmp_path / "results").exists()


def test_a_grid_of_yaml(tmp_path):
    file = tmp_path / "grid.yaml"
    file.write_text("strategy: [zero1, zero2]\nnproc: 2\n")
    assert sweep.read_grid(file) == {"strategy": ["zero1", "zero2"], "nproc": 2}
    file.write_text("- &base {size: [tiny]}\n- {<<: *base, nproc: [1, 2]}\n")
    assert sweep.read_grid(file) == [{"size": ["tiny"]}, {"size": ["tiny"], "nproc": [1, 2]}]
    for text, words in (
        ("[1, 2]", "a mapping of names to lists"),
        ("a: [1", "not YAML"),
        ("a: 1\na: 2", "has the key a twice"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=words):
            sweep.read_grid(file)


@pytest.mark.slow
def test_every_cell_has_its_rows(measured):
    folder, rows = measured
    for cell in sweep.cells(GRID)[0]:
        own = rows[rows["cell"] == cell.key]
        assert len(own) == cell.nproc * FEW["rounds"] * FEW["steps_per_round"]
        assert own[["strategy", "batch_size", "nproc"]].drop_duplicates().values.tolist() == [
            [cell.experiment.strategy, cell.experiment.batch_size, cell.nproc]
        ]
        assert set(own["rank"]) == set(range(cell.nproc)) and (own["step_ms"] > 0).all()
    assert rows["launch"].nunique() == 2 == len(list(folder.glob("*.csv")))  # one a world
    assert {"cpu", "cores", "torch", "python", "commit", "measured_at", "peak_bytes", "mfu"} <= set(rows)
    assert set(rows["nvme_path"]) == {""}  # as it was, and not what pandas makes of an empty cell


@pytest.mark.slow
def test_the_same_losses_as_one_launch_of_their_own(measured):
    """Turns and files change no number: both strategies average the same gradients."""
    _, rows = measured
    losses = rows.groupby(["strategy", "nproc", "batch_size", "step"])["loss"].mean().unstack("strategy")
    assert (losses["ddp_bucketed"] - losses["zero1"]).abs().max() < 1e-6


@pytest.mark.slow
def test_nothing_is_run_twice(measured, no_launch):
    folder, rows = measured
    pd.testing.assert_frame_equal(sweep.sweep(GRID, folder, **FEW), rows)


@pytest.mark.slow
def test_what_is_missing_runs_beside_the_first_of_its_world(measured, monkeypatch):
    folder, _ = measured
    possible, _ = sweep.cells(GRID | {"batch_size": [8, 16, 32]})
    planned = sweep.launches(possible, set(sweep.read(folder)["cell"]))
    assert [[(c.experiment.strategy, c.experiment.batch_size, c.nproc) for c in group] for group in planned] == [
        [("ddp_bucketed", 8, nproc), ("ddp_bucketed", 32, nproc), ("zero1", 32, nproc)] for nproc in (1, 2)
    ]
    monkeypatch.setattr(sweep, "TOGETHER", 2)
    assert [len(group) for group in sweep.launches(possible, set())] == [2] * 10  # five others in each of two worlds


@pytest.mark.slow
def test_a_killed_sweep_goes_on(tmp_path):
    """Killed in its second launch: the first one's cells are there, whole, and are not run again."""
    program = f"""
from labkit.run import sweep
compare, calls = sweep.compare, []

def endless_from_the_second(*arguments, **options):
    calls.append(options)
    return compare(*arguments, **options | ({{"rounds": 10**6}} if len(calls) > 1 else {{}}))

sweep.compare = endless_from_the_second
sweep.sweep({GRID!r}, {str(tmp_path)!r}, **{FEW!r})
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*.csv")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = sweep.results(tmp_path)
    assert kept["nproc"].unique().tolist() == [1]
    whole = sweep.sweep(GRID, tmp_path, **FEW)
    assert whole["cell"].nunique() == 8
    assert whole[whole["nproc"] == 1]["launch"].unique().tolist() == kept["launch"].unique().tolist()


@pytest.mark.slow
def test_a_cell_that_fails_is_told_and_what_was_measured_stays(tmp_path):
    grid = {"batch_size": [8], "nproc": 1}
    before = sweep.sweep(grid, tmp_path, **FEW)
    with pytest.raises(LaunchError, match="samples, fewer than one batch of 10000000"):
        sweep.sweep(grid | {"batch_size": [8, 10_000_000]}, tmp_path, **FEW)
    pd.testing.assert_frame_equal(sweep.results(tmp_path), before)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.slow
def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    def full(self, file, **options):
        file.write(b"cell,half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_csv", full)
    with pytest.raises(OSError, match="No space left"):
        sweep.sweep({"batch_size": [8], "nproc": 1}, tmp_path, **FEW)
    assert {file.suffix for file in tmp_path.iterdir()} == {"", ".json"}  # the lock, and what the code was


def test_two_sweeps_in_one_folder(tmp_path):
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another sweep writes to"):
            sweep.sweep(GRID, tmp_path, **FEW)


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "not a file of a sweep"), ("a,b\n1,2\n", "format 2"), ("format\n0\n", "format 2")],
)
def test_files_of_others_are_named(tmp_path, no_launch, text, words):
    (tmp_path / "odd.csv").write_text(text)
    with pytest.raises(ValueError, match=f"odd.csv: .*{words}"):
        sweep.sweep(GRID, tmp_path, **FEW)


@pytest.mark.slow
def test_folders_merge_and_unlike_machines_are_not_compared(measured, tmp_path):
    folder, rows = measured
    for file in folder.glob("*.csv"):
        os.link(file, tmp_path / file.name)
    rows.assign(cpu="another", launch="other").to_csv(tmp_path / "other.csv", index=False)
    assert len(sweep.results(tmp_path, mixed=True)) == 2 * len(rows)
    with pytest.raises(ValueError, match=r"measured with different cpu: .* and .*mixed=True"):
        sweep.results(tmp_path)
    with pytest.raises(ValueError, match="has no results"):
        sweep.results(tmp_path / "empty")


@pytest.mark.slow
def test_a_field_that_is_new_since_then_has_its_usual_value(measured, tmp_path):
    folder, _ = measured
    for path in folder.glob("*.csv"):
        pd.read_csv(path).drop(columns="schedule").to_csv(tmp_path / path.name, index=False)
    assert set(sweep.read(tmp_path)["schedule"]) == {"constant"}
    possible, _ = sweep.cells(GRID)
    assert sweep.launches(possible, set(sweep.read(tmp_path)["cell"])) == []

"""The benchmark protocol: what may be claimed from paired times."""

import json
import subprocess
import sys

import pytest
from benchmarks import simulated
from benchmarks.protocol import REPETITIONS, Comparison, exact_row
from repository import ROOT

from labkit.run import launch


def row(ratios, **target):
    values = {"ours": ratios, "theirs": [1.0] * len(ratios)}
    return Comparison("ours / theirs", "ours", "theirs", **target).row("a step", 2, values)


def test_a_claim_holds_only_with_its_whole_interval():
    close = [0.99 + 0.0001 * i for i in range(REPETITIONS)]
    wide = [0.5 + 0.05 * i for i in range(REPETITIONS)]
    assert row(close, at_most=1.0)["verdict"] == "holds"
    assert row(close, at_most=0.9)["verdict"] == "missed"
    assert row(wide, at_most=1.5)["verdict"] == "undecided"  # median 1.475, but the interval reaches over 1.5
    assert row(wide, at_most=1.5, upper=3.0)["verdict"] == "holds"
    assert row(wide, at_most=1.4)["verdict"] == "undecided"


def test_too_few_pairs_decide_nothing():
    assert row([0.5] * (REPETITIONS - 1), at_most=1.0)["verdict"] == "too few pairs"


def test_a_row_without_a_target_claims_nothing():
    told = row([2.0] * REPETITIONS)
    assert (told["ratio"], told["target"], told["verdict"]) == (2.0, "", "")


def test_an_interval_is_called_what_it_is():
    assert row([0.5, 0.75, 1.0] * 2)["interval"] == "0.500 to 1.000"
    assert row([0.5, 0.75, 1.0])["interval"] == "smallest 0.500, largest 1.000"
    assert exact_row("ring", "sent", 2, 100, 100)["interval"] == "exact"
    errors = [0.1, 0.2, 0.3, 0.4]
    assert simulated.row("half of 4 errors", errors, None)["interval"] == "quartiles 0.125 to 0.375"


def test_what_is_counted_must_be_equal():
    assert exact_row("ring", "sent", 2, 100, 100)["verdict"] == "holds"
    assert exact_row("ring", "sent", 2, 101, 100)["verdict"] == "missed"


@pytest.mark.slow
def test_the_exact_rows_hold_and_are_kept():
    """lab bench, end to end, on what does not depend on time."""
    command = [sys.executable, str(ROOT / "scripts" / "bench.py"), "exact"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = ROOT / done.stdout.splitlines()[-1].split(":")[0]
    facts = json.loads(kept.read_text())
    kept.unlink()
    assert {row["verdict"] for row in facts["rows"]} == {"holds"}
    assert facts["host"]["torch"]
    assert len(facts["commit"]) >= 7


@pytest.mark.slow
def test_an_unknown_benchmark_is_named():
    command = [sys.executable, str(ROOT / "scripts" / "bench.py"), "exect"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    told = "unknown benchmark 'exect'; choose from exact, launching, all_reduce, data_parallel, overlap, "
    assert told in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_every_simulated_form_has_its_steps_without_an_answer():
    """On a group that sends nothing, which a process must register first."""
    records = launch("benchmarks.simulated:times", nproc=2, device="cpu", repetitions=1, quiet=True).records
    named = {f"{form}|{ms}" for form in simulated.FORMS for ms in simulated.BLOCKS_MS}
    assert set(records["left"].dropna()) == named
    steps = records["events"].dropna()
    assert all(steps.map(len))

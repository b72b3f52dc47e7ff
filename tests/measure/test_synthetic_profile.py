"""Made-up profiles: a step's parts add up on every rank, and the course's own rules find the injected cause."""

import pandas as pd
import pytest

from labkit.measure.diagnose import diagnose
from labkit.measure.synthetic_profile import SyntheticRun

CAUSES = {
    "starved input": {"data_ms": 40.0},
    "one slow rank": {"slow_rank": 1, "slower": 2.0},
    "imbalance": {"loaded_rank": "any", "load": 2.5},
    "tiny buckets": {"messages": 20, "latency_ms": 2.0},
    "communication-bound": {"messages": 4, "transfer_ms": 90.0},
}


def table(**fields):
    return pd.DataFrame(SyntheticRun(**fields).rows())


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("fields", [{}, *CAUSES.values(), {"hidden": 0.7, "data_rank": 1}])
def test_the_parts_of_a_step_add_up_on_every_rank(ranks, fields):
    rows = table(ranks=ranks, **fields)
    parts = rows["data_ms"] + rows["forward_ms"] + rows["backward_ms"] + rows["optimizer_ms"]
    assert (parts - rows["step_ms"]).abs().max() < 1e-9
    assert (rows.groupby("step")["step_ms"].nunique() == 1).all()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("cause", CAUSES)
def test_the_rules_find_the_cause(cause, ranks):
    found = diagnose(table(ranks=ranks, seed=ranks, **CAUSES[cause]))
    assert found and found[0].name == cause


def test_a_healthy_run_has_no_cause():
    assert [diagnose(table(ranks=4, seed=seed)) for seed in range(20)] == [[]] * 20


def test_hidden_messages_cost_nothing():
    rows = table(ranks=3, transfer_ms=30.0, hidden=1.0, noise=0.0)
    assert rows["step_ms"].max() == pytest.approx(40.2)
    assert rows["network_ms"].min() == pytest.approx(30.4)


def test_a_leak_is_on_its_rank_and_a_wave_comes_back():
    rows = table(ranks=3, leak_rank=2, leak=1e6, wave=20e6)
    held = rows[rows["step"] >= 8].pivot(index="step", columns="rank", values="held_bytes")
    assert held[0].max() == 120e6 and held[0].iloc[0] == held[0].iloc[4]
    assert held[2].iloc[4] - held[2].iloc[0] == 4e6


def test_the_same_seed_gives_the_same_rows():
    assert SyntheticRun(odd_steps=3, seed=5).rows() == SyntheticRun(odd_steps=3, seed=5).rows()
    assert SyntheticRun(seed=5).rows() != SyntheticRun(seed=6).rows()

"""`lab equal`: each launcher really ends as warm ranks do, and a launcher that does not is named.

The pods are in test_pods.py.
"""

import json
import re

import equal
import pytest
from train_command import steady

from labkit.cluster.network_namespaces import Refused

SMALL = equal.MODEL.replace(model="mlp", strategy="ddp_bucketed")
COLD = (equal.command, equal.torchrun, equal.two_nodes, equal.sbatch)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """What the log of warm ranks says."""
    folder = tmp_path_factory.mktemp("warm")
    equal.warm(SMALL, folder)
    return steady(folder / "log.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("start", COLD, ids=lambda start: start.__name__)
def test_a_launcher_trains_as_warm_ranks_do(start, unbroken, tmp_path, monkeypatch):
    for name, value in equal.surroundings().items():
        monkeypatch.setenv(name, value)
    try:
        start(SMALL, tmp_path)
    except Refused as reason:
        pytest.skip(f"{start.__name__} does not run here: {reason}")
    assert steady(tmp_path / "log.jsonl") == unbroken
    assert len(unbroken) == SMALL.steps and len(unbroken[-1]["weights_sha256"]) == 64
    if start is equal.sbatch:
        (output,) = tmp_path.glob("mlp-ddp_bucketed-*.out")
        assert "ddp_bucketed, dp 2, gloo" in output.read_text()
        assert list(tmp_path.glob("*.outcome")) == []


def launcher(digest):
    """A launcher whose runs end with weights of that SHA-256, and of the strategy's."""

    def start(experiment, folder):
        rows = [{"step": 1}, {"step": 2, "weights_sha256": f"{experiment.strategy}-{digest}"}]
        (folder / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    start.__name__ = f"launcher_{id(start)}"
    return start


def fails(experiment, folder):
    raise RuntimeError("rank 1 died")


def refuses(experiment, folder):
    raise Refused("no root here")


def told(monkeypatch, capsys, tmp_path, launchers):
    """(Exit code, lines) of `lab equal` with these launchers."""
    for name, value in equal.surroundings().items():  # set here, so that they are as before afterwards
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(equal, "LAUNCHERS", launchers)
    monkeypatch.setattr(equal, "ROOT", tmp_path)
    monkeypatch.setattr(equal, "new_folder", lambda label: tmp_path / label)
    code = equal.equal([])
    return code, capsys.readouterr().out.splitlines()


def test_the_table_and_its_sentence(monkeypatch, capsys, tmp_path):
    launchers = {"warm": launcher("a"), "torchrun": launcher("a"), "pods": refuses}
    code, lines = told(monkeypatch, capsys, tmp_path, launchers)
    assert code == 0
    assert "torchrun                ddp_bucketed-a  fsdp-a" in lines
    assert lines[-3:] == [
        "NOT RUN: pods: no root here",
        "4 runs, 2 SHA-256",
        "each strategy ends with the same weights under all 2 launchers",
    ]


def test_other_weights_are_named_by_their_strategy(monkeypatch, capsys, tmp_path):
    code, lines = told(monkeypatch, capsys, tmp_path, {"warm": launcher("a"), "torchrun": launcher("b")})
    assert code == 1
    assert lines[-2:] == ["4 runs, 4 SHA-256", "DIFFERENT: ddp_bucketed, fsdp"]


def test_a_run_that_fails_leaves_its_error(monkeypatch, capsys, tmp_path):
    code, lines = told(monkeypatch, capsys, tmp_path, {"warm": launcher("a"), "torchrun": fails})
    assert code == 1
    assert any(re.fullmatch(r"torchrun +failed +failed", line) for line in lines)
    assert lines[-1] == "FAILED: 2 runs, each with an error.txt among its logs"
    assert "rank 1 died" in (tmp_path / "equal" / "fails" / "fsdp" / "error.txt").read_text()


def test_an_unknown_strategy_starts_nothing(monkeypatch, capsys):
    monkeypatch.setattr(equal, "train_all", lambda *_: pytest.fail("it trains"))
    with pytest.raises(SystemExit):
        equal.equal(["fdsp"])
    assert "unknown strategy 'fdsp'; choose from " in capsys.readouterr().err

"""`lab gpu` continues after a failure and past a limit, and reports the result of each check. On the CPU."""

import json
import subprocess
import sys

import gpu
import pytest
from benchmarks import one_rank
from terminal import Line


def check(code):
    return gpu.Check("one", [sys.executable, "-c", code], 60)


@pytest.mark.slow
def test_what_becomes_of_a_check(tmp_path):
    told = []
    path = tmp_path / "fine"
    for code, limit in ((f"print('{path}\\n')", 60), ("print('x'); 1 / 0", 60), ("import time; time.sleep(99)", 0.5)):
        told.append(gpu.run(check(code), limit, tmp_path / "log", Line("lab gpu")))
    assert [one["result"] for one in told] == ["ok", "failed", "too slow"]
    assert [one["last_line"] for one in told][:2] == ["fine", "ZeroDivisionError: division by zero"]


@pytest.mark.slow
def test_a_check_whose_package_is_missing_is_not_run_and_the_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "checks", lambda device, folder: [gpu.Check("tests", [], 60, ("sys", "no_such_package"))])
    assert gpu.gpu(["--device", "cpu", "--out", str(tmp_path)]) == 1
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["checks"] == [{"check": "tests", "result": "not run: needs no_such_package"}]


@pytest.mark.slow
def test_a_failed_test_is_named_with_its_message(tmp_path):
    case = tmp_path / "test_it.py"
    case.write_text("def test_good(): pass\ndef test_bad():\n    raise ValueError('too much')\n")
    report = tmp_path / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(case)]
    record = gpu.run(gpu.Check("tests", command, 60), 60, tmp_path / "log", Line("lab gpu"))
    told = gpu.cases(report)
    assert record["result"] == "failed" and (told["passed"], told["failed"]) == (1, 1)
    assert list(told["failures"].values()) == ["ValueError: too much"]


@pytest.mark.slow
def test_the_command_itself_on_the_cpu(tmp_path):
    """As on a node with GPUs, but for the notebooks and ratios: its checks run, and one file and one page say so."""
    command = [sys.executable, str(gpu.ROOT / "scripts" / "gpu.py"), "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--only", "tests", "training", "--minutes", "4"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert [(one["check"], one["result"]) for one in record["checks"]] == [("tests", "ok"), ("training", "ok")]
    assert record["tests"]["passed"] > 0 and record["tests"]["failures"] == {}
    assert record["checks"][1]["last_line"].startswith("done: 20 steps, loss ")
    text = (tmp_path / "index.html").read_text()
    assert "2 of 2 checks ok on no GPU" in text and f"torch {record['torch']}" in text


def test_the_page_says_what_failed_and_runs_nothing_that_was_printed():
    hostile = "<img src=x onerror=alert(1)>"
    record = dict.fromkeys(("time", "commit", "cpu", "cores", "torch", "cuda", "nccl", "python"), "1")
    record["gpus"] = [{"name": "A & B"}]
    record["checks"] = [{"check": "tests", "result": "failed", "seconds": 2.0, "last_line": hostile}]
    record["checks"] += [{"check": "bench", "result": "not run: no time left"}]
    record["tests"] = {"failures": {"test_it": hostile}}
    record["bench"] = [{"benchmark": "amp", "row": "a / b", "ratio": 0.5, "interval": "0.4 to 0.6", "verdict": "holds"}]
    text = gpu.page(record)
    assert "<img" not in text and text.count("&lt;img") == 2
    assert "0 of 2 checks ok on A &amp; B" in text and "0.4 to 0.6" in text and "not run: no time left" in text


def test_targets_of_a_cpu_are_named_on_a_gpu_but_not_judged():
    row = {"target": "at most 1.050", "verdict": "missed", "ratio": 1.2}
    assert one_rank.on_a_gpu(row) == {"target": "at most 1.050 on a CPU", "verdict": "", "ratio": 1.2}
    assert one_rank.on_a_gpu(row | {"target": ""})["target"] == ""


def test_ratios_are_kept_without_their_single_times(tmp_path):
    row = {"benchmark": "amp", "row": "a / b", "ratio": 0.5, "interval": "0.4 to 0.6", "verdict": "holds", "low": 0.4}
    (tmp_path / "bench.json").write_text(json.dumps({"rows": [row], "raw": [1, 2, 3]}))
    (kept,) = gpu.ratios(tmp_path / "bench.json")
    assert kept == {name: value for name, value in row.items() if name != "low"}
    assert gpu.ratios(tmp_path / "absent.json") == []


def test_a_check_that_is_unknown_is_told(capsys):
    with pytest.raises(SystemExit):
        gpu.gpu(["--only", "test"])
    assert "choose from" in capsys.readouterr().err

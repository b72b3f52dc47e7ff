"""`lab gpu` goes on after a failure and past a limit, and says of each check what became of it. On the CPU."""

import sys

import gpu
from terminal import Line


def check(code):
    return gpu.Check("one", [sys.executable, "-c", code], 60)


def test_what_becomes_of_a_check(tmp_path):
    told = []
    for code, limit in (("print('fine\\n')", 60), ("print('x'); 1 / 0", 60), ("import time; time.sleep(99)", 0.5)):
        told.append(gpu.run(check(code), limit, tmp_path / "log", Line("lab gpu")))
    assert [one["result"] for one in told] == ["ok", "failed", "too slow"]
    assert [one["last_line"] for one in told][:2] == ["fine", "ZeroDivisionError: division by zero"]


def test_a_failed_test_is_named_with_its_message(tmp_path):
    case = tmp_path / "test_it.py"
    case.write_text("def test_good(): pass\ndef test_bad():\n    raise ValueError('too much')\n")
    report = tmp_path / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(case)]
    record = gpu.run(gpu.Check("tests", command, 60), 60, tmp_path / "log", Line("lab gpu"))
    told = gpu.cases(report)
    assert record["result"] == "failed" and (told["passed"], told["failed"]) == (1, 1)
    assert list(told["failures"].values()) == ["ValueError: too much"]

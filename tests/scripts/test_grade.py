"""`lab grade`: cases, points and pages; and answers that harm whoever runs them cost only their own row."""

import ast
import contextlib
import csv
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import grade
import psutil
import pytest
import torch
import yaml
from grading import answers, cases, exercises, grader, report, sandbox, submissions
from hostile_answers import CHECKERS, HOSTILE, NOTEBOOK, SOLUTION, STUBS, answer, course, notebook
from repository import ROOT

needs_bubblewrap = pytest.mark.skipif(bool(sandbox.refusal()), reason=str(sandbox.refusal()))
WRONG = ("12_zero", "52_case_studies")  # notebooks whose wrong answers are graded here


@contextlib.contextmanager
def small_course(folder):
    """Put the small course in place of the real one, with lower limits and on one number of ranks."""
    course(folder / "notebooks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exercises, "SIZES", [2])
        patch.setattr(sandbox, "MEMORY", 2 * sandbox.GB)
        patch.setattr(exercises, "NOTEBOOKS", folder / "notebooks")
        patch.setattr(grader, "SECONDS", 8)
        patch.setattr(grader, "CPU_SECONDS", 2)
        patch.setattr(grader, "COLLECTIVE", 6)
        yield


@pytest.fixture
def small(tmp_path_factory):
    with small_course(tmp_path_factory.mktemp("course")):
        yield


def graded(folder, out, *options):
    """{(file, exercise): row of the CSV} of `lab grade`."""
    assert grade.grade([str(folder), "--out", str(out), "--jobs", "3", *options]) == 0
    with open(out / "grades.csv", newline="") as file:
        return {(row["file"], row["exercise"]): row for row in csv.DictReader(file)}


def submit(folder, **texts):
    """Write submissions: {name of the learner: text of a .py file}."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}_{NOTEBOOK}.py").write_text(text)
    return folder


def of(found, name, exercise="double"):
    return found[f"{name}_{NOTEBOOK}.py", exercise]


# Exercises, cases, answers


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({"nproc": "world_size"}, [2, 3, 4]),
        ({"nproc": "max(4, world_size)"}, [4, 5, 6]),
        ({"nproc": "1"}, [1]),
        ({"nodes": "2", "nproc": "3"}, [6]),
        ({}, [2]),
    ],
)
def test_the_ranks_of_an_exercise_are_those_that_its_check_allows(options, ranks):
    assert exercises.Exercise("n", "f", "g", "", options).ranks == ranks


def run_cases(double):
    """(cases, error) of the small course's checker, with assertions as cases, on one process."""
    source = cases.as_cases(exercises.functions([CHECKERS])["doubles"])
    rows, error = [], None
    namespace = {"record": lambda **row: rows.append(row), "double": double}
    try:
        exec(f"{cases.PRELUDE}\n{source}\ndoubles(double)\n{cases.END}", namespace)
    except Exception as raised:
        error = raised
    return rows, error


def test_every_assertion_is_a_case_and_is_tried():
    rows, error = run_cases(lambda number: 2 * number)
    assert error is None and rows == [{"case": True}] * 6 + [{"end": True}]
    rows, error = run_cases(lambda number: 1 + number)
    assert [row["case"] for row in rows[:-1]] == [True, True, False, True, False, False]
    assert rows[2]["why"] == "double(2) is 3, not 4." and rows[5]["why"] == "3: one more"


def test_an_error_behind_a_failed_case_keeps_the_earlier_ones():
    rows, error = run_cases({1: 2}.get)
    assert isinstance(error, TypeError)  # None / 2, which the assertion before it guards
    assert [row["case"] for row in rows] == [True, True, False]


@pytest.mark.parametrize(
    ("test", "is_of_type"),
    [
        ("found is not None", True),
        ("not isinstance(found, int) or (found is None and callable(found))", True),
        ("isinstance(found, int) and found > 1", False),
        ("found == None", False),
        ("found", False),
    ],
)
def test_a_type_alone_is_worth_nothing(test, is_of_type):
    assert cases.is_of_type(ast.parse(test, mode="eval").body) == is_of_type
    source = cases.as_cases(f"def checker(answer):\n    found = answer()\n    assert {test}\n")
    assert ("_passed()" in source, "_failed(" in source) == (not is_of_type, True)


def test_an_answer_brings_what_it_uses_and_nothing_else():
    first = "import math, torch\nimport os as system\nworld_size = 2\nLIMIT = {'a': 1}\nprint('is not run')\n"
    second = "def helper(x):\n    return math.ceil(x) + LIMIT['a'] + world_size\n\ndef unused():\n    pass\n"
    third = "%%time\n!ls\n%time 1\nhelper?\nhere = %pwd\n@torch.no_grad()\ndef f(x):\n    return helper(x)\n"
    found = answers.pieces([first, second, "def f(x):\n    return 1\n", third, "%%torchrun\nnot python"], "f")
    assert [(piece.cell, piece.line) for piece in found] == [(1, 1), (1, 4), (2, 1), (4, 6)]
    assert found[-1].text.startswith("@torch.no_grad()\ndef f")
    assert "is not run" not in "".join(piece.text for piece in found)


CONSTANTS = """
import math
INF = float("inf")
EPS = 2 ** -10
TYPE: object = torch.bfloat16
n = 4
SIZE = math.tau * n
n = 8
squares = [one * one for one in range(world_size)]
scale = lambda x: helper(x) / n
def helper(x):
    return x + EPS
"""
RESULTS = """
losses = []
count = 0
run = launch("x = 1")
last = losses[-1]
best = max(losses)
ratio = 1 / count
kept = unknown
"""


def test_an_answer_brings_values_that_are_computed_but_no_results():
    answer = "def f(x, run, last, best, ratio, kept):\n    return scale(x), INF, TYPE, SIZE, squares\n"
    found = answers.pieces([CONSTANTS, RESULTS, answer], "f")
    namespace = {"torch": torch, "world_size": 3}
    exec("\n".join(piece.text for piece in found), namespace)
    want = ((2 + 2**-10) / 8, math.inf, torch.bfloat16, 4 * math.tau, [0, 1, 4])
    assert namespace["f"](2, 0, 0, 0, 0, 0) == want
    local = answer.replace("return", "run = last = best = ratio = kept = 0\n    return")
    assert answers.pieces([CONSTANTS, RESULTS, local], "f")[:-1] == found[:-1]


@pytest.mark.parametrize(
    ("cells", "words", "line"),
    [
        (
            ["def doubel(x):\n    return 1"],
            "no function double() at the top level of the submission; is doubel() m",
            "",
        ),
        (["double = 3"], "no function double()", ""),
        (["x = 1", "def double(x):\n    return (x"], "syntax error in cell 2, line 2", "return (x"),
        (["def double(x): return " + "(" * 5000], "syntax error in cell 1", None),
        (["def double(x):\n    return 2", "def double(x):\n    return (x"], "syntax error in cell 2", "return (x"),
    ],
)
def test_an_answer_that_is_not_there_is_an_error_of_one_line(cells, words, line):
    with pytest.raises(answers.Unreadable) as error:
        answers.pieces(cells, "double")
    assert words in str(error.value) and "\n" not in str(error.value)
    assert line is None or error.value.line == line


def test_a_file_belongs_to_the_notebook_that_its_name_contains(tmp_path):
    for name in ("a/13_fsdp.ipynb", "b_13_fsdp (1).py", "essay.py", "13_fsdp.txt", "c/12_zero.ipynb", ".x/12_zero.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("[" * 10**5 if name.startswith("c") else notebook("x = 1"))
    (tmp_path / "d_12_zero.py").symlink_to("/etc/passwd")
    (tmp_path / "e_12_zero.py").write_bytes(b"\xff\xfe")
    found = {one.file: (one.notebook, one.problem) for one in submissions.find(tmp_path, tmp_path / "out")}
    assert found.pop("a/13_fsdp.ipynb") == ("13_fsdp", "") and found.pop("b_13_fsdp (1).py") == ("13_fsdp", "")
    assert all(problem for _, problem in found.values())
    assert sorted(found) == ["13_fsdp.txt", "c/12_zero.ipynb", "d_12_zero.py", "e_12_zero.py", "essay.py"]
    assert "nested too deeply" in found["c/12_zero.ipynb"][1] and "a link" in found["d_12_zero.py"][1]


def test_what_cannot_be_read_has_a_line_that_says_why(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "a_12_zero.py")
    (tmp_path / "b_12_zero.py").write_bytes("# \u00fc".encode("latin-1"))
    (tmp_path / "c_12_zero.ipynb").write_text("\n")
    (tmp_path / "d").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "d")
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        known = os.scandir

        def closed(path):
            if Path(path).name == "d":
                raise PermissionError(13, "Permission denied", str(path))
            return known(path)

        monkeypatch.setattr(os, "scandir", closed)  # root may read every folder
        found = {one.file: one.problem for one in submissions.find(tmp_path, tmp_path / "out")}
    pipe = "neither a file nor a folder, but a pipe, a socket or a device"
    assert found.pop("link").startswith("a link")
    assert found == {
        "a_12_zero.py": pipe,
        "b_12_zero.py": "is not UTF-8: save it with the encoding UTF-8",
        "c_12_zero.ipynb": "the file is empty",
        "d": "a folder that cannot be read: Permission denied",
        "s": pipe,
    }


# Points and pages

DONE = {"finished": True, "passed": 8, "tried": 8, "failed": [], "rank": 0, "by_rank": [4, 4], "seconds": 1.0}


@pytest.mark.parametrize(
    ("run", "share"),
    [
        (DONE, 1.0),
        (DONE | {"passed": 6}, 0.75),
        (DONE | {"finished": False, "passed": 2, "tried": 2}, 0.5),  # of the 4 that the course's answer has on a rank
        (DONE | {"finished": False, "passed": 4, "tried": 4}, 0.8),  # it came further, and yet it has not passed all
        (DONE | {"finished": False, "passed": 0, "tried": 0}, 0.0),
        (DONE | {"passed": 0, "tried": 0}, 1.0),
    ],
)
def test_points_are_the_share_of_cases_that_passed(run, share):
    assert grader.share(run, DONE) == pytest.approx(share)


def test_only_right_answers_have_all_points():
    exercise = exercises.Exercise("n", "f", "g", "", {"nproc": "2"})
    nearly = DONE | {"passed": 99_999, "tried": 100_000, "failed": ["one is wrong"]}
    row = grader.row(submissions.Submission("a.py", "n"), exercise, {2: nearly}, {})
    assert (row.points, row.message) == (0.999, "one is wrong") and report.percent(row.points) == "99%"


@pytest.mark.parametrize("forged", [[], {"finished": 1}, DONE | {"passed": 9}, DONE | {"error": 1}, DONE | {"x": 1}])
def test_a_forged_result_is_refused(forged):
    with pytest.raises(sandbox.Ended):
        grader.valid(forged)


def test_what_a_learner_wrote_is_text_in_the_page_and_in_a_spreadsheet():
    evil = "<script>alert(1)</script>\x1b[31m\ud800"
    row = grader.Row(f"={evil}", "n", "f", 0.5, grader.clean(evil), "=1+1", 1.0, {2: DONE}, grader.clean(evil))
    page = report.page("Grades", [evil], [row, grader.Row(evil, "", "", None, evil)])
    assert "<script>" not in page and "&lt;script&gt;" in page and "\x1b" not in grader.clean(evil)
    line = report.as_csv([row]).splitlines()[1]
    assert line.startswith("'=") and ",'=1+1," in line


# Graded for real


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The rows of a class of which each learner tries another harm."""
    folder = tmp_path_factory.mktemp("hostile")
    bodies = {name: body for name, (body, _) in HOSTILE.items()}
    submit(folder, right=SOLUTION, **{name: answer(body) for name, body in bodies.items()})
    fills = answer("return 2 * number", total=f"def total(mine):\n{textwrap.indent(bodies['fills'], '    ')}\n")
    submit(folder, early=fills)
    before = children()
    with small_course(tmp_path_factory.mktemp("course")):
        found = graded(folder, folder / "out")
    assert children() == before
    return found


def children():
    return {process.pid for process in psutil.Process().children(recursive=True)}


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_costs_only_its_own_row(name, hostile):
    words = HOSTILE[name][1]
    row = of(hostile, name)
    assert float(row["points"]) == 0
    assert any(one in row["message"] for one in ([words] if isinstance(words, str) else words)), row
    assert of(hostile, name, "total")["points"] == "1.000"


@needs_bubblewrap
@pytest.mark.slow
def test_what_comes_after_a_hostile_answer_is_graded(hostile):
    assert of(hostile, "early", "total")["points"] == "0.000" and of(hostile, "early")["points"] == "1.000"


@needs_bubblewrap
@pytest.mark.slow
def test_the_right_answer_among_hostile_ones_has_all_points(hostile):
    assert of(hostile, "right")["points"] == of(hostile, "right", "total")["points"] == "1.000"


REACH = """
import os, socket
reached = []
for path in {paths!r}:
    try:
        open(os.path.join(path, "lab-grade-was-here"), "w").close()
        reached.append("wrote " + path)
    except OSError:
        pass
for path in {files!r}:
    if os.path.exists(path):
        reached.append("read " + path)
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger"):
    if os.access(path, os.W_OK):
        reached.append("may write " + path)
for host in ("127.0.0.1", "192.0.2.1"):
    try:
        socket.create_connection((host, {port}), timeout=2).close()
        reached.append("reached " + host)
    except OSError:
        pass
raise RuntimeError("reached: " + str(reached))
"""


@needs_bubblewrap
@pytest.mark.slow
def test_an_answer_reaches_no_file_and_no_network(small, tmp_path):
    places = [str(ROOT), str(tmp_path), "/usr/lib", "/etc", "/", sys.prefix, sys.base_prefix, "/lab/labkit", "/dev"]
    files = [str(ROOT / "notebooks" / "solutions"), str(ROOT / "README.md"), str(tmp_path), "/etc/passwd", "/home"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        body = REACH.format(paths=places, files=files, port=server.getsockname()[1])
        found = graded(submit(tmp_path / "in", eve=answer(body)), tmp_path / "out")
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    own = [f"wrote {ROOT}"] if ROOT.is_relative_to("/tmp") else []  # an empty folder of the sandbox's own /tmp
    assert of(found, "eve")["message"] == f"RuntimeError: reached: {own}"
    assert [place for place in places if Path(place, "lab-grade-was-here").exists()] == []


@needs_bubblewrap
@pytest.mark.slow
def test_a_second_call_grades_only_what_is_new_and_says_the_same(small, tmp_path, monkeypatch):
    crash = "if number == 2:\n    raise ValueError(object())\nreturn 2 * number"
    texts = {"ann": SOLUTION, "bob": answer("return 1 + number"), "cem": answer(crash), "dan": "x = ("}
    folder = submit(tmp_path / "in", **texts)
    (folder / f"fay_{NOTEBOOK}.ipynb").write_text("{")
    first = graded(folder, tmp_path / "out")
    assert of(first, "ann")["points"] == "1.000"
    assert (of(first, "bob")["points"], of(first, "bob")["message"]) == ("0.500", "double(2) is 3, not 4.")
    assert of(first, "cem")["points"] == "0.333"  # 2 of 6 cases: those of 1
    assert of(first, "cem")["line"] == "cell 1, line 3: raise ValueError(object())"
    assert "syntax error" in of(first, "dan")["message"] or "no function" in of(first, "dan")["message"]
    assert first[f"fay_{NOTEBOOK}.ipynb", ""]["points"] == ""

    calls = []
    known = grader.grade
    monkeypatch.setattr(grader, "grade", lambda one, stopping: calls.append(one.file) or known(one, stopping))
    assert graded(folder, tmp_path / "out") == first and calls == []
    submit(folder, gus=STUBS)
    assert len(graded(folder, tmp_path / "out")) == len(first) + 2 and calls == [f"gus_{NOTEBOOK}.py"]
    for name in ("ann", "dan", "gus"):
        (folder / f"{name}_{NOTEBOOK}.py").unlink()
    for key, row in graded(folder, tmp_path / "other").items():
        assert row | {"seconds": ""} == first[key] | {"seconds": ""}


@pytest.mark.slow
def test_without_bubblewrap_the_limits_hold_and_a_line_says_so(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sandbox, "refusal", lambda: "bubblewrap is not installed")
    texts = {"right": SOLUTION, "memory": answer(HOSTILE["memory"][0])}
    found = graded(submit(tmp_path / "in", **texts), tmp_path / "out")
    assert capsys.readouterr().out.startswith("limits only, no sandbox: bubblewrap is not installed\n")
    assert "Graded without a sandbox" in (tmp_path / "out" / "grades.html").read_text()
    assert of(found, "right")["points"] == "1.000"
    assert "can't allocate memory" in of(found, "memory")["message"]


def submissions_of(stem):
    """(exercise, name of the answer, Submission, words) of a notebook's solution and its listed wrong answers."""
    stubs = exercises.functions(exercises.read(exercises.NOTEBOOKS / f"{stem}.ipynb"))
    listed = yaml.safe_load((exercises.NOTEBOOKS / "solutions" / f"{stem}.yaml").read_text())
    for exercise in grader.course(stem)[0]:
        yield exercise, "solution", submissions.solution(stem), None
        for name, wrong in listed[exercise.name]["wrong"].items():
            body = textwrap.indent(textwrap.dedent(wrong["answer"]), "    ")
            text = stubs[exercise.name].replace("    raise NotImplementedError", body)
            yield exercise, name, submissions.Submission("a.py", stem, (text,)), wrong["says"]


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.parametrize("stem", WRONG)
def test_wrong_answers_lose_points_and_hear_why_and_the_solutions_have_all(stem):
    """On 2, 3 and 4 ranks, where the checker allows it."""
    box = grader.Box()
    try:
        for exercise, name, submission, says in submissions_of(stem):
            runs = grader.graded(submission, exercise, box, threading.Event())
            row = grader.row(submission, exercise, runs, {})
            if says is None:
                assert row.points == 1 and list(runs) == exercise.ranks, row
            else:
                assert row.points < 1 and says in row.message, (name, row)
    finally:
        box.close()


@needs_bubblewrap
@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_keeps_what_is_graded(tmp_path):
    stem = "00_start_here"
    (tmp_path / "in").mkdir()
    solution = (exercises.NOTEBOOKS / "solutions" / f"{stem}.ipynb").read_bytes()
    (tmp_path / "in" / f"ann_{stem}.ipynb").write_bytes(solution)
    loop = "import os\n\ndef plan_13b():\n    while True:\n        pass\n"
    (tmp_path / "in" / f"bob_{stem}.py").write_text(loop)
    words = [sys.executable, str(ROOT / "scripts" / "grade.py"), "in", "--out", "out", "--jobs", "1"]
    place = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    child = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=os.environ | place)
    deadline = time.monotonic() + 120
    below = []
    while time.monotonic() < deadline and not (len(below) > 5 and list(tmp_path.glob("out/results/*.json"))):
        time.sleep(0.1)
        below = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130 and errors.strip().endswith("lab: interrupted")
    assert [process for process in below if process.is_running() and alive(process)] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    assert len(list(tmp_path.glob("out/results/*"))) == 1


def alive(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_the_help_says_how_files_are_named(capsys):
    with pytest.raises(SystemExit):
        grade.grade(["--help"])
    assert "submissions/alice/13_fsdp.ipynb" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["missing"], ["."]])
def test_a_folder_without_submissions_is_an_error_of_one_line(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(grade.UserError, match=r"no folder missing|no files in \."):
        grade.grade(words)


def test_bubblewrap_is_used_where_it_works():
    """Otherwise a mistake in its arguments would only skip tests."""
    plain = ["bwrap", "--ro-bind", "/", "/", "--unshare-all", "--unshare-user", "--disable-userns", "true"]
    if not shutil.which("bwrap") or subprocess.run(plain, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("bubblewrap does not work here")
    assert sandbox.refusal() is None


def test_a_sandbox_sees_folders_of_a_list_and_never_the_root():
    words = sandbox.arguments()
    bound = [words[place + 1] for place, word in enumerate(words) if re.fullmatch("--(ro-)?bind(-try)?", word)]
    assert "/" not in bound and "--bind" not in words
    assert not any((ROOT / "notebooks").is_relative_to(place) for place in bound if place != sys.base_prefix)

"""`lab run` and `lab test`: notebooks as batch jobs, in a copy of the scripts with small notebooks of its own."""

import ast
import errno
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import batch
import explorers
import nbformat
import psutil
import pytest
import terminal
from notebook_jobs import FIGURE, RANKS, Page, command, finished, notebook

import figures

PARAMETERS = "world_size = 2\nmodel = 'mlp'\nlr = 0.05\nunread = 1\nflag = False\nlimit = None\nsizes = [1, 4]"
READERS = "print(model, flag, limit, sizes)\n%time x = lr"
MAGIC = "%%torchrun --nproc $world_size\nprint(rank)"
TABLE = "import pandas\npandas.DataFrame({'strategy': ['ddp', 'fsdp'], 'step_ms': [1.25, 30.5]})"
OTHER_TABLE = "import pandas\npandas.DataFrame({'what': ['not the last table']})"
MAIN = "world_size = 2\nmeasure = False"
LATE = """
import threading, time
from ipykernel.iostream import IOPubThread
pipe = IOPubThread._event_pipe.fget
def late(thread):
    if threading.current_thread().name == "Control":
        time.sleep(0.3)  # at the end of a kernel long enough for its main thread to close it
    return pipe(thread)
IOPubThread._event_pipe = property(late)
"""


# Parameters


@pytest.fixture
def parametrised(tmp_path):
    return notebook(tmp_path / "07_small.ipynb", PARAMETERS, READERS, MAGIC)


def test_values_take_the_types_of_the_defaults(parametrised):
    given = {"world_size": "4", "model": "gpt", "lr": "1", "flag": "true", "limit": "3", "sizes": "[2]"}
    values = batch.check_parameters(parametrised, given)
    assert values == {"world_size": 4, "model": "gpt", "lr": 1, "flag": True, "limit": 3, "sizes": [2]}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("wordl_size", "4", "07_small.ipynb has no parameter 'wordl_size'; choose from world_size=2"),
        ("unread", "4", "parameter 'unread' is declared, but no cell reads it"),
        ("world_size", "two", "parameter 'world_size' is 'two' but must be int like 2"),
        ("world_size", "2.5", "must be int like 2"),
        ("flag", "1", "must be bool like False"),
        ("lr", "fast", "must be float like 0.05"),
        ("world_size", "0", "parameter 'world_size' is '0' but must be at least 1"),
        ("lr", "-0.1", "must be at least 0"),
        ("lr", "1e999", "must be at most 1.79769e+308"),
        ("model", "mpl", "'mpl' but must be one of mlp, resnet, gpt"),
        ("sizes", "[4, 0]", "must be a list of values at least 1"),
        ("sizes", "[]", "must be a list of int like [1, 4]"),
        ("sizes", "['4']", "must be a list of int like [1, 4]"),
    ],
)
def test_a_wrong_parameter_is_named(parametrised, name, value, words):
    with pytest.raises(terminal.UserError, match=re.escape(words)):
        batch.check_parameters(parametrised, {name: value})


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("02_data_parallel", 5), ("05_scaling", 3), ("12_zero", 5), ("13_fsdp", 3), ("43_experts", 3)],
)
def test_ranks_that_cannot_share_the_batch_are_refused_in_one_line(name, ranks):
    course = batch.read(batch.NOTEBOOKS / f"{name}.ipynb")
    names = batch.defaults(course) | {batch.RANKS: ranks}
    looks = [one for cell in batch.code_cells(course) for one in explorers.statements(cell) if refuses(one)]
    with pytest.raises(ValueError, match=rf"^.*batch_size={names['batch_size']}.*\b{ranks}\b.*$"):
        exec(compile(ast.Module(looks, []), name, "exec"), names)


def refuses(statement):
    raises = isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Raise)
    return raises and "find_spec" not in ast.unparse(statement)  # not whether labkit is there


@pytest.mark.parametrize("slip", [("--nproc", "0"), ("-p", "world_size", "-1"), ("--timeout", "0")])
def test_what_cannot_be_is_one_line_and_starts_no_kernel(tree, slip):
    notebook(tree / "notebooks" / "dashboard.ipynb", MAIN, "print(world_size, measure)")
    done = finished(tree, "run", *slip)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lab: ")
    assert done.stderr.count("\n") == 1
    assert not (tree / "runs").exists()


def test_a_parameter_is_read_where_a_magic_line_names_it(tmp_path):
    path = notebook(tmp_path / "a.ipynb", "n = 2", "%%torchrun --nproc {n}\nprint(rank)")
    assert batch.check_parameters(path, {"n": "3"}) == {"n": 3}


def test_names_of_notebooks(tree, monkeypatch):
    monkeypatch.setattr(batch, "NOTEBOOKS", tree / "notebooks")
    for name in ("00_start_here", "04_compare", "05_scaling"):
        notebook(tree / "notebooks" / f"{name}.ipynb")
    notebook(tree / "notebooks" / "scratch.ipynb")
    assert [path.stem for path in batch.course()] == ["00_start_here", "04_compare", "05_scaling"]
    notebook(tree / "notebooks" / "dashboard.ipynb")
    assert batch.course()[-1] == batch.find("dash")
    assert batch.find("04").stem == batch.find("04_compare").stem == "04_compare"
    for name, words in (("0", "several notebooks start with '0'"), ("4", "no notebook '4'; choose from 00_start_here")):
        with pytest.raises(terminal.UserError, match=words):
            batch.find(name)


def test_a_page_has_words_for_its_pictures(tmp_path):
    book = nbformat.read(notebook(tmp_path / "a.ipynb", "n = 1", "n", "n"), 4)
    for cell, metadata in zip(book.cells[2:], ({"alt": '5 > 4 & "more"'}, {}), strict=True):
        cell.outputs = [nbformat.v4.new_output("display_data", {"image/png": "iVBORw0KGgo="}, metadata=metadata)]
    first, second = Page(batch.as_page(book)).alts
    assert first == '5 > 4 & "more"'
    assert second.startswith("No description")
    assert [alt for _, _, alt in batch.displayed_pictures(book)] == ['5 > 4 & "more"', ""]


# Runs


@pytest.mark.slow
def test_run_leaves_the_notebook_a_page_and_figures_and_prints_the_table(tree):
    notebook(tree / "notebooks" / "dashboard.ipynb", MAIN, "assert measure", OTHER_TABLE, TABLE, FIGURE, LATE)
    done = finished(tree, "run", "--nproc", "3")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "strategy  step_ms" in done.stdout
    assert re.search(r"fsdp +30\.50", done.stdout)
    assert "not the last table" not in done.stdout
    (folder,) = (tree / "runs").glob("*-dashboard")
    listed = [line.strip() for line in done.stdout.splitlines() if line.startswith("  runs/")]
    assert [str(folder.relative_to(tree) / name) for name in ("dashboard.ipynb", "dashboard.html")] == listed
    assert done.stdout.endswith("dashboard.html\n")  # the page's address is the last line
    assert (folder / "figures" / "dashboard-1.png").read_bytes().startswith(b"\x89PNG")
    executed = nbformat.read(folder / "dashboard.ipynb", 4)
    assert [cell.source for cell in executed.cells if "injected-parameters" in cell.metadata.get("tags", [])] == [
        "# Parameters\nmeasure = True\nworld_size = 3\n"
    ]


@pytest.mark.slow
def test_run_all_sums_up_and_tells_the_first_failing_line(tree):
    notebook(tree / "notebooks" / "00_a.ipynb", "lr = 1", "print(lr)")
    notebook(tree / "notebooks" / "01_b.ipynb", "n = 2", "raise ValueError(f'no such thing: {n}')", "print(1)")
    own = "import os; assert '02_c/figures' in os.environ['LABKIT_FIGURES'], os.environ['LABKIT_FIGURES']"
    named = (
        "import os; from ipykernel import get_connection_info as how; how = how(unpack=True)\n"
        "assert how['transport'] == 'ipc', how\n"
        "assert os.stat(os.path.dirname(how['ip'])).st_mode & 0o777 == 0o700, how\n"
        "assert not [line for line in open('/proc/net/unix') if '@lab-' in line], 'an abstract socket'"
    )
    if sys.platform != "linux":
        named = ""  # a port: how long a socket's path may be differs
    notebook(tree / "notebooks" / "02_c.ipynb", "n = 2", "assert n == 3", own, named)
    done = finished(tree, "run", "all", "-p", "n", "3")
    assert done.returncode == 1
    rows = [line.split(maxsplit=3) for line in done.stdout.splitlines()[-7:-3]]
    assert [row[:2] for row in rows[1:]] == [["00_a", "ok"], ["01_b", "failed"], ["02_c", "ok"]]
    assert rows[2][3] == "cell 3: ValueError: no such thing: 3"
    assert done.stdout.splitlines()[-1].startswith("2 of 3 jobs ok")
    unknown = finished(tree, "run", "all", "-p", "m", "3")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr == "lab: no notebook has a parameter 'm'; choose from lr, n\n"


def test_no_notebook(tree):
    done = finished(tree, "run")
    assert (done.returncode, done.stderr) == (2, "lab: no notebook 'dashboard'; choose from none yet\n")


@pytest.mark.slow
def test_ctrl_c_stops_the_kernel_and_all_ranks(tree):
    notebook(tree / "notebooks" / "dashboard.ipynb", MAIN, "assert measure", RANKS)
    pids = tree / "pids"
    pids.mkdir()
    environment = {**os.environ, "PIDS": str(pids)}
    child = subprocess.Popen(command(tree, "run"), text=True, stderr=subprocess.PIPE, env=environment)
    deadline = time.monotonic() + 150
    while len(list(pids.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    ranks = [int(path.name) for path in pids.iterdir()]
    family = [process.pid for process in psutil.Process(child.pid).children(recursive=True)]
    assert len(ranks) == 2
    assert set(ranks) < set(family)
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGINT)  # people press it twice
    told = child.communicate(timeout=100)[1]
    assert child.returncode == 130
    assert told.strip().splitlines()[-1] == "lab: interrupted"
    assert "Traceback" not in told
    assert [pid for pid in family if psutil.pid_exists(pid)] == []


@pytest.mark.slow
def test_a_time_limit_stops_a_notebook(tree):
    notebook(tree / "notebooks" / "dashboard.ipynb", MAIN, "import time; time.sleep(60 + measure)")
    done = finished(tree, "run", "--timeout", "4")
    assert done.returncode == 1
    assert "still running after 4 s" in done.stdout


def test_a_full_disk_is_one_line(capsys):
    def write(arguments):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/x.ipynb")

    assert terminal.main(write, []) == 1
    assert capsys.readouterr().err == "lab: No space left on device: runs/x.ipynb\n"


def test_two_runs_of_one_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "ROOT", tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20300101-000000")
    assert [batch.new_folder("all").name for _ in range(3)] == [
        "20300101-000000-all",
        "20300101-000000-all-2",
        "20300101-000000-all-3",
    ]


# lab test


def small_suite(tree, text):
    (tree / "tests").mkdir()
    (tree / "tests" / "test_it.py").write_text(text)
    (tree / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\nmarkers = ['browser: x', 'slow: x', 'papermill: x']\n[tool.ruff]\nexclude = ['*']\n"
    )


@pytest.mark.slow
def test_lab_test_sums_up_and_closes_with_the_counts(tree, monkeypatch):
    cases = (
        "import pytest, time\ndef test_a(): time.sleep(3)\n"
        "def test_b(): assert 1 + 1 == 3\n"
        "def test_c(): pytest.skip('no CUDA device')\n"
        "@pytest.mark.slow\ndef test_d(): pass\n"
        "@pytest.mark.parametrize('n', [1, 2, 3, 4])\ndef test_e(n): pass\n"
        "def test_f(): import sys; assert not sys.dont_write_bytecode\n"
    )
    small_suite(tree, cases)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # each process of a run would compile what it imports
    done = finished(tree, "test", "tests", "browser", "--workers", "1")
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert "FAILED: tests: tests/test_it.py::test_b: assert (1 + 1) == 3" in lines
    assert "NOT TESTED: tests/test_it.py::test_c: no CUDA device" in lines
    slowest = lines.index("the 10 slowest cases:") + 1
    assert re.fullmatch(r"\d+\.\d s  tests/test_it.py::test_a", lines[slowest])
    assert re.fullmatch(r"\d+ s in all; the cores were idle \d+ % of it, and \d+ % in the kernel", lines[-2])
    assert lines[-1] == "7 passed, 1 failed"
    quick = finished(tree, "test", "quick", "--workers", "1")
    assert "ruff" in quick.stdout
    # The first two cases of a function that is not slow; what lints; test_b fails as before.
    lints = 2 + Path(sys.prefix, "bin", "hadolint").exists()
    assert quick.stdout.splitlines()[-1] == f"{4 + lints} passed, 1 failed"


@pytest.mark.slow
def test_lab_test_without_any_test_is_a_failure(tree):
    small_suite(tree, "")
    done = finished(tree, "test", "tests", "nbval", "papermill", "--workers", "1")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "0 passed, 0 failed"


@pytest.mark.parametrize(("tool", "builds"), [("docker", 1), ("podman", 2)])
def test_lab_test_image_builds_and_runs_a_notebook_when_it_is_named(tree, monkeypatch, tool, builds):
    place, calls = tree / "bin", tree / "calls"
    place.mkdir()
    monkeypatch.setenv("PATH", str(place))
    without = finished(tree, "test", "image")
    assert without.returncode == 1
    assert "NOT TESTED: build: there is neither podman nor docker on this machine" in without.stdout
    fake = f'#!/bin/sh\necho "$@" >>{calls}\n[ "$1" = "$REFUSED" ] && echo no space && exit 3\nexit 0\n'
    (place / tool).write_text(fake)
    (place / tool).chmod(0o755)
    done = finished(tree, "test", "image", "--build", "--network host")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"{builds + 1} passed, 0 failed")
    *build, run = calls.read_text().splitlines()
    assert len(build) == builds
    assert all(line.startswith("build --file scripts/Dockerfile --network host ") for line in build)
    assert run == "run --rm --network none --cap-drop ALL lab-test run 15_attention"
    monkeypatch.setenv("REFUSED", "build")
    refused = finished(tree, "test", "image")
    assert (refused.returncode, refused.stdout.splitlines()[-1]) == (1, "0 passed, 1 failed")
    assert "no space" in refused.stdout


@pytest.fixture
def scratch():
    """A folder with a short name: in tmp_path, that of the nursery's socket would be too long."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_lab_test_runs_notebooks_under_nbval_and_as_jobs_on_another_number_of_ranks(tree, scratch, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(scratch))
    notebook(tree / "notebooks" / "00_a.ipynb", "world_size = 2", "assert world_size < 4, 'too many'")
    few = "world_size = 4\nrounds = 9"
    notebook(tree / "notebooks" / "01_b.ipynb", few, "assert world_size < 3 and rounds == 1, 'too many'")
    notebook(tree / "notebooks" / "02_c.ipynb", "steps = 4", "import tempfile; tempfile.mkdtemp(); assert steps == 4")
    small_suite(tree, "")
    done = finished(tree, "test", "nbval", "papermill", "--workers", "2")
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED: ")]
    job, cell = sorted(failed, key=lambda line: "nbval" in line)
    assert job.startswith("FAILED: papermill: scripts/jobs.py::test_job[00_a]: ")
    assert job.endswith("cell 3: AssertionError: too many")
    assert cell == "FAILED: nbval: notebooks/01_b.ipynb::Cell 1: AssertionError: too many"
    skipped = [line for line in done.stdout.splitlines() if line.startswith("NOT TESTED")]
    assert skipped == [
        "NOT TESTED: scripts/jobs.py::test_job[02_c]: on other numbers of ranks: it has no parameter world_size"
    ]
    assert done.stdout.splitlines()[-1] == "6 passed, 2 failed"
    assert not [path for path in scratch.iterdir() if not path.name.startswith("torchinductor")]  # torch's own cache


# lab figures


def test_figures_of_the_whole_course_include_the_sweep_before_the_dashboard(monkeypatch):
    asked = []
    monkeypatch.setattr(figures, "run_all", lambda stored, jobs, timeout: (asked.append(jobs), ([], 0))[1])
    monkeypatch.setattr(figures, "write_between", lambda marks, lines: None)
    figures.figures([])
    figures.figures(["dashboard", "04"])
    assert asked[0] == [*(path.stem for path in batch.course()[:-1]), "sweep", "dashboard"]
    assert asked[1] == ["04_compare", "dashboard"]


@pytest.mark.slow
def test_figures_redraws_readmes_table_from_what_it_measured(tree):
    save = "from labkit.show import plots\nplots.save(figure, \"bars\", {'a': 1}, {}, 'measured here', 'one bar')"
    draw = "import matplotlib.pyplot as plt\nfigure = plt.figure()"
    notebook(tree / "notebooks" / "02_data_parallel.ipynb", "n = 1", draw, save)
    notebook(tree / "notebooks" / "01_b.ipynb", "n = 1", "assert n > 1")
    for name, opening in (("02_data_parallel", "# Start\n\n**Who is\nthere?** More."), ("01_b", "# 01 · What fails?")):
        path = tree / "notebooks" / f"{name}.ipynb"
        book = nbformat.read(path, 4)
        book.cells[0].source = opening
        nbformat.write(book, path)
    marks = "before\n<!-- the course, written by ./scripts/lab figures -->\nearlier rows\n"
    marks += "<!-- end of the course -->\nafter\n"
    (tree / "README.md").write_text(
        marks
        + "<!-- pictures, written by ./scripts/lab figures -->\n<!-- end of pictures -->\n"
        + "<!-- labkit, written by ./scripts/lab figures -->\n<!-- end of labkit -->\n"
    )
    done = finished(tree, "figures")
    assert done.returncode == 1  # 01_b failed: it is reported, and not in the table
    assert re.search(r"01_b +[\d.]+ +cell 2: AssertionError", done.stdout)
    readme = (tree / "README.md").read_text()
    whole = r"before\n<!--.*<!-- end of the course -->\nafter\n<!--.*<!-- end of pictures -->\n<!--.*<!-- end of labkit"
    assert re.fullmatch(whole + r" -->\n", readme, re.DOTALL)
    assert "earlier rows" not in readme
    row = r"\| \[02_data_parallel\]\(notebooks/02_data_parallel\.ipynb\) \| Who is there\? \| \d+ s \|\n"
    assert re.search(row, readme) and '\n\n<img src="figures/bars.svg" alt="one bar" width="800">\n\n' in readme
    assert "01_b" not in readme
    assert {path.name for path in (tree / "figures").iterdir()} == {"bars.svg", "bars.json", "course.json"}
    good, bad = (batch.read(tree / "notebooks" / f"{name}.ipynb") for name in ("02_data_parallel", "01_b"))
    assert good.cells[-1].execution_count == 3 and bad.cells[-1].execution_count is None
    assert good.metadata["labkit_code"] == json.loads((tree / "figures" / "bars.json").read_text())["code"]

    listed = finished(tree, "figures", "--stale", "--list")
    assert re.search(r"^notebooks/01_b\.ipynb +has no fingerprint", listed.stdout, re.MULTILINE)
    assert "02_data_parallel" not in listed.stdout and "Stale: stored results of older code" in listed.stdout
    bad.cells[-1].source = "print('mended')"
    nbformat.write(bad, tree / "notebooks" / "01_b.ipynb")
    done = finished(tree, "figures", "--stale")  # continues with the missing ones
    assert done.returncode == 0 and "1 of 1  01_b, about" in done.stdout and "02_data_parallel" not in done.stdout
    assert batch.read(tree / "notebooks" / "01_b.ipynb").cells[-1].outputs[0].text == "mended\n"
    assert "nothing is stale" in finished(tree, "figures", "--stale").stdout

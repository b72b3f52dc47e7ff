"""`lab run` with a grid: which jobs there are, what a folder keeps, and what a person sees of it."""

import csv
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import batch
import grid
import index
import nbformat
import psutil
import pytest
import results
import terminal
from notebook_jobs import FIGURE, RANKS, Page, command, finished, notebook
from repository import SCRIPTS

SMALL = "n = 2\nlr = 0.5\nmodel = 'mlp'"
READS = "print(n, lr, model)"
COUNTED = "import os, pathlib, time; (pathlib.Path(os.environ['RAN']) / f'{n}-{time.time_ns()}').touch()"
SAVED = (
    "import matplotlib.pyplot as plt\nfrom labkit.show import plots\n"
    "for name in ('zebra', 'ant'):\n"
    "    plots.save(plt.figure(), name, {'n': n}, {}, 'measured here', f'the first is \"zebra\" & n is {n}')"
)


def jobs_of(text, tmp_path, *paths, given=None):
    file = tmp_path / "grid.yaml"
    file.write_text(text)
    return grid.plan(list(paths), given or {}, grid.read(file))


# Which jobs there are


def test_a_notebook_gets_what_it_declares_and_what_is_twice_is_run_once(tmp_path):
    one = notebook(tmp_path / "01_one.ipynb", SMALL, READS)
    two = notebook(tmp_path / "02_two.ipynb", "n = 2", "print(n)")
    found = jobs_of("n: [2, 3, 2]\nlr: [1, 1.0, 1e-3]\n", tmp_path, one, two, given={"model": "gpt"})
    assert [(job.path.stem, job.values) for job in found] == [
        ("01_one", {"model": "gpt", "n": 2, "lr": 1}),
        ("01_one", {"model": "gpt", "n": 2, "lr": 0.001}),  # YAML reads 1e-3 as a word
        ("01_one", {"model": "gpt", "n": 3, "lr": 1}),
        ("01_one", {"model": "gpt", "n": 3, "lr": 0.001}),
        ("02_two", {"n": 2}),
        ("02_two", {"n": 3}),
    ]
    assert found[1].name == "01_one-n=2-lr=0.001"
    assert grid.varying(found) == ["n", "lr"]


def test_folders_have_names_of_their_own_whatever_the_values_are(tmp_path):
    path = notebook(tmp_path / "01_one.ipynb", "where = 'a'\nsizes = [1]", "print(where, sizes)")
    names = [job.name for job in jobs_of("where: [a/b, a_b, '..']\nsizes: [[1, 2], [12]]", tmp_path, path)]
    assert len(set(names)) == 6
    assert all(re.fullmatch(r"[\w.=+-]+", name) for name in names)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty; it maps parameters to lists"),
        ("{}", "is empty"),
        ("n: [2", "is not YAML (line 1)"),
        ("n: [2]\nn: [4]", "has the key n twice"),
        ("- n", "is a list; it maps parameters to lists"),
        ("n: 2", "'n' is 2 but must be a list of at least one value"),
        ("n: []", "'n' is [] but must be a list of at least one value"),
        ("m: [2]", "no notebook has a parameter 'm'; choose from lr, model, n, unread"),
        ("unread: [2]", "02_two.ipynb: parameter 'unread' is declared, but no cell reads it"),
        ("n: [2, two]", "01_one.ipynb: parameter 'n' is 'two' but must be int like 2"),
        ("n: [2, 2.5]", "parameter 'n' is 2.5 but must be int like 2"),
        ("n: [yes]", "parameter 'n' is True but must be int like 2"),
        ("n: [2, 0]", "parameter 'n' is 0 but must be at least 1"),
        ("model: [2]", "parameter 'model' is 2 but must be str like 'mlp'"),
        ("model: [mlp, mpl]", "'mpl' but must be one of mlp, resnet, gpt"),
        ("lr: [1]", "-p lr and the grid both set it"),
    ],
)
def test_a_wrong_grid_is_named(tmp_path, text, words):
    one = notebook(tmp_path / "01_one.ipynb", SMALL, READS)
    two = notebook(tmp_path / "02_two.ipynb", "n = 2\nunread = 1", "print(n)")
    with pytest.raises(terminal.UserError, match=re.escape(words)):
        jobs_of(text, tmp_path, one, two, given={"lr": "0.1"})


def test_two_notebooks_of_one_name_are_refused(tmp_path):
    (tmp_path / "other").mkdir()
    paths = [notebook(folder / "01_one.ipynb", SMALL, READS) for folder in (tmp_path, tmp_path / "other")]
    with pytest.raises(terminal.UserError, match="have the same name"):
        jobs_of("n: [2]", tmp_path, *paths)


@pytest.mark.parametrize("name", ["laptop", "node"])
def test_the_grids_that_ship_fit_the_course(name):
    found = grid.plan(batch.course(), {}, grid.read(SCRIPTS / "grids" / f"{name}.yaml"))
    assert {job.path for job in found} == set(batch.course())
    assert max(job.values.get("world_size", 1) for job in found) == {"laptop": 4, "node": 8}[name]


# What a folder keeps


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda out: out.write_text("x"), "is a file: use another folder"),
        (lambda out: (out.mkdir(), (out / "thesis.tex").touch()), "has other files (thesis.tex)"),
        (lambda out: (out.mkdir(), (out / results.MARK).write_text('{"format": 0}')), "written by another version"),
    ],
)
def test_a_folder_that_is_not_ours_stays_as_it_is(tmp_path, make, words):
    make(tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(terminal.UserError, match=re.escape(words)):
        results.claim(tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_is_one_commands_at_a_time(tmp_path):
    with results.claim(tmp_path / "out"), pytest.raises(terminal.UserError, match="in use by another lab run"):
        results.claim(tmp_path / "out")
    results.claim(tmp_path / "out").close()


def test_a_job_is_finished_only_if_all_of_it_is_there_and_it_is_this_job(tmp_path):
    path = notebook(tmp_path / "01_one.ipynb", SMALL, READS)
    (job,) = jobs_of("n: [3]", tmp_path, path)
    place = tmp_path / job.name
    place.mkdir()
    assert results.finished(tmp_path, job) is None
    (place / "01_one.html").touch()
    results.write(tmp_path, job, {"error": "", "seconds": 1.5})
    assert results.finished(tmp_path, job)["seconds"] == 1.5
    assert results.finished(tmp_path, replace(job, values={"n": 3, "lr": 0.1})) is None
    for text in ("", "{", "[]", '{"error": ""}'):
        (place / results.RECORD).write_text(text)
        assert results.finished(tmp_path, job) is None
    results.write(tmp_path, job, {"error": "cell 3: ValueError", "seconds": 1.5})
    assert results.finished(tmp_path, job) is None
    results.write(tmp_path, job, {"error": "", "seconds": 1.5})
    book = nbformat.read(path, 4)
    book.cells[2].outputs = [nbformat.v4.new_output("stream", text="2 0.5 mlp")]  # run by hand, and saved
    nbformat.write(book, path)
    (same,) = jobs_of("n: [3]", tmp_path, path)
    assert results.finished(tmp_path, same)
    notebook(path, SMALL, READS + "  # changed")
    (changed,) = jobs_of("n: [3]", tmp_path, path)
    assert results.finished(tmp_path, changed) is None


# Runs


def ran(tree):
    return sorted(path.name.split("-")[0] for path in (tree / "ran").iterdir())


@pytest.mark.slow
def test_a_grid_is_carried_on_after_a_failure_and_resumed(tree, monkeypatch):
    (tree / "ran").mkdir()
    monkeypatch.setenv("RAN", str(tree / "ran"))
    fails = f"assert n != 3 or '{tree}' in '{{}}', 'three & <no>'"
    one = notebook(tree / "notebooks" / "00_a.ipynb", "n = 2", COUNTED, fails, SAVED)
    notebook(tree / "notebooks" / "01_b.ipynb", "lr = 1.0\nworld_size = 2", "print(lr)", FIGURE)
    (tree / "g.yaml").write_text("n: [2, 3]\nlr: [0.5]\n")
    line = ("run", "00", "01", "--grid", str(tree / "g.yaml"), "--jobs", "3", "--out", str(tree / "out"))
    done = finished(tree, *line)
    assert done.returncode == 1, done.stderr
    rows = list(csv.reader((tree / "out" / "summary.csv").open()))
    assert rows[0] == ["notebook", "n", "result", "seconds", "first failing line"]
    assert [row[:3] for row in rows[1:]] == [["00_a", "2", "ok"], ["00_a", "3", "failed"], ["01_b", "", "ok"]]
    assert rows[2][4] == "cell 4: AssertionError: three & <no>"
    assert ran(tree) == ["2", "3"]
    assert "00_a      3  failed" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("2 of 3 jobs ok")
    assert "Up to 3 jobs ran in parallel" in done.stdout

    page = (tree / "out" / "index.html").read_text()
    seen = Page(page)
    there = [(tree / "out" / unquote(link)).exists() for link in seen.links + seen.sources]
    assert there == [True] * 11  # the table, a page and a notebook of each job, and two pictures with a link
    assert seen.sources == ["00_a-n%3D2/figures/zebra.svg", "01_b-lr%3D0.5/figures/01_b-1.png"]
    assert seen.alts[0] == 'the first is "zebra" & n is 2'
    assert "AssertionError: three &amp; &lt;no&gt;" in page

    again = finished(tree, *line)
    assert again.returncode == 1
    assert ran(tree) == ["2", "3", "3"]  # what failed, and nothing else
    assert "2 of 3 jobs are finished" in again.stdout
    notebook(one, "n = 2", COUNTED)
    mended = finished(tree, *line)
    assert mended.returncode == 0, mended.stdout
    assert ran(tree) == ["2", "2", "3", "3", "3"]  # the notebook has changed: its jobs are not finished
    assert not (tree / "out" / "00_a-n=2" / "figures").exists()  # nothing of the older run is left
    whole = finished(tree, *line)
    assert whole.returncode == 0 and "3 of 3 jobs are finished" in whole.stdout
    assert ran(tree) == ["2", "2", "3", "3", "3"]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_grid_leaves_no_rank_and_goes_on(tree, monkeypatch, how):
    (tree / "pids").mkdir()
    (tree / "ran").mkdir()
    monkeypatch.setenv("PIDS", str(tree / "pids"))
    monkeypatch.setenv("RAN", str(tree / "ran"))
    hangs = tree / "notebooks" / "01_b.ipynb"
    notebook(tree / "notebooks" / "00_a.ipynb", "n = 7", COUNTED)
    notebook(hangs, "world_size = 2", RANKS)
    line = ("run", "all", "--jobs", "2", "--out", str(tree / "out"))
    child = subprocess.Popen(command(tree, *line), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    record = tree / "out" / "00_a" / results.RECORD
    deadline = time.monotonic() + 120
    while (len(list((tree / "pids").iterdir())) < 2 or not record.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    family = psutil.Process(child.pid).children(recursive=True)
    assert {int(path.name) for path in (tree / "pids").iterdir()} < {process.pid for process in family}
    second = finished(tree, *line)
    assert (second.returncode, second.stdout) == (2, "")
    assert second.stderr.startswith("lab: --out ")
    assert "in use by another lab run" in second.stderr
    child.send_signal(how)
    told, wrong = child.communicate(timeout=100)
    if how != signal.SIGKILL:
        assert child.returncode == 130
        assert wrong.strip().splitlines()[-1] == "lab: interrupted"
        assert "Traceback" not in wrong
        assert told.splitlines()[-1].startswith("1 of 2 jobs ok")
        assert "To run the remaining jobs, use the same command with --out out." in told
    psutil.wait_procs(family, timeout=0 if how != signal.SIGKILL else 60)
    assert [process for process in family if process.is_running()] == []
    notebook(hangs, "world_size = 2", "print(world_size)")
    done = finished(tree, *line)
    assert done.returncode == 0, done.stderr
    assert "1 of 2 jobs are finished" in done.stdout
    assert ran(tree) == ["7"]


@pytest.mark.slow
def test_a_dead_process_is_a_failed_job(tree):
    dies = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nprint(n)"
    notebook(tree / "notebooks" / "00_a.ipynb", "n = 7", dies)
    notebook(tree / "notebooks" / "01_b.ipynb", "n = 7", "print(n)")
    done = finished(tree, "run", "all")
    assert done.returncode == 1
    assert re.search(r"00_a +failed +[\d.]+ +its process ended with -9", done.stdout)
    assert re.search(r"01_b +ok", done.stdout)


def test_a_full_disk_keeps_what_is_finished(tmp_path, monkeypatch):
    path = notebook(tmp_path / "01_one.ipynb", SMALL, READS)
    (job,) = jobs_of("n: [3]", tmp_path, path)
    place = tmp_path / job.name
    place.mkdir()
    (place / "01_one.html").touch()
    results.write(tmp_path, job, {"error": "", "seconds": 1.5})

    def full(self, text):
        self.open("w").close()
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        results.write(tmp_path, job, {"error": "", "seconds": 2.5})
    assert results.finished(tmp_path, job)["seconds"] == 1.5


# The page


def test_the_page_says_what_was_not_run_and_what_ran_at_once(tmp_path):
    path = notebook(tmp_path / "01_one.ipynb", SMALL, READS)
    first, second = jobs_of("n: [3, 4]", tmp_path, path)
    page = index.page([first, second], {first.name: {"error": "", "seconds": 1.0, "at_once": 2, "picture": ""}})
    assert "1 of 2 jobs ok" in page
    assert "Up to 2 jobs ran in parallel" in page
    assert page.count("not run") == 1
    assert "<img" not in page

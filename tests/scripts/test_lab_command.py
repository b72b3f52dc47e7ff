"""scripts/lab as a person meets it: first use, later uses, and everything that can be wrong, each told in one line."""

import ast
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from repository import ROOT

STUB = "import sys; print('ran', sys.argv[1:])"
RUN_IT = "; import runpy, sys; sys.argv[:] = ['lab', 'run']; runpy.run_path({!r}, run_name='__main__')"
FAKE_PYTHON = "import sys; sys.version_info = (3, 9, 1)" + RUN_IT
SMALL_DISK = "import shutil; shutil.disk_usage = lambda path: type('Usage', (), {{'free': {}}})"
LIMIT = 240  # seconds for one command, also on a machine that many others use
VERSION = "from importlib.metadata import version; print(version({!r}))"
MAIN, TESTS, WEBSITE = "requirements.txt", "tests/requirements.txt", "scripts/website/requirements.txt"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the command with nothing to install, after its first use."""
    root = new_tree(tmp_path_factory.mktemp("lab"))
    first = lab(root, "run", "-x")
    assert (first.returncode, first.stdout) == (0, "ran ['-x']\n"), first.stderr
    assert "setting up .venv: creating it" in first.stderr
    return root


def new_tree(root):
    (root / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "lab", root / "scripts")
    (root / "scripts" / "run.py").write_text(STUB)
    for file, lock in load_lab().LOCKS.items():
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_text("")
        (root / lock).write_text("")
    return root


def environment(port=None, **pip):
    """Ours, but for pip's settings: those given (PIP_*), and an index on a loopback port."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    index = {} if port is None else {"PIP_INDEX_URL": f"http://127.0.0.1:{port}/simple"}
    return {**kept, **index, "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "1", **pip}


def lab(root, *arguments, port=None, **pip):
    command = [sys.executable, str(root / "scripts" / "lab"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment(port, **pip))


def closed_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def assert_one_line(finished, *words, code=1):
    """The last line says it; a traceback is never shown."""
    assert finished.returncode == code, finished.stderr
    assert "Traceback" not in finished.stderr
    last = finished.stderr.splitlines()[-1]
    assert last.startswith("lab: ")
    for word in words:
        assert word in last


def test_any_python_3_can_read_it():
    ast.parse((ROOT / "scripts" / "lab").read_text(), feature_version=(3, 6))


@pytest.mark.slow
def test_later_uses_start_at_once(tree):
    later = lab(tree, "run", "all", "-p", "a", "1")
    assert (later.stdout, later.stderr) == ("ran ['all', '-p', 'a', '1']\n", "")


@pytest.mark.slow
def test_the_site_is_made_by_web(tree):
    (tree / "scripts" / "web.py").write_text(STUB)
    assert lab(tree, "site", "--out", "a").stdout == "ran ['--out', 'a']\n"


@pytest.mark.slow
def test_exit_code_is_the_commands(tree):
    (tree / "scripts" / "bench.py").write_text("import sys; sys.exit(7)")
    assert lab(tree, "bench").returncode == 7


@pytest.mark.slow
def test_unknown_command(tree):
    assert_one_line(lab(tree, "rum"), "'rum'", "run, plan, config, equal, grade, test, site, bench, figures", code=2)


def test_help_needs_no_setup(tmp_path):
    assert "./scripts/lab test" in lab(new_tree(tmp_path), "--help").stdout
    assert not (tmp_path / ".venv").exists()


def test_wrong_python(tmp_path):
    root = new_tree(tmp_path)
    code = FAKE_PYTHON.format(str(root / "scripts" / "lab"))
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": str(tmp_path)})
    assert_one_line(finished, "needs Python 3.11, 3.12 or 3.13", "this is 3.9")
    assert finished.stderr.count("\n") == 1


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_wrong_python_hands_over_to_a_right_one_on_the_path(tmp_path, version):
    root = new_tree(tmp_path)
    stub = tmp_path / f"python{version}"
    stub.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "took over: $(basename "$1") $2"\n')
    stub.chmod(0o755)
    code = FAKE_PYTHON.format(str(root / "scripts" / "lab"))
    path = os.pathsep.join([str(tmp_path), os.defpath])
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": path})
    assert finished.stdout == "took over: lab run\n"


def test_no_disk(tmp_path):
    assert_one_line(lab_with_free(new_tree(tmp_path), 2e8), "needs 3 GB", "0.2 GB free")


# The build of torch: pip's own settings decide, and the lab reads from pip which it is


def lab_with_free(root, free, **pip):
    code = (SMALL_DISK + RUN_IT).format(free, str(root / "scripts" / "lab"))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(**pip))


def wheel(folder, name, version, requires="", holds=""):
    """The path of a wheel, as pip takes it, with one empty file at most."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files |= {holds: ""} if holds else {}
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inner, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(inner, text)
    return path


@pytest.fixture
def refused_setup(tree):
    """The stamp comes back: a refused setup has installed nothing, and the next test need not make .venv anew."""
    stamp = tree / ".venv" / "lab-stamp"
    before = stamp.read_text()
    yield
    stamp.write_text(before)


@pytest.fixture
def torch_of(tree):
    """torch_of(version): `tree` comes to need it. cuda/ has what pip takes where nothing is set, cpu/ the CPU build.

    Versions older than any: a machine's pip may be set up to refuse newer ones.
    """

    def need(version):
        (tree / "requirements.txt").write_text(f"torch=={version}\n")
        (tree / "scripts" / "figures.py").write_text(VERSION.format("torch"))
        wheel(tree / "cuda", "torch", version, requires=f"nvidia-cudnn-cu13=={version}")
        wheel(tree / "cuda", "nvidia_cudnn_cu13", version)
        wheel(tree / "cpu", "torch", f"{version}+cpu")
        return tree

    yield need
    (tree / "requirements.txt").write_text("")


@pytest.mark.slow
def test_the_cuda_build_is_told(torch_of):
    root = torch_of("0.1")
    done = lab(root, "figures", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(root / "cuda"))
    assert done.stdout == "0.1\n", done.stderr
    assert "torch's CUDA build, 6 GB" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("version", "where"), [("0.2", "variable"), ("0.3", "file")])
def test_pips_own_settings_choose_the_cpu_build(torch_of, version, where):
    root = torch_of(version)
    folders = f"{root / 'cuda'} {root / 'cpu'}"
    (root / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {folders}\n")
    variables = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": folders}
    done = lab(root, "figures", **{"PIP_CONFIG_FILE": str(root / "pip.conf")} if where == "file" else variables)
    assert done.stdout == f"{version}+cpu\n", done.stderr
    assert "CUDA" not in done.stderr


@pytest.mark.slow
def test_the_cuda_build_needs_more_disk(torch_of, refused_setup):
    root = torch_of("0.4")
    refused = lab_with_free(root, 5e9, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(root / "cuda"))
    assert_one_line(refused, "CUDA build needs 10 GB", "5.0 GB free", "CPU build (see README): 3 GB")
    assert not (root / ".venv" / "lab-stamp").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "no space left"),
        (
            "WARNING: Retrying: NewConnectionError()\nERROR: No matching",
            "cannot reach the package",
        ),
        ("ERROR: No matching distribution found for torch==99\nnoise", "No matching distribution found for torch==99"),
    ],
)
def test_pips_many_lines_become_one(words, line):
    explained = load_lab().explain(words)
    assert line in explained
    assert "\n" not in explained


def load_lab():
    loader = importlib.machinery.SourceFileLoader("lab_command", str(ROOT / "scripts" / "lab"))
    sys.dont_write_bytecode, held = True, sys.dont_write_bytecode
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("lab_command", loader))
    loader.exec_module(module)
    sys.dont_write_bytecode = held
    return module


def test_progress_is_read_from_pip():
    phase_of = load_lab().phase_of
    assert phase_of("Collecting torch==2.13.0\n  Downloading https://host/a/b/torch-2.13.0.whl (526 MB)") == (
        "downloading",
        "torch-2.13.0.whl (526 MB)",
    )
    assert phase_of("Processing /nvidia/wheels/torch-2.13.0+cpu.whl") == ("downloading", "torch-2.13.0+cpu.whl")
    assert phase_of("Collecting nvidia-ml-py==13.615.71")[0] == "downloading"  # no part of CUDA
    phase, detail = phase_of("Collecting a\nInstalling collected packages: a, b, c")
    assert phase == "installing"
    assert detail.endswith(" of 3 packages")


def test_packages_of_earlier_setups_are_not_progress(monkeypatch):
    lab_command = load_lab()
    monkeypatch.setattr(lab_command, "installed", lambda: 112)
    text = "Collecting a\nInstalling collected packages: a, b, c"
    assert lab_command.phase_of(text, before=110) == ("installing", "2 of 3 packages")


# Locks: each is made anew whenever its requirement file changes


def entries(lock):
    """{package: {version: hashes}} of a lock."""
    found = {}
    for entry in (ROOT / lock).read_text().replace("\\\n", " ").splitlines():
        if not entry.startswith("#"):
            name, _, rest = entry.partition("==")
            hashes = set(re.findall(r"--hash=sha256:[0-9a-f]{64}", rest))
            found.setdefault(plain(name), {})[rest.split()[0]] = hashes
    return found


def plain(name):
    return re.sub(r"[-_.]+", "-", name.partition("[")[0].strip().lower())


def direct(file):
    """{package: version} of a requirement file, without torch, whose build pip's settings choose."""
    pins = [line.partition("==") for line in (ROOT / file).read_text().splitlines() if not line.startswith(("#", "-e"))]
    return {plain(name): version.split(";")[0] for name, _, version in pins if name != "torch"}


LOCKS = load_lab().LOCKS


@pytest.mark.parametrize("file", LOCKS)
def test_the_lock_has_every_requirement_and_a_hash_for_everything(file):
    locked = entries(LOCKS[file])
    assert [name for name, versions in locked.items() if not all(versions.values())] == []
    pins = direct(file)
    assert {name: [*locked.get(name, ())] for name in pins} == {name: [version] for name, version in pins.items()}


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(LOCKS.values(), 2)])
def test_locks_agree(one, other):
    """They go into the same .venv."""
    ours, theirs = entries(one), entries(other)
    shared = ours.keys() & theirs.keys()
    assert shared
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}


OPTIONAL = {"wandb"}  # a person who wants it installs it


def imported(files):
    """The packages that Python files import, without those of the lab and of Python itself."""
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    scripts = {path.stem for path in (ROOT / "scripts").iterdir()}
    found = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - scripts - {"labkit"}
    packages = importlib.metadata.packages_distributions()
    return {plain(package) for name in found for package in packages.get(name, [name])} - OPTIONAL


def test_every_package_that_is_imported_is_in_the_lock_of_those_who_import_it():
    """Without the tests' packages all commands but `test` and `site` must run."""
    website = [ROOT / "scripts" / "web.py", *(ROOT / "scripts" / "website").glob("*.py")]
    main = {*(ROOT / "labkit").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")} - {*website}
    locked = entries(LOCKS[MAIN]).keys() | {"torch"}
    assert imported(main) - locked == set()
    assert imported(website) - locked - entries(LOCKS[WEBSITE]).keys() == set()
    assert imported([ROOT / "tests" / "scripts" / "test_web.py"])  # a package is found at all


@pytest.mark.slow
def test_a_file_with_another_hash_is_not_installed(tree, refused_setup):
    """Whoever can put a file before the package index's still cannot put code into .venv."""
    wheel(tree / "swapped", "a_package_for_this_test", "3")
    lock = tree / "scripts" / "requirements.lock"
    lock.write_text(f"a-package-for-this-test==3 --hash=sha256:{'0' * 64}\n")
    refused = lab(tree, "run", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tree / "swapped"))
    lock.write_text("")
    assert_one_line(refused, "DO NOT MATCH THE HASHES")
    assert not list((tree / ".venv").glob("lib/python*/site-packages/a_package*"))


@pytest.mark.slow
def test_a_failed_setup_is_told_and_the_next_use_repairs_it(tree):
    requirements, stamp = tree / "requirements.txt", tree / ".venv" / "lab-stamp"
    requirements.write_text("a-package-for-this-test==1\n")
    command = [sys.executable, str(tree / "scripts" / "lab"), "run"]
    offline = subprocess.run(command, capture_output=True, text=True, env=environment(closed_port()))
    assert_one_line(offline, "cannot reach the package index", "needs a network")
    assert not stamp.exists()  # so the half-made .venv is not taken for a whole one
    leftover = tree / ".venv" / "half-made"
    leftover.write_text("")
    requirements.write_text("")
    assert lab(tree, "run").stdout == "ran []\n"
    assert not leftover.exists()


@pytest.mark.slow
def test_a_venv_that_is_a_link_is_left_alone(tree, tmp_path):
    """Another checkout's: setting it up anew would empty it."""
    root = new_tree(tmp_path)
    (root / ".venv").symlink_to(tree / ".venv")
    assert_one_line(lab(root, "run"), "is a link", "remove the link")
    assert lab(tree, "run", "-x").stdout == "ran ['-x']\n"


@pytest.mark.slow
def test_changed_requirements_keep_the_venv(tree):
    lab(tree, "run")
    kept = tree / ".venv" / "kept"
    kept.write_text("")
    (tree / "requirements.txt").write_text("# a comment more\n")
    changed = lab(tree, "run")
    assert changed.stdout == "ran []\n"
    assert "setting up" in changed.stderr
    assert kept.exists()


# Extras: what only some commands need


def test_which_command_needs_which_extra():
    needed = load_lab().needed
    assert needed("run") == needed("open") == (MAIN,)
    assert needed("site") == (MAIN, WEBSITE)
    assert set(needed("test")) == set(LOCKS)


def pin(root, file, version, **more):
    """Let a requirement file and its lock need a wheel; returns pip's settings that lead to it. more: of wheel()."""
    name = f"needed_by_{Path(file).parent.name or 'all'}"
    path = wheel(root / "extra", name, version, **more)
    (root / file).write_text(f"{name}=={version}\n")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    (root / LOCKS[file]).write_text(f"{name}=={version} --hash=sha256:{digest}\n")
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(root / "extra")}


@pytest.fixture
def extras(tree):
    """`tree`, set up for `run`; `lab test` prints the version of the tests' package."""
    assert lab(tree, "run").returncode == 0
    (tree / "scripts" / "test.py").write_text(VERSION.format("needed_by_tests"))
    (tree / ".venv" / "kept").write_text("")
    yield tree
    for file, lock in LOCKS.items():
        (tree / file).write_text("")
        (tree / lock).write_text("")


def kept(root):
    """Whether .venv is the one that the test began with."""
    return (root / ".venv" / "kept").exists()


@pytest.mark.slow
def test_an_extra_is_added_on_the_first_use_of_its_command(extras):
    settings = pin(extras, TESTS, "0.1")
    assert lab(extras, "run").stderr == ""
    first = lab(extras, "test", **settings)
    assert first.stdout == "0.1\n", first.stderr
    assert f"setting up .venv: adding {TESTS}" in first.stderr
    assert lab(extras, "test").stderr == lab(extras, "run").stderr == ""
    assert kept(extras)


@pytest.mark.slow
def test_a_changed_extra_updates_the_same_venv(extras):
    lab(extras, "test", **pin(extras, TESTS, "0.2"))
    settings = pin(extras, TESTS, "0.3")
    assert lab(extras, "run").stderr == ""
    assert lab(extras, "test", **settings).stdout == "0.3\n"
    assert kept(extras)


@pytest.mark.slow
def test_changed_requirements_keep_the_extras_up_to_date(extras):
    """Their packages may need the new versions of shared ones."""
    lab(extras, "test", **pin(extras, TESTS, "0.4"))
    settings = pin(extras, TESTS, "0.5")
    (extras / MAIN).write_text("# a comment more\n")
    changed = lab(extras, "run", **settings)
    assert f"adding {MAIN}, {TESTS}" in changed.stderr
    later = lab(extras, "test")
    assert (later.stdout, later.stderr) == ("0.5\n", "")
    assert kept(extras)


@pytest.mark.slow
def test_an_extra_that_cannot_be_had_leaves_the_rest_as_it_was(extras):
    settings = pin(extras, TESTS, "0.6")
    assert_one_line(lab(extras, "test", port=closed_port()), "cannot reach the package index")
    assert lab(extras, "run").stderr == ""
    assert lab(extras, "test", **settings).stdout == "0.6\n"
    assert kept(extras)


@pytest.mark.slow
def test_after_an_extra_that_was_half_installed_the_venv_is_made_anew(extras):
    settings = pin(extras, TESTS, "0.7", holds="../outside")
    assert_one_line(lab(extras, "test", **settings), "outside the target directory")
    again = lab(extras, "run")
    assert "creating it" in again.stderr
    assert not kept(extras)


@pytest.mark.slow
def test_in_a_clean_checkout_one_command_installs_everything(tmp_path):
    root = new_tree(tmp_path)
    for file in LOCKS:
        settings = pin(root, file, "1")
    names = ("needed_by_all", "needed_by_tests", "needed_by_website")
    (root / "scripts" / "test.py").write_text("; ".join(VERSION.format(name) for name in names))
    assert lab(root, "test", **settings).stdout == "1\n1\n1\n"
    assert lab(root, "run").stderr == ""


@pytest.mark.slow
def test_interrupted_setup(tree):
    """The package index never answers; Ctrl-C ends pip, says so in one line, and leaves no stamp."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (tree / "requirements.txt").write_text("a-package-for-this-test==2\n")
        command = [sys.executable, str(tree / "scripts" / "lab"), "run"]
        child = subprocess.Popen(
            command, text=True, stderr=subprocess.PIPE, env=environment(silent.getsockname()[1]), start_new_session=True
        )
        silent.settimeout(LIMIT)
        connection, _ = silent.accept()  # pip is asking
        os.killpg(child.pid, signal.SIGINT)
        told = child.communicate(timeout=LIMIT)[1]
        connection.close()
    assert child.returncode == 130
    assert told.splitlines()[-1] == "lab: setup interrupted; the next use starts it again"
    assert "Traceback" not in told
    assert not (tree / ".venv" / "lab-stamp").exists()
    (tree / "requirements.txt").write_text("")


@pytest.mark.slow
def test_two_first_uses_at_once_wait_for_each_other(tmp_path):
    root = new_tree(tmp_path)
    command = [sys.executable, str(root / "scripts" / "lab"), "run"]
    children = [
        subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
        for _ in range(2)
    ]
    told = [child.communicate(timeout=LIMIT) for child in children]
    assert [child.returncode for child in children] == [0, 0], told
    assert sum("another setup of this .venv is running" in stderr for _, stderr in told) == 1
    assert sum("later uses start at once" in stderr for _, stderr in told) == 1

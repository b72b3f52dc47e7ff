"""scripts/lab as a person meets it: first use, later uses, and everything that can be wrong, each told in one line."""

import ast
import importlib.machinery
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import zipfile

import pytest
from repository import ROOT

STUB = "import sys; print('ran', sys.argv[1:])"
RUN_IT = "; import runpy, sys; sys.argv[:] = ['lab', 'run']; runpy.run_path({!r}, run_name='__main__')"
FAKE_PYTHON = "import sys; sys.version_info = (3, 9, 1)" + RUN_IT
SMALL_DISK = "import shutil; shutil.disk_usage = lambda path: type('Usage', (), {{'free': {}}})"
LIMIT = 240  # seconds for one command, also on a machine that many others use
VERSION = "from importlib.metadata import version; print(version('torch'))"


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
    (root / "requirements.txt").write_text("")
    (root / "scripts" / "requirements.lock").write_text("")
    return root


def environment(port=None, **pip):
    """Ours, but for pip's settings: those given (PIP_*), and an index on a loopback port."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    index = {} if port is None else {"PIP_INDEX_URL": f"http://127.0.0.1:{port}/simple"}
    return {**kept, **index, "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "1", **pip}


def lab(root, *arguments, **pip):
    command = [sys.executable, str(root / "scripts" / "lab"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment(**pip))


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
    assert_one_line(lab(tree, "rum"), "'rum'", "run, test, site, bench, figures", code=2)


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


def wheel(folder, name, version, requires=""):
    """An empty wheel, as pip takes it."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)


@pytest.fixture
def torch_of(tree):
    """torch_of(version): `tree` comes to need it. cuda/ has what pip takes where nothing is set, cpu/ the CPU build.

    Versions older than any: a machine's pip may be set up to refuse newer ones.
    """

    def need(version):
        (tree / "requirements.txt").write_text(f"torch=={version}\n")
        (tree / "scripts" / "figures.py").write_text(VERSION)
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
def test_the_cuda_build_needs_more_disk(torch_of):
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


def test_the_lock_has_every_requirement_and_a_hash_for_everything():
    """Made anew whenever requirements.txt changes."""
    entries = (ROOT / "scripts" / "requirements.lock").read_text().replace("\\\n", " ").splitlines()
    locked = {}
    for entry in entries:
        if not entry.startswith("#"):
            name, _, rest = entry.partition("==")
            assert re.search(r"--hash=sha256:[0-9a-f]{64}", rest), entry
            locked.setdefault(re.sub(r"\[.*\]", "", name), []).append(rest.split()[0])
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        name, exact, rest = line.partition("==")
        if exact and name != "torch":
            assert locked[re.sub(r"\[.*\]", "", name).replace("_", "-").lower()] == [rest.split(";")[0]], line


@pytest.mark.slow
def test_a_file_with_another_hash_is_not_installed(tree):
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

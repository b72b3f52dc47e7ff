"""The packages of tests/frameworks, in .frameworks: DeepSpeed and others, which need not fit into .venv.

They come without dependencies, so that .venv keeps its own torch; a test puts the folder on its path.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".frameworks"
LOCK = ROOT / "tests" / "frameworks" / "requirements.lock"
# DeepSpeed comes as source; its operators are compiled at their first use
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "--no-deps")
PIP += ("--no-build-isolation", "--no-compile")


def stamp():
    """Return what the folder is made from: this Python and the lock."""
    text = f"{sys.version_info[:2]} {LOCK.read_text()}"
    return hashlib.sha256(text.encode()).hexdigest()


def is_ready():
    """Return whether the folder has what the lock says; a checkout without the lock needs no folder."""
    if not LOCK.exists():
        return True
    written = FOLDER / "lab-stamp"
    return written.exists() and written.read_text() == stamp()


def command(folder):
    """Return pip's command that installs into a folder, and its environment."""
    words = [sys.executable, *PIP, "--target", str(folder), "--requirement", str(LOCK)]
    return words, os.environ | {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}


def install(run):
    """Install; return pip's exit code. run(command, environment) -> exit code."""
    new = FOLDER.with_name(".frameworks-new")
    shutil.rmtree(new, ignore_errors=True)
    code = run(*command(new))
    if code == 0:
        (new / "lab-stamp").write_text(stamp())
        shutil.rmtree(FOLDER, ignore_errors=True)
        new.rename(FOLDER)
    return code


if __name__ == "__main__":
    sys.exit(0 if is_ready() else install(lambda words, added: subprocess.run(words, env=added).returncode))

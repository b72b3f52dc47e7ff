"""`lab`: open JupyterLab on the course. Loopback only, a token in the URL, a free port, no calls home."""

import argparse
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START = "notebooks/00_start_here.ipynb"


def server_command(root, start, *arguments):
    """Return the command that serves JupyterLab on `start`, a path below the folder `root`."""
    turn_news_off()
    return [
        sys.executable,
        *("-m", "jupyterlab"),
        "--ip=127.0.0.1",
        "--port=0",
        "--allow-root",
        f"--ServerApp.root_dir={root}",
        f"--LabApp.default_url=/lab/tree/{start}",
        "--LabApp.extension_manager=readonly",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        *arguments,
    ]


def turn_news_off():
    """Turn off the question about Jupyter's news, which would cover the first page; only a file can do that."""
    path = Path(sys.prefix, "etc", "jupyter", "labconfig", "page_config.json")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}))


def main(arguments):
    parser = argparse.ArgumentParser(prog="lab open", description=__doc__)
    parser.add_argument("--no-browser", action="store_true", help="print the address instead of opening it")
    options = parser.parse_args(arguments)
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # use this .venv's kernel instead of a user-wide one
    command = server_command(ROOT, START, *(["--no-browser"] if options.no_browser else []))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])

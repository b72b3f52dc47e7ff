"""`lab gpu [--minutes 8] [--device cuda]`: run the lab's tests, notebooks and a training on a GPU, in one command.

For a node with one GPU or more, offline, with an installed torch (2.11 or later). Without .venv, it uses the Python
that runs `lab`. It needs torch, numpy, pandas, matplotlib, psutil, PyYAML, tqdm, pytest, pytest-timeout and pytest-
xdist, and for the notebooks nbclient, papermill, nbconvert, ipykernel, ipywidgets and latex2mathml. Without a
package index, copy their wheels, install them into a folder, and name that folder in PYTHONPATH.

Each check has a time limit, the most important come first, and a failure or a missing package does not stop the
others. One JSON file and an HTML page list what ran, on which card and code, failures with their last line, times, and
the ratios of `lab bench` that one rank can measure. Exits with 1 unless every check is ok.
"""

import argparse
import html
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from terminal import Line, UserError, main, say, table

ROOT = Path(__file__).resolve().parent.parent
SHORTEST = 10.0  # seconds: a check is not started with less time left
GRACE = 5.0  # seconds for an interrupted check to end its ranks
BENCH = "bench.json"
NOTEBOOKS = ("10_memory", "14_recompute_and_offload", "02_data_parallel")
NAMES = ("tests", "training", *NOTEBOOKS, "bench")
FOR_TESTS = ("pytest", "pytest_timeout", "xdist")
FOR_NOTEBOOKS = ("nbclient", "papermill", "nbconvert", "bleach", "tinycss2", "ipykernel", "ipywidgets", "latex2mathml")
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 100%/1.5 system-ui, sans-serif; }}
body {{ margin: 0 auto; max-width: 70rem; padding: 1rem; }}
table {{ border-collapse: collapse; }}
td, th {{ border-bottom: 1px solid GrayText; overflow-wrap: anywhere; padding: .2rem .8rem .2rem 0; text-align: left; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{about}</p>
{parts}
</body>
</html>
"""


@dataclass
class Check:
    name: str
    command: list
    limit: float  # seconds
    packages: tuple = ()  # that it imports, in addition to torch's and labkit's

    def missing(self):
        return [name for name in self.packages if find_spec(name) is None]


def checks(device, folder):
    """Return the checks, the most important first: correctness, a training, notebooks."""
    python = sys.executable
    ranks = "1"
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={folder / 'tests.xml'}"]
    on_gpu = ["-m", "gpu", *map(str, marked(ROOT))]
    tests = on_gpu if device == "cuda" else [str(ROOT / "tests" / "gpu" / "test_gpu_oracles.py"), "-k", "mesh"]
    train = [python, "-m", "labkit.train", "--nproc", ranks, "--model", "gpt", "--steps", "20"]
    run = [python, str(ROOT / "scripts" / "run.py")]
    return [
        Check("tests", [*pytest, *tests], 200, FOR_TESTS),
        Check("training", train, 45),
        *(
            Check(
                name,
                [*run, name, "--nproc", ranks, "-p", "device", device, "--out", str(folder / name)],
                100,
                FOR_NOTEBOOKS,
            )
            for name in NOTEBOOKS
        ),
        Check("bench", [python, str(ROOT / "scripts" / "bench.py"), "one_rank", "--out", str(folder / BENCH)], 100),
    ]


def marked(root):
    """Return the test files with cases for a GPU."""
    return [path for path in sorted((root / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]


def code_of_checks(root, code):
    """Return the fingerprint of the code that tests, training and notebooks use, equal on all machines."""
    sources = ["import labkit.train; labkit.train.main"]
    files = [*marked(root), root / "tests" / "helpers" / "on_device.py"]
    sources += [path.read_text() for path in files if path.exists()]
    for name in NOTEBOOKS:
        cells = json.loads((root / "notebooks" / f"{name}.ipynb").read_text())["cells"]
        sources += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return code.of_cells(sources)


def run(check, limit, log, line):
    """Run a check and return its record. At the limit it is interrupted as by Ctrl-C, then killed."""
    carried = [folder for folder in os.getenv("PYTHONPATH", "").split(os.pathsep) if folder]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *carried])}
    environment["JUPYTER_PATH"] = os.pathsep.join(str(Path(folder, "share", "jupyter")) for folder in carried)
    started = time.monotonic()
    with log.open("w") as file:
        child = subprocess.Popen(
            check.command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while child.poll() is None and time.monotonic() - started < limit:
                line.show(f"{check.name}, at most {limit - (time.monotonic() - started):.0f} s more,")
                time.sleep(0.3)
        finally:
            late = child.poll() is None
            end(child)
    text = log.read_text(errors="replace").replace(f"{log.parent}{os.sep}", "")
    words = [line for line in text.splitlines() if line.strip()]
    result = "too slow" if late else "failed" if child.returncode else "ok"
    seconds = round(time.monotonic() - started, 1)
    return {"check": check.name, "result": result, "seconds": seconds, "last_line": words[-1] if words else ""}


def end(child):
    for sign, grace in ((signal.SIGINT, GRACE), (signal.SIGKILL, None)):
        if child.poll() is None:
            os.killpg(child.pid, sign)
            try:
                child.wait(grace)
            except subprocess.TimeoutExpired:
                continue


def cases(path):
    """Return pytest's counts of cases, and the failures with their last lines."""
    if not path.exists():
        return {}
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures = {}
    for case in ElementTree.parse(path).iter("testcase"):
        wrong = [child for child in case if child.tag in ("failure", "error")]
        skipped = any(child.tag == "skipped" for child in case)
        counts["failed" if wrong else "skipped" if skipped else "passed"] += 1
        if wrong:
            message = (wrong[0].get("message") or "").strip().splitlines()
            failures[f"{case.get('classname')}::{case.get('name')}"] = message[0][:300] if message else ""
    return {**counts, "failures": failures}


def ratios(path):
    """Return the ratios of `lab bench`, without single times."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return [{name: row[name] for name in ("benchmark", "row", "ratio", "interval", "verdict")} for row in rows]


def page(record):
    """Return the record as a self-contained HTML page."""
    gpus = ", ".join(gpu["name"] for gpu in record["gpus"]) or "no GPU"
    versions = f"torch {record['torch']}, CUDA {record['cuda']}, NCCL {record['nccl']}, Python {record['python']}"
    ok = sum(one["result"] == "ok" for one in record["checks"])
    checks = [
        [one["check"], one["result"], one.get("seconds", ""), one.get("last_line", "")] for one in record["checks"]
    ]
    failures = record["tests"].get("failures", {}).items()
    bench = [
        [row["benchmark"], row["row"], f"{row['ratio']:.3f}", row["interval"], row["verdict"]]
        for row in record["bench"]
    ]
    return PAGE.format(
        title=html.escape(f"{ok} of {len(record['checks'])} checks ok on {gpus}"),
        about=html.escape(
            f"{record['time']}, commit {record['commit']}; {record['cpu']}, {record['cores']} cores; {versions}"
        ),
        parts="\n".join(
            [
                section("Checks", ("check", "result", "seconds", "last line"), checks),
                section("Failed tests", ("test", "message"), failures),
                section("Ratios", ("benchmark", "row", "ratio", "95 % interval, unless named", "verdict"), bench),
            ]
        ),
    )


def section(title, names, rows):
    """Return a heading and a table, or "" without rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<h2>{title}</h2>\n<table>\n<tr>{head}</tr>\n{body}\n</table>"


def facts(device):
    """Return the machine card, the commit, and versions of the numeric libraries."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("torch finds no GPU: use --device cpu to test the command itself")
    sys.path.insert(0, str(ROOT))
    from labkit.measure import fingerprint, machine

    code = code_of_checks(ROOT, fingerprint.Code(ROOT))
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else None
    return {**machine.card(), "device": device, "nccl": nccl, "commit": machine.commit(), "code": code}


def gpu(arguments):
    parser = argparse.ArgumentParser(prog="lab gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8, help="total time (8)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: test the command itself (cuda)")
    parser.add_argument(
        "--only", nargs="+", default=NAMES, choices=NAMES, metavar="CHECK", help=f"{', '.join(NAMES)} (all)"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for the results (runs/TIME-gpu)")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: must be more than 0")
    began = time.strftime("%Y%m%d-%H%M%S")
    folder = (options.out or ROOT / "runs" / f"{began}-gpu").resolve()
    record = {"time": began, **facts(options.device), "minutes": options.minutes, "checks": []}
    folder.mkdir(parents=True, exist_ok=True)
    line = Line("lab gpu")
    try:
        for check in (one for one in checks(options.device, folder) if one.name in options.only):
            limit = min(check.limit, options.minutes * 60 - line.seconds)
            if absent := check.missing():
                record["checks"].append({"check": check.name, "result": f"not run: needs {', '.join(absent)}"})
            elif limit < SHORTEST:
                record["checks"].append({"check": check.name, "result": "not run: no time left"})
            else:
                record["checks"].append(run(check, limit, folder / f"{check.name}.log", line))
    finally:
        record["tests"] = cases(folder / "tests.xml")
        record["bench"] = ratios(folder / BENCH)
        (folder / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")
        (folder / "index.html").write_text(page(record))
    say()
    rows = [
        (one["check"], one["result"], one.get("seconds", ""), one.get("last_line", "")[:90]) for one in record["checks"]
    ]
    say(table(rows, header=("check", "result", "seconds", "last line")))
    for name, message in record["tests"].get("failures", {}).items():
        say(f"  {name}: {message}")
    say(f"\n{folder / 'gpu.json'}, and as a page: {folder / 'index.html'}")
    return 0 if all(one["result"] == "ok" for one in record["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main(gpu, sys.argv[1:]))

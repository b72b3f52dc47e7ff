"""A notebook as a batch job: find it, validate its parameters, execute it on its own kernel, collect its results."""

import ast
import base64
import functools
import hashlib
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import limits
import nbformat
import psutil
from IPython.core.inputtransformer2 import TransformerManager
from page import as_page
from terminal import UserError
from traitlets.config import Config

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
# the default notebook of `lab run`, and its parameters
MAIN_JOB = "dashboard"
MAIN_VALUES = {"measure": "true"}
RANKS = "world_size"  # the parameter that --nproc sets
# Upper limits of a notebook's repetitions (for a list: of its length): enough to see that it works, without changing
# what it measures.
FEW = {"repeats": 1, "rounds": 1, "steps_per_round": 1, "repetitions": 1, "seeds": 1, "timed_steps": 2}
FEW |= {"steps": 30, "epochs": 4, "most_steps": 32, "block_ms": 2.0, "sizes_kib": 3, "links": 1, "compared": 2}
FEW |= {"ahead": 1, "pairs": 25, "more_seeds": 1, "links_mbit": 1}
# These also change what is counted, so nbval, which compares counts, does not use them.
SMALL = {"size": "tiny", "length": 512, "lengths": 2, "tensor_mib": 1, "train_steps": 60}
GRACE = 5.0  # seconds for an interrupted kernel to end its ranks


def course(folder=None):
    """Return the notebooks of the course (of a folder), in order; the dashboard, without a number, is last."""
    folder = folder or NOTEBOOKS
    return [*sorted(folder.glob("[0-9][0-9]_*.ipynb")), *folder.glob(f"{MAIN_JOB}.ipynb")]


def find(name):
    """Return the notebook called `name`: a path, a stem, or the start of exactly one stem ("04", "04_comp")."""
    path = Path(name)
    if path.suffix == ".ipynb":
        if not path.is_file():
            raise UserError(f"no notebook {name}: use a name, such as 04_compare, or a path")
        return path.resolve()
    hits = [path for path in course() if path.stem == name] or [path for path in course() if path.stem.startswith(name)]
    if len(hits) != 1:
        names = ", ".join(path.stem for path in hits or course()) or "none yet"
        raise UserError(f"{'several notebooks start with' if hits else 'no notebook'} {name!r}; choose from {names}")
    return hits[0]


def new_folder(label):
    """Make runs/TIME-LABEL; a second command in the same second gets another folder."""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
    for number in itertools.count(1):
        folder = ROOT / "runs" / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue


def read(path):
    return nbformat.read(path, as_version=4)


def digest(path):
    """Return the SHA-256 of a notebook's cells, independent of stored outputs."""
    cells = [(cell.cell_type, cell.source, cell.metadata.get("tags")) for cell in read(path).cells]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()


# Parameters


def defaults(notebook):
    """Return {name: default} of the cell tagged `parameters`; they must be literals, as nbval and papermill differ."""
    values = {}
    for cell in code_cells(notebook):
        if "parameters" in cell.metadata.get("tags", []):
            for statement in ast.parse(cell.source).body:
                if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                    values[statement.targets[0].id] = ast.literal_eval(statement.value)
    return values


def few(notebook, limits=FEW):
    """Return parameters with which the notebook repeats as little as possible."""
    return {name: at_most(limits[name], default) for name, default in defaults(notebook).items() if name in limits}


def at_most(limit, default):
    if isinstance(default, list):
        return default[:limit]
    return limit if isinstance(default, str) else min(default, limit)


def names_read(notebook):
    """Return every name that cells other than `parameters` read, also in a magic's line and cell."""
    names = set()
    for cell in code_cells(notebook):
        if "parameters" in cell.metadata.get("tags", []):
            continue
        for node in ast.walk(ast.parse(TransformerManager().transform_cell(cell.source))):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                names.add(node.id)
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "").startswith(("run_cell_m", "run_line_m")):
                texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
                names.update(re.findall(r"\w+", " ".join(map(str, texts))))
    return names


@functools.cache
def declared(path):
    """Return (defaults, names read) of a notebook, cached for all points of a grid."""
    notebook = read(path)
    return defaults(notebook), names_read(notebook)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def check_parameters(path, given):
    """Convert `given` (name -> text or YAML value) to the defaults' types; UserError for an invalid value."""
    known, used = declared(path)
    values = {}
    for name, text in given.items():
        if name not in known:
            there = ", ".join(f"{key}={value!r}" for key, value in known.items()) or "none"
            raise UserError(f"{path.name} has no parameter {name!r}; choose from {there}")
        if name not in used:
            raise UserError(f"{path.name}: parameter {name!r} is declared, but no cell reads it")
        what = f"{path.name}: parameter {name!r}"
        values[name] = value_like(known[name], text, what)
        if words := limits.demand(name, values[name], known[name]):
            raise UserError(f"{what} is {text!r} but must be {words}")
    return values


def value_like(default, text, what):
    """Convert the text to the default's type: a string stays unchanged, an int may replace a float."""
    value = text
    if isinstance(text, str) and not isinstance(default, str):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text if default is None else {"true": True, "false": False}.get(text, text)
    kinds = (int, float) if type(default) is float else (type(default),)
    if default is not None and type(value) not in kinds:
        raise UserError(f"{what} is {text!r} but must be {type(default).__name__} like {default!r}")
    return value


# Execution


@dataclass
class Outcome:
    """Result of one notebook. `error` is the first failing line; empty if every cell ran."""

    name: str
    folder: Path
    seconds: float = 0.0
    error: str = ""
    interrupted: bool = False
    figures: list[Path] = field(default_factory=list)


def execute(path, folder, values, *, timeout=900.0, progress=True, kernel="python3", figures=None):
    """Run the notebook with papermill and write NAME.ipynb, NAME.html and figures/ to `folder`.

    figures: another folder for what the notebook saves.
    """
    outcome = Outcome(path.stem, folder)
    folder.mkdir(parents=True, exist_ok=True)
    executed = folder / path.name
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # use this .venv's kernel instead of a user-wide one
    os.environ["LABKIT_FIGURES"] = str(figures or folder / "figures")
    started = time.monotonic()
    before = psutil.Process().children(recursive=True)
    with tempfile.TemporaryDirectory(prefix="lab-") as private:  # which other users cannot enter
        # nbclient handles SIGINT in the main thread. It runs in another one, so Ctrl-C and the limit stay ours.
        job = Papermill(path, executed, values, progress, kernel, connection(private))
        job.start()
        try:
            if not job.done.wait(timeout):
                outcome.error = f"still running after {timeout:.0f} s"
        except KeyboardInterrupt:
            outcome.error = "interrupted"
            outcome.interrupted = True
        if not job.done.is_set():
            stop_kernel(job, before)
    outcome.seconds = time.monotonic() - started
    outcome.error = outcome.error or (one_line(job.error) if job.error else "")
    if executed.exists():
        outcome.figures = harvest(executed, folder)
    return outcome


class Papermill(threading.Thread):
    """One notebook under papermill. `done` is set at the end (an interrupted join() would misreport a live thread)."""

    def __init__(self, path, executed, values, progress, kernel, config):
        super().__init__(daemon=True)
        self.path = path
        self.executed = executed
        self.values = values
        self.progress = progress
        self.kernel = kernel
        self.config = config
        self.done = threading.Event()
        self.error = None

    def run(self):
        import papermill

        try:
            papermill.execute_notebook(
                self.path,
                self.executed,
                parameters=self.values,
                kernel_name=self.kernel,
                language="python",
                extra_arguments=QUIET,
                config=self.config,
                cwd=self.path.parent,
                progress_bar={"desc": self.path.stem, "bar_format": BAR, "disable": None if self.progress else True},
            )
        except Exception as error:
            self.error = error
        finally:
            self.done.set()


def connection(folder):
    """Return how a kernel is reached: by sockets in a folder that only this user may enter.

    A port that was free may be taken before the kernel opens it, and any user of the machine can read what a kernel
    publishes on a port, or on an abstract socket.
    """
    named = {"transport": "ipc", "ip": f"{folder}/kernel"} if sys.platform == "linux" else {}
    return Config({"KernelManager": named})


# Without these, every run begins with a warning about TCP, and may end with a traceback of ipykernel: its control
# thread may still write to a socket that its main thread has just closed.
QUIET = [
    "--IPKernelApp.log_level=ERROR",
    "--IPKernelApp.logging_config={'loggers': {'tornado.general': {'level': 'CRITICAL'}}}",
]
BAR = "{desc}: cell {n_fmt} of {total_fmt} |{bar:20}| {elapsed}, about {remaining} left"


def stop_kernel(job, before):
    """End the kernel and its descendants: first as the stop button does, then by force."""
    held = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave ranks running
    ours = [process for process in psutil.Process().children(recursive=True) if process not in before]
    for process in ours:
        if "ipykernel_launcher" in command_of(process):
            process.send_signal(signal.SIGINT)
    job.done.wait(GRACE)
    for process in ours:  # psutil compares start times, so a reused pid is not hit
        if process.is_running():
            process.kill()
    psutil.wait_procs(ours, timeout=GRACE)
    job.done.wait(GRACE)
    signal.signal(signal.SIGINT, held)


def command_of(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def one_line(error):
    """Summarise papermill's error as `cell 7: ValueError: ...`."""
    name = getattr(error, "ename", None)
    if name is None:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    value = (error.evalue.strip().splitlines() or [""])[0]
    return f"cell {error.exec_count}: {name}: {value}".rstrip(": ")


# Harvest


def harvest(executed, folder):
    """Write NAME.html and the figures that cells displayed; return the figures' paths."""
    notebook = read(executed)
    (folder / f"{executed.stem}.html").write_text(as_page(notebook), encoding="utf-8")
    pictures = folder / "figures"
    for number, (kind, data, _) in enumerate(displayed_pictures(notebook), start=1):
        pictures.mkdir(exist_ok=True)
        raw = data.encode() if kind == "svg" else base64.b64decode(data)
        (pictures / f"{executed.stem}-{number}.{kind}").write_bytes(raw)
    return sorted(pictures.glob("*.[sp][vn]g"))


def headline(folder, path):
    """Return {"picture", "alt"} of the first saved figure, else of the first displayed; {} without a page."""
    executed = folder / path.name
    if not executed.exists():
        return {}
    for about in sorted(folder.glob("figures/*.json"), key=lambda about: about.stat().st_mtime_ns):
        facts = json.loads(about.read_text())
        return {"picture": f"figures/{facts['figure']}", "alt": facts["alt"]}
    for kind, _, alt in displayed_pictures(read(executed)):
        return {"picture": f"figures/{path.stem}-1.{kind}", "alt": alt or f"the first picture of {path.stem}"}
    return {"picture": "", "alt": ""}


def displayed_pictures(notebook):
    """Yield (svg or png, data, alt text) of the outputs."""
    for cell in code_cells(notebook):
        for output in cell.outputs:
            for mime, kind in (("image/svg+xml", "svg"), ("image/png", "png")):
                if mime in output.get("data", {}):
                    yield kind, output.data[mime], output.get("metadata", {}).get("alt", "")
                    break


def tables(executed):
    """Return the tables of the cells tagged `table` as text, then what these cells print; else the last table."""
    cells = code_cells(read(executed))
    tagged = [cell for cell in cells if "table" in cell.metadata.get("tags", [])]
    outputs = [output for cell in tagged or cells for output in cell.outputs]
    shown = [output.get("data", {}) for output in outputs]
    texts = [data["text/plain"] for data in shown if is_table(data)]
    printed = [output.text.rstrip() for output in outputs if output.output_type == "stream"]
    return texts + printed if tagged else texts[-1:]


def is_table(data):
    return "<table" in data.get("text/html", "") or "| :--" in data.get("text/markdown", "")

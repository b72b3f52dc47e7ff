"""The stored results of runs, and the code that they were measured with.

Outputs of notebooks, figures/*.json with their pictures, and the dashboard's sweep carry a fingerprint of their code
(labkit/measure/fingerprint.py). A record is stale if that code has changed, or if it has no fingerprint. A notebook is
also stale if it shows source of labkit that has changed.
"""

import ast
import hashlib
import inspect
import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import batch
import gpu
import nbformat
from nbconvert.preprocessors import CoalesceStreamsPreprocessor
from terminal import UserError

from labkit.measure import fingerprint
from labkit.run import sweep
from labkit.show import notebook as show

KEY = "labkit_code"  # in a notebook's metadata; "code" in a figure's JSON and in a sweep's file
HEADING = re.compile(r"(labkit/[\w/]+\.py)(:\d+(?:-\d+)?)?")
COMMAND = "./scripts/lab figures --stale"
GRIDS = ("dashboard.yaml", "dashboard_more.yaml")  # of the sweep that ships
GPU = "gpu_*.json"  # made by `lab gpu`, which needs a GPU
SHOWN = 3  # names of changed files in a line


@dataclass
class Record:
    """A stored result. `job` renews it: the name of a notebook, or "sweep"."""

    name: str
    job: str
    changed: list = field(default_factory=list)  # files that have changed since
    bare: bool = False  # it has no fingerprint

    def why(self):
        if self.bare:
            return "has no fingerprint of its code"
        more = f" and {len(self.changed) - SHOWN} more" if len(self.changed) > SHOWN else ""
        return f"changed since: {', '.join(self.changed[:SHOWN])}{more}"


class Stored:
    """The stored results of a checkout (figures/ and notebooks/), compared with today's code."""

    def __init__(self, root=batch.ROOT, code=None):
        self.root = Path(root)
        self.code = code or fingerprint.Code(root)
        self.notebooks = self.root / "notebooks"
        self.figures = self.root / "figures"
        self.sweep = self.notebooks / batch.MAIN_JOB

    def stale(self):
        """Return the records that are older than their code."""
        return [record for record in self.records() if record.bare or record.changed]

    def records(self):
        for path in batch.course(self.notebooks):
            notebook = batch.read(path)
            today = self.of_notebook(path, notebook)
            record = compared(f"notebooks/{path.name}", path.stem, notebook.metadata.get(KEY), today)
            record.changed += self.other_source(notebook)
            yield record
            for name in saved_figures(notebook):
                file = self.figures / f"{name}.json"
                code = json.loads(file.read_text()).get("code") if file.exists() else None
                yield compared(f"figures/{name}.json", path.stem, code, today)
        today = self.of_sweep()
        for path in sorted(self.sweep.glob("*.csv")):
            yield compared(f"notebooks/{path.parent.name}/{path.name}", "sweep", sweep.code_of(path), today)
        if missing := self.not_measured():
            yield Record(f"notebooks/{self.sweep.name}", "sweep", [f"{GRIDS[-1]} ({missing} cells not measured)"])

    def of_notebook(self, path, notebook=None):
        """Return today's fingerprint of a notebook: its cells, the code of labkit that they use, and its data files."""
        cells = batch.code_cells(notebook or batch.read(path))
        code = self.code.of_cells([cell.source for cell in cells])
        data = [*sorted(path.parent.glob(f"{path.stem}*.yaml")), *sorted(path.with_suffix("").glob("*.csv"))]
        if data:
            content = hashlib.sha256(b"".join(file.read_bytes() for file in data))
            code[f"notebooks/{path.stem}*.yaml, {path.stem}/*.csv"] = content.hexdigest()[: fingerprint.DIGITS]
        return code

    def not_measured(self):
        """Return how many cells of the grids the stored sweep lacks."""
        grids = [self.notebooks / name for name in GRIDS if (self.notebooks / name).exists()]
        if not grids or not self.sweep.exists():
            return 0
        possible, _ = sweep.cells([one for path in grids for one in sweep.as_list(sweep.read_grid(path))])
        return len({cell.key for cell in possible} - set(sweep.read(self.sweep).get("cell", ())))

    def of_sweep(self):
        return self.code.fingerprint([sweep.MEASURED])

    def about_gpu(self):
        """Return a line for each stale record of `lab gpu`. Renewing one needs a GPU."""
        way = "to renew it, run ./scripts/lab gpu on a machine with a GPU and copy its gpu.json there"
        files = sorted(self.figures.glob(GPU))
        today = gpu.code_of_checks(self.root, self.code) if files else {}
        lines = []
        for file in files:
            record = compared(f"figures/{file.name}", "gpu", json.loads(file.read_text()).get("code"), today)
            if record.bare or record.changed:
                lines.append(f"{record.name} is stale: {record.why()}; {way}")
        return lines

    # Source that cells have shown

    def other_source(self, notebook):
        """Return files of which the notebook's outputs show source that has changed."""
        shown = [(file, text) for _, _, file, text in shown_source(notebook)]
        return sorted({f"{file} (as shown)" for file, text in shown if text not in self.texts(file).values()})

    def texts(self, file):
        """Return {(qualified name, first line, last line): text} of a file's definitions, lambdas, and all of it."""
        path = self.root / file
        if not path.exists():
            return {}
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        texts = {("", 0, 0): as_shown(lines)}
        for name, node in definitions(ast.parse("".join(lines))):
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
            texts[name, first, node.end_lineno] = as_shown(lines[first - 1 : node.end_lineno])
        return texts

    def renew_source(self, path):
        """Update displayed source where the cell names one function of it, without a run."""
        notebook = batch.read(path)
        before = nbformat.writes(notebook)
        for cell, output, file, text in shown_source(notebook):
            texts = self.texts(file)
            same = [place for place in texts if texts[place] == text] or named_in(cell.source, text, texts)
            if len(same) == 1:
                name, first, last = same[0]
                heading = f"{file}:{first}" + (f"-{last}" if last > first else "") if name else file
                folded = "<details>" in output.data["text/markdown"]
                output.data.update(show.as_source(heading, texts[same[0]], folded))
        if nbformat.writes(notebook) != before:
            nbformat.write(notebook, path)

    # Renewing

    def keep(self, path, executed, figures, code):
        """Store the results of a notebook's run: outputs, figures, and the fingerprint of its code."""
        notebook = batch.read(path)
        done, _ = CoalesceStreamsPreprocessor().preprocess(batch.read(executed), {})  # merges consecutive prints
        new = [one for one in batch.code_cells(done) if "injected-parameters" not in one.metadata.get("tags", [])]
        old = batch.code_cells(notebook)
        if [cell.source for cell in old] != [cell.source for cell in new]:
            raise UserError(f"{path.name} changed during its run, so its outputs were not stored: run it again")
        for old_cell, new_cell in zip(old, new, strict=True):
            old_cell.outputs = new_cell.outputs
            old_cell.execution_count = new_cell.execution_count
            old_cell.metadata.pop("execution", None)
        notebook.metadata.pop("widgets", None)
        notebook.metadata[KEY] = code
        self.figures.mkdir(exist_ok=True)
        for file in sorted(figures.glob("*.*")):
            if file.suffix == ".json":
                facts = json.loads(file.read_text()) | {"code": code}
                file.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")
            file.replace(self.figures / file.name)
        nbformat.write(notebook, path)

    def keep_sweep(self, folder):
        """Replace the stored sweep by the files of a new one."""
        new = [*folder.glob("*.csv"), *folder.glob("*.json")]
        for file in new:
            shutil.copy(file, self.sweep)
        for file in self.sweep.glob("*.*"):
            if file.name not in {one.name for one in new}:
                file.unlink()
        shutil.rmtree(folder)

    def forget(self, folder):
        """Remove files of an interrupted sweep that were measured with older code."""
        today = self.of_sweep()
        for file in folder.glob("*.csv"):
            if fingerprint.changed(sweep.code_of(file), today):
                file.unlink()
        for file in folder.glob("*.json"):
            if json.loads(file.read_text()) != today:
                file.unlink()


def compared(name, job, code, today):
    return Record(name, job, fingerprint.changed(code, today), bare=not code)


def saved_figures(notebook):
    """Return the names given to plots.save in the notebook's code."""
    return re.findall(r"plots\.save\(\w+, \"(\w+)\"", "\n".join(cell.source for cell in batch.code_cells(notebook)))


def shown_source(notebook):
    """Yield (cell, output, file, text) of all source of labkit in the notebook's outputs."""
    for cell in batch.code_cells(notebook):
        for output in cell.outputs:
            heading, _, text = output.get("data", {}).get("text/plain", "").partition("\n\n")
            if place := HEADING.fullmatch(heading):
                yield cell, output, place[1], text


def named_in(source, text, texts):
    """Return the places in `texts` with the name of the text's definition, preferring one that the cell names."""
    kind = re.search(r"^(?:async )?(?:def|class) (\w+)", text, re.MULTILINE)
    same = [place for place in texts if kind and place[0].rpartition(".")[2] == kind[1]]
    return same if len(same) == 1 else [place for place in same if re.search(rf"\b{place[0]}\b", source)]


def definitions(tree, above=""):
    """Yield (qualified name, node) of all functions and classes, including nested ones."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield f"{above}{node.name}", node
            yield from definitions(node, f"{above}{node.name}.")
        elif isinstance(node, ast.Lambda):  # a cell shows the lines that contain it
            yield f"{above}<lambda>", node
        else:
            yield from definitions(node, above)


def as_shown(lines):
    return inspect.cleandoc("\n" + "".join(lines)) + "\n"

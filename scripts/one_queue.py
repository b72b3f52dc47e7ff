"""A pytest plugin of `lab test`: one queue of cases for all workers, and a file with the result of each case.

It runs the collected cases of the kinds in --kinds. The cells of a notebook stay together and in order, on one kernel.
Slow cases come first, so that no worker is left with one at the end.
"""

import json
import re
from collections import Counter
from pathlib import Path

import batch
import nbformat
import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

TOGETHER = (".ipynb", "test_browser.py", "test_lab_command.py", "test_web.py", "test_checkpoint_on_s3.py")
TOGETHER += ("test_grade.py", "test_sweep.py", "test_slurm_launch.py", "test_slurm_training.py")
COLOURS = r"\x1b\[[\d;]*m"  # in a traceback of a notebook
FEW = 2  # cases of one function that `--quick` runs
NOTEBOOK_LIMIT = 900  # seconds for one cell or job, also on a busy machine


def pytest_addoption(parser):
    parser.addoption("--kinds", default="tests,nbval,papermill,browser", help="which kinds of cases to run")
    parser.addoption("--quick", action="store_true", help=f"{FEW} cases of each function that is not marked slow")
    parser.addoption("--cases", help="file that gets a JSON object per case")


def pytest_configure(config):
    if config.option.cases and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Cases(Path(config.option.cases)))


def kind_of(nodeid, keywords):
    if ".ipynb::" in nodeid:
        return "nbval"
    return next((kind for kind in ("papermill", "browser") if kind in keywords), "tests")


def pytest_xdist_make_scheduler(config, log):
    return Queue(config, log)


class Queue(LoadScopeScheduling):
    """A scheduler of single cases; those that share a kernel, a server, a cluster or a .venv stay together."""

    def _split_scope(self, nodeid):
        file = nodeid.partition("::")[0]
        return file if file.endswith(TOGETHER) else nodeid


def pytest_collection_modifyitems(config, items):
    kinds = config.option.kinds.split(",")
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.timeout(NOTEBOOK_LIMIT))
            repeat_little(item)
    chosen = [item for item in items if kind_of(item.nodeid, item.keywords) in kinds]
    if config.option.quick:
        chosen = list(few_of_each(item for item in chosen if "slow" not in item.keywords))
    config.hook.pytest_deselected(items=list({*items} - {*chosen}))
    items[:] = sorted(chosen, key=comes_late)


def repeat_little(item):
    """Reduce the repetitions of a notebook's defaults, because nbval need not measure."""
    if "parameters" in item.cell.metadata.get("tags", []):
        values = batch.few(nbformat.v4.new_notebook(cells=[item.cell]))
        item.cell.source += "".join(f"\n{name} = {value!r}" for name, value in values.items())


def comes_late(item):
    """Sort key: slow cases first; cases of one file that share something keep their order."""
    return "slow" not in item.keywords and not str(item.path).endswith(TOGETHER)


def few_of_each(items):
    seen = Counter()
    for item in items:
        seen[item.nodeid.partition("[")[0]] += 1
        if seen[item.nodeid.partition("[")[0]] <= FEW:
            yield item


class Cases:
    """A plugin of the main process that collects the workers' reports and writes each ended case."""

    def __init__(self, path):
        self.path = path
        self.cases = {}
        path.write_text("")

    def pytest_runtest_logreport(self, report):
        kind = kind_of(report.nodeid, report.keywords)
        new = {"name": report.nodeid, "kind": kind, "outcome": "passed", "seconds": 0.0, "why": ""}
        case = self.cases.setdefault(report.nodeid, new)
        case["seconds"] += report.duration
        if report.failed:
            case["outcome"] = "failed"
            case["why"] = last_line(report)
        elif report.skipped and case["outcome"] == "passed":
            case["outcome"] = "skipped"
            case["why"] = report.longrepr[-1].removeprefix("Skipped: ")
        if report.when == "teardown":
            self.write(self.cases.pop(report.nodeid))

    def pytest_sessionfinish(self):
        """Write the cases that are left, whose worker has died."""
        for case in self.cases.values():
            self.write(case)

    def write(self, case):
        with self.path.open("a") as file:
            file.write(json.dumps(case) + "\n")


def last_line(report):
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash:
        return crash.message.splitlines()[0]
    lines = re.sub(COLOURS, "", report.longreprtext).strip().splitlines()
    return lines[-1] if lines else ""

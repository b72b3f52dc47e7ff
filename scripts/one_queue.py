"""What `lab test` adds to pytest: one queue of cases for all workers, and a file that says how each case went.

Of what pytest has collected, the kinds that --kinds names run. The cells of a notebook stay together and in order, on
one kernel; what is marked slow comes before what is not, so that no worker is left alone with it at the end.
"""

import json
import re
from collections import Counter
from pathlib import Path

import batch
import nbformat
import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

TOGETHER = (".ipynb", "test_browser.py", "test_lab_command.py", "test_web.py")
COLOURS = r"\x1b\[[\d;]*m"  # of a traceback in a notebook
FEW = 3  # cases of one function that `--quick` runs
NOTEBOOK_LIMIT = 900  # seconds for one cell or job: far above any, also beside others on a busy machine


def pytest_addoption(parser):
    parser.addoption("--kinds", default="tests,nbval,papermill,browser", help="which kinds of cases to run")
    parser.addoption("--quick", action="store_true", help=f"{FEW} cases of each function that is not marked slow")
    parser.addoption("--cases", help="the file that gets a JSON object for each case")


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
    """Hands out single cases, but what shares a kernel, a server or a .venv as one; the largest first."""

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
    """nbval runs a notebook's defaults. What it repeats in order to measure, it need not repeat here."""
    if "parameters" in item.cell.metadata.get("tags", []):
        values = batch.few(nbformat.v4.new_notebook(cells=[item.cell]))
        item.cell.source += "".join(f"\n{name} = {value!r}" for name, value in values.items())


def comes_late(item):
    """Those of one file that share something may build on each other: they keep their order."""
    return "slow" not in item.keywords and not str(item.path).endswith(TOGETHER)


def few_of_each(items):
    seen = Counter()
    for item in items:
        seen[item.nodeid.partition("[")[0]] += 1
        if seen[item.nodeid.partition("[")[0]] <= FEW:
            yield item


class Cases:
    """Gathers, in the process that hands out the cases, what the workers report, and writes down what has ended."""

    def __init__(self, path):
        self.path, self.cases = path, {}
        path.write_text("")

    def pytest_runtest_logreport(self, report):
        kind = kind_of(report.nodeid, report.keywords)
        new = {"name": report.nodeid, "kind": kind, "outcome": "passed", "seconds": 0.0, "why": ""}
        case = self.cases.setdefault(report.nodeid, new)
        case["seconds"] += report.duration
        if report.failed:
            case["outcome"], case["why"] = "failed", last_line(report)
        elif report.skipped and case["outcome"] == "passed":
            case["outcome"], case["why"] = "skipped", report.longrepr[-1].removeprefix("Skipped: ")
        if report.when == "teardown":
            self.write(self.cases.pop(report.nodeid))

    def pytest_sessionfinish(self):
        """What is left are cases whose worker has died."""
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

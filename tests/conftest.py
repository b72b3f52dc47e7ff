import gc
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parent
SCRIPTS = TESTS.parent / "scripts"
# Tests import helpers, other tests and scripts by their base names; so do the ranks that they start.
sys.path += [str(folder) for folder in (*sorted(TESTS.glob("[a-z]*/")), SCRIPTS)]
pytest.register_assert_rewrite(*[path.stem for path in (TESTS / "helpers").glob("*.py")])
# Tests hold values to 1e-12: the same thread count everywhere keeps the order of sums the same.
torch.set_num_threads(1)
# A shell starts background jobs with SIGINT ignored, and children inherit that: the tests press Ctrl-C for real.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def handlers():
    """Signal handlers stay as they were: a rank's own, left by train.main, let a later Ctrl-C end the test process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def pools():
    held = {}
    yield held
    for pool in held.values():
        pool.close()


@pytest.fixture
def ranks(pools):
    """ranks(2, body, **arguments): run body(rank, world_size, **arguments) on warm ranks, results by rank."""
    from pool import Pool

    def run(world_size, body, /, **arguments):
        pool = pools.get(world_size)
        if pool is not None and not pool.alive:
            pool.close()
            pool = None
        if pool is None:
            pool = pools[world_size] = Pool(world_size, [path for path in sys.path if path])
        return pool.run(body, **arguments)

    return run


@pytest.fixture
def tree(tmp_path):
    """A copy of the scripts, and no notebooks yet."""
    shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "notebooks").mkdir()
    return tmp_path


def pytest_collection_finish(session):
    session.frozen = len(sys.modules)
    gc.freeze()  # torch and thousands of cases: no collection of garbage need look through them again


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    if len(sys.modules) > item.session.frozen + 100:  # nor through what a test has imported
        item.session.frozen = len(sys.modules)
        gc.collect()
        gc.freeze()


def missing_capability(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return "no CUDA device"
    if item.get_closest_marker("browser"):
        from browser import CHROMIUM  # needs playwright, which a node with GPUs may lack

        if not CHROMIUM:
            return "no Chromium"
    return None


def pytest_runtest_setup(item):
    reason = missing_capability(item)
    if reason:
        pytest.skip(reason)


def pytest_terminal_summary(terminalreporter):
    for report in terminalreporter.stats.get("skipped", []):
        terminalreporter.write_line(f"NOT TESTED: {report.nodeid}: {report.longrepr[-1]}")

"""Pytest cases: every notebook as a batch job, on 4 ranks if its default is 2, else on 2.

nbval runs the defaults. A job does not measure, so it repeats as little as possible. LABKIT_JOBS names the folder for
the jobs' results.
"""

import os
from pathlib import Path

import batch
import kernels
import pytest

LIMIT = 600  # seconds until a job fails, also on a busy machine
# Less than nbval, which compares what comes of it: here it is enough that a notebook runs through on other ranks.
LESS = {"steps": 20}


@pytest.mark.slow
@pytest.mark.papermill
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("path", batch.course(), ids=lambda path: path.stem)
def test_job(path, tmp_path):
    notebook = batch.read(path)
    default = batch.defaults(notebook).get(batch.RANKS)
    if default is None:
        pytest.skip(f"on other numbers of ranks: it has no parameter {batch.RANKS}")
    values = {batch.RANKS: 2 if default == 4 else 4, **batch.few(notebook, batch.FEW | batch.SMALL | LESS)}
    folder = Path(os.environ.get("LABKIT_JOBS", tmp_path)) / path.stem
    kernel = kernels.NAME if kernels.PLACE in os.environ else "python3"
    outcome = batch.execute(path, folder, values, timeout=LIMIT, progress=False, kernel=kernel)
    assert not outcome.error, outcome.error

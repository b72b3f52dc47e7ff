"""Fingerprints of code: what changes them and what does not, on a small labkit and on this one."""

import json
import shutil
import textwrap
from pathlib import Path

import batch
import nbformat
import pytest
import stored

from labkit.measure import fingerprint
from labkit.run import launch, sweep

SMALL = {
    "__init__.py": '"""The package."""',
    "comm.py": '''
        """Messages."""
        import torch

        LIMIT = 4


        def all_reduce(tensor):
            """Add up."""
            return checked(tensor)


        def checked(tensor):
            return tensor[:LIMIT]


        def barrier():
            return None
    ''',
    "ddp.py": '''
        from labkit.comm import all_reduce


        class DDP:
            def average(self, p):
                """Average the gradients."""
                return all_reduce(p.grad)
    ''',
    "zero.py": """
        from labkit import comm

        STAGES = {}


        def stage(make):
            STAGES[make.__name__] = make
            return make


        @stage
        def first():
            return comm.barrier()


        def shard(stage):
            return STAGES[stage]()
    """,
    "trainer.py": """
        from labkit.ddp import DDP
        from labkit.zero import shard

        STRATEGIES = {"ddp": DDP, "zero": shard}


        def train(strategy):
            return STRATEGIES[strategy]
    """,
    "show/__init__.py": "",
    "show/bars.py": "def bars():\n    return 1",
    "show/curves.py": "def curves():\n    return 2",
    "show/plots.py": """
        from labkit.show.bars import bars
        from labkit.show.curves import curves

        __all__ = ["bars", "curves"]
    """,
    "scale/__init__.py": "",
    "scale/fit.py": """
        from pathlib import Path

        ROWS = Path(__file__).with_name("rows.csv")


        def fit():
            return ROWS.read_text()
    """,
    "scale/rows.csv": "a,b\n1,2\n",
}
NOTEBOOKS = {
    "01_ddp": ["from labkit.ddp import DDP\nfrom labkit.show import plots", "model = DDP()\nplots.bars()"],
    "02_zero": ["from labkit import zero", "zero.shard('first')"],
    "03_named": ["from run import launch", "launch('labkit.trainer:train')"],
    "04_program": ["%load_ext labkit", "%%torchrun --nproc 2\nfrom labkit import comm\ncomm.barrier()"],
    "05_text": ["head = 'from labkit.show.curves import curves'", "launch(head + 'curves()')"],
    "06_fit": ["from labkit.scale.fit import fit", "fit()"],
    "07_whole": ["from labkit import zero\nname = 'shard'", "getattr(zero, name)"],
    "08_inside": ["def on_ranks():\n    from labkit.comm import barrier\n\n    barrier()", "on_ranks()"],
}


@pytest.fixture
def small(tmp_path):
    """A checkout with a labkit of a few functions, and notebooks whose records are of today."""
    for name, text in SMALL.items():
        path = tmp_path / "labkit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"))
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "figures").mkdir()
    for name, sources in NOTEBOOKS.items():
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "notebooks" / f"{name}.ipynb")
    for path in batch.course(tmp_path / "notebooks"):
        notebook = batch.read(path)
        notebook.metadata[stored.KEY] = stored.Stored(tmp_path).of_notebook(path)
        nbformat.write(notebook, path)
    assert stale(tmp_path) == {}
    return tmp_path


def stale(root):
    """{notebook: changed files} of the records that are stale."""
    return {record.job[:2]: record.changed for record in stored.Stored(root).stale()}


def edit(root, name, old, new):
    path = root / "labkit" / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "old", "new", "notebooks"),
    [
        ("comm.py", "checked(tensor)", "checked(tensor + 1)", "01 03"),
        ("comm.py", "tensor[:LIMIT]", "tensor", "01 03"),  # through a function that calls it
        ("comm.py", "LIMIT = 4", "LIMIT = 5", "01 03"),  # a constant, through two
        ("comm.py", "return None", "return 0", "02 03 04 07 08"),
        ("ddp.py", "p.grad)", "p.grad.clone())", "01 03"),
        ("zero.py", "return comm.barrier()", "return [comm.barrier()]", "02 03 07"),  # which only a table names
        ("trainer.py", '"zero": shard', '"zero": [shard]', "03"),
        ("show/bars.py", "return 1", "return 2", "01"),  # not of those who draw something else with plots
        ("show/curves.py", "return 2", "return 1", "05"),
        ("scale/fit.py", "read_text()", "read_bytes()", "06"),
        ("scale/rows.csv", "1,2", "1,3", "06"),
    ],
)
def test_a_change_makes_exactly_those_stale_that_use_it(small, name, old, new, notebooks):
    edit(small, name, old, new)
    assert stale(small) == {notebook: [f"labkit/{name}"] for notebook in notebooks.split()}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("comm.py", '"""Add up."""', '"""Add up the tensors of all ranks."""'),
        ("comm.py", '            """Add up."""\n'.replace(" " * 8, ""), ""),
        ("comm.py", '"""Messages."""', '"""Every message."""'),
        ("ddp.py", '"""Average the gradients."""', '"""Average."""  # in place'),
        ("comm.py", "tensor[:LIMIT]", "(\n        tensor[:LIMIT]  # no more\n    )"),
        ("comm.py", "LIMIT = 4\n", "LIMIT = 4\n\n\ndef unused():\n    return LIMIT\n"),
        ("show/plots.py", '__all__ = ["bars", "curves"]', '__all__ = ["curves", "bars"]'),
    ],
)
def test_docstrings_comments_form_and_what_nobody_uses_make_nothing_stale(small, name, old, new):
    edit(small, name, old, new)
    assert stale(small) == {}


def test_a_cell_that_changes_makes_its_own_notebook_stale(small):
    path = small / "notebooks" / "02_zero.ipynb"
    notebook = batch.read(path)
    notebook.cells[1].source += "  # with a comment"
    notebook.cells.append(nbformat.v4.new_markdown_cell("text"))
    nbformat.write(notebook, path)
    assert stale(small) == {}
    notebook.cells[1].source = "zero.shard('second')"
    nbformat.write(notebook, path)
    assert stale(small) == {"02": ["cells"]}
    notebook = batch.read(small / "notebooks" / "04_program.ipynb")
    notebook.cells[1].source = notebook.cells[1].source.replace("--nproc 2", "--nproc 4")
    nbformat.write(notebook, small / "notebooks" / "04_program.ipynb")
    assert stale(small) == {"02": ["cells"], "04": ["cells"]}


def test_a_record_without_a_fingerprint_is_stale_and_says_so(small):
    path = small / "notebooks" / "02_zero.ipynb"
    notebook = batch.read(path)
    del notebook.metadata[stored.KEY]
    nbformat.write(notebook, path)
    (record,) = stored.Stored(small).stale()
    assert record.name == "notebooks/02_zero.ipynb" and record.why() == "has no fingerprint of its code"


def test_a_figure_and_a_sweep_have_fingerprints_of_their_own(small):
    path = small / "notebooks" / "06_fit.ipynb"
    notebook = batch.read(path)
    notebook.cells[1].source = 'figure = fit()\nplots.save(figure, "fitted", {}, {}, "", "")'
    notebook.metadata[stored.KEY] = today = stored.Stored(small).of_notebook(path, notebook)
    nbformat.write(notebook, path)
    assert [record.name for record in stored.Stored(small).stale()] == ["figures/fitted.json"]  # it is not there
    figure = small / "figures" / "fitted.json"
    figure.write_text(json.dumps({"code": today | {"labkit/scale/fit.py": "0"}}))
    (record,) = stored.Stored(small).stale()
    assert record.name == "figures/fitted.json" and record.why() == "changed since: labkit/scale/fit.py"
    figure.write_text(json.dumps({"code": today}))
    folder = small / "notebooks" / "dashboard"
    folder.mkdir()
    (folder / "a.csv").write_text("cell,code\nx,12\n")
    (record,) = stored.Stored(small).stale()
    assert (record.name, record.job, record.bare) == ("notebooks/dashboard/a.csv", "sweep", True)
    code = stored.Stored(small).of_sweep() | {"labkit/comm.py": "0"}
    (folder / "12.json").write_text(json.dumps(code))
    (record,) = stored.Stored(small).stale()
    assert record.changed == ["labkit/comm.py"]


# Source that a notebook shows


@pytest.fixture
def showing(small):
    """A notebook that has shown DDP.average and all of comm.py."""
    path = small / "notebooks" / "01_ddp.ipynb"
    notebook, texts = batch.read(path), stored.Stored(small).texts("labkit/ddp.py")
    (place,) = [place for place in texts if place[0] == "DDP.average"]
    whole = stored.Stored(small).texts("labkit/comm.py")["", 0, 0]
    shown = [stored.show.as_source(f"labkit/ddp.py:{place[1]}-{place[2]}", texts[place])]
    shown += [stored.show.as_source("labkit/comm.py", whole, folded=True)]
    cell = notebook.cells[1]
    cell.source += "\nshow.source(DDP.average, comm)"
    cell.outputs = [nbformat.v4.new_output("display_data", data) for data in shown]
    notebook.metadata[stored.KEY] = stored.Stored(small).of_notebook(path, notebook)
    nbformat.write(notebook, path)
    assert stale(small) == {}
    return path


def test_a_text_that_was_shown_and_has_changed_makes_it_stale_until_it_is_shown_anew(small, showing):
    edit(small, "ddp.py", "from labkit.comm", "# a line above\nfrom labkit.comm")
    assert stale(small) == {}  # the lines have moved, the text is the same
    edit(small, "ddp.py", "Average the gradients.", "Average.")
    assert stale(small) == {"01": ["labkit/ddp.py (as shown)"]}
    stored.Stored(small).renew_source(showing)
    assert stale(small) == {}
    assert ["<details>" in one.data["text/markdown"] for one in batch.read(showing).cells[1].outputs] == [False, True]
    plain = batch.read(showing).cells[1].outputs[0].data["text/plain"]
    assert plain.startswith("labkit/ddp.py:6-8\n\ndef average(self, p):\n") and "Average." in plain


def test_a_text_of_something_that_has_gone_needs_a_run(small, showing):
    edit(small, "ddp.py", "def average", "def mean")
    stored.Stored(small).renew_source(showing)
    assert stale(small)["01"] == ["labkit/ddp.py", "labkit/ddp.py (as shown)"]


def test_text_as_stored_is_text_as_shown():
    """What inspect shows is found in the file, to the letter: a method with decorators, a class, a module, a lambda."""
    from labkit.compression import topk
    from labkit.ideas.compression import top_k_mean
    from labkit.run.experiment import Experiment
    from labkit.trainer import STRATEGIES

    code = stored.Stored()
    for one in (
        topk.TopK,
        top_k_mean,
        Experiment,
        Experiment.from_dict,
        topk,
        STRATEGIES["zero1"],
        STRATEGIES["ddp_bucketed"],
    ):
        heading, text = stored.show.place_and_code(one)
        file, _, lines = heading.partition(":")
        (place,) = [place for place, found in code.texts(file).items() if found == text]
        assert lines == ("-".join(map(str, dict.fromkeys(place[1:]))) if lines else "")


# This labkit


USED_BY = {
    "attention/context_parallel.py": ("def ulysses_attention(", "41"),
    "ideas/attention_and_context.py": ("def tiled_attention(", "15"),
    "show/expert_capacity_explorer.py": ("def explorer(", "43"),
    "ideas/experts.py": ("def mixture_of_experts(", "43"),
}


@pytest.mark.slow
def test_of_the_course_exactly_those_are_stale_that_use_a_function(tmp_path):
    shutil.copytree(batch.ROOT / "labkit", tmp_path / "labkit", ignore=shutil.ignore_patterns("__pycache__"))
    before = fingerprints(tmp_path)
    expected = {}
    for file, (old, user) in USED_BY.items():
        edit(tmp_path, file, old, f"{old}*, more=0, ")
        expected.setdefault(user, []).append(f"labkit/{file}")
    after = fingerprints(tmp_path)
    changed = {name[:2]: fingerprint.changed(before[name], after[name]) for name in after}
    assert {name: files for name, files in changed.items() if files} == {
        name: sorted(files) for name, files in expected.items()
    }


def fingerprints(root):
    there = stored.Stored(root)
    return {path.stem: there.of_notebook(path) for path in batch.course()}


EXPERIMENTS = {
    "fsdp": {"strategy": "fsdp", "recompute": "every"},
    "zero1": {"strategy": "zero1", "precision": "bf16"},
    "topk": {"comm_hook": "topk", "accumulation": 2},
    "diloco": {"strategy": "diloco", "every": 2},
}


def watched(context, experiments):
    import sys

    from labkit.run.compare import take_turns

    entered = set()

    def note(frame, event, _):
        if event == "call" and "/labkit/" in frame.f_code.co_filename and frame.f_code.co_name != "<module>":
            entered.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    sys.setprofile(note)
    try:
        take_turns(context, experiments, rounds=1, steps_per_round=2)
    finally:
        sys.setprofile(None)
    if context.rank == 0:
        context.record(entered=sorted(entered))


@pytest.mark.slow
def test_whatever_a_sweep_runs_is_in_its_fingerprint():
    """The oracle: functions that a rank has entered, in its own process, are among those that were read to be used."""
    small = {name: {"model": "gpt", "batch_size": 8} | fields for name, fields in EXPERIMENTS.items()}
    run = launch(watched, nproc=2, device="cpu", quiet=True, experiments=small)
    entered = next(rows for rows in run.records["entered"] if isinstance(rows, list))
    code = fingerprint.Code()
    reached, _ = code.reach(fingerprint.ast.parse(sweep.MEASURED))
    lines = {str(code.paths[name]): {spread(one) for one in of} for name, of in reached.items()}
    assert len(entered) > 300
    assert [
        (Path(file).name, line)
        for file, line in entered
        if not any(first <= line <= last for first, last in lines.get(file, ()))
    ] == []


def spread(statement):
    above = [one.lineno for one in getattr(statement, "decorator_list", [])]
    return min([statement.lineno, *above]), statement.end_lineno


# The sweep that ships with the dashboard

STRATEGIES = ("amp", "compression", "ddp", "fsdp", "recompute", "zero")
FILES = ("comm", "gloo_workarounds", "hierarchical", "local_sgd", "mesh")
EVERY = [*(f"labkit/{name}/" for name in STRATEGIES), *(f"labkit/{name}.py" for name in FILES)]
AXES = {"tensor": "tensor_parallel", "pipeline": "pipeline", "context": "attention", "experts": "moe"}


def test_the_shipped_sweep_measured_todays_messages_and_strategies():
    there = stored.Stored()
    today = there.of_sweep()
    assert all(any(name.startswith(one) for name in today) for one in EVERY)
    rows = sweep.read(there.sweep)
    used = [f"labkit/{folder}/" for axis, folder in AXES.items() if (rows[axis] != sweep.USUAL[axis]).any()]
    for path in there.sweep.glob("*.csv"):
        recorded = sweep.code_of(path)
        changed = [name for name in fingerprint.changed(recorded, today) if name in recorded]
        newer = [name for name in changed if name.startswith((*EVERY, *used))]
        assert not newer, f"{path.name} is older than {', '.join(newer)}: run {stored.COMMAND}"
    assert (rows["commit"].str.len() >= 12).all()


def test_a_sweep_that_lacks_cells_of_its_grids_is_stale(small):
    (small / "notebooks" / "dashboard.yaml").write_text("- {model: [mlp], strategy: [ddp_bucketed, zero1]}\n")
    (small / "notebooks" / "dashboard").mkdir()
    (record,) = stored.Stored(small).stale()
    assert (record.job, record.changed) == ("sweep", ["dashboard_more.yaml (2 cells not measured)"])

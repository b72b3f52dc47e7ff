"""%%torchrun in a real IPython shell, and what the person sees while ranks run."""

import json

import pytest
from IPython.core.error import UsageError
from IPython.testing.globalipapp import start_ipython

from labkit.run import console
from labkit.run.launch import LaunchError


@pytest.fixture(scope="session")  # IPython starts one in a process
def shell():
    shell = start_ipython()
    shell.run_line_magic("load_ext", "labkit")
    return shell


def test_the_cell_sees_its_rank_and_the_notebook_gets_the_run(shell):
    source = "total = torch.tensor([float(rank)], device=device)\ncomm.all_reduce(total)\nrecord(total=total.item())"
    shell.run_cell_magic("torchrun", "--nproc 3 --into result --quiet", source)
    assert shell.user_ns["result"].records["total"].tolist() == [3.0, 3.0, 3.0]


@pytest.mark.slow
def test_a_cell_that_fails_is_started_again_and_knows_it(shell):
    source = "record(x=attempt)\nif attempt < 2: raise ValueError('no')"
    shell.run_cell_magic("torchrun", "--nproc 1 --restarts 2 --into result --quiet", source)
    assert shell.user_ns["result"].records["x"].tolist() == [0, 1, 2]


def test_variables_of_the_notebook_can_be_options(shell):
    shell.user_ns["ranks_wanted"] = 2
    shell.run_cell("%%torchrun --nproc $ranks_wanted --into result --quiet\nrecord(x=world_size)").raise_error()
    assert shell.user_ns["result"].records["x"].tolist() == [2, 2]


@pytest.mark.parametrize(("line", "error"), [("--nproc two", UsageError), ("--into 2x", UsageError)])
def test_a_wrong_option_is_a_usage_error(shell, line, error):
    with pytest.raises(error):
        shell.run_cell_magic("torchrun", line, "pass")


def test_a_failing_cell_raises_and_shows_the_rank_not_the_notebooks_traceback(shell):
    with pytest.raises(LaunchError) as caught:
        shell.run_cell_magic("torchrun", "--quiet", "raise ValueError('no')")
    (text,) = caught.value._render_traceback_()
    assert text.startswith("LaunchError: rank ") and "ValueError: no" in text and "launch.py" not in text


class Screen:
    """What a notebook would show of one output that is redrawn in place."""

    def __init__(self, monkeypatch):
        self.texts = []
        monkeypatch.setattr(console, "in_notebook", lambda: True)
        monkeypatch.setattr("IPython.display.display", self.display)

    def display(self, content, **options):
        self.update(content)
        return self

    def update(self, content, **options):
        self.texts.append(content["text/plain"])


def test_the_bar_appears_after_two_seconds_with_an_estimate_and_goes_at_the_end(monkeypatch):
    screen = Screen(monkeypatch)
    clock = iter([0.0, 1.0, 3.0, 4.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    bar = console.Bar(quiet=False)
    bar.update(1, 10)  # after 1 s: nothing yet
    bar.update(3, 10)
    bar.update(4, 10)
    bar.close()
    assert len(screen.texts) == 3
    assert "3/10" in screen.texts[0] and "00:07" in screen.texts[0]  # 3 s for 3 steps: 7 s are left
    assert screen.texts[-1] == ""


def test_a_line_that_is_still_being_written_waits_for_its_end(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    tail = console.Tail(path)
    assert list(tail.lines()) == []
    path.write_text('{"a": 1}\n{"b"')
    assert [json.loads(line) for line in tail.lines()] == [{"a": 1}]
    path.write_text('{"a": 1}\n{"b": 2}\n')
    assert [json.loads(line) for line in tail.lines()] == [{"b": 2}]

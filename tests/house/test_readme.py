"""README's pictures and its table of the course are those that `lab figures` recorded; nobody has typed a number in."""

import hashlib
import json
import re
import warnings

import batch
import pytest
import stored

import figures

README = (batch.ROOT / "README.md").read_text()
SHOWN = re.findall(r"(?:\(|src=\")figures/(\w+)\.svg", README)
PICTURES = sorted({*SHOWN, *(path.stem for path in figures.FIGURES.glob("*.svg"))})


def test_the_table_is_the_recorded_one():
    course = json.loads(figures.COURSE.read_text())
    written = README.split(figures.MARKS[0])[1].split(figures.MARKS[1])[0]
    assert written == figures.course_table(course)
    assert set(course) == {path.stem for path in batch.course()}
    shown = README.split(figures.LARGE_MARKS[0])[1].split(figures.LARGE_MARKS[1])[0]
    assert shown == figures.gallery(course)
    assert len({facts["host"] for facts in course.values()}) == 1  # of one machine, or times do not compare


def test_the_table_of_labkit_is_what_the_files_say():
    """After a change of a first line: ./scripts/lab figures --stale writes it anew, and runs nothing for it."""
    assert README.split(figures.TREE_MARKS[0])[1].split(figures.TREE_MARKS[1])[0] == figures.tree()


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_the_one_that_was_drawn_from_its_record(name):
    record = json.loads((figures.FIGURES / f"{name}.json").read_text())
    assert record["sha256"] == hashlib.sha256((figures.FIGURES / f"{name}.svg").read_bytes()).hexdigest()
    assert record["data"]
    assert {"machine", "commit", "parameters", "provenance", "alt"} <= set(record)


def test_every_recorded_picture_is_saved_by_a_notebook():
    assert set(PICTURES) == {name for path in batch.course() for name in stored.saved_figures(batch.read(path))}


@pytest.mark.slow
def test_no_stored_record_is_older_than_the_code_that_it_measures():
    there = stored.Stored()
    for words in there.about_gpu():
        warnings.warn(words, stacklevel=1)
    old = there.stale()
    assert not old, f"\n{figures.report(old)}"


def test_the_first_notebook_names_all_that_come_after_it():
    first, *others = batch.course()
    last = batch.read(first).cells[-1].source
    assert [path.stem for path in others if f"({path.name})" not in last] == []

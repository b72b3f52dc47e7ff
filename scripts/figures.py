"""`lab figures [NAME...]`: run the course and redraw figures/ and README's table from what was measured here.

A notebook saves its pictures through labkit.show.plots.save, which writes NAME.svg and NAME.json (the data, host,
versions, commit and parameters) into the folder that LABKIT_FIGURES names. Here that is figures/ itself. The seconds of
each notebook are kept in figures/course.json, from which README's table of the course is written.
"""

import argparse
import html
import json
import re
import sys

import batch
from batch import ROOT
from terminal import UserError, main, say, table

from labkit.measure import machine

FIGURES = ROOT / "figures"
README = ROOT / "README.md"
COURSE = FIGURES / "course.json"
MARKS = ("<!-- the course, written by ./scripts/lab figures -->\n", "<!-- end of the course -->")


def question(notebook):
    """What the notebook asks: the first bold question of its opening, else its title."""
    opening = notebook.cells[0].source
    bold = re.search(r"\*\*([^*]+\?)\*\*", opening.replace("\n", " "))
    title = re.sub(r"^#\s*(\d+\s*·\s*)?", "", opening.splitlines()[0])
    return bold.group(1) if bold else title


def saved_figures(notebook):
    """Names given to plots.save in the notebook's code."""
    return re.findall(r"plots\.save\(\w+, \"(\w+)\"", "\n".join(cell.source for cell in batch.code_cells(notebook)))


def picture(figure):
    """A saved figure in README's table, with the words that were saved beside it."""
    words = html.escape(json.loads((FIGURES / f"{figure}.json").read_text())["alt"])
    return f'<img src="figures/{figure}.svg" alt="{words}" width="220">'


def course_table(course):
    """README's table: notebook, question, time, picture. course: name -> what course.json keeps of it."""
    lines = ["| notebook | question | time | picture |", "| :-- | :-- | --: | :-- |"]
    for name, facts in sorted(course.items()):
        pictures = [picture(figure) for figure in facts["figures"][:1]]
        link = f"[{name}](notebooks/{name}.ipynb)"
        lines.append(f"| {link} | {facts['question']} | {facts['seconds']:.0f} s | {''.join(pictures)} |")
    hosts = sorted({facts["host"] for facts in course.values()})
    return "\n".join(
        [*lines, "", f"Times of a whole run with the default parameters, measured on {'; '.join(hosts)}.", ""]
    )


def write_course(measured):
    """Add what was measured to figures/course.json, forget notebooks that are gone, and write README's table."""
    kept = json.loads(COURSE.read_text()) if COURSE.exists() else {}
    names = {path.stem for path in batch.course()}
    course = {name: facts for name, facts in sorted({**kept, **measured}.items()) if name in names}
    FIGURES.mkdir(exist_ok=True)
    COURSE.write_text(json.dumps(course, indent=1) + "\n")
    before, rest = README.read_text().split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    README.write_text(before + MARKS[0] + course_table(course) + MARKS[1] + after)


def figures(arguments):
    parser = argparse.ArgumentParser(prog="lab figures", description=__doc__)
    parser.add_argument("names", nargs="*", help="notebooks (all)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds that one notebook may take (900)")
    options = parser.parse_args(arguments)
    paths = [batch.find(name) for name in options.names] or batch.course()
    if not paths:
        raise UserError("there is no notebook in notebooks/")
    folder = batch.new_folder("figures")
    rows, measured = [], {}
    for path in paths:
        outcome = batch.execute(path, folder / path.stem, {}, timeout=options.timeout, figures=FIGURES)
        if outcome.interrupted:
            raise KeyboardInterrupt
        notebook = batch.read(path)
        saved = saved_figures(notebook)
        rows.append((path.stem, f"{outcome.seconds:.1f}", outcome.error or ", ".join(saved) or "saves no figure"))
        if not outcome.error:
            facts = {"question": question(notebook), "seconds": round(outcome.seconds, 1), "figures": saved}
            measured[path.stem] = {**facts, "host": machine.host_class()}
    write_course(measured)
    say(table(rows, header=("notebook", "seconds", "figures written")))
    return 1 if len(measured) < len(paths) else 0


if __name__ == "__main__":
    sys.exit(main(figures, sys.argv[1:]))

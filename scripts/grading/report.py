"""grades.html and grades.csv: a table of submissions x exercises, and what each answer was and said."""

import csv
import html
import io
import re
from itertools import groupby

COLUMNS = ("file", "notebook", "exercise", "points", "message", "line", "seconds")
# A spreadsheet would compute a cell that begins with one of these.
FORMULA = ("=", "+", "-", "@", "\t", "\r")
FIRST = "first mistake"  # a column of wide screens
LONGEST = 110  # characters of that column
STYLE = """
:root { color-scheme: light dark; font: 100%/1.5 system-ui, sans-serif; --right: #0072b2; --partly: #d55e00; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { border-bottom: 1px solid #8886; padding: .3rem .75rem .3rem 0; text-align: left; vertical-align: top; }
thead th { font-weight: 600; overflow-wrap: normal; }
tbody th { font-weight: normal; min-width: 7rem; }
td { white-space: nowrap; font-variant-numeric: tabular-nums; }
td.words { white-space: normal; }
.grade { display: inline-block; min-width: 4.2rem; padding: 0 .4rem; border: .12rem solid; border-radius: .3rem; }
a.grade { text-decoration: none; }
.right { color: #fff; background: var(--right); border-color: var(--right); }
.partly { color: inherit; border-color: var(--partly); }
.none { color: inherit; border-color: #8888; border-style: dashed; }
article { border: 1px solid #8886; border-radius: .5rem; margin: .75rem 0; padding: .6rem .8rem; }
article:target { outline: .15rem solid var(--right); }
article p { margin: .3rem 0; }
.head { align-items: baseline; display: flex; flex-wrap: wrap; gap: .25rem .75rem; justify-content: space-between; }
small { font-size: .85rem; font-weight: normal; opacity: .85; }
code, pre { font: .85rem/1.45 ui-monospace, monospace; }
pre { background: #8882; border-radius: .3rem; overflow-x: auto; padding: .6rem; white-space: pre; }
summary { cursor: pointer; }
@media (prefers-color-scheme: dark) { :root { --right: #1f77b4; --partly: #e69f00; } }
@media (max-width: 900px) { .first { display: none; } }
@media (max-width: 600px) { th, td { padding-right: .4rem; } body { padding: .75rem; } tbody th { min-width: 5rem; } }
"""
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<p>{about}</p>
<p>Points are the share of the checker's cases that passed, the mean over the numbers of ranks.
<span class="grade right">&#10003; 100%</span> all cases passed,
<span class="grade partly">&#9680; 60%</span> some, <span class="grade none">&#10007; 0%</span> none.
Look at the source of an answer before you trust its points: an answer can fake its own.
The same as a table: <a href="grades.csv">grades.csv</a>.</p>
{sections}
</body>
</html>
"""


def as_csv(rows):
    """Return the text of grades.csv: a line for each Row."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        points = "" if row.points is None else f"{row.points:.3f}"
        words = (row.file, row.notebook, row.exercise, points, row.message, row.line)
        writer.writerow([*map(harmless, words), f"{row.seconds:.1f}"])
    return file.getvalue()


def harmless(text):
    """Return the text of a CSV cell that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(FORMULA) else text


def page(title, about, rows):
    """Return the page. rows: Rows in any order; about: lines of text about this grading."""
    unread = [row for row in rows if row.points is None]
    graded = sorted((row for row in rows if row.points is not None), key=lambda row: (row.notebook, row.file))
    parts = [not_read(unread)] if unread else []
    for notebook, group in groupby(graded, key=lambda row: row.notebook):
        parts.append(section(notebook, list(group)))
    lines = "<br>".join(map(html.escape, about))
    return PAGE.format(title=html.escape(title), style=STYLE, about=lines, sections="\n".join(parts))


def not_read(rows):
    lines = [
        f"<tr><th>{html.escape(row.file)}</th><td class=words>{html.escape(row.message)}</td></tr>" for row in rows
    ]
    return f"<h2>Not graded</h2>\n{as_table(['file', 'reason'], lines)}"


def section(notebook, rows):
    """Return the table and the answers of a notebook. rows: sorted by file."""
    files = {file: list(group) for file, group in groupby(rows, key=lambda row: row.file)}
    names = [row.exercise for row in next(iter(files.values()))]
    places = {(row.file, row.exercise): f"{notebook}-{number}" for number, row in enumerate(rows, start=1)}
    lines, answers = [], []
    for file, mine in files.items():
        mean = sum(row.points for row in mine) / len(mine)
        cells = "".join(f"<td>{grade(row.points, places[row.file, row.exercise])}</td>" for row in mine)
        first = next((row.message for row in mine if row.message), "")
        words = f'<td class="words first">{html.escape(shortened(first))}</td>'
        lines.append(f"<tr><th>{breakable(file)}</th>{cells}<td>{percent(mean)}</td>{words}</tr>")
        answers += [article(row, places[row.file, row.exercise]) for row in mine]
    table = as_table(["file", *names, "mean", FIRST], lines)
    return "\n".join([f"<h2>{html.escape(notebook)}</h2>", table, frequent(rows, names), *answers])


def breakable(name):
    """Return a name as HTML that may break after each of its parts."""
    return re.sub(r"(?<=[/_.-])", "<wbr>", html.escape(name))


def shortened(text):
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def as_table(header, lines):
    kind = {FIRST: ' class="first"'}
    head = "".join(f"<th{kind.get(word, '')}>{breakable(word)}</th>" for word in header)
    body = "\n".join(lines)
    return (
        f'<div class="scroll" tabindex="0"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
    )


def frequent(rows, names):
    """Return how many answers of each exercise are right."""
    words = []
    for name in names:
        mine = [row for row in rows if row.exercise == name]
        words.append(f"{html.escape(name)}: {sum(row.points == 1 for row in mine)} of {len(mine)} right")
    return f"<p>{'; '.join(words)}.</p>"


def grade(points, place=None):
    kind, sign = ("right", "&#10003;") if points == 1 else ("partly", "&#9680;") if points > 0 else ("none", "&#10007;")
    text = f"{sign} {percent(points)}"
    link = f'a href="#{html.escape(place)}"' if place else "span"
    return f'<{link} class="grade {kind}">{text}</{link.split()[0]}>'


def percent(points):
    """Return 99.9% as 99%: 100% is for right answers only."""
    return f"{int(100 * points)}%"


def article(row, place):
    """Return what is known of one answer: its grade, message, failed cases of each run, and source."""
    head = f"<h3>{html.escape(row.exercise)} <small>{breakable(row.file)}</small></h3>{grade(row.points)}"
    parts = [f'<article id="{html.escape(place)}"><div class="head">{head}</div>']
    if row.message:
        parts.append(f"<p>{html.escape(row.message)}</p>")
    if row.line:
        parts.append(f"<p><code>{html.escape(row.line)}</code></p>")
    ran = [words_of(ranks, run) for ranks, run in sorted(row.runs.items()) if "by_rank" in run or "ended" in run]
    parts.append(f"<p><small>{'; '.join(ran) or 'not run'}</small></p>")
    others = [why for run in row.runs.values() for why in run["failed"] if why != row.message]
    if others:
        lines = "".join(f"<li>{html.escape(why)}</li>" for why in dict.fromkeys(others))
        parts.append(f"<details><summary>other failed cases</summary><ul>{lines}</ul></details>")
    if row.answer:
        parts.append(f"<details><summary>answer</summary><pre>{html.escape(row.answer)}</pre></details>")
    return "\n".join([*parts, "</article>"])


def words_of(ranks, run):
    where = f"{ranks} rank{'s' if ranks > 1 else ''}"
    if run["finished"]:
        return f"{where}: {run['passed']} of {run['tried']} cases"
    if not run["tried"]:
        return f"{where}: did not finish"
    return f"{where}: stopped after {run['tried']} cases of rank {run['rank']}, {run['passed']} passed"

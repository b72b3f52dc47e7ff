"""index.html of a batch: a card per job, with its main picture, its parameters and links to its pages."""

import html
from urllib.parse import quote

STYLE = """
:root { color-scheme: light dark; font: 100%/1.5 system-ui, sans-serif; }
body { margin: 0 auto; max-width: 90rem; padding: 1rem; }
main { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); }
article { border: 1px solid GrayText; border-radius: .5rem; overflow-wrap: anywhere; padding: 0 1rem 1rem; }
img { background: #fff; border-radius: .25rem; max-width: 100%; }
h2 { font-size: 1.1rem; }
h2 small { display: block; font-weight: normal; }
.failed { border-left: .3rem solid #d55e00; padding-left: .6rem; }
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
<p>{about} The same as a table: <a href="summary.csv">summary.csv</a>.</p>
<main>
{cards}
</main>
</body>
</html>
"""


def page(jobs, records):
    """Return the page of the jobs. records: {job name: record}; a job without one has not run."""
    ok = sum(job.name in records and not records[job.name]["error"] for job in jobs)
    return PAGE.format(
        title=f"{ok} of {len(jobs)} jobs ok",
        style=STYLE,
        about=html.escape(beside(records) or "One job at a time."),
        cards="\n".join(card(job, records.get(job.name)) for job in jobs),
    )


def beside(records):
    """Return a note about the times of parallel jobs; "" if there were none."""
    most = max((record.get("at_once", 1) for record in records.values()), default=1)
    return f"Up to {most} jobs ran in parallel, which makes their times longer." if most > 1 else ""


def card(job, record):
    stem = job.path.stem
    folder = quote(job.name)
    values = ", ".join(f"{name} = {value!r}" for name, value in job.values.items()) or "default parameters"
    title = f"{html.escape(stem)} <small>{html.escape(values)}</small>"
    if record is None:
        return article(title, "<p>not run</p>")
    result = f"ok, {record['seconds']:.1f} s"
    if record["error"]:
        result = f"failed after {record['seconds']:.1f} s: {record['error']}"
    parts = [f"<p{' class=failed' * bool(record['error'])}>{html.escape(result)}</p>"]
    if "picture" not in record:  # its process left no pages
        return article(title, *parts)
    page = f"{folder}/{quote(stem)}.html"
    if record["picture"]:
        alt = html.escape(record["alt"], quote=True)
        parts.append(f'<p><a href="{page}"><img src="{folder}/{quote(record["picture"])}" alt="{alt}"></a></p>')
    parts.append(f'<p><a href="{folder}/{quote(stem)}.ipynb">executed notebook</a></p>')
    return article(f'<a href="{page}">{title}</a>', *parts)


def article(title, *parts):
    return "\n".join([f"<article>\n<h2>{title}</h2>", *parts, "</article>"])

"""`lab site`: build the course as a static web site, from the notebooks' stored outputs; no notebook is run.

Sphinx converts a folder that scripts/website/sources.py writes, with the settings of scripts/website/conf.py. The site
is built in a temporary folder and moved to its place when it is complete.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from terminal import Line, UserError, main, say
from website import sources

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = Path(__file__).resolve().parent / "website"
MARK = "objects.inv"  # in every Sphinx site: a folder with it may be replaced
JOBS = 2
# Where each long phase of Sphinx begins and ends, as parts of the total; labkit is imported before.
PHASES = {"reading sources": (0.25, 0.55), "writing output": (0.55, 0.8), "highlighting module code": (0.8, 1.0)}


def build(out, line=None):
    """Build the site into the folder `out`; return Sphinx's warnings. UserError if it cannot be written."""
    place = check(out)
    try:
        sources.write(place / "source")
        lines = run_sphinx(place, line or Line("site"))
        if out.exists():
            out.rename(place / "before")
        (place / "html").rename(out)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return lines


def check(out):
    """Make a new folder next to `out`, from which the site can be moved; UserError if that is impossible."""
    for path in (out, *out.parents):
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file, not a folder for the site")
    if out.is_dir() and any(out.iterdir()) and not (out / MARK).exists():
        raise UserError(f"{out} has other files, and a site replaces only an older site: use another folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}") from None


def run_sphinx(place, line):
    warnings = place / "warnings"
    command = [sys.executable, "-m", "sphinx", "--builder", "html", "--jobs", str(JOBS), "--no-color"]
    command += ["--conf-dir", SETTINGS, "--doctree-dir", place / "doctrees", "--warning-file", warnings]
    child = subprocess.Popen(
        [*command, place / "source", place / "html"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SETTINGS.parent)])},
    )
    try:
        for text in child.stdout:
            if words := progress(text, line.seconds):
                line.show(words)
    finally:
        if child.poll() is None:
            child.terminate()
        child.wait()
        line.clear()
    lines = [text.replace(f"{place}/", "") for text in warnings.read_text().splitlines() if text.strip()]
    if child.returncode:
        raise UserError(f"Sphinx ended with {child.returncode}: {lines[-1] if lines else 'no message'}")
    return lines


def progress(text, seconds):
    """Convert Sphinx's "writing output... [ 34%] page" to a progress bar; None for other lines."""
    found = re.match(r"([\w ]+)\.\.\. *\[ *(\d+)%\]", text)
    if not found or found[1] not in PHASES:
        return None
    begin, end = PHASES[found[1]]
    done = begin + (end - begin) * int(found[2]) / 100
    return f"|{'#' * int(20 * done):20}| {found[1]}, about {seconds * (1 - done) / done:.0f} s left"


def site(arguments):
    parser = argparse.ArgumentParser(prog="lab site", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "site", help="the site's folder (runs/site)")
    out = parser.parse_args(arguments).out.absolute()
    line = Line("site")
    line.show("|                    | starting")
    warnings = build(out, line)
    for warning in warnings:
        say(warning)
    pages = sum(1 for _ in out.rglob("*.html"))
    line.close(f"{pages} pages: open {out / 'index.html'}")
    return 1 if warnings else 0


if __name__ == "__main__":
    sys.exit(main(site, sys.argv[1:]))

"""Small notebooks and the commands of a copied scripts/, for `lab run`, `lab test` and their pages."""

import subprocess
import sys
from html.parser import HTMLParser

import nbformat

FIGURE = "import matplotlib.pyplot as plt\nplt.plot([world_size, 2])\nplt.show()"
RANKS = """
from labkit.run import launch
def hang(context):
    import os, pathlib, time
    pathlib.Path(f"{os.environ['PIDS']}/{os.getpid()}").touch()
    time.sleep(600)  # longer than any test waits for its end
launch(hang, nproc=world_size)
"""


def notebook(path, *sources):
    """A notebook whose first code cell is tagged parameters."""
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in sources]
    if cells:
        cells[0].metadata.tags = ["parameters"]
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# a title"), *cells]), path)
    return path


def command(tree, name, *arguments):
    """The command line of a script of the tree."""
    return [sys.executable, str(tree / "scripts" / f"{name}.py"), *arguments]


def finished(tree, name, *arguments):
    """A script of the tree, run to its end."""
    return subprocess.run(command(tree, name, *arguments), capture_output=True, text=True, timeout=280)


class Page(HTMLParser):
    """What a page links and shows."""

    def __init__(self, text):
        super().__init__()
        self.links, self.sources, self.alts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        about = dict(attributes)
        if tag == "a":
            self.links.append(about["href"])
        if tag == "img":
            self.sources.append(about["src"])
            self.alts.append(about["alt"])

"""The page of an executed notebook: all in one file, code that is no idea folded, formulas drawn, light and dark."""

import re
from html.parser import HTMLParser

import nbformat
import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from repository import ROOT

WIDGET = "application/vnd.jupyter.widget-view+json"
COURSE = sorted((ROOT / "notebooks").glob("*.ipynb"))


def as_page(notebook):
    import page

    return page.as_page(notebook)


@pytest.fixture(scope="module")
def page():
    shown = new_output("display_data", {"text/markdown": "````python\nx = 1\n````", "text/plain": "x = 1"})
    widget = new_output("display_data", {WIDGET: {"model_id": "1"}, "text/plain": "VBox(children=())"})
    cells = [
        new_markdown_cell("A rank sends $\\frac{n-1}{n}P$; `$HOME` and `$PATH` are no formula.\n\n$$a = b$$"),
        new_code_cell("idea = 1", outputs=[shown], execution_count=1),
        new_code_cell("plumbing = 2", metadata={"jupyter": {"source_hidden": True}}, execution_count=2),
        new_code_cell("show(controls)", outputs=[widget], execution_count=3),
        new_code_cell("%%torchrun --nproc 2\nfrom labkit import comm", execution_count=4),
    ]
    kernel = {"name": "python", "pygments_lexer": "ipython3"}  # what an executed notebook says of itself
    return as_page(new_notebook(cells=cells, metadata={"language_info": kernel}))


def test_formulas_are_drawn_without_a_network(page):
    assert "<mfrac>" in page and page.count("</math>") == 2 and 'display="block"' in page
    assert "$HOME" in page and "@formula" not in page
    assert "<script src" not in page and "mathjax" not in page.lower()


def test_plumbing_is_folded_and_the_idea_is_not(page):
    folded = page[page.index('<details class="folded">') : page.index("</details>")]
    assert "plumbing" in folded and page.count("<details") == 1


def test_the_code_of_ranks_has_colours_too(page):
    assert re.search(r"<span[^>]*>from</span>", page[page.index("torchrun") :])


def test_a_widget_says_where_it_lives(page):
    assert "VBox" not in page and "Controls: open the notebook in JupyterLab" in page


def test_it_is_dark_where_the_system_is(page):
    assert '<style media="(prefers-color-scheme: dark)">' in page


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.stem)
def test_every_formula_of_the_course_can_be_drawn(path):
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "markdown"]  # code has none
    page = as_page(notebook)
    assert not any(word in page for word in ("\\frac", "\\leftarrow", "\\cdot", "\\text{"))


HOSTILE = "2<img src=x onerror=alert(1)> | [a](javascript:alert(1)) *b* `c` $d$ <script>e()</script>"


def test_words_of_a_stranger_are_shown_as_text():
    """A sweep's CSV names its versions and machine; they end in captions and cells."""
    from labkit.show import notebook

    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notebook, "display", lambda data, raw: shown.append(data))
        notebook.table(pd.DataFrame({"strategy": [HOSTILE]}), f"measured {HOSTILE}")
    outputs = [new_output("display_data", data) for data in shown]
    # One that did not go through table(), and kinds that a page has no use for.
    outputs.append(new_output("display_data", {"text/html": HOSTILE, "text/plain": ""}))
    outputs.append(new_output("display_data", {"text/markdown": HOSTILE, "text/plain": ""}))
    outputs.append(new_output("display_data", {"application/javascript": "alert(1)", "text/plain": ""}))
    outputs.append(new_output("display_data", {"image/svg+xml": "<svg onload='alert(1)'/>", "text/plain": ""}))
    page = as_page(new_notebook(cells=[new_code_cell("show()", outputs=outputs, execution_count=1)]))
    read = Elements(page)
    assert not [tag for tag, attributes in read.elements if any(name.startswith("on") for name in attributes)]
    assert not [tag for tag, attributes in read.elements if tag == "script"]
    assert not [tag for tag, attributes in read.elements if "javascript" in (attributes.get("href") or "")]
    pictures = [attributes["src"] for tag, attributes in read.elements if tag == "img"]
    assert all(source.startswith("data:image/svg+xml;base64,") for source in pictures)
    plain = " ".join("".join(read.text).split())
    assert plain.count(HOSTILE) == 3, "a cell, a caption and HTML show every character"


def test_a_printed_marker_is_printed():
    printed = new_output("stream", name="stdout", text="@formula7@ formula-7.\n")
    page = as_page(
        new_notebook(cells=[new_markdown_cell("$x$"), new_code_cell("print()", outputs=[printed], execution_count=1)])
    )
    assert "@formula7@ formula-7." in page and page.count("</math>") == 1


class Elements(HTMLParser):
    """The elements of a page, (tag, attributes), and its text."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.text = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)

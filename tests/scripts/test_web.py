"""The site, built once: every link leads somewhere, nothing comes from elsewhere, phones and the dark are fine."""

import base64
import contextlib
import functools
import http.server
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import links
import pytest
from browser import browser
from repository import ROOT

WEB = ROOT / "scripts" / "web.py"
COURSE = sorted(path for path in (ROOT / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
pytestmark = pytest.mark.timeout(900)  # also with other tests on a busy machine


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(the site's folder, what Sphinx warned of)."""
    import web

    out = tmp_path_factory.mktemp("web") / "site"
    return out, web.build(out)


@pytest.fixture(scope="module")
def folder(built):
    return built[0].resolve()


@pytest.fixture(scope="module")
def read(folder):
    return links.pages(folder)


def page_of(notebook):
    return notebook.relative_to(ROOT).with_suffix(".html")


@pytest.mark.slow
def test_sphinx_has_nothing_to_warn_of(built):
    assert built[1] == []


@pytest.mark.slow
def test_every_link_leads_somewhere(folder, read):
    assert links.broken(folder, read) == []
    assert links.misshapen(read) == []


@pytest.mark.slow
def test_nothing_is_fetched_from_elsewhere(folder, read):
    assert links.foreign_loads(folder, read) == []
    assert not any("mathjax" in load.lower() for page in read.values() for load in page.loads)


@pytest.mark.slow
def test_every_notebook_can_be_reached_from_every_page(folder, read):
    for path, page in read.items():
        reached = {links.led_to(path, link) for link in page.links} | {path}
        assert {folder / page_of(notebook) for notebook in COURSE} <= reached, path


@pytest.mark.slow
def test_every_module_has_a_page(folder):
    from website.sources import modules

    assert len(modules()) > 100
    for name in modules():
        assert (folder / "api" / f"{name}.html").is_file()


@pytest.mark.slow
def test_every_page_has_one_heading_and_every_picture_words(read):
    assert {path: page.h1 for path, page in read.items() if page.h1 != 1} == {}
    assert [(path, src) for path, page in read.items() for src, alt in page.images if not alt.strip()] == []


@pytest.mark.slow
def test_formulas_are_drawn_without_a_network(folder):
    text = (folder / "notebooks" / "12_zero.html").read_text()
    assert "</math>" in text and "\\frac" not in text


@pytest.mark.slow
def test_plumbing_is_folded_and_controls_say_where_they_live(folder):
    text = (folder / "notebooks" / "13_fsdp.html").read_text()
    assert "<details" in text and "code, folded" in text
    assert "Controls: run this notebook in JupyterLab." in text and "widget-view" not in text


@pytest.mark.slow
def test_the_search_knows_all_reduce(folder):
    index = json.loads((folder / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    found = index["terms"]["reduc"]
    assert "notebooks/01_collectives" in {index["docnames"][place] for place in found}


# A picture in the browser


@pytest.fixture(scope="module")
def address(folder):
    """The site over HTTP, on a loopback port."""
    handler = functools.partial(QuietHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words):
        pass


@contextlib.contextmanager
def opened(address, **settings):
    """A page in a browser; what it asks for elsewhere is an error."""
    with browser() as chromium:
        page = chromium.browser.new_page(**settings)
        asked = []
        page.on("request", lambda request: request.url.startswith(address) or asked.append(request.url))
        yield page
    assert asked == []


SHOWN = ["index.html", "notebooks/01_collectives.html", "notebooks/13_fsdp.html", "notebooks/21_compression.html"]
SHOWN += ["notebooks/00_start_here.html", "api/labkit.html", "api/labkit.fsdp.html", "search.html"]
# The column of text, which may scroll by itself: wide code, tables and formulas are to scroll inside it.
OVER = """() => Math.max(...[document.documentElement, document.querySelector(".content")]
  .map(element => element.scrollWidth - element.clientWidth))"""
GROUND = "() => getComputedStyle(document.body).backgroundColor"


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_without_javascript(address, scheme):
    phone = {"viewport": {"width": 390, "height": 844}, "java_script_enabled": False, "color_scheme": scheme}
    with opened(address, **phone) as page:
        for name in SHOWN:
            page.goto(f"{address}/{name}")
            assert page.evaluate(OVER) <= 0, name
            channels = [int(number) for number in page.evaluate(GROUND).strip("rgba()").split(",")[:3]]
            assert max(channels) < 60 if scheme == "dark" else min(channels) > 240, name


@pytest.mark.slow
@pytest.mark.browser
def test_the_search_finds_pages(address):
    with opened(address) as page:
        page.goto(f"{address}/index.html")
        page.get_by_role("textbox", name="Search").first.fill("all-reduce")
        page.keyboard.press("Enter")
        page.locator("#search-results a", has_text="Collectives").first.click()
        page.wait_for_url("**/01_collectives.html*")


# What can go wrong


def run(*arguments, **settings):
    return subprocess.run([sys.executable, WEB, *arguments], capture_output=True, text=True, timeout=280, **settings)


def assert_one_line(finished, *words):
    assert finished.returncode == 2
    line = finished.stderr.strip().splitlines()
    assert len(line) == 1 and line[0].startswith("lab: ")
    assert all(word in line[0] for word in words), line[0]


@pytest.mark.slow
def test_a_place_that_cannot_take_a_site(tmp_path):
    (tmp_path / "file").write_text("mine")
    assert_one_line(run("--out", str(tmp_path / "file")), "is a file")
    assert_one_line(run("--out", str(tmp_path / "file" / "site")), "is a file")
    assert_one_line(run("--out", "/proc/site"), "cannot write")
    assert_one_line(run("--out", str(tmp_path)), "has other files")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_an_interrupted_build_leaves_the_old_site(tmp_path):
    out = tmp_path / "site"
    out.mkdir()
    (out / "objects.inv").write_text("an older site")
    child = subprocess.Popen([sys.executable, WEB, "--out", out], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob(".site-*/html")) and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    told = child.communicate(timeout=200)[1].decode()
    assert child.returncode == 130 and told.strip() == "lab: interrupted"
    assert [path.name for path in tmp_path.iterdir()] == ["site"]
    assert [path.name for path in out.iterdir()] == ["objects.inv"]


def test_a_broken_link_is_found(tmp_path):
    there = '<h1 id="here">a</h1><a href="b.html#is">b</a><a href="#here">up</a><a href="https://a.org/x">out</a>'
    (tmp_path / "a.html").write_text(there)
    (tmp_path / "b.html").write_text('<p id="is">b</p><img src="c.png" alt="c"><a href="a.html">a</a>')
    (tmp_path / "c.png").touch()
    folder = tmp_path.resolve()
    assert links.broken(folder) == []
    (tmp_path / "c.png").unlink()
    (tmp_path / "a.html").write_text(there + '<a href="b.html#gone"></a><a href="#gone"></a><a href="../secret"></a>')
    wrong = ["a.html: b.html#gone", "a.html: #gone", "a.html: ../secret", "b.html: c.png"]
    assert links.broken(folder) == wrong


def test_what_comes_from_elsewhere_is_found(tmp_path):
    inside = '<script src="a.js"></script><a href="https://a.org">no load</a><link rel="search" href="//a.org/s">'
    (tmp_path / "a.html").write_text(inside)
    assert links.foreign_loads(tmp_path, links.pages(tmp_path)) == []
    (tmp_path / "a.html").write_text(inside + '<script src="https://cdn.org/m.js"></script>')
    (tmp_path / "s.css").write_text("@import '//fonts.org/f'; p { background: url(data:image/png;base64,a) }")
    assert len(links.foreign_loads(tmp_path, links.pages(tmp_path))) == 2
    (tmp_path / "a.html").write_text('<a href="https://no host/">a</a><a href="javascript:void(0)">b</a>')
    assert len(links.misshapen(links.pages(tmp_path))) == 2


# The parts it is made of


@pytest.fixture
def leading():
    from website.links import Links

    return Links(ROOT)


def test_links_of_the_repository_lead_to_pages(leading):
    first = ROOT / "README.md"
    assert leading.lead("[a](labkit/ddp/ddp.py)", first) == "[a](/api/labkit.ddp.ddp.rst)"
    assert leading.lead("[a](labkit/compression)", first) == "[a](/api/labkit.compression.rst)"
    assert leading.lead("[a](labkit/__init__.py#x)", first) == "[a](/api/labkit.rst#x)"
    assert leading.lead("[a](notebooks/solutions)", first) == "[a](/notebooks/solutions/index.md)"
    assert leading.lead("[a](https://a.org/labkit/ddp/ddp.py)", first) == "[a](https://a.org/labkit/ddp/ddp.py)"
    assert leading.lead("[a](../secret)", first) == "[a](../secret)" and leading.files == []
    assert leading.lead("[a](scripts/grids)", first) == "[a](/files/scripts/grids.rst)"
    assert leading.files == [Path("scripts/grids")]


def test_names_of_notebooks_and_modules_become_links(leading):
    place = ROOT / "notebooks" / "12_zero.ipynb"
    assert leading.lead("see `13_fsdp`", place) == "see [`13_fsdp`](/notebooks/13_fsdp.ipynb)"
    linked = "**[`labkit/ddp/ddp.py:4-7`](/api/labkit.ddp.ddp.rst)**"
    assert leading.lead("**`labkit/ddp/ddp.py:4-7`**", place) == linked
    for kept in ("`12_zero`", "`torch`", "```\n`13_fsdp`\n```", "[`13_fsdp`](https://a.org)"):
        assert leading.lead(kept, place) == kept


def test_links_in_a_folded_answer_lead_to_pages(leading):
    place = ROOT / "notebooks" / "12_zero.ipynb"
    assert leading.lead('(<a href="13_fsdp.ipynb">13</a>)', place) == '(<a href="13_fsdp.html">13</a>)'
    for kept in ('<a href="https://a.org/b.ipynb">b</a>', '```\n<a href="13_fsdp.ipynb">\n```'):
        assert leading.lead(kept, place) == kept


def test_a_notebook_keeps_words_folds_and_controls(tmp_path, leading):
    from nbformat.v4 import new_code_cell, new_notebook, new_output
    from website import sources

    shown = {"image/png": base64.b64encode(b"a picture").decode(), "text/plain": "seen"}
    widget = {sources.WIDGET: {"model_id": "1"}, "text/plain": "Controls: in JupyterLab."}
    outputs = [
        new_output("display_data", shown, metadata={"image/png": {"alt": 'a "bar"', "width": 300}}),
        new_output("display_data", widget),
        new_output("display_data", {"text/plain": ""}),
    ]
    cell = new_code_cell("draw()", outputs=outputs, metadata={"jupyter": {"source_hidden": True}})
    path = ROOT / "notebooks" / "dashboard.ipynb"
    made = sources.for_site(new_notebook(cells=[cell]), path, tmp_path, leading).cells[0]
    assert "hide-input" in made.metadata.tags
    told = [output.data["text/markdown"] for output in made.outputs]
    assert told[1:] == ["*Controls: in JupyterLab.*"]
    assert 'alt="a &quot;bar&quot;" width="300"' in told[0]
    assert [one.read_bytes() for one in (tmp_path / "pictures").iterdir()] == [b"a picture"]


def test_printed_columns_do_not_wrap(tmp_path, leading):
    from nbformat.v4 import new_code_cell, new_notebook, new_output
    from website import sources

    printed = ["gathers  4  yes\n", "all weights equal one process  yes\n"]
    cells = [new_code_cell("f()", outputs=[new_output("stream", text=text)]) for text in printed]
    made = sources.for_site(new_notebook(cells=cells), ROOT / "notebooks" / "dashboard.ipynb", tmp_path, leading)
    assert ["columns" in cell.metadata.get("tags", []) for cell in made.cells] == [True, False]


def test_names_in_a_table_break_and_options_keep_their_dashes():
    from website import conf

    code = '<code><span class="pre">--micro-batch_size</span></code>'
    context = {"body": f"{code}<td>{code}</td>"}
    conf.breakable(None, None, None, context, None)
    broken = '<span class="option">--micro</span>-batch_<wbr>size'
    assert context["body"] == f"{code}<td>{code.replace('--micro-batch_size', broken)}</td>"


def test_progress_is_a_bar_of_the_whole():
    import web

    assert web.progress("writing output... [100%] a", 8.0) == "|################    | writing output, about 2 s left"
    assert web.progress("pickling environment... done", 8.0) is None


def test_a_docstring_is_shown_as_it_is():
    from docutils.core import publish_parts
    from website.docstrings import as_rst

    lines = ["A. of *args: a_ `b*` |c|::", "", "    picture   |--*--|", "", "- one", "- two", "", "The end."]
    body = publish_parts("\n".join(as_rst(lines)), writer="html5")["body"]
    assert "<p>A. of *args: a_ " in body and "b*</span>" in body and "|c|::" in body
    assert "picture   |--*--|" in body and "- one\n- two" in body and "system-message" not in body


@pytest.mark.parametrize("repository", [True, False])
def test_a_link_out_of_the_repository_gets_no_page(tmp_path, repository):
    """A cell's text may link to .git/config, to an untracked file, or through a link to another folder."""
    from website.links import Links

    root = tmp_path.resolve() / "lab"
    for name in ("notebooks/a.ipynb", "labkit/ddp/ddp.py", "README.md", ".secret/key"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (tmp_path / "outside").touch()
    (root / "out").symlink_to(tmp_path / "outside")
    if repository:
        subprocess.run(["git", "init", "-q", root], check=True)
        subprocess.run(["git", "-C", root, "add", "README.md", "labkit", "notebooks", "out"], check=True)
        (root / "untracked").touch()
    links = Links(root)
    hidden = ["../.git/config", "../.secret/key", "../out", "../../outside", "../untracked", "/etc/passwd"]
    text = " ".join(f"[x]({to})" for to in hidden)
    assert links.lead(text, root / "notebooks" / "a.ipynb") == text and links.files == []
    led = links.lead("[x](../README.md) [y](../labkit/ddp/ddp.py) [z](../labkit)", root / "notebooks" / "a.ipynb")
    assert led == "[x](/files/README.md.rst) [y](/api/labkit.ddp.ddp.rst) [z](/api/labkit.rst)"

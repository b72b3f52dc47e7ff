"""The course in JupyterLab, seen by a real browser: it runs, stops at the stop button, and its controls redraw.

LABKIT_SCREENSHOTS=folder keeps the pictures of the pages.
"""

import os
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from browser import ROOT, Notebook, browser, server
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

sys.path.append(str(ROOT / "scripts"))

import batch
import kernels

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]

CONTROL = """
import matplotlib.pyplot as plt, ipywidgets
from IPython.display import display
def draw(world_size):
    plt.figure(figsize=(4, 2)); plt.bar(range(world_size), [1 / world_size] * world_size); plt.show()
slider = ipywidgets.IntSlider(value=2, min=1, max=8, continuous_update=False)
display(slider, ipywidgets.interactive_output(draw, {"world_size": slider}))
"""
HANG = """
from labkit.run import launch
def hang(context, folder):
    import os, pathlib, time
    pathlib.Path(folder, str(os.getpid())).touch()
    time.sleep(120)
launch(hang, nproc=2, folder={folder!r})
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The course without its outputs, repeating little, and two small notebooks; what JupyterLab saves stays here."""
    folder = tmp_path_factory.mktemp("course")
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        notebook = load_notebook_node(str(path))
        kernel = kernels.NAME if kernels.PLACE in os.environ else "python3"
        notebook = parameterize_notebook(notebook, batch.few(notebook), kernel_name=kernel, language="python")
        notebook.metadata.kernelspec.name = kernel
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, folder / path.name)
    (folder / "pids").mkdir()
    write(folder / "control.ipynb", CONTROL, "print('six times seven is', 6 * 7)")
    write(folder / "hang.ipynb", HANG.format(folder=str(folder / "pids")), "print('alive after the stop')")
    return folder


def write(path, *sources):
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


@pytest.fixture(scope="module")
def jupyter(folder):
    with server(folder, "control.ipynb") as address, browser() as chromium:
        yield chromium, address


@pytest.fixture
def lab(jupyter):
    """lab(name): the notebook in a new page, which is checked and closed at the end."""
    chromium, address = jupyter
    pages = []

    def open_notebook(name):
        pages.append(Notebook(chromium, address(name)))
        return pages[-1]

    yield open_notebook
    for page in pages:
        page.check_and_close()


@pytest.fixture
def picture():
    """picture(take, name): take is a page's way to draw itself, called where somebody wants to look."""
    wanted = os.environ.get("LABKIT_SCREENSHOTS")

    def keep(take, name):
        if wanted:
            Path(wanted).mkdir(parents=True, exist_ok=True)
            take(Path(wanted, name))

    return keep


def course_notebook(name):
    missing = not (ROOT / "notebooks" / f"{name}.ipynb").exists()
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"there is no notebook {name} yet"))


def test_a_control_redraws_the_plot(lab, picture):
    page = lab("control.ipynb")
    page.run_and_finish()
    assert "six times seven is 42" in page.outputs()
    before = page.images()
    assert len(before) == 1
    page.panel.locator(".jupyter-widgets .noUi-handle").first.focus()
    page.page.keyboard.press("ArrowRight")
    page.wait_for_change(before)
    picture(page.screenshot, "control.png")


def test_the_stop_button_leaves_no_rank(lab, folder):
    page = lab("hang.ipynb")
    page.run_all()
    pids = wait_for(lambda: [int(path.name) for path in (folder / "pids").iterdir()], lambda found: len(found) == 2)
    assert all(map(psutil.pid_exists, pids))
    page.interrupt()
    assert wait_for(lambda: [pid for pid in pids if psutil.pid_exists(pid)], lambda left: not left, seconds=5) == []
    page.wait_idle()
    assert "KeyboardInterrupt" in page.outputs()


def wait_for(look, good, seconds=60):
    deadline = time.monotonic() + seconds
    while not good(seen := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return seen


@pytest.mark.parametrize("name", [course_notebook(name) for name in ("04_compare", "20_slow_networks")])
def test_the_course_runs_and_is_seen_in_both_themes(lab, picture, name):
    page = lab(f"{name}.ipynb")
    page.run_and_finish()
    before = page.images()
    assert before
    picture(page.screenshot_all, f"{name}-light")
    page.set_theme("Dark")
    picture(page.screenshot_all, f"{name}-dark")
    page.set_theme("Light")
    menus = page.panel.locator(".jupyter-widgets.widget-dropdown select")
    boxes = page.panel.locator(".jupyter-widgets.widget-checkbox input")
    if menus.count():
        menus.last.select_option(index=menus.last.locator("option").count() - 1)
    else:
        boxes.last.click()
    page.wait_for_change(before)
    for theme in ("Light", "Dark"):
        page.set_theme(theme)
        (menus if menus.count() else boxes).first.scroll_into_view_if_needed()
        picture(page.screenshot, f"{name}-control-{theme.lower()}.png")

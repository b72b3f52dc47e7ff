"""The course in JupyterLab, in a real browser: each control answers, the run button leaves no rank, all can be read.

LABKIT_SCREENSHOTS=folder keeps the pictures of the pages.
"""

import os
import time
from pathlib import Path

import batch
import explorers
import nbformat
import psutil
import pytest
from accessibility import violations
from browser import PATIENCE, Lab, browser, server
from page import as_page
from panels import PANELS, Panel
from playwright.sync_api import expect

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]

HANG = """
from labkit.run import launch
def hang(context, folder):
    import os, pathlib, time
    pathlib.Path(folder, str(os.getpid())).touch()
    time.sleep(300)
launch(hang, nproc=2, folder={folder!r})
"""
# A board whose button starts ranks that work until there is a file "go".
BUTTON = """
import pandas as pd
from labkit.measure.machine import ROOT
from labkit.run import launch, sweep
from labkit.show import dashboard
def work(context, folder):
    import os, pathlib, time
    pathlib.Path(folder, "pids", str(os.getpid())).touch()
    while not pathlib.Path(folder, "go").exists():
        time.sleep(0.02)
rows = sweep.results(ROOT / "notebooks" / "dashboard")
rows = rows[rows[["tensor", "context", "pipeline", "expert"]].max(axis=1) == 1]  # they run on 2 ranks
def measure(cells):
    launch(work, nproc=2, quiet=True, folder={folder!r})
    return rows.head(2).assign(launch="again")
state = dashboard.State(model="gpt", link="this machine")
board = dashboard.board(rows, state, measure).show()
"""
LIVE = """
from labkit.run import launch
from labkit.show import live
program = '''
import itertools, os, time
for step in itertools.takewhile(lambda _: not os.path.exists({go!r}), itertools.count()):
    time.sleep(0.1)
    waits = {{"exposed_comm_ms": 20.0 + step, "step_ms": 100.0}}
    parts = {{"data_ms": 5.0, "forward_ms": 20.0, "backward_ms": 60.0, "optimizer_ms": 5.0}}
    record(step=step, loss=1 / (1 + step), samples_per_s=80.0, rss_bytes=3e8 + 1e6 * step, **waits, **parts)
'''
launch(program, nproc=2, device="cpu", bar=live.Live("emulated"));
"""
# In each frame of the page: is the picture there, whole? Only what changes is noted.
WATCH = """
() => {
  const seen = window.seen = {frames: 0, states: [], pictures: []};
  const look = () => {
    const image = document.querySelector('.jp-OutputArea-output .widget-html svg');
    const there = image !== null && image.getBoundingClientRect().height > 0;
    seen.frames += there;
    if (seen.states.at(-1) !== there) seen.states.push(there);
    if (there && !seen.pictures.includes(image.ariaLabel)) seen.pictures.push(image.ariaLabel);
    requestAnimationFrame(look);
  };
  look();
}
"""
ENDS = ["finished", "stopped", "restarted", "shut down", "tab closed"]
MAIN_JOB = batch.NOTEBOOKS / f"{batch.MAIN_JOB}.ipynb"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What JupyterLab serves: of each notebook with explorers what they need, small notebooks, a stored one."""
    folder = tmp_path_factory.mktemp("course")
    for path in explorers.with_explorers():
        nbformat.write(explorers.needed(explorers.prepared(path)), folder / path.name)
    write(folder / "hang.ipynb", HANG.format(folder=str(folder / "pids")), "print('alive after the stop')")
    for end in ENDS:
        write(folder / f"{end}.ipynb", BUTTON.format(folder=str(folder)))
    write(folder / "live.ipynb", LIVE.format(go=str(folder / "seen")))
    (folder / "stored").mkdir()
    nbformat.write(batch.read(MAIN_JOB), folder / "stored" / MAIN_JOB.name)
    return folder


def write(path, *sources):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source.strip()) for source in sources])
    notebook.metadata.kernelspec = {"name": explorers.kernel(), "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


@pytest.fixture(scope="module")
def jupyter(folder):
    with server(folder, "hang.ipynb") as address, browser() as window:
        yield Lab(window, address)


@pytest.fixture
def lab(jupyter):
    """lab(name): the notebook, opened in JupyterLab's page, which is checked at the end."""
    yield jupyter.open
    jupyter.check()


@pytest.fixture
def picture():
    """picture(take, name): take is a page's way to draw itself, called where somebody wants to look."""
    wanted = os.environ.get("LABKIT_SCREENSHOTS")

    def keep(take, name):
        if wanted:
            Path(wanted).mkdir(parents=True, exist_ok=True)
            take(Path(wanted, name))

    return keep


@pytest.fixture
def at_work(folder):
    """at_work(): the pids of ranks that work, once there are two."""
    places = folder / "pids"
    places.mkdir()
    yield lambda: wait_for(lambda: [int(path.name) for path in places.iterdir()], lambda found: len(found) == 2)
    for path in (*places.iterdir(), folder / "go"):
        path.unlink(missing_ok=True)
    places.rmdir()


def wait_for(look, good):
    deadline = time.monotonic() + 100
    while not good(seen := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return seen


def left(pids):
    """Which of them are alive, however long one waits for their end."""
    return wait_for(lambda: [pid for pid in pids if psutil.pid_exists(pid)], lambda alive: not alive)


@pytest.mark.parametrize("path", sorted(explorers.with_explorers()), ids=lambda path: path.stem)
def test_every_control_of_an_explorer_answers(lab, picture, path):
    """By keyboard alone. Prints how long each takes to show its new picture: -s or -rP shows it."""
    page = lab(path.name)
    page.run_and_finish()
    panels = page.panel.locator(PANELS)
    assert panels.count() == sum(map(explorers.shows_a_widget, batch.read(path).cells))
    for number in range(panels.count()):
        panel = Panel(page, number)
        for name, times in panel.move_all().items():
            print(f"{path.stem}: {name}: {', '.join(f'{ms:.0f}' for ms in times)} ms")
    for theme in ("Dark", "Light"):
        page.set_theme(theme)
        picture(page.screenshot_all, f"{path.stem}-{theme.lower()}")
        assert page.violations() == []
    page.shut_down()


def test_the_stop_button_leaves_no_rank(lab, at_work):
    page = lab("hang.ipynb")
    page.run_all()
    pids = at_work()
    assert all(map(psutil.pid_exists, pids))
    page.interrupt()
    assert left(pids) == []
    page.wait_idle()
    assert "KeyboardInterrupt" in page.outputs()


@pytest.mark.parametrize("end", ENDS)
def test_the_run_button_leaves_no_rank(lab, at_work, folder, end):
    page = lab(f"{end}.ipynb")
    page.run_and_finish()
    button = page.panel.get_by_role("button", name="Measure this choice")
    button.click()
    pids = at_work()
    assert len(pids) == 2 and all(map(psutil.pid_exists, pids))
    if end == "stopped":
        page.interrupt()
    elif end == "restarted":
        page.restart()
    elif end == "shut down":
        page.shut_down()
    elif end == "tab closed":
        page.page.close()  # the kernel lives on, and what it measures comes to its end
    if end in ("finished", "tab closed"):
        (folder / "go").touch()
    assert left(pids) == []
    if end in ("finished", "stopped"):
        words = {"finished": "measured: 2 rows added", "stopped": "KeyboardInterrupt"}[end]
        page.panel.get_by_text(words).wait_for(timeout=PATIENCE)
        expect(button).to_be_enabled(timeout=PATIENCE)


def test_a_notebook_with_stored_outputs_is_accessible(lab, picture):
    page = lab(f"stored/{MAIN_JOB.name}")
    assert page.images()
    for theme in ("Dark", "Light"):
        page.set_theme(theme)
        picture(page.screenshot_all, f"stored-{theme.lower()}")
        assert page.violations() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_a_notebook_is_accessible(jupyter, picture, tmp_path, scheme):
    file = tmp_path / "page.html"
    file.write_text(as_page(batch.read(MAIN_JOB)))
    page = jupyter.window.new_page()
    page.emulate_media(color_scheme=scheme)
    page.goto(file.as_uri())
    picture(lambda path: page.screenshot(path=path, full_page=True), f"page-{scheme}.png")
    found = violations(page)
    page.close()
    assert found == []


def test_the_live_view_does_not_flicker(lab, picture, folder):
    """While ranks run it is redrawn in place, and in no frame is it gone. The last here, as it goes on looking."""
    page = lab("live.ipynb")
    page.page.evaluate(WATCH)
    page.run_all()
    page.panel.locator(".widget-html svg").wait_for(timeout=PATIENCE)
    page.page.wait_for_function("() => window.seen.pictures.length >= 3 && window.seen.frames > 20", timeout=PATIENCE)
    seen = page.page.evaluate("() => window.seen")  # a change of the theme draws the whole page anew
    print(seen["frames"], "frames,", len(seen["pictures"]), "pictures")
    assert seen["states"] == [False, True]
    for theme in ("Dark", "Light"):
        page.set_theme(theme)
        picture(page.screenshot, f"live-{theme.lower()}.png")
        assert page.violations() == []
    (folder / "seen").touch()
    page.wait_idle()
    page.panel.locator(".jp-RenderedImage img").wait_for(timeout=PATIENCE)
    assert page.panel.locator(".widget-html svg").count() == 0
    page.shut_down()

"""The live view in a real browser: while ranks run it is redrawn in place, and in no frame is it gone."""

import os
from pathlib import Path

import explorers
import nbformat
import pytest
from browser import PATIENCE, Lab, browser, server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

CELL = """
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


def test_the_live_view_does_not_flicker(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL.format(go=str(tmp_path / "go")).strip())])
    notebook.metadata.kernelspec = {"name": explorers.kernel(), "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "live.ipynb")
    pictures = os.environ.get("LABKIT_SCREENSHOTS")
    with server(tmp_path, "live.ipynb") as address, browser() as window:
        lab = Lab(window, address)
        page = lab.open("live.ipynb")
        page.page.evaluate(WATCH)
        page.run_all()
        page.panel.locator(".widget-html svg").wait_for(timeout=PATIENCE)
        page.page.wait_for_function(
            "() => window.seen.pictures.length >= 3 && window.seen.frames > 20", timeout=PATIENCE
        )
        seen = page.page.evaluate("() => window.seen")  # a change of the theme draws the whole page anew
        print(seen["frames"], "frames,", len(seen["pictures"]), "pictures")
        assert seen["states"] == [False, True]
        for theme in ("Dark", "Light"):
            page.set_theme(theme)
            if pictures:
                Path(pictures).mkdir(parents=True, exist_ok=True)
                page.page.wait_for_timeout(1500)
                page.page.screenshot(path=str(Path(pictures, f"live-{theme.lower()}.png")))
            assert page.violations() == []
        (tmp_path / "go").touch()
        page.wait_idle()
        page.panel.locator(".jp-RenderedImage img").wait_for(timeout=PATIENCE)
        assert page.panel.locator(".widget-html svg").count() == 0
        page.shut_down()
        lab.check()

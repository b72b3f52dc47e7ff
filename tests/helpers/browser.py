"""A person in JupyterLab, played by a real browser: open a notebook, run it, stop it, move a control, look.

The server is the one that `lab` starts (scripts/open.py), the browser Debian's Chromium through playwright; nothing is
downloaded. Jupyter gets folders of its own, so that the person's settings play no part and are not touched.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from accessibility import violations
from playwright.sync_api import sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",  # CI runs as root in a container
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 120_000  # ms for anything to appear
CELL_PATIENCE = 300_000  # ms for a notebook to finish
LOOK = 100  # ms between looks at a page: at every frame, the default, looking is half of its work
UNFOLDED = ".jp-CodeCell:not(:has(.jp-Placeholder))"  # a folded cell shows no number


@contextlib.contextmanager
def server(folder, start):
    """JupyterLab on `folder`; yields a function path -> the address of a notebook, token included."""
    from open import server_command

    token = secrets.token_hex(16)
    home = Path(folder, ".jupyter-home")
    places = {f"JUPYTER_{kind.upper()}_DIR": str(home / kind) for kind in ("config", "data", "runtime")}
    settings = home / "config" / "lab" / "user-settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text(json.dumps({"windowingMode": "none"}))  # draw all cells
    environment = {**os.environ, **places, "HOME": str(home), "JUPYTER_PREFER_ENV_PATH": "1"}
    ours = ("--no-browser", "--expose-app-in-browser", f"--IdentityProvider.token={token}")
    command = server_command(folder, start, *ours)
    with open(home / "server.log", "w") as log:
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        port = wait_for_port(child, home / "server.log")
        yield lambda path: f"http://127.0.0.1:{port}/lab/tree/{path}?reset&token={token}"
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def wait_for_port(child, log):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and child.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", log.read_text())
        if found:
            return int(found.group(1))
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


@contextlib.contextmanager
def browser():
    """One window, whose pages share what they have loaded: with a folder of its own it keeps JupyterLab compiled."""
    size = {"width": 1280, "height": 1000}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        window = playwright.chromium.launch_persistent_context(
            folder, executable_path=CHROMIUM, args=FLAGS, viewport=size
        )
        window.set_default_timeout(PATIENCE)
        yield window
        window.close()


class Lab:
    """JupyterLab in one page of a window, which loads it once: notebooks open in it one after the other.

    `offsite` and `errors` collect requests to elsewhere and the page's own errors.
    """

    def __init__(self, window, address):
        self.window, self.address, self.page = window, address, None
        self.offsite, self.errors = [], []

    def open(self, path):
        """The notebook, alone in the page; in a new page if there is none, or a test has closed it."""
        if self.page is None or self.page.is_closed():
            self.page = self.window.new_page()
            home = self.address("").split("/lab/")[0]
            here = (home, home.replace("http", "ws"), "data:", "blob:")
            self.page.on("request", lambda request: request.url.startswith(here) or self.offsite.append(request.url))
            self.page.on("pageerror", lambda error: self.errors.append(str(error)))
            self.page.goto(self.address(path))
        else:
            self.page.evaluate(OPEN, path)
        return Notebook(self.page)

    def check(self):
        assert self.offsite == []
        assert self.errors == []


class Notebook:
    """The notebook that is open in a page."""

    def __init__(self, page):
        self.page = page
        self.panel = self.page.locator(".jp-NotebookPanel").first
        self.panel.locator(".jp-Cell").first.wait_for(timeout=PATIENCE)
        self.wait_idle()  # the toolbar's dot says so before a kernel is there; the status bar is honest

    def menu(self, *names):
        for name in names:
            self.page.get_by_role("menuitem", name=name, exact=True).click()

    def wait_idle(self, timeout=PATIENCE):
        self.page.wait_for_function(IDLE, timeout=timeout, polling=LOOK)

    def run_all(self):
        self.menu("Run", "Run All Cells")

    def run_and_finish(self, timeout=CELL_PATIENCE):
        """Run all cells of a notebook without outputs; AssertionError, with its words, if it stops before the end."""
        self.run_all()
        self.page.wait_for_function(STOPPED, timeout=timeout, polling=LOOK)
        self.wait_idle()
        errors = self.panel.locator("[data-mime-type='application/vnd.jupyter.error']").all_inner_texts()
        assert not errors, errors[0][-2000:]
        prompts = self.panel.locator(f"{UNFOLDED} .jp-InputPrompt").all_inner_texts()
        wrong = [number for number, prompt in enumerate(prompts) if not re.search(r"\d", prompt)]
        assert not wrong, f"stopped before code cell {wrong[0]} of {len(prompts)}: {self.outputs()[-2000:]}"

    def interrupt(self):
        """The toolbar's stop button."""
        self.panel.locator("jp-button[data-command='notebook:interrupt-kernel']").click()

    def restart(self):
        """The toolbar's restart button; the question whether to do so is answered with yes."""
        self.panel.locator("jp-button[data-command='notebook:restart-kernel']").click()
        self.page.locator(".jp-Dialog button.jp-mod-accept").click()

    def shut_down(self):
        self.menu("Kernel", "Shut Down Kernel")

    def outputs(self):
        return "\n".join(self.panel.locator(".jp-OutputArea-output").all_inner_texts())

    def images(self):
        return [image.get_attribute("src") for image in self.panel.locator(".jp-OutputArea-output img").all()]

    def violations(self):
        """What axe finds in outputs and widgets. The rest is JupyterLab's, as is a picture without its alt text."""
        return violations(self.page, ".jp-NotebookPanel .jp-OutputArea-output", [".jp-RenderedImage img"])

    def set_theme(self, name):
        """ "Light" or "Dark", from the menu."""
        self.page.get_by_role("menuitem", name="Settings", exact=True).click()
        self.page.locator(".lm-Menu-item", has_text=re.compile("^Theme")).click()
        self.page.locator(".lm-Menu-item", has_text=f"JupyterLab {name}").first.click()
        light = "true" if name == "Light" else "false"
        self.page.wait_for_function("(light) => document.body.dataset.jpThemeLight === light", arg=light)

    def screenshot(self, path):
        self.page.wait_for_timeout(500)  # let the last output settle
        self.page.screenshot(path=str(path))

    def screenshot_all(self, stem):
        """The whole notebook, a screen at a time: stem-0.png, stem-1.png, ..."""
        scroller = self.panel.locator(".jp-WindowedPanel-outer").first
        height, total = scroller.evaluate("e => [e.clientHeight, e.scrollHeight]")
        for number in range(-(-total // height)):
            scroller.evaluate("(e, top) => e.scrollTo(0, top)", number * height)
            self.screenshot(f"{stem}-{number}.png")


# Open documents are closed without a question whether to save them.
OPEN = """
async (path) => {
  for (const open of [...jupyterapp.shell.widgets('main')]) open.dispose();
  const opened = await jupyterapp.commands.execute('docmanager:open', {path});
  await opened.context.ready;
  await opened.sessionContext.ready;
}
"""
IDLE = "() => document.querySelector('#jp-main-statusbar')?.innerText.includes('| Idle')"

# Some cell has its number and none is waiting for one: all have run, or one has failed and the rest were dropped.
STOPPED = """
() => {
  const cells = document.querySelectorAll('.jp-NotebookPanel .jp-CodeCell .jp-InputPrompt');
  const prompts = [...cells].map(e => e.textContent);
  return prompts.some(text => /\\d/.test(text)) && !prompts.some(text => text.includes('*'));
}
"""

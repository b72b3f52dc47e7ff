"""A panel with one button per rank that kills its process.

    (Start) (Kill rank 0) (Kill rank 1)
    rank 1 killed after step 7; attempt 2: step 6 of 20
    rank 1 killed after step 7; done. Every loss is that of the run that was never broken.

The run is in a thread, so that the kernel can handle clicks. begin(bar, pids) launches it and
returns a sentence about the result. Each rank writes its process id into the folder pids, in a file
named after its number. bar: the argument of launch.
"""

import html
import os
import signal
import tempfile
import threading
from pathlib import Path

import ipywidgets

from labkit.show import controls


class Panel:
    """Buttons, and the bar of the launch. `.panel` is the widget, `.message` its text."""

    def __init__(self, begin, world_size):
        self.begin = begin
        self.step = 0
        self.attempt = 1
        self.kills = []
        self.start = button("Start", "play", self.started)
        self.victims = [
            button(f"Kill rank {rank}", "bolt", lambda _, rank=rank: self.kill(rank))
            for rank in range(world_size)
        ]
        self.message = ipywidgets.HTML("<p>Start the run, then kill a rank.</p>")
        self.panel = ipywidgets.VBox([controls.row([self.start, *self.victims]), self.message])
        self.enable(running=False)

    def enable(self, running):
        self.start.disabled = running
        for one in self.victims:
            one.disabled = not running

    def say(self, words):
        self.message.value = f"<p>{html.escape('; '.join([*self.kills, words]))}</p>"

    def started(self, button=None):
        self.step = 0
        self.attempt = 1
        self.kills = []
        self.enable(running=True)
        self.say("the ranks start")
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self):
        with tempfile.TemporaryDirectory() as self.pids:
            try:
                words = self.begin(self, self.pids)
            except Exception as error:  # shown next to the buttons
                words = f"{type(error).__name__}: {controls.first_line(error)}"
        self.enable(running=False)
        self.say(f"done. {words}")

    def update(self, step, total):
        self.step = step
        self.say(f"attempt {self.attempt}: step {step} of {total}")

    def record(self, row):
        """Do nothing: the records are drawn after the run."""

    def close(self):
        self.attempt += 1

    def kill(self, rank):
        """Send SIGKILL to the current process of the rank, if there is one."""
        try:
            os.kill(int(Path(self.pids, str(rank)).read_text()), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            return self.say(f"rank {rank} is just being started")
        self.kills.append(f"rank {rank} killed after step {self.step}")
        self.say("the launcher starts all ranks again")


def button(words, icon, pressed):
    found = ipywidgets.Button(description=words, icon=icon, layout={"width": "auto"})
    found.on_click(pressed)
    return found


def buttons(begin, world_size):
    """Show the panel for world_size ranks and return it. begin: see above."""
    shown = Panel(begin, world_size)
    controls.show(shown.panel)
    return shown

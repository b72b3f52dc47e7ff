"""A small course of one notebook with two exercises, and answers to the second that harm whoever runs them."""

import json
import textwrap

NOTEBOOK = "00_small"
CHECKERS = """
def sums(total):
    assert total(rank + 1) == world_size * (world_size + 1) // 2, f"not the sum of {world_size} ranks"


check(total, sums, nproc=world_size, device="cpu")


def doubles(double):
    for number in (1, 2, 3):
        found = double(number)
        assert found is not None, "double() returns None: return the number."
        half = found / 2
        assert half == number, f"double({number}) is {found}, not {2 * number}."
        if found == 1 + number and number == 3:
            words = "one more"
            raise AssertionError(f"{number}: {words}")


check(double, doubles, nproc=2, device="cpu")
"""
STUBS = """
def double(number):
    raise NotImplementedError


def total(mine):
    raise NotImplementedError
"""
TOTAL = """
def total(mine):
    value = torch.tensor(mine)
    comm.all_reduce(value)
    return value.item()
"""
SOLUTION = f"def double(number):\n    return 2 * number\n\n{TOTAL}"

# name: (body of double(), words of the message; a tuple: one of them)
# On a busy machine, memory that grows may reach the time limit first.
HOSTILE = {
    "loop": ("while True:\n    pass", ("does a loop not end?", "stopped after")),
    "forks": ("import os\nwhile True:\n    os.fork()", ("more than", "OSError", "BlockingIOError")),
    "memory": ("return torch.ones(10 * 2**28)", "can't allocate memory"),
    "creeping": (
        "kept = []\nwhile True:\n    kept.append(torch.ones(2**24))",
        ("more than", "can't allocate", "stopped after", "time limit"),
    ),
    "exits": ("import os\nos._exit(0)", "left early with exit code 0"),
    "leaves": ("import sys\nsys.exit(0)", "ended the process"),
    "segfault": ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
    "prints": ('for _ in range(100):\n    print("x" * 2**20)\nreturn 2 * number', "may print or write 67 MB"),
    "fills": ('for n in range(99):\n    open(f"/tmp/{n}", "wb").write(bytes(2**24))', "may write 268 MB"),
    "kills": ("import os\nos.kill(-1, 9)", "the sandbox ended"),
    "forges": (
        "import os\nfor pid in filter(str.isdigit, os.listdir('/proc')):\n    for number in range(12):\n"
        "        try:\n            open(f'/proc/{pid}/fd/{number}', 'w').write('rubbish\\n')\n"
        "        except OSError:\n            pass",
        "something else than results",
    ),
}


def notebook(*cells):
    """The text of a notebook with these code cells."""
    found = [{"cell_type": "code", "source": cell, "metadata": {}, "outputs": []} for cell in cells]
    return json.dumps({"cells": found, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def course(folder):
    """Write the small course into folder."""
    (folder / "solutions").mkdir(parents=True)
    (folder / f"{NOTEBOOK}.ipynb").write_text(notebook(STUBS, "%load_ext labkit", CHECKERS))
    (folder / "solutions" / f"{NOTEBOOK}.ipynb").write_text(notebook(SOLUTION))


def answer(body, total=TOTAL):
    """The text of a .py submission whose double() has this body."""
    return f"def double(number):\n{textwrap.indent(body, '    ')}\n\n{total}"

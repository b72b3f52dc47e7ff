"""An exercise of a notebook: checks the reader's function on real ranks.

def average(tensor): raise NotImplementedError      the stub, in one cell; the reader fills it in
def is_average(average): assert ...                 the checker, which every rank calls
check(average, is_average, nproc=2)                 prints "not solved yet", "solved", or the error
"""

import ast
from inspect import ismodule

from labkit.run.job import source_of
from labkit.run.launch import LaunchError, launch


def check(solution, checker, nproc=2, **options):
    """Call checker(solution) on nproc ranks, print a verdict, and return whether it passed.

    Both are functions of the notebook. Their source is sent to the ranks, where they can use rank,
    world_size, device, torch, dist and comm. options: those of launch.
    """
    sources = [source_of(function) for function in (solution, checker)]
    if is_stub(sources[0]):
        print(f"{solution.__name__}: not solved yet")
        return False
    program = "\n".join([*sources, f"{checker.__name__}({solution.__name__})"])
    options = {"timeout": 60, "collective_timeout": 10, "quiet": True} | options
    try:
        launch(program, nproc=nproc, **options)
    except LaunchError as error:
        cause = {} if error.cause is None else error.cause.error
        stub = cause.get("type") == "NotImplementedError"
        mistake = words(str(error).splitlines()[0], cause, solution, sources[0])
        print(f"{solution.__name__}: {'not solved yet' if stub else f'not right yet: {mistake}'}")
        return False
    nodes = options.get("nodes", 1)
    print(
        f"{solution.__name__}: solved, on {f'{nodes} nodes of ' if nodes > 1 else ''}{nproc} ranks"
    )
    return True


def words(headline, cause, solution, answer):
    """Return what is wrong: the checker's words, or the headline; and the line of the answer.

    headline: of the LaunchError. cause: the error of the rank that failed first, or {}. answer: the
    source of the reader's function; its line is named where the error was raised in it.
    """
    if cause.get("type") == "AssertionError" and cause["message"]:
        return cause["message"]
    line = cause.get("line")
    if line and line in answer:
        headline += f", at `{line}`"
    return headline + cure(cause, solution.__globals__)


def cure(cause, names):
    """Return what to do if the ranks lack one of the notebook's names (a dict), or ""."""
    name = cause.get("message", "").split("'")[1::2][:1]
    if cause.get("type") != "NameError" or not name or name[0] not in names:
        return ""
    name = name[0]
    value = names[name]
    where = "inside the function: the ranks are other processes"
    if not ismodule(value):
        return f"; define or import {name} {where}"
    module = value.__name__
    return f"; write `import {module}{'' if module == name else f' as {name}'}` {where}"


def is_stub(source):
    """Return whether a function is only `raise NotImplementedError`; this check needs no ranks."""
    function = ast.parse(source).body[0]
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return [ast.unparse(statement).removesuffix("()") for statement in body] == [
        "raise NotImplementedError"
    ]

"""The rules of the house that a test can hold: names of files, where a file lies, words that are gone."""

import ast
import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

import labkit

ROOT = Path(labkit.__file__).parent
REPOSITORY = ROOT.parent
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
# ideas/ has the plain form of what a folder has as a class: the same name is wanted there.
COURSE = "ideas"
# `python -m labkit.train` and `labkit.convert`: a command stands at the top, what it starts in a folder.
COMMANDS = (Path("train.py"), Path("convert.py"))


def names_twice(files):
    """Base names that two files have, outside ideas/ and but for __init__.py."""
    counts = Counter(path.name for path in files if path.parts[0] != COURSE and path.name != "__init__.py")
    return sorted(name for name, count in counts.items() if count > 1)


def test_no_two_files_share_a_name():
    assert names_twice(FILES) == []
    assert names_twice([Path("run/job.py"), Path("scale/job.py"), Path("ideas/job.py")]) == ["job.py"]


def imported(source):
    """Dotted names of labkit that a file imports; `from labkit.a import b` gives labkit.a and labkit.a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(sources):
    """{file: the files that import it}. sources: {path below labkit: text}. An __init__.py only hands on."""
    modules = {f"labkit.{'.'.join(path.with_suffix('').parts)}": path for path in sources}
    found = {path: set() for path in sources}
    for path, source in sources.items():
        for name in imported(source):
            if name in modules and modules[name] != path and path.name != "__init__.py":
                found[modules[name]].add(path)
    return found


def misplaced(sources, elsewhere=""):
    """Files whose one importer lies in another folder. elsewhere: text of notebooks, scripts and README.

    What a person imports directly (a class in the file of its folder's name, what a notebook or a script names) may lie
    by itself.
    """
    lost = []
    for path, users in importers(sources).items():
        module = f"labkit.{'.'.join(path.with_suffix('').parts)}"
        face = path.stem == path.parent.name or path.parts[0] == COURSE
        if len(users) != 1 or face or module in elsewhere:
            continue
        (user,) = users
        if user.parent != path.parent and user not in COMMANDS:
            lost.append(f"{path}: only {user} imports it")
    return lost


def text_outside():
    """The text of notebooks, scripts and README, in which `from labkit.a import b` reads labkit.a.b, too."""
    files = [*REPOSITORY.glob("notebooks/**/*.ipynb"), *REPOSITORY.glob("scripts/**/*"), REPOSITORY / "README.md"]
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files if path.is_file())
    for package, names in re.findall(r"from (labkit(?:\.\w+)*) import ([\w, ]+)", text):
        text += "".join(f"\n{package}.{name.split(' as ')[0].strip()}" for name in names.split(","))
    return text


def test_what_has_one_importer_lies_with_it():
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path in FILES}
    assert misplaced(sources, text_outside()) == []


def test_a_misplaced_file_is_found():
    sources = {Path("a/one.py"): "x = 1", Path("b/two.py"): "from labkit.a import one"}
    assert misplaced(sources) == ["a/one.py: only b/two.py imports it"]
    assert misplaced(sources, "labkit.a.one") == []
    sources[Path("a/three.py")] = "import labkit.a.one"
    assert misplaced(sources) == []


# Files that the glossary renames: old paths below labkit.
OLD = (
    *("parts/", "budget.py", "composition.py", "meter.py", "gloo.py", "run/settle", "run/forecast", "run/participant"),
    *("run/meshed", "run/watch.py", "run/cluster", "run/nodes", "measure/turns", "measure/waits", "measure/bubble"),
    *("measure/overlap", "measure/symptoms", "measure/compressed", "measure/to_loss", "measure/links", "measure/noise"),
    *("scale/given", "scale/clock", "scale/bucket.py", "scale/images", "scale/encoders", "scale/rehearse"),
    *("show/held_against", "show/switched", "show/saw", "show/stacks", "show/stages", "show/broken", "show/killing"),
    *("show/talking", "show/choices", "show/arrangement", "show/budgets", "show/fleets", "show/saves", "show/links"),
    *("show/lengths", "show/experts", "show/contents", "show/turns", "show/loads", "show/crossings", "show/race"),
    *("show/scales", "show/widgets", "run/network_namespaces"),
)


def old_names(text):
    """Old file names in a text, as paths or as modules."""
    spelled = {name: name.removesuffix(".py").rstrip("/") for name in OLD}
    return sorted(
        name
        for name, stem in spelled.items()
        if re.search(rf"labkit[/.]{re.escape(stem).replace('/', '[/.]')}(?![\w])", text)
    )


def test_an_old_name_is_found():
    assert old_names("from labkit.run.settle import x; labkit/show/saw.py; labkit.parts.units") == [
        "parts/",
        "run/settle",
        "show/saw",
    ]
    assert old_names("labkit.measure.noise_of, labkit/show/widget") == []


@pytest.mark.parametrize("folder", ["labkit", "notebooks", "scripts"])
def test_no_old_name_is_left(folder):
    files = [path for path in (REPOSITORY / folder).rglob("*") if path.suffix in (".py", ".md", ".ipynb", ".yaml", "")]
    found = {}
    for path in files:
        if path.is_file() and ".ipynb_checkpoints" not in path.parts:
            text = path.read_text(encoding="utf-8", errors="replace")
            if path.suffix == ".ipynb":  # not the stored fingerprints and outputs, which a renewal replaces
                cells = re.sub(r'"outputs": \[.*?\n   \]', "", text, flags=re.DOTALL)
                text = cells[: cells.rfind('"metadata"')]
            if names := old_names(text):
                found[str(path.relative_to(REPOSITORY))] = names
    assert found == {}


PRIVATE = re.compile(
    r"\btorch\._[a-zA-Z]|\b_C\.|distributed_c10d\._|_execution_engine|\._post_accumulate|_rendezvous\._"
)


def private_touches(source):
    """Lines of code that use a private name of torch; text in strings and comments does not count."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return [line.strip() for line in ast.unparse(tree).splitlines() if PRIVATE.search(line)]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_private_names_of_torch_are_in_one_file(path):
    touches = private_touches((ROOT / path).read_text(encoding="utf-8"))
    assert bool(touches) == (path.name == "torch_private.py"), touches


def test_a_private_name_is_found():
    assert private_touches("x = torch._C._current_graph_task_id()") and not private_touches("x = 'torch._dynamo'")


@pytest.mark.slow
def test_every_name_that_a_file_imports_from_labkit_exists():
    """Also inside functions, which a test may never call."""
    missing = []
    for folder in ("labkit", "scripts", "tests"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("labkit"):
                    names = [one.name for one in node.names if not is_there(node.module, one.name)]
                    missing += [f"{path.relative_to(REPOSITORY)}: {node.module}.{name}" for name in names]
    assert missing == []


def is_there(module, name):
    """Whether `from module import name` works: an attribute, or a module of that name."""
    if hasattr(importlib.import_module(module), name):
        return True
    return importlib.util.find_spec(f"{module}.{name}") is not None

"""Fingerprint the code behind a stored number: a digest per file of labkit that was used.

    code = Code()
    code.fingerprint(["import labkit.ddp; labkit.ddp.DDP"])   {"labkit/ddp/ddp.py": "5f0c...", ...}
    code.of_cells(sources)                                    the same, and "cells": a notebook's

The sources are parsed, not run. Imports lead from the names in a cell to the functions, classes and
constants of labkit that it can reach, these to others, and so on:

    cell: Trainer(...) -> trainer.Trainer -> comm.all_reduce -> comm_log.Event    used: digested
                          trainer.STRATEGIES                                      not used: not

A digest covers only the used parts of a file: their syntax trees without docstrings. So changing a
comment, a docstring, a line break or an unused function changes no digest. Names that exist only
at run time are followed in strings: "labkit.train:main", programs, names of data files. A module
that is passed on (for example to getattr) counts as used completely.
"""

import ast
import hashlib
import re
import textwrap
from pathlib import Path

from labkit.measure.machine import ROOT

DIGITS = 12
CELLS = "cells"  # the key of a notebook's own code
MAGIC = re.compile(r"^[%!].*$", re.MULTILINE)
NAMED = re.compile(r"(?P<whole>labkit\.)?(?P<path>\w+(?:\.\w+)*)(?::(?P<name>\w+))?")
DATA = (".csv", ".json", ".mplstyle", ".yaml")
EXTENSION = "import labkit\nlabkit.load_ipython_extension\n"  # what %load_ext labkit runs


def changed(recorded, today):
    """Return the names of files that differ between two fingerprints, sorted.

    recorded: a fingerprint, or None for an empty one.
    """
    recorded = recorded or {}
    return sorted(
        name for name in recorded.keys() | today.keys() if recorded.get(name) != today.get(name)
    )


def digest(parts):
    """Return the first DIGITS hexadecimal digits of a SHA-256 of repr(parts)."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:DIGITS]


def canonical(node):
    """Return a syntax tree as nested tuples without docstrings, equal on all Python versions."""
    if isinstance(node, list):
        return tuple(canonical(child) for child in node)
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr):
        return ("JoinedStr", *map(canonical, joined(node.values)))
    fields = [
        (name, canonical(value))
        for name, value in ast.iter_fields(without_docstring(node))
        if value is not None and value != [] and name != "kind"
    ]
    return (type(node).__name__, *fields)


def joined(values):
    """Merge neighboring texts of an f-string, which Python versions split differently."""
    parts = []
    for value in values:
        if parts and isinstance(value, ast.Constant) and isinstance(parts[-1], ast.Constant):
            parts[-1] = ast.Constant(parts[-1].value + value.value)
        elif not (isinstance(value, ast.Constant) and value.value == ""):
            parts.append(value)
    return parts


def without_docstring(node):
    """Return the node without its docstring, if it has one."""
    if not isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node
    if ast.get_docstring(node, clean=False) is None:
        return node
    fields = dict(ast.iter_fields(node)) | {"body": node.body[1:]}
    return type(node)(**fields)


class Module:
    """A parsed file. `definitions`: name -> statements; `always`: statements that run on import."""

    def __init__(self, name, text, is_package=False):
        self.name = name
        self.tree = without_docstring(ast.parse(text))
        self.bindings = bindings(self.tree, name if is_package else name.rpartition(".")[0])
        self.definitions = {}
        self.always = []
        self.exported = set()
        imports = (ast.Import, ast.ImportFrom)
        self.body = [part for part in self.tree.body if not isinstance(part, imports)]
        for statement in self.body:
            names = bound(statement)
            for name in names:
                self.definitions.setdefault(name, []).append(statement)
            if not names or self.registers(statement):
                self.always.append(statement)
            if "__all__" in names:
                self.exported = set(ast.literal_eval(statement.value))

    def registers(self, statement):
        """Return whether a decorator of labkit may register this definition in a table."""
        decorators = {base(part) for part in getattr(statement, "decorator_list", [])}
        targets = set().union(*(self.bindings.get(name, ()) for name in decorators))
        ours = any(target.startswith("labkit") for target in targets)
        return ours or bool(decorators & self.definitions.keys())

    def statements(self, name):
        """Return the statements that define the name or always run. None: all but imports."""
        return self.body if name is None else [*self.definitions.get(name, ()), *self.always]


def base(node):
    """Return the first name of a chain of attributes, subscripts and calls, or None."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call | ast.Starred):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def bound(statement):
    """Return the names that a statement of a module defines or changes, as a list."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.If) and "__name__" in names_in(statement.test):
        return ["__main__"]
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = getattr(statement, "targets", None) or [statement.target]
        parts = [part for target in targets for part in getattr(target, "elts", [target])]
        return [name for name in map(base, parts) if name]
    inner = [part for part in ast.iter_child_nodes(statement) if isinstance(part, ast.stmt)]
    return [name for part in inner for name in bound(part)]


def names_in(node):
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def bindings(tree, package=""):
    """Return {local name: dotted names} for all imports in the tree."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                target = alias.name if alias.asname else alias.name.partition(".")[0]
                names.setdefault(alias.asname or target, set()).add(target)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            parent = [*above, node.module] if node.module else above
            for alias in node.names:
                target = ".".join([*parent, alias.name])
                names.setdefault(alias.asname or alias.name, set()).add(target)
    return names


class Uses(ast.NodeVisitor):
    """The names in a tree: `dotted` (attribute chains, through imports) and `texts` (strings)."""

    def __init__(self, bindings):
        self.bindings = bindings
        self.dotted = set()
        self.texts = set()

    def visit_Attribute(self, node):
        chain = []
        inner = node
        while isinstance(inner, ast.Attribute):
            chain.insert(0, inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            self.add(inner.id, chain)
        else:
            self.visit(inner)

    def visit_Name(self, node):
        self.add(node.id, [])

    def visit_Constant(self, node):
        if isinstance(node.value, str):
            self.texts.add(node.value)

    def add(self, name, chain):
        self.dotted |= {".".join([target, *chain]) for target in self.bindings.get(name, ())}


class Code:
    """The sources below root/labkit. Each is parsed when it is reached; none is imported."""

    def __init__(self, root=ROOT):
        self.root = Path(root)
        self.paths = {}
        self.data = {}
        self.parsed = {}
        self.known = {}
        for path in sorted((self.root / "labkit").rglob("*.*")):
            if path.suffix == ".py":
                parts = path.relative_to(self.root).with_suffix("").parts
                self.paths[".".join(part for part in parts if part != "__init__")] = path
            elif path.suffix in DATA:
                self.data.setdefault(path.name, []).append(path)

    def fingerprint(self, sources):
        """Return {file: digest} of the code in labkit that pieces of Python source can reach."""
        statements, files = self.reach(ast.parse("\n".join(sources)))
        digests = {}
        for name, of in statements.items():
            in_order = sorted(of, key=lambda statement: statement.lineno)
            digests[self.shown(self.paths[name])] = digest(
                [self.known[statement][0] for statement in in_order]
            )
        for path in files:
            digests[self.shown(path)] = hashlib.sha256(path.read_bytes()).hexdigest()[:DIGITS]
        return dict(sorted(digests.items()))

    def of_cells(self, sources):
        """Return the fingerprint of a notebook's code cells; "cells" is the digest of the cells."""
        magics = [line for source in sources for line in MAGIC.findall(source)]
        code = [MAGIC.sub("", source) for source in sources]
        extension = [EXTENSION] if any("labkit" in line for line in magics) else []
        own = digest([magics, canonical(ast.parse("\n".join(code)))])
        return {CELLS: own} | self.fingerprint([*code, *extension])

    def shown(self, path):
        return path.relative_to(self.root).as_posix()

    def module(self, name):
        if name not in self.parsed:
            path = self.paths[name]
            text = path.read_text(encoding="utf-8")
            self.parsed[name] = Module(name, text, path.name == "__init__.py")
        return self.parsed[name]

    def reach(self, tree):
        """Return ({module: statements}, data files) that the tree can reach."""
        waiting, files = self.named(tree, bindings(tree))
        reached = {}
        seen = set()
        while waiting:
            symbol = waiting.pop()
            if symbol in seen:
                continue
            seen.add(symbol)
            module = self.module(symbol[0])
            for statement in module.statements(symbol[1]):
                _, symbols, data = self.about(module, statement)
                reached.setdefault(module.name, set()).add(statement)
                waiting |= symbols
                files |= data
        return reached, files

    def about(self, module, statement):
        """Return (digest, symbols, data files) of a module's statement, from a cache."""
        if statement not in self.known:
            symbols, files = self.named(statement, module.bindings)
            own = names_in(statement) & module.definitions.keys()
            symbols |= {(module.name, name) for name in own}
            self.known[statement] = (digest(canonical(statement)), symbols, files)
        return self.known[statement]

    def named(self, tree, bindings):
        """Return (symbols, data files) that names and strings in the tree lead to."""
        uses = Uses(bindings)
        uses.visit(tree)
        dotted = uses.dotted.union(*map(self.in_text, uses.texts))
        symbols = {symbol for name in dotted for symbol in self.resolve(name)}
        return symbols, {path for text in uses.texts for path in self.data.get(text, ())}

    def in_text(self, text):
        """Return dotted names in a string: a program's imports, or "labkit.train:main"."""
        if "import" in text and "labkit" in text:
            try:
                tree = ast.parse(textwrap.dedent(text))
            except SyntaxError:
                return set()
            return set().union(*bindings(tree).values())
        match = NAMED.fullmatch(text)
        path = match and f"labkit.{match['path']}"
        if not match or path not in self.paths or not (match["whole"] or "." in match["path"]):
            return set()
        return {f"{path}.{match['name']}" if match["name"] else path}

    def resolve(self, dotted):
        """Yield the symbols (module, name) of "labkit.models.build"; name None: the full module."""
        parts = dotted.split(".")
        known = [n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in self.paths]
        if not known:
            return
        module = self.module(".".join(parts[: known[-1]]))
        rest = parts[known[-1] :]
        if rest and rest[0] in module.definitions:
            yield (module.name, rest[0])
        elif rest and rest[0] in module.bindings:
            for target in module.bindings[rest[0]]:
                yield from self.resolve(".".join([target, *rest[1:]]))
        else:
            yield (module.name, None)
            for name in module.exported & module.bindings.keys():
                yield from self.resolve(f"{module.name}.{name}")

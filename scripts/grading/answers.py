"""Read an answer from a submission: the function, and the imports, constants, functions and classes that it uses.

    pieces(cells, "set_up")     [Piece("import math", cell 2, line 1), Piece("def set_up(module): ...", cell 9, line 4)]

No other statement of a submission is run. This file reads what learners wrote, so it runs in the sandbox only: deeply
nested code can crash Python's parser. Standard library only.
"""

import ast
import difflib
from dataclasses import dataclass

from grading.exercises import plain

# names that each rank provides; a submission's own value, such as world_size = 2, would be wrong on 3 ranks
GIVEN = ("torch", "dist", "comm", "rank", "world_size", "local_rank", "node", "device", "attempt", "record", "progress")
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
SIMPLE = ("abs", "bool", "complex", "float", "frozenset", "int", "len", "list", "range", "round", "set", "sum", "tuple")


class Unreadable(Exception):
    """Raised if a submission has no such answer; the message is one line. line: of the submission, or ""."""

    def __init__(self, message, line=""):
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Piece:
    """Source of one statement. cell, line: where it begins, counted from 1."""

    text: str
    cell: int
    line: int


def statements(cells):
    """Return ([(statement, source, cell number)], [(cell number, source, SyntaxError)])."""
    found, broken = [], []
    for number, cell in enumerate(map(plain, cells), start=1):
        try:
            found += [(node, cell, number) for node in ast.parse(cell).body]
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            broken.append((number, cell, error))
    return found, broken


def names_defined(node, known):
    """Return the names that a statement defines, if an answer may use it: a definition, import or constant.

    known: names that are defined before it.
    """
    if isinstance(node, DEFINITIONS):
        return [node.name]
    if isinstance(node, ast.Import):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value and is_constant(node.value, known):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def is_constant(value, known):
    """Return whether a value needs only literals, known names and SIMPLE functions, as `float("inf")` and `2 * SIZE`.

    A result, such as `loss = losses[-1]` of a plot, could end an answer that only has a `loss` of its own.
    """
    nodes = list(at_once(value))
    own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names = {node.id for node in nodes if isinstance(node, ast.Name)} - own
    return names <= {*known, *GIVEN, *SIMPLE} and not any(map(may_fail, nodes))


def may_fail(node):
    """Return whether an operation may fail for a value that other statements have changed: a[-1], total / count."""
    if isinstance(node, ast.Call):
        return not isinstance(node.func, ast.Name) or node.func.id not in SIMPLE
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod)):
        return not isinstance(node.right, ast.Constant)
    return isinstance(node, (ast.Subscript, ast.Await, ast.Yield, ast.YieldFrom))


def names_used(node):
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def at_once(node):
    """Yield the nodes of an expression that are evaluated with it: not the body of a lambda."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [node.args] if isinstance(node, ast.Lambda) else ast.iter_child_nodes(node)


def pieces(cells, name):
    """Return the Pieces of the answer `name`, in the order of the submission. Raises Unreadable.

    If a name is defined several times, the last definition counts, as in a notebook that is run from top to bottom;
    for a constant, also the one before it.
    """
    found, broken = statements(cells)
    defined, before = {}, []
    for place, (node, _, _) in enumerate(found):
        early = names_used(node) if isinstance(node, (ast.Assign, ast.AnnAssign)) else ()
        before.append([defined[one] for one in early if one in defined])
        defined |= {one: place for one in names_defined(node, defined) if one not in GIVEN}
    if name not in defined or not isinstance(found[defined[name]][0], ast.FunctionDef):
        raise missing(name, found, broken)
    later = [one for one in broken if one[0] > found[defined[name]][2] and f"def {name}(" in one[1]]
    if later:
        raise missing(name, [], later)
    wanted, waiting = set(), [defined[name]]
    while waiting:
        place = waiting.pop()
        if place not in wanted:
            wanted.add(place)
            waiting += [defined[one] for one in names_used(found[place][0]) if one in defined] + before[place]
    return [piece(*found[place]) for place in sorted(wanted)]


def piece(node, cell, number):
    """Return the Piece of a statement; a function's decorators belong to it."""
    decorators = getattr(node, "decorator_list", [])
    if decorators:
        first = decorators[0].lineno
        return Piece("\n".join(cell.split("\n")[first - 1 : node.end_lineno]), number, first)
    return Piece(ast.get_source_segment(cell, node), number, node.lineno)


def missing(name, found, broken):
    """Return the Unreadable of a function that is not there: a syntax error in its cell, or another name."""
    for number, cell, error in broken:
        if f"def {name}" in cell:
            line = getattr(error, "lineno", None) or 0
            text = cell.split("\n")[line - 1].strip() if line else ""
            return Unreadable(f"syntax error in {where(number, line)}: {getattr(error, 'msg', error)}", text)
    known = [node.name for node, _, _ in found if isinstance(node, ast.FunctionDef)]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; is {near[0]}() meant?" if near else ""
    return Unreadable(f"no function {name}() at the top level of the submission{hint}")


def where(cell, line):
    return f"cell {cell}, line {line}"

"""The explorers of the course, and of each notebook only what they need: a small notebook whose controls can be moved.

An explorer is a cell whose stored outputs hold a widget. From there back to the top, a statement stays if it sets or
changes a name that is read further down. So a notebook added later is found by itself, and runs in seconds.
"""

import ast
import builtins
import copy
import os
import re
import symtable

import batch
import kernels
import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

WIDGET = "application/vnd.jupyter.widget-view+json"
CERTAIN = (ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)  # they always set
BLOCKS = (ast.FunctionDef, ast.ClassDef)


def shows_a_widget(cell):
    return any(WIDGET in output.get("data", {}) for output in cell.get("outputs", []))


def with_explorers():
    """The notebooks of the course that show a widget, as paths."""
    return [path for path in batch.NOTEBOOKS.glob("*.ipynb") if any(map(shows_a_widget, batch.read(path).cells))]


def prepared(path):
    """The notebook at `path`, repeating little, on the kernel that tests use."""
    notebook = load_notebook_node(str(path))
    few = batch.few(notebook, batch.FEW | batch.SMALL)
    notebook = parameterize_notebook(notebook, few, kernel_name=kernel(), language="python")
    notebook.metadata.kernelspec.name = kernel()
    return notebook


def kernel():
    return kernels.NAME if kernels.PLACE in os.environ else "python3"


def needed(notebook):
    """A notebook of the explorers' cells and of the statements that they need, in order and without outputs."""
    every = [one for cell in batch.code_cells(notebook) for one in statements(cell)]
    others = set(dir(builtins)).union(*map(imports, every))
    inside = {one.name: read_inside(one) for one in every if isinstance(one, BLOCKS)}
    cells, wanted = [], set()
    for cell in reversed(batch.code_cells(notebook)):
        kept = []
        for statement in reversed(statements(cell)):
            reads, sets = reads_and_sets(statement)
            loads = "load_ext" in ast.unparse(statement)
            if shows_a_widget(cell) or loads or wanted & (sets | changes(statement, others)):
                certain = sets if isinstance(statement, CERTAIN) else set()
                wanted = with_insides((wanted - certain) | reads, inside)
                kept.insert(0, ast.unparse(statement))
        if kept:
            cells.insert(0, nbformat.v4.new_code_cell("\n".join(kept)))
    return nbformat.v4.new_notebook(cells=cells, metadata=notebook.metadata)


def statements(cell):
    return ast.parse(TransformerManager().transform_cell(cell.source)).body


def imports(statement):
    if not isinstance(statement, ast.Import | ast.ImportFrom):
        return set()
    return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}


def with_insides(wanted, inside):
    """Who calls a function needs what is read inside it, then and not where it is defined."""
    while more := set().union(*(inside.get(name, ()) for name in wanted)) - wanted:
        wanted = wanted | more
    return wanted


def reads_and_sets(statement):
    """The notebook's names that a statement reads before it has set them itself, and those that it sets."""
    text = ast.unparse(statement)
    if magic := re.search(r"run_cell_magic\('torchrun', '(.*?)'", text):
        return set(re.findall(r"[${](\w+)", magic[1])), set(re.findall(r"--into (\w+)", magic[1]))
    table = symtable.symtable(text, "cell", "exec")
    sets = {one.get_name() for one in table.get_symbols() if one.is_assigned() or one.is_imported()}
    if isinstance(statement, BLOCKS):
        return {one.get_name() for one in table.get_symbols() if one.is_referenced()}, sets
    if isinstance(statement, ast.For | ast.With):
        shell = copy.copy(statement)
        shell.body, shell.orelse = [ast.Pass()], []
        head, given = reads_and_sets(shell) if ast.unparse(shell) != text else (read_in(table), set())
        return head | (read_first(statement.body) - given), sets
    return read_in(table), sets


def read_first(block):
    """What the statements of a block read before one of them has set it."""
    wanted = set()
    for statement in reversed(block):
        reads, sets = reads_and_sets(statement)
        wanted = (wanted - sets if isinstance(statement, CERTAIN) else wanted) | reads
    return wanted


def read_in(table):
    """Names of the notebook that a block, or one inside it, reads."""
    module = table.get_type() == "module"
    here = {one.get_name() for one in table.get_symbols() if one.is_referenced() and (module or one.is_global())}
    return here.union(*map(read_in, table.get_children()))


def read_inside(function):
    return read_in(symtable.symtable(ast.unparse(function), "cell", "exec"))


def changes(statement, others):
    """Names of what a statement changes in place: rows.append(...), frame["x"] = ..., train(model). Not `others`."""
    if isinstance(statement, BLOCKS):
        return set()
    found = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            found.add(root(node))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and root(node.value.func) not in others:
            found |= {root(node.value.func), *map(root, node.value.args)}
    return found - others - {None}


def root(node):
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None

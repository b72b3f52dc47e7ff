"""The explorers of the course, and of each notebook only what they need: a small notebook whose controls can be moved.

An explorer is a cell whose stored outputs hold a widget. From there back to the top, a statement stays if it sets or
changes a name that is read further down. So a notebook added later is found by itself, and runs in seconds.
"""

import ast
import builtins
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
BLOCKS = (ast.FunctionDef, ast.ClassDef, ast.Lambda)


def shows_a_widget(cell):
    return any(WIDGET in output.get("data", {}) for output in cell.get("outputs", []))


def with_explorers():
    """The notebooks of the course that show a widget, as paths."""
    return [path for path in batch.NOTEBOOKS.glob("*.ipynb") if any(map(shows_a_widget, batch.read(path).cells))]


def prepared(path):
    """The notebook at `path`, repeating little, on the kernel that tests use."""
    notebook = load_notebook_node(str(path))
    notebook = parameterize_notebook(notebook, batch.few(notebook), kernel_name=kernel(), language="python")
    notebook.metadata.kernelspec.name = kernel()
    return notebook


def kernel():
    return kernels.NAME if kernels.PLACE in os.environ else "python3"


def needed(notebook):
    """A notebook of the explorers' cells and of the statements that they need, in order and without outputs."""
    cells, wanted = [], set()
    imported = {name for cell in batch.code_cells(notebook) for one in statements(cell) for name in imports(one)}
    for cell in reversed(batch.code_cells(notebook)):
        kept = []
        for statement in reversed(statements(cell)):
            reads, sets = names(statement)
            changed = changes(statement, imported | set(dir(builtins)))
            loads = "load_ext" in ast.unparse(statement)
            if shows_a_widget(cell) or loads or wanted & (sets | changed):
                wanted = (wanted - sets if isinstance(statement, CERTAIN) else wanted) | reads
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


def names(statement):
    """What a statement reads and what it sets, of the notebook's own names."""
    if magic := re.search(r"run_cell_magic\('torchrun', '(.*?)'", ast.unparse(statement)):
        return set(re.findall(r"[${](\w+)", magic[1])), set(re.findall(r"--into (\w+)", magic[1]))
    table = symtable.symtable(ast.unparse(statement), "cell", "exec")
    sets = {one.get_name() for one in table.get_symbols() if one.is_assigned() or one.is_imported()}
    return read_in(table), sets


def read_in(table):
    """Names of the module that this block or one inside it reads."""
    module = table.get_type() == "module"
    here = {one.get_name() for one in table.get_symbols() if one.is_referenced() and (module or one.is_global())}
    return here.union(*map(read_in, table.get_children()))


def changes(statement, others):
    """Names of what a statement changes in place: rows.append(...), frame["x"] = ..., train(model). Not `others`."""
    if isinstance(statement, BLOCKS):
        return set()
    found = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(root(node))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and root(node.value.func) not in others:
            found |= {root(node.value.func), *map(root, node.value.args)}
    return found - others - {None}


def root(node):
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None

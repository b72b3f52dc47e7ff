"""The folder with DeepSpeed, Accelerate, Megatron Core and torchtitan, and what their sources say."""

import ast
import os
from pathlib import Path

from repository import ROOT

HERE = ROOT / ".frameworks"
# LABKIT_FRAMEWORKS: another folder with these packages, by `pip install --no-deps --target`
FOLDER = os.environ.get("LABKIT_FRAMEWORKS") or (str(HERE) if HERE.exists() else None)
MISSING = "there is no folder .frameworks: ./scripts/lab test makes it, or python scripts/framework_packages.py"


def dataclass_fields(file, name):
    """{field: default} of a class in a file of the folder, read from its syntax tree: nothing is imported.

    A default that is no literal is the text of its expression, which is what a field() and an Enum have.
    """
    tree = ast.parse(Path(FOLDER, file).read_text())
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    fields = [node for node in found.body if isinstance(node, ast.AnnAssign)]
    return {node.target.id: value_of(node.value) for node in fields}


def value_of(node):
    """The value of a literal, also within field(default=...); else the expression's text."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "field":
        given = [one.value for one in node.keywords if one.arg == "default"]
        node = given[0] if given else node
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)

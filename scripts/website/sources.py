"""Write the folder that Sphinx reads: notebooks with stored outputs, README as first page, a page per module.

index.md                  README, and the order of everything
pictures.md               every picture that a notebook saves
notebooks/                the course; solutions/ below it
api/labkit.ddp.rst        a page per module, in the order of labkit/__init__.py
files/...                 other files of the repository that are linked
figures/  pictures/       README's figures; pictures that notebooks display
"""

import ast
import base64
import functools
import html
import json
import re
import shutil
from pathlib import Path

import nbformat
from page import WIDGET

from website.docstrings import prose
from website.links import Links

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
COLUMNS = re.compile(r"\S {2,}(?=\S).* {2,}\S")  # in a printed line: at least three columns, which must not wrap
SOLUTIONS = """# Solutions

Every exercise of the notebooks, solved and run. Try it yourself first: you remember best
what you guessed wrong.

```{toctree}
:maxdepth: 1

"""


def write(folder):
    """Write everything to the new folder."""
    links = Links(ROOT)
    course = sorted(NOTEBOOKS.glob("*.ipynb"))
    solutions = sorted((NOTEBOOKS / "solutions").glob("*.ipynb"))
    shutil.copytree(ROOT / "figures", folder / "figures", ignore=shutil.ignore_patterns("*.json"))
    for path in (*course, *solutions):
        put(folder / path.relative_to(ROOT), nbformat.writes(for_site(read(path), path, folder, links)))
    put(folder / "notebooks" / "solutions" / "index.md", SOLUTIONS + entries(solutions, NOTEBOOKS / "solutions"))
    put(folder / "pictures.md", pictures_page(links))
    put(folder / "index.md", first_page(course, links))
    for name in modules():
        put(folder / "api" / f"{name}.rst", module_page(name))
    for path in links.files:
        put(folder / "files" / f"{path}.rst", file_page(path))
        if (ROOT / path).is_file():
            shutil.copy(ROOT / path, folder / "files" / f"{path}.txt")


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def read(path):
    return nbformat.read(path, as_version=4)


# Notebooks


def for_site(notebook, path, folder, links):
    """Prepare the notebook for myst-nb: folded plumbing, links to pages, pictures with alt text."""
    notebook.metadata = {"language_info": {"name": "python", "pygments_lexer": "cell"}}
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            cell.source = links.lead(cell.source, path)
            continue
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            cell.metadata.tags = [*cell.metadata.get("tags", []), "hide-input"]
        if any(COLUMNS.search(output.get("text", "")) for output in cell.outputs):
            cell.metadata.tags = [*cell.metadata.get("tags", []), "columns"]
        for place, output in enumerate(cell.outputs):
            data = output.get("data", {})
            if WIDGET in data:
                output.data = {"text/markdown": f"*{data['text/plain']}*"}
            elif "image/png" in data:
                name = f"{path.parent.name}-{path.stem}-{number}-{place}.png"
                output.data = {"text/markdown": picture(output, folder / "pictures" / name)}
            elif "text/html" in data:
                output.data = {"text/html": f'<div class="html-output">{data["text/html"]}</div>'}
            elif "text/markdown" in data:
                output.data = {"text/markdown": links.lead(data["text/markdown"], path)}
        cell.outputs = [output for output in cell.outputs if output.get("data") != {"text/plain": ""}]
    return notebook


def picture(output, path):
    """Save the picture; return the tag that shows it, with its alt text."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(base64.b64decode(output.data["image/png"]))
    about = output.metadata.get("image/png", {})
    words = html.escape(about.get("alt") or output.data.get("text/plain", ""), quote=True)
    width = f' width="{about["width"]}"' if "width" in about else ""
    return f'<img src="/pictures/{path.name}" alt="{words}"{width}>'


def title(path):
    """Return "01 Collectives": the number of the file and the notebook's first heading."""
    number = re.match(r"\d+", path.stem)
    heading = re.search(r"^# (?:\d+ · )?(.+)", read(path).cells[0].source, re.MULTILINE)
    words = heading[1] if heading else path.stem
    return f"{number[0]} {words}" if number else words


def entries(paths, folder):
    """Return the lines of a toctree of notebooks, with its end. Solutions have their notebooks' names."""
    lines = [
        f"{title(NOTEBOOKS / path.name)} <{path.relative_to(folder).with_suffix('').as_posix()}>" for path in paths
    ]
    return "\n".join([*lines, "```\n"])


def first_page(course, links):
    text = links.lead((ROOT / "README.md").read_text(), ROOT / "README.md")
    contents = f"```{{toctree}}\n:hidden:\n:caption: The course\n\n{entries(course, ROOT)}"
    pages = "Solutions <notebooks/solutions/index>\nPictures <pictures>\napi/labkit"
    more = f"```{{toctree}}\n:hidden:\n:caption: Reference\n\n{pages}\n```\n"
    return "\n".join([text, contents, more])


def pictures_page(links):
    """Return a page of every picture that a notebook saves, with its notebook and question."""
    course = json.loads((ROOT / "figures" / "course.json").read_text())
    lines = ["# Pictures", "", "Each picture is drawn by the notebook above it, from what that run measured.", ""]
    for name, facts in course.items():
        lines += [f"## [{name}](notebooks/{name}.ipynb)", "", facts["question"], ""]
        for figure in facts["figures"]:
            words = html.escape(json.loads((ROOT / "figures" / f"{figure}.json").read_text())["alt"], quote=True)
            lines += [f'<img src="figures/{figure}.svg" alt="{words}" width="816">', ""]
    return links.lead("\n".join(lines), ROOT / "README.md")


# Modules


def file_of(name):
    """Return the file of a module, or the __init__.py of a package."""
    path = ROOT.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def modules():
    """Return the public modules of labkit in the order of its docstring; unlisted ones come last."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "labkit").rglob("*.py")]
    found = {".".join(part for part in path.parts if part != "__init__") for path in paths}
    listed = re.findall(r"\s{2,}(\w+)(?:\.py|/)", words_of("labkit"))

    def order(name):
        stem = name.rpartition(".")[2]
        return name != "labkit", listed.index(stem) if stem in listed else len(listed), name

    return sorted((name for name in found if "._" not in name), key=order)


def words_of(name):
    return ast.get_docstring(ast.parse(file_of(name).read_text())) or ""


def first_words(name):
    """Return the first paragraph of a module's docstring, as a line of reStructuredText."""
    return " ".join(prose(words_of(name).partition("\n\n")[0].split("\n")))


def module_page(name):
    """Return the page of a module: what autodoc finds; for a package its docstring and a list of its modules.

    The navigation, which is on every page, has the entries of labkit/ only; packages list their own modules.
    """
    head = [":orphan:", ""] if name.count(".") > 1 else []
    head += [name, "=" * len(name), "", f".. automodule:: {name}"]
    below = [other for other in modules() if other.rpartition(".")[0] == name]
    if not below:
        return "\n".join([*head, ""])
    rows = [(other, other.rpartition(".")[2], first_words(other)) for other in below]
    contents = [f"- :doc:`{stem} <{other}>`: {words}" for other, stem, words in rows]
    tree = [".. toctree::", "   :hidden:", "", *(f"   {stem} <{other}>" for other, stem, _ in rows)]
    return "\n".join([*head, "", *contents, "", *(tree if name == "labkit" else []), ""])


def file_page(path):
    """Return the page of a file with its text, or of a folder with a list of its files."""
    name = path.as_posix()
    there = ROOT / path
    lines = [":orphan:", "", f"``{name}``", "=" * (len(name) + 4), ""]
    if there.is_dir():
        return "\n".join([*lines, *(f"- ``{one.name}``" for one in sorted(there.iterdir())), ""])
    language = {".py": "python", ".yaml": "yaml"}.get(path.suffix, "text")
    return "\n".join([*lines, f".. literalinclude:: {path.name}.txt", f"   :language: {language}", ""])

"""Sphinx's settings for the site: myst-nb for notebooks, autodoc for modules, the furo theme."""

import importlib
import re
from functools import partial

from docutils.nodes import SkipNode
from latex2mathml.converter import convert
from pygments.lexer import inherit
from pygments.lexers import PythonLexer
from pygments.token import Name

from website.docstrings import as_rst
from website.sources import modules

project = html_title = "Distributed Training Lab"
language = "en"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
viewcode_follow_imported_members = False  # a default of another module is no place of its source
highlight_language = "none"  # of docstrings
smartquotes = False  # they would turn the two dashes of --nproc into one

nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "myst"
nb_code_prompt_show = nb_code_prompt_hide = "code, folded"
myst_enable_extensions = ["dollarmath", "html_image"]
myst_disable_syntax = ["myst_line_comment", "myst_block_break", "myst_role", "myst_target"]

autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource", "show-inheritance": True}
autodoc_default_options["ignore-module-all"] = True  # re-exported names are documented where they are defined
autodoc_inherit_docstrings = False  # no docstrings of PyTorch's base classes
add_module_names = False

html_theme = "furo"
pygments_dark_style = "github-dark"
html_static_path = ["static"]
templates_path = ["templates"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = html_show_copyright = False


class Cell(PythonLexer):
    """Python, below a first line that is IPython's own: %%torchrun --nproc $world_size."""

    tokens = {"root": [(r"\A%%.*\n", Name.Decorator), inherit]}  # noqa: RUF012


def inline_formula(translator, node):
    translator.body.append(convert(node.astext()))
    raise SkipNode


def formula(translator, node):
    translator.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise SkipNode


def show_docstring(app, what, name, one, options, lines):
    lines[:] = as_rst(lines)


def is_borrowed(app, what, name, one, skip, options):
    """Skip a class or function that a class only refers to (`linear = RowLinear`); its own module documents it."""
    return True if what == "class" and "." not in getattr(one, "__qualname__", ".") else None


def breakable(app, name, template, context, doctree):
    """Let long names in tables break after a dot or an underscore, and not after the dashes of an option."""

    def text(found):
        parts = re.sub(r"([_./=(,])(?=\w)", r"\1<wbr>", found[2])
        return found[1] + re.sub(r"--\w+", r'<span class="option">\g<0></span>', parts)

    def cell(found):
        return re.sub(r'(<span class="(?:pre|std std-doc)">)([^<]+)', text, found[0])

    if "body" in context:
        context["body"] = re.sub(r"<td\b.*?</td>", cell, context["body"], flags=re.DOTALL)


def same_list(lists, app, name, template, context, doctree):
    """Cache the list of pages of Furo: for pages that it does not name, links depend on depth and first folder only."""
    if name.startswith("_modules/") or "orphan" in app.env.metadata.get(name, ()):
        draw = context["toctree"]
        place = name.count("/"), name.partition("/")[0]

        def drawn(**options):
            if place not in lists:
                lists[place] = draw(**options)
            return lists[place]

        context["toctree"] = drawn


def setup(app):
    app.add_html_math_renderer("mathml", (inline_formula, None), (formula, None))
    app.add_lexer("cell", Cell)
    app.connect("autodoc-process-docstring", show_docstring)
    app.connect("autodoc-skip-member", is_borrowed)
    app.connect("html-page-context", breakable)
    app.connect("html-page-context", partial(same_list, {}), priority=499)  # before Furo's
    for name in modules():
        importlib.import_module(name)  # once, before Sphinx forks its workers

"""An executed notebook as one HTML page: JupyterLab's look, plumbing folded, dark where the reader's system is dark.

It needs no network: formulas are MathML, which browsers draw by themselves. And it runs nothing: what cells displayed
may hold words from a stranger's sweep, so outputs keep their text, tables and links, and no script, form or picture
from elsewhere.
"""

import re
import secrets

CODE_OR_FORMULA = re.compile(r"(```.*?```|`[^`]*`)|\$\$(.+?)\$\$|\$((?:[^$\n]|\n(?!\n))+)\$", re.DOTALL)
WIDGET = "application/vnd.jupyter.widget-view+json"
TAGS = {"a", "b", "br", "code", "details", "div", "em", "h1", "h2", "h3", "h4", "hr", "i", "li", "ol", "p", "pre"}
TAGS |= {"small", "span", "strong", "sub", "summary", "sup", "table", "tbody", "td", "tfoot", "th", "thead", "tr", "ul"}
ATTRIBUTES = {"*": ["class", "style", "title"], "a": ["href"], "td": ["colspan", "rowspan"]}
ATTRIBUTES |= {"th": ["colspan", "rowspan", "scope"]}
STYLES = ["color", "font-weight", "max-width", "opacity", "text-align"]
TEMPLATE = """{% extends 'lab/index.html.j2' %}

{% block html_head_js %}{% endblock %}
{% block html_head_js_mathjax %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}

{% block extra_css %}
{{ super() }}
{{ resources.include_css('static/theme-dark.css')
   | replace('<style type="text/css">', '<style media="(prefers-color-scheme: dark)">')
   | replace(':root', 'html:root') }}
<style>
body .jp-OutputArea-output pre { font-family: var(--jp-code-font-family); }
.folded > summary { cursor: pointer; color: var(--jp-ui-font-color2); font-size: var(--jp-ui-font-size1); }
/* Where JupyterLab's own colours lie too close to the ground for the eye (WCAG AA: 4.5 to 1) */
body .jp-RenderedHTMLCommon a:any-link { text-decoration: underline; }
html:root {
  --jp-cell-prompt-not-active-font-color: var(--jp-ui-font-color1);
  --jp-cell-prompt-not-active-opacity: 1;
  --jp-mirror-editor-operator-color: #7928a1;
  --jp-mirror-editor-number-color: #006b00;
  --jp-mirror-editor-comment-color: #2f6868;
}
@media (prefers-color-scheme: dark) {
  html:root {
    --jp-mirror-editor-operator-color: #d2a8ff;
    --jp-mirror-editor-number-color: #66bb6a;
    --jp-mirror-editor-comment-color: #7fb3b3;
  }
}
</style>
{% endblock %}

{% block data_png %}
{% set alt = output.metadata.get('alt') %}
{{ super() | replace('<img', '<img alt="%s"' | format(alt | escape_html), 1) if alt else super() }}
{% endblock %}

{% block data_html scoped %}
<div class="jp-RenderedHTMLCommon jp-RenderedHTML jp-OutputArea-output {{ extra_class }}" data-mime-type="text/html">
{{ output.data['text/html'] | harmless }}
</div>
{% endblock %}

{% block data_markdown scoped %}
<div class="jp-RenderedHTMLCommon jp-RenderedMarkdown jp-OutputArea-output {{ extra_class }}"
 data-mime-type="text/markdown">
{{ output.data['text/markdown'] | markdown2html | harmless }}
</div>
{% endblock %}

{% block data_javascript scoped %}{% endblock %}

{% block input_group %}
{% if cell.metadata.get('jupyter', {}).get('source_hidden') %}
<details class="folded"><summary>code, folded</summary>{{ super() }}</details>
{% else %}
{{ super() }}
{% endif %}
{% endblock %}
"""


def as_page(notebook):
    from latex2mathml.converter import convert
    from nbconvert import HTMLExporter

    formulas, mark = [], f"formula-{secrets.token_hex(16)}-"  # which no output can print

    def held_back(found):  # Markdown would take MathML apart
        code, block, inline = found.groups()
        if code:
            return code
        formulas.append(convert(block or inline, display="block" if block else "inline"))
        return f"{mark}{len(formulas) - 1}."

    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = CODE_OR_FORMULA.sub(held_back, cell.source)
        for output in cell.get("outputs", []):
            if WIDGET in output.get("data", {}):
                output.data = {"text/markdown": "*Controls: open the notebook in JupyterLab.*"}
    notebook.metadata.title = title_of(notebook)
    notebook.metadata.language_info = {"name": "python"}  # IPython's own lexer leaves a %%torchrun cell without colours
    exporter = HTMLExporter(raw_template=TEMPLATE, embed_images=True)
    exporter.register_filter("harmless", harmless)
    page, _ = exporter.from_notebook_node(notebook)
    return re.sub(rf"{mark}(\d+)\.", lambda found: formulas[int(found[1])], page)


def harmless(html):
    """What an output displays, without anything that a browser would run or fetch; other tags are shown as text."""
    from bleach.css_sanitizer import CSSSanitizer
    from bleach.sanitizer import Cleaner

    styles = CSSSanitizer(allowed_css_properties=STYLES)
    unstyled = re.sub(r"<style\b.*?</style>", "", html, flags=re.DOTALL)  # pandas' own, which would be shown as text
    return Cleaner(tags=TAGS, attributes=ATTRIBUTES, css_sanitizer=styles).clean(unstyled)


def title_of(notebook):
    """Its first heading, for the browser's tab and for who is read the page aloud."""
    headings = (
        re.search("^# (.+)", cell.source, re.MULTILINE) for cell in notebook.cells if cell.cell_type == "markdown"
    )
    return next((found[1] for found in headings if found), "Notebook")

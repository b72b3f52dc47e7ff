"""An executed notebook as one HTML page: JupyterLab's look, plumbing folded, dark where the reader's system is dark.

It needs no network: formulas are MathML, which browsers draw by themselves.
"""

import re

CODE_OR_FORMULA = re.compile(r"(```.*?```|`[^`]*`)|\$\$(.+?)\$\$|\$((?:[^$\n]|\n(?!\n))+)\$", re.DOTALL)
WIDGET = "application/vnd.jupyter.widget-view+json"
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

    formulas = []

    def held_back(found):  # Markdown would take MathML apart
        code, block, inline = found.groups()
        if code:
            return code
        formulas.append(convert(block or inline, display="block" if block else "inline"))
        return f"@formula{len(formulas) - 1}@"

    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = CODE_OR_FORMULA.sub(held_back, cell.source)
        for output in cell.get("outputs", []):
            if WIDGET in output.get("data", {}):
                output.data = {"text/markdown": "*Controls: open the notebook in JupyterLab.*"}
    notebook.metadata.title = title_of(notebook)
    notebook.metadata.language_info = {"name": "python"}  # IPython's own lexer leaves a %%torchrun cell without colours
    page, _ = HTMLExporter(raw_template=TEMPLATE, embed_images=True).from_notebook_node(notebook)
    return re.sub(r"@formula(\d+)@", lambda found: formulas[int(found[1])], page)


def title_of(notebook):
    """Its first heading, for the browser's tab and for who is read the page aloud."""
    headings = (
        re.search("^# (.+)", cell.source, re.MULTILINE) for cell in notebook.cells if cell.cell_type == "markdown"
    )
    return next((found[1] for found in headings if found), "Notebook")

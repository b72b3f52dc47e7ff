"""Convert an executed notebook to one HTML page: JupyterLab's look, folded plumbing, dark mode by the system's setting.

It needs no network: formulas are MathML, which browsers render themselves. It runs no code: outputs may contain text of
an untrusted sweep, so they keep their text, tables and links, but no scripts, forms or external images.
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
/* Where JupyterLab's own contrast is below WCAG AA (4.5 to 1) */
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

    # a mark that no output can contain
    formulas = []
    mark = f"formula-{secrets.token_hex(16)}-"

    def held_back(found):  # Markdown would change MathML
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
    notebook.metadata.language_info = {"name": "python"}  # IPython's lexer does not highlight a %%torchrun cell
    exporter = HTMLExporter(raw_template=TEMPLATE, embed_images=True)
    exporter.register_filter("harmless", harmless)
    page, _ = exporter.from_notebook_node(notebook)
    return re.sub(rf"{mark}(\d+)\.", lambda found: formulas[int(found[1])], page)


def harmless(html):
    """Remove everything that a browser would run or fetch from an output; other tags are shown as text."""
    from bleach.css_sanitizer import CSSSanitizer
    from bleach.sanitizer import Cleaner

    styles = CSSSanitizer(allowed_css_properties=STYLES)
    unstyled = re.sub(r"<style\b.*?</style>", "", html, flags=re.DOTALL)  # of pandas; it would be shown as text
    return Cleaner(tags=TAGS, attributes=ATTRIBUTES, css_sanitizer=styles).clean(unstyled)


def title_of(notebook):
    """Return the first heading, for the browser's tab and for screen readers."""
    headings = (
        re.search("^# (.+)", cell.source, re.MULTILINE) for cell in notebook.cells if cell.cell_type == "markdown"
    )
    return next((found[1] for found in headings if found), "Notebook")

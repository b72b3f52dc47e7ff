"""What people look at: pictures (plots.py), tables, what a notebook prints (notebook.py), widgets.

data -> plots.*(frame) -> Figure -> plots.present(...)   with alt text, caption and provenance
                                 -> plots.save(...)      figures/NAME.svg, and its data in NAME.json
"""

"""What people look at: pictures (plots.py), tables, what a notebook prints (notebook.py) and the widgets.

data -> plots.*(frame) -> Figure -> plots.present(...)   in the notebook, with alt text, caption and provenance
                                 -> plots.save(...)      figures/NAME.svg, and NAME.json with what it was drawn from
"""

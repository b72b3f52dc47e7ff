"""The sources of the site that `lab site` (scripts/web.py) builds.

sources.py      the folder that Sphinx reads: notebooks, README, a page per module
links.py        converts links of the repository to links of the site
docstrings.py   docstrings as plain text, without markup
conf.py         Sphinx's settings; uses static/ and templates/
"""

"""What `lab site` (scripts/web.py) makes the site from.

sources.py      the folder that Sphinx reads: notebooks, README, a page for each module
links.py        links of the repository as links of the site
docstrings.py   plain text as it is, not as markup
conf.py         Sphinx's settings; static/ and templates/ go with them
"""

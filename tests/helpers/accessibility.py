"""What axe, the engine of most accessibility checkers, finds on a page: labels, contrast, keyboard, and more."""

from axe_playwright_python.sync_playwright import Axe


def violations(page, include="html", exclude=()):
    """A line for each element that breaks a rule. include: a selector, look only there; exclude: selectors."""
    context = {"include": [[include]], "exclude": [[one] for one in exclude]}
    found = Axe().run(page, context, {"resultTypes": ["violations"]}).response["violations"]
    return [f"{one['id']}: {one['help']}: {node['html'][:200]}" for one in found for node in one["nodes"]]

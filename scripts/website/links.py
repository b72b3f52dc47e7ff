"""Convert links of the repository to links of the site: notebooks and modules lead to their pages.

Names without a link, such as `13_fsdp` or `labkit/ddp/ddp.py:40-72`, become links.
"""

import os
import re
import subprocess

# Fenced blocks and links stay unchanged; other text in `single` ticks may be a name.
FENCED = r"(?P<ticks>`{3,}).*?(?P=ticks)"
SPAN = re.compile(rf"(?P<kept>{FENCED}|\[[^\]]*\]\([^)]*\))|`(?P<span>[^`\n]+)`", re.DOTALL)
LINK = re.compile(rf"(?P<kept>{FENCED})|(?<!!)(?P<words>\[[^\]]*\])\((?P<to>[^)\s]+)\)", re.DOTALL)
# In a folded answer, which is HTML, a link to another notebook of its folder.
BESIDE = re.compile(rf'(?P<kept>{FENCED})|(?P<start><a href="\w+)\.ipynb"', re.DOTALL)


class Links:
    """A converter of links; `files` collects files and folders that need a page of their own."""

    def __init__(self, root):
        self.root = root
        self.files = []
        self.tracked = tracked(root)
        self.notebooks = {path.stem: path for path in root.glob("notebooks/*.ipynb")}

    def lead(self, text, path):
        """Return the Markdown of the file `path` with links to pages of the site."""
        named = SPAN.sub(lambda found: found["kept"] or self.of_name(found["span"], path), text)
        named = BESIDE.sub(lambda found: found["kept"] or f'{found["start"]}.html"', named)
        return LINK.sub(lambda found: found["kept"] or f"{found['words']}({self.of_link(found['to'], path)})", named)

    def of_name(self, span, path):
        name = span.partition(":")[0]
        one = self.notebooks.get(name)
        if one is None and name.startswith(("labkit/", "solutions/", "notebooks/")):
            one = next((p for p in (self.root / name, self.root / "notebooks" / name) if p.is_file()), None)
        if one is None or one == path:
            return f"`{span}`"
        return f"[`{span}`]({os.path.relpath(one, path.parent)})"

    def of_link(self, to, path):
        """Return the target of a link of the file `path`; other links than to repository files are unchanged."""
        there, hash, anchor = to.partition("#")
        target = (path.parent / there).resolve()
        if not there or ":" in there or target not in self.tracked:
            return to
        return f"{self.page(target.relative_to(self.root))}{hash}{anchor}"

    def page(self, path):
        """Return the source of the page, relative to the site's root, for a path of the repository."""
        if path.suffix == ".ipynb":
            return f"/{path.as_posix()}"
        if path.as_posix() == "notebooks/solutions":
            return "/notebooks/solutions/index.md"
        if path.parts[0] == "labkit" and (path.suffix == ".py" or (self.root / path).is_dir()):
            parts = [part for part in path.with_suffix("").parts if part != "__init__"]
            return f"/api/{'.'.join(parts)}.rst"
        if path not in self.files:
            self.files.append(path)
        return f"/files/{path.as_posix()}.rst"


def tracked(root):
    """Return the files of the repository and their folders; without git, those without hidden parts.

    A link to any other file, such as .git/config or a file outside the checkout, gets no page.
    """
    listed = subprocess.run(["git", "-C", root, "ls-files", "-z"], capture_output=True, text=True)
    if listed.returncode == 0:
        files = [root / name for name in listed.stdout.split("\0") if name]
    else:
        files = [path for path in root.rglob("*") if not any(part[0] == "." for part in path.relative_to(root).parts)]
    present = {path.resolve() for path in files if path.exists()}
    inside = {path for path in present if path.is_relative_to(root)}
    return inside | {folder for path in inside for folder in path.parents if folder.is_relative_to(root)}

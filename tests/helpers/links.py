"""What the pages of a folder refer to, and what of it is not there: anchors too, and whatever comes from elsewhere."""

import functools
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {"stylesheet", "icon", "preload", "prefetch", "modulepreload", "manifest"}  # a <link> of these is loaded


class Page(HTMLParser):
    """ids, links (href of an <a>), loads (what the browser fetches by itself), images (src, alt), h1 of one page."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loads, self.images, self.h1 = set(), [], [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        self.h1 += tag == "h1"
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "img":
            self.images.append((given.get("src", ""), given.get("alt") or ""))
        if tag == "form" and "action" in given:
            self.links.append(given["action"])
        if tag == "link" and FETCHED & set(given.get("rel", "").split()):
            self.loads.append(given["href"])
        self.loads += [given[name] for name in ("src", "data", "poster") if given.get(name)]
        if given.get("style"):
            self.loads += re.findall(r"url\(['\"]?([^'\")]+)", given["style"])

    handle_startendtag = handle_starttag


def pages(folder):
    return {path: Page(path.read_text()) for path in sorted(folder.rglob("*.html"))}


def elsewhere(address):
    return bool(urlsplit(address).netloc)


def led_to(path, link):
    """The file that a relative link of the page at `path` means, without its anchor."""
    return Path(os.path.normpath(path.parent / unquote(link.partition("#")[0])))


def broken(folder, read=None):
    """ "page: address" of every link or load of a page that leads to nothing in the folder."""
    read = read or pages(folder)
    page_at = functools.cache(lambda path: path / "index.html" if path.is_dir() else path)
    within = functools.cache(lambda path: path.is_file() and path.is_relative_to(folder))
    found = []
    for path, page in read.items():
        for address in dict.fromkeys([*page.links, *page.loads]):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = page_at(led_to(path, parts.path)) if parts.path else path
            there = within(target)
            anchor = unquote(parts.fragment)
            if there and anchor and target in read:
                there = anchor in read[target].ids
            if not there:
                found.append(f"{path.relative_to(folder)}: {address}")
    return found


def foreign_loads(folder, read):
    """Whatever a page or a style sheet makes the browser fetch from another place."""
    found = [f"{path.name}: {load}" for path, page in read.items() for load in page.loads if elsewhere(load)]
    for sheet in folder.rglob("*.css"):
        asked = re.findall(r"(?:url\(|@import )['\"]?([^'\");]+)", sheet.read_text())
        found += [f"{sheet.name}: {address}" for address in asked if elsewhere(address)]
    return found


def misshapen(read):
    """Links to elsewhere that no browser could follow."""
    addresses = {link for page in read.values() for link in page.links if urlsplit(link).scheme or elsewhere(link)}
    well = re.compile(r"https?://[\w-]+(\.[\w-]+)+(:\d+)?([/?#]\S*)?$|mailto:\S+@\S+$")
    return sorted(address for address in addresses if not well.match(address))

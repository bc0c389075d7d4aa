"""The elements of a page, in pairs, and its text."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

LOADING = {"src", "href", "onerror", "onclick", "onload", "srcset"}
"""Attributes by which a page would load or run something."""


class Page(HTMLParser):
    """Reads a page. `open` names the elements that are not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.cells: list[list[str]] = []
        """The rows of its tables."""
        self.headings: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in ("meta", "input"):
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        elif tag in ("td", "th"):
            self.cells[-1].append("")
        elif tag in ("h1", "h2"):
            self.headings.append("")

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1][-1] += data
        elif self.open and self.open[-1] in ("h1", "h2"):
            self.headings[-1] += data

    def facts(self) -> dict[str, str]:
        """Return the rows of two cells, the first by the second."""
        return {row[0]: row[1] for row in self.cells if len(row) == 2}

    def is_self_contained(self) -> bool:
        """Return whether it is whole, and has nothing by which a page loads or runs something."""
        return not self.open and not self.attributes & LOADING and not self.names & {"script", "link", "iframe", "img"}

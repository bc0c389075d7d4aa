"""The documentation as a site: the reference has all public names, links and anchors exist, nothing is external."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from interpreters import run_command

import trainwright as tw

ROOT = Path(__file__).parents[1]
REFERENCE = "".join(page.read_text() for page in sorted((ROOT / "docs/reference").glob("*.md")))
LOADED = {
    "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src", "link": "href",
}  # fmt: skip
"""Elements that make a browser load a file, and their attributes with the address."""


def test_the_reference_has_every_public_name_once() -> None:
    documented = re.findall(r"^::: trainwright\.(\w+)$", REFERENCE, re.MULTILINE)
    assert len(documented) == len(set(documented))
    documented += tw.callbacks.__all__  # docs/site/pages.py adds them
    mentioned = {name for name in tw.__all__ if re.search(rf"`(?:trainwright\.)?{name}` is", REFERENCE)}  # aliases
    assert set(documented) | mentioned == set(tw.__all__)


def test_each_page_of_docs_is_in_the_navigation() -> None:
    """`make docs` fails otherwise, but later."""
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = set(re.findall(r"[\w/]+\.md", navigation))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= listed


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


class Page(HTMLParser):
    """The links of a page, the addresses that it loads, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADED and LOADED[tag] in given and given.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(given[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="make docs installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    done = run_command(command, folder=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def addresses(pages: dict[Path, Page]) -> Iterator[tuple[Path, str, Path, str]]:
    """Yield the links within the site: the page, the link, and the file and the anchor that it leads to."""
    for path, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if not parts.scheme and not parts.netloc and path.name != "404.html":  # whose links begin at the root
                target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                yield path, link, target / "index.html" if target.is_dir() else target, unquote(parts.fragment)


@pytest.mark.slow
def test_links_and_anchors_lead_somewhere(pages: dict[Path, Page]) -> None:
    checked = list(addresses(pages))
    assert len(checked) > 1000
    assert not [(str(page), link) for page, link, target, _ in checked if not target.is_file()]
    lost = {(str(page), link) for page, link, to, anchor in checked if to in pages and anchor not in pages[to].anchors}
    assert not {each for each in lost if not each[1].startswith("#__")}  # made by the theme's script


@pytest.mark.slow
def test_no_page_loads_anything_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    assert not {address for page in pages.values() for address in page.loads if urlsplit(address).netloc}
    styles = [*site.rglob("*.css"), *pages]
    imported = [re.findall(r"(?:url\(|@import\s+)[\"']?(?:https?:)?//[^\"')\s]+", path.read_text()) for path in styles]
    assert not [each for found in imported for each in found]
    scripts = "".join(path.read_text() for path in pages)
    assert not re.findall(r"googletagmanager|google-analytics|fonts\.g", scripts)


@pytest.mark.slow
def test_every_public_name_is_shown_with_its_docstring(pages: dict[Path, Page], site: Path) -> None:
    anchors = {each for path, page in pages.items() if path.parent == site / "reference" for each in page.anchors}
    aliases = {"LightningDataModule", "LightningModule", "__version__"}
    assert {f"trainwright.{name}" for name in tw.__all__ if name not in aliases} <= anchors

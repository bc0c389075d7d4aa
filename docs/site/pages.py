"""What the site adds to the pages in docs/: those that lie elsewhere in the repository, and a page for each source file or
notebook that a page links to. Links are written as they work in the repository, and are turned here into the site's own.
"""

from __future__ import annotations

import ast
import json
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/RESULTS.md": "results.md",
}
"""Pages that lie outside docs/, and where they are on the site."""
ALONE = ("index.md", "changelog.md")
"""Pages that are the only ones of their tab, and so need no list of pages."""
LATER = (
    "migrating.md",
    "from_accelerate.md",
    "from_composer.md",
    "missing_names.md",
    "contributing.md",
    "changelog.md",
    "results.md",
)
"""Pages that a search shows after the guides, as it does the reference."""
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, address in ELSEWHERE.items():
        files.append(File.generated(config, address, content=(ROOT / path).read_text()))
    pages = [(path_of(each.src_uri), each.content_string) for each in files.documentation_pages()]
    linked = {target for path, text in pages for target in targets(path, text)}
    for folder in [each for each in linked if (ROOT / each).is_dir()]:
        linked |= {f"{folder}/{each.name}" for each in (ROOT / folder).glob("*.py")}
    for path in sorted(linked):
        address = address_of(path)
        if address.startswith("source/"):
            files.append(File.generated(config, address, content=source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of a page, as they work in the repository, into links between pages of the site."""
    here = page.file.src_uri
    if here in ALONE:
        page.meta["hide"] = ["navigation"]
    if here in LATER or here.startswith("reference/"):
        page.meta["search"] = {"boost": 0.3}
    if here.startswith("source/"):
        return markdown
    if here == "reference/callbacks.md":
        markdown += "".join(f"\n::: trainwright.{name}\n" for name in callback_names())

    def on_the_site(link: re.Match[str]) -> str:
        target = resolved(path_of(here), link[1])
        if not (ROOT / target).exists():
            return link[0]  # mkdocs warns of it
        return posixpath.relpath(address_of(target), posixpath.dirname(here) or ".") + (link[2] or "")

    return outside_of_blocks(markdown, lambda text: LINK.sub(on_the_site, text))


def callback_names() -> list[str]:
    """Return the public names of callbacks."""
    text = (ROOT / "trainwright/callbacks/__init__.py").read_text()
    names: list[str] = ast.literal_eval(text.partition("__all__ = ")[2])
    return names


def path_of(address: str) -> str:
    """Return where in the repository a page of the site is written."""
    return {address: path for path, address in ELSEWHERE.items()}.get(address, f"docs/{address}")


def address_of(path: str) -> str:
    """Return where on the site a file or a folder of the repository is shown."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return ELSEWHERE.get(path, f"source/{path}.md")


def resolved(path: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def targets(path: str, text: str) -> Iterator[str]:
    """Yield the files and folders that a page links to."""
    found: list[str] = []
    outside_of_blocks(text, lambda part: found.extend(each[1] for each in LINK.finditer(part)) or part)
    for link in found:
        if (ROOT / (target := resolved(path, link))).exists():
            yield target


def outside_of_blocks(text: str, change: Callable[[str], str]) -> str:
    """Return the text with all but its fenced blocks changed."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


def source_page(path: str) -> str:
    """Return a page that shows a file or a notebook, or that lists the files of a folder; searches leave it out."""
    there = ROOT / path
    head = f"---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n\n# {path}\n\n"
    if there.is_dir():
        names = sorted(each.name for each in there.glob("*.py"))
        return head + "".join(f"- [{name}]({os.path.basename(path)}/{name}.md)\n" for name in names)
    if there.suffix == ".ipynb":
        return head + "\n".join(map(cell_text, json.loads(there.read_text())["cells"]))
    return f"{head}````{LANGUAGES.get(there.suffix, 'text')}\n{there.read_text()}\n````\n"


def cell_text(cell: dict[str, Any]) -> str:
    """Return a cell of a notebook with its outputs, in Markdown; headings are below the page's own."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return re.sub(r"^#", "##", source, flags=re.MULTILINE) + "\n"
    parts = [f"````python\n{source}\n````\n"]
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            image = "".join(data["image/png"].split())
            parts.append(f"![The cell's output](data:image/png;base64,{image})\n")
        else:
            text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
            parts.append(f"````text\n{text}\n````\n")
    return "\n".join(parts)

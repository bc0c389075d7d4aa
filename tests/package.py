"""The package's source as the tests of its shape read it: the files, their syntax trees, and who declares an attribute."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1]
ROOT = PROJECT / "trainwright"
FILES = sorted(ROOT.rglob("*.py"))
SELF = ("self", "cls")


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Place = tuple[str, str]
"""A place in the code: `path:line`, and a few words of its text."""


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


class Source:
    """A Python file of the project: its path, its text and the nodes of its syntax tree."""

    def __init__(self, path: Path) -> None:
        self.path, self.stem = path.relative_to(PROJECT).as_posix(), path.stem
        self.text = path.read_text()
        self.tree = tree_of(path) if path in FILES else ast.parse(self.text)
        self.nodes = list(ast.walk(self.tree))
        self.num_lines = len(self.text.splitlines())
        self.module = self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.part = self.path.split("/")[1] if self.path.count("/") > 1 else "base"

    def at(self, node: Any = None, text: str = "") -> Place:
        return f"{self.path}:{getattr(node, 'lineno', 1)}", text or f"{self.num_lines} lines"

    def of(self, *kinds: type) -> Iterator[Any]:
        return (node for node in self.nodes if isinstance(node, kinds))


class Measure:
    """A measure's name, its definition, its places with the worst first, and its value: by default the number of places.

    Its limit is rounded up to a multiple of `step`.
    """

    def __init__(
        self, name: str, definition: str, places: list[Place], value: float | None = None, step: float = 1
    ) -> None:
        self.name, self.definition, self.places, self.step = name, definition, places, step
        self.value = len(places) if value is None else value


def repeated(found: dict[str, list[Place]]) -> list[Place]:
    """Return the names that stand in several files, starting with the names of most places."""
    several = {name: places for name, places in found.items() if len({at.partition(":")[0] for at, _ in places}) > 1}
    ordered = sorted(several.items(), key=lambda item: -len(item[1]))
    return [(places[0][0], f"{name}; also {', '.join(at for at, _ in places[1:])}") for name, places in ordered]


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """Yield (module, line, whether at import time). Imports under TYPE_CHECKING never run."""
    checked: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            checked.update(child for each in node.body for child in ast.walk(each))
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    late = {child for function in functions for child in ast.walk(function)}
    for node in ast.walk(tree):
        if node in checked:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno, node not in late
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, node not in late


@functools.cache
def declared() -> dict[str, set[str]]:
    """Return the files of the classes that declare an attribute, by the attribute's name.

    A property with a setter declares nothing, since its owner's method does the write. Nor does a protocol.
    """
    owners: dict[str, set[str]] = defaultdict(set)
    with_setter: set[str] = set()
    for path in FILES:
        for owner in (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)):
            if any(ast.unparse(base).startswith("Protocol") for base in owner.bases):
                continue
            for node in ast.walk(owner):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                    owners[node.attr].add(name_of(path))
            for node in owner.body:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                for name in (getattr(node, "name", ""), *(getattr(target, "id", "") for target in targets)):
                    owners[name].add(name_of(path))
                if f"{getattr(node, 'name', '')}.setter" in map(ast.unparse, getattr(node, "decorator_list", ())):
                    with_setter.add(node.name)  # type: ignore[attr-defined]
    return {name: files for name, files in owners.items() if name and name not in with_setter}


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in SELF

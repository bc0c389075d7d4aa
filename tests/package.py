"""The package's source as the tests of its shape read it: the files, their syntax trees, and who declares an attribute."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1]
ROOT = PROJECT / "trainwright"
FILES = sorted(ROOT.rglob("*.py"))
SELF = ("self", "cls")
Scope = dict[str, set[str]]


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


@dataclass
class ClassFacts:
    """A class in the source: its files, its bases, and its attributes with the classes that their types name."""

    files: set[str] = field(default_factory=set)
    bases: set[str] = field(default_factory=set)
    is_protocol: bool = False
    """Whether it only names attributes that another class declares."""
    attributes: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    declared_in: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


class Declarations:
    """The attributes that the classes of the package declare, and rough types of expressions.

    A type is the set of the package's classes that an annotation names, so `list[Callback]` and `Callback | None` are
    both {Callback}. An element of a list has the type of the list. Where a name has no such type the attribute's name
    decides.
    """

    def __init__(self) -> None:
        self.classes: dict[str, ClassFacts] = defaultdict(ClassFacts)
        self.returns: Scope = defaultdict(set)
        """The classes that the annotation of a function's result names, by the function's name."""
        self.owners: dict[str, set[str]] = defaultdict(set)
        """The files that declare an attribute of this name in some class."""
        self.setters: dict[str, set[str]] = defaultdict(set)
        """The files of the classes that have a setter for a property of this name."""
        kinds = (ast.ClassDef, ast.FunctionDef)
        nodes = [(name_of(path), node) for path in FILES for node in ast.walk(tree_of(path)) if isinstance(node, kinds)]
        found = [(file, node) for file, node in nodes if isinstance(node, ast.ClassDef)]
        for file, node in found:
            self.classes[node.name].files.add(file)
        for _, node in nodes:
            if isinstance(node, ast.FunctionDef):
                self.returns[node.name] |= self.named(node.returns)
        for file, node in found:
            self._read_class(file, node)

    def _read_class(self, file: str, node: ast.ClassDef) -> None:
        facts = self.classes[node.name]
        facts.bases |= {base for each in node.bases for base in self.named(each)}
        facts.is_protocol = any(ast.unparse(each).startswith("Protocol") for each in node.bases)
        for each in node.body:
            if isinstance(each, ast.FunctionDef):
                self._declare(file, facts, each.name, self.named(each.returns))
                if f"{each.name}.setter" in map(ast.unparse, each.decorator_list):
                    self.setters[each.name].add(file)
            elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                self._declare(file, facts, each.target.id, self.named(each.annotation))
            elif isinstance(each, ast.Assign):
                for target in each.targets:
                    if isinstance(target, ast.Name):
                        self._declare(file, facts, target.id, set())
        for method in (each for each in node.body if isinstance(each, ast.FunctionDef)):
            scope = self.parameters(method)
            for each in ast.walk(method):
                targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
                for target in targets if isinstance(each, (ast.Assign, ast.AnnAssign, ast.AugAssign)) else ():
                    for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                        if isinstance(one, ast.Attribute) and is_self(one.value):
                            stated = self.named(each.annotation) if isinstance(each, ast.AnnAssign) else set()
                            value = self.type_of(each.value, scope) if isinstance(each, ast.Assign) else set()
                            self._declare(file, facts, one.attr, stated or value)

    def _declare(self, file: str, facts: ClassFacts, name: str, types: set[str]) -> None:
        facts.attributes[name] |= types
        if facts.is_protocol:
            return
        facts.declared_in[name].add(file)
        self.owners[name].add(file)

    def named(self, annotation: ast.expr | None) -> set[str]:
        if annotation is None:
            return set()
        names = {each.id for each in ast.walk(annotation) if isinstance(each, ast.Name)}
        names |= {
            each.value for each in ast.walk(annotation) if isinstance(each, ast.Constant) and each.value in self.classes
        }
        return {name for name in names if name in self.classes}

    def parameters(self, function: ast.FunctionDef) -> Scope:
        given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        return {each.arg: self.named(each.annotation) for each in given}

    def type_of(self, node: ast.expr | None, scope: Scope) -> set[str]:
        if isinstance(node, ast.Name):
            return scope.get(node.id, set())
        if isinstance(node, ast.Attribute):
            types = self.ancestors(self.type_of(node.value, scope))
            return {each for one in types for each in self.classes[one].attributes.get(node.attr, ())}
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name):
                return {called.id} if called.id in self.classes else self.returns.get(called.id, set())
            return self.type_of(called, scope)
        if isinstance(node, (ast.Subscript, ast.Await, ast.NamedExpr)):
            return self.type_of(node.value, scope)
        return set()

    def ancestors(self, types: set[str]) -> set[str]:
        found: set[str] = set()
        left = set(types)
        while left:
            one = left.pop()
            found.add(one)
            left |= self.classes[one].bases - found
        return found

    def scope_of(self, function: ast.FunctionDef, outer: Scope, own: str | None) -> Scope:
        """Return the types of a function's names: its parameters, its variables and its loop targets, in order."""
        scope = {**outer, **self.parameters(function)}
        if own is not None:
            scope |= {name: {own} for name in SELF}
        for node in ast.walk(function):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                scope[node.target.id] = self.named(node.annotation)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    pairs = [(target, node.value)]
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                        pairs = list(zip(target.elts, node.value.elts, strict=False))
                    for one, value in pairs:
                        if isinstance(one, ast.Name):
                            scope[one.id] = scope.get(one.id, set()) | self.type_of(value, scope)
            elif isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.target, ast.Name):
                scope[node.target.id] = scope.get(node.target.id, set()) | self.type_of(node.iter, scope)
        return scope

    def files_of(self, types: set[str], attribute: str) -> set[str]:
        """Return the files of the classes that declare an attribute, among these classes, their bases and their subclasses."""
        kinds = self.ancestors(types)
        kinds |= {name for name in self.classes if types & self.ancestors({name})}
        return {file for each in kinds for file in self.classes[each].declared_in.get(attribute, ())}


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in SELF


def scoped_nodes(path: Path, known: Declarations) -> Iterator[tuple[ast.AST, Scope]]:
    """Yield the nodes of a file once, with the types of the names around them."""

    def walk(node: ast.AST, scope: Scope, own: str | None) -> Iterator[tuple[ast.AST, Scope]]:
        yield node, scope
        if isinstance(node, ast.ClassDef):
            own = node.name
        elif isinstance(node, ast.FunctionDef):
            scope, own = known.scope_of(node, scope, own), None
        for child in ast.iter_child_nodes(node):
            yield from walk(child, scope, own)

    return walk(tree_of(path), {}, None)

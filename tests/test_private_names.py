"""The names that the package takes from inside its dependencies are there, and the list of them is complete."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from package import FILES, name_of, tree_of
from private_names import USES, Use

LISTED = {name for use in USES for name in (*use.names.split(), *use.owner.split("."), *use.instead.split("."))}
DOCUMENTED = {"_exit", "_getframe", "_fields", "_replace", "_asdict"}
"""Of os, sys and named tuples, whose underscores hide nothing."""
BEGINNINGS = {"_fsdp", "_ds_"}
"""Prefixes of the names that engines put on a module."""
ENDINGS = re.compile(r"_(dataloader|dataset|model|batch|batches|epoch|step|hooks|start|end|next|eval|train|_)+")
"""Of hooks' and steps' names, which are joined to a stage's: `f"on_{stage}_batch_end"`."""
MINE = {"_fsdp_root", "_running_module", "_has_warned_of_its_state"}
"""Names that the package puts into other objects' `__dict__`."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path: tree_of(path) for path in FILES}


@functools.cache
def parsed(source: str) -> frozenset[str]:
    """Return the names that a source assigns or defines, and the strings in it, which may be names of attributes."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
    return frozenset(found)


def find(path: str) -> Any:
    """Return the object at a full path."""
    found: Any = None
    module = ""
    for part in path.split("."):
        module = f"{module}.{part}".lstrip(".")
        try:  # modules first: some packages have a class of the same name beside them
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            if not hasattr(found, part):
                raise
            found = getattr(found, part)
    return found


def has(owner: Any, name: str) -> bool:
    """Return whether a class or a module has a name, on its instances or in its code."""
    if hasattr(owner, name):
        return True
    name = name.removeprefix(f"_{getattr(owner, '__name__', '')}__") if "__" in name else name
    for kind in inspect.getmro(owner) if inspect.isclass(owner) else (owner,):
        try:
            source = inspect.getsource(inspect.getmodule(kind) or kind)
        except (OSError, TypeError):  # compiled
            continue
        if name in parsed(source) or f"__{name}" in parsed(source):
            return True
    return False


@pytest.mark.filterwarnings("ignore")  # warnings of other packages at their import
@pytest.mark.parametrize(
    ("use", "name"), [pytest.param(use, name, id=f"{use.owner}-{name}") for use in USES for name in use.names.split()]
)
def test_a_private_name_is_there(use: Use, name: str) -> None:
    package = use.owner.partition(".")[0]
    pytest.importorskip(package)
    try:
        is_there = has(find(use.owner), name)
    except ImportError:
        is_there = False
    if not is_there and use.instead:
        owner, _, public = use.instead.rpartition(".")
        is_there = has(find(owner), public)
    assert is_there, f"{use.owner}.{name} is gone. It is what the package needs to {use.purpose}."


def private_uses() -> Iterator[tuple[str, str]]:
    """Yield where the package uses a private name that may be another package's, and the name."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("trainwright"):
                names = [*(node.module or "").split("."), *(each.name for each in node.names)]
            elif isinstance(node, ast.Import):
                names = [part for each in node.names for part in each.name.split(".")]
            elif isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"_\w+", node.value):
                names = [node.value]
            yield from ((f"{name_of(path)}:{getattr(node, 'lineno', 0)}", each) for each in names if is_private(each))
            if isinstance(node, ast.Attribute) and node.attr.startswith("ds_"):
                yield f"{name_of(path)}:{node.lineno}", node.attr


def stored(tree: ast.AST) -> set[str]:
    """Return the attributes that methods assign to `self`."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    }


@functools.cache
def own_names() -> set[str]:
    """Return the private names that the package's classes and modules define."""
    own: set[str] = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
        own |= stored(tree)
    return {name for name in own if is_private(name)}


@pytest.mark.slow
def test_the_list_is_complete() -> None:
    known = LISTED | own_names() | DOCUMENTED | BEGINNINGS | MINE
    missing = [f"{place} {name}" for place, name in private_uses() if name not in known and not ENDINGS.fullmatch(name)]
    assert not missing, f"write into tests/private_names.py what these are for: {missing}"


def test_what_engines_are_asked_for_is_listed() -> None:
    # ZeRO's optimizers have names without an underscore that no document promises.
    used = {
        (path.name, node.attr)
        for path, tree in trees().items()
        if "strategies" in path.parts
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("zero", "engine.optimizer", "scaler")
    }
    public = {"zero_grad", "loss_scale", "dynamic_loss_scale", "optimizer", "loss_scaler", "dynamic", "get"}
    assert not {each for each in used if each[1] not in LISTED | public}


def test_each_name_of_the_list_is_used() -> None:
    words = {word for path in trees() for word in re.findall(r"\w+", path.read_text())}
    assert not [name for use in USES for name in use.names.split() if name not in words]

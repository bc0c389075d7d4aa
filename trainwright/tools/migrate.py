"""`trainwright migrate`: rewrites the imports of a script for Lightning or Accelerate, and keeps the rest of the file."""

from __future__ import annotations

import ast
import difflib
import importlib
import io
import os
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import trainwright
from trainwright.arguments import instead_of
from trainwright.launch.cli import Parser
from trainwright.launch.config import printable
from trainwright.loggers.files import write_file

_PACKAGE = re.compile(
    r"(lightning\.pytorch|pytorch_lightning|lightning\.fabric|lightning_fabric|lightning|accelerate)(?:\.|$)"
)
_MODULE = re.compile(r"from[\s\\]+([\w.]+)")
FOLDERS = ("callbacks", "loggers", "profilers", "strategies")
"""The packages of Lightning that exist here under the same names."""
_HOMES = {
    "builtins": "ValueError",
    "trainwright.cli": "ArgsType LRSchedulerCallable LightningArgumentParser LightningCLI OptimizerCallable "
    "ReduceLROnPlateau SaveConfigCallback instantiate_class",
    "trainwright.data.transfer": "to_device",
    "trainwright.engine.optimizers": "SchedulerConfig",
    "trainwright.engine.prepared": "PreparedOptimizer",
    "trainwright.gradient_norms": "grad_norm",
    "trainwright.hyperparameters": "AttributeDict HyperParameters",
    "trainwright.rank_zero": "rank_zero_debug rank_zero_deprecation",
    "trainwright.module_hooks": "EVAL_DATALOADERS LRSchedulerPLType LRSchedulerTypeUnion OptimizerLRScheduler "
    "OptimizerLRSchedulerConfig STEP_OUTPUT TRAIN_DATALOADERS",
    "trainwright.trainer.states": "RunningStage TrainerFn TrainerStatus",
}
"""The modules of names that the package itself does not offer."""
HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
RENAMED = {
    "move_data_to_device": "to_device",
    "LightningOptimizer": "PreparedOptimizer",
    "LRSchedulerConfig": "SchedulerConfig",
    "HyperparametersMixin": "HyperParameters",
    "MisconfigurationException": "ValueError",  # what wrong settings raise here
}


class Edit(NamedTuple):
    """A replacement of the characters from `start` to `end`."""

    start: int
    end: int
    text: str


class Remark(NamedTuple):
    """A name without a counterpart, in a line of the script, and the advice on it."""

    line: int
    name: str
    advice: str


def migrate_command(arguments: Sequence[str], _: Any) -> int:
    """Run `trainwright migrate` and return its exit code."""
    parser = Parser(
        prog="trainwright migrate",
        description="Rewrites the imports of a script that was written for Lightning or Accelerate, prints the difference, "
        "and lists the names that have no counterpart. The exit code is 1 if there are such names.",
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("--write", action="store_true", help="change the file, instead of printing the difference")
    options = parser.parse_args(arguments)
    shown = printable(options.script)
    try:
        text, encoding = read_script(options.script)
        migrated, remarks = migrate(text)
        if options.write and migrated != text:
            write_script(options.script, migrated.encode(encoding))
    except OSError as error:
        parser.error(f"{shown}: {error.strerror}.")
    except SyntaxError as error:
        parser.error(f"{shown}:{error.lineno or 1}: {printable(error.msg)}. Nothing was written.")
    except (ValueError, ImportError) as error:
        parser.error(f"{shown}: {printable(str(error))}. Nothing was written.")
    if migrated == text:
        print(f"{shown}: no import to rewrite")
    elif options.write:
        print(f"{shown}: rewritten")
    else:
        print(_difference(options.script, text, migrated), end="")
    for remark in remarks:
        print(f"{shown}:{remark.line}: {remark.name}: {remark.advice}")
    return 1 if remarks else 0


def read_script(path: str) -> tuple[str, str]:
    """Return the text of a script with its line endings, and its encoding."""
    if path.endswith(".ipynb"):
        raise ValueError(
            "this is a notebook. Save it as a script, with `jupyter nbconvert --to script`, and migrate that"
        )
    data = Path(path).read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding), encoding


def write_script(path: str, data: bytes) -> None:
    """Replace a script whole or not at all; the target of a link is replaced, and keeps its mode."""
    target = os.path.realpath(path)
    mode = os.stat(target).st_mode
    write_file(target, data)
    os.chmod(target, mode)


def migrate(text: str) -> tuple[str, list[Remark]]:
    """Return a script with its imports rewritten, and a remark on each name without a counterpart.

    Raises:
        SyntaxError: the text is not Python, or imports all names of one of the packages.

    >>> from trainwright.tools.migrate import migrate
    >>> migrate("import lightning as L")
    ('import trainwright as L', [])
    """
    script = Script(text)
    edits: list[Edit] = []
    remarks: list[Remark] = []
    names: dict[str, str] = {}
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                _rewrite_import(script, alias, edits, remarks, names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _PACKAGE.match(node.module or ""):
            _rewrite_from(script, node, edits, remarks)
    remarks += _missing_attributes(script.tree, names)
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text, sorted(remarks)


class Script:
    """A script's text and syntax tree, and the offsets of the tree's nodes in the text."""

    def __init__(self, text: str) -> None:
        self.text, self.tree = text, ast.parse(text)
        self._lines = re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: Any) -> tuple[int, int]:
        """Return the offsets of a node's first character and of the one after its last."""
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def separator(self, node: ast.stmt) -> str:
        """Return the text between two statements that replace this one."""
        line = self._lines[node.lineno - 1]
        before = line[: self.span(node)[0] - self._starts[node.lineno - 1]]
        ending = line[len(line.rstrip("\r\n")) :] or "\n"
        return "; " if before.strip() else ending + before

    def _offset(self, line: int, column: int) -> int:
        in_bytes = self._lines[line - 1].encode()[:column]
        return self._starts[line - 1] + len(in_bytes.decode())


def _rewrite_import(
    script: Script, alias: ast.alias, edits: list[Edit], remarks: list[Remark], names: dict[str, str]
) -> None:
    """Add the edit of one part of an `import` statement; `names` gets the name that it binds to the package."""
    if not (package := _PACKAGE.match(alias.name)):
        return
    path = alias.name[package.end() :]
    folder = path.partition(".")[0]
    if (alias.asname and folder and folder not in FOLDERS) or "fabric" in package[1]:
        remarks.append(
            Remark(alias.lineno, alias.name, advice_on(alias.name, "Fabric" if "fabric" in package[1] else folder))
        )
    elif alias.asname and folder:
        edits.append(Edit(*script.span(alias), f"trainwright.{folder} as {alias.asname}"))
    else:
        bound = alias.asname or alias.name.partition(".")[0]
        names[bound] = package[1]
        edits.append(Edit(*script.span(alias), f"trainwright as {bound}"))


def _rewrite_from(script: Script, node: ast.ImportFrom, edits: list[Edit], remarks: list[Remark]) -> None:
    """Add the edits of a `from` statement: of its module and names if all of them move together, else of all of it."""
    module = str(node.module)
    if any(alias.name == "*" for alias in node.names):
        message = f"`from {module} import *` hides the names that the script uses; import them by name first"
        raise SyntaxError(message, (None, node.lineno, None, None))
    statements: dict[str, list[str]] = {}
    for alias in node.names:
        found = counterpart(module, alias.name)
        if found is None:
            remarks.append(Remark(alias.lineno, f"{module}.{alias.name}", advice_on(module, alias.name)))
        home, name = found or (module, alias.name)
        bound = alias.asname or alias.name
        statements.setdefault(home, []).append(name if name == bound else f"{name} as {bound}")
    start, end = script.span(node)
    if len(statements) == 1:
        (home, names), match = statements.popitem(), _MODULE.match(script.text, start)
        assert match is not None
        edits.append(Edit(*match.span(1), home))
        edits += [Edit(*script.span(alias), name) for alias, name in zip(node.names, names, strict=True)]
    else:
        lines = [f"from {home} import {', '.join(names)}" for home, names in statements.items()]
        edits.append(Edit(start, end, script.separator(node).join(lines)))


def _missing_attributes(tree: ast.AST, names: dict[str, str]) -> Iterator[Remark]:
    """Yield a remark on each use of a name that the package does not have, such as `pl.utilities.seed`."""
    inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node in inner:
            continue
        used = ast.unparse(node)
        bound, *parts = used.split(".")
        if bound not in names or not re.fullmatch(r"[\w.]+", used):
            continue
        found: Any = trainwright
        for index, part in enumerate(parts):
            if isinstance(found, ModuleType) and not hasattr(found, part):
                yield Remark(node.lineno, used, _advice_on_use(names[bound], bound, parts[index:]))
            found = getattr(found, part, None)


def _advice_on_use(package: str, bound: str, parts: list[str]) -> str:
    for index, part in enumerate(parts):
        module = ".".join((package, *parts[:index]))
        if found := counterpart(module, part):
            home, name = found
            return f"use {bound}.{name}" if home == "trainwright" else f"use {home}.{name}"
        if instead_of(part, _path(module)):
            break
    return advice_on(module, part)


def counterpart(module: str, name: str) -> tuple[str, str] | None:
    """Return the module and the name here of a name of Lightning or Accelerate, or None.

    >>> from trainwright.tools.migrate import counterpart
    >>> counterpart("lightning.pytorch.utilities.rank_zero", "rank_zero_only")
    ('trainwright', 'rank_zero_only')
    """
    path = _path(module)
    folder = path.partition(".")[0]
    if path.startswith("utilities.model_summary") and name in ("ModelSummary", "summarize"):
        return "trainwright.callbacks.layer_summary", "LayerSummary"
    own = RENAMED.get(name, name)
    if own in HOME_OF:
        return HOME_OF[own], own
    if instead_of(name, path):
        return None
    if folder in FOLDERS and hasattr(importlib.import_module(f"trainwright.{folder}"), own):
        return f"trainwright.{folder}", own
    if own in trainwright.__all__ or (not path and own in (*FOLDERS, "cli", "pytorch")):
        return "trainwright", own
    return None


def advice_on(module: str, name: str) -> str:
    """Return what to do about a name without a counterpart."""
    if advice := instead_of(name, _path(module)).removeprefix(": "):
        return advice
    if name.startswith("_"):
        return "it is private in its package"
    return "no counterpart; docs/migrating.md lists what to use instead of other names"


def _path(module: str) -> str:
    """Return a module's path within its package."""
    return _PACKAGE.sub("", module, count=1)


def _difference(path: str, before: str, after: str) -> str:
    old, new = (io.StringIO(text, newline="").readlines() for text in (before, after))
    lines = difflib.unified_diff(old, new, path, path)
    return "".join(line if line.endswith(("\n", "\r")) else f"{line}\n\\ No newline at end of file\n" for line in lines)

"""`trainwright migrate`: rewrites the imports of a Lightning or Accelerate script, and keeps the other bytes of the file."""

from __future__ import annotations

import ast
import difflib
import importlib
import io
import os
import re
import tokenize
from collections.abc import Iterator, Sequence
from itertools import accumulate
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
_MODULE = re.compile(rb"from[\s\\]+([\w.]+)")
FOLDERS = ("callbacks", "loggers", "profilers", "strategies")
"""Lightning's packages that have the same names here."""
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
    "trainwright.trainer.run_position": "RunningStage TrainerFn TrainerStatus",
}
"""The modules of names that are not in trainwright.__all__."""
HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
RENAMED = {
    "move_data_to_device": "to_device",
    "LightningOptimizer": "PreparedOptimizer",
    "LRSchedulerConfig": "SchedulerConfig",
    "HyperparametersMixin": "HyperParameters",
    "MisconfigurationException": "ValueError",  # the exception for wrong settings
}


class Remark(NamedTuple):
    """A name without a counterpart, its line in the script, and the advice on it."""

    line: int
    name: str
    advice: str


def migrate_command(arguments: Sequence[str], _: Any) -> int:
    """Run `trainwright migrate` and return its exit code."""
    parser = Parser(
        prog="trainwright migrate",
        description="Rewrites the imports of a script for Lightning or Accelerate, prints the difference, and lists the names "
        "that have no counterpart. The exit code is 1 if there are such names.",
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("--write", action="store_true", help="change the file, instead of printing the difference")
    options = parser.parse_args(arguments)
    shown = printable(options.script)
    try:
        text, encoding = read_script(options.script)
        migrated, remarks = migrate(text)
        if options.write and migrated != text:
            target = os.path.realpath(options.script)
            mode = os.stat(target).st_mode
            write_file(target, migrated.encode(encoding))
            os.chmod(target, mode)
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
        old, new = (io.StringIO(each, newline="").readlines() for each in (text, migrated))
        for line in difflib.unified_diff(old, new, options.script, options.script):
            print(line, end="" if line.endswith(("\n", "\r")) else "\n\\ No newline at end of file\n")
    for remark in remarks:
        print(f"{shown}:{remark.line}: {remark.name}: {remark.advice}")
    return 1 if remarks else 0


def read_script(path: str) -> tuple[str, str]:
    """Return the text of a script with its line endings, and its encoding."""
    if path.endswith(".ipynb"):
        raise ValueError("this is a notebook. Save it as a script (`jupyter nbconvert --to script`) and migrate that")
    data = Path(path).read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding), encoding


def migrate(text: str) -> tuple[str, list[Remark]]:
    """Return a script with rewritten imports, and remarks on the names without a counterpart.

    Raises:
        SyntaxError: the text is not Python, or imports all names of one of the packages.

    >>> from trainwright.tools.migrate import migrate
    >>> migrate("import lightning as L")
    ('import trainwright as L', [])
    """
    script = Script(text)
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                script.rewrite_import(alias)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _PACKAGE.match(node.module or ""):
            script.rewrite_from(node)
    remarks = sorted([*script.remarks, *_missing_attributes(script.tree, script.packages)])
    name = next(iter(script.packages), "tw")  # by which the script knows the package
    return script.edited(), [each._replace(advice=re.sub(r"\btw\.", f"{name}.", each.advice)) for each in remarks]


class Script:
    """A script in UTF-8, with its syntax tree and the edits to make. Like the tree, it counts columns in bytes."""

    def __init__(self, text: str) -> None:
        self.tree, self.data = ast.parse(text), text.encode()
        self._lines = self.data.splitlines(keepends=True)
        self._starts = [0, *accumulate(map(len, self._lines))]
        self._edits: list[tuple[int, int, str]] = []
        self.remarks: list[Remark] = []
        self.packages: dict[str, str] = {}
        """The packages by the names that the script gives them."""

    def edited(self) -> str:
        """Return the text with all edits."""
        data = self.data
        for start, end, text in sorted(self._edits, reverse=True):
            data = data[:start] + text.encode() + data[end:]
        return data.decode()

    def rewrite_import(self, alias: ast.alias) -> None:
        """Rewrite one part of an `import` statement."""
        if not (package := _PACKAGE.match(alias.name)):
            return
        folder = alias.name[package.end() :].partition(".")[0]
        if "fabric" in package[1] or (alias.asname and folder and folder not in FOLDERS):
            advice = advice_on(alias.name, "Fabric" if "fabric" in package[1] else folder)
            self.remarks.append(Remark(alias.lineno, alias.name, advice))
        elif alias.asname and folder:
            self._rename(alias, f"trainwright.{folder} as {alias.asname}")
        else:
            name = alias.asname or alias.name.partition(".")[0]
            self.packages[name] = package[1]
            self._rename(alias, f"trainwright as {name}")

    def rewrite_from(self, node: ast.ImportFrom) -> None:
        """Rewrite a `from` statement: its module and names, or as several statements if the modules differ."""
        module = str(node.module)
        if any(alias.name == "*" for alias in node.names):
            message = f"`from {module} import *` hides the names that the script uses; import them by name first"
            raise SyntaxError(message, (None, node.lineno, None, None))
        statements: dict[str, list[str]] = {}
        for alias in node.names:
            home, name = counterpart(module, alias.name) or (module, alias.name)
            if home == module:
                self.remarks.append(Remark(alias.lineno, f"{module}.{alias.name}", advice_on(module, alias.name)))
            target = alias.asname or alias.name
            statements.setdefault(home, []).append(name if name == target else f"{name} as {target}")
        start, end = self._span(node)
        if len(statements) == 1:
            (home, names), match = statements.popitem(), _MODULE.match(self.data, start)
            assert match is not None
            self._edits.append((*match.span(1), home))
            for alias, name in zip(node.names, names, strict=True):
                self._rename(alias, name)
        else:
            line = self._lines[node.lineno - 1].decode()
            before = self.data[self._starts[node.lineno - 1] : start].decode()
            separator = "; " if before.strip() else (line[len(line.rstrip("\r\n")) :] or "\n") + before
            lines = [f"from {home} import {', '.join(names)}" for home, names in statements.items()]
            self._edits.append((start, end, separator.join(lines)))

    def _rename(self, node: ast.alias, text: str) -> None:
        self._edits.append((*self._span(node), text))

    def _span(self, node: Any) -> tuple[int, int]:
        start, end = ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        return self._starts[start[0] - 1] + start[1], self._starts[end[0] - 1] + end[1]


def _missing_attributes(tree: ast.AST, packages: dict[str, str]) -> Iterator[Remark]:
    """Yield remarks on the uses of names that this package lacks, such as `pl.utilities.seed`."""
    inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node in inner:
            continue
        used = ast.unparse(node)
        name, *parts = used.split(".")
        if name not in packages or not re.fullmatch(r"[\w.]+", used):
            continue
        value: Any = trainwright
        for index, part in enumerate(parts):
            if isinstance(value, ModuleType) and not hasattr(value, part):
                yield Remark(node.lineno, used, _advice_on_use(packages[name], name, parts[index:]))
            value = getattr(value, part, None)


def _advice_on_use(package: str, name: str, parts: list[str]) -> str:
    for index, part in enumerate(parts):
        module = ".".join((package, *parts[:index]))
        if names := counterpart(module, part):
            return f"use {name if names[0] == 'trainwright' else names[0]}.{names[1]}"
        if instead_of(part, _path(module)):
            break
    return advice_on(module, part)


def counterpart(module: str, name: str) -> tuple[str, str] | None:
    """Return the module and name here for a name of Lightning or Accelerate, or None.

    >>> from trainwright.tools.migrate import counterpart
    >>> counterpart("lightning.pytorch.utilities.rank_zero", "rank_zero_only")
    ('trainwright', 'rank_zero_only')
    """
    path = _path(module)
    folder = path.partition(".")[0]
    if path.startswith("utilities.model_summary") and name in ("ModelSummary", "summarize"):
        return "trainwright.callbacks.model_summary", "LayerSummary"
    new_name = RENAMED.get(name, name)
    if new_name in HOME_OF:
        return HOME_OF[new_name], new_name
    if instead_of(name, path):
        return None
    if folder in FOLDERS and hasattr(importlib.import_module(f"trainwright.{folder}"), new_name):
        return f"trainwright.{folder}", new_name
    if new_name in trainwright.__all__ or (not path and new_name in (*FOLDERS, "cli", "pytorch")):
        return "trainwright", new_name
    return None


def advice_on(module: str, name: str) -> str:
    """Return advice on a name without a counterpart."""
    if advice := instead_of(name, _path(module)).removeprefix(": "):
        return advice
    if name.startswith("_"):
        return "it is private in its package"
    return "no counterpart; docs/migrating.md lists what to use instead of other names"


def _path(module: str) -> str:
    return _PACKAGE.sub("", module, count=1)

"""The first program, its originals in a plain loop, in Lightning and in Accelerate, and three examples as notebooks.

PYTHONPATH=tests python tests/examples/test_first_program.py      # writes the notebooks from their programs
"""

from __future__ import annotations

import ast
import difflib
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from forked import run_python

from trainwright.tools.migrate import migrate

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FIRST = EXAMPLES / "first.py"
PLAIN, LIGHTNING, ACCELERATE = (
    EXAMPLES / f"first/{name}.py" for name in ("plain", "with_lightning", "with_accelerate")
)
SHOW_CLUB = """
from pathlib import Path

from IPython.display import Image

Image(max(Path("runs").rglob("club.png"), key=lambda path: path.stat().st_mtime))
"""
NOTEBOOKS = {"first": ("", ""), "gpt": ("--steps 400", ""), "graph": ("", SHOW_CLUB)}
"""Programs that are notebooks too: their options there, and one more cell."""


# -- the program and its originals -----------------------------------------------------------------------------------


def last_lines(program: Path) -> list[str]:
    """Run a program, and return its last lines: eight rows of digits, six predictions, the accuracy."""
    done = run_python(program, warnings_are="error" if program != ACCELERATE else None)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = [line.rstrip() for line in done.stdout.rstrip().splitlines()[-10:]]
    assert all(re.fullmatch(r"[ ░▒▓█]{48,96}", line) for line in lines[:8]), done.stdout
    assert lines[8].split() == ["5", "7", "4", "5", "9", "5"]
    assert float(lines[9].removeprefix("accuracy: ")) > 0.97
    return lines


def migrated(program: Path) -> Path:
    """Write a program into this folder as `trainwright migrate` rewrites it."""
    text, remarks = migrate(program.read_text())
    assert not remarks
    (there := Path("train.py")).write_text(text)
    return there


def difference(old: Path, new: Path) -> str:
    """Return `diff -u OLD NEW` without the times."""
    names = (path.relative_to(ROOT).as_posix() if path.is_absolute() else path.name for path in (old, new))
    lines = difflib.unified_diff(old.read_text().splitlines(), new.read_text().splitlines(), *names, lineterm="")
    return "\n".join(lines)


@pytest.mark.slow
def test_the_first_program_and_its_originals_read_the_digits() -> None:
    lines = last_lines(FIRST)
    assert last_lines(migrated(LIGHTNING)) == lines  # the same digits of the accuracy
    last_lines(migrated(ACCELERATE))
    last_lines(ACCELERATE)
    last_lines(PLAIN)
    shown = (ROOT / "README.md").read_text().partition("It prints:\n\n```\n")[2].partition("```")[0].splitlines()
    assert shown[-10:-1] == lines[:-1]
    assert re.fullmatch(r"accuracy: 0\.9[78]\d\d", shown[-1])


def test_the_pages_show_the_first_program_and_its_differences() -> None:
    program = FIRST.read_text().partition('"""\n\n')[2]
    assert len(program.splitlines()) <= 41
    for page in ("README.md", "docs/first_model.md"):
        assert f"```python\n{program}```\n" in (ROOT / page).read_text(), page
    page = (ROOT / "docs/first_model.md").read_text()
    shown = re.findall(r"^```diff\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)
    originals = [(PLAIN, FIRST), (LIGHTNING, migrated(LIGHTNING)), (ACCELERATE, migrated(ACCELERATE))]
    assert shown == [difference(PLAIN, FIRST), *(difference(path, migrated(path)) for path, _ in originals[1:])]


# -- notebooks -------------------------------------------------------------------------------------------------------


def notebook_of(name: str) -> dict[str, Any]:
    """Return a program as a notebook: its docstring, a cell for every class and function, and a last cell that runs it."""
    text = (EXAMPLES / f"{name}.py").read_text()
    docstring, *nodes = ast.parse(text).body
    options, more = NOTEBOOKS[name]
    title, _, rest = ast.literal_eval(docstring.value).strip().partition("\n\n")  # type: ignore[attr-defined]
    about = [part for part in rest.split("\n\n") if part and not part.startswith("    ")]
    cells = [
        (
            "markdown",
            "\n\n".join([f"# {title.rstrip('.')}", *about, f"This is `{name}.py`, a cell for each of its parts."]),
        )
    ]
    groups: list[list[ast.stmt]] = [[]]
    for node in nodes[:-1]:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            groups += [[node], []]
        else:
            groups[-1].append(node)
    lines = text.splitlines()
    cells += [("code", "\n".join(lines[group[0].lineno - 1 : group[-1].end_lineno])) for group in groups if group]
    body = nodes[-1].body  # type: ignore[attr-defined]
    if len(body) == 1:
        command = json.dumps([f"{name}.py", *options.split()])
        cells.append(("code", f'import sys\n\n__file__, sys.argv = "{name}.py", {command}\n{ast.unparse(body)}'))
    else:
        cells.append(("code", "\n".join(line[4:] for line in lines[body[0].lineno - 1 :])))
    cells += [("code", more.strip())] * bool(more)
    return {
        "cells": [made_cell(number, *cell) for number, cell in enumerate(cells)],
        "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def made_cell(number: int, kind: str, source: str) -> dict[str, Any]:
    cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True)}
    return cell if kind == "markdown" else {**cell, "execution_count": None, "outputs": []}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_equals_its_program(name: str) -> None:
    """If not: `PYTHONPATH=tests python tests/examples/test_first_program.py`."""
    assert json.loads((EXAMPLES / f"{name}.ipynb").read_text()) == notebook_of(name)


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from the client
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_trains_in_a_kernel(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nbformat = pytest.importorskip("nbformat")
        from notebook_client import run_notebook
    shutil.copytree(EXAMPLES / "data", tmp_path / "data")
    text = (EXAMPLES / f"{name}.ipynb").read_text().replace("400", "150")  # an epoch has 136 steps
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    run_notebook(notebook, tmp_path)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.get("text", "") for output in outputs)
    expected = {"first": r"accuracy: 0\.9[789]", "gpt": r"\nval_loss: [0-3]\.\d", "graph": r"\nval_acc: 0\.9"}
    assert re.search(expected[name], printed), printed
    assert any("image/png" in output.get("data", {}) for output in outputs) == bool(NOTEBOOKS[name][1])


if __name__ == "__main__":
    for name in NOTEBOOKS:
        (EXAMPLES / f"{name}.ipynb").write_text(json.dumps(notebook_of(name), indent=1, ensure_ascii=False) + "\n")

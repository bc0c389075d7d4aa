"""The fast tests and those of launchers, with the oldest and the newest torch of pyproject.toml, on each Python here.

`make test-versions` runs this, one environment after another; each is made anew and removed when its tests have passed.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
OLDEST = next(each for each in PROJECT["dependencies"] if each.startswith("torch>=")).replace(">=", "==")
FAST = "not slow and not gpu and not device and not cluster and not faults"
OF_TORCH = ("torch", "setuptools")
"""Pins that are those of one torch: other versions of it ask for other setuptools."""
ROWS: list[str] = []

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "uv|virtualenv"  # uv links packages out of its cache; pip copies 5 GB each time
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False
nox.options.stop_on_first_error = False
# pyenv's own commands for other versions than the chosen one are there, but fail; the interpreters lie here.
_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
os.environ["PATH"] = os.pathsep.join([*map(str, sorted(_pyenv.glob("versions/3.*/bin"))), os.environ["PATH"]])


@nox.session(python=PYTHONS)
@nox.parametrize("torch", [nox.param(OLDEST, id=f"oldest, {OLDEST}"), nox.param("torch", id="newest")])
def tests(session: nox.Session, torch: str) -> None:
    """Run these tests; what stands behind `--` goes on to pytest."""
    session.notify("table")
    row = [str(session.python), torch, "-", "-", "-", "-"]
    ROWS.append("")
    position = len(ROWS) - 1
    results = Path(session.create_tmp(), "results.xml")
    results.unlink(missing_ok=True)
    try:
        row[1] = install(session, torch)
        start = time.monotonic()
        try:
            command = ("python", "-m", "pytest", "-m", FAST, f"--junitxml={results}", *session.posargs)
            session.run(*command, env={"TMPDIR": None})  # nox's own is too deep for loader workers' sockets
        finally:
            row[2:] = [*counts(results), f"{time.monotonic() - start:.0f}"]
    finally:
        ROWS[position] = f"| {' | '.join(row)} |"
    shutil.rmtree(session.virtualenv.location)


@nox.session(python=False, default=False)
def table(session: nox.Session) -> None:
    """Print what has been run."""
    print("\n| Python | torch | passed | failed | skipped | seconds |", "|---|---|---|---|---|---|", *ROWS, sep="\n")


def install(session: nox.Session, torch: str) -> str:
    """Install the package, the tests' requirements and a torch; return the version of that."""
    constraints = Path(session.create_tmp(), "constraints.txt")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(line for line in lines if line.partition("==")[0] not in OF_TORCH))
    pinned = ("--no-build-isolation", "-c", str(constraints))
    session.env["UV_COMPILE_BYTECODE"] = "1"  # or the first test's processes would, all of them at once
    # DeepSpeed and FairScale come as source, which looks for the torch that is there: that first, and them last.
    session.install(*pinned, torch, "setuptools", "wheel", "hatchling", "editables")
    session.install(*pinned, torch, "-e", ".[test]")
    session.install(*pinned, torch, "-e", ".[test,deepspeed,fairscale]")
    version = session.run("python", "-c", "import torch; print(torch.__version__)", silent=True)
    return str(version).strip().rpartition("\n")[2]


def counts(results: Path) -> list[str]:
    """Return how many tests passed, failed and were skipped; that the interpreter died, where it did."""
    if not results.exists():
        return ["-", "died", "-"]
    suite = next(ElementTree.parse(results).iter("testsuite")).attrib
    failed = int(suite["failures"]) + int(suite["errors"])
    skipped = int(suite["skipped"])
    return [str(int(suite["tests"]) - failed - skipped), str(failed), str(skipped)]

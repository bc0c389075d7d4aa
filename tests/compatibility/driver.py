"""Run all cases of one framework in this process: `python tests/compatibility/driver.py lightning OUT.json [CASE..]`."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import math
import os
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

VERSION = "2.6.6"
"""Of the Lightning that the recorded results are of."""
EXPECTED = Path(__file__).parent / "expected.json"
THEMES = (
    "hooks", "logging", "trainer", "optimizers", "checkpoints", "evaluation", "callbacks", "data", "modules",
    "habits",
)  # fmt: skip
Case = Callable[[Any, Path], Any]


def cases() -> dict[str, Case]:
    """Return every case by its name, `theme.name`."""
    found: dict[str, Case] = {}
    for theme in THEMES:
        module = importlib.import_module(f"cases_{theme}")
        functions = {name.removeprefix("case_"): value for name, value in vars(module).items() if "case_" in name[:5]}
        found |= {f"{theme}.{name}": case for name, case in (functions | getattr(module, "CASES", {})).items()}
    return found


def plain(value: Any, folder: str) -> Any:
    """Return a case's result as JSON, with numbers rounded and paths relative to the case's folder."""
    if isinstance(value, torch.Tensor):
        return plain(value.detach().tolist(), folder)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (int, float)):
        return value if isinstance(value, int) else round(value, 4) + 0.0 if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {plain(str(key), folder): plain(each, folder) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(each, folder) for each in value]
    return str(value).replace(folder, "FOLDER")


@contextlib.contextmanager
def surroundings() -> Iterator[Path]:
    """Run a case with a new folder, a fixed seed and no output, and restore everything afterwards."""
    states = random.getstate(), torch.get_rng_state(), Path.cwd(), dict(os.environ)
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(name)
        random.seed(0)
        torch.manual_seed(0)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                yield Path(name).resolve()
        finally:
            os.chdir(states[2])
            os.environ.clear()
            os.environ.update(states[3])
            random.setstate(states[0])
            torch.set_rng_state(states[1])


def run(case: Case, framework: Any) -> Any:
    """Return the result of a case, or its error."""
    with surroundings() as folder:
        try:
            return plain(case(framework, folder), str(folder))
        except BaseException as error:
            if os.environ.get("SHOW_ERRORS"):
                traceback.print_exc(file=sys.__stderr__)
            return {"raised": f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"}


def results(name: str, chosen: Sequence[str] = ()) -> dict[str, Any]:
    """Return the results of the framework of this name, by case."""
    framework = importlib.import_module(name)
    for each in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(each).setLevel(logging.ERROR)
    return {each: run(case, framework) for each, case in cases().items() if not chosen or each in chosen}


def write(path: Path, found: dict[str, Any]) -> None:
    """Write results with one line for a case."""
    lines = [f"{json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    name, path, *chosen = sys.argv[1:]
    write(Path(path), results(name, chosen))


if __name__ == "__main__":
    main()

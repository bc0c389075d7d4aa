"""The script of a failing case: shorter than a screen, self-contained, exit code 1 if the difference shows."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fuzz.job import kind_module
from fuzz.kind import Config, Kind

FOLDER = Path(__file__).resolve().parents[1]

BY_KIND = """\
# PYTHONPATH={folder} python this.py
import importlib, sys, tempfile
from pathlib import Path

kind = importlib.import_module("{module}")
config = {config}
{run}"""

ALONE = """\
found = kind.differences(config, Path(tempfile.mkdtemp()))
print(*found, sep="\\n")
sys.exit(bool(found))
"""

IN_JOBS = """\
from fuzz.job import Jobs  # starts jobs of kind.PROCESSES processes each

jobs = Jobs(kind)
found = jobs.run(config).differences
jobs.close()
print(*found, sep="\\n")
sys.exit(bool(found))
"""


def spelled(config: Config) -> str:
    """Return a configuration as lines of Python that fit a screen."""
    lines, line = [], "    "
    for key, value in config.items():
        item = f"{key!r}: {value!r}, "
        if len(line) + len(item) > 112:
            lines.append(line.rstrip())
            line = "    "
        line += item
    return "\n".join(["{", *lines, line.rstrip(), "}"])


def script_of(kind: Kind, config: Config, found: list[str]) -> str:
    """Return the script: the kind's, if it writes one."""
    own: Any = getattr(kind, "script", None)
    if own is not None:
        return str(own(config, found))
    name = kind_module(kind)
    return BY_KIND.format(
        folder=FOLDER,
        module=name if "." in name else f"fuzz.{name}",
        config=spelled(config),
        run=ALONE if kind.PROCESSES == (1,) else IN_JOBS,
    )


def shows(text: str, seconds: float) -> tuple[bool, str]:
    """Run a script and return whether it exits with 1, as it should, and the end of its output."""
    with tempfile.TemporaryDirectory(prefix="fuzz-script-") as folder:
        path = Path(folder) / "script.py"
        path.write_text(text)
        try:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", str(path)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path])},
                capture_output=True,
                text=True,
                timeout=seconds,
                cwd=folder,
            )
        except subprocess.TimeoutExpired:
            return False, f"it takes more than {seconds:.0f} s"
        return done.returncode == 1, (done.stdout + done.stderr)[-1500:]

"""Runs every test marked `gpu` on the accelerator that is here, with the interpreter and the packages that are here.

    python tests/gpu_session.py [pytest's arguments]

Nothing is installed: tests of packages that are missing skip with the reason. Only files with such tests are imported. Only
warnings of Trainwright fail a test, since a driver or another torch may give unknown ones. Tests that have not begun after
nine minutes are skipped.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
NEEDED = ("torch", "numpy", "safetensors", "fsspec", "tqdm", "pytest")
"""Without which no test can be imported."""
MINUTES = 9.0
"""After which no test begins."""
SECONDS = 150
"""Of one test."""
FILTERS = ("default", r"error:::trainwright\b")


def missing() -> list[str]:
    """Return the missing packages without which the package or the tests cannot be imported."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def files() -> list[str]:
    """Return the files that hold tests marked `gpu`."""
    return sorted(str(path) for path in TESTS.rglob("test_*.py") if re.search(r"\bmark\.gpu\b", path.read_text()))


def main(arguments: list[str]) -> int:
    """Run the tests. Return pytest's exit code, or 0 if there are no tests."""
    if sys.version_info < (3, 11):  # noqa: UP036 - run as it is, on any interpreter
        print(
            f"{sys.executable} is Python {sys.version.split()[0]}; Python 3.11 or newer is needed. Name one by PYTHON=."
        )
        return 2
    if absent := missing():
        print(
            f"the tests on a GPU need {', '.join(absent)}, which {sys.executable} does not have; install what is missing, or "
            "put it on PYTHONPATH."
        )
        return 2
    for place in (str(ROOT), str(TESTS)):
        if place not in sys.path:
            sys.path.insert(0, place)
    # For the processes that the tests start, some of them in other folders.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        import trainwright  # noqa: F401
    except ImportError as error:
        print(f"trainwright cannot be imported here: {error}")
        return 2
    import pytest
    from session_clock import SessionClock

    options = ["-m", "gpu", "-ra", "--continue-on-collection-errors", "-p", "no:cacheprovider", "--tb=short"]
    options += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    options += ["-o", "filterwarnings=" + "\n".join(FILTERS), "--durations=10"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        options += ["--timeout", str(SECONDS)]
    given = (
        [] if any(not each.startswith("-") and Path(each.split("::")[0]).exists() for each in arguments) else files()
    )
    code = int(pytest.main([*options, *arguments, *given], plugins=[SessionClock(MINUTES)]))
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

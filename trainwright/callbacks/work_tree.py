"""The git work tree of a script: its commit when a run began, and how far its files differ from it."""

from __future__ import annotations

import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

LONGEST_SECONDS = 5.0
"""The longest time that git may take in all: the difference of a large tree on a slow disk takes minutes."""


def describe_work_tree(script: Path, began: float) -> list[tuple[str, str]]:
    """Return the rows of a table on the work tree that a script is in; empty if it is in none, or git is missing.

    `began` is the time in seconds since 1970: a commit since then is not the one that runs.
    """
    until = time.monotonic() + LONGEST_SECONDS
    folder = str(script.parent)
    moment = datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds")
    # The reflog knows which commit was checked out then; a work tree without one has its present commit alone.
    commit = _ask(folder, until, "rev-parse", "--verify", "--quiet", f"HEAD@{{{moment}}}") or _ask(
        folder, until, "rev-parse", "--verify", "--quiet", "HEAD"
    )
    if not commit:
        return []
    rows = [("git commit", commit)]
    if branch := _ask(folder, until, "branch", "--show-current"):
        rows.append(("branch", branch))
    difference = _ask(folder, until, "diff", "--no-ext-diff", "--no-textconv", "--shortstat", commit, "--")
    if difference is None:
        difference = f"unknown: git did not say it within {LONGEST_SECONDS:g} seconds"
    rows.append(("files that differ from it", difference or "none"))
    return rows


def _ask(folder: str, until: float, *arguments: str) -> str | None:
    """Return what git prints; None if it fails, is missing, or takes too long."""
    # Nothing of the repository's settings is run, and no lock is taken that a user's own git would wait for.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", folder, *arguments]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=max(0.1, until - time.monotonic()),
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip()

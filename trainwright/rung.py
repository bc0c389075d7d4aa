"""The rung of a ladder: the settings under which `trainwright ladder` runs a script, instead of the script's."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from trainwright.callers import say
from trainwright.distributed.environment import RUNG_VARIABLE, rung_file
from trainwright.rank_zero import rank_zero_only

PLAIN = (str, int, float, bool, type(None))
_is_aside = ContextVar("_is_aside", default=False)


@dataclass(frozen=True)
class Rung:
    """One way to run a script. A setting that is None is left to the script."""

    name: str
    folder: str
    """Where each rank writes its record."""
    strategy: str | None = None
    devices: int | None = None
    precision: str | None = None
    compile: bool | None = None
    accelerator: str | None = None
    steps: int | None = None
    """Optimizer steps after which the training ends, if it has not ended before."""
    seed: int | None = None

    def write(self, path: Path) -> None:
        """Write the file that the variable names."""
        path.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> Rung:
        """Return the rung of a file (ValueError if it holds none)."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(**{each.name: values[each.name] for each in fields(cls)})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"the environment has {RUNG_VARIABLE}={path}, which is not the file of a rung ({type(error).__name__}: "
                f"{error}); `trainwright ladder` sets the variable for the scripts that it runs: unset it."
            ) from error


class ActiveRung:
    """The rung of this process, and what it has replaced in the script."""

    def __init__(self, rung: Rung) -> None:
        self.rung = rung
        self.replaced: dict[str, tuple[str, str]] = {}
        """For each setting, the script's value and the rung's."""
        self.has_seeded = False
        """Whether the script has seeded itself with the rung's seed."""

    def seed_instead_of(self, given: Any) -> Any:
        """Return the rung's seed, or the one given if it has none."""
        if self.rung.seed is None:
            return given
        self.has_seeded = True
        return self.replace("seed", given, self.rung.seed)

    def replace(self, name: str, given: Any, value: Any) -> Any:
        """Return the rung's value of a setting; if the script's is another, print that, once and on rank 0."""
        was, now = _shown(given), _shown(value)
        if was != now and name not in self.replaced:
            self.replaced[name] = (was, now)
            if rank_zero_only.rank == 0:
                text = f"trainwright: this rung of the ladder sets {name}={now}; the script has {was}."
                say(text)
        return value


def active_rung() -> ActiveRung | None:
    """Return the rung under which this process runs; None if no ladder has started it."""
    path = rung_file()
    return None if path is None else _active(path)


@functools.cache
def _active(path: str) -> ActiveRung:
    return ActiveRung(Rung.read(path))


@contextmanager
def aside() -> Iterator[None]:
    """Leave the Trainers that the block makes out of the rung's record, and without its limit of steps: trial runs."""
    token = _is_aside.set(True)
    try:
        yield
    finally:
        _is_aside.reset(token)


def is_aside() -> bool:
    """Return whether what is made now is left out of the rung's record."""
    return _is_aside.get()


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, (*PLAIN, list, tuple)) else f"{type(value).__name__}(...)"

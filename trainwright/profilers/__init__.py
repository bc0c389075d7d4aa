"""Profilers: they show where a run spends its time."""

from __future__ import annotations

from trainwright.arguments import foreign_hint
from trainwright.errors import a_type_of, did_you_mean
from trainwright.profilers.advanced import AdvancedProfiler
from trainwright.profilers.base import PassThroughProfiler, Profiler
from trainwright.profilers.pytorch import PyTorchProfiler
from trainwright.profilers.simple import SimpleProfiler

PROFILERS: dict[str, type[Profiler]] = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "pytorch": PyTorchProfiler,
}


def resolve_profiler(profiler: str | Profiler | None) -> Profiler:
    """Return the profiler for a name or an instance. None returns a profiler that measures nothing."""
    if profiler is None:
        return PassThroughProfiler()
    if isinstance(profiler, str):
        if profiler not in PROFILERS:
            raise ValueError(
                f"profiler={profiler!r} is unknown; choose from {', '.join(PROFILERS)}, or pass a Profiler instance."
                f"{did_you_mean(profiler, PROFILERS)}"
            )
        return PROFILERS[profiler]()
    if not isinstance(profiler, Profiler):
        raise TypeError(
            f"profiler={profiler!r} is {a_type_of(profiler)}; expected a name ({', '.join(PROFILERS)}) or a "
            f"Profiler instance. Pass an instance, not its class.{foreign_hint(profiler)}"
        )
    return profiler


__all__ = [
    "PROFILERS", "AdvancedProfiler", "PassThroughProfiler", "Profiler", "PyTorchProfiler", "SimpleProfiler",
    "resolve_profiler",
]  # fmt: skip

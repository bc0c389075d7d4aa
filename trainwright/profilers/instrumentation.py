"""What is measured of a run, and as which action. Without a profiler nothing is wrapped, so it costs nothing.

Measured are the engine's methods below, the hooks that are overridden ("[callback] EarlyStopping.on_train_end", "[module] ..."
and "[datamodule] ...") and the wait for batches ("train_dataloader_next", and one for each evaluation).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trainwright.profilers.base import PassThroughProfiler, Profiler

T = TypeVar("T")
Undo = Callable[[], None]

ENGINE_ACTIONS: Mapping[str, str | None] = {
    "run": None,
    "backward": "backward",
    "step": "optimizer_step",
    "save": "save_checkpoint",
}
"""The engine's methods that are measured; None where the action is the method's second argument ("training_step")."""


def is_measuring(profiler: Profiler | None) -> bool:
    return profiler is not None and not isinstance(profiler, PassThroughProfiler)


def instrument(engine: object, profiler: Profiler | None) -> Undo:
    """Measure the engine's methods until the returned function is called."""
    if profiler is None or not is_measuring(profiler):
        return lambda: None
    for method, action in ENGINE_ACTIONS.items():
        bound = getattr(engine, method)
        setattr(engine, method, _timed_by_name(bound, profiler) if action is None else profiler.timed(bound, action))

    def undo() -> None:
        for method in ENGINE_ACTIONS:
            vars(engine).pop(method, None)

    return undo


def _timed_by_name(function: Callable[..., Any], profiler: Profiler) -> Callable[..., Any]:
    timed = functools.cache(functools.partial(profiler.timed, function))  # one wrapper for each name
    return lambda subject, name, *args, **kwargs: timed(name)(subject, name, *args, **kwargs)

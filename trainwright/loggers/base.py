"""The logger contract, and what every logger does with the values that it is given.

The trainer calls `start` at each run's beginning on every rank, then on rank 0: `log_hyperparams` and `log_graph` once,
`log_metrics` for each row, `state_dict` at each checkpoint, `flush` at each epoch's end, `finalize` and `close` at the run's
end. Where a run goes on, `load_state_dict` comes before `start`. What user code calls on another rank does nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, Literal

Status = Literal["success", "failed", "interrupted"]


class Logger:
    """Override what the logger can keep; the rest does nothing."""

    log_dir: str | None = None
    """The folder of this run; None before `start`, or where the logger has none."""
    save_dir: str | None = None
    """The folder of all runs; None where the logger has none."""
    name: str | None = None
    """What the runs of this logger are called together."""
    version: int | str | None = None
    """Which of them this run is."""
    experiment: Any = None
    """The writer's own object, for what it can do beyond this contract."""

    def start(self, agreed: Callable[[str], str], *, is_writer: bool) -> None:
        """Choose the place of this run. Collective: called at each run's beginning, on every rank.

        `agreed(text)` returns rank 0's text on every rank.
        """

    def log_hyperparams(self, params: Mapping[str, Any] | argparse.Namespace) -> None:
        """Keep the hyper-parameters of the run; called once by the trainer."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write one row; without a step it is of the step of the row before."""

    def log_graph(self, model: Any) -> None:
        """Keep the graph of the model; called once by the trainer."""

    def state_dict(self) -> dict[str, Any]:
        """Return, on rank 0, where this logger stands, as plain data for a checkpoint; what goes before it is written first."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint's run stood; called on every rank, before `start`, and only if that gave a state.

        What was logged after that state was taken will be logged again.
        """

    def save(self) -> None:
        """Write what is held back; what `flush` does by default."""

    def flush(self) -> None:
        """Make what was logged durable; called at the end of each epoch."""
        self.save()

    def finalize(self, status: Status) -> None:
        """Called at the end of a run, before `close`, with how it ended."""

    def close(self) -> None:
        """Flush and close; called at the end of a run, after a failure too."""
        self.flush()


def to_numbers(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the metrics as python numbers, the items of a dict among them as name/key.

    Raises:
        TypeError: a value that is no number and no tensor or array of one element.
    """
    numbers: dict[str, Any] = {}
    for name, value in metrics.items():
        if prefix and name not in ("step", "epoch"):
            name = f"{prefix}-{name}"
        if type(value) is float or type(value) is int:
            numbers[name] = value
        elif isinstance(value, Mapping):
            numbers.update(to_numbers({f"{name}/{key}": item for key, item in value.items()}))
        else:
            numbers[name] = _number(name, value)
    return numbers


def _number(name: str, value: Any) -> float:
    if isinstance(value, (bool, int, float)):
        return value
    size = getattr(value, "numel", getattr(value, "size", None))
    if hasattr(value, "item") and (size() if callable(size) else size) == 1:
        return value.detach().item() if hasattr(value, "detach") else value.item()  # type: ignore[no-any-return]
    raise TypeError(
        f"the metric {name!r} was given to a logger as a {type(value).__name__}; accepted are numbers, tensors and arrays of "
        "one element, and dicts of them."
    )


def to_dict(params: Mapping[str, Any] | argparse.Namespace) -> dict[str, Any]:
    """Return hyper-parameters as a dict; TypeError where they are no Mapping and no Namespace."""
    if isinstance(params, argparse.Namespace):
        return dict(vars(params))
    if not isinstance(params, Mapping):
        raise TypeError(
            f"log_hyperparams got {params!r:.80}, a {type(params).__name__}; accepted are a dict or a Namespace."
        )
    return dict(params)

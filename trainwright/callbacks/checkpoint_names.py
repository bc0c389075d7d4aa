"""The names of a ModelCheckpoint's files: a template with fields, filled with the epoch, the step and metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainwright.paths import absolute

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol

FIELD = r"\{([^{}:]+)(:[^{}]*)?\}"
"""A field of a template: a name and, if wanted, its format."""


def check_template(template: str) -> None:
    """Raise ValueError for an unpaired brace, and for "::"."""
    absolute(template)
    if set("{}") & set(re.sub(FIELD, "", template)):
        raise ValueError(
            f"filename={template!r} has a brace without its pair; write fields as {{epoch}} or {{val_loss:.3f}}."
        )


@dataclass(frozen=True)
class Naming:
    """How a ModelCheckpoint names its files."""

    folder: str
    """"" for names alone."""
    insert_names: bool
    """Whether {epoch} becomes "epoch=3" rather than "3"."""
    equals: str
    extension: str

    def path(self, template: str, values: Mapping[str, Any], version: int | None = None) -> str:
        """Return the path that a template gives; ValueError if it has a metric that was not logged."""
        name = f"{self.fill(template, values)}{self.extension if version is None else f'-v{version}{self.extension}'}"
        return f"{self.folder}/{name}" if self.folder else name

    def fill(self, template: str, values: Mapping[str, Any]) -> str:
        def written(match: re.Match[str]) -> str:
            name, spec = match.group(1), match.group(2) or ""
            if name not in values:
                raise ValueError(
                    f"filename={template!r} asks for {name!r}, which was not logged; there are {', '.join(sorted(values))}."
                )
            value = values[name]
            text = format(value.item() if isinstance(value, Tensor) else value, spec[1:])
            # "/" would make a folder
            return f"{name.replace('/', '_')}{self.equals}{text}" if self.insert_names else text

        return re.sub(FIELD, written, template)


def name_values(trainer: TrainerProtocol, monitor: str | None, template: str, is_left: bool) -> dict[str, Any]:
    """Return the values of a template's fields at this point of the run.

    With a monitor, a metric of earlier weights is NaN. Until the monitor is logged, or if the run stops within the epoch, so is
    every field that is missing.
    """
    metrics = trainer.metrics
    values: dict[str, Any] = {
        name: math.nan
        if monitor is not None and metrics.is_outdated(name)
        else metrics.monitored(name, "ModelCheckpoint")
        for name in trainer.callback_metrics
    }
    values.update(epoch=trainer.current_epoch, step=trainer.global_step)
    if is_left or (monitor is not None and monitor not in values):
        values = {**{name: math.nan for name, _ in re.findall(FIELD, template)}, **values}
    return values

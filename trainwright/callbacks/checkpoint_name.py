"""The names of checkpoints: a template's fields, filled with counters and metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.trainer.trainer import Trainer

SUFFIX = ".ckpt"
FIELD = r"\{([^{}:]+)(:[^{}]*)?\}"
"""A field of a template: a name and, if wanted, its format."""


def check_template(template: str) -> None:
    """Refuse a template with a brace that has no pair (ValueError)."""
    rest = re.sub(FIELD, "", template)
    if "{" in rest or "}" in rest:
        raise ValueError(
            f"filename={template!r} has a brace without its pair; write fields as {{epoch}} or {{val_loss:.3f}}."
        )


def fill_template(template: str, values: Mapping[str, Any], *, insert_names: bool) -> str:
    """Return the name that a template gives with these values; "/" in a metric's name becomes "_".

    Args:
        template: text with fields, such as "{epoch:02d}-{val_loss:.2f}".
        values: what the fields stand for.
        insert_names: write {epoch} as "epoch=3" rather than "3".

    Raises:
        ValueError: a field's metric was not logged.
    """

    def written(match: re.Match[str]) -> str:
        name, spec = match.group(1), match.group(2) or ""
        if name not in values:
            raise ValueError(
                f"filename={template!r} asks for {name!r}, which was not logged; there are {', '.join(sorted(values))}."
            )
        text = format(values[name], spec[1:])
        label = name.replace("/", "_")
        return f"{label}={text}" if insert_names else text

    return re.sub(FIELD, written, template)


def name_values(trainer: Trainer, monitor: str | None, template: str) -> dict[str, Any]:
    """Return what the fields of a name stand for where a run is saved.

    With a monitor a metric that other weights got is NaN, and so is each field where the monitor was not logged yet.
    """
    values: dict[str, Any] = {
        name: math.nan if monitor is not None and trainer.logbook.is_outdated(name) else float(value)
        for name, value in trainer.callback_metrics.items()
    }
    values.update(epoch=trainer.current_epoch, step=trainer.global_step)
    if monitor is not None and monitor not in values:  # nor are others like it
        values = {**{name: math.nan for name, _ in re.findall(FIELD, template)}, **values}
    return values

"""Settings: the Trainer's numbers, checked together before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DEFAULT_MAX_EPOCHS = 1000


@dataclass(frozen=True)
class Settings:
    """The limits and intervals of a run; what each means stands in Trainer's docstring."""

    max_epochs: int | None = None
    max_steps: int = -1
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    check_val_every_n_epoch: int = 1
    num_sanity_val_steps: int = 2
    log_every_n_steps: int = 50
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    compile: bool | dict[str, Any] = False

    def __post_init__(self) -> None:
        problems = [
            *_whole_number(self, "max_epochs", least=-1, optional=True),
            *_whole_number(self, "max_steps", least=-1),
            *_whole_number(self, "check_val_every_n_epoch", least=1),
            *_whole_number(self, "num_sanity_val_steps", least=-1),
            *_whole_number(self, "log_every_n_steps", least=1),
            *_whole_number(self, "accumulate_grad_batches", least=1),
            *(problem for stage in ("train", "val", "test") for problem in _limit(self, f"limit_{stage}_batches")),
        ]
        if self.gradient_clip_val is not None and not (
            _is_number(self.gradient_clip_val) and self.gradient_clip_val > 0
        ):
            problems.append(
                f"gradient_clip_val={self.gradient_clip_val!r}: accepted is a number above 0, or None for no limit"
            )
        if self.gradient_clip_algorithm not in ("norm", "value"):
            problems.append(
                f"gradient_clip_algorithm={self.gradient_clip_algorithm!r}: accepted are 'norm' (the total norm) and "
                "'value' (each element)"
            )
        options: object = self.compile
        if not isinstance(options, (bool, dict)):
            problems.append(f"compile={self.compile!r}: accepted are True, False and a dict of torch.compile's options")
        if problems:
            raise ValueError("Trainer was given wrong settings: " + "; ".join(problems) + ".")

    @property
    def last_epoch(self) -> int | None:
        """Return the number of epochs to train; None without end."""
        if self.max_epochs is None:
            return DEFAULT_MAX_EPOCHS if self.max_steps == -1 else None
        return None if self.max_epochs == -1 else self.max_epochs

    @property
    def clip_norm(self) -> float | None:
        """Return the limit of the total gradient norm."""
        return self.gradient_clip_val if self.gradient_clip_algorithm == "norm" else None

    @property
    def clip_value(self) -> float | None:
        """Return the limit of each element of the gradients."""
        return self.gradient_clip_val if self.gradient_clip_algorithm == "value" else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole_number(settings: Settings, name: str, *, least: int, optional: bool = False) -> list[str]:
    value = getattr(settings, name)
    if (value is None and optional) or (isinstance(value, int) and not isinstance(value, bool) and value >= least):
        return []
    without_end = " (-1 is without end)" if least == -1 else ""
    return [f"{name}={value!r}: accepted is a whole number from {least}{without_end}{', or None' if optional else ''}"]


def _limit(settings: Settings, name: str) -> list[str]:
    value = getattr(settings, name)
    if value is None or (_is_number(value) and value >= 0 and (isinstance(value, int) or value <= 1.0)):
        return []
    return [
        f"{name}={value!r}: accepted is a number of batches (int), a fraction from 0.0 to 1.0 (float), or None for all"
    ]

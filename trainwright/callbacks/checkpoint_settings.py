"""The settings of ModelCheckpoint that depend on each other, checked."""

from __future__ import annotations

from typing import Any

KEY_SETTINGS = (
    "monitor", "mode", "save_top_k", "every_n_train_steps", "every_n_epochs", "train_time_interval", "filename",
)  # fmt: skip
"""What tells the state of one ModelCheckpoint from that of another."""


def check_choices(mode: Any, save_last: Any, filename: Any, monitor: Any) -> None:
    """Refuse a mode or a save_last that is unknown (ValueError), and names that are no text (TypeError)."""
    if mode not in ("min", "max"):
        raise ValueError(f"mode={mode!r} is unknown; choose from min, max.")
    if save_last not in (None, True, False, "link"):
        raise ValueError(f"save_last={save_last!r} is not accepted; choose from True, False, None, 'link'.")
    for name, text in (("filename", filename), ("monitor", monitor)):
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{name}={text!r} is a {type(text).__name__}; accepted are a str and None.")


def check_top_k(save_top_k: Any, monitor: str | None) -> None:
    """Refuse a number of checkpoints that cannot be kept (ValueError)."""
    if isinstance(save_top_k, bool) or not isinstance(save_top_k, int) or save_top_k < -1:
        raise ValueError(f"save_top_k={save_top_k!r} is not accepted; pass a number of checkpoints, or -1 for all.")
    if monitor is None and save_top_k > 1:
        raise ValueError(
            f"save_top_k={save_top_k} needs a metric to judge by; pass monitor='val_loss' with a name that you log, or "
            "save_top_k=1 (the newest), 0 or -1."
        )


def checked_intervals(steps: Any, interval: Any, epochs: Any) -> tuple[int, int]:
    """Return the steps and the epochs between two saves, 0 for none; each epoch where nothing was given."""
    for name, value in (("every_n_train_steps", steps), ("every_n_epochs", epochs)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name}={value!r} is no whole number; pass a number from 0 (off) on.")
        if value is not None and value < 0:
            raise ValueError(f"{name}={value} is below 0; pass a number from 0 (off) on.")
    if bool(steps) + bool(epochs) + (interval is not None) > 1:
        raise ValueError(
            f"every_n_train_steps={steps!r}, train_time_interval={interval!r} and every_n_epochs={epochs!r} exclude each "
            "other; give one of them, or a ModelCheckpoint for each."
        )
    if steps is None and epochs is None and interval is None:
        return 0, 1
    return steps or 0, epochs or 0

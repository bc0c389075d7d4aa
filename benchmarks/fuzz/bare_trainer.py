"""A Trainer that shows and writes nothing by itself."""

from __future__ import annotations

from typing import Any

import trainwright as tw

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "logger": False,
}


def bare_trainer(**settings: Any) -> tw.Trainer:
    """Return a Trainer of these settings, without bars, checkpoints and loggers."""
    return tw.Trainer(**{**QUIET, **settings})

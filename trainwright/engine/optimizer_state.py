"""Optimizer state: the optimizers of a run out of a checkpoint."""

from __future__ import annotations

from typing import Any

from trainwright.checkpoint.contents import check_optimizer, restore_optimizer, with_dtypes_of
from trainwright.checkpoint.reader import Checkpoint
from trainwright.checkpoint.tensors import TensorEntry
from trainwright.engine.named_state import Named, optimizer_pieces
from trainwright.errors import CheckpointError
from trainwright.strategies import Strategy


def check_optimizers(checkpoint: Checkpoint, state: dict[str, Any], named: Named) -> None:
    """Refuse a checkpoint of other optimizers, or without any (CheckpointError)."""
    described = state.get("optimizers")
    if described is None:
        raise CheckpointError(
            f"{checkpoint.path}: it holds weights only, so a run cannot go on from it; load it as weights, or resume from "
            "a full checkpoint."
        )
    if len(described) != len(named):
        raise CheckpointError(
            f"{checkpoint.path}: it holds {len(described)} optimizers, but this run has {len(named)}. Build the same "
            "optimizers to resume, or load the weights alone."
        )
    for number, (optimizer, names) in enumerate(named):
        check_optimizer(number, optimizer, names, described[number], checkpoint.path)


def load_optimizers(checkpoint: Checkpoint, state: dict[str, Any], strategy: Strategy, named: Named) -> None:
    """Give the optimizers their state, each process its part."""
    described = state["optimizers"]
    model = checkpoint.tensors("model")
    entries = checkpoint.tensors("optimizer") if "optimizer" in checkpoint.sections else {}
    for number, (optimizer, names) in enumerate(named):
        own: dict[str, TensorEntry] = {
            name.split("/", 1)[1]: entry for name, entry in entries.items() if name.startswith(f"{number}/")
        }
        own = with_dtypes_of(names, own, model)
        strategy.allocate_optimizer_state(optimizer, names, own)
        restore_optimizer(optimizer, names, described[number], model)
    if pieces := optimizer_pieces(strategy, named):  # plain SGD has no state at all
        checkpoint.read_into("optimizer", pieces)

"""Optimizer state: the parameters that optimizers step, and their state, into a checkpoint and out of one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from trainwright.checkpoint.codec import decode, encode_stored
from trainwright.checkpoint.contents import check_optimizer, restore_optimizer, with_dtypes_of
from trainwright.checkpoint.reader import StoredCheckpoint
from trainwright.distributed.collectives import broadcast_tensors, table_of
from trainwright.distributed.ranks import Ranks
from trainwright.engine.named_state import Named, optimizer_pieces
from trainwright.engine.script_settings import fresh_group
from trainwright.errors import CheckpointError
from trainwright.strategies import Strategy


class ReplacedParameters:
    """The parameters that a strategy has replaced, for optimizers that were made before. It keeps none of them alive."""

    def __init__(self) -> None:
        self._now = WeakIdKeyDictionary()

    @contextmanager
    def followed(self, module: nn.Module) -> Iterator[None]:
        """Record which of the module's parameters the block replaces."""
        # By weak references, because a model that is sharded may not fit into memory twice.
        before = {name: TensorWeakRef(tensor) for name, tensor in module.named_parameters(remove_duplicate=False)}
        yield
        for name, now in module.named_parameters(remove_duplicate=False):
            was = before[name]() if name in before else None
            if was is not None and was is not now:
                self._now[was] = now

    def current(self, parameter: Tensor) -> Tensor:
        """Return a parameter's replacement, or the parameter itself."""
        now: Tensor = self._now.get(parameter, parameter)  # type: ignore[no-untyped-call]
        return now

    def update(self, optimizers: Iterable[Optimizer]) -> None:
        """Replace the parameters of optimizers (ValueError if an optimizer has stepped, or would train nothing)."""
        for optimizer in optimizers:
            kind = type(optimizer).__name__
            for group in optimizer.param_groups:
                now = [self.current(parameter) for parameter in group["params"]]
                if any(
                    new is not old and optimizer.state.get(old) for old, new in zip(group["params"], now, strict=True)
                ):
                    raise ValueError(
                        f"the {kind} has state for a parameter that the strategy has replaced; prepare it before its first "
                        "step (a new one in every configure_optimizers), and load its state afterwards."
                    )
                if shapes := [tuple(new.shape) for new in now if new.is_meta]:
                    raise ValueError(
                        f"the {kind} has a parameter on the meta device, of shape {shapes[0]}, that is in no prepared "
                        "model, so its steps would train nothing; prepare the model before it, or in the same call."
                    )
                group["params"] = now


def describe_optimizers(strategy: Strategy, named: Named, ranks: Ranks) -> list[dict[str, Any]]:
    """Return the groups of every optimizer and the plain values of its state, the same on every rank. Collective.

    Raises:
        CheckpointError: a value cannot be stored, on every rank if every rank owns a part of the state.
    """
    if not strategy.capabilities.divides_optimizers or ranks.world_size == 1:
        return [strategy.describe_optimizer(optimizer, names) for optimizer, names in named]
    error = ""
    described: list[dict[str, Any]] = []
    plain: list[Any] = []
    tensors: dict[str, Tensor] = {}
    try:
        for number, (optimizer, names) in enumerate(named):
            described.append(strategy.describe_optimizer(optimizer, names))
            subject = f"the state of {type(optimizer).__name__}" + (f" (optimizer {number})" if number else "")
            text, found = encode_stored(described[-1]["plain"], subject)
            plain.append(text)
            tensors |= found
    except CheckpointError as refused:  # raised after the exchange, in which the other ranks wait for this one
        error = str(refused)
    message = {"error": error, "plain": plain, "tensors": table_of(tensors)}
    parts = ranks.exchange(message, "a save of the optimizers' state")
    if errors := [part["error"] for part in parts if part["error"]]:
        raise CheckpointError(errors[0])
    joined: list[dict[str, Any]] = [{} for _ in described]
    for rank, part in enumerate(parts):
        sent = broadcast_tensors(part["tensors"], tensors if rank == ranks.rank else None, rank, strategy.device)
        for values, text in zip(joined, part["plain"], strict=True):
            values.update(decode(text, sent))
    return [{**groups, "plain": values} for groups, values in zip(described, joined, strict=True)]


def check_optimizers(checkpoint: StoredCheckpoint, state: dict[str, Any], named: Named) -> None:
    """Raise CheckpointError for a checkpoint of other optimizers, or without any."""
    described = state.get("optimizers")
    if described is None:
        raise CheckpointError(
            f"{checkpoint.path}: it holds weights only, so a run cannot be resumed from it; load it as weights, or resume "
            "from a full checkpoint."
        )
    if len(described) != len(named):
        raise CheckpointError(
            f"{checkpoint.path}: it contains {len(described)} optimizers, but this run has {len(named)}. Build the same "
            "optimizers to resume, or load only the weights."
        )
    for number, (optimizer, names) in enumerate(named):
        check_optimizer(number, optimizer, names, described[number], checkpoint.path)


def load_optimizers(
    checkpoint: StoredCheckpoint, state: dict[str, Any], strategy: Strategy, named: Named, fresh: Collection[str]
) -> None:
    """Load this process's part of the optimizers' state. The settings in `fresh` stay the script's."""
    model = checkpoint.tensors("model")
    entries = checkpoint.tensors("optimizer") if "optimizer" in checkpoint.sections else {}
    for number, (optimizer, names) in enumerate(named):
        prefix = f"{number}/"
        stored = {name.removeprefix(prefix): entry for name, entry in entries.items() if name.startswith(prefix)}
        # The state's tensors have to exist before pieces of them can be read in place.
        strategy.allocate_optimizer_state(optimizer, names, with_dtypes_of(names, stored, model))
        described = state["optimizers"][number]
        groups = zip(described["groups"], optimizer.param_groups, strict=True)
        described = {**described, "groups": [fresh_group(stored, present, fresh) for stored, present in groups]}
        restore_optimizer(optimizer, names, described, model)
    if pieces := optimizer_pieces(strategy, named):  # plain SGD has no state at all
        checkpoint.read_into("optimizer", pieces)

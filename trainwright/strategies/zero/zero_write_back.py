"""User code's writes into parameters under ZeRO, which are kept in stages 1 and 2, and rejected in stage 3.

A ZeRO step recomputes the weights from its masters. Weight clipping or a `load_state_dict` would be lost. So in stages 1 and 2
every rank copies its shard into the masters before a step and a save. Nothing is sent. Stage 3 frees a gathered parameter
without a look at it. There only `deepspeed.zero.GatheredParameters` with a `modifier_rank` writes the shards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies.zero import vendor
from trainwright.strategies.zero.master_optimizer import Shard

EMPTY = re.compile(r"\(0\)|\[0\]")
"""The shape of a tensor of one dimension without elements, as torch's errors show it."""


class ZeroWriteBack:
    """Keeps or rejects the writes of user code into the parameters of a strategy's engines."""

    def __init__(self) -> None:
        self._gathered: list[tuple[str, Any, tuple[int, int]]] = []
        """Parameters of stage 3, with the versions of the parameter and of its shard."""
        self._flat: list[tuple[Tensor, int]] = []
        """Parameters of stages 1 and 2, which are views of the engine's flat weights, and their addresses."""
        self._flats: list[tuple[Any, Any]] = []
        self._versions: list[int] = []

    def track(self, zero: Any, stage: int, rank: int, part: nn.Module, modules: Iterable[nn.Module]) -> None:
        """Track the parameters of an engine's `part`, by their names in `modules`. `zero` is its optimizer, or a substitute."""
        self._flats += vendor.flat_weights(zero, stage, rank)
        if stage < 3:
            self._flat += [(p, p.data_ptr()) for group in vendor.trained_groups(zero, stage) for p in group]
            return
        own = set(part.parameters())
        named = [pair for module in modules for pair in module.named_parameters()]
        self._gathered += [
            (name, p, vendor.versions(p)) for name, p in named if p in own and vendor.versions(p) is not None
        ]

    def check(self) -> None:
        """Raise RuntimeError for a write that stage 3 would lose."""
        for index, (name, parameter, before) in enumerate(self._gathered):
            now = vendor.versions(parameter)
            self._gathered[index] = name, parameter, now
            if now[0] != before[0] and now[1] == before[1]:
                raise RuntimeError(
                    f"the parameter {name!r} was written, which ZeRO stage 3 would lose: it frees the gathered parameter, and "
                    "a rank trains only a shard. Make it a buffer, write it in a hook such as on_train_batch_end within `with "
                    "deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):`, or choose 'ddp', 'ddp_sharded' or "
                    "'fsdp'."
                )

    def run(self, refuses: bool = True) -> None:
        """Update masters from the parameters. `refuses` raises RuntimeError for writes that cannot be kept."""
        if refuses:
            self.check()
            if any(parameter.data_ptr() != address for parameter, address in self._flat):
                raise RuntimeError(
                    "a parameter was given other memory (`parameter.data = ...`), which DeepSpeed does not step. Write in "
                    "place instead: parameter.copy_(value) under torch.no_grad()."
                )
        now = [parameter._version for parameter, _ in self._flat]
        now += [vendor.versions(parameter)[1] for _, parameter, _ in self._gathered]
        is_written, self._versions = now != self._versions, now
        for low, master in self._flats:
            # Copying all weights to offloaded masters would cost as much as the step, so only if something was written.
            if low is not None and low.numel() == master.numel() and (low.device == master.device or is_written):
                update_master(master.detach(), low)

    def clear(self) -> None:
        for tracked in (self._gathered, self._flat, self._flats):
            tracked.clear()


def update_master(master: Tensor, low: Tensor) -> None:
    """Update a float32 master from its weights, except where they are the rounded master."""
    if master.data_ptr() == low.data_ptr():
        return
    low = low.detach().to(master.device)
    if low.dtype == master.dtype:
        master.copy_(low)
    else:
        master.copy_(torch.where(low == master.to(low.dtype), master, low.to(master.dtype)))


def update_masters(shards: Iterable[Shard]) -> None:
    """Update masters from parameters that were taken off their engine."""
    for shard in shards:
        low = shard.parameter.detach().reshape(-1).narrow(0, shard.start, shard.numel)
        update_master(shard.flat.detach().narrow(0, shard.offset, shard.numel), low)


def note_empty_parameter(error: BaseException, stage: int) -> None:
    """Add a note to an error of a parameter that stage 3 has not gathered, or of a tensor that it does not know."""
    if stage == 3 and isinstance(error, RuntimeError) and EMPTY.search(str(error)):
        error.add_note(
            "Under ZeRO stage 3 a rank holds only a part of a parameter, and has an empty tensor in its place while its "
            "module is not called. A step that uses parameters() itself, or a penalty on gradients (create_graph=True), may "
            "have met one. Use parameters in their module's forward, or choose stage 1 or 2."
        )


def warn_of_shards(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    """Warn of a user's `state_dict` call without the parameters that stage 3 has sharded."""
    if any(isinstance(value, nn.Parameter) for value in state.values()):
        return  # called with keep_vars, as the framework does
    lost = [name for name, p in module.named_parameters() if getattr(p, "ds_numel", 0) > 0 and p.numel() == 0]
    if lost:
        rank_zero_warn(
            f"the state_dict of {type(module).__name__} is empty for {lost[0]!r} and {len(lost) - 1} others, of which a "
            "rank holds only a part under ZeRO stage 3. tw.gather_module(module), called on all ranks, returns a whole copy. "
            "To resume later, save with trainer.save_checkpoint(path).",
            stacklevel=3,
        )

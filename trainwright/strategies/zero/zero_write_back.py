"""User code's writes into parameters under ZeRO, which are kept in stages 1 and 2, and rejected in stage 3.

A ZeRO step recomputes the weights from its masters. Weight clipping or the update of a momentum encoder would be lost. So in
stages 1 and 2 every rank copies its shard into the masters before a step and a save. Nothing is sent. Stage 3 frees a gathered
parameter without a look at it. There only `deepspeed.zero.GatheredParameters` with a `modifier_rank` writes the shards.
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
        self._shards: list[ShardVersions] = []
        self._views: list[FlatView] = []
        self._flats: list[tuple[Any, Any]] = []

    def track(self, zero: Any, stage: int, rank: int, part: nn.Module, modules: Iterable[nn.Module]) -> None:
        """Track the parameters of an engine's `part`, by their names in `modules`. `zero` is its optimizer, or a substitute."""
        self._flats += vendor.flat_weights(zero, stage, rank)
        if stage < 3:
            self._views += [FlatView(each) for group in vendor.trained_groups(zero, stage) for each in group]
            return
        own = set(part.parameters())
        named = [pair for module in modules for pair in module.named_parameters()]
        self._shards += [ShardVersions(each, name) for name, each in named if each in own and hasattr(each, "ds_id")]

    def check(self) -> None:
        """Raise RuntimeError for a write that stage 3 would lose."""
        for each in self._shards:
            each.check()

    def run(self, refuses: bool = True) -> None:
        """Update masters from the parameters. `refuses` calls `check` first."""
        if refuses:
            self.check()
        tracked: list[ShardVersions | FlatView] = [*self._shards, *self._views]
        written = [each.pop_written() for each in tracked]
        for low, master in self._flats:
            # Copying all weights to offloaded masters would cost as much as the step, so only if something was written.
            if low is not None and low.numel() == master.numel() and (low.device == master.device or any(written)):
                update_master(master.detach(), low)

    def clear(self) -> None:
        for tracked in (self._shards, self._views, self._flats):
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


class FlatView:
    """A parameter of stage 1 or 2, which is a view of its engine's flat weights."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter, self._data, self._version = parameter, parameter.data, parameter._version

    def pop_written(self) -> bool:
        """Move a replaced `.data` back into the flat weights. Return whether the parameter was written since the last call."""
        parameter = self._parameter
        is_elsewhere = parameter.data_ptr() != self._data.data_ptr()  # after `.data = ...`
        if is_elsewhere:
            self._data.copy_(parameter.detach())
            parameter.data = self._data
        is_written, self._version = parameter._version != self._version, parameter._version
        return is_elsewhere or is_written


class ShardVersions:
    """The versions of a stage 3 parameter and of its shard: a write of only the gathered parameter is lost."""

    def __init__(self, parameter: Any, name: str) -> None:
        self._parameter, self._name = parameter, name
        self._versions = self._now()
        self._shard_version = self._versions[1]

    def _now(self) -> tuple[int, int]:
        return self._parameter._version, self._parameter.ds_tensor._version

    def check(self) -> None:
        """Raise RuntimeError if the parameter was written and its shard was not."""
        before, self._versions = self._versions, self._now()
        if self._versions[0] != before[0] and self._versions[1] == before[1]:
            raise RuntimeError(
                f"the parameter {self._name!r} was written, which ZeRO stage 3 would lose: it frees the gathered parameter, "
                "and a rank trains only a shard. Make it a buffer, write it in a hook such as on_train_batch_end within `with "
                "deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):`, or choose 'ddp', 'ddp_sharded' or 'fsdp'."
            )

    def pop_written(self) -> bool:
        """Return whether the shard was written since the last call."""
        before, self._shard_version = self._shard_version, self._parameter.ds_tensor._version
        return self._shard_version != before


def note_empty_parameter(error: BaseException, stage: int) -> None:
    """Add a note to an error of a parameter that stage 3 has not gathered, or of a tensor that it does not know."""
    if stage == 3 and isinstance(error, RuntimeError) and EMPTY.search(str(error)):
        error.add_note(
            "Under ZeRO stage 3 a rank holds only a part of a parameter, and has an empty tensor in its place while its "
            "module is not called. A step that uses parameters() itself, or a penalty on gradients (create_graph=True), may "
            "have met one. Use parameters in their module's forward, or choose stage 1 or 2."
        )
    if stage == 3 and isinstance(error, AttributeError) and (error.name or "").startswith("ds_"):
        error.add_note(
            "ZeRO stage 3 gathers a module's own parameters, and met another tensor instead of one. A step that calls the "
            "module with other values (torch.func.functional_call, as in MAML) needs whole parameters: choose another strategy."
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


def refuse_copy(memo: Any) -> None:
    """Raise RuntimeError for a deep copy of a module that stage 3 has sharded."""
    raise RuntimeError(
        "a module that ZeRO stage 3 has sharded cannot be copied, because a rank holds only a part of it. "
        "tw.gather_module(module), called on all ranks, returns a whole, plain copy in host memory."
    )

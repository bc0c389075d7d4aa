"""Write-back under ZeRO: keeps what user code writes into parameters.

A ZeRO step recomputes the weights from its masters, and stage 3 frees a gathered parameter unseen, so that weight clipping or
the update of a momentum encoder would be lost. Each rank therefore copies its shard back before a parameter is partitioned, and
into the masters before each step and save. Nothing is sent.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainwright.strategies.master_optimizer import Shard

ENGINES = ("deepspeed", "trainwright")
"""Packages that write a parameter's `.data` for the engine."""
PACKAGES = (*ENGINES, "torch")
"""Packages that may see a parameter that is not gathered."""
ANSWERS = (
    *("__get__", "dim", "ndimension", "numel", "nelement", "element_size", "size", "stride", "__len__", "__repr__"),
    *("is_floating_point", "is_complex", "is_contiguous", "type", "get_device", "data_ptr", "__format__"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "untyped_storage"),
)
"""Attributes and methods that work on a parameter that is not gathered."""
EMPTY = re.compile(r"\(0\)|\[0\]")
"""What torch's errors say of a tensor of one dimension without elements."""
PLAIN_DATA: Any = Tensor.data
_paused: list[None] = []


@contextmanager
def paused() -> Iterator[None]:
    """Disable write-back within the context, because the shards are newer than what is gathered."""
    _paused.append(None)
    try:
        yield
    finally:
        _paused.pop()


class ZeroWriteBack:
    """Writes back what user code wrote into the parameters of a strategy's engines."""

    def __init__(self) -> None:
        self._kept: list[KeptShard] = []
        self._views: list[FlatView] = []
        self._flats: list[tuple[Any, Any]] = []

    def track(self, zero: Any, stage: int, rank: int, part: nn.Module, modules: Iterable[nn.Module]) -> None:
        """Track the parameters of an engine's `part`, by their names in `modules`; `zero` is its optimizer, or a substitute."""
        if stage < 3:
            self._views += [FlatView(each) for group in zero.bit16_groups for each in group]
            parts = [each[rank] for each in zero.parallel_partitioned_bit16_groups]
            self._flats += zip(parts, zero.single_partition_of_fp32_groups, strict=True)
            return
        own = set(part.parameters())
        named = [pair for module in modules for pair in module.named_parameters()]
        self._kept += [kept_shard(each, name) for name, each in named if each in own and hasattr(each, "ds_id")]
        parts = getattr(zero, "fp16_partitioned_groups_flat", [])
        self._flats += zip(parts, getattr(zero, "fp32_partitioned_groups_flat", []), strict=True)

    def check(self) -> None:
        """Raise RuntimeError for a write into a parameter that was not gathered, which had no effect."""
        for each in self._kept:
            each.check()

    def run(self, refuses: bool = True) -> None:
        """Update shards and masters from the parameters; `refuses` calls `check` first."""
        if refuses:
            self.check()
        is_written = False
        for kept in self._kept:
            kept.write_back()
            is_written |= kept.pop_written()
        for view in self._views:
            is_written |= view.write_back()
        for low, master in self._flats:
            # Copying all weights to offloaded masters would cost as much as the step, so only if something was written.
            if low is not None and low.numel() == master.numel() and (low.device == master.device or is_written):
                update_master(master.detach(), low)

    def clear(self) -> None:
        for tracked in (self._kept, self._views, self._flats):
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

    def write_back(self) -> bool:
        """Move a replaced `.data` back into the flat weights; return whether the parameter was written since the last call."""
        parameter = self._parameter
        is_elsewhere = parameter.data_ptr() != self._data.data_ptr()  # after `.data = ...`
        if is_elsewhere:
            self._data.copy_(parameter.detach())
            parameter.data = self._data
        is_written, self._version = parameter._version != self._version, parameter._version
        return is_elsewhere or is_written


class PartitionedParameter(nn.Parameter):
    """A parameter of stage 3, whose data cannot be used while it is not gathered."""

    @property
    def data(self: Any) -> Tensor:
        found: Tensor = PLAIN_DATA.__get__(self)
        home = _calling_package()
        if home not in ENGINES:
            self.partition.is_handed_out = True
        if found.numel() or not self.ds_numel or home in PACKAGES:
            return found
        placeholder = found.as_subclass(NotGathered)
        placeholder.refusal = self.partition.refusal
        return placeholder

    @data.setter
    def data(self: Any, value: Tensor) -> None:
        home = _calling_package()
        if self.ds_status.name == "NOT_AVAILABLE" and home not in PACKAGES:
            raise self.partition.refusal()
        if home not in ENGINES:
            self.partition.is_handed_out = True
        PLAIN_DATA.__set__(self, value)

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(
            "a parameter that ZeRO stage 3 has sharded cannot be copied: each rank holds a part of it. "
            "tw.gather_module(module), called on all ranks, gives a whole, plain copy in host memory."
        )


class NotGathered(Tensor):
    """The `.data` of a parameter that is not gathered: it has a dtype and a device, and refuses to compute."""

    refusal: Callable[[], RuntimeError]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ANSWERS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise next(each for each in tree_leaves((args, kwargs)) if isinstance(each, NotGathered)).refusal()


class KeptShard:
    """Replaces a parameter's `partition`, and writes back before it."""

    def __init__(self, parameter: Any, name: str) -> None:
        self._parameter, self._name = parameter, name
        self._rank = dist.get_rank(parameter.ds_process_group)
        self._partition: Callable[..., None] = parameter.partition
        self._version = parameter._version
        self._is_written = False
        self.is_handed_out = False
        """Whether user code has read its `.data`, through which writes leave no trace."""

    def __call__(
        self, param_list: Any = None, hierarchy: int = 0, has_been_updated: bool = False, free_data: bool = True
    ) -> None:
        for each in [self._parameter] if param_list is None else param_list:
            each.partition.write_back()
        self._partition(param_list, hierarchy, has_been_updated, free_data)

    def write_back(self) -> None:
        """Copy this rank's part of a gathered parameter into its shard, if it was written."""
        parameter = self._parameter
        if parameter.ds_status.name != "AVAILABLE" or _paused:
            return
        is_written, self._version = self.is_handed_out or parameter._version != self._version, parameter._version
        self._is_written |= is_written
        shard = parameter.ds_tensor
        if shard.dtype != parameter.dtype or shard.status.name != "AVAILABLE" or not parameter.numel():
            return  # quantized, or offloaded to a disk
        if is_written:
            start = min(shard.numel() * self._rank, parameter.ds_numel)
            numel = min(shard.numel(), parameter.ds_numel - start)
            with torch.no_grad():
                shard[:numel].copy_(parameter.detach().reshape(-1)[start : start + numel])

    def pop_written(self) -> bool:
        is_written, self._is_written = self._is_written, False
        return is_written

    def check(self) -> None:
        """Raise RuntimeError for a write while the parameter was not gathered."""
        if self._parameter._version != self._version and self._parameter.ds_status.name == "NOT_AVAILABLE":
            raise self.refusal()

    def refusal(self) -> RuntimeError:
        """Return the error for a use of the parameter while it is not gathered."""
        return RuntimeError(
            f"the parameter {self._name!r} was used where it is not gathered: under ZeRO stage 3 each rank holds a part of it, "
            "and the whole exists only while its module is called. Use it in the forward of its module, or in a hook such as "
            "on_train_batch_end within `with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):`; make it a "
            "buffer; or choose stage 1 or 2, or 'fsdp'."
        )


def note_empty_parameter(error: BaseException, stage: int) -> None:
    """Add a note to an error of a parameter that stage 3 has not gathered, or of a tensor that it does not know."""
    if stage == 3 and isinstance(error, RuntimeError) and EMPTY.search(str(error)):
        error.add_note(
            "Under ZeRO stage 3 each rank holds a part of a parameter, and has an empty tensor instead where its module is not "
            "called. A step that uses parameters() itself, or a penalty on gradients (create_graph=True), may have met one: "
            "use parameters in their module's forward, or choose stage 1 or 2."
        )
    if stage == 3 and isinstance(error, AttributeError) and (error.name or "").startswith("ds_"):
        error.add_note(
            "ZeRO stage 3 gathers a module's own parameters, and met another tensor instead of one. A step that calls the "
            "module with other values (torch.func.functional_call, as in MAML) needs whole parameters: choose another strategy."
        )


def kept_shard(parameter: Any, name: str) -> KeptShard:
    """Keep what is written into a stage 3 parameter from now on, and return what does it."""
    if not isinstance(parameter.partition, KeptShard):
        parameter.partition = KeptShard(parameter, name)
        parameter.all_gather = _checked(parameter, parameter.all_gather)
        parameter.all_gather_coalesced = _checked(parameter, parameter.all_gather_coalesced)
        parameter.__class__ = PartitionedParameter
    kept: KeptShard = parameter.partition
    return kept


def _checked(parameter: Any, gather: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a gathering function, to check first for writes while parameters were not gathered."""

    def call(*args: Any, **kwargs: Any) -> Any:
        listed = [each for each in (*args, *kwargs.values()) if isinstance(each, (list, tuple, set))]
        for each in listed[0] if listed else [parameter]:
            each.partition.check()
        return gather(*args, **kwargs)

    return call


def _calling_package() -> str:
    """Return the package whose code uses the calling property."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).partition(".")[0]

"""Zero writes: what a user's code writes into parameters under DeepSpeed, kept in what its engine goes on from.

A step of ZeRO's makes the weights anew from its masters, and stage 3 lets go of a whole parameter without a look at it, so that
a clip of weights, or under stage 3 the update of a momentum encoder, would be lost. This rank's part of a parameter is copied
back before the parameter is let go, and into the masters before each step and each save; nothing is sent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright.strategies.master_optimizer import Shard

ENGINES = ("deepspeed", "trainwright")
"""Whose code writes a parameter's `.data` for the engine, and not for a user."""
PACKAGES = (*ENGINES, "torch")
"""Whose code may see that a parameter is not gathered."""
TELLS = (
    *("__get__", "dim", "ndimension", "numel", "nelement", "element_size", "size", "stride", "__len__", "__repr__"),
    *("is_floating_point", "is_complex", "is_contiguous", "type", "get_device", "data_ptr", "__format__"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "untyped_storage"),
)
"""What of a parameter that is not gathered can be asked."""
PLAIN_DATA: Any = Tensor.data
_paused: list[None] = []


@contextmanager
def paused() -> Iterator[None]:
    """Within the context let go of what is gathered as it is, since its shard is newer."""
    _paused.append(None)
    try:
        yield
    finally:
        _paused.pop()


class ZeroWriteBack:
    """Keeps what is written into the parameters of a strategy's engines."""

    def __init__(self) -> None:
        self._kept: list[KeptShard] = []
        self._views: list[WholeView] = []
        self._flats: list[tuple[Any, Any]] = []

    def track(self, zero: Any, stage: int, rank: int, part: nn.Module, modules: Iterable[nn.Module]) -> None:
        """Keep what is written into an engine's parameters.

        Args:
            zero: the engine's optimizer, or what it has in the place of one where nothing is trained.
            stage: ZeRO's.
            rank: this process's.
            part: what the engine owns.
            modules: the user's, which have the names.
        """
        if stage < 3:
            self._views += [WholeView(each) for group in zero.bit16_groups for each in group]
            parts = [each[rank] for each in zero.parallel_partitioned_bit16_groups]
            self._flats += zip(parts, zero.single_partition_of_fp32_groups, strict=True)
            return
        own = set(part.parameters())
        named = [pair for module in modules for pair in module.named_parameters()]
        self._kept += [kept_shard(each, name) for name, each in named if each in own and hasattr(each, "ds_id")]
        parts = getattr(zero, "fp16_partitioned_groups_flat", [])
        self._flats += zip(parts, getattr(zero, "fp32_partitioned_groups_flat", []), strict=True)

    def check(self) -> None:
        """Refuse a write that was made into a parameter while it was not gathered, and so changed nothing (RuntimeError)."""
        for each in self._kept:
            each.check()

    def settle(self, refuses: bool = True) -> None:
        """Let shards and masters be what the parameters show; see `check` for what it refuses."""
        if refuses:
            self.check()
        is_written = False
        for each in self._kept:
            each.keep()
            is_written |= each.take_note()
        for view in self._views:
            is_written |= view.settle()
        for low, master in self._flats:
            # Where the masters are in host memory the whole copy would cost as much as their step.
            if low is not None and low.numel() == master.numel() and (low.device == master.device or is_written):
                update_master(master.detach(), low)

    def clear(self) -> None:
        """Follow no engine any more."""
        self._kept.clear()
        self._views.clear()
        self._flats.clear()


def update_master(master: Tensor, low: Tensor) -> None:
    """Let a float32 master be what its weights show, where they do not show the master itself."""
    if master.data_ptr() == low.data_ptr():
        return
    low = low.detach().to(master.device)
    if low.dtype == master.dtype:
        master.copy_(low)
    else:
        master.copy_(torch.where(low == master.to(low.dtype), master, low.to(master.dtype)))


def update_masters(shares: Iterable[Shard]) -> None:
    """Let masters be what the parameters show, which an engine has given back."""
    for share in shares:
        whole = share.parameter.detach().reshape(-1)
        update_master(
            share.flat.detach().narrow(0, share.offset, share.numel), whole.narrow(0, share.start, share.numel)
        )


class WholeView:
    """A parameter of stage 1 or 2, whose memory is a part of its engine's flat weights."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter, self._data, self._version = parameter, parameter.data, parameter._version

    def settle(self) -> bool:
        """Return whether the parameter was seen to be written since the last time; it has the engine's memory then."""
        parameter = self._parameter
        is_elsewhere = parameter.data_ptr() != self._data.data_ptr()
        if is_elsewhere:  # .data = ... has given it memory of its own
            self._data.copy_(parameter.detach())
            parameter.data = self._data
        is_written, self._version = parameter._version != self._version, parameter._version
        return is_elsewhere or is_written


class PartedParameter(nn.Parameter):
    """A parameter of stage 3, with whose data nothing can be computed while it is not gathered."""

    @property
    def data(self: Any) -> Tensor:
        found: Tensor = PLAIN_DATA.__get__(self)
        home = _calling_package()
        if home not in ENGINES:
            self.partition.is_handed_out = True
        if found.numel() or not self.ds_numel or home in PACKAGES:
            return found
        away = found.as_subclass(Away)
        away.refusal = self.partition.refusal
        return away

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


class Away(Tensor):
    """What `parameter.data` is while the parameter is not gathered: it tells its dtype and device, and computes nothing."""

    refusal: Callable[[], RuntimeError]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in TELLS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise next(each for each in _flat((*args, *(kwargs or {}).values())) if isinstance(each, Away)).refusal()


class KeptShard:
    """What stands in the place of a parameter's `partition`: keeps what was written into it."""

    def __init__(self, parameter: Any, name: str) -> None:
        self._parameter, self._name = parameter, name
        self._rank = dist.get_rank(parameter.ds_process_group)
        self._partition: Callable[..., None] = parameter.partition
        self._version = parameter._version
        self._is_written = False
        self.is_handed_out = False
        """Whether a user's code has had its `.data`, through which a write shows nowhere else."""

    def __call__(
        self, param_list: Any = None, hierarchy: int = 0, has_been_updated: bool = False, free_data: bool = True
    ) -> None:
        for each in [self._parameter] if param_list is None else param_list:
            each.partition.keep()
        self._partition(param_list, hierarchy, has_been_updated, free_data)

    def keep(self) -> None:
        """Copy this rank's part of a parameter that is gathered into its shard."""
        parameter = self._parameter
        if parameter.ds_status.name != "AVAILABLE" or _paused:
            return
        is_written, self._version = self.is_handed_out or parameter._version != self._version, parameter._version
        self._is_written |= is_written
        shard = parameter.ds_tensor
        if shard.dtype != parameter.dtype or shard.status.name != "AVAILABLE" or not parameter.numel():
            return  # a quantized one, or one on a disk
        if is_written:
            start = min(shard.numel() * self._rank, parameter.ds_numel)
            numel = min(shard.numel(), parameter.ds_numel - start)
            with torch.no_grad():
                shard[:numel].copy_(parameter.detach().reshape(-1)[start : start + numel])

    def take_note(self) -> bool:
        """Return whether the parameter was seen to be written since the last time."""
        is_written, self._is_written = self._is_written, False
        return is_written

    def check(self) -> None:
        """Refuse a write that was made while the parameter was not gathered (RuntimeError)."""
        if self._parameter._version != self._version and self._parameter.ds_status.name == "NOT_AVAILABLE":
            raise self.refusal()

    def refusal(self) -> RuntimeError:
        """Return the error of who uses the parameter where it is not gathered."""
        return RuntimeError(
            f"the parameter {self._name!r} was used where it is not gathered: under ZeRO stage 3 each rank holds a part of it, "
            "and the whole is there while its module is called. Use it in the forward of its module, or in a hook such as "
            "on_train_batch_end within `with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):`; make it a "
            "buffer; or choose stage 1 or 2, or 'fsdp'."
        )


def kept_shard(parameter: Any, name: str) -> KeptShard:
    """Return what keeps the writes into a parameter of stage 3, from now on."""
    if not isinstance(parameter.partition, KeptShard):
        parameter.partition = KeptShard(parameter, name)
        parameter.all_gather = _checked(parameter, parameter.all_gather)
        parameter.all_gather_coalesced = _checked(parameter, parameter.all_gather_coalesced)
        parameter.__class__ = PartedParameter
    kept: KeptShard = parameter.partition
    return kept


def _checked(parameter: Any, gather: Callable[..., Any]) -> Callable[..., Any]:
    """Return what gathers parameters after a look whether one was written where it was not gathered."""

    def call(*args: Any, **kwargs: Any) -> Any:
        asked = [each for each in (*args, *kwargs.values()) if isinstance(each, (list, tuple, set))]
        for each in asked[0] if asked else [parameter]:
            each.partition.check()
        return gather(*args, **kwargs)

    return call


def _calling_package() -> str:
    """Return the package whose code uses the property that asks."""
    home: str = sys._getframe(2).f_globals.get("__name__", "")
    return home.partition(".")[0]


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, (list, tuple)) else (value,)

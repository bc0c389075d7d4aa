"""The job as a strategy's user sees it, under Lightning's names (`trainer.strategy.barrier()`). The Engine does the work."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from trainwright.distributed import collectives
from trainwright.strategies.module_checks import replicated
from trainwright.strategies.replication import equalize

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class JobView:
    """The part of a Strategy that modules and callbacks use. It is one process until the Engine connects it."""

    rank: int
    world_size: int
    device: torch.device
    wrapped: Mapping[nn.Module, Any]
    device_mesh: DeviceMesh | None = None
    """The ranks by their place in a mesh with tensor parallelism."""
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]
    _job: Any = None
    """The Engine, once this process is connected."""
    _module: nn.Module | None = None

    def join_job(self, job: Any) -> None:
        self._job = job

    def note_module(self, module: nn.Module | None) -> None:
        """Record the prepared module, or None once it is released."""
        self._module = module

    @property
    def root_device(self) -> torch.device:
        """Return the device of this process."""
        return self.device

    @property
    def global_rank(self) -> int:
        """Return the number of this process in the job, from 0."""
        return self.rank

    @property
    def is_global_zero(self) -> bool:
        """Return whether this is rank 0."""
        return self.rank == 0

    @property
    def lightning_module(self) -> nn.Module | None:
        """Return the prepared module, as the user made it."""
        return self._module

    @property
    def model(self) -> Any:
        """Return the prepared module, or the wrapper that its steps run through, or None before the preparation."""
        wrapper = None if self._module is None else self.wrapped.get(self._module)
        return self._module if wrapper is None else wrapper

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank has made this call. Collective: call on every rank."""
        if self._job is not None:
            self._job.barrier(name or "strategy.barrier")

    def broadcast_buffers(self, modules: Iterable[nn.Module]) -> None:
        """Replace buffers by rank 0's, so that all ranks evaluate one model. Collective: call on every rank."""
        equalize(buffer for module in modules for buffer in replicated(module, module.named_buffers()))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object on every rank: plain data, tensors and nests of them. Collective: call on every rank."""
        return obj if self._job is None else self._job.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str | None = "mean") -> Any:
        """Return the mean, sum, min or max of a tensor over the ranks, anything else unchanged. Collective.

        Raises:
            TypeError: the mean of integers.
            ValueError: a group: all ranks of the job take part.
        """
        _refuse_group(group, "reduce")
        if self._job is None or self.world_size == 1 or not isinstance(tensor, Tensor):
            return tensor
        name = str(reduce_op or "sum").rpartition(".")[2].lower()
        return self._job.reduce(tensor, {"avg": "mean"}.get(name, name))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks, stacked along a new first dimension (of length 1 on one process). Collective.

        With `sync_grads`, gradients flow back to the tensors' ranks.

        Raises:
            ValueError: a group, or shapes that differ across the ranks.
        """
        _refuse_group(group, "all_gather")
        return collectives.gather_stacked(tensor, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether the decision of all ranks, or with all=False of any rank, is True. Collective."""
        if self._job is None or self.world_size == 1:
            return bool(decision)
        flag = torch.tensor(int(decision), device=self.device)
        return bool(collectives.all_reduce(flag, "min" if all else "max", with_all=True))

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made._arguments = args, kwargs
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or a pickle is a new strategy of the same arguments: without the job, wrappers of
        # modules and shards, which are this process's.
        return _construct, (type(self), *self._arguments)


def _construct(kind: type[JobView], args: tuple[Any, ...], kwargs: dict[str, Any]) -> JobView:
    # The first construction has given the warnings of these arguments.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(*args, **kwargs)


def _refuse_group(group: Any, call: str) -> None:
    if group is not None:
        raise ValueError(f"strategy.{call} was given the group {group!r}; expected None: all ranks take part.")

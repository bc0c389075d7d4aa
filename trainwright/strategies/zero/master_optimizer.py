"""Master optimizer: DeepSpeed steps it, and the user's optimizer steps the parameters' shards of the flat masters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from trainwright.checkpoint.tensors import Piece, TensorEntry
from trainwright.strategies.base import by_parameter, new_state, state_location
from trainwright.strategies.divided_optimizers import DIVIDED, GroupView, UsedParameters


class Shard(NamedTuple):
    """This rank's shard of a parameter: `numel` elements from `start` on, stored in a flat master from `offset` on.

    `shape` is the whole parameter's, and `first` the rank that holds its first element.
    """

    parameter: Tensor
    flat: Tensor
    offset: int
    start: int
    numel: int
    shape: tuple[int, ...]
    first: int


class MasterView(NamedTuple):
    """A shard as the user's optimizer steps it: a view of the flat master."""

    shard: Shard
    tensor: Tensor


class MasterGroup(GroupView):
    """The user's group as DeepSpeed sees it, with flat masters in place of its parameters."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            self.parameters = value
        else:
            super().__setitem__(key, value)


class MasterOptimizer(Optimizer):
    """DeepSpeed's optimizer: its step lets the user's optimizer step views of the flat masters.

    So every parameter has its state and step count, as on one process, and unused parameters do not change. Groups without
    trained parameters are hidden from DeepSpeed. After `attach` the groups of the user's optimizer hold this rank's views.
    """

    def __init__(self, own: Optimizer) -> None:
        self.own = own
        self.defaults = own.defaults
        self.state = defaultdict(dict)  # DeepSpeed looks for state by flat master here, and finds none
        self.given: list[list[Any]] = [list(group["params"]) for group in own.param_groups]
        self.param_groups: list[Any] = [
            MasterGroup(group, (p for p in given if p.requires_grad))
            for group, given in zip(own.param_groups, self.given, strict=True)
            if any(p.requires_grad for p in given)
        ]
        self.views: dict[Tensor, MasterView] = {}
        """This rank's views by parameter."""
        self.rescale = 1.0
        """The factor for gradients in the next step, because offloaded ones cannot be reached before it."""
        self._of: dict[Tensor, list[MasterView]] = {}
        self._used = UsedParameters()

    def attach(self, shards: Iterable[Shard]) -> None:
        """Give the user's optimizer views of DeepSpeed's masters, with the state that it had before."""
        for shard in shards:
            self._used.track([shard.parameter])
            if shard.numel:
                part = shard.flat.detach().narrow(0, shard.offset, shard.numel).requires_grad_()
                self.views[shard.parameter] = MasterView(shard, part)
                self._of.setdefault(shard.flat, []).append(self.views[shard.parameter])
        for group, given in zip(self.own.param_groups, self.given, strict=True):
            before = {p: self.own.state.pop(p) for p in given if p in self.own.state}
            mine = [self.views[p] for p in given if p in self.views]
            group["params"] = [view.tensor for view in mine]
            for view in mine:
                if view.shard.parameter in before:
                    self.own.state[view.tensor] = self._cut(view, before[view.shard.parameter], group)

    def release(self, strategy: str) -> None:
        DIVIDED[self.own] = strategy
        for group, given in zip(self.own.param_groups, self.given, strict=True):
            group["params"] = list(given)
        for parameter, view in self.views.items():
            if view.tensor in self.own.state:
                self.own.state[parameter] = self.own.state.pop(view.tensor)

    def _cut(self, view: MasterView, state: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's shard of a whole parameter's state."""
        shard, cut = view.shard, {}
        for key, value in state.items():
            if not isinstance(value, Tensor):
                cut[key] = value
            elif tuple(value.shape) == shard.shape and key != "step":
                part = value.detach().reshape(-1)[shard.start : shard.start + shard.numel]
                dtype = view.tensor.dtype if value.dtype == shard.parameter.dtype else value.dtype
                cut[key] = part.to(view.tensor.device, dtype, copy=True)
            elif value.numel() == 0:
                raise ValueError(
                    f"{type(self.own).__name__} makes its state ({key!r}) when it is constructed, and an earlier run has left "
                    "the parameters sharded by then. Create the module again and load a checkpoint."
                )
            else:  # the master may be on another device than the parameter was
                cut[key] = value.to(*state_location(view.tensor, key, value.dtype, group))
        return cut

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the views of the masters in DeepSpeed's groups, one group at a time."""
        for group in self.param_groups:
            views = [view for flat in group["params"] for view in self._of.get(flat, ())]
            for view in views:
                view.tensor.grad = self._gradient(view)
            if views:
                self._step_alone(group.data, [view.tensor for view in views])
            for view in views:
                view.tensor.grad = None

    def _gradient(self, view: MasterView) -> Tensor | None:
        shard = view.shard
        if shard.flat.grad is None:
            return None
        gradient = shard.flat.grad.narrow(0, shard.offset, shard.numel)
        if self._used.is_unused(shard.parameter, gradient):
            return None
        if self.rescale != 1.0:
            gradient.mul_(self.rescale)
        return gradient

    def _step_alone(self, group: dict[str, Any], tensors: list[Tensor]) -> None:
        groups, kept, params = self.own.param_groups, list(self.own.param_groups), group["params"]
        groups[:], group["params"] = [group], tensors
        try:
            self.own.step()
        finally:
            groups[:], group["params"] = kept, params

    def clear(self) -> None:
        """Start over, after a step or when gradients were discarded."""
        self._used.clear()
        self.rescale = 1.0

    def close(self) -> None:
        self._used.close()


def optimizer_pieces(master: MasterOptimizer, names: Mapping[Tensor, str], rank: int) -> Iterator[Piece]:
    """Yield this rank's shard of the user's optimizer state."""
    for parameter, view in master.views.items():
        for key, value in master.own.state.get(view.tensor, {}).items():
            name = f"{names[parameter]}/{key}"
            if isinstance(value, Tensor) and key != "step" and value.shape == view.tensor.shape:
                yield Piece(name, view.shard.shape, view.shard.start, value.detach(), rank)
            elif isinstance(value, Tensor):  # ranks without a shard of the parameter have none
                yield Piece(name, tuple(value.shape), 0, value.detach(), view.shard.first)


def allocate(master: MasterOptimizer, names: Mapping[Tensor, str], entries: Mapping[str, TensorEntry]) -> None:
    """Replace the optimizer's state by empty tensors for a load to fill."""
    by_name = by_parameter(entries)
    master.own.state.clear()
    for group, given in zip(master.own.param_groups, master.given, strict=True):
        for view in (master.views[p] for p in given if p in master.views):
            for key, entry in by_name.get(names[view.shard.parameter], {}).items():
                state = master.own.state[view.tensor]
                is_part = tuple(entry.shape) == view.shard.shape and key != "step"
                if is_part and entry.dtype == view.shard.parameter.dtype:
                    entry = replace(entry, dtype=view.tensor.dtype)  # the parameter's dtype becomes the master's
                state[key] = new_state(view.tensor, key, entry, group, is_part)

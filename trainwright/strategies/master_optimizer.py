"""Master optimizer: what DeepSpeed steps; it lets the user's optimizer step each parameter's share of the flat masters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.strategies.base import state_location
from trainwright.strategies.group_view import GroupView
from trainwright.strategies.used_parameters import UsedParameters


class Shard(NamedTuple):
    """This rank's share of a parameter: one range of it, which lies somewhere in a flat master.

    `offset` is the range's beginning in the master, `start` that in the parameter, of which `numel` elements are this
    rank's; `shape` is the whole parameter's. `first` is the rank that holds the parameter's first element.
    """

    parameter: Tensor
    flat: Tensor
    offset: int
    start: int
    numel: int
    shape: tuple[int, ...]
    first: int


@dataclass(frozen=True)
class MasterView:
    """A share as the user's optimizer steps it: a view of the flat master, with the parameter's name for its state."""

    shard: Shard
    tensor: Tensor

    def is_part(self, key: str, value: Tensor) -> bool:
        """Return whether a tensor of its state has an element for each of the parameter's."""
        return key != "step" and value.shape == self.tensor.shape


class MasterGroup(GroupView):
    """The user's group as DeepSpeed sees it: what it puts there for parameters (its flat masters) stays out of the user's."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            self.parameters = value
        else:
            super().__setitem__(key, value)


class MasterOptimizer(Optimizer):
    """What DeepSpeed takes for the optimizer: its step lets the user's own step views of the flat masters.

    So each parameter has state and a count of steps of its own, as on one process, and one that no loss has reached since the
    last step is left alone. Groups in which nothing is trained stay the user's; DeepSpeed does not see them.

    Args:
        own: the user's optimizer; from `take` on its groups hold this rank's views.
    """

    def __init__(self, own: Optimizer) -> None:
        self.own = own
        self.defaults = own.defaults
        self.state = defaultdict(dict)  # DeepSpeed looks for state by flat master here, and finds none
        self.given: list[list[Any]] = [list(group["params"]) for group in own.param_groups]
        views: list[Any] = [
            MasterGroup(group, [p for p in given if p.requires_grad])
            for group, given in zip(own.param_groups, self.given, strict=True)
            if any(p.requires_grad for p in given)
        ]
        self.param_groups = views
        self.views: dict[Tensor, MasterView] = {}
        """This rank's views by parameter."""
        self.rescale = 1.0
        """What the next step multiplies gradients by."""
        self.largest: float | None = None
        self._of: dict[Tensor, list[MasterView]] = {}
        self._used = UsedParameters()

    def take(self, shares: Iterable[Shard]) -> None:
        """Give the user's optimizer views of the masters that DeepSpeed has made, with the state that it had before.

        Raises:
            ValueError: its state was made from parameters that an earlier run has left sharded.
        """
        for shard in shares:
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

    def _cut(self, view: MasterView, state: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a whole parameter's state."""
        shard, cut = view.shard, {}
        for key, value in state.items():
            if not isinstance(value, Tensor):
                cut[key] = value
            elif tuple(value.shape) == shard.shape and key != "step":
                part = value.detach().reshape(-1)[shard.start : shard.start + shard.numel]
                dtype = view.tensor.dtype if value.dtype == shard.parameter.dtype else value.dtype
                cut[key] = part.to(view.tensor.device, dtype, copy=True)
            elif value.numel() == 0 and key == "sum" and isinstance(self.own, torch.optim.Adagrad):
                cut[key] = torch.full_like(view.tensor, group["initial_accumulator_value"], requires_grad=False)
            elif value.numel() == 0:
                raise ValueError(
                    f"{type(self.own).__name__} makes its state ({key!r}) when it is constructed, and an earlier run has left "
                    "the parameters sharded by then. Create the module again and load a checkpoint."
                )
            else:  # the master may lie elsewhere than the parameter did
                cut[key] = value.to(*state_location(view.tensor, key, value.dtype, group))
        return cut

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step what lies in the masters that DeepSpeed has put into its groups, each group by itself."""
        for group in self.param_groups:
            views = [view for flat in group["params"] for view in self._of.get(flat, ())]
            for view in views:
                view.tensor.grad = self._gradient(view)
            if views:
                self._step_alone(group.data, [view.tensor for view in views])  # type: ignore[attr-defined]
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
        if self.largest is not None:
            gradient.clamp_(-self.largest, self.largest)
        return gradient

    def _step_alone(self, group: dict[str, Any], tensors: list[Tensor]) -> None:
        groups, kept, params = self.own.param_groups, list(self.own.param_groups), group["params"]
        groups[:], group["params"] = [group], tensors
        try:
            self.own.step()
        finally:
            groups[:], group["params"] = kept, params

    def defer_clipping(self, value: float | None, scale: float) -> None:
        """Multiply gradients by `scale` and clip their elements at `value` in the next step, where nothing earlier can."""
        self.rescale *= scale
        self.largest = None if self.largest is None else self.largest * scale
        if value is not None:
            self.largest = value if self.largest is None else min(self.largest, value)

    def clear(self) -> None:
        """Take note that the gradients of this window have been stepped with or dropped."""
        self._used.clear()
        self.rescale, self.largest = 1.0, None

    def close(self) -> None:
        """Let go of the parameters."""
        self._used.close()


class StateByParameter(MutableMapping[Any, Any]):
    """The state of the user's optimizer by the module's own parameters; of those that this rank has no share of, nothing."""

    def __init__(self, master: MasterOptimizer) -> None:
        self._state = master.own.state
        self._views = master.views
        self._given = {p for group in master.given for p in group}
        self._parameters = {view.tensor: parameter for parameter, view in master.views.items()}

    def __getitem__(self, key: Any) -> Any:
        if key in self._views:
            return self._state[self._views[key].tensor]
        return {} if key in self._given else self._state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if key in self._views:
            self._state[self._views[key].tensor] = value
        elif key not in self._given:
            self._state[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._state[self._views[key].tensor if key in self._views else key]

    def __iter__(self) -> Iterator[Any]:
        return (self._parameters.get(key, key) if isinstance(key, Tensor) else key for key in list(self._state))

    def __len__(self) -> int:
        return len(self._state)

"""ZeRO's optimizer as the user sees it, the modules that its engine owns, and the engine's precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.precision.base import Precision, Sender
from trainwright.strategies.divided_optimizers import OptimizerProxy, parameters_of
from trainwright.strategies.zero import vendor
from trainwright.strategies.zero.master_optimizer import MasterOptimizer
from trainwright.strategies.zero.zero_order import ReductionOrder


class Part(nn.Module):
    """The modules that one DeepSpeed engine owns. Its forward runs a step that uses them."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, step: Callable[[], Any]) -> Any:
        return step()


class AddedAttributes:
    """Records the attributes that the creation of an engine within this context adds to modules, to remove them later."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        members = [each for module in modules for each in module.modules()]
        parameters = [p for each in members for p in each._parameters.values() if p is not None]
        self._modules: dict[Any, set[str]] = {each: set(each.__dict__) for each in members}
        self._parameters: dict[Any, set[str]] = {each: set(each.__dict__) for each in parameters}

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        for table in (self._modules, self._parameters):
            for each, before in table.items():
                table[each] = set(each.__dict__) - before

    def remove(self) -> None:
        """Remove the attributes, and copy whole parameters to separate memory. Shards stay."""
        for module, added in self._modules.items():
            for name in added.union(vendor.ADDED_LATER):
                module.__dict__.pop(name, None)
            if type(module._parameters) is not dict:
                module._parameters = dict(module._parameters.items())
        for parameter, added in self._parameters.items():
            parameter.grad = None
            if hasattr(parameter, "ds_id"):
                continue
            for name in added:
                parameter.__dict__.pop(name, None)
            parameter.data = parameter.data.clone()  # out of the engine's flat buffer


class ZeroOptimizer(OptimizerProxy):
    """Shows the module's parameters while DeepSpeed steps flat masters, which `write_back` updates from the weights."""

    def __init__(
        self,
        master: MasterOptimizer,
        engine: Any,
        order: ReductionOrder,
        write_back: Callable[[], None],
        refresh: Callable[[], None],
    ) -> None:
        super().__init__(master.own, master.given)
        self.master, self.engine, self.order = master, engine, order
        self._write_back, self._refresh = write_back, refresh
        self._is_in_backward = self._is_due = False
        self._num_ended = 0
        if order.stage == 2:
            vendor.on_all_gradients(engine.optimizer, self._end_or_note)

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Return the state by the module's parameters. It is empty for parameters without a shard on this rank."""
        views = self.master.views
        return {p: self.own.state.get(views[p].tensor, {}) if p in views else {} for p in parameters_of(self)}

    def _call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._write_back()
        result = method(*args, **kwargs)
        self._refresh()
        return result

    @property
    def has_ended(self) -> bool:
        """Whether DeepSpeed has ended the latest backward."""
        return self.order.num_ended > self._num_ended

    def begin_backward(self, loss: Tensor) -> Tensor:
        """Make the engine ready for a backward, and return the loss that it scales."""
        self._is_in_backward, self._is_due = True, False
        self._num_ended = self.order.num_ended
        vendor.begin_backward(self.engine)
        # The engine refuses a leaf, such as a plain zero.
        scaled: Tensor = self.engine.scale(loss if loss.grad_fn is not None else loss.view_as(loss))
        return scaled

    def _end_or_note(self) -> None:
        """Record that gradients are complete as DeepSpeed counts them. A backward by hand ends here.

        The count is complete too early if a backward runs others (reentrant checkpointing), whose gradients would be lost.
        """
        self._is_due = True
        if not self._is_in_backward:
            vendor.finish_backward(self.engine)

    def end_backward(self) -> None:
        """End a backward, even if it has reached this engine on other ranks only. Collective."""
        self._is_in_backward = False
        if self._is_due or (self.order.stage == 2 and not self.has_ended):
            vendor.finish_backward(self.engine)
        vendor.reset_depth(self.engine)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients in DeepSpeed's buckets, where it keeps them instead of in `.grad`."""
        for parameter in parameters_of(self):
            parameter.grad = None  # a backward that failed has left it, and on the CPU DeepSpeed's call fails for it
        vendor.discard_gradients(self.engine.optimizer)
        self.master.clear()


class ZeroPrecision(Precision):
    """The precision of DeepSpeed engines, which keep float32 masters and scale losses themselves. All else is `inner`'s."""

    takes_closure = False

    def __init__(self, inner: Precision, scalers: Callable[[], list[Any]]) -> None:
        self._scalers = scalers
        self.name = inner.name
        self.param_dtype, self.autocast_dtype = inner.param_dtype, inner.autocast_dtype
        self.has_scaler = self.compute_dtype == torch.float16
        self.converts_batch = inner.converts_batch
        contexts = ("init_context", "forward_context", "backward_context", "step_context")
        for method in ("convert_module", "restore_module", "convert_batch", *contexts):
            setattr(self, method, getattr(inner, method))

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        with self.backward_context() or nullcontext():
            super().backward(loss, send, **options)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale under the names of torch's GradScaler, so that other strategies can resume it."""
        scaler = next((each for each in self._scalers() if getattr(each, "dynamic", False)), None)
        return {} if scaler is None else vendor.scale_state(scaler)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for scaler in self._scalers() if "scale" in state else []:
            vendor.load_scale(scaler, state)

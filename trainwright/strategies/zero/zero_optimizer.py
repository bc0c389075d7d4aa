"""ZeRO's optimizer as the user sees it, the modules that its engine owns, and the engine's precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.precision.base import Precision, Sender
from trainwright.strategies.divided_optimizers import OptimizerProxy, parameters_of
from trainwright.strategies.zero.master_optimizer import MasterOptimizer, StateByParameter
from trainwright.strategies.zero.zero_order import ReductionOrder


class Part(nn.Module):
    """The modules that one DeepSpeed engine owns. Its forward runs a step that uses them."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, step: Callable[[], Any]) -> Any:
        return step()


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
        if order.stage == 2:
            engine.optimizer.unregister_grad_acc_post_hooks()
            engine.optimizer.register_grad_acc_post_hook(self._end_or_note)

    @property
    def state(self) -> Any:  # type: ignore[override]
        return StateByParameter(self.master)

    def _call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._write_back()
        result = method(*args, **kwargs)
        self._refresh()
        return result

    def begin_backward(self, loss: Tensor) -> Tensor:
        """Make the engine ready for a backward, and return the loss that it scales."""
        self._is_in_backward, self._is_due = True, False
        self.order.begin()
        self.engine.optimizer.clear_backward_seen_flag()
        self.engine._backward_prologue()
        # The engine refuses a leaf, such as a plain zero.
        scaled: Tensor = self.engine.scale(loss if loss.grad_fn is not None else loss.view_as(loss))
        return scaled

    def _end_or_note(self) -> None:
        """Record that gradients are complete as DeepSpeed counts them. A backward by hand ends here.

        The count is complete too early if a backward runs others (reentrant checkpointing), whose gradients would be lost.
        """
        self._is_due = True
        if not self._is_in_backward:
            self.engine._backward_post_hook()

    def end_backward(self) -> None:
        """End a backward, even if it has reached this engine on other ranks only. Collective."""
        self._is_in_backward = False
        if self._is_due or (self.order.stage == 2 and not self.order.has_ended):
            self.engine._backward_post_hook()
        # An engine that no loss has reached ran no epilogue. A backward within the next forward would run it.
        self.engine.optimizer._backward_hook_state.backward_active_depth = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients in DeepSpeed's buckets, where it keeps them instead of in `.grad`."""
        zero = self.engine.optimizer
        for parameter in parameters_of(self):
            parameter.grad = None  # a backward that failed has left it, and on the CPU DeepSpeed's call fails for it
        zero.zero_grad()
        self.master.clear()
        if hasattr(zero, "all_grad_tensors"):  # stages 1 and 2
            zero.all_grad_tensors = dict.fromkeys(zero.all_grad_tensors)
            zero.averaged_gradients = dict.fromkeys(zero.averaged_gradients)
        else:
            # Otherwise a parameter that is unused from now on keeps its last gradient.
            for buffer in zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.values():
                buffer.zero_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError, because DeepSpeed's masters are fixed."""
        raise RuntimeError(
            "DeepSpeed lays its buffers out when the optimizer is prepared, so groups cannot be added later. Pass them to the "
            "optimizer in configure_optimizers."
        )


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
        for method in ("convert_module", "convert_batch", *contexts):
            setattr(self, method, getattr(inner, method))

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        with self.backward_context() or nullcontext():
            super().backward(loss, send, **options)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale under the names of torch's GradScaler, so that other strategies can resume it."""
        scaler = next((each for each in self._scalers() if getattr(each, "dynamic", False)), None)
        if scaler is None:
            return {}
        return {
            "scale": float(scaler.cur_scale),
            "growth_factor": float(scaler.scale_factor),
            "backoff_factor": 1.0 / float(scaler.scale_factor),
            "growth_interval": int(scaler.scale_window),
            "_growth_tracker": int(scaler.cur_iter - scaler.last_overflow_iter - 1),
            "iterations": int(scaler.cur_iter),
            "hysteresis": int(scaler.cur_hysteresis),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for scaler in self._scalers() if "scale" in state else []:
            scaler.cur_scale = float(state["scale"])
            if getattr(scaler, "dynamic", False):
                scaler.cur_iter = int(state.get("iterations", state["_growth_tracker"]))
                scaler.last_overflow_iter = scaler.cur_iter - int(state["_growth_tracker"]) - 1
                scaler.cur_hysteresis = int(state.get("hysteresis", scaler.cur_hysteresis))

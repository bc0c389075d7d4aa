"""Mixed precision: float32 weights, with the forward in float16 or bfloat16 under torch.autocast."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainwright.devices.abilities import autocasts, scales_losses
from trainwright.precision.base import Closure, Precision, ReduceMax, Sender

DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}

Found = dict[Any, Tensor]
"""By device, a tensor that is 1 if a gradient was not finite."""


@dataclass
class Unscaled:
    """An optimizer whose gradients were divided by the loss scale."""

    optimizer: Optimizer
    found: Found = field(default_factory=dict)
    is_divided: bool = True
    """False once they were multiplied by the scale again, so that another backward can add to them."""
    has_stepped: bool = False
    is_recorded: bool = False
    """Whether `found` has been counted for the scale."""


class MixedPrecision(Precision):
    """Autocast, and for float16 a loss scale (Micikevicius et al., 2018, "Mixed Precision Training").

    Args:
        name: "16-mixed" or "bf16-mixed".
        device_type: "cpu", or the accelerator's ("cuda", "mps", "xpu", ...).
        scaler: the GradScaler to use with "16-mixed", by default with torch's settings. A disabled scaler scales nothing.
    """

    def __init__(self, name: str, device_type: str, scaler: torch.amp.GradScaler | None = None) -> None:
        self.name = name
        self.autocast_dtype = DTYPES[name]
        if scaler is not None and name != "16-mixed":
            raise ValueError(f"precision {name!r} needs no loss scale: pass scaler= with '16-mixed' only.")
        if name == "16-mixed" and scaler is None:
            scaler = torch.amp.GradScaler(device_type)
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.has_scaler = self.scaler is not None
        self.takes_closure = not self.has_scaler
        self._first_state = self.scaler.state_dict() if self.scaler is not None else {}
        self._device_type = device_type
        self._autocast = _Autocast(device_type, self.autocast_dtype)
        self._unscaled: dict[int, Unscaled] = {}
        self._found: dict[int, Found] = {}
        """By optimizer, the infs of gradients that were used or discarded, until the scale is updated."""
        self._has_scaled = False
        self._tracked: Sequence[Optimizer] = ()
        _see_every_step()

    def check(self, device: torch.device) -> None:
        if _mixes(self.name, device):
            return
        lacking = f"an autocast in {self.autocast_dtype}"
        if autocasts(device.type, self.autocast_dtype):
            lacking = "a loss scale (torch.amp.GradScaler)"
        accepted = [*(repr(name) for name in DTYPES if _mixes(name, device)), repr("32-true")]
        raise ValueError(
            f"precision={self.name!r} needs {lacking}, which torch {torch.__version__} does not have on {device.type!r}; pass "
            f"precision={' or '.join(accepted)}."
        )

    def forward_context(self) -> AbstractContextManager[Any]:
        return self._autocast

    def step_context(self) -> AbstractContextManager[Any]:
        return _NoAutocast(self._device_type)

    def backward_context(self) -> AbstractContextManager[Any] | None:
        # Backward runs in the dtypes of the forward. Recomputed activations enter autocast again.
        return _NoAutocast(self._device_type) if torch.is_autocast_enabled(self._device_type) else None

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        if self.scaler is not None:
            self._rescale()
            self._has_scaled = True
            loss = self.scaler.scale(loss)
        with self.backward_context() or nullcontext():
            super().backward(loss, send, **options)

    def unscale(self, optimizer: Optimizer, reduce_max: ReduceMax | None = None) -> None:
        if self.scaler is None or not self._has_scaled:
            return
        unscaled = self._unscaled.get(id(optimizer))
        if unscaled is not None and unscaled.is_divided:
            return
        unscaled = unscaled or Unscaled(optimizer)
        self._unscaled[id(optimizer)] = unscaled
        unscaled.is_divided = True
        for part, device in _by_kind(optimizer):
            with self._scale_on(device):
                self.scaler.unscale_(part)
            # Removed, because the scaler rejects a second unscale_ of an optimizer before its next update.
            for where, value in self.scaler._per_optimizer_states.pop(id(part))["found_inf_per_device"].items():
                known = unscaled.found.get(where)
                unscaled.found[where] = value if known is None else torch.maximum(known, value)
        if reduce_max is not None:
            # One tensor, because a rank without gradients does not know on which devices other ranks have gradients.
            any_found = unscaled.found.pop(self._scale.device, None)
            if any_found is None:
                any_found = torch.zeros_like(self._scale).reshape(1)
            for value in unscaled.found.values():
                any_found = torch.maximum(any_found, value.to(any_found.device))
            reduce_max(any_found)
            unscaled.found = {any_found.device: any_found}

    @contextmanager
    def _scale_on(self, device: torch.device) -> Iterator[None]:
        """Give the scaler a copy of its scale on the device of offloaded gradients within the block.

        NOTE: torch copies the scale to the host without waiting, so the division would read it too early.
        """
        scale = self._scale
        if device == scale.device:
            yield
            return
        assert self.scaler is not None
        self.scaler._scale = scale.to(device)
        try:
            yield
        finally:
            self.scaler._scale = scale

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        """Unscale, and step outside of autocast unless a gradient is not finite. A closure still runs within autocast.

        With a loss scale the closure runs once, before unscaling, because an optimizer would use scaled gradients from a
        later call. NOTE: waits for the device, because the host decides whether to step.
        """
        if not torch.is_autocast_enabled(self._device_type):
            return self._step(optimizer, closure)
        with self.step_context():
            return self._step(optimizer, None if closure is None else self._within(closure))

    def _within(self, closure: Closure) -> Closure:
        def call() -> Any:
            with self._autocast:
                loss = closure()
            torch.clear_autocast_cache()  # the optimizer may change the weights before the next call
            return loss

        return call

    def _step(self, optimizer: Optimizer, closure: Closure | None) -> bool:
        if self.scaler is None:
            return super().step(optimizer, closure)
        if closure is not None:
            with torch.enable_grad():
                closure()
        if not self._has_scaled:
            return super().step(optimizer)
        self.unscale(optimizer)
        unscaled = self._unscaled[id(optimizer)]
        skipped = any(bool(value.item()) for value in unscaled.found.values())
        # scaler.step would divide again, because its record of the optimizer was removed.
        if not skipped:
            optimizer.step()
        unscaled.has_stepped = True
        self._record(unscaled)
        return skipped

    def _rescale(self) -> None:
        """Update the scale, and scale unscaled gradients again, because the next backward adds scaled ones to them."""
        present: list[list[Tensor]] = []
        for number, unscaled in list(self._unscaled.items()):
            gradients = [grad for _, grad in _with_gradients(unscaled.optimizer)]
            if not gradients:  # dropped by the user
                self._record(unscaled)
                del self._unscaled[number]
            elif unscaled.is_divided:
                present.append(gradients)
                unscaled.is_divided = False
                if unscaled.has_stepped:
                    unscaled.found, unscaled.has_stepped, unscaled.is_recorded = {}, False, False
        if self._found:
            self._adapt([id(gradient) for gradients in present for gradient in gradients])
        for gradients in present:
            for gradient in gradients:
                self._multiply(gradient, self._scale)

    def _adapt(self, divided: Collection[int]) -> None:
        """Update the scale, and rescale pending gradients except the unscaled ones."""
        # A copy, because the scaler overwrites its scale.
        before = self._scale.clone()
        self._update_scale()
        pending = {id(grad): grad for optimizer in self._tracked for _, grad in _with_gradients(optimizer)}
        for number, gradient in pending.items():
            if number not in divided:
                self._multiply(gradient, self._scale / before)

    @property
    def _scale(self) -> Tensor:
        assert self.scaler is not None
        assert self.scaler._scale is not None
        return self.scaler._scale

    @torch.no_grad()
    def _multiply(self, gradient: Any, factor: Tensor) -> None:
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient  # a shard, under fsdp
        local.mul_(factor.to(local.device))

    def _record(self, unscaled: Unscaled) -> None:
        if unscaled.found and not unscaled.is_recorded:
            self._found[id(unscaled.optimizer)] = unscaled.found
            unscaled.is_recorded = True

    def _update_scale(self) -> None:
        """Update the scale from the infs that the steps found.

        This happens before the next loss is scaled instead of after a step. Two optimizers that step after one backward then
        both divide by the scale of their loss.
        """
        if self.scaler is None or not self._found:
            return
        for number, found in self._found.items():
            # The scaler reads the infs from its records, and cannot update without any.
            self.scaler._per_optimizer_states[number]["found_inf_per_device"] = found
        self.scaler.update()
        self._found.clear()

    def state_dict(self) -> dict[str, Any]:
        if self.scaler is None:
            return {}
        # The latest step's infs belong to this save. Otherwise a resumed run would use a scale that is one update behind.
        self._update_scale()
        return dict(self.scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
            self.scaler._per_optimizer_states.clear()
            self._unscaled.clear()  # infs found before the load do not count
            self._found.clear()

    def release(self, optimizer: Optimizer) -> None:
        """Count the infs of discarded gradients for the scale, as after a step."""
        unscaled = self._unscaled.pop(id(optimizer), None)
        if unscaled is not None:
            self._record(unscaled)

    def track(self, optimizers: Sequence[Optimizer]) -> None:
        self._tracked = tuple(optimizers)

    def reset(self) -> None:
        self.load_state_dict(self._first_state)


class _Autocast(AbstractContextManager[None]):
    """A reusable autocast, because building one costs more than entering it.

    torch.autocast stores the previous state in itself, so a nested entry builds another. Without gradients the weight cache is
    off, because weights may change between two evaluations, for example to averages, and nothing clears the cache.
    """

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self._arguments = (device_type, dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unsupported dtypes, which `check` rejects
            self._keeping = torch.autocast(device_type, dtype)
            self._converting = torch.autocast(device_type, dtype, cache_enabled=False)
        self._open: list[torch.autocast] = []
        # Under a GPU's autocast torch does not use the fast path.
        self._attention = NoFastPath() if device_type == "cpu" else None

    def __enter__(self) -> None:
        if self._attention is not None:
            self._attention.__enter__()
        keeps = torch.is_grad_enabled()
        context = self._keeping if keeps else self._converting
        if self._open:
            context = torch.autocast(*self._arguments, cache_enabled=keeps)
        self._open.append(context)
        context.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)
        if self._attention is not None:
            self._attention.__exit__(*error)


class NoFastPath(AbstractContextManager[None]):
    """Disables torch's attention fast path (one kernel per layer in evaluation), reentrantly."""

    def __init__(self) -> None:
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch.backends.mha.set_fastpath_enabled(self._before.pop())


class _NoAutocast(AbstractContextManager[None]):
    """Disables autocast, and clears its weight cache afterwards, because a step may have changed the weights."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._off: torch.autocast | None = None

    def __enter__(self) -> None:
        if torch.is_autocast_enabled(self._device_type):
            self._off = torch.autocast(self._device_type, enabled=False)
            self._off.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        if self._off is not None:
            self._off.__exit__(*error)
            self._off = None
            torch.clear_autocast_cache()


def _mixes(name: str, device: torch.device) -> bool:
    return autocasts(device.type, DTYPES[name]) and (name != "16-mixed" or scales_losses(device.type))


def _with_gradients(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    return [(p, grad) for group in optimizer.param_groups for p in group["params"] if (grad := p.grad) is not None]


def _by_kind(optimizer: Optimizer) -> list[tuple[Any, torch.device]]:
    """Return groups of parameters that the scaler can unscale in one call, with their devices; DTensors are separate."""
    kinds: dict[tuple[type, torch.device], list[Tensor]] = {}
    for parameter, grad in _with_gradients(optimizer):
        kinds.setdefault((type(grad), grad.device), []).append(parameter)
    if len(kinds) == 1:
        return [(optimizer, device) for _, device in kinds]
    return [
        (SimpleNamespace(param_groups=[{"params": parameters}]), device) for (_, device), parameters in kinds.items()
    ]


@cache
def _see_every_step() -> None:
    """Clear autocast's weight cache after every step of any optimizer, including unknown ones."""
    register_optimizer_step_post_hook(lambda *_: torch.clear_autocast_cache())

"""Mixed precision: the forward in float16 or bfloat16 under torch.autocast, the weights in float32."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.precision.base import Agree, Clipper, Closure, Precision, Sender, StepResult


class MixedPrecision(Precision):
    """Autocast, and for float16 a loss scale (Micikevicius et al., 2018, "Mixed Precision Training").

    Args:
        name: "16-mixed" or "bf16-mixed".
        device_type: "cpu" or "cuda".
        scaler: the GradScaler to use with "16-mixed"; by default torch's own settings.
    """

    def __init__(self, name: str, device_type: str, scaler: torch.amp.GradScaler | None = None) -> None:
        self.name = name
        self.autocast_dtype = torch.float16 if name == "16-mixed" else torch.bfloat16
        if scaler is not None and name != "16-mixed":
            raise ValueError(f"precision {name!r} needs no loss scale: pass scaler= with '16-mixed' only.")
        if name == "16-mixed" and scaler is None:
            scaler = torch.amp.GradScaler(device_type)
        self.scaler = scaler
        self.takes_closure = scaler is None
        self._first_state = scaler.state_dict() if scaler is not None else {}
        self._autocast = _Autocast(device_type, self.autocast_dtype)
        self._unscaled: set[int] = set()
        self._update_due = False
        self._has_scaled = False

    def forward_context(self) -> AbstractContextManager[Any]:
        return self._autocast

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        if self.scaler is not None:
            self._update_scale()
            self._has_scaled = True
            loss = self.scaler.scale(loss)
        super().backward(loss, send, **options)

    def unscale(self, optimizer: Optimizer, agree: Agree | None = None) -> None:
        if self.scaler is None or not self._has_scaled or id(optimizer) in self._unscaled:
            return
        self.scaler.unscale_(optimizer)
        self._unscaled.add(id(optimizer))
        if agree is not None:
            found: dict[Any, Tensor] = self.scaler._found_inf_per_device(optimizer)
            if not found:  # this rank has no gradient of its own
                assert self.scaler._scale is not None
                found[self.scaler._scale.device] = torch.zeros_like(self.scaler._scale).reshape(1)
            for value in found.values():
                agree(value)

    def step(self, optimizer: Optimizer, clip: Clipper | None, closure: Closure | None = None) -> StepResult:
        """Unscale, clip, and step unless a gradient is not finite.

        With a loss scale the closure is called once, before all this: what the optimizer made of a later call would be
        scaled. NOTE: the one host-device sync is here: the host has to know whether to step.
        """
        if self.scaler is None:
            return super().step(optimizer, clip, closure)
        if closure is not None:
            with torch.enable_grad():
                closure()
        if not self._has_scaled:
            return super().step(optimizer, clip)
        self.unscale(optimizer)
        self._unscaled.discard(id(optimizer))
        norm = clip(optimizer) if clip is not None else None
        found = self.scaler._found_inf_per_device(optimizer)
        skipped = any(bool(value.item()) for value in found.values())
        if not skipped:
            optimizer.step()
        self._update_due = self._update_due or bool(found)
        return StepResult(norm, skipped)

    def _update_scale(self) -> None:
        """Adapt the scale to what the steps found.

        Done before the next loss is scaled, not after each step: two optimizers that step after one backward are then
        unscaled by the scale that their loss was scaled with.
        """
        if self._update_due and self.scaler is not None and not self._unscaled:
            self.scaler.update()
            self._update_due = False

    def state_dict(self) -> dict[str, Any]:
        if self.scaler is None:
            return {}
        self._update_scale()
        return dict(self.scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
            self.scaler._per_optimizer_states.clear()  # what steps before the load found is no longer due
            self._unscaled.clear()
            self._update_due = False

    def forget(self, optimizer: Optimizer) -> None:
        """Let what was found in the dropped gradients count for the scale, as after a step."""
        if id(optimizer) in self._unscaled:
            self._unscaled.discard(id(optimizer))
            self._update_due = True

    def reset(self) -> None:
        self.load_state_dict(self._first_state)


class _Autocast(AbstractContextManager[None]):
    """An autocast that is entered again and again, since building one costs more than entering it.

    torch.autocast keeps what it has to restore in itself, so within one that is open another is built.
    """

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self._arguments = (device_type, dtype)
        self._outermost = torch.autocast(*self._arguments)
        self._open: list[torch.autocast] = []

    def __enter__(self) -> None:
        context = torch.autocast(*self._arguments) if self._open else self._outermost
        self._open.append(context)
        context.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)

"""Mixed precision: the forward in float16 or bfloat16 under torch.autocast, the weights in float32."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainwright.devices.abilities import autocasts, scales_losses
from trainwright.precision.base import Agree, Closure, Precision, Sender
from trainwright.precision.fast_path import NoFastPath

DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}

Found = dict[Any, Tensor]
"""By device a tensor that is 1 where a gradient was not finite."""


@dataclass
class Looked:
    """An optimizer whose gradients were divided by the loss scale."""

    optimizer: Optimizer
    found: Found = field(default_factory=dict)
    is_divided: bool = True
    """False from a further backward on, before which they were multiplied again."""
    has_stepped: bool = False
    is_told: bool = False
    """Whether the scale has heard, or is going to hear, of what was found."""


class MixedPrecision(Precision):
    """Autocast, and for float16 a loss scale (Micikevicius et al., 2018, "Mixed Precision Training").

    Args:
        name: "16-mixed" or "bf16-mixed".
        device_type: "cpu", or the accelerator's ("cuda", "mps", "xpu", ...).
        scaler: the GradScaler to use with "16-mixed"; by default torch's own settings. One that is disabled scales nothing.
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
        self._looked: dict[int, Looked] = {}
        self._told: dict[int, Found] = {}
        """What was found in gradients that were stepped with or dropped, until the scale has heard of it."""
        self._has_scaled = False
        self._followed: Sequence[Optimizer] = ()
        _see_every_step()

    def check(self, device: torch.device) -> None:
        if _mixes(self.name, device):
            return
        what = f"an autocast in {self.autocast_dtype}"
        if autocasts(device.type, self.autocast_dtype):
            what = "a loss scale (torch.amp.GradScaler)"
        accepted = [*(repr(name) for name in DTYPES if _mixes(name, device)), repr("32-true")]
        raise ValueError(
            f"precision={self.name!r} needs {what}, which torch {torch.__version__} does not have on {device.type!r}; pass "
            f"precision={' or '.join(accepted)}."
        )

    def forward_context(self) -> AbstractContextManager[Any]:
        return self._autocast

    def step_context(self) -> AbstractContextManager[Any]:
        return _Outside(self._device_type)

    def backward_context(self) -> AbstractContextManager[Any] | None:
        # Its operations have the dtypes that the forward has chosen; what is computed again enters autocast by itself.
        return _Outside(self._device_type) if torch.is_autocast_enabled(self._device_type) else None

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        if self.scaler is not None:
            self._take_along()
            self._has_scaled = True
            loss = self.scaler.scale(loss)
        context = self.backward_context()
        if context is None:
            super().backward(loss, send, **options)
        else:
            with context:
                super().backward(loss, send, **options)

    def unscale(self, optimizer: Optimizer, agree: Agree | None = None) -> None:
        if self.scaler is None or not self._has_scaled:
            return
        looked = self._looked.get(id(optimizer))
        if looked is not None and looked.is_divided:
            return
        looked = looked or Looked(optimizer)
        self._looked[id(optimizer)] = looked
        looked.is_divided = True
        for part, device in _by_kind(optimizer):
            with self._scale_on(device):
                self.scaler.unscale_(part)
            for place, value in self.scaler._per_optimizer_states.pop(id(part))["found_inf_per_device"].items():
                looked.found[place] = torch.maximum(looked.found[place], value) if place in looked.found else value
        if agree is not None:
            # One tensor: a rank without a gradient of its own does not know where the others' lie.
            any_found = looked.found.pop(self._scale.device, None)
            if any_found is None:
                any_found = torch.zeros_like(self._scale).reshape(1)
            for value in looked.found.values():
                any_found = torch.maximum(any_found, value.to(any_found.device))
            agree(any_found)
            looked.found = {any_found.device: any_found}

    @contextmanager
    def _scale_on(self, device: torch.device) -> Iterator[None]:
        """Let the scaler divide gradients that lie elsewhere than its scale (in host memory, offloaded) by a copy of it.

        By itself it would copy its scale to the host without waiting for the copy, and the division would not wait either.
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
        """Unscale, and step unless a gradient is not finite; outside of autocast, in which a closure runs as before.

        With a loss scale the closure is called once, before all this: what the optimizer made of a later call would be
        scaled. NOTE: the one host-device sync is here: the host has to know whether to step.
        """
        if not torch.is_autocast_enabled(self._device_type):
            return self._step(optimizer, closure)
        with self.step_context():
            return self._step(optimizer, None if closure is None else self._within(closure))

    def _within(self, closure: Closure) -> Closure:
        def call() -> Any:
            with self._autocast:
                loss = closure()
            torch.clear_autocast_cache()  # the optimizer may change the weights before it calls again
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
        looked = self._looked[id(optimizer)]
        skipped = any(bool(value.item()) for value in looked.found.values())
        if not skipped:
            optimizer.step()
        looked.has_stepped = True
        self._tell(looked)
        return skipped

    def _take_along(self) -> None:
        """Adapt the scale; multiply the gradients that were divided already and to which the next backward adds."""
        present: list[list[Tensor]] = []
        for number, looked in list(self._looked.items()):
            gradients = [
                p.grad for group in looked.optimizer.param_groups for p in group["params"] if p.grad is not None
            ]
            if not gradients:  # dropped, in whatever way
                self._tell(looked)
                del self._looked[number]
            elif looked.is_divided:
                present.append(gradients)
                looked.is_divided = False
                if looked.has_stepped:
                    looked.found, looked.has_stepped, looked.is_told = {}, False, False
        if self._told:
            self._adapt([id(each) for gradients in present for each in gradients])
        for gradient in (each for gradients in present for each in gradients):
            self._multiply(gradient, self._scale)

    def _adapt(self, divided: Collection[int]) -> None:
        """Adapt the scale, and with it the gradients that wait for a step, but those that are divided by it."""
        before = self._scale.clone()
        self._update_scale()
        parameters = [p for each in self._followed for group in each.param_groups for p in group["params"]]
        waiting = {id(p.grad): p.grad for p in parameters if p.grad is not None and id(p.grad) not in divided}
        for gradient in waiting.values():
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

    def _tell(self, looked: Looked) -> None:
        if looked.found and not looked.is_told:
            self._told[id(looked.optimizer)] = looked.found
            looked.is_told = True

    def _update_scale(self) -> None:
        """Adapt the scale to what the steps found.

        Done before the next loss is scaled, not after each step: two optimizers that step after one backward are then
        unscaled by the scale that their loss was scaled with.
        """
        if self.scaler is None or not self._told:
            return
        for number, found in self._told.items():
            self.scaler._per_optimizer_states[number]["found_inf_per_device"] = found
        self.scaler.update()
        self._told.clear()

    def state_dict(self) -> dict[str, Any]:
        if self.scaler is None:
            return {}
        self._update_scale()
        return dict(self.scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
            self.scaler._per_optimizer_states.clear()
            self._looked.clear()  # what steps before the load found is no longer due
            self._told.clear()

    def release(self, optimizer: Optimizer) -> None:
        """Let what was found in the discarded gradients count for the scale, as after a step."""
        looked = self._looked.pop(id(optimizer), None)
        if looked is not None:
            self._tell(looked)

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Take note of the optimizers whose gradients may wait for a step while another's step changes the scale."""
        self._followed = tuple(optimizers)

    def reset(self) -> None:
        self.load_state_dict(self._first_state)


class _Autocast(AbstractContextManager[None]):
    """An autocast that is entered again and again, since building one costs more than entering it.

    torch.autocast keeps what it has to restore in itself, so within one that is open another is built. Where no gradients are
    wanted weights are converted at each use, and not kept: nobody tells when they change, as in a step that evaluates an
    average of them too.
    """

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self._arguments = (device_type, dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a dtype that the device does not have, which `check` refuses
            self._keeping = torch.autocast(device_type, dtype)
            self._converting = torch.autocast(device_type, dtype, cache_enabled=False)
        self._open: list[torch.autocast] = []
        # Which torch itself leaves out under a GPU's autocast, and under that alone.
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


class _Outside(AbstractContextManager[None]):
    """No autocast, in whatever it is entered; afterwards weights are converted anew, as they may have changed."""

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


def _by_kind(optimizer: Optimizer) -> list[tuple[Any, torch.device]]:
    """Return what the scaler divides at a time, and where it lies: DTensors apart from other gradients."""
    held = [(p, grad) for group in optimizer.param_groups for p in group["params"] if (grad := p.grad) is not None]
    kind, device = (type(held[0][1]), held[0][1].device) if held else (None, None)
    if device is not None and all(type(grad) is kind and grad.device == device for _, grad in held):
        return [(optimizer, device)]
    kinds: dict[tuple[type, torch.device], list[Tensor]] = {}
    for parameter, grad in held:
        kinds.setdefault((type(grad), grad.device), []).append(parameter)
    return [
        (SimpleNamespace(param_groups=[{"params": parameters}]), device) for (_, device), parameters in kinds.items()
    ]


_hooked: list[Any] = []


def _see_every_step() -> None:
    """Have every optimizer's step, of whoever made it, end the use of weights that autocast has converted before it."""
    if not _hooked:
        _hooked.append(register_optimizer_step_post_hook(_convert_anew))


def _convert_anew(*_: Any) -> None:
    torch.clear_autocast_cache()

"""Single dtype: weights, batches and the numbers of a step in float64, float16 or bfloat16."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.devices.abilities import computes_in
from trainwright.precision.base import Closure, Precision, Sender
from trainwright.value_kinds import is_dtensor, is_metric, with_values

DTYPES = {"64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16}


class SingleDtypePrecision(Precision):
    """Floating-point parameters, buffers and batches in one dtype.

    States of torchmetrics objects keep their dtype, because a sum in half precision soon stops growing.

    Args:
        name: "64-true", "16-true" or "bf16-true".
    """

    param_dtype: torch.dtype
    converts_batch = True

    def __init__(self, name: str) -> None:
        if name not in DTYPES:
            raise ValueError(f"name={name!r} is no precision of one dtype; choose from {', '.join(DTYPES)}.")
        self.name = name
        self.param_dtype = DTYPES[name]
        self._context = _DefaultDtype(self.param_dtype)

    def check(self, device: torch.device) -> None:
        if not computes_in(device.type, self.param_dtype):
            has = [repr(name) for name, dtype in DTYPES.items() if computes_in(device.type, dtype)]
            raise ValueError(
                f"precision={self.name!r} computes in {self.param_dtype}, which {device} does not have; pass one of "
                f"{', '.join([repr('32-true'), *has])}, or accelerator='cpu'."
            )

    def convert_module(self, module: nn.Module) -> None:
        """Convert floating-point parameters and buffers in place, except those on the meta device.

        Meta tensors draw their values in the dtype of their creation, and are converted afterwards.
        """
        if is_metric(module):
            return
        recurses = "recurse" not in inspect.signature(module._apply).parameters  # it converts its children too
        for child in () if recurses else module.children():
            self.convert_module(child)
        tensors = [*module.parameters(recurse=recurses), *module.buffers(recurse=recurses)]
        is_done = all(self._converted(tensor) is tensor for tensor in tensors)
        is_sharded = any(map(is_dtensor, tensors))  # which torch cannot swap, even for equal ones
        # A class that overrides _apply may have other tensors. Torch's RNNs only flatten their weights again.
        if is_done and (is_sharded or type(module)._apply is nn.Module._apply or isinstance(module, nn.RNNBase)):
            return
        module._apply(self._converted, **({} if recurses else {"recurse": False}))  # type: ignore[no-untyped-call]

    def convert_batch(self, batch: Any) -> Any:
        """Return the batch with its floating-point tensors in this dtype."""
        if isinstance(batch, Tensor):
            return self._converted(batch)
        if isinstance(batch, Mapping):
            return with_values(batch, {key: self.convert_batch(value) for key, value in batch.items()})
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*map(self.convert_batch, batch))
        if isinstance(batch, (list, tuple)):
            return type(batch)(map(self.convert_batch, batch))
        return batch

    def init_context(self) -> AbstractContextManager[Any]:
        return _DefaultDtype(self.param_dtype)

    def forward_context(self) -> AbstractContextManager[Any]:
        return self._context

    def backward_context(self) -> AbstractContextManager[Any]:
        # Activation checkpointing reruns parts of the forward in backward, and does not restore the default dtype.
        return self._context

    def step_context(self) -> AbstractContextManager[Any]:
        return self._context.outside()

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        with self._context:
            super().backward(loss, send, **options)

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        """Step outside of the forward's default dtype. A closure still runs in it."""
        if not self._context.is_entered:
            return super().step(optimizer, closure)
        with self.step_context():
            return super().step(optimizer, None if closure is None else self._within(closure))

    def _within(self, closure: Closure) -> Closure:
        def call() -> Any:
            with self._context:
                return closure()

        return call

    def _converted(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.param_dtype) if tensor.is_floating_point() and not tensor.is_meta else tensor


class _DefaultDtype(AbstractContextManager[None]):
    """Sets the default dtype of new tensors, reentrantly."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._before: list[torch.dtype] = []

    @property
    def is_entered(self) -> bool:
        return bool(self._before)

    def outside(self) -> AbstractContextManager[None]:
        """Return a context with the default dtype from before this one was first entered."""
        return _DefaultDtype(self._before[0] if self._before else torch.get_default_dtype())

    def __enter__(self) -> None:
        self._before.append(torch.get_default_dtype())
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(self._before.pop())

"""Traced step: the bytes that a forward saves for backward, computed from shapes only."""

from __future__ import annotations

import copy
import re
import warnings
import weakref
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainwright.data.transfer import map_leaves
from trainwright.precision.base import Precision

__all__ = ["parse_batch", "saved_bytes"]


def parse_batch(text: str) -> Any:
    """Return a batch on the meta device for a text such as "8x128:int64,8:int64".

    Several tensors are a list, as a DataLoader returns it, and so is one with a comma after it. With names, such as
    "words=8x128:int64", they are a dict.

    Raises:
        ValueError: the text has another form.
    """
    example = "a batch such as 8x128:int64,8:int64, or x=8x3x32x32,y=8:int64 for a dict (float32 without a dtype)"
    tensors, names = [], []
    for part in text.removesuffix(",").split(","):
        form = re.fullmatch(r"\s*(?:(\w+)=)?(\d+(?:x\d+)*)(?::(\w+))?\s*", part)
        dtype = getattr(torch, form[3] or "float32", None) if form else None
        if form is None or not isinstance(dtype, torch.dtype):
            raise ValueError(f"--batch {text}: {part!r} is not the shape and dtype of a tensor. Pass {example}.")
        names.append(form[1])
        tensors.append(torch.empty([int(size) for size in form[2].split("x")], dtype=dtype, device="meta"))
    if len(set(names)) == len(names) and None not in names:
        return dict(zip(names, tensors, strict=True))
    if any(names):
        raise ValueError(f"--batch {text}: expected a separate name for each tensor, or none. Pass {example}.")
    return tensors if "," in text else tensors[0]


def saved_bytes(module: nn.Module, batch: Any, precision: Precision, calls_forward: bool = False) -> int:
    """Return the bytes of the tensors that one step saves for backward, without parameters and buffers.

    The tensors have shapes but no values, as on the CPU, so nothing is allocated or computed. A step that reads values
    raises an error of torch.

    Args:
        module: a module, also on the meta device, in the dtype of the precision.
        batch: tensors, of which only shapes and dtypes count.
        precision: its autocast applies.
        calls_forward: call the forward even if the module has a training_step. A dict has its keyword arguments, a list or
            a tuple its arguments.
    """
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.simplefilter("ignore")  # such as self.log's, without a trainer
        attributes = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
        memo: dict[int, Any] = {}
        for tensor in chain(module.parameters(), module.buffers(), attributes):
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(_fake(tensor), tensor.requires_grad) if is_parameter else _fake(tensor)
        fake = copy.deepcopy(module, memo).train()
        batch = precision.convert_batch(map_leaves(_fake, batch))
        saved: list[weakref.ref[Tensor]] = []

        def record(tensor: Tensor) -> Tensor:
            saved.append(weakref.ref(tensor))
            return tensor

        with precision.forward_context() or nullcontext(), torch.autograd.graph.saved_tensors_hooks(record, _same):
            output = _call(fake, batch, calls_forward)  # keeps the graph alive
        own = {id(tensor.untyped_storage()) for tensor in chain(fake.parameters(), fake.buffers())}
        storages = [tensor.untyped_storage() for tensor in (ref() for ref in saved) if tensor is not None]
        size = sum(storage.nbytes() for key, storage in {id(each): each for each in storages}.items() if key not in own)
        del output
        return size


def _call(module: nn.Module, batch: Any, calls_forward: bool) -> Any:
    step = getattr(module, "training_step", None)
    if callable(step) and not calls_forward:
        return step(batch, 0)
    if isinstance(batch, dict):
        return module(**batch)
    return module(*batch) if isinstance(batch, (list, tuple)) else module(batch)


def _fake(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") if isinstance(leaf, Tensor) else leaf


def _same(tensor: Tensor) -> Tensor:
    return tensor

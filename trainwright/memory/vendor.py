"""The bytes that a step saves for backward, by torch's private tensors without values, as read in torch 2.13."""

from __future__ import annotations

import copy
import warnings
import weakref
from contextlib import nullcontext
from itertools import chain

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from trainwright.data.transfer import map_leaves
from trainwright.precision.base import Precision
from trainwright.strategies.fsdp2.tensor_plan import TensorGroup

__all__ = ["saved_bytes"]


def saved_bytes(
    module: nn.Module,
    batch: object,
    precision: Precision,
    calls_forward: bool = False,
    group: TensorGroup | None = None,
) -> int:
    """Return the bytes of the tensors that one step saves for backward, without parameters and buffers.

    The tensors have shapes but no values, as on the CPU, so nothing is allocated or computed. A step that reads values
    raises an error of torch.

    Args:
        module: a module, also on the meta device, in the dtype of the precision.
        batch: tensors, of which only shapes and dtypes count.
        precision: its autocast applies.
        calls_forward: call the forward even if the module has a training_step. A dict has its keyword arguments, a list or
            a tuple its arguments.
        group: a tensor group, of which one rank's bytes are counted.
    """
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.simplefilter("ignore")  # such as self.log's, without a trainer
        attributes = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
        memo: dict[int, object] = {
            id(each): _fake(each) for each in (*module.parameters(), *module.buffers(), *attributes)
        }
        fake = copy.deepcopy(module, memo).train()
        if group is not None:
            group.plan(fake)
            group.divide(fake)
        batch = precision.convert_batch(map_leaves(_fake, batch))
        saved: list[weakref.ref[Tensor]] = []

        def record(tensor: Tensor) -> Tensor:
            saved.append(weakref.ref(tensor))
            return tensor

        loss_context = nullcontext() if group is None else group.loss_context()
        saving = torch.autograd.graph.saved_tensors_hooks(record, _same)
        with precision.forward_context() or nullcontext(), loss_context, saving:
            output = _call(fake, batch, calls_forward)  # keeps the graph alive
        own = {id(_storage(tensor)) for tensor in chain(fake.parameters(), fake.buffers())}
        storages = [_storage(tensor) for tensor in (ref() for ref in saved) if tensor is not None]
        size = sum(storage.nbytes() for key, storage in {id(each): each for each in storages}.items() if key not in own)
        del output
        return size


def _call(module: nn.Module, batch: object, calls_forward: bool) -> object:
    step = getattr(module, "training_step", None)
    if callable(step) and not calls_forward:
        return step(batch, 0)
    if isinstance(batch, dict):
        return module(**batch)
    return module(*batch) if isinstance(batch, (list, tuple)) else module(batch)


def _fake(leaf: object) -> object:
    if not isinstance(leaf, Tensor):
        return leaf
    fake = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
    return nn.Parameter(fake, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else fake


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _same(tensor: Tensor) -> Tensor:
    return tensor

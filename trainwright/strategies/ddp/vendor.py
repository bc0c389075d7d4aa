"""The private names of torch that ddp needs, as read in torch 2.11 to 2.15.

DDP's reducer counts the gradients of one backward per forward. Manual optimization, several backwards of one forward, and a
backward that failed all need its internal calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

BROADCAST_BYTES = 32 * 1024 * 1024


def rank_local_names(module: nn.Module) -> frozenset[str]:
    """Return the names of tensors that a module excludes from DDP, so that they may differ across ranks."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def exclude(forward: nn.Module, names: Iterable[str]) -> None:
    forward._ddp_params_and_buffers_to_ignore = list(names)  # type: ignore[assignment]


def recomputes_reentrantly(layer: nn.Module) -> bool:
    """Return whether a layer recomputes activations in a backward within the backward."""
    # The functions of torch's checkpoint_wrapper, and of transformers while its checkpointing is on.
    functions = [vars(layer).get(name) for name in ("checkpoint_fn", "_gradient_checkpointing_func")]
    is_reentrant = any(getattr(function, "keywords", {}).get("use_reentrant") for function in functions)
    return is_reentrant and bool(vars(layer).get("gradient_checkpointing", True))


def broadcast_coalesced(tensors: list[Tensor]) -> None:
    """Replace tensors by rank 0's, in place, in messages of 32 MiB. Collective: call on every rank."""
    group = dist.group.WORLD
    assert group is not None
    dist._broadcast_coalesced(group, tensors, BROADCAST_BYTES, 0)  # type: ignore[attr-defined]


def prepare_backward(wrapped: DistributedDataParallel, loss: Tensor) -> None:
    """Prepare a module's reducer for the backward of a loss, as its forward does."""
    wrapped.reducer._rebuild_buckets()
    used = list(_find_tensors(loss)) if wrapped.find_unused_parameters else []  # type: ignore[no-untyped-call]
    wrapped.reducer.prepare_for_backward(used)


def reset_reducer(wrapped: DistributedDataParallel) -> None:
    """Make a reducer usable after a failed backward, whose error the user may catch."""
    wrapped.reducer._reset_state()


def is_learning_graph(wrapped: DistributedDataParallel) -> bool:
    """Return whether DDP has yet to learn a static graph, in a backward that must be synchronized."""
    return wrapped.static_graph and not wrapped._static_graph_delay_allreduce_enqueued


def accumulate_in_order(wrapped: DistributedDataParallel, parameters: list[nn.Parameter]) -> None:
    """Run a backward of zeros through parameters in this order, by which the next forward rebuilds the buckets."""
    with _without_hooks(parameters):
        wrapped.reducer.prepare_for_backward([])
        for parameter in parameters:
            torch.autograd.backward(parameter, torch.zeros_like(parameter))
    for parameter in parameters:
        parameter.grad = None


@contextmanager
def _without_hooks(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    # Emptied in place, because autograd keeps references to the dicts.
    tables: list[Any] = [hooks for p in parameters for kind in kinds if (hooks := getattr(p, kind, None))]
    copies = [dict(hooks) for hooks in tables]
    try:
        for hooks in tables:
            hooks.clear()
        yield
    finally:
        for hooks, users in zip(tables, copies, strict=True):
            hooks.update(users)

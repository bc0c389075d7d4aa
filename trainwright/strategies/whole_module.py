"""Whole module: a plain copy, in host memory, of a module that fsdp or ZeRO stage 3 has left sharded."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import checkpoint

from trainwright.strategies.fsdp2.tensor_plan import whole_of
from trainwright.strategies.replication import equalize
from trainwright.strategies.zero import vendor
from trainwright.value_kinds import computed_tensors

ENGINES = (str(Path(__file__).parent), str(Path(dist.__file__).parent))
"""The folders of the code that strategies attach to modules."""
ADDED = (
    *("__composable_api", "ds_", "_external_params", "_original_parameters", "all_parameters"),
    *("applied_pre_backward_ref_cnt", "pre_bwd_fn", "post_bwd_fn"),
)
"""Beginnings of the names of attributes that torch's fully_shard and DeepSpeed add to a module."""
PACKAGES = ("deepspeed.", "torch.distributed.", "trainwright.strategies.")


def is_sharded(module: nn.Module) -> bool:
    """Return whether fsdp or ZeRO stage 3 has sharded a module's parameters."""
    return any(isinstance(each, DTensor) or hasattr(each, "ds_id") for each in module.parameters())


def gather_module(module: nn.Module, *, all_ranks: bool = False) -> nn.Module | None:
    """Return a whole, plain copy of a module in host memory, on rank 0 or on all ranks. Collective: call on every rank.

    It is a copy under every strategy, so that a script may always end in `torch.save`, `copy.deepcopy` or an export. The
    module itself is unchanged, and can be trained further.

    Args:
        module: as a run has left it, or `accelerator.unwrap_model(model)` for a prepared model.
        all_ranks: return the copy on every rank. Otherwise only rank 0 returns it, and the others None.

    Raises:
        RuntimeError: the module is sharded, and the processes of that run are no longer connected.

    >>> tw.Trainer(max_epochs=1, enable_model_summary=False).fit(module, loader)
    >>> whole = tw.gather_module(module)
    >>> if whole is not None:  # on rank 0
    ...     torch.save(whole.state_dict(), "weights.pt")
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not dist.is_initialized() and is_sharded(module):
        raise RuntimeError(
            f"{type(module).__name__} is sharded over processes that are no longer connected. Read it from a checkpoint: "
            f"{type(module).__name__}.load_from_checkpoint(path)."
        )
    wanted = all_ranks or rank == 0
    memo: dict[int, Any] = {}
    for each in module.modules():
        root = each.__dict__.get("_fsdp_root")
        if root is not None and root.depth == 0:
            root.reshard()
    with torch.no_grad():
        for parameter in module.parameters():
            whole = _gathered(parameter)
            if wanted:
                host = torch.empty_like(whole, device="cpu").copy_(whole)
                memo[id(parameter)] = nn.Parameter(host, parameter.requires_grad)
        buffers = [(each, each.detach().clone()) for each in module.buffers()]
        equalize(clone for _, clone in buffers)
    if not wanted:
        return None
    memo |= {id(each): clone.cpu() for each, clone in buffers}
    memo |= {id(each): each.detach().to("cpu", copy=True) for each in computed_tensors(module)}
    return _copied(module, memo)


def _gathered(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's whole value. Collective where it is sharded."""
    whole = parameter.detach()
    if isinstance(whole, DTensor):
        return whole_of(whole)
    return vendor.gather_whole(parameter) if hasattr(parameter, "ds_id") else whole


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a copy of a module tree as the user made it, with the memo's tensors."""
    members = list(module.modules())
    for each in members:
        # fully_shard has replaced the class by one of (FSDPModule, class).
        plain: Any = type(each).__bases__[1] if isinstance(each, FSDPModule) else type(each)
        memo[id(each)] = plain.__new__(plain)
    for each in members:
        # A parametrized module refuses __getstate__, but can be copied.
        state: Any = each.__dict__ if is_parametrized(each) else each.__getstate__()  # type: ignore[no-untyped-call]
        kept: dict[str, Any] = {}
        for name, value in state.items():
            if name.startswith(ADDED) or (name.startswith("_") and "fsdp" in name) or _is_engines(value):
                continue
            if name.endswith("_hooks") and isinstance(value, dict):
                value = type(value)((key, hook) for key, hook in value.items() if not _is_engines(hook))
            elif name == "_parameters":
                value = dict(value.items())
            kept[name] = copy.deepcopy(value, memo)
        copied = memo[id(each)]
        if is_parametrized(each):
            copied.__dict__.update(kept)
        else:
            copied.__setstate__(kept)
    whole: nn.Module = memo[id(module)]
    return whole


def _is_engines(value: Any) -> bool:
    """Return whether this function or class belongs to a strategy or its engine, not to the user."""
    inner = value
    while inner is not None:  # a partial, a bound method, or torch's wrapper of a hook
        value = inner
        inner = value.func if isinstance(value, partial) else getattr(value, "__func__", getattr(value, "hook", None))
    if not isinstance(value, (FunctionType, type)):
        return False
    # A method that a strategy has wrapped names the user's module, so its code's file counts too.
    is_file = isinstance(value, FunctionType) and value.__code__.co_filename.startswith(ENGINES)
    return f"{value.__module__}.".startswith(PACKAGES) or is_file or value is checkpoint

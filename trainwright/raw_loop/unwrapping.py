"""Models without the wrappers around them."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from trainwright.compiled_names import is_compiled
from trainwright.engine.prepared import PreparedModule
from trainwright.strategies.base import StepForward

WRAPPERS = (PreparedModule, StepForward, DistributedDataParallel, DataParallel)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the user's model, without the wrappers of `prepare` and of torch's data parallelism.

    Args:
        keep_fp32_wrapper: has no effect: a prepared model's own forward is never replaced.
        keep_torch_compile: leave the wrapper of torch.compile on a model that has no other wrapper within it.
        recursive: replace the wrapped submodules of the model too, in place.

    >>> prepared = tw.Accelerator().prepare(model)
    >>> tw.extract_model_from_parallel(prepared) is model
    True
    """
    inner = _unwrapped(model, keep_torch_compile)
    if recursive:
        # A list, because children are replaced meanwhile.
        for parent in list(inner.modules()):
            for name, child in parent.named_children():
                if isinstance(child, WRAPPERS):
                    setattr(parent, name, _unwrapped(child, keep_torch_compile))
    return inner


def _unwrapped(model: nn.Module, keeps_compiled: bool) -> nn.Module:
    inner = model
    while isinstance(inner, WRAPPERS) or is_compiled(inner):
        compiled = inner if is_compiled(inner) else None
        inner = inner._orig_mod if compiled is not None else inner.module  # type: ignore[assignment]
        if compiled is not None and keeps_compiled and not isinstance(inner, WRAPPERS):
            return compiled
    return inner

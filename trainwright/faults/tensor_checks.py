"""Checks of losses, gradients and nests of tensors, and copies of buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
Buffers = list[tuple[nn.Module, str, Tensor, Tensor]]
"""Buffers by module and name, and copies of their values."""


class PlainBackwards:
    """Rejects gradients of a plain backward in manual optimization, which are neither averaged nor scaled."""

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._names: dict[Tensor, str] = {}
        self._handles: list[RemovableHandle] = []
        self.came: set[Tensor] = set()
        """The parameters with gradients from a backward."""

    def watch(self, module: nn.Module) -> None:
        self.close()
        self._module, self._names = module, {}
        self._watch_new(module)

    def _watch_new(self, module: nn.Module) -> list[Tensor]:
        """Watch new parameters, and return those under a name that another parameter had."""
        known = set(self._names.values())
        found: dict[Tensor, str] = {
            p: name for name, p in module.named_parameters() if p.requires_grad and p not in self._names
        }
        self._names.update(found)
        self._handles += [each.register_post_accumulate_grad_hook(self.came.add) for each in found]  # type: ignore[no-untyped-call]
        return [each for each, name in found.items() if name in known]

    def refuse(self) -> None:
        """Raise RuntimeError if a plain backward has given gradients that were not discarded."""
        if self._module is not None:  # once, within a step, where fsdp's modules have gathered parameters
            self.came.update(each for each in self._watch_new(self._module) if each.grad is not None)
            self._module = None
        kept = [name for each, name in self._names.items() if each in self.came and each.grad is not None]
        self.came.clear()
        if kept:
            raise RuntimeError(
                f"loss.backward() has given {kept[0]!r} a gradient, which is neither averaged over the ranks nor scaled as "
                "16-mixed needs it. Under manual optimization call self.manual_backward(loss) instead."
            )

    def close(self) -> None:
        for each in self._handles:
            each.remove()
        self._handles.clear()


def copied_buffers(modules: Iterable[nn.Module]) -> Buffers:
    """Return copies of all buffers, for `restore`."""
    return [
        (owner, name, buffer, buffer.detach().clone())
        for module in modules
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if not is_lazy(buffer)
    ]


@torch.no_grad()
def restore(buffers: Buffers) -> None:
    """Return buffers to their earlier values, and to their places, from which a step may have replaced them."""
    for owner, name, buffer, value in buffers:
        buffer.copy_(value)
        setattr(owner, name, buffer)


def read_losses(losses: Sequence[Tensor]) -> list[float]:
    """Return losses as numbers. NOTE: waits for the device, once for all."""
    numbers: list[float] = torch.stack([loss.float().reshape(()) for loss in losses]).tolist() if losses else []
    return numbers


@torch.no_grad()
def not_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of tensors that are not finite, with one read from each device."""
    checks: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in named:
        is_plain = tensor.layout is torch.strided and not tensor.is_meta  # a save rejects others
        is_plain &= type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        if is_plain and tensor.numel() > 0 and tensor.dtype in DTYPES:
            # On the CPU ten times as fast as a norm. An extreme is NaN where any element is.
            extremes = torch.stack(torch.aminmax(tensor))
            checks.setdefault(tensor.device, {})[name] = extremes.isfinite().all()
    return [
        name
        for found in checks.values()
        for name, is_finite in zip(found, torch.stack([*found.values()]).tolist(), strict=True)
        if not is_finite
    ]


def has_bad(nest: object) -> bool:
    """Return whether a tensor of a nest is not finite. NOTE: waits for the device."""
    return any(not bool(tensor.isfinite().all()) for _, tensor in named_tensors(nest))


def named_tensors(nest: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nest, with their paths as names."""
    if isinstance(nest, Tensor):
        yield path or "batch", nest
    items = nest.items() if isinstance(nest, Mapping) else enumerate(nest) if isinstance(nest, (list, tuple)) else ()
    for key, value in items:
        yield from named_tensors(value, f"{path}.{key}" if path else str(key))

"""Plain backwards: calls of `loss.backward()` in manual optimization, which the engine does not see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class PlainBackwards:
    """Rejects gradients of a plain backward, where they are neither averaged nor scaled."""

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._names: dict[Tensor, str] = {}
        self._handles: list[RemovableHandle] = []
        self._came: set[Tensor] = set()
        self._has_looked = False

    def watch(self, module: nn.Module) -> None:
        """Watch the trained parameters of one module."""
        self.close()
        self._module = module
        self._watch_new(module)

    def _watch_new(self, module: nn.Module) -> list[Tensor]:
        """Watch new parameters, and return the parameters under a name that another parameter had."""
        known = set(self._names.values())
        found: dict[Tensor, str] = {}
        found.update((p, name) for name, p in module.named_parameters() if p.requires_grad and p not in self._names)
        self._names.update(found)
        for each in found:
            self._handles.append(each.register_post_accumulate_grad_hook(self._came.add))  # type: ignore[no-untyped-call]
        return [each for each, name in found.items() if name in known]

    @contextmanager
    def own(self) -> Iterator[None]:
        """Return the context of the engine's backward.

        Raises:
            RuntimeError: as `refuse`.
        """
        self.refuse()
        try:
            yield
        finally:
            self._came.clear()

    def refuse(self) -> None:
        """Raise RuntimeError if a plain backward has given gradients that were not discarded."""
        if self._module is not None and not self._has_looked:
            self._has_looked = True  # once, within a step, where the module has gathered parameters
            self._came.update(each for each in self._watch_new(self._module) if each.grad is not None)
        if not self._came:
            return
        kept = [self._names[each] for each in self._names if each in self._came and each.grad is not None]
        self._came.clear()
        if kept:
            raise RuntimeError(
                f"loss.backward() has given {kept[0]!r} a gradient, which is neither averaged over the ranks nor scaled as "
                "16-mixed needs it. Under manual optimization call self.manual_backward(loss) instead."
            )

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for each in self._handles:
            each.remove()
        for kept in (self._names, self._handles, self._came):
            kept.clear()
        self._module, self._has_looked = None, False

"""Compiled names: a state_dict whose keys do not tell which submodules somebody has wrapped in torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

WRAPPER = "_orig_mod"
"""Under this name a module that torch.compile has returned holds the one that it was given."""


def clean_name(name: str) -> str:
    """Return a state_dict key, or the name of a parameter, without the parts that torch.compile puts into it."""
    if WRAPPER not in name:
        return name
    return ".".join(part for part in name.split(".") if part != WRAPPER)


def register_clean_names(module: nn.Module) -> None:
    """Let a module's state_dict have clean names, and let it load both forms, whatever in it is compiled by then."""
    module.register_state_dict_post_hook(_clean)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_adapt)  # type: ignore[no-untyped-call]


def is_compiled(module: object) -> bool:
    """Return whether a module is what torch.compile returned. Where nobody has loaded the compiler, none is."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def _clean(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    if "torch._dynamo.eval_frame" in sys.modules:
        _rename(state_dict, prefix, clean_name)
        # Versions are looked up under the names that a module has when it loads: known under both.
        metadata = getattr(state_dict, "_metadata", {})
        metadata.update({clean_name(name): value for name, value in metadata.items() if WRAPPER in name})


def _adapt(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Give each key the form that this module has for it."""
    if not any(is_compiled(each) for each in module.modules()):
        _rename(state_dict, prefix, clean_name)
        return
    _rename(state_dict, prefix, lambda name: own_name(module, name))
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        for name, _ in module.named_modules():
            if WRAPPER in name and clean_name(prefix + name) in metadata:
                metadata.setdefault(prefix + name, metadata[clean_name(prefix + name)])


def own_name(module: nn.Module, name: str) -> str:
    """Return the key that a module's own state_dict has for a name, whatever in it is compiled."""
    current: Any = module
    parts = []
    for part in clean_name(name).split("."):
        while is_compiled(current):
            parts.append(WRAPPER)
            current = current._orig_mod
        parts.append(part)
        current = current._modules.get(part) if isinstance(current, nn.Module) else None
    return ".".join(parts)


def _rename(state_dict: dict[str, Any], prefix: str, rename: Callable[[str], str]) -> None:
    """Rename the keys below a prefix, in place and in their order."""
    names = [prefix + rename(name[len(prefix) :]) if name.startswith(prefix) else name for name in state_dict]
    if names != list(state_dict):
        values = list(state_dict.values())
        state_dict.clear()
        state_dict.update(zip(names, values, strict=True))

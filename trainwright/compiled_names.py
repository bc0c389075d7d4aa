"""Compiled names: state_dict keys that do not depend on which submodules torch.compile or `checkpoint_wrapper` wraps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

WRAPPER = "_orig_mod"
"""The attribute in which a compiled module holds the original one."""
RECOMPUTED = "_checkpoint_wrapped_module"
"""The attribute in which torch's activation wrappers hold theirs; their own hooks keep it out of a state_dict."""


def clean_name(name: str) -> str:
    """Return a state_dict key or the name of a parameter or module without the parts that wrappers add."""
    if WRAPPER not in name and RECOMPUTED not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in (WRAPPER, RECOMPUTED))


def register_clean_names(module: nn.Module) -> None:
    """Give a module's state_dict clean names, and let it load both forms, whatever is compiled then."""
    module.register_state_dict_post_hook(_clean)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_adapt)  # type: ignore[no-untyped-call]


def is_compiled(module: object) -> bool:
    """Return whether torch.compile returned this module."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def _clean(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    _rename(state_dict, prefix, clean_name)
    # A load looks versions up under the names that the module then has, so both are kept.
    metadata = getattr(state_dict, "_metadata", {})
    metadata.update({clean_name(name): value for name, value in metadata.items() if WRAPPER in name})


def _adapt(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Rename each key to the form that this module uses."""
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
    """Return the key that a module's own state_dict uses for a name, whatever is compiled."""
    current: Any = module
    parts = []
    for part in clean_name(name).split("."):
        while is_compiled(current) or RECOMPUTED in getattr(current, "_modules", ()):
            if is_compiled(current):
                parts.append(WRAPPER)
            current = current._modules[WRAPPER if is_compiled(current) else RECOMPUTED]
        parts.append(part)
        current = current._modules.get(part) if isinstance(current, nn.Module) else None
    return ".".join(parts)


def _rename(state_dict: dict[str, Any], prefix: str, rename: Callable[[str], str]) -> None:
    """Rename the keys below a prefix, keeping their order."""
    names = [prefix + rename(name[len(prefix) :]) if name.startswith(prefix) else name for name in state_dict]
    if names != list(state_dict):
        values = list(state_dict.values())
        state_dict.clear()
        state_dict.update(zip(names, values, strict=True))

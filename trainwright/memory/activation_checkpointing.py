"""Activation checkpointing: blocks store their inputs only, and compute their activations again in the backward.

Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainwright.errors import did_you_mean
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies import Strategy
from trainwright.strategies.fsdp2.wrap_policy import has_forward

EXPENSIVE = ("mm", "convolution", "attention")
"""Parts of the names of operations whose results "selective" stores. All others take little time to repeat."""
ACCEPTED = (
    "Pass True (the repeated blocks), 'selective', a set of Module classes such as {Block}, or a dict with the keys 'blocks', "
    "'selective' and 'offload'."
)


@dataclass(frozen=True)
class ActivationCheckpointing:
    """Which blocks recompute their activations, and how.

    Args:
        blocks: classes of modules. None for the repeated blocks.
        selective: store the results of matrix products, convolutions and attention, and recompute only the rest.
        offload: keep the blocks' inputs in host memory until the backward.
    """

    blocks: frozenset[type[nn.Module]] | None = None
    selective: bool = False
    offload: bool = False

    @classmethod
    def read(cls, value: Any) -> ActivationCheckpointing | None:
        """Return the settings of an `activation_checkpointing=` argument, or None for False and None (ValueError)."""
        if value is None or value is False:
            return None
        options: dict[str, Any] = {"blocks": value}
        if isinstance(value, Mapping):
            options = {"blocks": None, **value}
        elif value == "selective":
            options = {"blocks": None, "selective": True}
        blocks = options["blocks"]
        if blocks is None or blocks is True:
            options["blocks"] = None
        else:
            options["blocks"] = frozenset(blocks if isinstance(blocks, set | frozenset | list | tuple) else [blocks])
        are_classes = all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in options["blocks"] or ())
        are_flags = all(isinstance(options.get(name, False), bool) for name in ("selective", "offload"))
        is_known = options.keys() <= {"blocks", "selective", "offload"} and options["blocks"] != frozenset()
        if not (are_classes and are_flags and is_known):
            raise ValueError(f"activation_checkpointing={value!r} is not accepted. {ACCEPTED}")
        return cls(**options)

    def install(self, module: nn.Module, device_type: str, strategy: Strategy | None = None) -> Callable[[], None]:
        """Make the blocks of a module recompute their activations. Return a function that undoes it.

        Raises:
            ValueError: the module has no such block, or the strategy recomputes activations too.
        """
        if getattr(strategy, "activation_checkpointing_policy", None):
            raise ValueError(
                "activation_checkpointing= and the strategy's activation_checkpointing_policy= would recompute blocks twice. "
                "Omit activation_checkpointing_policy."
            )
        offloads = self.offload and device_type != "cpu"
        if offloads != self.offload:
            rank_zero_warn(
                "activation_checkpointing: 'offload' moves tensors from a GPU to the host. This run is on the CPU: nothing is "
                "moved.",
                stacklevel=2,
            )
        blocks = repeated_blocks(module) if self.blocks is None else _of_classes(module, self.blocks)
        if not blocks:
            raise ValueError(
                f"activation_checkpointing finds no repeated block in {type(module).__name__}: no ModuleList, Sequential or "
                "ModuleDict of it has two modules of one class that have children. Name the classes of the blocks, as in "
                "activation_checkpointing={Block}."
            )
        for block in blocks:  # which another loop may have prepared
            if isinstance(earlier := vars(block).get("forward"), partial) and earlier.func is _recomputed:
                block.forward = earlier.args[1]
        before = [(block, vars(block).get("forward")) for block in blocks]
        for block in blocks:
            block.forward = partial(_recomputed, block, block.forward, self.selective, offloads)

        cached = _switch_caches_off(module)

        def undo() -> None:
            for config in cached:
                config.use_cache = True
            for block, forward in before:
                if forward is None:
                    vars(block).pop("forward", None)
                else:
                    block.forward = forward

        return undo


def _switch_caches_off(module: nn.Module) -> list[Any]:
    """Switch off the caches of transformers' decoders, to which a recomputation would append again; return their configs."""
    configs: list[Any] = [getattr(part, "config", None) for part in module.modules()]
    cached = [config for config in configs if getattr(config, "use_cache", None) is True]
    for config in cached:
        config.use_cache = False
    return cached


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules with children that share their class with another item of their container."""
    blocks: list[nn.Module] = []
    for container in module.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            items = [item for item in container.children() if has_forward(item) and any(True for _ in item.children())]
            counts = Counter(map(type, items))
            blocks += [item for item in items if counts[type(item)] > 1]
    return _outermost(blocks)


def _outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that are not within an earlier one."""
    found: list[nn.Module] = []
    inner: set[nn.Module] = set()
    for module in modules:
        if module not in inner:
            found.append(module)
            inner.update(module.modules())
    return found


def _of_classes(module: nn.Module, classes: Iterable[type[nn.Module]]) -> list[nn.Module]:
    """Return the submodules of the classes, without those within another (ValueError if a class has none)."""
    submodules = [submodule for submodule in module.modules() if submodule is not module]
    known = sorted({type(submodule).__name__ for submodule in submodules})
    for kind in classes:
        if not any(isinstance(submodule, kind) for submodule in submodules):
            raise ValueError(
                f"activation_checkpointing names {kind.__name__}, of which {type(module).__name__} has no submodule."
                f"{did_you_mean(kind.__name__, known)} Its classes are {', '.join(known)}."
            )
    return _outermost(submodule for submodule in submodules if isinstance(submodule, tuple(classes)))


def _recomputed(
    block: nn.Module, forward: Callable[..., Any], is_selective: bool, offloads: bool, /, *args: Any, **kwargs: Any
) -> Any:
    """Run a block's forward, and store its inputs and, if `is_selective`, the results of expensive operations only."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():  # a compiled recomputation updates no buffer
        contexts: Any = partial(create_selective_checkpoint_contexts, _policy) if is_selective else None
    else:
        contexts = partial(_contexts, block, is_selective)
    if contexts is not None:
        kwargs["context_fn"] = contexts
    # The innermost hooks see a tensor, so these see only the inputs, which torch's checkpoint saves outside of its hooks.
    outer: AbstractContextManager[Any] = save_on_cpu(pin_memory=True) if offloads else nullcontext()
    with outer:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _contexts(block: nn.Module, is_selective: bool) -> tuple[Any, Any]:
    """Return the contexts of a block's forward and of its recomputation."""
    forward, again = nullcontext(), nullcontext()
    if is_selective:
        forward, again = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return forward, without_updates(block, again)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_expensive = any(word in str(operation) for word in EXPENSIVE)  # such as "aten.addmm.default"
    return CheckpointPolicy.MUST_SAVE if is_expensive else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def without_updates(block: nn.Module, inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Keep a recomputation from updating the running statistics of norms again."""
    norms: list[Any] = [
        layer for layer in block.modules() if layer.training and getattr(layer, "track_running_stats", False)
    ]
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, _, count in before:
        norm.momentum, norm.num_batches_tracked = 0.0, None if count is None else count.clone()
    try:
        with inner:
            yield
    finally:
        for norm, momentum, count in before:
            norm.momentum, norm.num_batches_tracked = momentum, count

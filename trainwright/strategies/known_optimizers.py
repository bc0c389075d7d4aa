"""Known optimizers: which of them step each element independently, so that a rank may step a shard of the elements."""

from __future__ import annotations

import inspect

from torch.optim import ASGD, SGD, Adadelta, Adafactor, Adagrad, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop, Rprop

KNOWN = (SGD, Adam, Adagrad, NAdam, RAdam, Adamax, ASGD, Rprop, RMSprop, Adadelta)  # AdamW is an Adam
"""torch's optimizers that step each element independently."""
UNSHARDED = (Adafactor, Rprop)
"""torch's optimizers that cannot step DTensors."""
KNOWN_OF_DEEPSPEED = ("FusedAdam", "DeepSpeedCPUAdam", "FusedLion", "DeepSpeedCPULion", "DeepSpeedCPUAdagrad")


def refuse_unknown_optimizer(optimizer: Optimizer, strategy: str) -> None:
    """Raise ValueError for an optimizer that may step an element by other elements."""
    if not steps_elements(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} is not known to step each element independently, and strategy={strategy!r} gives "
            "each rank only a shard of the elements. If it does, pass elementwise=True to the strategy. Otherwise choose "
            "strategy='ddp' or 'ddp_sharded', which step whole tensors, or another optimizer, such as AdamW."
        )


def steps_elements(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to step each element independently, or inherits such a step."""
    own = type(optimizer)
    if own.__module__.startswith("deepspeed.ops.") and own.__name__ in KNOWN_OF_DEEPSPEED:
        return True
    return any(
        all(
            inspect.unwrap(getattr(own, name)) is inspect.unwrap(getattr(kind, name))
            for name in ("step", "_init_group")
            if hasattr(kind, name)
        )
        for kind in KNOWN
        if isinstance(optimizer, kind)
    )


def refuse_unsharded(optimizer: Optimizer) -> None:
    """Raise ValueError for one of torch's optimizers that cannot step DTensors; others fail in their first step."""
    if isinstance(optimizer, UNSHARDED):
        raise ValueError(no_shards(optimizer))


def no_shards(optimizer: Optimizer) -> str:
    """Return the text of the error for an optimizer that cannot compute on sharded parameters."""
    return (
        f"{type(optimizer).__name__} does not compute on the sharded parameters (DTensors) that strategy='fsdp' gives it. Use "
        "another optimizer, such as AdamW, or strategy='ddp' or 'ddp_sharded', where a parameter is stepped whole."
    )

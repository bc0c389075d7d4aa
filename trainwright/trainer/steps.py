"""Steps: which arguments a module's step takes, read from its signature once a run."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from trainwright.module import Module


@dataclass(frozen=True)
class StepArguments:
    """What a step is called with: the batch, and the indices of the batch and of the loader if it takes them."""

    takes_index: bool = True
    takes_loader_index: bool = False
    pulls: bool = False
    """Whether it takes its batches from an iterator."""

    def of(self, batch: Any, index: int, loader_index: int) -> tuple[Any, ...]:
        if self.takes_loader_index:
            return batch, index, loader_index
        return (batch, index) if self.takes_index else (batch,)


def read_step(module: Module, name: str, num_loaders: int = 1, are_named: bool = False) -> StepArguments:
    """Return what a module's step takes; `are_named`: all loaders have names, or need none.

    Raises:
        TypeError: it requires other arguments than the batch and the two indices, or takes no loader's index although there
            are several loaders without names.
    """
    step = getattr(module, name)
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):  # a callable without a signature
        return StepArguments()
    names = [each.name for each in parameters]
    if "dataloader_iter" in names:
        return StepArguments(takes_index=False, pulls=True)
    takes_any = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = [each for each in positional if each.default is each.empty]
    keyword_only = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    who = f"{type(module).__name__}.{name}"
    in_fit = name == "training_step"
    if (not positional and not takes_any) or len(needed) > (2 if in_fit else 3) or keyword_only:
        given = "batch_idx" if in_fit else "batch_idx and dataloader_idx"
        raise TypeError(
            f"{who}({', '.join(names)}) cannot be called: it is given the batch, and {given} if it takes more, by position."
        )
    # Values logged by several loaders need names that tell them apart; predictions are a list for each loader.
    if num_loaders > 1 and len(positional) < 3 and not takes_any and not are_named and name != "predict_step":
        raise TypeError(
            f"{who}({', '.join(names)}) takes no dataloader_idx, but there are {num_loaders} loaders; add a third argument, "
            "dataloader_idx=0, or pass the loaders in a dict of names."
        )
    takes_loader_index = len(needed) > 2 or (num_loaders > 1 and (len(positional) > 2 or takes_any))
    return StepArguments(takes_index=len(positional) > 1 or takes_any, takes_loader_index=takes_loader_index)

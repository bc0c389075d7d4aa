"""Local SGD: the ranks step copies of a model, and average them after every few steps."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.raw_loop.bare_models import extract_model_from_parallel
from trainwright.raw_loop.job_states import Processes


class LocalSGD:
    """Within the block the ranks step copies of a prepared model, and average the parameters every few steps.

    Backward then sends nothing. `step` does, every local_sgd_steps calls. At the block's end the parameters are averaged once
    more, and so are the optimizer's moments (momentum, Adam's averages), which differ by rank in between. Buffers become rank
    0's. So afterwards all ranks hold the same model and optimizer again. `save_state` is refused within the block. On one
    process the block changes nothing. Collective: call on every rank.

    Args:
        accelerator: the Accelerator that prepared the model.
        model: the prepared model.
        local_sgd_steps: how many calls of `step` before the parameters are averaged.
        enabled: False leaves the averaging of gradients on.

    Raises:
        ValueError: a strategy that shards the model or its optimizer, a precision with a loss scale, a model that was not
            prepared, a wrong number.

    >>> accelerator = tw.Accelerator()
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    >>> with tw.LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
    ...     for inputs, targets in loader:
    ...         accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...         local_sgd.step()
    """

    def __init__(self, accelerator: Processes, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if isinstance(local_sgd_steps, bool) or not isinstance(local_sgd_steps, int) or local_sgd_steps < 1:
            raise ValueError(f"local_sgd_steps={local_sgd_steps!r} is not accepted. Pass an integer of at least 1.")
        engine = accelerator.engine
        strategy = engine.strategy
        if enabled and (not strategy.capabilities.holds_modules or strategy.capabilities.divides_optimizers):
            raise ValueError(
                f"LocalSGD needs the whole model and optimizer on each rank, and strategy={strategy.name!r} shards them. Use "
                "strategy='ddp', or enabled=False."
            )
        if enabled and accelerator.use_distributed and engine.precision.state_dict():
            raise ValueError(
                f"LocalSGD was given precision {engine.precision.name!r}, whose loss scale would skip other steps on each "
                "rank. Use mixed_precision='bf16', or enabled=False."
            )
        module = extract_model_from_parallel(model)
        if module not in engine.modules:
            raise ValueError(f"the {type(module).__name__} of LocalSGD was not prepared. Pass what prepare returned.")
        self.enabled = enabled and accelerator.use_distributed
        self.num_steps = 0
        """How many times `step` was called."""
        self._engine, self._module, self._every = engine, module, local_sgd_steps

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._engine.train_apart(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.enabled:
            return
        self._engine.train_apart(False)
        if error is None:  # otherwise the other ranks may be elsewhere
            self._unite()

    def step(self) -> None:
        """Count a batch, and average the parameters if it is due. Collective: call on every rank."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self._every == 0:
            self._average(self._trained())

    def _trained(self) -> list[Tensor]:
        return [each for each in self._module.parameters() if each.requires_grad]

    @torch.no_grad()
    def _unite(self) -> None:
        """Give all ranks the same parameters and optimizer states."""
        engine, own = self._engine, set(self._trained())
        self._average(self._trained())
        own_buffers = list(self._module.buffers())
        for buffer, sent in zip(own_buffers, engine.broadcast(own_buffers), strict=True):
            buffer.copy_(sent)  # as every training step of ddp begins with rank 0's
        moments: list[Tensor] = []
        for optimizer in engine.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"] if not own.isdisjoint(group["params"]) else ():
                    state = optimizer.state.get(parameter, {})
                    moments += [each for each in state.values() if _is_moment(each, parameter)]
        # Compared before the collectives, which would hang or mix tensors up if the ranks' lists differ.
        counts = engine.ranks.exchange([list(each.shape) for each in moments], "the end of LocalSGD")
        if any(each != counts[0] for each in counts):
            raise RuntimeError(
                f"at the end of LocalSGD the ranks' optimizers hold {[len(each) for each in counts]} moments: some parameters "
                "had a gradient on some ranks only. Use every parameter in the loss of each rank, or freeze the others."
            )
        self._average(moments)

    @torch.no_grad()
    def _average(self, tensors: Iterable[Tensor]) -> None:
        for each in tensors:
            each.copy_(self._engine.reduce(each.detach(), "mean"))


def _is_moment(value: Any, parameter: Tensor) -> bool:
    # A count of steps, which has a different shape, is the same on all ranks.
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape

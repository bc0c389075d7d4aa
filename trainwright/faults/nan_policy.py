"""NaN policy: what a run does about losses, gradients and weights that are not finite.

A NanGuard watches the engine of a run or of a raw loop. It replaces methods of the engine object, so a run without a policy
calls nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainwright.rank_zero import rank_zero_warn, warn

if TYPE_CHECKING:
    from trainwright.engine.engine import Engine
    from trainwright.precision.base import Closure, Sender
    from trainwright.strategies.base import Clipping, StepResult

POLICIES = (None, "raise", "skip", "rollback")
MOST_SKIPS = 10
"""Steps that a run may omit in a row."""
MOST_ROLLBACKS = 2
"""Times that a run may return to the same checkpoint."""
CHECK = "the check of the losses"

Buffers = list[tuple[nn.Module, str, Tensor, Tensor]]
"""Buffers by module and name, and their values at some time."""


class RunParts(NamedTuple):
    """The parts of a run that a NanGuard needs, as functions."""

    step: Callable[[], int]
    """Returns the number of optimizer steps so far."""
    write: Callable[[str, bytes], str]
    """Writes a file into the run's folder, and returns its path, or "" if the run writes nothing."""
    get_rng: Callable[[], dict[str, object]]
    set_rng: Callable[[dict[str, object]], None]
    batch: Callable[[], str] = lambda: ""
    """Returns the position of the current batch in words, such as "epoch 0, batch 3"."""
    silence: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context in which a step logs nothing."""
    roll_back: Callable[[], str] | None = None
    """Loads the newest checkpoint on all ranks, and returns its path, or "" if there is none."""


class Call(NamedTuple):
    """A forward, or training_step, of the current accumulation window."""

    module: nn.Module
    name: str
    args: tuple[object, ...]
    kwargs: dict[str, object]

    @property
    def batch(self) -> object:
        """Return the batch: the first argument of a step, or all arguments of a forward."""
        return self.args[0] if self.name != "forward" else (*self.args, *self.kwargs.values())


class NanGuard:
    """Applies a policy to one engine, from `install` to `remove`.

    Under "raise" it checks the loss every `interval` optimizer steps (0: only the weights, at saves and at the end), before the
    step, and keeps the latest batch. Under "skip" and "rollback" it keeps the batches, buffers and RNG states of a window.
    """

    def __init__(self, engine: Engine, policy: str | None, parts: RunParts, interval: int) -> None:
        self._engine, self._policy, self._parts, self._interval = engine, policy, parts, interval
        self._decides = policy in ("skip", "rollback")
        self._calls: list[Call] = []
        self._losses: list[Tensor] = []
        self._rng: dict[str, object] = {}
        self._buffers: Buffers = []
        """The buffers at the window's start."""
        self._has_warned = self._has_ended = False
        self._finite_at = 0
        """The optimizer step of the latest check that found nothing."""
        self._num_steps = self._num_skipped = 0
        """Steps so far under "raise", and omitted steps since the latest one that was made."""
        self._returns: list[str] = []
        """The checkpoint of the latest rollback, once for each return to it."""

    def install(self) -> None:
        """Watch the engine, if there is a policy."""
        engine = self._engine
        self._run, self._backward, self._step = engine.run, engine.backward, engine.step
        self._prepare, self._find_fault, self._save = engine.prepare_optimizers, engine.find_fault, engine.save
        watched: dict[str, object] = {
            "run": self._watch_run,
            "backward": self._watch_backward,
            "step": self._watch_step,
        }
        if self._decides:
            watched["prepare_optimizers"] = self._prepare_optimizers
        else:
            watched |= {"find_fault": self._refuse_fault, "save": self._refuse_save}
        for name, method in watched.items() if self._policy is not None else ():
            setattr(engine, name, method)

    def remove(self) -> None:
        """Let the engine run unwatched, and free the batches."""
        for name in ("run", "backward", "step", "prepare_optimizers", "find_fault", "save"):
            vars(self._engine).pop(name, None)
        self._clear()

    # -- at log points

    def look(self, outputs: object) -> None:
        """Warn once of a loss that is not finite, at a log point of a run without a policy."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self._policy is None and not self._has_warned and isinstance(loss, Tensor) and loss.numel() == 1:
            value = loss.item()
            if not math.isfinite(value):
                self._has_warned = True
                warn(
                    f"the loss{self._of_rank(self._engine.rank)} is {value} at step {self._parts.step()} "
                    f"({self._parts.batch()}). Weights that follow from it are not finite, and training does not recover. Pass "
                    "nan_policy='raise' to end such a run, 'skip' to omit such steps, or 'rollback' to return to the newest "
                    "checkpoint.",
                    stacklevel=2,
                )

    def _check(self) -> None:
        """Raise FloatingPointError on every rank if the latest loss of one is not finite. Collective."""
        step = self._parts.step()
        local = [float(loss) for loss in self._losses[-1:]]
        losses = self._engine.ranks.exchange(local, CHECK)
        bad = {rank: loss for rank, found in enumerate(losses) for loss in found if not math.isfinite(loss)}
        if bad:
            self._has_ended = True
            rank, loss = next(iter(bad.items()))
            others = f", as on {len(bad) - 1} more" if len(bad) > 1 else ""
            fault = self._find_fault()
            found = self._replay() + (f" By now {fault}." if fault else "")
            stored = self._store(self._engine.rank in bad)
            raise FloatingPointError(
                f"the loss{self._of_rank(rank)} is {loss}{others}: {self._since(step)}. {found}{stored} Find the cause as "
                "docs/nan_loss.md says, or pass nan_policy='skip' or 'rollback' to train on."
            )
        self._finite_at = step

    def _since(self, step: int) -> str:
        where = self._parts.batch()
        since = "or earlier" if step == self._finite_at else f"after step {self._finite_at}"
        return f"found at step {step}{f' ({where})' if where else ''}, and it began {since}"

    def _of_rank(self, rank: int) -> str:
        return f" of rank {rank}" if self._engine.world_size > 1 else ""

    def _refuse_fault(self) -> str:
        """Raise FloatingPointError on every rank, before a save and at the end of a run, if weights are not finite."""
        fault = self._find_fault()
        if fault and not self._has_ended:
            self._has_ended = True
            step = self._parts.step()
            raise FloatingPointError(f"{fault}: {self._since(step)}.{self._store(True)}")
        return fault

    def _refuse_save(self, *args: object, **kwargs: object) -> None:
        self._refuse_fault()
        self._save(*args, **kwargs)  # type: ignore[arg-type]

    def _replay(self) -> str:
        """Run the latest batch again, and return a sentence on the first module whose output is not finite. Collective."""
        if not self._calls:
            return ""
        module, name, args, kwargs = self._calls[-1]
        found = ["in the batch"] if has_bad(self._calls[-1].batch) else []

        def look(path: str, child: nn.Module, _: object, outputs: object) -> None:
            if not found and has_bad(outputs):
                found.append(f"an output of {path!r} ({type(child).__name__})")

        hooks = [child.register_forward_hook(partial(look, path)) for path, child in module.named_modules() if path]
        rng, buffers = self._parts.get_rng(), self._copied_buffers()
        self._parts.set_rng(self._rng)
        try:
            with torch.no_grad(), self._parts.silence():
                self._run(module, name, *args, **kwargs)
        except Exception as error:  # of the user's step, which may count on gradients
            found = found or [f"unknown, because a second run failed ({type(error).__name__}: {error})"]
        finally:
            self._parts.set_rng(rng)
            restore(buffers)
            for hook in hooks:
                hook.remove()
        everywhere = self._engine.ranks.exchange(found, CHECK)
        for rank, local in enumerate(everywhere):
            if local:
                return f"The first value that is not finite{self._of_rank(rank)} is {local[0]}."
        return "The outputs of all modules are finite: look at the computation of the loss."

    # -- at every step

    def _watch_run(self, module: nn.Module, name: str, /, *args: object, **kwargs: object) -> object:
        if torch.is_grad_enabled():
            if not self._decides:
                self._calls.clear()
            if not self._calls:
                self._rng = self._parts.get_rng()
                self._buffers = self._copied_buffers() if self._decides else []
            self._calls.append(Call(module, name, args, kwargs))
        result: object = self._run(module, name, *args, **kwargs)
        return result

    def _watch_backward(self, loss: Tensor, send: Sender | None = None, **options: object) -> None:
        if not self._decides:
            self._losses.clear()
        self._losses.append(loss.detach())
        self._backward(loss, send, **options)

    def _watch_step(
        self, optimizer: Optimizer, clipping: Clipping | None = None, closure: Closure | None = None
    ) -> StepResult:
        if not self._decides:
            self._num_steps += 1
            if self._interval and self._num_steps % self._interval == 0:
                self._check()  # before the step, which would spread the NaN to all weights
            return self._step(optimizer, clipping, closure)
        if self._is_finite(optimizer):
            result = self._step(optimizer, clipping, closure)
            self._num_skipped = 0
        else:
            result = self._omit(optimizer)
        self._clear()
        return result

    def _is_finite(self, optimizer: Optimizer) -> bool:
        """Return whether the window's losses and gradients are finite on all ranks. Collective.

        A loss scale (16-mixed) tests the gradients itself, and omits the step.
        """
        engine, tensors = self._engine, list(self._losses)
        if not engine.precision.has_scaler:
            with engine.precision.step_context():
                norm = engine.strategy.gradient_norm(optimizer)
            tensors += [] if norm is None else [norm]
        are_finite = [tensor.isfinite().all().to(engine.device) for tensor in tensors]
        flag = torch.stack(are_finite).all().float() if are_finite else torch.ones((), device=engine.device)
        # NOTE: waits for the device, because the host decides whether to step.
        return bool(engine.reduce(flag, "min").item())

    def _omit(self, optimizer: Optimizer) -> StepResult:
        """Discard a window on all ranks, and return to the newest checkpoint under "rollback". Collective."""
        restore(self._buffers)
        if self._rng:
            self._parts.set_rng(self._rng)
        result = self._engine.strategy.skip_step(optimizer)
        is_bad = any(not bool(loss.isfinite().all()) for loss in self._losses)
        found = self._engine.ranks.exchange(is_bad, CHECK)
        ranks = [str(rank) for rank, each in enumerate(found) if each]
        of_ranks = f" of rank {' and '.join(ranks)}" if self._engine.world_size > 1 else ""
        what = f"the loss{of_ranks}" if ranks else "a gradient"
        where = self._parts.batch()
        text = f"{what} is not finite at step {self._parts.step()}{f' ({where})' if where else ''}"
        stored = self._store(is_bad or not ranks)
        self._num_skipped += 1
        if self._num_skipped > MOST_SKIPS:
            raise FloatingPointError(
                f"{text}, and so were the {MOST_SKIPS} steps before it, which nan_policy={self._policy!r} has skipped.{stored} "
                "Lower the learning rate, or find the cause as docs/nan_loss.md says."
            )
        path = self._parts.roll_back() if self._parts.roll_back is not None else ""
        if path:
            self._returns = [*self._returns, path] if path in self._returns else [path]
            if len(self._returns) > MOST_ROLLBACKS:
                raise FloatingPointError(
                    f"{text}, and the run has returned to {path} {MOST_ROLLBACKS} times without a newer checkpoint.{stored} "
                    "Save more often (every_n_train_steps), lower the learning rate, or find the cause as docs/nan_loss.md "
                    "says."
                )
        rank_zero_warn(
            f"{text}. The step is skipped on all ranks{f', and the run returns to {path}' if path else ''}.{stored}",
            stacklevel=2,
        )
        return result

    def _prepare_optimizers(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError(
                    f"nan_policy={self._policy!r} cannot skip a step of LBFGS, which computes several losses in its step. Pass "
                    "nan_policy='raise' or None, or choose another optimizer."
                )
        return self._prepare(optimizers)

    # -- batches and buffers

    def _store(self, is_bad: bool) -> str:
        """Write the window's batches on the ranks where they are bad, and return a sentence with the paths. Collective."""
        engine, batches = self._engine, [call.batch for call in self._calls]
        tensors = dict(named_tensors(batches[0] if len(batches) == 1 else batches)) if is_bad else {}
        path = ""
        if tensors:
            from safetensors.torch import save

            of_rank = f"-rank{engine.rank}" if engine.world_size > 1 else ""
            data = save({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()})
            try:
                path = self._parts.write(f"bad-batch-{self._parts.step()}{of_rank}.safetensors", data)
            except OSError as error:
                rank_zero_warn(f"the bad batch was not stored: {error}", stacklevel=2)
        paths = [each for each in engine.ranks.exchange(path, CHECK) if each]
        return f" The batch is stored as {' and '.join(paths)}." if paths else ""

    def _copied_buffers(self) -> Buffers:
        return [
            (owner, name, buffer, buffer.detach().clone())
            for module in self._engine.modules
            for owner in module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
            if not is_lazy(buffer)
        ]

    def _clear(self) -> None:
        self._calls, self._losses, self._buffers = [], [], []


def check_policy(policy: str | None, allowed: Sequence[str | None] = POLICIES) -> None:
    """Raise ValueError for a policy that is not allowed."""
    if policy not in allowed:
        *first, last = map(repr, allowed)
        raise ValueError(f"nan_policy={policy!r} is not accepted; pass {', '.join(first)} or {last}.")


@torch.no_grad()
def restore(buffers: Buffers) -> None:
    """Return buffers to their earlier values, and to their places, from which a step may have replaced them."""
    for owner, name, buffer, value in buffers:
        buffer.copy_(value)
        setattr(owner, name, buffer)


def has_bad(nest: object) -> bool:
    return any(not bool(tensor.isfinite().all()) for _, tensor in named_tensors(nest))


def named_tensors(nest: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nest, with their paths as names."""
    if isinstance(nest, Tensor):
        yield path or "batch", nest
    items = nest.items() if isinstance(nest, Mapping) else enumerate(nest) if isinstance(nest, (list, tuple)) else ()
    for key, value in items:
        yield from named_tensors(value, f"{path}.{key}" if path else str(key))

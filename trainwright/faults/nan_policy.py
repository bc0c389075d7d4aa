"""NaN policy: what a run does about losses, gradients and weights that are not finite.

A NanGuard watches the engine of a run or of a raw loop. It replaces methods of the engine object, so a run without a policy
calls nothing of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import fsspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.distributed.collectives import all_reduce
from trainwright.faults.tensor_checks import Buffers, copied_buffers, has_bad, named_tensors, read_losses, restore
from trainwright.rank_zero import rank_zero_warn, warn

if TYPE_CHECKING:
    from trainwright.engine.engine import Engine
    from trainwright.precision.base import Closure, Sender
    from trainwright.strategies.base import Clipping, StepResult

POLICIES = (None, "raise", "skip", "rollback")
WATCHED = {
    None: (),
    "raise": ("run", "backward", "step", "find_fault", "save"),
    "skip": ("run", "backward", "step", "prepare_optimizers"),
    "rollback": ("run", "backward", "step", "prepare_optimizers"),
}
"""The methods of an engine that a policy replaces."""
MOST_SKIPS = 10
"""Steps that a run may skip in a row, and times that it may return to one checkpoint."""
MOST_STORED = 20
"""Batches that a rank stores in a run."""
MOST_CALLS = 64
"""Calls of a window that are kept. An evaluation with gradients has no step that would end the window."""
CHECK_EVERY = 50
"""Optimizer steps between two checks of a raw loop."""
CHECK = "the check for NaN"
REMEDY = "docs/nan_loss.md says how to find the cause"


class RunParts(NamedTuple):
    """The parts of a run that its NanGuard uses."""

    step: Callable[[], int]
    """Returns the number of optimizer steps so far."""
    folder: str
    """Where batches are stored, a path or a URL, or "" to store none."""
    get_rng: Callable[[], dict[str, object]]
    set_rng: Callable[[dict[str, object]], None]
    batch: Callable[[], str] = str
    """Returns the position of the current batch in words, such as " (epoch 0, batch 3)"."""
    silence: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context in which a step logs nothing."""
    roll_back: Callable[[], str] = str
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

    Under "raise" it checks the loss every `interval` optimizer steps, before the step, and keeps the latest batch. Under "skip"
    and "rollback" it keeps the batches of a window, with the buffers and RNG states at its start.
    """

    def __init__(self, engine: Engine, policy: str | None, parts: RunParts, interval: int) -> None:
        self._engine, self._policy, self._parts, self._interval = engine, policy, parts, interval
        self._raises = policy == "raise"
        self._has_warned = False
        self._finite_at = -1
        self._num_steps = self._num_skipped = self._num_stored = 0
        """The step of the latest check, the steps so far under "raise", and the steps skipped in a row."""
        self._returns: Counter[str] = Counter()
        """The number of returns to each checkpoint."""
        self.fault = ""
        """The weights that are not finite at the end."""
        self._clear()

    def _clear(self) -> None:
        self._calls: list[Call] = []
        self._losses: list[Tensor] = []
        self._buffers: Buffers = []
        self._rng: dict[str, object] = {}

    def install(self) -> None:
        """Watch the engine, if there is a policy."""
        engine = self._engine
        self._run, self._backward, self._step, self._save = engine.run, engine.backward, engine.step, engine.save
        self._find_fault, self._prepare = engine.find_fault, engine.prepare_optimizers
        for name in WATCHED[self._policy]:
            setattr(engine, name, getattr(self, f"watched_{name}"))

    def remove(self) -> None:
        """Free the batches, and let the engine run unwatched."""
        for name in WATCHED[self._policy]:
            vars(self._engine).pop(name, None)
        self._clear()

    def end(self) -> None:
        """Look for weights that are not finite at the end of a run, and warn of them. Collective."""
        self.fault = self._engine.find_fault()
        if self.fault:
            rank_zero_warn(f"the run has ended, and {self.fault}. It counts as failed; {REMEDY}.", stacklevel=2)

    def end_epoch(self) -> None:
        """Check the epoch's last loss under "raise". Collective."""
        if self._raises and self._losses:
            self._check()

    def look(self, outputs: object) -> None:
        """Warn once of a loss that is not finite, at a log point of a run without a policy."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self._policy is None and not self._has_warned and isinstance(loss, Tensor) and has_bad(loss):
            self._has_warned = True
            lasts = (
                "" if self._engine.precision.has_scaler else ", so the weights become NaN and training does not recover"
            )
            warn(
                f"the loss{self._of(self._engine.rank)} is {loss.mean().item()} at step {self._parts.step()}"
                f"{self._parts.batch()}{lasts}. Pass nan_policy='raise' to end such a run, 'skip' to skip such steps, or "
                "'rollback' to return to the newest checkpoint.",
                stacklevel=2,
            )

    def _of(self, *ranks: int) -> str:
        return f" of rank {' and '.join(map(str, ranks))}" if self._engine.world_size > 1 else ""

    # -- the methods of the engine

    def watched_run(self, module: nn.Module, name: str, /, *args: object, **kwargs: object) -> object:
        if torch.is_grad_enabled():
            if self._raises or not self._calls:
                self._rng = self._parts.get_rng()
                self._buffers = [] if self._raises else copied_buffers(self._engine.modules)
            self._calls = [*(() if self._raises else self._calls[1 - MOST_CALLS :]), Call(module, name, args, kwargs)]
        return self._run(module, name, *args, **kwargs)

    def watched_backward(self, loss: Tensor, send: Sender | None = None, **options: object) -> None:
        self._losses = [*(() if self._raises else self._losses), loss.detach()]
        self._backward(loss, send, **options)

    def watched_step(
        self, optimizer: Optimizer, clipping: Clipping | None = None, closure: Closure | None = None
    ) -> StepResult:
        if self._raises:
            self._num_steps += 1
            if self._interval and self._num_steps % self._interval == 0:
                self._check()  # before the step, which would spread the NaN to all weights
            return self._step(optimizer, clipping, closure)
        if closure is not None and not self._losses:
            raise TypeError(
                f"step was given a closure, but nan_policy={self._policy!r} needs the gradients before step()."
            )
        if self._is_finite(optimizer):
            result, self._num_skipped = self._step(optimizer, clipping, closure), 0
        else:
            result = self._omit(optimizer)
        self._clear()
        return result

    def watched_prepare_optimizers(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise ValueError(
                f"nan_policy={self._policy!r} cannot skip a step of LBFGS, which computes several losses. Pass 'raise' or "
                "None, or choose another optimizer."
            )
        return self._prepare(optimizers)

    def watched_find_fault(self) -> str:
        fault = self._find_fault()
        if fault and not self.fault:
            self.fault = fault
            raise FloatingPointError(f"{fault}, found {self._where()}.{self._store(True)} {REMEDY}.")
        return fault

    def watched_save(self, *args: object, **kwargs: object) -> None:
        self.watched_find_fault()
        self._save(*args, **kwargs)  # type: ignore[arg-type]

    # -- "raise"

    def _check(self) -> None:
        """Raise FloatingPointError on every rank if the latest loss of one is not finite. Collective."""
        losses = self._engine.ranks.exchange(read_losses(self._losses), CHECK)
        bad = {rank: loss for rank, local in enumerate(losses) for loss in local if not math.isfinite(loss)}
        if bad:
            found, self.fault = self._replay(), self._find_fault()
            by_now = f" By now {self.fault}." if self.fault else ""
            self.fault = self.fault or "the loss is not finite"
            raise FloatingPointError(
                f"the loss{self._of(*bad)} is {next(iter(bad.values()))}, found {self._where()}. {found}{by_now}"
                f"{self._store(self._engine.rank in bad)} {REMEDY}."
            )
        self._finite_at = self._parts.step()

    def _where(self) -> str:
        before = (
            f"it was not there at step {self._finite_at}" if self._finite_at >= 0 else "no earlier step was checked"
        )
        return f"at step {self._parts.step()}{self._parts.batch()}; {before}"

    def _replay(self) -> str:
        """Run the latest batch again, and return a sentence on the first value that is not finite. Collective."""
        if not self._calls:
            return ""
        module, name, args, kwargs = self._calls[-1]
        found = ["in the batch"] if has_bad(self._calls[-1].batch) else []

        def look(path: str, child: nn.Module, _: object, outputs: object) -> None:
            if not found and has_bad(outputs):
                found.append(f"an output of {path!r} ({type(child).__name__})")

        hooks = [child.register_forward_hook(partial(look, path)) for path, child in module.named_modules() if path]
        rng, buffers = self._parts.get_rng(), copied_buffers(self._engine.modules)
        self._parts.set_rng(self._rng)
        try:
            with torch.no_grad(), self._parts.silence():
                self._run(module, name, *args, **kwargs)
        except Exception as error:  # a step of the user that needs gradients
            found = found or [f"unknown, since a second run failed ({type(error).__name__}: {error})"]
        finally:
            self._parts.set_rng(rng)
            restore(buffers)
            for hook in hooks:
                hook.remove()
        everywhere = self._engine.ranks.exchange(found, CHECK)
        return next(
            (f"The first such value{self._of(rank)} is {each[0]}." for rank, each in enumerate(everywhere) if each),
            "The outputs of all modules are finite, so it comes from the computation of the loss.",
        )

    # -- "skip" and "rollback"

    def _is_finite(self, optimizer: Optimizer) -> bool:
        """Return whether the window's losses and gradients are finite on all ranks. Collective.

        Gradients with a loss scale are left to the scale, which skips the step itself.
        """
        engine, tensors = self._engine, self._losses
        if not engine.precision.has_scaler:
            with engine.precision.step_context():
                norm = engine.strategy.gradient_norm(optimizer)
            tensors = tensors if norm is None else [*tensors, norm]
        are_finite = [
            torch.ones((), device=engine.device),
            *(each.isfinite().all().to(engine.device) for each in tensors),
        ]
        # NOTE: waits for the device, because the host decides whether to step.
        return bool(all_reduce(torch.stack([each.float() for each in are_finite]).min(), "min", with_all=True).item())

    def _omit(self, optimizer: Optimizer) -> StepResult:
        """Discard a window on all ranks, and return to the newest checkpoint under "rollback". Collective."""
        restore(self._buffers)
        if self._rng:
            self._parts.set_rng(self._rng)
        result = self._engine.strategy.skip_step(optimizer)
        is_bad = has_bad(self._losses)
        ranks = [rank for rank, each in enumerate(self._engine.ranks.exchange(is_bad, CHECK)) if each]
        subject = f"the loss{self._of(*ranks)}" if ranks else "a gradient"
        text = f"{subject} is not finite at step {self._parts.step()}{self._parts.batch()}"
        stored = self._store(is_bad or not ranks)
        self._num_skipped += 1
        if self._num_skipped > MOST_SKIPS:
            raise FloatingPointError(f"{text}, after {MOST_SKIPS} skipped steps in a row.{stored} {REMEDY}.")
        if path := self._parts.roll_back():
            self._returns[path] += 1
            if self._returns[path] > MOST_SKIPS:
                raise FloatingPointError(
                    f"{text}, after {MOST_SKIPS} returns to {path}.{stored} Save more often (every_n_train_steps=), or lower "
                    f"the learning rate; {REMEDY}."
                )
        returns = f", and the run returns to {path}" if path else ""
        if not path and self._policy == "rollback":
            returns = ", and there is no checkpoint yet to return to"
        rank_zero_warn(f"{text}. The step is skipped on all ranks{returns}.{stored}", stacklevel=2)
        return result

    # -- batches and buffers

    def _store(self, is_bad: bool) -> str:
        """Write the window's batches on the ranks where they are bad, and return a sentence with the paths. Collective."""
        from safetensors.torch import save

        engine, batches, path = self._engine, [call.batch for call in self._calls], ""
        tensors = dict(named_tensors(batches[0] if len(batches) == 1 else batches)) if is_bad else {}
        if tensors and self._parts.folder and self._num_stored < MOST_STORED:
            self._num_stored += 1
            of_rank = f"-rank{engine.rank}" if engine.world_size > 1 else ""
            path = f"{self._parts.folder}/bad-batch-{self._parts.step()}{of_rank}.safetensors"
            try:
                with fsspec.open(path, "wb", auto_mkdir=True) as file:
                    file.write(save({name: each.detach().cpu().clone().contiguous() for name, each in tensors.items()}))
            except OSError as error:
                path = f"nothing ({error})"
        paths = [each for each in engine.ranks.exchange(path, CHECK) if each]
        which = "The latest batch" if self._raises else "The batch"
        can_log = self._raises and self._interval > 1 and self._parts.batch()  # a raw loop has no rows
        remedy = "; with log_every_n_steps=1 it is the first bad one" if can_log else ""
        return f" {which} is stored as {' and '.join(paths)}{remedy}." if paths else ""


def refuse_policy(policy: str | None, *, is_automatic: bool = True, saves: bool = True) -> None:
    """Raise ValueError for a policy that a run cannot have: under manual optimization, or without a ModelCheckpoint."""
    if policy in ("skip", "rollback") and not is_automatic:
        raise ValueError(
            f"nan_policy={policy!r} needs automatic optimization, but this module has automatic_optimization = False. Pass "
            "'raise' or None."
        )
    if policy == "rollback" and not saves:
        raise ValueError(
            "nan_policy='rollback' returns to checkpoints, but this run saves none that it could resume from. Add a "
            "ModelCheckpoint, or pass 'skip'."
        )

"""Used parameters: compares over the ranks which parameters get gradients, and rejects steps that use none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainwright.distributed.collectives import Exchange, gather_object
from trainwright.strategies.module_checks import trained
from trainwright.tensor_names import clean_name


class RanksUse:
    """Compares which parameters the ranks use, at the 1st, 2nd, 4th, 8th backward and so on, and before every save.

    An engine may pair the ranks' gradients by their positions. If only some ranks take a branch of the model, the engine adds
    gradients of different parameters. The backwards between two comparisons are compared by a digest.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._backwards = self._compared = self._digest = 0
        self._used: tuple[bool, ...] = ()
        self._names: list[str] = []
        self._tracked: dict[Tensor, str] = {}
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._came: set[Tensor] = set()
        self._has_untracked = False

    def track(self, module: nn.Module) -> None:
        """Register a module's shards for `note_gradients`. Call this again once some are unfrozen.

        A frozen shard has no hook. Nor has a shard on the host, because FSDP would wait for every copy of its gradient.
        """
        for name, shard in module.named_parameters():
            if not isinstance(shard, DTensor):
                self._has_untracked |= shard.requires_grad
                continue
            self._tracked[shard] = clean_name(name)
            is_offloaded = shard.device.type != shard.device_mesh.device_type
            if shard.requires_grad and shard not in self._hooks and not is_offloaded:
                self._hooks[shard] = shard.register_post_accumulate_grad_hook(self._came.add)  # type: ignore[no-untyped-call]

    def has_come(self) -> bool:
        """Return whether a backward has given a parameter a gradient, as far as that is tracked."""
        return bool(self._came) or self._has_untracked or any(each.grad is not None for each in self._tracked)

    def note_gradients(self) -> None:
        """Record which tracked parameters have got a gradient in a backward. Collective at some backwards.

        A parameter without a hook counts if it has a gradient now.
        """
        if len(self._hooks) < len(self._tracked):
            self._came.update(each for each in self._tracked.keys() - self._hooks.keys() if each.grad is not None)
        self.note(self._tracked.values(), map(self._came.__contains__, self._tracked))
        self._came.clear()

    def renewed(self) -> RanksUse:
        """Remove the hooks from the parameters, and return a new comparison."""
        for hook in self._hooks.values():
            hook.remove()
        return RanksUse(self._strategy)

    def note(self, names: Iterable[str], used: Iterable[bool]) -> None:
        """Record which of the named parameters have got a gradient in a backward. Collective at some backwards.

        Raises:
            RuntimeError: as `compare`.
        """
        self._backwards += 1
        if (now := tuple(used)) != self._used:
            self._used, self._names = now, list(names)
        self._digest = hash((self._digest, now))  # of numbers, so it is the same in every process
        if self._backwards & (self._backwards - 1) == 0:
            self.compare()

    def compare(self, exchange: Exchange = gather_object) -> None:
        """Compare the backwards since the last comparison. Collective.

        Raises:
            RuntimeError: on every rank, if the ranks have used different parameters.
        """
        if not self._backwards:
            return
        if set(exchange(self._digest)) == {self._digest}:
            self._compared = self._backwards
            return
        by_rank = zip(*exchange([int(is_used) for is_used in self._used]), strict=False)
        names = [name for name, used in zip(self._names, by_rank, strict=False) if len(set(used)) > 1]
        latest = f", of the latest one {names[0]!r} and {len(names) - 1} more" if names else ""
        raise RuntimeError(
            f"in a backward after number {self._compared} some ranks gave other parameters gradients than the others{latest}. "
            f"{self._strategy} adds the ranks' gradients by their positions, so the weights may be wrong since then. Use the "
            "same parameters on all ranks in every step (add 0 * output.sum() of the unused branch to the loss), or train with "
            "strategy='ddp_find_unused_parameters_true'."
        )


class BackwardGuard:
    """Rejects a training step whose backward gives no parameter a gradient while the other ranks wait for it.

    It also rejects every call after a failed backward, because the engine is in the middle of that one.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._is_watched = self._is_due = self._has_failed = False
        self.is_running = False
        """Whether the strategy runs a backward now."""

    def watch(self, is_watched: bool) -> BackwardGuard:
        """Set whether steps are watched, and return this guard."""
        self._is_watched = is_watched
        return self

    def begin(self, name: str) -> None:
        """Record the beginning of a step. A raw loop's is named "forward", and need not have a backward.

        Raises:
            RuntimeError: as `refuse_failed`.
        """
        self.refuse_failed()
        self._is_due = self._is_watched and name != "forward" and torch.is_grad_enabled()

    @contextmanager
    def backward(self, has_come: Callable[[], bool]) -> Iterator[None]:
        """Return the context of a backward. Afterwards `has_come` returns whether a gradient has come.

        Raises:
            RuntimeError: a watched step's backward has produced no gradient.
        """
        self.is_running = True
        try:
            yield
        except BaseException:
            self._has_failed = True
            raise
        finally:
            self.is_running = False
            is_due, self._is_due = self._is_due, False
        if is_due and not has_come():
            raise RuntimeError(
                "the loss of training_step does not depend on any parameter of the module, and "
                f"{self._strategy} waits for gradients from every rank. Return a loss of the module's output "
                "(0.0 * output.sum(), to let a batch count for nothing), or train with "
                "strategy='ddp_find_unused_parameters_true'."
            )

    def refuse_failed(self) -> None:
        """Raise RuntimeError if an earlier backward has failed."""
        if self._has_failed:
            raise failed_before(self._strategy)


def failed_before(strategy: str) -> RuntimeError:
    """Return the error of a step after a forward or backward that failed."""
    return RuntimeError(
        f"an earlier forward or backward raised an error, and {strategy} cannot train on in the middle of it. Do not catch the "
        "error: create the module again and load a checkpoint. 'ddp' and a single process train on after such an error."
    )


def are_all_stepped(modules: Iterable[nn.Module], optimizers: Sequence[Optimizer]) -> bool:
    """Return whether the optimizers step all trained parameters of the modules, or there are no optimizers."""
    stepped = {each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    return not optimizers or all(p in stepped for module in modules for p in trained(module).values())

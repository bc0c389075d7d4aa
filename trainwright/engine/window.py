"""Accumulation windows of the Trainer and the raw loop: which batch ends one, and how its losses are weighted and divided."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.distributed import collectives
from trainwright.engine.engine import Engine
from trainwright.engine.prepared_loader import Iteration, Iterations
from trainwright.rank_zero import rank_zero_warn

LOW = (torch.float16, torch.bfloat16)


class TokenMean:
    """Makes the gradients of losses that are sums over tokens the gradients of the mean over all tokens of all ranks.

    How many tokens a window has is known at its end. Until then its losses are divided by a power of two, which rounds nothing.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._unit = 0.0
        """About the number of tokens of a rank's first window, a power of two. 0 before the first loss."""
        self.reset()

    def reset(self) -> None:
        """Begin a window."""
        self._count: int | Tensor = 0
        self._factor: float | None = None
        self._corrected: set[int] = set()

    def scale(self, loss: Tensor, weight: float, num_tokens: int | Tensor | None, length: int) -> Tensor:
        """Return a loss for backward, and count its tokens. A rank without samples has weight 0. The first call is collective.

        Raises:
            ValueError: num_tokens is not a number of tokens.
        """
        if isinstance(num_tokens, Tensor):
            is_count = num_tokens.numel() == 1 and not num_tokens.is_complex()
        else:
            is_count = isinstance(num_tokens, int) and not isinstance(num_tokens, bool) and num_tokens >= 0
        if num_tokens is None or not is_count:
            raise ValueError(
                f"accumulate_by='tokens' was given num_tokens={num_tokens!r}. Expected the number of tokens that the loss sums "
                "up, an integer or a tensor of one element: return {'loss': losses.sum(), 'num_tokens': mask.sum()} from "
                "training_step, or pass it to accelerator.backward(loss, num_tokens=mask.sum())."
            )
        if self._factor is not None:  # a step was made since the latest loss
            self.reset()
        count = num_tokens.detach().reshape(()) if isinstance(num_tokens, Tensor) else num_tokens
        count = count if weight else 0
        if not self._unit:
            self._unit = 2.0 ** round(math.log2(max(1.0, self._sum(count) / self._engine.num_data_ranks * length)))
        self._count = self._count + count
        return scaled(loss, 1.0 if weight else 0.0, self._unit)

    def factor(self, optimizer: Optimizer | None) -> float:
        """Return the factor that an optimizer's gradients need in this window; 1 from the second call on. Collective."""
        if id(optimizer) in self._corrected:  # a clip has multiplied the gradients
            return 1.0
        self._corrected.add(id(optimizer))
        if self._factor is None:
            total = self._sum(self._count)
            self._factor = self._engine.num_data_ranks * self._unit / total if total else 0.0
        return self._factor

    def _sum(self, count: int | Tensor) -> float:
        """Return the sum over the ranks. NOTE: waits for the device."""
        total = torch.as_tensor(count, dtype=torch.int64, device=self._engine.device)
        return collectives.all_reduce(total, "sum").item()


class AccumulationWindow:
    """The batches of one optimizer step: which batch ends the window, and how its losses and gradients are scaled.

    A window ends after its usual number of batches, or with the data. Its losses are divided by the length that is known at its
    first batch. If it ends earlier, its gradients are multiplied by `correction` before the step.
    """

    def __init__(self, engine: Engine, *, syncs_each_batch: bool = False, by_tokens: bool = False) -> None:
        self.length = 1
        """Batches of this window, as known at its first batch. The losses are divided by this number."""
        self.usual_length = 1
        """Batches of a window that the data does not cut short.

        The window ends there, or with the last batch, and not after `length` batches: a loader may yield more than its length.
        """
        self.has_gradients = False
        """Whether gradients wait for the step."""
        self.is_open = False
        """Whether gradients wait, or batches of this window are still to come."""
        self.is_at_start = self.is_at_end = True
        """Whether the current batch is the window's first, and whether it is its last."""
        self._engine, self._syncs_each_batch = engine, syncs_each_batch
        self.tokens = TokenMean(engine) if by_tokens else None
        """Weighs tokens equally, or None to weigh batches equally."""
        self._divisor: float | None = None
        """The number that this window's losses are divided by. None before the first loss."""
        self._position = 0
        """Batches that have ended."""
        self._count = 1
        """Batches, the current one included."""

    def begin_batch(self, usual_length: int, batches_left: int | None, is_last: bool) -> None:
        """Begin a batch of this window or of the next, and average gradients over the ranks in its last batch only.

        `batches_left` in the data includes this batch. It is None if unknown.
        """
        self.is_at_start = self._position == 0
        if self.is_at_start:
            self._divisor, self.usual_length, self.length = None, usual_length, usual_length
            if batches_left is not None:
                self.length = max(1, min(usual_length, batches_left))
        self._count = self._position + 1
        self.is_at_end = is_last or self._count >= self.usual_length  # is_last, since the length may have been wrong
        if self.usual_length > 1:
            self._engine.sync_gradients(self.is_at_end or self._syncs_each_batch)

    def end_batch(self) -> None:
        """End the current batch, and the window with its last."""
        if self.is_at_end:
            self.has_gradients = self.is_open = False
            self._position = 0
        else:
            self._position, self.is_open = self._count, True

    def hold_gradients(self) -> None:
        """Keep the window open until the gradients that now wait are stepped with or dropped."""
        self.has_gradients = self.is_open = True

    def drop(self) -> None:
        """Begin a new window with the next batch: the gradients of this one are gone, or have been stepped with."""
        self.has_gradients = self.is_open = False
        self._position, self._count = 0, 1
        self.is_at_start = self.is_at_end = True
        if self.tokens is not None:
            self.tokens.reset()

    def scale(self, loss: Tensor, weight: float = 1.0, num_tokens: int | Tensor | None = None) -> Tensor:
        """Return a loss weighted by this rank's samples in its round, and divided for this window."""
        if self.tokens is not None:
            return self.tokens.scale(loss, weight, num_tokens, self.length)
        if self._divisor is None:
            self._divisor = divisor_of(self.length, loss.dtype)
        return scaled(loss, weight, self._divisor)

    @property
    def correction(self) -> float:
        """Return the factor that the gradients still need at the window's end.

        The window may end earlier than its losses were divided for, or its length may be inexact in their dtype.
        """
        if self.tokens is not None:
            return self.tokens.factor(None) if self.is_at_end else 1.0
        return (self._divisor or self.length) / self._count if self.is_at_end else 1.0


def scaled(loss: Tensor, weight: float, divisor: float) -> Tensor:
    """Return a loss times a rank's weight, divided by a window's divisor: the same bits in both loops."""
    if weight == divisor == 1.0:
        return loss
    loss = loss.float() if loss.dtype in LOW else loss
    loss = loss if weight == 1.0 else loss * weight
    return loss if divisor == 1.0 else loss / divisor


def divisor_of(length: int, dtype: torch.dtype) -> float:
    """Return a window's length, or for a low-precision loss the nearest number whose reciprocal its dtype represents."""
    # The gradient that enters a loss has the loss's dtype. A third is 0.2 % too large in bfloat16, in every gradient. So the
    # losses are divided by the reciprocal of that, and `correction` multiplies the gradients, in their own dtype, by the rest.
    return 1.0 / torch.tensor(1.0 / length, dtype=dtype).item() if dtype in LOW else length


class ModelWindow(AccumulationWindow, AbstractContextManager[None]):
    """The window of one set of models in a raw loop, empty for all: entered once for each of its batches."""

    def __init__(self, windows: AccumulationWindows, models: tuple[nn.Module, ...] = ()) -> None:
        super().__init__(windows.engine, syncs_each_batch=windows.syncs_each_batch, by_tokens=windows.by_tokens)
        self._windows, self._models = windows, models
        self._iteration: Iteration | None = None
        """The pass over a loader that it began in."""
        self.batches = 0
        """Its batches so far, also of earlier windows."""
        self._corrected: set[int] = set()
        self._put_off: list[Callable[[], None]] = []
        """Called when the next window begins, to clear gradients: `zero_grad` was called at this window's end before a step."""

    def __enter__(self) -> None:
        windows = self._windows
        windows.current = self
        self.batches += 1
        if self._put_off and self._position == 0:
            waiting, self._put_off = self._put_off, []
            for clear in waiting:
                clear()
        if windows.usual_length == 1 and self._position == 0:
            self.begin_batch(1, None, True)
            self._corrected.clear()
            return
        iteration = windows.iterations.current()
        loader = None if iteration is None else iteration.loader
        self.drop_if_left()
        if self._position == 0:
            self._iteration = iteration
            self._corrected.clear()
        if not windows.ends_with_loader:
            loader = None
        left = None if loader is None else loader.batches_left
        self.begin_batch(windows.usual_length, left, loader is not None and loader.is_at_end)
        self.end_batch()  # here and not on exit: a user may leave the block by an exception, or a break

    def __exit__(self, *error: object) -> None:
        return None

    def drop_if_left(self) -> None:
        """Drop the gradients of an open window whose pass over a loader the loop has left, with a warning."""
        if self._position and self._iteration is not None and self._iteration.is_left:
            rank_zero_warn(
                f"the loop left its loader after {self._position} of the {self.length} batches of an accumulation window: "
                "their gradients are dropped without a step. Leave the loader where accelerator.sync_gradients is True, or set "
                "accelerator.gradient_accumulation_steps before it to the number of batches that you read.",
                stacklevel=3,
            )
            self.drop()
            self._windows.drop_gradients(self._models)

    def put_off(self, clear: Callable[[], None]) -> None:
        """Call this when the next window of these models begins."""
        self._put_off.append(clear)

    def correct(self, optimizer: Optimizer) -> float:
        """Return the factor that an optimizer's gradients still need in this window; 1 from the second call on."""
        if self.tokens is not None:
            return self.tokens.factor(optimizer) if self.is_at_end else 1.0
        correction = self.correction
        if correction == 1.0 or id(optimizer) in self._corrected:  # a clip has multiplied the gradients
            return 1.0
        self._corrected.add(id(optimizer))
        return correction


class AccumulationWindows:
    """The windows of a raw loop, one for each set of models passed to `of`.

    `drop_gradients` clears a set's gradients. With `ends_with_loader` False the next pass fills a window that the end of a
    loader has cut. With `syncs_each_batch` every backward averages gradients over the ranks.
    """

    def __init__(
        self,
        engine: Engine,
        usual_length: int,
        iterations: Iterations,
        drop_gradients: Callable[[tuple[nn.Module, ...]], None],
        *,
        ends_with_loader: bool = True,
        syncs_each_batch: bool = False,
        by_tokens: bool = False,
    ) -> None:
        self.engine, self.iterations, self.drop_gradients = engine, iterations, drop_gradients
        self.usual_length = usual_length
        self.ends_with_loader, self.syncs_each_batch, self.by_tokens = ends_with_loader, syncs_each_batch, by_tokens
        self.backwards = 0
        """Number of losses sent backward so far."""
        self.reset()

    def reset(self) -> None:
        """Begin with the first batch of a window."""
        self._windows: dict[tuple[nn.Module, ...], ModelWindow] = {}
        self.current = ModelWindow(self)
        """The window that was entered last."""
        self._has_gradients = False
        """Whether a loss was sent backward since the latest step or drop."""

    @property
    def is_open(self) -> bool:
        """Return whether gradients wait, or a window has begun and not ended."""
        return self._has_gradients or any(window.is_open for window in self._windows.values())

    @property
    def is_counting(self) -> bool:
        """Return whether the loop uses `accumulate`, and does not count its batches by itself."""
        return bool(self._windows)

    def drop_left(self) -> None:
        """Drop the open windows that the loop has left by leaving its loader."""
        for window in self._windows.values():
            window.drop_if_left()

    def of(self, models: tuple[nn.Module, ...]) -> ModelWindow:
        if models not in self._windows:
            self._windows[models] = ModelWindow(self, models)
        return self._windows[models]

    def set_length(self, length: int) -> None:
        """Set the usual length of the windows that begin from now on."""
        self.usual_length = length
        if length == 1 and not any(window.is_open for window in self._windows.values()):
            self.engine.sync_gradients(True)  # which a window of length 1 does not set again in each batch

    def scale_loss(self, loss: Tensor, num_tokens: int | Tensor | None = None, *, weighs_round: bool) -> Tensor:
        """Return a loss scaled for the current window, and count it as sent backward.

        For a loop that counts its batches by itself, the loss is divided by the usual length. With `weighs_round` it is also
        weighted by this rank's samples in the round of the current batch.
        """
        if num_tokens is not None and not self.by_tokens:
            raise ValueError(
                "backward was given num_tokens=; pass accumulate_by='tokens' to the Accelerator, too, or omit it."
            )
        self.backwards += 1
        self._has_gradients = True
        self.iterations.note_training()
        iteration = self.iterations.current() if weighs_round else None
        weight = 1.0 if iteration is None else iteration.loader.weight
        if self.usual_length > 1 and not self._windows and not self.by_tokens:
            return scaled(loss, weight, self.usual_length)
        return self.current.scale(loss, weight, num_tokens)

    def clear(self) -> None:
        """Note that no gradients wait any more: they have been stepped with, or dropped."""
        self.iterations.note_training()
        self._has_gradients = False

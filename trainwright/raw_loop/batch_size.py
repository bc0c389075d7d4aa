"""Memory that runs out: functions that are called with smaller and smaller batches, and freeing of memory."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from trainwright.devices.hardware import free_unused_memory, is_out_of_memory
from trainwright.distributed.connection import open_connection
from trainwright.distributed.environment import Environment
from trainwright.distributed.ranks import Ranks
from trainwright.distributed.store_channel import CallSkipped
from trainwright.raw_loop.job_states import PartialState

REDUCED_TO = 0.9
PATIENCE_SECONDS, TRY_SECONDS = 60.0, 1800.0
"""How long a rank waits for the others to end a try: one whose memory ran out, and one whose try has succeeded."""


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Return a function that passes a batch size to this one, and tries a smaller one when memory runs out.

    A decorator. The function makes its models, optimizers and loaders itself, so that the objects of a failed try can be freed:
    nothing outside may refer to them, so let it begin with `accelerator.free_memory()`. The size that fits is kept for later
    calls. Other errors are raised. A try fails on all ranks if memory runs out on one, so all have the same size.
    Collective: call the returned function on every rank.

    Args:
        function: takes the batch size as its first argument.
        starting_batch_size: the first size to try.
        reduce_batch_size_fn: returns the next size, without arguments, by default nine tenths of the last one.

    Raises:
        TypeError: the function does not take the arguments after a batch size.
        RuntimeError: a batch size of 1 needs too much memory, or memory ran out on one rank only, and the others wait for
            it within that try.

    >>> accelerator = tw.Accelerator()
    >>> @tw.find_executable_batch_size(starting_batch_size=512)
    ... def train(batch_size):
    ...     accelerator.free_memory()
    ...     model = accelerator.prepare(nn.Linear(4, 3))
    ...     for inputs, targets in accelerator.prepare(DataLoader(loader.dataset, batch_size=batch_size)):
    ...         accelerator.backward(loss_fn(model(inputs), targets))
    ...     return batch_size
    >>> train()
    512
    """
    if function is None:
        options: Any = {"starting_batch_size": starting_batch_size, "reduce_batch_size_fn": reduce_batch_size_fn}
        return functools.partial(find_executable_batch_size, **options)
    size = _checked(starting_batch_size, "starting_batch_size")
    name = getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function)
    def searching(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        _check_arguments(function, name, size, args, kwargs)
        free_unused_memory()
        while True:
            result, failure = None, ""
            try:
                result = function(size, *args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                # Only its text: the error's traceback holds the tensors of the failed try.
                failure = str(error) or type(error).__name__
            if not (failures := _failures(failure, size)):
                return result
            # On a rank whose try has succeeded, the result may hold a model.
            result = None
            free_unused_memory()
            smaller = int(size * REDUCED_TO) if reduce_batch_size_fn is None else reduce_batch_size_fn()
            if smaller == 0:
                raise RuntimeError(
                    f"{name} ran out of memory with a batch size of {size}, the smallest ({failures[0]}). Make the model "
                    "smaller, or choose a strategy that shards it."
                )
            size = _checked(smaller, "the batch size that reduce_batch_size_fn returned,")

    return searching


def _check_arguments(
    function: Callable[..., Any], name: str, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        inspect.signature(function).bind(size, *args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{name} was called with arguments that it does not take after the batch size ({error}); "
            "find_executable_batch_size passes the batch size itself, as the first one."
        ) from None


def _failures(failure: str, size: int) -> list[str]:
    """Return the failures of all ranks. `failure` is this rank's, or "" if it succeeded. Collective."""
    if Environment.detect().world_size == 1:
        return [failure] if failure else []
    # The try may have failed before the function made an Accelerator, which joins the job.
    connection = open_connection() or PartialState().engine.connection
    ranks = Ranks(connection.channel, PATIENCE_SECONDS if failure else TRY_SECONDS)
    try:
        replies = ranks.exchange(failure, "the end of a try of find_executable_batch_size")
    except (TimeoutError, CallSkipped) as error:
        if not failure:
            raise
        raise RuntimeError(
            f"rank {ranks.rank} ran out of memory with a batch size of {size} ({failure}), and other ranks did not: they wait "
            "for it within that attempt, which then never ends. Begin with a smaller starting_batch_size, or give all ranks "
            "samples of the same size."
        ) from error
    return [each for each in replies if each]


def _checked(size: Any, what: str) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"{what} {size!r} is not accepted. It has to be an integer of at least 1.")
    return size


def release_memory(*objects: Any) -> Any:
    """Collect garbage and empty the device's cache. Return a None per argument, to assign to its variable.

    >>> model, optimizer = tw.release_memory(model, optimizer)
    """
    count = len(objects)
    # This tuple would keep them alive.
    del objects
    free_unused_memory()
    return [None] * count

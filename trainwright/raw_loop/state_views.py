"""What an Accelerator knows of its job and of its gradients, under the names of Accelerate's state classes: views."""

from __future__ import annotations

from typing import Any

from trainwright.engine.prepared_loader import Iterations, PreparedLoader
from trainwright.engine.window import AccumulationWindows
from trainwright.raw_loop.processes import PartialState, Processes
from trainwright.raw_loop.settings import word_for


class AcceleratorState(Processes):
    """The processes of a job and the precision of its Accelerator, as `accelerator.state` shows them.

    Collective without an accelerator: create it on every rank.

    Args:
        accelerator: whose state to show; without one, the processes of this job as `PartialState` sees them.

    >>> accelerator = tw.Accelerator(devices=1, mixed_precision="bf16")
    >>> accelerator.state.num_processes, accelerator.state.mixed_precision
    (1, 'bf16')
    """

    def __init__(self, accelerator: Processes | None = None) -> None:
        super().__init__((PartialState() if accelerator is None else accelerator).engine)

    @property
    def mixed_precision(self) -> str:
        """Return "no", "fp16", "bf16", or the Trainer's name of any other precision."""
        return word_for(self.engine.precision)

    def __repr__(self) -> str:
        names = "distributed_type num_processes process_index local_process_index device mixed_precision"
        shown = ", ".join(f"{name}={getattr(self, name)!s}" for name in names.split())
        return f"AcceleratorState({shown})"


class GradientState:
    """The accumulation windows and loaders of an Accelerator, as `accelerator.gradient_state` shows them.

    Raises:
        TypeError: it is made by hand; each Accelerator has its own.

    >>> accelerator = tw.Accelerator(gradient_accumulation_steps=4)
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    >>> for inputs, targets in loader:
    ...     with accelerator.accumulate(model):
    ...         accelerator.backward(loss_fn(model(inputs), targets))
    ...         if accelerator.gradient_state.sync_gradients:  # every fourth batch
    ...             optimizer.step()
    ...             optimizer.zero_grad()
    """

    def __init__(self, windows: AccumulationWindows | None = None, iterations: Iterations | None = None) -> None:
        if windows is None or iterations is None:
            raise TypeError(
                "the process has no GradientState; each Accelerator has its own: accelerator.gradient_state."
            )
        self._windows, self._iterations = windows, iterations

    @property
    def sync_gradients(self) -> bool:
        """Return whether the current batch ends its accumulation window."""
        return self._windows.current.is_at_end

    @property
    def num_steps(self) -> int:
        """Return the batches per optimizer step."""
        return self._windows.usual_length

    @property
    def active_dataloader(self) -> PreparedLoader | None:
        """Return the prepared loader that the loop is over; None outside a loop."""
        iteration, _ = self._iterations.current()
        return None if iteration is None else iteration.loader

    @property
    def in_dataloader(self) -> bool:
        """Return whether the loop is over a prepared loader."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Return whether the current batch is the last of its loader."""
        loader = self.active_dataloader
        return loader is not None and loader.is_at_end

    @property
    def remainder(self) -> int:
        """Return how many samples of a padded last round are real; 0 in any other round, -1 outside a loop."""
        loader = self.active_dataloader
        if loader is None:
            return -1
        sizes = loader.last_sizes if loader.is_at_end else None
        return 0 if sizes is None else sum(sizes)

    def __repr__(self) -> str:
        names: tuple[str, ...] = ("sync_gradients", "num_steps", "end_of_dataloader", "remainder")
        values: list[Any] = [getattr(self, name) for name in names]
        shown = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        return f"GradientState({shown})"

"""Job states: views of a job's processes and of an Accelerator's windows, as Accelerate's state classes show them."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from functools import partial, wraps
from typing import Any

import torch

from trainwright.arguments import instead_of, refuses_unknown
from trainwright.distributed import collectives
from trainwright.distributed.environment import Environment
from trainwright.engine import nests
from trainwright.engine.engine import Engine
from trainwright.engine.prepared_loader import Iterations, PreparedLoader
from trainwright.engine.window import AccumulationWindows
from trainwright.errors import a_type_of
from trainwright.raw_loop.loop_settings import word_for


class DistributedType(StrEnum):
    """How the processes of a job divide the work. A member equals its name as text.

    The members after FSDP are for scripts written for Accelerate that compare with them. No job has one.

    >>> accelerator = tw.Accelerator(devices=1)
    >>> accelerator.distributed_type == tw.DistributedType.NO == "NO"
    True
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    MULTI_HPU = "MULTI_HPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_NEURON = "MULTI_NEURON"
    MULTI_NPU = "MULTI_NPU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_XPU = "MULTI_XPU"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    TP = "TP"


class Processes:
    """The processes of an Engine's job, as this one sees them: a view on the Engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no {name!r}{instead_of(name)}.", name=name, obj=self)

    @property
    def device(self) -> torch.device:
        """Return the device of this process."""
        return self.engine.device

    @property
    def distributed_type(self) -> DistributedType:
        """Return how the processes divide the work. One process has `NO` under every strategy that replicates the model."""
        if (named := self.engine.strategy.capabilities.distributed_type) is not None:
            return DistributedType(named)
        if not self.use_distributed:
            return DistributedType.NO
        return DistributedType.MULTI_CPU if self.device.type == "cpu" else DistributedType.MULTI_GPU

    @property
    def use_distributed(self) -> bool:
        """Return whether the job has several processes."""
        return self.num_processes > 1

    @property
    def num_processes(self) -> int:
        """Return how many processes the job has."""
        return self.engine.world_size

    @property
    def process_index(self) -> int:
        """Return this process's number in the job, from 0."""
        return self.engine.rank

    @property
    def local_process_index(self) -> int:
        """Return this process's number on its node, from 0."""
        return self.engine.local_rank

    @property
    def is_main_process(self) -> bool:
        """Return whether this is the first process of the job."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Return whether this is the first process of its node."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Return whether this is the last process of the job."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait until every rank has called this. Collective: call on every rank."""
        self.engine.barrier("wait_for_everyone")

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context whose block rank 0 runs before the other ranks. Collective: enter it on every rank."""
        return self.engine.rank_zero_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context whose block the nodes' first processes run before the others. Collective: enter it on every rank."""
        return self.engine.rank_zero_first(local=True)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this process's part of a list, a tuple, a tensor, or a dict of these. Nothing is communicated.

        The parts are contiguous and differ by at most one item; with apply_padding the last item pads the shorter ones.
        """
        yield nests.portion(inputs, self.engine.data_rank, self.engine.num_data_ranks, apply_padding)

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs on the job's first process, and returns None on the others. A decorator."""
        return self._only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs on every node's first process, and returns None on the others. A decorator."""
        return self._only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs on the job's last process, and returns None on the others. A decorator."""
        return self._only(function, lambda: self.is_last_process)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Return a function that runs on one process of the job, or a decorator if there is no `function`.

        Raises:
            ValueError: the job has no process of that number.
        """
        if function is None:
            return partial(self.on_process, process_index=process_index)
        self._check_index(process_index, self.num_processes)
        return self._only(function, lambda: self.process_index == process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Return a function that runs on one process per node, or a decorator if there is no `function`.

        Raises:
            ValueError: this node has no process of that number.
        """
        if function is None:
            return partial(self.on_local_process, local_process_index=local_process_index)
        self._check_index(local_process_index, self.engine.environment.local_world_size, "local_process_index")
        return self._only(function, lambda: self.local_process_index == local_process_index)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        if self.is_main_process:
            builtins.print(*args, **kwargs)

    def _only(self, function: Callable[..., Any], is_chosen: Callable[[], bool]) -> Callable[..., Any]:
        if not callable(function):
            raise TypeError(f"a decorator of processes was given {a_type_of(function)}. Expected a function.")

        @wraps(function)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if is_chosen() else None

        return chosen

    def _check_index(self, index: Any, count: int, name: str = "process_index") -> None:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
            raise ValueError(f"{name}={index!r} is not accepted. Pass a number from 0 to {count - 1}.")


class PartialState(Processes):
    """The processes of this job, without a model: in a launched script it joins the job. Otherwise it is one process.

    Collective: create it on every rank.

    Args:
        cpu: compute on the CPU also if there is an accelerator.

    >>> state = tw.PartialState()
    >>> with state.split_between_processes(["a cat", "a dog", "a bird"]) as prompts:
    ...     print(f"process {state.process_index} of {state.num_processes}: {prompts}")
    process 0 of 1: ['a cat', 'a dog', 'a bird']
    """

    @refuses_unknown
    def __init__(self, cpu: bool = False) -> None:
        # Without a launcher "auto" would start a process per GPU.
        is_launched = Environment.detect().launched_by != "single"
        group = collectives.data_group()
        super().__init__(Engine(devices="auto" if is_launched else 1, accelerator="cpu" if cpu else "auto"))
        collectives.use_data_group(group)  # of an Accelerator's strategy, whose job this is


class AcceleratorState(Processes):
    """The processes of a job and the precision of its Accelerator, as `accelerator.state` shows them.

    Collective without an accelerator: create it on every rank.

    Args:
        accelerator: whose state to show. By default it shows the processes of this job as `PartialState` sees them.

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
        TypeError: it is made by hand, instead of by an Accelerator.

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
            raise TypeError("the process has no GradientState. Each Accelerator has one: accelerator.gradient_state.")
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
        """Return the prepared loader that the loop is over, or None outside a loop."""
        iteration = self._iterations.current()
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
        """Return how many samples of a padded last round are real, or 0 in any other round, -1 outside a loop."""
        loader = self.active_dataloader
        if loader is None:
            return -1
        sizes = loader.last_sizes if loader.is_at_end else None
        return 0 if sizes is None else sum(sizes)

    def __repr__(self) -> str:
        names = ("sync_gradients", "num_steps", "end_of_dataloader", "remainder")
        return f"GradientState({', '.join(f'{name}={getattr(self, name)}' for name in names)})"

"""The note on an out-of-memory error: the bytes that this rank stored, and the arguments that need less."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainwright.memory.activation_checkpointing import repeated_blocks
from trainwright.memory.memory_estimate import estimate_memory, size_text
from trainwright.strategies.divided_optimizers import unwrap_optimizer

if TYPE_CHECKING:
    from trainwright.engine.engine import Engine


_PACKAGE = str(Path(__file__).parents[1])


def memory_note(
    engine: Engine, module: nn.Module, error: BaseException, batch_size: int, accumulate: int, recomputes: bool
) -> str:
    """Return the memory that this rank stores and the arguments that need less, as text. It allocates no tensor.

    Args:
        error: the out-of-memory error. The tensors of its calls are listed.
        batch_size: the batch size of the training loader, 1 if unknown.
        accumulate: batches of an optimizer step.
        recomputes: whether the run recomputes activations already.
    """
    states = [state for optimizer in engine.optimizers for state in unwrap_optimizer(optimizer).state.values()]
    stored = {
        "parameters": _local_bytes(module.parameters()),
        "gradients": _local_bytes(parameter.grad for parameter in module.parameters()),
        "optimizer state": _local_bytes(value for state in states for value in state.values()),
        "buffers": _local_bytes(module.buffers()),
    }
    device, parts = engine.device, ", ".join(f"{name} {size_text(size)}" for name, size in stored.items())
    text = f"Out of memory on rank {engine.rank} ({device}), which stored: {parts}."
    peak_of = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    if peak_of is not None and (peak := peak_of(device)):
        rest = size_text(max(0, peak - sum(stored.values())))
        text += f" The peak was {size_text(peak)}: activations, batches and workspace used up to {rest}."
    if largest := _largest_activations(error, module):
        text += f" The largest tensors in the failed call: {'; '.join(largest)}."
    remedies = [*_for_activations(engine, module, batch_size, accumulate, recomputes), *_for_state(engine, module)]
    return "\n  - ".join([f"{text}\nWays to use less memory (sizes exclude activations):", *remedies])


def _largest_activations(error: BaseException, module: nn.Module) -> list[str]:
    """Return the three largest tensors of the calls that failed, apart from parameters and buffers, as text."""
    seen = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    tensors: list[tuple[int, str]] = []
    for frame, line in walk_tb(error.__traceback__):
        code = frame.f_code
        for name, value in () if code.co_filename.startswith(_PACKAGE) else frame.f_locals.items():
            if isinstance(value, torch.Tensor) and id(value) not in seen:
                seen.add(id(value))
                place = f"{name} in {code.co_name} ({Path(code.co_filename).name}:{line})"
                tensors.append((value.nbytes, f"{size_text(value.nbytes)} {list(value.shape)} {place}"))
    return [text for _, text in sorted(tensors, reverse=True)[:3]]


def _local_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of the tensors among these objects, of a sharded tensor only the bytes of this rank's shard."""
    known = (tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and not is_lazy(tensor))
    shards = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in known]
    return sum(shard.numel() * shard.element_size() for shard in shards)


def _for_activations(
    engine: Engine, module: nn.Module, batch_size: int, accumulate: int, recomputes: bool
) -> Iterator[str]:
    """Yield the arguments that save activations."""
    if batch_size > 1:
        smaller = f"batch_size={batch_size // 2} instead of {batch_size} in the loader"
        yield f"{smaller}, with accumulate_grad_batches={2 * accumulate}: half of the activations"
    if not recomputes and repeated_blocks(module):
        yield "activation_checkpointing=True: the backward computes most activations again instead of storing them"
    if engine.precision.name == "32-true":
        yield 'precision="bf16-mixed": half of most activations'


def _for_state(engine: Engine, module: nn.Module) -> Iterator[str]:
    """Yield the arguments that save parameters, gradients and the optimizer's state."""
    if any(
        is_lazy(parameter) or not parameter.numel() for parameter in module.parameters()
    ):  # an engine took its values
        return
    optimizers = [unwrap_optimizer(optimizer) for optimizer in engine.optimizers] or torch.optim.AdamW
    sharded = estimate_memory(module, optimizers, max(engine.world_size, 2))
    before = {**estimate_memory(module, optimizers, 1).parts, **sharded.parts}.get(engine.strategy.name)
    if before is None:
        return
    if engine.precision.name in ("32-true", "bf16-mixed", "16-mixed"):
        yield f'precision="bf16-true": from {size_text(before.total)} to {size_text(before.total // 2)}'
    if any(type(optimizer).__name__ in ("Adam", "AdamW") for optimizer in engine.optimizers):
        sizes = f"from {size_text(before.optimizer)} to about {size_text(before.optimizer // 4)}"
        yield f"an 8-bit optimizer, such as torchao.optim.AdamW8bit: its state {sizes}"
    is_host = engine.device.type == "cpu"  # where the processes of a machine share its memory
    on = f"{'num_nodes' if is_host else 'devices'}={sharded.num_devices}, " if engine.world_size == 1 else ""
    place = "machine" if is_host else "device"
    for size, name in sorted((size, name) for name, size in sharded.per_device.items() if size < before.total)[:2]:
        yield f'{on}strategy="{name}": from {size_text(before.total)} to {size_text(size)} on each {place}'

"""State entries: the tensors of a module's state_dict, in use by the module or computed for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from trainwright.checkpoint.contents import is_extra_state
from trainwright.compiled_names import clean_name
from trainwright.errors import CheckpointError
from trainwright.tensor_names import state_entries

if TYPE_CHECKING:
    from trainwright.strategies.base import Strategy


def state_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module's state_dict by name: those in use, which a load may write into, and computed ones."""
    yield from ((clean_name(name), value) for name, value, _ in state_entries(module) if not is_extra_state(name))


def computed_entries(strategy: Strategy, module: nn.Module) -> list[str]:
    """Return the names of computed state_dict entries, which no load can write into; raise CheckpointError if sharded."""
    entries = state_entries(module)
    names = [clean_name(name) for name, _, is_in_use in entries if not is_in_use and not is_extra_state(name)]
    if names and not strategy.holds_modules:
        raise CheckpointError(
            f"{names[0]!r} in the state_dict of {type(module).__name__} is computed from what it holds, of which each rank "
            f"has a part, or a copy in low precision, under strategy={strategy.name!r}. Keep it as a parameter or buffer, or "
            "choose 'ddp'."
        )
    return names

"""The module after a run: the plain one that the user passed, with the trained values, usable by hand."""

from __future__ import annotations

import copy
import io
import pickle  # nothing is read by it: whether a module can be pickled is what is asked
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Say = Callable[[str], None]


class LeftModule:
    """A module before a run, to be checked after it.

    Args:
        module: as the user made it.
        is_copied: whether torch can copy and pickle it, which it cannot with parametrizations or old weight norms.
    """

    def __init__(self, module: nn.Module, *, is_copied: bool = True) -> None:
        self.dtypes = {name: value.dtype for name, value in module.state_dict().items()}
        self.attributes = {name: set(each.__dict__) for name, each in module.named_modules()}
        self.parameters = dict(module.named_parameters())
        self.is_copied = is_copied

    def compare_values(self, plain: nn.Module, stored: dict[str, Tensor], say: Say, *, on_rank_0: bool) -> None:
        """Return what differs from the saved values, in dtype or value. Buffers differ per rank; rank 0's were saved."""
        named = dict(plain.named_parameters())
        for name, value in plain.state_dict().items():
            if value.dtype != self.dtypes.get(name, value.dtype):
                say(f"afterwards: {name} is {value.dtype}")
            elif not torch.equal(value, stored[name]) and (on_rank_0 or name in named):
                say(
                    f"afterwards: {name} is off what was saved by {float((value.double() - stored[name]).abs().max()):.2e}"
                )

    def compare_parameters(self, module: nn.Module, say: Say) -> None:
        """Return which parameters are not the ones that the user passed, plain and with nothing attached."""
        for name, parameter in module.named_parameters():
            if parameter is not self.parameters[name]:
                say(f"afterwards: {name} is another Parameter")
            if type(parameter) is not nn.Parameter or set(parameter.__dict__):
                say(f"afterwards: {name} is a {type(parameter)} with {list(parameter.__dict__)}")

    def compare_layers(self, plain: nn.Module, fresh: nn.Module, say: Say) -> None:
        """Return which layers have extra attributes, or a class unlike that in a fresh module."""
        for name, layer in plain.named_modules():
            if more := set(layer.__dict__) - self.attributes[name] - {"_hparams"}:
                say(f"afterwards: {name or 'the module'} has {sorted(more)[:4]}")
            if type(layer) is not type(fresh.get_submodule(name)) and "Parametrized" not in type(layer).__name__:
                say(f"afterwards: {name or 'the module'} is a {type(layer)}")

    def go_on(self, plain: nn.Module, fresh: nn.Module, loss: Callable[[Any], Tensor]) -> None:
        """Print, copy, pickle and save it, and train the copy by hand."""
        repr(plain)
        if self.is_copied:
            copied = copy.deepcopy(plain)
            torch.save(plain, io.BytesIO())
            pickle.dumps(plain)
        else:
            copied = fresh
            copied.load_state_dict(plain.state_dict())
        torch.save(plain.state_dict(), io.BytesIO())
        copied.train()
        optimizer = torch.optim.SGD([each for each in copied.parameters() if each.requires_grad], 0.01)
        loss(copied).backward()
        optimizer.step()

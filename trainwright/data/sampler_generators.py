"""Sampler generators: substitutes for the generators that a sampler has as attributes, while it is drawn from.

The user's generator continues from epoch to epoch, so a run that resumes within an epoch could not draw that epoch's order
again; without a seed it also differs across ranks. So each pass draws from generators of the same kinds, seeded for the pass.
The sampler keeps everything else, and its generators are not advanced.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainwright.data.seeding import derive_seed


class SamplerGenerators:
    """Substitutes for a sampler's generators in one pass, and for those of the sampler within a batch sampler.

    Args:
        parts: what the pass's seed is derived from. Each substitute adds the initial seed of a torch.Generator, or the
            attribute's name for the other kinds, which may have no seed.
        same_on_ranks: whether all ranks draw the same; if not, a generator's state replaces its name.
    """

    def __init__(self, source: Any, *parts: int, same_on_ranks: bool = True) -> None:
        self._found: list[tuple[dict[str, Any], str, Any, Any]] = []
        """The attributes of a sampler, the name of one, the user's generator there and its substitute."""
        made: dict[int, Any] = {}  # by the generator's id: two samplers may have the same one
        sampler, path = source, ""
        while sampler is not None:
            attributes = getattr(sampler, "__dict__", {})
            for name, found in {**_of_class(type(sampler)), **attributes}.items():
                if (kind := _kind_of(found)) is None:
                    continue
                seeded, state = kind
                if id(found) not in made:
                    name_or_state = path + name if same_on_ranks else repr(state())
                    made[id(found)] = seeded(derive_seed(*parts, _number(found, name_or_state)))
                self._found.append((attributes, name, found, made[id(found)]))
            sampler, path = getattr(sampler, "sampler", None), f"{path}sampler."

    @contextmanager
    def active(self) -> Iterator[None]:
        """Substitute the generators within the block. Attributes that the sampler has since replaced are left alone."""
        here = [(*each, each[1] in each[0]) for each in self._found if each[0].get(each[1], each[2]) is each[2]]
        for attributes, name, _, substitute, _ in here:
            attributes[name] = substitute
        try:
            yield
        finally:
            for attributes, name, found, substitute, is_own in here:
                if attributes.get(name) is not substitute:
                    continue
                if is_own:
                    attributes[name] = found
                else:  # the class has it
                    del attributes[name]


def _kind_of(found: Any) -> tuple[Callable[[int], Any], Callable[[], Any]] | None:
    """Return what makes a seeded generator of the same kind, and what returns its state; None for subclasses and all else."""
    if isinstance(found, torch.Generator):
        return lambda seed: torch.Generator().manual_seed(seed), found.initial_seed
    if type(found) is random.Random:
        return random.Random, found.getstate
    if "numpy" not in sys.modules:
        return None
    numpy = sys.modules["numpy"].random
    if type(found) is numpy.RandomState:
        return lambda seed: numpy.RandomState(seed % 2**32), found.get_state
    if type(found) is numpy.Generator:
        bits = type(found.bit_generator)
        # The constructor of another library's BitGenerator may take no seed.
        known = bits if getattr(numpy, bits.__name__, None) is bits else numpy.PCG64
        return lambda seed: numpy.Generator(known(seed)), lambda: found.bit_generator.state
    return None


def _number(found: Any, name_or_state: str) -> int:
    """Return a generator's part in the seed: the same in each epoch, and in a resumed run."""
    # torch's global generator reports the seed that this process began with, which says nothing of the run.
    if isinstance(found, torch.Generator) and found is not torch.default_generator:
        return found.initial_seed()
    return zlib.crc32(name_or_state.encode())


def _of_class(kind: type) -> dict[str, Any]:
    return {name: value for each in reversed(kind.__mro__) for name, value in vars(each).items()}

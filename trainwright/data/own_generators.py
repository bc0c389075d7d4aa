"""Own generators: those that a sampler has as attributes, and what stands in for them while it is drawn from.

A generator of the user's goes on from epoch to epoch, so a run that is taken up within an epoch could not draw that epoch's
order again; one without a seed differs on each rank too. So each pass is drawn from generators of the same kinds that are
seeded for it. The sampler stays the user's own, with all else that it keeps, and its generators stay where they were.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from trainwright.data.seeding import derive_seed


class StandIn(NamedTuple):
    """What takes the place of one attribute."""

    attributes: dict[str, Any]
    name: str
    found: Any
    own: Any
    is_inherited: bool
    """Whether the attribute is the class's."""


class OwnGenerators:
    """What stands in for a sampler's generators in one pass, and for those of the sampler within a batch sampler.

    These kinds are known: torch.Generator, random.Random, numpy's RandomState and Generator.

    Args:
        source: the sampler.
        parts: what the pass's seed is made of, with what stands for each generator. That is a torch.Generator's first seed,
            and for the others, which may have had none, the attribute's name.
        is_alike: whether all ranks are to draw alike; otherwise a generator's state stands for it, in the place of its name.
    """

    def __init__(self, source: Any, *parts: int, is_alike: bool = True) -> None:
        self._stand_ins: list[StandIn] = []
        made: dict[int, Any] = {}
        """By the generator's id, so that one which two samplers share is shared still."""
        sampler, path = source, ""
        while sampler is not None:
            attributes = getattr(sampler, "__dict__", {})
            for name, found in {**_of_class(type(sampler)), **attributes}.items():
                kind = _kind_of(found)
                if kind is None:
                    continue
                if id(found) not in made:
                    made[id(found)] = kind.seeded(derive_seed(*parts, _number(found, kind, path + name, is_alike)))
                stand_in = StandIn(attributes, name, found, made[id(found)], name not in attributes)
                self._stand_ins.append(stand_in)
            sampler, path = getattr(sampler, "sampler", None), f"{path}sampler."

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Put the stand-ins in their places for the length of the block; an attribute that was set anew is left alone."""
        here = [each for each in self._stand_ins if each.attributes.get(each.name, each.found) is each.found]
        for each in here:
            each.attributes[each.name] = each.own
        try:
            yield
        finally:
            for each in here:
                if each.attributes.get(each.name) is not each.own:
                    continue
                if each.is_inherited:
                    del each.attributes[each.name]
                else:
                    each.attributes[each.name] = each.found


class _Kind(NamedTuple):
    seeded: Callable[[int], Any]
    """Makes a generator of this kind."""
    state: Callable[[], Any]
    """Tells where the one that was found stands."""


def _kind_of(found: Any) -> _Kind | None:
    """Return how a generator is made anew; None for anything else, and for subclasses, which may need what we do not know."""
    if isinstance(found, torch.Generator):
        return _Kind(lambda seed: torch.Generator().manual_seed(seed), found.initial_seed)
    if type(found) is random.Random:
        return _Kind(random.Random, found.getstate)
    if "numpy" not in sys.modules:
        return None
    numpy = sys.modules["numpy"].random
    if type(found) is numpy.RandomState:
        return _Kind(lambda seed: numpy.RandomState(seed % 2**32), found.get_state)
    if type(found) is numpy.Generator:
        bits = type(found.bit_generator)
        known = bits if getattr(numpy, bits.__name__, None) is bits else numpy.PCG64
        return _Kind(lambda seed: numpy.Generator(known(seed)), lambda: found.bit_generator.state)
    return None


def _number(found: Any, kind: _Kind, path: str, is_alike: bool) -> int:
    """Return what stands for a generator: the same in each epoch, and in a run that is taken up."""
    # torch's global one has the seed that this process began with, whatever the run began with.
    if isinstance(found, torch.Generator) and found is not torch.default_generator:
        return found.initial_seed()
    return zlib.crc32((path if is_alike else repr(kind.state())).encode())


def _of_class(kind: type) -> dict[str, Any]:
    return {name: value for each in reversed(kind.__mro__) for name, value in vars(each).items()}

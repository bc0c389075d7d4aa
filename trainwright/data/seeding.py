"""Seeds: one number that a run starts from, and those derived from it, such as the seed of an epoch's order."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trainwright.devices import cuda
from trainwright.devices.generators import (
    check_device_state,
    device_state,
    is_generator_state,
    set_device_state,
    state_in,
)
from trainwright.distributed.environment import Environment
from trainwright.errors import CheckpointError, a_type_of
from trainwright.overrides import overridden

_chosen = itertools.count()


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed python, numpy and torch on every device; return the seed.

    The order of the data and the loader workers follow it too, with or without `workers`. Call it on every rank with the same
    number; None chooses a random one, the same on every rank. With `verbose` rank 0 logs it to the logger "trainwright".

    Raises:
        TypeError: seed is not an int.
        ValueError: seed is outside 0 .. 2**32 - 1, which numpy cannot take.

    >>> tw.seed_everything(42)
    42
    """
    return seed_rank(seed, 0, verbose)


def seed_rank(seed: int | None, offset: int, verbose: bool) -> int:
    """Seed this rank as `seed_everything` does, with a number that is higher by its offset."""
    seed = overridden("seed_everything", "seed", seed)
    if seed is None:
        seed = _choose_seed(Environment.detect())
    if isinstance(seed, int) and not isinstance(seed, bool):
        seed += offset
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed={seed!r} is {a_type_of(seed)}; expected an int from 0 to 2**32 - 1, or None.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} is out of range; expected an int from 0 to 2**32 - 1, or None.")
    # Imported if nothing has yet: its generator would begin unseeded at a later import.
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    if verbose and Environment.detect().rank == 0:
        logging.getLogger("trainwright").info("seed_everything: the seed is %d.", seed)
    return seed


def _choose_seed(environment: Environment) -> int:
    """Return a random seed; if several ranks need the same, one derived from the job's address."""
    if environment.world_size == 1:
        return random.SystemRandom().randrange(2**32)
    # Before the process group exists, the ranks have in common the job's address and the number of this call.
    job = f"{environment.main_address}:{environment.main_port}:{environment.restart_count}:{next(_chosen)}"
    return int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big")


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Restore the generators (python's, numpy's if it is loaded, torch's, the accelerator's) after the block.

    Args:
        include_cuda: False leaves out the accelerator's generators, whatever kind it is.

    >>> with tw.isolate_rng():
    ...     noise = torch.rand(3)
    >>> torch.equal(noise, torch.rand(3))
    True
    """
    state = rng_state() if include_cuda else {**host_state(), "device": None}
    try:
        yield
    finally:
        set_rng_state(state)


def derive_seed(*parts: int) -> int:
    """Return a 63-bit seed that is a pure function of the parts; other parts give another seed."""
    digest = hashlib.sha256(",".join(map(str, parts)).encode()).digest()
    # 63 bits, because seeds travel to workers in tensors of int64.
    return int.from_bytes(digest[:8], "big") >> 1


def rng_state() -> dict[str, Any]:
    """Return the states of this process's generators: python's, numpy's if it is loaded, torch's, the accelerator's."""
    return {**host_state(), **cuda.FOR_EARLIER_READERS, "device": device_state()}


def set_rng_state(state: dict[str, Any]) -> None:
    """Set the generators to what `rng_state` returned, also if it has been through a checkpoint."""
    if state["numpy"] is not None:
        import numpy  # noqa: F401 - its generator is set below, where it is loaded
    set_host_state(state)
    set_device_state(state_in(state))


def derived_rng_state(seed: int) -> dict[str, Any]:
    """Return what `rng_state` would return with the host's generators seeded, without changing them."""
    with IsolatedGenerators(seed).active():
        return {**host_state(), **cuda.FOR_EARLIER_READERS, "device": None}


class IsolatedGenerators:
    """Generators of python, numpy and torch (CPU) that replace the process's own while `active`."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.state: dict[str, Any] = {}
        """Their states, once they have been active."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from these generators in the block. This costs some 300 us, so draw a lot at once."""
        outside = host_state()
        if self.state:
            set_host_state(self.state)
        else:
            seed_generators(self._seed)
        try:
            yield
        finally:
            self.state = host_state()
            set_host_state(outside)


def read_isolated(items: Iterator[Any], generators: Iterable[IsolatedGenerators]) -> Iterator[Any]:
    """Yield the items, each read with the next of the generators active."""
    for each in generators:
        with each.active():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def seed_generators(seed: int) -> None:
    """Seed this process's generators on the host: python's, numpy's if it is loaded, torch's."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed also seeds every device and is 200 times slower


def host_state() -> dict[str, Any]:
    """Return the states of this process's generators on the host: python's, numpy's if it is loaded, torch's."""
    numpy_state = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    return {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}


def set_host_state(state: dict[str, Any]) -> None:
    """Set the generators to what `host_state` returned, also if it has been through a checkpoint."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))  # a checkpoint has the words in a list
    if state["numpy"] is not None:
        sys.modules["numpy"].random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


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


DEVICE = "device"
KEY_LENGTH = 624
"""The words of a Mersenne Twister."""


def check_generator_states(value: Any, path: str) -> None:
    """Refuse a checkpoint's plain data if a generator state in it is not valid (CheckpointError)."""
    for state in _states_in([value]):
        for name, check in _CHECKS.items():
            try:
                check(state_in(state) if name == DEVICE else state.get(name))
            except Exception as error:
                raise CheckpointError(
                    f"{path}: the state of the {name} generator is not valid ({error}). Use another checkpoint, or a good "
                    "copy of this one."
                ) from error


def _states_in(value: Any) -> Iterator[Mapping[str, Any]]:
    if is_generator_state(value):
        yield value
    else:
        for each in value.values() if isinstance(value, Mapping) else value:
            if isinstance(each, (Mapping, list, tuple)):
                yield from _states_in(each)


def _check_python(state: Any) -> None:
    version, words, gauss = state
    random.Random().setstate((version, tuple(words), gauss))


def _check_numpy(state: Any) -> None:
    if state is None:
        return
    if isinstance(state, Mapping):
        raise TypeError("a dict, where a tuple was stored")
    kind, key, position, has_gauss, gauss = state
    # Checked by hand: numpy's set_state takes any position, and reads beyond the key at the next draw.
    if kind != "MT19937":
        raise ValueError(f"of the kind {kind!r}")
    if getattr(key, "shape", None) != (KEY_LENGTH,) or str(key.dtype) != "uint32":
        raise ValueError(f"its key is not an array of {KEY_LENGTH} uint32")
    if type(position) is not int or not 0 <= position <= KEY_LENGTH:
        raise ValueError(f"its position is {position!r}")
    if has_gauss not in (0, 1) or not math.isfinite(gauss):
        raise ValueError(f"its next normal number is {gauss!r}")


def _check_torch(state: Any) -> None:
    if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.dim() != 1:
        raise TypeError("not a row of bytes")
    torch.Generator().set_state(state)


_CHECKS = {"python": _check_python, "numpy": _check_numpy, "torch": _check_torch, DEVICE: check_device_state}

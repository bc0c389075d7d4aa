"""Seeds and RNG states: the seed of a run, seeds derived from it, and isolated random number generators."""

from __future__ import annotations

import hashlib
import itertools
import logging
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
)
from trainwright.distributed.environment import Environment
from trainwright.errors import CheckpointError, a_type_of

_chosen = itertools.count()


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed python, numpy and torch on every device, and return the seed.

    The order of the data and the loader workers depend on it too, with or without `workers`. Call it on every rank with the
    same number. None chooses a random seed, the same on every rank. With `verbose` rank 0 logs the seed to the logger
    "trainwright".

    Raises:
        TypeError: seed is not an int.
        ValueError: seed is outside 0 .. 2**32 - 1, which numpy cannot take.

    >>> tw.seed_everything(42)
    42
    """
    return seed_rank(seed, 0, verbose)


def seed_rank(seed: int | None, offset: int, verbose: bool) -> int:
    """Seed this rank like `seed_everything`, with the seed increased by `offset`."""
    if seed is None:
        seed = _choose_seed(Environment.detect())
    if isinstance(seed, int) and not isinstance(seed, bool):
        seed += offset
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed={seed!r} is {a_type_of(seed)}; expected an int from 0 to 2**32 - 1, or None.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} is out of range; expected an int from 0 to 2**32 - 1, or None.")
    # A later import of numpy would begin with an unseeded generator.
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    if verbose and Environment.detect().rank == 0:
        logging.getLogger("trainwright").info("seed_everything: the seed is %d.", seed)
    return seed


def _choose_seed(environment: Environment) -> int:
    """Return a random seed, or a seed derived from the job's address if there are several ranks."""
    if environment.world_size == 1:
        return random.SystemRandom().randrange(2**32)
    # Before the process group exists, the ranks share only the job's address and the number of this call.
    job = f"{environment.main_address}:{environment.main_port}:{environment.restart_count}:{next(_chosen)}"
    return int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big")


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Restore the RNG states of python, torch, the accelerator and, if it is loaded, numpy after the block.

    Args:
        include_cuda: False excludes the accelerator's generators, whatever its kind.

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
    """Return a 63-bit seed that depends on the parts only. Other parts give another seed."""
    digest = hashlib.sha256(",".join(map(str, parts)).encode()).digest()
    # 63 bits, because seeds travel to workers in tensors of int64.
    return int.from_bytes(digest[:8], "big") >> 1


def rng_state() -> dict[str, Any]:
    """Return this process's RNG states: python, numpy if it is loaded, torch, and the accelerator."""
    return {**host_state(), **cuda.FOR_EARLIER_READERS, "device": device_state()}


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the state that `rng_state` returned, directly or from a checkpoint."""
    if state["numpy"] is not None:
        import numpy  # noqa: F401 - its generator is set below, where it is loaded
    set_host_state(state)
    set_device_state(state.get("device"))


def derived_rng_state(seed: int) -> dict[str, Any]:
    """Return the `rng_state` of generators with this seed on the host, without changing the present generators."""
    with IsolatedGenerators(seed).active():
        return {**host_state(), **cuda.FOR_EARLIER_READERS, "device": None}


class IsolatedGenerators:
    """Generators of python, numpy and torch (CPU) that replace the process's generators while `active`."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.state: dict[str, Any] = {}
        """The RNG states, once the generators have been active."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use these generators in the block. Entering it costs about 300 us, so draw many numbers at once."""
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
    """Yield the items. Every item is read with the next of the generators active."""
    for isolated in generators:
        with isolated.active():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def seed_generators(seed: int) -> None:
    """Seed this process's generators on the host: python, numpy if it is loaded, and torch."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed also seeds every device and is 200 times slower


def host_state() -> dict[str, Any]:
    """Return this process's RNG states on the host: python, numpy if it is loaded, and torch."""
    numpy_state = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    return {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}


def host_digest() -> int:
    """Return a checksum of this process's RNG states on the host, to compare with other processes."""
    state = host_state()
    return zlib.crc32(repr((state["python"], state["numpy"], state["torch"].tolist())).encode())


def set_host_state(state: dict[str, Any]) -> None:
    """Restore the state that `host_state` returned, directly or from a checkpoint."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))  # a checkpoint has the words in a list
    if state["numpy"] is not None:
        sys.modules["numpy"].random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


class SamplerGenerators:
    """Substitutes for the generators in the attributes of a sampler, or of the sampler in a batch sampler, during one pass.

    The user's generator continues from epoch to epoch. So a run that resumes within an epoch could not repeat that epoch's
    order, and an unseeded order differs across ranks. Therefore every pass uses new generators of the same kinds, seeded for
    the pass. The user's generators are not advanced.

    Args:
        parts: the numbers from which the pass's seed is derived. A substitute adds the initial seed of a torch.Generator, or
            the attribute's name for other kinds of generators, which may have no seed.
        same_on_ranks: whether all ranks draw the same order. Otherwise a generator's state replaces its name.
    """

    def __init__(self, source: Any, *parts: int, same_on_ranks: bool = True) -> None:
        self._substitutes: list[tuple[dict[str, Any], str, Any, Any]] = []
        """The attributes of a sampler, the name of an attribute, the user's generator there, and its substitute."""
        by_id: dict[int, Any] = {}  # two samplers may share a generator
        sampler, path = source, ""
        while sampler is not None:
            attributes = getattr(sampler, "__dict__", {})
            for name, generator in attributes.items():
                if (kind := _kind_of(generator)) is None:
                    continue
                seeded, state = kind
                if id(generator) not in by_id:
                    name_or_state = path + name if same_on_ranks else repr(state())
                    by_id[id(generator)] = seeded(derive_seed(*parts, _number(generator, name_or_state)))
                self._substitutes.append((attributes, name, generator, by_id[id(generator)]))
            sampler, path = getattr(sampler, "sampler", None), f"{path}sampler."

    @contextmanager
    def active(self) -> Iterator[None]:
        """Substitute the generators within the block, except in attributes that the sampler has replaced meanwhile."""
        active = [entry for entry in self._substitutes if entry[0].get(entry[1]) is entry[2]]
        for attributes, name, _, substitute in active:
            attributes[name] = substitute
        try:
            yield
        finally:
            for attributes, name, generator, substitute in active:
                if attributes.get(name) is substitute:
                    attributes[name] = generator


def _kind_of(value: Any) -> tuple[Callable[[int], Any], Callable[[], Any]] | None:
    """Return functions that make a seeded generator of the same kind and read its state, or None for other values."""
    if isinstance(value, torch.Generator):
        return lambda seed: torch.Generator().manual_seed(seed), value.initial_seed
    if type(value) is random.Random:
        return random.Random, value.getstate
    if "numpy" not in sys.modules:
        return None
    numpy = sys.modules["numpy"].random
    if type(value) is numpy.RandomState:
        return lambda seed: numpy.RandomState(seed % 2**32), value.get_state
    if type(value) is numpy.Generator:
        bits = type(value.bit_generator)
        # The constructor of another library's BitGenerator may take no seed.
        known = bits if getattr(numpy, bits.__name__, None) is bits else numpy.PCG64
        return lambda seed: numpy.Generator(known(seed)), lambda: value.bit_generator.state
    return None


def _number(generator: Any, name_or_state: str) -> int:
    """Return a generator's part in the seed, which is the same in every epoch and in a resumed run."""
    # torch's global generator reports the seed of this process's start, which does not depend on the run.
    if isinstance(generator, torch.Generator) and generator is not torch.default_generator:
        return generator.initial_seed()
    return zlib.crc32(name_or_state.encode())


KEY_LENGTH = 624
"""The words of a Mersenne Twister."""


def check_generator_states(value: Any, path: str) -> None:
    """Reject a checkpoint's plain data if an RNG state in it is not valid (CheckpointError)."""
    # torch and numpy do not check every value themselves.
    for state in _states_in([value]):
        for name, check in _CHECKS.items():
            try:
                check(state.get(name))
            except Exception as error:
                raise CheckpointError(
                    f"{path}: the state of the {name} generator is not valid ({error}). Use another checkpoint, or a good "
                    "copy of this checkpoint."
                ) from error


def _states_in(value: Any) -> Iterator[Mapping[str, Any]]:
    if is_generator_state(value):
        yield value
    else:
        for item in value.values() if isinstance(value, Mapping) else value:
            if isinstance(item, (Mapping, list, tuple)):
                yield from _states_in(item)


def _check_python(state: Any) -> None:
    version, words, gauss = state
    random.Random().setstate((version, tuple(words), gauss))


def _check_numpy(state: Any) -> None:
    if state is None:
        return
    import numpy

    numpy.random.RandomState().set_state(state)
    # numpy accepts any position, and then reads beyond the key at the next draw.
    if type(state[2]) is not int or not 0 <= state[2] <= KEY_LENGTH:
        raise ValueError(f"its position is {state[2]!r}")


def _check_torch(state: Any) -> None:
    if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.dim() != 1:
        raise TypeError("not a row of bytes")
    torch.Generator().set_state(state)


_CHECKS = {"python": _check_python, "numpy": _check_numpy, "torch": _check_torch, "device": check_device_state}

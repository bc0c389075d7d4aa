"""Seeds: one number that a run starts from, and those derived from it, such as the seed of an epoch's order."""

from __future__ import annotations

import hashlib
import itertools
import logging
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainwright.devices import cuda
from trainwright.devices.generators import device_state, set_device_state, state_in
from trainwright.distributed.environment import Environment
from trainwright.errors import a_type_of
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

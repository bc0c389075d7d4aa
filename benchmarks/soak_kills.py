"""The faults of a run of soak.py: the kind, the victim and the time of each."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from soak_job import ACCUMULATE, BATCHES

VICTIMS = ("rank", "launcher", "all")
MOMENTS = {"step": 4, "save": 3, "validation": 2, "start": 1, "load": 1}
"""When to kill, and how often each. "start" is before the first step after a start, "load" before that."""
LONGEST_DELAY = {"step": 0.05, "save": 0.025, "validation": 0.012, "start": 0.03, "load": 0.15}
"""Seconds at most from the moment to the kill."""
KINDS = {"kill": 2, "pause": 1, "hang": 1}
"""Kinds of faults, and how often each. A paused process continues after some seconds. A hanging one stays stopped."""
PAUSE_SECONDS = (0.5, 4.0)
STEPS = -(-BATCHES // ACCUMULATE)
"""Optimizer steps of an epoch."""


@dataclass(frozen=True)
class Kill:
    """A fault: its victim, and its time, which is an event some steps after the run's start, plus a short delay."""

    moment: str
    steps: int
    delay: float
    victim: str
    """"launcher", "all", or the number of a rank."""
    kind: str = "kill"
    seconds: float = 0.0
    """The length of a pause."""

    def __str__(self) -> str:
        victim = (
            f"rank {self.victim}" if self.victim.isdigit() else f"the {self.victim}" if self.victim != "all" else "all"
        )
        later = (
            f", {self.steps} steps or more after it had begun" if self.moment in ("step", "save", "validation") else ""
        )
        kind = {"kill": "", "pause": f"pause of {self.seconds:.1f} s, ", "hang": "hang, "}[self.kind]
        return f"{kind}{victim}, {1e3 * self.delay:.0f} ms into a {self.moment}{later}"


def plan(seed: int, number: int, kills: int, num_ranks: int, epochs: int, *, only_kills: bool = True) -> list[Kill]:
    """Choose the faults of a run: of any three in a row, one is of a rank, one of the launcher, one of all.

    With `only_kills` all of them are kills. A single process does not hang, because nothing would end it.
    """
    generator = random.Random(f"{seed}/{number}")
    # So far apart that a run is killed as often as asked for before it ends, and sometimes twice in one epoch.
    furthest = max(2, 2 * epochs * STEPS // (kills + 2))
    victims = generator.sample(VICTIMS, len(VICTIMS)) if num_ranks > 1 else ["rank"]
    chosen = []
    for count in range(kills):
        victim, moment = victims[count % len(victims)], generator.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        rank, steps = generator.randrange(num_ranks), generator.randint(1, furthest)
        delay = generator.uniform(0, LONGEST_DELAY[moment])
        chosen.append(Kill(moment, steps, delay, str(rank) if victim == "rank" else victim))
        if not only_kills:
            kind, seconds = generator.choices(list(KINDS), list(KINDS.values()))[0], generator.uniform(*PAUSE_SECONDS)
            kind = "pause" if kind == "hang" and num_ranks == 1 else kind
            victim = str(rank) if kind == "hang" else chosen[-1].victim
            chosen[-1] = replace(chosen[-1], kind=kind, victim=victim, seconds=seconds)
    return chosen

"""Which kills a run of soak.py gets: what is killed, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass

from soak_job import ACCUMULATE, BATCHES

VICTIMS = ("rank", "launcher", "all")
MOMENTS = {"step": 4, "save": 3, "validation": 2, "start": 1, "load": 1}
"""When to kill, and how often each. "start" is before the first step after a start, "load" before that."""
LONGEST_DELAY = {"step": 0.05, "save": 0.025, "validation": 0.012, "start": 0.03, "load": 0.15}
"""Seconds at most from the moment to the kill."""
STEPS = -(-BATCHES // ACCUMULATE)
"""Optimizer steps of an epoch."""


@dataclass(frozen=True)
class Kill:
    """What to kill, and when: at an event some steps after the run's start, plus a short delay."""

    moment: str
    steps: int
    delay: float
    victim: str
    """"launcher", "all", or the number of a rank."""

    def __str__(self) -> str:
        victim = (
            f"rank {self.victim}" if self.victim.isdigit() else f"the {self.victim}" if self.victim != "all" else "all"
        )
        later = (
            f", {self.steps} steps or more after it had begun" if self.moment in ("step", "save", "validation") else ""
        )
        return f"{victim}, {1e3 * self.delay:.0f} ms into a {self.moment}{later}"


def plan(seed: int, number: int, kills: int, num_ranks: int, epochs: int) -> list[Kill]:
    """Choose the kills of a run: of any three in a row, one is of a rank, one of the launcher, one of all."""
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
    return chosen

"""A kind of random test with a known fault: three and more apples differ where there is a pear too."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from fuzz.kind import Config, Refused

NAME, PROCESSES, LIMIT = "toy", (1,), 3.0
SIMPLEST: dict[str, list[Any]] = {"apples": [0], "pears": [[]], "plums": [False], "colour": ["red", "green"]}


def draw(random: random.Random) -> Config:
    return {
        "apples": random.randint(0, 40),
        "pears": [random.randint(0, 9) for _ in range(random.randint(0, 3))],
        "plums": random.random() < 0.5,
        "colour": random.choice(["red", "green", "blue"]),
    }


def differences(config: Config, folder: Path) -> list[str]:
    (folder / "seen").write_text("a folder of its own")
    if config["colour"] == "grey":
        raise Refused("grey apples are no apples")
    if config["colour"] == "dead":
        os.kill(os.getpid(), signal.SIGKILL)
    if config["colour"] == "slow":
        time.sleep(60)  # longer than the tested limit
    if config["colour"] == "bad":
        raise ValueError("rotten")
    return ["fruit: too much of it"] if config["apples"] >= 3 and config["pears"] and config["colour"] != "red" else []

"""The configurations of training runs for resume, cuts and peer, and which of their keys take effect together."""

from __future__ import annotations

from random import Random
from typing import Any

from fuzz.kind import Config

LOADERS = (
    "map", "shuffle", "drop", "weighted", "sampler", "batches", "stream", "shuffled stream", "endless", "list",
)  # fmt: skip
MODES = ("min_size", "max_size", "max_size_cycle")
UNSIZED = ("stream", "shuffled stream", "endless")
SCHEDULERS = ("epoch", "step", "validation", "cycle", "plateau", "plateau on loss", "plateau at validations")
SAVES = ("steps", "epochs", "epoch ends", "time")
HOLDERS = ("arguments", "module", "datamodule")
"""What the loaders come from."""
FEATURES = (
    "draw at start", "draw at epochs", "draw at validations", "draw in validations", "draw at ends", "log at ends",
    "log in a callback", "average", "metric", "rates", "dropout", "none", "schedule", "persistent",
)  # fmt: skip
SAVING_HOOKS = (
    "on_train_batch_end", "on_validation_start", "on_validation_end", "on_train_epoch_start", "on_train_epoch_end",
)  # fmt: skip

SIMPLEST: dict[str, list[Any]] = {
    "seed": [1],
    "loader": ["map", "shuffle"],
    "second": ["map"],
    "mode": [None],
    "samples": [2],
    "batch": [1, 2],
    "workers": [0],
    "augment": [False],
    "optimizer": ["sgd"],
    "manual": [False],
    "two": [False],
    "window": [1],
    "close": [False],
    "scheduler": [None, "epoch", "step"],
    "frequency": [1],
    "clip": [None],
    "precision": [None],
    "epochs": [1],
    "max_steps": [None],
    "min_steps": [None],
    "min_epochs": [None],
    "limit_train": [None],
    "limit_val": [None],
    "validate": ["off", None],
    "across": [False],
    "every_epochs": [1],
    "sanity": [0],
    "stop": [None],
    "patience": [0],
    "save": ["steps", "epochs"],
    "save_every": [1],
    "async_save": [False],
    "best": [None],
    "top_k": [1],
    "mode_max": [False],
    "own_save": [None],
    "user_stop": [None],
    "features": [[]],
    "log_every": [1],
    "val_on_step": [False],
    "holder": ["arguments"],
    "reload": [0],
    "val_loaders": [1],
    "max_time": [None],
}
"""The simplest values of each key; `at` and `cuts` are of resume and cuts."""


def draw(random: Random) -> Config:
    """Draw a run."""

    def often(odds: float, value: Any, otherwise: Any = None) -> Any:
        return value if random.random() < odds else otherwise

    return {
        "seed": random.randint(0, 999),
        "loader": random.choice(LOADERS),
        "second": random.choice(LOADERS[:8]),
        "mode": often(0.25, random.choice(MODES)),
        "samples": random.randint(7, 24),
        "batch": random.randint(1, 4),
        "workers": often(0.06, 2, 0),
        "augment": random.random() < 0.4,
        "optimizer": random.choice(["sgd", "adam"]),
        "manual": random.random() < 0.3,
        "two": random.random() < 0.4,
        "window": random.choice([1, 1, 2, 3, 5]),
        "close": random.random() < 0.5,
        "scheduler": often(0.8, random.choice(SCHEDULERS)),
        "frequency": random.choice([1, 1, 2, 3]),
        "clip": often(0.3, random.choice(["norm", "value"])),
        "precision": often(0.25, random.choice(["16-mixed", "bf16-mixed", "64-true", "bf16-true"])),
        "epochs": random.randint(2, 4),
        "max_steps": often(0.3, random.randint(3, 16)),
        "min_steps": often(0.2, random.randint(3, 8)),
        "min_epochs": often(0.3, 2),
        "limit_train": often(0.3, random.choice([2, 3, 5, 7, 0.5, 0.8])),
        "limit_val": often(0.3, random.choice([1, 2, 0.5])),
        "validate": random.choice(
            ["off", None, None, 0.25, 0.34, 0.5, 1, 2, 3, random.randint(4, 9), often(0.5, "always", "never")]
        ),
        "across": random.random() < 0.4,
        "every_epochs": often(0.15, 2, 1),
        "sanity": random.choice([0, 2]),
        "stop": often(0.5, random.choice(["val_loss", "loss_epoch", "val_loss at validations"])),
        "patience": random.randint(0, 2),
        "save": random.choice(["steps", "steps", *SAVES]),
        "save_every": random.randint(1, 3),
        "async_save": random.random() < 0.15,
        "best": often(0.5, random.choice(["epochs", "steps", "last", "weights"])),
        "top_k": random.randint(1, 3),
        "mode_max": random.random() < 0.3,
        "own_save": often(0.4, random.choice(SAVING_HOOKS)),
        "user_stop": often(0.25, random.randint(0, 2)),
        "features": [each for each in FEATURES if random.random() < (0.08 if each == "none" else 0.25)],
        "log_every": random.randint(1, 3),
        "val_on_step": random.random() < 0.4,
        "holder": often(0.35, random.choice(HOLDERS), "arguments"),
        "reload": often(0.5, random.randint(1, 2), 0),
        "val_loaders": often(0.2, 2, 1),
        "max_time": often(0.1, random.choice(["day", "moment"])),
    } | often(0.06, {"optimizer": "lbfgs"}, {})


def settled(config: Config) -> Config:
    """Return the configuration with keys that other keys make ineffective at their simplest values.

    A run with timed validations validates always or never, and a checkpoint does not hold the position within the interval, so
    nothing that depends on validations is combined with it.
    """
    c = dict(config)
    if c["mode"] is not None:
        c["loader"] = "map" if c["loader"] in ("list", "endless") else c["loader"]
    if c["loader"] == "list":
        c["workers"] = 0
    if c["holder"] == "arguments":
        c["reload"] = 0
    if c["optimizer"] == "lbfgs":  # its closure is called several times a step
        c["manual"], c["window"] = False, 1
        c["features"] = [each for each in c["features"] if each not in ("none", "schedule")]
        c["precision"] = None if c["precision"] == "16-mixed" else c["precision"]
    if c["loader"] == "endless" and not isinstance(c["limit_train"], int):
        c["limit_train"] = 4
    names = [c["loader"], *([c["second"]] if c["mode"] else [])]
    is_sized = not any(each in UNSIZED for each in names)
    if not is_sized and isinstance(c["limit_train"], float):
        c["limit_train"] = 3
    if not is_sized and isinstance(c["validate"], float):
        c["validate"] = 2
    if c["manual"]:
        c["clip"] = c["clip"] if not c["two"] else None
        c["features"] = [each for each in c["features"] if each not in ("none", "schedule")]
        if c["scheduler"] not in (None, "step", "epoch"):
            c["scheduler"] = "step"
    else:
        c["two"] = False
    if c["min_steps"] is not None and c["max_steps"] is not None:
        c["min_steps"] = min(c["min_steps"], c["max_steps"])
    validates = c["validate"] != "off"
    by_time = c["validate"] in ("always", "never")
    c["across"] = c["across"] and (by_time or (isinstance(c["validate"], int) and validates))
    c["every_epochs"] = 1 if c["across"] or not validates else c["every_epochs"]
    each_epoch = validates and not by_time and not c["across"] and c["every_epochs"] == 1
    if not each_epoch:
        if c["scheduler"] in ("plateau", "validation", "plateau at validations"):
            c["scheduler"] = "epoch"
        if c["stop"] is not None and c["stop"].startswith("val"):
            c["stop"] = None
    if not validates or by_time:
        c["best"] = None
        c["features"] = [each for each in c["features"] if "validations" not in each]
    if c["own_save"] is not None and "validation" in c["own_save"] and (not validates or by_time):
        c["own_save"] = None
    if c["across"] and c["best"] in ("epochs", "last", "weights"):
        c["best"] = None
    return c

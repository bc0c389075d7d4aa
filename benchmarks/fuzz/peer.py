"""Peer: the order of events in a run against that in Lightning, from the same program, if Lightning is installed.

Compared are, in order and each with its epoch and step, the batches, validations, scheduler steps with the resulting rates, the
early stop, and the names of the final checkpoints. `MEANT` lists intended differences with their reasons: a configuration is
simplified by each row that applies to it, and any remaining difference counts.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trainwright as tw
from fuzz import run_config
from fuzz.kind import Config, Refused
from fuzz.program import program

try:
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.utilities import CombinedLoader
except ImportError:
    lightning = None

NAME, PROCESSES, LIMIT = "peer", (1,), 120.0
SIMPLEST: dict[str, list[Any]] = dict(run_config.SIMPLEST)


def available() -> str:
    """Return why the kind cannot run here."""
    return "" if lightning is not None else "lightning is not installed (pip install lightning)"


def by_metric(c: Config) -> bool:
    """Return whether a metric's value decides when something happens in the run."""
    return bool(c["stop"] or c["best"] or str(c["scheduler"]).startswith("plateau"))


def within_epochs(c: Config) -> bool:
    """Return whether any validation happens within an epoch."""
    return c["validate"] not in ("off", None) or c["across"]


MEANT: list[tuple[str, Callable[[Config], bool], Config]] = [
    (
        "the order of the data and its augmentation are functions of seed and epoch here, the global generator's there",
        lambda c: True,
        {"augment": False, "features": [], "workers": 0, "own_save": None, "async_save": False},
    ),
    (
        "a stream with a state goes on each epoch, wherever it is read; there it may begin anew",
        lambda c: c["loader"] not in ("map", "stream", "list"),
        {"loader": "map"},
    ),
    ("a list is a list of batches; there one of loaders", lambda c: c["loader"] == "list", {"loader": "map"}),
    ("the same of the second loader", lambda c: c["second"] not in ("map", "stream"), {"second": "map"}),
    ("a validation's schedulers are not there", lambda c: "validation" in str(c["scheduler"]), {"scheduler": "step"}),
    (
        "interval='step' with a frequency counts the steps of the run; there the batches of the epoch",
        lambda c: c["scheduler"] in ("step", "cycle"),
        {"frequency": 1},
    ),
    (
        "the last accumulation window of an epoch is divided by its own length, so metrics differ; there by the full one's",
        lambda c: c["window"] > 1 and by_metric(c),
        {"window": 1},
    ),
    (
        "a validation that falls due within a window (a manual one, too) is made at its end; there within it",
        lambda c: c["window"] > 1 and within_epochs(c),
        {"window": 1},
    ),
    (
        "a step left out for an inf in 16-mixed leaves out the scheduler's; there it does not",
        lambda c: c["precision"] == "16-mixed",
        {"precision": "bf16-mixed"},
    ),
    (
        "val_check_interval=1 is each batch; there its callbacks take it for 1.0, each epoch",
        lambda c: c["validate"] == 1,
        {"validate": 2},
    ),
    (
        "an epoch of a stream without a length is validated at its end, too; there only without val_check_interval",
        lambda c: "stream" in c["loader"] + str(c["mode"] and c["second"]) and within_epochs(c) and not c["across"],
        {"loader": "map", "second": "map"},
    ),
    (
        "epoch-wise schedulers step at the end of a stream that is shorter than limit_train_batches; there they do not",
        lambda c: "stream" in c["loader"] + str(c["mode"] and c["second"]) and isinstance(c["limit_train"], int),
        {"limit_train": None},
    ),
    (
        "an epoch over a min_size combination with a stream is validated at its end; there nobody sees that it ends",
        lambda c: c["mode"] == "min_size" and "stream" in c["loader"] + str(c["second"]),
        {"loader": "map", "second": "map"},
    ),
    (
        "a stop within an epoch ends the run there once min_steps are made; there, with min_steps, at the epoch's end",
        lambda c: c["min_steps"] is not None and within_epochs(c) and bool(c["stop"] or c["user_stop"]),
        {"min_steps": None},
    ),
    (
        "a batch of unlike sizes weighs in a metric's mean as its largest tensor; there as its first",
        lambda c: bool(c["mode"]) and by_metric(c),
        {"mode": None},
    ),
    (
        "early stopping by an epoch's loss sees that of the epoch after its last validation; there that of the one before",
        lambda c: c["stop"] == "loss_epoch" and within_epochs(c),
        {"stop": "val_loss", "every_epochs": 1, "across": False},
    ),
    (
        "an epoch in which manual optimization has not stepped is saved; there it is not",
        lambda c: c["manual"],
        {"window": 1},
    ),
    (
        "a checkpoint by steps counts among the best once its own weights are scored; there by the score of earlier weights",
        lambda c: c["best"] == "steps",
        {"best": "epochs"},
    ),
    (
        "save_last keeps the newest under its own name; there as last.ckpt",
        lambda c: c["best"] == "last",
        {"best": "epochs"},
    ),
    ("the time at which something is due is that of two machines", lambda c: c["save"] == "time", {"save": "steps"}),
    (
        "the same of validations by time",
        lambda c: c["validate"] in ("always", "never"),
        {"validate": None, "across": False},
    ),
    (
        "weights that are not finite, as LBFGS makes them of clipped gradients, are not saved; there they are",
        lambda c: c["optimizer"] == "lbfgs",
        {"clip": None},
    ),
    (
        "the moment at which max_time is over is that of two machines",
        lambda c: c["max_time"] == "moment",
        {"max_time": "day"},
    ),
]


def draw(random: random.Random) -> Config:
    """Draw a run."""
    return run_config.draw(random)


def simplified(config: Config) -> Config:
    """Return the configuration without what is intended to differ."""
    config = run_config.settled(config)
    before: Config = {}
    while before != config:  # what one row gives may fall under another
        before = config
        for _reason, holds, instead in MEANT:
            if holds(config):
                config = run_config.settled({**config, **instead})
    return config


def moments(package: Any) -> Any:
    """Return a callback of a package that records what happens when."""

    class Moments(package.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.events: list[list[Any]] = []

        def _note(self, trainer: Any, what: str, *values: Any) -> None:
            if not trainer.sanity_checking:
                self.events.append([what, trainer.current_epoch, trainer.global_step, *values])

        def on_train_start(self, trainer: Any, module: Any) -> None:
            for config in trainer.lr_scheduler_configs:
                self._watch(trainer, config.scheduler)

        def _watch(self, trainer: Any, scheduler: Any) -> None:
            base, note = type(scheduler), self._note

            class Noted(base):  # type: ignore[misc,valid-type]
                def step(self, *arguments: Any, **options: Any) -> None:
                    super().step(*arguments, **options)
                    note(trainer, "scheduler", [round(each["lr"], 9) for each in self.optimizer.param_groups])

            scheduler.__class__ = Noted

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self._note(trainer, "batch", batch_idx)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            self._note(trainer, "validation")

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            self._note(trainer, "epoch end")

    return Moments()


def run(config: Config, package: Any, folder: Path) -> dict[str, Any]:
    """Run the program with a package instead of trainwright and return its events and checkpoints.

    Intended differences: trainwright also saves the end of a run, as `end-step=` or, within an epoch that was validated there,
    as a version of that name. save_last keeps the newest under its own name; Lightning writes `last.ckpt`.
    """
    names: dict[str, Any] = {"__name__": "program", "tw": package}
    text = program(config).replace("import trainwright as tw\n", "")
    exec(compile(text, "program", "exec"), names)
    noted = moments(package)
    with open(folder / "said", "a") as said, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        trainer, _ = names["run"](folder / package.__name__, None, [noted])
    files = {
        name: sorted(path.name for path in (folder / package.__name__ / name).glob("*.ckpt"))
        for name in ("all", "best")
    }
    return {"events": in_order(noted.events), "step": trainer.global_step} | {
        name: sorted({re.sub(r"-v\d+", "", each) for each in found if not each.startswith(("end-", "last"))})
        for name, found in files.items()
    }


def in_order(events: list[list[Any]]) -> list[list[Any]]:
    """Return the events with those of each step in a canonical order.

    Intended difference: epoch-wise schedulers step after the last batch's on_train_batch_end, in Lightning before it.
    """
    order = {"batch": 0, "scheduler": 1, "validation": 2, "epoch end": 3}
    return sorted(events, key=lambda event: (event[1], event[2], order[event[0]]))


def own_parts() -> Any:
    """Return trainwright without fused optimizers, like Lightning: in 16 bits they round differently."""
    return SimpleNamespace(
        **{name: getattr(tw, name) for name in vars(peers()) if name != "Trainer"},
        Trainer=partial(tw.Trainer, fused_optimizers=False),
    )


def peers() -> Any:
    """Return Lightning's parts under the names that the program uses."""
    return SimpleNamespace(
        __name__="lightning",
        Module=lightning.LightningModule,
        DataModule=lightning.LightningDataModule,
        Callback=lightning.Callback,
        Trainer=lightning.Trainer,
        seed_everything=lightning.seed_everything,
        CSVLogger=CSVLogger,
        ModelCheckpoint=ModelCheckpoint,
        EarlyStopping=EarlyStopping,
        LearningRateMonitor=LearningRateMonitor,
        CombinedLoader=CombinedLoader,
    )


def differences(config: Config, folder: Path) -> list[str]:
    config = simplified(config)
    try:
        own = run(config, own_parts(), folder)
    except (ValueError, TypeError) as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    other = run(config, peers(), folder)
    if config["max_steps"]:
        for each in (own, other):
            without_left_epoch(each)
    found = []
    for aspect in own:
        if own[aspect] != other[aspect]:
            found.append(f"{aspect}: {_first(own[aspect], other[aspect])}")
    return found


def without_left_epoch(run: dict[str, Any]) -> None:
    """Remove what follows the last batch of a run that max_steps has ended.

    Intended difference: Lightning validates a run that stops within an epoch, trainwright does not.
    """
    last = max((n for n, each in enumerate(run["events"]) if each[0] == "batch"), default=-1)
    run["events"] = run["events"][: last + 1]
    run["best"] = []
    run["all"] = [name for name in run["all"] if not name.endswith(f"step={run['step']}.ckpt")]


def _first(own: Any, other: Any) -> str:
    if not isinstance(own, list):
        return f"{own}, with Lightning {other}"
    at = next((n for n, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), min(len(own), len(other)))
    return f"{len(own)}, with Lightning {len(other)}; at {at} {own[at : at + 3]}, with Lightning {other[at : at + 3]}"

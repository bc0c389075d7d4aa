"""Resume: a random run, and the same run from five of its checkpoints, which must end bitwise like the uninterrupted one.

Compared are weights, the optimizers' state, rates, counters, metrics, the generators after the run, early stopping, the
schedulers, each batch and validation with its data, in order, and the rows of metrics.csv. A checkpoint kept for its score must
hold the weights that get this score. run_config.py defines the configurations.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

import trainwright as tw
from fuzz import run_config
from fuzz.data import Samples
from fuzz.kind import Config, Refused
from fuzz.program import program
from fuzz.record import Record, Recorder, compare, record
from fuzz.run_script import compared

NAME, PROCESSES, LIMIT = "resume", (1,), 120.0
SIMPLEST: dict[str, list[Any]] = {**run_config.SIMPLEST, "at": [[0.0], [0.5], [0.99]]}


def draw(random: random.Random) -> Config:
    """Draw a run, and which of its checkpoints to resume from, as fractions from 0 to 1."""
    return {**run_config.draw(random), "at": sorted(random.randrange(1000) / 1000 for _ in range(5))}


def loaded(config: Config) -> dict[str, Any]:
    """Return the namespace of the configuration's program."""
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(program(config), "program", "exec"), names)
    return names


def run(names: dict[str, Any], config: Config, folder: Path, ckpt_path: str | None = None, *callbacks: Any) -> Record:
    """Run the program, from a checkpoint or from the start, and return its record."""
    recorder = Recorder(validations=config["validate"] not in ("always", "never"))
    try:
        trainer, module = names["run"](folder, ckpt_path, [recorder, *callbacks])
    except (ValueError, TypeError, RuntimeError, tw.TrainwrightError) as error:
        if ckpt_path is None and not any(each[0] == "batch" for each in recorder.events):
            raise Refused(f"{type(error).__name__}: {error}") from error
        raise
    return record(trainer, module, recorder, folder)


def checkpoints(whole: Record) -> list[Path]:
    """Return the checkpoints that a run can resume from, in the order of their steps."""
    paths = [path for name in ("all", "own") for path in (whole["path"] / name).glob("*.ckpt")]
    return sorted(
        (path for path in paths if not path.name.startswith("end-")), key=lambda path: (steps(path), str(path))
    )


def steps(path: Path) -> int:
    """Return the number of steps in a checkpoint's name."""
    return int(path.stem.rpartition("=")[2].partition("-")[0])


def differences(config: Config, folder: Path) -> list[str]:
    names = loaded(config)
    whole = run(names, config, folder / "whole")
    found = scores(names, config, whole)
    paths = checkpoints(whole)
    chosen = dict.fromkeys(paths[int(at * len(paths))] for at in config["at"]) if paths else {}
    for number, path in enumerate(chosen):
        part = run(names, config, folder / f"part-{number}", str(path))
        found += [f"{each} from {path.relative_to(folder)}" for each in compare(whole, part, goes_on=False)]
    return found


def scores(names: dict[str, Any], config: Config, whole: Record) -> list[str]:
    """Return which of the kept checkpoints do not hold the weights that got their score."""
    found = []
    settled = run_config.settled(config)
    for scored in whole["scores"]:
        for name, score in scored.items():
            path = whole["path"] / "best" / name
            trainer = tw.Trainer(
                accelerator="cpu",
                precision=settled["precision"],
                limit_val_batches=settled["limit_val"],
                enable_progress_bar=False,
                logger=False,
                enable_checkpointing=False,
            )
            loader = DataLoader(Samples(5), batch_size=2)
            (results,) = trainer.validate(names["Net"](), loader, ckpt_path=str(path), verbose=False)
            got = results.get("val_loss_epoch", results.get("val_loss"))  # exact, unlike callback_metrics
            if got != score and not got != got != score:
                found.append(f"score: {score}, but its weights get {got} in {name}")
    return found


def script(config: Config, found: list[str]) -> str:
    """Return the program, the run from the first checkpoint that differs, and the comparison."""
    paths = [each.rpartition(" from ")[2] for each in found if " from whole/" in each]
    return program(config, compared(found, paths[0] if paths else None))

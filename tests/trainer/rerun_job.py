"""A script with ckpt_path="auto" that starts again in new processes until it has finished.

`python rerun_job.py FOLDER SEEDS` runs it without interruption. Then it runs the script in a folder per seed and kills
it at random places. The test compares the folders. The processes are forked, so that torch is imported once.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from deadlines import wait_until
from small import ACCELERATOR, Classifier, make_loader, weights

import trainwright as tw

MOMENTS = ("on_train_batch_start", "on_train_batch_end", "on_validation_end", "on_train_epoch_end", "on_train_start")


class Killed(tw.Callback):
    """Ends the process as kill -9 does, at the n-th hook of this run."""

    def __init__(self, after: int) -> None:
        self.left = after

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


for name in MOMENTS:
    setattr(Killed, name, lambda self, *args, **kwargs: self.count())


class KilledLate(Killed):
    """The same after the checkpoint of that moment is saved."""

    priority = -10


def script(after: int = 0, late: bool = False) -> None:
    """The user's script."""
    tw.seed_everything(5)
    module = Classifier(dropout=0.3)
    saving = tw.ModelCheckpoint(every_n_train_steps=4)
    killed = KilledLate(after) if late else Killed(after)
    trainer = tw.Trainer(
        accelerator=ACCELERATOR,
        max_epochs=3,
        log_every_n_steps=2,
        val_check_interval=6,
        callbacks=[
            saving,
            tw.ModelCheckpoint(save_top_k=-1, filename="end-{epoch}", save_on_train_epoch_end=True),
            killed,
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, make_loader(44, 4, shuffle=True), make_loader(8), ckpt_path="auto")
    trainer.test(module, make_loader(8), verbose=False)
    torch.save(weights(module), "weights.pt")


def attempt(folder: Path, *args: Any) -> int:
    """Run the script in a new process and return its exit code."""
    folder.mkdir(exist_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            os.chdir(folder)
            script(*args)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def rerun(folder: Path, seed: int) -> int:
    """Run the script until it finishes, with kills in between, and return the number of kills."""
    draw = random.Random(seed)
    kills = 0
    while (code := attempt(folder, draw.randint(3, 25), draw.random() < 0.5)) != 0:
        assert code == -signal.SIGKILL, code
        kills += 1
        assert kills < 60
    return kills


def together(folder: Path) -> list[list[int]]:
    """Start the same script twice, 0 to 200 ms apart, several times. Return the exit codes."""
    folder.mkdir()
    endings = []
    for number, pause in enumerate((0.0, 0.0, 0.05, 0.2)):
        pids = []
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                os.chdir(folder)
                os._exit(fixed(number))
            pids.append(pid)
            time.sleep(pause)
        endings.append(sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))
    return endings


def fixed(number: int) -> int:
    """Train in the shared folder. Return 3 if the run was rejected before it wrote anything."""

    class Waits(tw.Callback):
        """Goes on training until the other one has been refused."""

        def on_train_batch_start(self, *args: Any) -> None:
            wait_until(Path(f"refused-{number}").exists, 60.0)

    trainer = tw.Trainer(
        accelerator=ACCELERATOR,
        max_epochs=1,
        callbacks=[tw.ModelCheckpoint("kept", filename=f"run-{number}"), Waits()],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Classifier(), make_loader(44, 4))
    except tw.CheckpointError as error:
        assert trainer.logger is not None
        assert not trainer.logger.has_version, "a folder was claimed"
        Path(f"refused-{number}").write_text(str(error))
        return 3
    return 0


def main(folder: Path, seeds: int) -> None:
    torch.set_num_threads(1)
    assert attempt(folder / "whole") == 0
    kills = [rerun(folder / f"killed-{seed}", seed) for seed in range(seeds)]
    again = attempt(folder / "whole")  # a finished run ends at once
    (folder / "told.json").write_text(
        json.dumps({"kills": kills, "again": again, "together": together(folder / "two")})
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""Kill one of two processes in the middle of an epoch, start the same command again, and compare with a run without the kill.

python examples/faults/killed.py
"""

import os
import re
import signal
import sys
from pathlib import Path

from story import FOLDER, SETTINGS, Classifier, empty_folder, end, samples, start
from torch.utils.data import DataLoader

import trainwright as tw


class Kill(tw.Callback):
    """Kills rank 1 after a step, but only in the first start."""

    def __init__(self, step: int, mark: Path):
        self.step, self.mark = step, mark

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step and trainer.global_rank == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, step: int):
    tw.seed_everything(0)
    module, loader = Classifier(), DataLoader(samples(320), batch_size=8, shuffle=True)
    saves = tw.ModelCheckpoint(folder / "checkpoints", every_n_train_steps=4)
    kill = Kill(step, folder / "killed")
    trainer = tw.Trainer(devices=2, max_epochs=3, callbacks=[saves, kill], default_root_dir=folder, **SETTINGS)
    trainer.fit(module, loader, ckpt_path="auto")
    module.export(folder / "weights.safetensors")


def main():
    empty_folder()
    start(FOLDER / "whole", 0)
    print("an uninterrupted run on two processes: 3 epochs, 60 steps")
    for number in ("first", "second"):
        run = start(FOLDER / "cut", 30)
        print(f"{number} start of the other run: exit code {run.returncode}")
        print(
            *(
                f"  {line}"
                for line in (run.stdout + run.stderr).splitlines()
                if re.match("trainwright:|resuming", line)
            ),
            sep="\n",
        )
    files = ("weights.safetensors", "trainwright_logs/version_0/metrics.csv")
    equal = [(FOLDER / "cut" / file).read_bytes() == (FOLDER / "whole" / file).read_bytes() for file in files]
    for file, is_equal in zip(files, equal, strict=True):
        print(f"{Path(file).name}: {'the same bytes' if is_equal else 'other bytes'} in both runs")
    end(run.returncode == 0 and all(equal), "after a SIGKILL the same command ends with the same bits")


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2])) if sys.argv[1:] else main()

"""Save a run of two processes in the middle of an epoch, resume it on one, two and three, and compare.

python examples/faults/other_world_size.py
"""

import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file
from story import FOLDER, SETTINGS, Classifier, empty_folder, end, samples, start
from torch.utils.data import DataLoader

import trainwright as tw


class Recorded(Classifier):
    """Exports the weights with which it starts, and records the samples of every step of every process."""

    def on_train_start(self):
        self.export(Path(self.trainer.default_root_dir, f"start-{self.trainer.global_step}.safetensors"))

    def training_step(self, batch, batch_idx):
        with open(f"{self.trainer.default_root_dir}/samples-{self.trainer.global_rank}.txt", "a") as file:
            print(self.trainer.global_step, *batch[2].tolist(), file=file)
        return super().training_step(batch, batch_idx)


def train(folder: Path, devices: int, max_steps: int):
    tw.seed_everything(0)
    module = Recorded(dropout=0.0)  # the processes draw different random numbers for a dropout
    loader = DataLoader(samples(300), batch_size=12 // devices, shuffle=True)  # 25 steps an epoch, on any number
    saves = tw.ModelCheckpoint(folder / "checkpoints")
    settings = {"devices": devices, "max_epochs": -1, "max_steps": max_steps, "callbacks": saves}
    tw.Trainer(default_root_dir=folder, **settings, **SETTINGS).fit(module, loader, ckpt_path="auto")
    module.export(folder / f"end-{max_steps}.safetensors")


def steps_of(folder: Path) -> dict[int, list[int]]:
    """Return the samples of every step, over all processes."""
    steps: dict[int, list[int]] = {}
    for line in "".join(path.read_text() for path in folder.glob("samples-*.txt")).splitlines():
        step, *numbers = map(int, line.split())
        steps.setdefault(step, []).extend(numbers)
    return {step: sorted(numbers) for step, numbers in steps.items()}


def main():
    saved = empty_folder() / "saved"
    start(saved, 2, 35)
    print("two processes train an epoch of 25 steps and 10 of the next, and copies of this run complete that epoch")
    weights, samples_of, is_kept = {}, {}, True
    for devices in (2, 1, 3):
        folder = shutil.copytree(saved, FOLDER / f"on-{devices}")
        start(folder, devices, 50)
        weights[devices], samples_of[devices] = load_file(folder / "end-50.safetensors"), steps_of(folder)
        is_same = samples_of[devices] == samples_of[2]
        is_loaded = (folder / "start-35.safetensors").read_bytes() == (saved / "end-35.safetensors").read_bytes()
        difference = max(float((weights[devices][name] - weights[2][name]).abs().max()) for name in weights[2])
        print(f"on {devices}: weights {'exact' if is_loaded else 'other'} at the resume, in every step the "
              f"{'same' if is_same else 'other'} samples, at the end a difference of {difference:.0e}")  # fmt: skip
        is_kept = is_kept and is_loaded and is_same and difference <= (1e-6 if devices != 2 else 0.0)
    epoch = sorted(number for step in range(25, 50) for number in samples_of[2][step])
    end(is_kept and epoch == list(range(300)), "the epoch has every sample once, on any number of processes")


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])) if sys.argv[1:] else main()

"""Train on two processes, resume from a checkpoint within an epoch on one and on three, and compare.

python examples/faults/other_world_size.py
"""

import sys
from pathlib import Path

from safetensors.torch import load_file
from story import FOLDER, SETTINGS, Classifier, empty_folder, end, samples, start
from torch.utils.data import DataLoader

import trainwright as tw


class Recorded(Classifier):
    """Exports the weights with which it starts, and records the samples of every step of every process."""

    def on_train_start(self):
        self.export(Path(self.trainer.default_root_dir, "start.safetensors"))

    def training_step(self, batch, batch_idx):
        with open(f"{self.trainer.default_root_dir}/samples-{self.trainer.global_rank}.txt", "a") as file:
            print(self.trainer.global_step, *batch[2].tolist(), file=file)
        return super().training_step(batch, batch_idx)


def train(devices: int, checkpoint: str | None = None):
    tw.seed_everything(0)
    folder = FOLDER / f"on-{devices}"
    module = Recorded(dropout=0.0)  # the random numbers of a dropout would differ with the number of processes
    loader = DataLoader(samples(300), batch_size=12 // devices, shuffle=True)  # 25 steps an epoch on any number
    saves = tw.ModelCheckpoint(folder / "checkpoints", every_n_train_steps=35, save_top_k=-1)
    trainer = tw.Trainer(devices=devices, max_epochs=2, callbacks=saves, default_root_dir=folder, **SETTINGS)
    trainer.fit(module, loader, ckpt_path=checkpoint)
    module.export(folder / "end.safetensors")


def results_of(devices: int) -> tuple[dict, dict[int, list[int]]]:
    """Return the weights at the end, and the samples of every step from 25 on, over all processes."""
    steps: dict[int, list[int]] = {}
    for path in (FOLDER / f"on-{devices}").glob("samples-*.txt"):
        for step, *numbers in (map(int, line.split()) for line in path.read_text().splitlines()):
            steps[step] = sorted(steps.get(step, []) + numbers)
    return load_file(FOLDER / f"on-{devices}/end.safetensors"), {step: steps[step] for step in steps if step >= 25}


def main():
    empty_folder()
    start(2)
    weights, steps = results_of(2)
    is_kept = sorted(number for step in steps.values() for number in step) == list(range(300))
    print(f"two processes: 2 epochs of 25 steps, {'every sample once' if is_kept else 'samples missing'} in the second")
    [checkpoint] = FOLDER.glob("on-2/checkpoints/*step=35.ckpt")
    saved = Classifier.load_from_checkpoint(checkpoint).state_dict()
    for devices in (1, 3):
        start(devices, checkpoint)
        loaded, (ended, trained) = load_file(FOLDER / f"on-{devices}/start.safetensors"), results_of(devices)
        is_exact = all(loaded[name].equal(saved[name]) for name in saved)
        is_same = trained == {step: steps[step] for step in range(35, 50)}
        difference = max(float((ended[name] - weights[name]).abs().max()) for name in weights)
        start_weights, step_samples = ("the same" if is_equal else "other" for is_equal in (is_exact, is_same))
        print(f"resumed at step 35 on {devices}: {start_weights} weights, {step_samples} samples in every step")
        print(f"  largest difference of a weight at the end: {difference:.0e}")
        is_kept = is_kept and is_exact and is_same and difference < 1e-6
    end(is_kept, "on another number of processes every step has the same samples, and the weights differ by rounding")


if __name__ == "__main__":
    train(int(sys.argv[1]), *sys.argv[2:]) if sys.argv[1:] else main()

"""Test and predict 103 samples on one process and on three, and compare.

python examples/faults/uneven_evaluation.py
"""

import json
import sys

import torch
from story import FOLDER, SETTINGS, Classifier, empty_folder, end, samples, start
from torch.utils.data import DataLoader, DistributedSampler

import trainwright as tw


class Tested(Classifier):
    def test_step(self, batch, batch_idx):
        inputs, labels, _ = batch
        self.log("accuracy", (self.net(inputs).argmax(1) == labels).float().mean())

    def predict_step(self, batch, batch_idx):
        inputs, labels, numbers = batch
        return torch.stack([numbers, self.net(inputs).argmax(1) == labels], 1)


def evaluate(devices: int) -> dict:
    tw.seed_everything(3)
    module, loader = Tested(), DataLoader(samples(103), batch_size=8)
    trainer = tw.Trainer(devices=devices, default_root_dir=FOLDER, logger=False, **SETTINGS)
    [metrics] = trainer.test(module, loader, verbose=False)
    rows = torch.cat(trainer.predict(module, loader)).tolist()
    if trainer.is_global_zero:
        text = json.dumps({"accuracy": metrics["accuracy"], "rows": rows})
        (FOLDER / f"on-{devices}.json").write_text(text)


def main():
    empty_folder()
    runs = {}
    for devices in (1, 3):
        start(devices)
        runs[devices] = json.loads((FOLDER / f"on-{devices}.json").read_text())
        print(f"accuracy on {devices} process{'es' * (devices > 1)}: {runs[devices]['accuracy']!r}")
    numbers, correct = zip(*runs[3]["rows"], strict=True)
    shares = [list(DistributedSampler(correct, 3, rank, shuffle=False)) for rank in range(3)]
    padded = [correct[number] for share in shares for number in share]
    print(f"torch's DistributedSampler scores {len(padded)} samples: {sum(padded) / len(padded)!r}")
    is_ordered = list(numbers) == list(range(103))
    print(f"predict on three processes: {len(numbers)} outputs, {'in order' if is_ordered else 'not in order'}")
    is_kept = is_ordered and runs[1] == runs[3] and abs(runs[3]["accuracy"] - sum(correct) / 103) < 1e-6
    end(is_kept, "103 samples on three processes are scored and predicted once, in order")


if __name__ == "__main__":
    evaluate(int(sys.argv[1])) if sys.argv[1:] else main()

"""Accumulate over windows of four batches, of which the last has two, and compare its gradient with a plain loop's.

python examples/faults/short_window.py
"""

import torch
from story import SETTINGS, Classifier, empty_folder, end, samples
from torch import nn
from torch.utils.data import DataLoader

import trainwright as tw

BATCHES = list(DataLoader(samples(80), batch_size=8))  # 10 batches: windows of 4, 4 and 2


class Compared(Classifier):
    """Keeps the gradient of every optimizer step, and that of a plain loop over the same batches and weights."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.windows = [BATCHES[0:4], BATCHES[4:8], BATCHES[8:10]]
        self.differences, self.ratios = [], []

    def on_before_optimizer_step(self, optimizer):
        window = self.windows[len(self.ratios)]
        losses = [nn.functional.cross_entropy(self.net(inputs), labels) for inputs, labels, _ in window]
        mean = torch.cat([part.flatten() for part in torch.autograd.grad(sum(losses) / len(window), self.parameters())])
        gradient = torch.cat([parameter.grad.flatten() for parameter in self.parameters()])
        self.differences.append(float((gradient - mean).abs().max()))
        self.ratios.append(float(gradient.norm() / mean.norm()))


def main():
    module = Compared()
    trainer = tw.Trainer(max_epochs=1, accumulate_grad_batches=4, default_root_dir=empty_folder(), **SETTINGS)
    trainer.fit(module, DataLoader(samples(80), batch_size=8))
    for window, ratio, difference in zip(module.windows, module.ratios, module.differences, strict=True):
        print(
            f"window of {len(window)} batches: {ratio:.4f} of the plain loop's gradient, largest difference {difference:.0e}"
        )
    print("a division by 4 in every window gives 0.5000 in the last one")
    is_kept = len(module.ratios) == 3 and max(module.differences) < 1e-6
    end(is_kept, "a shorter last window has the gradient of its own mean")


if __name__ == "__main__":
    tw.seed_everything(0)
    main()

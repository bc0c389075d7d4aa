"""Trial: the small training of `trainwright test`, as each of its processes runs it.

`python -m trainwright.tools.trial STRATEGY OUT` writes the weights, gathered on rank 0, to a safetensors file.
"""

from __future__ import annotations

import argparse

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Accelerator, gather_module

SAMPLES, BATCH, WIDTH = 48, 8, 16
"""BATCH is that of all processes together."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy")
    parser.add_argument("out")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--alone", action="store_true", help="this process is the whole job")
    options = parser.parse_args()
    accelerator = Accelerator(
        strategy=options.strategy, cpu=options.cpu, devices=1 if options.alone else "auto", precision="32-true"
    )
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    inputs = torch.randn(SAMPLES, WIDTH)
    data = TensorDataset(inputs, inputs[:, :4].argmax(1))
    loader = DataLoader(data, batch_size=BATCH // accelerator.num_processes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch, targets in loader:
        loss = nn.functional.cross_entropy(prepared(batch), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    whole = gather_module(accelerator.unwrap_model(prepared))
    if whole is not None:
        save_file({name: each.contiguous() for name, each in whole.state_dict().items()}, options.out)
    accelerator.engine.close()


if __name__ == "__main__":
    main()

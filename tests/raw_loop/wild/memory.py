"""A batch size that fits in memory. With a smaller one, more batches are accumulated, so that a step sees as many samples."""

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed
from torch.utils.data import DataLoader, TensorDataset

ROOM = 20


def forward(model, inputs):
    if len(inputs) > ROOM:
        raise RuntimeError(f"CUDA out of memory. Tried to allocate room for {len(inputs)} samples.")
    return model(inputs).squeeze(-1)


def main():
    accelerator = Accelerator(cpu=True)
    observed_batch_size = 64
    tries = []

    def halve():
        return tries[-1] // 2

    @find_executable_batch_size(starting_batch_size=observed_batch_size, reduce_batch_size_fn=halve)
    def inner_training_loop(batch_size):
        accelerator.free_memory()
        tries.append(batch_size)
        accelerator.gradient_accumulation_steps = observed_batch_size // batch_size
        set_seed(13)
        features = torch.randn(256, 5)
        dataset = TensorDataset(features, features.sum(dim=1).sin())
        train_dataloader = DataLoader(dataset, batch_size=batch_size)
        model = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
        for epoch in range(3):
            total_loss, steps = 0, 0
            for inputs, targets in train_dataloader:
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.mse_loss(forward(model, inputs), targets)
                    total_loss += loss.detach()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    steps += accelerator.sync_gradients
            mean_loss = accelerator.reduce(total_loss, reduction="mean").item() / len(train_dataloader)
            accelerator.print(f"epoch {epoch} train_loss: {mean_loss:.6f}")
            accelerator.print(f"epoch {epoch} steps: {steps}")

    inner_training_loop()

    @find_executable_batch_size(starting_batch_size=32)
    def evaluate(batch_size):
        forward(torch.nn.Linear(5, 1), torch.ones(batch_size, 5))
        return batch_size

    accelerator.print(f"batch_size: {tries[-1]}")
    accelerator.print(f"tries: {len(tries)}")
    accelerator.print(f"eval_batch_size: {evaluate()}")


if __name__ == "__main__":
    main()

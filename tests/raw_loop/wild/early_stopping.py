"""Early stopping: a process that has seen no improvement for a while sets the trigger, and all stop."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


class EarlyStoppingCallback:
    def __init__(self, min_delta=0.0, patience=2):
        self.min_delta, self.patience = min_delta, patience
        self.counter, self.lowest_loss = 0, float("inf")

    def check_early_stopping(self, eval_loss):
        delta = self.lowest_loss - eval_loss
        if delta >= self.min_delta:
            self.lowest_loss, self.counter = eval_loss, 0
            return False
        self.counter += 1
        return self.counter >= self.patience


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(3)
    centers = torch.tensor([[1.5, 0.0], [-1.5, 0.0]])
    labels = torch.arange(160) % 2
    points = centers[labels] + torch.randn(160, 2)
    train_dataloader = DataLoader(TensorDataset(points[:128], labels[:128]), batch_size=16)
    eval_dataloader = DataLoader(TensorDataset(points[128:], labels[128:]), batch_size=16)
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    callback = EarlyStoppingCallback(min_delta=1e-4, patience=2)
    for epoch in range(20):
        model.train()
        for inputs, targets in train_dataloader:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        losses = []
        with torch.inference_mode():
            for inputs, targets in eval_dataloader:
                each = torch.nn.functional.cross_entropy(model(inputs), targets, reduction="none")
                losses.append(accelerator.gather_for_metrics(each))
        eval_loss = torch.cat(losses).mean().item()
        accelerator.print(f"epoch {epoch} eval_loss: {eval_loss:.6f}")
        if accelerator.is_last_process and callback.check_early_stopping(eval_loss):
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    accelerator.print(f"epochs: {epoch + 1}")


if __name__ == "__main__":
    main()

"""Tracking: settings, losses and an accuracy in TensorBoard's files."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main():
    config = {"lr": 0.05, "num_epochs": 4, "batch_size": 20, "optimizer": "sgd"}
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir="runs")
    set_seed(5)
    if accelerator.is_main_process:
        accelerator.init_trackers("wild", config=config)
    generator = torch.Generator().manual_seed(5)
    labels = torch.arange(240) % 3
    points = torch.eye(3)[labels] * 3 + torch.randn(240, 3, generator=generator)
    dataset = TensorDataset(points, labels)
    train_dataloader = DataLoader(dataset, batch_size=config["batch_size"])
    eval_dataloader = DataLoader(dataset, batch_size=100)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    for epoch in range(config["num_epochs"]):
        model.train()
        total_loss = 0
        for inputs, targets in train_dataloader:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        accurate, num_elems = 0, 0
        for inputs, targets in eval_dataloader:
            with torch.no_grad():
                predictions = model(inputs).argmax(dim=-1)
            accurate_preds = accelerator.gather_for_metrics(predictions == targets)
            num_elems += accurate_preds.shape[0]
            accurate += accurate_preds.long().sum()
        eval_metric = accurate.item() / num_elems
        accelerator.print(f"epoch {epoch} seen: {num_elems}")
        accelerator.log(
            {"accuracy": 100 * eval_metric, "train_loss": total_loss.item() / len(train_dataloader), "epoch": epoch},
            step=epoch,
        )
    accelerator.print(f"accuracy: {eval_metric:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

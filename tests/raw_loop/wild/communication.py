"""Less communication: a hook that halves the bytes of gradients."""

import argparse

import torch
from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def training_function(args):
    ddp_kwargs = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType(args.ddp_comm_hook))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ddp_kwargs])
    set_seed(17)
    features = torch.randn(192, 6)
    dataset = TensorDataset(features, (features[:, 0] * features[:, 1] > 0).long())
    train_dataloader = DataLoader(dataset, batch_size=8)
    model = torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.ReLU(), torch.nn.Linear(24, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    for epoch in range(3):
        model.train()
        total_loss = 0
        for inputs, targets in train_dataloader:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            total_loss += loss.detach()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        mean_loss = accelerator.reduce(total_loss, reduction="mean").item() / len(train_dataloader)
        norm = sum(parameter.detach().double().square().sum().item() for parameter in model.parameters())
        accelerator.print(f"{args.name} epoch {epoch} train_loss: {mean_loss:.6f}")
        accelerator.print(f"{args.name} epoch {epoch} norm: {norm:.6f}")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", type=str, required=True)
    parser.add_argument("--ddp_comm_hook", type=str, default="no", choices=["no", "fp16", "bf16"])
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()

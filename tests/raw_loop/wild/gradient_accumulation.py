"""Gradient accumulation with clipping and a count of steps where sync_gradients says that a window ends."""

import argparse
import math

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--max_train_steps", type=int, default=9)
    parser.add_argument("--per_device_batch_size", type=int, default=4)
    parser.add_argument("--mixed_precision", type=str, default="no")
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        project_config=ProjectConfiguration(project_dir="out", logging_dir="out/logs"),
        dataloader_config=DataLoaderConfiguration(split_batches=False),
    )
    set_seed(11)
    if accelerator.is_main_process:
        print(f"processes: {accelerator.num_processes}")
        print(f"several: {accelerator.distributed_type != DistributedType.NO}")
    inputs = torch.randn(96, 10)
    targets = (inputs[:, :3].sum(dim=1) > 0).long()
    with accelerator.main_process_first():
        dataset = TensorDataset(inputs, targets)
    train_dataloader = DataLoader(dataset, batch_size=args.per_device_batch_size)
    model = torch.nn.Sequential(torch.nn.Linear(10, 24), torch.nn.ReLU(), torch.nn.Linear(24, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    num_epochs = math.ceil(args.max_train_steps / steps_per_epoch)

    completed_steps, synced = 0, 0
    for _ in range(num_epochs):
        model.train()
        train_loss = 0.0
        for features, labels in train_dataloader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(features), labels)
                average = accelerator.gather(loss.repeat(args.per_device_batch_size)).mean()
                train_loss += average.item() / args.gradient_accumulation_steps
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed_steps += 1
                synced += 1
                accelerator.print(f"step {completed_steps} loss: {train_loss:.6f}")
                accelerator.print(f"step {completed_steps} norm: {float(norm):.6f}")
                train_loss = 0.0
            if completed_steps >= args.max_train_steps:
                break
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    accelerator.print(f"completed_steps: {completed_steps}")
    accelerator.print(f"weights: {sum(p.detach().double().abs().sum().item() for p in unwrapped.parameters()):.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

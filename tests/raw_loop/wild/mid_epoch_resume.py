"""Checkpoints by steps, and a resume in the middle of an epoch with skip_first_batches."""

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=str, default="checkpoints")
    parser.add_argument("--checkpointing_steps", type=int, default=None)
    parser.add_argument("--stop_after", type=int, default=None)
    parser.add_argument("--resume_from_checkpoint", type=str, default=None)
    parser.add_argument("--num_epochs", type=int, default=2)
    args = parser.parse_args()

    # The schedule counts the loop's calls, on any number of processes.
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    set_seed(7)
    features = torch.randn(120, 6)
    dataset = TensorDataset(features, (features @ torch.randn(6, 1)).squeeze(-1))
    train_dataloader = DataLoader(dataset, batch_size=10, shuffle=False)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=24)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )

    overall_step, starting_epoch, resume_step = 0, 0, None
    if args.resume_from_checkpoint is not None:
        accelerator.print(f"Resumed from checkpoint: {os.path.basename(args.resume_from_checkpoint)}")
        accelerator.load_state(args.resume_from_checkpoint)
        resume_step = int(os.path.basename(args.resume_from_checkpoint).replace("step_", ""))
        starting_epoch = resume_step // len(train_dataloader)
        resume_step -= starting_epoch * len(train_dataloader)

    seen = 0
    for epoch in range(starting_epoch, args.num_epochs):
        model.train()
        if resume_step is not None and epoch == starting_epoch:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
            overall_step += starting_epoch * len(train_dataloader) + resume_step
        else:
            active_dataloader = train_dataloader
        for inputs, targets in active_dataloader:
            loss = F.mse_loss(model(inputs).squeeze(-1), targets)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            seen += len(targets)
            if args.checkpointing_steps and overall_step % args.checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{overall_step}"))
            if overall_step == args.stop_after:
                accelerator.print(f"stopped at: {overall_step}")
                return
    accelerator.wait_for_everyone()
    norm = sum(float(parameter.detach().double().square().sum()) for parameter in model.parameters())
    accelerator.print(f"overall_step: {overall_step}")
    accelerator.print(f"seen: {seen}")
    accelerator.print(f"last_loss: {loss.item():.6f}")
    accelerator.print(f"norm: {norm:.6f}")
    accelerator.print(f"lr: {lr_scheduler.get_last_lr()[0]:.8f}")


if __name__ == "__main__":
    main()

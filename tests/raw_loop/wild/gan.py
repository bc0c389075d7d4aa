"""Two models and two optimizers, as a GAN: checkpoints in one folder that is written again and again, and a resume by hand."""

import argparse
import json
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=str, default="gan")
    parser.add_argument("--save_every", type=int, default=None)
    parser.add_argument("--stop_after", type=int, default=None)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    set_seed(2)
    generator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 6))
    discriminator = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=0.01, betas=(0.5, 0.999))
    dataloader = DataLoader(TensorDataset(torch.randn(60, 6)), batch_size=5, shuffle=False)
    generator, discriminator, optimizer_g, optimizer_d, dataloader = accelerator.prepare(
        generator, discriminator, optimizer_g, optimizer_d, dataloader
    )
    state = os.path.join(args.output, "latest")
    seen, first_epoch = 0, 0
    if args.resume:
        accelerator.load_state(state)
        with open(os.path.join(state, "progress.json")) as file:
            seen = json.load(file)["batches"]
        first_epoch = seen // len(dataloader)

    done = first_epoch * len(dataloader)
    for _ in range(first_epoch, args.epochs):
        for (real,) in dataloader:
            done += 1
            if done <= seen:
                continue
            noise = torch.randn(len(real), 4, generator=torch.Generator().manual_seed(done))
            fake = generator(noise)
            optimizer_d.zero_grad()
            verdicts = discriminator(torch.cat([real, fake.detach()]))
            truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
            loss_d = F.binary_cross_entropy_with_logits(verdicts, truth)
            accelerator.backward(loss_d)
            optimizer_d.step()
            optimizer_g.zero_grad()
            loss_g = F.binary_cross_entropy_with_logits(discriminator(fake), torch.ones(len(real), 1))
            accelerator.backward(loss_g)
            optimizer_g.step()
            if args.save_every and done % args.save_every == 0:
                accelerator.save_state(state)
                if accelerator.is_main_process:
                    with open(os.path.join(state, "progress.json"), "w") as file:
                        json.dump({"batches": done}, file)
                accelerator.wait_for_everyone()
            if done == args.stop_after:
                return
    name = "resumed" if args.resume else "whole"
    for part, model, loss in (("generator", generator, loss_g), ("discriminator", discriminator, loss_d)):
        norm = sum(float(each.detach().double().square().sum()) for each in model.parameters())
        accelerator.print(f"{name} {part}: {norm:.5f}")
        accelerator.print(f"{name} {part} loss: {loss.item():.5f}")


if __name__ == "__main__":
    main()

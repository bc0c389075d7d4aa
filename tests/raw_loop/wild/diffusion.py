"""A denoiser with averaged weights, as diffusers' text-to-image: hooks that write the models, a resume that skips batches."""

import argparse
import os
import shutil

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.inner = nn.Embedding(10, 8), nn.Linear(8 + 4, 8)

    def forward(self, noisy, timesteps, prompts):
        return self.inner(torch.cat([noisy + self.time(timesteps), prompts], dim=1))


class Averaged:
    """As diffusers' EMAModel."""

    def __init__(self, parameters, decay=0.9):
        self.decay, self.shadow = decay, [each.clone().detach() for each in parameters]

    @torch.no_grad()
    def step(self, parameters):
        for mean, each in zip(self.shadow, parameters, strict=True):
            mean.sub_((1 - self.decay) * (mean - each))

    def state_dict(self):
        return {"decay": self.decay, "shadow": self.shadow}

    def load_state_dict(self, state):
        self.decay, self.shadow = state["decay"], state["shadow"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=str, default="whole")
    parser.add_argument("--checkpointing_steps", type=int, default=None)
    parser.add_argument("--checkpoints_total_limit", type=int, default=1)
    parser.add_argument("--resume_from_checkpoint", type=str, default=None)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--stop_after", type=int, default=None)
    args = parser.parse_args()

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        project_config=ProjectConfiguration(
            project_dir=args.output_dir, logging_dir=os.path.join(args.output_dir, "logs")
        ),
    )
    set_seed(3)
    if accelerator.is_main_process and args.output_dir is not None:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()
    unet = Denoiser()
    ema = Averaged(unet.parameters())

    def save_model_hook(models, weights, output_dir):
        if accelerator.is_main_process:
            for model in models:
                assert isinstance(model, Denoiser)
                os.makedirs(os.path.join(output_dir, "unet"), exist_ok=True)
                torch.save(model.state_dict(), os.path.join(output_dir, "unet", "weights.bin"))
                if weights:
                    weights.pop()

    def load_model_hook(models, input_dir):
        while len(models) > 0:
            model = models.pop()
            model.load_state_dict(torch.load(os.path.join(input_dir, "unet", "weights.bin")))

    if accelerator.num_processes == 1:  # on several a hook gets the wrapped model, whose class differs by the library
        accelerator.register_save_state_pre_hook(save_model_hook)
        accelerator.register_load_state_pre_hook(load_model_hook)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=0.01)
    images, prompts = torch.randn(64, 8), torch.randn(64, 4)
    train_dataloader = DataLoader(TensorDataset(images, prompts), batch_size=4, shuffle=False)
    unet, optimizer, train_dataloader = accelerator.prepare(unet, optimizer, train_dataloader)
    accelerator.register_for_checkpointing(ema)

    steps_per_epoch = len(train_dataloader) // args.gradient_accumulation_steps
    global_step, first_epoch, resume_step = 0, 0, 0
    if args.resume_from_checkpoint == "latest":
        paths = [name for name in os.listdir(args.output_dir) if name.startswith("checkpoint")]
        path = sorted(paths, key=lambda name: int(name.split("-")[1]))[-1]
        accelerator.print(f"Resuming from checkpoint {path}")
        accelerator.load_state(os.path.join(args.output_dir, path))
        global_step = int(path.split("-")[1])
        first_epoch = global_step // steps_per_epoch
        resume_step = global_step * args.gradient_accumulation_steps % len(train_dataloader)

    for epoch in range(first_epoch, args.num_train_epochs):
        unet.train()
        train_loss = 0.0
        for step, (latents, hidden) in enumerate(train_dataloader):
            # Skip steps until we reach the resumed step
            if args.resume_from_checkpoint and epoch == first_epoch and step < resume_step:
                continue
            with accelerator.accumulate(unet):
                generator = torch.Generator().manual_seed(1000 * epoch + step)
                noise = torch.randn(latents.shape, generator=generator)
                timesteps = torch.randint(0, 10, (latents.shape[0],), generator=generator)
                loss = F.mse_loss(unet(latents + noise * timesteps[:, None] / 10, timesteps, hidden), noise)
                avg_loss = accelerator.gather(loss.repeat(4)).mean()
                train_loss += avg_loss.item() / args.gradient_accumulation_steps
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.step(unet.parameters())
                global_step += 1
                last_loss, train_loss = train_loss, 0.0
                if args.checkpointing_steps and global_step % args.checkpointing_steps == 0:
                    if accelerator.is_main_process:
                        checkpoints = [name for name in os.listdir(args.output_dir) if name.startswith("checkpoint")]
                        for name in checkpoints[: max(0, len(checkpoints) + 1 - args.checkpoints_total_limit)]:
                            shutil.rmtree(os.path.join(args.output_dir, name))
                    accelerator.wait_for_everyone()
                    accelerator.save_state(os.path.join(args.output_dir, f"checkpoint-{global_step}"))
                if global_step == args.stop_after:
                    return
    accelerator.wait_for_everyone()
    unet = accelerator.unwrap_model(unet)
    norms = [
        sum(float(each.detach().double().square().sum()) for each in kept) for kept in (unet.parameters(), ema.shadow)
    ]
    name = args.resume_from_checkpoint or "whole"
    accelerator.print(f"{name} steps: {global_step}")
    accelerator.print(f"{name} loss: {last_loss:.6f}")
    accelerator.print(f"{name} norm: {norms[0]:.6f}")
    accelerator.print(f"{name} averaged: {norms[1]:.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

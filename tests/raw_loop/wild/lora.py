"""Low-rank layers of a frozen model, as diffusers' dreambooth LoRA: bf16, hooks that write the layers, a repeated run."""

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.out = nn.Linear(6, 6), nn.Linear(6, 1)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs):
        return self.out(torch.tanh(self.base(inputs) + self.up(self.down(inputs))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=str, default="lora")
    parser.add_argument("--mixed_precision", type=str, default="bf16")
    parser.add_argument("--checkpointing_steps", type=int, default=5)
    parser.add_argument("--max_train_steps", type=int, default=16)
    parser.add_argument("--stop_after", type=int, default=None)
    parser.add_argument("--resume_from_checkpoint", type=str, default=None)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True, mixed_precision=args.mixed_precision)
    set_seed(5)
    unet = Adapted()
    unet.requires_grad_(False)
    unet.down.requires_grad_(True)
    unet.up.requires_grad_(True)

    def unwrap_model(model):
        return accelerator.unwrap_model(model)

    def save_model_hook(models, weights, output_dir):
        if accelerator.is_main_process:
            for model in models:
                if not isinstance(unwrap_model(model), type(unwrap_model(unet))):
                    raise ValueError(f"unexpected save model: {model.__class__}")
                if accelerator.num_processes == 1 and not isinstance(model, type(unwrap_model(unet))):
                    raise ValueError(f"unexpected save model: {model.__class__}")
                layers = {name: each for name, each in unwrap_model(model).state_dict().items() if "out" not in name}
                torch.save(layers, os.path.join(output_dir, "lora_weights.bin"))
                # make sure to pop weight so that corresponding model is not saved again
                if weights:
                    weights.pop()

    def load_model_hook(models, input_dir):
        while len(models) > 0:
            model = unwrap_model(models.pop())
            assert isinstance(model, type(unwrap_model(unet)))
            model.load_state_dict(torch.load(os.path.join(input_dir, "lora_weights.bin")), strict=False)

    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)
    params_to_optimize = list(filter(lambda each: each.requires_grad, unet.parameters()))
    optimizer = torch.optim.AdamW(params_to_optimize, lr=0.05)
    inputs = torch.randn(48, 6)
    dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())
    train_dataloader = DataLoader(dataset, batch_size=4, shuffle=False)
    unet, optimizer, train_dataloader = accelerator.prepare(unet, optimizer, train_dataloader)

    global_step, first_epoch, resume_step = 0, 0, 0
    if args.resume_from_checkpoint:
        if args.resume_from_checkpoint == "latest":
            dirs = [name for name in os.listdir(args.output_dir) if name.startswith("checkpoint")]
            path = sorted(dirs, key=lambda name: int(name.split("-")[1]))[-1]
        else:
            path = os.path.basename(args.resume_from_checkpoint)
        accelerator.load_state(os.path.join(args.output_dir, path))
        global_step = int(path.split("-")[1])
        first_epoch, resume_step = global_step // len(train_dataloader), global_step % len(train_dataloader)

    epochs = -(-args.max_train_steps // len(train_dataloader))
    for epoch in range(first_epoch, epochs):
        unet.train()
        for step, (batch, targets) in enumerate(train_dataloader):
            if args.resume_from_checkpoint and epoch == first_epoch and step < resume_step:
                continue
            with accelerator.accumulate(unet):
                loss = F.mse_loss(unet(batch).float(), targets.float(), reduction="mean")
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(params_to_optimize, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                global_step += 1
                if global_step % args.checkpointing_steps == 0:
                    accelerator.save_state(os.path.join(args.output_dir, f"checkpoint-{global_step}"))
            if global_step in (args.max_train_steps, args.stop_after):
                break
        if global_step in (args.max_train_steps, args.stop_after):
            break
    accelerator.wait_for_everyone()
    norm = sum(float(each.detach().double().square().sum()) for each in params_to_optimize)
    name = args.resume_from_checkpoint or ("stopped" if args.stop_after else "whole")
    accelerator.print(f"{name} steps: {global_step}")
    accelerator.print(f"{name} loss: {loss.item():.5f}")
    accelerator.print(f"{name} norm: {norm:.5f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

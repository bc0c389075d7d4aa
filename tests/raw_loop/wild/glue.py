"""Sentences of different lengths with labels, as transformers' run_glue_no_trainer: padded batches, metrics, a schedule."""

import argparse
import math
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.head = nn.EmbeddingBag(30, 10, padding_idx=0), nn.Linear(10, 3)

    def forward(self, input_ids, labels):
        logits = self.head(self.embeddings(input_ids))
        return F.cross_entropy(logits, labels), logits


def collate(features):
    longest = max(len(each["input_ids"]) for each in features)
    padded = [each["input_ids"] + [0] * (longest - len(each["input_ids"])) for each in features]
    return {"input_ids": torch.tensor(padded), "labels": torch.tensor([each["labels"] for each in features])}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=str, default="glue")
    parser.add_argument("--checkpointing_steps", type=str, default=None)
    parser.add_argument("--resume_from_checkpoint", type=str, default=None)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--stop_after", type=int, default=None)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    set_seed(17)
    examples = [
        {"input_ids": [(each * k) % 29 + 1 for k in range(1, 3 + each % 5)], "labels": each % 3} for each in range(118)
    ]
    train_dataloader = DataLoader(examples[:96], collate_fn=collate, batch_size=4)
    eval_dataloader = DataLoader(examples[96:], collate_fn=collate, batch_size=4)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.2, total_iters=24)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
    checkpointing_steps = args.checkpointing_steps
    if checkpointing_steps is not None and checkpointing_steps.isdigit():
        checkpointing_steps = int(checkpointing_steps)

    completed_steps, starting_epoch, resume_step = 0, 0, None
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        training_difference = os.path.splitext(os.path.basename(args.resume_from_checkpoint))[0]
        resume_step = int(training_difference.replace("step_", "")) * args.gradient_accumulation_steps
        starting_epoch = resume_step // len(train_dataloader)
        completed_steps = resume_step // args.gradient_accumulation_steps
        resume_step -= starting_epoch * len(train_dataloader)

    name = "resumed" if args.resume_from_checkpoint else "whole"
    for epoch in range(starting_epoch, args.num_train_epochs):
        model.train()
        if args.resume_from_checkpoint and epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        else:
            active_dataloader = train_dataloader
        for step, batch in enumerate(active_dataloader):
            loss, _ = model(**batch)
            loss = loss / args.gradient_accumulation_steps
            accelerator.backward(loss)
            if step % args.gradient_accumulation_steps == 1 or step == len(train_dataloader) - 1:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                completed_steps += 1
                if isinstance(checkpointing_steps, int) and completed_steps % checkpointing_steps == 0:
                    accelerator.save_state(os.path.join(args.output_dir, f"step_{completed_steps}"))
                if completed_steps == args.stop_after:
                    return
            if completed_steps >= max_train_steps:
                break
        model.eval()
        right = total = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                _, logits = model(**batch)
            predictions, references = accelerator.gather((logits.argmax(dim=-1), batch["labels"]))
            # If we are in a multiprocess environment, the last batch has duplicates
            rest = len(eval_dataloader.dataset) - total
            predictions, references = predictions[:rest], references[:rest]
            right += (predictions == references).sum().item()
            total += len(references)
        accelerator.print(f"{name} accuracy {epoch}: {right / total:.5f}")
    norm = sum(float(each.detach().double().square().sum()) for each in model.parameters())
    accelerator.print(f"{name} steps: {completed_steps}")
    accelerator.print(f"{name} norm: {norm:.5f}")
    accelerator.print(f"{name} lr: {lr_scheduler.get_last_lr()[0]:.8f}")


if __name__ == "__main__":
    main()

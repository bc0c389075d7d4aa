"""A language model, as transformers' run_clm_no_trainer: grouped texts, perplexity, checkpoints by steps and by epochs."""

import argparse
import math
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DistributedType
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.inner = nn.Embedding(20, 12), nn.GRU(12, 12, batch_first=True)
        self.head = nn.Linear(12, 20)
        self.head.weight = self.embeddings.weight

    def forward(self, input_ids, labels):
        logits = self.head(self.inner(self.embeddings(input_ids))[0])
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, 20), labels[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


def group_texts(tokens, block_size):
    total = len(tokens) // block_size * block_size
    blocks = [tokens[at : at + block_size] for at in range(0, total, block_size)]
    return [{"input_ids": block, "labels": list(block)} for block in blocks]


def default_data_collator(features):
    return {key: torch.tensor([each[key] for each in features]) for key in features[0]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=str, default="clm")
    parser.add_argument("--checkpointing_steps", type=str, default=None)
    parser.add_argument("--resume_from_checkpoint", type=str, default=None)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--stop_after", type=int, default=None)
    args = parser.parse_args()

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with="tensorboard",
        project_dir=args.output_dir,
    )
    set_seed(11)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()
    tokens = [each * each * 7 % 19 for each in range(8 * 120)]
    train_dataset, eval_dataset = group_texts(tokens, 8)[:96], group_texts(tokens, 8)[96:]
    train_dataloader = DataLoader(train_dataset, collate_fn=default_data_collator, batch_size=4)
    eval_dataloader = DataLoader(eval_dataset, collate_fn=default_data_collator, batch_size=4)
    model = Model()
    no_decay = ["bias"]
    parameters = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": 0.1,
        },
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(parameters, lr=0.02)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    if accelerator.distributed_type == DistributedType.XLA:
        model.tie_weights()
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
    checkpointing_steps = args.checkpointing_steps
    if checkpointing_steps is not None and checkpointing_steps.isdigit():
        checkpointing_steps = int(checkpointing_steps)
    accelerator.init_trackers("clm_no_trainer", {"lr": 0.02, "epochs": args.num_train_epochs})

    completed_steps, starting_epoch, resume_step = 0, 0, None
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        training_difference = os.path.splitext(os.path.basename(args.resume_from_checkpoint))[0]
        if "epoch" in training_difference:
            starting_epoch = int(training_difference.replace("epoch_", "")) + 1
            completed_steps = starting_epoch * num_update_steps_per_epoch
        else:
            # need to multiply `gradient_accumulation_steps` to reflect real steps
            resume_step = int(training_difference.replace("step_", "")) * args.gradient_accumulation_steps
            starting_epoch = resume_step // len(train_dataloader)
            completed_steps = resume_step // args.gradient_accumulation_steps
            resume_step -= starting_epoch * len(train_dataloader)

    for epoch in range(starting_epoch, args.num_train_epochs):
        model.train()
        total_loss = 0
        if args.resume_from_checkpoint and epoch == starting_epoch and resume_step is not None:
            # We skip the first `n` batches in the dataloader when resuming from a checkpoint
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        else:
            active_dataloader = train_dataloader
        for batch in active_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed_steps += 1
                if isinstance(checkpointing_steps, int) and completed_steps % checkpointing_steps == 0:
                    accelerator.save_state(os.path.join(args.output_dir, f"step_{completed_steps}"))
            if completed_steps >= max_train_steps:
                break
            if completed_steps == args.stop_after:
                return
        model.eval()
        losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                loss = model(**batch)["loss"]
            losses.append(accelerator.gather_for_metrics(loss.repeat(4)))
        perplexity = math.exp(torch.mean(torch.cat(losses)))
        name = os.path.basename(args.resume_from_checkpoint or "whole")
        accelerator.print(f"{name} perplexity {epoch}: {perplexity:.5f}")
        accelerator.log({"perplexity": perplexity, "train_loss": total_loss.item() / 24}, step=completed_steps)
        if args.checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
    accelerator.end_training()


if __name__ == "__main__":
    main()

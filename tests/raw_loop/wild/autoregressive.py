"""Gradient accumulation for sequences of different lengths: a step's loss is the mean over the tokens of all its batches."""

import contextlib

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

IGNORED = -100


def get_dataset(size):
    generator = torch.Generator().manual_seed(29)
    lengths = torch.randint(3, 12, (size,), generator=generator)
    return [torch.randint(1, 16, (int(length),), generator=generator) for length in lengths]


def collate_fn(sequences):
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    labels = torch.roll(padded, -1, dims=1)
    labels[:, -1] = 0
    return {"input_ids": padded, "labels": labels.masked_fill(labels == 0, IGNORED)}


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    set_seed(29)
    train_dataloader = DataLoader(get_dataset(128), collate_fn=collate_fn, batch_size=4)
    model = torch.nn.Sequential(torch.nn.Embedding(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    steps_per_update = accelerator.gradient_accumulation_steps
    for epoch in range(2):
        model.train()
        training_iterator = iter(train_dataloader)
        for update in range(len(train_dataloader) // steps_per_update):
            batch_samples = [next(training_iterator) for _ in range(steps_per_update)]
            local_items = sum((batch["labels"] != IGNORED).sum() for batch in batch_samples)
            num_items_in_batch = accelerator.gather(local_items).sum().item()
            total = 0
            for index, batch in enumerate(batch_samples):
                is_last = index == len(batch_samples) - 1
                with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
                    logits = model(batch["input_ids"])
                    loss = torch.nn.functional.cross_entropy(
                        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
                    )
                    total += loss.detach()
                    # The gradients are averaged over the processes, and backward divides by the number of batches.
                    scale = accelerator.num_processes * accelerator.gradient_accumulation_steps / num_items_in_batch
                    accelerator.backward(loss * scale)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            mean_loss = accelerator.reduce(total, reduction="sum").item() / num_items_in_batch
            accelerator.print(f"epoch {epoch} update {update} loss: {mean_loss:.6f}")
            accelerator.print(f"epoch {epoch} update {update} items: {num_items_in_batch}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

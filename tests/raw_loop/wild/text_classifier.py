"""A text classifier of transformers, made from a config, with a warm-up and an evaluation over all processes."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

MAX_LENGTH, VOCABULARY = 12, 40


def get_dataset(size, seed):
    """Sentences of token ids. The label says whether more than half of their tokens are from the vocabulary's second half."""
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for _ in range(size):
        length = int(torch.randint(4, MAX_LENGTH + 1, (1,), generator=generator))
        bias = int(torch.randint(0, 2, (1,), generator=generator)) * (VOCABULARY // 4)
        ids = torch.randint(1, VOCABULARY // 2 + bias, (length,), generator=generator)
        label = int((ids >= VOCABULARY // 2).float().mean() > 0.2)
        examples.append({"input_ids": ids.tolist(), "labels": label})
    return examples


def collate_fn(examples):
    longest = max(len(example["input_ids"]) for example in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    for row, example in enumerate(examples):
        ids[row, : len(example["input_ids"])] = torch.tensor(example["input_ids"])
    labels = torch.tensor([example["labels"] for example in examples])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    set_seed(config["seed"])
    train_dataloader = DataLoader(get_dataset(192, 1), collate_fn=collate_fn, batch_size=config["batch_size"])
    eval_dataloader = DataLoader(get_dataset(75, 2), collate_fn=collate_fn, batch_size=32)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=MAX_LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=2,
        )
    )
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=4,
        num_training_steps=len(train_dataloader) * config["num_epochs"],
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    for epoch in range(config["num_epochs"]):
        model.train()
        total_loss = 0
        for batch in train_dataloader:
            outputs = model(**batch)
            loss = outputs.loss
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

        model.eval()
        correct, seen = 0, 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            correct += int((predictions == references).sum())
            seen += references.shape[0]
        mean_loss = accelerator.reduce(total_loss, reduction="mean") / len(train_dataloader)
        accelerator.print(f"epoch {epoch} train_loss: {mean_loss.item():.6f}")
        accelerator.print(f"epoch {epoch} accuracy: {correct / seen:.6f}")
        accelerator.print(f"epoch {epoch} seen: {seen}")
        accelerator.print(f"epoch {epoch} lr: {lr_scheduler.get_last_lr()[0]:.8f}")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", type=str, default=None, choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    training_function({"lr": 5e-3, "num_epochs": 2, "seed": 42, "batch_size": 16}, args)


if __name__ == "__main__":
    main()

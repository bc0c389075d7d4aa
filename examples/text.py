"""Read a docstring of Python's standard library, and say which package it is from: asyncio, email, logging, unittest or xml.

    python examples/text.py
    python examples/text.py --ask "Send a message to a remote server and wait for its reply."

The text comes with Python. A network with attention reads the words, in batches of docstrings of similar length.
"""

import argparse
import ast
import collections
import random
import re
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import trainwright as tw

PACKAGES = ["asyncio", "email", "logging", "unittest", "xml"]
QUESTIONS = ["Wait until the lock is free.", "Decode the subject of a message.", "Check that two values are equal."]


def load_docstrings():
    """Return the (docstring, number of its package) pairs of the standard library, without repeats."""
    pairs = {}
    for label, package in enumerate(PACKAGES):
        for path in sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node):
                    pairs.setdefault(ast.get_docstring(node), label)
    return list(pairs.items())


def words_of(text: str):
    return re.findall(r"[a-z]+", text.lower())[:100]


class Reader(tw.Module):
    def __init__(self, vocabulary: list[str], width: int = 32):
        super().__init__()
        self.save_hyperparameters()
        self.embedding, self.dropout = nn.Embedding(len(vocabulary) + 2, width, padding_idx=0), nn.Dropout(0.3)
        self.attention, self.head = nn.Linear(width, 1), nn.Linear(width, len(PACKAGES))

    def encode(self, text: str, label: int = 0):
        """Return a sample: the numbers of the words (0 is padding, 1 any unknown word), and the label."""
        known = {word: number for number, word in enumerate(self.hparams.vocabulary, start=2)}
        return {"words": [known.get(word, 1) for word in words_of(text)] or [1], "label": label}

    def forward(self, words):
        features = self.dropout(self.embedding(words))
        weights = self.attention(features)[..., 0].masked_fill(words == 0, -torch.inf).softmax(1)
        return self.head((weights[..., None] * features).sum(1))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch["words"]), batch["label"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self(batch["words"]).argmax(1) == batch["label"]).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


def main():
    parser = argparse.ArgumentParser(description="Classify docstrings of the standard library.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--ask", default=QUESTIONS, nargs="+", metavar="TEXT")
    options = parser.parse_args()
    tw.seed_everything(0)
    random.shuffle(pairs := load_docstrings())
    train, val = pairs[len(pairs) // 5 :], pairs[: len(pairs) // 5]
    counts = collections.Counter(word for text, _ in train for word in words_of(text))
    reader = Reader([word for word, count in counts.most_common() if count > 1])
    best = tw.ModelCheckpoint(monitor="val_acc", mode="max")
    trainer = tw.Trainer(max_epochs=options.epochs, callbacks=[best], default_root_dir="runs")
    samples = [reader.encode(*pair) for pair in train]
    sampler = tw.LengthBucketSampler([len(sample["words"]) for sample in samples], batch_size=32)
    train_loader = DataLoader(samples, batch_sampler=sampler, collate_fn=tw.pad_collate)
    trainer.fit(reader, train_loader, DataLoader([reader.encode(*pair) for pair in val], 64, collate_fn=tw.pad_collate))

    reader = Reader.load_from_checkpoint(best.best_model_path).eval()
    for text in options.ask:
        scores = reader(torch.tensor([reader.encode(text)["words"]]))
        trainer.print(f"{PACKAGES[scores.argmax()]}: {text}")
    trainer.print(f"docstrings: {len(train)} to learn from, {len(val)} to test on")
    most = max(collections.Counter(label for _, label in val).values())
    trainer.print(f"always the most frequent package: {most / len(val):.3f}")
    trainer.print(f"val_acc: {best.best_model_score:.3f}")


if __name__ == "__main__":
    main()

"""Train on a stream of the package datasets, which is read while the model trains and is never in memory as a whole.

    python examples/stream.py
    python examples/stream.py --devices 2
    python examples/stream.py --data hub

By default the stream reads made film reviews from files that the first start writes. `--data hub` streams 3.6 million
reviews of products from the Hugging Face Hub. At the end the program prints the words that count most.
"""

import argparse
import itertools
import json
import zlib
from pathlib import Path

import torch
from imdb.made import make_reviews
from torch import nn
from torch.utils.data import DataLoader

import trainwright as tw

try:
    from datasets import load_dataset
except ImportError as error:
    raise ImportError("examples/stream.py needs datasets: pip install datasets") from error

FILES, WORDS = [Path(f"runs/stream/{number}.jsonl") for number in range(5)], 2**14


def open_streams(data: str):
    """Return the training stream, in another order in each epoch, and the validation stream."""
    if data == "hub":
        splits = load_dataset("fancyzhx/amazon_polarity", streaming=True).rename_column("content", "text")
    else:
        names = [str(path) for path in FILES]
        splits = load_dataset("json", data_files={"train": names[:4], "test": names[4]}, streaming=True)
    return splits["train"].shuffle(seed=0, buffer_size=1000), splits["test"].take(2000)


def tokens_of(text: str):  # hashes of its words, so that no vocabulary has to be counted first
    return [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in text.lower().split()]


def make_batch(rows):
    tokens = [torch.tensor(tokens_of(row["text"])[:256]) for row in rows]
    return nn.utils.rnn.pad_sequence(tokens, batch_first=True), torch.tensor([row["label"] for row in rows]).float()


class Classifier(tw.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.EmbeddingBag(WORDS, 1, mode="sum", padding_idx=0)  # a review's score is the sum of its words'
        nn.init.zeros_(self.weights.weight)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.binary_cross_entropy_with_logits(self.weights(batch[0])[:, 0], batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        are_right = (self.weights(batch[0])[:, 0] > 0) == batch[1].bool()
        self.log("val_acc", are_right.float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


def main():
    parser = argparse.ArgumentParser(description="Train a classifier of reviews on a stream.")
    parser.add_argument("--data", default="made", choices=["made", "hub"])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    tw.seed_everything(0)
    trainer = tw.Trainer(
        max_steps=options.steps, devices=options.devices, val_check_interval=250, default_root_dir="runs"
    )
    with trainer.engine.rank_zero_first():
        if options.data == "made" and not FILES[-1].exists():
            FILES[0].parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps({"text": text, "label": label}) for text, label in make_reviews(10_000)]
            for number, path in enumerate(FILES):
                path.write_text("\n".join(lines[number :: len(FILES)]))
    train, val = open_streams(options.data)
    classifier = Classifier()
    train_loader = DataLoader(train, 32, collate_fn=make_batch, num_workers=2)  # each reads half of the files
    trainer.fit(classifier, train_loader, DataLoader(val, 100, collate_fn=make_batch))

    words = {word for row in itertools.islice(val, 500) for word in row["text"].lower().split()}
    ranked = sorted(words, key=lambda word: classifier.weights.weight[tokens_of(word)].item())
    trainer.print("against:", *ranked[:12])
    trainer.print("for:", *ranked[:-13:-1])
    trainer.print(f"val_acc: {trainer.callback_metrics['val_acc']:.4f}")


if __name__ == "__main__":
    main()

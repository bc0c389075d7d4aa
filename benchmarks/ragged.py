"""Ragged text: length buckets and packed rows against loops written by hand that pad, on the same model and data.

    reviews      a DistilBERT from a small config classifies made reviews of log-normal lengths, 12 in a batch, until it reaches
                 an accuracy on test reviews. By hand: shuffled, padded to the longest of the batch. With trainwright: the same
                 batch size in a LengthBucketSampler, under a Trainer. The time is that of the training, without evaluations.
    documents    a GPT-2 from a small config on documents of log-normal lengths: tokens a second, padding not counted. By hand:
                 shuffled documents, padded to the longest of the batch. With trainwright: a PackedDataset under a Trainer, with
                 as many tokens in a batch, padding included.

By hand is a plain loop with torch's defaults. The rounds are interleaved, so that noise hits both, ratios are taken within a
round, and medians count.

    python benchmarks/ragged.py [--rounds 3] [--only reviews,documents] [--accuracy 0.9] [--small]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import math
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import DistilBertConfig, DistilBertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import trainwright as tw

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

MEDIAN, SPREAD, LONGEST = 174, 0.77, 512
"""Tokens of a text, log-normal as the words of published film reviews, and cut."""
VOCABULARY, BATCH, LOOK_EVERY = 1000, 12, 25
GOALS = {"reviews": "<= 0.60", "documents": ">= 1.80"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="reviews,documents", help="cases separated by commas")
    parser.add_argument("--accuracy", type=float, default=0.9, help="of the test reviews, at which a run ends")
    parser.add_argument("--small", action="store_true", help="a quick check that everything runs, without a meaning")
    options = parser.parse_args()
    if options.small:
        options.rounds, options.accuracy = 1, 0.0
    cases: dict[str, Callable[[int, argparse.Namespace], tuple[float, float]]] = {
        "reviews": measure_reviews,
        "documents": measure_documents,
    }
    print(f"{'case':<12}{'unit':<10}{'by hand':>10}{'trainwright':>13}{'ratio':>8}   {'goal':<10}ratios of the rounds")
    for name in options.only.split(","):
        rounds = [cases[name](seed, options) for seed in range(options.rounds)]
        by_hand, ours = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratios = [second / first for first, second in rounds]
        unit = "seconds" if name == "reviews" else "tokens/s"
        shown = " ".join(f"{ratio:.3f}" for ratio in ratios)
        print(
            f"{name:<12}{unit:<10}{by_hand:10.2f}{ours:13.2f}{statistics.median(ratios):8.3f}   {GOALS[name]:<10}{shown}",
            flush=True,
        )


def lengths_of(count: int, rng: random.Random, is_small: bool) -> list[int]:
    median = 20 if is_small else MEDIAN
    return [min(LONGEST, max(4, round(rng.lognormvariate(math.log(median), SPREAD)))) for _ in range(count)]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


# -- reviews -------------------------------------------------------------------------------------------------------------


def make_reviews(count: int, seed: int, is_small: bool) -> list[dict[str, Any]]:
    """Return reviews of neutral words, of which a twentieth is from the good or the bad words of the label."""
    rng = random.Random(seed)
    reviews = []
    for length in lengths_of(count, rng, is_small):
        label = rng.randrange(2)
        tokens = [rng.randrange(102, VOCABULARY) for _ in range(length)]
        for place in rng.sample(range(length), max(1, length // 20)):
            is_on_side = rng.random() < 0.8
            tokens[place] = rng.randrange(2, 52) + 50 * (label if is_on_side else 1 - label)
        reviews.append(
            {"input_ids": torch.tensor(tokens), "attention_mask": torch.ones(length).long(), "labels": label}
        )
    return reviews


def pad_by_hand(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = {
        name: pad_sequence([sample[name] for sample in samples], batch_first=True)
        for name in ("input_ids", "attention_mask")
    }
    return {**batch, "labels": torch.tensor([sample["labels"] for sample in samples])}


class Watch:
    """Measures the time of training, and ends it at an accuracy of the test reviews."""

    def __init__(self, model: nn.Module, test: list[dict[str, Any]], accuracy: float) -> None:
        self.model, self.target = model, accuracy
        ordered = sorted(test, key=lambda review: len(review["input_ids"]))
        self.batches = list(DataLoader(ordered, 50, collate_fn=pad_by_hand))  # type: ignore[arg-type]
        self.count, self.seconds, self.begun = 0, 0.0, time.perf_counter()

    def is_done(self) -> bool:
        """Count a step. Return whether the accuracy is reached, without counting the time of its evaluation."""
        self.count += 1
        if self.count % LOOK_EVERY:
            return False
        self.seconds += time.perf_counter() - self.begun
        self.model.eval()
        with torch.no_grad():
            right = [(self.model(**batch).logits.argmax(1) == batch["labels"]).float() for batch in self.batches]
        self.model.train()
        self.begun = time.perf_counter()
        return float(torch.cat(right).mean()) >= self.target


def make_classifier(options: argparse.Namespace) -> Any:
    size = {"dim": 32, "hidden_dim": 64} if options.small else {"dim": 128, "hidden_dim": 512}
    config = DistilBertConfig(
        vocab_size=VOCABULARY, n_layers=2, n_heads=4, max_position_embeddings=LONGEST, num_labels=2, **size
    )
    return DistilBertForSequenceClassification(config).train()


def measure_reviews(seed: int, options: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds to the accuracy, by hand and with buckets."""
    sizes = (300, 60) if options.small else (6000, 500)
    train, test = (make_reviews(size, 2 * seed + part, options.small) for part, size in enumerate(sizes))
    torch.manual_seed(seed)
    model = make_classifier(options)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    loader: Any = DataLoader(train, BATCH, shuffle=True, collate_fn=pad_by_hand)  # type: ignore[arg-type]
    watch = Watch(model, test, options.accuracy)
    is_done = False
    while not is_done:
        for batch in loader:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
            if is_done := watch.is_done():
                break
    return watch.seconds, buckets(seed, options, train, test)


class Reviews(tw.Module):
    def __init__(self, model: nn.Module, watch: Watch) -> None:
        super().__init__()
        self.model, self.watch = model, watch

    def on_train_start(self) -> None:
        self.watch.begun = time.perf_counter()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).loss  # type: ignore[no-any-return]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = self.watch.is_done()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=5e-4)


def buckets(seed: int, options: argparse.Namespace, train: list[dict[str, Any]], test: list[dict[str, Any]]) -> float:
    tw.seed_everything(seed, verbose=False)
    model = make_classifier(options)
    watch = Watch(model, test, options.accuracy)
    sampler = tw.LengthBucketSampler([len(review["input_ids"]) for review in train], batch_size=BATCH, seed=seed)
    loader: Any = DataLoader(train, batch_sampler=sampler, collate_fn=tw.PadCollate())  # type: ignore[arg-type]
    with quiet():
        tw.Trainer(max_epochs=-1, barebones=True, devices=1).fit(Reviews(model, watch), loader)
    return watch.seconds


# -- documents -----------------------------------------------------------------------------------------------------------


def make_language_model(options: argparse.Namespace) -> Any:
    size, layers = (32, 1) if options.small else (192, 4)
    special = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LONGEST, n_embd=size, n_layer=layers, n_head=4, use_cache=False, **special
    )
    return GPT2LMHeadModel(config).train()


def pad_documents(documents: list[Tensor]) -> dict[str, Tensor]:
    ids = pad_sequence(documents, batch_first=True)
    mask = pad_sequence([torch.ones_like(document) for document in documents], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Documents(tw.Module):
    def __init__(self, model: nn.Module, skipped: int) -> None:
        super().__init__()
        self.model, self.skipped, self.tokens, self.begun = model, skipped, 0, 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.skipped:
            self.begun = time.perf_counter()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = tw.document_mask(batch["document_ids"])
        names = ("input_ids", "position_ids", "labels")
        return self.model(attention_mask=mask, **{name: batch[name] for name in names}).loss  # type: ignore[no-any-return]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= self.skipped:
            self.tokens += int((batch["document_ids"] > 0).sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=5e-4)


def measure_documents(seed: int, options: argparse.Namespace) -> tuple[float, float]:
    """Return the tokens a second, by hand and packed."""
    steps, skipped = (3, 1) if options.small else (40, 5)
    rng = random.Random(seed)
    count = (steps + skipped) * BATCH * 3
    documents = [torch.randint(1, VOCABULARY, (length,)) for length in lengths_of(count, rng, options.small)]
    torch.manual_seed(seed)
    model = make_language_model(options)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    loader: Any = DataLoader(documents, BATCH, shuffle=True, collate_fn=pad_documents)  # type: ignore[arg-type]
    tokens, padded, begun = 0, 0, 0.0
    for index, batch in zip(range(steps + skipped), loader, strict=False):
        if index == skipped:
            begun = time.perf_counter()
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
        padded += batch["input_ids"].numel()
        tokens += int(batch["attention_mask"].sum()) if index >= skipped else 0
    by_hand = tokens / (time.perf_counter() - begun)
    rows_in_batch = max(1, round(padded / (steps + skipped) / LONGEST))
    packed = DataLoader(tw.PackedDataset(documents, LONGEST), rows_in_batch, shuffle=True)
    torch.manual_seed(seed)
    module = Documents(make_language_model(options), skipped)
    with quiet():
        tw.Trainer(max_steps=steps + skipped, barebones=True, devices=1).fit(module, packed)
    return by_hand, module.tokens / (time.perf_counter() - module.begun)


if __name__ == "__main__":
    main()

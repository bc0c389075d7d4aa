"""What the scripts of this folder share: their options, the reviews as batches of tokens, and the model."""

import argparse
import functools
import hashlib
import random
from pathlib import Path

import archive
import made
import torch
from filelock import FileLock
from tokenizers import BertWordPieceTokenizer
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DistilBertConfig, PreTrainedTokenizerFast

LONGEST = 512
"""Reviews are cut after so many tokens."""


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a DistilBERT to classify film reviews as good or bad.")
    parser.add_argument(
        "--data", default="made", help="made, hub, or the path or URL of aclImdb_v1.tar.gz or its folder"
    )
    parser.add_argument("--digest", default=archive.PUBLISHED_MD5, help="the archive's MD5 or SHA-256")
    parser.add_argument(
        "--cache", type=Path, default=Path("runs/imdb/data"), help="the folder for downloads and vocabularies"
    )
    parser.add_argument("--reviews", type=positive_int, default=6000, help="how many reviews to make")
    parser.add_argument("--pretrained", metavar="NAME", help="weights from the Hub, such as distilbert-base-uncased")
    parser.add_argument("--epochs", type=positive_int, default=3)
    parser.add_argument("--batch-size", type=positive_int, default=12, help="reviews in a batch of each process")
    parser.add_argument("--learning-rate", type=float, help="by default 1e-3, or 5e-5 for pretrained weights")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.learning_rate = options.learning_rate or (5e-5 if options.pretrained else 1e-3)
    return options


def positive_int(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def load(options: argparse.Namespace) -> list[DataLoader]:
    """Return loaders of the training, validation and test reviews; if these cannot be had, end the script and say why."""
    try:
        options.cache.mkdir(parents=True, exist_ok=True)
        with FileLock(options.cache / "lock"):  # the first process prepares what is missing, the others find it
            parts = split(read(options))
            tokenizer = load_tokenizer(options, [text for text, _ in parts[0]])
    except (OSError, ValueError, ImportError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    collate = functools.partial(make_batch, padding=tokenizer.pad_token_id)
    loaders = []
    for part in parts:
        tokens = tokenizer([text for text, _ in part], truncation=True, max_length=LONGEST)["input_ids"]
        samples = [(torch.tensor(each), label) for each, (_, label) in zip(tokens, part, strict=True)]
        loaders.append(DataLoader(samples, options.batch_size, shuffle=part is parts[0], collate_fn=collate))
    return loaders


def read(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Return pairs of a text and its label: 1 for a good review, 0 for a bad one."""
    if options.data == "made":
        return made.make_reviews(options.reviews)
    if options.data == "hub":
        return read_hub()
    return archive.read_folder(archive.find_folder(options.data, options.digest, options.cache))


def read_hub() -> list[tuple[str, int]]:
    try:
        from datasets import concatenate_datasets, load_dataset
    except ImportError as error:
        raise ImportError("--data hub needs the package datasets: pip install datasets") from error
    try:
        parts = load_dataset("stanfordnlp/imdb", split=["train", "test"])
    except Exception as error:  # of several packages, none of which says what to do
        raise ConnectionError(
            f"the Hub's data set stanfordnlp/imdb cannot be read: {error}. {archive.NO_NETWORK}"
        ) from error
    both = concatenate_datasets(parts)
    return list(zip(both["text"], both["label"], strict=True))


def split(reviews: list[tuple[str, int]]) -> list[list[tuple[str, int]]]:
    """Return 70, 10 and 20 % of the reviews, of the good and of the bad ones: 35,000, 5,000 and 10,000 of the published ones.

    The parts depend on the reviews alone: neither on their order nor on a seed.
    """
    rng = random.Random(0)
    parts = [[], [], []]
    for label in (0, 1):
        ordered = sorted(each for each in reviews if each[1] == label)
        rng.shuffle(ordered)
        first, second = len(ordered) * 7 // 10, len(ordered) * 8 // 10
        for part, chosen in zip(parts, (ordered[:first], ordered[first:second], ordered[second:]), strict=True):
            part += chosen
    if not all(parts):
        raise ValueError(f"{len(reviews)} reviews are too few for training, validation and test; 8 or more are needed.")
    return parts


def vocabulary_size(options: argparse.Namespace) -> int:
    return 1000 if options.data == "made" else 16000


def load_tokenizer(options: argparse.Namespace, texts: list[str]):
    """Return the tokenizer of the pretrained model, or one with a WordPiece vocabulary trained on the texts.

    The same texts give slightly different vocabularies each time, so the first one is kept: all processes need the same.
    """
    if options.pretrained:
        return load_pretrained(AutoTokenizer, options.pretrained)
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    path = options.cache / f"vocabulary-{digest[:12]}.json"
    if not path.exists():
        tokenizer = BertWordPieceTokenizer()
        tokenizer.train_from_iterator(texts, vocabulary_size(options), show_progress=False)
        tokenizer.save(str(path))
    return PreTrainedTokenizerFast(tokenizer_file=str(path), pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")


def make_batch(samples: list[tuple[torch.Tensor, int]], padding: int) -> dict[str, torch.Tensor]:
    """Return what the model takes: the tokens of each review, padded to the longest."""
    tokens, labels = zip(*samples, strict=True)
    ids = pad_sequence(tokens, batch_first=True, padding_value=padding)
    return {"input_ids": ids, "attention_mask": (ids != padding).long(), "labels": torch.tensor(labels)}


def make_model(options: argparse.Namespace):
    """Return a small DistilBERT with random weights, or the pretrained one."""
    if options.pretrained:
        return load_pretrained(AutoModelForSequenceClassification, options.pretrained, num_labels=2).train()
    config = DistilBertConfig(
        vocab_size=vocabulary_size(options),
        max_position_embeddings=LONGEST,
        dim=64,
        hidden_dim=128,
        n_layers=2,
        n_heads=4,
        num_labels=2,
    )
    return AutoModelForSequenceClassification.from_config(config).train()


def load_pretrained(kind, name: str, **settings):
    try:
        return kind.from_pretrained(name, **settings)
    except (OSError, ValueError) as error:
        raise OSError(
            f"--pretrained {name} cannot be loaded: {error} Without --pretrained the script makes a small model, "
            "which needs no network."
        ) from error

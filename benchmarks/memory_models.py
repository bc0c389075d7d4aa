"""The networks of benchmarks/sharded_memory.py: four families that differ in what fills the memory.

The size of a network is its width. Its forward takes a batch and returns the loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

HEADS = 4
WORDS, TEXT_LENGTH, CLASSES = 4096, 64, 4
COLOURS, IMAGE_LENGTH = 64, 14 * 14
"""An image GPT reads an image as a row of pixels, each of one of a few colours."""
FREQUENCIES, FRAMES, LETTERS, TRANSCRIPT = 64, 120, 29, 12
PROTOTYPES, VIEW = 256, 32
"""The clusters of the SwAV-style head, and the side of each view of an image."""


class Block(nn.Module):
    """A transformer's block: attention, then two linear layers, each after a layer norm and with a residual."""

    def __init__(self, width: int, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.attention(self.attention_norm(hidden)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=self.is_causal)
        hidden = hidden + self.projection(mixed.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.mlp_norm(hidden))


class TextTransformer(nn.Module):
    """An encoder that classifies texts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(TEXT_LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, is_causal=False) for _ in range(4)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        tokens, labels = batch
        hidden = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return functional.cross_entropy(self.head(self.norm(self.blocks(hidden)).mean(1)), labels)


class ImageGPT(nn.Module):
    """A decoder that predicts each pixel of an image from those before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.colours = nn.Embedding(COLOURS, width)
        self.places = nn.Embedding(IMAGE_LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, is_causal=True) for _ in range(6)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, COLOURS, bias=False)

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        (pixels,) = batch
        hidden = self.colours(pixels) + self.places(torch.arange(pixels.shape[1], device=pixels.device))
        logits = self.head(self.norm(self.blocks(hidden)))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), pixels[:, 1:].flatten())


class RecurrentLayer(nn.Module):
    """A layer that reads the frames in both directions and adds the two readings."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(inputs)
        self.gru = nn.GRU(inputs, width, batch_first=True, bidirectional=True)

    def forward(self, frames: Tensor) -> Tensor:
        return self.gru(self.norm(frames))[0].unflatten(-1, (2, -1)).sum(-2)


class SpeechNetwork(nn.Module):
    """A network of the DeepSpeech2 kind: convolutions over a spectrogram, recurrent layers, and letters by CTC."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=(11, 11), stride=(2, 2), padding=(5, 5), bias=False),
            nn.BatchNorm2d(16),
            nn.Hardtanh(0, 20),
            nn.Conv2d(16, 16, kernel_size=(11, 11), stride=(2, 1), padding=(5, 5), bias=False),
            nn.BatchNorm2d(16),
            nn.Hardtanh(0, 20),
        )
        inputs = 16 * FREQUENCIES // 4
        self.layers = nn.Sequential(*(RecurrentLayer(width if number else inputs, width) for number in range(3)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, LETTERS)

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        spectrograms, transcripts = batch
        frames = self.convolutions(spectrograms.unsqueeze(1)).flatten(1, 2).transpose(1, 2)
        letters = self.head(self.norm(self.layers(frames))).log_softmax(-1).transpose(0, 1)
        lengths = [torch.full((len(transcripts),), size) for size in (len(letters), transcripts.shape[1])]
        return functional.ctc_loss(letters, transcripts, *lengths)


class ResidualBlock(nn.Module):
    """A ResNet's basic block."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, channels, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.shortcut = nn.Conv2d(inputs, channels, 1, stride=stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first_norm(self.first(images)).relu()
        return (self.second_norm(self.second(hidden)) + self.shortcut(images)).relu()


class Prototypes(nn.Module):
    """The cosine of each feature to each cluster's prototype."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(PROTOTYPES, features))

    def forward(self, features: Tensor) -> Tensor:
        return functional.linear(functional.normalize(features), functional.normalize(self.weight))


class SwavResNet(nn.Module):
    """A ResNet that learns without labels: each view's cluster is predicted from the other view of the same image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        blocks = [
            (ResidualBlock(before, after, 1 + (before != after)), ResidualBlock(after, after, 1))
            for before, after in itertools.pairwise(sizes)
        ]
        self.stages = nn.Sequential(*(block for pair in blocks for block in pair))
        self.head = nn.Sequential(nn.Linear(8 * width, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 128))
        self.prototypes = Prototypes(128)

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        features = self.head(self.stages(self.stem(torch.cat(batch))).mean((-2, -1)))
        first, second = self.prototypes(features).chunk(2)
        pairs = ((first, second), (second, first))
        return sum(functional.cross_entropy(scores / 0.1, assigned(other)) for scores, other in pairs) / 2  # type: ignore[return-value]


@torch.no_grad()
def assigned(scores: Tensor) -> Tensor:
    """Return for each sample the parts of it that each cluster gets, if all clusters get as much (Sinkhorn and Knopp)."""
    parts = (scores / 0.05).exp()
    for _ in range(3):
        parts = functional.normalize(parts, p=1, dim=0)
        parts = functional.normalize(parts, p=1, dim=1)
    return parts


def texts(generator: torch.Generator) -> tuple[Tensor, ...]:
    tokens = torch.randint(WORDS, (2, TEXT_LENGTH), generator=generator)
    return tokens, torch.randint(CLASSES, (2,), generator=generator)


def pixels(generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randint(COLOURS, (1, IMAGE_LENGTH), generator=generator),)


def recordings(generator: torch.Generator) -> tuple[Tensor, ...]:
    spectrograms = torch.randn(2, FREQUENCIES, FRAMES, generator=generator)
    return spectrograms, torch.randint(1, LETTERS, (2, TRANSCRIPT), generator=generator)


def views(generator: torch.Generator) -> tuple[Tensor, ...]:
    images = torch.randn(4, 3, VIEW, VIEW, generator=generator)
    return images, images + 0.1 * torch.randn(images.shape, generator=generator)


@dataclass(frozen=True)
class Family:
    """Networks that differ in their width."""

    title: str
    make: Callable[[int], nn.Module]
    make_batch: Callable[[torch.Generator], tuple[Tensor, ...]]
    """A rank's batch."""
    block: type[nn.Module]
    """What fsdp gathers at a time."""
    width: int
    """Of the network in the table."""
    step: int
    """What a width is a multiple of."""


FAMILIES = {
    "text": Family("text transformer", TextTransformer, texts, Block, width=256, step=16),
    "image": Family("image GPT", ImageGPT, pixels, Block, width=240, step=16),
    "speech": Family("speech network", SpeechNetwork, recordings, RecurrentLayer, width=352, step=16),
    "swav": Family("ResNet, SwAV head", SwavResNet, views, ResidualBlock, width=40, step=2),
}

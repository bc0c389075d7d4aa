"""The models of benchmarks/gpu.py: DistilBERT, a GPT, a ResNet-18 and perceptrons."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class TransformerSize:
    """The dimensions of a transformer."""

    width: int
    layers: int
    heads: int
    hidden: int
    vocabulary: int
    length: int


DISTILBERT = TransformerSize(width=768, layers=6, heads=12, hidden=3072, vocabulary=30522, length=512)
SMALL_DISTILBERT = TransformerSize(width=32, layers=2, heads=2, hidden=64, vocabulary=100, length=32)
GPT2 = TransformerSize(width=768, layers=12, heads=12, hidden=3072, vocabulary=50304, length=1024)
SMALL_GPT = TransformerSize(width=32, layers=2, heads=2, hidden=64, vocabulary=100, length=32)


class TransformersDistilBert(nn.Module):
    """DistilBERT for sequences of two classes, as transformers has it, with weights made from its config."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        from transformers import DistilBertConfig, DistilBertForSequenceClassification

        config = DistilBertConfig(
            vocab_size=size.vocabulary,
            max_position_embeddings=size.length,
            n_layers=size.layers,
            n_heads=size.heads,
            dim=size.width,
            hidden_dim=size.hidden,
        )
        self.net = DistilBertForSequenceClassification(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.net(input_ids=input_ids, attention_mask=attention_mask).logits


class _Block(nn.Module):
    """A block of DistilBERT: attention and a perceptron, each normalised after its sum."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.query, self.key, self.value, self.out = (nn.Linear(size.width, size.width) for _ in range(4))
        self.attention_norm = nn.LayerNorm(size.width, eps=1e-12)
        self.widen, self.narrow = nn.Linear(size.width, size.hidden), nn.Linear(size.hidden, size.width)
        self.output_norm = nn.LayerNorm(size.width, eps=1e-12)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        dropped = 0.1 if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropped)
        x = self.attention_norm(x + self.out(attended.transpose(1, 2).flatten(2)))
        return self.output_norm(x + self.dropout(self.narrow(F.gelu(self.widen(x)))))


class PlainDistilBert(nn.Module):
    """The same shape in plain torch, if transformers is missing."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width, padding_idx=0)
        self.positions = nn.Embedding(size.length, size.width)
        self.norm, self.dropout = nn.LayerNorm(size.width, eps=1e-12), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(_Block(size) for _ in range(size.layers))
        self.pool, self.pool_dropout = nn.Linear(size.width, size.width), nn.Dropout(0.2)
        self.classifier = nn.Linear(size.width, 2)
        _initialise(self)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.dropout(self.norm(self.tokens(input_ids) + self.positions(positions)))
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        return self.classifier(self.pool_dropout(F.relu(self.pool(x[:, 0]))))


class _CausalBlock(nn.Module):
    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.inputs, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.widen, self.narrow = nn.Linear(size.width, size.hidden), nn.Linear(size.hidden, size.width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.inputs(self.attention_norm(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.perceptron_norm(x)), approximate="tanh"))


class Gpt(nn.Module):
    """A GPT-2 with tied embeddings and without dropout, of 124 M parameters at full size. It returns its loss."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(_CausalBlock(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        _initialise(self)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class _Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(inner)) + self.short(x))


class ResNet18(nn.Module):
    """A ResNet-18 that takes images as bytes and normalises them on the device."""

    def __init__(self, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        sizes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2), (4 * width, 8 * width, 2)]
        self.body = nn.Sequential(
            *(each for before, after, stride in sizes for each in _pair(before, after, stride)),
        )
        self.head = nn.Linear(8 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images.float().sub(127.5).div(58.0)
        return self.head(self.body(self.stem(x)).mean((2, 3)))


def _pair(before: int, after: int, stride: int) -> tuple[nn.Module, nn.Module]:
    return _Residual(before, after, stride), _Residual(after, after, 1)


def make_model(name: str, is_small: bool, with_transformers: bool) -> nn.Module:
    """Return a new model on the host; its weights are the same in every process."""
    torch.manual_seed(0)
    if name == "distilbert":
        size = SMALL_DISTILBERT if is_small else DISTILBERT
        return TransformersDistilBert(size) if with_transformers else PlainDistilBert(size)
    if name == "gpt":
        return Gpt(SMALL_GPT if is_small else GPT2)
    if name == "resnet":
        return ResNet18(8, 10) if is_small else ResNet18()
    if name == "mlp":
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    width, layers = (128, 4) if is_small else (2048, 20)  # 84 M parameters: 1.0 GB with Adam's moments
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def flops_per_token(is_small: bool) -> float:
    """Return the GPT's floating-point operations per token, forward and backward: 6 per weight, plus those of attention.

    Position embeddings are looked up, not multiplied; the tied embedding is multiplied once, as the head.
    """
    size = SMALL_GPT if is_small else GPT2
    weights = size.vocabulary * size.width + size.layers * (4 * size.width**2 + 2 * size.width * size.hidden)
    return 6.0 * weights + 12.0 * size.layers * size.width * size.length


def _initialise(module: nn.Module) -> None:
    for each in module.modules():
        if isinstance(each, (nn.Linear, nn.Embedding)):
            nn.init.normal_(each.weight, std=0.02)
            if isinstance(each, nn.Linear) and each.bias is not None:
                nn.init.zeros_(each.bias)

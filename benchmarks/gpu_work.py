"""The work of a case, the same for every implementation: model, data, optimizer, loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from gpu_cases import LOADER_BATCHES, Case
from gpu_models import DISTILBERT, GPT2, SMALL_DISTILBERT, SMALL_GPT, flops_per_token, make_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

Batch = dict[str, Tensor]
RATES = {"distilbert": 5e-5, "gpt": 3e-4, "resnet": 1e-3, "mlp": 1e-3, "layers": 1e-4}
SMALL_RATE = 1e-3
"""Of small models, which learn little in few steps otherwise; what does not learn could not show a difference."""
POOL = {"distilbert": 960, "gpt": 128, "resnet": 512, "mlp": 512, "layers": 64}
"""How many samples there are; the epoch goes through them again and again."""


class Samples(Dataset[Batch]):
    """Made-up samples that a model can learn from, each a pure function of its index."""

    def __init__(self, case: Case, is_small: bool) -> None:
        self.case = case
        self.length = LOADER_BATCHES * (1 if case.model == "mlp" else case.batch)
        draw = torch.Generator().manual_seed(1)
        pool = POOL[case.model] // (8 if is_small else 1)
        self.pool = {
            "distilbert": _sentences,
            "gpt": _texts,
            "resnet": _images,
            "mlp": _points,
            "layers": _rows,
        }[case.model](case, pool, is_small, draw)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        return self.pool[index % len(self.pool)]


def _sentences(case: Case, pool: int, is_small: bool, draw: torch.Generator) -> list[Batch]:
    size = SMALL_DISTILBERT if is_small else DISTILBERT
    longest = min(case.length, size.length)
    found = []
    for _ in range(pool):
        length = int(torch.randint(longest // 8, longest + 1, (), generator=draw)) if case.is_ragged else longest
        tokens = torch.randint(1, size.vocabulary, (length,), generator=draw)
        label = torch.randint(0, 2, (), generator=draw)
        tokens[1 : longest // 8] = label + 1  # what tells the classes apart
        found.append({"input_ids": tokens, "labels": label})
    return found


def _texts(case: Case, pool: int, is_small: bool, draw: torch.Generator) -> list[Batch]:
    size = SMALL_GPT if is_small else GPT2
    length = min(case.length, size.length)
    found = []
    for _ in range(pool):
        start, stride = (int(each) for each in torch.randint(1, 8, (2,), generator=draw))
        text = (start + stride * torch.arange(length + 1)) % min(size.vocabulary, 1000)
        found.append({"tokens": text[:-1].contiguous(), "labels": text[1:].contiguous()})
    return found


def _images(case: Case, pool: int, is_small: bool, draw: torch.Generator) -> list[Batch]:
    side, classes = (16, 10) if is_small else (224, 1000)
    images = torch.randint(0, 256, (pool, 3, side, side), generator=draw, dtype=torch.uint8)
    labels = torch.randint(0, classes, (pool,), generator=draw)
    return [{"images": image, "labels": label} for image, label in zip(images, labels, strict=True)]


def _points(case: Case, pool: int, is_small: bool, draw: torch.Generator) -> list[Batch]:
    inputs = torch.randn(pool, case.batch, 32, generator=draw)
    labels = (inputs @ torch.randn(32, 10, generator=draw)).argmax(-1)
    return [{"inputs": each, "labels": label} for each, label in zip(inputs, labels, strict=True)]


def _rows(case: Case, pool: int, is_small: bool, draw: torch.Generator) -> list[Batch]:
    width = 128 if is_small else 2048
    return [{"inputs": torch.randn(width, generator=draw), "labels": torch.zeros(())} for _ in range(pool)]


class Padded:
    """Collates sentences, padded to the longest of them, with a mask."""

    def __call__(self, samples: list[Batch]) -> Batch:
        tokens = [each["input_ids"] for each in samples]
        padded = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        lengths = torch.tensor([len(each) for each in tokens])
        mask = (torch.arange(padded.shape[1])[None, :] < lengths[:, None]).long()
        return {
            "input_ids": padded,
            "attention_mask": mask,
            "labels": torch.stack([each["labels"] for each in samples]),
        }


class Work:
    """What all implementations of a case share.

    Args:
        case: the case.
        device: where it is computed.
        is_small: whether models and data are tiny, to try the benchmark.
        with_transformers: whether DistilBERT is that of transformers or the plain one.
        compiler: torch.compile's backend.
    """

    def __init__(
        self, case: Case, device: torch.device, *, is_small: bool, with_transformers: bool, compiler: str, folder: str
    ) -> None:
        self.case, self.device, self.is_small = case, device, is_small
        self.with_transformers, self.folder = with_transformers, folder
        self.compile_options: dict[str, Any] = {}
        """torch.compile's arguments; empty where nothing is compiled."""
        if case.compiled:
            self.compile_options = {"backend": compiler}
            if compiler == "inductor" and case.compiled != "default":
                self.compile_options["mode"] = case.compiled

    @property
    def amp_dtype(self) -> torch.dtype | None:
        return {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(self.case.precision)

    @property
    def precision(self) -> str:
        """The Trainers' name of the precision."""
        return self.case.precision if self.amp_dtype is not None else "32-true"

    @property
    def mixed_precision(self) -> str:
        """Accelerate's name of the precision."""
        return {torch.float16: "fp16", torch.bfloat16: "bf16", None: "no"}[self.amp_dtype]

    def model(self) -> nn.Module:
        return make_model(self.case.model, self.is_small, self.with_transformers)

    def optimizer(self, parameters: Iterable[nn.Parameter], fused: bool | None = None) -> torch.optim.Optimizer:
        rate = SMALL_RATE if self.is_small else RATES[self.case.model]
        return torch.optim.AdamW(parameters, lr=rate, fused=fused)

    def loader(self) -> DataLoader[Batch]:
        case = self.case
        collate = {"collate_fn": Padded()} if case.is_ragged else {}
        return DataLoader(
            Samples(case, self.is_small),
            batch_size=None if case.model == "mlp" else case.batch,
            num_workers=min(case.num_workers, 1) if self.is_small else case.num_workers,
            pin_memory=self.device.type not in ("cpu", "mps"),
            **collate,  # type: ignore[arg-type]
        )

    def moved(self, batch: Batch) -> Batch:
        return {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}

    def loss_of(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a batch that is on the device."""
        if self.case.model == "gpt":
            return model(batch["tokens"], batch["labels"])
        if self.case.model == "layers":
            return model(batch["inputs"]).square().mean()
        inputs = [batch[key] for key in ("input_ids", "attention_mask", "images", "inputs") if key in batch]
        return F.cross_entropy(model(*inputs), batch["labels"])

    def facts(self) -> dict[str, float]:
        """Return what a step processes: samples, tokens (if their number is constant) and, for the GPT, FLOPs."""
        case, tokens = self.case, 0
        if case.length and not case.is_ragged:
            size = SMALL_GPT if case.model == "gpt" else SMALL_DISTILBERT
            tokens = case.batch * (min(case.length, size.length) if self.is_small else case.length)
        flops = tokens * flops_per_token(self.is_small) if case.model == "gpt" else 0.0
        return {"samples": case.batch, "tokens": tokens, "flops": flops}

"""The losses of *layers*: each of torch.nn, and how to call it on (batch, 3) outputs and classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Call = Callable[[Any, Tensor, Tensor], Tensor]


def plainly(loss: nn.Module, y: Tensor, t: Tensor) -> Tensor:
    return loss(y, t)


@dataclass(frozen=True)
class Loss:
    """How to make and call a loss."""

    make: Callable[[], nn.Module]
    call: Call = plainly
    is_alike: bool = True
    """Whether the mean of the ranks' losses is that of all samples."""


def hot(y: Tensor, t: Tensor) -> Tensor:
    """Return the targets as vectors of the outputs' dtype."""
    return F.one_hot(t, 3).to(y.dtype)


def signs(y: Tensor, t: Tensor) -> Tensor:
    return (t > 0).to(y.dtype) * 2 - 1


def on_vectors(loss: nn.Module, y: Tensor, t: Tensor) -> Tensor:
    return loss(y, hot(y, t))


def on_triplets(loss: nn.Module, y: Tensor, t: Tensor) -> Tensor:
    return loss(y, hot(y, t), hot(y, (t + 1) % 3))


def ctc(loss: nn.Module, y: Tensor, t: Tensor) -> Tensor:
    chances = F.log_softmax(y, 1)[None].float().expand(2, -1, -1)
    lengths = torch.ones(len(t), dtype=torch.long)
    return loss(chances, (t % 2 + 1)[:, None], lengths * 2, lengths)


LOSSES: dict[str, Loss] = {
    "ce": Loss(nn.CrossEntropyLoss),
    "weighted_ce": Loss(lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])), is_alike=False),
    "smooth_ce": Loss(lambda: nn.CrossEntropyLoss(label_smoothing=0.1)),
    **(
        {"linear_ce": Loss(lambda: nn.LinearCrossEntropyLoss(3, 3, bias=True))}
        if hasattr(nn, "LinearCrossEntropyLoss")  # since torch 2.13
        else {}
    ),
    "nll": Loss(nn.NLLLoss, lambda loss, y, t: loss(F.log_softmax(y, 1), t)),
    "bce": Loss(nn.BCELoss, lambda loss, y, t: loss(y.float().sigmoid(), hot(y, t).float())),
    "bce_logits": Loss(lambda: nn.BCEWithLogitsLoss(pos_weight=torch.full((3,), 2.0)), on_vectors),
    "mse": Loss(nn.MSELoss, on_vectors),
    "l1": Loss(nn.L1Loss, on_vectors),
    "smooth_l1": Loss(nn.SmoothL1Loss, on_vectors),
    "huber": Loss(nn.HuberLoss, on_vectors),
    "kl": Loss(
        lambda: nn.KLDivLoss(reduction="batchmean"),
        lambda loss, y, t: loss(F.log_softmax(y, 1), hot(y, t) * 0.7 + 0.1),
    ),
    "margin": Loss(nn.MultiMarginLoss, lambda loss, y, t: loss(y.float(), t)),
    "multi_label": Loss(
        nn.MultiLabelMarginLoss, lambda loss, y, t: loss(y.float(), F.pad(t[:, None], (0, 2), value=-1))
    ),
    "multi_label_soft": Loss(nn.MultiLabelSoftMarginLoss, on_vectors),
    "soft_margin": Loss(nn.SoftMarginLoss, lambda loss, y, t: loss(y[:, 0], signs(y, t))),
    "ranking": Loss(lambda: nn.MarginRankingLoss(0.5), lambda loss, y, t: loss(y[:, 0], y[:, 1], signs(y, t))),
    "hinge": Loss(nn.HingeEmbeddingLoss, lambda loss, y, t: loss(y[:, 0], signs(y, t))),
    "poisson": Loss(nn.PoissonNLLLoss, on_vectors),
    "gaussian": Loss(nn.GaussianNLLLoss, lambda loss, y, t: loss(y.float(), hot(y, t).float(), y.float().square() + 1)),
    "cosine": Loss(nn.CosineEmbeddingLoss, lambda loss, y, t: loss(y, hot(y, t), signs(y, t))),
    "triplet": Loss(nn.TripletMarginLoss, on_triplets),
    "triplet_distance": Loss(
        lambda: nn.TripletMarginWithDistanceLoss(distance_function=nn.CosineSimilarity()), on_triplets
    ),
    "ctc": Loss(nn.CTCLoss, ctc, is_alike=False),
}

"""More bodies of *layers*: layers that reshape or measure, bare parameters, and tied, frozen or written tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.nets import BODIES, WIDTH, Body, L, W, calls, chain, floats, linear, parameter, words

chain(
    "upsample",
    floats(1, 4, 4),
    lambda: [
        nn.Upsample(scale_factor=2),
        nn.Conv2d(1, 2, 3),
        nn.UpsamplingNearest2d(scale_factor=2),
        nn.UpsamplingBilinear2d(scale_factor=2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        L(8, 3),
    ],
)
chain(
    "channels_last",
    floats(2, 4, 4),
    lambda: [
        nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last),
        nn.ChannelShuffle(2),
        nn.PixelShuffle(2),
        nn.PixelUnshuffle(4),
        nn.Flatten(),
        L(16, 3),
    ],
)
chain(
    "fold",
    floats(2, 4, 4),
    lambda: [
        nn.Unfold(2),
        nn.Linear(9, 9),
        nn.Fold(4, 2),
        nn.Flatten(),
        nn.Unflatten(1, (2, 16)),
        nn.Flatten(),
        L(32, 3),
    ],
)
calls(
    "containers",
    floats(W),
    lambda s, x: s.body["head"](s.rows[0](x) + s.rows[1](x) * s.scales["a"] + x @ s.matrices[0]),
    body=lambda: nn.ModuleDict({"head": L(4, 3)}),
    rows=lambda: nn.ModuleList([L(W, 4), L(W, 4)]),
    scales=lambda: nn.ParameterDict({"a": nn.Parameter(torch.ones(4))}),
    matrices=lambda: nn.ParameterList([nn.Parameter(torch.eye(W, 4))]),
)
calls(
    "distances",
    floats(W),
    lambda s, x: torch.stack([s.c(s.a(x), s.b(x)), s.p(s.a(x), s.b(x)), s.b(x).sum(1)], 1),
    a=linear(W, 4),
    b=linear(W, 4),
    c=nn.CosineSimilarity,
    p=nn.PairwiseDistance,
)
calls("zero_dim", floats(W), lambda s, x: s.l(x) * s.t.exp(), l=linear(W), t=parameter(lambda: torch.tensor(0.3)))
calls(
    "bare",
    floats(W),
    lambda s, x: (x @ s.m + s.b) * s.s,
    m=parameter(lambda: torch.eye(W, 3)),
    b=parameter(lambda: torch.zeros(3)),
    s=parameter(lambda: torch.ones(3)),
)
calls(
    "einsum_cdist",
    floats(W),
    lambda s, x: -torch.cdist(torch.einsum("bi,ij->bj", x, s.m), s.c),
    m=parameter(lambda: torch.randn(W, 4)),
    c=parameter(lambda: torch.randn(3, 4)),
)
calls(
    "lerp",
    floats(W),
    lambda s, x: torch.lerp(s.l(x).float(), torch.zeros(3), s.w.float()),
    l=linear(W),
    w=parameter(lambda: torch.full((3,), 0.2)),
)
calls(
    "matrix_exp",
    floats(W),
    lambda s, x: s.l(x @ torch.linalg.matrix_exp(s.m)),
    m=parameter(lambda: torch.randn(W, W) * 0.1),
    l=linear(W),
)
calls(
    "adaptive_softmax",
    floats(W),
    lambda s, x: s.a.log_prob(s.l(x))[:, :3],
    l=linear(W, W),
    a=lambda: nn.AdaptiveLogSoftmaxWithLoss(W, 6, [2, 4], div_value=1.5),
)


def without_autocast(s: Any, x: Tensor) -> Tensor:
    x = s.l(x)
    with torch.autocast("cpu", enabled=False):
        return s.h(x.to(s.h.weight.dtype).tanh())


calls("autocast_off", floats(W), without_autocast, l=linear(W, 6), h=linear(6))


class Tied(nn.Module):
    """An embedding tied to the layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.h, self.l = nn.Embedding(11, WIDTH), L(WIDTH, 11, bias=False), L(11, 3)
        self.h.weight = self.e.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.l(self.h(self.e(x).mean(1).tanh()))


class Averaged(nn.Module):
    """A moving average of the weights, and buffers of every dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(L(WIDTH, 6), nn.Tanh(), L(6, 3))
        self.slow = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("low", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("wide", torch.ones(3, dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([True, True, False]))
        self.register_buffer("empty", torch.zeros(0, 2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.mean.lerp_(torch.ones_like(self.mean), 1e-4)
                for slow, now in zip(self.slow.parameters(), self.net.parameters(), strict=True):
                    if slow.shape == now.shape:  # as it is not where a strategy shares it out
                        slow.mul_(0.9999).add_(0.0001)
        return self.net(x) + self.slow(x) * self.mean.mean() + self.low.to(x.dtype)


def frozen() -> nn.Module:
    body = nn.Sequential(L(WIDTH, 6), nn.Tanh(), nn.LayerNorm(6), L(6, 3))
    body[0].requires_grad_(False)
    return body


BODIES["tied"] = Body(Tied, words(4))
BODIES["averaged"] = Body(Averaged, floats(W))
BODIES["frozen"] = Body(frozen, floats(W))

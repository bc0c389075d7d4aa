"""The bodies of *layers*: each kind of layer of torch.nn in a small net of (batch, ...) in and (batch, 3) out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

WIDTH = 8
Forward = Callable[[Any, Tensor], Tensor]
Inputs = Callable[[int], Tensor]


@dataclass(frozen=True)
class Body:
    """How to make a body, and what it takes."""

    make: Callable[[], nn.Module]
    inputs: Inputs
    is_alike: bool = True
    """Whether ranks compute what one process does: no statistics over a batch, and nothing drawn."""


BODIES: dict[str, Body] = {}
FORWARDS: dict[str, Forward] = {}
EXEMPT = {
    **dict.fromkeys(("Module", "Container", "RNNBase", "RNNCellBase"), "the base of others"),
    "DataParallel": "one process with several GPUs, which no strategy here is",
    "SyncBatchNorm": "refuses what is not on a GPU",
    "NLLLoss2d": "another name of NLLLoss",
}
"""What of torch.nn no net has, and why."""


class Calls(nn.Module):
    """A body whose forward is a function, found by its name, so that the body can be pickled and copied."""

    def __init__(self, name: str, parts: dict[str, Any]) -> None:
        super().__init__()
        self.name = name
        for key, part in parts.items():
            setattr(self, key, part)

    def forward(self, x: Tensor) -> Tensor:
        return FORWARDS[self.name](self, x)


def floats(*shape: int) -> Inputs:
    """Return a function that makes random inputs, the same each time."""
    return lambda n: torch.randn(n, *shape, generator=torch.Generator().manual_seed(5))


def words(*shape: int) -> Inputs:
    """Return a function that makes random word numbers below 11."""
    return lambda n: torch.randint(0, 11, (n, *shape), generator=torch.Generator().manual_seed(5))


def chain(name: str, inputs: Inputs, make: Callable[[], list[nn.Module]], is_alike: bool = True) -> None:
    """Add a body of layers in a row."""
    BODIES[name] = Body(lambda: nn.Sequential(*make()), inputs, is_alike)


def calls(name: str, inputs: Inputs, forward: Forward, is_alike: bool = True, **make: Callable[[], Any]) -> None:
    """Add a body of parts, made in their order, with a custom forward."""
    FORWARDS[name] = forward
    BODIES[name] = Body(lambda: Calls(name, {key: each() for key, each in make.items()}), inputs, is_alike)


def linear(i: int, o: int = 3, **options: Any) -> Callable[[], nn.Linear]:
    return lambda: nn.Linear(i, o, **options)


def parameter(value: Callable[[], Tensor]) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(value())


L, W = nn.Linear, WIDTH

chain("linear", floats(W), lambda: [L(W, 16), nn.Tanh(), L(16, 3)])
chain("no_bias", floats(W), lambda: [L(W, 16, bias=False), nn.GELU(), L(16, 3, bias=False)])
calls("bilinear", floats(W), lambda s, x: s.b(x[:, :4], x[:, 4:]), b=lambda: nn.Bilinear(4, 4, 3))
calls("bilinear_behind", floats(W), lambda s, x: s.b(s.l(x), x), l=linear(W, 4), b=lambda: nn.Bilinear(4, W, 3))


def spatial(d: int) -> Callable[[str], Any]:
    """Return a function from a kind of layer, such as "ConvNd", to its class over d dimensions."""
    return lambda kind: getattr(nn, kind.replace("Nd", f"{d}d"))


def add_convolutions(d: int) -> None:
    """Add the nets of convolutions, norms and paddings over d dimensions."""
    of, image = spatial(d), floats(2, *(4,) * d)
    whole, smaller = 2 * 4**d, 4 * 2**d
    pool, pads = of("AdaptiveAvgPoolNd")(1), ("Circular", "Constant", "Reflection", "Replication", "Zero")
    chain(f"conv{d}", image, lambda: [of("ConvNd")(2, 4, 3), nn.ReLU(), nn.Flatten(), L(smaller, 3)])
    chain(f"convt{d}", image, lambda: [of("ConvTransposeNd")(2, 2, 2), nn.Flatten(), L(2 * 5**d, 3)])
    chain(f"bn{d}_first", image, lambda: [of("BatchNormNd")(2), nn.Flatten(), L(whole, 3)], False)
    chain(
        f"bn{d}_behind",
        image,
        lambda: [of("ConvNd")(2, 4, 3), of("BatchNormNd")(4), nn.ReLU(), nn.Flatten(), L(smaller, 3)],
        False,
    )
    instance = {"affine": True, "track_running_stats": True}
    chain(f"instance{d}", image, lambda: [of("InstanceNormNd")(2, **instance), nn.Flatten(), L(whole, 3)], False)
    chain(
        f"pads{d}",
        image,
        lambda: [
            of("ConvNd")(2, 3, 3),
            *(of(f"{kind}PadNd")(1, *([0.5] if kind == "Constant" else [])) for kind in pads),
            copy.deepcopy(pool),
            nn.Flatten(),
            L(3, 3),
        ],
    )


def add_pools(d: int) -> None:
    """Add the nets of poolings, dropouts and lazy layers over d dimensions."""
    of, image, whole = spatial(d), floats(2, *(4,) * d), 2 * 4**d
    pool = of("AdaptiveAvgPoolNd")(1)
    chain(
        f"pools{d}",
        image,
        lambda: [
            of("ConvTransposeNd")(2, 3, 5),
            of("MaxPoolNd")(2, 1),
            of("AvgPoolNd")(2, 1),
            nn.Softplus(),  # the root of a sum that is zero has no gradient
            of("LPPoolNd")(2, 2, 1),
            of("AdaptiveMaxPoolNd")(2),
            copy.deepcopy(pool),
            nn.Flatten(),
            L(3, 3),
        ],
    )
    calls(
        f"unpool{d}",
        image,
        lambda s, x: s.l(s.u(*s.p(s.c(x))).flatten(1)),
        c=lambda: of("ConvNd")(2, 2, 1),
        p=lambda: of("MaxPoolNd")(2, return_indices=True),
        u=lambda: of("MaxUnpoolNd")(2),
        l=linear(whole),
    )
    chain(
        f"dropouts{d}", image, lambda: [of("ConvNd")(2, 3, 3), of("DropoutNd")(), nn.Flatten(), L(3 * 2**d, 3)], False
    )
    if d > 1:
        fractional = of("FractionalMaxPoolNd")
        chain(
            f"fractional{d}",
            image,
            lambda: [fractional(2, 2), of("ConvNd")(2, 3, 2), nn.Flatten(), L(3, 3)],
            False,
        )
    chain(
        f"lazy{d}",
        image,
        lambda: [
            of("LazyConvNd")(3, 2),
            of("LazyBatchNormNd")(),
            of("LazyConvTransposeNd")(3, 2),
            of("LazyInstanceNormNd")(affine=True, track_running_stats=True),
            nn.Flatten(),
            nn.LazyLinear(3),
        ],
        False,
    )


for dimensions in (1, 2, 3):
    add_convolutions(dimensions)
    add_pools(dimensions)

chain("lazy_linear", floats(W), lambda: [nn.LazyLinear(6), nn.Tanh(), L(6, 3)])
chain("bn_momentum_none", floats(W), lambda: [L(W, 6), nn.BatchNorm1d(6, momentum=None), L(6, 3)], False)
chain("bn_no_stats", floats(W), lambda: [L(W, 6), nn.BatchNorm1d(6, track_running_stats=False), L(6, 3)], False)
chain("bn_frozen", floats(W), lambda: [L(W, 6), nn.BatchNorm1d(6).requires_grad_(False), L(6, 3)], False)
chain("layernorm_first", floats(W), lambda: [nn.LayerNorm(W), L(W, 3)])
chain("layernorm_behind", floats(W), lambda: [L(W, 6), nn.LayerNorm(6), nn.ReLU(), L(6, 3)])
chain("layernorm_2d", floats(4, 4), lambda: [nn.LayerNorm((4, 4)), nn.Flatten(), L(16, 3)])
chain("rmsnorm_first", floats(W), lambda: [nn.RMSNorm(W), L(W, 3)])
chain("rmsnorm_behind", floats(W), lambda: [L(W, 6), nn.RMSNorm(6), L(6, 3)])
chain("groupnorm_first", floats(4, 4), lambda: [nn.GroupNorm(2, 4), nn.Flatten(), L(16, 3)])
chain("groupnorm_behind", floats(2, 4, 4), lambda: [nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), L(16, 3)])
for norm_name, norm in {"local_response": nn.LocalResponseNorm, "cross_map": nn.CrossMapLRN2d}.items():
    chain(norm_name, floats(2, 4, 4), lambda norm=norm: [nn.Conv2d(2, 4, 3), norm(2), nn.Flatten(), L(16, 3)])

ACTIVATIONS = {
    "rising": (nn.CELU, nn.ELU, nn.GELU, nn.LeakyReLU, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Softplus),
    "bounded": (nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LogSigmoid, nn.Sigmoid, nn.Softsign, nn.Tanh),
    "shrinking": (nn.Hardshrink, nn.Softshrink, nn.Tanhshrink, nn.Identity),
}
for family, classes in ACTIVATIONS.items():
    # A residual each, for what is zero over much of its range.
    calls(
        f"activations_{family}",
        floats(W),
        lambda s, x: s.l(sum((then(first(x)) for first, then in zip(s.first, s.then, strict=True)), x)),
        first=lambda classes=classes: nn.ModuleList(L(W, W) for _ in classes),
        then=lambda classes=classes: nn.ModuleList(each() for each in classes),
        l=linear(W),
    )
chain("glu_threshold", floats(W), lambda: [L(W, 12), nn.GLU(), nn.Threshold(-0.5, 0.1), L(6, 3)])
chain("softmax_soft", floats(W), lambda: [L(W, 6), nn.Softmax(1), L(6, 6), nn.Softmin(1), L(6, 3), nn.LogSoftmax(1)])
chain("softmax2d", floats(2, 4, 4), lambda: [nn.Conv2d(2, 4, 3), nn.Softmax2d(), nn.Flatten(), L(16, 3)])
chain("prelu", floats(W), lambda: [nn.PReLU(W), L(W, 6), nn.PReLU(), L(6, 3)])
chain(
    "random",
    floats(W),
    lambda: [L(W, 6), nn.RReLU(), nn.Dropout(0.2), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2), L(6, 3)],
    False,
)
chain("embedding", words(4), lambda: [nn.Embedding(11, 6, padding_idx=0), nn.Flatten(), L(24, 3)])
chain("embedding_norm", words(4), lambda: [nn.Embedding(11, 6), nn.LayerNorm(6), nn.Flatten(), L(24, 3)])
chain("embedding_max_norm", words(4), lambda: [nn.Embedding(11, 6, max_norm=1.0), nn.Flatten(), L(24, 3)])
chain("embedding_bag", words(4), lambda: [nn.EmbeddingBag(11, 6), L(6, 3)])
chain("embedding_bag_max", words(4), lambda: [nn.EmbeddingBag(11, 6, mode="max"), L(6, 3)])


def add_recurrent(kind: str) -> None:
    """Add the bodies of a kind of recurrent layer."""
    both = kind == "GRU"
    calls(
        kind.lower(),
        floats(4, 3),
        lambda s, x: s.h(s.r(x)[0][:, -1]),
        r=lambda: getattr(nn, kind)(3, 5, 2, batch_first=True, bidirectional=both),
        h=linear(10 if both else 5),
    )
    calls(
        kind.lower() + "_cell",
        floats(W),
        lambda s, x: s.h(s.r(x)[0] if kind == "LSTM" else s.r(x)),
        r=lambda: getattr(nn, kind + "Cell")(W, 5),
        h=linear(5),
    )


for recurrent in ("RNN", "LSTM", "GRU"):
    add_recurrent(recurrent)
calls(
    "lstm_proj",
    floats(4, 3),
    lambda s, x: s.h(s.r(x)[0][:, -1]),
    r=lambda: nn.LSTM(3, 5, batch_first=True, proj_size=2),
    h=linear(2),
)


def attention(name: str, forward: Forward, **options: Any) -> None:
    calls(name, floats(4, W), forward, a=lambda: nn.MultiheadAttention(W, 2, batch_first=True, **options), h=linear(W))


attention("attention", lambda s, x: s.h(s.a(x, x, x, need_weights=False)[0].mean(1)))
attention("attention_bias_kv", lambda s, x: s.h(s.a(x, x, x)[0].mean(1)), add_bias_kv=True, add_zero_attn=True)
attention("attention_kdim", lambda s, x: s.h(s.a(x, x[..., :3], x[..., :5])[0].mean(1)), kdim=3, vdim=5)


def encoder(norm_first: bool = False) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(W, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)


def masked(s: Any, x: Tensor) -> Tensor:
    mask = (torch.arange(4)[None] > x[:, :1] % 3 + 1).expand(len(x), 4)
    return s.h(s.t(s.e(x), src_key_padding_mask=mask)[:, 0])


BLOCK = {"nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
calls("encoder", floats(4, W), lambda s, x: s.h(s.t(x).mean(1)), t=encoder, h=linear(W))
calls("encoder_pre", floats(4, W), lambda s, x: s.h(s.t(x).mean(1)), t=lambda: encoder(True), h=linear(W))
calls("encoder_masked", words(4), masked, e=lambda: nn.Embedding(11, W), t=encoder, h=linear(W))
calls(
    "decoder",
    floats(4, W),
    lambda s, x: s.h(s.t(x, x[:, :2]).mean(1)),
    t=lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(W, **BLOCK), 2),
    h=linear(W),
)
calls(
    "transformer",
    floats(4, W),
    lambda s, x: s.h(s.t(x, x).mean(1)),
    t=lambda: nn.Transformer(W, num_encoder_layers=1, num_decoder_layers=1, **BLOCK),
    h=linear(W),
)
calls(
    "vit",
    floats(1, 4, 4),
    lambda s, x: s.head(
        s.norm(s.blocks(torch.cat([s.token.expand(len(x), -1, -1), s.patch(x).flatten(2).mT], 1) + s.place)[:, 0])
    ),
    patch=lambda: nn.Conv2d(1, W, 2, 2),
    token=parameter(lambda: torch.randn(1, 1, W) * 0.1),
    place=parameter(lambda: torch.randn(1, 5, W) * 0.1),
    blocks=lambda: encoder(True),
    norm=lambda: nn.LayerNorm(W),
    head=linear(W),
)

P = parametrizations
chain("param_orthogonal", floats(W), lambda: [P.orthogonal(L(W, 6)), nn.Tanh(), L(6, 3)])
chain("param_orthogonal_square", floats(W), lambda: [P.orthogonal(L(W, W)), nn.Tanh(), L(W, 3)])
chain("param_orthogonal_cayley", floats(W), lambda: [P.orthogonal(L(W, W), orthogonal_map="cayley"), L(W, 3)])
chain("param_weight_norm", floats(W), lambda: [P.weight_norm(L(W, 6)), nn.Tanh(), L(6, 3)])
chain("param_spectral", floats(W), lambda: [P.spectral_norm(L(W, 6)), nn.Tanh(), L(6, 3)], False)
chain("old_weight_norm", floats(W), lambda: [weight_norm(L(W, 6)), nn.Tanh(), L(6, 3)])
chain("old_spectral_first", floats(W), lambda: [spectral_norm(L(W, 6)), nn.Tanh(), L(6, 3)], False)
chain("old_spectral_conv", floats(2, 4, 4), lambda: [spectral_norm(nn.Conv2d(2, 4, 3)), nn.Flatten(), L(16, 3)], False)

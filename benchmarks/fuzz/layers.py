"""Sixty small nets, one for each kind of layer and loss, under each strategy and precision on two ranks, beside one process.

    python benchmarks/fuzz/layers.py alone DIR [--nets a,b] [--precisions p,q]         the reference, on one process
    python -m trainwright.launch.processes --num-processes 2 -- \
        python benchmarks/fuzz/layers.py ranks DIR [--nets ..] [--strategies ..] [--precisions ..]
Rank 0 prints one line a cell that differs, and the count of all.
"""

import argparse
import copy
import io
import math
import os
import pickle
import sys
import traceback
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw

W = 8  # width
QUIET = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "logger": False,
}


def GENERATOR():
    return torch.Generator().manual_seed(5)


def floats(*shape):
    return lambda n: torch.randn(n, *shape, generator=GENERATOR())


def words(*shape):
    return lambda n: torch.randint(0, 11, (n, *shape), generator=GENERATOR())


def flat(y):
    return y.flatten(1)


NETS = {}
OVER_BATCH = set()  # whose statistics are each rank's own


def net(name, make_input, over_batch=False):
    def keep(make):
        NETS[name] = (make, make_input)
        if over_batch:
            OVER_BATCH.add(name)
        return make

    return keep


class Calls(nn.Module):
    """A body whose forward is a function of it."""

    def __init__(self, function, **modules):
        super().__init__()
        for name, value in modules.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            elif isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.function_name = function.__name__ if hasattr(function, "__name__") else ""
        FUNCTIONS[id(self)] = function
        self.key = id(self)

    def forward(self, x):
        return FUNCTIONS[self.key](self, x)


FUNCTIONS = {}


def seq(*layers):
    return nn.Sequential(*layers, nn.LazyLinear(3) if False else nn.Identity())


def simple(name, make, make_input, over_batch=False):
    NETS[name] = (make, make_input)
    if over_batch:
        OVER_BATCH.add(name)


L = nn.Linear
simple("linear", lambda: nn.Sequential(L(W, 16), nn.Tanh(), L(16, 3)), floats(W))
simple("no_bias", lambda: nn.Sequential(L(W, 16, bias=False), nn.GELU(), L(16, 3, bias=False)), floats(W))
simple("bilinear", lambda: Calls(lambda s, x: s.b(x[:, :4], x[:, 4:]), b=nn.Bilinear(4, 4, 3)), floats(W))
simple("bilinear_behind", lambda: Calls(lambda s, x: s.b(s.l(x), x), l=L(W, 4), b=nn.Bilinear(4, W, 3)), floats(W))
for d in (1, 2, 3):
    conv, trans = getattr(nn, f"Conv{d}d"), getattr(nn, f"ConvTranspose{d}d")
    bn, inorm = getattr(nn, f"BatchNorm{d}d"), getattr(nn, f"InstanceNorm{d}d")
    shape = (2, *(4,) * d)
    simple(
        f"conv{d}",
        lambda conv=conv, d=d: nn.Sequential(conv(2, 4, 3), nn.ReLU(), nn.Flatten(), L(4 * 2**d, 3)),
        floats(*shape),
    )
    simple(
        f"convt{d}",
        lambda trans=trans, d=d: nn.Sequential(trans(2, 2, 2), nn.Flatten(), L(2 * 5**d, 3)),
        floats(*shape),
    )
    simple(f"bn{d}_first", lambda bn=bn, d=d: nn.Sequential(bn(2), nn.Flatten(), L(2 * 4**d, 3)), floats(*shape), True)
    simple(
        f"bn{d}_behind",
        lambda conv=conv, bn=bn, d=d: nn.Sequential(conv(2, 4, 3), bn(4), nn.ReLU(), nn.Flatten(), L(4 * 2**d, 3)),
        floats(*shape),
        True,
    )
    simple(
        f"instance{d}",
        lambda inorm=inorm, d=d: nn.Sequential(
            inorm(2, affine=True, track_running_stats=True), nn.Flatten(), L(2 * 4**d, 3)
        ),
        floats(*shape),
        True,
    )
simple("bn_momentum_none", lambda: nn.Sequential(L(W, 6), nn.BatchNorm1d(6, momentum=None), L(6, 3)), floats(W), True)
simple(
    "bn_no_stats",
    lambda: nn.Sequential(L(W, 6), nn.BatchNorm1d(6, track_running_stats=False), L(6, 3)),
    floats(W),
    True,
)


def frozen_bn():
    body = nn.Sequential(L(W, 6), nn.BatchNorm1d(6), L(6, 3))
    body[1].requires_grad_(False)
    return body


simple("bn_frozen", frozen_bn, floats(W), True)
simple("layernorm_first", lambda: nn.Sequential(nn.LayerNorm(W), L(W, 3)), floats(W))
simple("layernorm_behind", lambda: nn.Sequential(L(W, 6), nn.LayerNorm(6), nn.ReLU(), L(6, 3)), floats(W))
simple("layernorm_2d", lambda: nn.Sequential(nn.LayerNorm((4, 4)), nn.Flatten(), L(16, 3)), floats(4, 4))
simple("rmsnorm_first", lambda: nn.Sequential(nn.RMSNorm(W), L(W, 3)), floats(W))
simple("rmsnorm_behind", lambda: nn.Sequential(L(W, 6), nn.RMSNorm(6), L(6, 3)), floats(W))
simple("groupnorm_first", lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(), L(16, 3)), floats(4, 4))
simple(
    "groupnorm_behind",
    lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), L(16, 3)),
    floats(2, 4, 4),
)
simple(
    "local_response",
    lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.LocalResponseNorm(2), nn.Flatten(), L(16, 3)),
    floats(2, 4, 4),
)
simple("prelu", lambda: nn.Sequential(nn.PReLU(W), L(W, 6), nn.PReLU(), L(6, 3)), floats(W))
simple("embedding", lambda: nn.Sequential(nn.Embedding(11, 6, padding_idx=0), nn.Flatten(), L(24, 3)), words(4))
simple("embedding_norm", lambda: nn.Sequential(nn.Embedding(11, 6), nn.LayerNorm(6), nn.Flatten(), L(24, 3)), words(4))
simple("embedding_bag", lambda: nn.Sequential(nn.EmbeddingBag(11, 6), L(6, 3)), words(4))
for kind in ("RNN", "LSTM", "GRU"):
    simple(
        kind.lower(),
        lambda kind=kind: Calls(
            lambda s, x: s.h(s.r(x)[0][:, -1]),
            r=getattr(nn, kind)(3, 5, 2, batch_first=True, bidirectional=kind == "GRU"),
            h=L(10 if kind == "GRU" else 5, 3),
        ),
        floats(4, 3),
    )
    simple(
        kind.lower() + "_cell",
        lambda kind=kind: Calls(
            lambda s, x: s.h((lambda o: o[0] if isinstance(o, tuple) else o)(s.r(x))),
            r=getattr(nn, kind + "Cell")(W, 5),
            h=L(5, 3),
        ),
        floats(W),
    )
simple(
    "lstm_proj",
    lambda: Calls(lambda s, x: s.h(s.r(x)[0][:, -1]), r=nn.LSTM(3, 5, batch_first=True, proj_size=2), h=L(2, 3)),
    floats(4, 3),
)
simple(
    "attention",
    lambda: Calls(
        lambda s, x: s.h(s.a(x, x, x, need_weights=False)[0].mean(1)),
        a=nn.MultiheadAttention(W, 2, batch_first=True),
        h=L(W, 3),
    ),
    floats(4, W),
)
simple(
    "attention_bias_kv",
    lambda: Calls(
        lambda s, x: s.h(s.a(x, x, x)[0].mean(1)),
        a=nn.MultiheadAttention(W, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True),
        h=L(W, 3),
    ),
    floats(4, W),
)
simple(
    "attention_kdim",
    lambda: Calls(
        lambda s, x: s.h(s.a(x, x[..., :3], x[..., :5])[0].mean(1)),
        a=nn.MultiheadAttention(W, 2, batch_first=True, kdim=3, vdim=5),
        h=L(W, 3),
    ),
    floats(4, W),
)


def encoder(**k):
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(W, 2, 16, dropout=0.0, batch_first=True, **k),
        2,
        enable_nested_tensor=not k.get("norm_first", False),
    )


simple("encoder", lambda: Calls(lambda s, x: s.h(s.t(x).mean(1)), t=encoder(), h=L(W, 3)), floats(4, W))
simple(
    "encoder_pre", lambda: Calls(lambda s, x: s.h(s.t(x).mean(1)), t=encoder(norm_first=True), h=L(W, 3)), floats(4, W)
)


def masked(s, x):
    y = s.t(s.e(x), src_key_padding_mask=(torch.arange(4)[None] > x[:, :1] % 3 + 1).expand(len(x), 4))
    return s.h(y[:, 0])


simple("encoder_masked", lambda: Calls(masked, e=nn.Embedding(11, W), t=encoder(), h=L(W, 3)), words(4))
simple(
    "transformer",
    lambda: Calls(
        lambda s, x: s.h(s.t(x, x).mean(1)), t=nn.Transformer(W, 2, 1, 1, 16, dropout=0.0, batch_first=True), h=L(W, 3)
    ),
    floats(4, W),
)


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(1, W, 2, 2)
        self.token = nn.Parameter(torch.randn(1, 1, W) * 0.1)
        self.place = nn.Parameter(torch.randn(1, 5, W) * 0.1)
        self.blocks = encoder(norm_first=True)
        self.norm = nn.LayerNorm(W)
        self.head = L(W, 3)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.norm(self.blocks(x)[:, 0]))


simple("vit", ViT, floats(1, 4, 4))
P = parametrizations
simple("param_orthogonal", lambda: nn.Sequential(P.orthogonal(L(W, 6)), nn.Tanh(), L(6, 3)), floats(W))
simple("param_orthogonal_square", lambda: nn.Sequential(P.orthogonal(L(W, W)), nn.Tanh(), L(W, 3)), floats(W))
simple(
    "param_orthogonal_cayley", lambda: nn.Sequential(P.orthogonal(L(W, W), orthogonal_map="cayley"), L(W, 3)), floats(W)
)
simple("param_weight_norm", lambda: nn.Sequential(P.weight_norm(L(W, 6)), nn.Tanh(), L(6, 3)), floats(W))
simple("param_spectral", lambda: nn.Sequential(P.spectral_norm(L(W, 6)), nn.Tanh(), L(6, 3)), floats(W), True)
simple("old_weight_norm", lambda: nn.Sequential(weight_norm(L(W, 6)), nn.Tanh(), L(6, 3)), floats(W))
simple("old_spectral_first", lambda: nn.Sequential(spectral_norm(L(W, 6)), nn.Tanh(), L(6, 3)), floats(W), True)
simple(
    "old_spectral_conv",
    lambda: nn.Sequential(spectral_norm(nn.Conv2d(2, 4, 3)), nn.Flatten(), L(16, 3)),
    floats(2, 4, 4),
    True,
)


def tied():
    e, h = nn.Embedding(11, W), L(W, 11, bias=False)
    h.weight = e.weight
    return Calls(lambda s, x: s.l(s.h(s.e(x).mean(1).tanh())), e=e, h=h, l=L(11, 3))


simple("tied", tied, words(4))


def frozen():
    body = nn.Sequential(L(W, 6), nn.Tanh(), nn.LayerNorm(6), L(6, 3))
    body[0].requires_grad_(False)
    return body


simple("frozen", frozen, floats(W))


class Averaged(nn.Module):
    """A copy that follows slowly, and buffers of every dtype."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(L(W, 6), nn.Tanh(), L(6, 3))
        self.slow = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(W))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("low", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("wide", torch.ones(3, dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([True, True, False]))
        self.register_buffer("empty", torch.zeros(0, 2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.mean.lerp_(torch.ones(W), 1e-4)
                for s, n in zip(self.slow.parameters(), self.net.parameters(), strict=False):
                    if s.shape == n.shape:
                        s.mul_(0.9999).add_(0.0001)
        return self.net(x) + self.slow(x) * self.mean.mean() + self.low.float()


simple("averaged", Averaged, floats(W))
simple(
    "zero_dim", lambda: Calls(lambda s, x: s.l(x) * s.t.exp(), l=L(W, 3), t=nn.Parameter(torch.tensor(0.3))), floats(W)
)
simple(
    "bare",
    lambda: Calls(
        lambda s, x: (x @ s.m + s.b) * s.s,
        m=nn.Parameter(torch.eye(W, 3)),
        b=nn.Parameter(torch.zeros(3)),
        s=nn.Parameter(torch.ones(3)),
    ),
    floats(W),
)


def without_autocast(s, x):
    x = s.l(x)
    with torch.autocast("cpu", enabled=False):
        return s.h(x.float().tanh())


simple("autocast_off", lambda: Calls(without_autocast, l=L(W, 6), h=L(6, 3)), floats(W))
simple(
    "einsum_cdist",
    lambda: Calls(
        lambda s, x: -torch.cdist(torch.einsum("bi,ij->bj", x, s.m), s.c),
        m=nn.Parameter(torch.randn(W, 4)),
        c=nn.Parameter(torch.randn(3, 4)),
    ),
    floats(W),
)
simple(
    "lerp",
    lambda: Calls(
        lambda s, x: torch.lerp(s.l(x).float(), torch.zeros(3), s.w), l=L(W, 3), w=nn.Parameter(torch.full((3,), 0.2))
    ),
    floats(W),
)
simple(
    "matrix_exp",
    lambda: Calls(
        lambda s, x: s.l(x @ torch.linalg.matrix_exp(s.m)), m=nn.Parameter(torch.randn(W, W) * 0.1), l=L(W, 3)
    ),
    floats(W),
)
simple(
    "adaptive_softmax",
    lambda: Calls(
        lambda s, x: s.a.log_prob(s.l(x))[:, :3],
        l=L(W, W),
        a=nn.AdaptiveLogSoftmaxWithLoss(W, 6, [2, 4], div_value=1.5),
    ),
    floats(W),
)
simple(
    "upsample",
    lambda: nn.Sequential(
        nn.Upsample(scale_factor=2), nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), L(8, 3)
    ),
    floats(1, 4, 4),
)
simple(
    "channels_last",
    lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), nn.PixelShuffle(2), nn.Flatten(), L(16, 3)
    ),
    floats(2, 4, 4),
)
LOSSES = {
    "weighted_ce": lambda y, t: F.cross_entropy(y, t, weight=torch.tensor([1.0, 2.0, 0.5])),
    "smooth_ce": lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1),
    "nll": lambda y, t: F.nll_loss(F.log_softmax(y, 1), t),
    "bce_logits": lambda y, t: F.binary_cross_entropy_with_logits(
        y, F.one_hot(t, 3).float(), pos_weight=torch.ones(3) * 2
    ),
    "mse": lambda y, t: F.mse_loss(y, F.one_hot(t, 3).float()),
    "l1": lambda y, t: F.smooth_l1_loss(y, F.one_hot(t, 3).float()),
    "huber": lambda y, t: F.huber_loss(y, F.one_hot(t, 3).float()),
    "kl": lambda y, t: F.kl_div(F.log_softmax(y, 1), F.one_hot(t, 3).float() * 0.7 + 0.1, reduction="batchmean"),
    "margin": lambda y, t: F.multi_margin_loss(y.float(), t),
    "poisson": lambda y, t: F.poisson_nll_loss(y, F.one_hot(t, 3).float()),
    "gaussian": lambda y, t: F.gaussian_nll_loss(y.float(), F.one_hot(t, 3).float(), y.float().square() + 1),
    "cosine": lambda y, t: F.cosine_embedding_loss(y, F.one_hot(t, 3).float(), (t > 0).float() * 2 - 1),
    "triplet": lambda y, t: F.triplet_margin_loss(y, F.one_hot(t, 3).float(), F.one_hot((t + 1) % 3, 3).float()),
    "ctc": lambda y, t: F.ctc_loss(
        F.log_softmax(y, 1)[None].float().expand(2, -1, -1),
        (t % 2 + 1)[:, None],
        torch.full((len(t),), 2),
        torch.ones(len(t), dtype=torch.long),
    ),
}
for loss_name in LOSSES:
    # A weighted mean over a rank's samples is none over all samples.
    simple("loss_" + loss_name, NETS["layernorm_behind"][0], floats(W), loss_name in ("weighted_ce", "ctc"))
CLOSE = {"32-true": 1e-3, "bf16-mixed": 0.12, "16-mixed": 0.05}


class Net(tw.Module):
    def __init__(self, name):
        super().__init__()
        torch.manual_seed(3)
        self.name = name
        self.body = NETS[name][0]()
        self.loss = LOSSES.get(name.removeprefix("loss_"), F.cross_entropy)
        self.factor = 1.0

    def training_step(self, batch, batch_idx):
        # Small nets overflow at the usual scale of float16, and by other batches on two ranks than on one.
        return self.loss(self.body(batch[0]), batch[1]) * self.factor

    def validation_step(self, batch, batch_idx):
        y = self.body(batch[0])
        self.log("val_loss", self.loss(y, batch[1]).double())

    def predict_step(self, batch, batch_idx):
        return self.body(batch[0]).float()

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05 / self.factor, momentum=0.9)


class SaveHalf(tw.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def loader(name, ranks, n=16):
    data = TensorDataset(NETS[name][1](n), torch.arange(n) % 3)
    return DataLoader(data, batch_size=4 // ranks)


def trainer(strategy, precision, **more):
    return (
        tw.Trainer(
            devices="auto" if strategy == "single_device" else None,
            strategy=strategy,
            precision=precision,
            max_epochs=1,
            **{**QUIET, **more},
        )
        if False
        else tw.Trainer(strategy=strategy, precision=precision, max_epochs=1, **{**QUIET, **more})
    )


def weights_of(path):
    checkpoint = tw.load_weights(path) if hasattr(tw, "load_weights") else None
    return checkpoint


def factor_of(precision):
    return 2.0**-8 if precision == "16-mixed" else 1.0


def alone(folder, names, precisions):
    kept = {}
    for precision in precisions:
        for name in names:
            module = Net(name)
            module.factor = factor_of(precision)
            start = {k: v.clone() for k, v in module.state_dict().items() if v.is_floating_point()}
            try:
                used = trainer("single_device", precision)
                used.fit(module, loader(name, 1), loader(name, 1))
                loss = float(used.callback_metrics["val_loss"])
                out = torch.cat(used.predict(module, loader(name, 1)))
                kept[precision, name] = (start, {k: v.clone() for k, v in module.state_dict().items()}, loss, out)
            except Exception as error:
                print(f"ALONE {precision} {name}: {type(error).__name__}: {str(error)[:150]}", flush=True)
    torch.save(kept, folder / "alone.pt")
    print(f"alone: {len(kept)}")


def distance(state, start, wanted):
    moved = math.sqrt(sum(float((wanted[k].double() - v.double()).square().sum()) for k, v in start.items()))
    off = math.sqrt(sum(float((wanted[k].double() - state[k].double()).square().sum()) for k in start))
    return off / max(moved, 1e-9)


def afterwards(name, precision, module, plain, whole, stored, state, dtypes, keys, before, say):
    """Look at the module that a run has left, or at the whole copy of it."""
    rank = int(os.environ["RANK"])
    if plain is not None:
        for k, v in plain.state_dict().items():
            if v.dtype != dtypes[k]:
                say(f"afterwards {k} is {v.dtype}")
            elif not torch.equal(v, state[k]) and (rank == 0 or k in dict(plain.named_parameters())):
                say(f"afterwards {k} is not what was saved ({float((v.double() - state[k].double()).abs().max()):.2e})")
        if whole:
            for k, p in module.named_parameters():
                if p is not before[k]:
                    say(f"afterwards {k} is another Parameter")
                if type(p) is not nn.Parameter or set(p.__dict__):
                    say(f"afterwards {k}: {type(p)} {list(p.__dict__)}")
        for k, m in plain.named_modules():
            if more := set(m.__dict__) - keys[k] - {"_hparams"}:
                say(f"afterwards {k or 'module'} has {sorted(more)[:4]}")
            if type(m) is not type(stored.get_submodule(k)) and "Parametrized" not in type(m).__name__:
                say(f"afterwards {k or 'module'} is a {type(m)}")
        repr(plain)
        if "param_" not in name and "old_spec" not in name and "old_weight" not in name:
            copied = copy.deepcopy(plain)
        else:
            copied = Net(name)
            copied.load_state_dict(plain.state_dict())
        if "loss_" not in name and "param_" not in name:
            torch.save(plain, io.BytesIO())
            pickle.dumps(plain)
        torch.save(plain.state_dict(), io.BytesIO())
        copied.train()
        x, y = next(iter(loader(name, 2)))
        hand = torch.optim.SGD([p for p in copied.parameters() if p.requires_grad], 0.01)
        copied.loss(copied.body(x), y).backward()
        hand.step()


def cell(folder, name, strategy, precision, kept, say):
    rank = int(os.environ["RANK"])
    path = str(folder / f"{name}-{strategy}-{precision}.ckpt")
    half = str(folder / f"{name}-{strategy}-{precision}-half.ckpt")
    start, wanted, loss, out = kept[precision, name]
    module = Net(name)
    module.factor = factor_of(precision)
    dtypes = {k: v.dtype for k, v in module.state_dict().items()}
    keys = {k: set(v.__dict__) for k, v in module.named_modules()}
    before = dict(module.named_parameters())
    used = trainer(strategy, precision, callbacks=[SaveHalf(half)])
    used.fit(module, loader(name, 2), loader(name, 2))
    got = float(used.callback_metrics["val_loss"])
    used.save_checkpoint(path)
    if not math.isfinite(got):
        say(f"val_loss is {got}")
    stored = Net.load_from_checkpoint(path, name=name)
    state = stored.state_dict()
    off = distance(state, start, wanted)
    if not off <= (2.0 if name in OVER_BATCH else CLOSE[precision]):
        say(f"weights are off by {off:.4f} of what they moved")
    if name not in OVER_BATCH and abs(got - loss) > CLOSE[precision] * 0.2 * max(1.0, abs(loss)):
        say(f"val_loss {got} beside {loss}")
    for k, v in state.items():
        if v.dtype != dtypes[k]:
            say(f"{k} is stored in {v.dtype}")
        if k not in start and v.numel() and not torch.equal(v, wanted[k]):
            say(f"{k} (integer) differs: {v} {wanted[k]}")
    repr(module)
    whole = strategy not in ("fsdp", "deepspeed_stage_3")
    plain = module
    if not whole:
        try:
            plain = tw.gather_module(module)
        except Exception:
            traceback.print_exc()
            plain = None
        if plain is not None and rank != 0:
            say("rank 1 was given a module")
    try:
        afterwards(name, precision, module, plain, whole, stored, state, dtypes, keys, before, say)
    except Exception as error:  # the other rank goes on
        where = traceback.extract_tb(error.__traceback__)[-1]
        if "-v" in sys.argv:
            traceback.print_exc()
        say(f"afterwards: {type(error).__name__}: {str(error)[:200]} ({where.filename.split('/')[-1]}:{where.lineno})")
    again = used.validate(module, loader(name, 2), verbose=False)[0]["val_loss"]
    if again != got:
        say(f"validate gives {again!r}, fit gave {got!r}")
    predicted = used.predict(module, loader(name, 2))
    if predicted is not None and name not in OVER_BATCH:
        mine = torch.cat([p if isinstance(p, torch.Tensor) else torch.cat(p) for p in predicted])
        if len(mine) == len(out) and not torch.allclose(mine, out, atol=0.3 if precision != "32-true" else 1e-3):
            say(f"predictions differ by {float((mine - out).abs().max())}")
    fresh = Net(name)
    other = trainer(strategy, precision)
    read = other.validate(fresh, loader(name, 2), ckpt_path=path, verbose=False)[0]["val_loss"]
    if read != got:
        say(f"validate(ckpt_path) gives {read!r}, fit gave {got!r}")
    resumed = Net(name)
    resumed.factor = factor_of(precision)
    other = trainer(strategy, precision)
    other.fit(resumed, loader(name, 2), loader(name, 2), ckpt_path=half)
    other.save_checkpoint(path + "2")
    for k, v in Net.load_from_checkpoint(path + "2", name=name).state_dict().items():
        if not torch.equal(v, state[k]) and not (v.is_floating_point() and v.isnan().any()):
            say(f"resumed, {k} differs by {float((v.double() - state[k].double()).abs().max()):.2e}")
            break
    if float(other.callback_metrics["val_loss"]) != got:
        say(f"resumed val_loss {float(other.callback_metrics['val_loss'])!r}, {got!r}")


def ranks(folder, names, strategies, precisions):
    import shutil

    kept = torch.load(folder / "alone.pt", weights_only=False)
    count, bad = 0, 0
    for strategy in strategies:
        for precision in precisions:
            for name in names:
                if (precision, name) not in kept:
                    continue
                told = []
                if os.environ.get("FUZZ_PROGRESS") and os.environ["RANK"] == "0":
                    print("..", strategy, precision, name, file=sys.stderr, flush=True)
                try:
                    cell(folder, name, strategy, precision, kept, told.append)
                except Exception as error:
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    told.append(
                        f"{type(error).__name__}: {str(error)[:220]} ({where.filename.split('/')[-1]}:{where.lineno})"
                    )
                    if "-v" in sys.argv:
                        traceback.print_exc()
                count, bad = count + 1, bad + bool(told)
                if torch.distributed.is_initialized():
                    torch.distributed.barrier()  # the other may still be reading
                if os.environ["RANK"] == "0":
                    for line in told[:4]:
                        print(f"{strategy} {precision} {name}: {line}", flush=True)
                    for leftover in folder.glob("*.ckpt*"):
                        shutil.rmtree(leftover, ignore_errors=True)
                elif told:
                    print(f"(rank 1) {strategy} {precision} {name}: {told[0]}", flush=True)
                if torch.distributed.is_initialized():
                    torch.distributed.barrier()
    if os.environ["RANK"] == "0":
        print(f"cells {count}, bad {bad}")
        sys.exit(bool(bad))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nets")
    parser.add_argument(
        "--strategies", default="ddp,ddp_sharded,fsdp,deepspeed_stage_1,deepspeed_stage_2,deepspeed_stage_3"
    )
    parser.add_argument("--precisions", default="bf16-mixed,16-mixed,32-true")
    parser.add_argument("-v", action="store_true")
    args = parser.parse_args()
    names = args.nets.split(",") if args.nets else list(NETS)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.what == "alone":
        alone(args.folder, names, args.precisions.split(","))
    else:
        ranks(args.folder, names, args.strategies.split(","), args.precisions.split(","))

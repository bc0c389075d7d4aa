"""Float8 precision, emulated: losses near those of bf16-mixed, exact resumes, checkpoints, restored modules and errors."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_job import quiet
from jobs import run_job
from small import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainwright as tw

STEPS = 200
WINDOW = 20
TOKENS, WIDTH = 24, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        normed = self.norm(inputs)
        inputs = inputs + self.attention(normed, normed, normed, need_weights=False)[0]
        return inputs + self.down(nn.functional.gelu(self.up(inputs)))


class Language(tw.Module):
    """A small transformer that predicts the next token of an arithmetic series."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.tokens, self.odd = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, 17)
        self.blocks, self.back = nn.Sequential(Block(), Block()), nn.Linear(17, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)
        self.losses: list[float] = []
        self.num_calls = 0
        self.blocks[0].up.register_forward_hook(self.count)  # type: ignore[union-attr]

    def count(self, layer: nn.Module, *_: Any) -> None:
        self.num_calls += "forward" in vars(layer)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        inputs = self.blocks(self.tokens(batch[:, :-1]))
        logits = self.head(inputs + self.back(self.odd(inputs)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def series(times: int = 1) -> DataLoader[Any]:
    """Return a loader with every batch several times, so that as many ranks have the same gradients as one process."""
    generator = torch.Generator().manual_seed(8)
    starts, strides = (torch.randint(0, TOKENS, (STEPS, 5, 1), generator=generator) for _ in range(2))
    batches = (starts + strides * torch.arange(7)) % TOKENS  # 30 rows of a matrix, not a multiple of 16
    return DataLoader([batch for batch in batches for _ in range(times)], batch_size=None)


def emulated() -> tw.Float8Precision:
    return tw.Float8Precision("cpu", emulate=True)


def fit(precision: Any, max_steps: int = STEPS, path: str | None = None, ranks: int = 1, **settings: Any) -> Any:
    module = Language()
    trainer = tw.Trainer(precision=precision, max_epochs=1, max_steps=max_steps, **settings, **QUIET)
    trainer.fit(module, series(ranks), ckpt_path=path)
    return module, trainer


def largest_difference(one: nn.Module, other: dict[str, Tensor]) -> float:
    return max(float((value - other[name]).abs().max()) for name, value in one.state_dict().items())


@pytest.mark.host
def test_losses_are_within_a_percent_of_bf16_mixed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        module, _ = fit(emulated())
    [text] = [record.message for record in caplog.records if record.name == "trainwright" and "fp8" in record.message]
    assert text == (
        "fp8-mixed: 4 linear layers compute in float8, in bfloat16: odd (32 x 17 features), back (17 x 32 features), "
        "head (the last layer)."
    )
    other, _ = fit("bf16-mixed")
    assert module.losses != other.losses
    assert module.losses[-1] < module.losses[0] - 1
    for begin in range(0, STEPS, WINDOW):
        mean, expected = (sum(run.losses[begin : begin + WINDOW]) / WINDOW for run in (module, other))
        assert mean == pytest.approx(expected, rel=0.01)


@pytest.mark.host
def test_a_run_leaves_the_module_and_its_checkpoint_as_bf16_mixed_does(tmp_path: Path) -> None:
    plain, path = Language(), str(tmp_path / "float8.ckpt")
    layers = {name: (id(layer), type(layer), sorted(vars(layer))) for name, layer in plain.named_modules()}
    trainer = tw.Trainer(precision=emulated(), max_epochs=1, max_steps=3, **QUIET)
    trainer.fit(plain, series())
    assert plain.num_calls == 3  # hooks of a converted layer run
    assert {name: (id(layer), type(layer), sorted(vars(layer))) for name, layer in plain.named_modules()} == layers
    trainer.save_checkpoint(path)
    resumed, _ = fit("bf16-mixed", 6, path)
    assert len(resumed.losses) == 3
    assert all(value.dtype == torch.float32 for value in plain.state_dict().values())


@pytest.mark.host
def test_a_run_resumed_in_float8_trains_the_same_bits(tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    whole, _ = fit(emulated(), 12)
    fit(emulated(), 6)[1].save_checkpoint(path)
    resumed, _ = fit(emulated(), 12, path)
    assert len(resumed.losses) == 6
    assert largest_difference(resumed, whole.state_dict()) == 0.0


@pytest.mark.slow
@pytest.mark.host
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_layers_compute_in_float8() -> None:
    eager, _ = fit(emulated(), 3)
    compiled, _ = fit(emulated(), 3, compile={"backend": "eager"})
    plain, _ = fit("bf16-mixed", 3)
    assert compiled.losses == pytest.approx(eager.losses, rel=1e-4)
    assert abs(plain.losses[2] - eager.losses[2]) > 2 * abs(compiled.losses[2] - eager.losses[2])


def test_a_raw_loop_trains_in_float8_until_its_memory_is_freed() -> None:
    accelerator = tw.Accelerator(precision=emulated(), cpu=True)
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    inputs = torch.randn(4, 16)
    in_float8 = model(inputs).detach()
    accelerator.free_memory()
    assert 0.0 < float((net(inputs).detach() - in_float8).abs().max()) < 0.2
    assert all("forward" not in vars(layer) for layer in net)


STRATEGIES = ("ddp", "ddp_sharded", "fsdp", "deepspeed_stage_2", "deepspeed_stage_3")
ROUNDED = ("fsdp", "deepspeed_stage_3")
"""They gather or reduce in bfloat16, as under bf16-mixed."""


def on_ranks(folder: Path) -> dict[str, Any]:
    quiet()
    results: dict[str, Any] = {}
    for strategy in STRATEGIES:
        module, _ = fit(emulated(), 6, ranks=2, strategy=strategy)
        results[strategy] = (module.losses, tw.gather_module(module, all_ranks=True).state_dict())
        assert module.num_calls == 6
        assert not any("linear_mm_config" in vars(layer) for layer in module.modules())
    return results


@pytest.mark.slow
@pytest.mark.host
def test_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    alone, _ = fit(emulated(), 6)
    for result in run_job(on_ranks, 2, tmp_path):
        for strategy, (losses, weights) in result.items():
            is_rounded = strategy in ROUNDED
            assert losses == pytest.approx(alone.losses, rel=0.01 if is_rounded else 1e-5), strategy
            assert is_rounded or largest_difference(alone, weights) < 1e-5, strategy


def test_devices_without_float8_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"precision='fp8-mixed' needs a GPU .*'cpu'.* Pass precision='bf16-mixed'"):
        tw.Trainer(precision="fp8-mixed", **{**QUIET, "accelerator": "cpu"})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"compute capability 8.9 or newer, .*NVIDIA A100 has none. Pass"):
        tw.Float8Precision().check(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    tw.Float8Precision().check(torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"Float8Precision\('cuda'\) does not run on cpu; pass 'cpu' to it"):
        tw.Float8Precision(emulate=True).check(torch.device("cpu"))


def test_a_missing_torchao_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs torchao. Run: pip install 'trainwright\[torchao\]'"):
        emulated().check(torch.device("cpu"))

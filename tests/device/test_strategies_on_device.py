"""Every strategy on an accelerator, with the device's collectives on one rank and on two, equals one process.

Two ranks have separate devices if there are two. They share a single GPU over gloo, since NCCL takes no device twice.
Strategies that cannot run there are skipped with the error's words.
"""

from __future__ import annotations

import importlib.util
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from by_hand import DTYPES, ON_DEVICE, on_host
from jobs import run_job
from small import assert_close, assert_equal, weights
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.devices.abilities import autocasts, collective_backend
from trainwright.strategies.fsdp2.strategy import FSDPStrategy

pytestmark = pytest.mark.gpu

ROWS, EPOCHS = 48, 2
FSDP: dict[str, Any] = {"min_parameters": 0, "auto_wrap_policy": [nn.Linear]}
STRATEGIES: dict[str, Callable[[], Any]] = {
    # First, as it wants gloo beside the device's collectives.
    "fsdp, offloaded": lambda: FSDPStrategy(cpu_offload=True, **FSDP),
    "fsdp": lambda: FSDPStrategy(**FSDP),
    "ddp": lambda: "ddp",
    "ddp_sharded": lambda: "ddp_sharded",
    "deepspeed_stage_1": lambda: "deepspeed_stage_1",
    "deepspeed_stage_2": lambda: "deepspeed_stage_2",
    "deepspeed_stage_3": lambda: "deepspeed_stage_3",
    "deepspeed_stage_2_offload": lambda: "deepspeed_stage_2_offload",
}
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
ON_TWO_RANKS = ("fsdp, offloaded", "fsdp", "ddp", "ddp_sharded")
OVER_GLOO = ON_TWO_RANKS[2:]
"""Strategies that two ranks with one GPU can run."""
CLIPPING = {"32-true": (0.5, "norm"), "bf16-mixed": (0.05, "value"), "16-mixed": (0.5, "norm")}


class Blocks(tw.Module):
    """A few layers with a norm, a frozen parameter and a buffer."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(8)
        norm = nn.BatchNorm1d(16) if batch_norm else nn.LayerNorm(16)
        self.net = nn.Sequential(nn.Linear(8, 16), norm, nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))
        self.net[3].bias.requires_grad_(False)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 0.5]))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs) * self.scale * self.temperature

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]).float(), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        outputs = self(batch[0])
        self.log("val_loss", F.cross_entropy(outputs.float(), batch[1]))
        self.log("count", len(batch[0]), reduce_fx="sum")

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).float()

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        return torch.optim.AdamW(trained, lr=0.02, eps=1e-3)


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    return TensorDataset(torch.randn(samples, 8, generator=generator), torch.arange(samples) % 3)


def everything(strategy: Any, folder: Path, *, world: int, ranks: int, precision: str) -> dict[str, Any]:
    """Fit, cut and resume, validate and predict. `world` ranks share the samples, of which one process does `ranks` parts."""
    settings = {**ON_DEVICE, "devices": world, "strategy": strategy, "precision": precision}
    settings |= dict(zip(("gradient_clip_val", "gradient_clip_algorithm"), CLIPPING[precision], strict=True))
    settings["accumulate_grad_batches"] = 2
    found: dict[str, Any] = {}

    def train(epochs: int, ckpt_path: str | None = None) -> tuple[Any, Any]:
        tw.seed_everything(1)
        module, trainer = Blocks(), tw.Trainer(max_epochs=epochs, **settings)
        trainer.fit(module, DataLoader(data(ROWS), batch_size=4 * ranks), ckpt_path=ckpt_path)
        return module, trainer

    _, cut = train(1)
    path = str(folder / "one.ckpt")
    cut.save_checkpoint(path)
    module, trainer = train(EPOCHS)
    found["loss"] = float(trainer.callback_metrics["loss"])
    found["devices"] = sorted({each.device.type for each in module.parameters()})
    found["backend"] = dist.get_backend() if dist.is_initialized() else None
    copy = tw.gather_module(module, all_ranks=True)
    found["weights"] = on_host(weights(copy))
    resumed, _ = train(EPOCHS, path)
    copy = tw.gather_module(resumed, all_ranks=True)
    found["resumed"] = on_host(weights(copy))
    (validated,) = trainer.validate(module, DataLoader(data(11), batch_size=2 * ranks), verbose=False)
    found["validated"] = validated
    predictions = trainer.predict(module, DataLoader(data(11), batch_size=2 * ranks))
    found["predictions"] = torch.cat([each.cpu() for each in predictions])
    trainer.save_checkpoint(str(folder / "end.ckpt"))
    return found


def incomparable(name: str, precision: str) -> str:
    """Return why the results of a strategy may differ from one process on any device, or ""."""
    has_own_rule = name.startswith("deepspeed") and precision == "16-mixed"
    return "DeepSpeed scales losses by a rule of its own, and skips other steps" if has_own_rule else ""


def missing(name: str, precision: str, device_type: str) -> str:
    """Return why a strategy cannot be tried here, or ""."""
    if precision in DTYPES and not autocasts(device_type, DTYPES[precision]):
        return f"{device_type} has no autocast in {DTYPES[precision]}"
    if name.startswith("fsdp") and collective_backend(device_type) is None:
        return f"torch has no collectives on {device_type}"
    package = "deepspeed" if name.startswith("deepspeed") else "fairscale" if name == "ddp_sharded" else None
    if package is not None and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if package == "deepspeed" and device_type != "cuda":
        return f"DeepSpeed does not compute on {device_type}"
    return incomparable(name, precision)


def all_of_them(folder: Path, world: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Try every strategy in every precision. Return the results, or why there are none."""
    for package in ("deepspeed", "fairscale", "pydantic"):
        warnings.filterwarnings("ignore", module=rf"{package}(\..*)?")
    kind = torch.accelerator.current_accelerator()
    found: dict[str, Any] = {}
    for name in names:
        for precision in PRECISIONS:
            case = f"{name}, {precision}"
            if reason := missing(name, precision, kind.type):
                found[case] = {"skipped": reason}
                continue
            place = folder / case.replace(", ", "-")
            try:
                found[case] = everything(STRATEGIES[name](), place, world=world, ranks=1, precision=precision)
            except Exception:
                found[case] = {"failed": traceback.format_exc()}
    return found


def one_rank(folder: Path) -> dict[str, Any]:
    return all_of_them(folder, 1, tuple(STRATEGIES))


@contextmanager
def sharing_one_device(folder: Path) -> Iterator[None]:
    """Run the ranks of this job as on a cluster that shows all of them the same device."""
    before = dict(os.environ)
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    for name, value in {"RANK": rank, "SIZE": world, "LOCAL_RANK": rank, "LOCAL_SIZE": world}.items():
        os.environ[f"OMPI_COMM_WORLD_{name}"] = value
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=60),
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def two_ranks(folder: Path) -> dict[str, Any]:
    if torch.accelerator.device_count() > 1:
        return {**all_of_them(folder, 2, ON_TWO_RANKS), "normed": synced_batch_norm()}
    with sharing_one_device(folder):
        refused = refused_over_gloo()
        found = {
            f"{name}, {precision}": refused
            for name in ON_TWO_RANKS
            if name not in OVER_GLOO
            for precision in PRECISIONS
        }
        found |= all_of_them(folder, 2, OVER_GLOO)
        found["normed"] = synced_batch_norm()
        dist.destroy_process_group()
        return found


def refused_over_gloo() -> dict[str, Any]:
    """torch's DTensor ends the process when it gathers over gloo on a GPU, so the strategy refuses that."""
    try:
        settings = {**ON_DEVICE, "devices": 2, "strategy": "fsdp"}
        tw.Trainer(max_epochs=1, **settings).fit(Blocks(), DataLoader(data(ROWS)))
    except ValueError as error:
        return {"skipped": str(error)}
    return {"failed": "fsdp trains over gloo"}


def synced_batch_norm() -> dict[str, Any]:
    """Train with statistics over two ranks, whose batches are halves of one process's batches."""
    kind = torch.accelerator.current_accelerator()
    try:
        nn.SyncBatchNorm(2).to(kind)(torch.randn(3, 2, device=kind, requires_grad=True)).sum().backward()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return {"skipped": f"torch's SyncBatchNorm does not run here: {str(error)[:100]}"}
    module = Blocks(batch_norm=True)
    try:
        settings = {**ON_DEVICE, "devices": 2, "strategy": "ddp", "sync_batchnorm": True}
        tw.Trainer(max_epochs=1, **settings).fit(module, DataLoader(data(ROWS), batch_size=4))
    except Exception:
        return {"failed": traceback.format_exc()}
    return {"weights": on_host(weights(module))}


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = run_job(one_rank, 1, tmp_path_factory.mktemp("one"), seconds=140, warnings_are=_warnings())
    return found


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    kind = torch.accelerator.current_accelerator()
    if collective_backend(kind.type) is None:
        pytest.skip(f"torch has no collectives on {kind.type}")
    if kind.type != "cuda" and torch.accelerator.device_count() == 1:
        pytest.skip(f"gloo takes no tensors of {kind.type}")
    folder = tmp_path_factory.mktemp("two")
    return folder, run_job(two_ranks, 2, folder, seconds=140, warnings_are=_warnings())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], dict[str, Any]]:
    """Return the results of one process without a strategy that does the work of so many ranks."""
    known: dict[tuple[int, str], dict[str, Any]] = {}

    def find(ranks: int, precision: str) -> dict[str, Any]:
        if (ranks, precision) not in known:
            folder = tmp_path_factory.mktemp("alone")
            known[ranks, precision] = everything("auto", folder, world=1, ranks=ranks, precision=precision)
        return known[ranks, precision]

    return find


def _warnings() -> str:
    """On a real device, a driver or another torch may give unknown warnings."""
    return "error" if hasattr(torch, "sim") else "default"


def compare(found: dict[str, Any], expected: dict[str, Any], precision: str) -> None:
    if "skipped" in found:
        pytest.skip(found["skipped"])
    assert "failed" not in found, found["failed"]
    tolerance = 1e-4 if precision == "32-true" else 2e-2
    assert_close(found["weights"], expected["weights"], tolerance)
    assert_equal(found["resumed"], found["weights"])
    assert found["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    assert found["validated"] == pytest.approx(expected["validated"], rel=tolerance)
    torch.testing.assert_close(found["predictions"], expected["predictions"], rtol=tolerance, atol=tolerance)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_one_rank_equals_one_process(
    device: torch.device,
    of_one_rank: dict[str, Any],
    alone: Callable[[int, str], dict[str, Any]],
    name: str,
    precision: str,
) -> None:
    found = of_one_rank[f"{name}, {precision}"]
    compare(found, alone(1, precision), precision)
    is_offloaded = name == "fsdp, offloaded"
    assert ("cpu" in found["devices"]) == is_offloaded
    assert set(found["devices"]) <= {"cpu", device.type}
    if name == "fsdp" or name.startswith("deepspeed"):
        own = dist.get_default_backend_for_device(device.type)
        assert own in found["backend"] or "cpu:gloo" in found["backend"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks_equal_one_process(
    of_two_ranks: tuple[Path, list[dict[str, Any]]],
    alone: Callable[[int, str], dict[str, Any]],
    name: str,
    precision: str,
) -> None:
    folder, ranks = of_two_ranks
    for found in ranks:
        compare(found[f"{name}, {precision}"], alone(2, precision), precision)
    path = folder / f"{name}, {precision}".replace(", ", "-") / "end.ckpt"
    loaded = Blocks.load_from_checkpoint(str(path))  # on the CPU
    assert_equal(weights(loaded), ranks[0][f"{name}, {precision}"]["weights"])


@pytest.mark.timeout(200)
def test_batch_norm_is_synchronised_over_two_ranks(of_two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    module = Blocks(batch_norm=True)
    tw.Trainer(max_epochs=1, **ON_DEVICE).fit(module, DataLoader(data(ROWS), batch_size=8))
    for found in of_two_ranks[1]:
        if "skipped" in found["normed"]:
            pytest.skip(found["normed"]["skipped"])
        assert "failed" not in found["normed"], found["normed"]["failed"]
        assert_close(found["normed"]["weights"], on_host(weights(module)), 1e-4)

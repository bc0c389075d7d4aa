"""One process reads two ranks' checkpoints of any strategy: as a module, in a test, in a raw loop, as a file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from jobs import run_job
from small import ON_HOST, QUIET, Classifier, assert_close, assert_equal, loss_of, make_loader, weights
from torch import nn

import trainwright as tw
from trainwright.checkpoint.conversion import export_safetensors
from trainwright.checkpoint.reader import examine, open_checkpoint

STRATEGIES = ["ddp", "ddp_sharded", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
pytestmark = pytest.mark.slow


class Tied(Classifier):
    """Has a head that is tied, a parameter that is frozen, one without dimensions, and a scheduler."""

    def __init__(self, scale: float = 1.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(8, 13, bias=False)
        self.embed.weight = self.net[0].weight
        self.scale = nn.Parameter(torch.tensor(scale))
        self.frozen = nn.Parameter(torch.arange(5.0), requires_grad=False)
        self.register_buffer("shift", torch.full((2, 1), 0.25))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return loss_of(self.net, batch) * self.scale + self.embed(batch[0]).square().mean() * self.shift.sum()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


def save_under_each(folder: Path) -> dict[str, Any]:
    """Train the same three steps under every strategy and save them. Return the loss of a test."""
    for module in ("deepspeed", "fairscale", "pydantic"):
        warnings.filterwarnings("ignore", module=rf"{module}(\..*)?")
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
    losses = {}
    for strategy in STRATEGIES:
        module = Tied()
        trainer = tw.Trainer(max_epochs=1, strategy=strategy, **QUIET)
        trainer.fit(module, make_loader(24, 4))
        trainer.save_checkpoint(folder / f"{strategy}.ckpt")
        (found,) = trainer.test(module, make_loader(21, 4), verbose=False)
        losses[strategy] = found
    return losses


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one-process")
    first, second = run_job(save_under_each, 2, folder)
    assert first == second
    return folder, first


def moments(accelerator: tw.Accelerator, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state of the optimizer, by the parameters' names."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    (optimizer,) = accelerator.engine.optimizers
    return {
        f"{names[parameter]}/{key}": torch.as_tensor(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


@pytest.fixture(scope="module")
def reference(job: tuple[Path, dict[str, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights and moments out of the checkpoint of ddp, whose ranks hold both whole."""
    path = job[0] / "ddp.ckpt"
    checkpoint = open_checkpoint(str(path))
    entries = checkpoint.tensors("optimizer")
    state = {name.partition("/")[2]: checkpoint.read_tensor("optimizer", name) for name in entries}
    return weights(Tied.load_from_checkpoint(str(path))), state


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_process_reads_it(strategy: str, job: tuple[Path, dict[str, Any]], reference: Any, tmp_path: Path) -> None:
    path = job[0] / f"{strategy}.ckpt"
    expected_weights, expected_moments = reference
    assert open_checkpoint(str(path)).header["strategy"].startswith(strategy.split("_stage")[0])
    assert examine(str(path)).problems == []

    loaded = Tied.load_from_checkpoint(str(path))
    assert_close(weights(loaded), expected_weights, 1e-5)
    assert loaded.hparams == {"scale": 1.5}
    assert loaded.embed.weight is loaded.net[0].weight

    tested = Tied()
    (found,) = tw.Trainer(**QUIET).test(tested, make_loader(21, 4), ckpt_path=path, verbose=False)
    assert found == pytest.approx(job[1][strategy], rel=1e-5)
    assert_equal(weights(tested), weights(loaded))

    accelerator = tw.Accelerator(cpu=ON_HOST)
    module = Tied()
    (optimizer,), (scheduler,) = module.configure_optimizers()
    prepared, _, _ = accelerator.prepare(module, optimizer, scheduler)
    accelerator.load_state(str(path))
    assert accelerator.step_count == 3
    assert_equal(weights(prepared), weights(loaded))
    state = moments(accelerator, module)
    assert expected_moments.keys() <= state.keys()
    assert_close({name: state[name] for name in expected_moments}, expected_moments, 1e-5)

    # After training with another optimizer only the weights fit.
    accelerator = tw.Accelerator(cpu=ON_HOST)
    module = Tied()
    prepared, _ = accelerator.prepare(module, torch.optim.SGD(module.parameters(), 0.1))
    with pytest.raises(tw.CheckpointError, match=r"Build the same .*, or load only the weights|Prepare the same ones"):
        accelerator.load_state(str(path))
    accelerator.load_state(str(path), weights_only=True)
    assert_equal(weights(prepared), weights(loaded))

    done = export_safetensors(str(path), str(tmp_path / "model.safetensors"))
    assert done.shared == {"embed.weight": "net.0.weight"}
    assert_equal(
        dict(safetensors.torch.load_file(tmp_path / "model.safetensors")),
        {name: value for name, value in weights(loaded).items() if name != "embed.weight"},
    )

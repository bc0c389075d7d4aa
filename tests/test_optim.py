"""tw.optim.split: which parameters each optimizer steps, and runs of it under strategies, schedules and resumes."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, loss_of, make_data
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon
from torch.utils.data import DataLoader

import trainwright as tw
from trainwright.optim import split

STEPS = 6
SAMPLES = 64


class Tower(tw.Module):
    """A network of three matrices and a head, trained by Muon and AdamW with a schedule."""

    def __init__(self, matrix: Any = Muon) -> None:
        super().__init__()
        torch.manual_seed(5)
        sizes = (8, 32, 24, 16)
        hidden = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.LayerNorm(pair[1]))]
        self.net = nn.Sequential(*hidden, nn.Tanh(), nn.Linear(sizes[-1], 3))
        self.matrix = matrix
        self.rates: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer: Any = self.optimizers()
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def configure_optimizers(self) -> Any:
        optimizer = split(self, partial(self.matrix, lr=0.02), partial(AdamW, lr=3e-3))
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def batches(times: int = 1) -> DataLoader[Any]:
    """Return a loader with every batch several times, so that as many ranks have the same gradients as one process.

    Muon computes in bfloat16, where the sums of gradients of different batches would round differently.
    """
    rows = [list(range(SAMPLES * step, SAMPLES * (step + 1))) for step in range(STEPS)]
    return DataLoader(make_data(SAMPLES * STEPS), batch_sampler=[row for row in rows for _ in range(times)])


def make_trainer(strategy: Any, ranks: int, **settings: Any) -> tw.Trainer:
    devices = 1 if ranks == 1 else "auto"
    return tw.Trainer(strategy=strategy, devices=devices, gradient_clip_val=0.5, max_epochs=1, **{**settings, **QUIET})


def fit(strategy: str, ranks: int, matrix: Any = Muon, **settings: Any) -> tuple[Tower, tw.Trainer]:
    module, trainer = Tower(matrix), make_trainer(strategy, ranks)
    trainer.fit(module, batches(ranks), **settings)
    return module, trainer


DDP = ("ddp", "ddp_sharded")
WHOLE = r"Split_Muon_AdamW steps whole .*'ddp', or 'ddp_sharded'"


def on_ranks(folder: Path) -> dict[str, Any]:
    """Train under every strategy."""
    results: dict[str, Any] = {}
    for strategy in DDP:
        module, trainer = fit(strategy, 2)
        trainer.save_checkpoint(str(folder / f"{strategy}.ckpt"))
        results[strategy] = {"weights": module.state_dict(), "rates": module.rates}
        results[f"{strategy}, resumed"] = resumed(strategy, 2, folder)
    for strategy in ("fsdp", tw.FSDPStrategy(elementwise=True)):
        with pytest.raises(ValueError, match=WHOLE):
            fit(strategy, 2)  # type: ignore[arg-type]
    return results


def resumed(strategy: str, ranks: int, folder: Path) -> dict[str, Tensor]:
    path, half = str(folder / f"{strategy} half.ckpt"), Tower()
    trainer = make_trainer(strategy, ranks, max_steps=STEPS // 2)
    trainer.fit(half, batches(ranks))
    trainer.save_checkpoint(path)
    return fit(strategy, ranks, ckpt_path=path)[0].state_dict()


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name].cpu() - other[name].cpu()).abs().max()) for name in one)


def test_a_resumed_run_trains_the_same_bits(tmp_path: Path) -> None:
    alone, _ = fit("single_device", 1)
    assert largest_difference(alone.state_dict(), Tower().state_dict()) > 0.01
    assert alone.rates[-1] == pytest.approx([0.02, 3e-3])
    assert largest_difference(resumed("single_device", 1, tmp_path), alone.state_dict()) == 0.0


@pytest.mark.slow
@pytest.mark.host
def test_ranks_train_the_weights_of_one_process(tmp_path: Path) -> None:
    alone, _ = fit("single_device", 1)
    results = run_job(on_ranks, 2, tmp_path / "job")
    for result in results:
        for strategy in DDP:
            assert result[strategy]["rates"] == alone.rates
            assert largest_difference(result[strategy]["weights"], alone.state_dict()) < 1e-5
            assert largest_difference(result[f"{strategy}, resumed"], result[strategy]["weights"]) == 0.0


def test_a_split_optimizer_steps_as_two_optimizers_do() -> None:
    module, by_hand = Tower(), Tower()
    optimizer = split(module.net, partial(Muon, lr=0.02), partial(AdamW, lr=3e-3))
    matrices = [by_hand.net[index].weight for index in (0, 2, 4)]
    others = [parameter for parameter in by_hand.net.parameters() if id(parameter) not in map(id, matrices)]
    pair = (Muon(matrices, lr=0.02), AdamW(others, lr=3e-3))
    losses = []
    for batch in batches():
        optimizer.zero_grad()

        def closure(batch: Any = batch) -> Tensor:
            loss = loss_of(module.net, batch)
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()))
        for part in pair:
            part.zero_grad()
        loss_of(by_hand.net, batch).backward()
        for part in pair:
            part.step()
    assert largest_difference(module.state_dict(), by_hand.state_dict()) == 0.0
    assert losses[-1] < losses[0]


def test_a_state_dict_restores_the_state_of_both_parts() -> None:
    def trained(steps: int, state: Any = None, net: Any = None) -> Any:
        net = net or Tower().net
        optimizer = split(net)
        if state is not None:
            optimizer.load_state_dict(state)
        for batch in list(batches())[len(optimizer.state) and STEPS - steps :][:steps]:
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
        return net, optimizer

    whole, _ = trained(STEPS)
    net, optimizer = trained(STEPS // 2)
    net, _ = trained(STEPS // 2, optimizer.state_dict(), net)
    assert largest_difference(net.state_dict(), whole.state_dict()) == 0.0


def test_a_resume_with_other_optimizers_is_rejected(tmp_path: Path) -> None:
    _, trainer = fit("single_device", 1)
    trainer.save_checkpoint(str(tmp_path / "muon.ckpt"))
    with pytest.raises(tw.CheckpointError, match="saved by Split_Muon_AdamW, but this run's is a Split_SGD_AdamW"):
        fit("single_device", 1, SGD, ckpt_path=str(tmp_path / "muon.ckpt"))


class Language(nn.Module):
    """Has every kind of parameter. `is_tied` ties the head to the embedding."""

    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 8)
        self.position = nn.Parameter(torch.zeros(4, 8))
        self.attention = nn.MultiheadAttention(8, 2)
        self.mixer = nn.Conv2d(1, 1, 3)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10)
        if is_tied:
            self.head.weight = self.tokens.weight


MATRICES = {"position", "attention.in_proj_weight", "attention.out_proj.weight", "hidden.weight"}


def test_hidden_matrices_are_split_from_all_other_parameters() -> None:
    for net in (Language(), Language(is_tied=True)):
        optimizer = split(net)
        assert set(optimizer.names["matrix"]) == MATRICES
        matrices, rest = (group["params"] for group in optimizer.param_groups)
        assert len(matrices) + len(rest) == len(list(net.parameters()))
    assert (
        split(net, exclude="position")
        .describe()
        .startswith("Muon: attention.in_proj_weight, attention.out_proj.weight")
    )


def test_exclude_takes_names_modules_and_parameters() -> None:
    net = Language()
    for exclude in ([net.attention, net.position], ("attention", "position"), ["attention", net.position]):
        assert split(net, exclude=exclude).names["matrix"] == ["hidden.weight"]
    assert "head.weight" in split(net, head=False).names["matrix"]
    assert "head.weight" not in split(net, head=False, exclude="head").names["matrix"]


def test_a_group_that_is_added_belongs_to_the_rest() -> None:
    net, layer = Tower().net, nn.Linear(4, 4)
    optimizer = split(net, rest=partial(AdamW, lr=0.5))
    optimizer.add_param_group({"params": layer.parameters()})
    assert optimizer.param_groups[-1]["lr"] == 0.5
    before = layer.weight.detach().clone()
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(layer.weight, before)


def test_wrong_arguments_are_rejected() -> None:
    net = Language()
    for text, arguments in (
        ("exclude='atention' names no parameter or submodule of Language.*'attention'", {"exclude": "atention"}),
        ("Language has no parameters for matrix=: all .* belong to rest", {"exclude": net}),
        ("some parameters appear in more than one parameter group", {"rest": lambda _: AdamW(net.parameters())}),
    ):
        with pytest.raises(ValueError, match=text):
            split(net, **arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"module is a generator, not an nn.Module. Pass the module itself"):
        split(net.parameters())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Linear has no parameters for rest=: all 1 belong to matrix"):
        split(nn.Linear(4, 4, bias=False), head=False)
    for wrong in ("AdamW", lambda parameters: parameters):
        with pytest.raises(TypeError, match=r"not an Optimizer\. Pass a class of optimizers, such as"):
            split(net, rest=wrong)  # type: ignore[arg-type]

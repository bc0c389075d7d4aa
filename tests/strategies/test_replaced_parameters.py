"""Parameters that a hook replaces at the start of an epoch: a grown table, a new head."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import DEVICE, ON_HOST, QUIET, Classifier, assert_close, make_loader, weights
from torch import Tensor, nn
from torch.nn import functional as F

import trainwright as tw

BATCH = 4


class NewHead(tw.Module):
    """Gets another head in its second epoch, by the ways that `way` names."""

    def __init__(self, way: str = "list") -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body, self.head, self.way = nn.Linear(8, 8), nn.Linear(8, 5), way

    def on_train_epoch_start(self) -> None:
        if self.way != "within":
            self.replace()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.way == "within" and batch_idx == 1:
            self.replace()

    def replace(self) -> None:
        if self.current_epoch == 1:
            (optimizer,) = self.trainer.optimizers
            torch.manual_seed(5)
            old, self.head = list(self.head.parameters()), nn.Linear(8, 3, device=DEVICE)
            for each in old:
                optimizer.state.pop(each, None)
            new = dict(zip(old, self.head.parameters(), strict=True))
            for group in optimizer.param_groups:
                parameters = [new.get(each, each) for each in group["params"]]
                if self.way == "in place":
                    group["params"][:] = parameters
                else:
                    group["params"] = parameters

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs).tanh())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01, eps=1e-3)


class Unfrozen(Classifier):
    """Trains its first layer from the second batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx > 0)


class Stranger(Classifier):
    """Its optimizer also has a parameter of no module."""

    def __init__(self, is_trained: bool) -> None:
        super().__init__()
        self.is_trained = is_trained

    def configure_optimizers(self) -> Any:
        stranger = nn.Parameter(torch.ones(2, device=DEVICE), requires_grad=self.is_trained)
        return torch.optim.SGD([*self.net.parameters(), stranger], 0.1)


class Overridden(Stranger):
    """Overrides `parameters`."""

    def parameters(self, recurse: bool = True) -> Any:
        return iter(())


def trained(strategy: Any, ranks: int, way: str = "list") -> dict[str, Tensor]:
    module = NewHead(way)
    trainer = tw.Trainer(strategy=strategy, max_epochs=3, **QUIET)
    trainer.fit(module, make_loader(32, BATCH * ranks))
    return weights(tw.gather_module(module, all_ranks=True) if strategy == "fsdp" else module)


def in_a_loop(strategy: Any, ranks: int) -> dict[str, Tensor]:
    accelerator = tw.Accelerator(cpu=ON_HOST, strategy=strategy)
    module = NewHead()
    model, optimizer, loader = accelerator.prepare(
        module, module.configure_optimizers(), make_loader(32, BATCH * ranks)
    )
    for epoch in range(3):
        if epoch == 1:
            torch.manual_seed(5)
            module.head = nn.Linear(8, 3, device=DEVICE)
            optimizer.param_groups[0]["params"] = [*module.body.parameters(), *module.head.parameters()]
            optimizer.state.clear()  # of the body too
        for batch in loader:
            accelerator.backward(F.cross_entropy(model(batch[0]), batch[1]))
            optimizer.step()
            optimizer.zero_grad()
    trained = accelerator.unwrap_model(model)
    found = weights(tw.gather_module(trained, all_ranks=True) if strategy == "fsdp" else trained)
    accelerator.engine.close()
    return found


def replaced(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        "ddp": trained("ddp", 1),
        "searching": trained(tw.DDPStrategy(find_unused_parameters=True), 1),
        "loop": in_a_loop(tw.DDPStrategy(find_unused_parameters=True), 1),
        "fsdp": trained("fsdp", 1),
        "fsdp loop": in_a_loop("fsdp", 1),
    }
    for strategy in (tw.DDPStrategy(find_unused_parameters=True), "fsdp"):
        with pytest.raises(
            RuntimeError, match=r"'head\.weight' of NewHead was replaced, added or unfrozen within an epoch"
        ):
            trained(strategy, 1, "within")
    with pytest.raises(RuntimeError, match=r"'net\.0\.weight' of Unfrozen .* ddp has not averaged its gradient"):
        tw.Trainer(strategy="ddp_find_unused_parameters_true", max_epochs=1, **QUIET).fit(Unfrozen(), make_loader(32))
    for way in ("list", "in place"):
        with pytest.raises(RuntimeError, match=r"parameters of an optimizer's group were replaced after") as raised:
            trained("ddp_sharded", 1, way)
        found[way] = str(raised.value)
    return found


def refused(folder: Path) -> list[str]:
    warnings.filterwarnings("ignore")
    texts = []
    for strategy in ("deepspeed_stage_2", "deepspeed_stage_3"):
        for way in ("list", "in place"):
            with pytest.raises(RuntimeError) as raised:
                trained(strategy, 1, way)
            texts.append(str(raised.value))
        with pytest.raises(ValueError, match=r"SGD trains parameters of no prepared module, the first of shape \[2\]"):
            tw.Trainer(strategy=strategy, max_epochs=1, **QUIET).fit(Stranger(is_trained=True), make_loader(8))
    for kind in (Stranger, Overridden):
        module = kind(is_trained=False)
        before = weights(module.net)
        tw.Trainer(strategy="deepspeed_stage_2", max_epochs=1, **QUIET).fit(module, make_loader(8))
        assert not any(torch.equal(each, before[name]) for name, each in weights(module.net).items())
    return texts


def test_ddp_and_fsdp_average_the_gradients_of_new_parameters_and_ddp_sharded_refuses_them(tmp_path: Path) -> None:
    expected, loop = trained("single_device", 2), in_a_loop("single_device", 2)
    for result in run_job(replaced, 2, tmp_path):
        assert_close(result["ddp"], expected, 1e-5)
        assert_close(result["searching"], expected, 1e-5)
        assert_close(result["fsdp"], expected, 1e-5)
        for name in ("loop", "fsdp loop"):
            assert_close(result[name], loop, 1e-5)
        assert result["list"] == result["in place"]


def test_deepspeed_refuses_new_parameters_and_those_of_no_module_on_every_rank(tmp_path: Path) -> None:
    first, second = run_job(refused, 2, tmp_path)
    assert first == second
    for text, way in zip(first, ("list", "in place") * 2, strict=True):
        match = (
            "of an optimizer's group were replaced after" if way == "list" else "'head.bias' of NewHead was replaced"
        )
        assert match in text, text

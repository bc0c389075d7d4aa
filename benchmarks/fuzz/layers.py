"""Each kind of layer and loss of torch.nn under each strategy and precision on two ranks, against one process.

A cell fits, validates, predicts, saves, loads the checkpoint, resumes from the middle of its epoch, and checks the module
afterwards. `CLOSE` lists what is within a tolerance of one process; everything else is compared bit for bit. Bodies with batch
statistics, and those that draw random numbers, differ per rank, so only the ends of the same run are compared.
"""

from __future__ import annotations

import math
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from fuzz import irregular_nets
from fuzz.bare_trainer import bare_trainer
from fuzz.kind import Config, processes
from fuzz.left_module import LeftModule
from fuzz.losses import LOSSES
from fuzz.nets import BODIES
from fuzz.refusal import refusals, refuse_what_torch_cannot

assert irregular_nets  # imported for the bodies that it adds

NAME = "layers"
PROCESSES = (1, 2)
LIMIT = 60.0
STRATEGIES = ["ddp", "ddp_sharded", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
CLOSE = {"32-true": 1e-3, "bf16-mixed": 0.12, "16-mixed": 0.05}
"""How far weights may be from one process's, as a share of how far they moved."""
SIMPLEST = {"net": ["linear"], "loss": ["ce"], "strategy": STRATEGIES, "precision": ["32-true", "bf16-mixed"]}
NEVER_COPIED = ("param_", "old_spectral", "old_weight")
"""Bodies that torch itself does not copy or pickle: parametrizations, and weights that are computed in a hook."""


def cells() -> list[Config]:
    """Return each body, and each loss on one of them, under each precision and strategy."""
    nets = [(net, "ce") for net in BODIES] + [("layernorm_behind", loss) for loss in LOSSES if loss != "ce"]
    return [
        {"net": net, "loss": loss, "precision": precision, "strategy": strategy}
        for precision in CLOSE
        for net, loss in nets
        for strategy in STRATEGIES
    ]


class Net(tw.Module):
    """A body and a loss in a user's module."""

    def __init__(self, net: str, loss: str, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = BODIES[net].make()
        self.criterion = LOSSES[loss].make()
        self.loss_name, self.factor = loss, factor
        self.steps_begun = 0

    def loss(self, batch: Any) -> Tensor:
        return LOSSES[self.loss_name].call(self.criterion, self.body(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps_begun += 1
        # Small nets overflow at the usual scale of float16, and by other batches on two ranks than on one.
        return self.loss(batch) * self.factor

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch).double())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.body(batch[0]).float()

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        return torch.optim.SGD(trained, lr=0.05 / self.factor, momentum=0.9)


class SaveHalf(tw.Callback):
    """Saves in the middle of the epoch."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def floating(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's floating state, with zeros for what has no shape yet."""
    state = {name: value for name, value in module.state_dict().items() if value.is_floating_point()}
    return {name: torch.zeros(()) if is_lazy(value) else value.clone() for name, value in state.items()}


class Cell:
    """The runs of a cell, and the differences found."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder, self.said = config, folder, list[str]()
        self.precision = config["precision"]
        self.is_alike = BODIES[config["net"]].is_alike and LOSSES[config["loss"]].is_alike
        self.is_whole = config["strategy"] not in ("fsdp", "deepspeed_stage_3")

    def say(self, what: str) -> None:
        self.said.append(what)

    def net(self) -> Net:
        is_scaled = self.precision == "16-mixed"
        return Net(self.config["net"], self.config["loss"], 2.0**-8 if is_scaled else 1.0)

    def loader(self) -> DataLoader[Any]:
        data = TensorDataset(BODIES[self.config["net"]].inputs(16), torch.arange(16) % 3)
        return DataLoader(data, batch_size=4 // processes())

    def trainer(self, **more: Any) -> tw.Trainer:
        strategy = self.config["strategy"] if processes() > 1 else "single_device"
        return bare_trainer(strategy=strategy, precision=self.precision, max_epochs=1, **more)

    def run_alone(self) -> None:
        """Make the run of one process, and keep its results."""
        by_hand, loss = self.net(), LOSSES[self.config["loss"]]
        both = nn.ModuleList([by_hand.body, by_hand.criterion])
        both.forward = lambda x: by_hand.body(x)  # type: ignore[method-assign]
        refuse_what_torch_cannot(
            both, lambda y, t: loss.call(by_hand.criterion, y, t), self.precision, next(iter(self.loader()))
        )
        module = self.net()
        start = floating(module)
        with refusals(module):
            trainer = self.trainer()
            trainer.fit(module, self.loader(), self.loader())
        state = {name: value.clone() for name, value in module.state_dict().items()}
        val_loss = trainer.callback_metrics["val_loss"].double()
        outputs = torch.cat(trainer.predict(module, self.loader()))
        torch.save([start, state, val_loss, outputs], self.folder / "alone.pt")

    def run_ranks(self) -> None:
        """Make the run of several ranks, and compare it with that of one process and with its own save and resume."""
        self.start, self.wanted, self.val_loss, self.outputs = torch.load(self.folder / "alone.pt")
        module = self.net()
        before = LeftModule(module, is_copied=not self.config["net"].startswith(NEVER_COPIED))
        with refusals(module):
            trainer = self.trainer(callbacks=[SaveHalf(self.folder / "half.ckpt")])
            trainer.fit(module, self.loader(), self.loader())
        self.got = float(trainer.callback_metrics["val_loss"])
        path = str(self.folder / "whole.ckpt")
        trainer.save_checkpoint(path)
        self.stored = Net.load_from_checkpoint(path, net=self.config["net"], loss=self.config["loss"])
        self.state = self.stored.state_dict()
        self.compare_with_one(before)
        self.look_at(module, before)
        self.evaluate(trainer, module, path)
        self.resume()

    def compare_with_one(self, before: LeftModule) -> None:
        """Compare weights, validation and dtypes with those of one process."""
        close = CLOSE[self.precision]
        if not math.isfinite(self.got):
            self.say(f"validation: val_loss is {self.got}")
        both = [
            (self.wanted[name].double(), self.state[name].double(), old.double()) for name, old in self.start.items()
        ]
        moved = math.sqrt(sum(float((wanted - old).square().sum()) for wanted, _, old in both))
        off = math.sqrt(sum(float((wanted - now).square().sum()) for wanted, now, _ in both)) / max(moved, 1e-9)
        if not off <= (close if self.is_alike else 2.0):
            self.say(f"weights: they are off by {off:.4g} of what they moved")
        wanted = float(self.val_loss)
        if self.is_alike and not abs(self.got - wanted) <= close * 0.2 * max(1.0, abs(wanted)):
            self.say(f"validation: val_loss is {self.got} beside {wanted}")
        for name, value in self.state.items():
            if value.dtype != before.dtypes.get(name, value.dtype):
                self.say(f"dtypes: {name} is stored in {value.dtype}")
            if name not in self.start and value.numel() and not torch.equal(value, self.wanted[name]):
                self.say(f"weights: {name} (no float) is {value}, not {self.wanted[name]}")

    def look_at(self, module: Net, before: LeftModule) -> None:
        """Check the module after the run, or the whole copy of it."""
        on_rank_0 = torch.distributed.get_rank() == 0
        repr(module)
        plain: Any = module if self.is_whole else tw.gather_module(module)
        if plain is None:
            return
        if not self.is_whole and not on_rank_0:
            self.say("afterwards: a rank besides 0 was given a whole module")
        try:  # by itself, as the other ranks have no copy to look at
            before.compare_values(plain, self.state, self.say, on_rank_0=on_rank_0)
            if self.is_whole:
                before.compare_parameters(module, self.say)
            before.compare_layers(plain, self.stored, self.say)
            batch = next(iter(self.loader()))
            before.go_on(plain, self.net(), lambda copied: copied.loss(batch))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.say(f"afterwards: {type(error).__name__}: {error} ({where.filename}:{where.lineno})")

    def evaluate(self, trainer: tw.Trainer, module: Net, path: str) -> None:
        """Validate again, predict, and validate the module loaded from the checkpoint."""
        again = trainer.validate(module, self.loader(), verbose=False)[0]["val_loss"]
        if float(torch.tensor(again)) != self.got:  # callback metrics are float32
            self.say(f"validate: it gives {again!r}, fit gave {self.got!r}")
        predicted = trainer.predict(module, self.loader())
        if predicted is not None and self.is_alike:
            mine = torch.cat([each if isinstance(each, Tensor) else torch.cat(each) for each in predicted])
            close = 0.3 if CLOSE[self.precision] > 1e-3 else 1e-3
            if len(mine) == len(self.outputs) and not torch.allclose(mine, self.outputs, atol=close):
                self.say(f"predictions: they are off by {float((mine - self.outputs).abs().max()):.3g}")
        read = self.trainer().validate(self.net(), self.loader(), ckpt_path=path, verbose=False)[0]["val_loss"]
        if float(torch.tensor(read)) != self.got:
            self.say(f"validate(ckpt_path): it gives {read!r}, fit gave {self.got!r}")

    def resume(self) -> None:
        """Resume from the middle of the epoch, and compare the end bit for bit."""
        trainer, path = self.trainer(), str(self.folder / "resumed.ckpt")
        trainer.fit(self.net(), self.loader(), self.loader(), ckpt_path=str(self.folder / "half.ckpt"))
        trainer.save_checkpoint(path)
        ended = Net.load_from_checkpoint(path, net=self.config["net"], loss=self.config["loss"]).state_dict()
        for name, value in ended.items():
            if not torch.equal(value, self.state[name]) and not (value.is_floating_point() and value.isnan().any()):
                off = float((value.double() - self.state[name].double()).abs().max())
                self.say(f"resumed: {name} is off by {off:.2e}")
                break
        if (val_loss := float(trainer.callback_metrics["val_loss"])) != self.got:
            self.say(f"resumed: val_loss is {val_loss!r}, not {self.got!r}")


def differences(config: Config, folder: Path) -> list[str]:
    cell = Cell(config, folder)
    if processes() == 1:
        cell.run_alone()
    else:
        cell.run_ranks()
    return cell.said

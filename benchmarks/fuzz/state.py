"""Each optimizer and scheduler through save and resume under each strategy and precision, and across strategies.

A cell trains two epochs under its strategy, and one epoch that is then resumed there: bit for bit the same. Within `CLOSE`, its
result is that of one process. So is that of its first epoch resumed under each other strategy and on one process, and that of
one process's first epoch resumed here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from fuzz.bare_trainer import bare_trainer
from fuzz.kind import Config, Refused, processes
from fuzz.optimizers import OPTIMIZERS, SCHEDULERS, WITH_MOMENTUM
from fuzz.refusal import refusals
from trainwright.checkpoint.foreign_formats import read_weights

NAME = "state"
PROCESSES = (1, 2, 1)
LIMIT = 90.0
STRATEGIES = [
    "ddp_find_unused_parameters_true",
    "ddp_sharded",
    "fsdp",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_3",
]
CLOSE = {"32-true": 2e-5, "bf16-mixed": 0.02, "16-mixed": 0.02}
"""How far weights may be from one process's."""
CLOSE_OF = {("Muon", "bf16-mixed"): 0.03}
"""The same of an optimizer that answers to a gradient's direction alone, which two ranks round otherwise than one."""
SIMPLEST = {
    "optimizer": ["SGD", "AdamW"],
    "scheduler": [None],
    "precision": ["32-true", "bf16-mixed"],
    "strategy": STRATEGIES,
    "others": [[]],
}


def cells() -> list[Config]:
    """Return each optimizer, and each scheduler on one or two of them, under each precision and strategy.

    In 32 bits an optimizer's state is resumed under all other strategies. In the other precisions, and for schedulers, which no
    strategy changes, it is resumed under the next one.
    """
    pairs: list[tuple[str, str | None]] = [(name, None) for name in OPTIMIZERS]
    pairs += [("AdamW", name) for name in SCHEDULERS] + [("SGD momentum", name) for name in WITH_MOMENTUM]
    found = []
    for precision in CLOSE:
        for optimizer, scheduler in pairs:
            for number, strategy in enumerate(STRATEGIES):
                others = STRATEGIES[number + 1 :] + STRATEGIES[:number]
                cell = {"optimizer": optimizer, "scheduler": scheduler, "precision": precision, "strategy": strategy}
                is_all = scheduler is None and precision == "32-true"
                found.append({**cell, "others": others if is_all else others[:1]})
    return found


class Net(tw.Module):
    """Groups of several sizes, a parameter without dimensions, frozen ones, and one that no loss reaches."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.head = nn.Linear(3, 1)
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.cold = nn.Linear(4, 4).requires_grad_(False)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.config, self.steps_begun = config, 0
        # Small nets overflow at the usual scale of float16, and by other batches on two ranks than on one.
        self.factor = 2.0**-6 if config["precision"].startswith("16") else 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh()) * self.gain + self.frozen.sum() * 0.01

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps_begun += 1
        loss = F.mse_loss(self(batch[0]), batch[1].to(self.head.weight.dtype)) * self.factor
        self.log("loss", loss)
        return loss

    def on_train_start(self) -> None:
        if self.config["optimizer"].startswith("ScheduleFree"):
            self.trainer.optimizers[0].train()

    def configure_optimizers(self) -> Any:
        rest = [each for name, each in self.named_parameters() if not name.startswith(("cold", "body"))]
        parts = [list(self.cold.parameters()), list(self.body.parameters()), rest]
        make = OPTIMIZERS[self.config["optimizer"]]
        try:
            optimizer = make([{"params": part} for part in parts])
        except ValueError:  # of matrices alone, or without groups
            optimizer = make([each for each in self.parameters() if each.dim() == 2])
        if self.config["scheduler"] is None:
            return optimizer
        scheduler = SCHEDULERS[self.config["scheduler"]](optimizer)
        interval = "epoch" if self.config["scheduler"] == "Plateau" else "step"
        return [optimizer], [{"scheduler": scheduler, "interval": interval, "monitor": "loss"}]


class SparseNet(Net):
    """An embedding with sparse gradients, for the one optimizer that requires them."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.words = nn.EmbeddingBag(9, 3, mode="sum", sparse=True)
        self.requires_grad_(False)
        self.words.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words((x.abs() * 4).long().clamp(max=8)).tanh())

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS["SparseAdam"](list(self.words.parameters()))


def loader() -> DataLoader[Any]:
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(6))
    return DataLoader(TensorDataset(x, x[:, :1] - x[:, 1:2].square()), batch_size=4 // processes(), shuffle=True)


def accepting(config: Config) -> Any:
    """Return the strategy, which accepts the optimizers that step each element independently and are not torch's."""
    strategy, is_elementwise = config["strategy"], config["optimizer"].startswith(("PlainState", "ScheduleFree"))
    if is_elementwise and strategy == "fsdp":
        return tw.FSDPStrategy(elementwise=True)
    if is_elementwise and strategy.startswith("deepspeed"):
        return tw.DeepSpeedStrategy(stage=int(strategy[-1]), elementwise=True)
    return strategy


def run(config: Config, path: Path, epochs: int, resume: Path | None = None) -> list[float | None]:
    """Train under the configuration's strategy, or on one process, save, and return the rates at the end."""
    is_sparse = config["optimizer"] == "SparseAdam"
    module = (SparseNet if is_sparse else Net)(config)
    with refusals(module):
        trainer = bare_trainer(
            strategy=accepting(config) if processes() > 1 else "single_device",
            precision=config["precision"],
            max_epochs=epochs,
            accumulate_grad_batches=1 if is_sparse else 2,
            gradient_clip_val=None if is_sparse else 0.5,
        )
        torch.manual_seed(7)
        trainer.fit(module, loader(), ckpt_path=resume and str(resume))
    trainer.save_checkpoint(str(path), overwrite=True)
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return [None if rate is None else float(rate) for rate in rates]  # some find a rate of their own


def apart(one: Path, other: Path) -> float:
    """Return the largest difference of two checkpoints' weights; infinite for a NaN."""
    a, b = read_weights(str(one)).state_dict, read_weights(str(other)).state_dict
    found = (float((a[name].double() - b[name].double()).abs().max()) for name in a if a[name].numel())
    return max(each if each == each else float("inf") for each in found)


class Cell:
    """The runs of one cell, which use the folder in turn: one process, the ranks, one process."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        precision = config["precision"]
        self.close = CLOSE_OF.get((config["optimizer"], precision), CLOSE[precision])
        self.said: list[str] = []

    def train_and_resume(self, name: str) -> None:
        """Train without and with a resume, which must agree bit for bit. The first may be refused."""
        whole, half, resumed = (self.folder / f"{name}.{part}" for part in ("whole", "half", "resumed"))
        rates = run(self.config, whole, 2)
        run(self.config, half, 1)
        again = self.allowed(f"resumed: {name}", lambda: run(self.config, resumed, 2, half))
        if again is not None and ((off := apart(whole, resumed)) or again != rates):
            self.said.append(f"resumed: {name} is off by {off:.2e}, rates {again} and {rates}")

    def allowed(self, aspect: str, again: Any) -> Any:
        """Return the result of a run that may no longer be refused; None, and a difference, if it is."""
        try:
            return again()
        except Refused as refusal:
            self.said.append(f"{aspect} is refused: {refusal}")
            return None

    def compare(self, aspect: str, path: Path) -> None:
        """Compare the result of a run with that of one process."""
        if (off := apart(path, self.folder / "one.whole")) > self.close:
            self.said.append(f"{aspect} is off one process by {off:.2e}")

    def run_ranks(self) -> None:
        self.train_and_resume("ranks")
        self.compare("whole: it", self.folder / "ranks.whole")
        here = self.folder / "ranks.from_one"
        if (
            self.allowed("from one process: it", lambda: run(self.config, here, 2, self.folder / "one.half"))
            is not None
        ):
            self.compare("from one process: it", here)
        for other in self.config["others"]:
            there, config = self.folder / f"{other}.from_ranks", {**self.config, "strategy": other}
            try:
                run(config, there, 2, self.folder / "ranks.half")
            except Refused:
                # It has to refuse the optimizer without a checkpoint, too; its own cell shows that.
                self.refuse_fresh(config, other)
                continue
            self.compare(f"to another strategy: {other}", there)

    def refuse_fresh(self, config: Config, other: str) -> None:
        try:
            run(config, self.folder / f"{other}.fresh", 1)
        except Refused:
            return
        self.said.append(f"to another strategy: {other} refuses the checkpoint, and takes the optimizer")

    def run_back(self) -> None:
        """Resume the ranks' first epoch on one process."""
        back = self.folder / "one.back"
        if self.allowed("back: one process", lambda: run(self.config, back, 2, self.folder / "ranks.half")) is not None:
            self.compare("back: one process", back)


def differences(config: Config, folder: Path) -> list[str]:
    cell = Cell(config, folder)
    if processes() > 1:
        cell.run_ranks()
    elif (folder / "ranks.half").exists():
        cell.run_back()
    else:
        cell.train_and_resume("one")
    return cell.said

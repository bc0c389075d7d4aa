"""The checks of every strategy, as functions that run on every rank of a job and on one process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small import QUIET
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import trainwright as tw

WORDS, WIDTH, LENGTH = 11, 5, 6  # 2 and 4 divide no shape of the model except the hidden layer's input
RANK_BATCH = 2
STEPS = 6
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm": {"gradient_clip_val": 0.2},
    "value, 3 batches": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 3},
    "norm, 4 batches": {"gradient_clip_val": 0.2, "accumulate_grad_batches": 4},  # the last window is of 2
}
"""Runs of six batches: Trainer settings by name."""
ONE_OPTIMIZER = r"trains one optimizer, and was given 2.*'ddp', 'ddp_sharded' or 'fsdp'"
NOT_COMPILED = r"compile=True cannot hold .* choose 'fsdp' or stage 2"


class Classifies(tw.Module):
    """Says which word a sentence is about: a transformer whose head is tied to its embedding."""

    def __init__(self, lr: float = 0.02) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lr = lr
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 1, dim_feedforward=7, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.weight
        self.shift = nn.Parameter(torch.full((3, 1), 0.1))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.tensor([0.5, 2.0, 1.0]), requires_grad=False)
        self.register_buffer("scale", torch.tensor([2.0, 0.5, 1.0]))
        self.accuracy = MulticlassAccuracy(WORDS, average="micro")
        nn.init.normal_(self.embed.weight, std=0.5)
        self.losses: list[Tensor] = []

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + (self.shift * self.scale[:, None] * self.frozen[:, None]).sum()
        return self.head(self.blocks(x).mean(dim=1)) * self.temperature

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.detach().float())
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        outputs = self(batch[0])
        self.accuracy(outputs, batch[1])
        self.log("val_loss", F.cross_entropy(outputs, batch[1]))
        self.log("accuracy", self.accuracy)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]
        # A key bias has no gradient but rounding, of which a smaller eps would make a step.
        optimizer = torch.optim.AdamW(groups, lr=self.lr, weight_decay=0.1, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Divides(Classifies):
    """A classifier with two layers that can be divided over a tensor group."""

    def __init__(self, lr: float = 0.02) -> None:
        super().__init__(lr)
        self.up, self.down = nn.Linear(WORDS, 8), nn.Linear(8, WORDS)
        nn.init.zeros_(self.down.weight)

    def forward(self, words: Tensor) -> Tensor:
        logits = super().forward(words)
        return logits + self.down(torch.tanh(self.up(logits)))


class Players(tw.Module):
    """Steps two optimizers manually, and the second loss leaves gradients on the first player."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.critic = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        self.maker = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        critic, maker = self.optimizers()
        made = self.maker(batch[0][:, :3])
        with self.toggled_optimizer(critic):
            critic.zero_grad()
            self.manual_backward(F.softplus(-self.critic(batch[0][:, 3:])).mean())  # two backwards, one step
            self.manual_backward(F.softplus(self.critic(made.detach())).mean())
            critic.step()
        with self.toggled_optimizer(maker):
            maker.zero_grad()
            self.manual_backward(F.softplus(-self.critic(self.maker(batch[0][:, :3]))).mean())
            self.clip_gradients(maker, 0.05)
            maker.step()

    def configure_optimizers(self) -> Any:
        # Plain SGD with a rate of 1: the first step changes the weights by the gradients.
        return [torch.optim.SGD(self.critic.parameters(), 1.0), torch.optim.SGD(self.maker.parameters(), 1.0)]


class Player(tw.Module):
    """Steps one optimizer manually, after two backwards and after one."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.softplus(-self.net(batch[0][:, 3:])).mean())
        self.manual_backward(F.softplus(self.net(batch[0][:, :5])).mean())
        optimizer.step()
        optimizer.zero_grad()
        self.manual_backward(F.softplus(self.net(batch[0][:, 1:6])).mean())
        self.clip_gradients(optimizer, 0.05)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1.0)


class Wide(tw.Module):
    """A net of many tensors, to measure the optimizer's state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(62, 62), nn.Tanh())))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0].repeat(1, 8)[:, :62]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.001)


MESH = "fsdp on a mesh"
"""The name of fsdp on two data ranks of two tensor ranks."""
PLANS = {
    Divides: {"up": "colwise", "down": "rowwise"},
    Players: {"*.0": "colwise", "*.2": "rowwise"},
    Wide: {"net.[048]": "colwise", "net.[26]": "rowwise", "net.10": "rowwise"},
}


def classifier(strategy: str) -> type[Classifies]:
    """Return the module with automatic optimization that a strategy trains."""
    return Divides if strategy == MESH else Classifies


def strategy_of(name: str, kind: type[tw.Module]) -> Any:
    """Return the strategy of a name for a kind of module."""
    if name != MESH:
        return name
    return tw.FSDPStrategy(mesh={"data": 2, "tensor": 2}, tensor_plan=PLANS[kind], min_parameters=1)


def sentences(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, WORDS, (samples, LENGTH), generator=generator)
    return TensorDataset(words, words[:, 0])


def draws(samples: int) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 8, generator=torch.Generator().manual_seed(4)))


def loader(data: TensorDataset, ranks: int) -> DataLoader[Any]:
    """Return the loader of a process that does the work of this many ranks."""
    return DataLoader(data, batch_size=RANK_BATCH * ranks)


class StepNorms(tw.Callback):
    """Records the norms that the engine reports."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        plain = trainer.engine.step

        def step(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            if result.norm is not None:
                self.norms.append(float(result.norm))
            return result

        trainer.engine.step = step


def train(
    strategy: Any, world: int, ranks: int, path: Path, kind: type[Classifies] = Classifies, **settings: Any
) -> dict[str, Any]:
    """Train a new classifier for six batches, save it, and return its figures."""
    module, norms = kind(), StepNorms()
    trainer = tw.Trainer(max_epochs=1, strategy=strategy, callbacks=[norms], **{**QUIET, **settings})
    trainer.fit(module, loader(sentences(STEPS * RANK_BATCH * world), ranks))
    losses = trainer.engine.reduce(torch.stack(module.losses))
    trainer.save_checkpoint(str(path))
    return {
        "losses": losses,
        "norms": torch.tensor(norms.norms),
        "loss": trainer.callback_metrics["loss_epoch"],
        "steps": trainer.global_step,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
    }


def manual_kind(strategy: str) -> type[tw.Module]:
    """Return the module with manual optimization that a strategy can train."""
    return Player if strategy.startswith("deepspeed") else Players


def train_manually(kind: type[tw.Module], strategy: Any, world: int, ranks: int, folder: Path) -> None:
    for steps in (1, 3):
        trainer = tw.Trainer(max_epochs=1, strategy=strategy, **QUIET)
        trainer.fit(kind(), loader(draws(steps * RANK_BATCH * world), ranks))
        trainer.save_checkpoint(str(folder / f"{kind.__name__}-{steps}.ckpt"))


def evaluate(strategy: Any, ranks: int, path: Path, kind: type[Classifies] = Classifies) -> dict[str, Any]:
    """Validate, test and predict on 21 samples, with weights from a checkpoint."""
    data = sentences(21)
    found: dict[str, Any] = {}
    for stage in ("validate", "test"):
        trainer = tw.Trainer(strategy=strategy, **QUIET)
        (found[stage],) = getattr(trainer, stage)(kind(), loader(data, ranks), ckpt_path=str(path), verbose=False)
    predictions = tw.Trainer(strategy=strategy, **QUIET).predict(kind(), loader(data, ranks), ckpt_path=str(path))
    found["predict"] = torch.cat(predictions)
    return found


def optimizer_bytes(strategy: Any) -> int:
    """Return the bytes of the optimizer's state on this rank."""
    trainer = tw.Trainer(max_steps=1, strategy=strategy, **QUIET)
    trainer.fit(Wide(), loader(draws(8), 1))
    total = 0
    for state in trainer.optimizers[0].state.values():
        for key, value in state.items():
            local = value.to_local() if hasattr(value, "to_local") else value
            total += local.numel() * local.element_size() if key != "step" else 0
    return total


def overflows(kind: type[Classifies]) -> Classifies:
    """Return a module whose gradients overflow on one rank in the second batch."""

    class Overflows(kind):  # type: ignore[valid-type, misc]
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 1 and self.global_rank == self.trainer.world_size - 1 else loss

    made: Classifies = Overflows()
    return made


def train_low(strategy: Any, world: int, path: Path, kind: type[Classifies] = Classifies) -> dict[str, Any]:
    """Train in both mixed precisions, with a gradient that overflows on one rank only."""
    found: dict[str, Any] = {}
    for precision in ("bf16-mixed", "16-mixed"):
        module = kind() if precision == "bf16-mixed" else overflows(kind)
        with warnings.catch_warnings(record=True) as told:
            warnings.filterwarnings("always", "DeepSpeed has no float16 on the CPU")
            trainer = tw.Trainer(max_epochs=1, strategy=strategy, precision=precision, **QUIET)
        trainer.fit(module, loader(sentences(STEPS * RANK_BATCH * world), 1))
        found[precision] = {
            "losses": trainer.engine.reduce(torch.stack(module.losses)),
            "used": trainer.precision,
            "told": len(told),
            "skipped": trainer.state.skipped_steps,
            "scale": trainer.engine.precision.state_dict().get("scale"),
        }
        trainer.save_checkpoint(str(path.with_name(f"{precision}.ckpt")))
    return found


def train_compiled(strategy: Any, world: int, ranks: int, path: Path) -> dict[str, Any]:
    return train(strategy, world, ranks, path, compile={"backend": "aot_eager"})


def contract(folder: Path) -> dict[str, Any]:
    """Make every check with the strategy that the folder is named after, on this rank."""
    quiet()
    name, kind, manual = folder.name, classifier(folder.name), manual_kind(folder.name)
    strategy = strategy_of(name, kind)
    world = tw.Trainer(strategy=strategy, **QUIET).engine.num_data_ranks
    found: dict[str, Any] = {"world": world}
    for case, settings in CASES.items():
        found[case] = train(strategy, world, 1, folder / f"{case}.ckpt", kind, **settings)
    found["evaluation"] = evaluate(strategy, 1, folder / "plain.ckpt", kind)
    train_manually(manual, strategy_of(name, manual), world, 1, folder)
    if manual is Player:
        with pytest.raises(ValueError, match=ONE_OPTIMIZER):
            train_manually(Players, strategy, world, 1, folder)
    found["bytes"] = optimizer_bytes(strategy_of(name, Wide))
    found["low"] = train_low(strategy, world, folder / "low", kind)
    if strategy == "deepspeed_stage_3":
        with pytest.raises(ValueError, match=NOT_COMPILED):
            tw.Trainer(strategy=strategy, compile=True, **QUIET)
    return found


def compiled(folder: Path) -> dict[str, Any]:
    """Train a compiled module with the strategy that the folder is named after, on this rank."""
    quiet()
    return train_compiled(folder.name, 2, 1, folder / "compiled.ckpt")


def more_ranks(folder: Path) -> dict[str, Any]:
    """Make only the main check, for three and four ranks."""
    quiet()
    strategy: Any = folder.name.partition("@")[0]
    if strategy == "hybrid":
        strategy = tw.FSDPStrategy(num_replicas=2, min_parameters=1)
    world = tw.Trainer(strategy=strategy, **QUIET).world_size
    found = {"norm, 4 batches": train(strategy, world, 1, folder / "run.ckpt", **CASES["norm, 4 batches"])}
    return {**found, "evaluation": evaluate(strategy, 1, folder / "run.ckpt")}


def fail(folder: Path) -> None:
    """Let rank 1 raise within an epoch."""
    quiet()

    class Fails(Classifies):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 2 and self.global_rank == 1:
                raise ArithmeticError("the third batch is bad")
            return super().training_step(batch, batch_idx)

    trainer = tw.Trainer(max_epochs=1, strategy=folder.name.partition("@")[0], **QUIET)
    trainer.fit(Fails(), loader(sentences(STEPS * RANK_BATCH * 2), 1))


def quiet() -> None:
    """Ignore the warnings of other packages, while warnings of this package and torch stay errors."""
    warnings.filterwarnings(
        "ignore", "The .grad attribute of a Tensor that is not a leaf"
    )  # torch's compiler looks at it
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)  # within the compiler
    for module in ("deepspeed", "fairscale", "pydantic"):
        warnings.filterwarnings("ignore", module=rf"{module}(\..*)?")


def alone(world: int, folder: Path, kind: type[Classifies] = Classifies) -> dict[str, Any]:
    """Return the results of one process that does the work of all ranks."""
    found: dict[str, Any] = {}
    for case, settings in CASES.items():
        found[case] = train("single_device", world, world, folder / f"{case}.ckpt", kind, **settings)
    found["evaluation"] = evaluate("single_device", world, folder / "plain.ckpt", kind)
    for manual in (Player, Players):
        train_manually(manual, "single_device", world, world, folder)
    found["bytes"] = optimizer_bytes("single_device")
    return found


def relative_distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    """Yield every tensor's largest difference relative to its largest element, or to 0.01 if that is larger."""
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    for name, value in left.items():
        assert value.shape == right[name].shape, name
        if value.is_floating_point():
            size = max(float(right[name].abs().max()), 0.01) if value.numel() else math.inf
            yield name, float((value - right[name]).abs().max()) / size if value.numel() else 0.0

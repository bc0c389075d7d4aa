"""The small models and data that many tests train."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import trainwright as tw
from trainwright.data.transfer import to_device
from trainwright.loggers import Logger

ACCELERATOR = os.environ.get("TRAINWRIGHT_TEST_ACCELERATOR", "cpu")
"""The kind of device that the tests train on. `make test-device` sets it."""
ON_HOST = ACCELERATOR == "cpu"
DEVICE = torch.device("cpu") if ON_HOST else torch.accelerator.current_accelerator() or torch.device("cpu")

QUIET: Mapping[str, Any] = MappingProxyType(
    {
        "accelerator": ACCELERATOR,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    }
)
"""Trainer arguments for a run that writes nothing."""
SAVING: Mapping[str, Any] = MappingProxyType({**QUIET, "enable_checkpointing": True})
"""The same for a run that saves checkpoints."""


def make_net(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 13), nn.Tanh(), nn.Dropout(dropout), nn.Linear(13, 3))


def make_data(samples: int = 44, seed: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(samples, 8, generator=generator), torch.randint(0, 3, (samples,), generator=generator)
    )


def make_loader(samples: int = 44, batch_size: int = 4, *, shuffle: bool = False, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(make_data(samples), batch_size=batch_size, shuffle=shuffle, **kwargs)


class Stream(IterableDataset[Any]):
    """Yields samples of the same data, and has no length."""

    def __init__(self, samples: int = 44) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        yield from make_data(self.samples)


L = TypeVar("L", bound=Logger)


def began(logger: L, state: dict[str, Any] | None = None) -> L:
    """Start a logger as a run on one process does, from the state in a checkpoint if there is one."""
    if state is not None:
        logger.load_state_dict(state)
    logger.start(lambda text: text, is_writer=True)
    return logger


def placed(batch: Any) -> Any:
    """Return a batch where the tests train."""
    return to_device(batch, DEVICE)


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


class Classifier(tw.Module):
    """A small classifier. Hooks of the loop may be attributes of a subclass."""

    def __init__(self, dropout: float = 0.0, lr: float = 0.05) -> None:
        super().__init__()
        self.net = make_net(dropout)
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self.net, batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.net, batch))
        self.log("count", len(batch[0]), reduce_fx="sum")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Scored(Classifier):
    """Logs a given score every epoch."""

    def __init__(self, scores: list[float], dropout: float = 0.0, name: str = "score") -> None:
        super().__init__(dropout)
        self.scores, self.name = scores, name

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log(self.name, self.scores[min(self.current_epoch, len(self.scores) - 1)])


class Averaging(torch.optim.SGD):
    """As the schedule-free optimizers: it trains one point and is evaluated at another, and has to be told which."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for group in self.param_groups:
            group["train_mode"] = False

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def _move(self, to_train: bool) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] != to_train else []:
                parameter.mul_(2.0 if to_train else 0.5)
            group["train_mode"] = to_train

    def step(self, closure: Any = None) -> Any:
        assert self.param_groups[0]["train_mode"]
        return super().step(closure)


class Rows(tw.Logger):
    """Keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


def be_rank(monkeypatch: Any, rank: int) -> None:
    """Set the variables of one of two ranks."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))


def fit(
    module: tw.Module, loader: Any = None, val: Any = None, *, ckpt_path: Any = None, **settings: Any
) -> tw.Trainer:
    """Train one epoch of 11 batches, or as the settings say, and return the trainer."""
    trainer = tw.Trainer(**{"max_epochs": 1, "num_sanity_val_steps": 0, **QUIET, **settings})
    trainer.fit(module, make_loader() if loader is None else loader, val, ckpt_path=ckpt_path)
    return trainer


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Bitwise."""
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(
            left[name], right[name], rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )

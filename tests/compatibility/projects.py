"""The small parts that the cases' projects are made of. `L` is the framework: Lightning or ours, by the same names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

QUIET = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip
"""Trainer arguments for a run that writes nothing."""


def part(L: Any, path: str) -> Any:
    """Return the names of a module of Lightning, such as "callbacks", or their counterparts."""
    module = f"lightning.pytorch.{path}"
    return importlib.import_module(module) if L.__name__ == "lightning" else Migrated(module)


class Migrated:
    """The counterparts of the names of one of Lightning's modules, as `trainwright migrate` imports them."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        from trainwright.tools.migrate import counterpart

        found = counterpart(self._module, name)
        if found is None:
            raise AttributeError(f"{self._module}.{name} has no counterpart", name=name)
        return getattr(importlib.import_module(found[0]), found[1])


def data(samples: int = 12, seed: int = 0) -> TensorDataset:
    x = torch.linspace(-1, 1, 2 * samples).reshape(samples, 2) + 0.1 * seed
    return TensorDataset(x, x.sum(1, keepdim=True) * 0.5 + 0.25)


def loader(samples: int = 12, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(data(samples), batch_size=batch_size, **options)


def trainer(L: Any, folder: Any, **options: Any) -> Any:
    return L.Trainer(**{**QUIET, "default_root_dir": folder, "max_epochs": 1, **options})


def regression(L: Any) -> type[Any]:
    """Return the module that most cases train or subclass."""

    class Regression(L.LightningModule):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()
            self.lr = lr
            self.layer = nn.Linear(2, 1)
            with torch.no_grad():
                self.layer.weight.copy_(torch.tensor([[0.3, -0.2]]))
                self.layer.bias.fill_(0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

        def loss(self, batch: Any) -> Tensor:
            return nn.functional.mse_loss(self(batch[0]), batch[1])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val_loss", self.loss(batch))

        def test_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("test_loss", self.loss(batch))

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    return Regression


def scripted(L: Any, name: str, values: Iterable[float], **log_options: Any) -> type[Any]:
    """Return a module whose n-th validation logs the n-th value, whatever it trains."""

    class Scripted(regression(L)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.values = list(values)
            self.count = 0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                value = self.values[min(self.count, len(self.values) - 1)]
                if not self.trainer.sanity_checking:
                    self.count += 1
                self.value = value
            self.log(name, self.value, **log_options)

    return Scripted


def recording(base: type[Any], names: Iterable[str], record: Callable[[str], Any]) -> type[Any]:
    """Return a subclass that records its calls of these methods."""

    def made(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            record(name)
            return getattr(super(made_class, self), name)(*args, **kwargs)

        return method

    made_class = type(f"Recording{base.__name__}", (base,), {name: made(name) for name in names})
    return made_class


FIT = """
    setup on_fit_start on_sanity_check_start on_sanity_check_end on_train_start on_train_epoch_start
    on_train_batch_start on_train_batch_end on_train_epoch_end on_train_end on_fit_end teardown on_validation_start
    on_validation_end on_validation_epoch_start on_validation_epoch_end on_validation_batch_start
    on_validation_batch_end
"""
FIT_HOOKS = FIT.split()
STEP_HOOKS = ["on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]


def hooks_of(stage: str) -> list[str]:
    return [
        "setup", "teardown", f"on_{stage}_start", f"on_{stage}_end", f"on_{stage}_epoch_start", f"on_{stage}_epoch_end",
        f"on_{stage}_batch_start", f"on_{stage}_batch_end",
    ]  # fmt: skip


OWN_FILES = ("trainwright_run.json", "hparams.json", "report.html")
"""Files that only our runs write. No project reads them."""


def files(folder: Any) -> list[str]:
    """Return the files and checkpoints below a folder. A checkpoint is one entry, whether it is a file or a folder."""
    found = []
    for path in sorted(each for each in folder.rglob("*") if each.name not in OWN_FILES):
        above = path.relative_to(folder).parents
        if path.suffix == ".ckpt" or (path.is_file() and not any(each.suffix == ".ckpt" for each in above)):
            found.append(str(path.relative_to(folder)))
    return found


def raised(call: Callable[[], Any]) -> str:
    """Return the class of the exception that a call raises, or "nothing"."""
    try:
        call()
    except BaseException as error:
        return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return "nothing"


def refusal(call: Callable[[], Any]) -> str:
    """Return "refused" if a call raises an exception of the framework's choice, or "accepted"."""
    return "accepted" if raised(call) == "nothing" else "refused"

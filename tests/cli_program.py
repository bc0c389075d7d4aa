"""A program with a TrainwrightCLI, which tests run by command lines and in their process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.cli import TrainwrightArgumentParser, TrainwrightCLI

DEFAULTS: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


class Net(tw.Module):
    """A net.

    Args:
        width: how wide it is.
        act: its activation.
    """

    def __init__(self, width: int, act: nn.Module | None = None, num_classes: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="act")
        self.net = nn.Sequential(nn.Linear(4, width), act or nn.Tanh(), nn.Linear(width, num_classes))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        output: Tensor = self.net(batch[0])
        return output


class OwnOptimizer(Net):
    """A net with an optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(tw.DataModule):
    """Random data.

    Args:
        batch_size: samples of a batch.
    """

    def __init__(self, batch_size: int = 4, num_classes: int = 3) -> None:
        super().__init__()
        self.batch_size, self.num_classes = batch_size, num_classes

    def _loader(self, shuffle: bool) -> DataLoader[Any]:
        inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), self.batch_size, shuffle=shuffle)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(False)

    test_dataloader = predict_dataloader = val_dataloader


class Program(TrainwrightCLI):
    def add_arguments_to_parser(self, parser: TrainwrightArgumentParser) -> None:
        parser.link_arguments("data.num_classes", "model.num_classes")
        parser.set_defaults({"data.batch_size": 8})


if __name__ == "__main__":
    Program(Net, Data, trainer_defaults=DEFAULTS)

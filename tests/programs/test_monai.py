"""Images of MONAI: a cached dataset, its DataLoader, a UNet, and predictions that are MetaTensors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET

import trainwright as tw

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    monai = pytest.importorskip("monai")
    from monai.data import CacheDataset, DataLoader, MetaTensor, decollate_batch
    from monai.losses import DiceLoss
    from monai.metrics import DiceMetric
    from monai.networks.nets import UNet
    from monai.transforms import AsDiscrete, Compose, EnsureTyped, RandFlipd, ScaleIntensityd

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:monai")]
IMAGES = 13


def images(size: int, *, random: bool) -> Any:
    """Squares on noise. The label is the place of the square."""
    generator = torch.Generator().manual_seed(9)
    items = []
    for number in range(size):
        label = torch.zeros(1, 16, 16)
        row, column = (int(each) for each in torch.randint(0, 8, (2,), generator=generator))
        label[:, row : row + 8, column : column + 8] = 1
        image = MetaTensor(label * 3 + 0.3 * torch.randn(1, 16, 16, generator=generator), meta={"number": number})
        items.append({"image": image, "label": label})
    steps = [EnsureTyped(["image", "label"]), ScaleIntensityd(["image"])]
    steps += [RandFlipd(["image", "label"], prob=0.5)] if random else []
    return CacheDataset(items, Compose(steps), progress=False)


class Segmentation(tw.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = UNet(spatial_dims=2, in_channels=1, out_channels=1, channels=(4, 8), strides=(2,))
        self.loss, self.dice = DiceLoss(sigmoid=True), DiceMetric()
        self.discrete = AsDiscrete(threshold=0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.net(batch["image"]), batch["label"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found = [self.discrete(each) for each in decollate_batch(self.net(batch["image"]))]
        self.dice(y_pred=found, y=decollate_batch(batch["label"]))
        self.log("dice", self.dice.aggregate().item(), batch_size=len(found))
        self.dice.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch["image"])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def programs(folder: Path) -> dict[str, Any]:
    trainer = tw.Trainer(max_epochs=5, **{**QUIET, "devices": "auto"})
    module = Segmentation()
    training = DataLoader(images(24, random=True), batch_size=4 // trainer.world_size, shuffle=True)
    evaluation = DataLoader(images(IMAGES, random=False), batch_size=4)
    trainer.fit(module, training, evaluation)
    dice = float(trainer.callback_metrics["dice"])
    predicted = trainer.predict(module, evaluation)
    with torch.no_grad():
        expected = [module.net(batch["image"]) for batch in evaluation]
    return {
        "dice": dice,
        "kinds": sorted({type(each).__name__ for each in predicted}),
        "difference": max(
            float((torch.as_tensor(one).as_subclass(torch.Tensor) - two.as_subclass(torch.Tensor)).abs().max())
            for one, two in zip(predicted, expected, strict=True)
        ),
        "sizes": [len(each) for each in predicted],
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_segmentation_is_trained(ranks: int, tmp_path: Path) -> None:
    for found in [programs(tmp_path)] if ranks == 1 else run_job(programs, ranks, tmp_path):
        assert found["dice"] > 0.9
        assert found["sizes"] == [4, 4, 4, 1]
        assert found["difference"] < 1e-5
        assert found["kinds"] == ["MetaTensor" if ranks == 1 else "Tensor"]

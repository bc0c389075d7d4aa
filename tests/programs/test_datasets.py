"""Datasets of Hugging Face: by index and as streams, shuffled, in workers and on two ranks, resumed within an epoch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, SAVING, assert_equal, make_net, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainwright as tw

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.slow

ROWS, EPOCHS, BATCH = 40, 3, 4


def rows() -> Any:
    generator = torch.Generator().manual_seed(2)
    numbers = torch.randn(ROWS, 8, generator=generator).tolist()
    table = {"x": numbers, "y": [number % 3 for number in range(ROWS)], "number": list(range(ROWS))}
    return datasets.Dataset.from_dict(table)


def by_index(**options: Any) -> DataLoader[Any]:
    return DataLoader(rows().with_format("torch"), batch_size=BATCH, shuffle=True, **options)


def stream(*, shuffle: bool = False, batch_size: int = BATCH, **options: Any) -> DataLoader[Any]:
    made = rows().to_iterable_dataset(num_shards=2).with_format("torch")
    if shuffle:
        made = made.shuffle(seed=7, buffer_size=16)
    return DataLoader(made, batch_size=batch_size, **options)


class Reader(tw.Module):
    """Records the rows of the epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.seen: dict[int, list[int]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.setdefault(self.current_epoch, []).extend(batch["number"].tolist())
        return nn.functional.cross_entropy(self.net(batch["x"]), batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def whole_and_resumed(loader: Any, folder: Path, step: int = 6) -> tuple[Reader, Reader]:
    """Train, and train again from the checkpoint of a step."""
    whole, resumed = Reader(), Reader()
    callback = tw.ModelCheckpoint(folder, every_n_train_steps=step, save_top_k=-1, filename="{step}")
    options = {**SAVING, "max_epochs": EPOCHS}
    tw.Trainer(**options, callbacks=[callback]).fit(whole, loader())
    options["enable_checkpointing"] = False
    tw.Trainer(**options).fit(resumed, loader(), ckpt_path=folder / f"step={step}.ckpt")
    return whole, resumed


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["by index", "stream", "shuffled stream"])
def test_rows_are_read_once_in_an_epoch_and_resumed_exactly(
    kind: str, workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaders = {
        "by index": lambda: by_index(num_workers=workers),
        "stream": lambda: stream(num_workers=workers),
        "shuffled stream": lambda: stream(shuffle=True, num_workers=workers),
    }
    whole, resumed = whole_and_resumed(loaders[kind], tmp_path)
    assert [sorted(whole.seen[epoch]) for epoch in range(EPOCHS)] == [list(range(ROWS))] * EPOCHS
    if kind != "stream":
        assert whole.seen[0] != whole.seen[1] != whole.seen[2], "each epoch has an order of its own"
    assert {**whole.seen, 0: whole.seen[0][6 * BATCH :]} == resumed.seen
    assert_equal(weights(whole), weights(resumed))
    assert capsys.readouterr().err.count("have to be re-read") == (kind == "shuffled stream")


def seen_on_two_ranks(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, loader in (("by index", by_index()), ("stream", stream(shuffle=True, batch_size=2))):
        module = Reader()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            tw.Trainer(max_epochs=2, **{**QUIET, "devices": "auto"}).fit(module, loader)
        found[name] = module.seen
        found[f"told of {name}"] = [str(each.message) for each in told if issubclass(each.category, UserWarning)]
    return found


def test_two_ranks_share_them(tmp_path: Path) -> None:
    ranks = run_job(seen_on_two_ranks, 2, tmp_path)
    for name in ("by index", "stream"):
        for epoch in range(2):
            assert sorted(row for found in ranks for row in found[name][epoch]) == list(range(ROWS))
        assert ranks[0][name][0] != ranks[0][name][1]
    assert [found["told of stream"] for found in ranks] == [[], []], "the ranks read the same stream"

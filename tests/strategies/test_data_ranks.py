"""Data ranks: ranks that share a part of the data count every sample once."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import run_job
from small import QUIET, Classifier, assert_close, assert_equal, loss_of, make_data, make_net, weights
from torch.utils.data import DataLoader, Dataset
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy

import trainwright as tw
from trainwright.checkpoint.reader import open_checkpoint

pytestmark = pytest.mark.slow
TRAIN, VALIDATION, BATCH = 45, 13, 4
WARNING = (
    " was saved within an epoch of data in {} parts, and this run has {}: for this epoch the metric objects accuracy cover "
    "only the batches after the resume."
)


class PairedStrategy(tw.DDPStrategy):
    """Ranks 2n and 2n + 1 share a part of the data, as if they computed one replica together."""

    def connect(self, rank: int, world_size: int, device: torch.device, precision: tw.Precision) -> None:
        super().connect(rank, world_size, device, precision)
        self.data_rank, self.num_data_ranks = rank // 2, world_size // 2
        groups = [dist.new_group([*range(place, world_size, 2)]) for place in range(2)]
        self.data_group = groups[rank % 2]


class Numbered(Dataset[Any]):
    """Samples with their numbers."""

    def __init__(self, samples: int) -> None:
        self.data = make_data(samples)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return (*self.data[index], index)


class Counts(Classifier):
    """A classifier with dropout that records its samples, the rows of a gather, and metrics of every kind."""

    def __init__(self) -> None:
        super().__init__(dropout=0.25)
        self.accuracy, self.seen = MulticlassAccuracy(3, average="micro"), SumMetric()
        self.samples: list[list[int]] = []
        self.rows: list[int] = []

    def on_fit_start(self) -> None:
        torch.manual_seed(20 + self.trainer.engine.data_rank)  # other dropout masks for other parts of the data

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.samples.append(batch[2].tolist())
        self.rows.append(len(self.all_gather(torch.zeros(1))))
        loss = super().training_step(batch, batch_idx)
        self.log("train_count", len(batch[0]), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("train_numbers", batch[2].sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("train_accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        outputs = self.net(batch[0])
        self.log("largest", float(outputs.max()), reduce_fx="max")
        self.log("of_first", float(batch_idx), rank_zero_only=True)
        self.seen(len(batch[0]))
        self.log("seen", self.seen)
        return {"preds": outputs, "target": batch[1]}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[2], self.net(batch[0])


class CountsTokens(Counts):
    """Its losses are sums over the samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        count = len(batch[0])
        return {"loss": loss_of(self.net, batch) * count, "num_tokens": count}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)  # whose step is proportional to the gradients


def loader(samples: int = TRAIN, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbered(samples), batch_size=BATCH, **options)


def strategy() -> tw.Strategy:
    """Return the strategy of two parts of the data in a job of two or four ranks."""
    return PairedStrategy() if tw.PartialState().num_processes == 4 else tw.DDPStrategy()


def fitted(module: Counts, source: Path | None = None, **settings: Any) -> tuple[tw.Trainer, dict[str, Any]]:
    """Train on shuffled data, or continue, and return the trainer with numbers of the run."""
    tw.seed_everything(11, verbose=False)
    trainer = tw.Trainer(**{"strategy": strategy(), "max_epochs": 2, "num_sanity_val_steps": 0, **QUIET, **settings})
    trainer.fit(module, loader(shuffle=True), loader(VALIDATION), ckpt_path=source and str(source))
    return trainer, {
        "weights": weights(module),
        "samples": module.samples,
        "rows": module.rows,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "numbers": [trainer.num_training_batches, *trainer.num_val_batches, trainer.global_step],
    }


def trained(folder: Path) -> dict[str, Any]:
    """Train, evaluate, predict, save and resume on this rank."""
    report = tw.ClassificationReport(verbose=False)
    module = Counts()
    trainer, whole = fitted(module, callbacks=[report])
    assert module.seen.dist_sync_fn is None
    found: dict[str, Any] = {"whole": whole, "support": report.scores["validation"].support.tolist()}
    found["validated"] = trainer.validate(module, loader(VALIDATION), verbose=False)[0]
    found["of rank 0"] = trainer.logged_metrics.get("of_first")
    predictions = trainer.predict(module, loader(VALIDATION))
    found["predicted"] = [torch.cat(parts) for parts in zip(*predictions, strict=True)]
    found["world_size"] = trainer.world_size
    found["tokens"] = fitted(CountsTokens(), accumulate_by="tokens", accumulate_grad_batches=4)[1]

    world = trainer.world_size
    half, _ = fitted(Counts(), max_steps=8)  # within the second epoch
    half.save_checkpoint(folder / f"half-{world}.ckpt")
    found["resumed"] = fitted(Counts(), folder / f"half-{world}.ckpt")[1]
    if world == 4:
        other, _ = fitted(Counts(), max_steps=2, strategy="ddp")  # four parts of the data
        other.save_checkpoint(folder / "four.ckpt")
    found["from other ranks"] = fitted(Counts(), folder / "half-4.ckpt")[1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found["from four parts"] = fitted(Counts(), folder / "four.ckpt", max_epochs=1)[1]
        if world == 4:
            found["to four parts"] = fitted(Counts(), folder / "half-4.ckpt", strategy="ddp")[1]["metrics"]
    found["warnings"] = [str(each.message).partition(".ckpt")[2] for each in caught]
    return found


def looped(folder: Path) -> dict[str, Any]:
    """Train in a raw loop, save and continue, and make the calls that gather, on this rank."""
    accelerator = tw.Accelerator(
        cpu=True, strategy=strategy(), accumulate_by="tokens", gradient_accumulation_steps=2, scale_schedulers=True
    )
    world, part = accelerator.num_processes, accelerator.engine.data_rank
    tw.set_seed(5, device_specific=True)
    found: dict[str, Any] = {"drawn": torch.rand(1)}
    module = make_net(dropout=0.25)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.manual_seed(30 + part)
    model, optimizer, scheduler, data = accelerator.prepare(module, optimizer, scheduler, loader(shuffle=True))
    found["total_batch_size"], found["length"], found["seen"] = data.total_batch_size, len(data), []

    def train(stop: int | None = None) -> None:
        for index, batch in enumerate(data):
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
                accelerator.backward(loss, num_tokens=len(batch[0]))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found["seen"].append(accelerator.gather_for_metrics(batch[2]).tolist())
            if index + 1 == stop:
                return

    train()
    tw.PartialState()
    found["rate"] = scheduler.get_last_lr()
    found["objects"] = accelerator.gather_for_metrics([part], use_gather_object=True)
    found["reduced"] = accelerator.reduce({"number": 1.0 + part, "tensor": torch.ones(1) + part}, "sum")
    found["padded"] = accelerator.pad_across_processes(torch.ones(1 + part)).tolist()
    with accelerator.split_between_processes([*range(5)]) as numbers:
        found["split"] = numbers
    if accelerator.is_main_process:
        accelerator.set_trigger()
    found["triggered"] = accelerator.check_trigger()
    found["any"] = accelerator.engine.strategy.reduce_boolean_decision(accelerator.is_last_process, all=False)
    train(stop=2)
    state = accelerator.save_state(folder / f"loop-{world}")
    for name in ("weights", "repeated"):
        accelerator.load_state(state)
        assert data.epoch == 1  # so the loop continues within the epoch
        train()
        found[name] = weights(module)
    return found


def unlike(folder: Path) -> list[Any]:
    """Return the next random numbers of a job whose ranks have other seeds."""
    accelerator = tw.Accelerator(cpu=True, strategy=PairedStrategy())
    tw.set_seed(accelerator.process_index)
    accelerator.prepare(loader())
    return [float(torch.rand(1)), random.random()]


def test_a_shared_part_of_the_data_is_counted_once(tmp_path: Path) -> None:
    four, two = run_job(trained, 4, tmp_path), run_job(trained, 2, tmp_path)
    runs = ("whole", "tokens", "resumed", "from other ranks", "from four parts")
    for rank, found in enumerate(four):
        expected = two[rank // 2]
        assert_equal(found["whole"]["weights"], found["resumed"]["weights"])
        assert found["to four parts"]["train_numbers"] == sum(range(TRAIN))
        for name in runs:
            assert_close(found[name]["weights"], expected[name]["weights"])
            assert found[name]["metrics"] == pytest.approx(expected[name]["metrics"], rel=1e-5)
            for exact in ("samples", "rows", "numbers"):
                assert found[name][exact] == expected[name][exact], (name, exact)
        assert found["whole"]["metrics"]["seen"] == found["validated"]["seen"] == sum(found["support"]) == VALIDATION
        assert found["whole"]["metrics"]["train_count"] == TRAIN
        assert set(found["whole"]["rows"]) == {2}
        assert found["validated"] == pytest.approx(expected["validated"], rel=1e-5)
        numbers, outputs = found["predicted"]
        assert numbers.tolist() == [*range(VALIDATION)]
        torch.testing.assert_close(outputs, expected["predicted"][1], rtol=1e-5, atol=1e-5)
        assert (found["support"], found["world_size"]) == (expected["support"], 4)
        assert two[0]["of rank 0"] is not None
        assert found["of rank 0"] == (expected["of rank 0"] if rank == 0 else None)
        assert (found["warnings"], expected["warnings"]) == (
            ([WARNING.format(4, 2), WARNING.format(2, 4)] if rank == 0 else []),
            ([WARNING.format(4, 2)] if rank < 2 else []),
        )

    headers = {name: open_checkpoint(str(tmp_path / f"{name}.ckpt")).header for name in ("half-4", "half-2", "four")}
    assert {name: header.get("num_data_ranks") for name, header in headers.items()} == {
        "half-4": 2, "half-2": None, "four": None
    }  # fmt: skip


def together(folder: Path) -> Any:
    """Train and predict on ranks that all read the whole data."""
    module = Counts()
    trainer, found = fitted(module, strategy=PairedStrategy())
    return found, trainer.predict(module, loader(VALIDATION))


def test_a_job_whose_ranks_share_all_data_is_like_one_process(tmp_path: Path) -> None:
    module = Counts()
    trainer, expected = fitted(module, strategy="auto")
    predicted = trainer.predict(module, loader(VALIDATION))
    assert set(expected.pop("rows")) == {1}
    for found, predictions in run_job(together, 2, tmp_path):
        assert_close(found["weights"], expected["weights"])
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)
        assert (found["samples"], found["numbers"]) == (expected["samples"], expected["numbers"])
        assert [numbers.tolist() for numbers, _ in predictions] == [numbers.tolist() for numbers, _ in predicted]


def test_a_raw_loop_gathers_samples_of_a_shared_part_once(tmp_path: Path) -> None:
    four, two = run_job(looped, 4, tmp_path), run_job(looped, 2, tmp_path)
    for rank, found in enumerate(four):
        expected = two[rank // 2]
        assert_equal(found["weights"], found["repeated"])
        assert_close(found["weights"], expected["weights"])
        first = [number for batch in found["seen"][: found["length"]] for number in batch]
        assert sorted(first) == [*range(TRAIN)]
        assert found["triggered"]
        assert found["any"]
        for name in ("drawn", "total_batch_size", "length", "seen", "rate", "objects", "reduced", "padded", "split"):
            assert found[name] == expected[name], name


def test_generators_of_ranks_with_a_shared_part_are_seeded_alike(tmp_path: Path) -> None:
    first, second, third, fourth = run_job(unlike, 4, tmp_path)
    assert first == second != third == fourth

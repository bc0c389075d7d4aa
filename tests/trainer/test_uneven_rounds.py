"""Uneven rounds: the last round of an epoch, in which the ranks have unequally many samples, or none, beside one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from jobs import run_job
from small import ON_HOST, QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import trainwright as tw
from trainwright.distributed import collectives


def numbers(count: int, size: int, first: int = 1, **options: Any) -> DataLoader[Any]:
    """Return a loader of the numbers from `first` on. `size` is the size of a step over all ranks."""
    data = TensorDataset(torch.arange(first, first + count, dtype=torch.float32))
    return DataLoader(data, batch_size=size // world(), **options)


def world() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def trainer(**options: Any) -> tw.Trainer:
    return tw.Trainer(**{"max_epochs": 1, "devices": "auto", "num_sanity_val_steps": 0, **QUIET, **options})


class Counting(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(1.0, 6.0))


class Collecting(tw.Callback):
    """Collects the samples of its rank."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self.batches = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.samples += [] if trainer.is_dummy_batch else batch[0].tolist()
        self.batches += 1
        self.log("n_callback", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")


class Mean(tw.Module):
    """One weight, whose gradient is minus the mean of the batch, and everything by which a batch can leave a trace."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.w = nn.Parameter(torch.zeros(1))
        self.metric = torchmetrics.SumMetric()
        self.total = torch.zeros(())
        self.samples: list[float] = []
        self.seen = self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        values = batch[0]
        loss: Tensor = -(self.w * values).mean()
        self.samples += values.tolist()
        self.seen += len(values)
        self.steps += 1
        self.total += values.sum()
        self.metric.update(values)
        self.log("n", float(len(values)), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("mean", values.mean(), on_step=False, on_epoch=True)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("n_backward", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("n_end", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("mean_end", batch[0].mean(), on_step=False, on_epoch=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def trained(module: Mean, loader: Any) -> dict[str, Any]:
    """Return the results of a training over all ranks."""
    collecting = Collecting()
    run = trainer(callbacks=[collecting])
    run.fit(module, loader)
    metrics = {name: round(float(value), 4) for name, value in run.callback_metrics.items() if name != "n_backward"}
    kept = [module.samples, collecting.samples]
    return {
        "w": round(float(module.w.detach()), 4),
        "metrics": metrics,
        "kept": [sorted(chain.from_iterable(each)) for each in zip(*collectives.gather_object(kept), strict=True)],
        "seen": [
            sum(each) for each in zip(*collectives.gather_object([module.seen, float(module.total)]), strict=True)
        ],
        "batches": [module.steps, collecting.batches],
    }


class Pairs(tw.Module):
    """Two weights, one a loader."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(1)) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = 0.0 * (self.a + self.b)
        for name in ("a", "b"):
            if batch[name] is not None:
                loss = loss - getattr(self, name) * batch[name][0].mean()
                self.log(f"sum_{name}", batch[name][0].sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def combined(mode: Any, first: int, second: int) -> list[float]:
    module, run = Pairs(), trainer()
    loader = tw.CombinedLoader({"a": numbers(first, 4), "b": numbers(second, 4, 101)}, mode)
    run.fit(module, loader)
    sums = [run.callback_metrics[f"sum_{name}"] for name in ("a", "b")]
    return [round(float(each.detach()), 3) for each in (module.a, module.b, *sums)]


class Evaluated(tw.Module):
    """Communicates in its evaluation's steps, in three ways."""

    def __init__(self, in_hook: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.metric = torchmetrics.MeanMetric(dist_sync_on_step=True)
        self.samples: list[float] = []
        self.in_hook = in_hook

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        values = batch[0] if isinstance(batch, list) else batch
        self.samples += values.tolist()
        self.log("n", float(len(values)), reduce_fx="sum")
        self.log("mean", values.mean())
        if not self.in_hook:
            self.communicate(values)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.in_hook:
            self.communicate(batch[0])

    def communicate(self, values: Tensor) -> None:
        self.all_gather(values)
        self.metric(values)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        if world() > 1:
            torch.distributed.all_reduce(values.sum())


def evaluated(loader: Any, is_shared: bool = True, **options: Any) -> Any:
    module = Evaluated(**options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="all_gather: in a last round")
        (metrics,) = trainer(use_distributed_sampler=is_shared).validate(module, loader, verbose=False)
    samples = sorted(chain.from_iterable(collectives.gather_object(module.samples)))
    return {name: round(value, 4) for name, value in metrics.items()}, samples


def own_of_each(**options: Any) -> Any:
    """Evaluate 1 to 7 in two loaders: the first rank has four numbers, and the second three."""
    share = torch.arange(1.0, 5.0) if torch.distributed.get_rank() == 0 else torch.arange(5.0, 8.0)
    return evaluated(DataLoader(TensorDataset(share), batch_size=2), is_shared=False, **options)


class Part(tw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0][:, None])
        self.log("sum", batch[0].sum(), reduce_fx="sum")


def part(strategy: str) -> float:
    run = trainer(strategy=strategy if world() > 1 else "auto", limit_val_batches=0.5)
    (metrics,) = run.validate(Part(), numbers(14, 4), verbose=False)
    return metrics["sum"]


def accelerated(count: int, **options: Any) -> list[float]:
    """Return a weight trained by an Accelerator, and the samples that its loader gives for metrics."""
    accelerator = tw.Accelerator(cpu=ON_HOST, **options)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), numbers(count, 4)
    )
    seen = []
    for (values,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(-model(values[:, None]).mean())
            optimizer.step()
            optimizer.zero_grad()
        seen.append(accelerator.gather_for_metrics(values))
    weight = next(model.parameters()).detach()
    return [round(float(weight), 4), *sorted(torch.cat(seen).tolist())]


class Normed(tw.Module):
    """A batch norm, which wants two samples, and embeddings that are gathered."""

    def __init__(self, gathers: bool = False) -> None:
        super().__init__()
        self.net, self.gathers = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)), gathers
        self.rows: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.net(batch[0][:, None])
        if self.gathers:
            gathered = self.all_gather(outputs, sync_grads=True)
            self.rows.append(gathered.reshape(-1, 2).shape[0])
            return gathered.pow(2).mean()  # type: ignore[no-any-return]
        return outputs.pow(2).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Lengths(torch.utils.data.Dataset[Any]):
    """Samples of several lengths, which no batch may mix."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2 if index < 6 else 3,), float(index))


class OfOneLength(tw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.batches: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches.append(batch[:, 0].tolist())
        return -(self.w * batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def compared() -> dict[str, Any]:
    """Return results that must be the same on one process and on several."""
    results: dict[str, Any] = {}
    for count in (5, 7):
        results[f"automatic {count}"] = trained(Mean(), numbers(count, 4))
        results[f"manual {count}"] = trained(Mean(manual=True), numbers(count, 4))
        results[f"evaluated {count}"] = evaluated(numbers(count, 4))
        results[f"evaluated in a hook {count}"] = evaluated(numbers(count, 4), in_hook=True)
        results[f"accelerated {count}"] = accelerated(count)
    for mode in ("min_size", "max_size", "max_size_cycle"):
        results[f"combined {mode}"] = combined(mode, 5, 7), combined(mode, 7, 5)
    for strategy in ("ddp", "fsdp"):
        results[f"a part {strategy}"] = part(strategy)
    return results


def ranks_job(folder: Path) -> dict[str, Any]:
    tw.seed_everything(1)
    trainer()  # joins the job
    results = compared()
    normed = Normed()
    trainer().fit(normed, numbers(2 * 8 + 3, 16))
    gathering = Normed(gathers=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer().fit(gathering, numbers(2 * 8 + 5, 16))
    lengths = OfOneLength()
    trainer().fit(lengths, DataLoader(Lengths(), batch_sampler=[[0, 1], [2, 3], [4, 5], [6, 7, 8]]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results["iterable"] = evaluated(DataLoader(Counting(), batch_size=2))
        results["own"] = [own_of_each(in_hook=in_hook) for in_hook in (False, True)]
        run = trainer(use_distributed_sampler=False, strategy="fsdp")
        batches = [torch.ones(2)] * (torch.distributed.get_rank() == 0)
        with pytest.raises(ValueError, match="the ranks have 1, 0 batches of their own to evaluate"):
            run.validate(Evaluated(), batches, verbose=False)
    return {
        **results,
        "normed": sum(collectives.gather_object(float(normed.net[1].running_mean.abs().sum()))),
        "rows": gathering.rows,
        "said": [str(each.message) for each in said if "all_gather" in str(each.message)],
        "lengths": lengths.batches,
    }


@pytest.mark.slow
def test_several_ranks_are_one_process(tmp_path: Path) -> None:
    tw.seed_everything(1)
    alone = compared()
    left, right = run_job(ranks_job, 2, tmp_path)
    for name, wanted in alone.items():
        for got in (left[name], right[name]):
            assert got == wanted, name
    assert left["rows"] == right["rows"] == [16, 6]
    assert right["said"] == []
    (said,) = left["said"]
    assert "in a last round the ranks have 3, 2 rows" in said
    assert left["lengths"] == [[0.0, 1.0], [4.0, 5.0]]
    assert right["lengths"] == [[2.0, 3.0], [6.0, 7.0, 8.0]]
    assert left["iterable"] == right["iterable"] == ({"n": 5.0, "mean": 3.0, "metric": 3.0}, [1.0, 2.0, 3.0, 4.0, 5.0])
    for got in (*left["own"], *right["own"]):
        assert got == ({"n": 7.0, "mean": 4.0, "metric": 4.0}, [float(each) for each in range(1, 8)])

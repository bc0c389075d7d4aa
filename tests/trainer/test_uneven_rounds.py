"""Uneven rounds: the last round of an epoch, in which the ranks have unequally many samples, or none, beside one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
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
from trainwright.trainer.metrics import MetricCollector
from trainwright.trainer.uneven_round import Communication, OwnRounds, UnevenRound


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


class Pulling(Mean):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, index, _ = next(dataloader_iter)
        return super().training_step(batch, index)


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


def evaluated(loader: Any, **options: Any) -> Any:
    module = Evaluated(**options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="all_gather: in a last round")
        (metrics,) = trainer().validate(module, loader, verbose=False)
    samples = sorted(chain.from_iterable(collectives.gather_object(module.samples)))
    return {name: round(value, 4) for name, value in metrics.items()}, samples


def own_of_each(kind: str, **options: Any) -> Any:
    """Evaluate 1 to 8 in two loaders: the first rank has five numbers, and the second three."""
    share = torch.arange(1.0, 6.0) if torch.distributed.get_rank() == 0 else torch.arange(6.0, 9.0)
    loader: Any = DataLoader(TensorDataset(share), batch_size=2)
    if kind == "unknown":
        loader = DataLoader(Numbers(share.tolist()), batch_size=2)
    module = Evaluated(**options)
    run = trainer(use_distributed_sampler=False, strategy="fsdp" if kind == "fsdp" else "ddp")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="all_gather: in a last round")
        (metrics,) = run.validate(module, loader, verbose=False)
    pulled = run.test(PullingHook(), loader, verbose=False)[0]
    samples = sorted(chain.from_iterable(collectives.gather_object(module.samples)))
    return {name: round(value, 4) for name, value in (metrics | pulled).items()}, samples


class Numbers(IterableDataset[Any]):
    def __init__(self, values: list[float]) -> None:
        self.values = values

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.tensor(each),) for each in self.values])


class SecondGathers(tw.Module):
    """Communicates in its steps with the second loader only."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if dataloader_idx == 1:
            self.all_gather(self.w)
        self.log("n", float(len(batch[0])), reduce_fx="sum", batch_size=len(batch[0]))


class Writing(tw.BasePredictionWriter):
    def __init__(self, gathers: bool, written: list[float]) -> None:
        super().__init__()
        self.gathers, self.write = gathers, written.extend

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *args: Any) -> None:
        if self.gathers:
            module.all_gather(module.w)
        self.write(prediction.tolist())


def written(gathers: bool) -> list[float]:
    samples: list[float] = []
    trainer(callbacks=[Writing(gathers, samples)]).predict(HookGathers(), numbers(5, 4), return_predictions=False)
    return sorted(chain.from_iterable(collectives.gather_object(samples)))


class HookGathers(tw.Module):
    """Communicates in a hook of its prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[0]  # type: ignore[no-any-return]

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.all_gather(self.w)


class PullingEvaluation(tw.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def step(self, batches: Any) -> Tensor:
        values = next(batches)[0]
        values = values[0] if isinstance(values, list) else values
        self.net(values[:, None])
        return values  # type: ignore[no-any-return]

    def test_step(self, dataloader_iter: Any) -> None:
        values = self.step(dataloader_iter)
        self.log("n", float(len(values)), reduce_fx="sum", batch_size=len(values))
        self.log("mean", values.mean(), batch_size=len(values))

    def predict_step(self, dataloader_iter: Any) -> Tensor:
        return self.step(dataloader_iter)


class PullingHook(PullingEvaluation):
    """Communicates in the hook after a step."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.all_gather(torch.ones(()))


def pulled(strategy: str, loader: Callable[[], Any]) -> Any:
    run = trainer(strategy=strategy if world() > 1 else "auto")
    (metrics,) = run.test(PullingHook(), loader(), verbose=False)
    predictions = run.predict(PullingEvaluation(), loader())
    return metrics["n"], round(metrics["mean"], 4), torch.cat(predictions).tolist()


class Branches(tw.Module):
    """Has a branch of the model per loader."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for name in ("a", "b"):
            if batch[name] is not None:
                getattr(self, name)(batch[name][0][:, None])
        count = sum(len(each[0]) for each in batch.values() if each is not None)
        self.log("n", float(count), reduce_fx="sum", batch_size=count)


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
        results[f"pulled {count}"] = trained(Pulling(), numbers(count, 4))
        results[f"manual, pulled {count}"] = trained(Pulling(manual=True), numbers(count, 4))
        results[f"evaluated {count}"] = evaluated(numbers(count, 4))
        results[f"evaluated in a hook {count}"] = evaluated(numbers(count, 4), in_hook=True)
        results[f"accelerated {count}"] = accelerated(count)
    results["evaluated in a hook of one batch"] = evaluated(numbers(1, 2), in_hook=True)
    for mode in ("min_size", "max_size", "max_size_cycle"):
        results[f"combined {mode}"] = combined(mode, 5, 7), combined(mode, 7, 5)
    results["written"] = written(gathers=False)
    assert set(written(gathers=True)) == set(results["written"])
    results["of one batch"] = trainer().validate(SecondGathers(), [numbers(8, 2), numbers(1, 2)], verbose=False)
    for strategy in ("ddp", "fsdp"):
        results[f"pulled evaluation {strategy}"] = pulled(strategy, lambda: numbers(5, 4))
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
    single = OfOneLength()
    trainer().fit(single, DataLoader(Lengths(), batch_sampler=[[0, 1], [2, 3], [6, 7, 8]]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results["iterable"] = evaluated(DataLoader(Counting(), batch_size=2))
        for kind in ("known", "unknown", "fsdp"):
            results[f"own, {kind}"] = [own_of_each(kind, in_hook=in_hook) for in_hook in (False, True)]
        for first, second in ((5, 8), (6, 5)):
            both = tw.CombinedLoader({"a": numbers(first, 2), "b": numbers(second, 2)}, "max_size")
            with pytest.raises(
                ValueError,
                match=r"loader '[ab]' of a CombinedLoader\('max_size'\) has 5 batches, which the 2 ranks cannot divide",
            ):
                trainer(strategy="fsdp").validate(Branches(), both, verbose=False)
        both = tw.CombinedLoader({"a": numbers(4, 2), "b": numbers(8, 2)}, "max_size")
        results["branches"] = trainer(strategy="fsdp").validate(Branches(), both, verbose=False)[0]["n"]
        run = trainer(use_distributed_sampler=False, strategy="fsdp")
        batches = [torch.ones(2)] * (torch.distributed.get_rank() == 0)
        with pytest.raises(ValueError, match="rank 1 has no batch of its own to evaluate"):
            run.validate(Evaluated(), batches, verbose=False)
        results["iterables"] = pulled("fsdp", lambda: DataLoader(Counting(), batch_size=2))
    return {
        **results,
        "normed": sum(collectives.gather_object(float(normed.net[1].running_mean.abs().sum()))),
        "rows": gathering.rows,
        "said": [str(each.message) for each in said if "all_gather" in str(each.message)],
        "lengths": lengths.batches,
        "single": [float(single.w.detach()), single.batches],
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
    assert left["single"] == [8.5, [[0.0, 1.0], [6.0, 7.0, 8.0]]], "the mean of 0 to 3, then that of 6 to 8"
    assert right["single"] == [8.5, [[2.0, 3.0]]], "a batch that is not its own leaves nothing"
    assert left["iterable"] == right["iterable"] == ({"n": 5.0, "mean": 3.0, "metric": 3.0}, [1.0, 2.0, 3.0, 4.0, 5.0])
    for kind in ("known", "unknown", "fsdp"):
        for got in (*left[f"own, {kind}"], *right[f"own, {kind}"]):
            assert got == ({"n": 8.0, "mean": 4.5, "metric": 4.5}, [float(each) for each in range(1, 9)]), kind
    assert left["branches"] == 12.0
    assert left["iterables"] == right["iterables"] == (5.0, 3.0, [1.0, 2.0, 3.0, 4.0, 5.0])


@pytest.mark.parametrize("known", [True, False])
def test_the_batch_that_a_rank_goes_on_with_is_whole(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step removes an item of its batch. One rank's loader has two batches while another's has four."""

    class Given(list[Any]):
        exact_length = 2 if known else None

    have = iter([[1, 1], [1, 1], [0, 1], [0, 1], [0, 0]])
    monkeypatch.setattr(collectives, "gather_object", lambda value: [value, 4 if known else None])
    monkeypatch.setattr(collectives, "all_gather", lambda value: torch.tensor(next(have)))
    given: Any = Given({"x": torch.ones(1) * each, "y": each} for each in range(2))
    rounds = OwnRounds(given, None, is_collective=False)
    seen = [(float(batch["x"]), batch.pop("y")) for batch in rounds]
    assert seen == [(0.0, 0), (1.0, 1), (1.0, 1), (1.0, 1)]
    assert rounds.real_length == 2


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("queue", torch.zeros(3))
        self.synced = torchmetrics.MeanMetric(dist_sync_on_step=True)
        self.metrics = torchmetrics.MetricCollection([torchmetrics.SumMetric(), torchmetrics.CatMetric()])
        self.rows = [1]
        self.best = 0.0
        self.seen = self.steps = 0
        self.total = torch.zeros(())

    def leave(self) -> None:
        """Leave every kind of trace."""
        self.norm(torch.randn(4, 2))
        self.queue = torch.ones(3)
        self.queue[0] = 5.0
        self.metrics.update(torch.tensor([1.0, 2.0]))
        self.synced.update(torch.tensor([8.0]))
        self.best = 3.0
        self.rows.extend([2, 3])
        self.seen += 2
        self.steps += 1
        self.total += 1.0

    def traces(self) -> Any:
        sums = [float(each) for each in (self.queue.sum(), self.norm.running_mean.abs().sum(), self.total)]  # type: ignore[union-attr, operator]
        states = [{name: str(getattr(each, name)) for name in each._defaults} for each in self.metrics.values()]
        plain = self.best, list(self.rows), self.seen
        return sums, states, plain, str(self.synced.mean_value), [each._update_count for each in self.metrics.values()]


@pytest.mark.parametrize("is_dummy", [False, True])
def test_a_dummy_batch_leaves_no_trace(is_dummy: bool) -> None:
    module = Traced()
    module.leave()
    before, rows = module.traces(), module.rows
    collector = MetricCollector(module)
    uneven = UnevenRound(collector, module, is_dummy)
    assert (collector.is_uneven, collector.silent) == (True, is_dummy)
    for _ in range(2):  # in the step, and in the hooks after it
        module.leave()
        uneven.renew()
        assert (module.traces() == before) is is_dummy
    uneven.put_back()
    module.rows.append(4)  # by the optimizer's step
    assert module.traces() != before
    before = module.traces() if is_dummy else before
    uneven.end()
    assert (collector.is_uneven, collector.silent) == (False, False)
    assert (module.traces() == before) is is_dummy
    assert module.rows is rows
    assert module.steps >= 2, "a count of batches goes on"
    module.synced.update(torch.tensor([8.0]))
    assert module.synced._update_count > 1


@pytest.mark.parametrize(
    ("counts", "is_collective", "in_step", "in_hooks"),
    [
        ([1, 1, 1, 1], False, False, False),
        ([1, 1, 2, 2], False, True, False),
        ([1, 2, 2, 2], True, True, True),
        ([None] * 4, False, True, True),
    ],
)
def test_the_first_batch_shows_where_an_evaluation_communicates(
    counts: list[Any], is_collective: bool, in_step: bool, in_hooks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued = iter(counts)
    monkeypatch.setattr(collectives, "count_issued", lambda: next(issued))
    communication = Communication(forward_is_collective=is_collective)
    for _ in range(4):
        communication.look()
    assert (communication.in_step, communication.in_hooks) == (in_step, in_hooks)

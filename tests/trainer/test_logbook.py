"""The logbook: the three dicts, the loggers' rows, several loaders, reads from the device, two real ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import run_job
from small import Rows
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

import trainwright as tw
from trainwright.checkpoint.codec import decode, encode
from trainwright.distributed.connection import open_process_group
from trainwright.distributed.environment import Environment
from trainwright.trainer.logbook import Logbook, format_table
from trainwright.trainer.metrics import MetricCollector
from trainwright.trainer.run_position import OpenEpoch, Position

READS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__")


class Measured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.several = MetricCollection([MulticlassAccuracy(3, average="micro"), MulticlassPrecision(3)])


def make_logbook(*loggers: tw.Logger, rank: int = 0, world_size: int = 1) -> tuple[Logbook, Position]:
    engine: Any = SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"))
    state = Position()
    return Logbook(loggers, engine, state), state


def start(logbook: Logbook, hook: str, module: nn.Module | None = None) -> MetricCollector:
    as_module: Any = module if module is not None else nn.Module()
    collector = logbook.start(as_module, "train" if "train" in hook else "validation")
    collector.hook, collector.batch = hook, torch.zeros(4, 2)
    return collector


def log(
    collector: MetricCollector, name: str, value: Any, *, on_step: Any = None, on_epoch: Any = None, **more: Any
) -> None:
    settings = (
        more.get("prog_bar", False), more.get("logger"), on_step, on_epoch, more.get("reduce_fx", "mean"),
        False, False, None, more.get("add_dataloader_idx", True), None, more.get("rank_zero_only", False),
    )  # fmt: skip
    collector.log(name, value, settings, more.get("batch_size"))


def test_the_three_dicts_of_training_have_step_and_epoch_values() -> None:
    logbook, _ = make_logbook()
    collector = start(logbook, "training_step")
    for value in (1.0, 3.0):
        log(collector, "both", value, on_step=True, on_epoch=True, prog_bar=True)
        log(collector, "step", torch.tensor(value), prog_bar=True)
        log(collector, "hidden", value, logger=False)
        log(collector, "zero", value, rank_zero_only=True, prog_bar=True, on_epoch=True)
        assert logbook.callback_metrics == {"both": value, "both_step": value, "step": value, "hidden": value}
    assert logbook.logged_metrics == {"both_step": 3.0, "step": 3.0, "zero_step": 3.0}
    assert logbook.progress_bar_metrics == {"both_step": 3.0, "step": 3.0, "zero_step": 3.0}
    assert logbook.finish(1) == [{"both_epoch": 2.0}]
    assert logbook.callback_metrics == {"both": 2.0, "both_step": 3.0, "both_epoch": 2.0, "step": 3.0, "hidden": 3.0}
    epoch = {"both_epoch": 2.0, "zero_epoch": 2.0}
    assert logbook.logged_metrics == {"both_step": 3.0, "step": 3.0, "zero_step": 3.0, **epoch}
    shown = logbook.progress_bar_metrics
    assert shown == {"both_step": 3.0, "step": 3.0, "zero_step": 3.0, **epoch}
    assert all(type(value) is float for value in shown.values())
    assert all(isinstance(value, Tensor) and value.dim() == 0 for value in logbook.callback_metrics.values())
    log(start(logbook, "training_step"), "both", 7.0, on_step=True, on_epoch=True)
    assert logbook.callback_metrics["both"] == 7.0  # the latest, until the epoch ends


def test_of_an_evaluation_callbacks_see_the_epochs_values_only() -> None:
    logbook, _ = make_logbook()
    training = start(logbook, "training_step")
    log(training, "same", 1.0)
    collector = start(logbook, "validation_step")
    log(collector, "both", 2.0, on_step=True)
    log(collector, "step", 2.0, on_step=True, on_epoch=False, prog_bar=True)
    assert logbook.callback_metrics == {"same": 1.0}
    assert logbook.logged_metrics == {"same": 1.0, "both_step": 2.0, "step": 2.0}
    assert logbook.progress_bar_metrics == {"step": 2.0}
    log(collector, "same", 5.0)
    assert logbook.finish(1) == [{"both_epoch": 2.0, "same": 5.0}]
    logbook.end_evaluation()
    assert logbook.callback_metrics == {"same": 5.0, "both": 2.0, "both_epoch": 2.0}  # in the order of time
    log(training, "same", 1.5)
    assert logbook.callback_metrics["same"] == 1.5


def test_rows_have_the_x_values_of_their_stage() -> None:
    rows = Rows()
    logbook, state = make_logbook(rows)
    state.epoch, state.batches_that_stepped, state.step = 2, 7, 14
    collector = start(logbook, "training_step")
    log(collector, "a", 1.0)
    log(collector, "b", torch.tensor(2.0), on_epoch=True, logger=False)
    logbook.log_step()
    log(collector, "step", 100)
    log(collector, "epoch", 2.5)
    logbook.log_step()
    logbook.finish(1)
    for _ in range(2):
        collector = start(logbook, "validation_step")
        for index in (0, 1):
            collector.loader = (index, None)
            for count in (0, 1):
                log(collector, "v", float(count), on_step=True, on_epoch=True)
                logbook.log_evaluation_step()
        collector.hook, collector.loader = "on_validation_epoch_end", None
        log(collector, "step", 41.0)
        logbook.finish(2)
    evaluation = [
        (41, {"epoch": 2, "v_epoch/dataloader_idx_0": 0.5, "v_epoch/dataloader_idx_1": 0.5}),
        (2, {"epoch": 2, "v_step/dataloader_idx_0": 0.0}),  # the loader's batches of all validations
        (3, {"epoch": 2, "v_step/dataloader_idx_0": 1.0}),
        (2, {"epoch": 2, "v_step/dataloader_idx_1": 0.0}),
        (3, {"epoch": 2, "v_step/dataloader_idx_1": 1.0}),
        (41, {"epoch": 2, "v_epoch/dataloader_idx_0": 0.5, "v_epoch/dataloader_idx_1": 0.5}),
    ]
    assert rows.rows[:2] == [(6, {"epoch": 2, "a": 1.0}), (100, {"epoch": 2.5, "a": 1.0})]
    assert rows.rows[6:] == evaluation
    assert type(rows.rows[1][0]) is int


def test_the_hooks_of_an_epochs_end_can_read_what_was_logged_before() -> None:
    rows, module = Rows(), Measured()
    logbook, _ = make_logbook(rows)
    for value in (1.0, 3.0):
        collector = start(logbook, "validation_step", module)
        module.mean.update(value)
        log(collector, "metric", module.mean)
        log(collector, "loss", value)
        logbook.reduce()
        assert logbook.callback_metrics["metric"] == logbook.callback_metrics["loss"] == value
        assert module.mean.compute() == value
        collector.hook = "on_validation_epoch_end"
        log(collector, "late", value)
        assert logbook.finish(1) == [{"metric": value, "loss": value, "late": value}]
    assert rows.rows[-1] == (0, {"epoch": 0, "metric": 3.0, "loss": 3.0, "late": 3.0})


def evaluate(logbook: Logbook, batches: dict[Any, list[tuple[float, int]]]) -> list[dict[str, float]]:
    """Log the (value, size) batches of the loaders, with all kinds of values, as the evaluation loop does."""
    module = Measured()
    collector = start(logbook, "validation_step", module)
    for loader, pairs in batches.items():
        collector.loader = loader
        for value, size in pairs:
            collector.batch = torch.zeros(size, 2)
            module.mean.update(torch.full((size,), value))
            module.several(torch.eye(3)[[int(value) % 3] * size], torch.zeros(size, dtype=torch.int64))
            log(collector, "mean", torch.tensor(value))
            log(collector, "most", value, reduce_fx="max")
            log(collector, "size", size, reduce_fx="sum")
            log(collector, "metric", module.mean)
            log(collector, "again", module.mean)
            log(collector, "several", module.several)
        collector.end_loader()
    collector.loader, collector.batch, collector.hook = None, None, "on_validation_epoch_end"
    log(collector, "all", 3.0)
    return logbook.finish(len(batches))


BATCHES = {(0, None): [(1.0, 4), (2.0, 2), (3.0, 4)], (1, "noisy"): [(10.0, 1), (0.0, 3)]}


def expected(pairs: list[tuple[float, int]], suffix: str) -> dict[str, float]:
    count = sum(size for _, size in pairs)
    mean = sum(value * size for value, size in pairs) / count
    right = sum(size for value, size in pairs if int(value) % 3 == 0) / count
    values = {"mean": mean, "most": max(pairs)[0], "size": count, "metric": mean, "again": mean}
    values["several/MulticlassAccuracy"] = right
    return {name + suffix: value for name, value in values.items()}


def check(result: list[dict[str, float]]) -> None:
    for values, (loader, pairs) in zip(result, BATCHES.items(), strict=True):
        suffix = f"/dataloader_idx_{loader[0]}"
        wanted = {**expected(pairs, suffix), "all": 3.0}
        assert {name: values[name] for name in wanted} == pytest.approx(wanted)
        assert len(values) == len(wanted) + 1  # the precision


def test_loaders_do_not_mix() -> None:
    logbook, _ = make_logbook()
    for _ in range(2):  # and nothing is left for the next validation
        check(evaluate(logbook, BATCHES))
    assert {"mean/dataloader_idx_0", "mean/dataloader_idx_1", "all"} <= set(logbook.callback_metrics)


def job(folder: Path) -> dict[str, Any]:
    """The ranks take turns in the batches: rank 1 has one batch of two loaders, and none of a third."""
    environment = Environment.detect()
    open_process_group(environment, "gloo")
    rank = dist.get_rank()
    logbook, _ = make_logbook(rank=rank, world_size=2)
    result = evaluate(logbook, {loader: pairs[rank::2] for loader, pairs in BATCHES.items()})
    one_sided = evaluate(logbook, {(0, None): [(1.0, 4)], (1, None): [(2.0, 2)] if rank == 0 else []})

    collector = start(logbook, "training_step")
    gathers: list[int] = []
    inner = dist.all_gather
    for name in range(300):
        log(collector, f"x{name}", float(rank + name), on_epoch=True, batch_size=1 + 2 * rank)
    log(collector, "zero", float(rank), on_step=False, on_epoch=True, rank_zero_only=True)
    log(collector, "nan", float("nan") if rank else 1.0, on_epoch=True, reduce_fx="min")
    dist.all_gather = lambda *args, **kwargs: (gathers.append(1), inner(*args, **kwargs))[1]
    many = logbook.finish(1)[0]
    first = len(gathers)
    log(start(logbook, "training_step"), "x", float(rank), on_epoch=True)
    logbook.finish(1)
    dist.all_gather = inner
    metrics = {name: value.item() for name, value in logbook.callback_metrics.items()}
    return {
        "result": result,
        "one_sided": one_sided,
        "many": many,
        "gathers": [first, len(gathers) - first],
        "logged": sorted(name for name in logbook.logged_metrics if name.startswith("zero")),
        "monitored": "zero" in metrics,
    }


def test_two_ranks_are_exact_and_gather_once(tmp_path: Path) -> None:
    results = run_job(job, 2, tmp_path)
    first, second = results
    check(first["result"])
    assert first["result"] == second["result"]
    assert first["one_sided"] == second["one_sided"]
    assert first["one_sided"][1]["metric/dataloader_idx_1"] == 2.0
    assert first["one_sided"][1]["mean/dataloader_idx_1"] == 2.0
    for result in results:
        assert result["many"]["x7_epoch"] == pytest.approx((7 * 1 + 8 * 3) / 4)
        assert torch.tensor(result["many"]["nan_epoch"]).isnan()
        assert result["gathers"] == [2, 2]  # the lengths, and the values
        assert not result["monitored"]
    assert (first["logged"], second["logged"]) == (["zero"], [])


class Counted(Tensor):
    """A tensor that tells when it is read, as one on a device would make the host wait."""

    reads: list[str] = []


def _counting(name: str) -> Any:
    def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        Counted.reads.append(name)
        return getattr(Tensor, name)(self, *args, **kwargs)

    return read


for _name in READS:
    setattr(Counted, _name, _counting(_name))


def test_values_are_read_at_log_points_only() -> None:
    Counted.reads.clear()
    rows, module = Rows(), Measured()
    logbook, state = make_logbook(rows)
    collector = start(logbook, "training_step", module)
    values = torch.arange(1.0, 201.0)
    for index, value in enumerate(values):
        loss = value.as_subclass(Counted)
        collector.batch = torch.zeros(1 + index % 3, 2)
        for reduce_fx in ("mean", "sum", "min", "max"):
            log(collector, reduce_fx, loss, on_step=True, on_epoch=True, reduce_fx=reduce_fx, prog_bar=True)
        log(collector, "now", loss)
        module.mean(index + 1.0)  # reads by torchmetrics do not count
        log(collector, "metric", module.mean, on_step=True, on_epoch=True)
        loss += 1000  # a logged value is a copy
        assert len(logbook.callback_metrics) == 11  # looking at the dict reads nothing
    assert Counted.reads == []
    state.batches_that_stepped = 200
    logbook.log_step()
    assert Counted.reads == ["tolist"]  # all values in one transfer
    assert rows.rows[-1][1]["now"] == 200.0
    (reduced,) = logbook.finish(1)
    assert Counted.reads.count("tolist") == 2
    weights = torch.tensor([1.0 + index % 3 for index in range(200)])
    plain = torch.arange(1.0, 201.0)
    assert reduced["mean_epoch"] == pytest.approx(float((plain * weights).sum() / weights.sum()))
    assert [reduced[f"{name}_epoch"] for name in ("sum", "min", "max")] == [20100.0, 1.0, 200.0]
    assert reduced["metric_epoch"] == pytest.approx(100.5)


def test_half_precision_and_mixed_kinds_add_up_exactly() -> None:
    logbook, _ = make_logbook()
    collector = start(logbook, "validation_step")
    for index in range(130):
        half = torch.tensor(2048.0, dtype=torch.float16)
        log(collector, "sum", half.as_subclass(Counted) if index % 2 else half, reduce_fx="sum")
        mixed = float(index) if index % 2 else torch.tensor(float(index)).as_subclass(Counted)
        for name in ("min", "max"):
            log(collector, name, mixed, reduce_fx=name)
    assert logbook.finish(1) == [{"sum": 130 * 2048.0, "min": 0.0, "max": 129.0}]


def test_a_table_has_a_column_per_loader() -> None:
    assert format_table("test metric", [{"acc": 0.5, "loss/step": 1234.5678}]).splitlines() == [
        "----------------------", "  test metric  value", "----------------------", "  acc          0.5",
        "  loss/step    1234.57", "----------------------",
    ]  # fmt: skip
    two = [{"acc/dataloader_idx_0": 0.5, "all": 1.0}, {"acc/dataloader_idx_1": 0.25, "own": 3.0, "all": 1.0}]
    assert format_table("test metric", two, [None, "noisy"]).splitlines()[1:-1] == [
        "  test metric  loader 0  noisy",
        "------------------------------",
        "  acc          0.5       0.25",
        "  all          1         1",
        "  own                    3",
    ]


def test_the_state_is_restored_from_plain_data() -> None:
    epoch = OpenEpoch({"loss": 1.0}, {"values": []}, [{"rows": 3}], {"Timer": {"time": 2.0}})
    for state in (
        Position(),
        Position(epoch=2, batch=3, step=9, open_epoch=epoch, rng={"epoch left": {"python": [1, 2]}}),
    ):
        plain = decode(*encode(state.plain(), "state"))
        again = Position.of_plain(plain)
        assert again.plain() == state.plain()
        assert again.open_epoch == state.open_epoch


def test_one_metric_of_a_collection_is_reset_with_the_state_that_it_shares() -> None:
    module, found = Measured(), []
    logbook, _ = make_logbook()
    for right in (True, False):
        collector = start(logbook, "validation_step", module)
        for _ in range(2):
            module.several.update(torch.eye(3), torch.arange(3) if right else torch.tensor([1, 2, 0]))
            log(collector, "precision", module.several["MulticlassPrecision"])
        found += logbook.finish(1)
    assert found == [{"precision": 1.0}, {"precision": 0.0}]

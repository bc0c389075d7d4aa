"""The hooks that may call self.log, its defaults in them, its names and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

from trainwright.trainer.logged_value import LOG_RULES, LoggedValue
from trainwright.trainer.metrics import MetricCollector, flat_items

DEFAULTS: dict[str, Any] = {
    "prog_bar": False, "logger": None, "on_step": None, "on_epoch": None, "reduce_fx": "mean", "enable_graph": False,
    "sync_dist": False, "sync_dist_group": None, "add_dataloader_idx": True, "batch_size": None,
    "metric_attribute": None, "rank_zero_only": False,
}  # fmt: skip

STEP_HOOKS = [
    "on_train_batch_start", "on_train_batch_end", "training_step", "on_before_backward", "backward",
    "on_after_backward", "on_before_optimizer_step", "optimizer_step", "configure_gradient_clipping",
    "clip_gradients", "on_before_zero_grad", "optimizer_zero_grad",
]  # fmt: skip
EVALUATION_HOOKS = [
    "validation_step", "test_step", "on_validation_batch_start", "on_validation_batch_end", "on_test_batch_start",
    "on_test_batch_end",
]  # fmt: skip
EPOCH_HOOKS = [
    "on_train_start", "on_validation_start", "on_test_start", "on_train_epoch_start", "on_train_epoch_end",
    "on_validation_epoch_start", "on_validation_epoch_end", "on_test_epoch_start", "on_test_epoch_end",
]  # fmt: skip
CLOSED_HOOKS = [
    "on_fit_start", "on_fit_end", "on_train_end", "on_validation_end", "on_test_end", "on_sanity_check_start",
    "on_sanity_check_end", "predict_step", "on_predict_batch_end", "setup", "teardown", "transfer_batch_to_device",
    "lr_scheduler_step", "configure_optimizers", "on_save_checkpoint", "on_load_checkpoint",
]  # fmt: skip


class Measured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.other = MeanMetric(), MeanMetric()
        self.parts = nn.ModuleList([MeanMetric()])
        self.several = MetricCollection(
            [MulticlassAccuracy(3, average="micro"), MulticlassPrecision(3, average="micro")], prefix="val_"
        )


def collector_in(hook: str, module: nn.Module | None = None, rank: int = 0) -> MetricCollector:
    collector = MetricCollector(module or nn.Module(), "train" if "train" in hook else "validation", rank)
    collector.hook, collector.batch = hook, torch.zeros(4, 2)
    return collector


def log(collector: MetricCollector, name: Any, value: Any, **settings: Any) -> LoggedValue | None:
    given = {**DEFAULTS, **settings}
    batch_size = given.pop("batch_size")
    collector.log(name, value, tuple(given.values()), batch_size)
    return collector.values.get((collector.hook, name, collector.loader))


def test_each_hook_has_the_defaults_and_the_freedom_of_the_table() -> None:
    assert set(LOG_RULES) == {*STEP_HOOKS, *EVALUATION_HOOKS, *EPOCH_HOOKS}
    for hook in LOG_RULES:
        collector = collector_in(hook)
        logged = log(collector, "x", 1.0)
        assert (logged.on_step, logged.on_epoch) == ((True, False) if hook in STEP_HOOKS else (False, True)), hook
        for levels in ((True, True), (True, False), (False, True)):
            named = {"on_step": levels[0], "on_epoch": levels[1]}
            if hook in EPOCH_HOOKS and levels != (False, True):
                with pytest.raises(
                    ValueError, match=f"called in {hook}, where there is no batch.*Leave on_step at False"
                ):
                    log(collector, str(levels), 1.0, **named)
            else:
                logged = log(collector, str(levels), 1.0, **named)
                assert (logged.on_step, logged.on_epoch) == levels


@pytest.mark.parametrize("hook", [*CLOSED_HOOKS, ""])
def test_the_other_hooks_say_where_to_log(hook: str) -> None:
    where = f"called in {hook}" if hook else "called outside of a step or hook"
    with pytest.raises(RuntimeError, match=f"{where}, where nothing is collected. Log in training_step"):
        log(collector_in(hook), "x", 1.0)


@pytest.mark.parametrize(("loader", "levels", "add", "names"), [
    (None, (True, False), True, ("w", "w", "w")),
    (None, (True, True), True, ("w", "w_step", "w_epoch")),
    ((0, None), (False, True), True, ("w/dataloader_idx_0",) * 3),
    ((1, None), (True, True), True, ("w/dataloader_idx_1", "w_step/dataloader_idx_1", "w_epoch/dataloader_idx_1")),
    ((1, None), (True, True), False, ("w", "w_step", "w_epoch")),
    ((0, "clean"), (False, True), True, ("w/dataloader_idx_0",) * 3),
    ((1, "noisy"), (True, True), True, tuple(f"{each}/dataloader_idx_1" for each in ("w", "w_step", "w_epoch"))),
])  # fmt: skip
def test_names_have_suffixes_of_step_epoch_and_loader(
    loader: Any, levels: tuple[bool, bool], add: bool, names: tuple[str, str, str]
) -> None:
    collector = collector_in("validation_step")
    collector.loader = loader
    logged = log(collector, "w", 1.0, on_step=levels[0], on_epoch=levels[1], add_dataloader_idx=add)
    assert (logged.key.base_name, logged.step_name, logged.key.epoch_name) == names


def test_a_dict_and_a_collection_are_logged_by_part() -> None:
    module = Measured()
    module.several.update(torch.eye(3), torch.tensor([0, 1, 1]))
    collector = collector_in("validation_step", module)
    log(collector, "loss", {"a": 1.0, "b": torch.tensor(2.0), "c": {"d": module.mean}})
    log(collector, "all", module.several)
    assert [name for _, name, _ in collector.values] == [
        "loss/a", "loss/b", "loss/c/d", "all/val_MulticlassAccuracy", "all/val_MulticlassPrecision",
    ]  # fmt: skip
    assert collector.values["validation_step", "all/val_MulticlassAccuracy", None].key.attribute == (
        "several.MulticlassAccuracy"
    )
    assert [name for name, _ in flat_items({"a": 1, "b": 2})] == ["a", "b"]
    assert [name for name, _ in flat_items(module.several)] == ["val_MulticlassAccuracy", "val_MulticlassPrecision"]


@pytest.mark.parametrize(("given", "reduction"), [
    ("avg", "mean"),
    ("MEAN", "mean"),
    (torch.mean, "mean"),
    (sum, "sum"),
    (torch.sum, "sum"),
    (min, "min"),
    (max, "max"),
])  # fmt: skip
def test_reductions_have_several_forms(given: Any, reduction: str) -> None:
    logged = log(collector_in("training_step"), "x", 1.0, reduce_fx=given)
    assert logged.reduce_fx == reduction


def test_a_hook_may_log_a_name_of_another_hook_with_other_settings() -> None:
    collector = collector_in("training_step")
    log(collector, "x", 1.0)
    collector.hook = "on_train_epoch_end"
    log(collector, "x", 1.0, prog_bar=True)
    assert [(logged.key.hook, logged.key.prog_bar) for logged in collector.values.values()] == [
        ("training_step", False),
        ("on_train_epoch_end", True),
    ]


@pytest.mark.parametrize(("name", "value", "settings", "error", "match"), [
    ("x", torch.zeros(2).as_subclass(nn.Parameter), {}, ValueError, r"shape \(2,\)"),
    (3, 1.0, {}, TypeError, "a metric's name is a str; self.log got 3, an int"),
    ("x", 1.0, {"reduce_fx": []}, ValueError, "choose from mean, sum, min, max"),
    ("x", 1.0, {"on_step": False}, ValueError, "Set at least one of them"),
    ("x", 1.0, {"sync_dist_group": "world"}, ValueError, "sync_dist_group='world'; only None is accepted"),
    ("x", 1.0, {"on_epoch": True, "batch_size": 0}, ValueError, "batch_size=0, an int. Expected a positive number"),
    ("x", 1.0, {"on_epoch": True, "batch_size": "4a"}, ValueError, "batch_size='4a', a str"),
    ("x", 1.0, {"on_epoch": True, "batch_size": torch.tensor(4)}, ValueError,
     "a Tensor. Expected a positive number.*waits for"),
    ("x", MeanMetric(), {"metric_attribute": "mean"}, ValueError, "not an attribute of the module"),
    ("x", MeanMetric(), {"metric_attribute": "nowhere.x"}, ValueError, "not an attribute of the module"),
    ("x", MeanMetric(), {"rank_zero_only": True}, ValueError, "gathers its state over all ranks"),
])  # fmt: skip
def test_wrong_values_and_settings_are_rejected(name: Any, value: Any, settings: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        log(collector_in("training_step", Measured()), name, value, **settings)


def test_one_name_in_one_hook_has_one_setting_and_one_metric() -> None:
    module = Measured()
    collector = collector_in("validation_step", module)
    log(collector, "x", 1.0)
    log(collector, "x", 1.0, batch_size=3)  # may differ from batch to batch
    with pytest.raises(ValueError, match=r"in validation_step with reduce_fx='mean' and then 'sum'. Use one setting"):
        log(collector, "x", 1.0, reduce_fx="sum")
    log(collector, "m", module.mean)
    with pytest.raises(ValueError, match=r"another one than before.*a name of its own"):
        log(collector, "m", module.other)
    log(collector, "part", module.parts[0], metric_attribute="parts.0")
    collector.loader = (0, None)
    log(collector, "y", 1.0, add_dataloader_idx=False)
    collector.loader = (1, None)
    log(collector, "x", 1.0)
    with pytest.raises(ValueError, match="called with two loaders, whose values would be mixed"):
        log(collector, "y", 1.0, add_dataloader_idx=False)


def test_the_graph_of_the_latest_value_is_kept_where_asked_for() -> None:
    collector, weight = collector_in("training_step"), torch.ones((), requires_grad=True)
    kept = log(collector, "kept", weight * 2, enable_graph=True, on_epoch=True)
    left = log(collector, "left", weight * 2)
    assert isinstance(kept.last, Tensor)
    kept.last.backward()
    assert weight.grad == 2.0
    assert kept.total() == (8.0, 4.0)
    assert left.last == 2.0

"""Several runs in one script: of one Trainer, of several Trainers, of one module, and the module after them."""

from __future__ import annotations

import copy
import csv
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from jobs import run_job
from small import QUIET, SAVING, Classifier, assert_equal, make_loader, weights

import trainwright as tw
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.loggers.remote import RemoteLogger
from trainwright.loggers.run_files import read_history


def trained(epochs: int = 1, **loader: Any) -> Classifier:
    module = Classifier()
    tw.Trainer(max_epochs=epochs, **QUIET).fit(module, make_loader(**loader))
    return module


def test_a_second_fit_begins_anew_with_the_weights_as_they_are() -> None:
    trainer, module = tw.Trainer(max_epochs=2, **QUIET), Classifier()
    trainer.fit(module, make_loader())
    first = trainer.optimizers[0]
    trainer.fit(module, make_loader(20))
    assert (trainer.current_epoch, trainer.global_step, trainer.num_training_batches) == (2, 10, 5)
    assert trainer.optimizers[0] is not first
    expected = trained(2)
    tw.Trainer(max_epochs=2, **QUIET).fit(expected, make_loader(20))
    assert_equal(weights(module), weights(expected))
    other = Classifier()
    trainer.fit(other, make_loader())  # another module in the same trainer
    assert_equal(weights(other), weights(trained(2)))
    assert trainer.model is other


def test_a_fit_that_was_stopped_does_not_stop_the_next() -> None:
    class Stop(tw.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = trainer.should_stop or (batch_idx == 2 and module.lr == 0.05)

    trainer = small.fit(Classifier(), callbacks=Stop())
    assert (trainer.global_step, trainer.should_stop) == (3, True)
    trainer.fit(Classifier(lr=0.01), make_loader())
    assert (trainer.global_step, trainer.should_stop) == (11, False)


def test_two_trainers_do_not_know_of_each_other() -> None:
    first, second = tw.Trainer(max_epochs=1, **QUIET), tw.Trainer(max_epochs=2, precision="16-mixed", **QUIET)
    module, other = Classifier(), Classifier()
    first.fit(module, make_loader())
    second.fit(other, make_loader())
    assert (first.global_step, second.global_step) == (11, 22)
    assert module.trainer is first
    assert_equal(weights(module), weights(trained()))
    result = second.test(module, make_loader(8), verbose=False)
    assert module.trainer is second
    assert result[0]["count"] == 8
    first.fit(module, make_loader())
    assert first.callback_metrics.keys() == {"loss", "loss_step", "loss_epoch"}


def test_evaluations_do_not_change_a_fit(tmp_path: Path) -> None:
    """They change neither weights nor counters, nor the result of a training after them."""
    checkpoint = tw.ModelCheckpoint(tmp_path, monitor="val_loss")
    trainer = tw.Trainer(max_epochs=2, callbacks=checkpoint, **SAVING)
    module = Classifier(dropout=0.3)
    tw.seed_everything(1)
    (before,) = trainer.validate(module, make_loader(8), verbose=False)
    trainer.test(module, make_loader(8), verbose=False)
    tw.seed_everything(1)
    trainer.fit(module, make_loader(), make_loader(8))
    expected = Classifier(dropout=0.3)
    tw.seed_everything(1)
    tw.Trainer(max_epochs=2, **QUIET).fit(expected, make_loader(), make_loader(8))
    assert_equal(weights(module), weights(expected))
    (after,) = trainer.validate(module, make_loader(8), verbose=False)
    assert after["val_loss"] < before["val_loss"]
    (tested,) = trainer.test(module, make_loader(8), verbose=False)
    assert tested == after
    assert (trainer.global_step, trainer.current_epoch, module.training) == (22, 2, True)
    (best,) = trainer.test(dataloaders=make_loader(8), ckpt_path="best", verbose=False)
    assert best["val_loss"] == pytest.approx(float(checkpoint.best_model_score), rel=1e-6)


def test_without_a_module_the_latest_one_is_taken_at_its_best(tmp_path: Path, capsys: Any) -> None:
    class Worse(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", float(self.current_epoch))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("sum", self.net[0].weight.sum())

        def test_dataloader(self) -> Any:
            return make_loader(8)

    sums: list[float] = []
    watch = tw.LambdaCallback(on_train_epoch_end=lambda trainer, module: sums.append(module.net[0].weight.sum().item()))
    checkpoint = tw.ModelCheckpoint(tmp_path, monitor="val_loss")
    trainer = tw.Trainer(max_epochs=3, callbacks=[checkpoint, watch], **SAVING)
    trainer.fit(Worse(), make_loader(), make_loader(4))
    assert trainer.validate(ckpt_path="best", verbose=False) == [{"val_loss": 3.0}]  # on the fit's loaders
    (found,) = trainer.test()
    assert found["sum"] == pytest.approx(sums[0])
    printed = capsys.readouterr().out
    assert "it takes the best checkpoint" in printed
    assert "sum" in printed
    assert trainer.test(trainer.model, verbose=False)[0]["sum"] == found["sum"]  # it has the best weights by now


def test_a_fit_that_failed_leaves_a_trainer_that_works() -> None:
    class Failing(Classifier):
        fails = True

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.fails and batch_idx == 5:
                raise ArithmeticError("once")
            return super().training_step(batch, batch_idx)

    trainer, module = tw.Trainer(max_epochs=1, accumulate_grad_batches=2, **QUIET), Failing()
    with pytest.raises(ArithmeticError, match="once"):
        trainer.fit(module, make_loader())
    assert not trainer.training
    module.fails = False
    module.load_state_dict(Classifier().state_dict())
    trainer.fit(module, make_loader())
    expected = Classifier()
    tw.Trainer(max_epochs=1, accumulate_grad_batches=2, **QUIET).fit(expected, make_loader())
    assert_equal(weights(module), weights(expected))


def as_a_plain_module(folder: Path) -> dict[str, Any]:
    """Return facts about a module that several ranks have trained, and train it again."""
    settings = {**QUIET, "devices": "auto"}
    trainer, module = tw.Trainer(max_epochs=1, **settings), Classifier()
    trainer.fit(module, make_loader(48))
    batch = torch.ones(2, 8)
    copied, pickled = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    for each in (module, copied):  # a step in a loop by hand, on this rank
        each.zero_grad()
        each.net(batch).sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    facts = {
        "keys": list(module.state_dict()),
        "plain": all(
            torch.equal(left, right) for left, right in zip(module.parameters(), copied.parameters(), strict=True)
        ),
        "free": (copied._trainer, pickled._trainer) == (None, None),
        "type": type(module).__name__,
        "pickled": weights(pickled),
    }
    trainer.fit(pickled, make_loader(48), make_loader(8))  # another module in the same trainer
    (facts["tested"],) = trainer.test(pickled, make_loader(9), verbose=False)
    again = tw.Trainer(max_epochs=2, **settings)  # another trainer in the same job
    again.fit(pickled, make_loader(16))
    facts["counts"] = (trainer.global_step, again.global_step)
    facts["twice"] = weights(pickled)
    return facts


def test_a_module_that_was_trained_on_two_ranks_is_a_plain_one(tmp_path: Path) -> None:
    found = run_job(as_a_plain_module, 2, tmp_path)
    for facts in found:
        assert facts["keys"] == list(Classifier().state_dict())
        assert (facts["plain"], facts["free"], facts["type"]) == (True, True, "Classifier")
        assert facts["tested"]["count"] == 9
        assert facts["counts"] == (6, 4)
    for name in ("pickled", "twice"):
        assert_equal(found[0][name], found[1][name])


class Noted(Classifier):
    """Logs its rate as a hyper-parameter."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr=lr)
        self.save_hyperparameters()


def steps_in(folder: str | Path) -> list[int]:
    with open(f"{folder}/metrics.csv", newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["loss_step"]]


def test_a_fit_from_step_0_is_a_run_of_its_own_and_a_resumed_fit_continues(tmp_path: Path) -> None:
    settings = {**SAVING, "logger": True, "log_every_n_steps": 1, "devices": 1}
    trainer = tw.Trainer(max_epochs=1, default_root_dir=tmp_path, **settings)
    logs = tmp_path / "trainwright_logs"
    trainer.fit(Noted(), make_loader())
    trainer.logger.log_hyperparams({"of_the_first": 1})
    trainer.test(Noted(), make_loader(8), verbose=False)
    assert trainer.log_dir == f"{logs}/version_0"
    trainer.fit(Noted(0.01), make_loader())
    assert trainer.log_dir == f"{logs}/version_1"
    assert trainer.checkpoint_callback.best_model_path == f"{logs}/version_1/checkpoints/epoch=0-step=11.ckpt"
    assert [steps_in(logs / f"version_{number}") for number in (0, 1)] == [list(range(11))] * 2
    assert json.loads((logs / "version_1/hparams.json").read_text()) == {"lr": 0.01}
    assert json.loads((logs / "version_0/hparams.json").read_text()) == {"lr": 0.05, "of_the_first": 1}
    other = tw.Trainer(max_epochs=2, default_root_dir=tmp_path, **{**settings, "logger": trainer.logger})
    other.fit(Noted(0.01), make_loader(), ckpt_path="last")
    assert other.log_dir == f"{logs}/version_1"
    assert steps_in(other.log_dir) == list(range(22))
    other.fit(Noted(), make_loader(), ckpt_path=f"{logs}/version_0/checkpoints/epoch=0-step=11.ckpt")
    assert other.log_dir == f"{logs}/version_0"
    other.fit(Noted(0.03), make_loader())
    assert other.log_dir == f"{logs}/version_2"
    assert [len(steps_in(logs / f"version_{number}")) for number in range(3)] == [22, 22, 22]


@pytest.mark.filterwarnings("ignore:.*is from an earlier run")
def test_a_fixed_version_shows_the_latest_run_only(tmp_path: Path) -> None:
    loggers = [tw.CSVLogger(tmp_path, "a", "mine"), tw.TensorBoardLogger(tmp_path, "a", "mine")]
    trainer = tw.Trainer(max_epochs=1, **{**QUIET, "logger": loggers, "log_every_n_steps": 1})
    trainer.fit(Noted(), make_loader(48))
    trainer.fit(Noted(), make_loader(16))
    series = read_history(str(tmp_path / "a/mine"), kind="tensorboard").series["loss_step"]
    assert steps_in(tmp_path / "a/mine") == series.steps.tolist() == [0, 1, 2, 3]


class Service(RemoteLogger):
    """A service in memory, whose runs have ids without an order."""

    project = "a/project"
    ids = iter("zyxwvu")

    def _open(self, run_id: str | None) -> str:
        return run_id or next(self.ids)

    def _write(self, rows: Any) -> None:
        rows.clear()

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        pass


def test_a_run_of_a_service_owns_its_checkpoints(tmp_path: Path) -> None:
    def fit(lr: float, epochs: int, path: str | None = None, logger: Any = None) -> tw.Trainer:
        settings = {**SAVING, "logger": logger or Service()}
        trainer = tw.Trainer(max_epochs=epochs, default_root_dir=tmp_path, **settings)
        trainer.fit(Classifier(lr=lr), make_loader(), ckpt_path=path)
        return trainer

    first = fit(0.1, 4)
    assert first.checkpoint_callback.best_model_path == f"{tmp_path}/a_project/z/checkpoints/epoch=3-step=44.ckpt"
    second = fit(0.5, 1)
    again = fit(0.5, 2, "last")
    assert again.resume_source == second.checkpoint_callback.best_model_path
    assert (again.logger.version, again.optimizers[0].param_groups[0]["lr"]) == ("y", 0.5)
    given = fit(0.1, 5, "auto", Service(run_id="z"))
    assert given.resume_source == first.checkpoint_callback.best_model_path
    first.fit(Classifier(), make_loader())
    assert first.logger.version == "x"
    assert sorted(os.listdir(tmp_path / "a_project")) == ["x", "y", "z"]


class SetUp(Classifier):
    """Gets a transfer hook and a validation loader in setup."""

    calls = 0

    def setup(self, stage: str) -> None:
        self.on_after_batch_transfer = self.count
        self.val_dataloader = lambda: make_loader(5)

    def count(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls += 1
        return batch


def test_a_stop_within_an_epoch_is_saved_without_a_metric_of_its_end(tmp_path: Path) -> None:
    class Graph(tw.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"average": torch.ones(1, requires_grad=True) * 2}

    settings = {**SAVING, "max_steps": 3}
    saving = tw.ModelCheckpoint(tmp_path, "{epoch}-{val_loss:.2f}")
    tw.Trainer(callbacks=[Graph(), saving], **settings).fit(Classifier(), make_loader(), make_loader(5))
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=0-val_loss=nan.ckpt"]


def test_layers_that_setup_adds_count_in_every_call() -> None:
    trainer, module = tw.Trainer(max_epochs=1, num_sanity_val_steps=0, **QUIET), SetUp()
    trainer.fit(module, make_loader())
    batches = trainer.num_training_batches + trainer.num_val_batches[0]
    assert module.calls == batches
    assert "val_loss" in trainer.callback_metrics
    trainer.validate(module, make_loader(5), verbose=False)
    assert module.calls == batches + trainer.num_val_batches[0]


def test_setup_may_choose_the_accumulation() -> None:
    class Accumulating(tw.Callback):
        def setup(self, trainer: tw.Trainer, module: tw.Module, stage: str) -> None:
            trainer.accumulate_grad_batches = 4

    trainer = tw.Trainer(max_epochs=2, callbacks=[Accumulating()], **QUIET)
    trainer.fit(Classifier(), make_loader())  # eleven batches
    assert (trainer.global_step, trainer.accumulate_grad_batches) == (6, 4)


def test_callbacks_replaced_within_a_run_are_saved(tmp_path: Path) -> None:
    class Stateful(tw.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

    class Replacing(tw.Callback):
        def on_fit_start(self, trainer: tw.Trainer, module: tw.Module) -> None:
            trainer.callbacks = [*trainer.callbacks, Stateful()]

    trainer = small.fit(Classifier(), callbacks=[Replacing()])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = open_checkpoint(str(tmp_path / "a.ckpt")).run_state()["callbacks"]
    assert [each for name, each in saved.items() if name.endswith("Stateful")] == [{"a": 1}]

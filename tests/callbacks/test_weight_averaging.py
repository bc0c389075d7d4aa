"""WeightAveraging and EMAWeightAveraging on one process: torch's numbers, scored and saved weights, and exact resumes."""

from __future__ import annotations

import copy
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import QUIET, Classifier, assert_close, assert_equal, make_loader, weights
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import trainwright as tw
from trainwright.checkpoint.reader import open_checkpoint


class Normed(Classifier):
    """It has running statistics, an infinite mask, weights that two layers share, and a layer that trains later."""

    mask: Tensor
    step: Tensor

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        layers = [torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
        layers[2].weight = layers[1].weight
        layers[3].requires_grad_(False)
        self.net.extend(layers)
        self.net.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.net.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.seen: list[dict[str, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.net[-1].requires_grad_(self.global_step >= 14)
        self.net.step += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.seen.append(weights(self.net))
        super().validation_step(batch, batch_idx)


class Reference(tw.Callback):
    """torch's AveragedModel, updated after every step."""

    def __init__(self, **options: Any) -> None:
        self.options, self.model, self.at = options, AveragedModel(torch.nn.Linear(1, 1)), list[dict[str, Tensor]]()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            self.model = AveragedModel(module.net, use_buffers=True, **self.options)
        self.model.update_parameters(module.net)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.at.append(weights(self.model.module))


def ema(**options: Any) -> tw.EMAWeightAveraging:
    return tw.EMAWeightAveraging(**{"decay": 0.7, **options})


def fit(
    average: tw.Callback | None, *others: tw.Callback, kind: Callable[[], tw.Module] = Normed, **options: Any
) -> tuple[tw.Trainer, Any]:
    path = options.pop("ckpt_path", None)
    module = kind()
    callbacks = [*others, *([average] if average else [])]
    settings = {**QUIET, "max_epochs": 3, "callbacks": callbacks, **options}
    trainer = tw.Trainer(**settings)
    torch.manual_seed(0)
    trainer.fit(module, make_loader(shuffle=True), make_loader(20), ckpt_path=path)
    return trainer, module


@pytest.mark.parametrize(("average", "options", "tolerance"), [
    (lambda: tw.WeightAveraging(), {}, 1e-6),  # on the CPU AveragedModel has another formula for it
    (ema, {"multi_avg_fn": get_ema_multi_avg_fn(0.7)}, 0.0),
    (lambda: tw.WeightAveraging(avg_fn=get_ema_avg_fn(0.7)), {"avg_fn": get_ema_avg_fn(0.7)}, 0.0),
    (
        lambda: tw.WeightAveraging("cpu", multi_avg_fn=get_ema_multi_avg_fn(0.7)),
        {"avg_fn": get_ema_avg_fn(0.7)},
        1e-6,
    ),
], ids=["mean", "ema", "one by one", "several"])  # fmt: skip
def test_weight_average_equals_torchs(average: Any, options: dict[str, Any], tolerance: float) -> None:
    reference, module = Reference(**options), Normed()
    trainer = tw.Trainer(max_epochs=2, val_check_interval=5, callbacks=[reference, average()], **QUIET)
    trainer.fit(module, make_loader(), make_loader(20))
    reference.at[0] = module.seen[0]  # of the sanity check
    found, ends = [*module.seen, weights(module.net)], [*reference.at, weights(reference.model.module)]
    for seen, wanted in zip(found, ends, strict=True):
        assert not any(each.isnan().any() for each in seen.values())
        for name in ("mask", "step", "4.num_batches_tracked"):  # torch makes NaN of an infinity, and cuts off counts
            wanted[name] = seen[name]
        assert_close(seen, wanted, tolerance)
    assert torch.equal(module.net.mask.cpu(), torch.tensor([0.0, -torch.inf]))
    assert int(module.net.step) == 22


def test_buffers_have_no_average_without_use_buffers() -> None:
    latest: dict[str, Tensor] = {}
    keeps = tw.LambdaCallback(on_train_batch_end=lambda trainer, module, *_: latest.update(weights(module)))
    _, module = fit(ema(use_buffers=False), keeps, max_epochs=1)
    now = weights(module)
    assert torch.equal(now["net.4.running_mean"], latest["net.4.running_mean"])
    assert not torch.equal(now["net.4.weight"], latest["net.4.weight"])


def test_when_it_updates() -> None:
    def updates(average: tw.WeightAveraging, **options: Any) -> tuple[int, list[int], list[int]]:
        steps, epochs, decide = list[int](), list[int](), average.should_update

        def note(step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            is_due = decide(step_idx, epoch_idx)
            (steps if epoch_idx is None else epochs).extend([step_idx if epoch_idx is None else epoch_idx] * is_due)  # type: ignore[list-item]
            return is_due

        average.should_update = note  # type: ignore[method-assign]
        fit(average, kind=Classifier, **options)
        return average.n_averaged, steps, epochs

    assert updates(tw.WeightAveraging(), max_epochs=1) == (11, list(range(11)), [])
    assert updates(ema(), accumulate_grad_batches=4, max_epochs=2) == (6, list(range(6)), [])
    assert updates(ema(update_every_n_steps=5, update_starting_at_step=7)) == (5, [10, 15, 20, 25, 30], [])
    assert updates(ema(update_every_n_steps=0, update_starting_at_epoch=1)) == (2, [], [1, 2])
    assert updates(ema(update_every_n_steps=9, update_starting_at_epoch=2)) == (5, [0, 9, 18, 27], [2])
    _, plain = fit(None)
    _, late = fit(ema(update_starting_at_step=99))  # never: the weights stay as trained
    assert_equal(weights(late), weights(plain))


def test_what_is_scored_is_what_is_saved(tmp_path: Path) -> None:
    saving = [
        tw.ModelCheckpoint(tmp_path, "best", monitor="val_loss", async_save=True),
        tw.ModelCheckpoint(tmp_path, "weights", monitor="val_loss", save_weights_only=True),
    ]
    trainer, module = fit(ema(), *saving, enable_checkpointing=True, val_check_interval=4)
    _, plain = fit(None, val_check_interval=4)
    for each in saving:
        best = trainer.validate(Normed(), make_loader(20), ckpt_path=each.best_model_path, verbose=False)[0]["val_loss"]
        assert best == pytest.approx(float(each.best_model_score), abs=0.0)  # type: ignore[arg-type]
    assert open_checkpoint(saving[0].best_model_path).sections == ["model", "optimizer", "training"]
    assert open_checkpoint(saving[1].best_model_path).sections == ["model"]
    trainer, module = fit(ema())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    trainer.save_checkpoint(tmp_path / "end-weights.ckpt", weights_only=True)
    for name in ("end", "end-weights"):
        assert_equal(weights(Normed.load_from_checkpoint(tmp_path / f"{name}.ckpt")), weights(module))
    stored = open_checkpoint(str(tmp_path / "end.ckpt")).read_tensors("training")
    wanted = {name: value for name, value in weights(plain).items() if name in stored}
    assert "net.7.weight" in wanted
    assert_equal(stored, wanted)  # as a run without averages trains them
    trainer.validate(Classifier(), make_loader(20), verbose=False)
    trainer.save_checkpoint(tmp_path / "other.ckpt", weights_only=True)
    Classifier.load_from_checkpoint(tmp_path / "other.ckpt")


class Saves(tw.Callback):
    """Saves after a step, before or after the average is updated."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("precision", "step"), [("32-true", 3), ("32-true", 22), ("bf16-true", 3), ("bf16-true", 13), ("16-mixed", 13)]
)
def test_resumed_run_has_the_same_average(tmp_path: Path, precision: str, step: int) -> None:
    path = tmp_path / "run.ckpt"
    options = {"precision": precision, "val_check_interval": 4}
    saving = Saves(path, step)
    average = ema(update_starting_at_step=4)
    _, whole = fit(average, saving, **options)
    again = ema(update_starting_at_step=4)
    _, resumed = fit(again, ckpt_path=path, **options)
    assert_equal(weights(resumed), weights(whole))
    assert again.n_averaged == average.n_averaged == 29
    for late, early in zip(reversed(resumed.seen[1:]), reversed(whole.seen), strict=False):
        assert_equal(late, early)
    sections = open_checkpoint(str(path)).sections
    assert ("average" in sections) == (precision == "bf16-true" and step > 3)


def test_run_that_stops_within_an_epoch_continues_its_average(tmp_path: Path) -> None:
    for options in ({}, {"update_every_n_steps": 0, "update_starting_at_epoch": 0}):
        path = tmp_path / f"{len(options)}"
        _, whole = fit(ema(**options))
        saving = tw.ModelCheckpoint(path, "mid", every_n_epochs=1)
        fit(ema(**options), saving, max_steps=15, enable_checkpointing=True)
        _, resumed = fit(ema(**options), ckpt_path=path / "mid.ckpt")
        assert_equal(weights(resumed), weights(whole))


class Interrupted(Normed):
    """A validation within an epoch does not come to its end."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.global_step == 15 and batch_idx == 1:
            self.interrupt()

    def interrupt(self) -> None:
        raise RuntimeError("no more")


class Signalled(Interrupted):
    def interrupt(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_failed_validation_restores_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"val_check_interval": 4, "enable_checkpointing": True}
    _, whole = fit(ema(), **{**options, "enable_checkpointing": False})
    latest: dict[str, Tensor] = {}

    class Keeps(tw.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            latest.update(weights(module))

        def teardown(self, trainer: Any, module: Any, stage: str) -> None:
            self.at_end = weights(module)

    keeps, saving = Keeps(), tw.ModelCheckpoint(tmp_path / "failed", save_on_exception=True)
    with pytest.raises(RuntimeError, match="no more"):
        fit(ema(), keeps, saving, kind=Interrupted, **options)
    assert_equal(keeps.at_end, latest)  # the weights in training are back
    _, resumed = fit(ema(), ckpt_path=tmp_path / "failed" / "exception-epoch=1-step=15.ckpt", val_check_interval=4)
    assert_equal(weights(resumed), weights(whole))
    with pytest.raises(tw.RunStopped):
        fit(ema(), tw.ModelCheckpoint(tmp_path / "stopped"), kind=Signalled, **options)
    _, resumed = fit(ema(), ckpt_path=tmp_path / "stopped" / "stop-step=15.ckpt", val_check_interval=4)
    assert_equal(weights(resumed), weights(whole))
    capsys.readouterr()


def test_a_run_continues_after_its_end(tmp_path: Path) -> None:
    _, whole = fit(ema())
    trainer, module = fit(ema(), max_epochs=2)
    before = trainer.validate(module, make_loader(20), verbose=False)
    assert before[0]["val_loss"] == float(trainer.callback_metrics["val_loss"])
    trainer, module = fit(ema(), max_epochs=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    _, resumed = fit(ema(), ckpt_path=tmp_path / "two.ckpt")
    assert_equal(weights(resumed), weights(whole))
    # A second fit begins from the module's weights, with another average.
    average = trainer.callbacks[0]
    assert isinstance(average, tw.EMAWeightAveraging)
    trainer.fit(module, make_loader(), make_loader(20))
    assert average.n_averaged == 22


def test_resume_without_the_average_begins_a_new_one(tmp_path: Path) -> None:
    trainer, _ = fit(None, max_epochs=2)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    trainer, _ = fit(ema(), max_epochs=2)
    trainer.save_checkpoint(tmp_path / "averaged.ckpt")
    average = ema()
    with pytest.warns(UserWarning, match=r"plain.ckpt holds no average of EMAWeightAveraging.* after step 22"):
        fit(average, ckpt_path=tmp_path / "plain.ckpt")
    assert average.n_averaged == 11
    _, whole = fit(None)
    with pytest.warns(UserWarning, match=r"averaged.ckpt: .*no callback loads, .* without them: WeightAveraging"):
        _, resumed = fit(None, ckpt_path=tmp_path / "averaged.ckpt")
    assert_equal(weights(resumed), weights(whole))

    class Mine(tw.WeightAveraging):
        """Another class continues it."""

    fit(Mine(), ckpt_path=tmp_path / "averaged.ckpt")
    with (
        pytest.warns(UserWarning, match="no callback loads, so this run continues without them: WeightAveraging"),
        pytest.warns(UserWarning, match="holds no average of StochasticWeightAveraging"),
    ):
        fit(tw.StochasticWeightAveraging(0.1), ckpt_path=tmp_path / "averaged.ckpt")


def test_other_precisions_resume(tmp_path: Path) -> None:
    for first, then in (("bf16-true", "32-true"), ("32-true", "bf16-true")):
        trainer, module = fit(ema(), max_epochs=2, precision=first)
        path = tmp_path / f"{first}.ckpt"
        trainer.save_checkpoint(path)
        _, resumed = fit(ema(), ckpt_path=path, max_epochs=2, precision=then)  # nothing is left to train
        found, wanted = weights(resumed), weights(module)
        for name in found:
            assert torch.equal(found[name].bfloat16(), wanted[name].bfloat16()), name


def test_weight_averaging_works_in_other_runs() -> None:
    class Late(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.made, self.net = self.net, None  # type: ignore[assignment]

        def configure_model(self) -> None:
            with torch.device("meta"):
                self.net = torch.nn.Sequential(torch.nn.Linear(8, 3))

    average = ema()
    fit(average, kind=Late)
    fit(ema(), compile={"backend": "eager"}, max_epochs=1)
    fit(ema(), fast_dev_run=2)
    fit(ema(), limit_val_batches=0)

    class Manual(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
            self.manual_backward(loss)
            optimizer.step()  # type: ignore[union-attr]

    fit(average, kind=Manual)
    assert average.n_averaged == 33

    copied = pickle.loads(pickle.dumps(copy.deepcopy(average)))
    assert copied.n_averaged == 33
    assert copied.decay == 0.7


def test_weight_averaging_rejects_wrong_settings() -> None:
    with pytest.raises(ValueError, match="both say how to average"):
        tw.WeightAveraging(avg_fn=get_ema_avg_fn(), multi_avg_fn=get_ema_multi_avg_fn())
    with pytest.raises(TypeError, match=r"avg_fn=0\.9 cannot be called"):
        tw.WeightAveraging(avg_fn=0.9)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"decay=1.5 is not accepted; pass a number from 0"):
        ema(decay=1.5)
    with pytest.raises(ValueError, match=r"update_starting_at_step=-1 is not accepted; pass an integer of at least 0"):
        ema(update_starting_at_step=-1)
    with pytest.raises(ValueError, match="makes no update"):
        ema(update_every_n_steps=0)
    with pytest.raises(ValueError, match="EMAWeightAveraging and StochasticWeightAveraging average the same weights"):
        fit(tw.StochasticWeightAveraging(0.1), ema())


def test_an_epochs_update_comes_before_its_validation(tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        return {"update_every_n_steps": 0, "update_starting_at_epoch": 0}

    seen: list[dict[str, Tensor]] = []

    class Scores(tw.Callback):
        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                seen.append(weights(module))

    saving = tw.ModelCheckpoint(tmp_path, "{epoch}", monitor="val_loss", save_top_k=-1)
    average = ema(**options())
    settings: dict[str, Any] = {"kind": Classifier, "enable_checkpointing": True}
    trainer, whole = fit(average, Scores(), saving, **settings)
    assert average.n_averaged == 3
    trainer.validate(whole, make_loader(20), verbose=False)
    assert_equal(seen.pop(), seen[2])
    for epoch in range(3):
        path = f"{tmp_path}/epoch={epoch}.ckpt"
        assert_equal(weights(Classifier.load_from_checkpoint(path)), seen[epoch])
    _, resumed = fit(ema(**options()), kind=Classifier, ckpt_path=f"{tmp_path}/epoch=0.ckpt")
    assert_equal(weights(resumed), weights(whole))

"""A fit that a signal stops: the place, the save, the exit code, and a resume with the same bits."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from small import QUIET, SAVING, Classifier, assert_equal, make_loader, weights

import trainwright as tw
from trainwright.checkpoint.discovery import find_checkpoints
from trainwright.errors import RunStopped


class Net(Classifier):
    """Draws numbers in training and in validation, and has schedulers of an epoch and of a metric."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        torch.rand(3)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7),
            {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
                "monitor": "val_loss",
            },
        ]


class Sender(tw.Callback):
    """Sends this process signals at the n-th call of one of its hooks."""

    def __init__(self, hook: str, call: int, *numbers: int) -> None:
        self.calls, self.call, self.numbers = 0, call, numbers
        setattr(self, hook, self.send)

    def send(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == self.call:
            for number in self.numbers:
                os.kill(os.getpid(), number)

    def on_fit_start(self, *_: Any) -> None: ...
    def on_train_start(self, *_: Any) -> None: ...
    def on_train_batch_start(self, *_: Any) -> None: ...
    def on_train_batch_end(self, *_: Any) -> None: ...
    def on_validation_start(self, *_: Any) -> None: ...
    def on_validation_batch_start(self, *_: Any) -> None: ...
    def on_validation_end(self, *_: Any) -> None: ...
    def on_train_epoch_start(self, *_: Any) -> None: ...
    def on_train_epoch_end(self, *_: Any) -> None: ...
    def on_save_checkpoint(self, *_: Any) -> None: ...
    def on_train_end(self, *_: Any) -> None: ...


class Seen(tw.Callback):
    """Records the trained batches, and the metrics at an epoch's end."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def on_train_batch_end(self, trainer: tw.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((trainer.current_epoch, batch_idx, batch[1].tolist()))

    def on_train_epoch_end(self, trainer: tw.Trainer, module: Any) -> None:
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def fit(
    folder: Path, *extra: tw.Callback, keep: dict[str, Any] | None = None, path: str | None = None, **options: Any
) -> tuple[Net, tw.Trainer, list[Any], int | str | None]:
    """Fit in a folder. Return the module, the trainer, the record, and the exit code of a stop."""
    torch.manual_seed(5)
    module, seen, code = Net(dropout=0.3), [], None
    saver = tw.ModelCheckpoint(dirpath=folder, monitor="val_loss", **(keep or {}))
    settings = {**SAVING, "max_epochs": 3, "accumulate_grad_batches": 3, **options}
    trainer = tw.Trainer(callbacks=[saver, *extra, Seen(seen)], **settings)
    loaders = make_loader(shuffle=True), make_loader(20)
    try:
        trainer.fit(module, *loaders, ckpt_path=path)
    except RunStopped as stopped:
        code = stopped.code
    return module, trainer, seen, code


def state_of(trainer: tw.Trainer) -> list[Any]:
    schedulers = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    counters = {**trainer.state.state_dict(), "saves": 0}  # the stop made one more save
    return [counters, schedulers, trainer.optimizers[0].param_groups[0]["lr"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Net, tw.Trainer, list[Any]]:
    module, trainer, seen, code = fit(tmp_path_factory.mktemp("whole"))
    assert code is None
    return module, trainer, seen


PLACES = {
    "in the first batch": ("on_train_batch_start", 1, "stop-step=1"),
    "in a window": ("on_train_batch_end", 2, "stop-step=1"),
    "at a window's end": ("on_train_batch_end", 6, "stop-step=2"),
    "in an epoch's last batch": ("on_train_batch_start", 11, "stop-step=4"),
    "at the second epoch's start": ("on_train_epoch_start", 2, "epoch=0-step=4"),
    "in the sanity check": ("on_validation_batch_start", 1, "stop-step=0"),
    "in a validation": ("on_validation_batch_start", 5, "stop-step=4"),
    "in the setup": ("on_fit_start", 1, "stop-step=0"),
    "before training": ("on_train_start", 1, "stop-step=0"),
    "at an epoch's end": ("on_train_epoch_end", 1, "epoch=0-step=4"),
    "in a save": ("on_save_checkpoint", 1, "epoch=0-step=4"),
    "in an asynchronous save": ("on_save_checkpoint", 1, "epoch=0-step=4"),
    "at the last epoch's end": ("on_train_epoch_end", 3, "stop-step=12"),
}


# Which save is the best depends on the numbers that dropout draws, at the last epoch's end.
OF_THE_HOST = [pytest.param(each, marks=pytest.mark.host if "last epoch's end" in each else ()) for each in PLACES]


@pytest.mark.parametrize("place", OF_THE_HOST)
def test_a_stop_is_saved_once_and_resumes_bitwise(place: str, tmp_path: Path, whole: Any, capfd: Any) -> None:
    hook, call, name = PLACES[place]
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    keep = {"async_save": "asynchronous" in place}
    _, trainer, first, code = fit(tmp_path, Sender(hook, call, signal.SIGTERM, signal.SIGTERM), keep=keep)
    assert code == 75
    assert trainer.received_sigterm
    assert trainer.interrupted
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    *_, found = entries = find_checkpoints(str(tmp_path))
    stops = [each.path for each in entries if "/stop-" in each.path]
    assert len(stops) == name.startswith("stop")
    assert found.path == f"{tmp_path}/{name}.ckpt"
    said = capfd.readouterr().err
    assert said.count("trainwright: SIGTERM has stopped the run") == 1
    assert f'it is saved as {found.path}. Run the same command with ckpt_path="auto" to resume.' in said
    module, resumed, rest, code = fit(tmp_path, path=found.path)
    assert code is None
    assert not resumed.received_sigterm
    assert_equal(weights(module), weights(whole[0]))
    assert state_of(resumed) == state_of(whole[1])
    assert first + rest == whole[2]


@pytest.mark.parametrize("every", [3, 4])
def test_a_validation_within_an_epoch_is_run_again(every: int, tmp_path: Path) -> None:
    """After every third batch a window has ended. After a fourth it has not, so the validation waits for the sixth."""
    options: dict[str, Any] = {"val_check_interval": every, "num_sanity_val_steps": 0}
    module, trainer, seen, code = fit(tmp_path / "whole", **options)
    assert code is None
    stopped = tmp_path / "stopped"
    _, first_trainer, first, code = fit(stopped, Sender("on_validation_batch_start", 7, signal.SIGTERM), **options)
    assert code == 75
    assert (first_trainer.global_step, first_trainer.state.validations) == ((2, 1) if every == 3 else (3, 1))
    (path,) = [each.path for each in find_checkpoints(str(stopped)) if "/stop-" in each.path]
    again, resumed, rest, code = fit(stopped, path=path, **options)
    assert code is None
    assert_equal(weights(again), weights(module))
    assert state_of(resumed) == state_of(trainer)
    assert first + rest == seen


def test_it_is_saved_whole_whatever_the_settings(tmp_path: Path) -> None:
    keep = {"save_weights_only": True, "every_n_epochs": 0, "save_top_k": 2}
    sender = Sender("on_train_batch_end", 2, signal.SIGTERM)
    _, trainer, _, code = fit(tmp_path, sender, keep=keep, min_steps=10, min_epochs=2)
    assert (code, trainer.global_step) == (75, 1)
    (entry,) = find_checkpoints(str(tmp_path))
    assert entry.path.endswith("/stop-step=1.ckpt")
    _, resumed, _, code = fit(tmp_path, path=entry.path, keep=keep)
    assert (code, resumed.global_step) == (None, 12)


@pytest.mark.parametrize("options", [{"fast_dev_run": 8}, {"keep": {"save_top_k": 0}}])
def test_without_a_checkpoint_it_says_so(options: dict[str, Any], tmp_path: Path, capfd: Any) -> None:
    assert fit(tmp_path, Sender("on_train_batch_end", 2, signal.SIGUSR1), **options)[3] == 128 + signal.SIGUSR1
    assert "SIGUSR1 has stopped the run in epoch 0, at step 1; nothing was saved" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_stops_and_saves_the_run(tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, trainer, _, code = fit(tmp_path / "script", Sender("on_train_batch_end", 2, signal.SIGINT))
    assert (code, trainer.interrupted, trainer.received_sigterm) == (130, True, False)
    assert "trainwright: Ctrl-C has stopped the run" in capfd.readouterr().err
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)  # as where somebody sits at a prompt
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "prompt", Sender("on_train_batch_end", 2, signal.SIGINT))
    assert [Path(each.path).name for each in find_checkpoints(str(tmp_path / "prompt"))] == ["stop-step=1.ckpt"]
    with pytest.raises(KeyboardInterrupt):  # a second one does not wait for the window's end
        fit(tmp_path / "twice", Sender("on_train_batch_end", 1, signal.SIGINT, signal.SIGINT))
    assert find_checkpoints(str(tmp_path / "twice")) == []


def test_a_handler_of_the_users_own_is_called_too(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        assert fit(tmp_path, Sender("on_train_batch_end", 2, signal.SIGUSR1))[3] == 75
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1, signal.SIGUSR1]


def test_an_error_puts_the_handlers_back(tmp_path: Path) -> None:
    class Failing(tw.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ArithmeticError("no such luck")

    before, wakeup = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    with pytest.raises(ArithmeticError):
        fit(tmp_path, Failing())
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == wakeup == -1
    assert not [thread for thread in threading.enumerate() if thread.name == "trainwright-signals"]


class Gathers(Net):
    """Steps every third batch under manual optimization, and not at an epoch's end."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 3 == 2:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        if batch_idx == 10:
            self.optimizers().zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("call", [4, 5, 6, 7, 11])
def test_gathered_gradients_are_stepped_before_a_save(call: int, tmp_path: Path) -> None:
    """A checkpoint holds no gradients: under manual optimization too a stop and a save wait for the step."""

    def run(folder: Path, *extra: tw.Callback) -> tuple[Gathers, tw.Trainer, int | str | None]:
        torch.manual_seed(5)
        module, code = Gathers(dropout=0.3), None
        saver = tw.ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1)
        trainer = tw.Trainer(callbacks=[saver, *extra], max_epochs=2, **SAVING)
        try:
            trainer.fit(module, make_loader(shuffle=True), make_loader(20), ckpt_path="auto")
        except RunStopped as stopped:
            code = stopped.code
        return module, trainer, code

    whole, _, code = run(tmp_path / "whole")
    assert code is None
    _, trainer, code = run(tmp_path / "stopped", Sender("on_train_batch_start", call, signal.SIGTERM))
    assert code == 75
    assert trainer.state.batch in (3, 6, 9, 11)
    again, _, code = run(tmp_path / "stopped")
    assert code is None
    assert_equal(weights(again), weights(whole))
    names = [Path(each.path).name for each in find_checkpoints(str(tmp_path / "whole"))]
    assert [name for name in names if not name.startswith("end")] == [
        f"epoch={epoch}-step={step}.ckpt" for epoch, step in ((0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6))
    ]


def test_the_first_saving_callback_writes_the_stop(tmp_path: Path) -> None:
    keeping = tw.ModelCheckpoint(tmp_path / "kept")
    callbacks = [tw.ModelCheckpoint(tmp_path / "none", save_top_k=0), keeping]
    trainer = tw.Trainer(callbacks=callbacks, **{**SAVING, "max_steps": 3})
    trainer.fit(Classifier(), make_loader(), ckpt_path="auto")
    assert find_checkpoints(str(tmp_path / "kept"))[-1].step == 3
    assert trainer.test(None, make_loader(), ckpt_path="best", verbose=False)


def test_a_fit_in_another_thread_installs_no_handlers(tmp_path: Path) -> None:
    before, during = signal.getsignal(signal.SIGTERM), []
    look = tw.LambdaCallback(on_train_batch_end=lambda *_: during.append(signal.getsignal(signal.SIGTERM)))
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(fit(tmp_path, look, max_epochs=1)))
    thread.start()
    thread.join()
    assert done
    assert set(during) == {before}


def test_a_second_run_is_stopped_after_the_error_of_the_first_was_dropped(tmp_path: Path) -> None:
    errors: list[RunStopped] = []

    class Sends(tw.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            errors.clear()
            os.kill(os.getpid(), signal.SIGTERM)

    for _ in range(2):
        with pytest.raises(RunStopped) as stopped:
            tw.Trainer(max_epochs=1, default_root_dir=tmp_path, callbacks=Sends(), **QUIET).fit(Net(), make_loader())
        assert stopped.value.code == 128 + signal.SIGTERM  # without a ModelCheckpoint
        errors.append(stopped.value)
        del stopped

"""ModelCheckpoint(async_save=True) keeps the same checkpoints as a blocking one, and removes none before the new one exists."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from deadlines import deadline
from held import HeldFiles, held
from jobs import run_job
from small import ON_HOST, SAVING, assert_equal, make_loader, weights
from started import Started, python

import trainwright as tw
from trainwright.checkpoint.discovery import find_checkpoints
from trainwright.checkpoint.reader import open_checkpoint

Scored = partial(small.Scored, dropout=0.2)


def trainer_of(*callbacks: tw.Callback, epochs: int = 1, **settings: Any) -> tw.Trainer:
    settings = {**SAVING, **settings}
    return tw.Trainer(max_epochs=epochs, callbacks=list(callbacks), **settings)


def run(folder: str, scores: list[float], ckpt_path: str | None = None, **kwargs: Any) -> tw.ModelCheckpoint:
    callback = tw.ModelCheckpoint(folder, **{"monitor": "score", **kwargs})
    trainer_of(callback, epochs=len(scores)).fit(
        Scored(scores), make_loader(shuffle=True), make_loader(4), ckpt_path=ckpt_path
    )
    return callback


def found(folder: object) -> dict[str, int]:
    """Return the checkpoints of a folder with their steps."""
    return {Path(entry.path).name: entry.step for entry in find_checkpoints(str(folder))}


def digests(path: str) -> dict[str, str]:
    return {name: record.sha256 for name, record in open_checkpoint(path)._manifest.files.items()}


@pytest.mark.parametrize("kwargs", [
    {"save_top_k": 2, "save_last": True},
    {"filename": "best"},
    {"filename": "best", "save_top_k": 2},
    {"monitor": None, "every_n_train_steps": 3},
    {"save_top_k": -1, "save_weights_only": True},
])  # fmt: skip
def test_what_is_kept_is_the_same(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    scores = [3.0, 5.0, 1.0, 2.0, 4.0]
    states = {}
    for name in ("plain", "async"):
        torch.manual_seed(5)
        folder = tmp_path / name / "kept"
        callback = run(str(folder), scores, async_save=name == "async", **kwargs)
        assert {*found(folder), "last.ckpt"} == {*os.listdir(folder), "last.ckpt"}
        assert callback.best_model_path == "" or open_checkpoint(callback.best_model_path)
        states[name] = [found(folder), str(callback.state_dict()).replace(name, "")]
    assert states["async"] == states["plain"]
    for name in found(tmp_path / "plain" / "kept"):
        plain, other = digests(f"{tmp_path}/plain/kept/{name}"), digests(f"{tmp_path}/async/kept/{name}")
        for one in (plain, other):
            one.pop("state.json")  # it tells the paths
        assert other == plain


def settle(trainer: tw.Trainer) -> None:
    """Let the save in flight end, committed or failed, without a report."""
    if trainer.engine.writer.in_flight is not None:
        assert trainer.engine.writer.in_flight.wait(deadline(20))


class Settles(tw.Callback):
    """Lets every save commit before the next batch."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        settle(trainer)


def test_the_checkpoint_of_a_resume_goes_at_a_later_one(tmp_path: Path) -> None:
    """A run of 11 steps, and two that continue to 22 and 33 steps. All save every third step."""
    for epochs, kept in ((1, [9]), (2, [9, 21]), (3, [21, 33])):
        callback = tw.ModelCheckpoint(tmp_path, every_n_train_steps=3, async_save=True, filename="{step}")
        trainer = trainer_of(Settles(), callback, epochs=epochs)
        trainer.fit(Scored([1.0]), make_loader(), ckpt_path="last" if epochs > 1 else None)
        assert sorted(found(tmp_path).values()) == kept


class Watched(tw.Callback):
    """Shuts the gate after a step's save has begun, looks at the folder in the steps after it, and opens the gate."""

    def __init__(self, folder: Path, shut_at: int, open_at: int) -> None:
        self.folder, self.shut_at, self.open_at = folder, shut_at, open_at
        self.seen: list[dict[str, int]] = []
        self.after: dict[str, int] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step == self.shut_at - 1:
            settle(trainer)
            HeldFiles.gate.clear()
        elif self.shut_at <= step < self.open_at:
            self.seen.append(found(self.folder))
        elif step == self.open_at:
            HeldFiles.gate.set()
            settle(trainer)
        elif step == self.open_at + 1:
            self.after = found(self.folder)


def test_nothing_goes_before_the_new_one_is_there(tmp_path: Path) -> None:
    """Saves after steps 3, 6 and 9 of 11, the second of which is delayed until step 7."""
    watched = Watched(tmp_path, 6, 7)
    callback = tw.ModelCheckpoint(f"held://{tmp_path}", every_n_train_steps=3, async_save=True, filename="{step}")
    with held(is_shut=False):
        trainer_of(watched, callback).fit(Scored([1.0]), make_loader())
    assert watched.seen == [{"step=3.ckpt": 3}]
    assert watched.after == {"step=6.ckpt": 6}  # the old one has gone without another save
    assert found(tmp_path) == {"step=9.ckpt": 9}
    assert callback.best_model_path == callback.last_model_path == f"held://{tmp_path}/step=9.ckpt"


class Fills(tw.Callback):
    """Lets the disk be full from a step on."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        settle(trainer)
        HeldFiles.is_full = trainer.global_step >= self.step


@pytest.mark.parametrize("first_bad", [4, 8])
def test_a_failed_save_leaves_what_was_kept(tmp_path: Path, first_bad: int) -> None:
    """The save after step 6 fails and the next save reports it, or the save after step 9 fails and the end reports it."""
    callback = tw.ModelCheckpoint(f"held://{tmp_path}", every_n_train_steps=3, async_save=True, filename="{step}")
    trainer = trainer_of(Fills(first_bad), callback)
    kept, bad = (3, 6) if first_bad == 4 else (6, 9)
    says = pytest.raises(tw.CheckpointError, match=rf"step={bad}\.ckpt was not written: .*the disk is full")
    with held(is_shut=False), says:
        trainer.fit(Scored([1.0]), make_loader())
    assert trainer.global_step == (9 if first_bad == 4 else 11)
    assert found(tmp_path) == {f"step={kept}.ckpt": kept}
    assert callback.best_model_path == callback.last_model_path == f"held://{tmp_path}/step={kept}.ckpt"
    assert trainer.engine.writer.in_flight is None
    trainer.test(Scored([1.0]), make_loader(4), ckpt_path="best", verbose=False)


class StopsAfterAFailure(Fills):
    """Lets a save fail. Then there is room again, and a signal stops the run."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        if trainer.global_step > self.step:
            HeldFiles.is_full = False
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_stop_saves_though_the_save_before_it_has_failed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Saves after steps 3 and 6: the second fails, and the run is stopped at step 7."""
    callback = tw.ModelCheckpoint(f"held://{tmp_path}", every_n_train_steps=3, async_save=True, filename="{step}")
    with held(is_shut=False), pytest.raises(tw.RunStopped) as stopped:
        trainer_of(StopsAfterAFailure(5), callback).fit(Scored([1.0]), make_loader())
    assert stopped.value.code == 75
    assert "the disk is full" in capfd.readouterr().err
    assert found(tmp_path) == {"step=3.ckpt": 3, "stop-step=7.ckpt": 7}


def test_an_error_elsewhere_lets_it_commit(tmp_path: Path) -> None:
    class Fails(tw.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 7:
                raise ValueError("of a callback")

    callback = tw.ModelCheckpoint(str(tmp_path), every_n_train_steps=3, async_save=True, filename="newest")
    with pytest.raises(ValueError, match="of a callback"):
        trainer_of(Fails(), callback).fit(Scored([1.0]), make_loader())
    assert found(tmp_path) == {"newest.ckpt": 6}
    assert os.listdir(tmp_path) == ["newest.ckpt"]
    assert callback.best_model_path == f"{tmp_path}/newest.ckpt"


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Let no file grow beyond a size meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Cramped(tw.Callback):
    """Takes the room for files away on rank 1, from a step on. Records the complete checkpoints."""

    def __init__(self, step: int) -> None:
        self.step, self.limit, self.saved = step, limited(2000), list[str]()

    def on_checkpoint_saved(self, trainer: Any, module: Any, path: str) -> None:
        self.saved.append(path)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        settle(trainer)
        if trainer.global_step == self.step and trainer.global_rank == 1:
            self.limit.__enter__()


def two_ranks(folder: Path) -> dict[str, Any]:
    said: dict[str, Any] = {}
    # Only rank 1 cannot write the save after step 4.
    place = folder / "cramped"
    for ending in (6, 5):  # the save after step 6 says so, or the end of fit
        cramped = Cramped(3)
        callback = tw.ModelCheckpoint(
            str(place / str(ending)), every_n_train_steps=2, async_save=True, filename="{step}"
        )
        trainer = trainer_of(cramped, callback, devices=2, max_steps=ending, epochs=-1)
        try:
            trainer.fit(Scored([1.0]), make_loader())
        except tw.CheckpointError as error:
            said[str(ending)] = [str(error), trainer.global_step, callback.best_model_path, cramped.saved]
        if trainer.global_rank == 1:
            cramped.limit.__exit__(None, None, None)
    # In a raw loop.
    accelerator = tw.Accelerator(cpu=ON_HOST, devices=2)
    net = torch.nn.Linear(8, 3)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    accelerator.save_state(f"{folder}/own/0", blocking=False)
    for step in (1, 2):
        accelerator.backward(model(torch.ones(2, 8)).sum())
        optimizer.step()
        accelerator.save_state(f"{folder}/own/{step}", blocking=False)
        accelerator.save_state(f"{folder}/own/same", blocking=step == 1, overwrite=True)
    accelerator.finish_save()
    said["own"] = found(folder / "own")
    accelerator.save_state(f"{folder}/own/last", blocking=False)  # the end of the process waits for it
    return said


def test_ranks_keep_the_same_checkpoints_in_async_saves(tmp_path: Path) -> None:
    results = run_job(two_ranks, 2, tmp_path)
    for ending, at_step in ((6, 6), (5, 5)):
        folder = tmp_path / "cramped" / str(ending)
        errors = [said[str(ending)] for said in results]
        assert errors[0] == errors[1]
        text, step, best, saved = errors[0]
        assert text.startswith(f"checkpoint {folder}/step=4.ckpt was not written: rank 1: ")
        assert "File too large" in text
        assert (step, best) == (at_step, f"{folder}/step=2.ckpt")
        assert saved == [f"{folder}/step=2.ckpt"]
        assert found(folder) == {"step=2.ckpt": 2}
        assert os.listdir(folder) == ["step=2.ckpt"]
    assert results[0]["own"] == {"0": 0, "1": 1, "2": 2, "same": 2}
    assert found(tmp_path / "own") == {"0": 0, "1": 1, "2": 2, "same": 2, "last": 2}


FAILING = """
import os, signal, sys, threading
from pathlib import Path
import trainwright as tw
from small import SAVING, Classifier, make_loader

folder, ending = sys.argv[1:]
sync = os.fsync
may_go_on = threading.Event()

class Ends(tw.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        step = trainer.global_step
        if step == 4:
            assert trainer.engine.writer.in_flight.wait(600)
            os.fsync = lambda descriptor: (may_go_on.wait(600), sync(descriptor))
        if step == 7 and trainer.global_rank == 1:
            assert not trainer.engine.writer.in_flight.is_committed
            if ending == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            may_go_on.set()
            raise ValueError("of a callback")
        if step == 7 and ending == "raised":
            may_go_on.set()

callback = tw.ModelCheckpoint(folder, every_n_train_steps=3, async_save=True, filename="{step}", save_top_k=-1)
tw.Trainer(devices=2, max_epochs=2, callbacks=[Ends(), callback], **SAVING).fit(Classifier(), make_loader())
"""


@pytest.mark.slow
def test_a_rank_that_fails_while_a_save_is_in_flight(tmp_path: Path) -> None:
    """If both ranks live the save commits. If one is killed the other leaves, and the previous checkpoint exists."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    started = {
        ending: Started(python("-W", "error", str(script), str(tmp_path / ending), ending), tmp_path)
        for ending in ("raised", "killed")
    }
    try:
        for ending, job in started.items():
            assert job.wait() != 0
            assert ("of a callback" if ending == "raised" else "SIGKILL") in job.stderr
            job.check_nothing_left()
            kept = found(tmp_path / ending)
            assert kept == {"step=3.ckpt": 3} | ({"step=6.ckpt": 6} if ending == "raised" else {})
            for name in kept:
                assert open_checkpoint(f"{tmp_path}/{ending}/{name}").world_size == 2
    finally:
        for job in started.values():
            job.close()


def test_a_save_of_the_users_own_in_the_background_is_whole(tmp_path: Path) -> None:
    """Within a window a save waits for the window's end. It has a hook's changes, and later saves wait for it."""
    said = []

    class Saves(tw.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx in (1, 3):
                said.append(trainer.save_checkpoint(f"{tmp_path}/{batch_idx}.ckpt", blocking=False))

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"]["more"] = module.net[0].weight * 2
            checkpoint["note"] = [trainer.global_step]

    trainer = trainer_of(Saves(), accumulate_grad_batches=4, enable_checkpointing=False)
    module = Scored([1.0])
    trainer.fit(module, make_loader())
    assert said == [False, True]
    assert found(tmp_path) == {"1.ckpt": 1, "3.ckpt": 1}
    for name in found(tmp_path):
        checkpoint = open_checkpoint(f"{tmp_path}/{name}")
        assert checkpoint.run_state()["note"] == [1]
        weight = checkpoint.read_tensor("model", "net.0.weight")
        assert torch.equal(checkpoint.read_tensor("model", "more"), 2 * weight)
        assert not torch.equal(weight, module.net[0].weight)
    end = weights(module)
    trainer.callbacks.clear()
    assert trainer.save_checkpoint(f"{tmp_path}/end.ckpt", weights_only=True, blocking=False)
    other = Scored([1.0])
    trainer.validate(other, make_loader(4), ckpt_path=f"{tmp_path}/end.ckpt", verbose=False)
    assert_equal(weights(other), end)

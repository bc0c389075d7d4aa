"""Checkpoints of a raw loop: numbered ones and how many stay, the newest complete one, registered objects."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_python
from jobs import run_job
from small import ON_HOST, assert_equal, loss_of, make_loader, make_net, weights

import trainwright as tw
from trainwright.checkpoint.discovery import find_checkpoints, is_checkpoint
from trainwright.checkpoint.reader import open_checkpoint


class Loop:
    """A loop over the small net, and its prepared objects."""

    def __init__(self, samples: int = 44, **settings: Any) -> None:
        torch.manual_seed(5)
        self.accelerator = tw.Accelerator(cpu=ON_HOST, **settings)
        net = make_net(dropout=0.2)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        loader = make_loader(samples, shuffle=True)
        prepared = self.accelerator.prepare(net, optimizer, scheduler, loader)
        self.net, self.optimizer, self.scheduler, self.loader = prepared

    def train(self, epochs: int = 1, saves: int = 0) -> None:
        """Train to that epoch, and save after these numbers of steps."""
        for _ in range(self.loader.epoch, epochs):
            for batch in self.loader:
                self.step(batch)
                if saves and self.accelerator.step_count % saves == 0:
                    self.accelerator.save_state()

    def step(self, batch: Any) -> None:
        self.accelerator.backward(loss_of(self.net, batch))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()


def project(folder: Path, **settings: Any) -> tw.ProjectConfiguration:
    return tw.ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, **settings)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in (folder / "checkpoints").iterdir() if not each.name.startswith("."))


def test_checkpoints_are_numbered_and_limited(tmp_path: Path) -> None:
    loop = Loop(project_config=project(tmp_path, total_limit=2))
    accelerator = loop.accelerator
    assert (accelerator.project_dir, accelerator.logging_dir, accelerator.save_iteration) == (*[str(tmp_path)] * 2, 0)
    paths = [accelerator.save_state() for _ in range(3)]
    assert paths == [f"{tmp_path}/checkpoints/checkpoint_{number}" for number in range(3)]
    assert names(tmp_path) == ["checkpoint_1", "checkpoint_2"]
    assert accelerator.save_iteration == 3
    with pytest.warns(UserWarning, match=r"this one is .*checkpoint_3 and not elsewhere"):
        accelerator.save_state("elsewhere")
    accelerator.save_state(blocking=False)
    accelerator.finish_save()
    assert names(tmp_path) == ["checkpoint_3", "checkpoint_4"]
    # Another process of this project: it continues the numbers, and keeps a checkpoint that was loaded by its path.
    again = Loop(project_config=project(tmp_path, total_limit=2)).accelerator
    again.load_state(f"{tmp_path}/checkpoints/checkpoint_3")
    for _ in range(3):
        again.save_state()
    assert names(tmp_path) == ["checkpoint_3", "checkpoint_6", "checkpoint_7"]
    newest = Loop(project_config=project(tmp_path, total_limit=2)).accelerator
    newest.load_state()
    assert newest.save_iteration == 8
    newest.save_state()
    assert names(tmp_path) == ["checkpoint_7", "checkpoint_8"]


def test_damaged_ones_do_not_count(tmp_path: Path) -> None:
    loop = Loop(project_config=project(tmp_path, total_limit=2))
    for _ in range(3):
        loop.train(loop.loader.epoch + 1)
        loop.accelerator.save_state()
    kept = weights(loop.net)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "checkpoint_2", folder / "checkpoint_3")
    (folder / "checkpoint_3" / "manifest.json").unlink()
    shutil.copytree(folder / "checkpoint_2", folder / "checkpoint_4")
    file = folder / "checkpoint_4" / "model-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    (folder / "checkpoint_9").mkdir()
    (folder / "notes").mkdir()
    again = Loop(project_config=project(tmp_path, total_limit=2))
    with pytest.warns(UserWarning, match="skips .*checkpoint_[34], which is damaged") as warned:
        again.accelerator.load_state()
    assert len(warned) == 2
    assert_equal(weights(again.net), kept)
    assert again.accelerator.save_state().endswith("checkpoint_10")
    assert names(tmp_path) == [
        "checkpoint_10", "checkpoint_2", "checkpoint_3", "checkpoint_4", "checkpoint_9", "notes"
    ]  # fmt: skip


def test_load_state_needs_a_checkpoint(tmp_path: Path) -> None:
    loop = Loop(project_dir=tmp_path)
    with pytest.raises(
        tw.CheckpointError, match=r"no complete checkpoint .* was found in .*checkpoints\. Save one first"
    ):
        loop.accelerator.load_state()
    bare = Loop().accelerator
    assert bare.project_dir is None
    for call in (bare.save_state, bare.load_state):
        with pytest.raises(ValueError, match=r"no project: pass a path, or Accelerator\(project_dir="):
            call()
    assert loop.accelerator.save_state().endswith("checkpoints/checkpoint_0")


def test_states_are_saved_on_a_remote_file_system() -> None:
    folder = "memory://raw-loop"
    loop = Loop(project_config=tw.ProjectConfiguration(folder, total_limit=2))
    for epoch in range(3):
        loop.train(epoch + 1)
        loop.accelerator.save_state()
    assert [each.path.rpartition("/")[2] for each in find_checkpoints(f"{folder}/checkpoints")] == [
        "checkpoint_1",
        "checkpoint_2",
    ]
    again = Loop(project_dir=folder)
    again.accelerator.load_state()
    assert_equal(weights(again.net), weights(loop.net))


def test_another_run_holds_the_folder(tmp_path: Path) -> None:
    loop = Loop(project_dir=tmp_path)
    loop.accelerator.save_state()
    program = f"""
import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
from test_saved_states import Loop
Loop(project_dir={str(tmp_path)!r}).accelerator.save_state()
"""
    done = run_python("-c", program, folder=tmp_path)
    assert done.returncode
    assert "is in use by another run" in done.stderr


KILLED = """
import os, signal, sys
sys.path[:0] = {paths!r}
from test_saved_states import Loop, project
from trainwright.checkpoint import discovery, filesystem
from pathlib import Path
left = {calls}
def counted(function):
    def call(*arguments):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return call
files = filesystem.LocalFiles
for name in ("put", "rename", "remove_tree", "make_new_directory"):
    setattr(files, name, counted(getattr(files, name)))
loop = Loop(project_config=project(Path({folder!r}), total_limit=2))
if Path({folder!r}, "checkpoints", "checkpoint_0").exists():
    loop.accelerator.load_state()
loop.train(2, saves=2)
loop.accelerator.end_training()
"""


@pytest.mark.slow
def test_a_killed_save_is_continued(tmp_path: Path) -> None:
    """Kill a save that replaces another at every file operation. The next process continues exactly."""
    whole = Loop(project_config=project(tmp_path / "whole", total_limit=2))
    whole.train(2, saves=2)
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    for calls in (9, 10, 11, 13):  # commit, the two operations of a removal, the next manifest
        folder = tmp_path / str(calls)
        done = run_python("-c", KILLED.format(paths=paths, calls=calls, folder=str(folder)), folder=tmp_path)
        assert done.returncode == -9, done.stderr
        again = Loop(project_config=project(folder, total_limit=2))
        again.accelerator.load_state()
        assert again.accelerator.step_count >= 4
        again.train(2, saves=2)
        assert_equal(weights(again.net), weights(whole.net))
        assert len(names(folder)) == 2
        assert all(is_checkpoint(str(folder / "checkpoints" / name)) for name in names(folder))
        assert [each.name for each in (folder / "checkpoints").iterdir() if ".tmp-" in each.name] == []


class Average:
    """An average of losses, with a tensor and plain data."""

    def __init__(self) -> None:
        self.total, self.counts = torch.zeros(2), {"seen": 0}

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.counts = state["total"], state["counts"]


def test_registered_objects_are_saved(tmp_path: Path) -> None:
    loop, average = Loop(), Average()
    loop.accelerator.register_for_checkpointing(average, average)
    average.total += 3
    average.counts["seen"] = 7
    path = loop.accelerator.save_state(str(tmp_path / "state.ckpt"))
    again, other = Loop(), Average()
    with pytest.raises(tw.CheckpointError, match=r"registered objects Average, but registered here are \(none\)"):
        again.accelerator.load_state(path)
    again.accelerator.register_for_checkpointing(other)
    again.accelerator.load_state(path)
    assert torch.equal(other.total, torch.full((2,), 3.0))
    assert other.counts == {"seen": 7}
    for wrong, match in ((object(), "given an object. Expected objects with state_dict"), (Average, "given a type")):
        with pytest.raises(TypeError, match=match):
            again.accelerator.register_for_checkpointing(wrong)
    (saved,) = json.loads((tmp_path / "state.ckpt" / "state.json").read_text())["registered"]
    assert saved["class"] == "Average"


def test_wrong_arguments_of_states_are_rejected(tmp_path: Path) -> None:
    loop = Loop()
    path = loop.accelerator.save_state(str(tmp_path / "state.ckpt"), safe_serialization=True)
    with pytest.raises(ValueError, match="would write a pickle"):
        loop.accelerator.save_state(path, safe_serialization=False)
    with pytest.raises(TypeError, match=r"has no map_location=.* tensors are loaded to where"):
        loop.accelerator.load_state(path, map_location="cpu")
    with pytest.raises(TypeError, match="Did you mean strict="):
        loop.accelerator.load_state(path, strickt=False)
    for wrong, match in (
        ({"total_limit": 0}, "total_limit=0"),
        ({"iteration": -1}, "at least 0"),
        ({"total_limit": True}, "True"),
    ):
        with pytest.raises(ValueError, match=match):
            tw.ProjectConfiguration(**wrong)
    with pytest.raises(TypeError, match="project_dir=3 is an int"):
        tw.ProjectConfiguration(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"needs a folder. Pass project_dir="):
        tw.Accelerator(cpu=ON_HOST, project_config=tw.ProjectConfiguration(automatic_checkpoint_naming=True))
    with pytest.raises(ValueError, match=r"were both given. Pass one"):
        tw.Accelerator(cpu=ON_HOST, project_dir="a", project_config=tw.ProjectConfiguration("b"))
    with pytest.raises(TypeError, match=r"Expected a tw\.ProjectConfiguration"):
        tw.Accelerator(cpu=ON_HOST, project_config="runs")  # type: ignore[arg-type]


def on_two_ranks(folder: Path) -> list[Any]:
    loop = Loop(project_config=project(folder / "project", total_limit=1), log_with="csv")
    accelerator = loop.accelerator
    bare = tw.Accelerator(cpu=True)
    with pytest.raises(RuntimeError, match="before prepare"):
        bare.load_state(str(folder))
    with pytest.raises(tw.CheckpointError, match="no complete checkpoint"):
        accelerator.load_state()
    if accelerator.is_main_process:  # as scripts do
        with pytest.raises(RuntimeError, match="log was called before init_trackers"):
            accelerator.log({"loss": 1.0})
        accelerator.init_trackers("run", config={"lr": 0.05})
    half = Average()
    accelerator.register_for_checkpointing(half)
    for number, batch in enumerate(loop.loader):
        loop.step(batch)
        half.counts["seen"] += 1
        accelerator.log({"loss": torch.tensor(1.0 * number)})
        if number == 2:
            accelerator.save_state(blocking=False)
    accelerator.save_state(blocking=False)
    accelerator.end_training()
    kept = weights(loop.net)
    accelerator.wait_for_everyone()
    found = names(folder / "project")

    class Broken(Average):
        def state_dict(self) -> dict[str, Any]:
            if accelerator.process_index == 1:
                raise OSError("only here")
            return super().state_dict()

    accelerator.register_for_checkpointing(Broken())
    with pytest.raises(tw.CheckpointError, match="rank 1: OSError: only here"):
        accelerator.save_state()
    again = Loop(project_dir=folder / "project")
    again.accelerator.register_for_checkpointing(Average())
    again.accelerator.load_state()
    assert_equal(weights(again.net), kept)
    assert again.loader.epoch == 1
    saved = again.accelerator.save_state(folder / f"of-{accelerator.process_index}")
    assert saved == str(folder / "of-0")
    assert Path(saved).exists()
    return found


@pytest.mark.host
def test_two_ranks_save_and_load_one_state(tmp_path: Path) -> None:
    assert run_job(on_two_ranks, 2, tmp_path) == [["checkpoint_1"]] * 2
    table = (tmp_path / "project" / "run" / "version_0" / "metrics.csv").read_text().splitlines()
    assert table[0] == "step,epoch,loss" or table[0] == "step,loss"
    assert len(table) == 7


def test_an_evaluation_that_was_left_begins_anew(tmp_path: Path) -> None:
    loop = Loop(project_dir=tmp_path)
    scored = loop.accelerator.prepare(make_loader(16))
    loop.train(1)
    next(iter(scored))
    loop.accelerator.save_state()
    again = Loop(project_dir=tmp_path)
    scored = again.accelerator.prepare(make_loader(16))
    again.accelerator.load_state()
    assert len(list(scored)) == 4


def test_a_stop_within_an_epoch_is_exact(tmp_path: Path) -> None:
    whole = Loop()
    whole.train(2)
    left = Loop(project_dir=tmp_path)
    for number, batch in enumerate(left.loader):
        left.step(batch)
        if number == 4:
            left.accelerator.save_state()
            break
    torch.manual_seed(77)
    again = Loop(project_dir=tmp_path)
    again.accelerator.load_state()
    again.train(2)
    assert_equal(weights(again.net), weights(whole.net))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # torch sees no step in the resumed process
def test_a_scheduler_of_epochs_counts_steps_before_the_save(tmp_path: Path) -> None:
    rates = []
    for is_resumed in (False, True):
        accelerator = tw.Accelerator(cpu=ON_HOST, gradient_accumulation_steps=2)
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
        batches = [torch.randn(2, 8) for _ in range(3)]
        if is_resumed:
            accelerator.load_state(tmp_path / "saved")
        for index, batch in enumerate(batches[2:] if is_resumed else batches):
            with accelerator.accumulate(net):
                accelerator.backward(net(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
            if index == 1:
                accelerator.save_state(tmp_path / "saved")
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.25, 0.25]


def test_a_resumed_loop_gets_the_batches_that_it_counts_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def loaded(**settings: Any) -> tuple[tw.Accelerator, Any, Any, Any]:
        torch.manual_seed(5)
        accelerator = tw.Accelerator(cpu=ON_HOST, project_dir=tmp_path, **settings)
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net, _, loader, other = accelerator.prepare(net, optimizer, make_loader(24, shuffle=True), make_loader(16))
        if (tmp_path / "checkpoints").exists():
            accelerator.load_state()
        return accelerator, net, loader, other

    accelerator, net, loader, _ = loaded()
    whole = []
    for number, batch in enumerate(loader):
        whole.append(batch[0].tolist())
        accelerator.backward(loss_of(net, batch))
        if number == 3:
            accelerator.save_state()

    def rest(loader: Any) -> list[Any]:
        return [batch[0].tolist() for batch in loader]

    capsys.readouterr()
    loader = loaded()[2]
    assert rest(loader) == whole  # a loop that skips the first batches by itself, as with Accelerate
    assert capsys.readouterr().out.startswith(
        "load_state: the loader begins with batch 0, as in Accelerate, though it was"
    )
    assert rest(loader) != whole  # the next epoch
    accelerator, _, loader, _ = loaded()
    assert rest(tw.skip_first_batches(loader, 4)) == whole[4:]
    assert capsys.readouterr().out == ""
    loader = loaded()[2]
    assert loader.epoch == 0
    assert rest(loader) == whole[4:]
    assert capsys.readouterr().out == "load_state: the loader continues at batch 4 of epoch 0.\n"
    loader = loaded(dataloader_config=tw.DataLoaderConfiguration(use_stateful_dataloader=True))[2]
    assert rest(loader) == whole[4:]
    accelerator, _, loader, _ = loaded()
    accelerator.save_state()
    loader = loaded()[2]
    assert (loader.epoch, rest(loader)) == (0, whole[4:])  # a save before the first pass holds the position


def test_hooks_write_into_the_checkpoint(tmp_path: Path) -> None:
    loop = Loop(project_config=project(tmp_path, total_limit=1), mixed_precision="bf16")
    accelerator, read = loop.accelerator, []

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        assert [type(each) for each in models] == [type(accelerator.unwrap_model(loop.net))]
        assert weights.pop().keys() == models[0].state_dict().keys()
        folder = Path(output_dir, "adapter", "inner")
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        Path(output_dir, "note.txt").write_text("first")

    def load(models: list[Any], input_dir: str) -> None:
        assert isinstance(models.pop(), type(accelerator.unwrap_model(loop.net)))
        read.append(Path(input_dir, "adapter", "inner", "config.json").read_text())

    handle = accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    for _ in range(2):
        path = Path(accelerator.save_state())
    accelerator.save_state(blocking=False)
    accelerator.finish_save()
    assert names(tmp_path) == ["checkpoint_2"]  # the folders of hooks are removed with their checkpoints
    path = tmp_path / "checkpoints" / "checkpoint_2"
    before = weights(loop.net)
    loop.train(1)
    accelerator.load_state()
    assert read == ["{}"]
    assert_equal(weights(loop.net), before)
    checkpoint = open_checkpoint(str(path))
    assert (checkpoint.extra_files, checkpoint.file_sizes["adapter/inner/config.json"]) == ([], 2)
    (path / "adapter" / "own.txt").write_text("")
    assert open_checkpoint(str(path)).extra_files == ["adapter/own.txt"]
    (path / "note.txt").write_text("other")
    with pytest.raises(tw.CheckpointError, match=r"note\.txt does not match its digest"):
        accelerator.load_state(path)
    handle.remove()
    last = Path(accelerator.save_state())
    assert not (last / "note.txt").exists()
    with pytest.raises(TypeError, match="register_save_state_pre_hook was given an int"):
        accelerator.register_save_state_pre_hook(3)  # type: ignore[arg-type]


def test_a_failing_hook_leaves_nothing(tmp_path: Path) -> None:
    loop = Loop()

    def fail(models: list[Any], weights: list[Any], output_dir: str) -> None:
        Path(output_dir, "half").write_text("")
        raise OSError("the hook's disk")

    def link(models: list[Any], weights: list[Any], output_dir: str) -> None:
        Path(output_dir, "link").symlink_to(tmp_path)

    for hook, match in (
        (fail, "a hook of save_state failed: OSError: the hook's disk"),
        (link, "expected plain files"),
    ):
        handle = loop.accelerator.register_save_state_pre_hook(hook)
        with pytest.raises(tw.CheckpointError, match=match):
            loop.accelerator.save_state(tmp_path / "state.ckpt")
        handle.remove()
        assert list(tmp_path.iterdir()) == []
    taken = loop.accelerator.save_state(tmp_path / "state.ckpt")
    loop.accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(tw.CheckpointError, match="the hook's disk"):
        loop.accelerator.save_state(taken)
    with pytest.raises(tw.CheckpointError, match="exists already"):
        loop.accelerator.save_state(taken, overwrite=False)
    assert [each.name for each in tmp_path.iterdir()] == ["state.ckpt"]

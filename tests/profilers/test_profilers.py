"""The profilers measure real work, and nothing is wrapped where there is none."""

from __future__ import annotations

import json
import pstats
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from small import QUIET, Classifier, loss_of, make_data, make_loader, make_net
from torch import nn
from torch.profiler import ProfilerAction
from torch.utils.data import DataLoader

import trainwright as tw
from trainwright.profilers import (
    AdvancedProfiler,
    PassThroughProfiler,
    Profiler,
    PyTorchProfiler,
    SimpleProfiler,
    resolve_profiler,
)
from trainwright.profilers.base import instrument, is_measuring
from trainwright.profilers.pytorch import SORT_KEYS


class Engine:
    """The four methods of an engine that are measured, over a real net and optimizer."""

    def __init__(self) -> None:
        self.net = make_net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.saves: list[str] = []

    def run(self, module: nn.Module, name: str, batch: Any) -> torch.Tensor:
        return loss_of(module, batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def save(self, path: str) -> None:
        self.saves.append(path)


def train(profiler: Profiler, batches: int, stage: str = "fit", log_dir: Path | None = None) -> Engine:
    engine = Engine()
    profiler.setup(stage, 0, log_dir)
    profiler.attach(engine.net)
    undo = instrument(engine, profiler)
    loader = DataLoader(make_data(4 * batches), batch_size=4)
    batch_end = profiler.timed(lambda: time.sleep(0.001), "[callback] Sleeper.on_train_batch_end")
    try:
        for batch in profiler.timed_iterator(loader, "train_dataloader_next"):
            engine.optimizer.zero_grad()
            engine.backward(engine.run(engine.net, "training_step" if stage == "fit" else f"{stage}_step", batch))
            engine.step(engine.optimizer)
            batch_end()
        engine.save("here")
        profiler.describe()
    finally:
        undo()
        profiler.teardown(stage)
    assert "run" not in vars(engine)
    return engine


def test_the_simple_profiler_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = SimpleProfiler()
    train(profiler, batches=6)
    calls = {action: duration.calls for action, duration in profiler.durations.items()}
    assert calls == {
        "train_dataloader_next": 7,  # the seventh found the end
        "training_step": 6,
        "backward": 6,
        "optimizer_step": 6,
        "[callback] Sleeper.on_train_batch_end": 6,
        "save_checkpoint": 1,
    }
    assert profiler.durations["[callback] Sleeper.on_train_batch_end"].seconds >= 0.006
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Profile of fit"
    assert [cell.strip() for cell in lines[1].split("|")] == [
        *("Action", "Mean (s)", "Calls", "Total (s)", "%", "Own (s)")
    ]
    total = [cell.strip() for cell in lines[3].split("|")]
    assert (total[0], total[2], total[4]) == ("Total", "32", "100.00")
    assert len({len(line) for line in lines[1:]}) == 1
    shares = [float(line.split("|")[4]) for line in lines[4:]]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 100
    recorded = profiler.recorded_durations["backward"]
    assert len(recorded) == 6
    assert sum(recorded) == pytest.approx(profiler.durations["backward"].seconds)
    train(profiler, batches=2)
    assert profiler.durations["training_step"].calls == 2  # only of that run


def test_a_file_is_written_where_oneis_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(SimpleProfiler(filename="times", extended=False), batches=2, log_dir=tmp_path / "logs")
    text = (tmp_path / "logs" / "fit-times.txt").read_text()
    assert "Calls" not in text
    assert "optimizer_step" in text
    train(SimpleProfiler(dirpath="memory://profiles"), batches=1)
    with fsspec.open("memory://profiles/fit-profile.txt", "rt") as file:
        assert "training_step" in file.read()
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match=r"filename='a/b' is not a plain name\. Pass the folder as dirpath"):
        SimpleProfiler(filename="a/b")


def test_a_table_that_cannot_be_written_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    says = r"SimpleProfiler could not write .*/file/fit-profile\.txt: .*another dirpath"
    with pytest.raises(OSError, match=says):
        train(SimpleProfiler(dirpath=tmp_path / "file"), batches=1)
    assert "training_step" in capsys.readouterr().out


def test_other_ranks_say_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    train(SimpleProfiler(), batches=1)
    train(AdvancedProfiler(dirpath="here", dump_stats=True), batches=1)
    assert capsys.readouterr().out == ""
    assert not Path("here").exists()


@pytest.mark.parametrize("kind", [SimpleProfiler, AdvancedProfiler, PyTorchProfiler])
def test_actions_may_lie_within_each_other(kind: type[Profiler]) -> None:
    profiler = kind()
    assert profiler.summary() == ""
    with profiler.profile("whole"):  # around a run too
        profiler.setup("test")
        with profiler.profile("outer"), profiler.profile("inner"), profiler.profile("inner"):
            time.sleep(0.01)
        profiler.start("first")
        profiler.start("second")
        profiler.stop("first")
        profiler.stop("second")
        with pytest.raises(KeyError), profiler.profile("broken"):
            raise KeyError
        profiler.teardown("test")
    with pytest.raises(RuntimeError, match="action='outer' was stopped, but it is not running"):
        profiler.stop("outer")
    if isinstance(profiler, SimpleProfiler):
        seconds = {action: duration.seconds for action, duration in profiler.durations.items()}
        assert 0.01 <= seconds["inner"] <= seconds["outer"] <= seconds["whole"]
        assert profiler.durations["inner"].calls == 2
        own = {action: duration.own_seconds for action, duration in profiler.durations.items()}
        assert own["inner"] == pytest.approx(seconds["inner"])  # also a nested call of the same action
        assert own["outer"] == pytest.approx(seconds["outer"] - seconds["inner"])
        assert (own["first"], own["second"]) == (seconds["first"], seconds["second"])  # neither is within the other
    profiler.setup("validate")
    with profiler.profile("next"):
        pass
    profiler.teardown("validate")


def test_advanced_profiler_shows_the_functions(tmp_path: Path) -> None:
    profiler = AdvancedProfiler(dirpath=tmp_path, filename="calls", line_count_restriction=12, dump_stats=True)

    def nap() -> None:
        with profiler.profile("inner"):
            time.sleep(0.01)

    with profiler.profile("outer"):
        nap()
        sum(range(10))
    train(profiler, batches=3)
    text = (tmp_path / "fit-calls.txt").read_text()
    assert "Profile of fit: training_step\n" in text
    assert "cross_entropy" in text
    assert "due to restriction <12>" in text
    dumped = pstats.Stats(str(tmp_path / "fit-calls-callback_Sleeper.on_train_batch_end.prof"))
    assert any("sleep" in name for _, _, name in dumped.stats)
    outer, inner = ({name for _, _, name in pstats.Stats(profiler.profiles[each]).stats} for each in ("outer", "inner"))
    assert any("sleep" in name for name in inner)
    assert not any("sleep" in name for name in outer)
    assert any("sum" in name for name in outer)  # it went on after the inner one


@pytest.mark.parametrize(("lines", "error"), [(0, ValueError), (1.5, ValueError), (-0.1, ValueError), ("3", TypeError)])
def test_a_bad_line_count_is_refused(lines: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"line_count_restriction=.* expected .*\. Pass for example 20 or 0\.1"):
        AdvancedProfiler(line_count_restriction=lines)


def test_pytorch_profiler_is_recording_batches_three_to_five(tmp_path: Path, capsys: Any) -> None:
    profiler = PyTorchProfiler(group_by_input_shapes=True, row_limit=200)
    engine = train(profiler, batches=8, log_dir=tmp_path)
    text = capsys.readouterr().out
    assert text.startswith("Profile of fit\n")
    for name in ("aten::linear", "training_step", "optimizer_step", "[module] 0", "[module] Sequential", "[[4, 8]"):
        assert name in text
    trace = json.loads((tmp_path / "fit-profile.pt.trace.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert names.count("training_step") == 3
    assert {name for name in names if name.startswith("ProfilerStep")} == {f"ProfilerStep#{n}" for n in (2, 3, 4)}
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in engine.net.modules())
    assert list(tmp_path.iterdir()) == [tmp_path / "fit-profile.pt.trace.json"]


def test_pytorch_profiler_has_other_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ready: list[Any] = []
    profiler = PyTorchProfiler(tmp_path, "ops", on_trace_ready=ready.append, schedule=None, record_module_names=False)
    train(profiler, batches=1, stage="predict")
    assert len(ready) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["predict-ops.txt"]
    table = (tmp_path / "predict-ops.txt").read_text()
    assert "predict_step" in table
    assert "[module]" not in table
    train(PyTorchProfiler(export_to_chrome=False), batches=2)
    assert "recorded nothing in 2 batches" in capsys.readouterr().out
    repeated = PyTorchProfiler(
        tmp_path, schedule=torch.profiler.schedule(wait=0, warmup=1, active=1), acc_events=True, row_limit=5
    )
    train(repeated, batches=6)
    traces = sorted(path.name for path in tmp_path.glob("*.json"))
    assert traces == ["fit-profile-2.pt.trace.json", "fit-profile-3.pt.trace.json", "fit-profile.pt.trace.json"]
    averages = profiler._averages
    assert averages is not None
    for key in SORT_KEYS:
        averages.table(sort_by=key)


def recorded_once_more() -> bool:
    """Tell whether torch's profiler still works in this process."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorder:
        torch.ones(2) + 1
    return any(event.key == "aten::add" for event in recorder.key_averages())


def refuse(recorder: Any) -> None:
    raise OSError("no space left")


@pytest.mark.parametrize(("arguments", "error", "text"), [
    # Raised between two cycles, after the end of the first one and before the second is prepared.
    (
        {"on_trace_ready": refuse, "schedule": torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=2)},
        OSError,
        "no space left",
    ),
    # Raised where a recording would have ended.
    (
        {"schedule": lambda step: [ProfilerAction.RECORD, ProfilerAction.NONE][step % 2]},
        UserWarning,
        "RECORD followed by NONE",
    ),
    # Raised before the prepared trace has begun.
    (
        {"schedule": lambda step: [ProfilerAction.WARMUP, ProfilerAction.NONE][step % 2]},
        UserWarning,
        "WARMUP followed by NONE",
    ),
])  # fmt: skip
def test_a_recorder_that_fails_on_its_way_is_not_left(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        train(PyTorchProfiler(**arguments), batches=8)
    assert recorded_once_more()


def test_named_modules_leave_a_compiled_forward_alone(capsys: pytest.CaptureFixture[str]) -> None:
    net, profiler = make_net(), PyTorchProfiler(export_to_chrome=False, schedule=None, row_limit=100)
    batch = torch.randn(4, 8)
    profiler.setup("fit")
    profiler.attach(net)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    with profiler.profile("training_step"):
        torch.testing.assert_close(compiled(batch), net(batch))
    profiler.describe()
    profiler.teardown("fit")
    assert "[module] 3" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "error", "text"), [
    ({"sort_by_key": "cpu_tme"}, ValueError, r"sort_by_key='cpu_tme' is unknown; .* Did you mean 'cpu_time'\?"),
    ({"with_stak": True}, TypeError, r"'with_stak' is unknown; .* Did you mean 'with_stack'\?"),
    ({"table_kwargs": {"row_limit": 3}}, TypeError, "an argument of table_kwargs='row_limit' is unknown"),
    ({"group_by_input_shapes": True, "record_shapes": False}, ValueError, "excludes record_shapes=False"),
])  # fmt: skip
def test_bad_settings_of_the_pytorch_profiler_are_refused(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        PyTorchProfiler(**arguments)


def test_profilers_are_resolved_by_name() -> None:
    assert type(resolve_profiler("simple")) is SimpleProfiler
    assert type(resolve_profiler("advanced")) is AdvancedProfiler
    assert type(resolve_profiler("pytorch")) is PyTorchProfiler
    own = SimpleProfiler()
    assert resolve_profiler(own) is own
    with pytest.raises(
        ValueError, match=r"profiler='simpel' is unknown; choose from simple, .* Did you mean 'simple'\?"
    ):
        resolve_profiler("simpel")
    with pytest.raises(TypeError, match=r"profiler=<class .*SimpleProfiler'> is a type; .* not its class"):
        resolve_profiler(SimpleProfiler)  # type: ignore[arg-type]


def test_hooks_are_actions(tmp_path: Path) -> None:
    class Data(tw.DataModule):
        def prepare_data(self) -> None:
            pass

        def setup(self, stage: str) -> None:
            pass

        def train_dataloader(self) -> Any:
            return make_loader(8)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    class Hooked(Classifier):
        def on_train_epoch_end(self) -> None:
            pass

        def optimizer_step(self, *args: Any) -> None:
            super().optimizer_step(*args)

        def transfer_batch_to_device(self, batch: Any, *args: Any) -> Any:
            return super().transfer_batch_to_device(batch, *args)

    class Slow(tw.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            time.sleep(0.01)

    profiler, saves = SimpleProfiler(filename="times"), tw.ModelCheckpoint(tmp_path, every_n_train_steps=1)
    settings = {**QUIET, "enable_checkpointing": True, "callbacks": [Slow(), saves]}
    tw.Trainer(**settings, max_epochs=1, profiler=profiler).fit(Hooked(), datamodule=Data())
    durations = profiler.durations
    calls = {action: each.calls for action, each in durations.items()}
    assert {action: number for action, number in calls.items() if "ModelCheckpoint" not in action} == {
        "[datamodule] prepare_data": 1, "[datamodule] setup": 1, "[module] configure_optimizers": 1,
        "train_dataloader_next": 3, "[module] transfer_batch_to_device": 2, "[datamodule] on_after_batch_transfer": 2,
        "training_step": 2, "backward": 2, "[module] optimizer_step": 2, "optimizer_step": 2,
        "[callback] Slow.on_train_batch_end": 2, "save_checkpoint": 2, "[module] on_train_epoch_end": 1,
    }  # fmt: skip
    slow, saving = durations["[callback] Slow.on_train_batch_end"], "[callback] ModelCheckpoint.on_save_point"
    assert slow.own_seconds == slow.seconds >= 0.02
    for outer, inner in ((saving, "save_checkpoint"), ("[module] optimizer_step", "optimizer_step")):
        assert durations[outer].own_seconds <= durations[outer].seconds - durations[inner].seconds + 1e-9


@pytest.mark.parametrize("profiler", [None, PassThroughProfiler()])
def test_without_a_profiler_nothing_is_wrapped(profiler: Profiler | None) -> None:
    engine = Engine()
    instrument(engine, profiler)()
    assert vars(engine).keys() == {"net", "optimizer", "saves"}
    assert not is_measuring(profiler)
    assert is_measuring(SimpleProfiler())
    with resolve_profiler(profiler).profile("action"):
        pass

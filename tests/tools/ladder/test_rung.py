"""The settings of a rung replace the arguments of the script's Trainer and Accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rungs import set_rung
from small import QUIET, Classifier, make_loader, make_net

import trainwright as tw
from trainwright.overrides import active_file, overridden
from trainwright.strategies import is_variant_of
from trainwright.strategies.ddp.strategy import DDPStrategy
from trainwright.tools.ladder.recorder import RungRecorder
from trainwright.tools.ladder.rung import COMPILER, Rung

GIVEN = {"devices": 4, "num_nodes": 2, "accelerator": "auto", "strategy": "auto", "precision": None}


def engine_arguments() -> dict[str, Any]:
    return {name: overridden("Engine", name, value) for name, value in GIVEN.items()}


def compiler_of(given: str | None) -> Any:
    """Return the backend that compiles a model which a loop prepares."""
    backends: list[str] = []
    net = make_net()
    net.compile = lambda backend: backends.append(backend)  # type: ignore[assignment]
    tw.Accelerator(accelerator="cpu", dynamo_backend=given).prepare(net)
    return next(iter(backends), None)


def test_without_a_rung_nothing_changes() -> None:
    assert active_file() is None
    assert engine_arguments() == GIVEN
    assert compiler_of("eager") == "eager"
    assert not any(isinstance(each, RungRecorder) for each in tw.Trainer(**QUIET).callbacks)


def test_a_foreign_file_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "rung.json"
    Rung("ddp", "there", devices=2, strategy="ddp").write(path)
    assert Rung.read(str(path)) == Rung("ddp", "there", devices=2, strategy="ddp")
    path.write_text('{"name": "ddp"}')
    monkeypatch.setenv("TRAINWRIGHT_RUNG", str(path))
    with pytest.raises(
        ValueError, match=r"TRAINWRIGHT_RUNG=.*is not the file of a rung \(KeyError: 'overrides'\).*unset it"
    ):
        tw.Trainer(**QUIET)


def test_settings_of_the_engine_are_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    file = set_rung(monkeypatch, tmp_path, devices=3, strategy="ddp", precision="bf16-mixed", accelerator="cpu")
    assert list(engine_arguments().values()) == [3, 1, "cpu", "ddp", "bf16-mixed"]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "trainwright: this rung of the ladder sets devices=3; the script has 4."
    assert len(said) == len(file.replaced) == 5
    engine_arguments()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("given", "name", "stays"), [
    (DDPStrategy(find_unused_parameters=True), "ddp", True),
    ("ddp_find_unused_parameters_true", "ddp", True),
    ("ddp", "ddp_find_unused_parameters_true", False),
    ("deepspeed", "deepspeed_stage_2", False),
    ("auto", "ddp", False),
    (DDPStrategy(), "fsdp", False),
])  # fmt: skip
def test_a_strategy_with_options_of_its_own_stays(
    given: Any, name: str, stays: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_rung(monkeypatch, tmp_path, strategy=name)
    assert overridden("Engine", "strategy", given, is_like=is_variant_of) == (given if stays else name)


def test_arguments_of_a_trainer_are_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_rung(monkeypatch, tmp_path, precision="bf16-mixed", compile=True, steps=5)
    timer = tw.Timer()
    trainer = tw.Trainer(max_steps=50, min_steps=10, callbacks=timer, plugins=None, precision="32-true", **QUIET)
    assert (trainer.max_steps, trainer.min_steps) == (5, None)
    assert trainer.precision == "bf16-mixed"
    assert [type(each) for each in trainer.callbacks] == [tw.Timer, RungRecorder]
    assert tw.Trainer(max_steps=3, **QUIET).max_steps == 3
    assert not any(isinstance(each, RungRecorder) for each in trainer.trial(max_steps=9).callbacks)
    assert trainer.trial(max_steps=9).max_steps == 5  # the trial ends after 9, and its module sees the fit's limit


def test_a_rung_can_switch_compiling_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = set_rung(monkeypatch, tmp_path, compile=False)
    tw.Trainer(compile={"mode": "default"}, **QUIET)
    assert file.replaced["compile"] == ("dict(...)", "False")
    assert compiler_of("eager") is None
    compiling = set_rung(monkeypatch, tmp_path / "compiled", compile=True)
    tw.Trainer(compile={"mode": "default"}, **QUIET)  # its options stay
    assert not compiling.replaced
    assert compiler_of(None) == COMPILER
    assert compiler_of("eager") == "eager"


@pytest.mark.filterwarnings("ignore:ModelCheckpoint monitors 'val_loss', which was not logged yet")
def test_a_training_that_a_rung_cuts_short_is_tested_without_a_best_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = set_rung(monkeypatch, tmp_path / "rung", steps=2)
    best = tw.ModelCheckpoint(monitor="val_loss")
    settings = {**QUIET, "enable_checkpointing": True, "default_root_dir": str(tmp_path / "root")}
    trainer = tw.Trainer(max_epochs=1, callbacks=[best], num_sanity_val_steps=0, **settings)
    module = Classifier()
    trainer.fit(module, make_loader(), make_loader())
    assert trainer.global_step == 2
    assert not best.best_model_path
    for given in ("best", best.best_model_path):
        trainer.test(module, make_loader(), ckpt_path=given)
    assert file.replaced["ckpt_path"] == ("'best'", "None")

"""Flags and variables fill the arguments that a script leaves open, and a file of overrides replaces them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small import QUIET

import trainwright as tw
from trainwright.distributed.environment import JOB_VARIABLE, RUNG_VARIABLE
from trainwright.overrides import Override, OverrideFile, overridden
from trainwright.precision import is_spelling_of, resolve_precision
from trainwright.strategies import is_variant_of
from trainwright.strategies.ddp.strategy import DDPStrategy


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the variables that `trainwright launch` passes to its workers."""

    def launch(**passed_on: Any) -> None:
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, "0")
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "1")
        monkeypatch.setenv(JOB_VARIABLE, json.dumps(passed_on))

    return launch


TOLD = {"accelerator": "cpu", "strategy": "ddp", "precision": "bf16"}
LIKE = {"strategy": is_variant_of, "precision": is_spelling_of}


def filled(**given: Any) -> dict[str, Any]:
    likes = {name: {"is_like": LIKE[name]} if name in LIKE else {} for name in given}
    return {name: overridden("Engine", name, value, **likes[name]) for name, value in given.items()}


def test_a_flag_fills_an_open_argument(launched: Callable[..., None]) -> None:
    given = {"accelerator": "auto", "strategy": "auto", "precision": None}
    assert filled(**given) == given
    launched(**TOLD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert filled(**given) == TOLD
        same = {"accelerator": "cpu", "strategy": DDPStrategy(), "precision": resolve_precision("bf16-mixed", "cpu")}
        assert filled(**same) == same  # in other words


@pytest.mark.parametrize(("name", "given", "text"), [
    ("accelerator", "gpu",
     "the command line or its config says --cpu, and the script accelerator='gpu'; the script's is used"),
    ("strategy", "single_device", "says --strategy ddp, and the script strategy='single_device'"),
    ("precision", 16, "says --precision bf16, and the script precision=16"),
    ("precision", 16, "Leave precision= or mixed_precision= out of the script"),
])  # fmt: skip
def test_the_script_overrides_a_flag_with_a_warning(
    name: str, given: Any, text: str, launched: Callable[..., None]
) -> None:
    launched(**TOLD)
    with pytest.warns(UserWarning, match=text) as caught:
        assert filled(**{name: given}) == {name: given}
    assert len(caught) == 1


def test_a_flag_fills_the_accumulation(launched: Callable[..., None]) -> None:
    def steps(owner: str, argument: str, given: int) -> Any:
        return overridden(owner, argument, given, is_open=given == 1)

    assert steps("Accelerator", "gradient_accumulation_steps", 2) == 2
    launched(gradient_accumulation_steps=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert steps("Accelerator", "gradient_accumulation_steps", 1) == 4
        assert steps("Accelerator", "gradient_accumulation_steps", 4) == 4
    with pytest.warns(
        UserWarning, match="says --gradient-accumulation-steps 4, and the script accumulate_grad_batches=2"
    ):
        assert steps("Trainer", "accumulate_grad_batches", 2) == 2


def test_accumulation_reaches_trainer_and_accelerator(launched: Callable[..., None]) -> None:
    launched(gradient_accumulation_steps=4)
    assert tw.Trainer(**QUIET).accumulate_grad_batches == 4
    accelerator = tw.Accelerator()
    assert accelerator.gradient_accumulation_steps == 4
    accelerator.engine.close()


class SilentObserver:
    def note_made(self, owner: str) -> None: ...

    def added_arguments(self, owner: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {}


def write_file(monkeypatch: pytest.MonkeyPatch, path: Path, *overrides: Override) -> None:
    OverrideFile.write(path, overrides, f"{__name__}:SilentObserver")
    monkeypatch.setenv(RUNG_VARIABLE, str(path))


def test_a_file_wins_over_a_flag_and_a_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launched: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    launched(**TOLD)
    monkeypatch.setenv("TRAINWRIGHT_TRAINER_MAX_STEPS", "9")
    overrides = [Override("Engine", "precision", "64-true", "a tool"), Override("Trainer", "max_steps", 5, "a tool")]
    write_file(monkeypatch, tmp_path / "overrides.json", *overrides)
    trainer = tw.Trainer(**{**QUIET, "accelerator": "cpu"})
    assert (trainer.precision, trainer.strategy.name, trainer.max_steps) == ("64-true", "ddp", 5)
    said = capsys.readouterr().err
    assert "trainwright: a tool sets precision='64-true'; the script has None." in said
    assert "trainwright: a tool sets max_steps=5; the script has 9." in said
    trainer.engine.close()

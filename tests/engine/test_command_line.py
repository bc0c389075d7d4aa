"""What the command line asked for fills what a script leaves open."""

from __future__ import annotations

import warnings

import pytest
from small import QUIET

import trainwright as tw
from trainwright.distributed.environment import JOB_VARIABLE, Environment
from trainwright.engine.command_line import fill_accumulation, fill_open
from trainwright.precision import resolve_precision
from trainwright.strategies.ddp import DDPStrategy

TOLD = Environment(launched_by="trainwright", strategy="ddp", precision="bf16", accelerator="cpu")


def test_what_is_open_is_filled() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fill_open(TOLD, "auto", "auto", None) == ("cpu", "ddp", "bf16")
        assert fill_open(Environment(), "auto", "auto", None) == ("auto", "auto", None)
        strategy, precision = DDPStrategy(), resolve_precision("bf16-mixed", "cpu")
        assert fill_open(TOLD, "cpu", strategy, precision) == ("cpu", strategy, precision)  # the same in other words


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            ("gpu", "auto", None),
            "the command line or its config says --cpu, and the script accelerator='gpu'; the script's is used",
        ),
        (("auto", "single_device", None), "says --strategy ddp, and the script strategy='single_device'"),
        (("auto", "auto", 16), "says --precision bf16, and the script precision=16"),
        (("auto", "auto", 16), "Leave precision= or mixed_precision= out of the script"),
    ],
)
def test_the_script_wins_and_that_is_said(given: tuple[str, str, int | None], text: str) -> None:
    with pytest.warns(UserWarning, match=text) as caught:
        filled = fill_open(TOLD, *given)
    assert len(caught) == 1
    assert [
        (new, old) for new, old in zip(filled, given, strict=True) if old not in ("auto", None) and new != old
    ] == []


def test_accumulation_fills_what_is_open_too() -> None:
    chosen = Environment(launched_by="trainwright", gradient_accumulation_steps=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fill_accumulation(chosen, "gradient_accumulation_steps", 1) == 4
        assert fill_accumulation(chosen, "gradient_accumulation_steps", 4) == 4
        assert fill_accumulation(Environment(), "gradient_accumulation_steps", 2) == 2
    with pytest.warns(
        UserWarning, match="says --gradient-accumulation-steps 4, and the script accumulate_grad_batches=2"
    ):
        assert fill_accumulation(chosen, "accumulate_grad_batches", 2) == 2


def test_accumulation_reaches_trainer_and_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv(JOB_VARIABLE, '{"gradient_accumulation_steps": 4}')
    assert tw.Trainer(**QUIET).accumulate_grad_batches == 4
    accelerator = tw.Accelerator()
    assert accelerator.gradient_accumulation_steps == 4
    accelerator.engine.close()

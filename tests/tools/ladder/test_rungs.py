"""The rungs of a ladder, and the settings that they keep from earlier rungs."""

from __future__ import annotations

import pytest
from rungs import attempt

from trainwright.strategies import STRATEGIES, VARIANTS
from trainwright.tools.ladder.attempt import Attempt
from trainwright.tools.ladder.ladder import choose_devices, known_rungs, settings_of, usual_rungs

BUILT_IN = ["ddp", "ddp_sharded", "deepspeed_stage_2", "fsdp", "deepspeed_stage_3"]


def test_the_rungs_depend_on_the_machine() -> None:
    usual = usual_rungs("cpu", 2)
    assert usual[:3] == ["unchanged", "bf16-mixed", "compile"]
    assert [name for name in usual[3:] if name in VARIANTS or name in STRATEGIES] == usual[3:]
    assert set(BUILT_IN) <= set(usual[3:])
    assert "deepspeed_stage_1" not in usual
    assert usual_rungs("cpu", 1) == ["unchanged", "bf16-mixed", "compile"]
    known = known_rungs()
    assert set(usual_rungs("cpu", 2)) < set(known)
    assert {"16-true", "deepspeed_stage_3_offload", "ddp_find_unused_parameters_true"} < set(known)
    assert not {"ddp_spawn", "single_device"} & set(known)


@pytest.mark.host
def test_the_cpu_has_two_devices_by_default() -> None:
    assert choose_devices("auto", "cpu") == 2
    assert choose_devices("3", "cpu") == 3
    assert choose_devices("-1", "cpu") >= 1
    for given in ("0", "two", "²"):
        with pytest.raises(ValueError, match=r"--devices .*: expected an integer of at least 1, -1 for all, or auto"):
            choose_devices(given, "cpu")


def of(*rates: tuple[str, float | None]) -> dict[str, Attempt]:
    """Return results of rungs. A rung without a rate has failed."""
    return {
        name: attempt(name, "failed", "why") if rate is None else attempt(name, samples_per_second=rate)
        for name, rate in rates
    }


def test_what_helped_is_kept() -> None:
    first = ("unchanged", 100.0)
    assert settings_of("unchanged", {}, 2) == {}
    assert settings_of("16-mixed", of(first), 2) == {"precision": "16-mixed", "compile": None}
    helped = of(first, ("bf16-mixed", 120.0), ("16-mixed", 140.0))
    assert settings_of("compile", helped, 2) == {"precision": "16-mixed", "compile": True}
    compiled = {**helped, "compile": compiling(150.0, "16-mixed")}
    plain = {"precision": "16-mixed", "devices": 4, "strategy": "fsdp"}
    assert settings_of("fsdp", compiled, 4) == {**plain, "compile": True}
    assert settings_of("fsdp", {**helped, "compile": compiling(130.0, "16-mixed")}, 4) == {**plain, "compile": None}
    assert settings_of("fsdp", {**helped, **of(("compile", None))}, 4) == {**plain, "compile": None}
    slow = settings_of("ddp", of(first, ("bf16-mixed", 90.0)), 2)
    assert slow == {"precision": None, "compile": None, "devices": 2, "strategy": "ddp"}


def compiling(rate: float, precision: str | None = None) -> Attempt:
    return attempt("compile", samples_per_second=rate, compile=True, precision=precision)


@pytest.mark.slow
def test_stage_3_does_not_compile() -> None:
    pytest.importorskip("deepspeed")
    results = of(("unchanged", 100.0), ("compile", 200.0))
    assert settings_of("deepspeed_stage_3", results, 2)["compile"] is False
    assert settings_of("deepspeed_stage_2", results, 2)["compile"] is True

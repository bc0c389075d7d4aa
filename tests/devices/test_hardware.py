"""Names of accelerators, generator states and abilities, on a machine with an accelerator or without one."""

from __future__ import annotations

import re

import pytest
import torch

from trainwright.devices import abilities, hardware


@pytest.fixture(autouse=True)
def _no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "accelerator_type", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_auto_is_the_accelerator_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hardware.resolve_device_type("auto") == "cpu"
    assert hardware.resolve_device_type("cpu") == "cpu"
    monkeypatch.setattr(hardware, "accelerator_type", lambda: "mps")
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    assert {hardware.resolve_device_type(name) for name in ("auto", "gpu", "mps")} == {"mps"}
    assert hardware.resolve_device_type("cpu") == "cpu"
    with pytest.raises(
        RuntimeError, match=r"accelerator='cuda' was requested, but torch .* has 'mps' here; .*'auto' for 'mps', or"
    ):
        hardware.resolve_device_type("cuda")


@pytest.mark.parametrize("name", ["gpu", "cuda", "mps", "xpu"])
def test_an_accelerator_that_is_not_here_is_refused(name: str) -> None:
    text = f"accelerator='{name}' was requested, but torch {torch.__version__} has no accelerator here"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        hardware.resolve_device_type(name)


@pytest.mark.parametrize(("name", "close"), [
    ("cudda", "cuda"),
    ("gpus", "gpu"),
    ("mpps", "mps"),
    ("meta", None),
    ("ROCm", "cuda"),
    ("MPS", "mps"),
    ("tpu", None),
])  # fmt: skip
def test_an_unknown_accelerator_is_refused_with_the_nearest_name(name: str, close: str | None) -> None:
    hint = f" Did you mean '{close}'?" if close else " Import the package of another backend first."
    with pytest.raises(
        ValueError,
        match=rf"accelerator='{name}' is unknown; choose from auto, cpu, gpu, cuda, mps, xpu.*\.{re.escape(hint)}$",
    ):
        hardware.resolve_device_type(name)
    with pytest.raises(TypeError, match="accelerator=1 is an int; expected auto, cpu"):
        hardware.resolve_device_type(1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "told"), [
    ("cpu:0", r"names a device by its number; pass accelerator='cpu'\.$"),
    ("xpu:1", r"names a device by its number; pass accelerator='xpu' with devices=\[1\]\.$"),
    (":1", "is unknown; choose from"),
    ("xpu:", "is unknown; choose from"),
])  # fmt: skip
def test_a_devices_number_is_no_part_of_its_kind(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=rf"accelerator='{name}' {told}"):
        hardware.resolve_device_type(name)


def test_a_second_kind_of_accelerator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "accelerator_type", lambda: "xpu")
    monkeypatch.setattr(hardware, "is_available", lambda kind: True)
    assert hardware.resolve_device_type("gpu") == "xpu"
    with pytest.raises(
        RuntimeError, match=r"'mps' was requested, but torch .* uses 'xpu' as this process's accelerator"
    ):
        hardware.resolve_device_type("mps")


def test_the_host_is_asked_what_it_can_do() -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    assert all(abilities.fuses("cpu", name, dtype) for name in ("Adam", "SGD", "Adagrad") for dtype in dtypes)
    assert all(abilities.autocasts("cpu", dtype) for dtype in (torch.bfloat16, torch.float16))
    assert not abilities.autocasts("cpu", torch.float64)
    assert abilities.widest_float("cpu") == torch.float64
    assert not abilities.has_pinned_memory("cpu")
    assert not abilities.copies_aside("cpu")
    assert abilities.collective_backend("cpu") == "gloo"


def test_a_device_that_cannot_is_believed() -> None:
    """The meta device has no values, so reads of them fail, as on a device that lacks the operator."""
    assert abilities.collective_backend("mps") is None
    assert abilities.collective_backend("meta") is None
    assert not abilities.has_streams("meta")
    assert not abilities.autocasts("meta", torch.bfloat16)

"""The memory of a model on every device, from sizes only."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import trainwright as tw
from trainwright.memory.memory_estimate import available_memory

GIB = 2**30
PARAMETERS = 1000 * 1000 + 1000


def on_meta(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Linear(1000, 1000, device="meta", dtype=dtype)


def deep() -> nn.Module:
    """Eight blocks, which are groups of fsdp."""
    return nn.Sequential(*(nn.Sequential(on_meta()) for _ in range(8)))


def measured(kind: Any, **options: Any) -> int:
    """Return the bytes of a real optimizer's state after a real step, without its counts of steps."""
    module = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 30))
    optimizer = kind(module.parameters(), **options)
    module(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    values = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    return sum(value.nbytes for value in values)


@pytest.mark.parametrize(("kind", "options"), [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.NAdam, {"foreach": True}),
])  # fmt: skip
def test_an_optimizers_state_is_what_a_real_step_makes(kind: Any, options: dict[str, Any]) -> None:
    module = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 30))
    estimate = tw.estimate_memory(module, kind(module.parameters(), **options))
    assert not estimate.is_assumed
    assert estimate.optimizer == measured(kind, **options)


def test_every_strategy_has_its_share() -> None:
    estimate = tw.estimate_memory(on_meta(), torch.optim.Adam, num_devices=4, available_bytes=24 * GIB)
    one = 4 * PARAMETERS
    assert (estimate.parameters, estimate.gradients) == (one, one)
    assert estimate.optimizer == 2 * one
    expected = {
        "ddp": 5 * one,
        "ddp_sharded": 2 * one + 8 * 1000 * 1000,  # all of the larger tensor's
        "deepspeed_stage_1": 2 * one + 3 * one / 4 + one,  # with the buffer in which gradients are reduced
        "deepspeed_stage_2": one + 4 * one / 4 + one,
        "fsdp": 4 * one / 4 + 2 * one,  # with the gathered part and its gradients
        "deepspeed_stage_3": 5 * one / 4 + one + one,  # and with the gathered part
    }
    assert list(estimate.per_device) == list(expected)
    for name, size in expected.items():
        assert estimate.per_device[name] == pytest.approx(size, abs=16)
    ring = one * 3 // 4
    sent = {
        "ddp": 2,
        "ddp_sharded": 2,
        "deepspeed_stage_1": 3,
        "deepspeed_stage_2": 3,
        "fsdp": 2,
        "deepspeed_stage_3": 2,
    }
    assert {name: part.sent for name, part in estimate.parts.items()} == {name: n * ring for name, n in sent.items()}
    blocks = tw.estimate_memory(deep(), torch.optim.Adam, num_devices=4, available_bytes=24 * GIB)
    assert blocks.parts["fsdp"].sent == 3 * 8 * ring  # gathered for forward and for backward, and reduced
    assert blocks.parts["ddp_sharded"].optimizer == pytest.approx(2 * 8 * one / 4, rel=0.001)
    alone = tw.estimate_memory(on_meta(), num_devices=1)
    assert (list(alone.parts), alone.parts["single_device"].sent) == (["single_device"], 0)


def test_what_fsdp_has_whole_is_that_of_its_groups() -> None:
    """Two blocks, the gradients of one, and the parameters outside of blocks."""
    one = 4 * PARAMETERS

    def gathered(module: nn.Module, **options: Any) -> int:
        estimate = tw.estimate_memory(module, torch.optim.SGD, num_devices=8, available_bytes=GIB, **options)
        assert estimate.parts["fsdp"].gathered == estimate.gathered
        assert estimate.parts["ddp_sharded"].gathered == 0
        return estimate.gathered

    assert gathered(deep()) == 3 * one
    assert (
        gathered(nn.Sequential(*deep(), on_meta(), on_meta())) == 6 * one
    )  # two blocks and the others, which are more
    assert gathered(deep().requires_grad_(False).append(nn.Linear(2, 3, device="meta"))) == 2 * one + 2 * 4 * 9
    assert gathered(deep(), auto_wrap_policy={nn.Linear}) == 3 * one
    nested = nn.Sequential(*(nn.Sequential(on_meta(), on_meta(), on_meta()) for _ in range(2)))
    # The other two layers of a block stay gathered while its group within is called.
    inner = {block[2] for block in nested}
    assert gathered(nested, auto_wrap_policy=lambda part: part in inner or part in [*nested]) == (2 + 2 + 2) * one
    assert gathered(deep(), auto_wrap_policy=lambda module: isinstance(module, nn.Linear)) == 3 * one
    assert (
        gathered(nn.Sequential(deep(), nn.Linear(2, 3, device="meta")), auto_wrap_policy={nn.Sequential})
        == 3 * one + 36
    )


def test_frozen_parameters_buffers_and_half_precision_are_counted() -> None:
    module = nn.Sequential(on_meta(torch.bfloat16), nn.BatchNorm1d(10, device="meta"))
    module[0].bias.requires_grad_(False)
    estimate = tw.estimate_memory(module, 12, num_devices=1, available_bytes=GIB)
    assert estimate.parameters == 2 * PARAMETERS + 4 * (10 + 10 + 10 + 10) + 8
    assert estimate.gradients == 2 * 1000 * 1000 + 4 * 20
    assert estimate.optimizer == 12 * (1000 * 1000 + 20)


@pytest.mark.parametrize(("devices", "megabytes", "advice"), [
    (1, 100, r"^strategy='single_device' would need 15.3 MiB of the 100.0 MiB\.$"),
    (2, 100, r"^strategy='ddp' would need 19.1 MiB of the 100.0 MiB\.$"),
])  # fmt: skip
def test_the_advice_names_a_strategy(devices: int, megabytes: int, advice: str) -> None:
    check_advice(on_meta(), devices, megabytes, advice)


@pytest.mark.parametrize(("devices", "megabytes", "advice"), [
    (4, 100, r"^strategy='ddp_sharded' would need 76.4 MiB of the 100.0 MiB\.$"),
    (8, 40, r"^strategy='fsdp' would need 26.7 MiB of the 40.0 MiB\.$"),
    (8, 20, r"^no strategy fits it on 8 device\(s\) of 20.0 MiB: use more or larger devices, "),
    (1, 20, r"^no strategy fits it on 1 device\(s\) of 20.0 MiB: use more or larger devices, "),
    (2, 14, r"^no strategy fits .* 14.0 MiB: .*smaller groups under fsdp \(auto_wrap_policy\)"),
])  # fmt: skip
def test_the_advice_fits_a_deep_net(devices: int, megabytes: int, advice: str) -> None:
    check_advice(deep(), devices, megabytes, advice)


def check_advice(module: nn.Module, devices: int, megabytes: int, advice: str) -> None:
    estimate = tw.estimate_memory(module, num_devices=devices, available_bytes=megabytes * 2**20)
    assert re.search(advice, estimate.advice)
    text = str(estimate)
    assert estimate.advice in text
    assert "Activations are not counted" in text
    assert all(name in text for name in estimate.per_device)


def test_an_unknown_optimizer_is_counted_as_adam() -> None:
    module = on_meta()
    optimizer = torch.optim.Adafactor(module.parameters())
    estimate = tw.estimate_memory(module, [optimizer], num_devices=1, available_bytes=GIB)
    assert estimate.optimizer == 8 * PARAMETERS
    assert "counted as Adam's" in str(estimate)


def test_wrong_estimate_arguments_raise() -> None:
    with pytest.raises(ValueError, match="num_devices=-1 is not accepted; pass a number of at least 1"):
        tw.estimate_memory(on_meta(), num_devices=-1)
    with pytest.raises(TypeError, match="optimizer='adam' is not accepted; pass an optimizer, a list of them, a class"):
        tw.estimate_memory(on_meta(), "adam")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="auto_wrap_policy chooses no submodule of Linear"):
        tw.estimate_memory(on_meta(), auto_wrap_policy={nn.Conv1d})
    with pytest.raises(TypeError, match="optimizer=-1 is not accepted; pass an optimizer, a list"):
        tw.estimate_memory(on_meta(), -1)


@pytest.mark.parametrize("given", [0, -5, True, float("nan"), float("inf"), "80GB"])
def test_the_memory_of_a_device_is_checked(given: Any) -> None:
    with pytest.raises(ValueError, match=r"available_bytes=.* is not accepted; pass a number of at least 1"):
        tw.estimate_memory(on_meta(), available_bytes=given)
    assert tw.estimate_memory(on_meta(), available_bytes=16e9).available == 16_000_000_000  # type: ignore[arg-type]


class Masked(tw.Module):
    """Two blocks and a buffer that is larger than they are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2))
        self.register_buffer("mask", torch.ones(300, 64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for block in self.blocks:
            batch = block(batch)
        return (batch @ self.mask.T).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def test_buffers_are_not_sharded() -> None:
    estimate = tw.estimate_memory(Masked(), 0, num_devices=4, available_bytes=130 * 2**10)
    mask, parameters = 4 * 300 * 64, 4 * 2 * (64 * 64 + 64)
    assert (estimate.parameters, estimate.unsharded) == (parameters + mask, mask)
    for name in ("fsdp", "deepspeed_stage_3"):
        assert estimate.parts[name].parameters == parameters / 4 + mask
    assert "no strategy fits" in estimate.advice


def test_the_memory_of_this_machine_is_found() -> None:
    assert GIB / 4 < available_memory() < 2**50

"""The simulated device itself: what must fail on it fails, and what must work works."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

if not hasattr(torch, "sim"):
    pytest.skip("the simulated device is not loaded; run make test-device", allow_module_level=True)

pytestmark = pytest.mark.device
sim = torch.sim  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    sim.synchronize()
    sim.clear_violations()
    yield
    sim.refuse_sync(False)
    sim.raise_violations(True)
    sim.synchronize()
    found = sim.violations()
    sim.clear_violations()
    assert found == []


def found() -> list[str]:
    """Take the violations so far."""
    all_of_them: list[str] = sim.violations()
    sim.clear_violations()
    return all_of_them


def test_a_forgotten_wait_is_a_wrong_number_and_an_error() -> None:
    source = torch.arange(4.0).pin_memory()
    side = sim.Stream()
    with sim.stream(side):
        there = source.to("sim", non_blocking=True)
    with pytest.raises(RuntimeError, match="nothing waits for it"):
        there + 1
    sim.clear_violations()
    sim.raise_violations(False)
    assert (there + 1).isnan().all()
    assert "nothing waits for it" in found()[0]
    sim.current_stream().wait_stream(side)
    there.record_stream(sim.current_stream())
    assert (there + 1).tolist() == [1, 2, 3, 4]


def test_a_model_trains() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(8, 1)
    ).to("sim")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    inputs = torch.randn(8, 1, 4, 4, device="sim")
    losses = []
    for _ in range(5):
        loss = (model(inputs) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]

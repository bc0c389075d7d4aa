"""An RNG state from a checkpoint is checked before it is set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import QUIET, Classifier, make_loader

import trainwright as tw
from trainwright.checkpoint import reader
from trainwright.data.seeding import check_generator_states, rng_state

SEEDED = torch.zeros(16, dtype=torch.uint8)


def device_state(state: Any, others: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "cuda", "state": state, "others": others or {}}


def spoiled(name: str, value: Any) -> dict[str, Any]:
    state = rng_state()
    return {**state, name: value(state[name])}


BAD = {
    "position": ("numpy", lambda state: (*state[:2], 10**9, *state[3:])),
    "negative": ("numpy", lambda state: (*state[:2], -5, *state[3:])),
    "no int": ("numpy", lambda state: (*state[:2], 3.5, *state[3:])),
    "short key": ("numpy", lambda state: (state[0], state[1][:10], *state[2:])),
    "kind": ("numpy", lambda state: ("PCG64", *state[1:])),
    "index": ("python", lambda state: (3, (*state[1][:-1], 10**6), None)),
    "words": ("python", lambda state: (3, state[1][:5], None)),
    "nothing": ("python", lambda state: None),
    "size": ("torch", lambda state: state[:-1]),
    "dtype": ("torch", lambda state: state.float()),
    "zeros": ("torch", lambda state: torch.zeros_like(state)),
    "device": ("device", lambda state: device_state(torch.zeros(15, dtype=torch.uint8))),
    "offset": ("device", lambda state: device_state(torch.full((16,), 255, dtype=torch.uint8))),
    "further": ("device", lambda state: device_state(SEEDED, {"1": torch.zeros(15, dtype=torch.uint8)})),
    "number": ("device", lambda state: device_state(SEEDED, {"one": SEEDED})),
    "no bytes": ("device", lambda state: device_state([0] * 16)),
    "no states": ("device", lambda state: "cuda"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_state_that_a_generator_cannot_have_is_refused(case: str) -> None:
    name, value = BAD[case]
    check_generator_states({"rng": {**rng_state(), "device": device_state(SEEDED, {"3": SEEDED})}}, "path")
    with pytest.raises(tw.CheckpointError, match=f"path: the state of the {name} generator is not valid"):
        check_generator_states({"sources": [[{"generators": spoiled(name, value)}]]}, "path")


@pytest.mark.host
def test_a_run_refuses_it_before_anything_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tw.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Classifier(), make_loader(8))
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    own = reader.StoredCheckpoint.rank_state
    bad = spoiled(*BAD["position"])
    monkeypatch.setattr(reader.StoredCheckpoint, "rank_state", lambda self, rank: {**own(self, rank), "rng": bad})
    module = Classifier()
    before = module.net[0].weight.detach().clone()
    with pytest.raises(tw.CheckpointError, match="generator"):
        tw.Trainer(max_epochs=2, **QUIET).fit(module, make_loader(8), ckpt_path=tmp_path / "whole.ckpt")
    assert torch.equal(module.net[0].weight, before)

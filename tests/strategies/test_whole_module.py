"""A whole copy of a module on one process. test_layers.py gathers sharded modules."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

import trainwright as tw


def seen(module: nn.Module, args: Any) -> None:
    assert args


def test_a_whole_copy_does_not_share_tensors() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.GRU(3, 3))
    module[0].weight.requires_grad_(False)
    module.register_forward_pre_hook(seen)
    copied = tw.gather_module(module)
    assert copied is not None
    assert pickle.loads(pickle.dumps(copied)).state_dict().keys() == module.state_dict().keys()
    assert seen in copied._forward_pre_hooks.values()
    for (name, mine), theirs in zip(copied.named_parameters(), module.parameters(), strict=True):
        assert mine is not theirs, name
        assert torch.equal(mine, theirs)
        assert mine.requires_grad == theirs.requires_grad
    copied[1].running_mean.fill_(3.0)  # type: ignore[index]
    assert module[1].running_mean.sum() == 0.0


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_a_copy_has_no_graph() -> None:
    """Torch's older weight_norm and spectral_norm keep computed weights, and some modules keep a state."""
    module: Any = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)), nn.utils.spectral_norm(nn.Linear(3, 3)))
    inputs = torch.ones(2, 3)
    module.state = {"hidden": [module(inputs)]}
    copied: Any = tw.gather_module(module)
    assert not copied.state["hidden"][0].requires_grad
    assert torch.equal(copied.eval()(inputs), module.eval()(inputs))
    assert copied[0].weight_g is not module[0].weight_g

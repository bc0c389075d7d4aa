"""Which optimizers may step a shard of the elements, and the argument that accepts another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import make_net
from zero_job import Layers

import trainwright as tw
from trainwright.strategies.divided_optimizers import is_elementwise, refuse_undivided


def test_torch_optimizers_and_inherited_steps_are_known() -> None:
    class Same(torch.optim.AdamW):
        pass

    class Other(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    net = make_net()
    assert is_elementwise(Same(net.parameters()))
    assert not is_elementwise(Other(net.parameters()))
    for kind in (torch.optim.SGD, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD):
        assert is_elementwise(kind(net.parameters(), lr=0.1))
    assert not is_elementwise(torch.optim.Adafactor(net.parameters()))


def test_unknown_optimizer_is_rejected_with_the_argument_that_accepts_it() -> None:
    with pytest.raises(
        ValueError,
        match=r"Layers is not known to step every element .*strategy='fsdp'.*elementwise=True.*'ddp' or 'ddp_sharded'",
    ):
        refuse_undivided(Layers(make_net().parameters(), lr=0.1), "fsdp", False)


@pytest.mark.parametrize("kind", [tw.FSDPStrategy, tw.DeepSpeedStrategy])
def test_elementwise_has_to_be_a_bool(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"elementwise='Lion' is not accepted. Pass True or False"):
        kind(elementwise="Lion")

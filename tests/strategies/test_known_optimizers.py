"""Which optimizers may step a shard of the elements, and the argument that accepts another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import make_net
from zero_job import Layers

import trainwright as tw
from trainwright.strategies.known_optimizers import refuse_unknown_optimizer, steps_elements


def test_torch_optimizers_and_inherited_steps_are_known() -> None:
    class Same(torch.optim.AdamW):
        pass

    class Other(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    net = make_net()
    assert steps_elements(Same(net.parameters()))
    assert not steps_elements(Other(net.parameters()))
    for kind in (torch.optim.SGD, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD):
        assert steps_elements(kind(net.parameters(), lr=0.1))
    assert not steps_elements(torch.optim.Adafactor(net.parameters()))


def test_unknown_optimizer_is_rejected_with_the_argument_that_accepts_it() -> None:
    with pytest.raises(
        ValueError,
        match=r"Layers is not known to step each element .*strategy='fsdp'.*elementwise=True.*'ddp' or 'ddp_sharded'",
    ):
        refuse_unknown_optimizer(Layers(make_net().parameters(), lr=0.1), "fsdp")


@pytest.mark.parametrize("kind", [tw.FSDPStrategy, tw.DeepSpeedStrategy])
def test_elementwise_has_to_be_a_bool(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"elementwise='Lion' is not accepted. Pass True or False"):
        kind(elementwise="Lion")

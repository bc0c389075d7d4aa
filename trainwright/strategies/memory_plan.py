"""Memory plans for estimates: which tensors a strategy shards over the devices, and which buffers it adds."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["ALONE", "FULLY_SHARDED", "MEMORY_PLANS", "DeviceBytes"]

LARGEST_BUCKET = 500_000_000
"""The most elements of DeepSpeed's buffer for reducing gradients. Smaller models get a smaller one."""
MOST_GATHERED = 1_000_000_000
"""DeepSpeed's stage 3 keeps up to this many gathered elements instead of gathering them again."""


class DeviceBytes(NamedTuple):
    """Bytes on one device in training."""

    parameters: int
    """The bytes of the parameters, and of the module's buffers."""
    gradients: int
    optimizer: int
    """The bytes of the optimizer's state."""
    masters: int
    """The bytes of the float32 copies that an engine steps in place of the parameters."""
    buffers: int
    """The bytes of the buffers for reducing gradients over the devices."""
    gathered: int
    """The bytes of the parameters that a step gathers from other devices, and under fsdp of their gradients."""
    activations: int = 0
    """The bytes that a forward saves for backward, if they are known."""
    sent: int = 0
    """The bytes that the device sends in an optimizer step of one batch, by rings, without module buffers."""

    @property
    def total(self) -> int:
        """Return the sum of all parts that are stored."""
        return sum(self[:-1])


@dataclass(frozen=True)
class MemoryPlan:
    """Which parts of a model's training memory are sharded over the devices, and what is sent."""

    parameters: bool = False
    gradients: bool = False
    optimizer: bool = False
    keeps_tensors: bool = False
    """Whether the optimizer's state is divided by whole tensors: a tensor goes to the device that has least."""
    sends: int = 0
    """How often a step sends as many bytes as the gradients have, apart from gathered parameters. An all-reduce is two."""
    has_buckets: bool = False
    """Whether gradients are copied into communication buckets."""
    has_masters: bool = False
    """Whether a device keeps float32 masters of its shard of the trained parameters, which the optimizer steps. A window's
    gradients are summed in float32 too, whatever the parameters' dtype."""
    reduces: str = ""
    """The dtype of the reduction buffer: "float32", "gradients" (theirs), or "" without one."""
    gathers: bool = False
    """Whether gathered parameters stay whole on all devices until the step ends."""
    gathers_groups: bool = False
    """Whether parameters are whole on a device one group at a time, with their gradients."""

    def on_device(
        self,
        *,
        parameters: int,
        gradients: int,
        optimizer: int,
        unsharded: int,
        masters: int,
        of_masters: int,
        gathered: int,
        regathered: int,
        sizes: Sequence[int],
        num_devices: int,
    ) -> DeviceBytes:
        """Return one device's part of a whole model's bytes.

        Buffers are among `parameters`, and `unsharded` has their bytes. The trained parameters in float32 are `masters`,
        and `of_masters` is the optimizer's state for these. Groups have up to `gathered` bytes at once, and gather
        `regathered` again for backward. If known, `sizes` has the elements of the trained parameters.
        """
        trained, sharded = masters // 4, parameters - unsharded
        state = of_masters if self.has_masters else optimizer
        reduced = {"float32": masters, "gradients": gradients, "": 0}[self.reduces]
        sent = self.sends * gradients + (sharded + regathered if self.gathers_groups else 0)
        if self.gathers:
            gathered = min(sharded, MOST_GATHERED * (gradients // trained if trained else 4))
            sent += 2 * sharded - gathered

        def part(size: int, is_divided: bool) -> int:
            return -(-size // num_devices) if is_divided else size

        return DeviceBytes(
            parameters=part(sharded, self.parameters) + unsharded,
            gradients=part(masters if self.has_masters else gradients, self.gradients),
            optimizer=state * _largest_share(sizes, num_devices) // trained
            if self.keeps_tensors and sizes
            else part(state, self.optimizer),
            masters=part(masters, True) if self.has_masters else 0,
            buffers=(gradients if self.has_buckets else 0)
            + (reduced if trained <= LARGEST_BUCKET else reduced * LARGEST_BUCKET // trained),
            gathered=gathered if self.gathers or self.gathers_groups else 0,
            sent=sent * (num_devices - 1) // num_devices,
        )


def _largest_share(sizes: Sequence[int], num_devices: int) -> int:
    """Return the most elements on one device, if every tensor goes to the device that has the fewest."""
    shares = [0] * num_devices
    for size in sizes:
        heapq.heapreplace(shares, shares[0] + size)
    return max(shares)


ALONE = "single_device"
FULLY_SHARDED = "fsdp"
"""The strategy that shards everything."""

MEMORY_PLANS = {
    "ddp": MemoryPlan(has_buckets=True, sends=2),
    "ddp_sharded": MemoryPlan(optimizer=True, keeps_tensors=True, sends=2),
    "deepspeed_stage_1": MemoryPlan(optimizer=True, has_masters=True, reduces="float32", sends=3),
    "deepspeed_stage_2": MemoryPlan(gradients=True, optimizer=True, has_masters=True, reduces="gradients", sends=3),
    "fsdp": MemoryPlan(parameters=True, gradients=True, optimizer=True, gathers_groups=True, sends=1),
    "deepspeed_stage_3": MemoryPlan(
        parameters=True, gradients=True, optimizer=True, has_masters=True, reduces="gradients", gathers=True, sends=1
    ),
}
"""The strategies for several devices. The first that fits is recommended."""

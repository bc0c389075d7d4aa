"""Memory plans for estimates: which tensors a strategy shards over the devices, and which buffers it adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["ALONE", "FULLY_SHARDED", "MEMORY_PLANS", "DeviceBytes"]

LARGEST_BUCKET = 500_000_000
"""The most elements of DeepSpeed's buffer for reducing gradients. Smaller models get a smaller one."""
MOST_GATHERED = 1_000_000_000
"""DeepSpeed's stage 3 keeps up to this many gathered elements instead of gathering them again."""


class DeviceBytes(NamedTuple):
    """Bytes on one device in training, without activations."""

    parameters: int
    """The bytes of the parameters, and of the module's buffers."""
    gradients: int
    optimizer: int
    """The bytes of the optimizer's state."""
    masters: int
    """The bytes of the float32 copies that an engine steps in place of the parameters."""
    buffers: int
    """The bytes of the buffers for reducing and gathering over the devices."""

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        return sum(self)


@dataclass(frozen=True)
class MemoryPlan:
    """Which parts of a model's training memory are sharded over the devices."""

    parameters: bool = False
    gradients: bool = False
    optimizer: bool = False
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
        num_devices: int,
    ) -> DeviceBytes:
        """Return one device's part of a whole model's bytes.

        `unsharded` are the module's buffers, which are among `parameters`. `masters` are its trained parameters in float32,
        and `of_masters` is the optimizer's state for these. `gathered` is the largest size that groups have at once.
        """
        trained, sharded = masters // 4, parameters - unsharded
        reduced = {"float32": masters, "gradients": gradients, "": 0}[self.reduces]

        def part(size: int, is_divided: bool) -> int:
            return -(-size // num_devices) if is_divided else size

        return DeviceBytes(
            parameters=part(sharded, self.parameters) + unsharded,
            gradients=part(masters if self.has_masters else gradients, self.gradients),
            optimizer=part(of_masters if self.has_masters else optimizer, self.optimizer),
            masters=part(masters, True) if self.has_masters else 0,
            buffers=(gradients if self.has_buckets else 0)
            + (reduced if trained <= LARGEST_BUCKET else reduced * LARGEST_BUCKET // trained)
            + (min(sharded, MOST_GATHERED * (gradients // trained if trained else 4)) if self.gathers else 0)
            + (gathered if self.gathers_groups else 0),
        )


ALONE = "single_device"
FULLY_SHARDED = "fsdp"
"""The strategy that shards everything."""

MEMORY_PLANS = {
    "ddp": MemoryPlan(has_buckets=True),
    "ddp_sharded": MemoryPlan(optimizer=True),
    "deepspeed_stage_1": MemoryPlan(optimizer=True, has_masters=True, reduces="float32"),
    "deepspeed_stage_2": MemoryPlan(gradients=True, optimizer=True, has_masters=True, reduces="gradients"),
    "fsdp": MemoryPlan(parameters=True, gradients=True, optimizer=True, gathers_groups=True),
    "deepspeed_stage_3": MemoryPlan(
        parameters=True, gradients=True, optimizer=True, has_masters=True, reduces="gradients", gathers=True
    ),
}
"""The strategies for several devices. The first that fits is recommended."""

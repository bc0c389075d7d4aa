"""MemoryPlan: what each strategy, by name, divides among the devices, and what it keeps beside; for estimates of memory."""

from __future__ import annotations

from dataclasses import dataclass

LARGEST_BUCKET = 500_000_000
"""DeepSpeed reduces gradients in a buffer of so many elements at most; of fewer, where the model trains fewer."""
MOST_GATHERED = 1_000_000_000
"""Of so many elements DeepSpeed's stage 3 keeps what it has gathered, rather than to gather it again."""


@dataclass(frozen=True)
class MemoryPlan:
    """What of a model's memory is divided among the devices, in training."""

    parameters: bool = False
    gradients: bool = False
    optimizer: bool = False
    has_buckets: bool = False
    """Whether gradients have a second copy, in which they are sent."""
    has_masters: bool = False
    """Whether each device keeps a float32 copy of its part of the trained parameters."""
    reduces: str = ""
    """What the buffer holds in which gradients are reduced: "float32", "gradients" (in their dtype), "" for no such buffer."""
    gathers: bool = False
    """Whether parameters that were gathered stay whole on each device until a step's end."""

    def bytes_on_device(
        self, *, parameters: int, gradients: int, optimizer: int, masters: int, num_devices: int
    ) -> int:
        """Return what one device holds, from what a whole model has; `masters` are its trained parameters in float32."""
        trained = masters // 4
        reduced = {"float32": masters, "gradients": gradients, "": 0}[self.reduces]

        def part(size: int, is_divided: bool) -> int:
            return -(-size // num_devices) if is_divided else size

        return (
            part(parameters, self.parameters)
            + part(gradients, self.gradients)
            + part(optimizer, self.optimizer)
            + (gradients if self.has_buckets else 0)
            + (part(masters, True) if self.has_masters else 0)
            + (reduced if trained <= LARGEST_BUCKET else reduced * LARGEST_BUCKET // trained)
            + (min(parameters, MOST_GATHERED * (gradients // trained if trained else 4)) if self.gathers else 0)
        )


ALONE = "single_device"
FULLY_SHARDED = "fsdp"
"""The strategy that divides everything."""

MEMORY_PLANS = {
    "ddp": MemoryPlan(has_buckets=True),
    "ddp_sharded": MemoryPlan(optimizer=True),
    "deepspeed_stage_1": MemoryPlan(optimizer=True, has_masters=True, reduces="float32"),
    "deepspeed_stage_2": MemoryPlan(gradients=True, optimizer=True, has_masters=True, reduces="gradients"),
    "fsdp": MemoryPlan(parameters=True, gradients=True, optimizer=True),
    "deepspeed_stage_3": MemoryPlan(
        parameters=True, gradients=True, optimizer=True, has_masters=True, reduces="gradients", gathers=True
    ),
}
"""The strategies of several devices; of those that fit, the one that stands first is recommended."""

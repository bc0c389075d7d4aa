"""The device mesh: the ranks over which torch's DTensor shards."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainwright.devices.abilities import collective_backend
from trainwright.distributed.collectives import group_backends


def make_mesh(device_type: str, world_size: int) -> DeviceMesh:
    """Return the mesh of all ranks (ValueError over gloo on an accelerator: DTensor crashes there when it gathers)."""
    backend = collective_backend(device_type)
    if group_backends().get(device_type) == "gloo" != backend:
        raise ValueError(
            f"fsdp does not run over gloo on {device_type!r}: torch's DTensor crashes there when it gathers. Open the process "
            f"group with {backend!r}, or choose strategy='ddp'."
        )
    return init_device_mesh(device_type, (world_size,))

"""Meshes and names of strategies that are rejected, with the reason and an alternative."""

from __future__ import annotations

from typing import Any

import pytest

import trainwright as tw
from trainwright.strategies.mesh_axes import check_mesh, reject_unsupported_axes

CONTEXT = r"'{}' is not supported, because torch's kernels .* of NVIDIA\. torchtitan \(https://.*\) has it\..* strategy='fsdp'"
EXPERT = r"'{}' is not supported, because the layers of a model .* their experts\. torchtitan \(https://.*\) has it"
PIPELINE = r"'{}' is not supported, because a schedule .* replace training_step\. torchtitan \(https://.*\) has it"
REJECTED_AXES: list[tuple[Any, type[Exception], str]] = [
    *(({"data": 2, name: 2}, ValueError, f"the axis {CONTEXT.format(name)}") for name in ("context", "cp")),
    *(({"data": 2, name: 2}, ValueError, f"the axis {EXPERT.format(name)}") for name in ("expert", "ep")),
    *(({"data": 2, name: 2}, ValueError, f"the axis {PIPELINE.format(name)}") for name in ("pipeline", "pp")),
    ({"data": 2, "tensors": 2}, ValueError, r"'tensors' is unknown; choose from .* Did you mean 'tensor'\?"),
    (
        {"dp": 2, "tp": 2},
        ValueError,
        r"'dp' is unknown; choose from replicate, shard, data, tensor\. Did you mean 'data'\?",
    ),
    ({0: 2}, ValueError, r"the axis 0 is unknown; choose from replicate, shard, data, tensor\.$"),
    ({"data": 0, "tensor": 2}, ValueError, "data=0 is not accepted; pass an integer of at least 1"),
    ({"data": True, "tensor": 2}, ValueError, "data=True is not accepted; pass an integer"),
    ({"data": 2, "tensor": 2.0}, ValueError, "tensor=2.0 is not accepted; pass an integer"),
    ({"data": 2}, ValueError, r"mesh=\{'data': 2\} has not the axes of one pair. Pass .*\{'data': 2, 'tensor': 2\}"),
    ({"data": 2, "shard": 2}, ValueError, r"has not the axes of one pair. Pass \{'replicate': 2, 'shard': 2\} or"),
    ({}, ValueError, r"mesh=\{\} has not the axes of one pair"),
    ((2, 2), TypeError, r"mesh=\(2, 2\) is a tuple; pass a dict of axes and sizes: \{'replicate': 2"),
]
REJECTED_NAMES = [
    *((name, CONTEXT) for name in ("context", "context_parallel", "cp")),
    *((name, EXPERT) for name in ("expert", "expert_parallel", "ep")),
    *((name, PIPELINE) for name in ("pipeline", "pipeline_parallel", "pp")),
    *((name, r"strategy='{}' is an option of fsdp: pass FSDPStrategy\(mesh=\{{\"data\": 2, \"tensor\": 2\}}, tensor_plan=")
      for name in ("tensor_parallel", "tensor", "tp", "model_parallel")),
    *((name, r"strategy='{}' is an option of fsdp: pass FSDPStrategy\(num_replicas=2\)")
      for name in ("hsdp", "hybrid_shard", "HYBRID_SHARD")),
    ("SHARD_GRAD_OP", r"strategy='{}' is an option of fsdp: pass FSDPStrategy\(reshard_after_forward=False\)"),
    *((name, rf"strategy='{{}}' is unknown; use '{new}', or choose from auto, .*\.$") for name, new in (
        ("fsdp2", "fsdp"), ("fsdp_native", "fsdp"), ("FULL_SHARD", "fsdp"), ("dp", "ddp"), ("zero3", "deepspeed_stage_3"),
        ("deepspeed_stage_3_offload_nvme", "deepspeed_stage_3_offload"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "kind", "match"), REJECTED_AXES, ids=lambda value: str(value)[:30])
def test_other_axes_are_rejected_with_the_reason(mesh: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        reject_unsupported_axes(mesh)


@pytest.mark.parametrize("mesh", [{"replicate": 2, "shard": 3}, {"data": 3, "tensor": 2}, {"tensor": 6, "data": 1}])
def test_a_mesh_has_one_place_for_every_process(mesh: dict[str, int]) -> None:
    check_mesh(mesh, 6)
    with pytest.raises(
        ValueError, match=r"is for 6 processes \(\d \* \d\), but the job has 4\. Pass sizes .* is 4, or start 6"
    ):
        check_mesh(mesh, 4)


def test_the_size_of_a_mesh_is_checked_after_its_axes() -> None:
    with pytest.raises(ValueError, match="the axis 'pp' is not supported"):
        check_mesh({"pp": 2}, 4)


@pytest.mark.parametrize(("name", "match"), REJECTED_NAMES)
def test_other_parallelism_is_rejected_by_name_with_the_reason(name: str, match: str) -> None:
    with pytest.raises(ValueError, match=match.format(name)):
        tw.Trainer(strategy=name, devices=4, accelerator="cpu")

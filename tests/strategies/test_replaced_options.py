"""Options of strategies under Lightning's names: accepted options, and the errors of missing ones."""

from __future__ import annotations

import copy
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

import trainwright as tw
from trainwright.strategies.replaced_options import EVERY, HARMLESS, OF_DDP, OF_DEEPSPEED, OF_FSDP

Zero = tw.DeepSpeedStrategy


@pytest.mark.parametrize(("kind", "options", "said"), [
    (tw.DDPStrategy, {"find_unused_parameter": True}, r"Did you mean find_unused_parameters=\?"),
    (tw.DDPStrategy, {"process_group_backend": "mpi"}, "gloo on the CPU.*init_process_group before"),
    (tw.DDPStrategy, {"start_method": "fork"}, "pass strategy='ddp_spawn' or 'ddp_notebook'"),
    (tw.DDPStrategy, {"broadcast_buffers": False}, "rank 0's buffers.*_ddp_params_and_buffers_to_ignore"),
    (tw.DDPStrategy, {"ddp_comm_hook": print}, "pass comm_hook="),
    (tw.DDPStrategy, {"cluster_environment": object()}, r"is detected \(docs/launching.md\)"),
    (tw.ShardedDDPStrategy, {"reduce_fp17": True}, r"Did you mean reduce_fp16=\?"),
    (tw.FSDPStrategy, {"activation_checkpointing": [nn.Linear]}, "pass activation_checkpointing_policy="),
    (tw.FSDPStrategy, {"state_dict_type": "other"}, "one format, which every strategy loads"),
    (tw.FSDPStrategy, {"device_mesh": (2, 2)}, "pass mesh={'replicate': 2, 'shard': 4} or mesh="),
    (tw.FSDPStrategy, {"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, "gathers ahead by itself"),
    (tw.FSDPStrategy, {"reshard_after_forwards": True}, r"Did you mean reshard_after_forward=\?"),
    (tw.FSDPStrategy, {"mixed_precision": MixedPrecision(torch.bfloat16)}, "pass a .*MixedPrecisionPolicy"),
    (tw.FSDPStrategy, {"auto_wrap_policy": partial(size_based_auto_wrap_policy, min_num_params=1)},
     r"auto_wrap_policy cannot be called: it is given \(module\)"),
    (Zero, {"loss_scale": 0.0}, "section 'fp16' of config="),
    (Zero, {"nvme_path": "/local"}, "offloading to NVMe is refused"),
    (Zero, {"accelerator": "gpu"}, "pass accelerator= to the Trainer"),
    (Zero, {"zero_optimization": False}, "strategy='ddp' is what"),
])  # fmt: skip
def test_missing_options_are_rejected_by_name(kind: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        kind(**options)


def test_options_that_change_nothing_are_accepted() -> None:
    tw.DDPStrategy(broadcast_buffers=True, start_method="popen", cluster_environment=None, process_group_backend=None)
    given = {"state_dict_type": "sharded", "use_orig_params": True, "backward_prefetch": BackwardPrefetch.BACKWARD_PRE}
    copy.deepcopy(tw.FSDPStrategy(**given))
    strategy = Zero(zero_optimization=True, logging_level=None, load_full_weights=True, overlap_comm=True)
    assert strategy.zero == {"overlap_comm": True}
    assert HARMLESS.keys() <= {**EVERY, **OF_DDP, **OF_FSDP, **OF_DEEPSPEED}.keys()


def test_options_of_the_same_meaning_are_translated() -> None:
    assert not tw.FSDPStrategy(sharding_strategy="SHARD_GRAD_OP").options.reshard_after_forward
    assert tw.FSDPStrategy(sharding_strategy=ShardingStrategy.FULL_SHARD).options.reshard_after_forward
    assert not tw.FSDPStrategy(cpu_offload=CPUOffload()).cpu_offload
    assert tw.FSDPStrategy(cpu_offload=CPUOffload(offload_params=True)).cpu_offload
    assert not tw.FSDPStrategy(sharding_strategy="shard_grad_op").options.reshard_after_forward
    with pytest.raises(
        ValueError, match=r"Choose 'FULL_SHARD' or 'SHARD_GRAD_OP'\. In place of HYBRID_SHARD pass num_replicas="
    ):
        tw.FSDPStrategy(sharding_strategy="HYBRID_SHARD")
    with pytest.raises(ValueError, match="Omit one of the two"):
        tw.FSDPStrategy(sharding_strategy="FULL_SHARD", reshard_after_forward=False)
    for kind in (tw.DDPStrategy, tw.FSDPStrategy, Zero):
        assert kind(timeout=timedelta(minutes=2)).timeout_seconds == 120

"""Replaced options: options of Lightning's strategies that are missing here, and their replacements.

An option is accepted if its value asks for the behavior that is the only one here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from trainwright.arguments import refuse_unknown

EVERY = {
    "accelerator": "pass accelerator= to the Trainer",
    "parallel_devices": "pass devices= to the Trainer",
    "precision_plugin": "pass precision= to the Trainer",
    "cluster_environment": "the job of a launcher, SLURM or MPI is detected (docs/launching.md)",
    "checkpoint_io": "checkpoints have one format; ModelCheckpoint(async_save=True) writes them in the background",
    "process_group_backend": "the device decides it (nccl on NVIDIA's, gloo on the CPU). For another one call "
    "torch.distributed.init_process_group before the Trainer is made",
    "start_method": "pass strategy='ddp_spawn' or 'ddp_notebook' to the Trainer, whose processes are new interpreters",
}
OF_DDP = {
    "ddp_comm_hook": "pass comm_hook=, a function or 'fp16', 'bf16' or 'power_sgd'",
    "ddp_comm_state": "pass comm_state=",
    "ddp_comm_wrapper": "pass what it returns, such as torch's fp16_compress_wrapper(hook), as comm_hook=",
    "model_averaging_period": "the gradients are averaged in each step; examples/raw_loop/local_sgd.py does it less often",
    "broadcast_buffers": "every training step starts with rank 0's buffers, so that the ranks train one model. Name those that "
    "stay each rank's own in the module's _ddp_params_and_buffers_to_ignore",
    "init_sync": "the ranks always start with rank 0's weights",
    "process_group": "all processes of the job take part",
    "device_ids": "pass devices= to the Trainer",
    "output_device": "pass devices= to the Trainer",
}
OF_FSDP = {
    "activation_checkpointing": "pass activation_checkpointing_policy=, with the same classes",
    "state_dict_type": "checkpoints have one format, which every strategy loads on any number of processes",
    "device_mesh": "pass mesh={'replicate': 2, 'shard': 4} or mesh={'data': 2, 'tensor': 2}",
    "process_group": "all processes take part; num_replicas= shards within groups of them",
    "ignored_modules": "every parameter is sharded",
    "ignored_states": "every parameter is sharded",
    "ignored_parameters": "every parameter is sharded",
    "param_init_fn": "build the module on the meta device in configure_model, and its reset_parameters are run",
    "use_orig_params": "parameters always keep their names and shapes",
    "sync_module_states": "the ranks always start with rank 0's weights",
    "limit_all_gathers": "torch's FSDP2 limits them by itself",
    "backward_prefetch": "torch's FSDP2 gathers ahead by itself",
    "forward_prefetch": "torch's FSDP2 gathers ahead by itself",
}
_NVME = "offloading to NVMe is refused, since no checkpoint finds optimizer state there"
_ACTIVATIONS = "pass it to deepspeed.checkpointing.configure, in the script"
_SCALE = "pass it in the section 'fp16' of config="
OF_DEEPSPEED = {
    "zero_optimization": "strategy='ddp' is what training without it is",
    "remote_device": "build the module on the meta device in configure_model",
    "offload_params_device": _NVME,
    "offload_optimizer_device": _NVME,
    **dict.fromkeys(
        (
            "nvme_path", "params_buffer_count", "params_buffer_size", "max_in_cpu", "optimizer_buffer_count", "block_size",
            "queue_depth", "single_submit", "overlap_events", "thread_count",
        ), _NVME,
    ),
    "pin_memory": "pass it in config=, {'zero_optimization': {'offload_optimizer': {'device': 'cpu', 'pin_memory': True}}}",
    "zero_allow_untested_optimizer": "pass elementwise=True",
    "logging_batch_size_per_gpu": "pass config={'train_micro_batch_size_per_gpu': ...}, which DeepSpeed's reports show",
    "logging_level": "set it with logging.getLogger('DeepSpeed').setLevel",
    **dict.fromkeys(("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"), _SCALE),
    **dict.fromkeys(
        (
            "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "synchronize_checkpoint_boundary",
        ), _ACTIVATIONS,
    ),
    "load_full_weights": "a checkpoint of any strategy is loaded",
    "exclude_frozen_parameters": "a checkpoint holds frozen parameters too",
}  # fmt: skip
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "start_method": ("popen",), "broadcast_buffers": (True,), "init_sync": (True,),
    "state_dict_type": ("full", "sharded"), "use_orig_params": (True,), "sync_module_states": (True,),
    "limit_all_gathers": (True,), "backward_prefetch": ("BACKWARD_PRE",), "forward_prefetch": (False,),
    "zero_optimization": (True,), "offload_params_device": ("cpu",), "offload_optimizer_device": ("cpu",),
    "load_full_weights": (True, False), "exclude_frozen_parameters": (False,),
}  # fmt: skip
"""Accepted values, which ask for the behavior that is the only one here, as None does."""


def refuse_options(kind: type[Any], unknown: Mapping[str, Any], replaced: Mapping[str, str]) -> None:
    """Raise TypeError for options that a strategy does not have, with the replacements of Lightning's options."""
    options = {**EVERY, **replaced}
    left = {name: value for name, value in unknown.items() if not (name in options and _is_harmless(name, value))}
    known = [
        each.name for each in inspect.signature(kind.__init__).parameters.values() if each.kind == each.KEYWORD_ONLY
    ]
    refuse_unknown(kind.__name__, left, known, options)


def _is_harmless(name: str, value: Any) -> bool:
    accepted = HARMLESS.get(name, ())
    return value is None or any(value is each for each in accepted) or getattr(value, "name", value) in accepted


def reshards(sharding_strategy: Any, reshard_after_forward: bool) -> bool:
    """Return whether groups are resharded after their forward, by the strategy's name in Lightning if there is one."""
    name = getattr(sharding_strategy, "name", sharding_strategy)  # a text, or a member of torch's enum
    name = name.upper() if isinstance(name, str) else name
    if name not in (None, "FULL_SHARD", "SHARD_GRAD_OP"):
        raise ValueError(
            f"sharding_strategy={sharding_strategy!r} is not accepted. Choose 'FULL_SHARD' or 'SHARD_GRAD_OP'. In place of "
            "HYBRID_SHARD pass num_replicas=, the number of nodes (with 'SHARD_GRAD_OP' for _HYBRID_SHARD_ZERO2). In place of "
            "NO_SHARD choose strategy='ddp', which keeps the model whole."
        )
    if name == "FULL_SHARD" and not reshard_after_forward:
        raise ValueError(
            "sharding_strategy='FULL_SHARD' reshards after every forward, and reshard_after_forward=False does not. Omit "
            "one of the two."
        )
    return bool(reshard_after_forward) and name != "SHARD_GRAD_OP"

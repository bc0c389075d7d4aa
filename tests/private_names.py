"""Every name that the package takes from inside its dependencies, where no version promises it, with its purpose.

Look here first when a new version of torch, DeepSpeed, FairScale or torchmetrics comes out: `test_private_names.py`
names what is gone or missing here. Names with an underscore are private. ZeRO's optimizers have public names,
but no documentation.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Use(NamedTuple):
    """Names that one owner has, and why the package needs them."""

    owner: str
    """The module or class, by its full path."""
    names: str
    """Separated by spaces."""
    purpose: str
    instead: str = ""
    """The public name that some promised versions have in its place."""


TABLE = """
torch._C
    _get_privateuse1_backend_name: name the out-of-tree backend that `accelerator=` accepts
torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper
    _checkpoint_wrapped_module: keep what checkpoint_wrapper wraps under its plain names
torch._dynamo.eval_frame.OptimizedModule
    _orig_mod: keep what torch.compile wraps under its plain names
torch.autograd
    _profiler_enabled: leave torch's profiler whole when a recording fails (profilers/pytorch.py)
torch.Tensor
    _version: see that a step wrote to a parameter or a buffer in place
    _is_view: hand out results that are no views of fsdp's buffers (strategies/fsdp2/vendor.py)
    _backward_hooks _post_accumulate_grad_hooks: run a backward that is no step's without the hooks of gradients
        (strategies/ddp/vendor.py)
torch.nn.Module
    _parameters _buffers _modules: replace and walk a module's own tensors without its methods
    _apply: convert a module to one dtype, layer by layer (precision/single_dtype.py)
    _call_impl _compiled_call_impl: compile submodules in place, so that a state_dict keeps its names
        (engine/compilation.py)
torch.nn.modules.module
    _extra_state: store what a module keeps beside tensors (checkpoint/contents.py)
torch.nn.MultiheadAttention
    _reset_parameters: initialize layers that were built on the meta device
torch.nn.modules.batchnorm
    _BatchNorm: keep normalizations in float32 under fsdp (strategies/fsdp2/vendor.py)
torch.nn.parallel.distributed
    _find_tensors: prepare DDP's reducer for a manual backward (strategies/ddp/vendor.py)
torch.nn.parallel.DistributedDataParallel
    _static_graph_delay_allreduce_enqueued: synchronize the first backward of a static graph, which DDP learns from
        (strategies/ddp/vendor.py)
    _ddp_params_and_buffers_to_ignore: keep each rank's own parameters and buffers out of DDP (strategies/ddp/vendor.py)
torch._C._distributed_c10d.Reducer
    _reset_state: train on after a backward that failed and whose error the user has caught (strategies/ddp/vendor.py)
    _rebuild_buckets: prepare DDP's reducer for a manual backward (strategies/ddp/vendor.py)
torch.distributed
    _broadcast_coalesced: send rank 0's buffers in few messages (strategies/ddp/vendor.py)
torch.distributed.distributed_c10d
    _set_pg_timeout: give collectives a timeout of their own (distributed/vendor.py) [torch.distributed.set_timeout]
    _world: count the collectives that a step has made (distributed/vendor.py)
torch.distributed.ProcessGroup
    _get_backend _device_types: count the collectives that a step has made (distributed/vendor.py)
torch._C._distributed_c10d
    _dump_fr_trace_json: name the collective in which a rank waits (distributed/vendor.py) [_dump_nccl_trace_json]
torch._C._distributed_c10d.Backend
    _get_sequence_number_for_group: count the collectives that a step has made (distributed/vendor.py)
torch.distributed.tensor._utils
    compute_local_shape_and_global_offset: find this rank's range of a sharded parameter (strategies/fsdp2/vendor.py)
torch.distributed.fsdp.FSDPModule
    _get_fsdp_state: reach what fsdp keeps of a group's parameters
torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState
    _fsdp_param_group: reach a group's dtypes (strategies/fsdp2/vendor.py)
    _register_pre_backward_hook: gather for the backward of a loss that was made outside of a forward
        (strategies/fsdp2/vendor.py)
torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup
    _init_mp_dtypes: reduce the gradients of a group that was frozen before (strategies/fsdp2/vendor.py)
torch.amp.GradScaler
    _scale: set, read and keep the loss scale (precision/mixed.py)
    _per_optimizer_states: share found infinities between optimizers and ranks (precision/mixed.py)
    _growth_tracker: carry a loss scale from DeepSpeed to others, and back
torch.optim.Adam
    _init_group: know a subclass that steps as torch's own class does
torch.optim.lr_scheduler
    _opt_called: resume a scheduler without torch's warning of its first step
torch.utils._pytree
    tree_leaves tree_map tree_map_only tree_map_with_path MappingKey: walk nested results and states
torch.utils.data.DataLoader
    _iterator _get_iterator: start a loader's workers anew, know them, and know who iterates as torch does
        (data/vendor.py)
torch.autograd.profiler
    _is_profiler_enabled: step as torch does while a profiler records (engine/optimizers.py)
torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    _task_info: name the batches that a worker of a loader has not delivered (faults/vendor.py)
torch.utils.data._utils.worker
    _worker_loop: find the `done_event` by which a loader tells a worker to end (data/vendor.py)
multiprocessing.synchronize.Event
    _flag: see without a lock whether a worker was told to end (data/vendor.py)
torch.utils.tensorboard.SummaryWriter
    _get_file_writer: flush and place the file of events (loggers/tensorboard.py)
torchmetrics.Metric
    _update_count _computed: restore the state of a metric
    _forward_cache: log a metric's value of this batch (trainer/vendor.py)
fairscale.optim.OSS
    _broadcast_params: send this rank's parameters after a load (strategies/oss/vendor.py)
deepspeed.runtime.zero.partition_parameters
    _external_params: leave DeepSpeed's marks out of a whole copy of a module (strategies/whole_module.py)
    ds_id ds_shape ds_numel ds_tensor ds_status ds_process_group: read what stage 3 has sharded
    ds_active_sub_modules ds_persist: shard what a failed forward has left gathered (strategies/zero/vendor.py)
deepspeed.runtime.zero.parameter_offload
    _original_parameters: leave DeepSpeed's marks out of a whole copy of a module (strategies/whole_module.py)
    FWD_MODULE_STACK ds_inflight_param_registry: let DeepSpeed go of a module that is not trained any more
        (strategies/zero/vendor.py)
deepspeed.comm.torch
    build_shm_op: run on the CPU without a compiler (strategies/zero/vendor.py)
deepspeed.runtime.engine.DeepSpeedEngine
    _broadcast_model _configure_basic_optimizer _do_optimizer_sanity_check: make an engine around the user's own
        optimizer (strategies/zero/vendor.py)
    _backward_prologue scale: run a backward through the engine (strategies/zero/vendor.py)
    _backward_post_hook: end a backward that has reached an engine on other ranks alone (strategies/zero/vendor.py)
    _running_engine_step allreduce_gradients enable_backward_allreduce: reduce gradients before the step, to clip them
        (strategies/zero/vendor.py)
deepspeed.runtime.fp16.loss_scaler
    CreateLossScaler: scale losses where the weights stay float32 (strategies/zero/vendor.py)
deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler
    cur_scale cur_iter last_overflow_iter cur_hysteresis scale_factor scale_window: save and restore the loss scale
        (strategies/zero/vendor.py)
deepspeed.runtime.base_optimizer.ZeROOptimizer
    should_refresh_expected_hook_count: refuse a backward that is not the strategy's (strategies/zero/vendor.py)
    _backward_hook_state clear_backward_seen_flag register_grad_acc_post_hook unregister_grad_acc_post_hooks: run a
        backward, and those within it, through the engine (strategies/zero/vendor.py)
deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer
    _use_compact_grad_partition_buffer params_in_partition cpu_offload gradient_accumulation_dtype setup_buckets
        get_all_grad_tensors: step with zeros where no loss reached a parameter (strategies/zero/vendor.py)
    reduce_independent_p_g_buckets_and_remove_grads independent_gradient_partition_epilogue: give gradients to the
        buckets in one order on all ranks (strategies/zero/vendor.py)
    all_grad_tensors averaged_gradients finalize_gradient_accumulation_boundary: clip and drop this rank's share of
        the gradients (strategies/zero/vendor.py)
    bit16_groups single_partition_of_fp32_groups parallel_partitioned_bit16_groups update_lp_params: read and write
        this rank's share of the masters (strategies/zero/vendor.py)
    clip_grad overflow loss_scaler _global_grad_norm: clip in the step, and tell how it went
deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3
    reduce_independent_p_g_buckets_and_remove_grads independent_gradient_partition_epilogue: give gradients to the
        buckets in one order on all ranks (strategies/zero/vendor.py)
    _DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition averaged_gradients offload_optimizer: clip, drop and
        fill in this rank's share of the gradients (strategies/zero/vendor.py)
    fp16_groups fp32_partitioned_groups_flat grad_position get_param_id: read and write this rank's share of the
        masters (strategies/zero/vendor.py)
    _partition_all_parameters _reassign_or_swap_out_partitioned_parameters persistent_parameters: let the weights
        follow masters that a load has written (strategies/zero/vendor.py)
    clip_grad overflow loss_scaler _global_grad_norm: clip in the step, and tell how it went
    _grad_acc_hooks _leaf_module_hooks ipg_buckets: free an engine's buffers with its module (strategies/zero/vendor.py)
deepspeed.utils.mixed_precision_linkage
    _hp_mapping: find this rank's share of a parameter in the masters (strategies/zero/vendor.py)
deepspeed.utils.tensor_fragment.tensor_fragment
    lp_fragment_address hp_fragment_address: find this rank's share of a parameter in the masters
        (strategies/zero/vendor.py)
deepspeed.runtime.zero.partitioned_param_coordinator
    PartitionedParameterCoordinator: let DeepSpeed go of a module that is not trained any more
        (strategies/zero/vendor.py)
transformers.modeling_utils.PreTrainedModel
    _gradient_checkpointing_func: reject reentrant recomputation on several ranks (strategies/ddp/vendor.py)
datasets.IterableDataset
    _ex_iterable: know a stream that is split after a shuffle (data/vendor.py)
_pytest
    __name__: know a script that a test runner runs (launch/command.py)
"""
"""Each owner with its uses, `names: purpose` or `names: purpose [instead]`; a line that is indented more continues one."""


def _read(table: str) -> list[Use]:
    uses, owner = list[Use](), ""
    for line in re.sub(r"\n {8}", " ", table).splitlines():
        if line.startswith("    "):
            names, purpose, instead = re.fullmatch(r" {4}(.*?): (.*?)(?: \[(.*)\])?", line).groups("")  # type: ignore[union-attr]
            uses.append(Use(owner, names, purpose, instead))
        else:
            owner = line
    return uses


USES = _read(TABLE)

"""Names of Lightning and Accelerate that do not exist here, and their replacements; docs/missing_names.md lists them."""

from __future__ import annotations

__all__ = ["instead_of"]

_GROUPS = {
    # Lightning's parts.
    "Fabric": "for your own loop use tw.Accelerator",
    "LightningCLI": "it is trainwright.cli.LightningCLI",
    "instantiate_module": "make the module in the script, from the config that trainwright.cli.stored_config returns",
    "GPUStatsMonitor": "use DeviceStatsMonitor",
    "NeptuneLogger LitLogger": "subclass tw.Logger for this service",
    "XLAProfiler XLAStrategy SingleDeviceXLAStrategy XLAAccelerator XLAPrecision XLACheckpointIO": "TPUs are "
    "not supported",
    "ModelParallelStrategy": "strategy='fsdp' shards a module; tensor parallelism is missing",
    "ParallelStrategy": "subclass tw.Strategy; strategy.capabilities.is_parallel says whether it runs on several processes",
    "accelerators.Accelerator CPUAccelerator CUDAAccelerator MPSAccelerator": "accelerator= of the Trainer "
    "takes names, such as 'gpu', and trainer.accelerator is the device's kind as text",
    "find_usable_cuda_devices": "devices= of the Trainer takes a number, or a list of indices",
    "get_cpu_stats get_nvidia_gpu_stats get_device_stats": "DeviceStatsMonitor logs them",
    "MixedPrecision DoublePrecision HalfPrecision FSDPPrecision DeepSpeedPrecision": "pass a name as "
    "precision= to the Trainer, such as '16-mixed'",
    "BitsandbytesPrecision TransformerEnginePrecision": "quantised and 8-bit training are missing; the Trainer "
    "lists its precisions",
    "SLURMEnvironment TorchElasticEnvironment LightningEnvironment KubeflowEnvironment LSFEnvironment "
    "MPIEnvironment ClusterEnvironment": "leave it out: the job of torchrun, SLURM, MPI or trainwright launch "
    "is detected",
    "AsyncCheckpointIO": "pass ModelCheckpoint(async_save=True) in callbacks=",
    "CheckpointIO TorchCheckpointIO": "checkpoints have one format; on_save_checkpoint adds to them",
    "LayerSync TorchSyncBatchNorm": "pass sync_batchnorm=True to the Trainer",
    # Hooks, states and types.
    "ModelHooks DataHooks CheckpointHooks": "tw.Module and tw.DataModule have the hooks",
    "TrainerState": "trainer.state has fn, stage and status",
    "OptimizerConfig LRSchedulerConfigType": "configure_optimizers returns a plain dict; its type is "
    "OptimizerLRSchedulerConfig",
    "WriteInterval": "write_interval takes 'batch', 'epoch' or 'batch_and_epoch'",
    "Interval": "interval of the Timer takes 'step' or 'epoch'",
    "GradClipAlgorithmType": "gradient_clip_algorithm takes 'norm' or 'value'",
    "LightningEnum": "use enum.StrEnum",
    "PossibleUserWarning": "filter UserWarning",
    "LightningDeprecationWarning": "filter DeprecationWarning",
    "SIGTERMException": "a signal ends fit with tw.RunStopped",
    "AbstractClosure Closure ClosureResult ManualResult OutputResult RestartStage": "the loops are functions here; "
    "trainer.fit_loop has their limits and counters",
    "Tqdm": "TQDMProgressBar makes bars of tqdm.auto",
    "CustomProgress CustomInfiniteTask CustomBarColumn CustomTimeColumn BatchesProcessedColumn "
    "ProcessingSpeedColumn MetricsTextColumn": "override configure_columns of RichProgressBar, with the "
    "columns of rich",
    "ExperimentWriter": "CSVLogger writes metrics.csv itself",
    "RegisterRecordFunction ScheduleWrapper": "PyTorchProfiler takes the arguments of torch.profiler.profile",
    # Functions.
    "pl_worker_init_function": "loader workers are seeded by themselves",
    "garbage_collection_cuda": "tw.release_memory frees unused memory",
    "is_oom_error is_cuda_out_of_memory is_out_of_cpu_memory is_cudnn_snafu": "tw.find_executable_batch_size "
    "tries smaller batches after such an error",
    "recursive_detach": "detach the tensors with torch.utils._pytree.tree_map",
    "convert_zero_checkpoint_to_fp32_state_dict ds_checkpoint_dir": "trainwright checkpoint export writes the "
    "weights of any checkpoint",
    "from_compiled to_uncompiled": "pass compile=True to the Trainer, which compiles it",
    "extract_batch_size": "pass batch_size= to self.log",
    "has_len_all_ranks": "len(loader) raises TypeError without a length",
    "is_overridden": "compare the method of type(module) with that of tw.Module",
    "is_param_in_hook_signature": "use inspect.signature",
    "find_shared_parameters set_shared_parameters": "tied weights stay tied on every device",
    "is_picklable": "call pickle.dumps",
    "clean_namespace collect_init_args get_init_args parse_class_init_keys": "call self.save_hyperparameters()",
    "lightning_getattr lightning_hasattr lightning_setattr": "use getattr, hasattr and setattr",
    "save_hparams_to_yaml load_hparams_from_yaml save_hparams_to_tags_csv load_hparams_from_tags_csv "
    "update_hparams": "loggers write hparams.yaml; read it with yaml.safe_load",
    "measure_flops": "ThroughputMonitor counts them, or torch.utils.flop_counter.FlopCounterMode",
    "suggested_max_num_workers": "divide len(os.sched_getaffinity(0)) by the number of processes",
    "is_shared_filesystem": "a path has to be the same folder for all ranks",
    "disable_possible_user_warnings": "use warnings.filterwarnings",
    "UnrepeatedDistributedSampler UnrepeatedDistributedSamplerWrapper": "leave it out: evaluation repeats no sample",
    "get_torchvision_model": "call torchvision's function",
    "download_model_from_registry find_model_local_ckpt_path": "the registry of models is missing; ckpt_path= "
    "takes a path or an fsspec URL",
    "get_filesystem": "use fsspec.core.url_to_fs",
    # Models of examples.
    "BoringModel BoringDataModule BoringDataModuleNoLen IterableBoringDataModule ManualOptimBoringModel "
    "DemoModel RandomDataset RandomDictDataset RandomIterableDataset RandomIterableDatasetWithLen "
    "LightningLSTM SimpleLSTM SequenceSampler LightningTransformer Transformer WikiText2 MNIST "
    "MNISTDataModule": "write a small Module; docs/testing.md has one",
    "ServableModule ServableModuleValidator": "serving is missing",
    # Accelerate's.
    "DummyOptim": "make the optimizer in the script",
    "DummyScheduler": "make the scheduler in the script",
    "gather_object": "tw.gather takes plain data",
    "broadcast_object_list": "tw.broadcast takes plain data",
    "dispatch_model cpu_offload load_checkpoint_and_dispatch infer_auto_device_map disk_offload": "inference "
    "of models larger than a device is missing",
    "load_checkpoint_in_model": "load the tensors of safetensors.torch.load_file into the model before prepare",
    "prepare_pippy": "inference in a pipeline is missing",
    "send_to_device": "tensors have .to(device), and a prepared loader moves its batches",
    "get_logger": "use logging.getLogger, or tw.rank_zero_info",
    "LoggerType": "log_with takes names, such as 'tensorboard'",
    "GeneralTracker": "subclass tw.Logger, and pass an instance to log_with",
    "TorchDynamoPlugin": "Accelerator(dynamo_backend='inductor'), or model.compile(...) before prepare",
    "DynamoBackend": "dynamo_backend takes torch's names, such as 'inductor'",
    "PrecisionType": "mixed_precision takes 'no', 'fp16' and 'bf16'",
    "RNGType": "rng_types takes names, such as 'torch'",
    "FP8RecipeKwargs": "fp8 is missing",
    "MegatronLMPlugin ParallelismConfig": "tensor parallelism is missing; FullyShardedDataParallelPlugin and "
    "DeepSpeedPlugin shard a model",
    "is_initialized": "leave it out; torch.distributed.is_initialized() says whether there are other processes",
    # Attributes of an Accelerator and its states.
    "fp8_backend fp8_enabled fp8_recipe_handler has_fp8_handler delayed_fp8_autocast": "fp8 is missing",
    "parallelism_config torch_device_mesh tensor_parallel_rank pipeline_parallel_rank context_parallel_rank "
    "data_parallel_rank data_parallel_shard_rank maybe_context_parallel": "tensor parallelism is missing; process_index "
    "is the rank",
    "device_placement dispatch_batches even_batches log_with non_blocking rng_types split_batches dataloader_config "
    "step_scheduler_with_optimizer use_stateful_dataloader deepspeed_plugin autocast_handler ddp_handler init_handler "
    "profile_handler scaler_handler": "keep the value that the script passes to Accelerator",
    "verify_device_map": "device maps are not supported; strategy='fsdp' shards a model",
    "lomo_backward": "LOMO is not supported; strategy='fsdp' with cpu_offload saves memory",
    "multi_device native_amp": "use_distributed and mixed_precision replace it",
    "backend initialized destroy_process_group": "torch.distributed has functions of that purpose",
}
ELSEWHERE = {name: instead for names, instead in _GROUPS.items() for name in names.split()}
"""What to use instead of each name; one that another name here means elsewhere has its module before it."""


def instead_of(name: str, path: str = "") -> str:
    """Return ": " and the advice on a missing name of a path in Lightning, such as "accelerators"; "" without advice."""
    folder = path.partition(".")[0]
    instead = ELSEWHERE.get(f"{folder}.{name}", ELSEWHERE.get(name))
    return "" if instead is None else f": {instead}"

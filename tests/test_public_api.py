"""The public names and their arguments. A change here is a change for every user, so it is made on purpose."""

from __future__ import annotations

import inspect

import pytest

import trainwright as tw

NAMES = """Accelerator AcceleratorState AdvancedProfiler AutocastKwargs CSVLogger CheckpointError CombinedLoader
    DDPCommunicationHookType DDPStrategy DataLoaderConfiguration DataModule DeepSpeedPlugin
    DeepSpeedStrategy DistributedDataParallelKwargs DistributedType Engine FSDPStrategy
    Float8Precision
    FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin GradientState
    InitProcessGroupKwargs LaunchError LengthBucketSampler LightningDataModule LightningModule Logger MLFlowLogger Module
    PackedDataset PadCollate PartialState Precision ProfileKwargs Profiler ProjectConfiguration PyTorchProfiler RunStopped
    ShardedDDPStrategy SimpleProfiler Strategy TensorBoardLogger Trainer TrainwrightError Tuner WandbLogger
    WorkerFailed __version__ broadcast check_packing debug_launcher document_mask estimate_memory extract_model_from_parallel
    find_executable_batch_size gather gather_module init_empty_weights init_on_device isolate_rng load_weights
    notebook_launcher pad_across_processes pad_collate rank_zero_info rank_zero_only rank_zero_warn reduce release_memory
    seed_everything set_seed skip_first_batches synchronize_rng_states"""
TRAINER = """accelerator strategy devices num_nodes precision logger callbacks fast_dev_run max_epochs min_epochs max_steps
    min_steps max_time limit_train_batches limit_val_batches limit_test_batches limit_predict_batches
    overfit_batches val_check_interval check_val_every_n_epoch num_sanity_val_steps log_every_n_steps
    enable_checkpointing enable_progress_bar enable_model_summary enable_report accumulate_grad_batches gradient_clip_val
    gradient_clip_algorithm deterministic benchmark inference_mode use_distributed_sampler profiler detect_syncs
    memory_snapshot detect_anomaly nan_policy
    barebones plugins sync_batchnorm reload_dataloaders_every_n_epochs default_root_dir enable_autolog_hparams
    hang_timeout accumulate_by activation_checkpointing compile fused_optimizers unknown"""
METHODS = {
    tw.Engine: """backward barrier broadcast close find_fault finish_save gather load note_base open prepare_loader
        prepare_module prepare_optimizers rank_zero_first reduce refresh_trainable run save step sync_gradients
        take_seed use verified""",
    tw.Accelerator: """accumulate autocast backward broadcast check_trigger clear clip_grad_norm_
        clip_grad_value_ end_training finish_save free_memory gather gather_for_metrics get_state_dict get_tracker
        init_trackers join_uneven_inputs load load_state local_main_process_first log log_images
        main_process_first no_sync on_last_process on_local_main_process on_local_process on_main_process on_process
        pad_across_processes prepare prepare_data_loader prepare_model prepare_optimizer prepare_scheduler print profile
        reduce register_for_checkpointing register_load_state_pre_hook register_save_state_pre_hook save save_model
        save_state set_trigger skip_first_batches split_between_processes step trigger_sync_in_backward
        unscale_gradients unwrap_model wait_for_everyone""",
    tw.Strategy: """after_run all_gather allocate_optimizer_state backward barrier broadcast broadcast_buffers check
        check_gradients check_module check_optimizer
        clip_gradients close connect describe_optimizer finalize gradient_norm join_job model_pieces note_module
        optimizer_pieces reduce reduce_boolean_decision refresh_trainable refresh_weights release resolve run
        setup_module setup_optimizers skip_step step sync_gradients""",
    tw.Precision: """backward backward_context check convert_batch convert_module forward_context init_context
        load_state_dict release reset restore_module state_dict step step_context track unscale""",
    tw.Trainer: """export fit init_module predict print save_checkpoint stop_soon test trial validate""",
    tw.DataModule: """load_state_dict on_after_batch_transfer on_before_batch_transfer on_exception predict_dataloader
        prepare_data save_hyperparameters setup state_dict teardown test_dataloader train_dataloader transfer_batch_to_device
        val_dataloader""",
    tw.Logger: """after_save_checkpoint begin_fit close finalize flush load_state_dict log_graph log_hyperparams log_images
        log_metrics plot save start state_dict""",
}
LOG = """name value prog_bar logger on_step on_epoch reduce_fx enable_graph sync_dist sync_dist_group add_dataloader_idx
    batch_size metric_attribute rank_zero_only"""


def public_methods(kind: type) -> list[str]:
    own = [each for each in kind.__mro__ if each.__module__.startswith("trainwright")]
    return sorted(
        {name for each in own for name, value in vars(each).items() if inspect.isfunction(value) and name[0] != "_"}
    )


def test_public_names_are_listed() -> None:
    assert sorted(tw.__all__) == sorted([*NAMES.split(), *tw.callbacks.__all__])
    for name in tw.__all__:
        assert getattr(tw, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        tw.Trainr  # type: ignore[attr-defined]


def test_arguments_of_the_trainer_are_listed() -> None:
    parameters = inspect.signature(tw.Trainer).parameters
    assert list(parameters) == TRAINER.split()
    kinds = {each.kind for each in parameters.values() if each.name != "unknown"}  # an alias that names mistakes
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_public_methods_have_their_arguments(kind: type) -> None:
    assert public_methods(kind) == METHODS[kind].split()


def test_arguments_of_log_are_lightnings() -> None:
    assert list(inspect.signature(tw.Module.log).parameters)[1:] == LOG.split()


def test_arguments_of_saves_are_listed() -> None:
    saves = {
        tw.Trainer.save_checkpoint: "filepath weights_only storage_options blocking overwrite trained_only export",
        tw.Accelerator.save_state: "output_dir safe_serialization blocking overwrite trained_only unknown",
        tw.Engine.save: "path step epoch state rank_state weights_only trained_only edit blocking number overwrite directory "
        "parts",
    }
    for method, names in saves.items():
        assert list(inspect.signature(method).parameters)[1:] == names.split()


@pytest.mark.parametrize("name", [name for name in tw.__all__ if name != "__version__"])
def test_everything_public_has_a_docstring(name: str) -> None:
    thing = getattr(tw, name)
    assert thing.__doc__
    for method_name, method in vars(thing).items() if inspect.isclass(thing) else ():
        inherited = any(getattr(getattr(base, method_name, None), "__doc__", None) for base in thing.__mro__)
        if inspect.isfunction(method) and not method_name.startswith("_"):
            assert inherited, f"{name}.{method_name}"

"""The arguments of an Accelerator, right and wrong ones."""

from __future__ import annotations

import copy
import inspect
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import trainwright as tw
from trainwright.raw_loop.loop_settings import LoopSettings

OPEN: dict[str, Any] = {
    "mixed_precision": None, "precision": None, "cpu": True, "accelerator": "auto", "strategy": "auto",
    "deepspeed_plugin": None, "fsdp_plugin": None, "gradient_accumulation_steps": 1,
    "gradient_accumulation_plugin": None, "kwargs_handlers": None, "dynamo_backend": None, "nan_policy": None,
    "accumulate_by": "batches", "activation_checkpointing": False,
}  # fmt: skip


PLUGIN = tw.GradientAccumulationPlugin(3)


def settings(**chosen: Any) -> LoopSettings:
    return LoopSettings(**{**OPEN, **chosen})


def test_plugins_become_strategies() -> None:
    fsdp = settings(
        fsdp_plugin=tw.FullyShardedDataParallelPlugin(
            sharding_strategy="SHARD_GRAD_OP", transformer_cls_names_to_wrap=["Linear"], cpu_offload=True
        )
    ).chosen_strategy
    assert isinstance(fsdp, tw.FSDPStrategy)
    assert (fsdp.options.reshard_after_forward, fsdp.cpu_offload) == (False, True)
    assert fsdp.options.auto_wrap_policy is not None
    policy: Any = fsdp.options.auto_wrap_policy
    assert (policy(nn.Linear(1, 1)), policy(nn.ReLU())) == (True, False)
    plugin = tw.DeepSpeedPlugin(
        zero_stage=3, offload_param_device="cpu", gradient_accumulation_steps=4, gradient_clipping=0.5
    )
    chosen = settings(deepspeed_plugin=plugin)
    assert isinstance(chosen.chosen_strategy, tw.DeepSpeedStrategy)
    assert (chosen.chosen_strategy.name, chosen.accumulation.num_steps, chosen.clip_norm) == (
        "deepspeed_stage_3",
        4,
        0.5,
    )
    options = tw.DistributedDataParallelKwargs(find_unused_parameters=True, comm_hook=SimpleNamespace(value="fp16"))
    ddp = settings(kwargs_handlers=[options]).chosen_strategy
    assert isinstance(ddp, tw.DDPStrategy)
    assert (ddp.find_unused_parameters, ddp.comm_hook) == (True, "fp16")
    assert settings(kwargs_handlers=[options], strategy="fsdp").chosen_strategy == "fsdp"


def test_options_reach_their_parts() -> None:
    chosen = settings(
        mixed_precision="fp16",
        kwargs_handlers=[
            tw.GradScalerKwargs(init_scale=8.0, growth_interval=3),
            tw.InitProcessGroupKwargs(timeout=timedelta(seconds=90)),
            tw.AutocastKwargs(enabled=False),
        ],
        gradient_accumulation_plugin=tw.GradientAccumulationPlugin(3, sync_each_batch=True),
        dynamo_backend="INDUCTOR",
    )
    precision: Any = chosen.chosen_precision
    assert (precision.name, precision.scaler.get_scale()) == ("16-mixed", 8.0)
    assert (chosen.timeout_seconds, chosen.autocast.enabled, chosen.compiler) == (90.0, False, "inductor")
    assert (chosen.accumulation.num_steps, chosen.accumulation.sync_each_batch) == (3, True)
    assert settings(kwargs_handlers=[tw.GradScalerKwargs()]).chosen_precision is None
    assert settings(dynamo_backend="no").compiler is None


@pytest.mark.parametrize(
    ("chosen", "words"),
    [({"gradient_acumulation_steps": 2}, "Did you mean gradient_accumulation_steps="),
        ({"tpu": True}, "TPUs are not supported"), ({"kwargs_handlers": tw.AutocastKwargs()}, "is not a list of options"),
        ({"megatron_lm_plugin": 1}, "Megatron-LM is not supported"), ({"mixed_precision": "fp8"}, "Choose from no, fp16, bf16"),
        ({"fsdp_plugin": object()}, "fsdp_plugin is an object. Expected a FullyShardedDataParallelPlugin"),
        ({"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": PLUGIN}, "Pass one number"),
        ({"strategy": "ddp", "deepspeed_plugin": tw.DeepSpeedPlugin()}, "strategy='ddp' and DeepSpeedPlugin were given"),
        ({"kwargs_handlers": [object()]}, "kwargs_handlers has an object. Expected"),
        ({"kwargs_handlers": [tw.AutocastKwargs()] * 2}, "has two AutocastKwargs"),
        ({"step_scheduler_with_optimizer": "no"}, "step_scheduler_with_optimizer='no' is not accepted. Pass True or False"),
        ({"cpu": "yes"}, "cpu='yes' is not accepted"), ({"mixed_precision": ["fp16"]}, "Choose from no, fp16, bf16"),
        ({"kwargs_handlers": 5}, "kwargs_handlers=5 is not a list"),
        ({"rng_types": "torch"}, "rng_types='torch' is not a list"), ({"rng_types": 5}, "rng_types=5 is not a list"),
        ({"dynamo_backend": "inductr"}, "Did you mean 'inductor'")],
)  # fmt: skip
def test_wrong_arguments_of_an_accelerator_are_rejected(chosen: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words.replace("(", r"\(")):
        tw.Accelerator(**{"cpu": True, **chosen})


@pytest.mark.parametrize(("make", "words"), [
    (lambda: tw.FullyShardedDataParallelPlugin(sharding_strategy="HYBRID_SHARD"), "num_replicas=. shards within groups"),
    (lambda: tw.FullyShardedDataParallelPlugin(use_orig_params=False), "always keep their names"),
    (lambda: tw.DeepSpeedPlugin(offload_param_device="nvme"), "Choose 'none' or 'cpu'"),
    (lambda: tw.GradientAccumulationPlugin(0), "integer of at least 1"),
    (lambda: tw.DistributedDataParallelKwargs(broadcast_buffers=False), "rank 0's buffers"),
    (lambda: tw.InitProcessGroupKwargs(init_method="tcp://"), "launcher's address"),
])  # fmt: skip
def test_wrong_options_are_rejected(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_unknown_options_have_the_nearest_name() -> None:
    with pytest.raises(TypeError, match=r"DeepSpeedPlugin has no argument zero_stag= .* Did you mean zero_stage="):
        tw.DeepSpeedPlugin(zero_stag=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"GradScalerKwargs has no argument init_scal= .* Did you mean init_scale="):
        tw.GradScalerKwargs(init_scal=2.0)  # type: ignore[call-arg]
    assert next(iter(inspect.signature(tw.GradScalerKwargs).parameters)) == "init_scale"
    assert copy.deepcopy(tw.DataLoaderConfiguration(data_seed=3)).data_seed == 3


def test_misspelt_and_positional_arguments_are_rejected() -> None:
    accelerator, model, _, _ = make_loop()
    with pytest.raises(TypeError, match=r"init_trackers has no argument confg= .* Did you mean config="):
        accelerator.init_trackers("run", confg={})  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"set_seed has no argument device_spcific= .* Did you mean device_specific="):
        tw.set_seed(1, device_spcific=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"PartialState has no argument timeout= .* Its arguments are cpu"):
        tw.PartialState(timeout=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"reduce has no argument reducton= .* Did you mean reduction="):
        accelerator.reduce(1, reducton="sum")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes 1 positional argument but 3 were given"):
        tw.Accelerator(True, "bf16")
    with pytest.raises(TypeError, match=r"save_state has no max_shard_size= .*: a checkpoint has one layout"):
        accelerator.save_state("a", max_shard_size="1GB")
    with pytest.raises(ValueError, match="norm_type=1 is not accepted"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)


def test_objects_of_the_wrong_kind_are_rejected() -> None:
    accelerator, model, optimizer, loader = make_loop()
    with pytest.raises(TypeError, match="prepare was given nothing"):
        accelerator.prepare()
    cases: list[tuple[Any, Any, str]] = [
        (accelerator.prepare_model, optimizer, "PreparedOptimizer, which is not a module. It is for prepare_optimizer"),
        (
            accelerator.prepare_optimizer,
            nn.Linear(1, 1),
            "given a Linear, which is not an optimizer. It is for prepare_m",
        ),
        (accelerator.prepare_scheduler, model, "which is not a scheduler. It is for prepare_model"),
        (accelerator.prepare_scheduler, "text", r"given a str, which is not a scheduler\."),
        (accelerator.prepare_scheduler, loader, "It is for prepare_data_loader"),
    ]
    for method, given, match in cases:
        with pytest.raises(TypeError, match=match):
            method(given)
    assert accelerator.engine.modules == [accelerator.unwrap_model(model)]


def test_what_another_accelerator_prepared_is_unwrapped() -> None:
    _, *given = make_loop(mixed_precision="bf16")
    other = tw.Accelerator(cpu=True)
    model, optimizer, loader = other.prepare(*given)
    assert model is given[0].module
    for batch in loader:
        other.backward(model(batch).mean())
        optimizer.step()
    assert other.step_count == 5


def make_loop(**chosen: Any) -> tuple[tw.Accelerator, Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(10, 4), batch_size=2)
    accelerator = tw.Accelerator(cpu=True, **chosen)
    return (accelerator, *accelerator.prepare(model, optimizer, loader))


def test_optimizers_are_fused_unless_told_otherwise() -> None:
    _, _, optimizer, _ = make_loop()
    assert optimizer.param_groups[0]["fused"] is True
    _, _, optimizer, _ = make_loop(fused_optimizers=False)
    assert optimizer.param_groups[0]["fused"] is None


def test_a_window_may_pass_the_end_of_the_loader() -> None:
    plugin = tw.GradientAccumulationPlugin(4, sync_with_dataloader=False)
    accelerator, model, optimizer, loader = make_loop(gradient_accumulation_plugin=plugin)
    ends = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
                ends.append(accelerator.sync_gradients)
    assert ends == [False, False, False, True, False, False, False, True, False, False]
    assert accelerator.step_count == 2


def test_schedulers_are_stepped_with_the_optimizer_or_as_chosen() -> None:
    accelerator, model, optimizer, loader = make_loop(
        gradient_accumulation_steps=2, step_scheduler_with_optimizer=False
    )
    scheduler = accelerator.prepare_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1000))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            scheduler.step()
    assert (accelerator.step_count, scheduler.last_epoch) == (3, 5)


def test_attributes_of_accelerate_that_are_missing_are_named() -> None:
    accelerator = make_loop()[0]
    assert accelerator.scaler is None
    assert isinstance(tw.Accelerator(cpu=True, mixed_precision="fp16").scaler, (torch.amp.GradScaler, type(None)))
    for owner, name, instead in (
        (accelerator, "split_batches", "keep the value that the script passes to Accelerator"),
        (accelerator, "fp8_enabled", "fp8 is missing"),
        (accelerator.state, "deepspeed_plugin", "keep the value"),
        (tw.PartialState(), "backend", "torch.distributed has"),
    ):
        with pytest.raises(AttributeError, match=f"{type(owner).__name__} has no '{name}': {instead}"):
            getattr(owner, name)
    assert not hasattr(accelerator, "deepspeed_engine_wrapped")
    with pytest.raises(ImportError, match=r"'is_initialized'.*leave it out"):
        from trainwright import is_initialized  # noqa: F401


def test_memory_is_freed_and_a_new_model_prepared(tmp_path: Path) -> None:
    accelerator, model, optimizer, loader = make_loop()
    accelerator.register_for_checkpointing(torch.optim.SGD(model.parameters(), 0.1))
    with pytest.warns(UserWarning, match="free_memory drops the registered objects. Register those again") as told:
        model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    assert [each.filename for each in told] == [__file__]
    assert (model, optimizer, loader, accelerator.engine.modules) == (None, None, None, [])
    fresh = nn.Linear(4, 1)
    fresh, optimizer = accelerator.prepare(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1))
    accelerator.backward(fresh(torch.randn(2, 4)).mean())
    optimizer.step()
    assert accelerator.step_count == 1
    accelerator.load_state(accelerator.save_state(tmp_path / "state"))


def test_a_backend_compiles_models_or_is_rejected() -> None:
    accelerator, model, optimizer, loader = make_loop(dynamo_backend="eager")
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
    assert accelerator.unwrap_model(model)._compiled_call_impl is not None
    with pytest.raises(AttributeError, match="Accelerator has no 'verify_device_map': device maps are not supported"):
        accelerator.verify_device_map(model)
    assert accelerator.prepare_model(nn.Linear(2, 2), evaluation_mode=True) is not None


def test_one_process_is_a_job_of_one() -> None:
    state = tw.PartialState(cpu=True)
    assert (state.num_processes, state.is_last_process, state.distributed_type) == (1, True, "NO")
    assert state.distributed_type not in (tw.DistributedType.XLA, tw.DistributedType.MULTI_XPU, tw.DistributedType.TP)
    assert state.on_main_process(lambda: 3)() == 3
    assert state.on_process(process_index=0)(lambda: 4)() == 4
    with pytest.raises(ValueError, match=r"process_index=2 is not accepted. Pass a number from 0 to 0"):
        state.on_process(process_index=2)(lambda: 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.config = {"width": 4}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs)
        return outputs

    def generate(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self(inputs)
        return outputs


def test_a_prepared_model_has_what_the_users_has() -> None:
    model = tw.Accelerator(cpu=True, mixed_precision="bf16").prepare(Net())
    assert model.config == {"width": 4}
    assert model(torch.ones(1, 4)).dtype == torch.float32
    assert model.generate(torch.ones(1, 4)).dtype == torch.bfloat16  # in the precision's context
    model.inner, model.config = nn.Linear(4, 4), {}
    assert (model.module.inner is model.inner, model.module.config) == (True, {})
    model.eval()
    assert not model.module.training
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
        _ = model.nothing


def test_none_stays_none_and_a_class_is_refused() -> None:
    accelerator = tw.Accelerator(cpu=True)
    _, scheduler = accelerator.prepare(nn.Linear(1, 1), None)
    assert scheduler is None
    with pytest.raises(TypeError, match="Expected torch modules"):
        accelerator.prepare(torch.optim.SGD)
    for placement in (True, [True], "ab"):
        with pytest.raises(ValueError, match=r"is no list of 2 items. Pass one per object"):
            accelerator.prepare(nn.Linear(1, 1), None, device_placement=placement)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Each Accelerator has one: accelerator\.gradient_state"):
        tw.GradientState()
    assert (accelerator.state.mixed_precision, accelerator.gradient_state.num_steps) == ("no", 1)

"""DeepSpeed on two ranks and on one: its configuration beside the Trainer's settings, and every stage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed_job
import everyday_job
import pytest
import torch
from deepspeed_job import EVERYDAY_STAGES, STAGES, deepspeed, deepspeed_everyday, run_equal
from everyday_job import assert_everyday, assert_same_weights
from jobs import run_alone, run_job

import trainwright as tw
from trainwright.strategies.base import Optimization
from trainwright.strategies.zero.strategy import DeepSpeedStrategy
from trainwright.strategies.zero.vendor import import_deepspeed, keep_to_current_device
from trainwright.strategies.zero.zero_optimizer import Part

TOLD = "the DeepSpeed config says {}: the config's is used."


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("deepspeed")
    return run_job(deepspeed, 2, folder), folder


@pytest.mark.slow
def test_everyday_calls_match_one_process_under_deepspeed(tmp_path: Path) -> None:
    ranks = run_job(deepspeed_everyday, 2, tmp_path)
    expected = everyday_job.alone(tmp_path / "alone")
    for stage in EVERYDAY_STAGES:
        folder = tmp_path / str(stage)
        assert_everyday([rank[stage] for rank in ranks], expected, folder, tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_deepspeed_settings_and_modules_match_one_process(job: Any, stage: int, tmp_path: Path) -> None:
    """Any torch optimizer, settings by the Trainer and by the config, parameters without dimensions, a scheduler."""
    ranks, folder = job
    expected = run_equal(stage, tmp_path, alone=True)
    for name, (steps, lr) in expected.items():
        for rank in ranks:
            assert rank["equal"][stage][name] == (steps, pytest.approx(lr)), name
        assert_same_weights(folder / f"{name}-{stage}.ckpt", tmp_path / f"{name}-{stage}.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_of_the_config_is_restored(job: Any, stage: int) -> None:
    """The config's scheduler moves once a step, and both go on from a checkpoint."""
    ranks, folder = job
    for rank in ranks:
        found = rank["own"][stage]
        assert (found["steps"], found["half lr"]) == (12, pytest.approx(0.0375))
        assert found["lr"] == pytest.approx(0.1)
    assert_same_weights(folder / f"own-resumed-{stage}.ckpt", folder / f"own-{stage}.ckpt", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_raw_deepspeed_loop_does_not_differ_from_one_process(job: Any, stage: int) -> None:
    for rank in job[0]:
        assert rank["loop"][stage] == pytest.approx(deepspeed_job.one_loop(), rel=1e-5)


@pytest.mark.slow
def test_disagreements_are_told_once(job: Any) -> None:
    told = job[0][0]["told"]
    assert told["all"] == [
        TOLD.format("stage=1, and the strategy stage=2"),
        TOLD.format("gradient_clipping=0.5, and the Trainer gradient_clip_val=1.0"),
        TOLD.format("gradient_accumulation_steps=2, and the Trainer accumulate_grad_batches=4"),
    ]
    assert told["agree"] == told["silent"] == told["none"] == told["mixed"] == []
    assert told["bf16"] == [TOLD.format("bf16-mixed, and the Trainer 16-mixed")]
    assert told["fp16"] == ["DeepSpeed has no float16 on the CPU: bfloat16 is used in its place."]
    assert all(texts == [] for texts in job[0][1]["told"].values())  # rank 0 speaks


@pytest.mark.slow
def test_one_module_is_trained_in_several_precisions(job: Any) -> None:
    for rank in job[0]:
        found = dict(rank["precisions"])
        assert found.pop("dtype") == "torch.float32"
        for name, (loss, used) in found.items():
            assert name.startswith(used)
            assert 0.0 < loss < 20.0


@pytest.mark.slow
def test_deepspeed_on_one_process_matches_no_strategy(tmp_path: Path) -> None:
    """One process trains as without a strategy."""
    script = (
        "from pathlib import Path\n"
        "from contract_job import quiet\n"
        "from deepspeed_job import MAKERS, DeepSpeedStrategy, Moves, Plain, configured_loop, fitted\n"
        "quiet()\n"
        "config = {'gradient_clipping': 0.01, 'gradient_accumulation_steps': 4}\n"
        "for stage in (2, 3):\n"
        "    strategy, path = f'deepspeed_stage_{stage}', Path(f'{stage}.ckpt')\n"
        "    fitted(strategy, Plain(MAKERS['sgd']), 2, path, accumulate_grad_batches=2, gradient_clip_val=0.3)\n"
        "    taken = DeepSpeedStrategy(stage=stage, elementwise=True)\n"
        "    fitted(taken, Moves(), 2, Path(f'{stage}-moves.ckpt'), max_epochs=2)\n"
        "    configured_loop(DeepSpeedStrategy(stage=stage, config=config), Path(f'{stage}-loop.ckpt'))\n"
    )
    run_alone(script, tmp_path)
    module = deepspeed_job.Plain(deepspeed_job.MAKERS["sgd"])
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    deepspeed_job.fitted("single_device", module, 2, tmp_path / "plain.ckpt", **settings)
    deepspeed_job.fitted("single_device", deepspeed_job.Moves(), 2, tmp_path / "plain-moves.ckpt", max_epochs=2)
    deepspeed_job.configured_loop("single_device", tmp_path / "plain-loop.ckpt")
    for stage in (2, 3):
        for kind in ("", "-moves", "-loop"):
            assert_same_weights(tmp_path / f"{stage}{kind}.ckpt", tmp_path / f"plain{kind}.ckpt")


@pytest.mark.parametrize(("options", "kind", "text"), [
    ({"stage": 4}, ValueError, r"stage=4 is not accepted. Choose from 1, 2 and 3"),
    ({"config": {"zero_optimization": {"stage": 0}}}, ValueError, r"stage=0 is not accepted"),
    ({"stage": 2, "offload_parameters": True}, ValueError, r"needs stage 3, which shards them, not stage 2"),
    ({"config": "/nowhere.json"}, ValueError, r"config='/nowhere.json': there is no such file"),
    ({"config": [1]}, TypeError, r"config= is a list. Expected a dict"),
    ({"config": {"fp16": {"enabled": True}, "bf16": {"enabled": True}}}, ValueError, r"enables both fp16 and bf16"),
    ({"config": {"zero_optimization": 2}}, ValueError, r"zero_optimization=2 is not a section. Pass a dict"),
    ({"config": {"fp16": True}}, ValueError, r"fp16=True is not a section. Pass a dict"),
    ({"config": {"gradient_clipping": "much"}}, ValueError, r"gradient_clipping='much' is not a norm"),
    ({"config": {"gradient_accumulation_steps": 0}}, ValueError, r"gradient_accumulation_steps=0 is not accepted"),
])  # fmt: skip
def test_settings_are_checked(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        DeepSpeedStrategy(**options)


def test_a_config_without_valid_json_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{'stage': 2}")
    with pytest.raises(ValueError, match=r"config.json' is not JSON .*. Correct the file"):
        DeepSpeedStrategy(config=tmp_path / "config.json")


NO_FLOAT64 = "precision='64-true': DeepSpeed computes in 32 or 16 bits. Choose these, or 'fsdp'."


@pytest.mark.parametrize("stage", STAGES)
def test_float64_is_rejected(stage: int) -> None:
    with pytest.raises(ValueError, match=NO_FLOAT64):
        tw.Trainer(strategy=f"deepspeed_stage_{stage}", precision="64-true", accelerator="cpu")


def test_batch_sizes_without_accumulation_are_rejected() -> None:
    strategy = DeepSpeedStrategy(config={"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2})
    with pytest.raises(ValueError, match=r"but no accumulation. Set gradient_accumulation_steps"):
        strategy.resolve(Optimization())


def test_missing_deepspeed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs DeepSpeed.*pip install 'trainwright\[deepspeed\]'"):
        DeepSpeedStrategy()


@pytest.mark.parametrize(("stage", "parameter", "text"), [
    (1, torch.zeros(3, dtype=torch.bfloat16), "trains 'whole' in float32 and 'odd' in bfloat16, but DeepSpeed lays"),
    (2, torch.zeros(3, dtype=torch.float64), "'odd' in float64, but DeepSpeed .* its masters are float32"),
    (1, torch.zeros(3, dtype=torch.complex64), "trains 'whole' in float32 and 'odd' in complex64, but DeepSpeed"),
])  # fmt: skip
def test_parameters_that_cannot_be_sharded_are_rejected(stage: int, parameter: torch.Tensor, text: str) -> None:
    from trainwright.strategies.zero.deepspeed_config import refuse_what_cannot_be_sharded

    module = torch.nn.Module()
    module.whole, module.odd = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(parameter)
    with pytest.raises(ValueError, match=text):
        refuse_what_cannot_be_sharded(Part([module]), stage)


def test_parameters_that_are_not_trained_may_be_of_any_dtype() -> None:
    from trainwright.strategies.zero.deepspeed_config import refuse_what_cannot_be_sharded

    module = torch.nn.Linear(2, 2)
    module.odd = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64), requires_grad=False)
    refuse_what_cannot_be_sharded(Part([module]), 2)


@pytest.mark.parametrize(("setting", "name"), [
    ({"offload_optimizer": {"device": "nvme"}}, "offload_optimizer.device='nvme'"),
    ({"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "offload_optimizer.ratio"),
    ({"offload_optimizer": {"device": "cpu", "super_offload": True}}, "offload_optimizer.super_offload"),
    ({"zenflow": {"topk_ratio": 0.1}}, "zenflow"),
])  # fmt: skip
def test_state_that_no_checkpoint_would_find(setting: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"zero_optimization.{name} makes DeepSpeed keep optimizer state where no"):
        DeepSpeedStrategy(config={"zero_optimization": setting})
    if "zenflow" in setting:
        with pytest.raises(ValueError, match="zenflow makes DeepSpeed keep"):
            DeepSpeedStrategy(**setting)


@pytest.mark.parametrize(("options", "size"), [
    ({}, 12),
    ({"reduce_bucket_size": 50}, 50),
    ({"config": {"zero_optimization": {"reduce_bucket_size": 70}}, "reduce_bucket_size": 50}, 70),
    ({"config": {"zero_optimization": {"reduce_bucket_size": "auto"}}}, 12),
])  # fmt: skip
def test_the_bucket_fits_the_model_unless_a_size_is_given(options: dict[str, Any], size: int) -> None:
    from trainwright.strategies.zero.deepspeed_config import build_config

    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 5))
    net[1].requires_grad_(False)
    strategy = DeepSpeedStrategy(stage=1, **options)
    config = build_config(
        strategy.own_config,
        1,
        precision=strategy.precision,
        offload_optimizer=False,
        offload_parameters=False,
        parameters=net.parameters(),
        **strategy.zero,
    )
    assert config["zero_optimization"]["reduce_bucket_size"] == size


class Numbered:
    """Stands for DeepSpeed's class of a kind of device, which names its devices by number."""

    def device_name(self, index: int | None = None) -> str:
        return "odd" if index is None else f"odd:{index}"

    def current_device_name(self) -> str:
        return "odd:3"


def test_the_local_rank_is_no_devices_number() -> None:
    """DeepSpeed passes the text of LOCAL_RANK, or the number of a device."""
    numbered = Numbered()
    for _ in range(2):
        keep_to_current_device(numbered)
    names = [numbered.device_name("0"), numbered.device_name(0), numbered.device_name()]  # type: ignore[arg-type]
    assert names == ["odd:3", "odd:0", "odd"]


def test_a_device_that_deepspeed_does_not_know() -> None:
    import_deepspeed(torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"strategy='deepspeed' on 'meta': DeepSpeed does not support it.* Choose 'fsdp'"
    ):
        import_deepspeed(torch.device("meta"))


def test_what_deepspeed_reads_of_the_environment_is_not_left_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later run of the process, on a GPU, would compute on the CPU."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    import_deepspeed(torch.device("cpu"))
    assert "DS_ACCELERATOR" not in os.environ


def test_overlap_below_stage_2_is_rejected() -> None:
    with pytest.raises(ValueError, match="overlap_comm=True needs stage 2 or 3"):
        DeepSpeedStrategy(stage=1, overlap_comm=True)
    with pytest.raises(ValueError, match="overlap_comm=True needs stage 2 or 3"):
        DeepSpeedStrategy(config={"zero_optimization": {"stage": 1, "overlap_comm": True}})
    assert DeepSpeedStrategy(stage=1, overlap_comm=False).zero == {"overlap_comm": False}

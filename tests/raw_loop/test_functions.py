"""The functions and small classes of the raw loop, on one process."""

from __future__ import annotations

import gc
import json
import random
import weakref
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from small import be_rank, make_data, make_loader, make_net
from torch import nn
from torch.nn.parallel import DataParallel

import trainwright as tw


def alone(**settings: Any) -> tw.Accelerator:
    return tw.Accelerator(cpu=True, devices=1, **settings)


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Acelerator'\. Did you mean 'Accelerator'\?"):
        tw.Acelerator  # type: ignore[attr-defined]


def drawn() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_set_seed_is_seed_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    tw.set_seed(3)
    ours = drawn()
    tw.seed_everything(3)
    assert drawn() == ours
    be_rank(monkeypatch, 1)
    tw.set_seed(3)
    assert drawn() == ours
    tw.set_seed(2, device_specific=True)
    assert drawn() == ours
    with pytest.raises(TypeError, match="seed='3' is a str"):
        tw.set_seed("3", device_specific=True)  # type: ignore[arg-type]


def test_set_seed_makes_algorithms_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    before = torch.backends.cudnn.benchmark
    try:
        tw.set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = before


def test_a_smaller_batch_is_tried_until_it_fits() -> None:
    tried: list[int] = []
    kept: list[weakref.ref[torch.Tensor]] = []

    @tw.find_executable_batch_size(starting_batch_size=20)
    def train(batch_size: int, name: str, *, factor: int = 1) -> str:
        gc.collect()
        assert all(each() is None for each in kept), "a failed try is freed before the next one"
        held = torch.empty(batch_size)
        cycle = [held]
        cycle.append(cycle)  # type: ignore[arg-type]
        kept.append(weakref.ref(held))
        tried.append(batch_size)
        if batch_size * factor > 16:
            torch.empty(2**60, dtype=torch.uint8)  # more than any host has
        return name

    assert train.__name__ == "train"
    assert train("a") == "a"
    assert tried == [20, 18, 16]
    kept.clear()
    assert train("b", factor=2) == "b"
    assert tried[3:] == [16, 14, 12, 10, 9, 8], "the size that fitted is kept for the next call"


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear"),
    RuntimeError("MPS backend out of memory (MPS allocated: 1 MB)"),
    MemoryError(),
])  # fmt: skip
def test_errors_of_memory_are_recognized(error: Exception) -> None:
    def train(batch_size: int) -> int:
        if batch_size > 4:
            raise error
        return batch_size

    halved = iter((16, 8, 4))
    assert tw.find_executable_batch_size(train, 32, lambda: next(halved))() == 4


def test_other_errors_are_raised_at_once() -> None:
    tried: list[int] = []

    @tw.find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        train()
    assert tried == [8]


def test_no_batch_size_fits() -> None:
    @tw.find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> None:
        raise MemoryError("no room")

    with pytest.raises(RuntimeError, match=r"train ran out of memory with a batch size of 1, the smallest \(no room\)"):
        train()


def test_wrong_uses_of_the_search() -> None:
    with pytest.raises(ValueError, match="starting_batch_size 0 is not accepted"):
        tw.find_executable_batch_size(print, starting_batch_size=0)

    def train(batch_size: int) -> int:
        if batch_size > 8:
            raise MemoryError
        return batch_size

    with pytest.raises(TypeError, match=r"train was called with arguments .*too many positional arguments.*itself"):
        tw.find_executable_batch_size(train)(32)
    with pytest.raises(ValueError, match=r"reduce_batch_size_fn returned, 4\.5 is not accepted"):
        tw.find_executable_batch_size(train, 9, lambda: 4.5)()  # type: ignore[arg-type,return-value]


def test_release_memory_frees_its_arguments() -> None:
    tensor: Any = torch.ones(3)
    reference = weakref.ref(tensor)
    tensor, other = tw.release_memory(tensor, [])
    assert (tensor, other, reference()) == (None, None, None)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_parameter("absent", None)
        self.register_buffer("table", torch.arange(3))


def test_empty_parameters_get_their_values_in_prepare() -> None:
    with tw.init_empty_weights():
        model = Tied()
        lazy = nn.LazyLinear(3)
    assert all(each.is_meta for each in model.parameters())
    assert model.head.weight is model.embedding.weight
    assert not model.frozen.requires_grad
    assert model.table.tolist() == [0, 1, 2]
    assert lazy(torch.ones(1, 2)).shape == (1, 3)
    with tw.init_empty_weights(include_buffers=True):
        model = Tied()
    assert all(each.is_meta for each in (*model.parameters(), *model.buffers()))
    assert not nn.Linear(2, 2).weight.is_meta, "outside the block models are made as ever"
    with pytest.raises(ValueError, match="inside"), tw.init_empty_weights():
        raise ValueError("inside")
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_prepared_model_gets_the_values_of_a_plain_start() -> None:
    torch.manual_seed(4)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    for include_buffers in (False, True):
        with tw.init_empty_weights(include_buffers):
            empty = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        torch.manual_seed(4)
        prepared = alone().prepare(empty)
        for name, value in plain.state_dict().items():
            assert torch.equal(prepared.state_dict()[name], value), name


def test_models_are_made_on_a_device() -> None:
    with tw.init_on_device("cpu"):
        model = Tied()
    assert model.head.weight is model.embedding.weight
    with tw.init_on_device(torch.device("meta")):
        assert nn.Linear(1, 1).weight.is_meta


def test_models_are_extracted_from_their_wrappers() -> None:
    net = make_net()
    prepared = alone(mixed_precision="bf16").prepare(net)
    assert prepared is not net
    assert tw.extract_model_from_parallel(prepared) is net
    assert tw.extract_model_from_parallel(net) is net
    assert tw.extract_model_from_parallel(DataParallel(net), keep_fp32_wrapper=False) is net
    compiled = torch.compile(net, backend="eager")
    assert tw.extract_model_from_parallel(compiled) is compiled
    assert tw.extract_model_from_parallel(compiled, keep_torch_compile=False) is net
    assert tw.extract_model_from_parallel(torch.compile(prepared, backend="eager")) is net
    outer = nn.Sequential(nn.Identity(), prepared)
    assert tw.extract_model_from_parallel(outer, recursive=True)[1] is net


@pytest.mark.parametrize(("mixed_precision", "options", "dtype"), [
    ("bf16", tw.AutocastKwargs(cache_enabled=False), torch.bfloat16),
    ("fp16", tw.AutocastKwargs(cache_enabled=False), torch.float16),
    ("bf16", tw.AutocastKwargs(enabled=False), torch.float32),
    ("bf16", None, torch.bfloat16),
    ("no", tw.AutocastKwargs(cache_enabled=False), torch.float32),
])  # fmt: skip
def test_autocast_keeps_the_precision(
    mixed_precision: str, options: tw.AutocastKwargs | None, dtype: torch.dtype
) -> None:
    accelerator = alone(mixed_precision=mixed_precision)
    with accelerator.autocast(options):
        assert nn.Linear(4, 4)(torch.ones(2, 4)).dtype == dtype


def test_the_states_are_views() -> None:
    accelerator = alone(mixed_precision="bf16", gradient_accumulation_steps=2)
    state = tw.AcceleratorState(accelerator)
    assert (state.num_processes, state.is_main_process, state.mixed_precision) == (1, True, "bf16")
    assert state.device == accelerator.device
    assert "mixed_precision=bf16" in repr(state)
    assert accelerator.state.mixed_precision == "bf16"
    assert tw.AcceleratorState().process_index == 0
    gradients = accelerator.gradient_state
    assert (gradients.in_dataloader, gradients.end_of_dataloader, gradients.remainder) == (False, False, -1)
    net, loader = accelerator.prepare(make_net(), make_loader(samples=10))
    ends = []
    for _ in loader:
        with accelerator.accumulate(net):
            assert gradients.active_dataloader is loader
            ends.append((gradients.sync_gradients, gradients.end_of_dataloader, gradients.remainder))
    assert ends == [(False, False, 0), (True, False, 0), (True, True, 0)]
    assert gradients.num_steps == 2
    assert "num_steps=2" in repr(gradients)


def precision_of() -> str:
    return str(tw.Accelerator(devices="auto").engine.precision.name)


def test_a_launched_function_runs_in_this_process() -> None:
    assert tw.notebook_launcher(precision_of, num_processes=1, mixed_precision="bf16") == "bf16-mixed"
    assert tw.notebook_launcher(precision_of, num_processes=1, use_port="29501", monitor_interval=0.1) == "32-true"
    assert tw.debug_launcher(pow, (2, 5), num_processes=1) == 32


def test_what_the_launchers_refuse() -> None:
    refusals: list[tuple[type[Exception], dict[str, Any], str]] = [
        (ValueError, {"mixed_precision": "fp8"}, "mixed_precision='fp8' is unknown. Choose from no, fp16, bf16"),
        (ValueError, {"max_restarts": 2}, "only a script can be restarted"),
        (ValueError, {"rdzv_backend": "c10d"}, "start a script on several nodes with trainwright launch"),
        (ValueError, {"num_nodes": 2}, "start a script on several nodes with trainwright launch"),
        (TypeError, {"args": 1}, r"given args=1. Expected a tuple of arguments, such as args=\(1,\)"),
        (TypeError, {"args": "abc"}, "given args='abc'. Expected a tuple"),
        (TypeError, {"num_proceses": 1}, r"no argument num_proceses= .*Did you mean num_processes="),
        (TypeError, {"mixed_precison": "fp16"}, r"no argument mixed_precison= .*Did you mean mixed_precision="),
    ]
    for kind, arguments, text in refusals:
        with pytest.raises(kind, match=text):
            tw.notebook_launcher(print, **arguments)
    with pytest.raises(TypeError, match=r"debug_launcher was given an int"):
        tw.debug_launcher(3)  # type: ignore[arg-type]


def test_a_profile_is_written(tmp_path: Path) -> None:
    seen: list[int] = []
    options = tw.ProfileKwargs(
        activities=["cpu"],
        schedule_option={"skip_first": 1, "warmup": 1, "active": 2, "repeat": 2},
        on_trace_ready=lambda recorder: seen.append(recorder.step_num),
        record_shapes=True,
        output_trace_dir=str(tmp_path / "traces"),
    )
    accelerator = alone(kwargs_handlers=[options])
    net = make_net()
    with accelerator.profile() as recorder:
        for inputs, _ in make_loader(samples=32):
            net(inputs)
            recorder.step()
    assert seen == [4, 7]
    names = ["profile-0-2.json", "profile-0.json"]
    assert sorted(each.name for each in (tmp_path / "traces").iterdir()) == names
    for name in names:
        events = json.loads((tmp_path / "traces" / name).read_text())["traceEvents"]
        assert any(each.get("name") == "aten::linear" for each in events)
    with accelerator.profile(tw.ProfileKwargs(activities=["cpu"])) as recorder:
        net(make_data(4).tensors[0])
    assert any(each.key == "aten::linear" for each in recorder.key_averages())


def test_wrong_options_of_a_profile_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"the activity 'cup'. Choose from cpu, .* Did you mean 'cpu'"):
        tw.ProfileKwargs(activities=["cup"])
    with pytest.raises(ValueError, match=r"phase of schedule_option 'warm_up'.* Did you mean 'warmup'"):
        tw.ProfileKwargs(schedule_option={"warm_up": 1})

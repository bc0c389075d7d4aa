"""Weights come out of every file that may hold them, and nothing else comes out of a pickle."""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import pathlib
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import omegaconf
import pytest
import safetensors.torch
import torch
from torch import nn

import trainwright as tw
from trainwright.checkpoint.contents import collect
from trainwright.checkpoint.foreign_formats import is_plain, read_weights
from trainwright.checkpoint.store import write_checkpoint
from trainwright.checkpoint.tensors import Piece
from trainwright.errors import CheckpointError
from trainwright.tools.checkpoints import checkpoint_command

FIXTURES = Path(__file__).parent / "fixtures"
HYPER_PARAMETERS = {"width": 3, "lr": 0.1, "layers": (3, 4), "config": {"a": 1}}


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A local folder and one in memory."""
    yield str(tmp_path) if request.param == "local" else "memory://exchange"
    if request.param == "memory":
        fsspec.filesystem("memory").rm("/", recursive=True)


def put(path: str, data: bytes) -> str:
    with fsspec.open(path, "wb", auto_mkdir=True) as file:
        file.write(data)
    return path


def saved(path: str, value: Any) -> str:
    with fsspec.open(path, "wb") as file:
        torch.save(value, file)
    return path


def test_a_real_lightning_checkpoint_is_read(folder: str) -> None:
    """The file was written by Lightning 2.6.6: a module, a datamodule, SGD, EarlyStopping and ModelCheckpoint."""
    weights = read_weights(put(f"{folder}/a.ckpt", (FIXTURES / "lightning.ckpt").read_bytes()))
    assert weights.kind == "lightning"
    assert (weights.hyper_parameters, weights.hparams_name) == (HYPER_PARAMETERS, "kwargs")
    assert (weights.datamodule_hyper_parameters, weights.datamodule_hparams_name) == ({"batch_size": 4}, "kwargs")
    assert (weights.epoch, weights.global_step) == (0, 2)
    assert {"callbacks", "loops", "optimizer_states", "lr_schedulers"} < weights.contents.keys()
    net = nn.ModuleDict({"net": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))}).eval()
    net.load_state_dict(weights.state_dict)
    expected = [[-0.3543643, 0.3761690], [-0.4927646, 0.8146941]]  # the output of Lightning's module
    torch.testing.assert_close(net["net"](torch.arange(8.0).reshape(2, 4)), torch.tensor(expected))


def test_our_own_checkpoint_whoever_wrote_which_part(folder: str, seats: Any) -> None:
    matrix, ends = torch.arange(12.0).reshape(4, 3), seats(2)

    def write(rank: int) -> None:
        half = matrix.flatten()[6 * rank : 6 * rank + 6]
        sections = {"model": [Piece("_orig_mod.layer.w", (4, 3), 6 * rank, half, rank)], "optimizer": []}
        state = {
            "extra": {"0": {"layer._extra_state": {"seen": 3}}},
            "hyper_parameters": {"lr": 0.1},
            "hparams_name": "kwargs",
            "datamodule_hyper_parameters": {"n": (1,)},
        }
        header = {"step": 7, "epoch": 2, "strategy": "ddp"}
        write_checkpoint(f"{folder}/a.ckpt", lambda: collect(sections, state, {}, rank, 2), header, ends[rank])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, range(2)))
    weights = read_weights(f"{folder}/a.ckpt")
    assert list(weights.state_dict) == ["layer.w", "layer._extra_state"]
    assert weights.state_dict["layer._extra_state"] == {"seen": 3}
    assert (weights.contents["epoch"], weights.contents["hyper_parameters"]) == (2, {"lr": 0.1})
    assert torch.equal(weights.state_dict["layer.w"], matrix)
    assert (weights.kind, weights.epoch, weights.global_step) == ("trainwright", 2, 7)
    assert (weights.hyper_parameters, weights.hparams_name) == ({"lr": 0.1}, "kwargs")
    assert weights.datamodule_hyper_parameters == {"n": (1,)}


def test_state_dicts_and_safetensors_are_read(folder: str) -> None:
    net = torch.compile(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), backend="eager")
    weights = read_weights(saved(f"{folder}/a.pt", net.state_dict()))
    assert weights.kind == "state_dict"
    assert next(iter(weights.state_dict)) == "0.weight"
    nested = read_weights(saved(f"{folder}/b.pt", {"state_dict": {"w": torch.ones(2)}, "epoch": 3}))
    assert (list(nested.state_dict), nested.epoch, nested.hyper_parameters) == (["w"], 3, {})
    data = safetensors.torch.save({"_orig_mod.w": torch.ones(2, dtype=torch.bfloat16)})
    tensors = read_weights(put(f"{folder}/c.safetensors", data))
    assert tensors.kind == "safetensors"
    assert tensors.state_dict["w"].dtype == torch.bfloat16


class Planted:
    """What a hostile file would run."""

    def __reduce__(self) -> Any:
        return os.system, ("touch planted",)


@pytest.mark.parametrize(("found", "message"), [
    (lambda path: saved(path, {"state_dict": {}, "hyper_parameters": {"x": Planted()}}),
     r"contains \w+\.system, but only"),
    (lambda path: saved(path, nn.Linear(1, 1)),
     r"contains torch\.nn\.modules\.linear\.Linear, .*model\.state_dict\(\)"),
    (lambda path: saved(path, {"w": torch.ones(1), "x": argparse.Namespace()}),
     r"contains argparse\.Namespace, .*ignore="),
    (lambda path: saved(path, {"state_dict": {"w": torch.ones(1), "x": [argparse.Namespace()]}}),
     r"contains argparse\.Namespace as 'x' of its state_dict, which can only be a tensor"),
    (lambda path: saved(path, {"state_dict": {"a._extra_state": {"x": nn.Linear}}}),
     r"contains torch\.nn\.modules\.linear\.Linear as 'a\._extra_state' of its state_dict"),
    (lambda path: saved(path, {"model": {"w": torch.ones(1)}, "epoch": 1}),
     "a dict with 'model', 'epoch', and 'model'"),
    (lambda path: saved(path, torch.ones(1)), "contains a Tensor, not a dict"),
    (lambda path: saved(path, {"state_dict": {"w": 1}}), "'w' is not a tensor"),
    (lambda path: put(path, (FIXTURES / "lightning.ckpt").read_bytes()[:5000]), "damaged or cut short"),
    (lambda path: put(path, b"PK\x03\x04aaa"), "damaged or cut short"),
    (lambda path: put(path, b"\x50" + bytes(7) + b"{aaaa"), "safetensors file and cannot be read"),
    (lambda path: put(path, b"lr: 0.1"), r"begins with b'lr: 0\.1'; expected a directory that trainwright wrote"),
    (lambda path: put(f"{path}/latest", b"global_step1").rpartition("/")[0], "sharded checkpoint of DeepSpeed"),
    (lambda path: put(f"{path}/zero_to_fp32.py", b"").rpartition("/")[0],
     r"sharded checkpoint of DeepSpeed; .* Convert it first: python (\S+)/zero_to_fp32\.py \1 weights --safe_serial"),
    (lambda path: put(f"{path}/mp_rank_00_model_states.pt", b"").rpartition("/")[0],
     r"Convert it first: python (\S+)/\.\./zero_to_fp32\.py \1/\.\. weights --safe_serialization$"),
    (lambda path: put(f"{path}/.metadata", b"").rpartition("/")[0],
     r"of torch\.distributed\.checkpoint; .* python -m \1\.format_utils dcp_to_torch \S+ weights\.pt$"
     .replace(r"\1", r"torch\.distributed\.checkpoint")),
    (lambda path: put(f"{path}/a.txt", b"").rpartition("/")[0], r"directory without a manifest\.json"),
    (lambda path: path, "does not exist; expected"),
])  # fmt: skip
def test_everything_else_is_refused_by_name(found: Any, message: str, folder: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_weights(found(f"{folder}/a"))
    assert not (tmp_path / "planted").exists()


class Marking:
    """It leaves a mark when it is made, called, or given a state."""

    def __init__(self, *_: Any) -> None:
        self.value = 1

    def __setstate__(self, state: Any) -> None:
        Path("mark").touch()


def leave_a_mark(*_: Any) -> None:
    Path("mark").touch()


class Reduced:
    """It is unpickled by a call of a function."""

    def __reduce__(self) -> Any:
        return leave_a_mark, (1,), {"state": 2}


OBJECTS: dict[str, Any] = {
    "functools.partial": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "argparse.Namespace": argparse.Namespace(a=1, b=[nn.Linear(1, 1)]),
    "torch.nn.modules.linear.Linear": nn.Linear(2, 1),
    "torch.optim.adamw.AdamW": torch.optim.AdamW,
    "torch.nn.functional.relu": [nn.functional.relu],
    "pathlib.PurePosixPath": {"nested": (1, {2: pathlib.PurePosixPath("a/b")})},
    f"{__name__}.Marking": Marking(),
    f"{__name__}.leave_a_mark": Reduced(),
}
PLAIN = {"lr": 0.1, "layers": (3, 4), "config": {"a": [1, None]}, "counts": defaultdict(list, a=[1])}


def test_hyper_parameters_that_are_objects_are_skipped(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    objects = {str(number): value for number, value in enumerate(OBJECTS.values())}
    path = saved(f"{folder}/a.ckpt", {
        "epoch": 3, "global_step": 7, "state_dict": {"w": torch.ones(2)}, "hparams_name": "kwargs", "loops": {"a": 1},
        "hyper_parameters": {**PLAIN, **objects}, "callbacks": {"Saving": {"dirpath": Path("a"), "best": 1}},
        "datamodule_hyper_parameters": {"batch_size": 4, "transform": nn.ReLU()},
    })  # fmt: skip
    weights = read_weights(path)
    assert (weights.kind, weights.epoch, weights.global_step) == ("lightning", 3, 7)
    assert torch.equal(weights.state_dict["w"], torch.ones(2))
    assert weights.hyper_parameters == PLAIN
    kinds = [form["kind"] for form in weights.hyper_parameter_forms.values()]
    assert kinds == list(OBJECTS)
    assert weights.datamodule_hyper_parameters == {"batch_size": 4}
    assert weights.contents["loops"] == {"a": 1}
    assert weights.contents["hyper_parameters"] == PLAIN
    assert "callbacks" not in weights.contents
    if not folder.startswith("memory"):
        assert checkpoint_command(["import", path, "b.ckpt"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "  hyper-parameter 0 skipped: a functools.partial" in lines
        assert len(lines) == 1 + len(OBJECTS) + len(["transform"])
        assert read_weights("b.ckpt").hyper_parameter_forms == weights.hyper_parameter_forms
    assert not Path("mark").exists()


class Configured(tw.Module):
    def __init__(self, width: int, act: Any = None) -> None:
        super().__init__()
        self.net = nn.Linear(width, 1)
        self.act = act


def test_a_module_needs_the_arguments_that_an_import_skipped(tmp_path: Path) -> None:
    content = {"state_dict": {"net.weight": torch.ones(1, 2), "net.bias": torch.ones(1)}, "hparams_name": "kwargs"}
    path = saved(f"{tmp_path}/a.ckpt", {**content, "hyper_parameters": {"width": 2, "act": nn.ReLU()}})
    with pytest.raises(TypeError, match=r"argument 'act' that is not in the checkpoint, since a torch\.nn\.modules"):
        Configured.load_from_checkpoint(path)
    assert torch.equal(Configured.load_from_checkpoint(path, act=None).net.weight, torch.ones(1, 2))
    # The hyper-parameters are the content of one object, such as OmegaConf's.
    path = saved(f"{tmp_path}/b.ckpt", {**content, "hparams_name": "act", "hyper_parameters": argparse.Namespace(a=1)})
    with pytest.raises(TypeError, match=r"argument 'act' that is not in the checkpoint, since a argparse\.Namespace"):
        Configured.load_from_checkpoint(path)
    assert Configured.load_from_checkpoint(path, width=2, act=None).net.in_features == 2
    weights = read_weights(FIXTURES / "lightning_namespace.ckpt")
    assert (weights.kind, len(weights.hyper_parameter_forms)) == ("lightning", 1)


def nested_lists(levels: int) -> list[Any]:
    """Return lists of two equal lists, with 2 ** levels items in all."""
    return [] if not levels else [nested_lists(levels - 1)] * 2


def configuration(**values: Any) -> omegaconf.DictConfig:
    """A configuration whose resolver has cached a result, so that its defaultdict has an item."""
    config = omegaconf.OmegaConf.create({"width": 2, "act": None, "twice": "${two:}", "more": [{"lr": 0.1}], **values})
    assert config.twice == 2
    return config


def test_omegaconf_containers_of_a_lightning_file_are_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, request: pytest.FixtureRequest
) -> None:
    omegaconf.OmegaConf.register_new_resolver("two", lambda: 2, use_cache=True)
    request.addfinalizer(lambda: omegaconf.OmegaConf.clear_resolver("two"))
    content = {"state_dict": {"net.weight": torch.ones(1, 2), "net.bias": torch.ones(1)}}
    config, values = configuration(model={"width": "${width}"}), {"twice": "${two:}", "more": [{"lr": 0.1}]}
    # One argument is the configuration, and another a part of it, whose interpolation needs the rest.
    parts = {
        "width": 2,
        "act": config,
        "part": config.model,
        "list": config.more,
        "path": configuration(path=Path("a")),
    }
    vars(bomb := configuration())["_content"] = {"lists": nested_lists(40)}
    path = saved(
        f"{tmp_path}/a.ckpt", {**content, "hparams_name": "kwargs", "hyper_parameters": {**parts, "bomb": bomb}}
    )
    monkeypatch.setattr(omegaconf.DictConfig, "__setstate__", lambda *_: pytest.fail("the file's objects are made"))
    weights = read_weights(path)
    kinds = {name: form["form"] for name, form in weights.hyper_parameter_forms.items()}
    assert kinds == {
        "act": "omegaconf",
        "part": "left_out",
        "list": "omegaconf",
        "path": "left_out",
        "bomb": "left_out",
    }
    assert Configured.load_from_checkpoint(path).act == config
    assert checkpoint_command(["import", path, f"{tmp_path}/parts.ckpt"]) == 0
    assert " 3 hyper-parameters;" in capsys.readouterr().out
    assert checkpoint_command(["show", f"{tmp_path}/parts.ckpt"]) == 0
    assert 'list: [{"lr": 0.1}]' in capsys.readouterr().out
    # Values of arguments would lose the rest of the configuration, which their interpolations need.
    path = saved(f"{tmp_path}/d.ckpt", {**content, "hyper_parameters": config})
    weights = read_weights(path)
    assert weights.hyper_parameters == {"width": 2, "act": None, "more": [{"lr": 0.1}]}
    assert weights.hyper_parameter_forms["twice"] == {"form": "left_out", "kind": "value with interpolations"}
    # The hyper-parameters are the content of the configuration.
    path = saved(f"{tmp_path}/b.ckpt", {**content, "hparams_name": "config", "hyper_parameters": configuration()})
    assert read_weights(path).hyper_parameters == {"width": 2, "act": None, **values}
    loaded = ConfiguredByOne.load_from_checkpoint(path)
    assert (loaded.config, type(loaded.config)) == (configuration(), omegaconf.DictConfig)
    assert checkpoint_command(["import", path, f"{tmp_path}/c.ckpt"]) == 0
    assert "skipped" not in capsys.readouterr().out
    assert ConfiguredByOne.load_from_checkpoint(f"{tmp_path}/c.ckpt").config == configuration()


class ConfiguredByOne(Configured):
    def __init__(self, config: omegaconf.DictConfig) -> None:
        super().__init__(config.width)
        self.config = config


def test_load_weights_returns_the_tensors_of_every_format(folder: str) -> None:
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}
    whole, names = safetensors.torch.save(tensors), {name: f"{name}.safetensors" for name in tensors}
    put(f"{folder}/hf/model.safetensors", whole)
    for name, file in names.items():
        put(f"{folder}/split/{file}", safetensors.torch.save({name: tensors[name]}))
    put(f"{folder}/split/model.safetensors.index.json", json.dumps({"weight_map": names}).encode())
    places = [
        saved(f"{folder}/a.pt", {**tensors, "net._extra_state": {"seen": 3}}),
        saved(f"{folder}/a.ckpt", {"state_dict": tensors, "epoch": 1}),
        put(f"{folder}/a.safetensors", whole),
        f"{folder}/hf",
        f"{folder}/split/model.safetensors.index.json",
        f"{folder}/split",
    ]
    for place in places:
        loaded = tw.load_weights(place)
        assert loaded.keys() == tensors.keys(), place
        assert all(torch.equal(loaded[name], tensors[name]) for name in tensors), place
    with pytest.raises(CheckpointError, match="does not exist; expected"):
        tw.load_weights(f"{folder}/none")


@pytest.mark.filterwarnings("ignore")  # of TorchScript's end, and of an archive of it
def test_a_torchscript_archive_is_rejected(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.trace(nn.Linear(1, 1), torch.ones(1)), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="only tensors and plain data are read from a pickle"):
        read_weights(tmp_path / "a.pt")


def test_only_plain_data_is_recognized_as_plain() -> None:
    loop: list[Any] = []
    loop.append(loop)
    plain = [None, 1, "a", (1, {2: {3}}), pathlib.Path("a"), torch.float16, datetime.timedelta(1), torch.ones(1000)]
    others = [
        nn.Linear(1, 1), len, loop, torch.ones(1001), [torch.ones(2, device="meta")], object(), {"a": {1: object()}},
    ]  # fmt: skip
    assert [is_plain(value) for value in plain] == [True] * len(plain)
    assert [is_plain(value) for value in others] == [False] * len(others)
    assert is_plain(torch.ones(1001), largest_tensor=2000)

"""Weights come out of every file that may hold them, and nothing else comes out of a pickle."""

from __future__ import annotations

import datetime
import os
import pathlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch
from torch import nn

from trainwright.checkpoint.foreign_formats import is_plain, read_weights
from trainwright.checkpoint.store import write_checkpoint
from trainwright.checkpoint.tensors import Piece
from trainwright.errors import CheckpointError

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
        write_checkpoint(
            f"{folder}/a.ckpt",
            sections={"model": [Piece("_orig_mod.layer.w", (4, 3), 6 * rank, half, rank)], "optimizer": []},
            state={
                "extra": {"0": {"layer._extra_state": {"seen": 3}}},
                "hyper_parameters": {"lr": 0.1},
                "hparams_name": "kwargs",
                "datamodule_hyper_parameters": {"n": (1,)},
            },
            rank_state={},
            header={"step": 7, "epoch": 2, "strategy": "ddp"},
            ranks=ends[rank],
        )

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
    (lambda path: str(FIXTURES / "lightning_namespace.ckpt"), r"contains argparse\.Namespace, .*ignore="),
    (lambda path: saved(path, {"model": {"w": torch.ones(1)}, "epoch": 1}),
     "a dict with 'model', 'epoch', and 'model'"),
    (lambda path: saved(path, torch.ones(1)), "contains a Tensor, not a dict"),
    (lambda path: saved(path, {"state_dict": {"w": 1}}), "'w' is not a tensor"),
    (lambda path: put(path, (FIXTURES / "lightning.ckpt").read_bytes()[:5000]), "damaged or cut short"),
    (lambda path: put(path, b"PK\x03\x04aaa"), "damaged or cut short"),
    (lambda path: put(path, b"\x50" + bytes(7) + b"{aaaa"), "safetensors file and cannot be read"),
    (lambda path: put(path, b"lr: 0.1"), r"begins with b'lr: 0\.1'; expected a directory that trainwright wrote"),
    (lambda path: put(f"{path}/latest", b"global_step1").rpartition("/")[0], "sharded checkpoint of DeepSpeed"),
    (lambda path: put(f"{path}/a.txt", b"").rpartition("/")[0], r"directory without a manifest\.json"),
    (lambda path: path, "does not exist; expected"),
])  # fmt: skip
def test_everything_else_is_refused_by_name(found: Any, message: str, folder: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_weights(found(f"{folder}/a"))
    assert not (tmp_path / "planted").exists()


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

"""Checkpoints of an earlier trainwright are read: every value of the fixtures, and a run continues from them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_format import FIXTURES, LAST_STEP, PLAIN, SAVED_STEP, Kinds, generators, plain, train, train_sharded
from jobs import run_job
from torch import nn

import trainwright as tw
from trainwright.checkpoint.manifest import FORMAT_VERSION
from trainwright.checkpoint.reader import examine, open_checkpoint
from trainwright.data.seeding import isolate_rng, set_rng_state
from trainwright.errors import CheckpointError

FORMAT = FIXTURES / "format-1"
WHAT_TO_DO = (
    "today's code does not write what the fixture holds: {}. Where a reader can do without it, or an older trainwright reads "
    "it as it is, take the name out of this comparison and say why. Else raise FORMAT_VERSION in checkpoint/manifest.py, let "
    "the reader take both versions, make a fixture of the new one (python tests/checkpoint_format.py), and keep this one and "
    "its tests as they are."
)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Every value as it was in memory when the fixture was saved."""
    return dict(json.loads((FORMAT / "expected.json").read_text()))


def read_back(path: Path, section: str) -> dict[str, Any]:
    checkpoint = open_checkpoint(str(path))
    return {name: plain(checkpoint.read_tensor(section, name)) for name in checkpoint.tensors(section)}


@pytest.mark.parametrize("section", ["model", "optimizer"])
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_every_tensor_is_what_it_was(name: str, section: str, expected: dict[str, Any]) -> None:
    saved = expected[name]["at the save"] if name == "ddp" else expected[name]
    found = read_back(FORMAT / f"{name}.ckpt", section)
    assert found.keys() == saved[section].keys()
    for each, value in saved[section].items():
        assert found[each] == value, each
    assert examine(str(FORMAT / f"{name}.ckpt")).problems == []


def test_the_fixture_has_what_is_hard() -> None:
    checkpoint = open_checkpoint(str(FORMAT / "ddp.ckpt"))
    entries = checkpoint.tensors("model")
    dtypes = {str(entry.dtype).removeprefix("torch.") for entry in entries.values()}
    assert dtypes == {"float32", "bfloat16", "float16", "float64", "int64", "bool", "uint8"}
    assert {entry.shape for entry in entries.values()} >= {(), (0, 3), (3, 2)}
    assert entries["first.weight"].pieces == entries["second.weight"].pieces  # tied
    sharded = open_checkpoint(str(FORMAT / "fsdp.ckpt")).tensors("optimizer")["0/0.weight/exp_avg"]
    assert len(sharded.pieces) == 2  # the rows of two ranks
    assert {piece.file for entry in entries.values() for piece in entry.pieces} == {
        "model-00000.safetensors",
        "model-00001.safetensors",
    }


def test_everything_plain_is_what_it_was(expected: dict[str, Any]) -> None:
    checkpoint = open_checkpoint(str(FORMAT / "ddp.ckpt"))
    assert (checkpoint.step, checkpoint.epoch, checkpoint.world_size) == (SAVED_STEP, 0, 2)
    assert checkpoint.header["strategy"] == "ddp"
    state = checkpoint.run_state()
    assert (state["hyper_parameters"], state["hparams_name"]) == (
        {"width": 2, "layers": (1, 2), "config": {"a": None}},
        "kwargs",
    )
    assert state["extra"] == {"0": {"_extra_state": {"note": "kept", "numbers": (1, 2.5)}}}
    memory = dict(state["callbacks"]["Memory"])
    array, tensor = memory.pop("array"), memory.pop("tensor")
    assert memory == PLAIN
    assert [type(each) for each in memory.values()] == [type(each) for each in PLAIN.values()]
    assert array.dtype == np.int16
    assert array.tolist() == [0, 1, 2]
    assert torch.equal(tensor, torch.arange(3.0).bfloat16())
    assert (state["position"]["step"], state["position"]["batch"], state["position"]["epoch"]) == (3, 3, 0)
    assert state["lr_schedulers"][0]["base_lrs"] == [0.1]
    (optimizer,) = state["optimizers"]
    assert optimizer["type"] == "AdamW"
    assert optimizer["groups"][0]["params"] == ["scale", "first.weight", "first.bias"]
    assert optimizer["groups"][0]["betas"] == (0.9, 0.999)
    for rank, digests in enumerate(expected["generators"]):
        kept = checkpoint.rank_state(rank)
        assert kept is not None
        with isolate_rng():
            set_rng_state(kept["rng"])
            assert generators() == digests
        assert kept["metrics"]
    assert expected["generators"][0] != expected["generators"][1]
    assert checkpoint.rank_state(2) is None


def go_on(folder: Path) -> dict[str, Any]:
    """On every rank, train from the fixture to the epoch's end, and write both checkpoints again."""
    resumed = train(folder / "resumed.ckpt", FORMAT / "ddp.ckpt")
    train(folder / "ddp.ckpt")
    train_sharded(folder / "fsdp.ckpt")
    return resumed


def keys_of(path: Path) -> set[str]:
    """The names that readers use: files, keys, tensors, and the types of the plain data."""
    body = json.loads((path / "manifest.json").read_bytes())["manifest"]
    found = {f"file {name}" for name in body["files"]} | {f"manifest {key}" for key in body}
    found |= {f"header {key}" for key in body["header"]}
    for section, table in body["sections"].items():
        for name, entry in table.items():
            found |= {f"{section} {name} {key}" for key in entry} | {
                f"{section} {name} {entry['dtype']} {entry['shape']}"
            }
    checkpoint = open_checkpoint(str(path))

    def walk(value: Any, place: str) -> None:
        found.add(f"{place} is {type(value).__name__}")
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{place}.{key}")

    walk(checkpoint.run_state(), "state")
    walk(checkpoint.rank_state(1), "rank")
    return found


def test_a_run_goes_on_from_it_and_today_s_code_writes_the_same(expected: dict[str, Any], tmp_path: Path) -> None:
    ranks = run_job(go_on, 2, tmp_path)
    for resumed in ranks:
        for section, values in expected["ddp"]["at the end"].items():
            assert resumed["at the end"][section].keys() == values.keys()
            for name, value in values.items():
                found = resumed["at the end"][section][name]
                assert (found["dtype"], found["shape"]) == (value["dtype"], value["shape"])
                assert found["values"] == pytest.approx(value["values"], rel=1e-6), name
        assert resumed["mean"] == pytest.approx(expected["ddp"]["mean"])  # over the whole epoch, on both ranks
        assert resumed["is loaded"]
    for name in ("ddp.ckpt", "fsdp.ckpt"):
        missing = sorted(keys_of(FORMAT / name) - keys_of(tmp_path / name))
        assert missing == [], WHAT_TO_DO.format(missing)
        written = json.loads((tmp_path / name / "manifest.json").read_bytes())["manifest"]["format_version"]
        assert written == FORMAT_VERSION == 1, WHAT_TO_DO.format("the version")
    # The position in the data lies where the first reader of one looked for it.
    ddp = open_checkpoint(str(tmp_path / "ddp.ckpt"))
    (place,) = ddp.run_state()["position"]["places"]
    assert (place["batch"], place["passes"], place["items"], place["size"]) == (SAVED_STEP, 0, 2 * SAVED_STEP, 1)
    assert place.keys() == {"batch", "passes", "items", "size", "order"}
    assert (ddp.rank_state(1) or {})["sources"] == [[None]]


def test_one_process_goes_on_from_the_rows_of_two(expected: dict[str, Any]) -> None:
    accelerator = tw.Accelerator(cpu=True)
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1, bias=False))
    net, _ = accelerator.prepare(net, torch.optim.Adam(net.parameters(), 0.1))
    accelerator.load_state(str(FORMAT / "fsdp.ckpt"))
    assert {name: plain(value) for name, value in net.state_dict().items()} == expected["fsdp"]["model"]
    loaded = Kinds.load_from_checkpoint(str(FORMAT / "ddp.ckpt"))
    assert {name: plain(value) for name, value in loaded.state_dict().items() if name != "_extra_state"} == expected[
        "ddp"
    ]["at the save"]["model"]
    assert loaded.hparams == {"width": 2, "layers": (1, 2), "config": {"a": None}}


def rewrite(path: Path, change: Any) -> str:
    body = json.loads((FORMAT / "ddp.ckpt" / "manifest.json").read_bytes())["manifest"]
    change(body)
    text = json.dumps(body).encode()
    path.mkdir()
    for each in (FORMAT / "ddp.ckpt").iterdir():
        (path / each.name).write_bytes(each.read_bytes())
    (path / "manifest.json").write_bytes(
        b'{"sha256": "%s", "manifest": %s}\n' % (hashlib.sha256(text).hexdigest().encode(), text)
    )
    return str(path)


def test_a_newer_version_is_refused_and_keys_of_a_later_writer_are_passed_over(tmp_path: Path) -> None:
    newer = rewrite(tmp_path / "newer.ckpt", lambda body: body.update(format_version=2))
    for load in (open_checkpoint, Kinds.load_from_checkpoint):
        with pytest.raises(
            CheckpointError, match=r"format version 2; this trainwright reads version 1\. Install a trainwright"
        ):
            load(newer)

    def add(body: Any) -> None:
        body["later"] = {"a": 1}
        body["header"]["later"] = "b"
        body["sections"]["model"]["scale"]["later"] = 3

    later = open_checkpoint(rewrite(tmp_path / "later.ckpt", add))
    assert later.read_tensor("model", "scale").dtype == torch.float32
    assert later.step == SAVED_STEP < LAST_STEP

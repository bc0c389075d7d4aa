"""Exported folders of weights on one process, with a stand-in for a model of transformers: contents, kills and errors."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_python
from safetensors import safe_open
from safetensors.torch import load_file
from small import QUIET, Classifier, assert_equal, make_loader, weights
from torch import nn

import trainwright as tw
from trainwright.checkpoint.weight_files import size_of
from trainwright.tools.checkpoints import checkpoint_command


class Config:
    dtype = None

    def to_json_string(self) -> str:
        return json.dumps({"model_type": "tiny", "dtype": "float64"})


class LibraryModel(nn.Sequential):
    """It has the methods by which a model of transformers is known."""

    all_tied_weights_keys = {"0.weight": "2.weight"}

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        self.config = Config()
        self[0].weight = self[2].weight

    def save_pretrained(self, folder: str) -> None:
        raise AssertionError("the export writes the files")


class Words:
    """A tokenizer."""

    tokenizer_class = "Words"

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


class Holds(Classifier):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, LibraryModel())


def evaluated(module: tw.Module) -> tw.Trainer:
    trainer = tw.Trainer(**QUIET)
    trainer.validate(module, make_loader(8), verbose=False)
    return trainer


@pytest.mark.host
def test_one_of_several_models_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = Holds("student", "teacher")
    module.words = Words()
    trainer = evaluated(module)
    assert trainer.export(tmp_path / "a", dtype=torch.float16, max_shard_size=100, model="student")
    assert "tokenizer" not in capsys.readouterr().err
    files = {each.name for each in (tmp_path / "a").iterdir()}
    shards = sorted(name for name in files if name.startswith("model-"))
    assert files == {*shards, "config.json", "tokenizer.json", "model.safetensors.index.json"}
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config == {"model_type": "tiny", "dtype": "float16", "architectures": ["LibraryModel"]}
    assert tw.load_weights(tmp_path / "a").keys() == module.student.state_dict().keys()  # both names of the tied tensor
    stored = {name: value for shard in shards for name, value in load_file(tmp_path / "a" / shard).items()}
    kept = ("0.bias", "1.bias", "1.weight", "2.bias", "2.weight")
    assert_equal(stored, {name: module.student.state_dict()[name].half() for name in kept})
    with safe_open(tmp_path / "a" / shards[-1], "pt") as file:
        assert file.metadata()["format"] == "pt"
    with pytest.raises(ValueError, match="several models"):
        trainer.save_checkpoint(tmp_path / "b.ckpt", weights_only=True, export="huggingface")
    assert os.listdir(tmp_path) == ["a"]
    trainer.save_checkpoint(tmp_path / "b.ckpt", weights_only=True)
    later = [str(tmp_path / "b.ckpt"), str(tmp_path / "c"), "--format=huggingface", "--model=teacher", "--dtype=f16"]
    assert checkpoint_command(["export", *later]) == 0


def test_a_folder_has_all_weights_of_a_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep = tw.ModelCheckpoint(tmp_path, filename="a", export="safetensors")
    module = Classifier()
    trainer = tw.Trainer(max_epochs=1, **{**QUIET, "enable_checkpointing": True}, callbacks=[keep])
    trainer.fit(module, make_loader(8))
    assert_equal(load_file(tmp_path / "a.ckpt" / "safetensors" / "model.safetensors"), weights(module))
    for again in (False, True):
        trainer.export(tmp_path / "one.safetensors", "safetensors", max_shard_size=1, overwrite=again)
        trainer.export(tmp_path / "folder", "safetensors", overwrite=again)
        assert_equal(load_file(tmp_path / "one.safetensors"), weights(module))
        assert_equal(load_file(tmp_path / "folder" / "model.safetensors"), weights(module))
        (tmp_path / "folder" / "earlier.txt").touch()
        with pytest.raises(
            tw.CheckpointError, match="exists already, and no export replaces it without overwrite=True"
        ):
            trainer.export(tmp_path / "folder", "safetensors")
    assert trainer.export(tmp_path / "folder", "safetensors", overwrite=True)
    assert os.listdir(tmp_path / "folder") == ["model.safetensors"]
    with pytest.raises(tw.CheckpointError, match="exists already, and is not an export, so it is not replaced"):
        trainer.export(tmp_path, "safetensors", overwrite=True)
    run = ["export", keep.best_model_path, str(tmp_path / "b"), "--format=safetensors"]
    assert checkpoint_command(["verify", keep.best_model_path]) == 0
    assert checkpoint_command([*run, "--max-shard-size=200", "--strip-prefix=net."]) == 0
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == {name.removeprefix("net.") for name in weights(module)}
    assert checkpoint_command([*run[:2], str(tmp_path / "c"), "--format=huggingface"]) == 77
    assert "does not describe a model of transformers" in capsys.readouterr().err
    for wrong in (["--model=net"], ["--tokenizer=x"], ["--format=huggingface", "--prefix=x"]):
        with pytest.raises(SystemExit):
            checkpoint_command([*run[:2], str(tmp_path / "d.safetensors"), *wrong])
        assert "--format huggingface" in capsys.readouterr().err


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"format": "gguf"}, ValueError, r"format='gguf' is not accepted. Choose from 'huggingface', 'safetensors'"),
    ({"dtype": "int8"}, ValueError, r"dtype='int8' is not accepted. Pass 'bf16', 'f16', 'f32'"),
    ({"dtype": torch.int8}, ValueError, r"dtype=torch.int8 is not accepted"),
    ({"max_shard_size": 0}, ValueError, r"max_shard_size=0 is not accepted. Pass bytes"),
    ({"max_shard_size": "5 apples"}, ValueError, r"max_shard_size='5 apples' is not accepted"),
    ({}, ValueError, r"Holds has several models: choose one of 'a', 'b' as the model"),
    ({"model": "c"}, ValueError, r"Holds has no single model 'c': choose one of 'a', 'b'"),
    ({"path": "memory://there"}, tw.CheckpointError, r"is not on a local disk. Pass a local path"),
    (
        {"path": "."},
        tw.CheckpointError,
        r"exists already, and no export replaces it without overwrite=True\. Remove it or",
    ),
    (
        {"path": "a.safetensors", "model": "a"},
        tw.CheckpointError,
        r"is the name of a file, but the weights need a folder",
    ),
]


def test_wrong_exports_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = evaluated(Holds("a", "b"))
    for arguments, kind, message in WRONG:
        with pytest.raises(kind, match=message):
            trainer.export(**{"path": "new", **({"model": "a"} if "path" in arguments else {}), **arguments})
    with pytest.raises(
        ValueError, match=r"Classifier has no model of transformers or peft\. Choose the format 'safetensors'"
    ):
        evaluated(Classifier()).export("new")
    with pytest.raises(tw.CheckpointError, match=r"model.bin does not end in \.safetensors"):
        Classifier().export("model.bin")
    with pytest.raises(RuntimeError, match="there is nothing to export"):
        tw.Trainer(**QUIET).export("new")
    with pytest.raises(ValueError, match=r"export='safetensors' writes within the call\. Leave out blocking=False"):
        trainer.save_checkpoint("new", export="safetensors", blocking=False)
    with pytest.raises(ValueError, match=r"export='safetensors' writes within the save\. Leave out async_save=True"):
        tw.ModelCheckpoint(export="safetensors", async_save=True)
    keep = tw.ModelCheckpoint("memory://there", export="safetensors")
    with pytest.raises(ValueError, match=r"export='safetensors' needs a local dirpath, but this one is memory://there"):
        tw.Trainer(**{**QUIET, "enable_checkpointing": True}, callbacks=[keep]).fit(Classifier(), make_loader(8))
    keep, module = tw.ModelCheckpoint(tmp_path, export="huggingface"), Classifier()
    unfit = tw.Trainer(max_epochs=1, **{**QUIET, "enable_checkpointing": True}, callbacks=[keep])
    with pytest.raises(ValueError, match=r"Classifier has no model of transformers or peft"):
        unfit.fit(module, make_loader(8))
    assert unfit.global_step == 0
    monkeypatch.setattr("trainwright.checkpoint.weight_files.os.pwrite", full)
    with pytest.raises(tw.CheckpointError, match=r"new was not written: the disk is full"):
        trainer.export("new", model="a")
    assert not os.listdir(tmp_path)


def full(*_: Any) -> int:
    raise OSError(28, "No space left on device")


def test_sizes_have_units() -> None:
    assert [size_of(text) for text in (7, "7", "1.5KB", "2 MiB", "5gb")] == [7, 7, 1500, 2 << 20, 5 * 1000**3]


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from small import QUIET, Classifier, make_loader
import trainwright as tw
trainer = tw.Trainer(**QUIET)
trainer.validate(Classifier(), make_loader(8), verbose=False)
write, calls = os.pwrite, []

def die(*arguments):
    calls.append(write(*arguments))
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return calls[-1]

os.pwrite = die
trainer.export("out", format="safetensors")
"""


def test_a_killed_export_leaves_nothing_at_the_path(tmp_path: Path) -> None:
    done = run_python("-c", KILLED.format(tests=str(Path(__file__).parents[1])), folder=tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert [each.name.split("-")[0] for each in tmp_path.iterdir()] == [".out.tmp"]

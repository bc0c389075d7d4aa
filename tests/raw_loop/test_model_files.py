"""The weights of a raw loop's model in safetensors files, and objects in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from small import ON_HOST, assert_equal, make_net, weights
from torch import nn

import trainwright as tw
from trainwright.checkpoint.codec import encode


class Tied(nn.Module):
    """A head that is tied to its embedding, and a buffer in another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.block = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(12.0).view(3, 4))
        self.register_buffer("turned", torch.randn(3, 2).t())


def prepared(model: nn.Module, **settings: Any) -> tuple[tw.Accelerator, nn.Module]:
    accelerator = tw.Accelerator(cpu=ON_HOST, **settings)
    return accelerator, accelerator.prepare(model)


def test_a_model_is_written_to_one_file(tmp_path: Path) -> None:
    accelerator, model = prepared(Tied())
    accelerator.save_model(model, tmp_path / "new" / "model")
    assert [each.name for each in (tmp_path / "new" / "model").iterdir()] == ["model.safetensors"]
    other = Tied()
    with torch.no_grad():
        other.embed.weight.zero_()
    missing, unexpected = load_model(other, tmp_path / "new" / "model" / "model.safetensors")
    assert not missing
    assert not unexpected
    assert_equal(weights(other), weights(accelerator.unwrap_model(model)))
    with safe_open(tmp_path / "new" / "model" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}


def test_a_large_model_is_written_in_shards(tmp_path: Path) -> None:
    accelerator, model = prepared(Tied())
    accelerator.save_model(model, tmp_path, max_shard_size="0.2KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    state = accelerator.get_state_dict(model)
    kept = {name: value for name, value in state.items() if name != "head.weight"}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in kept.values())
    assert index["weight_map"].keys() == kept.keys()
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        tensors = load_file(tmp_path / file)
        assert len(tensors) == 1 or sum(each.nbytes for each in tensors.values()) <= 200
        assert all(index["weight_map"][name] == file for name in tensors)
        found |= tensors
    assert_equal(found, {name: value.cpu() for name, value in kept.items()})
    count = len(set(index["weight_map"].values()))
    assert count > 2
    # Another save into the folder removes the earlier files, and other files stay.
    (tmp_path / "config.json").write_text("{}")
    accelerator.save_model(model, tmp_path, max_shard_size=400)
    files = {each.name for each in tmp_path.iterdir()}
    assert files == {"config.json", "model.safetensors.index.json", *index_files(tmp_path)}
    assert 1 < len(index_files(tmp_path)) < count
    accelerator.save_model(model, tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    accelerator.save_model(model, tmp_path, 400)
    assert "model.safetensors" not in {each.name for each in tmp_path.iterdir()}


def index_files(folder: Path) -> set[str]:
    return set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())


def test_wrong_arguments_of_model_files_are_rejected(tmp_path: Path) -> None:
    accelerator, model = prepared(make_net())
    for wrong in ("10 gigabytes", 0, -1, True, "0GB", None):
        with pytest.raises(ValueError, match=r"max_shard_size=.* is not accepted. Pass bytes"):
            accelerator.save_model(model, tmp_path, max_shard_size=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="would write a pickle"):
        accelerator.save_model(model, tmp_path, safe_serialization=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(tw.CheckpointError, match=r"the model was not saved in .*file: the directory cannot be made"):
        accelerator.save_model(model, tmp_path / "file")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_the_earlier_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model = prepared(make_net())
    accelerator.save_model(model, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainwright.raw_loop.model_files.host_bytes", full)
    with pytest.raises(tw.CheckpointError, match="the disk is full"):
        accelerator.save_model(model, tmp_path, 400)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"model.safetensors": before}


def test_unwrapped_models_are_the_users() -> None:
    net = make_net()
    accelerator, model = prepared(net, mixed_precision="bf16")
    assert model is not net
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is net
    compiled = torch.compile(net, backend="eager")
    assert accelerator.unwrap_model(compiled) is compiled
    assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is net
    assert accelerator.get_state_dict(compiled).keys() == net.state_dict().keys()


def test_objects_are_written_and_read(tmp_path: Path) -> None:
    accelerator = tw.Accelerator(cpu=ON_HOST)
    state = make_net().state_dict()
    values: dict[str, Any] = {
        "list.json": [1, 2.5, "text", None, (3, 4)],
        "weights.safetensors": dict(state),
        "mixed": {"weights": dict(state), "epoch": 3, 5: [torch.ones(2, 3).t()]},
        "one": torch.arange(3),
    }
    for name, value in values.items():
        accelerator.save(value, tmp_path / "new" / name)
        accelerator.save(value, tmp_path / "new" / name)  # in the place of the first
        (plain, tensors), (same, others) = encode(accelerator.load(tmp_path / "new" / name)), encode(value)
        assert plain == same
        assert_equal(tensors, others)
    for key in (str, lambda number: f"{number}.weight"):  # of two dtypes, since a file groups tensors by dtype
        dtypes = [torch.float64, torch.bfloat16, torch.float64, torch.float32]
        ordered = {key(number): torch.ones(2, dtype=dtypes[number % 4]) for number in range(12)}
        accelerator.save(ordered, tmp_path / "ordered")
        assert list(accelerator.load(tmp_path / "ordered")) == list(ordered)
    save_file(ordered, tmp_path / "theirs")
    header = json.loads((tmp_path / "theirs").read_bytes()[8:].partition(b"}}")[0] + b"}}")
    assert list(accelerator.load(tmp_path / "theirs")) == list(header)
    assert json.loads((tmp_path / "new" / "list.json").read_text())[:4] == [1, 2.5, "text", None]
    assert_equal(load_file(tmp_path / "new" / "weights.safetensors"), state)
    accelerator.save([1], "memory://raw/one.json")
    assert accelerator.load("memory://raw/one.json") == [1]
    with pytest.warns(
        UserWarning, match=r"model\.pt is written as a safetensors file, which torch\.load does not read"
    ):
        accelerator.save(state, tmp_path / "model.pt")
    with pytest.raises(TypeError, match=r"obj\.lock is a builtins\.object"):
        accelerator.save({"lock": object()}, tmp_path / "object")
    with pytest.raises(tw.CheckpointError, match="cannot be read"):
        accelerator.load(tmp_path / "object")
    file = tmp_path / "new" / "one"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(tw.CheckpointError, match="is not a whole safetensors file"):
        accelerator.load(file)
    file.write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(tw.CheckpointError, match=r"is not valid JSON but a pickle, .* Use torch\.load"):
        accelerator.load(file)
    torch.save(state, file)
    with pytest.raises(tw.CheckpointError, match="but a pickle"):
        accelerator.load(file)
    file.write_bytes(b"text")
    with pytest.raises(tw.CheckpointError, match=r"is not valid JSON .*damaged"):
        accelerator.load(file)
    for call in (lambda: accelerator.save_model([], tmp_path / "none"), lambda: accelerator.get_state_dict([])):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"but a list was given. Pass the model"):
            call()
    assert not [each for each in (tmp_path / "new").iterdir() if ".tmp-" in each.name]


@pytest.mark.slow
def test_transformers_reads_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
    accelerator, model = prepared(transformers.GPT2LMHeadModel(config))
    for size in ("10GB", "4KB"):
        folder = tmp_path / size
        accelerator.save_model(model, folder, max_shard_size=size)
        config.save_pretrained(folder)
        again, report = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert again.lm_head.weight is again.transformer.wte.weight
        assert_equal(weights(again), weights(accelerator.unwrap_model(model)))

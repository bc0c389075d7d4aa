"""Folders of weights for transformers and peft, exported from runs of two ranks and from checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from safetensors.torch import load_file
from small import QUIET, assert_equal
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

import trainwright as tw
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.tools.checkpoints import checkpoint_command

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")]

STRATEGIES = ("ddp", "ddp_sharded", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
WORDS, LONGEST = 300, 8
SHARD = 10_000
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
KINDS = {
    "GPT2LMHeadModel": ("AutoModelForCausalLM", lambda: gpt2()),
    "BertForMaskedLM": ("AutoModelForMaskedLM", lambda: transformers.BertConfig(vocab_size=50, **TINY)),
    "MixtralForCausalLM": (
        "AutoModelForCausalLM",
        lambda: transformers.MixtralConfig(vocab_size=50, num_key_value_heads=2, num_local_experts=4, **TINY),
    ),
}
"""Models with heads that are tied to their embeddings, and one whose library stores the experts in other shapes."""


def gpt2() -> Any:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=WORDS, n_positions=2 * LONGEST, **dropout)


class Language(tw.Module):
    def __init__(self, adapter: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.inner = nn.ModuleDict({"net": transformers.GPT2LMHeadModel(gpt2()).train()})
        if adapter:
            from peft import LoraConfig, get_peft_model

            lora = LoraConfig(r=4, lora_dropout=0.0, target_modules=["c_attn"], fan_in_fan_out=True)
            self.inner["net"] = get_peft_model(self.inner["net"], lora)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.inner["net"](input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=0.02)


def loader() -> DataLoader[Any]:
    return DataLoader(torch.randint(WORDS, (8, LONGEST), generator=torch.Generator().manual_seed(2)), batch_size=2)  # type: ignore[arg-type]


class Largest(TorchDispatchMode):
    """The bytes of the largest memory that an operation has allocated on this rank."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {each.data_ptr() for each in storages((args, kwargs))}
        self.bytes = max([self.bytes, *(each.nbytes() for each in storages(result) if each.data_ptr() not in known)])
        return result


def storages(values: Any) -> list[Any]:
    tensors = [each for each in tree_leaves(values) if isinstance(each, Tensor) and not each.is_meta]
    return [(each.to_local() if isinstance(each, DTensor) else each).untyped_storage() for each in tensors]


def exported(strategy: str, folder: Path, adapter: bool) -> dict[str, int]:
    """Train a step, and export the model and a whole copy of it. Return the work of this rank."""
    settings = {**QUIET, "devices": "auto", "strategy": strategy, "enable_checkpointing": True}
    average = [tw.EMAWeightAveraging(decay=0.5)] if strategy == "fsdp" and not adapter else []
    keep = tw.ModelCheckpoint(folder / "kept", filename="{step}", export="huggingface", every_n_train_steps=1)
    trainer = tw.Trainer(max_steps=2, **settings, callbacks=[keep, *average])
    module = Language(adapter)
    trainer.fit(module, loader())
    write, sizes = os.pwrite, []

    def count(*arguments: Any) -> int:
        sizes.append(write(*arguments))
        return sizes[-1]

    os.pwrite = count
    try:
        with Largest() as largest:
            trainer.export(folder / "as it is", max_shard_size=SHARD)
    finally:
        os.pwrite = write
    trainer.export(folder / "bf16", dtype="bf16", max_shard_size="10KB")
    trainer.save_checkpoint(folder / "end.ckpt")
    if (whole := tw.gather_module(module)) is not None:
        torch.save(
            {name: value.clone() for name, value in whole.inner["net"].state_dict().items()}, folder / "whole.pt"
        )
    return {"written": sum(sizes), "largest": largest.bytes}


def on_two_ranks(folder: Path) -> dict[str, Any]:
    jobs = {
        (strategy, adapter): folder / f"{strategy}-{adapter}" for strategy in STRATEGIES for adapter in (False, True)
    }
    return {f"{name}-{adapter}": exported(name, path, adapter) for (name, adapter), path in jobs.items()}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("job")
    return folder, run_job(on_two_ranks, 2, folder, seconds=400)


def read(folder: Path) -> dict[str, Tensor]:
    """Load a folder without naming a class, and return its weights."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert model.lm_head.weight is model.transformer.wte.weight
    return dict(model.state_dict())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_transformers_loads_the_weights_of_two_ranks(strategy: str, job: Any, capsys: Any) -> None:
    folder, works = job[0] / f"{strategy}-False", [found[f"{strategy}-False"] for found in job[1]]
    whole = torch.load(folder / "whole.pt")
    assert_equal(read(folder / "as it is"), whole)
    assert_equal(read(folder / "bf16"), {name: value.bfloat16() for name, value in whole.items()})
    files = [each.stat().st_size for each in (folder / "as it is").glob("model-*")]
    assert len(files) > 3
    sizes = [value.nbytes for name, value in whole.items() if name != "lm_head.weight"]
    assert sum(work["written"] for work in works) == sum(sizes)
    assert max(work["written"] for work in works) < 0.7 * sum(sizes)
    if strategy in ("fsdp", "deepspeed_stage_3"):
        assert max(work["largest"] for work in works) <= max(sizes) // 2
    # The checkpoint's folder has the weights that the checkpoint has.
    (kept,) = (folder / "kept").glob("step=*")
    assert checkpoint_command(["verify", str(kept)]) == 0
    stored = open_checkpoint(str(kept)).read_tensors("model")
    assert_equal(read(kept / "huggingface"), {name.removeprefix("inner.net."): value for name, value in stored.items()})
    # Later, by a process without the module's code.
    out = folder / "later"
    assert (
        checkpoint_command(["export", str(folder / "end.ckpt"), str(out), "--format=huggingface", "--dtype=bf16"]) == 0
    )
    assert "without a tokenizer" in capsys.readouterr().out
    assert_equal(read(out), read(folder / "bf16"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_peft_loads_the_adapter_of_two_ranks(strategy: str, job: Any, capsys: Any) -> None:
    from peft import PeftModel

    folder = job[0] / f"{strategy}-True"
    trained = Language(True).inner["net"]
    trained.load_state_dict(torch.load(folder / "whole.pt"))
    words = next(iter(loader()))
    (kept,) = (folder / "kept").glob("step=*")
    for path in (folder / "as it is", kept / "huggingface"):
        assert {each.name for each in path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        assert all(
            value.any() for name, value in load_file(path / "adapter_model.safetensors").items() if "lora_B" in name
        )
        loaded = PeftModel.from_pretrained(Language().inner["net"], path)
        assert torch.equal(loaded.eval()(words).logits, trained.eval()(words).logits)
    assert checkpoint_command(["export", str(kept), str(folder / "later"), "--format=huggingface"]) == 77
    assert "Pass --format safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_equals_the_one_of_save_pretrained(kind: str, tmp_path: Path) -> None:
    auto, config = KINDS[kind]

    class Holds(tw.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = getattr(transformers, kind)(config())
            self.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer())

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.net(input_ids=batch % 50)

    module, trainer = Holds(), tw.Trainer(**QUIET)
    trainer.validate(module, loader(), verbose=False)
    trainer.export(tmp_path / "a")
    module.net.save_pretrained(tmp_path / "b")
    for file in (tmp_path / "b").glob("*.json"):
        assert (tmp_path / "a" / file.name).read_text() == file.read_text()
    model, report = getattr(transformers, auto).from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not any(report.values())
    assert type(model).__name__ == kind
    assert_equal(dict(model.state_dict()), dict(module.net.state_dict()))
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
    assert again("b a")["input_ids"] == [1, 0]
    # A checkpoint stores neither the tokenizer nor the class, so the command copies the tokenizer's files.
    trainer.save_checkpoint(tmp_path / "c.ckpt", weights_only=True)
    more = ["--format=huggingface", f"--tokenizer={tmp_path / 'a'}"]
    assert checkpoint_command(["export", str(tmp_path / "c.ckpt"), str(tmp_path / "c"), *more]) == 0
    for file in (tmp_path / "a").iterdir():
        assert (tmp_path / "c" / file.name).read_bytes() == file.read_bytes()


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def test_computed_adapters_are_rejected(tmp_path: Path) -> None:
    module = Language()
    from peft import PromptTuningConfig, get_peft_model

    tuned = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    module.inner["net"] = get_peft_model(module.inner["net"], tuned)
    trainer = tw.Trainer(max_steps=1, **QUIET)
    trainer.fit(module, loader())
    with pytest.raises(ValueError, match=r"an adapter of kind PROMPT_TUNING when .* tw\.gather_module"):
        trainer.export(tmp_path / "a")
    assert not [*tmp_path.iterdir()]

"""LoRA of peft around a model of transformers: trained weights, exact resumes, and checkpoints of only the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from resumed import check_resume
from small import QUIET, assert_close, assert_equal
from torch import Tensor
from torch.utils.data import DataLoader

import trainwright as tw

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")]

STRATEGIES = ("ddp", "ddp_sharded", "deepspeed", "deepspeed_stage_3", "fsdp")


class Adapted(tw.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        config = transformers.DistilBertConfig(
            vocab_size=30, dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_position_embeddings=8, num_labels=2,
            dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
        )  # fmt: skip
        lora = peft.LoraConfig(
            r=4, lora_dropout=0.0, target_modules=["q_lin", "v_lin"], modules_to_save=["pre_classifier", "classifier"]
        )
        self.model = peft.get_peft_model(transformers.DistilBertForSequenceClassification(config), lora)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=0.02)


def loader(batch_size: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    labels = torch.arange(40) % 2
    words = torch.randint(0, 15, (40, 8), generator=generator) + 15 * labels[:, None]
    return DataLoader(
        [{"input_ids": each, "labels": label} for each, label in zip(words, labels, strict=True)],  # type: ignore[arg-type]
        batch_size=batch_size,
        shuffle=True,
    )


def size_of(path: Path) -> int:
    return sum(each.stat().st_size for each in path.rglob("*.safetensors")) or sum(
        each.stat().st_size for each in path.rglob("*") if each.is_file()
    )


def test_one_process_trains_an_adapter(tmp_path: Path) -> None:
    module, before = Adapted(), Adapted().state_dict()
    trainable = {name for name, each in module.named_parameters() if each.requires_grad}
    assert 0 < len(trainable) < len(list(module.named_parameters()))
    whole = check_resume(Adapted, loader, tmp_path / "whole.ckpt", accumulate_grad_batches=1)
    changed = {name for name, each in whole.items() if not torch.equal(each, before[name])}
    assert changed == trainable
    adapter = check_resume(Adapted, loader, tmp_path / "adapter.ckpt", trained_only=True)
    assert_equal(adapter, whole)
    assert size_of(tmp_path / "adapter.ckpt") < 0.8 * size_of(tmp_path / "whole.ckpt")


def on_two_ranks(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in STRATEGIES:
        options: dict[str, Any] = {"strategy": strategy, "trained_only": True}
        found[strategy] = check_resume(Adapted, lambda: loader(4), folder / f"{strategy}.ckpt", **options)
    module = Adapted()
    tw.Trainer(max_epochs=1, **{**QUIET, "devices": "auto", "strategy": "fsdp"}).fit(module, loader(4))
    whole = tw.gather_module(module)  # the module itself holds parts, which peft cannot write
    if whole is not None:
        whole.model.save_pretrained(folder / "adapter")
        found["whole"] = {name: each.clone() for name, each in whole.state_dict().items()}
    return found


def test_two_ranks_have_the_same_adapter(tmp_path: Path) -> None:
    alone = check_resume(Adapted, loader, tmp_path / "alone.ckpt")
    found, _ = run_job(on_two_ranks, 2, tmp_path / "job", seconds=300)
    for strategy in STRATEGIES:
        assert_close(found[strategy], alone, 2e-5)
    again = Adapted()
    peft.set_peft_model_state_dict(again.model, peft.load_peft_weights(tmp_path / "job" / "adapter", device="cpu"))
    assert_equal(dict(again.state_dict()), found["whole"])

"""Models of transformers, made from a config: every strategy and precision, their outputs and batches as they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, SAVING, assert_close, assert_equal, weights
from torch import Tensor
from torch.utils.data import DataLoader

import trainwright as tw
from trainwright.__main__ import main

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")]

VOCABULARY, LONGEST = 40, 12
OF_GPT2 = {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
STRATEGIES = ("ddp", "ddp_sharded", "fsdp", "deepspeed_stage_1", "deepspeed", "deepspeed_stage_3")


def sentences(size: int, seed: int) -> list[dict[str, Any]]:
    """Ragged sentences of token ids. The label is the half of the vocabulary that they are from."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(size):
        length = int(torch.randint(3, LONGEST + 1, (), generator=generator))
        low = 2 + number % 2 * (VOCABULARY // 2 - 1)
        words = torch.randint(low, low + VOCABULARY // 2 - 2, (length,), generator=generator)
        made.append({"input_ids": words, "labels": number % 2})
    return made


def padded(examples: list[dict[str, Any]]) -> Any:
    words = torch.nn.utils.rnn.pad_sequence([each["input_ids"] for each in examples], batch_first=True)
    labels = torch.tensor([each["labels"] for each in examples])
    return transformers.BatchEncoding({"input_ids": words, "attention_mask": (words > 0).long(), "labels": labels})


def texts(size: int = 192, seed: int = 1, **options: Any) -> DataLoader[Any]:
    return DataLoader(sentences(size, seed), batch_size=16, collate_fn=padded, **options)  # type: ignore[arg-type]


def distilbert() -> Any:
    return transformers.DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=16,
        n_layers=1,
        n_heads=2,
        hidden_dim=32,
        max_position_embeddings=LONGEST,
        num_labels=2,
    )


class TextClassifier(tw.Module):
    """The configuration is one of the constructor's arguments, as it is."""

    def __init__(self, config: transformers.DistilBertConfig, lr: float = 0.01) -> None:  # type: ignore[name-defined]
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(4)
        self.model = transformers.AutoModelForSequenceClassification.from_config(config)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch)  # the output is the step's, with its loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.model(**batch)
        self.log(
            "accuracy", (output.logits.argmax(-1) == batch["labels"]).float().mean(), batch_size=len(output.logits)
        )
        return output

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


@pytest.mark.parametrize("settings", [{}, {"precision": "16-mixed"}, {"compile": {"backend": "eager"}}], ids=str)
def test_a_text_classifier_is_trained_and_reloaded(settings: dict[str, Any], tmp_path: Path) -> None:
    module = TextClassifier(distilbert())
    best = tw.ModelCheckpoint(monitor="accuracy", mode="max")
    options = {**SAVING, "default_root_dir": tmp_path, **settings}
    trainer = tw.Trainer(max_epochs=3, callbacks=[best], **options)
    trainer.fit(module, texts(shuffle=True), texts(64, 2))
    (tested,) = trainer.test(module, texts(64, 3), ckpt_path="best", verbose=False)
    assert tested["accuracy"] > 0.95
    again = TextClassifier.load_from_checkpoint(best.best_model_path)
    assert type(again.hparams.config) is transformers.DistilBertConfig
    assert again.hparams.config.dim == 16
    (loaded,) = tw.Trainer(**{**QUIET, **settings}).test(again, texts(64, 3), verbose=False)
    assert loaded == tested
    predicted = trainer.predict(module, texts(20, 3), ckpt_path="best")
    assert [each.logits.shape for each in predicted] == [(16, 2), (4, 2)]


def gpt2() -> Any:
    return transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=VOCABULARY, n_positions=LONGEST, **OF_GPT2
    )


class LanguageModel(tw.Module):
    """Tied embeddings, recomputed activations, and a schedule over the steps that the Trainer foresees."""

    def __init__(self, recompute: bool = True) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.model = transformers.GPT2LMHeadModel(gpt2())
        if recompute:
            self.model.gradient_checkpointing_enable()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, batch_size=len(batch["input_ids"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def sequences(size: int) -> list[dict[str, Tensor]]:
    """Sentences of one length, so that the mean over batches is that over tokens, however the ranks share them."""
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(1, VOCABULARY, (size, LONGEST), generator=generator)
    return [transformers.BatchEncoding({"input_ids": each, "labels": each.clone()}) for each in words]


def language(batch_size: int) -> DataLoader[Any]:
    collate = transformers.default_data_collator
    return DataLoader(sequences(32), batch_size=batch_size, collate_fn=collate)  # type: ignore[arg-type]


def trained_language_model(folder: Path, strategy: str, batch_size: int, **settings: Any) -> dict[str, Any]:
    """Train, resume at the end, and return the results."""
    module = LanguageModel(**settings)
    options = {**QUIET, "devices": "auto", "strategy": strategy}
    trainer = tw.Trainer(max_epochs=2, **options)
    trainer.fit(module, language(batch_size), language(batch_size))
    path = folder / f"{strategy}-{len(settings)}.ckpt"
    trainer.save_checkpoint(path)
    (again,) = tw.Trainer(**options).validate(LanguageModel(), language(batch_size), ckpt_path=path, verbose=False)
    return {
        "steps": trainer.global_step,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "loss": float(trainer.callback_metrics["val_loss"]),
        "again": again["val_loss"],
        "is tied": module.model.lm_head.weight is module.model.transformer.wte.weight,
        "path": str(path),
    }


def on_two_ranks(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {name: trained_language_model(folder, name, 2) for name in STRATEGIES}
    found["without recomputation"] = trained_language_model(folder, "ddp", 2, recompute=False)

    options = {**QUIET, "devices": "auto"}
    module = TextClassifier(distilbert())
    tw.Trainer(max_epochs=3, strategy="ddp_sharded", **options).fit(module, texts())
    (tested,) = tw.Trainer(strategy="ddp_sharded", **options).test(module, texts(41, 3), verbose=False)
    found["accuracy"] = tested["accuracy"]
    found["outputs"] = [each["logits"] for each in tw.Trainer(**options).predict(module, texts(41, 3))]
    return found


def test_two_ranks_can_fine_tune_with_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = trained_language_model(tmp_path, "auto", 4)
    assert alone["steps"] == 16
    found, other = run_job(on_two_ranks, 2, tmp_path / "job", seconds=400)
    for name in (*STRATEGIES, "without recomputation"):
        one = found[name]
        assert one["loss"] == pytest.approx(alone["loss"], abs=2e-6), name
        assert one["again"] == pytest.approx(one["loss"], abs=1e-6), name
        assert (one["steps"], one["rate"], one["is tied"]) == (alone["steps"], alone["rate"], True), name
    assert found["accuracy"] > 0.95
    assert [len(each) for each in found["outputs"]] == [16, 16, 9]
    assert_close(dict(enumerate_of(found["outputs"])), dict(enumerate_of(other["outputs"])))

    weights_file = tmp_path / "exported" / "model.safetensors"
    weights_file.parent.mkdir()
    command = ["trainwright", "checkpoint", "export", found["fsdp"]["path"], str(weights_file), "--strip-prefix=model."]
    monkeypatch.setattr(sys, "argv", command)
    assert main() == 0
    gpt2().save_pretrained(weights_file.parent)
    model, report = transformers.GPT2LMHeadModel.from_pretrained(weights_file.parent, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    loaded = LanguageModel()
    loaded.model.load_state_dict(model.state_dict())
    (validated,) = tw.Trainer(**QUIET).validate(loaded, language(4), verbose=False)
    assert validated["val_loss"] == pytest.approx(alone["loss"], abs=2e-6)


def enumerate_of(tensors: list[Tensor]) -> list[tuple[str, Tensor]]:
    return [(str(number), each) for number, each in enumerate(tensors)]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_an_accelerator_trains_a_model_of_transformers(precision: str, tmp_path: Path) -> None:
    accelerator = tw.Accelerator(mixed_precision=precision, cpu=True)
    model = transformers.AutoModelForSequenceClassification.from_config(distilbert())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, 36)
    model, optimizer, train, evaluation, schedule = accelerator.prepare(
        model, optimizer, texts(shuffle=True), texts(41, 3), schedule
    )
    for _ in range(3):
        for batch in train:
            output = model(**batch)
            assert output.logits.dtype == torch.float32
            accelerator.backward(output.loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    right, seen = 0, 0
    for batch in evaluation:
        with torch.no_grad():
            output = accelerator.gather_for_metrics(model(**batch))
        labels = accelerator.gather_for_metrics(batch["labels"])
        right, seen = right + int((output.logits.argmax(-1) == labels).sum()), seen + len(labels)
    assert seen == 41
    assert right > 38
    accelerator.unwrap_model(model).save_pretrained(tmp_path)
    again = type(accelerator.unwrap_model(model)).from_pretrained(tmp_path)
    assert_equal(weights(again), weights(accelerator.unwrap_model(model)))

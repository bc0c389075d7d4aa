"""Packed rows train transformers' models as single documents do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

import trainwright as tw

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SIZES, LENGTH, VOCABULARY = [9, 24, 3, 14, 6, 5, 20, 7, 2, 11, 8], 24, 40


def make(kind: str) -> Any:
    torch.manual_seed(1)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config).double().eval()
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config).double().eval()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_packed_rows_train_as_single_documents(kind: str) -> None:
    model, documents = make(kind), [torch.randint(1, VOCABULARY, (size,)) for size in SIZES]
    rows = tw.PackedDataset(documents, LENGTH)
    batch = default_collate([rows[index] for index in range(len(rows))])

    def logits_of(batch: Any) -> Any:
        mask = tw.document_mask(batch["document_ids"])
        return model(batch["input_ids"], attention_mask=mask, position_ids=batch["position_ids"]).logits

    tw.check_packing(logits_of, batch, tolerance=1e-9)
    with pytest.raises(ValueError, match="the logits of document 2"):
        tw.check_packing(
            lambda batch: model(batch["input_ids"], position_ids=batch["position_ids"].clamp(max=0)).logits, batch
        )
    packed = model(
        batch["input_ids"],
        attention_mask=tw.document_mask(batch["document_ids"]),
        position_ids=batch["position_ids"],
        labels=batch["labels"],
    ).loss
    packed.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    count = sum(SIZES) - len(SIZES)
    total = sum(
        cross_entropy(model(document[None]).logits[0, :-1], document[1:], reduction="sum") for document in documents
    )
    (total / count).backward()
    assert packed.item() == pytest.approx(total.item() / count, rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-6, msg=name)

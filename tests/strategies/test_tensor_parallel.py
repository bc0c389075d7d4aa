"""Tensor parallelism on a mesh of two data ranks and two tensor ranks: four gloo ranks match one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contract_job import quiet
from jobs import run_job
from small import QUIET, assert_equal
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import trainwright as tw

pytestmark = pytest.mark.slow

WORDS, WIDTH, HEADS, LENGTH = 14, 8, 4, 6
PLAN: dict[str, Any] = {
    "embed": "rowwise",
    "blocks.*.qkv.*": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gathered",
}
ON_SEQUENCE: dict[str, Any] = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.before": "sequence",
    "blocks.*.between": "sequence",
    "blocks.*.qkv": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "blocks.*.qkv.*": "colwise",
    "blocks.*.out": RowwiseParallel(output_layouts=Shard(1)),
    "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": "sequence",
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}
"""Norms and residuals are divided along the sequence, and the loss over the words."""


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        parts = (self.query(x), self.key(x), self.value(x))
        return [part.view(*part.shape[:2], -1, WIDTH // HEADS).transpose(1, 2) for part in parts]


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = Projections(), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(*self.qkv(self.before(x)), is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Speaks(tw.Module):
    """Predicts the next word: a transformer whose layers can be divided."""

    def __init__(self, dropout: float = 0.0, is_on_sequence: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.save_hyperparameters()
        self.is_on_sequence = is_on_sequence
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.scale = nn.Parameter(torch.empty(()))
        self.reset_parameters()
        with torch.device("cpu"):  # torchmetrics has no values on the meta device
            self.accuracy = MulticlassAccuracy(WORDS, average="micro")
        self.masks: list[Tensor] = []

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) if self.is_on_sequence else self.embed(words) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, words: Tensor) -> Tensor:
        return F.cross_entropy(self(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.masks.append(F.dropout(torch.ones(8)))
        loss = self.loss(batch[0])
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        logits = self(batch[0][:, :-1])
        if isinstance(logits, DTensor):  # divided by "loss_parallel"
            logits = logits.full_tensor()
        self.accuracy(logits.flatten(0, 1), batch[0][:, 1:].flatten())
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten()))
        self.log("accuracy", self.accuracy)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class DividesItself(Speaks):
    def configure_model(self) -> None:
        for block in self.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, self.device_mesh["tensor"], plan)


def sentences(number: int, batch_size: int) -> DataLoader[Any]:
    words = torch.randint(0, WORDS, (number, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(words), batch_size=batch_size)


def fitted(
    steps: int, strategy: Any, path: Path, source: Path | None = None, module: Speaks | None = None, **settings: Any
) -> dict[str, Any]:
    """Train up to an optimizer step on 2 samples per data rank, save, and return the whole weights and the metrics."""
    module = Speaks() if module is None else module
    batch_size = 4 if strategy == "auto" else 2
    trainer = tw.Trainer(max_steps=steps, strategy=strategy, gradient_clip_val=0.5, **QUIET, **settings)
    val_loader = sentences(10, batch_size)
    trainer.fit(module, sentences(32, batch_size), val_loader, ckpt_path=source and str(source))
    trainer.save_checkpoint(str(path))
    found: dict[str, Any] = {"metrics": {name: float(value) for name, value in trainer.callback_metrics.items()}}
    whole = tw.gather_module(module, all_ranks=True)
    assert whole is not None
    return {**found, "weights": dict(whole.named_parameters()), "masks": module.masks}


def divided(plan: dict[str, Any] | None = None, **options: Any) -> tw.FSDPStrategy:
    plan = PLAN if plan is None else plan
    return tw.FSDPStrategy(mesh={"data": 2, "tensor": 2}, tensor_plan=plan, min_parameters=1, **options)


def trained_on_four(folder: Path) -> dict[str, Any]:
    """Train, resume and evaluate under several plans, on this rank of four."""
    quiet()
    module = Speaks()
    found: dict[str, Any] = {"whole": fitted(6, divided(), folder / "whole.ckpt", module=module)}
    places = {name: p.placements for name, p in module.named_parameters() if isinstance(p, DTensor)}
    found["places"] = {name: [str(place) for place in places[name]] for name in ("blocks.0.down.weight", "head.bias")}
    found["bytes"] = sum(p.to_local().numel() * 4 for p in module.parameters() if isinstance(p, DTensor))
    fitted(3, divided(), folder / "half.ckpt")
    found["resumed"] = fitted(6, divided(), folder / "resumed.ckpt", folder / "half.ckpt")
    on_data = tw.FSDPStrategy(mesh={"replicate": 2, "shard": 2}, min_parameters=1)
    fitted(4, on_data, folder / "fsdp.ckpt", folder / "half.ckpt")
    found["resumed from fsdp"] = fitted(5, divided(), folder / "from fsdp.ckpt", folder / "fsdp.ckpt")
    found["windows"] = fitted(3, divided(), folder / "windows.ckpt", accumulate_grad_batches=2)
    once = divided(sync_every_batch=False, reshard_after_forward=False)
    found["windows, synced once"] = fitted(3, once, folder / "once.ckpt", accumulate_grad_batches=2)
    module = Speaks(is_on_sequence=True)
    found["on the sequence"] = fitted(6, divided(ON_SEQUENCE), folder / "sequence.ckpt", module=module)
    found["in configure_model"] = fitted(6, divided({}), folder / "itself.ckpt", module=DividesItself())
    module = Speaks(is_on_sequence=True)
    found["bfloat16"] = fitted(6, divided(ON_SEQUENCE), folder / "bf16.ckpt", module=module, precision="bf16-mixed")
    recomputed = divided(activation_checkpointing_policy={Block})
    found["recomputed"] = fitted(6, recomputed, folder / "recomputed.ckpt")
    averaging = tw.callbacks.EMAWeightAveraging(decay=0.5)
    found["averaged"] = fitted(6, divided(), folder / "averaged.ckpt", callbacks=[averaging])
    with torch.device("meta"):
        module = Speaks()
    found["meta"] = fitted(6, divided(), folder / "meta.ckpt", module=module)
    try:
        fitted(1, divided(ON_SEQUENCE), folder / "wrong.ckpt")
    except RuntimeError as error:
        found["error"] = str(error)
    found["dropout"] = fitted(3, divided(), folder / "dropout.ckpt", module=Speaks(dropout=0.5))["masks"]
    trainer = tw.Trainer(strategy=divided(), **QUIET)
    found["validated"] = trainer.validate(Speaks(), sentences(10, 2), verbose=False)
    found["predicted"] = torch.cat(trainer.predict(Speaks(), sentences(10, 2)) or [])
    return found


def accelerated(folder: Path) -> dict[str, Any]:
    """Train with the Accelerator, on this rank of four or alone."""
    quiet()
    is_alone = torch.distributed.is_initialized() is False
    accelerator = tw.Accelerator(cpu=True, strategy="auto" if is_alone else divided())
    module = Speaks()
    loader = sentences(18, 4 if is_alone else 2)
    model, optimizer, loader = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.01), loader)
    for [words] in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        scores = [accelerator.gather_for_metrics(model(words).argmax(dim=-1)) for [words] in loader]
    return {"weights": {name: value.detach() for name, value in accelerator.get_state_dict(model).items()}, "scores": torch.cat(scores)}


def test_divided_layers_train_save_and_resume_as_whole_ones(tmp_path: Path) -> None:
    ranks = run_job(trained_on_four, 4, tmp_path)
    first = ranks[0]
    whole = fitted(6, "auto", tmp_path / "one.ckpt")
    sequence = Speaks(is_on_sequence=True)
    references = {
        **dict.fromkeys(("whole", "resumed", "in configure_model", "recomputed", "averaged", "meta"), whole),
        **dict.fromkeys(("windows", "windows, synced once"), fitted(3, "auto", tmp_path / "two.ckpt", accumulate_grad_batches=2)),
    }

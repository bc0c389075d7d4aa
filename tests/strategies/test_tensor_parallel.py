"""Tensor parallelism: four gloo ranks of a mesh match one process."""

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
from trainwright.memory.vendor import RankMesh
from trainwright.strategies.fsdp2.tensor_plan import check_plan, match_plan

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

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) if self.is_on_sequence else self.embed(words) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        words = batch[0]
        loss = F.cross_entropy(self(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
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


class CountsHeads(Speaks):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(WIDTH, HEADS * WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return self.heads(self.embed(words)).view(*words.shape, HEADS, WORDS).mean(dim=2)


class DividesItself(Speaks):
    def configure_model(self) -> None:
        for block in self.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, self.device_mesh["tensor"], plan)


def sentences(number: int, batch_size: int, seed: int = 5) -> DataLoader[Any]:
    words = torch.randint(0, WORDS, (number, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(words), batch_size=batch_size)


def fitted(
    steps: int, strategy: Any, path: Path, source: Path | None = None, module: Speaks | None = None, **settings: Any
) -> dict[str, Tensor]:
    """Train up to an optimizer step on four samples a step, save, and return the whole weights."""
    module = Speaks() if module is None else module
    trainer = tw.Trainer(max_steps=steps, strategy=strategy, gradient_clip_val=0.5, **QUIET, **settings)
    trainer.fit(module, sentences(32, 4 // trainer.engine.num_data_ranks), ckpt_path=source and str(source))
    trainer.save_checkpoint(str(path))
    return weights_of(module)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    whole = tw.gather_module(module, all_ranks=True)
    assert whole is not None
    return {name: value.detach() for name, value in whole.named_parameters()}


def divided(plan: dict[str, Any] | None = None, **options: Any) -> tw.FSDPStrategy:
    plan = PLAN if plan is None else plan
    return tw.FSDPStrategy(mesh={"data": 2, "tensor": 2}, tensor_plan=plan or None, min_parameters=1, **options)


def trained(folder: Path) -> dict[str, Any]:
    """Train, resume and evaluate under several plans, on this rank of four."""
    quiet()
    module = Speaks()
    found: dict[str, Any] = {"whole": fitted(6, divided(), folder / "whole.ckpt", module=module)}
    shards = {name: value for name, value in module.named_parameters() if isinstance(value, DTensor)}
    found["places"] = {
        name: [str(place) for place in shards[name].placements] for name in ("embed.weight", "norm.bias")
    }
    found["elements"] = sum(value.to_local().numel() for value in shards.values())
    fitted(3, divided(), folder / "half.ckpt")
    found["resumed"] = fitted(6, divided(), folder / "resumed.ckpt", folder / "half.ckpt")
    found["resumed under fsdp"] = fitted(6, "fsdp", folder / "fsdp.ckpt", folder / "half.ckpt")
    fitted(3, tw.FSDPStrategy(mesh={"replicate": 2, "shard": 2}), folder / "hybrid.ckpt")
    found["resumed from a hybrid mesh"] = fitted(6, divided(), folder / "other.ckpt", folder / "hybrid.ckpt")
    fitted(
        3,
        tw.FSDPStrategy(mesh={"data": 1, "tensor": 4}, tensor_plan={"blocks.*.up": "colwise_gathered"}),
        folder / "1x4.ckpt",
    )
    found["resumed from another mesh"] = fitted(6, divided(), folder / "other.ckpt", folder / "1x4.ckpt")
    found["in configure_model"] = fitted(6, divided({}), folder / "itself.ckpt", module=DividesItself())
    recomputed = divided(activation_checkpointing_policy={Block})
    found["recomputed"] = fitted(6, recomputed, folder / "recomputed.ckpt")
    averaging = tw.callbacks.EMAWeightAveraging(decay=0.5)
    found["averaged"] = fitted(6, divided(), folder / "averaged.ckpt", callbacks=[averaging])
    with torch.device("meta"):
        module = Speaks()
    found["meta"] = fitted(6, divided(), folder / "meta.ckpt", module=module)
    found["windows"] = fitted(3, divided(), folder / "windows.ckpt", accumulate_grad_batches=2)
    once = divided(sync_every_batch=False, reshard_after_forward=False)
    found["windows, synced once"] = fitted(3, once, folder / "once.ckpt", accumulate_grad_batches=2)
    for name, settings in ON_SEQUENCE_RUNS.items():
        module = Speaks(is_on_sequence=True)
        found[name] = fitted(6, divided(ON_SEQUENCE), folder / "sequence.ckpt", module=module, **settings)
    with pytest.raises(RuntimeError, match="different gradients of 'scale', which is not divided"):
        fitted(1, divided(ON_SEQUENCE), folder / "wrong.ckpt")
    trainer, other = (
        tw.Trainer(max_steps=1, strategy=divided(), **QUIET),
        sentences(32, 2, torch.distributed.get_rank()),
    )
    with pytest.raises(RuntimeError, match="the ranks of a tensor group got different batches"):
        trainer.fit(Speaks(), other)
    with pytest.raises(ValueError, match="compile=True cannot hold under strategy='fsdp'"):
        tw.Trainer(strategy=divided({}), compile=True, **QUIET)
    with pytest.raises(ValueError, match="the mesh has tensor=2, but no layer of Speaks is divided"):
        fitted(1, divided({}), folder / "wrong.ckpt")
    with pytest.raises(RuntimeError) as caught:
        fitted(1, divided({"heads": "colwise"}), folder / "wrong.ckpt", module=CountsHeads())
    assert "Let view infer the number of heads" in str(caught.value.__notes__)
    trainer = tw.Trainer(strategy=divided(), **QUIET)
    (found["validated"],) = trainer.validate(Speaks(), sentences(10, 2), verbose=False)
    module = Speaks()
    module.unused = nn.BatchNorm1d(WIDTH)
    synced = tw.Trainer(strategy=divided(), sync_batchnorm=True, **QUIET)
    synced.validate(module, sentences(10, 2), verbose=False)
    assert module.unused.process_group is synced.strategy.data_group
    found["predicted"] = torch.cat(trainer.predict(Speaks(), sentences(10, 2)) or [])
    found["accelerator"] = accelerated(divided())
    return found


ON_SEQUENCE_RUNS: dict[str, dict[str, Any]] = {"on the sequence": {}, "bfloat16": {"precision": "bf16-mixed"}}


def accelerated(strategy: Any) -> dict[str, Any]:
    """Train with the Accelerator, and return the whole weights and the scores of ten samples."""
    accelerator = tw.Accelerator(cpu=True, strategy=strategy)
    module = Speaks()
    batch_size = 4 // accelerator.engine.num_data_ranks
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(module, optimizer, sentences(10, batch_size))
    for [words] in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    with torch.no_grad():
        scores = torch.cat([accelerator.gather_for_metrics(model(words).argmax(dim=-1)) for [words] in loader])
    accelerator.end_training()
    return {"weights": weights_of(module), "scores": scores}


def test_divided_layers_train_save_and_resume_as_whole_ones(tmp_path: Path) -> None:
    ranks = run_job(trained, 4, tmp_path)
    whole = fitted(6, "auto", tmp_path / "one.ckpt")
    expected = {
        "windows": fitted(3, "auto", tmp_path / "two.ckpt", accumulate_grad_batches=2),
        "on the sequence": fitted(6, "auto", tmp_path / "three.ckpt", module=Speaks(is_on_sequence=True)),
    }
    averaging = tw.callbacks.EMAWeightAveraging(decay=0.5)
    expected["averaged"] = fitted(6, "auto", tmp_path / "four.ckpt", callbacks=[averaging])
    expected["windows, synced once"] = expected["windows"]
    low = Speaks(is_on_sequence=True)
    expected["bfloat16"] = fitted(6, "auto", tmp_path / "five.ckpt", module=low, precision="bf16-mixed")
    alone = accelerated("auto")
    trainer = tw.Trainer(**QUIET)
    (validated,) = trainer.validate(Speaks(), sentences(10, 4), verbose=False)
    for rank in ranks:
        assert_equal(rank["whole"], ranks[0]["whole"])
        assert_equal(rank["resumed"], rank["whole"])
        for name in RUNS:
            for parameter, value in expected.get(name, whole).items():
                torch.testing.assert_close(
                    rank[name][parameter], value, rtol=1e-5, atol=1e-5, msg=f"{parameter} differs: {name}"
                )
        distances = [(rank["bfloat16"][name] - value).abs().flatten() for name, value in expected["bfloat16"].items()]
        assert torch.cat(distances).mean() < 1e-3
        assert rank["validated"] == pytest.approx(validated, abs=1e-6)
        assert torch.equal(rank["predicted"], torch.cat(trainer.predict(Speaks(), sentences(10, 4)) or []))
        assert torch.equal(rank["accelerator"]["scores"], alone["scores"])
        for parameter, value in alone["weights"].items():
            torch.testing.assert_close(rank["accelerator"]["weights"][parameter], value, rtol=1e-5, atol=1e-5)
        assert rank["places"] == {"embed.weight": ["_S(0, 2)", "S(0)"], "norm.bias": ["S(0)"]}
    stored = Speaks.load_from_checkpoint(str(tmp_path / "whole.ckpt")).state_dict()
    assert_equal({name: stored[name] for name in whole}, ranks[0]["whole"])
    # A rank has a quarter of the divided layers and half of the norms.
    held = max(rank["elements"] for rank in ranks)
    assert held < 0.3 * sum(value.numel() for value in whole.values())
    planned = RankMesh.parse("data=2,tensor=2", PLAN).on_rank(Speaks(), torch.optim.AdamW)
    assert planned.parameters == pytest.approx(4 * held, rel=0.02)  # uneven shards of a tiny model


def _match(module: nn.Module, plan: dict[str, str], num_ranks: int) -> None:
    check_plan(plan, {"data": 1, "tensor": num_ranks})
    match_plan(module, plan, num_ranks)


RUNS = (
    *("whole", "resumed under fsdp", "resumed from a hybrid mesh", "resumed from another mesh", "in configure_model"),
    *("recomputed", "averaged", "meta", "windows", "windows, synced once", "on the sequence"),
)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"block.*.up": "colwise"}, r"matches no submodule of Speaks.* Did you mean 'blocks\.\*\.up'"),
        ({"blocks.*.up": "columns"}, r"tensor_plan\['blocks.\*.up'\]='columns' is unknown; choose from colwise, "),
        ({"blocks.*.dropout": "sequence", "blocks.0.dropout": "sequence"}, "names 'blocks.0.dropout' twice"),
        ({"blocks.*": "colwise"}, "divides 'blocks.0', a Block. Only nn.Linear and nn.Embedding"),
        ({"head": "colwise"}, "divides 'head' over 3 ranks, and its out_features=14 is not a multiple of 3"),
    ],
)
def test_plans_that_do_not_fit_are_rejected(plan: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        _match(Speaks(), plan, 3)


def test_tied_and_uncalled_layers_are_rejected() -> None:
    module = Speaks()
    module.head.weight = module.embed.weight
    with pytest.raises(ValueError, match="divides a parameter that 'embed' and 'head' have in common"):
        _match(module, {"embed": "rowwise"}, 2)
    module = Speaks()
    module.words = module.embed.weight  # of the module itself
    with pytest.raises(ValueError, match="a parameter that 'the module itself' and 'embed' have in common"):
        _match(module, {"embed": "rowwise"}, 2)
    layer = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8))
    with pytest.raises(ValueError, match=r"'0.linear1', whose weight a TransformerEncoderLayer uses without calling"):
        _match(layer, {"*.linear1": "colwise"}, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": {"data": 2, "tensor": 3}}, "is for 6 processes .2 . 3., but the job has 4"),
        ({"mesh": {"data": 2, "context": 2}}, "'context' is not supported"),
        ({"mesh": {"replicate": 4, "shard": 1}}, "has a shard of 1, so that nothing is sharded"),
        ({"tensor_plan": PLAN}, "needs a mesh with a tensor dimension"),
        ({"mesh": {"replicate": 2, "shard": 2}, "num_replicas": 2}, "does not go with mesh="),
    ],
)
def test_meshes_that_do_not_fit_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tw.Trainer(strategy=tw.FSDPStrategy(**options), devices=4, accelerator="cpu")

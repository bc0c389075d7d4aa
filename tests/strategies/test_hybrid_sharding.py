"""Hybrid sharding: replicas of a module that are each sharded over a group of ranks, here two by two on four gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contract_job import RANK_BATCH, STEPS, Classifies, loader, optimizer_bytes, quiet, sentences
from jobs import run_job
from small import QUIET, assert_equal
from torch.distributed.device_mesh import DeviceMesh

import trainwright as tw

pytestmark = pytest.mark.slow


def fitted(steps: int, strategy: Any, path: Path, source: Path | None = None, **settings: Any) -> dict[str, Any]:
    """Train up to an optimizer step, save, and return the whole weights."""
    module = Classifies()
    trainer = tw.Trainer(max_steps=steps, strategy=strategy, gradient_clip_val=0.2, **QUIET, **settings)
    trainer.fit(module, loader(sentences(STEPS * RANK_BATCH * 4), 1), ckpt_path=source and str(source))
    trainer.save_checkpoint(str(path))
    whole = tw.gather_module(module, all_ranks=True)
    assert whole is not None
    return {name: value for name, value in whole.state_dict().items() if "accuracy" not in name}


def hybrid(folder: Path) -> dict[str, Any]:
    """Train, resume, accumulate, and train with the Accelerator, on this rank of four."""
    quiet()

    def strategy(**options: Any) -> tw.FSDPStrategy:
        return tw.FSDPStrategy(num_replicas=2, min_parameters=1, **options)

    found: dict[str, Any] = {"whole": fitted(6, strategy(), folder / "whole.ckpt")}
    fitted(3, strategy(), folder / "half.ckpt")
    found["resumed"] = fitted(6, strategy(), folder / "resumed.ckpt", folder / "half.ckpt")
    found["other sharding"] = fitted(6, "fsdp", folder / "fsdp.ckpt", folder / "half.ckpt")
    found["windows"] = fitted(3, strategy(), folder / "windows.ckpt", accumulate_grad_batches=2)
    once = strategy(sync_every_batch=False)
    found["windows, synced once"] = fitted(3, once, folder / "once.ckpt", accumulate_grad_batches=2)
    found["bytes"] = optimizer_bytes(strategy())

    accelerator = tw.Accelerator(cpu=True, strategy=strategy())
    module = Classifies()
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.02))
    mesh: DeviceMesh = next(module.parameters()).device_mesh  # type: ignore[assignment]
    found["mesh"] = (mesh.mesh_dim_names, mesh.mesh.tolist())
    words, label = accelerator.prepare(loader(sentences(8), 1)).dataset.tensors
    rank = accelerator.process_index
    accelerator.backward(torch.nn.functional.cross_entropy(model(words[rank::4]), label[rank::4]))
    optimizer.step()
    return found


def test_hybrid_shards_train_save_and_resume_as_whole_ones(tmp_path: Path) -> None:
    ranks = run_job(hybrid, 4, tmp_path)
    for rank in ranks:
        assert rank["mesh"] == (("replicate", "shard"), [[0, 1], [2, 3]])
        assert_equal(rank["whole"], ranks[0]["whole"])
        assert_equal(rank["resumed"], rank["whole"])
        for first, second in (("other sharding", "whole"), ("windows, synced once", "windows")):
            for name, value in rank[first].items():
                torch.testing.assert_close(value, rank[second][name], rtol=1e-5, atol=1e-5)
    stored = Classifies.load_from_checkpoint(str(tmp_path / "whole.ckpt")).state_dict()
    assert_equal({name: stored[name] for name in ranks[0]["whole"]}, ranks[0]["whole"])
    total = sum(rank["bytes"] for rank in ranks)
    assert all(rank["bytes"] <= 0.26 * total for rank in ranks)  # a half of the model, which two replicas hold


@pytest.mark.parametrize("replicas", [3, 4])
def test_replicas_that_do_not_divide_the_processes_are_rejected(replicas: int) -> None:
    with pytest.raises(ValueError, match=rf"num_replicas={replicas} does not divide 4 processes .* Pass 1 or 2, or"):
        tw.Trainer(strategy=tw.FSDPStrategy(num_replicas=replicas), devices=4, accelerator="cpu")
    with pytest.raises(ValueError, match="num_replicas=0 is not accepted"):
        tw.FSDPStrategy(num_replicas=0)

"""Values that ranks gather, reduce, broadcast and divide, and blocks that run in turns, on one rank and on two."""

from __future__ import annotations

import copy
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import ON_HOST, Classifier, fit
from torch import Tensor
from torch.utils.data import DataLoader

import trainwright as tw
from trainwright.engine.nests import portion

SENT = {
    "text": "ü",
    "numbers": [1, 2.5, None, True, math.inf],
    "nested": ({3: "three"}, [torch.arange(6).reshape(2, 3)]),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 4),
    "strided": torch.arange(12.0).reshape(3, 4).t(),
}


class Gathering(Classifier):
    """Gathers in a step, where its gradients go back to the ranks that they belong to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.seen: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        own = {"pair": (torch.full((2,), float(rank)), [rank, 0.5]), "text": "kept"}
        self.seen["nested"] = self.all_gather(own)
        if world_size > 1:
            with pytest.raises(ValueError) as caught:
                self.all_gather(torch.ones(2 + rank))
            with pytest.raises(TypeError, match="all_gather got a different dtype on"):
                self.all_gather(torch.ones(2, dtype=[torch.float32, torch.int64][rank]))
            self.seen["refused"] = str(caught.value)
        gathered = self.all_gather(self.weight * (rank + 1.0), sync_grads=True).reshape(-1, 2)
        scales = torch.arange(1.0, world_size + 1.0).reshape(-1, 1)
        (gradient,) = torch.autograd.grad((gathered * scales).sum(), self.weight)
        self.seen["gradient"] = gradient
        return super().training_step(batch, batch_idx) + 0.0 * self.weight.sum()


def by_turns(context: Any, rank: int, folder: Path) -> bool:
    """Return whether this rank saw the file that rank 0 made in its turn, without waiting for it."""
    path = folder / "made"
    with context:
        if rank == 0:
            time.sleep(0.1)
            path.write_text("here")
        return path.exists()


def plain_data(accelerator: tw.Accelerator) -> dict[str, Any]:
    """Gather and reduce plain data, over a loader whose last round is filled up."""
    rank = accelerator.process_index
    texts, labels = [], []
    for batch in accelerator.prepare(DataLoader([(f"sample {index}", index) for index in range(5)], batch_size=2)):
        texts += accelerator.gather_for_metrics(batch[0])
        labels += accelerator.gather_for_metrics(batch[1]).tolist()
    return {
        "texts": texts,
        "labels": labels,
        "reduced plain": [accelerator.reduce({"loss": 1.0 + rank}, op)["loss"] for op in ("sum", "mean", "min", "max")],
        "reduced both": accelerator.reduce([2**60 + rank, torch.tensor(rank)]),
    }


def late_and_foreign(accelerator: tw.Accelerator) -> dict[str, Any]:
    """Train layers that were frozen or added later, on different data per rank; return the weights of all ranks."""
    rank, ranks = accelerator.process_index, accelerator.num_processes
    with torch.device("meta"):
        net = torch.nn.ModuleDict({"body": torch.nn.Linear(3, 3), "head": torch.nn.Linear(3, 1)})
    net.forward = lambda x: net["head"](net["extra"](net["body"](x)) if "extra" in net else net["body"](x))
    net["body"].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model, optimizer = accelerator.prepare(net, optimizer)
    loader = accelerator.prepare(DataLoader(torch.arange(12.0).reshape(4, 3) / 10, batch_size=1))
    made = [{name: each.clone() for name, each in net.named_parameters()}]
    for epoch in range(3):
        if epoch == 1:
            net["body"].requires_grad_(True)
        if epoch == 2:
            torch.manual_seed(rank)
            net["extra"] = torch.nn.Linear(3, 3)
            optimizer.add_param_group({"params": list(net["extra"].parameters())})
        for batch in loader:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
        made.append({name: each.detach().clone() for name, each in net.named_parameters()})
    copied = copy.deepcopy(model)
    found: dict[str, Any] = {"moved": {}, "copy": copied(torch.ones(1, 3)).item() == model(torch.ones(1, 3)).item()}
    for name, last in made[-1].items():
        everywhere = accelerator.gather(last.reshape(1, -1))
        assert torch.equal(everywhere, everywhere[:1].expand(ranks, -1)), name
        found["moved"][name] = [name in before and not torch.equal(before[name], last) for before in made[:-1]]
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    found["average"] = average(torch.ones(1, 3)).item() == model(torch.ones(1, 3)).item()
    if ranks > 1:
        foreign = {"params": [torch.nn.Parameter(torch.ones(1))]}
        with pytest.raises(
            ValueError, match="has parameters of no prepared model, which each of the 2 ranks would train"
        ):
            optimizer.add_param_group(foreign)
    return found


def job(folder: Path) -> dict[str, Any]:
    accelerator = tw.Accelerator(cpu=ON_HOST)
    engine, rank = accelerator.engine, accelerator.process_index
    found: dict[str, Any] = {"rank": rank}
    found["gathered"] = accelerator.gather({"a": [torch.tensor(rank)], "b": torch.full((1 + rank, 2), float(rank))})
    found["reduced"] = [
        accelerator.reduce({"x": torch.tensor([1.0 + rank])}, op)["x"].item() for op in ("sum", "mean", "max")
    ]
    found.update(plain_data(accelerator))
    found["late"] = late_and_foreign(tw.Accelerator(cpu=ON_HOST))
    found["sent"] = engine.broadcast(SENT if rank == 0 else None)
    last = accelerator.num_processes - 1
    found["sent by the last"] = accelerator.broadcast({"from": rank, "tensor": torch.tensor([rank])}, from_process=last)
    with pytest.raises(ValueError, match="src=7 is not a rank; choose from 0 to"):
        engine.broadcast(1, src=7)
    for name, context in (
        ("engine", engine.rank_zero_first()),
        ("local", engine.rank_zero_first(local=True)),
        ("main", accelerator.main_process_first()),
        ("local main", accelerator.local_main_process_first()),
    ):
        (folder / name).mkdir(exist_ok=True)
        found[f"turn of {name}"] = by_turns(context, rank, folder / name)
    for wait in (engine.barrier, accelerator.wait_for_everyone):
        path = folder / wait.__name__
        if rank == last:
            time.sleep(0.2)
            path.touch()
        wait()
        found[f"turn of {wait.__name__}"] = path.exists()
    with accelerator.split_between_processes(list(range(5))) as part:
        found["part"] = part
    with accelerator.split_between_processes(torch.arange(5), apply_padding=True) as part:
        found["padded"] = part.tolist()
    module = Gathering()
    trainer = fit(module, limit_train_batches=1)
    trainer.print(f"printed by rank {rank}")
    found.update(module.seen)
    return found


def check(found: dict[str, Any], ranks: int) -> None:
    rank = found["rank"]
    assert found["gathered"]["a"][0].tolist() == list(range(ranks))
    assert found["gathered"]["b"].shape == (sum(range(1, ranks + 1)), 2)
    assert found["reduced"] == ([1.0, 1.0, 1.0] if ranks == 1 else [3.0, 1.5, 2.0])
    assert sorted(found["texts"]) == [f"sample {index}" for index in range(5)]
    assert [f"sample {index}" for index in found["labels"]] == found["texts"]
    assert found["reduced plain"] == ([1.0] * 4 if ranks == 1 else [3.0, 1.5, 1.0, 2.0])
    assert found["reduced both"][0] == (2**60 if ranks == 1 else 2**61 + 1)
    assert found["reduced both"][1].item() == ranks - 1
    assert found["late"]["copy"]
    assert found["late"]["average"]
    for name, moved in found["late"]["moved"].items():
        assert moved == ([False, False, False] if name.startswith("extra") else [True] * 3), name
    sent = found["sent"]
    assert (sent["text"], sent["numbers"]) == (SENT["text"], SENT["numbers"])
    assert sent["nested"][0] == {3: "three"}
    assert torch.equal(sent["nested"][1][0], torch.arange(6).reshape(2, 3))
    for name in ("half", "scalar", "empty", "strided"):
        assert torch.equal(sent[name], SENT[name])
        assert sent[name].dtype == SENT[name].dtype
    assert found["sent by the last"]["from"] == found["sent by the last"]["tensor"].item() == ranks - 1
    for name in ("engine", "local", "main", "local main", "barrier", "wait_for_everyone"):
        assert found[f"turn of {name}"]
    assert found["part"] == ([0, 1, 2, 3, 4] if ranks == 1 else [[0, 1, 2], [3, 4]][rank])
    assert found["padded"] == ([0, 1, 2, 3, 4] if ranks == 1 else [[0, 1, 2], [3, 4, 4]][rank])
    nested = found["nested"]
    assert nested["text"] == "kept"
    stacked = (lambda values: torch.tensor(values[0])) if ranks == 1 else torch.tensor
    assert torch.equal(nested["pair"][0], stacked([[0.0, 0.0], [1.0, 1.0]][:ranks]))
    assert torch.equal(nested["pair"][1][0], stacked([0, 1][:ranks]))
    assert torch.equal(nested["pair"][1][1], stacked([0.5, 0.5][:ranks]))
    assert ranks == 1 or "different shapes (rank 0: (2,), rank 1: (3,)); they have to be equal" in found["refused"]
    # Every rank's loss scales rank r's part by r + 1, and that part is (r + 1) times the weight.
    assert torch.equal(found["gradient"], torch.full((2,), float(ranks * (rank + 1) ** 2)))


def test_one_process_gathers_and_broadcasts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(job(tmp_path), 1)
    assert "printed by rank 0" in capsys.readouterr().out


def test_two_ranks_gather_and_broadcast(tmp_path: Path) -> None:
    for found in run_job(job, 2, tmp_path):
        check(found, 2)


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize(("items", "ranks"), [(0, 2), (1, 3), (7, 3), (6, 3), (8, 5)])
def test_parts_make_up_the_whole(items: int, ranks: int, pad: bool) -> None:
    for kind in (list, tuple, torch.tensor):
        whole = kind(list(range(items)))
        parts = [list(portion(whole, rank, ranks, pad)) for rank in range(ranks)]
        if not pad:
            assert [int(each) for part in parts for each in part] == list(range(items))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
        else:
            assert {len(part) for part in parts} == {-(-items // ranks)}
            assert {int(each) for part in parts for each in part} == set(range(items))


def test_dicts_are_divided_by_value_and_others_refused() -> None:
    assert portion({"a": [1, 2, 3], "b": ["x", "y", "z"]}, 1, 2, False) == {"a": [3], "b": ["z"]}
    with pytest.raises(ValueError, match=r"different lengths \({'a': 1, 'b': 2}\); pass values of the same length"):
        portion({"a": [1], "b": [1, 2]}, 0, 2, False)
    with pytest.raises(TypeError, match="was given a str; expected a list, a tuple, a tensor, or a dict"):
        portion("text", 0, 2, False)

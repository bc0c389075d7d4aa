"""The collectives of a raw loop, and their errors on every rank, on one process and on two ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import make_net
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.distributed import collectives


def refused(kind: type[Exception], call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*args, **options)
    return str(caught.value)


def collect(folder: Path) -> dict[str, Any]:
    free = tw.gather(torch.tensor([1.0])).tolist()  # before an Accelerator joins the job
    accelerator = tw.Accelerator(cpu=True)
    rank = accelerator.process_index
    wide = torch.ones(1 + rank, 2 + 3 * rank)
    found: dict[str, Any] = {
        "free": [free, tw.reduce(torch.tensor([1.0 + rank])).tolist(), tw.reduce(2, "sum"),
            tw.broadcast({"rank": rank})],
        "shapes": refused(ValueError, accelerator.gather, wide),
        "reduced": [refused(ValueError, accelerator.reduce, {"a": torch.ones(2), "b": wide}),
            refused(TypeError, tw.reduce, torch.ones(2, dtype=[torch.float32, torch.int64][rank]))],
        "dims": refused(ValueError, tw.gather, torch.ones([2] * (1 + rank))),
        "padded": accelerator.gather(accelerator.pad_across_processes({"x": wide}, dim=1, pad_index=-1))["x"].tolist(),
        "first": tw.pad_across_processes(wide, pad_first=True).tolist(),
        "unchanged": accelerator.pad_across_processes(torch.tensor(7), dim=1).item(),
    }  # fmt: skip
    found["triggers"] = [accelerator.check_trigger()]
    if rank == accelerator.num_processes - 1:
        accelerator.set_trigger()
    found["triggers"] += [accelerator.check_trigger(), accelerator.check_trigger()]
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(rank)
    tw.synchronize_rng_states(["torch", "generator"], generator)
    found["drawn"] = [torch.rand(1).item(), torch.rand(1, generator=generator).item()]
    with accelerator.join_uneven_inputs([make_net()], even_batches=False):
        found["joined"] = True
    return found


def read_loaders(folder: Path) -> dict[str, Any]:
    """Prepare loaders that are rejected. Save within an epoch and resume."""
    accelerator = tw.Accelerator(cpu=True)
    rank = accelerator.process_index
    found: dict[str, Any] = {}
    with pytest.raises(ValueError, match=r"has 1 batches for 2 ranks, and drop_last drops a short round"):
        accelerator.prepare(DataLoader(list(range(2)), batch_size=2, drop_last=True))
    split = tw.Accelerator(cpu=True, split_batches=True)
    with pytest.raises(ValueError, match=r"batch_size=3. Pass a batch_size that is divisible by 2"):
        split.prepare(DataLoader(list(range(6)), batch_size=3))
    with pytest.raises(ValueError, match=r"with batch_size=None"):
        split.prepare(DataLoader(list(range(6)), batch_size=None))

    def prepared() -> tuple[tw.Accelerator, Any]:
        other, net = tw.Accelerator(cpu=True), make_net()
        torch.manual_seed(11)
        return other, other.prepare(net, DataLoader(TensorDataset(torch.arange(23)), batch_size=2, shuffle=True))[1]

    other, loader = prepared()
    whole = []
    for number, (batch,) in enumerate(loader):
        whole.append(batch.tolist())
        if number == 2:
            other.save_state(str(folder / "state"))
    again, loader = prepared()
    torch.manual_seed(12)
    again.load_state(str(folder / "state"))
    found["rest"] = loader.epoch == 0 and [batch.tolist() for (batch,) in loader] == whole[3:]
    found["whole"] = whole
    synced = tw.Accelerator(cpu=True, rng_types=["torch"])
    torch.manual_seed(rank)
    next(iter(synced.prepare(DataLoader(list(range(4)), batch_size=2))))
    found["synced"] = torch.rand(1).item()
    return found


def zipped(folder: Path) -> list[list[int]]:
    """Read two loaders at once, whose last rounds have samples on different ranks."""
    accelerator = tw.Accelerator(cpu=True)
    first, second = accelerator.prepare(
        DataLoader(list(range(8)), batch_size=2), DataLoader(list(range(5)), batch_size=2)
    )
    found: list[list[int]] = [[], []]
    for left, right in zip(first, second, strict=True):
        found[0] += accelerator.gather_for_metrics(left).tolist()
        found[1] += accelerator.gather_for_metrics(right, loader=second).tolist()
    return found


def everything(folder: Path) -> list[Any]:
    return [collect(folder), read_loaders(folder), zipped(folder)]


def test_collectives_agree_on_two_ranks(tmp_path: Path) -> None:
    both = run_job(everything, 2, tmp_path)
    for rank, (found, read, together) in enumerate(both):
        assert found["free"] == [[1.0, 1.0], [1.5], 4, {"rank": 0}]
        assert "rank 0: (1, 2), rank 1: (2, 5)). Pad them with pad_across_processes(tensor, dim=1)" in found["shapes"]
        assert "rank 0: (2,), rank 1: (2, 2)). Pad them with" in found["dims"]
        assert "different shapes (rank 0: (1, 2), rank 1: (2, 5)). Use pad_across" in found["reduced"][0]
        assert "a different dtype on rank(s) [1]" in found["reduced"][1]
        assert found["padded"] == [[1.0, 1.0, -1.0, -1.0, -1.0], [1.0] * 5, [1.0] * 5]
        assert found["first"] == ([[0.0, 0.0], [1.0, 1.0]] if rank == 0 else [[1.0] * 5] * 2)
        assert (found["unchanged"], found["triggers"], found["joined"]) == (7, [False, True, False], True)
        assert found["drawn"] == both[0][0]["drawn"]
        assert read["rest"]
        assert read["synced"] == both[0][1]["synced"]
        assert together == [list(range(8)), list(range(5))]
    sizes = [sum(map(len, read["whole"])) for _, read, _ in both]
    seen = sorted(each for _, read, _ in both for batch in read["whole"] for each in batch)
    assert (seen, sizes) == (list(range(23)), [12, 11])
    # One process resumes in the middle of the epoch that two began.
    accelerator = tw.Accelerator(cpu=True)
    _, loader = accelerator.prepare(make_net(), DataLoader(TensorDataset(torch.arange(23)), batch_size=2, shuffle=True))
    accelerator.load_state(str(tmp_path / "state"))
    assert loader.epoch == 0
    rest = sorted(each for (batch,) in loader for each in batch.tolist())
    assert rest == sorted(each for _, read, _ in both for batch in read["whole"][3:] for each in batch)


def test_collectives_need_no_second_process(tmp_path: Path) -> None:
    assert tw.gather([torch.ones(1), None]) == [torch.ones(1), None]
    assert (tw.reduce(3.0), tw.broadcast("x"), tw.pad_across_processes(torch.ones(2)).tolist()) == (
        3.0,
        "x",
        [1.0, 1.0],
    )
    accelerator = tw.Accelerator(cpu=True)
    scaled = accelerator.reduce({"a": torch.ones(2), "b": 3, "c": None}, "mean", scale=0.5)
    assert (scaled["a"].tolist(), scaled["b"], scaled["c"], tw.reduce(2, scale=2.0)) == ([0.5, 0.5], 1.5, None, 4.0)
    assert accelerator.gather_for_metrics([random, 1][1:], use_gather_object=True) == [1]
    assert accelerator.gather_for_metrics({"id": 1}, use_gather_object=True) == [{"id": 1}]
    accelerator.set_trigger()
    assert [accelerator.check_trigger(), accelerator.check_trigger()] == [True, False]
    assert collectives.shapes_of(torch.ones(2, 3), "x") == [(2, 3)]


def test_wrong_arguments_of_collectives_are_rejected() -> None:
    accelerator = tw.Accelerator(cpu=True)
    with pytest.raises(TypeError, match="pad_across_processes was given a str"):
        accelerator.pad_across_processes("text")
    with pytest.raises(ValueError, match=r"rng_types has 'numpy'. Expected torch, generator"):
        tw.Accelerator(cpu=True, rng_types=["numpy"])
    with pytest.raises(TypeError, match="rng_types='torch' is not a list"):
        tw.synchronize_rng_states("torch")
    with pytest.raises(ValueError, match=r"no generator was given. Pass generator="):
        tw.synchronize_rng_states(["generator"])
    with pytest.raises(TypeError, match=r"dataloader_config is a dict. Expected a tw.DataLoaderConfiguration"):
        tw.Accelerator(cpu=True, dataloader_config={})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"even_batches=1 is not accepted. Pass True or False"):
        tw.DataLoaderConfiguration(even_batches=1)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"dispatch_batches=True is not accepted: every process reads the data.*Omit it"
    ):
        tw.DataLoaderConfiguration(dispatch_batches=True)
    with pytest.raises(TypeError, match=r"data_seed='x' is a str. Expected an int, or None"):
        tw.DataLoaderConfiguration(data_seed="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="prepare_data_loader was given a Sequential, which is not a loader"):
        accelerator.prepare_data_loader(make_net())
    with pytest.raises(TypeError, match="prepare was given an object of type SkippedBatches"):
        accelerator.prepare(tw.skip_first_batches(DataLoader([1, 2])))
    with pytest.raises(ValueError, match="num_batches=-1 is not accepted"):
        tw.skip_first_batches([1, 2], -1)
    with pytest.raises(TypeError, match=r"skip_first_batches was given an int. Expected a loader"):
        tw.skip_first_batches(3)
    with pytest.raises(ValueError, match="this loader is not prepared"):
        accelerator.gather_for_metrics(1, loader=DataLoader([1]))
    with (
        pytest.raises(TypeError, match=r"join_uneven_inputs takes a list of models"),
        accelerator.join_uneven_inputs(make_net()),
    ):
        pass


def test_loaders_that_are_not_prepared_can_be_skipped() -> None:
    def made(kind: str) -> Any:
        if kind == "list":
            return [[0, 1], [2, 3], [4, 5]]
        options = {"indices": {"batch_size": 2, "shuffle": True}, "single": {"batch_size": None}}[kind]
        return DataLoader(list(range(9)), **options)

    for kind in ("list", "indices", "single"):
        torch.manual_seed(1)
        whole = [torch.as_tensor(batch).tolist() for batch in made(kind)]
        torch.manual_seed(1)
        skipped = tw.skip_first_batches(made(kind), 2)
        assert len(skipped) == len(whole) - 2
        assert [torch.as_tensor(batch).tolist() for batch in skipped] == whole[2:]
        assert len(list(skipped)) == len(skipped) == len(whole)


def test_a_loader_counts_its_epochs() -> None:
    accelerator = tw.Accelerator(cpu=True, dataloader_config=tw.DataLoaderConfiguration(data_seed=1))

    def made() -> Any:
        return accelerator.prepare_data_loader(DataLoader(list(range(20)), batch_size=2, shuffle=True))

    loader, epochs = made(), []
    for epoch in range(3):
        loader.set_epoch(epoch)
        epochs.append([batch.tolist() for batch in loader])
    loader = made()
    loader.set_epoch(2)
    assert [batch.tolist() for batch in loader] == epochs[2]
    loader.set_epoch(1)
    next(iter(loader))
    state = loader.state_dict()
    loader = made()
    loader.load_state_dict(state)
    loader.set_epoch(1)  # as the loop of a resumed script does
    skipped = accelerator.skip_first_batches(loader, 1)  # which does not skip it twice
    assert [batch.tolist() for batch in skipped] == epochs[1][1:]
    assert (loader.total_batch_size, loader.total_dataset_length) == (2, 20)

"""One process beside several: random loaders, combinations, accumulation, limits, manual optimization, evaluation, prediction.

    python benchmarks/fuzz/ranks.py ddp 0 20      # strategy, first seed, number of seeds; two gloo ranks

Each seed makes one configuration, which is run on one process with a global batch and on two with halves of it. Compared are
the weights (1e-6), the counters, every epoch metric, the samples seen, and the predictions. Combined loaders that cannot be cut
in one proportion warn, and are compared by their number of steps alone.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import trainwright as tw

RANKS = 2
torch.set_num_threads(1)


class Stream(IterableDataset[Any]):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter([self.data[i] for i in range(len(self.data))])


def data(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    return TensorDataset(
        x, x.sum(1, keepdim=True) + torch.randn(count, 1, generator=generator), torch.arange(1.0, count + 1)
    )


def world() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def loader(draw: random.Random, kind: str, count: int, size: int, seed: int) -> Any:
    dataset, batch = data(count, seed), size // world()
    if kind == "stream":
        return DataLoader(Stream(dataset), batch_size=batch)
    if kind == "weighted":
        generator = torch.Generator().manual_seed(4)
        weights = torch.rand(count, generator=generator).tolist()
        return DataLoader(dataset, batch_size=batch, sampler=WeightedRandomSampler(weights, count))
    return DataLoader(dataset, batch_size=batch, shuffle=kind == "shuffle", num_workers=0)


class Net(tw.Module):
    def __init__(self, manual: bool, pulls: bool, communicates: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        self.automatic_optimization = not manual
        self.communicates = communicates
        self.seen: list[float] = []
        self.metrics = nn.ModuleDict()
        for stage in ("train", "val", "test"):
            self.metrics[f"{stage}_mean"], self.metrics[f"{stage}_max"] = (
                torchmetrics.MeanMetric(),
                torchmetrics.MaxMetric(),
            )
        self.synced = torchmetrics.MeanMetric(dist_sync_on_step=True)
        self.window = 1

    def parts(self, batch: Any) -> list[Any]:
        return [each for each in (batch.values() if isinstance(batch, dict) else [batch]) if each is not None]

    def loss(self, batch: Any, log: str) -> Any:
        parts = self.parts(batch)
        loss: Any = 0.0
        names = [key for key, each in batch.items() if each is not None] if isinstance(batch, dict) else [""]
        metric, largest = self.metrics[f"{log}_mean"], self.metrics[f"{log}_max"]
        for number, (x, y, ids) in zip(names, parts, strict=True):
            mine = nn.functional.mse_loss(self.net(x), y)
            loss = loss + mine
            self.seen += ids.tolist()
            metric.update(ids)
            largest.update(ids)
            self.log(f"{log}_sum{number}", ids.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
            self.log(f"{log}_loss{number}", mine, on_step=False, on_epoch=True, batch_size=len(ids))
        self.log(f"{log}_metric", metric, on_step=False, on_epoch=True)
        self.log(f"{log}_max", largest, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch, "train")
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss)
        if (batch_idx + 1) % self.window == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        n = sum(len(ids) for _, _, ids in self.parts(batch))
        self.log("end", float(n), on_step=False, on_epoch=True, reduce_fx="sum")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch, "val")
        if self.communicates:
            self.all_gather(batch[2] if not isinstance(batch, dict) else torch.ones(1))
            self.synced(torch.ones(1))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        if self.automatic_optimization:
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return optimizer


class PullingNet(Net):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, index, _ = next(dataloader_iter)
        return super().training_step(batch, index)

    def test_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        super().test_step(next(dataloader_iter)[0], 0)

    def predict_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().predict_step(next(dataloader_iter)[0], 0)


class Samples(tw.Callback):
    def __init__(self) -> None:
        self.ids: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for _, _, ids in module.parts(batch):
            self.ids += ids.tolist()


def gathered(values: list[float]) -> list[float]:
    if world() == 1:
        return sorted(values)
    from trainwright.distributed.collectives import gather_object

    return sorted(each for part in gather_object(values) for each in part)


def run(seed: int, strategy: str) -> dict[str, Any]:
    draw = random.Random(seed)
    size = draw.choice([2, 4, 4, 8])
    kinds = ["plain", "shuffle", "weighted", "stream"]
    count = draw.randint(2, 26)
    kind = draw.choice([*kinds, "min_size", "max_size", "max_size_cycle", "sequential"])
    manual, pulls = draw.random() < 0.4, draw.random() < 0.3
    accumulate = draw.choice([1, 1, 2, 3])
    limit_train = draw.choice([None, None, None, 2, 0.6])
    limit_val = draw.choice([None, 0.5, 0.3, 2])
    communicates, epochs = draw.random() < 0.5, draw.choice([1, 2])
    val_count, pred_count = draw.randint(1, 17), draw.randint(1, 17)
    val_kind = draw.choice(["plain", "shuffle", "stream", "dict", "max_size", "max_size"])  # min_size ends by batches
    second = draw.randint(2, 26)
    if kind == "stream" and isinstance(limit_train, float):
        limit_train = 2
    if val_kind == "stream" and isinstance(limit_val, float):
        limit_val = 2
    config = {
        "size": size,
        "count": count,
        "kind": kind,
        "manual": manual,
        "pulls": pulls,
        "accumulate": accumulate,
        "limit_train": limit_train,
        "limit_val": limit_val,
        "communicates": communicates,
        "epochs": epochs,
        "val_count": val_count,
        "val_kind": val_kind,
        "second": second,
    }
    if kind in kinds:
        train: Any = loader(draw, kind, count, size, 1)
    else:
        pair = draw.choice(kinds), draw.choice(kinds)
        if "stream" in pair and isinstance(limit_train, float):
            limit_train = 2
        config["pair"] = pair
        train = tw.CombinedLoader(
            {"a": loader(draw, pair[0], count, size, 1), "b": loader(draw, pair[1], second, size, 2)}, kind
        )
    val: Any
    if val_kind in ("max_size", "min_size"):
        val = tw.CombinedLoader(
            {"a": loader(draw, "plain", val_count, size, 3), "b": loader(draw, "plain", second, size, 4)}, val_kind
        )
    elif val_kind == "dict":
        val = {"a": loader(draw, "plain", val_count, size, 3), "b": loader(draw, "plain", second, size, 4)}
    else:
        val = loader(draw, val_kind, val_count, size, 3)
    module = (PullingNet if pulls and kind != "sequential" else Net)(manual, pulls, communicates)
    module.window = accumulate
    samples = Samples()
    trainer = tw.Trainer(
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        max_epochs=epochs,
        strategy=strategy if world() > 1 else "auto",
        accumulate_grad_batches=1 if manual else accumulate,
        num_sanity_val_steps=0,
        callbacks=[samples],
        limit_train_batches=limit_train,
        limit_val_batches=limit_val,
        use_distributed_sampler=True,
    )
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, train, val)
        seen, ids = gathered(module.seen), gathered(samples.ids)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        state = {}
        for name, value in module.state_dict().items():
            if name.startswith("net"):
                state[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).flatten().tolist()
        tests = trainer.test(module, loader(draw, "plain", val_count, size, 6), verbose=False)
        predictions = trainer.predict(module, loader(draw, "plain", pred_count, size, 7))
        said = [str(each.message) for each in caught]
    inexact = any("cannot share a round of the combined" in each for each in said)
    return {
        "config": config,
        "inexact": inexact,
        "step": trainer.global_step,
        "seen": seen,
        "ids": ids,
        "metrics": metrics,
        "weights": state,
        "tests": tests,
        "predictions": torch.cat(predictions).flatten().tolist() if predictions else [],
    }


def differs(one: Any, other: Any, tolerance: float = 2e-6) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return not (one == other or one != one != other != other or abs(one - other) <= tolerance * max(1.0, abs(one)))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() != other.keys() or any(differs(one[key], other[key], tolerance) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) != len(other) or any(differs(a, b, tolerance) for a, b in zip(one, other, strict=True))
    return bool(one != other)


def results(strategy: str, seeds: range) -> dict[int, Any]:
    found: dict[int, Any] = {}
    tw.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)  # joins the job
    for seed in seeds:
        tw.seed_everything(
            seed, verbose=False
        ) if "verbose" in tw.seed_everything.__code__.co_varnames else torch.manual_seed(seed)
        try:
            found[seed] = run(seed, strategy)
        except (ValueError, TypeError, RuntimeError) as error:
            found[seed] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            if world() > 1 and not isinstance(error, (ValueError, TypeError)):
                print(seed, found[seed]["trace"], flush=True)
                break
    return found


def main() -> None:
    strategy, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    seeds = range(first, first + count)
    path = f"{tempfile.gettempdir()}/fuzz-ranks-{os.getpid()}.json"
    if len(sys.argv) > 4:
        got = results(strategy, seeds)
        if os.environ.get("RANK") == "0":
            Path(sys.argv[4]).write_text(json.dumps(got))
        return
    command = [sys.executable, __file__, strategy, str(first), str(count), path]
    launcher = [sys.executable, "-m", "trainwright.launch.processes", "--num-processes", str(RANKS), "--", *command]
    job = subprocess.Popen(
        launcher,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    alone = results(strategy, seeds)
    text, _ = job.communicate()
    if not os.path.exists(path):
        sys.exit(text[-6000:])
    several = {int(key): value for key, value in json.loads(Path(path).read_text()).items()}
    os.unlink(path)
    bad = inexact = 0
    for seed in seeds:
        one, other = alone.get(seed), several.get(seed)
        if one is None or other is None:
            print(seed, "missing", one is None, other is None, text[-3000:])
            bad += 1
            continue
        if "error" in one or "error" in other:
            if one.get("error") != other.get("error"):
                print(seed, "ERROR", one.get("error"), "|", other.get("error"), one.get("config"))
                bad += 1
            continue
        names = ["step", "seen", "ids", "metrics", "weights", "tests", "predictions"]
        if other["inexact"]:
            inexact += 1
            names = ["step"]
        wrong = [name for name in names if differs(one[name], other[name])]
        if wrong:
            bad += 1
            print(seed, "DIFFERS", wrong, one["config"])
            for name in wrong[:3]:
                print("   ", name, str(one[name])[:300], "|", str(other[name])[:300])
    print(f"{count} seeds, {bad} differ, {inexact} combined without one proportion")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()

"""Random loops of one's own through the Accelerator, beside the same by hand, the Trainer, and themselves cut and resumed.

fuzz_raw.py FIRST LAST              one process: by hand (torch alone), resumed, and against the Trainer
fuzz_raw.py FIRST LAST --ranks 2 [--strategy fsdp]   several processes beside one by hand on the same global batches
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import trainwright as tw

warnings.simplefilter("ignore")
torch.set_num_threads(1)


class Stream(IterableDataset):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter([self.data[i] for i in range(len(self.data))])


def net_of(seed: int, size: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, size), nn.Tanh(), nn.Linear(size, 2))


def config_of(seed: int, ranks: int = 1) -> dict[str, Any]:
    r = random.Random(seed)
    models = r.choice([1, 1, 2])
    batch = r.randint(1, 4)
    precision = r.choice(["no", "no", "bf16", "fp16"])
    rounds = r.randint(2, 11)
    tail = 0 if ranks > 1 else r.randint(0, batch - 1)
    return {
        "seed": seed,
        "models": models,
        "precision": precision,
        "window": r.randint(1, 4),
        "order": r.choice(["clear first", "clear last", "clear all first"]),
        "contexts": r.choice(["one", "own"]) if models == 2 else "one",
        "optimizers": [r.choice(["sgd", "adam", "adamw"]) for _ in range(models)],
        "clip": r.choice([None, "norm", "value", "step norm"]),
        "scheduler": [r.choice([None, "step", "epoch"]) for _ in range(models)],
        "samples": batch * ranks * rounds + tail,
        "batch": batch,
        "kind": r.choice(["map", "map", "stream"]) if ranks == 1 else "map",
        "epochs": r.randint(1, 3),
        "break": r.choice([None, None, r.randint(1, rounds)]),
        "overflow": [r.randint(0, 12), r.randrange(models)] if precision == "fp16" and r.random() < 0.7 else None,
        "validate": r.choice([None, "nested", "kept"]),
        "copies": r.random() < 0.3,
        "save_at": r.randint(0, 12),
        "every": r.choice([1, 1, 2]) if models == 2 else 1,
    }


def optimizer_of(kind: str, parameters: Any) -> Any:
    if kind == "sgd":
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)
    cls = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    return cls(parameters, 0.02, eps=1e-3)


def data_of(c: dict[str, Any]) -> TensorDataset:
    g = torch.Generator().manual_seed(c["seed"])
    return TensorDataset(torch.randn(c["samples"], 4, generator=g), torch.randint(0, 2, (c["samples"],), generator=g))


def loader_of(c: dict[str, Any], batch: int) -> DataLoader:
    data = data_of(c)
    return DataLoader(Stream(data) if c["kind"] == "stream" else data, batch_size=batch)


def make(c: dict[str, Any]) -> tuple[list, list, list]:
    nets = [net_of(c["seed"] + n, 5 + n) for n in range(c["models"])]
    optimizers = [optimizer_of(k, n.parameters()) for k, n in zip(c["optimizers"], nets, strict=False)]
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(o, 0.9) if k else None
        for o, k in zip(optimizers, c["scheduler"], strict=False)
    ]
    return nets, optimizers, schedulers


def loss_of(c: dict[str, Any], model: Any, number: int, batch: Any, count: int) -> torch.Tensor:
    loss = nn.functional.cross_entropy(model(batch[0]).float(), batch[1])
    if c["overflow"] == [count, number]:
        loss = loss * torch.tensor(float("inf"))
    return loss


def flat(nets: list) -> torch.Tensor:
    parts = []
    for net in nets:
        for p in net.parameters():
            p = p.detach()
            parts.append((p.full_tensor() if hasattr(p, "full_tensor") else p).flatten().clone())
    return torch.cat(parts)


def in_turn(c: dict[str, Any], number: int, count: int) -> bool:
    """Whether a model is trained on this batch: the second one only on each n-th, where it has its own windows."""
    return number == 0 or c["contexts"] == "one" or c["every"] == 1 or count % c["every"] == 0


def by_hand(c: dict[str, Any], batch_size: int) -> tuple[torch.Tensor, list]:
    nets, optimizers, schedulers = make(c)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(c["precision"])
    context = (lambda: torch.autocast("cpu", dtype)) if dtype else contextlib.nullcontext
    scaler = torch.amp.GradScaler("cpu", enabled=c["precision"] == "fp16")
    loader = list(loader_of(c, batch_size))
    count = 0
    window = {n: [] for n in range(c["models"])}
    rates = []
    made = [0] * c["models"]
    for _epoch in range(c["epochs"]):
        stop = len(loader) if c["break"] is None else min(c["break"], len(loader))
        for n in window if c["break"] is not None and c["break"] <= len(loader) else []:
            window[n] = []
        for index in range(stop):
            batch = loader[index]
            is_last = index == len(loader) - 1
            for n, (net, o) in enumerate(zip(nets, optimizers, strict=False)):
                if not in_turn(c, n, count):
                    continue
                window[n].append((batch, count))
                if len(window[n]) < c["window"] and not is_last:
                    continue
                o.zero_grad()
                for each, at in window[n]:
                    with context():
                        loss = loss_of(c, net, n, each, at)
                    scaler.scale(loss / len(window[n])).backward()
                scaler.unscale_(o)
                if c["clip"] in ("norm", "step norm"):
                    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                elif c["clip"] == "value":
                    nn.utils.clip_grad_value_(net.parameters(), 0.01)
                finite = all(bool(p.grad.isfinite().all()) for p in net.parameters())
                scaler.step(o)
                scaler.update()
                made[n] += finite
                if c["scheduler"][n] == "step" and finite:
                    schedulers[n].step()
                window[n] = []
            count += 1
        for n, s in enumerate(schedulers):
            if c["scheduler"][n] == "epoch" and made[n]:  # it leaves out what its optimizer has left out
                s.step()
                made[n] = 0
        rates.append([o.param_groups[0]["lr"] for o in optimizers])
    return flat(nets), rates


def raw(c: dict[str, Any], folder: str, strategy: str = "auto", resume: bool = False, cut: bool = False) -> Any:
    """The loop; with `cut` it saves where it may at or after batch `save_at` and ends; with `resume` it goes on from there."""
    accelerator = tw.Accelerator(
        cpu=True, mixed_precision=c["precision"], gradient_accumulation_steps=c["window"], strategy=strategy
    )
    nets, optimizers, schedulers = make(c)
    loader = loader_of(c, c["batch"])
    prepared = accelerator.prepare(*nets, *optimizers, loader, *[s for s in schedulers if s is not None])
    models, opts, loader = (
        list(prepared[: len(nets)]),
        list(prepared[len(nets) : 2 * len(nets)]),
        prepared[2 * len(nets)],
    )
    rest = list(prepared[2 * len(nets) + 1 :])
    scheds = [rest.pop(0) if s is not None else None for s in schedulers]
    val = accelerator.prepare(DataLoader(data_of({**c, "samples": 5}), batch_size=2))
    path, info = f"{folder}/state", f"{folder}/info-{accelerator.process_index}.json"
    count = first = 0
    rates: list = []
    if resume:
        accelerator.load_state(path)
        told = json.loads(Path(info).read_text())
        count, first, rates = told["count"], told["epoch"], told["rates"]
        done = told["index"]
    kept: list = []
    saved = False
    for epoch in range(first, c["epochs"]):
        start = done if resume and epoch == first else 0
        index = start
        for batch in [] if c["break"] is not None and index >= c["break"] else loader:
            for n, (model, o) in enumerate(zip(models, opts, strict=False)):
                if c["order"] == "clear all first" and c["contexts"] == "one" and n == 0:
                    for each in opts:
                        each.zero_grad()
                if not in_turn(c, n, count):
                    continue
                if c["contexts"] == "own":
                    context = accelerator.accumulate(model)
                else:
                    context = accelerator.accumulate(*models) if n == 0 else contextlib.nullcontext()
                with context:
                    if c["order"] == "clear first" or (c["order"] == "clear all first" and c["contexts"] == "own"):
                        o.zero_grad()
                    accelerator.backward(loss_of(c, model, n, batch, count))
                    if c["clip"] == "norm":
                        accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    elif c["clip"] == "value":
                        accelerator.clip_grad_value_(model.parameters(), 0.01)
                    if c["clip"] == "step norm":
                        accelerator.step(o, max_norm=0.1)
                    else:
                        o.step()
                    if c["scheduler"][n] == "step":
                        scheds[n].step()
                    if c["order"] == "clear last":
                        o.zero_grad()
            count, index = count + 1, index + 1
            if c["validate"] == "nested" and count % 3 == 0:
                seen = sum(len(accelerator.gather_for_metrics(b[1])) for b in val)
                assert seen == 5, ("validation saw", seen)
            elif c["validate"] == "kept" and count % 2 == 0:
                if not kept:
                    kept.append(iter(val))
                if next(kept[0], None) is None:
                    kept.clear()
            if c["copies"] and count % 4 == 1:
                copies(models)
            is_end = loader.is_at_end or (c["break"] is not None and index >= c["break"])
            if cut and not saved and count > c["save_at"] and not is_end:
                try:
                    accelerator.save_state(path, overwrite=True)
                except RuntimeError as error:
                    if "within an accumulation window" not in str(error):
                        raise
                else:
                    Path(info).write_text(json.dumps({"count": count, "epoch": epoch, "index": index, "rates": rates}))
                    return True
            if c["break"] is not None and index >= c["break"]:
                break
        for n, s in enumerate(scheds):
            if c["scheduler"][n] == "epoch":
                s.step()
        rates.append([o.param_groups[0]["lr"] for o in opts])
        whole = c["break"] is None or c["break"] > index
        if cut and count > c["save_at"] and whole:
            try:
                accelerator.save_state(path, overwrite=True)
            except RuntimeError as error:
                if "within an accumulation window" not in str(error):
                    raise
            else:
                Path(info).write_text(json.dumps({"count": count, "epoch": epoch + 1, "index": 0, "rates": rates}))
                return True
    if cut:
        return False
    if strategy.startswith("deepspeed"):
        accelerator.save_state(f"{folder}/end", overwrite=True)
        return f"{folder}/end", rates
    return flat([accelerator.unwrap_model(m) for m in models]), rates


def copies(models: list) -> None:
    for model in models:
        other = copy.deepcopy(model)
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(3.0)
            other(torch.ones(2, 4))
        torch.optim.swa_utils.AveragedModel(model).update_parameters(model)
        read = pickle.loads(pickle.dumps(model))
        assert read.state_dict().keys() == model.state_dict().keys()


def trainer_run(c: dict[str, Any]) -> torch.Tensor:
    class M(tw.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net_of(c["seed"], 5)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])

        def configure_optimizers(self) -> Any:
            o = optimizer_of(c["optimizers"][0], self.parameters())
            if not c["scheduler"][0]:
                return o
            return [o], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(o, 0.9), "interval": c["scheduler"][0]}]

    m = M()
    clip = {"norm": 0.1, "step norm": 0.1, "value": 0.01}.get(c["clip"])
    tw.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=c["epochs"],
        precision={"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[c["precision"]],
        accumulate_grad_batches=c["window"],
        gradient_clip_val=clip,
        gradient_clip_algorithm="value" if c["clip"] == "value" else "norm",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        fused_optimizers=False,
    ).fit(m, loader_of(c, c["batch"]))
    return flat([m.net])


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def one(c: dict[str, Any], folder: str) -> list[str]:
    bad = []
    mine, rates = raw(c, folder)
    hand, hand_rates = by_hand(c, c["batch"])
    tolerance = {"no": 2e-6, "bf16": 2e-5, "fp16": 2e-5}[c["precision"]]
    if c["kind"] == "stream" and c["precision"] != "no":
        tolerance = 5e-3  # a window that ends early is divided after its backwards
    if apart(mine, hand) > tolerance:
        bad.append(f"by hand {apart(mine, hand):.3g}")
    if rates != hand_rates:
        bad.append(f"rates {rates} {hand_rates}")
    if raw(c, folder, cut=True):
        again, again_rates = raw(c, folder, resume=True)
        if apart(again, mine) != 0.0:
            bad.append(f"resumed {apart(again, mine):.3g}")
        if again_rates != rates:
            bad.append(f"resumed rates {again_rates} {rates}")
    if c["models"] == 1 and c["break"] is None and c["overflow"] is None:
        t = trainer_run(c)
        if apart(t, mine) > (0.0 if c["kind"] == "map" else tolerance):
            bad.append(f"Trainer {apart(t, mine):.3g}")
    return bad


def inner(first: int, last: int, ranks: int, strategy: str, folder: str) -> None:
    out = {}
    for seed in range(first, last):
        c = settled(config_of(seed, ranks), strategy)
        place = f"{folder}/{seed}"
        Path(place).mkdir(exist_ok=True)
        try:
            end = raw(c, place, strategy)
            out[seed] = end
            if raw(c, place, strategy, cut=True):
                out[f"{seed} resumed"] = raw(c, place, strategy, resume=True)
        except Exception as error:
            import traceback

            out[seed] = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-4)}"
            torch.save(out, f"{folder}/out-{os.environ['RANK']}.pt")
            raise
    torch.save(out, f"{folder}/out-{os.environ['RANK']}.pt")


def settled(c: dict[str, Any], strategy: str) -> dict[str, Any]:
    if c["precision"] == "fp16":
        c["precision"], c["overflow"] = (
            "no",
            None,
        )  # each rank's smaller batch has larger gradients, which may overflow by themselves
    if strategy.startswith(("fsdp", "deepspeed", "ddp_sharded")):
        c["copies"] = False
    if strategy != "ddp":
        c["precision"] = "no"
        c["overflow"] = None
    return c


def several(first: int, last: int, ranks: int, strategy: str) -> None:
    folder = tempfile.mkdtemp()
    command = [
        sys.executable,
        __file__,
        str(first),
        str(last),
        "--ranks",
        str(ranks),
        "--strategy",
        strategy,
        "--inner",
        folder,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "trainwright.launch.processes", "--num-processes", str(ranks), "--", *command],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-6000:])
    outs = [
        torch.load(f"{folder}/out-{r}.pt", weights_only=False)
        for r in range(ranks)
        if Path(f"{folder}/out-{r}.pt").exists()
    ]
    count = wrong = 0
    for seed in range(first, last):
        c = settled(config_of(seed, ranks), strategy)
        if seed not in outs[0]:
            continue
        results = [o[seed] for o in outs]
        if isinstance(results[0], str):
            print(seed, c, results[0])
            continue
        count += 1
        hand, rates = by_hand(c, c["batch"] * ranks)
        bad = []
        if isinstance(results[0][0], str):
            continue
        if any(not torch.equal(results[0][0], other[0]) for other in results[1:]):
            bad.append("ranks differ")
        tolerance = {"no": 5e-6, "bf16": 2e-2, "fp16": 2e-3}[c["precision"]]
        if apart(results[0][0], hand) > tolerance:
            bad.append(f"by hand {apart(results[0][0], hand):.3g}")
        if results[0][1] != rates:
            bad.append(f"rates {results[0][1]} {rates}")
        again = outs[0].get(f"{seed} resumed")
        if again is not None and apart(again[0], results[0][0]) != 0.0:
            bad.append(f"resumed {apart(again[0], results[0][0]):.3g}")
        if bad:
            wrong += 1
            print("BAD", seed, bad, c)
    print(count, "compared,", wrong, "bad")
    shutil.rmtree(folder)
    sys.exit(bool(wrong or done.returncode))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--inner")
    a = parser.parse_args()
    if a.inner:
        return inner(a.first, a.last, a.ranks, a.strategy, a.inner)
    if a.ranks > 1:
        return several(a.first, a.last, a.ranks, a.strategy)
    bad = 0
    for seed in range(a.first, a.last):
        c = config_of(seed)
        folder = tempfile.mkdtemp()
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                found = one(c, folder)
        except Exception as error:
            import traceback

            found = [f"{type(error).__name__}: {error}", traceback.format_exc(limit=-3)]
        shutil.rmtree(folder)
        if found:
            bad += 1
            print("BAD", seed, *found, c, sep="\n   ", flush=True)
    print(f"{a.last - a.first} configurations, {bad} bad")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()

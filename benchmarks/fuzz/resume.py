"""Random runs on one process, each resumed from several of its checkpoints, cut and started again, beside the uncut run.

    python benchmarks/fuzz/resume.py FIRST LAST        seeds; OMP_NUM_THREADS=1

Compared bit for bit: weights, optimizer state, counters, rates, metrics, the order of events, metrics.csv (the rest of a
fresh one is compared, or the whole file where the run goes on in its folder), the state of callbacks, kept checkpoints.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

import trainwright as tw
from trainwright.data.combined import CombinedLoader
from trainwright.errors import RunStopped

LOG: list[Any] = []


class Samples(Dataset):
    def __init__(self, n, draws=False):
        self.n, self.draws = n, draws

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        x = torch.arange(4.0) * 0.1 + i * 0.05
        if self.draws:
            x = x + torch.rand(4) * 0.1 + random.random() * 0.1 + float(np.random.rand()) * 0.1
        return x, torch.tensor(float(i % 3))


class Stream(IterableDataset):
    def __init__(self, n, draws=False):
        self.n, self.draws = n, draws

    def __iter__(self):
        order = torch.randperm(self.n).tolist() if self.draws else range(self.n)
        data = Samples(self.n)
        for i in order:
            yield data[i]


class Stateful(Stream):
    """Goes on from epoch to epoch, in an endless stream cut by limit_train_batches."""

    def __init__(self, n):
        super().__init__(n)
        self.at = 0

    def __iter__(self):
        data = Samples(self.n)
        while True:
            i = self.at
            self.at += 1
            yield data[i % self.n]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, s):
        self.at = s["at"]


class Sampler(torch.utils.data.Sampler):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(torch.randperm(self.n).tolist())


def loader(kind, n, batch, workers=0):
    extra = {"num_workers": workers}
    if kind == "map":
        return DataLoader(Samples(n, True), batch_size=batch, **extra)
    if kind == "shuffle":
        return DataLoader(Samples(n, True), batch_size=batch, shuffle=True, **extra)
    if kind == "drop":
        return DataLoader(Samples(n), batch_size=batch, shuffle=True, drop_last=True, **extra)
    if kind == "weighted":
        return DataLoader(
            Samples(n), batch_size=batch, sampler=WeightedRandomSampler([1.0 + i % 3 for i in range(n)], n), **extra
        )
    if kind == "own sampler":
        return DataLoader(Samples(n), batch_size=batch, sampler=Sampler(n), **extra)
    if kind == "batches":
        return DataLoader(Samples(n), batch_sampler=BatchSampler(RandomSampler(range(n)), batch, False), **extra)
    if kind == "stream":
        return DataLoader(Stream(n), batch_size=batch, **extra)
    if kind == "drawn stream":
        return DataLoader(Stream(n, True), batch_size=batch, **extra)
    if kind == "stateful":
        return DataLoader(Stateful(n), batch_size=batch)
    if kind == "list":
        return list(DataLoader(Samples(n), batch_size=batch))
    if kind == "combined":
        return CombinedLoader([loader("shuffle", n, batch), loader("map", n + 5, batch)], "max_size_cycle")
    if kind == "sequential":
        return CombinedLoader([loader("shuffle", n, batch), loader("stream", n, batch)], "sequential")
    raise ValueError(kind)


KINDS = [
    "map",
    "shuffle",
    "drop",
    "weighted",
    "own sampler",
    "batches",
    "stream",
    "drawn stream",
    "stateful",
    "list",
    "combined",
    "sequential",
]


def first(batch):
    while isinstance(batch, (list, tuple)) and not isinstance(batch[0], Tensor):
        batch = next(b for b in batch if b is not None)
    return batch


class Net(tw.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 1))
        self.register_buffer("ema", torch.zeros(5, 4))
        self.noise = torch.zeros(3)
        self.automatic_optimization = not c["manual"]
        self.count = 0

    def step_loss(self, batch):
        x, y = first(batch)
        return ((self.net(x).squeeze(-1) - y + 0.01 * self.noise[:2].sum()) ** 2).mean()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["events"] = len(LOG)

    def on_load_checkpoint(self, checkpoint):
        self.events = checkpoint["events"]

    events = 0

    def note(self, *what):
        LOG.append((self.trainer.current_epoch, self.trainer.global_step, *what))

    def _train(self, batch, batch_idx):
        loss = self.step_loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("n", float(len(first(batch)[0])), reduce_fx="sum", on_step=False, on_epoch=True)
        self.note("train", batch_idx, float(loss))
        return loss

    def _manual(self, loss):
        opt = self.optimizers()
        every = self.c["manual_every"]
        self.manual_backward(loss / every)
        if self.trainer.state.total_batches % every == every - 1 or (
            self.c["manual_close"] and self.trainer.is_last_batch
        ):
            opt.step()
            opt.zero_grad()
            for s in [self.lr_schedulers()] if self.c["scheduler"] in ("step",) else []:
                s.step()

    def validation_step(self, batch, batch_idx):
        loss = self.step_loss(batch)
        self.log("val_loss", loss, on_step=self.c["val_on_step"], on_epoch=True)
        self.note("val", batch_idx, float(loss))
        if self.c["val_draws"]:
            torch.rand(2)
            random.random()

    def on_train_start(self):
        if self.c["hooks_draw"]:
            self.noise[0] = torch.rand(())

    def on_train_epoch_start(self):
        self.note("epoch start")
        if self.c["hooks_draw"]:
            self.noise[1] = torch.rand(()) + random.random()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ema.lerp_(self.net[0].weight.detach(), 0.1)

    def on_validation_start(self):
        if not self.trainer.sanity_checking:
            self.note("val start")
        if self.c["hooks_draw"]:
            self.noise[2] = torch.rand(())

    def on_validation_end(self):
        if not self.trainer.sanity_checking:
            self.note("val end", float(self.trainer.callback_metrics["val_loss"]))

    def on_train_epoch_end(self):
        self.note("epoch end", sorted((k, float(v)) for k, v in self.trainer.callback_metrics.items()))
        if self.c["hooks_draw"]:
            torch.rand(1)
        if self.c["user_stop"] and self.trainer.current_epoch == self.c["user_stop"]:
            self.trainer.should_stop = True

    def configure_optimizers(self):
        opt = {"sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), "adam": lambda p: torch.optim.AdamW(p, 0.02)}[
            self.c["optimizer"]
        ](self.parameters())
        S = torch.optim.lr_scheduler
        k = self.c["scheduler"]
        if k is None:
            return opt
        if k == "epoch":
            return [opt], [S.ExponentialLR(opt, 0.8)]
        if k == "step":
            return [opt], [{"scheduler": S.ExponentialLR(opt, 0.97), "interval": "step"}]
        if k == "step2":
            return [opt], [{"scheduler": S.StepLR(opt, 2, 0.9), "interval": "step", "frequency": 2}]
        if k == "val":
            return [opt], [{"scheduler": S.ExponentialLR(opt, 0.9), "interval": "validation"}]
        if k == "plateau":
            return {
                "optimizer": opt,
                "lr_scheduler": {
                    "scheduler": S.ReduceLROnPlateau(opt, patience=0, factor=0.7, threshold=0.3),
                    "monitor": self.c["monitor"],
                    "strict": False,
                },
            }
        if k == "plateau val":
            return {
                "optimizer": opt,
                "lr_scheduler": {
                    "scheduler": S.ReduceLROnPlateau(opt, patience=0, factor=0.7, threshold=0.3),
                    "monitor": "val_loss",
                    "interval": "validation",
                },
            }
        if k == "cosine":
            return [opt], [{"scheduler": S.OneCycleLR(opt, 0.1, total_steps=2000), "interval": "step"}]


class Plain(Net):
    def training_step(self, batch, batch_idx):
        loss = self._train(batch, batch_idx)
        if self.c["nones"] and (self.trainer.state.total_batches % 5 == 3):
            return None
        return self._manual(loss) if self.c["manual"] else loss


class Pulls(Net):
    def training_step(self, dataloader_iter):
        batch, i, _ = next(dataloader_iter)
        loss = self._train(batch, i)
        if self.c["pull2"]:
            try:
                batch, i, _ = next(dataloader_iter)
            except StopIteration:
                pass
            else:
                loss = loss + self._train(batch, i)
        return self._manual(loss) if self.c["manual"] else loss


def configuration(seed):
    r = random.Random(seed)
    c: dict[str, Any] = {"seed": seed}
    c["kind"] = r.choice(KINDS)
    c["n"], c["batch"] = r.randint(7, 24), r.randint(1, 4)
    c["workers"] = 1 if r.random() < 0.04 and c["kind"] in ("map", "shuffle", "stream") else 0
    c["manual"] = r.random() < 0.25
    c["manual_every"], c["manual_close"] = r.randint(1, 3), r.random() < 0.4
    c["pulls"] = r.random() < 0.12
    c["pull2"] = c["pulls"] and r.random() < 0.6
    c["optimizer"] = r.choice(["sgd", "adam"])
    c["scheduler"] = r.choice([None, "epoch", "step", "step2", "val", "plateau", "plateau val", "cosine"])
    if c["manual"] and c["scheduler"] != "step":
        c["scheduler"] = None
    c["monitor"] = r.choice(["val_loss", "loss_epoch"])
    c["hooks_draw"], c["val_draws"], c["val_on_step"] = r.random() < 0.4, r.random() < 0.4, r.random() < 0.5
    c["nones"] = not c["manual"] and not c["pulls"] and r.random() < 0.15
    c["user_stop"] = r.choice([0, 0, 0, 0, 1, 2])
    s: dict[str, Any] = {"max_epochs": r.randint(2, 4)}
    if not c["manual"] and not c["pulls"]:
        s["accumulate_grad_batches"] = r.choice([1, 1, 2, 3, 5])
    if c["kind"] == "stateful" or r.random() < 0.3:
        s["limit_train_batches"] = r.randint(2, 7)
    c["has_val"] = r.random() < 0.85
    sized = c["kind"] not in ("stream", "drawn stream", "stateful", "sequential")
    if c["has_val"]:
        how = r.random()
        if how < 0.2 and sized:
            s["val_check_interval"] = r.choice([0.25, 0.4, 0.5, 0.34])
        elif how < 0.4:
            s["val_check_interval"] = r.randint(1, 2)
        elif how < 0.6:
            s["val_check_interval"], s["check_val_every_n_epoch"] = r.randint(1, 9), None
        elif how < 0.7:
            s["check_val_every_n_epoch"] = 2
        if r.random() < 0.3:
            s["limit_val_batches"] = r.randint(1, 2)
        s["num_sanity_val_steps"] = r.choice([0, 2])
    if r.random() < 0.3:
        s["max_steps"] = r.randint(3, 16)
    if r.random() < 0.3:
        s["min_epochs"] = 2
    if r.random() < 0.2:
        s["min_steps"] = r.randint(3, 8)
    if not c["manual"] and r.random() < 0.3:
        s["gradient_clip_val"] = 0.3
    s["log_every_n_steps"] = r.choice([1, 2, 3])
    if r.random() < 0.2:
        s["precision"] = r.choice(["16-mixed", "bf16-mixed"])
    c["settings"] = s
    c["stopping"] = r.choice(
        [
            None,
            None,
            {"monitor": "val_loss", "patience": r.randint(0, 2)},
            {"monitor": "loss_epoch", "patience": r.randint(0, 2)},
            {"monitor": "val_loss", "patience": 0, "check_on_train_epoch_end": False},
        ]
    )
    if (
        c["stopping"]
        and c["stopping"]["monitor"] == "val_loss"
        and (not c["has_val"] or s.get("check_val_every_n_epoch", 1) != 1)
    ):
        c["stopping"] = None
    if c["stopping"]:
        c["stopping"]["strict"] = False
    c["saver"] = r.choice(
        [
            {"every_n_train_steps": 1},
            {"every_n_train_steps": 2},
            {"every_n_train_steps": 3},
            {"every_n_epochs": 1},
            {"every_n_epochs": 1, "save_on_train_epoch_end": True},
        ]
    )
    c["best"] = (
        r.choice([None, {"every_n_epochs": 1}, {"every_n_train_steps": 2}, {"every_n_epochs": 1, "save_last": True}])
        if c["has_val"]
        else None
    )
    c["user_save"] = r.choice(
        [
            None,
            None,
            "on_train_batch_end",
            "on_validation_end",
            "on_validation_start",
            "on_train_epoch_end",
            "on_train_epoch_start",
        ]
    )
    return c


class Save(tw.Callback):
    """Saves by itself, in one of the hooks, into a folder of its own; after the module, and after early stopping."""

    runs_last = True

    def __init__(self, hook, folder):
        self.folder, self.i = folder, 0
        setattr(self, hook, self.save)

    def save(self, trainer, *_):
        if trainer.sanity_checking:
            return
        self.i += 1
        if self.folder is not None and self.i % 2:
            trainer.save_checkpoint(f"{self.folder}/user-{self.i}.ckpt")

    def on_train_batch_end(self, *a): ...
    def on_validation_end(self, *a): ...
    def on_validation_start(self, *a): ...
    def on_train_epoch_end(self, *a): ...
    def on_train_epoch_start(self, *a): ...


def run(c, folder, ckpt=None, saves=True, extra=(), logname="logs"):
    LOG.clear()
    tw.seed_everything(c["seed"], verbose=False)
    module = (Pulls if c["pulls"] else Plain)(c)
    cb = []
    if c["stopping"]:
        cb.append(tw.EarlyStopping(**c["stopping"]))
    if c["user_save"]:
        cb.append(Save(c["user_save"], folder / "user" if saves else None))
    if saves:
        cb.append(tw.ModelCheckpoint(folder / "all", "{epoch}-{step}", save_top_k=-1, **c["saver"]))
    if c["best"]:
        cb.append(
            tw.ModelCheckpoint(folder / "best", "{step}-{val_loss}", monitor="val_loss", save_top_k=2, **c["best"])
        )
    has_checkpoints = any(isinstance(x, tw.ModelCheckpoint) for x in cb)
    trainer = tw.Trainer(
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*cb, *extra],
        enable_checkpointing=has_checkpoints,
        logger=tw.CSVLogger(folder, name=logname, version=0),
        **c["settings"],
    )
    val = DataLoader(Samples(5), batch_size=2) if c["has_val"] else None
    try:
        trainer.fit(module, loader(c["kind"], c["n"], c["batch"], c["workers"]), val, ckpt_path=ckpt)
    finally:
        result = {"log": list(LOG)}
    result["events"] = module.events
    opt = trainer.optimizers[0].state_dict()
    result |= {
        "weights": {k: v.clone() for k, v in module.state_dict().items()},
        "state": {
            f"{i}/{k}": torch.as_tensor(v).clone()
            for i, each in opt["state"].items()
            for k, v in each.items()
            if v is not None
        },
        "lr": [g["lr"] for g in opt["param_groups"]],
        "counters": {k: v for k, v in trainer.state.state_dict().items() if k not in ("saves",)},
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "rng": [*torch.rand(3).tolist(), random.random()],
        "stopping": [x.state_dict() for x in cb if isinstance(x, tw.EarlyStopping)],
        "best": [
            {Path(k).name: float(v) for k, v in x.best_k_models.items()}
            for x in cb
            if isinstance(x, tw.ModelCheckpoint) and x.monitor
        ],
        "schedulers": [x.scheduler.state_dict() for x in trainer.lr_scheduler_configs],
    }
    path = folder / logname / "version_0" / "metrics.csv"
    result["csv"] = path.read_text() if path.exists() else ""
    return result


def same(a, b):
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(7.7), b.nan_to_num(7.7))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=False))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    return a == b


def compare(whole, part, what, csv_whole=False, kept=True):
    bad = []
    for k in (
        "weights",
        "state",
        "lr",
        "counters",
        "metrics",
        "rng",
        "stopping",
        "schedulers",
        *(("best",) if kept else ()),
    ):
        if not same(whole[k], part[k]):
            bad.append(
                (k, whole[k] if k not in ("weights", "state") else "", part[k] if k not in ("weights", "state") else "")
            )
    log = part["log"]
    # the hooks of the epoch's start are called again within it
    if (
        log
        and log[0][2] == "epoch start"
        and not any(same(log[0], e) for e in whole["log"][len(whole["log"]) - len(log) :][:1])
    ):
        log = log[1:]
    if not csv_whole:
        expected = whole["log"][part["events"] :]
        if (
            what.startswith("user")
            and expected[:1]
            and expected[0][2] == "val end"
            and not (log and log[0][2] == "val end")
        ):
            expected = expected[1:]
        if not same(expected, log):
            i = next(
                (i for i, (x, y) in enumerate(zip(expected, log, strict=False)) if not same(x, y)),
                min(len(expected), len(log)),
            )
            bad.append(("log", i, expected[max(0, i - 2) : i + 3], log[max(0, i - 2) : i + 3], len(expected), len(log)))
        return [(what, *each) for each in bad]
    part = {**part, "log": log}
    n = len(log)
    if not same(whole["log"][len(whole["log"]) - n :], part["log"]):
        tail = whole["log"][len(whole["log"]) - n :]
        i = next(
            (i for i, (x, y) in enumerate(zip(tail, part["log"], strict=False)) if not same(x, y)), min(len(tail), n)
        )
        bad.append(("log", i, tail[max(0, i - 2) : i + 3], part["log"][max(0, i - 2) : i + 3], n, len(whole["log"])))
    if csv_whole and whole["csv"] != part["csv"]:
        bad.append(("csv", whole["csv"], part["csv"]))
    return [(what, *each) for each in bad]


class Cut(Exception):
    pass


class Cutter(tw.Callback):
    """Ends the run at the n-th call of a hook: by an exception or a signal."""

    HOOKS = [
        "on_train_batch_start",
        "on_train_batch_end",
        "on_validation_start",
        "on_validation_batch_end",
        "on_validation_end",
        "on_train_epoch_start",
        "on_train_epoch_end",
        "on_save_checkpoint",
        "on_train_start",
        "on_before_optimizer_step",
    ]

    def __init__(self, hook, call, how):
        self.call_, self.how = call, how
        setattr(self, hook, self.hit)

    def hit(self, trainer, *_):
        if trainer.sanity_checking:
            return
        self.call_ -= 1
        if self.call_ == 0:
            if self.how == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                raise Cut


for name in Cutter.HOOKS:
    setattr(Cutter, name, lambda self, *a: None)


def one(seed, verbose=False):
    c = configuration(seed)
    r = random.Random(seed + 10**6)
    folder = Path(tempfile.mkdtemp(prefix="fuzz"))
    found = []
    try:
        try:
            whole = run(c, folder / "whole")
        except (ValueError, RuntimeError, TypeError) as error:
            return [("refused", type(error).__name__, str(error)[:150])], c
        # what carries a score holds its weights
        for best in (whole["best"] or [{}])[0]:
            path = folder / "whole" / "best" / best
            if path.exists():
                module = (Pulls if c["pulls"] else Plain)({**c, "hooks_draw": False})
                if c["hooks_draw"]:
                    continue
                t = tw.Trainer(
                    accelerator="cpu",
                    enable_progress_bar=False,
                    logger=False,
                    enable_checkpointing=False,
                    limit_val_batches=c["settings"].get("limit_val_batches"),
                    precision=c["settings"].get("precision"),
                )
                [m] = t.validate(module, DataLoader(Samples(5), batch_size=2), ckpt_path=str(path), verbose=False)
                name = "val_loss_epoch" if "val_loss_epoch" in m else "val_loss"
                if m[name] != whole["best"][0][best]:
                    found.append(("score", best, m[name], whole["best"][0][best]))
        paths = [*(folder / "whole" / "all").glob("*.ckpt"), *(folder / "whole" / "user").glob("*.ckpt")]
        paths = [p for p in paths if not p.name.startswith("end-")]
        r.shuffle(paths)
        for i, p in enumerate(sorted(paths[:5])):
            part = run({**c, "best": None}, folder / f"part{i}", str(p), saves=False)
            found += compare(whole, part, p.name, kept=False)
        # cut by an exception or a signal, and run again in the same folder by "auto"
        for i in range(2):
            how, hook, call = r.choice(["signal", "exception"]), r.choice(Cutter.HOOKS), r.randint(1, 12)
            name = f"cut {how} {hook} {call}"
            try:
                run(c, folder / f"cut{i}", "auto", extra=[Cutter(hook, call, how)])
                if not c["nones"]:
                    pass
            except (Cut, RunStopped):
                pass
            # the saver's folder is the one that counts: "auto" looks in all checkpoint callbacks' folders
            part = run({**c, "user_save": None}, folder / f"cut{i}", "auto")
            expected = whole
            kept = True
            found += compare(expected, part, name, csv_whole=True, kept=kept)
        return found, c
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    import contextlib
    import io

    bad = refused = 0
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        if configuration(seed)["kind"] == "stateful" and os.environ.get("NO_STATEFUL"):
            continue
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                found, c = one(seed)
        except Exception:
            print(seed, "CRASH", configuration(seed))
            traceback.print_exc(file=sys.stdout)
            bad += 1
            continue
        if os.environ.get("PROGRESS"):
            print(seed, "done", len(found), flush=True)
        if found and found[0][0] == "refused":
            refused += 1
            print(seed, found[0], flush=True)
            continue
        if found:
            bad += 1
            print(seed, "BAD", c)
            for each in found[:3]:
                print("    ", str(each)[:1500])
        sys.stdout.flush()
    print("seeds", sys.argv[1:], "bad", bad, "refused", refused)
    sys.exit(bool(bad))

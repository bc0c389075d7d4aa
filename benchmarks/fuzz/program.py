"""The program of a configuration: plain trainwright, with what the configuration needs and nothing else.

The random runs execute this text, and a failing run prints it.
"""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

from fuzz import data
from fuzz.kind import Config
from fuzz.run_config import settled

TORCH_DATA = (
    "BatchSampler", "DataLoader", "Dataset", "IterableDataset", "RandomSampler", "Sampler", "WeightedRandomSampler",
)  # fmt: skip
HEAD = {
    "random.": "import random",
    "tempfile.": "import sys, tempfile",
    "timedelta": "from datetime import timedelta",
    "Path(": "from pathlib import Path",
    "numpy.": "import numpy",
    "torch": "import torch",
    "torchmetrics.": "import torchmetrics",
    "nn.": "from torch import nn",
}
LISTED = """\
def samples(count):
    return [(torch.arange(4.0) * 0.1 + i * 0.05, torch.tensor(float(i % 3))) for i in range(count)]"""
"""data.Samples where nothing is drawn."""


def program(config: Config, main: str = "") -> str:
    """Return the program: classes, `run(folder, ckpt_path, callbacks) -> (trainer, module)`, and a main part."""
    c = settled(config)
    body = "\n".join([*_module(c), *_data(c), *_callbacks(c), *_run(c)])
    classes = []
    if not c["augment"] and "Samples(" in body:
        body = body.replace("Samples(", "samples(")
        classes.append(LISTED)
    for each in (data.Samples, data.Stream, data.Endless, data.Shuffled):
        if re.search(rf"\b{each.__name__}\(", body):
            classes.append(_plain(inspect.getsource(each), "Stream(" in body and ", True)" in body))
    body = "\n\n".join([*classes, body, *([main] if main else [])])
    head = [line for word, line in HEAD.items() if word in body]
    names = [name for name in TORCH_DATA if re.search(rf"\b{name}\b", body)]
    if names:
        head.append(f"from torch.utils.data import {', '.join(names)}")
    return "\n".join([*head, "import trainwright as tw", "", body, ""])


def _plain(source: str, shuffles: bool) -> str:
    """Return a class as a script shows it: without annotations and unused shuffling."""
    source = re.sub(r" ->[^:]+(?=:\n)|: (int|bool|dict\[str, int\])(?=[,) =])", "", source)
    source = source.replace("\n\n    def", "\n    def").replace("augment = False", "augment").rstrip()
    if shuffles:
        return source.replace("shuffle = False", "shuffle=False")
    source = source.replace(
        "torch.randperm(self.count).tolist() if self.shuffle else range(self.count)", "range(self.count)"
    )
    return source.replace(", shuffle = False", "").replace(
        "self.count, self.shuffle = count, shuffle", "self.count = count"
    )


def _loader(c: Config, name: str, count: int) -> str:
    workers = f", num_workers={c['workers']}" if c["workers"] else ""
    workers += ", persistent_workers=True" if c["workers"] and "persistent" in c["features"] else ""
    tail = f", batch_size={c['batch']}{workers}"
    samples = f"Samples({count}, {c['augment']})" if c["augment"] else f"Samples({count})"
    if name == "batches":
        batches = f"BatchSampler(RandomSampler(range({count})), {c['batch']}, False)"
        return f"DataLoader({samples}, batch_sampler={batches}{workers})"
    weights = f"WeightedRandomSampler([1.0 + i % 3 for i in range({count})], {count})"
    return {
        "map": f"DataLoader({samples}{tail})",
        "shuffle": f"DataLoader({samples}{tail}, shuffle=True)",
        "drop": f"DataLoader({samples}{tail}, shuffle=True, drop_last=True)",
        "weighted": f"DataLoader({samples}{tail}, sampler={weights})",
        "sampler": f"DataLoader({samples}{tail}, sampler=Shuffled({count}))",
        "stream": f"DataLoader(Stream({count}){tail})",
        "shuffled stream": f"DataLoader(Stream({count}, True){tail})",
        "endless": f"DataLoader(Endless(){tail})",
        "list": f"list(DataLoader({samples}{tail}))",
    }[name]


def _module(c: Config) -> list[str]:
    on = set(c["features"])
    draws = bool(on & {"draw at start", "draw at epochs"})
    dropout = ", nn.Dropout(0.2)" if "dropout" in on else ""
    lines = [
        "class Net(tw.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        f"        self.net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(){dropout}, nn.Linear(3, 1))",
    ]
    lines += ["        self.noise = 0.0"] * draws
    lines += ['        self.register_buffer("average", torch.zeros(3, 4))'] * ("average" in on)
    lines += ["        self.mean = torchmetrics.MeanMetric()"] * ("metric" in on)
    lines += ["        self.automatic_optimization = False"] * c["manual"]
    lines += ["    def loss(self, batch):"]
    dtype = {"64-true": ".double()", "bf16-true": ".bfloat16()"}.get(c["precision"] or "", "")
    noise = " + 0.01 * self.noise" if draws else ""
    one = f"nn.functional.mse_loss(self.net({{}}[0]{dtype}).squeeze(-1){noise}, {{}}[1]{dtype})"
    if c["mode"]:
        lines += ["        parts = [each for each in batch.values() if each is not None]"]
        lines += [f"        return sum({one.format('each', 'each')} for each in parts) / len(parts)"]
    else:
        lines += [f"        return {one.format('batch', 'batch')}"]
    return [*lines, *_training_step(c, on), *_hooks(c, on), *_optimizers(c)]


def _training_step(c: Config, on: set[str]) -> list[str]:
    lines = ["    def training_step(self, batch, batch_idx):", "        loss = self.loss(batch)"]
    lines += ['        self.log("loss", loss, on_step=True, on_epoch=True)']
    lines += ["        self.mean(loss.detach().float())", '        self.log("mean", self.mean)'] * ("metric" in on)
    lines += ["        if batch_idx % 5 == 3:", "            return None"] * ("none" in on)
    if c["manual"]:
        share = f" / {c['window']}" if c["window"] > 1 else ""
        lines += [f"        self.manual_backward(loss{share})"]
        pad = "        "
        if c["window"] > 1:
            end = " or self.trainer.is_last_batch" if c["close"] else ""
            lines += [f"        if (batch_idx + 1) % {c['window']} == 0{end}:"]
            pad += "    "
        lines += [f"{pad}for optimizer in {'self.optimizers()' if c['two'] else '[self.optimizers()]'}:"]
        if c["clip"]:
            lines += [f'{pad}    self.clip_gradients(optimizer, 0.1, "{c["clip"]}")']
        lines += [f"{pad}    optimizer.step()", f"{pad}    optimizer.zero_grad()"]
        if c["scheduler"] == "step":
            lines += [f"{pad}for scheduler in {'self.lr_schedulers()' if c['two'] else '[self.lr_schedulers()]'}:"]
            lines += [f"{pad}    scheduler.step()"]
    return [*lines, "        return loss"] if not c["manual"] else lines


def _hooks(c: Config, on: set[str]) -> list[str]:
    lines: list[str] = []
    if c["validate"] != "off":
        index = ", dataloader_idx=0" if c["val_loaders"] > 1 else ""
        lines += [f"    def validation_step(self, batch, batch_idx{index}):"]
        lines += ["        torch.rand(1), random.random()"] * ("draw in validations" in on)
        value = "nn.functional.mse_loss(self.net(batch[0]).squeeze(-1), batch[1])"
        if c["precision"] in ("64-true", "bf16-true"):
            kind = "double" if c["precision"] == "64-true" else "bfloat16"
            value = value.replace("batch[0]", f"batch[0].{kind}()").replace("batch[1]", f"batch[1].{kind}()")
        step = ", on_step=True, on_epoch=True" if c["val_on_step"] else ""
        if index:
            lines += ['        name = ["val_loss", "other_loss"][dataloader_idx]']
            lines += [f"        self.log(name, {value}{step}, add_dataloader_idx=False)"]
        else:
            lines += [f'        self.log("val_loss", {value}{step})']
    hooks: dict[str, list[str]] = {}
    if "draw at start" in on:
        hooks.setdefault("on_train_start", []).append("self.noise = torch.rand(()).item()")
    if "draw at epochs" in on:
        hooks.setdefault("on_train_epoch_start", []).append("self.noise = torch.rand(()).item() + random.random()")
    if "draw at validations" in on:
        hooks.setdefault("on_validation_start", []).append("torch.rand(1), numpy.random.rand()")
    ends = hooks.setdefault("on_train_epoch_end", [])
    ends += ["torch.rand(1)"] * ("draw at ends" in on)
    ends += ['self.log("end", self.net[0].weight.norm())'] * ("log at ends" in on)
    if c["manual"] and c["scheduler"] == "epoch":
        ends += [f"for scheduler in {'self.lr_schedulers()' if c['two'] else '[self.lr_schedulers()]'}:"]
        ends += ["    scheduler.step()"]
    if c["user_stop"] is not None:
        ends += [f"if self.trainer.current_epoch == {c['user_stop']}:", "    self.trainer.should_stop = True"]
    for name, body in hooks.items():
        if body:
            lines += [f"    def {name}(self):", *[f"        {each}" for each in body]]
    if "average" in on:
        lines += ["    def on_train_batch_end(self, outputs, batch, batch_idx):"]
        lines += ["        self.average.lerp_(self.net[0].weight.detach(), 0.1)"]
    return lines


def _optimizers(c: Config) -> list[str]:
    make = {
        "sgd": "torch.optim.SGD({}, 0.05, momentum=0.9)",
        "adam": "torch.optim.AdamW({}, 0.02)",
        "lbfgs": "torch.optim.LBFGS({}, 0.1, max_iter=3, history_size=2)",
    }[c["optimizer"]]
    if c["two"]:
        parts = "(self.net[0], self.net[-1])"
        lines = [f"        optimizers = [{make.format('each.parameters()')} for each in {parts}]"]
    else:
        lines = [f"        optimizers = [{make.format('self.parameters()')}]"]
    lines = ["    def configure_optimizers(self):", *lines]
    if c["scheduler"] is None:
        return [*lines, "        return optimizers"]
    named, _, rest = c["scheduler"].partition(" ")
    schedulers = "torch.optim.lr_scheduler"
    made = {
        "cycle": f"{schedulers}.OneCycleLR(each, 0.1, total_steps=2000)",
        "plateau": f"{schedulers}.ReduceLROnPlateau(each, patience=0, factor=0.7, threshold=0.3)",
    }.get(named, f"{schedulers}.ExponentialLR(each, 0.9)")
    options: dict[str, Any] = {"interval": {"plateau": "epoch", "cycle": "step"}.get(named, named)}
    if named == "plateau":
        options["monitor"] = "loss_epoch" if rest == "on loss" else "val_loss"
        options["interval"] = "validation" if rest == "at validations" else "epoch"
        options["strict"] = False
    if c["frequency"] > 1:
        options["frequency"] = c["frequency"]
    text = ", ".join(
        f'"{key}": {json.dumps(value) if isinstance(value, str) else value}' for key, value in options.items()
    )
    return [*lines, f'        return optimizers, [{{"scheduler": {made}, {text}}} for each in optimizers]']


def _callbacks(c: Config) -> list[str]:
    lines: list[str] = []
    if c["own_save"]:
        lines += [
            "class Save(tw.Callback):",
            "    priority = -10",
            f"    def {c['own_save']}(self, trainer, *_):",
            "        if not trainer.sanity_checking:",
            '            trainer.save_checkpoint(f"{self.folder}/own/{trainer.global_step}.ckpt", overwrite=True)',
        ]
    if "log in a callback" in c["features"]:
        lines += [
            "class Norm(tw.Callback):",
            "    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):",
            '        module.log("norm", module.net[0].weight.detach().norm(), on_step=True, on_epoch=True)',
        ]
    return lines


def _data(c: Config) -> list[str]:
    """Return the loader hooks, of the module or of a DataModule."""
    if c["holder"] == "arguments":
        return []
    lines = ["class Data(tw.DataModule):"] if c["holder"] == "datamodule" else []
    for name, made in _loaders(c).items():
        lines += [f"    def {name}_dataloader(self):", *[f"        {each}" for each in made[:-1]]]
        lines += [f"        return {made[-1].partition(' = ')[2]}"]
    return lines


def _loaders(c: Config) -> dict[str, list[str]]:
    """Return the lines that assign `train` and `val`."""
    lines = [f"train = {_loader(c, c['loader'], c['samples'])}"]
    if c["mode"]:
        second = _loader(c, c["second"] if c["second"] != "endless" else "map", c["samples"] + 5)
        lines += [f'train = tw.CombinedLoader({{"a": train, "b": {second}}}, "{c["mode"]}")']
    if c["validate"] == "off":
        return {"train": lines}
    made = [f"DataLoader(Samples({n}{', False' if c['augment'] else ''}), batch_size=2)" for n in (5, 3)]
    return {"train": lines, "val": [f"val = [{', '.join(made)}]" if c["val_loaders"] > 1 else f"val = {made[0]}"]}


def _run(c: Config) -> list[str]:
    lines = ["def run(folder, ckpt_path=None, callbacks=()):", f"    tw.seed_everything({c['seed']}, verbose=False)"]
    if c["holder"] == "arguments":
        lines += [f"    {each}" for made in _loaders(c).values() for each in made]
    lines += ["    callbacks = [*callbacks]"]
    made, saver = [], _saver(c)
    if c["stop"]:
        at = ", check_on_train_epoch_end=False" if c["stop"].endswith("validations") else ""
        made.append(f'tw.EarlyStopping("{c["stop"].split()[0]}", patience={c["patience"]}, strict=False{at})')
    schedule = f"tw.GradientAccumulationScheduler({{0: {c['window']}, 1: 2}})"
    made += [schedule] * ("schedule" in c["features"])
    made += ["tw.LearningRateMonitor()"] * ("rates" in c["features"] and c["scheduler"] is not None)
    made += ["Norm()"] * ("log in a callback" in c["features"])
    made += ["Save()"] * bool(c["own_save"])
    lines += [f"    callbacks.append({each})" for each in made]
    lines += ["    callbacks[-1].folder = folder"] * bool(c["own_save"])
    lines += [f"    callbacks.append({each})" for each in saver]
    arguments = {"accelerator": '"cpu"', "devices": "1", **_limits(c)}
    arguments |= {"enable_progress_bar": "False", "enable_model_summary": "False"}
    text, line = [], "        "
    for name, value in arguments.items():
        if len(line) + len(name) + len(value) > 108:
            text.append(line.rstrip())
            line = "        "
        line += f"{name}={value}, "
    data = {
        "arguments": f"train, {'None' if c['validate'] == 'off' else 'val'}, ",
        "module": "",
        "datamodule": "datamodule=Data(), ",
    }[c["holder"]]
    return [
        *lines,
        "    trainer = tw.Trainer(",
        *text,
        line.rstrip(),
        '        callbacks=callbacks, logger=tw.CSVLogger(folder, name="logs", version=0),',
        "    )",
        "    module = Net()",
        f"    trainer.fit(module, {data}ckpt_path=ckpt_path)",
        "    return trainer, module",
    ]


def _saver(c: Config) -> list[str]:
    when = {
        "steps": f"every_n_train_steps={c['save_every']}",
        "epochs": "every_n_epochs=1",
        "epoch ends": "save_on_train_epoch_end=True",
        "time": "train_time_interval=timedelta(microseconds=1)",
    }[c["save"]]
    later = ", async_save=True" if c["async_save"] else ""
    made = [f'tw.ModelCheckpoint(f"{{folder}}/all", "{{epoch}}-{{step}}", save_top_k=-1, {when}{later})']
    if c["best"]:
        often = {"steps": "every_n_train_steps=2", "last": "save_last=True", "weights": "save_weights_only=True"}
        often["epochs"] = "every_n_epochs=1"
        mode = ', mode="max"' if c["mode_max"] else ""
        name = f'f"{{folder}}/best", "{{step}}", "val_loss", save_top_k={c["top_k"]}'
        made.append(f"tw.ModelCheckpoint({name}, {often[c['best']]}{mode})")
    return made


def _limits(c: Config) -> dict[str, str]:
    is_plain = not c["manual"] and "schedule" not in c["features"]
    given: dict[str, Any] = {
        "max_epochs": c["epochs"],
        "max_steps": c["max_steps"],
        "min_steps": c["min_steps"],
        "min_epochs": c["min_epochs"],
        "limit_train_batches": c["limit_train"],
        "accumulate_grad_batches": c["window"] if c["window"] > 1 and is_plain else None,
        "gradient_clip_val": 0.1 if c["clip"] and not c["manual"] else None,
        "gradient_clip_algorithm": c["clip"] if c["clip"] == "value" and not c["manual"] else None,
        "precision": c["precision"],
        "log_every_n_steps": c["log_every"],
        "reload_dataloaders_every_n_epochs": c["reload"] or None,
    }
    if c["validate"] != "off":
        given |= {"limit_val_batches": c["limit_val"], "num_sanity_val_steps": c["sanity"]}
        if c["validate"] not in (None, "always", "never"):
            given["val_check_interval"] = c["validate"]
        given["check_val_every_n_epoch"] = 2 if c["every_epochs"] > 1 else None
    text = {name: json.dumps(value) for name, value in given.items() if value is not None}
    if c["validate"] in ("always", "never"):
        text["val_check_interval"] = "timedelta(microseconds=1)" if c["validate"] == "always" else "timedelta(days=1)"
    if c["max_time"]:
        text["max_time"] = "timedelta(days=1)" if c["max_time"] == "day" else "timedelta(microseconds=1)"
    if c["across"]:
        text["check_val_every_n_epoch"] = "None"
    return text

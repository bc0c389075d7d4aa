"""The objects of a reader of the documentation: a module, loaders, a class to shard, and the examples of docstrings.

Blocks of pages and examples use these names unchanged. Ranks of a job load this file.
"""

from __future__ import annotations

import ast
import doctest
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from package import FILES, name_of, tree_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw


class Block_(nn.Sequential):
    """A part of a model that is sharded as a group."""


class Classifier(tw.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]))
        self.log("val_acc", (logits.argmax(1) == batch[1]).float().mean())

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Data(tw.DataModule):
    def train_dataloader(self) -> Any:
        return make_loader(shuffle=True)

    def val_dataloader(self) -> Any:
        return make_loader()

    test_dataloader = val_dataloader


def make_loader(shuffle: bool = False) -> DataLoader[Any]:
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))  # the same on all ranks
    return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=4, shuffle=shuffle)


def reader(text: str) -> dict[str, Any]:
    """Return the names that a block takes for granted, and write the files that it reads."""
    names: dict[str, Any] = {"torch": torch, "tw": tw, "Block": Block_, "Classifier": Classifier}
    names |= {"module": Classifier(), "data": Data(), "loss_fn": nn.functional.cross_entropy}
    names |= dict.fromkeys(("loader", "val_loader", "test_loader"), make_loader())
    names |= {"train_loader": make_loader(shuffle=True), "model": nn.Linear(4, 3)}
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    names["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(names["optimizer"], 0.9)
    for path in re.findall(r'"([\w/]+)/epoch=3-step=400\.ckpt"', text):
        trainer = tw.Trainer(max_epochs=1, barebones=True)
        trainer.fit(Classifier(), make_loader())
        trainer.save_checkpoint(f"{path}/epoch=3-step=400.ckpt")
    if '"deepspeed.json"' in text:
        Path("deepspeed.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    return names


def run_block(folder: Path) -> None:
    """Run the block that lies in a folder, as a rank of a job."""
    text = (folder / "block.py").read_text()
    exec(compile(text, "block.py", "exec"), {"__name__": "__main__", **reader(text)})


# -- docstrings ------------------------------------------------------------------------------------------------------


class Example(NamedTuple):
    """The examples of a docstring."""

    place: str
    text: str

    @property
    def is_for_several(self) -> bool:
        """Whether it runs on the ranks of a job."""
        return "devices=2" in self.text

    @property
    def starts_processes(self) -> bool:
        return "_launcher(" in self.text

    @property
    def needs_deepspeed(self) -> bool:
        return "DeepSpeed" in self.text


def examples() -> Iterator[Example]:
    """Yield the examples of the package's docstrings, read without importing it."""
    for path in FILES:
        for node in ast.walk(tree_of(path)) if ">>> " in path.read_text() else ():
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node) or ""
                if ">>> " in text:
                    yield Example(f"{name_of(path)}:{getattr(node, 'name', '')}", text)


class Checker(doctest.OutputChecker):
    """Compares the output of an example, without the line with the path of a fit's report unless the example shows it."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        if "report: " not in want:
            got = re.sub(r"^report: .*report\.html\n", "", got, flags=re.MULTILINE)
        return super().check_output(want, got, optionflags)


def failures_of(example: Example) -> str:
    """Run the lines of an example, and return doctest's report of its failures."""
    names = {"__name__": "__main__", **reader(""), "nn": nn, "DataLoader": DataLoader, "TensorDataset": TensorDataset}
    runner = doctest.DocTestRunner(Checker(), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    test = doctest.DocTestParser().get_doctest(example.text, names, example.place, example.place, 0)
    said = io.StringIO()
    runner.run(test, out=said.write)
    return said.getvalue()


def run_examples(folder: Path) -> dict[str, str]:
    """Run the examples whose places a folder lists, as a rank of a job. Return doctest's reports."""
    places = json.loads((folder / "places.json").read_text())
    return {each.place: failures_of(each) for each in examples() if each.place in places}

"""The contract of callbacks: the built-in ones use members of TrainerProtocol, the Trainer has them, and annotations fit."""

from __future__ import annotations

import ast
import operator
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from deadlines import deadline
from package import ROOT, tree_of
from small import QUIET

import trainwright as tw
from trainwright.callbacks.trainer_protocol import Counters, Metrics, RunProgress, SavingEngine, TrainerProtocol

FILES = sorted((ROOT / "callbacks").glob("*.py"))
PROTOCOLS = {
    "trainer": TrainerProtocol,
    "trainer.state": Counters,
    "trainer.state.progress": RunProgress,
    "trainer.metrics": Metrics,
    "trainer.engine": SavingEngine,
}


def members(protocol: type) -> set[str]:
    return {name for name in {**vars(protocol), **protocol.__annotations__} if not name.startswith("_")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_built_in_callbacks_use_the_protocol_alone(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            protocol = PROTOCOLS.get(owner := ast.unparse(node.value))
            assert protocol is None or node.attr in members(protocol), f"{path.name}:{node.lineno}: {owner}.{node.attr}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name):
            reads = node.func.id in ("getattr", "setattr", "vars") and ast.unparse(node.args[0]) == "trainer"
            assert not reads, f"{path.name}:{node.lineno} reaches past the protocol"
        elif isinstance(node, ast.Assign):
            assert ast.unparse(node.value) != "trainer", f"{path.name}:{node.lineno} gives the trainer a second name"


def test_each_member_is_used_and_the_trainer_has_it() -> None:
    used = {
        node.attr
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in (*PROTOCOLS, "state")
    }
    given = SimpleNamespace(trainer=tw.Trainer(**QUIET))
    for owner, protocol in PROTOCOLS.items():
        assert members(protocol) - used == set()
        assert members(protocol) - set(dir(operator.attrgetter(owner)(given))) == set()


USERS = """
import trainwright as tw
from trainwright.callbacks import TrainerProtocol

class Wide(tw.Callback):
    def on_train_start(self, trainer: tw.Trainer, module: tw.Module) -> None:
        trainer.print(trainer.global_step, trainer.profiler)

class Narrow(tw.Callback):
    def on_train_start(self, trainer: TrainerProtocol, module: tw.Module) -> None:
        trainer.should_stop = trainer.engine.ranks.decide(lambda: trainer.current_epoch > 3, "a stop")

class Bar(tw.TQDMProgressBar):
    def get_metrics(self, trainer: tw.Trainer, module: tw.Module) -> dict[str, object]:
        return {**super().get_metrics(trainer, module), "step": trainer.global_step}

class Stopping(tw.EarlyStopping):
    def on_validation_end(self, trainer: TrainerProtocol, module: tw.Module) -> None:
        super().on_validation_end(trainer, module)

given: TrainerProtocol = tw.Trainer()
"""
REACHES = """
    def on_train_end(self, trainer: TrainerProtocol, module: tw.Module) -> None:
        trainer.run
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # where it has no cache, mypy reads torch
def test_annotations_of_a_users_callbacks_fit(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(USERS)
    (tmp_path / "reaches.py").write_text(USERS.replace("\nclass Bar", REACHES + "\nclass Bar"))
    # With the package, as `make check` has it, whose cache would be of no use otherwise.
    command = [sys.executable, "-m", "mypy", "--strict", tmp_path / "users.py", tmp_path / "reaches.py", "trainwright"]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, timeout=deadline(800), check=False)
    (found,) = [line for line in done.stdout.splitlines() if "error:" in line]
    assert "reaches.py" in found, done.stdout + done.stderr
    assert '"TrainerProtocol" has no attribute "run"' in found
    assert "Found 1 error in 1 file" in done.stdout

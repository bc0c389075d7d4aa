"""Commands that start two processes: a package in a folder with spaces, and odd arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from started import Started, python

pytestmark = [pytest.mark.slow, pytest.mark.launch]

TRAIN = """
import argparse, json, logging, pathlib, sys
import trainwright as tw
from small import Classifier
from .data import make_loader

parser = argparse.ArgumentParser()
parser.add_argument("--note", action="append")
parser.add_argument("rest", nargs="*")
chosen = parser.parse_args()
logging.basicConfig(level=logging.INFO, handlers=[logging.StreamHandler(), logging.FileHandler("log.txt", mode="w")])
tw.seed_everything(1)
quiet = dict(enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, logger=False)
trainer = tw.Trainer(devices=2, accelerator="cpu", max_epochs=1, **quiet)
module = Classifier()
trainer.fit(module, make_loader(24))
logging.getLogger("mine").info("rank %d logs", trainer.global_rank)
told = {"note": chosen.note, "rest": chosen.rest, "world": trainer.world_size, "steps": trainer.global_step}
pathlib.Path(f"told-{trainer.global_rank}.json").write_text(json.dumps(told))
"""
ARGUMENTS = ("--note", "a b", "--note=", "--note=$(echo) 'q'", "--", "-x", "")


def run(command: list[str], folder: Path) -> Started:
    started = Started(command, folder)
    try:
        assert started.wait() == 0, started.stdout + started.stderr
        started.check_nothing_left()
    finally:
        started.close()
    return started


def test_a_package_can_launch_its_entry_point(tmp_path: Path) -> None:
    folder = tmp_path / "my work"
    package = folder / "pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "data.py").write_text("from small import make_loader\n")
    (package / "train.py").write_text(TRAIN)
    started = run(python("-m", "pkg.train", *ARGUMENTS), folder)
    for rank in range(2):
        told = json.loads((folder / f"told-{rank}.json").read_text())
        assert told == {"note": ["a b", "", "$(echo) 'q'"], "rest": ["-x", ""], "world": 2, "steps": 3}
    assert "[rank1] INFO:mine:rank 1 logs" in started.stderr
    assert "INFO:mine:rank 0 logs" in started.stderr.splitlines()

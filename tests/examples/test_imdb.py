"""The example examples/imdb: its data, and its scripts, which are made from others by changes of a few lines."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import io
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from interpreters import run_command
from jobs import run_job

FOLDER = Path(__file__).parents[2] / "examples" / "imdb"
sys.path.append(str(FOLDER))

import made  # noqa: E402

CHANGES = {
    "2_trainer": ("1_plain", 31, 41), "3_mixed_precision": ("2_trainer", 0, 1), "4_compile": ("2_trainer", 0, 1),
    "5_ddp": ("2_trainer", 1, 2), "6_deepspeed": ("2_trainer", 1, 2), "7_fsdp": ("2_trainer", 1, 2),
    "8_ddp_sharded": ("2_trainer", 1, 2), "9_raw_loop": ("1_plain", 14, 16),
}  # fmt: skip
"""By script: the script that it derives from, and the numbers of removed and added lines, without docstrings."""


def lines_of(name: str) -> list[str]:
    text = re.sub(r'\A""".*?"""', "", (FOLDER / f"{name}.py").read_text(), flags=re.DOTALL)
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_every_script_is_short_and_compared() -> None:
    scripts = {path.stem: len(path.read_text().splitlines()) for path in FOLDER.glob("[0-9]_*.py")}
    assert set(scripts) == {"1_plain", *CHANGES}
    assert max(scripts.values()) < 100


@pytest.mark.parametrize("name", CHANGES)
def test_a_script_is_another_one_with_few_changes(name: str) -> None:
    origin, most_removed, most_added = CHANGES[name]
    changes = [line for line in difflib.ndiff(lines_of(origin), lines_of(name)) if line[0] in "+-"]
    removed, added = (sum(line[0] == sign for line in changes) for sign in "-+")
    assert removed <= most_removed, "\n".join(changes)
    assert 0 < added <= most_added, "\n".join(changes)


def test_made_reviews_are_the_same_in_every_run() -> None:
    reviews = made.make_reviews(6000)
    assert hashlib.sha256(repr(reviews).encode()).hexdigest()[:16] == "8609344252dcb2c3"
    assert made.make_reviews(6000) == reviews
    assert len({text for text, _ in reviews}) > 5990
    assert max(len(text.split()) for text, _ in reviews) < 64


def options(**changes: Any) -> argparse.Namespace:
    import reviews

    with mock.patch.object(sys, "argv", ["script"]):
        found = reviews.parse_options()
    vars(found).update(changes)
    return found


@pytest.mark.parametrize("flag", ["--reviews", "--epochs", "--batch-size"])
@pytest.mark.parametrize("number", ["0", "-5"])
def test_a_number_that_is_not_positive_is_refused(flag: str, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    import reviews

    with mock.patch.object(sys, "argv", ["script", flag, number]), pytest.raises(SystemExit):
        reviews.parse_options()
    assert f"argument {flag}: {number} is not positive" in capsys.readouterr().err


def test_the_published_reviews_are_split_evenly() -> None:
    import reviews

    everything = [(f"review {index}", index % 2) for index in range(50_000)]
    parts = reviews.split(everything)
    assert [len(part) for part in parts] == [35_000, 5_000, 10_000]
    assert [sum(label for _, label in part) for part in parts] == [17_500, 2_500, 5_000]
    assert sorted(each for part in parts for each in part) == sorted(everything)
    assert reviews.split(everything[::-1]) == parts
    assert [len(part) for part in reviews.split(everything[:8])] == [4, 2, 2]
    with pytest.raises(ValueError, match="6 reviews are too few for training, validation and test"):
        reviews.split(everything[:6])


def test_batches_hold_what_was_read() -> None:
    import reviews

    given = options(reviews=200)
    train_loader, val_loader, test_loader = reviews.load(given)
    parts = reviews.split(made.make_reviews(200))
    assert [len(loader.dataset) for loader in (train_loader, val_loader, test_loader)] == [len(part) for part in parts]
    tokenizer = reviews.load_tokenizer(given, [text for text, _ in parts[0]])
    batches = list(test_loader)
    assert [len(batch["labels"]) for batch in batches] == [12, 12, 12, len(parts[2]) - 36]
    rows = [row for batch in batches for row in tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)]
    labels = torch.cat([batch["labels"] for batch in batches]).tolist()
    plain = [(re.sub(r"\W+", " ", text).strip(), label) for text, label in zip(rows, labels, strict=True)]
    assert plain == [(re.sub(r"\W+", " ", text).strip(), label) for text, label in parts[2]]
    for batch in batches:
        assert torch.equal(batch["attention_mask"], (batch["input_ids"] != tokenizer.pad_token_id).long())
    model = reviews.make_model(given)
    assert model.training
    assert model(**batches[0]).logits.shape == (12, 2)


def test_pretrained_weights_come_with_their_tokenizer() -> None:
    import reviews

    small = options(reviews=200)
    reviews.load(small)
    parts = reviews.split(made.make_reviews(200))
    reviews.load_tokenizer(small, [text for text, _ in parts[0]]).save_pretrained("mine")
    saved = reviews.make_model(small)
    saved.save_pretrained("mine")
    given = options(reviews=200, pretrained="mine")
    loaded = reviews.make_model(given)
    assert loaded.training
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), saved.parameters(), strict=True))
    first, *_ = reviews.load(given)
    same, *_ = reviews.load(small)
    assert [each.tolist() for each, _ in first.dataset] == [each.tolist() for each, _ in same.dataset]
    Path("gone").mkdir()
    with pytest.raises(
        OSError, match=r"--pretrained gone cannot be loaded: .* Without --pretrained the script makes a small"
    ):
        reviews.make_model(options(pretrained="gone"))
    with pytest.raises(SystemExit, match=r"OSError: --pretrained gone cannot be loaded"):  # without a traceback
        reviews.load(options(reviews=200, pretrained="gone"))
    with pytest.raises(SystemExit, match=r"FileNotFoundError: --data none: there is no such file or folder"):
        reviews.load(options(data="none"))


REDUCED = ("--reviews", "4800", "--epochs", "1")
ALONE = ("1_plain", "2_trainer", "3_mixed_precision")
TOGETHER = ("5_ddp", "6_deepspeed", "7_fsdp", "8_ddp_sharded", "9_raw_loop")


def run_here(name: str, *arguments: str) -> str:
    """Run a script in this process, and return its output."""
    argv = [f"{name}.py", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed, mock.patch.object(sys, "argv", argv):
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return printed.getvalue()


def accuracy(output: str) -> float:
    (found,) = re.findall(r"^test accuracy: (.*) %\ntraining time: [\d.]+ s$", output, re.MULTILINE)
    return float(found)


def on_one(folder: Path) -> dict[str, str]:
    outputs = {name: run_here(name, "--reviews", "2400", "--epochs", "2") for name in ALONE}
    # To compile takes half a minute, however few batches there are after it.
    return {**outputs, "4_compile": run_here("4_compile", *REDUCED, "--reviews", "240")}


def on_two(folder: Path) -> dict[str, str]:
    return {name: run_here(name, *REDUCED) for name in TOGETHER}


def best_checkpoints(folder: Path) -> int:
    return len(list((folder / "runs/imdb/trainwright_logs").rglob("*.ckpt/manifest.json")))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # from torch's compiler
def test_the_scripts_of_one_process_are_accurate(tmp_path: Path) -> None:
    (outputs,) = run_job(on_one, 1, tmp_path)
    found = {name: accuracy(output) for name, output in outputs.items()}
    assert found.pop("4_compile") > 30
    assert min(found.values()) > 75, found
    assert best_checkpoints(tmp_path) == 3


@pytest.mark.slow
def test_the_scripts_of_two_processes_are_accurate(tmp_path: Path) -> None:
    outputs, others = run_job(on_two, 2, tmp_path)
    assert not any(others.values()), "rank 0 alone prints"
    found = {name: accuracy(output) for name, output in outputs.items()}
    assert min(found.values()) > 75, found
    assert best_checkpoints(tmp_path) == 4


@pytest.mark.slow
def test_a_script_starts_its_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(FOLDER / "5_ddp.py"), *REDUCED, "--reviews", "240"]
    done = run_command(command, folder=tmp_path, seconds=180)
    assert done.returncode == 0, done.stderr
    assert accuracy(done.stdout) > 30  # the same script trains further on forked ranks
    assert best_checkpoints(tmp_path) == 1

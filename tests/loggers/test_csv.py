"""The CSV logger's folders and rows."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import fsspec
import pytest

import trainwright as tw


def rows(logger: tw.CSVLogger) -> list[dict[str, str]]:
    with fsspec.open(logger.metrics_path, "r", newline="") as file:
        return list(csv.DictReader(file))


def started(folder: Any, **kwargs: Any) -> tw.CSVLogger:
    logger = tw.CSVLogger(str(folder), **kwargs)
    logger.start(lambda text: text, is_writer=True)
    return logger


def test_each_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    folders = [started(tmp_path).log_dir for _ in range(3)]
    assert folders == [f"{tmp_path}/trainwright_logs/version_{number}" for number in range(3)]
    assert started(tmp_path, name="runs", version="mine").log_dir == f"{tmp_path}/runs/mine"


@pytest.mark.parametrize("place", ["local", "memory://csv"])
def test_new_columns_keep_the_earlier_rows(tmp_path: Path, place: str) -> None:
    logger = started(tmp_path if place == "local" else place)
    logger.log_metrics({"epoch": 0, "a": 1.5}, 1)
    logger.flush()
    logger.log_metrics({"epoch": 0, "a": 2.5}, 2)
    logger.flush()
    logger.log_metrics({"epoch": 1, "b": 3.5}, 3)
    logger.close()
    assert rows(logger) == [
        {"step": "1", "epoch": "0", "a": "1.5", "b": ""},
        {"step": "2", "epoch": "0", "a": "2.5", "b": ""},
        {"step": "3", "epoch": "1", "a": "", "b": "3.5"},
    ]


def test_rows_are_written_while_a_long_epoch_runs(tmp_path: Path) -> None:
    logger = started(tmp_path)
    for step in range(450):
        logger.log_metrics({"a": 0.1}, step)
    assert len(rows(logger)) == 400
    assert rows(logger)[0]["a"] == "0.1"


def test_the_numbers_of_one_moment_are_one_row(tmp_path: Path) -> None:
    logger = started(tmp_path)
    logger.log_metrics({"epoch": 0, "val": 1.0}, 7)
    logger.log_metrics({"epoch": 0, "train": 2.0}, 7)
    logger.log_metrics({"epoch": 0, "train": 3.0}, 7)
    logger.close()
    assert [(row["val"], row["train"]) for row in rows(logger)] == [("1.0", "2.0"), ("", "3.0")]


def test_no_folder_before_the_run() -> None:
    with pytest.raises(RuntimeError, match=r"before trainer\.fit"):
        tw.CSVLogger().metrics_path


def test_a_run_goes_on_in_the_folder_of_a_given_version(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        logger = started(tmp_path, version="mine")
        logger.log_metrics({"epoch": 0, "a": value}, 1)
        logger.close()
    assert [row["a"] for row in rows(logger)] == ["1.0", "2.0"]

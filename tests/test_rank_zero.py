"""Functions that act on rank 0 only, and the lines of warnings."""

from __future__ import annotations

import linecache
import logging
import os
import warnings
from threading import Thread

import pytest
import torch
from small import be_rank

from trainwright import rank_zero
from trainwright.engine.optimizers import read_optimizers
from trainwright.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn


@pytest.fixture(autouse=True)
def _unread_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "_rank", None)


@rank_zero_only
def double(number: int) -> int:
    """Double it."""
    return 2 * number


def test_a_function_runs_on_rank_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_zero_only.rank == 0
    assert double(4) == 8
    assert (double.__name__, double.__doc__) == ("double", "Double it.")
    monkeypatch.setattr(rank_zero_only, "_rank", None)
    be_rank(monkeypatch, 1)
    assert double(4) is None
    assert rank_zero_only.rank == 1
    assert rank_zero_only(lambda: "here", default="elsewhere")() == "elsewhere"
    be_rank(monkeypatch, 0)
    assert rank_zero_only.rank == 1  # read once
    rank_zero_only.rank = 0
    assert double(4) == 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_reads_its_own_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_zero_only.rank == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking beside torch's threads
        pid = os.fork()
    if pid == 0:
        be_rank(monkeypatch, 1)
        os._exit(10 + rank_zero_only.rank)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 11


def test_rank_0_logs_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="trainwright"):
        rank_zero_info("%d parts", 3)
    (record,) = caplog.records
    assert (record.name, record.levelname, record.message) == ("trainwright", "INFO", "3 parts")
    assert record.filename == os.path.basename(__file__)
    for category in (UserWarning, DeprecationWarning):
        with pytest.warns(category, match="careful") as caught:
            rank_zero_warn("careful", category)
        assert caught[0].filename == __file__


def test_the_others_say_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    be_rank(monkeypatch, 1)
    with caplog.at_level(logging.INFO, logger="trainwright"):
        rank_zero_info("no")
        rank_zero_warn("no")  # a warning would be an error here
    assert not caplog.records
    assert rank_zero.logger is logging.getLogger("trainwright")


def test_a_warning_shows_the_users_line() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.nn.Sequential(Warns())(None)
        read_optimizers(None)
        thread = Thread(target=read_optimizers, args=(None,))
        thread.start()
        thread.join()
    lines = [linecache.getline(each.filename, each.lineno).strip() for each in said]
    assert lines[0] == 'rank_zero_warn("here")'
    assert lines[1] == "read_optimizers(None)"
    assert len(said) == 3  # also where no line of the user's has led to it


class Warns(torch.nn.Module):
    def forward(self, value: object) -> None:
        rank_zero_warn("here")

"""Functions that act on rank 0 only, and the lines of warnings."""

from __future__ import annotations

import linecache
import logging
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from package import ROOT

from trainwright import rank_zero
from trainwright.engine.optimizers import read_optimizers
from trainwright.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn


@pytest.fixture(autouse=True)
def _unread_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "_rank", None)


def be_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))


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


def test_what_is_installed_in_pythons_own_folder_is_the_users() -> None:
    source = "import trainwright\ndef go():\n    trainwright.rank_zero_warn('here')\n"
    shown = []
    for file in ("site-packages/mine/train.py", "dist-packages/mine.py", "mine.py"):
        names: dict[str, Any] = {"__name__": "mine"}
        path = os.path.join(os.path.dirname(os.__file__), file)
        exec(compile(source, path, "exec"), names)
        with pytest.warns(UserWarning, match="here") as said:
            names["go"]()
        shown.append(said[0].filename == path)
    assert shown == [True, True, False]


def test_the_package_may_be_found_by_a_path_with_two_dots(tmp_path: Path) -> None:
    work, package = tmp_path / "work", tmp_path / "package"
    for folder in (work, package):
        folder.mkdir()
    shutil.copy(ROOT / "rank_zero.py", package)
    (package / "uses.py").write_text("from rank_zero import warn\n\ndef use():\n    warn('here')\n")
    program = "import sys; sys.path.insert(0, '../package'); from uses import use\nuse()"
    done = subprocess.run([sys.executable, "-c", program], cwd=work, capture_output=True, text=True, check=True)
    assert done.stderr.startswith("<string>:2: UserWarning: here")


class Warns(torch.nn.Module):
    def forward(self, value: object) -> None:
        rank_zero_warn("here")

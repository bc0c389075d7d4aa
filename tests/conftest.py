"""Settings that hold for every test: one torch thread, seeded generators, a folder of its own, no process group left behind."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    if importlib.util.find_spec("pytest_timeout") is None:  # machines with a GPU come with packages of their own
        parser.addini("timeout", "seconds of a test: pytest-timeout's, which is not installed")


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("pytest_timeout") is None:
        config.addinivalue_line("markers", "timeout(seconds): pytest-timeout's, which is not installed")


def pytest_runtest_setup(item: pytest.Item) -> None:
    # All of them at one place, so that the summary has one line for them.
    if item.get_closest_marker("gpu") is not None and not torch.accelerator.is_available():
        pytest.skip(f"torch {torch.__version__} sees no accelerator here")


@pytest.fixture(autouse=True)
def _seeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("the test leaves a process group in pytest's own process, which others may fork", pytrace=False)

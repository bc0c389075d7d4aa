"""Settings of all tests: one torch thread, seeded generators, a new folder, and no process group after a test.

torch is imported where it is used: the process that distributes the tests to pytest-xdist's workers starts without it.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from deadlines import load
from huge_pages import collapse
from interpreters import search_path

# On a CPU with AMX, oneDNN's gradient of a small bfloat16 convolution is now and then not finite (torch 2.13).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

STARTS_PROCESSES = {"run_job", "run_alone", "run_python", "run_command", "subprocess", "start_job", "notebook_launcher"}
"""Functions that run code in other interpreters."""


BEGIN = (
    "data/test_positions.py", "trainer/test_resume_data.py", "data/test_epoch_listeners.py",
    "trainer/test_streams.py", "data/test_workers.py", "checkpoint/test_lock.py", "data/test_batch_stream.py",
    "data/test_loaders.py", "test_soak.py", "launch/test_graceful_shutdown.py", "strategies/test_contract.py",
    "examples/test_examples.py", "examples/test_imdb.py", "test_gpu_benchmark.py", "test_fuzz.py",
    "launch/test_two_nodes.py", "launch/test_notebook.py", "strategies/test_matrix.py", "strategies/test_fsdp.py",
    "test_benchmarks.py", "test_packaging.py", "launch/test_processes.py", "strategies/test_zero_optimizers.py",
    "strategies/test_layers.py", "programs/test_transformers.py", "programs/test_hydra.py",
    "programs/test_entry_points.py", "launch/test_cli.py", "trainer/test_cuts.py",
)  # fmt: skip
"""Files that run first if several processes share the tests: files that fork most, while their process is small, then
the longest."""
NOT_FAST = {"programs": {"slow"}, "device": {"gpu", "device"}, "cluster": {"cluster"}, "faults": {"faults"}}
"""Folders that the fast sets do not read (`QUICK` in the Makefile), with the marks that their tests need."""
_loaded: set[str] = set()
"""The modules that were loaded when garbage was looked for last, or the tests had been collected."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On an accelerator deselect tests of the host, and tests that start processes outside of `tests/device`."""
    tests = Path(__file__).parent
    places = {tests / each: number for number, each in enumerate(BEGIN)}
    assert not (gone := [str(path) for path in places if not path.exists()]), f"BEGIN has {gone}"
    for item in items:
        marks = NOT_FAST.get(item.path.relative_to(tests).parts[0]) if item.path.is_relative_to(tests) else None
        if marks is not None and not any(map(item.get_closest_marker, marks)):
            raise pytest.UsageError(f"{item.nodeid} would never run; mark it as one of {sorted(marks)}")
    items.sort(key=lambda item: places.get(item.path, len(places)))
    from small import ON_HOST

    if ON_HOST:
        return
    left_out = [item for item in items if item.get_closest_marker("host") or _starts_processes(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Look for no garbage meanwhile: almost all that is made stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    _freeze()


def _freeze() -> None:
    """Exclude the loaded objects, torch above all, from later garbage collections."""
    gc.freeze()
    collapse()
    _loaded.update(sys.modules)


def _starts_processes(item: pytest.Item) -> bool:
    if "device" in item.path.parts or not isinstance(item, pytest.Function):
        return False
    definitions = item._fixtureinfo.name2fixturedefs.values()
    functions: list[Callable[..., Any]] = [item.function, *(each.func for one in definitions for each in one)]
    return any(_names(each) & STARTS_PROCESSES for each in functions)


def _names(function: Callable[..., Any]) -> set[str]:
    """Return the names that a function uses, and the names that its callees in the same module use."""
    names = set(function.__code__.co_names)
    for name in list(names):
        called = getattr(function, "__globals__", {}).get(name)
        if getattr(called, "__module__", None) == function.__module__ and hasattr(called, "__code__"):
            names |= set(called.__code__.co_names)
    return names


def pytest_addoption(parser: pytest.Parser) -> None:
    if importlib.util.find_spec("pytest_timeout") is None:  # machines with a GPU come with other packages
        parser.addini("timeout", "seconds of a test: pytest-timeout's, which is not installed")


def pytest_configure(config: pytest.Config) -> None:
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # a shell without job control ignores it for commands that end with &
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["PYTHONPATH"] = search_path(*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    # torch's compiler makes a folder for its cache when it is imported, in the folder that a test checks for leftovers.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")))
    if importlib.util.find_spec("pytest_timeout") is None:
        config.addinivalue_line("markers", "timeout(seconds): pytest-timeout's, which is not installed")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Give a test more time on a busy machine."""
    if len(sys.modules) > len(_loaded) + 100:
        gc.collect()
        _freeze()
    if item.config.getoption("timeout", None) is None:
        marker = item.get_closest_marker("timeout")
        seconds = float(marker.args[0] if marker else item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(seconds * load()), append=False)
    return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.accelerator.is_available():
        # All of them at one place, so that the summary has one line for them.
        pytest.skip(f"torch {torch.__version__} sees no accelerator here")


@pytest.fixture(autouse=True)
def _seeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch
    from small import ON_HOST

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINWRIGHT_CONFIG", os.devnull)  # not the user's config
    threads, handlers = (
        torch.get_num_threads(),
        {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)},
    )
    torch.set_num_threads(1)
    # torch.manual_seed also records a stack for every absent kind of device, which takes a millisecond.
    (torch.default_generator if ON_HOST else torch).manual_seed(0)
    yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():  # a kept error of a stopped run keeps its handlers
        signal.signal(number, handler)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("the test leaves a process group in pytest's own process, which others may fork", pytrace=False)

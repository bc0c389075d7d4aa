"""The PyTorch profiler: operators on the host and the device, as a table and a trace for a browser."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import emit_nvtx as nvtx_ranges
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from trainwright.devices import cuda
from trainwright.errors import did_you_mean
from trainwright.profilers.base import Profiler

STEP_ACTIONS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
"""The action per stage that is a batch: its start advances the schedule."""

_FORMS = ("{}_time", "{}_time_total", "{}_memory_usage", "self_{}_time_total", "self_{}_memory_usage")
SORT_KEYS = ("count", *(form.format(device) for device in ("cpu", cuda.NAME, "xpu", "device") for form in _FORMS))
"""The keys that torch can sort the table by."""


class PyTorchProfiler(Profiler):
    """Runs torch.profiler, with actions and submodules as named ranges.

    By default the first batch is skipped, the second warms up and the next three are recorded, once per run.

    Args:
        dirpath: the output folder, a local path or a URL. The default is the run's log folder.
        filename: the middle of the files' names, between the stage and, on several processes, the rank.
            Without both, the table is printed.
        group_by_input_shapes: list operators separately for different input shapes.
        emit_nvtx: emit ranges for Nsight Systems instead of recording. Start Python under `nsys profile`.
        export_to_chrome: write a trace for chrome://tracing or perfetto.dev on every rank, after every recording.
        row_limit: the number of rows of the table.
        sort_by_key: the column to sort by. The default is the total time on the device, or on the CPU if only it is recorded.
        record_module_names: name the forwards of submodules.
        table_kwargs: other arguments for the table, such as `max_name_column_width`.
        **profiler_kwargs: arguments for `torch.profiler.profile`, such as `schedule`, `activities` or `on_trace_ready`, which
            replaces the writing of a trace.

    Raises:
        TypeError: torch does not have an argument.
        ValueError: sort_by_key is unknown, or a setting excludes another setting or needs a GPU.

    >>> profiler = tw.PyTorchProfiler(dirpath="profiles", row_limit=10, export_to_chrome=False)
    >>> trainer = tw.Trainer(profiler=profiler, max_epochs=1, enable_model_summary=False)
    >>> trainer.fit(module, loader)  # writes the table to profiles/fit-profile.txt
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        emit_nvtx: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        record_module_names: bool = True,
        table_kwargs: dict[str, Any] | None = None,
        **profiler_kwargs: Any,
    ) -> None:
        super().__init__(dirpath, filename)
        _check_names("PyTorchProfiler", profiler_kwargs, profile.__init__, ())
        _check_names("table_kwargs", table_kwargs or {}, EventList.table, ("sort_by", "row_limit"))
        if sort_by_key is not None and sort_by_key not in SORT_KEYS:
            raise ValueError(_unknown("sort_by_key", sort_by_key, SORT_KEYS))
        if group_by_input_shapes and not profiler_kwargs.setdefault("record_shapes", True):
            raise ValueError("group_by_input_shapes=True excludes record_shapes=False. Do not pass record_shapes.")
        if emit_nvtx and not cuda.is_available():
            raise ValueError("emit_nvtx=True needs an NVIDIA GPU, and torch sees none. Remove it to record operators.")
        self.group_by_input_shapes, self.emit_nvtx = group_by_input_shapes, emit_nvtx
        self.export_to_chrome, self.record_module_names = export_to_chrome, record_module_names
        self.row_limit, self.sort_by_key, self.table_kwargs = row_limit, sort_by_key, table_kwargs or {}
        self.profiler_kwargs = {"schedule": schedule(wait=1, warmup=1, active=3, repeat=1), **profiler_kwargs}
        self._recorder: Any = None
        self._ranges: dict[str, list[Any]] = {}
        self._handles: list[Any] = []
        self._averages: EventList | None = None
        self._batches = self._recordings = 0
        self._has_ended = False

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | os.PathLike[str] | None = None) -> None:
        self._end()  # the profiler may have been used before the run
        super().setup(stage, local_rank, log_dir)
        self._averages, self._batches, self._recordings, self._has_ended = None, 0, 0, False

    def attach(self, module: nn.Module) -> None:
        if self.record_module_names:
            for name, child in module.named_modules():
                self._handles += _name_forward(child, f"[module] {name or type(child).__name__}")

    def start(self, action: str) -> None:
        if self._recorder is None and not self._has_ended:
            self._begin()
        if action == STEP_ACTIONS.get(self.stage or "fit", "training_step"):
            if self._batches and isinstance(self._recorder, profile):
                self._advance(self._recorder)
            self._batches += 1
        self._ranges.setdefault(action, []).append(_open_range(action))

    def stop(self, action: str) -> None:
        named = self._ranges.get(action)
        if not named:
            raise RuntimeError(f"action={action!r} was stopped, but it is not running. Start it first.")
        named.pop().__exit__(None, None, None)

    def summary(self) -> str:
        """Return the table of the last complete recording."""
        if self.emit_nvtx or not self._ranges:
            return ""
        if self._averages is None:
            return (
                f"Profile of {self.stage or 'this run'}: torch.profiler recorded nothing in {self._batches} batches. By "
                "default it starts with the third. Run more batches, or pass schedule=None to record all."
            )
        averages: Any = self._averages
        table = averages.table(sort_by=self._sort_key(), row_limit=self.row_limit, **self.table_kwargs)
        return f"Profile of {self.stage or 'this run'}\n{table}"

    def describe(self) -> None:
        self._end()
        super().describe()

    def teardown(self, stage: str) -> None:
        self._end()

    def _begin(self) -> None:
        if self.emit_nvtx:
            recorder: Any = nvtx_ranges()  # type: ignore[no-untyped-call]
        else:
            recorder = profile(**{**self.profiler_kwargs, "on_trace_ready": self._take_recording})
        recorder.__enter__()
        self._recorder = recorder

    def _advance(self, recorder: profile) -> None:
        """Advance the schedule by a batch.

        A recorder that fails here may report a state that it never entered, and torch crashes at the exit of such a recorder.
        So a failure ends the recording.
        """
        before = recorder.current_action
        try:
            recorder.step()
        except BaseException:  # an unwritable trace, or a warning as an error
            self._recorder, self._has_ended = None, True
            is_running = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
            if before == ProfilerAction.WARMUP and not is_running:
                recorder.start_trace()  # a prepared trace can end only after its start
                recorder.stop_trace()
            elif before in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE) and is_running:
                recorder.stop_trace()
            raise

    def _end(self) -> None:
        """End the recording, also after a failure. The recorded part is kept."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._has_ended = True
        if self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            recorder.__exit__(None, None, None)

    def _take_recording(self, recorder: profile) -> None:
        self._recordings += 1
        self._averages = recorder.key_averages(group_by_input_shape=self.group_by_input_shapes)
        on_trace_ready = self.profiler_kwargs.get("on_trace_ready")
        if on_trace_ready is not None:
            on_trace_ready(recorder)
        elif self.export_to_chrome:
            number = f"-{self._recordings}" if self._recordings > 1 else ""
            self.write(f"{number}.pt.trace.json", recorder.export_chrome_trace)

    def _sort_key(self) -> str:
        if self.sort_by_key is not None:
            return self.sort_by_key
        activities = self.profiler_kwargs.get("activities")
        if activities is None:
            activities = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
        is_cpu_only = all(activity == ProfilerActivity.CPU for activity in activities)
        return "cpu_time_total" if is_cpu_only else "device_time_total"


def _open_range(name: str) -> Any:
    named: Any = record_function(name)
    named.__enter__()
    return named


def _name_forward(module: nn.Module, name: str) -> list[Any]:
    """Record a module's forwards as named ranges, and return the handles of the hooks."""
    ranges: list[Any] = []

    def enter(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            ranges.append(_open_range(name))

    def leave(*_: Any) -> None:
        if ranges and not torch.compiler.is_compiling():
            ranges.pop().__exit__(None, None, None)

    before = module.register_forward_pre_hook(enter, prepend=True)
    return [before, module.register_forward_hook(leave, always_call=True)]


def _check_names(where: str, given: dict[str, Any], function: Callable[..., Any], taken: tuple[str, ...]) -> None:
    accepted = [name for name in inspect.signature(function).parameters if name not in ("self", *taken)]
    for name in given:
        if name not in accepted:
            raise TypeError(_unknown(f"an argument of {where}", name, accepted))


def _unknown(subject: str, name: str, accepted: tuple[str, ...] | list[str]) -> str:
    return f"{subject}={name!r} is unknown; choose from {', '.join(accepted)}.{did_you_mean(name, accepted)}"

"""Profiling of a block of a loop with torch.profiler, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from trainwright.arguments import NamedArguments
from trainwright.errors import did_you_mean
from trainwright.profilers import Profiler

ACTIVITIES = {name.lower(): activity for name, activity in ProfilerActivity.__members__.items()}
SCHEDULE = ("skip_first", "wait", "warmup", "active", "repeat")


@dataclass
class ProfileKwargs(NamedArguments):
    """Options of `Accelerator.profile`.

    Args:
        activities: what to record: "cpu" and the name of an accelerator; by default all that torch can.
        schedule_option: batches by phase: "skip_first" once, then in turns "wait", "warmup" and "active", which is recorded,
            "repeat" times (0: to the end). The loop calls `step()` of what `profile` yields after each batch.
        on_trace_ready: called with the profiler after each recording.
        record_shapes, profile_memory, with_stack, with_flops, with_modules: torch.profiler's.
        output_trace_dir: the folder, a path or a URL, into which each rank writes a trace for chrome://tracing or
            perfetto.dev after each recording: profile-RANK.json, later ones profile-RANK-2.json and so on.

    Raises:
        ValueError: an activity or a phase is unknown.

    >>> options = tw.ProfileKwargs(activities=["cpu"], record_shapes=True, output_trace_dir="traces")
    >>> accelerator = tw.Accelerator(kwargs_handlers=[options])
    >>> with accelerator.profile() as profiler:  # writes traces/profile-0.json
    ...     for inputs, targets in loader:
    ...         loss = loss_fn(model(inputs), targets)
    >>> table = profiler.key_averages().table(sort_by="cpu_time_total", row_limit=5)
    """

    activities: Iterable[str] | None = None
    schedule_option: Mapping[str, int] | None = None
    on_trace_ready: Callable[[profile], Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def __post_init__(self) -> None:
        for kind, given, known in (
            ("activity", self.activities or (), tuple(ACTIVITIES)),
            ("phase of schedule_option", self.schedule_option or (), SCHEDULE),
        ):
            for name in given:
                if name not in known:
                    raise ValueError(
                        f"ProfileKwargs was given the {kind} {name!r}; choose from {', '.join(known)}."
                        f"{did_you_mean(name, known)}"
                    )


@contextmanager
def profiled(options: ProfileKwargs) -> Iterator[profile]:
    """Record the block, and write what was recorded; the traces of other ranks may still be written when it ends."""
    recordings = 0
    files = Profiler(options.output_trace_dir)

    def take(recorder: profile) -> None:
        nonlocal recordings
        recordings += 1
        if options.on_trace_ready is not None:
            options.on_trace_ready(recorder)
        if options.output_trace_dir is not None:
            number = f"-{recordings}" if recordings > 1 else ""
            files.write(f"{number}.json", recorder.export_chrome_trace, names_rank=True)

    # torch's schedule has no defaults for these three.
    phases = {"wait": 0, "warmup": 0, "active": 1, **(options.schedule_option or {})}
    with profile(
        activities=None if options.activities is None else [ACTIVITIES[each] for each in options.activities],
        schedule=None if options.schedule_option is None else schedule(**phases),
        on_trace_ready=take,
        record_shapes=options.record_shapes,
        profile_memory=options.profile_memory,
        with_stack=options.with_stack,
        with_flops=options.with_flops,
        with_modules=options.with_modules,
    ) as recorder:
        yield recorder

"""Options: the objects that `Accelerator(kwargs_handlers=)` takes for its parts, among them the profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from trainwright.arguments import NamedArguments
from trainwright.errors import a_type_of, did_you_mean
from trainwright.precision import Precision
from trainwright.profilers import Profiler
from trainwright.strategies import Strategy, make_strategy

ACTIVITIES = {name.lower(): activity for name, activity in ProfilerActivity.__members__.items()}
SCHEDULE = ("skip_first", "wait", "warmup", "active", "repeat")


@dataclass
class ProfileKwargs(NamedArguments):
    """Options of `Accelerator.profile`.

    Args:
        activities: the activities to record: "cpu" and the name of an accelerator, by default all that torch can.
        schedule_option: batches by phase: "skip_first" once, then in turns "wait", "warmup" and "active", which is recorded,
            "repeat" times (0: to the end). The loop calls the `step()` of the yielded profiler after a batch.
        on_trace_ready: called with the profiler after a recording.
        record_shapes, profile_memory, with_stack, with_flops, with_modules: torch.profiler's.
        output_trace_dir: the folder, a path or a URL, into which every rank writes a trace for chrome://tracing or
            perfetto.dev after a recording: profile-RANK.json, later ones profile-RANK-2.json and so on.

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
                        f"ProfileKwargs was given the {kind} {name!r}. Choose from {', '.join(known)}."
                        f"{did_you_mean(name, known)}"
                    )


@contextmanager
def profiled(options: ProfileKwargs) -> Iterator[profile]:
    """Record the block, and write the traces. The traces of other ranks may still be written when it ends."""
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
    activities = None if options.activities is None else [ACTIVITIES[each] for each in options.activities]
    plan = None if options.schedule_option is None else schedule(**phases)
    names = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
    shown = {name: getattr(options, name) for name in names}
    with profile(activities=activities, schedule=plan, on_trace_ready=take, **shown) as recorder:
        yield recorder


REPLICATING = "ddp"
"""The strategy that DistributedDataParallelKwargs are for."""


class DDPCommunicationHookType(StrEnum):
    """How strategy "ddp" sends gradients, under Accelerate's names for `comm_hook`. A member equals its value as text.

    >>> options = tw.DistributedDataParallelKwargs(comm_hook=tw.DDPCommunicationHookType.BF16)
    >>> options.comm_hook == "bf16"
    True
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class AutocastKwargs(NamedArguments):
    """Options of `Accelerator.autocast`.

    Args:
        enabled: False computes in full precision there.
        cache_enabled: whether weights that were cast are kept for later uses in the block, or None for torch's default.

    >>> accelerator = tw.Accelerator(mixed_precision="bf16")
    >>> with accelerator.autocast(tw.AutocastKwargs(enabled=False)):
    ...     print((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
    torch.float32
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(NamedArguments):
    """Options of strategy "ddp".

    Args:
        dim, broadcast_buffers: accepted with their defaults only.
        check_reduction: accepted. It has no effect.
        bucket_cap_mb: MiB of gradients that are averaged together.
        find_unused_parameters: set it if some batches use only a part of the model.
        gradient_as_bucket_view: let gradients be views of the buckets, which saves memory.
        static_graph: every batch uses the same parameters.
        comm_hook: "no", "fp16", "bf16", "power_sgd", a function of (state, bucket), or an enum's member with such a value.
        comm_state_option: the function's state, or a dict of options for "power_sgd".

    Raises:
        ValueError: an option that the strategy cannot fulfil.

    >>> options = tw.DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=50)
    >>> accelerator = tw.Accelerator(kwargs_handlers=[options])
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: float | None = None
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: Any = "no"
    comm_state_option: Any = None

    def __post_init__(self) -> None:
        buffers = "every training step starts with rank 0's buffers, so that the ranks train one model"
        split = "a batch is not split between devices"
        for name, needed, reason in (("dim", 0, split), ("broadcast_buffers", True, buffers)):
            if (value := getattr(self, name)) != needed:
                raise ValueError(f"DistributedDataParallelKwargs({name}={value!r}) is not accepted: {reason}. Omit it.")

    def strategy(self, chosen: str | Strategy) -> str | Strategy:
        """Return the strategy "ddp" with these settings, if that or "auto" was chosen, or else the chosen one."""
        if chosen not in ("auto", REPLICATING):
            return chosen  # as scripts pass these options whatever the strategy is
        # Members of Accelerate's enum have the same values.
        hook = getattr(self.comm_hook, "value", self.comm_hook)
        same = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "bucket_cap_mb")
        options = {name: getattr(self, name) for name in same}
        options |= {"comm_hook": None if hook in (None, "no") else hook, "comm_state": self.comm_state_option}
        return make_strategy(REPLICATING, options)


@dataclass
class GradScalerKwargs(NamedArguments):
    """Options of the loss scale of mixed_precision="fp16", with torch.amp.GradScaler's names and defaults.

    Args:
        init_scale: the first scale.
        growth_factor: the factor of the scale after growth_interval steps in a row without an inf or a NaN.
        backoff_factor: the factor of the scale after a step with one, which is skipped.
        growth_interval: optimizer steps.
        enabled: False scales nothing.

    >>> options = tw.GradScalerKwargs(init_scale=1024.0, growth_interval=500)
    >>> accelerator = tw.Accelerator(mixed_precision="fp16", kwargs_handlers=[options])
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def precision(self, name: str, device_type: str) -> Precision:
        """Return the precision of a name, with this loss scale."""
        from trainwright.precision.mixed import MixedPrecision

        return MixedPrecision(name, device_type, torch.amp.GradScaler(device_type, **vars(self)))


@dataclass
class InitProcessGroupKwargs(NamedArguments):
    """Options of the process group.

    Args:
        backend: accepted if None, "nccl" or "gloo". The device decides.
        timeout: how long a rank waits for the others in a collective, half an hour by default.

    Raises:
        ValueError: an init_method, since the launcher's is used, or another backend.

    >>> from datetime import timedelta
    >>> options = tw.InitProcessGroupKwargs(timeout=timedelta(minutes=5))
    >>> accelerator = tw.Accelerator(kwargs_handlers=[options])
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.backend not in (None, "nccl", "gloo"):
            raise ValueError(f"InitProcessGroupKwargs(backend={self.backend!r}): the device decides; leave it out.")
        if self.init_method is not None:
            raise ValueError(
                f"InitProcessGroupKwargs(init_method={self.init_method!r}) is not accepted: the processes meet at the "
                "launcher's address. Pass --main-address and --main-port to trainwright launch."
            )


KINDS: tuple[type, ...] = (
    AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs,
)  # fmt: skip


def by_kind(given: Iterable[Any] | None) -> Callable[[type], Any]:
    """Return a function that finds the object of a kind among those given, or None if it is missing.

    Raises:
        TypeError: an object of another kind.
        ValueError: two of one kind.
    """
    if given is not None and not isinstance(given, Iterable):
        raise TypeError(f"kwargs_handlers={given!r} is not a list of options, such as [AutocastKwargs()].")
    found: dict[type, Any] = {}
    for each in given or ():
        kind = next((kind for kind in KINDS if isinstance(each, kind)), None)
        if kind is None:
            raise TypeError(
                f"kwargs_handlers has {a_type_of(each)}. Expected objects of trainwright's "
                f"{', '.join(kind.__name__ for kind in KINDS)}."
            )
        if kind in found:
            raise ValueError(f"kwargs_handlers has two {kind.__name__}. Pass one.")
        found[kind] = each
    return found.get

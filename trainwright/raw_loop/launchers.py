"""Launchers for a notebook, a REPL or a test: a function runs in several new processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainwright.arguments import refuse_unknown
from trainwright.devices import hardware
from trainwright.devices.abilities import num_together
from trainwright.distributed.network import LOOPBACK
from trainwright.engine.worker_calls import call_in_job
from trainwright.errors import a_type_of
from trainwright.precision import MIXED

NODES = "the processes run on this machine; start a script on several nodes with trainwright launch"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_nodes": ((1,), NODES), "node_rank": ((0,), NODES), "master_addr": ((LOOPBACK, "localhost"), NODES),
    "rdzv_backend": (("static",), NODES), "rdzv_endpoint": (("",), NODES), "rdzv_conf": ((None,), NODES),
    "rdzv_id": (("none",), NODES),
    "max_restarts": ((0,), "only a script can be restarted, by trainwright launch --max-restarts"),
    "monitor_interval": ((0.1,), "the launcher looks after its processes 20 times a second"),
    "log_line_prefix_template": ((None,), "lines of rank 1 and up begin with [rank1] and so on"),
}  # fmt: skip
"""Arguments of Accelerate's with the only values that are accepted, and why."""


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: int | str | None = None,
    **others: Any,
) -> Any:
    """Run `function(*args)` in several new processes, and return its result on rank 0.

    For a notebook, a REPL or a test. The function creates an `Accelerator`, which joins the job. The function and its
    arguments are copied to the new processes. Changes to the copies stay there.

    Args:
        function: returns plain data and tensors, or None.
        args: its arguments.
        num_processes: processes on this node, by default one per GPU, or one without GPUs. A single one is this process.
        mixed_precision: for an Accelerator that the function makes without one: "no", "fp16" or "bf16".
        use_port: accepted. It has no effect, since the processes meet at a free port.
        **others: Accelerate's further arguments, accepted with their defaults only.

    Raises:
        TypeError: something cannot be copied to the processes or back, or an argument is unknown.
        ValueError: an argument is not accepted.
        WorkerFailed, LaunchError: a rank has failed, or the processes could not be started.

    >>> def train(learning_rate):
    ...     accelerator = tw.Accelerator()
    ...     ...  # the loop
    ...     return accelerator.num_processes, learning_rate
    >>> tw.notebook_launcher(train, (0.1,), num_processes=2)
    (2, 0.1)
    """
    unknown = {name: value for name, value in others.items() if name not in REFUSED}
    names = ["function", "args", "num_processes", "mixed_precision", "use_port", *REFUSED]
    refuse_unknown("notebook_launcher", unknown, names)
    for name, value in others.items():
        accepted, reason = REFUSED[name]
        if value not in accepted:
            raise ValueError(f"{name}={value!r} is not accepted by notebook_launcher: {reason}. Leave it out.")
    if mixed_precision not in MIXED:
        raise ValueError(f"mixed_precision={mixed_precision!r} is unknown. Choose from {', '.join(MIXED)}.")
    defaults = {} if mixed_precision == "no" else {"precision": MIXED[mixed_precision]}
    if num_processes is None:
        num_processes = num_together(hardware.built_for() or "cpu") or 1
    return _launch("notebook_launcher", function, args, num_processes, defaults)


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> Any:
    """Run `function(*args)` in several new processes on the CPU, as `notebook_launcher` does. Return its result on rank 0.

    Args:
        function: returns plain data and tensors, or None.
        args: its arguments.
        num_processes: how many processes there are. A single one is this process.

    Raises:
        TypeError, ValueError, WorkerFailed, LaunchError: see `notebook_launcher`.

    >>> def count():
    ...     return int(tw.Accelerator().reduce(torch.tensor(1)))
    >>> tw.debug_launcher(count)
    2
    """
    return _launch("debug_launcher", function, args, num_processes, {"accelerator": "cpu"})


def _launch(
    name: str, function: Callable[..., Any], args: Sequence[Any], num_processes: int, defaults: dict[str, str]
) -> Any:
    if not callable(function):
        raise TypeError(f"{name} was given {a_type_of(function)}. Expected a function, with its arguments in args=.")
    if not isinstance(args, (list, tuple)):
        raise TypeError(f"{name} was given args={args!r}. Expected a tuple of arguments, such as args=(1,).")
    if isinstance(num_processes, bool) or not isinstance(num_processes, int) or num_processes < 1:
        raise ValueError(
            f"num_processes={num_processes!r} is not accepted. Pass an integer of at least 1, or to notebook_launcher None for "
            "one for each GPU."
        )
    asked = f"{name}(num_processes={num_processes})"
    return call_in_job(function, args, num_processes, asked=asked, defaults=defaults)

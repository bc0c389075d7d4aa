"""Launchers for a notebook, a REPL or a test: a function runs in several new processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainwright.arguments import refuse_unknown
from trainwright.devices import hardware
from trainwright.devices.abilities import num_together
from trainwright.distributed.network import DEFAULT_PORT, LOOPBACK
from trainwright.engine.worker_calls import call_in_job
from trainwright.errors import a_type_of
from trainwright.precision import MIXED

MEETING = "the nodes meet at master_addr and use_port"
REFUSED: dict[str, tuple[Any, str]] = {
    "rdzv_backend": ("static", MEETING),
    "rdzv_endpoint": ("", MEETING),
    "rdzv_conf": (None, MEETING),
    "rdzv_id": ("none", MEETING),
    "max_restarts": (0, "only a script can be restarted, by trainwright launch --max-restarts"),
    "monitor_interval": (0.1, "the launcher looks after its processes 20 times a second"),
    "log_line_prefix_template": (None, "lines of rank 1 and up begin with [rank1] and so on"),
}
"""Arguments of Accelerate's that are accepted with their default only, and why."""
OWN = ("mixed_precision", "use_port", "master_addr", "node_rank", "num_nodes")


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: int | str | None = None,
    master_addr: str = LOOPBACK,
    node_rank: int = 0,
    num_nodes: int = 1,
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
        use_port: where the processes meet, by default a free port, or 29500 on several nodes.
        master_addr: the first node's address, as all nodes reach it, for several nodes.
        node_rank: this node's number, from 0.
        num_nodes: how many nodes make this call, with different node_ranks. The result is returned on the first.
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
    _refuse(others)
    if mixed_precision not in MIXED:
        raise ValueError(f"mixed_precision={mixed_precision!r} is unknown. Choose from {', '.join(MIXED)}.")
    if num_nodes == 1 and master_addr not in (LOOPBACK, "localhost"):
        raise ValueError(
            f"master_addr={master_addr!r} was given for one node, whose processes meet on the loopback interface. Leave it "
            "out, or give num_nodes=."
        )
    defaults = {} if mixed_precision == "no" else {"precision": MIXED[mixed_precision]}
    if num_processes is None:
        num_processes = num_together(hardware.built_for() or "cpu") or 1
    node = (num_nodes, node_rank, master_addr, _port(use_port, num_nodes))
    return _launch("notebook_launcher", function, args, num_processes, node, defaults)


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
    return _launch("debug_launcher", function, args, num_processes, (1, 0, LOOPBACK, 0), {"accelerator": "cpu"})


def _launch(
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    num_processes: int,
    node: tuple[int, int, str, int],
    defaults: dict[str, str],
) -> Any:
    if not callable(function):
        raise TypeError(f"{name} was given {a_type_of(function)}. Expected a function, with its arguments in args=.")
    if not isinstance(args, (list, tuple)):
        raise TypeError(
            f"{name} was given args={args!r}. Expected a tuple of the function's arguments, such as args=(1,)."
        )
    if isinstance(num_processes, bool) or not isinstance(num_processes, int) or num_processes < 1:
        raise ValueError(
            f"num_processes={num_processes!r} is not accepted. Pass an integer of at least 1, or to notebook_launcher None for "
            "one for each GPU."
        )
    asked = f"{name}(num_processes={num_processes})"
    return call_in_job(function, args, num_processes, asked=asked, node=node, defaults=defaults)


def _port(given: int | str | None, num_nodes: int) -> int:
    if given is None:
        return DEFAULT_PORT if num_nodes != 1 else 0
    # Scripts for Accelerate pass a text, as its default is "29500".
    if isinstance(given, bool) or not str(given).isdecimal() or not 0 < int(given) < 65536:
        raise ValueError(f"use_port={given!r} is not accepted. Pass a port from 1 to 65535.")
    return int(given)


def _refuse(others: dict[str, Any]) -> None:
    unknown = {name: value for name, value in others.items() if name not in REFUSED}
    refuse_unknown("notebook_launcher", unknown, ["function", "args", "num_processes", *OWN, *REFUSED])
    for name, value in others.items():
        default, reason = REFUSED[name]
        if value != default:
            raise ValueError(f"{name}={value!r} is not accepted by notebook_launcher: {reason}. Leave it out.")

"""`trainwright estimate`: the memory per device that training a model takes, computed from sizes."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from trainwright import estimate_memory
from trainwright.errors import did_you_mean
from trainwright.launch.cli import Parser
from trainwright.memory.memory_estimate import MOST_USED, available_memory, size_text
from trainwright.precision import NAMES, canonical_name, resolve_precision
from trainwright.strategies.memory_plan import FULLY_SHARDED, DeviceBytes
from trainwright.tools.choices import LISTED_STRATEGIES, choose
from trainwright.tools.columns import fill, lay_out, terminal_width
from trainwright.tools.module_source import make_module

ALL_PRECISIONS = [name for name in NAMES if not name.startswith(("64", "fp8"))]
USUAL_PRECISIONS = [name for name in ALL_PRECISIONS if name not in ("16-true", "bf16-true")]
UNITS = {"": 1, "b": 1}
"""The units of sizes, in bytes."""
for power, letter in enumerate("kmgt", 1):
    UNITS |= {letter: 1000**power, f"{letter}b": 1000**power, f"{letter}ib": 1024**power}
HEADS = ("strategy", "devices", "parameters", "gradients", "optimizer", "masters", "buffers", "total", "")
SHORT_HEADS = ("strategy", "devices", "params", "grads", "optim", "masters", "buffers", "total", "")
MOST_PARAMETERS = 10**18
"""torch counts the bytes of a tensor in 64 bits, also on the meta device."""
COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


class EstimateRow(NamedTuple):
    """The bytes on one device under a precision and a strategy, for a number of devices."""

    precision: str
    strategy: str
    num_devices: int
    held: DeviceBytes


def estimate_command(arguments: Sequence[str], _: Any) -> int:
    """Run `trainwright estimate` and return its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        precisions = _precisions(options.precision)
        strategies = choose(options.strategies, LISTED_STRATEGIES, LISTED_STRATEGIES, "--strategies")
        devices = [_whole(text, "--devices") for text in options.devices.split(",")]
        memory = _amount(options.memory, UNITS, "--memory", "80GiB") if options.memory else available_memory()
        optimizer = _optimizer(options.optimizer)
        module, name = _module(options.target, options.params, options.args)
        rows = list(_rows(module, optimizer, precisions, strategies, devices))
        if not rows:
            raise ValueError(
                f"--strategies {options.strategies} with --devices {options.devices} and these precisions selects nothing: "
                "single_device is for 1 device, the others are for several, and DeepSpeed has no 64 bits."
            )
        is_assumed = estimate_memory(module, optimizer, 1, 1).is_assumed
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    count = sum(parameter.numel() for parameter in module.parameters())
    if options.json:
        facts = {"parameters": count, "memory": memory, "optimizer_is_assumed": is_assumed}
        print(json.dumps({**facts, "rows": [_as_data(row, memory) for row in rows]}, indent=2))
        return 0
    width = terminal_width(sys.stdout)
    lines = [f"{name}: {count:,} parameters, trained with {options.optimizer}. Bytes per device, without activations."]
    if is_assumed:
        lines.append(
            f"{options.optimizer} could not be tried on these sizes. Its state is counted like Adam's, 8 bytes a parameter."
        )
    if options.params and FULLY_SHARDED in strategies:
        lines.append(f"{FULLY_SHARDED} also gathers one block at a time, whose size --params does not show.")
    lines.append(f"With {size_text(memory)} per device; `fits` means that a fifth of it is free for activations.")
    print("\n".join([*(fill(line, width) for line in lines), *_table(rows, memory, width)]))
    if options.precision is None:
        more = "--precision all also shows 16-true and bf16-true, which keep the parameters themselves in 16 bits."
        print(f"\n{fill(more, width)}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="trainwright estimate",
        usage="trainwright estimate [OPTIONS] (SCRIPT_OR_MODULE[:CLASS] | --params N)",
        description="Prints the bytes of parameters, gradients and optimizer state per device, for strategies, precisions and "
        "numbers of devices. The module is made on the meta device, which allocates nothing. A script is imported, so put its "
        "work under `if __name__ == '__main__':`.",
    )
    add = parser.add_argument
    model = "the class of the model, or a function that returns it"
    add("target", nargs="?", metavar="SCRIPT_OR_MODULE[:CLASS]", help=model)
    add("--params", metavar="N", help="a number of parameters instead, such as 7e9 or 7B")
    add("--args", metavar="JSON", help="the arguments of the class, such as '{\"width\": 512}'")
    add("--optimizer", metavar="NAME", default="AdamW", help="a class of torch.optim (default: AdamW)")
    add("--devices", metavar="N,N", default="1,2,4,8", help="numbers of devices (default: 1,2,4,8)")
    precisions = f"of {', '.join(NAMES)}, or all of 16 and 32 bits (default: {', '.join(USUAL_PRECISIONS)})"
    add("--precision", metavar="NAME,NAME", help=precisions)
    add("--strategies", metavar="NAME,NAME", help=f"of {', '.join(LISTED_STRATEGIES)} (default: all)")
    add("--memory", metavar="SIZE", help="memory per device, such as 80GiB (default: the memory of this machine)")
    add("--json", action="store_true", help="print JSON")
    return parser


def _module(target: str | None, params: str | None, arguments: str | None) -> tuple[nn.Module, str]:
    if (target is None) == (params is None):
        raise ValueError("pass either SCRIPT_OR_MODULE[:CLASS] or --params N.")
    if target is not None:
        return make_module(target, arguments)
    if arguments is not None:
        raise ValueError("--args is for a class, so it does not go with --params.")
    count = _amount(str(params), COUNTS, "--params", "7e9 or 7B")
    if count > MOST_PARAMETERS:
        raise ValueError(f"--params {params}: expected at most {MOST_PARAMETERS:.0e} parameters, such as 7e9 or 7B.")
    return nn.ParameterList([nn.Parameter(torch.empty(count, device="meta"))]), f"--params {params}"


def _rows(
    module: nn.Module, optimizer: Any, precisions: Sequence[str], strategies: Sequence[str], devices: Sequence[int]
) -> Iterator[EstimateRow]:
    for precision in precisions:
        # Mixed precisions compute under autocast and keep the dtype of the module.
        dtype = resolve_precision(precision, "cpu").param_dtype
        converted = module if dtype is None else copy.deepcopy(module).to(dtype)
        for count in devices:
            for strategy, held in estimate_memory(converted, optimizer, count, 1).parts.items():
                if strategy in strategies and not (dtype == torch.float64 and held.masters):  # no engine has these
                    yield EstimateRow(precision, strategy, count, held)


def _table(rows: Sequence[EstimateRow], memory: int, width: int | None) -> Iterator[str]:
    """Yield the tables. Precisions with equal sizes share one."""
    by_precision: dict[str, list[EstimateRow]] = {}
    for row in rows:
        by_precision.setdefault(row.precision, []).append(row)
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, its_rows in by_precision.items():
        groups.setdefault(tuple(row[1:] for row in its_rows), []).append(name)
    for group, names in groups.items():
        cells = []
        fitting = []
        for strategy, count, held in group:
            verdict = _verdict(held, memory)
            sizes = (size_text(size) if size else "-" for size in (*held, held.total))
            cells.append((strategy, str(count), *sizes, verdict))
            if verdict == "fits":
                fitting.append((count, strategy))
        # The total includes the parts, so a narrow terminal drops the parts first, and empty ones before the others.
        parts = sorted((6, 5, 3, 4, 2), key=lambda at: any(row[at] != "-" for row in cells))
        yield f"\n{', '.join(names)}"
        is_narrow = width is not None and len(lay_out([HEADS, *cells], None)[1]) > width
        heads = SHORT_HEADS if is_narrow else HEADS
        yield from lay_out([heads, *cells], width, right=range(1, 8), dropped=parts)
        best = min(fitting, key=lambda entry: entry[0], default=None)
        yield "  nothing here fits" if best is None else f"  fewest devices that fit: {best[0]}, with {best[1]}"


def _verdict(held: DeviceBytes, memory: int) -> str:
    if held.total <= MOST_USED * memory:
        return "fits"
    return "tight" if held.total <= memory else "too large"


def _as_data(row: EstimateRow, memory: int) -> dict[str, Any]:
    about = {"precision": row.precision, "strategy": row.strategy, "devices": row.num_devices}
    return {**about, **row.held._asdict(), "total": row.held.total, "verdict": _verdict(row.held, memory)}


def _optimizer(name: str) -> type[torch.optim.Optimizer]:
    base, types = torch.optim.Optimizer, {k: v for k, v in vars(torch.optim).items() if isinstance(v, type)}
    known = {key: value for key, value in types.items() if issubclass(value, base) and value is not base}
    if name not in known:
        raise ValueError(f"--optimizer {name}: choose from {', '.join(known)}.{did_you_mean(name, known)}")
    return known[name]


def _precisions(text: str | None) -> list[str]:
    if text is None:
        return USUAL_PRECISIONS
    if text.strip().lower() == "all":
        return ALL_PRECISIONS
    return list(dict.fromkeys(canonical_name(name.strip()) for name in text.split(",")))


def _whole(text: str, flag: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(f"{flag} {text}: expected integers of at least 1, separated by commas.")
    return int(text)


def _amount(text: str, units: dict[str, int], flag: str, example: str) -> int:
    """Return a number with a unit, such as 80GiB; ValueError if the text is none."""
    amount = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e\+?[0-9]{1,2})?)\s*([a-z]*)", text.strip().lower())
    if amount is None or amount[2] not in units or (count := int(float(amount[1]) * units[amount[2]])) < 1:
        raise ValueError(f"{flag} {text}: expected a number such as {example}.")
    return count

"""`trainwright estimate`: the memory per device that training a model takes and the bytes it sends, computed from sizes."""

from __future__ import annotations

import copy
import itertools
import json
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainwright import estimate_memory
from trainwright.errors import did_you_mean
from trainwright.launch.cli import Parser
from trainwright.memory.memory_estimate import MOST_USED, available_memory, size_text
from trainwright.memory.vendor import RankMesh, saved_bytes
from trainwright.precision import NAMES, Precision, canonical_name, resolve_precision
from trainwright.strategies import why_rejected
from trainwright.strategies.memory_plan import FULLY_SHARDED, DeviceBytes
from trainwright.tools.choices import LISTED_STRATEGIES, choose
from trainwright.tools.columns import fill, lay_out, terminal_width
from trainwright.tools.module_source import make_module

ALL_PRECISIONS = [name for name in NAMES if not name.startswith(("64", "fp8"))]
USUAL_PRECISIONS = [name for name in ALL_PRECISIONS if name not in ("16-true", "bf16-true")]
Plan = tuple[str, RankMesh | None, DeviceBytes]
"""A strategy, its mesh and the bytes on a device."""
EXAMPLE_PLAN = '\'{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}\''
Activations = dict[tuple[str, str], int]
"""The saved bytes by the precision and the mesh, "" for a single device."""
UNITS = {"": 1, "b": 1}
"""The units of sizes, in bytes."""
for power, letter in enumerate("kmgt", 1):
    UNITS |= {letter: 1000**power, f"{letter}b": 1000**power, f"{letter}ib": 1024**power}
PARTS = ("parameters", "gradients", "optimizer", "masters", "buffers", "gathered", "activations", "total", "sent/step")
HEADS = ("strategy", "devices", *PARTS, "")
SHORT_PARTS = ("params", "grads", "optim", "masters", "buffers", "gathered", "activ", "total", "sent")
SHORT_HEADS = ("strategy", "devices", *SHORT_PARTS, "")
DROPPED = (6, 5, 7, 10, 3, 4, 2, 8)
"""The columns that a narrow terminal drops, in this order."""
MOST_PARAMETERS = 10**18
"""torch counts the bytes of a tensor in 64 bits, also on the meta device."""
COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


class EstimateRow(NamedTuple):
    """The bytes on one device under a precision and a strategy, for a number of devices."""

    precision: str
    strategy: str
    num_devices: int
    held: DeviceBytes
    mesh: str
    """The axes of the mesh of devices, or "" for a single axis."""
    rejected: str
    """Why the strategy would reject this, or ""."""

    @property
    def label(self) -> str:
        """Return the strategy with its mesh."""
        return f"{self.strategy} {self.mesh}".rstrip()

    def with_activations(self, saved: Activations) -> EstimateRow:
        """Return the row with its activations. A mesh without a plan saves as much as a single device."""
        size = saved.get((self.precision, self.mesh), saved.get((self.precision, ""), 0))
        return self._replace(held=self.held._replace(activations=size))


def estimate_command(arguments: Sequence[str], _: Any) -> int:
    """Run `trainwright estimate` and return its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        precisions = _precisions(options.precision)
        strategies = choose(options.strategies, LISTED_STRATEGIES, LISTED_STRATEGIES, "--strategies")
        meshes = _meshes(options.mesh or (), options.tensor_plan)
        devices = _devices(options.devices, meshes)
        memory = _amount(options.memory, UNITS, "--memory", "80GiB") if options.memory else available_memory()
        if memory < 2**20:
            raise ValueError(f"--memory {options.memory} is {memory} bytes; pass a size with its unit, such as 80GiB.")
        if meshes and FULLY_SHARDED not in strategies:
            raise ValueError(f"--mesh is for {FULLY_SHARDED}, and --strategies {options.strategies} omits it. Add it.")
        optimizer = _optimizer(options.optimizer)
        module, name = _module(options.target, options.params, options.args)
        rows = list(_rows(module, optimizer, precisions, strategies, devices, meshes))
        if not rows:
            raise ValueError(
                f"--strategies {options.strategies} with --devices {options.devices} selects nothing: single_device is for 1 "
                "device, and the others are for several."
            )
        activations, of_step = _activations(module, precisions, options.batch, meshes)
        rows = [row.with_activations(activations) for row in rows]
        is_assumed = estimate_memory(module, optimizer, 1, 1).is_assumed
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    count = sum(parameter.numel() for parameter in module.parameters())
    if options.json:
        facts = {"parameters": count, "memory": memory, "optimizer_is_assumed": is_assumed}
        print(json.dumps({**facts, "rows": [_as_data(row, memory) for row in rows]}, indent=2))
        return 0
    width = terminal_width(sys.stdout)
    free = "temporary tensors" if activations else "activations"
    lines = [
        f"{name}: {count:,} parameters, trained with {options.optimizer}. Bytes per device, {of_step}.",
        *_notes(options, is_assumed, any(row.strategy == FULLY_SHARDED for row in rows), meshes),
        f"With {size_text(memory)} per device; `fits` means that a fifth of it is free for {free}.",
    ]
    print("\n".join([*(fill(line, width) for line in lines), *_tables(rows, memory, width)]))
    if options.precision is None:
        more = "--precision all also shows 16-true and bf16-true, which keep the parameters themselves in 16 bits."
        print(f"\n{fill(more, width)}")
    return 0


def _notes(options: Namespace, is_assumed: bool, is_fully_sharded: bool, meshes: Sequence[RankMesh]) -> Iterator[str]:
    """Yield a sentence for every part that is assumed or not counted."""
    if is_assumed:
        yield f"{options.optimizer} could not be tried on these sizes. Its state is counted like Adam's, 8 bytes a parameter."
    if options.params and is_fully_sharded:
        yield f"{FULLY_SHARDED} also gathers one block at a time, whose size --params does not show."
    tensor = [mesh for mesh in meshes if mesh.tensor > 1]
    if any(mesh.plan is None for mesh in tensor):
        yield (
            "Assumed: tensor ranks divide the matrices of Linear and Embedding layers, and save all activations. "
            "--tensor-plan counts those of a plan."
        )
    if tensor:
        yield "The sent bytes are without the activations that tensor ranks exchange."


def _parser() -> Parser:
    parser = Parser(
        prog="trainwright estimate",
        usage="trainwright estimate [OPTIONS] (SCRIPT_OR_MODULE[:CLASS] | --params N)",
        description="Prints the bytes of parameters, gradients, optimizer state, gathered groups and activations per device, "
        "and the bytes that it sends, for strategies, precisions, numbers of devices and meshes. The module is made on the "
        "meta device, which allocates nothing. A script is imported, so put its work under `if __name__ == '__main__':`.",
    )
    add = parser.add_argument
    model = "the class of the model, or a function that returns it"
    add("target", nargs="?", metavar="SCRIPT_OR_MODULE[:CLASS]", help=model)
    add("--params", metavar="N", help="a number of parameters instead, such as 7e9 or 7B")
    add("--args", metavar="JSON", help="the arguments of the class, such as '{\"width\": 512}'")
    add("--optimizer", metavar="NAME", default="AdamW", help="a class of torch.optim (default: AdamW)")
    add("--devices", "--ranks", metavar="N,N", help="numbers of devices (default: those of --mesh, or 1,2,4,8)")
    mesh = "also show fsdp on a mesh: replicate=R,shard=S or data=D,tensor=T (may be repeated)"
    add("--mesh", metavar="AXIS=N,AXIS=N", action="append", help=mesh)
    plan = f"the tensor_plan of FSDPStrategy, for meshes with tensor ranks, such as {EXAMPLE_PLAN}"
    add("--tensor-plan", metavar="JSON", help=plan)
    batch = (
        "also count the activations of a training_step of this batch, such as 8x128:int64,8:int64 (default: those of a "
    )
    add(
        "--batch", metavar="SHAPE:DTYPE,...", help=f"{batch}forward of the module's example_input_array, if it has one)"
    )
    precisions = f"of {', '.join(NAMES)}, or all of 16 and 32 bits (default: {', '.join(USUAL_PRECISIONS)})"
    add("--precision", metavar="NAME,NAME", help=precisions)
    add("--strategies", metavar="NAME,NAME", help=f"of {', '.join(LISTED_STRATEGIES)} (default: all)")
    memory = "memory per device, such as 80GiB (default: the memory of this machine)"
    add("--memory", "--device-memory", metavar="SIZE", help=memory)
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


def _devices(text: str | None, meshes: Sequence[RankMesh]) -> list[int]:
    """Return the numbers of devices, by default those of the meshes (ValueError for a mesh of another number)."""
    if text is None:
        return sorted({mesh.num_ranks for mesh in meshes}) or [1, 2, 4, 8]
    devices = [_whole(part, "--devices") for part in text.split(",")]
    for mesh in (mesh for mesh in meshes if mesh.num_ranks not in devices):
        raise ValueError(
            f"--mesh {mesh.text} is for {mesh.num_ranks} ranks, the product, but --ranks is {text}. Change one."
        )
    return devices


def _meshes(texts: Sequence[str], plan_text: str | None) -> list[RankMesh]:
    try:
        plan = None if plan_text is None else json.loads(plan_text)
    except ValueError as error:
        raise ValueError(f"--tensor-plan {plan_text} is not JSON ({error}). Pass {EXAMPLE_PLAN}.") from error
    if plan_text is not None and not plan:
        raise ValueError(f"--tensor-plan {plan_text} names no layer. Pass {EXAMPLE_PLAN}.")
    meshes = [RankMesh.parse(text, plan) for text in texts]
    if plan is not None and not any(mesh.plan for mesh in meshes):
        raise ValueError("--tensor-plan is for a mesh with tensor ranks. Pass --mesh data=2,tensor=2 too.")
    return meshes


def parse_batch(text: str) -> Tensor | list[Tensor] | dict[str, Tensor]:
    """Return a batch on the meta device for a text such as "8x128:int64,8:int64".

    Several tensors are a list, as a DataLoader returns it, and so is one with a comma after it. With names, such as
    "words=8x128:int64", they are a dict.

    Raises:
        ValueError: the text has another form.
    """
    example = "a batch such as 8x128:int64,8:int64, or x=8x3x32x32,y=8:int64 for a dict (float32 without a dtype)"
    tensors, names = [], []
    for part in text.removesuffix(",").split(","):
        form = re.fullmatch(r"\s*(?:(\w+)=)?(\d+(?:x\d+)*)(?::(\w+))?\s*", part)
        dtype = getattr(torch, form[3] or "float32", None) if form else None
        if form is None or not isinstance(dtype, torch.dtype):
            raise ValueError(f"--batch {text}: {part!r} is not the shape and dtype of a tensor. Pass {example}.")
        names.append(form[1])
        tensors.append(torch.empty([int(size) for size in form[2].split("x")], dtype=dtype, device="meta"))
    if len(set(names)) == len(names) and None not in names:
        return dict(zip(names, tensors, strict=True))
    if any(names):
        raise ValueError(f"--batch {text}: expected different names for all tensors, or none. Pass {example}.")
    return tensors if "," in text else tensors[0]


def _activations(
    module: nn.Module, precisions: Sequence[str], text: str | None, meshes: Sequence[RankMesh]
) -> tuple[Activations, str]:
    """Return the bytes of activations if there is a batch, and a phrase about them.

    Raises:
        ValueError: the text is no batch, or the step cannot be traced with it.
    """
    batch = getattr(module, "example_input_array", None) if text is None else parse_batch(text)
    saved: Activations = {}
    if batch is None:
        return saved, "without activations (--batch adds those of a step)"
    for name in precisions:
        precision = resolve_precision(name, "cpu")
        plan = ""
        try:
            converted = _converted(module, precision)
            saved[name, ""] = saved_bytes(converted, batch, precision, calls_forward=text is None)
            for mesh in (mesh for mesh in meshes if mesh.plan is not None):
                plan = " under --tensor-plan, and can without it"
                with mesh.tensor_group() as group:
                    saved[name, mesh.text] = saved_bytes(converted, batch, precision, text is None, group)
        except Exception as error:
            reason = f"cannot be traced in {name}{plan} ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
            if text is None:
                return {}, f"without activations: the forward of example_input_array {reason}"
            if plan:
                raise ValueError(f"the step {reason}. Change the plan.") from error
            raise ValueError(
                f"--batch {text}: the step {reason}. Pass the shapes and dtypes of a batch. Omit --batch if the step reads "
                "values, as item() does, uses self.trainer (as self.current_epoch does), or steps the optimizers itself."
            ) from error
    traced = f"a step of {text}" if text is not None else "a forward of example_input_array, without the loss"
    return saved, f"with the activations of {traced}"


def _converted(module: nn.Module, precision: Precision) -> nn.Module:
    """Return the module in the dtype of its parameters in training. Mixed precisions compute under autocast and keep it."""
    dtype = precision.param_dtype
    return module if dtype is None else copy.deepcopy(module).to(dtype)


def _rows(
    module: nn.Module,
    optimizer: Any,
    precisions: Sequence[str],
    strategies: Sequence[str],
    devices: Sequence[int],
    meshes: Sequence[RankMesh],
) -> Iterator[EstimateRow]:
    for name, count in itertools.product(precisions, devices):
        precision = resolve_precision(name, "cpu")
        converted = _converted(module, precision)
        plans: list[Plan] = [
            (key, None, held) for key, held in estimate_memory(converted, optimizer, count, 1).parts.items()
        ]
        plans += [
            (FULLY_SHARDED, mesh, mesh.on_rank(converted, optimizer)) for mesh in meshes if mesh.num_ranks == count
        ]
        for strategy, mesh, held in (plan for plan in plans if plan[0] in strategies):
            options = {"num_replicas": mesh.replicas} if mesh else {}
            rejected = why_rejected(strategy, options, count, precision, converted, optimizer)
            yield EstimateRow(name, strategy, count, held, mesh.text if mesh else "", rejected)


def _tables(rows: Sequence[EstimateRow], memory: int, width: int | None) -> Iterator[str]:
    """Yield the tables. Precisions with equal sizes share one."""
    by_precision: dict[str, list[EstimateRow]] = {}
    for row in rows:
        by_precision.setdefault(row.precision, []).append(row)
    names: dict[tuple[object, ...], list[str]] = {}
    for name, its_rows in by_precision.items():
        names.setdefault(tuple(row[1:] for row in its_rows), []).append(name)
    for group in names.values():
        yield f"\n{', '.join(group)}"
        yield from _table(by_precision[group[0]], memory, width)
        yield from (fill(f"  {line}", width) for line in _results(by_precision[group[0]], memory))


def _table(rows: Sequence[EstimateRow], memory: int, width: int | None) -> Iterator[str]:
    """Yield the lines of a table, without columns that have no size."""
    cells = []
    for row in rows:
        sizes = (size_text(size) if size else "-" for size in (*row.held[:-1], row.held.total, row.held.sent))
        cells.append((row.label, str(row.num_devices), *sizes, _verdict(row, memory)))
    shown = [at for at in range(len(HEADS)) if any(line[at] != "-" for line in cells)]
    long, short, *lines = ([line[at] for at in shown] for line in (HEADS, SHORT_HEADS, *cells))
    # The total includes the parts, so a narrow terminal drops the parts first.
    dropped = [shown.index(at) for at in DROPPED if at in shown]
    is_narrow = width is not None and len(lay_out([long, *lines], None)[1]) > width
    heads = short if is_narrow else long
    yield from lay_out([heads, *lines], width, right=range(1, len(heads) - 1), dropped=dropped)


def _results(rows: Sequence[EstimateRow], memory: int) -> Iterator[str]:
    """Yield the fewest devices that fit, then the reason of every rejection."""
    fitting = sorted((row for row in rows if _verdict(row, memory) == "fits"), key=lambda row: row.num_devices)
    best = f"{fitting[0].num_devices}, with {fitting[0].label}" if fitting else ""
    yield f"fewest devices that fit: {best}" if best else "nothing here fits"
    for reason, label in {row.rejected: row.label for row in reversed(rows) if row.rejected}.items():
        yield f"{label} rejects it: {reason}"


def _verdict(row: EstimateRow, memory: int) -> str:
    if row.rejected:
        return "rejected"
    if row.held.total <= MOST_USED * memory:
        return "fits"
    return "tight" if row.held.total <= memory else "too large"


def _as_data(row: EstimateRow, memory: int) -> dict[str, Any]:
    about = {"precision": row.precision, "strategy": row.strategy, "devices": row.num_devices, "mesh": row.mesh}
    result = {"total": row.held.total, "verdict": _verdict(row, memory), "rejected": row.rejected}
    return {**about, **row.held._asdict(), **result}


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

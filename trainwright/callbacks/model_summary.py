"""ModelSummary: the module's children, their kinds and their parameters, printed before training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.base import Callback, check_integers
from trainwright.callbacks.rich_progress_bar import require_rich
from trainwright.data.seeding import isolate_rng
from trainwright.data.transfer import to_device
from trainwright.tensor_names import clean_name

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer

Sizes = dict[str, tuple[str, str]]
"""Input and output sizes by the child's name."""


class ModelSummary(Callback):
    """Prints a table of the module's children on rank 0: name, type, parameters, and whether it is in training mode.

    If the module has an `example_input_array` (a tensor, a tuple of arguments or a dict of them), one forward of it fills in
    the input and output sizes. Buffers, modes and generators are restored afterwards.

    Args:
        max_depth: levels of children to show: -1 for all, 0 for the totals only.

    Raises:
        ValueError: max_depth is below -1.

    >>> tw.Trainer(callbacks=tw.ModelSummary(max_depth=2), max_epochs=1).fit(module, loader)
    Name   Type        Parameters  Mode
    net    Sequential          67  train
    net.0  Linear              40  train
    net.1  Tanh                 0  train
    net.2  Linear              27  train
    67 parameters, 67 of them trained, 0.000 MiB
    trained for ...
    """

    @refuses_unknown
    def __init__(self, max_depth: int = 1) -> None:
        check_integers(-1, max_depth=max_depth)
        self.max_depth = max_depth

    def on_fit_start(self, trainer: AnyTrainer, module: Module) -> None:
        # On every rank: the forward of a sharded module is collective.
        def run(*args: Any, **kwargs: Any) -> Any:
            return trainer.strategy.run(module, "forward", args, kwargs)

        self._print(trainer, LayerSummary(module, self.max_depth, run))

    def _print(self, trainer: TrainerProtocol, summary: LayerSummary) -> None:
        trainer.print(summary)


ALIGNED = ["<", "<", ">", "<", "<", "<"]
"""How the columns are aligned."""


class LayerSummary:
    """The children of a module, as Lightning's `utilities.model_summary.ModelSummary`. Its text is the table.

    Args:
        model: the module.
        max_depth: levels of children: -1 for all, 0 for the totals only.
        run: calls the module's forward, by default the module itself.
    """

    def __init__(self, model: nn.Module, max_depth: int = 1, run: Callable[..., Any] | None = None) -> None:
        children, parameters = children_to(model, max_depth), list(model.parameters())
        self.layer_names = list(children)
        self.layer_types = [type(child).__name__ for child in children.values()]
        self.param_nums = [count_parameters(child.parameters()) for child in children.values()]
        self.total_parameters = count_parameters(parameters)
        self.trainable_parameters = count_parameters(each for each in parameters if each.requires_grad)
        sizes, note = _measure(model, children, run or model)
        self.header = ["Name", "Type", "Parameters", "Mode", *(["In", "Out"] if sizes else [])]
        modes = ["train" if child.training else "eval" for child in children.values()]
        columns = zip(self.layer_names, self.layer_types, self.param_nums, modes, strict=True)
        self.rows = [[name, kind, f"{count:,}", mode] for name, kind, count, mode in columns]
        for row in self.rows if sizes else ():
            row += sizes.get(row[0], ("", ""))
        size = sum(_numel(each) * each.element_size() for each in parameters if not is_lazy(each))
        counts = f"{self.total_parameters:,} parameters, {self.trainable_parameters:,} of them trained"
        self.totals = [f"{counts}, {size / 2**20:.3f} MiB"]
        """The lines below the table."""
        if any(map(is_lazy, parameters)):
            self.totals.append("(without the parameters of lazy children, which have no shape yet)")
        self.totals += filter(None, [note])

    def __str__(self) -> str:
        rows = [self.header, *self.rows] if self.rows else []
        sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(f"{cell:{align}{size}}" for cell, align, size in zip(row, ALIGNED, sizes, strict=False)).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, *self.totals])


def children_to(module: nn.Module, max_depth: int) -> dict[str, nn.Module]:
    """Return the children of a module down to a depth (-1 for all) by their names."""
    depth = math.inf if max_depth == -1 else max_depth
    shown = ((clean_name(name), child) for name, child in module.named_modules() if clean_name(name.rpartition(".")[2]))
    return {name: child for name, child in shown if name.count(".") < depth}


def count_parameters(parameters: Any) -> int:
    """Return how many elements parameters have, without lazy ones."""
    return sum(_numel(parameter) for parameter in parameters if not is_lazy(parameter))


def _numel(parameter: Any) -> int:
    # ZeRO-3 replaces a sharded parameter by an empty tensor.
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _measure(module: nn.Module, children: Mapping[str, nn.Module], run: Callable[..., Any]) -> tuple[Sizes, str]:
    """Run the module on its example_input_array. Return the sizes, or a note on the failure."""
    example = getattr(module, "example_input_array", None)
    if example is None or not children:
        return {}, ""
    if any(map(is_lazy, module.parameters())):
        return {}, "(no sizes: a forward would initialize the lazy children)"
    sizes: Sizes = {}

    def record(name: str) -> Callable[..., None]:
        def hook(child: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            sizes[name] = (_size([*args, *kwargs.values()]), _size(output))

        return hook

    with _without_trace(module), ExitStack() as stack:
        for name, child in children.items():
            stack.callback(child.register_forward_hook(record(name), with_kwargs=True).remove)
        try:
            first = next(module.parameters(), None)
            example = to_device(example, first.device if first is not None else torch.device("cpu"))
            if isinstance(example, Mapping):
                run(**example)
            else:
                run(*(example if isinstance(example, tuple) else (example,)))
        except Exception as error:
            return {}, f"(no sizes: the forward of example_input_array failed with {type(error).__name__}: {error})"
    return sizes, ""


@contextmanager
def _without_trace(module: nn.Module) -> Iterator[None]:
    """Put the module into evaluation mode for a forward, and restore its modes and buffers."""
    owners = list(module.modules())
    modes = [owner.training for owner in owners]
    buffers = [
        (owner, name, buffer, buffer.detach().clone())
        for owner in owners
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    module.eval()
    try:
        # A forward with hooks must not be compiled.
        with torch.no_grad(), isolate_rng(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for owner, mode in zip(owners, modes, strict=True):
            owner.training = mode
        with torch.no_grad():
            # A forward may have changed a buffer's values, or have assigned another tensor.
            for owner, name, buffer, value in buffers:
                buffer.copy_(value)
                setattr(owner, name, buffer)


def _size(value: Any) -> str:
    """Return the shapes of the tensors in a value, as short text."""
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        sizes = [_size(each) for each in value]
        return sizes[0] if len(sizes) == 1 else f"({', '.join(sizes)})"
    return "?"


class RichModelSummary(ModelSummary):
    """Prints the table of ModelSummary with rich.

    Args:
        max_depth: levels of children to show: -1 for all, 0 for the totals only.

    Raises:
        ImportError: rich is not installed.

    >>> trainer = tw.Trainer(callbacks=tw.RichModelSummary(max_depth=2), max_epochs=1)
    """

    @refuses_unknown
    def __init__(self, max_depth: int = 1) -> None:
        require_rich("RichModelSummary")
        super().__init__(max_depth)

    def _print(self, trainer: TrainerProtocol, summary: LayerSummary) -> None:
        if not trainer.is_global_zero:
            return
        from rich import console, table, text

        grid = table.Table(header_style="bold")
        for title, align in zip(summary.header, ALIGNED, strict=False):
            grid.add_column(title, justify="right" if align == ">" else "left", overflow="fold")
        for row in summary.rows:
            grid.add_row(*map(text.Text, row))  # not markup, even in brackets
        printer = console.Console()
        if summary.rows:
            printer.print(grid)
        printer.print(*summary.totals, sep="\n", markup=False, highlight=False, soft_wrap=True)

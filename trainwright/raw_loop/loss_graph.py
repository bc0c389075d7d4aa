"""What a loop may call backward on: a loss that a prepared model made and a prepared optimizer can step on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from trainwright.engine.engine import Engine
from trainwright.engine.prepared import PreparedModule, stepped_by
from trainwright.errors import a_type_of
from trainwright.raw_loop.preparation import Preparation
from trainwright.strategies.autograd_graph import graph_leaves

MOST_NODES = 100
"""How many nodes of a loss's graph are looked at in each backward; the first parameters are near the loss."""
CHECKED_FIRST = 100
"""How many losses a single process checks before it checks only some: it can train on any loss, prepared or not."""
UNCHECKED = 10
"""How many losses a single process leaves out between two checks: 11 is prime, so all losses of a cycle are checked in turn."""


class LossCheck:
    """Refuses losses that the backward of a loop cannot use: each of them on several ranks, in a few microseconds."""

    def __init__(self, engine: Engine, preparation: Preparation) -> None:
        self._engine, self._preparation = engine, preparation
        self._needs_forward = engine.world_size > 1 or engine.precision.forward_context() is not None
        """Whether gradients are averaged, or the precision has a context, only where a prepared model is called."""
        self._has_passed = False
        """Whether a loss of a prepared model has come."""
        self._own: set[Tensor] = set()
        """Parameters of prepared models, and those that prepared optimizers step."""
        self._way: list[int] = []
        """Where the latest loss had one of them: which input to take at each node from the loss on; tried first."""
        self._unclear = 0
        """How many losses passed whose nearest nodes showed no such parameter."""
        self._forwards = self._steps = 0
        """How many times prepared models had been called at the last loss of a new call, and the optimizer steps by then."""
        self._autocasts = 0
        """How many times the loop has asked for the precision's context, to compute in it by itself."""
        self._is_kept = False
        """Whether the last backward has kept its graph for another one."""
        self._passed = 0
        """How many losses have been checked and may be used."""
        self._left_out = 0
        """How many of the next losses are not checked."""

    def forward_context(self, is_enabled: bool) -> AbstractContextManager[Any] | None:
        """Return the precision's context, for what the loop computes by itself."""
        self._autocasts += is_enabled
        return self._engine.precision.forward_context()

    def look(self, loss: Any, options: dict[str, Any]) -> None:
        """Check a loss, on several ranks, or on one if it is due."""
        if self._left_out:
            self._left_out -= 1
            return
        self.check(loss, options)
        self._passed += 1
        if self._passed > CHECKED_FIRST and self._engine.world_size == 1:
            self._left_out = UNCHECKED

    def check(self, loss: Any, options: dict[str, Any]) -> None:
        """Refuse a loss; `options` are those of its backward.

        Raises:
            TypeError: it is not a tensor.
            ValueError: it needs no gradients, or no prepared model made it, or no prepared optimizer could step on it.
            RuntimeError: nothing was prepared.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(f"backward was given {a_type_of(loss)}; expected a loss tensor.")
        if loss.numel() != 1 and options.get("gradient") is None:
            raise ValueError(f"backward was given a loss of shape {tuple(loss.shape)}; take its mean or its sum.")
        if not loss.requires_grad:
            raise ValueError(
                "backward was given a loss that needs no gradients; compute it from the outputs of a prepared model, outside "
                "torch.no_grad(), and do not detach it."
            )
        if not self._preparation.models and not self._preparation.optimizers:
            raise RuntimeError(
                "backward was called before a model was prepared; pass the model and its optimizer to accelerator.prepare, "
                "and compute the loss with the model that it returns."
            )
        if self._engine.strategy.holds_modules:
            self._refuse_stranger(loss)
        if not self._has_passed:
            self._refuse_without_optimizer(loss)
        if self._needs_forward:
            self._refuse_without_forward(loss, options)
        self._has_passed = True

    def _refuse_stranger(self, loss: Tensor) -> None:
        """Refuse a loss without a prepared parameter in its graph (ValueError)."""
        if self._own and _leads(loss, self._way, self._own):
            return
        found = _reaches(loss, self._own, MOST_NODES, self._way)
        if found:
            return
        # A walk of a large graph takes as long as a small step does, so ever fewer of the unclear losses get one.
        number = self._unclear + 1
        # `number & (number - 1)` is 0 for powers of two.
        if found is None and number & (number - 1):
            self._unclear = number
            return
        modules, optimizers = self._engine.modules, self._preparation.optimizers
        self._own = {parameter for module in modules for parameter in module.parameters()} | stepped_by(*optimizers)
        if not _reaches(loss, self._own, None, []):
            raise ValueError(
                "backward was given a loss that no prepared model made: none of their parameters are in its graph. Call the "
                "model that accelerator.prepare returned."
            )
        self._unclear += found is None

    def _refuse_without_optimizer(self, loss: Tensor) -> None:
        """Refuse a loss that no prepared optimizer steps on, where another one would not train as it should (ValueError)."""
        engine, scales = self._engine, self._engine.precision.has_scaler
        trains_prepared_only = engine.world_size > 1 and engine.strategy.trains_prepared_only
        if not engine.modules:
            return
        stepped = stepped_by(*engine.optimizers)
        leaves = graph_leaves(loss) if engine.strategy.holds_modules else set()
        self._preparation.note_trained(leaves)
        if not (scales or trains_prepared_only):
            return
        if stepped and not (leaves and stepped.isdisjoint(leaves)):
            return
        if trains_prepared_only:
            reason = (
                f"under strategy={engine.strategy.name!r} its steps would train nothing, or each rank by itself. "
                "Pass the optimizer to accelerator.prepare, too, with its model, and step what it returns."
            )
        else:
            reason = (
                f"precision {engine.precision.name!r} multiplies losses by a scale, and only a prepared optimizer divides the "
                "gradients by it. Pass the optimizer to accelerator.prepare, too, and step what it returns."
            )
        raise ValueError(f"backward was given a loss of a model whose optimizer was not prepared; {reason}")

    def _refuse_without_forward(self, loss: Tensor, options: dict[str, Any]) -> None:
        """Refuse a loss if no prepared model was called since the optimizers stepped (ValueError).

        On several ranks no strategy averages its gradients. On one it lacks the precision's context, unless a method of a
        prepared model made it, or the loop's own use of the context.
        """
        is_alone = self._engine.world_size == 1
        forwards, steps, is_wrapped = self._autocasts if is_alone else 0, self._preparation.step_count, False
        for each in self._preparation.models:
            if isinstance(each, PreparedModule):
                forwards += each.forwards + (each.method_calls if is_alone else 0)
                is_wrapped = True
        if forwards != self._forwards:
            self._forwards, self._steps = forwards, steps
        elif is_wrapped and not self._is_kept:
            # One forward may have several backwards: of a kept graph, or of losses that several optimizers step on in turn.
            is_old = self._has_passed and steps - self._steps >= max(1, len(self._preparation.optimizers))
            if is_old or not forwards:
                self._refuse_original(loss, is_alone)
        keeps = options.get("retain_graph")
        self._is_kept = bool(options.get("create_graph") if keeps is None else keeps)

    def _refuse_original(self, loss: Tensor, is_alone: bool) -> None:
        """Refuse a loss of the model as it was before prepare (ValueError); on one process, parameters may be used without."""
        if not is_alone:
            raise ValueError(
                "backward was given a loss that a method of a prepared model made, or the model as it was before prepare, "
                "whose gradients no strategy averages over the ranks; call the model that accelerator.prepare returned "
                "itself, and let its forward call the method."
            )
        own = {parameter for module in self._engine.modules for parameter in module.parameters()}
        if not own.isdisjoint(graph_leaves(loss)):
            raise ValueError(
                "backward was given a loss of the model as it was before prepare, or of a part of it, which does not compute "
                f"in precision {self._engine.precision.name!r}; prepare does not change your model. Call the model "
                "that accelerator.prepare returned, or call a part of it within accelerator.autocast()."
            )


def _leads(loss: Tensor, way: list[int], own: set[Tensor]) -> bool:
    """Return whether this way through a loss's graph leads to one of these tensors, or to a part that cannot be seen."""
    node: Any = loss.grad_fn
    for number in way:
        if node is None or len(following := node.next_functions) <= number:
            return False
        node = following[number][0]
    return getattr(node, "variable", None) in own or isinstance(node, BackwardCFunction)


def _reaches(loss: Tensor, own: set[Tensor], most: int | None, way: list[int]) -> bool | None:
    """Return whether one of these tensors is in a loss's graph; None if the first `most` nodes do not show it.

    A part that cannot be seen, such as a checkpoint's, which is built in backward, may hold one. `way` becomes the way to what
    was found.
    """
    came: dict[Any, tuple[Any, int]] = {}  # the node before, and which of its inputs this one is
    waiting: list[tuple[Any, Any, int]] = [(loss.grad_fn, None, 0)]
    while waiting:
        node, before, number = waiting.pop()
        if node is None or node in came:
            continue
        came[node] = before, number
        if isinstance(node, BackwardCFunction) or getattr(node, "variable", None) in own:
            way.clear()
            while before is not None:
                way.append(number)
                before, number = came[before]
            way.reverse()
            return True
        if len(came) == most:
            return None
        waiting.extend((each, node, index) for index, (each, _) in enumerate(node.next_functions))
    return loss in own  # a parameter itself

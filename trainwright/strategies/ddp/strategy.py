"""DDP: every rank holds the whole model, and backward averages gradients (torch DistributedDataParallel)."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainwright.duration import seconds_of
from trainwright.precision.base import Closure, Sender
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies.base import Capabilities, Clipping, Optimization, StepForward, StepResult, Strategy
from trainwright.strategies.ddp import vendor
from trainwright.strategies.divided_optimizers import with_gradients
from trainwright.strategies.module_checks import (
    changed,
    graph_leaves,
    refuse_lazy,
    refuse_reentrant,
    refuse_row_norms,
    refuse_unaveraged,
    replicated,
    trained,
)
from trainwright.strategies.replaced_options import OF_DDP, refuse_options
from trainwright.strategies.replication import equalize

UNUSED = (
    "These parameters got no gradient in the step: {names}. ddp waits for a gradient of every parameter. Use them in the loss, "
    "freeze them (requires_grad_(False) before the epoch), or let ddp look for unused ones in every step: "
    "strategy='ddp_find_unused_parameters_true', or DDPStrategy(find_unused_parameters=True)."
)
MOST_NAMES = 10
"""How many of the unused parameters a message names."""

CommHook = Callable[[Any, Any], Any]


class DDPStrategy(Strategy):
    """Data parallelism over the ranks of a job, on one process too.

    Args:
        find_unused_parameters: find parameters that a step did not use, by walking the graph in every step. Always on under
            manual optimization, where one loss seldom uses every parameter.
        static_graph: promise that all steps use the same parameters in the same way (automatic optimization only). A run
            resumed on three or more ranks may then differ in the last bits, with a warning.
        gradient_as_bucket_view: make gradients views into the communication buckets, which saves a copy.
        bucket_cap_mb: size of a bucket in MiB, by default torch's.
        comm_hook: how gradients are sent: "fp16" or "bf16" (half the bytes), "power_sgd" (low-rank factors), or a function of
            (state, bucket) for torch's register_comm_hook. None sends them unchanged.
        comm_state: the function's state, or for "power_sgd" a dict of arguments for torch's PowerSGDState, such as
            {"matrix_approximation_rank": 2, "start_powerSGD_iter": 100}. Checkpoints do not store it: a resumed run starts
            with a new one, with a warning.
        timeout: seconds (or a timedelta) that a rank waits for the others, by default half an hour.

    Raises:
        ValueError, TypeError: an option that is not accepted.

    >>> strategy = tw.DDPStrategy(comm_hook="bf16", gradient_as_bucket_view=True)
    >>> trainer = tw.Trainer(strategy=strategy, devices=2, max_epochs=1, enable_model_summary=False)
    >>> trainer.fit(module, loader)
    """

    name = "ddp"
    capabilities = Capabilities(is_parallel=True)

    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        bucket_cap_mb: float | None = None,
        comm_hook: str | CommHook | None = None,
        comm_state: Any = None,
        timeout: float | timedelta | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        refuse_options(DDPStrategy, unknown, OF_DDP)
        self.timeout_seconds = seconds_of(timeout)
        self.comm_hook, self.comm_state = comm_hook, comm_state
        if comm_state is not None and comm_hook in (None, "fp16", "bf16"):
            raise ValueError(
                f"comm_state={comm_state!r} was given with comm_hook={comm_hook!r}, which keeps no state. Pass it with a "
                "function or with 'power_sgd', or omit it."
            )
        if comm_hook is not None:
            resolve_comm_hook(comm_hook, comm_state)  # only to reject an unknown one
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.bucket_cap_mb = bucket_cap_mb
        self._automatic = True
        self._orders: dict[nn.Module, ReadyOrder] = {}
        self._trained: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._known: set[Tensor] = set()
        """All of those parameters."""
        self._averaged: set[nn.Module] = set()
        """Modules whose last forward has had a backward that kept its graph, so another one may follow."""
        self._watched: dict[nn.Module, tuple[Any, Any]] = {}
        """The autograd node of a module's first parameter, which lives while this table holds it, and the hook's handle."""
        self._due: set[Any] = set()
        """Modules whose training step has run, and whose first parameter no backward has reached since then."""

    def check_module(self, module: nn.Module, optimization: Optimization | None) -> None:
        if self.world_size == 1:
            return
        refuse_lazy(module, self.name)
        if optimization is None:
            return
        refuse_row_norms(module, self.name)
        refuse_reentrant(module, self.name, not self.static_graph)  # which counts the calls of a layer
        if self.static_graph and not optimization.automatic:
            raise ValueError(
                "static_graph=True needs automatic optimization, but this module steps its optimizers itself, after separate "
                "backwards. Leave static_graph at False."
            )

    def setup_module(self, module: nn.Module, optimization: Optimization | None) -> None:
        self._move(module)
        self.check_module(module, optimization)
        if self.world_size == 1:
            return
        if optimization is None:
            equalize(replicated(module, (*module.named_parameters(), *module.named_buffers())))
            return
        self._automatic = optimization.automatic
        self._wrap(module)

    def _wrap(self, module: nn.Module) -> None:
        self._trained[module] = trained(module)
        self._known = {parameter for each in self._trained.values() for parameter in each.values()}
        local = vendor.rank_local_names(module)
        equalize(replicated(module, module.named_buffers()))
        self.buffers.track(module, local)
        if not self._trained[module]:
            equalize(replicated(module, module.named_parameters()))
            return
        is_searching = self.find_unused_parameters or not self._automatic
        forward = StepForward(module)
        if is_searching and not self.static_graph:
            forward = AnchoredForward(module, next(iter(self._trained[module].values())))
        # Buffers too: DDP would broadcast the buffers that it found when it was made (see SyncedBuffers).
        vendor.exclude(forward, (f"module.{name}" for name in (*local, *dict(module.named_buffers()))))
        self.wrapped[module] = DistributedDataParallel(
            forward,
            find_unused_parameters=is_searching,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            bucket_cap_mb=self.bucket_cap_mb,
        )
        if self.comm_hook is not None:
            state, hook = resolve_comm_hook(self.comm_hook, self.comm_state)
            # Wrapped, because torch refuses hooks with string annotations, and its bf16 hook under gloo, where it works.
            self.wrapped[module].register_comm_hook(state, lambda state, bucket: hook(state, bucket))
        self._orders[module] = ReadyOrder(self.wrapped[module])
        if not is_searching and not self.static_graph:
            self._watch(module)

    def _watch(self, module: nn.Module) -> None:
        """Record backwards that reach the module's first parameter, as the backward of a step does."""
        first = next(iter(self._trained[module].values()))
        node: Any = first.expand_as(first).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        # Not a hook of the tensor, which is not called where its gradient is undefined. The garbage collector cannot follow
        # a node's references to its hooks, so a reference to the module would keep it in memory.
        due, reference = self._due, weakref.ref(module)
        self._watched[module] = node, node.register_hook(lambda *_: due.discard(reference()))

    def refresh_trainable(self, modules: Sequence[nn.Module], in_step: bool = False) -> None:
        """Wrap a module again if parameters were frozen, unfrozen or replaced, because a reducer's parameters are fixed."""
        for module in () if in_step else modules:
            if module not in self._trained:
                continue
            self.buffers.track(module, vendor.rank_local_names(module))
            if not changed(self._trained[module], trained(module)):
                continue
            if module in self.wrapped:
                self._orders.pop(module).close()
                self._unwatch(module)
                del self.wrapped[module]
                gc.collect()  # a reducer's backward hooks live as long as it does
            self._wrap(module)

    def _unwatch(self, module: nn.Module) -> None:
        if module in self._watched:
            self._watched.pop(module)[1].remove()
        self._due.discard(module)

    def run(self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step as the wrapper's forward while training.

        Evaluation bypasses the wrapper. So does manual optimization, whose backward inside the wrapper's forward would come
        before the wrapper prepares its reducer, and not be averaged. `backward` prepares it instead.
        """
        self.buffers.begin_step(module)
        wrapped = self.wrapped.get(module)
        if wrapped is None or not torch.is_grad_enabled() or not self._automatic:
            return super().run(module, name, args, kwargs)
        self._averaged.discard(module)
        if name != "forward" and module in self._watched and wrapped.require_backward_grad_sync:
            self._due.add(module)
        try:
            with self.precision.forward_context() or nullcontext():
                return wrapped(name, *args, **kwargs)
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            raise self._unused(module, list(map(int, found[1].split())) if found else []) from error

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        if not self._automatic:
            for wrapped in self.wrapped.values():
                if wrapped.require_backward_grad_sync:
                    loss = wrapped.module.reach(loss)
                    vendor.prepare_backward(wrapped, loss)
        elif self.wrapped and (self._averaged or options.get("retain_graph")):
            reached = [each for each in self._reached_by(loss) if self.wrapped[each].require_backward_grad_sync]
            for module in self._averaged.intersection(reached):
                # A forward prepares the reducer for one backward. Averaging an average again changes nothing.
                vendor.prepare_backward(self.wrapped[module], loss)
            self._averaged.update(reached)
        try:
            super().backward(loss, send, **options)
        except BaseException:
            for module, wrapped in self.wrapped.items():  # the user may catch it, and train on the next batch
                vendor.reset_reducer(wrapped)
                self._orders[module].restart()
            raise
        if self._due:
            module = self._due.pop()
            # The other ranks' gradients would be averaged with this rank's gradients of the next step.
            left_out = [at for at, each in enumerate(self._trained[module].values()) if each.grad is None]
            raise self._unused(module, left_out or [0])

    def _reached_by(self, loss: Tensor) -> list[nn.Module]:
        """Return the wrapped modules whose parameters get gradients from a loss's backward."""
        leaves = graph_leaves(loss)
        if not leaves and len(self.wrapped) > 1:
            return []  # some of the graph cannot be seen, so any module may be reached, or not
        return [each for each in self.wrapped if not leaves or not leaves.isdisjoint(each.parameters())]

    def sync_gradients(self, enabled: bool) -> None:
        super().sync_gradients(enabled)
        # The flag behind DDP.no_sync, which both forward and backward read.
        for wrapped in self.wrapped.values():
            # NOTE: DDP learns a static graph in the first backward, which must be synchronised. Averaging that batch's
            # gradients early does not change the window's average.
            wrapped.require_backward_grad_sync = enabled or vendor.is_learning_graph(wrapped)

    def step(
        self, optimizer: Optimizer, clipping: Clipping | None = None, closure: Closure | None = None
    ) -> StepResult:
        if self._trained:
            unknown = [each for each in with_gradients(optimizer) if each not in self._known]
            refuse_unaveraged(self.name, self._trained, unknown)
        return super().step(optimizer, clipping, closure)

    def _unused(self, module: nn.Module, indices: Sequence[int]) -> RuntimeError:
        trained = list(self._trained[module])
        names = [trained[index] for index in indices[:MOST_NAMES]]
        if len(indices) > MOST_NAMES:
            names.append(f"and {len(indices) - MOST_NAMES} more")
        return RuntimeError(UNUSED.format(names=", ".join(names) or "in another step than the others"))

    @property
    def state(self) -> dict[str, Any]:
        return {"ready_orders": [order.indices for order in self._orders.values()]}

    def refresh_weights(self, modules: Sequence[nn.Module], loaded: Mapping[str, Any] | None = None) -> None:
        """Restore the buckets' layout after a load, so that three or more ranks sum in the saved run's order."""
        if loaded is None:
            return
        if self.wrapped and (self.comm_hook == "power_sgd" or self.comm_state is not None):
            rank_zero_warn(
                f"comm_hook={self.comm_hook!r} keeps a separate state (for power_sgd, the errors of the compression), which "
                "no checkpoint stores: the run resumes with a new one, close to an uninterrupted run but not bit for "
                "bit. For that, choose 'fp16', 'bf16' or no comm_hook.",
                stacklevel=2,
            )
        if self.wrapped and self.static_graph and self.world_size > 2:
            rank_zero_warn(
                f"static_graph=True on {self.world_size} ranks: the gradients' buckets are laid out while a run begins, so "
                "a resumed run may differ from an uninterrupted one in the last bits. For that, leave static_graph at False.",
                stacklevel=2,
            )
        for order, indices in zip(self._orders.values(), loaded.get("ready_orders", []), strict=False):
            order.replay(indices)

    def close(self) -> None:
        super().close()
        for order in self._orders.values():
            order.close()
        for module in list(self._watched):
            self._unwatch(module)
        self._orders.clear()
        self._trained.clear()
        self._known.clear()
        self._averaged.clear()


class AnchoredForward(StepForward):
    """A step whose loss reaches at least one parameter of the wrapper, its anchor.

    A reducer marks the parameters that a loss does not use when a backward reaches a used one. A rank whose loss uses
    none would take no part: the other ranks would wait for it, or be averaged with its next step.
    """

    def __init__(self, module: nn.Module, like: nn.Parameter) -> None:
        """Give the anchor the dtype and the device of a parameter that is trained."""
        super().__init__(module)
        dtype = like.dtype if like.is_floating_point() else torch.float32
        self.anchor = nn.Parameter(torch.zeros((), dtype=dtype, device=like.device))

    def forward(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(name, *args, **kwargs)
        if name == "forward":  # of a loop that computes the loss outside
            return result
        if isinstance(result, Tensor):
            return self.reach(result)
        if isinstance(result, dict) and isinstance(result.get("loss"), Tensor):
            result = copy(result)
            result["loss"] = self.reach(result["loss"])
        return result

    def reach(self, loss: Tensor) -> Tensor:
        """Return an equal loss whose backward reaches the anchor too, with a gradient of zero."""
        return loss + (self.anchor * 0.0).to(loss) if loss.requires_grad else loss


def resolve_comm_hook(hook: str | CommHook, state: Any) -> tuple[Any, CommHook]:
    """Return a communication hook's state and function."""
    if callable(hook):
        return state, hook
    if hook in ("fp16", "bf16"):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

        return None, fp16_compress_hook if hook == "fp16" else bf16_compress_hook
    if hook != "power_sgd":
        raise ValueError(f"comm_hook={hook!r} is unknown. Choose from fp16, bf16, power_sgd, or pass a function.")
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    if not isinstance(state, dict | None):
        raise TypeError(
            f"comm_state={state!r} was given with comm_hook='power_sgd'. Pass a dict of PowerSGDState's arguments."
        )
    try:
        return PowerSGDState(None, **(state or {})), powerSGD_hook
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"comm_state={state!r} is not accepted by torch's PowerSGDState ({error}). Pass arguments that it takes."
        ) from error


class ReadyOrder:
    """Records the order in which gradients get ready in the first backward, and replays it in a resumed run.

    DDP rebuilds its buckets by that order after the first backward. A resumed run has other buckets until then, so three or
    more ranks would sum its first gradients in a different order, and differ in the last bits.
    """

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self.indices: list[int] = []
        self._seen: set[int] = set()
        self._wrapped = wrapped
        named, ignored = wrapped.module.named_parameters(), wrapped.parameters_to_ignore
        self._parameters = [p for name, p in named if p.requires_grad and name not in ignored]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._record, index))
            for index, parameter in enumerate(self._parameters)
        ]

    def _record(self, index: int, parameter: Tensor) -> None:
        if index not in self._seen:
            self._seen.add(index)
            self.indices.append(index)
        if len(self.indices) == len(self._parameters):
            self.close()

    def close(self) -> None:
        """Stop recording."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def restart(self) -> None:
        """Drop the records of an incomplete backward."""
        if len(self._seen) < len(self._parameters):
            self.indices.clear()
            self._seen.clear()

    def replay(self, indices: Sequence[int]) -> None:
        """Run a backward of zeros in a recorded order. The next forward then rebuilds the buckets."""
        wrapped = self._wrapped
        is_whole = sorted(indices) == list(range(len(self._parameters)))
        if not is_whole or wrapped.find_unused_parameters or wrapped.static_graph:
            return
        self.close()
        vendor.accumulate_in_order(wrapped, [self._parameters[index] for index in indices])
        self.indices, self._seen = list(indices), set(indices)

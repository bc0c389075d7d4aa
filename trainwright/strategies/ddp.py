"""DDP: each rank holds the whole model, gradients are averaged during backward (torch DistributedDataParallel)."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors
from torch.optim import Optimizer

from trainwright.precision.base import Sender
from trainwright.strategies.base import Optimization, StepForward, Strategy, broadcast_tensors

UNUSED = (
    "the step before left out parameters that require gradients, and ddp waits for those of all of them. Use each parameter in "
    "the loss, freeze what is not used (requires_grad_(False) before the epoch), or let ddp look for them each step: "
    "strategy='ddp_find_unused_parameters_true', or DDPStrategy(find_unused_parameters=True)."
)


class DDPStrategy(Strategy):
    """Data parallelism over the ranks of a job, on one process too.

    Args:
        find_unused_parameters: look for parameters that a step did not use; costs a walk over the graph each step. Always
            on under manual optimization, where one loss seldom uses every parameter.
        static_graph: promise that each step uses the same parameters in the same way.
        gradient_as_bucket_view: let gradients be views into the communication buckets, saving one copy of them.
        bucket_cap_mb: size of a bucket in MiB; None is torch's own default.
    """

    name = "ddp"
    is_parallel = True

    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        bucket_cap_mb: float | None = None,
    ) -> None:
        super().__init__()
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.bucket_cap_mb = bucket_cap_mb
        self.wrapped: dict[nn.Module, DistributedDataParallel] = {}
        self._automatic = True
        self._orders: dict[nn.Module, ReadyOrder] = {}
        self._trained: dict[nn.Module, list[str]] = {}

    def setup_module(self, module: nn.Module, optimization: Optimization | None) -> None:
        self.place(module)
        if self.world_size == 1:
            return
        if optimization is None:
            broadcast_tensors((*module.parameters(), *module.buffers()))
            return
        self._automatic = optimization.automatic
        self._wrap(module)

    def _wrap(self, module: nn.Module) -> None:
        self._trained[module] = trained(module)
        if not self._trained[module]:
            broadcast_tensors((*module.parameters(), *module.buffers()))
            return
        self.wrapped[module] = DistributedDataParallel(
            StepForward(module),
            find_unused_parameters=self.find_unused_parameters or not self._automatic,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            bucket_cap_mb=self.bucket_cap_mb,
        )
        self._orders[module] = ReadyOrder(self.wrapped[module])

    def follow_parameters(self, modules: Sequence[nn.Module]) -> None:
        """Wrap a module anew where parameters were frozen or unfrozen since: its reducer knows those of then."""
        for module in modules:
            if module not in self._trained or trained(module) == self._trained[module]:
                continue
            if module in self.wrapped:
                self._orders.pop(module).close()
                del self.wrapped[module]
                gc.collect()  # a reducer hooks into backward until it is gone
            self._wrap(module)

    def run(self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step as the wrapper's forward while training.

        Without gradients the wrapper is left out: it would broadcast buffers, and ranks evaluate unequal numbers of
        batches. So it is under manual optimization, where `backward` prepares the reducer (a backward inside the wrapper's
        forward comes before the wrapper prepares it, and its gradients would silently not be averaged).
        """
        wrapped = self.wrapped.get(module)
        if wrapped is None or not torch.is_grad_enabled() or not self._automatic:
            return super().run(module, name, args, kwargs)
        context = self.precision.forward_context()
        try:
            if context is None:
                return wrapped(name, *args, **kwargs)
            with context:
                return wrapped(name, *args, **kwargs)
        except RuntimeError as error:
            if "Expected to have finished reduction" in str(error):
                raise RuntimeError(UNUSED) from error
            raise

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        if not self._automatic:
            for wrapped in self.wrapped.values():
                if wrapped.require_backward_grad_sync:
                    wrapped.reducer._rebuild_buckets()
                    wrapped.reducer.prepare_for_backward(list(_find_tensors(loss)))  # type: ignore[no-untyped-call]
        self.precision.backward(loss, send, **options)

    def sync_gradients(self, enabled: bool) -> None:
        # The switch behind DDP.no_sync, without a context: forward and backward both read it.
        for wrapped in self.wrapped.values():
            wrapped.require_backward_grad_sync = enabled

    def before_evaluation(self, modules: Iterable[nn.Module]) -> None:
        """Collective: rank 0's buffers go to every rank, so that one model is evaluated."""
        broadcast_tensors(buffer for module in modules for buffer in module.buffers())

    @property
    def state(self) -> dict[str, Any]:
        return {"ready_orders": [order.indices for order in self._orders.values()]}

    def after_load(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        """Lay out the buckets as they were, so that three and more ranks sum in the order of the saved run."""
        for order, indices in zip(self._orders.values(), state.get("ready_orders", []), strict=False):
            order.replay(indices)

    def close(self) -> None:
        for order in self._orders.values():
            order.close()
        self._orders.clear()
        self.wrapped.clear()
        self._trained.clear()


def trained(module: nn.Module) -> list[str]:
    """Return the names of the parameters that require gradients."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


class ReadyOrder:
    """The order in which gradients get ready in a module's first backward, by which DDP lays out its buckets anew."""

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self.indices: list[int] = []
        self._seen: set[int] = set()
        self._wrapped = wrapped
        self._parameters = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._record, index))  # type: ignore[no-untyped-call]
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

    def replay(self, indices: Sequence[int]) -> None:
        """Make an empty backward in a recorded order, before the first real one; the next forward lays out the buckets."""
        wrapped = self._wrapped
        if (
            sorted(indices) != list(range(len(self._parameters)))
            or wrapped.find_unused_parameters
            or wrapped.static_graph
        ):
            return
        wrapped.reducer.prepare_for_backward([])
        for index in indices:
            parameter = self._parameters[index]
            torch.autograd.backward(parameter, torch.zeros_like(parameter))
        for parameter in self._parameters:
            parameter.grad = None

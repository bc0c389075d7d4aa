"""ddp_sharded: every rank holds the whole model, and the optimizer state of its tensors (FairScale's OSS and ShardedDDP).

Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", but tensors belong whole
to one rank. FairScale is no longer developed. Its last version, 0.4.13, was tested with torch 2.13.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.duration import seconds_of
from trainwright.precision.base import Closure, Precision, Sender
from trainwright.rank_zero import rank_zero_info
from trainwright.strategies.base import (
    Capabilities,
    Clipping,
    Optimization,
    StepForward,
    StepResult,
    Strategy,
    scale_and_clip_value,
)
from trainwright.strategies.divided_optimizers import (
    DIVISIONS,
    REPLACED,
    Division,
    OptimizerProxy,
    UsedParameters,
    parameters_of,
    with_gradients,
)
from trainwright.strategies.module_checks import refuse_reentrant, refuse_sparse_weights, refuse_unreplicable
from trainwright.strategies.oss import vendor
from trainwright.strategies.replaced_options import OF_DDP, refuse_options
from trainwright.strategies.replication import DeferredAllReduce, equalize


class ShardedOptimizer(OptimizerProxy):
    """Shows all parameters, while the user's optimizer keeps and steps this rank's, which are then broadcast."""

    def __init__(self, own: Optimizer) -> None:
        everyones = [list(group["params"]) for group in own.param_groups]
        self.oss = vendor.make_oss(own)
        DIVISIONS[own] = Division(ShardedDDPStrategy.name, {}, everyones)
        super().__init__(own, everyones)
        self.used = UsedParameters()
        self.used.track(parameters_of(self))
        self._everyone = set(parameters_of(self))
        self._wrappers: list[Any] = []

    def set_wrappers(self, wrappers: Sequence[Any]) -> None:
        """Set the ShardedDDP wrappers of the modules that it steps, under automatic optimization."""
        self._wrappers = list(wrappers)

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.own.state

    def _call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        self.send()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients. In ShardedDDP's buckets they become zeros."""
        self.used.clear()
        bucketed: set[Tensor] = set()
        for wrapper in self._wrappers:
            bucketed |= wrapper.discard(self._everyone)
        for parameter in self._everyone - bucketed:
            parameter.grad = None

    def put_back(self) -> None:
        """Add the averages of earlier backwards to gradients that the latest one has not averaged."""
        for wrapper in self._wrappers:
            wrapper.put_back(self._everyone)

    @contextmanager
    def without_unused(self) -> Iterator[None]:
        """Hide the gradients of unused parameters, which are zeros in ShardedDDP's buckets, from the step."""
        left_out = [
            (parameter, parameter.grad)
            for parameter in with_gradients(self.own)
            if self.used.is_unused(parameter, parameter.grad)  # type: ignore[arg-type]
        ]
        for parameter, _ in left_out:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in left_out:
                parameter.grad = gradient
        self.used.clear()

    def send(self) -> None:
        """Broadcast this rank's parameters. Collective."""
        self.oss.send()

    def refuse_replaced(self) -> None:
        """Raise RuntimeError if a group's list has other parameters than when they were divided."""
        if set(parameters_of(self)) != self._everyone:
            raise RuntimeError(REPLACED)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError, because all parameters have their ranks by now."""
        raise RuntimeError(
            "ddp_sharded assigns parameters to ranks when the optimizer is prepared, so groups cannot be added later. Pass "
            "them to the optimizer in configure_optimizers, frozen if necessary."
        )


class ShardedDDPStrategy(Strategy):
    """Data parallelism with optimizer state sharded over the ranks, tensor by tensor.

    Parameters must have one dtype, and the optimizer must step them independently, without a closure. Gradients of
    other ranks' parameters are undefined after a backward.

    Args:
        reduce_buffer_size: elements of a bucket of small gradients.
        reduce_fp16: send gradients in float16, without buckets.
        timeout: seconds (or a timedelta) that a rank waits for the others, by default half an hour.

    Raises:
        ImportError: FairScale is not installed.
        ValueError, TypeError: an option that is not accepted.

    >>> strategy = tw.ShardedDDPStrategy(reduce_buffer_size=2**20)
    >>> trainer = tw.Trainer(strategy=strategy, devices=2, max_epochs=1, enable_model_summary=False)
    >>> trainer.fit(module, loader)
    """

    name = "ddp_sharded"
    capabilities = Capabilities(
        is_parallel=True,
        takes_closure=False,
        divides_optimizers=True,
        trains_prepared_only=True,
        takes_param_groups=False,
    )

    def __init__(
        self,
        *,
        reduce_buffer_size: int = 2**23,
        reduce_fp16: bool = False,
        timeout: float | timedelta | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        refuse_options(ShardedDDPStrategy, unknown, OF_DDP)
        self.timeout_seconds = seconds_of(timeout)
        if importlib.util.find_spec("fairscale") is None:
            raise ImportError(
                "strategy='ddp_sharded' needs FairScale, which is not installed. Run: pip install 'trainwright[fairscale]'"
            )
        if isinstance(reduce_buffer_size, bool) or not isinstance(reduce_buffer_size, int) or reduce_buffer_size < 0:
            raise ValueError(
                f"reduce_buffer_size={reduce_buffer_size!r} is not accepted; pass an integer of at least 0."
            )
        self.reduce_buffer_size = 0 if reduce_fp16 else reduce_buffer_size
        self.reduce_fp16 = reduce_fp16
        self._optimizers: dict[int, ShardedOptimizer] = {}
        self._deferred = DeferredAllReduce()
        self._stepped: Any = None
        """The wrapper of a training step whose backward is due."""
        self._automatic = True

    def check(self, device_type: str, num_processes: int, precision: Precision) -> None:
        if num_processes == 1:
            rank_zero_info("strategy='ddp_sharded' has nothing to shard on one process; it runs as 'single_device'.")

    def setup_module(self, module: nn.Module, optimization: Optimization | None) -> None:
        self._move(module)
        if self.world_size == 1:
            return
        refuse_unreplicable(module, self.name, optimization)
        refuse_reentrant(module, self.name, optimization)
        refuse_sparse_weights(module, self.name, optimization)
        equalize((*module.parameters(), *module.buffers()))
        self._automatic = optimization is None or optimization.automatic
        self.wrapped[module] = None  # until it has optimizers
        self.buffers.track(module)

    def refresh_trainable(self, modules: Sequence[nn.Module], in_step: bool = False) -> None:
        if in_step:
            return
        for optimizer in self._optimizers.values():
            optimizer.refuse_replaced()
        for module in modules if self.world_size > 1 else ():
            self.buffers.track(module)
            refuse_sparse_weights(module, self.name, True)  # an embedding may have been unfrozen

    def setup_optimizers(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], optimization: Optimization
    ) -> list[Optimizer]:
        if self.world_size == 1:
            return list(optimizers)
        sharded: list[Optimizer] = []
        for optimizer in optimizers:
            if not isinstance(optimizer, ShardedOptimizer):
                _refuse_mixed(optimizer)
                optimizer = ShardedOptimizer(optimizer)
                self._optimizers[id(optimizer)] = optimizer
            sharded.append(optimizer)
        if self._automatic:
            self._wrap(modules)
        else:
            for each in self._optimizers.values():
                # Manual optimization bypasses ShardedDDP, so its backward reduces nothing.
                self._deferred.track(parameters_of(each), each.oss.owners())
        return sharded

    def _wrap(self, modules: Sequence[nn.Module]) -> None:
        """Wrap the modules whose ShardedDDP does not have all of their optimizers yet."""
        for module in modules:
            own = set(module.parameters())
            theirs = [each for each in self._optimizers.values() if not own.isdisjoint(parameters_of(each))]
            oss, wrapped = [each.oss for each in theirs], self.wrapped.get(module)
            if not theirs or (wrapped is not None and wrapped.optimizers == oss):
                continue
            if wrapped is not None:
                wrapped.close()
            others = (
                set(each.module.parameters()) for name, each in self.wrapped.items() if each and name is not module
            )
            self.wrapped[module] = vendor.make_wrapper(
                StepForward(module),
                own.difference(*others),  # a parameter of two modules is averaged once
                oss,
                broadcast_buffers=False,  # see SyncedBuffers
                sync_models_at_startup=False,  # done already
                reduce_buffer_size=self.reduce_buffer_size,
                reduce_fp16=self.reduce_fp16,
                warn_on_trainable_params_changed=False,
            )
        wrappers = [each for each in self.wrapped.values() if each]
        for wrapped in wrappers:
            wrapped.take_turns(wrappers[::-1])  # a backward reaches the module made last first
        for each in self._optimizers.values():
            each.set_wrappers([wrapped for wrapped in wrappers if each.oss in wrapped.optimizers])

    def run(self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step as ShardedDDP's forward, which evaluation and manual optimization bypass."""
        self.buffers.begin_step(module)
        wrapped = self.wrapped.get(module)
        if wrapped is None or not torch.is_grad_enabled():
            return super().run(module, name, args, kwargs)
        self._stepped = wrapped if name != "forward" else None
        with self.precision.forward_context() or nullcontext():
            return wrapped(name, *args, **kwargs)

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        for optimizer in (each for each, is_final in self.finalized.items() if is_final):
            self._deferred.reopen(optimizer)
        for wrapped in self.wrapped.values():
            if wrapped is not None:
                wrapped.begin_backward()
        stepped, self._stepped = self._stepped, None
        super().backward(loss, send, **options)
        if stepped is not None:
            stepped.end_backward()

    def sync_gradients(self, enabled: bool) -> None:
        super().sync_gradients(enabled)
        for wrapped in self.wrapped.values():
            if wrapped is not None:
                vendor.set_reducing(wrapped, enabled)

    def _finalize(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, ShardedOptimizer):
            return super()._finalize(optimizer)
        self._deferred.reduce(optimizer)
        optimizer.put_back()
        # Only this rank's gradients count. FairScale's scaler does nothing on the CPU.
        self.precision.unscale(optimizer.own, lambda found: dist.all_reduce(found, op=dist.ReduceOp.MAX))

    def step(
        self, optimizer: Optimizer, clipping: Clipping | None = None, closure: Closure | None = None
    ) -> StepResult:
        if not isinstance(optimizer, ShardedOptimizer):
            return super().step(optimizer, clipping, closure)
        self.finalize(optimizer)
        with optimizer.without_unused():
            with self.precision.step_context():
                norm = None if clipping is None else self.clip_gradients(optimizer, clipping)
            skipped = self.precision.step(optimizer.own)
        self.finalized.pop(optimizer, None)
        if not skipped:
            optimizer.send()
        return StepResult(norm, skipped)

    def clip_gradients(self, optimizer: Optimizer, clipping: Clipping) -> Tensor | None:
        if not isinstance(optimizer, ShardedOptimizer):
            return super().clip_gradients(optimizer, clipping)
        self.finalize(optimizer)
        parameters = with_gradients(optimizer.own)
        scale_and_clip_value(parameters, clipping)
        if clipping.norm is None:
            return None
        total = torch.nn.utils.get_total_norm([p.grad for p in parameters]).to(self.device).square()  # type: ignore[misc]
        dist.all_reduce(total)
        total.sqrt_()
        torch.nn.utils.clip_grads_with_norm_(parameters, clipping.norm, total)
        return total

    def close(self) -> None:
        for wrapped in self.wrapped.values():
            if wrapped is not None:
                wrapped.close()
        for optimizer in self._optimizers.values():
            for parameter in parameters_of(optimizer):
                parameter.grad = None  # it may lie in a bucket
            optimizer.used.close()
        super().close()
        self._stepped = None
        self._optimizers.clear()
        self._deferred.clear()


def _refuse_mixed(optimizer: Optimizer) -> None:
    """Raise ValueError for several dtypes, because FairScale keeps a rank's parameters in one buffer."""
    dtypes = {p.dtype for p in parameters_of(optimizer) if p.requires_grad}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ValueError(
            f"ddp_sharded sends parameters in buffers of one dtype, but this {type(optimizer).__name__} steps parameters in "
            f"{names}. Convert the module to one dtype, or choose 'ddp' or 'fsdp'."
        )

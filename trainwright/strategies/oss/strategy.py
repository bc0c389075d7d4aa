"""ddp_sharded: every rank holds the whole model, and the optimizer state of its tensors (FairScale's OSS).

Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", but tensors belong whole
to one rank. FairScale is no longer developed. Its last version, 0.4.13, was tested with torch 2.13.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainwright.duration import seconds_of
from trainwright.precision.base import Closure, Precision, Sender
from trainwright.rank_zero import rank_zero_info
from trainwright.strategies.base import Capabilities, Clipping, Optimization, StepResult, Strategy, scale_and_clip_value
from trainwright.strategies.divided_optimizers import DIVIDED, REPLACED, OptimizerProxy, parameters_of, with_gradients
from trainwright.strategies.module_checks import refuse_sparse_weights, refuse_unshardable
from trainwright.strategies.oss import vendor
from trainwright.strategies.replaced_options import OF_DDP, refuse_options
from trainwright.strategies.replication import equalize


class ShardedOptimizer(OptimizerProxy):
    """Shows all parameters, while the user's optimizer keeps and steps this rank's, which are then broadcast.

    A gradient is averaged on the rank that steps it, and discarded on the others. Every rank sends the buckets in the same
    order, the last parameters first. A missing gradient is sent as zeros, because another rank may have used the parameter.
    """

    def __init__(self, own: Optimizer, bucket_size: int, dtype: torch.dtype | None) -> None:
        everyones = [list(group["params"]) for group in own.param_groups]
        self.oss, self._owners = vendor.make_oss(own)
        DIVIDED[own] = ShardedDDPStrategy.name
        super().__init__(own, everyones)
        self._everyone = set(parameters_of(self))
        self._bucket_size, self._dtype = bucket_size, dtype
        self._trained: list[nn.Parameter] = []
        self._buckets: list[list[nn.Parameter]] = []
        self._bucket_of: dict[Tensor, int] = {}
        self._hooks: list[RemovableHandle] = []
        self._missing: list[int] = []
        """How many gradients of each bucket have not come in the running backward."""
        self._sent: list[tuple[Tensor, list[bool], Any]] = []
        """The flat gradients of the buckets that were sent, which of them this rank has used, and the work."""
        self._sends = False
        self.is_averaged = False
        """Whether the gradients are averages, to which no backward has added."""
        self.follow_trained()

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.own.state

    def _call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        self.send()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients."""
        self.is_averaged = False
        for parameter in self._everyone:
            parameter.grad = None

    def follow_trained(self) -> None:
        """Divide the gradients of the parameters that are trained now into buckets of one rank.

        Raises:
            RuntimeError: a group's list has other parameters than when they were divided.
        """
        if set(parameters_of(self)) != self._everyone:
            raise RuntimeError(REPLACED)
        trained = [p for p in parameters_of(self)[::-1] if p.requires_grad]
        if trained == self._trained:
            return
        for frozen in self._everyone.difference(trained):
            frozen.grad = None  # otherwise momentum and decay would keep changing it
        if self._trained:
            self.oss.refresh_trainable()
        self.close()
        self._trained, self._buckets = trained, []
        open_buckets: dict[int, list[nn.Parameter]] = {}
        for p in trained:
            bucket = open_buckets.get(self._owners[p], [])
            if not bucket or sum(each.numel() for each in bucket) + p.numel() > self._bucket_size:
                bucket = open_buckets[self._owners[p]] = []
                self._buckets.append(bucket)
            bucket.append(p)
        self._bucket_of = {p: index for index, bucket in enumerate(self._buckets) for p in bucket}
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrive) for p in trained]  # type: ignore[no-untyped-call]

    def begin_backward(self, sends: bool) -> None:
        """Record whether the coming backward sends buckets. It adds to averages, so undo the mean of averaged gradients."""
        self._sends, self._missing, self._sent = sends, list(map(len, self._buckets)), []
        if self.is_averaged:
            self.is_averaged = False
            for parameter in with_gradients(self.own):
                parameter.grad.mul_(dist.get_world_size())  # type: ignore[union-attr]

    def _arrive(self, parameter: Tensor) -> None:
        """Send the complete buckets that have their turn, as a hook of a gradient."""
        if not self._sends:
            return
        self._missing[self._bucket_of[parameter]] -= 1
        while len(self._sent) < len(self._buckets) and self._missing[len(self._sent)] <= 0:
            self._send_next()

    @torch.no_grad()
    def _send_next(self) -> None:
        bucket = self._buckets[len(self._sent)]
        is_used = [p.grad is not None for p in bucket]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = gradients[0].reshape(-1) if len(bucket) == 1 else torch.cat([each.reshape(-1) for each in gradients])
        flat.div_(dist.get_world_size())
        if self._dtype is not None:
            flat = flat.to(self._dtype)
        for p in bucket:
            p.grad = None  # its memory is the flat one's from now on
        self._sent.append((flat, is_used, dist.reduce(flat, dst=self._owners[bucket[0]], async_op=True)))

    @torch.no_grad()
    def average(self) -> None:
        """Average the gradients that are not averages yet. Collective: call on every rank."""
        if self.is_averaged:
            return
        while len(self._sent) < len(self._buckets):
            self._send_next()
        for bucket, (flat, is_used, work) in zip(self._buckets, self._sent, strict=True):
            work.wait()
            parts = torch.split(flat, [p.numel() for p in bucket]) if self._owners[bucket[0]] == dist.get_rank() else ()
            for p, part, was_used in zip(bucket, parts, is_used, strict=False):
                if was_used or bool(part.any()):  # otherwise no rank has used it
                    p.grad = part.view_as(p).to(p.dtype)
        self._sends, self._sent, self.is_averaged = False, [], True

    def send(self) -> None:
        """Broadcast this rank's parameters. Collective."""
        vendor.send(self.oss)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class ShardedDDPStrategy(Strategy):
    """Data parallelism with optimizer state sharded over the ranks, tensor by tensor.

    Parameters must have one dtype, and the optimizer must step them independently, without a closure. Gradients of
    other ranks' parameters are undefined after a backward.

    Args:
        reduce_buffer_size: the most elements of a bucket. A larger gradient is sent separately.
        reduce_fp16: send gradients in float16.
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
        reduce_buffer_size: int = 2**18,
        reduce_fp16: bool = False,
        timeout: float | timedelta | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        refuse_options(ShardedDDPStrategy, unknown, OF_DDP)
        self.timeout_seconds = seconds_of(timeout)
        if importlib.util.find_spec("fairscale") is None:
            raise ImportError("strategy='ddp_sharded' needs FairScale. Run: pip install 'trainwright[fairscale]'")
        if isinstance(reduce_buffer_size, bool) or not isinstance(reduce_buffer_size, int) or reduce_buffer_size < 0:
            raise ValueError(
                f"reduce_buffer_size={reduce_buffer_size!r} is not accepted; pass an integer of at least 0."
            )
        self.reduce_buffer_size = reduce_buffer_size
        self.reduce_fp16 = reduce_fp16
        self._optimizers: dict[int, ShardedOptimizer] = {}
        self._automatic = True

    def check(self, device_type: str, num_processes: int, precision: Precision) -> None:
        if num_processes == 1:
            rank_zero_info("strategy='ddp_sharded' has nothing to shard on one process; it runs as 'single_device'.")

    def check_module(self, module: nn.Module, optimization: Optimization | None) -> None:
        if self.world_size > 1:
            refuse_unshardable(module, self.name, optimization)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise ValueError for several dtypes, because FairScale keeps a rank's parameters in one buffer."""
        dtypes = {p.dtype for p in parameters_of(optimizer) if p.requires_grad}
        if self.world_size > 1 and len(dtypes) > 1:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise ValueError(
                f"ddp_sharded sends parameters in buffers of one dtype, but this {type(optimizer).__name__} steps parameters "
                f"in {names}. Convert the module to one dtype, or choose 'ddp' or 'fsdp'."
            )

    def setup_module(self, module: nn.Module, optimization: Optimization | None) -> None:
        self._move(module)
        self.check_module(module, optimization)
        if self.world_size == 1:
            return
        equalize((*module.parameters(), *module.buffers()))
        self._automatic = optimization is None or optimization.automatic
        self.wrapped[module] = module  # so that a raw loop's forward comes here, which broadcasts buffers
        self.buffers.track(module)

    def refresh_trainable(self, modules: Sequence[nn.Module], in_step: bool = False) -> None:
        if in_step:
            return
        for optimizer in self._optimizers.values():
            optimizer.follow_trained()
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
                self.check_optimizer(optimizer)
                dtype = torch.float16 if self.reduce_fp16 else None
                optimizer = ShardedOptimizer(optimizer, self.reduce_buffer_size, dtype)
                self._optimizers[id(optimizer)] = optimizer
            sharded.append(optimizer)
        return sharded

    def run(self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.buffers.begin_step(module)
        return super().run(module, name, args, kwargs)

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        # The gradients of several optimizers, or of a manual step's backwards, are sent before the optimizers step.
        is_last = self._automatic and self.ends_window and len(self._optimizers) == 1
        for optimizer in self._optimizers.values():
            optimizer.begin_backward(is_last)
        super().backward(loss, send, **options)
        for optimizer in self._optimizers.values() if is_last else ():
            optimizer.average()

    def _finalize(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, ShardedOptimizer):
            return super()._finalize(optimizer)
        optimizer.average()
        # Only this rank's gradients count. FairScale's scaler does nothing on the CPU.
        self.precision.unscale(optimizer.own, lambda found: dist.all_reduce(found, op=dist.ReduceOp.MAX))

    def step(
        self, optimizer: Optimizer, clipping: Clipping | None = None, closure: Closure | None = None
    ) -> StepResult:
        if not isinstance(optimizer, ShardedOptimizer):
            return super().step(optimizer, clipping, closure)
        self.finalize(optimizer)
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
        for optimizer in self._optimizers.values():
            optimizer.close()
        super().close()
        self._optimizers.clear()

"""DeepSpeed: optimizer state (stage 1), gradients (2) and parameters (3) sharded over the ranks by DeepSpeed's engine.

Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.arguments import check_flags
from trainwright.checkpoint.tensors import Piece, TensorEntry
from trainwright.distributed.collectives import Exchange, gather_object
from trainwright.duration import seconds_of
from trainwright.precision import resolve_precision
from trainwright.precision.base import Closure, Precision, Sender
from trainwright.precision.mixed import NoFastPath
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies.base import Capabilities, Clipping, Optimization, StepResult, Strategy, call_step
from trainwright.strategies.divided_optimizers import parameters_of, refuse_undivided
from trainwright.strategies.module_checks import refuse_copy, refuse_sparse_weights, refuse_unreplicable, trained
from trainwright.strategies.replaced_options import EVERY, OF_DEEPSPEED, refuse_options
from trainwright.strategies.replication import equalize
from trainwright.strategies.used_parameters import BackwardGuard, are_all_stepped
from trainwright.strategies.zero import deepspeed_config, vendor
from trainwright.strategies.zero.master_optimizer import MasterOptimizer, Shard, allocate, optimizer_pieces
from trainwright.strategies.zero.zero_optimizer import AddedAttributes, Part, ZeroOptimizer, ZeroPrecision
from trainwright.strategies.zero.zero_order import ReductionOrder
from trainwright.strategies.zero.zero_write_back import (
    ZeroWriteBack,
    note_empty_parameter,
    update_masters,
    warn_of_shards,
)
from trainwright.tensor_names import state_entries


class DeepSpeedStrategy(Strategy):
    """ZeRO, by one DeepSpeed engine for one optimizer, on one process too.

    Mixed precisions keep float32 weights and compute under autocast, as on one process. 16-true and bf16-true keep the
    weights in the low dtype and train float32 masters. On the CPU, where DeepSpeed has no float16, bfloat16 replaces it. The
    engine owns the loss scale, clipping by norm and the reduction of gradients. There is one optimizer, which cannot call a
    closure. The trained parameters cannot change once it is prepared. After a backward that failed no step is possible.

    Args:
        stage: 1, 2 or 3, by default the config's, or else 2.
        offload_optimizer: keep the optimizer's state in host memory, and step there.
        offload_parameters: keep the sharded parameters in host memory (stage 3).
        config: DeepSpeed's settings, a dict or the path of a JSON file. They win over the arguments here and the
            Trainer's, with a warning if the two differ.
        timeout: seconds (or a timedelta) that a rank waits for the others, by default half an hour.
        elementwise: accept optimizers that are not known to step every element independently.
        zero: further settings of DeepSpeed's "zero_optimization" section, such as overlap_comm or reduce_bucket_size.

    Raises:
        ImportError: DeepSpeed is not installed.
        ValueError, TypeError: a setting is wrong, or the config contradicts itself.

    >>> strategy = tw.DeepSpeedStrategy(stage=3, reduce_bucket_size=50_000_000, overlap_comm=True)
    >>> trainer = tw.Trainer(strategy=strategy, devices=2, max_epochs=1, enable_model_summary=False)
    >>> trainer.fit(module, loader)
    """

    name = "deepspeed"
    capabilities = Capabilities(
        is_parallel=True,
        needs_group=True,
        holds_modules=False,
        gradients_are_parameters=False,
        divides_optimizers=True,
        keeps_optimizers=False,
        trains_prepared_only=True,
        takes_param_groups=False,
        takes_closure=False,
        distributed_type="DEEPSPEED",
    )

    def __init__(
        self,
        *,
        stage: int | None = None,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        timeout: float | timedelta | None = None,
        elementwise: bool = False,
        **zero: Any,
    ) -> None:
        super().__init__()
        check_flags(elementwise=elementwise)
        self.elementwise = elementwise
        replaced = {name: zero[name] for name in {**EVERY, **OF_DEEPSPEED} if name in zero}
        zero = {name: zero[name] for name in zero if name not in replaced}
        refuse_options(DeepSpeedStrategy, replaced, OF_DEEPSPEED)
        self.timeout_seconds = seconds_of(timeout)
        if importlib.util.find_spec("deepspeed") is None:
            raise ImportError("strategy='deepspeed' needs DeepSpeed. Run: pip install 'trainwright[deepspeed]'")
        self.own_config = deepspeed_config.read_config(config)
        configured = self.own_config.get("zero_optimization", {}).get("stage")
        if stage is not None and configured is not None and configured != stage:
            rank_zero_warn(
                f"the DeepSpeed config says stage={configured}, and the strategy stage={stage}: the config's is used."
            )
        self.stage = configured if configured is not None else 2 if stage is None else stage
        self.name = f"deepspeed_stage_{self.stage}"
        if self.stage not in (1, 2, 3):
            raise ValueError(f"stage={self.stage!r} is not accepted. Choose from 1, 2 and 3 (stage 0 would be ddp).")
        if offload_parameters and self.stage != 3:
            raise ValueError(f"offload_parameters=True needs stage 3, which shards them, not stage {self.stage}.")
        deepspeed_config.refuse_settings({**zero, **self.own_config.get("zero_optimization", {})}, self.stage)
        self._configured_precision = deepspeed_config.low_precision(self.own_config)
        self.offload_optimizer, self.offload_parameters, self.zero = offload_optimizer, offload_parameters, zero
        self.capabilities = replace(
            self.capabilities,
            forward_is_collective=self.stage == 3,
            makes_optimizer="optimizer" in self.own_config,
            takes_compile=self.stage < 3,  # the compiler sees the parameters before they are gathered
        )
        self._engines: dict[ZeroOptimizer, Any] = {}
        self._engine_of: dict[nn.Module, Any] = {}
        self._trained: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._added: list[AddedAttributes] = []
        self._write_back, self._guard = ZeroWriteBack(), BackwardGuard(self.name)
        self._left: dict[Any, list[Shard]] = {}
        """The shards of engines that were taken off their modules, which can still be saved."""

    def check(self, device_type: str, num_processes: int, precision: Precision) -> None:
        super().check(device_type, num_processes, precision)
        deepspeed_config.check_supported(device_type, precision)
        inner = self._inner_precision(device_type, precision)
        if inner is not precision and precision.compute_dtype is not None:
            rank_zero_warn(
                f"the DeepSpeed config says {inner.name}, and the Trainer {precision.name}: the config's is used.",
                stacklevel=4,
            )
        if device_type == "cpu" and (self.offload_optimizer or self.offload_parameters):
            rank_zero_warn("offloading moves tensors from a GPU to the host. This run is on the CPU: nothing is moved.")

    def connect(self, rank: int, world_size: int, device: torch.device, precision: Precision) -> None:
        super().connect(rank, world_size, device, precision)
        inner = self._inner_precision(device.type, precision)
        if device.type == "cpu" and inner.param_dtype == torch.float16:
            # Not in `check`, which warns in the process that launches the job too.
            rank_zero_warn("DeepSpeed has no float16 on the CPU: bfloat16 is used in its place.", stacklevel=4)
            inner = resolve_precision("bf16-true", device.type)
        self.precision = ZeroPrecision(inner, lambda: [each.optimizer.loss_scaler for each in self._engines.values()])

    def _inner_precision(self, device_type: str, precision: Precision) -> Precision:
        """Return the precision, or the config's if that computes in a different dtype."""
        configured = resolve_precision(self._configured_precision or precision, device_type)
        return precision if precision.compute_dtype == configured.compute_dtype else configured

    def resolve(self, optimization: Optimization) -> Optimization:
        return deepspeed_config.resolve(self.own_config, optimization)

    @property
    def _offloads(self) -> bool:
        configured = self.own_config.get("zero_optimization", {}).get("offload_optimizer", {})
        return (self.offload_optimizer and self.device.type != "cpu") or configured.get("device", "none") != "none"

    def check_module(self, module: nn.Module, optimization: Optimization | None) -> None:
        refuse_unreplicable(module, self.name, optimization if self.world_size > 1 else None)
        refuse_sparse_weights(module, self.name, optimization)
        if optimization is not None:
            deepspeed_config.refuse_what_cannot_be_sharded(Part([module]), self.stage)

    def setup_module(self, module: nn.Module, optimization: Optimization | None) -> None:
        self.check_module(module, optimization)
        sharded = {name: p for name, p in module.named_parameters() if hasattr(p, "ds_id")}
        if self.stage < 3 or not sharded:
            self._move(module)
        else:
            vendor.refuse_other_dtype(sharded, self.precision)
        whole = [p for p in module.parameters() if not hasattr(p, "ds_id")]
        equalize((*whole, *module.buffers()))
        self.wrapped[module] = None
        self.buffers.track(module)
        if self.stage == 3 and "__deepcopy__" not in module.__dict__:
            module.register_state_dict_post_hook(warn_of_shards)  # type: ignore[no-untyped-call]
            module.__dict__["__deepcopy__"] = refuse_copy
        if optimization is None and self.stage == 3 and any(True for _ in module.parameters()):
            self._engine_of[module] = self._initialize(Part([module]), None)

    def setup_optimizers(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], optimization: Optimization
    ) -> list[Optimizer]:
        may_wait = self.stage == 3 and self.world_size > 1
        self._guard.watch(may_wait and optimization.automatic and are_all_stepped(modules, optimizers))
        for module in modules:
            self._trained.setdefault(module, trained(module))
        if not optimizers and not self._engines and self.capabilities.makes_optimizer:
            own = [p for module in modules for p in module.parameters() if p.requires_grad]
            engine = self._initialize(Part(modules), None, own)
            return [self._take(engine.optimizer.optimizer, engine, modules)]
        if optimizers and self.capabilities.makes_optimizer:
            raise ValueError(
                "configure_optimizers returned an optimizer, and the DeepSpeed config has an 'optimizer' section. Return None "
                "to use the config's, or omit it in the config."
            )
        if len(optimizers) > 1:
            raise ValueError(
                f"strategy={self.name!r} trains one optimizer, and was given {len(optimizers)}. Use one optimizer with "
                "several parameter groups, or choose 'ddp', 'ddp_sharded' or 'fsdp', which train several."
            )
        # A module may override parameters().
        held = {each: {own for _, own in nn.Module.named_parameters(each)} for each in modules}
        for optimizer in (each for each in optimizers if each not in self._engines):
            self.check_optimizer(optimizer)
            deepspeed_config.refuse_strangers(optimizer, set().union(*held.values()))
            owners = [module for module in modules if not held[module].isdisjoint(parameters_of(optimizer))]
            master = MasterOptimizer(optimizer)
            self._take(master, self._initialize(Part(owners), master), owners)
        return list(self._engines)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        accepts_unknown = self.elementwise or self.own_config.get("zero_allow_untested_optimizer") is True
        refuse_undivided(optimizer, self.name, accepts_unknown)

    def _take(self, master: MasterOptimizer, engine: Any, owners: Sequence[nn.Module]) -> ZeroOptimizer:
        zero = engine.optimizer
        vendor.refuse_plain_backward(zero, lambda: self._guard.is_running, self.name)
        order = ReductionOrder(zero, engine.module.named_parameters(), self.stage)
        master.attach(vendor.shards_of(zero, self.stage, self.rank))
        refresh = partial(vendor.refresh_from_masters, zero, self.stage)
        facade = ZeroOptimizer(master, engine, order, self._write_back.run, refresh)
        self._engines[facade] = engine
        self._engine_of.update(dict.fromkeys(owners, engine))
        return facade

    def _initialize(self, part: Part, optimizer: MasterOptimizer | None, trained: Any = None) -> Any:
        self._added.append(AddedAttributes(part.members))
        with self._added[-1]:
            on_gpu = self.device.type != "cpu"
            config = deepspeed_config.build_config(
                self.own_config,
                self.stage,
                precision=self.precision,
                offload_optimizer=self.offload_optimizer and on_gpu,
                offload_parameters=self.offload_parameters and on_gpu,
                parameters=part.parameters(),
                **self.zero,
            )
            deepspeed_config.refuse_what_cannot_be_sharded(part, self.stage)
            engine = vendor.make_engine(part, optimizer, trained, config, self.device, self.check_optimizer)
        self._write_back.track(engine.optimizer, self.stage, self.rank, part, self.wrapped)
        if self.precision.autocast_dtype == torch.float16 and (optimizer is not None or trained is not None):
            vendor.scale_losses(engine)
        return engine

    def refresh_trainable(self, modules: Sequence[nn.Module], in_step: bool = False) -> None:
        """Raise RuntimeError if other parameters are trained now, because DeepSpeed's buffers are fixed."""
        for module in () if in_step else modules:
            self.buffers.track(module)
            deepspeed_config.refuse_other_parameters(module, self._trained.get(module))

    def run(self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Attention's fast path is off in stage 3: it reads parameters that are not gathered."""
        step: Callable[[], Any] = partial(call_step, module, name, args, kwargs)
        self.buffers.begin_step(module)
        self._write_back.check()
        self._guard.begin(name)
        if (engine := self._engine_of.get(module)) is not None:
            # Not engine(...), which hooks its prologue on the step's output: a manual backward runs before there is one.
            step = partial(engine.module, step)
        with self.precision.forward_context() or nullcontext(), NoFastPath() if self.stage == 3 else nullcontext():
            return step()

    def backward(self, loss: Tensor, send: Sender | None = None, **options: Any) -> None:
        self._guard.refuse_failed()
        for facade in self._engines:
            loss = facade.begin_backward(loss)
        with self._guard.backward(lambda: any(facade.has_ended for facade in self._engines)):
            super().backward(loss, send, **options)
        for facade in self._engines:
            facade.end_backward()

    def _finalize(self, optimizer: Optimizer) -> None:
        if not self._offloads:  # offloaded gradients are reduced in DeepSpeed's step only
            vendor.finalize_gradients(_prepared(optimizer).engine, self.stage)

    def step(
        self, optimizer: Optimizer, clipping: Clipping | None = None, closure: Closure | None = None
    ) -> StepResult:
        self._guard.refuse_failed()
        facade = _prepared(optimizer)
        engine, master, zero = facade.engine, facade.master, facade.engine.optimizer
        vendor.fill_missing_gradients(zero, self.stage)
        self._write_back.run()
        norm = 0.0
        if clipping is not None:
            if clipping.value is not None or clipping.scale != 1.0:
                self.clip_gradients(facade, clipping._replace(norm=None))
            # The engine clips by norm, which it computes anyway, before the deferred rescaling of offloaded gradients.
            norm = (clipping.norm or 0.0) / master.rescale
        with self.precision.step_context():
            total, skipped = vendor.step_engine(engine, norm, self._offloads or not self.finalized.get(facade))
        total = None if total is None else torch.as_tensor(total) * master.rescale
        self.finalized.pop(facade, None)
        master.clear()
        return StepResult(total, skipped)

    def clip_gradients(self, optimizer: Optimizer, clipping: Clipping) -> Tensor | None:
        facade = _prepared(optimizer)
        self.finalize(facade)
        if self._offloads and (clipping.norm is not None or clipping.value is not None):
            raise RuntimeError(
                "under offloading DeepSpeed keeps gradients where they cannot be clipped before its step. Clip by norm, by the "
                "Trainer's gradient_clip_val, or do not offload."
            )
        if self._offloads:
            facade.master.rescale *= clipping.scale
            return None
        return vendor.clip_gradients(facade.engine.optimizer, clipping, self.device)

    def gradient_norm(self, optimizer: Optimizer) -> Tensor | None:
        if self._offloads:
            raise RuntimeError(
                "under offloading DeepSpeed keeps gradients where they cannot be read before its step, so no step can be "
                "skipped. Pass nan_policy='raise', or do not offload."
            )
        return super().gradient_norm(optimizer)

    def check_gradients(self, exchange: Exchange = gather_object) -> None:
        for facade in self._engines:
            facade.order.compare(exchange)

    def model_pieces(self, module: nn.Module) -> list[Piece]:
        self._write_back.run()
        update_masters(shard for shards in self._left.values() for shard in shards)
        shards = {shard.parameter: shard for engine in self._engines.values() for shard in self._shards(engine)}
        pieces = []
        for name, value, _ in state_entries(module):
            if (shard := shards.get(value)) is not None:
                part = shard.flat.detach().narrow(0, shard.offset, shard.numel)
                pieces.append(Piece(name, shard.shape, shard.start, part, self.rank))
            elif hasattr(value, "ds_id"):  # not trained, so its partition counts, not a float32 master
                pieces.append(vendor.partition_piece(name, value, self.rank))
            else:
                writer = None if isinstance(value, nn.Parameter) else 0
                pieces.append(self._piece(name, value, writer))
        return pieces

    def optimizer_pieces(self, optimizer: Optimizer, names: Mapping[Tensor, str]) -> list[Piece]:
        return list(optimizer_pieces(_prepared(optimizer).master, names, self.rank))

    def allocate_optimizer_state(
        self, optimizer: Optimizer, names: Mapping[Tensor, str], entries: Mapping[str, TensorEntry]
    ) -> None:
        allocate(_prepared(optimizer).master, names, entries)

    def _local_parameters(self, optimizer: Optimizer) -> Iterable[Tensor]:
        return _prepared(optimizer).master.views

    def refresh_weights(self, modules: Sequence[nn.Module], loaded: Mapping[str, Any] | None = None) -> None:
        stepped = {shard.parameter for engine in self._engines.values() for shard in self._shards(engine)}
        vendor.refresh(p for module in modules for p in module.parameters() if p not in stepped)
        for engine in self._engines.values():
            vendor.refresh_from_masters(engine.optimizer, self.stage)
        for engine, saved in zip(self._engines.values(), (loaded or {}).get("lr_schedulers", []), strict=False):
            if engine.lr_scheduler is not None and saved is not None:
                engine.lr_scheduler.load_state_dict(saved)
        for facade, indices in zip(self._engines, (loaded or {}).get("reduction_orders", []), strict=False):
            facade.order.replay(indices)

    @property
    def state(self) -> dict[str, Any]:
        saved = [each.lr_scheduler and each.lr_scheduler.state_dict() for each in self._engines.values()]
        return {"lr_schedulers": saved, "reduction_orders": [each.order.indices for each in self._engines]}

    def _shards(self, engine: Any) -> Iterable[Shard]:
        left = self._left.get(engine)
        return vendor.shards_of(engine.optimizer, self.stage, self.rank) if left is None else left

    def after_run(self, error: BaseException | None = None) -> None:
        if error is not None:
            note_empty_parameter(error, self.stage)
        self._write_back.run(refuses=error is None)
        if self.stage < 3:  # a module of stage 3 can still be called, and its engine gathers it
            self._left = {engine: list(self._shards(engine)) for engine in self._engines.values()}
            self._detach()
        else:
            vendor.end_training(self._engine_of.values())

    def _detach(self) -> None:
        """Take the engines off the modules, which stay sharded in stage 3."""
        vendor.destroy(self._engine_of.values())
        for facade in self._engines:
            facade.master.close()
        for added in reversed(self._added):
            added.remove()
        for each in (self._engine_of, self._added, self._write_back):
            each.clear()

    def close(self) -> None:
        self._detach()
        for facade in self._engines:
            facade.master.release(self.name)
        super().close()
        self._guard = BackwardGuard(self.name)
        for each in (self._engines, self._left, self._trained):
            each.clear()


def _prepared(optimizer: Optimizer) -> ZeroOptimizer:
    assert isinstance(optimizer, ZeroOptimizer)
    return optimizer

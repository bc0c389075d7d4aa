"""Module: the class that users subclass. It defines the computation of a step. The Trainer decides when and where."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.optim import Optimizer

from trainwright.checkpoint.conversion import export_tensors
from trainwright.checkpoint.editing import load_state, with_base
from trainwright.checkpoint.foreign_formats import read_weights
from trainwright.checkpoint.reader import Verify
from trainwright.data.transfer import map_leaves, to_device
from trainwright.distributed import collectives
from trainwright.errors import a_type_of
from trainwright.hyperparameters import HyperParameters, build, classonly, read_hyper_parameters
from trainwright.module_hooks import AnyTrainer, ModuleHooks
from trainwright.rank_zero import rank_zero_only, warn
from trainwright.tensor_names import register_clean_names
from trainwright.value_kinds import is_collection, is_dtensor

if TYPE_CHECKING:
    from trainwright import Trainer
    from trainwright.loggers.base import Logger

Self = TypeVar("Self", bound="Module")


class Module(HyperParameters, ModuleHooks, nn.Module):
    """A torch module with the steps and the optimizers of its training.

    Override `training_step` and `configure_optimizers`, and any other method as needed. A step is called with the batch on its
    device, the batch's index within the epoch, and with several loaders the loader's index. It may take only the first, or the
    first two.

    >>> class Classifier(tw.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = nn.Linear(4, 3)
    ...
    ...     def training_step(self, batch):
    ...         return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
    ...
    ...     def configure_optimizers(self):
    ...         return torch.optim.SGD(self.parameters(), lr=0.1)
    """

    automatic_optimization = True
    """False: training_step calls `manual_backward` and steps the optimizers that `optimizers()` returns."""
    strict_loading = True
    """False: a checkpoint may lack tensors of this module, or have others."""
    prepare_data_per_node = True
    """False: `prepare_data` runs once in the job instead of once per node."""
    example_input_array: Any = None
    """An input of `forward`, for the summary's shapes, the logger's graph and `to_onnx`."""

    def __init__(self) -> None:
        super().__init__()
        self._trainer: AnyTrainer = None
        self._toggled: dict[Tensor, bool] = {}
        register_clean_names(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | dict[str, Any] | None:
        """Return the loss of one batch: a tensor of one element, or a dict that holds it under "loss"."""
        raise RuntimeError(f"{type(self).__name__} has no training_step. Define it to call trainer.fit.")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one batch during fit and `trainer.validate`. Log its metrics."""
        raise RuntimeError(f"{type(self).__name__} has no validation_step. Define it to call trainer.validate.")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one batch in `trainer.test`."""
        raise RuntimeError(f"{type(self).__name__} has no test_step. Define it to call trainer.test.")

    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the predictions of one batch, for `trainer.predict`. By default it calls `forward`."""
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Return the optimizer, or (optimizers, schedulers), or a dict with "optimizer" and "lr_scheduler"."""
        raise RuntimeError(f"{type(self).__name__} has no configure_optimizers. Define it to call trainer.fit.")

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward on a loss, already multiplied by the precision's loss scale. Override it to change how."""
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Step the optimizer with the clipped gradients of a window. Override it to step differently, or not at all.

        The closure's first call returns their loss. Later calls recompute the window, for optimizers such as LBFGS.
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear the gradients at a window's start."""
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients before a step. Override it to clip differently. The values are the Trainer's."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a scheduler. `metric` is the value of its monitor, or None."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a number under a name, to the loggers, the progress bar, and callbacks that monitor it.

        Args:
            name: the metric's name; with on_step and on_epoch both, it is logged as name_step and name_epoch.
            value: a number, a tensor of one element (it stays on its device until it is read), a torchmetrics Metric that is
                an attribute of this module (computed and reset when the epoch ends), or a flat dict of these, which are
                logged as name/key.
            prog_bar, logger: whether the progress bar and the loggers show it.
            on_step: log the value of every step, the default in training_step.
            on_epoch: log the reduction over the epoch and all ranks, the default elsewhere.
            reduce_fx: "mean" (weighted by batch_size), "sum", "min" or "max".
            enable_graph: keep the graph of the latest value.
            sync_dist: has no effect: epoch values are exact over all ranks, step values are local.
            sync_dist_group: only None is accepted, since values are reduced over all ranks.
            add_dataloader_idx: with several loaders, add the loader to the name.
            batch_size: samples behind this value, by default found in the batch.
            metric_attribute: the name of the attribute that holds the Metric, if it cannot be found.
            rank_zero_only: log only rank 0's value. Such a value cannot be monitored.

        Raises:
            RuntimeError: called in a hook that cannot log.
            ValueError: an unknown reduce_fx, a tensor of several elements, a name logged in two different ways.
        """
        settings = (
            prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, sync_dist_group, add_dataloader_idx,
            metric_attribute, rank_zero_only,
        )  # fmt: skip
        if is_compiling():  # within a graph: one break here, instead of one at every line below
            torch.compiler.disable(Module.log)(self, name, value, *settings[:-2], batch_size, *settings[-2:])  # type: ignore[no-untyped-call]
            return
        trainer = self._trainer
        if trainer is None:
            warn(
                f"self.log does nothing here: {type(self).__name__} is attached to no trainer, which trainer.fit, "
                "trainer.validate, trainer.test and trainer.predict do.",
                stacklevel=2,
            )
            return
        collector = trainer.run.logbook.collector
        if collector is None:
            raise RuntimeError(
                f"self.log({name!r}, ...) was called where nothing is collected. Log in a step, or in a hook "
                "from the start of an epoch to its end."
            )
        collector.log(name, value, settings, batch_size)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log the values of a flat dict, or the metrics of a MetricCollection. `log` describes the other arguments."""
        items: Callable[..., Any] = dictionary.items
        for name, value in items(keep_base=False, copy_state=False) if is_collection(dictionary) else items():
            self.log(name, value, *args, **kwargs)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list of several, for manual optimization. `use_pl_optimizer=False`: the original ones."""
        trainer = self.trainer
        optimizers = trainer.run.trained.prepared_optimizers if use_pl_optimizer else trainer.optimizers
        return optimizers[0] if len(optimizers) == 1 else list(optimizers)

    def lr_schedulers(self) -> Any:
        """Return the scheduler, or a list of several, for manual optimization, or None if there is none."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not schedulers else schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward on a loss under manual optimization. `Tensor.backward` gets the other arguments."""
        if self.automatic_optimization:
            raise RuntimeError(
                f"manual_backward was called, but {type(self).__name__}.automatic_optimization is True, so the Trainer runs "
                "backward on the loss that training_step returns. Return it, or set automatic_optimization = False."
            )
        if not isinstance(loss, Tensor):
            raise TypeError(f"manual_backward was given {a_type_of(loss)}. Expected a loss tensor.")
        names = ("gradient", "retain_graph", "create_graph", "inputs")  # of Tensor.backward, in its order
        options = {**dict(zip(names, args, strict=False)), **kwargs}
        send = self.backward if is_overridden("backward", self, Module) else None
        self.trainer.run.backward(loss, send, options)

    def clip_gradients(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of one optimizer, by "norm" (the default) or by "value". It does nothing without a limit."""
        self.trainer.run.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def toggle_optimizer(self, optimizer: Optimizer) -> None:
        """Freeze the parameters of all other optimizers until `untoggle_optimizer`."""
        self.untoggle_optimizer(optimizer)  # of an optimizer that was toggled before
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        groups = [group for each in self.trainer.optimizers for group in each.param_groups]
        for parameter in (parameter for group in groups for parameter in group["params"]):
            if parameter not in own and parameter not in self._toggled:
                self._toggled[parameter] = parameter.requires_grad
                parameter.requires_grad = False
        self.trainer.strategy.refresh_trainable((), in_step=True)

    def untoggle_optimizer(self, optimizer: Optimizer | None = None) -> None:
        """Undo `toggle_optimizer`."""
        if not self._toggled:
            return
        for parameter, required in self._toggled.items():
            parameter.requires_grad = required
        self._toggled.clear()
        self.trainer.strategy.refresh_trainable((), in_step=True)

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer) -> Iterator[None]:
        """Freeze the parameters of all other optimizers within the block."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return a nested structure with the tensors of all ranks, stacked along a new first dimension.

        Numbers become tensors. One process returns tensors unchanged. If the last round leaves some ranks with fewer samples,
        they repeat some of their rows, with a warning. Collective: call on every rank, with equal shapes.

        Args:
            data: tensors and numbers, or a nested structure of them.
            group: only None is accepted: all ranks of the job take part.
            sync_grads: let gradients flow back to the tensors' ranks.
        """
        if group is not None:
            raise ValueError("all_gather was given a group. Expected None: all ranks of the job take part.")
        collector = self.trainer.run.logbook.collector
        is_uneven = collector is not None and collector.batch is not None and collector.is_uneven
        on_uneven = collector.warn_of_rows if collector is not None and is_uneven else None

        def joined(leaf: Any) -> Any:
            if isinstance(leaf, (int, float)):
                leaf = torch.tensor(leaf, device=self.device)
            return collectives.gather_stacked(leaf, sync_grads, on_uneven) if isinstance(leaf, Tensor) else leaf

        return map_leaves(joined, data)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0 only."""
        self.trainer.print(*args, **kwargs)

    def freeze(self: Self) -> Self:
        """Let no parameter require gradients, and switch to evaluation mode."""
        return self.requires_grad_(False).eval()

    def unfreeze(self: Self) -> Self:
        """Let every parameter require gradients, and switch to training mode."""
        return self.requires_grad_(True).train()

    @classonly
    def load_from_checkpoint(
        cls: type[Self],
        checkpoint_path: str,
        map_location: Any = None,
        hparams_file: str | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        verify: Verify = "full",
        **kwargs: Any,
    ) -> Self:
        """Return a new module with the weights of a checkpoint, constructed with the hyper-parameters in it.

        Args:
            checkpoint_path: a checkpoint of a Trainer, of any strategy and number of processes, a Lightning `.ckpt` file,
                a file with a state_dict, or a safetensors file.
            map_location: the device to put the module on, by default the CPU, or as in torch.load a function of a storage and
                its location, which is on the CPU.
            hparams_file: a JSON or YAML file with hyper-parameters, to use instead of those in the checkpoint.
            strict: refuse a checkpoint that lacks tensors, or has others, by default the module's strict_loading.
            weights_only: has no effect: only plain data and tensors are ever read.
            verify: how a checkpoint of a Trainer is verified first: "full" (every digest), "size", or "off".
            kwargs: arguments of the constructor, which override the saved ones. Others are dropped with a warning.

        Raises:
            CheckpointError: no checkpoint, a damaged one, one of another model, or one with more than plain data and tensors.
            TypeError: the constructor needs an argument that was not saved.
        """
        weights = read_weights(str(checkpoint_path), verify)
        stored, forms = weights.hyper_parameters, weights.hyper_parameter_forms
        if hparams_file is not None:
            stored, forms = read_hyper_parameters(hparams_file), {}
        module = build(cls, stored, kwargs, weights.hparams_name, forms)
        module.configure_model()  # the layers that it makes are in the checkpoint
        contents = {**weights.contents, "state_dict": weights.state_dict}
        module.on_load_checkpoint(contents)
        is_strict = module.strict_loading if strict is None else strict
        path = str(checkpoint_path)
        state = with_base(module, contents["state_dict"], is_strict, path, weights.frozen_base)
        load_state(module, state, is_strict, path)
        return module if map_location is None else module.to(_device_of(map_location))

    def export(
        self, file_path: str | os.PathLike[str], *, strip_prefix: str = "", dtype: torch.dtype | None = None
    ) -> None:
        """Write the weights as one safetensors file that other libraries read, on rank 0, as `checkpoint export` does.

        Args:
            file_path: a local path that ends in .safetensors and does not exist yet.
            strip_prefix: write only the tensors whose names begin with this, without it.
            dtype: the dtype to convert floating-point tensors to.
        """
        if any(is_dtensor(each) or hasattr(each, "ds_id") for each in self.parameters()):
            raise ValueError(
                f"the weights of {type(self).__name__} are divided over the ranks. Export the result of "
                "tw.gather_module(module), or use `trainwright checkpoint export`."
            )
        if rank_zero_only.rank == 0:
            export_tensors(self.state_dict(), os.fspath(file_path), strip_prefix=strip_prefix, dtype=dtype)

    def to_onnx(self, file_path: Any = None, input_sample: Any = None, **kwargs: Any) -> Any:
        """Export `forward` in evaluation mode as an ONNX file. torch.onnx.export gets the keyword arguments."""
        sample = self.example_input_array if input_sample is None else input_sample
        if sample is None:
            raise ValueError("to_onnx has no input: pass input_sample=, or set example_input_array on the module.")
        sample = to_device(sample, self.device)
        was_training = {child: child.training for child in self.modules()}
        self.eval()
        try:
            with torch.no_grad():
                return torch.onnx.export(self, sample if isinstance(sample, tuple) else (sample,), file_path, **kwargs)
        finally:
            for child, training in was_training.items():  # one by one, because train() would change all children
                child.training = training

    @property
    def trainer(self) -> Trainer:
        """Return the trainer that runs this module (RuntimeError outside of a run)."""
        if self._trainer is None:
            raise RuntimeError(
                f"{type(self).__name__} is attached to no trainer. Use self.trainer inside trainer.fit, "
                "trainer.validate, trainer.test and trainer.predict only."
            )
        return self._trainer  # type: ignore[no-any-return]

    @trainer.setter
    def trainer(self, trainer: AnyTrainer) -> None:
        for child in self.modules():
            if isinstance(child, Module):
                child._trainer = trainer

    @property
    def device_mesh(self) -> Any:
        """Return the mesh of `FSDPStrategy(mesh={"data": 2, "tensor": 2})`, or None if the strategy has none."""
        return None if self._trainer is None else self._trainer.strategy.device_mesh

    @property
    def device(self) -> torch.device:
        """Return the device of the first parameter, or the CPU if there is none."""
        parameter = next(self.parameters(), None)
        return parameter.device if parameter is not None else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the first floating-point parameter, or torch's default if there is none."""
        return next((each.dtype for each in self.parameters() if each.is_floating_point()), torch.get_default_dtype())

    @property
    def on_gpu(self) -> bool:
        """Return whether this module is on an accelerator, a GPU or another."""
        return self.device.type not in ("cpu", "meta")

    @property
    def current_epoch(self) -> int:
        """Return the current epoch, counted from 0, or 0 outside of a run."""
        return self._trainer.current_epoch if self._trainer is not None else 0

    @property
    def global_step(self) -> int:
        """Return the number of optimizer steps made, or 0 outside of a run."""
        return self._trainer.global_step if self._trainer is not None else 0

    @property
    def global_rank(self) -> int:
        """Return this process's rank in the job, or 0 outside of a run."""
        return self._trainer.global_rank if self._trainer is not None else 0

    @property
    def local_rank(self) -> int:
        """Return this process's rank on its node, or 0 outside of a run."""
        return self._trainer.local_rank if self._trainer is not None else 0

    @property
    def logger(self) -> Logger | None:
        """Return the trainer's first logger, or None."""
        return self._trainer.logger if self._trainer is not None else None

    @property
    def loggers(self) -> list[Logger]:
        """Return the trainer's loggers."""
        return list(self._trainer.loggers) if self._trainer is not None else []

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle contains only the module, not its run.
        return {**self.__dict__, "_trainer": None, "_toggled": {}}


def _device_of(location: Any) -> torch.device:
    if isinstance(location, dict):
        raise TypeError(f"map_location={location!r} is not accepted; pass one device, to which the module is moved.")
    return torch.device(location(torch.empty(0).untyped_storage(), "cpu").device if callable(location) else location)


def trainer_of(module: Module) -> AnyTrainer:
    """Return the Trainer that runs a module or has run it last, or None if none has."""
    return module._trainer


def is_overridden(method: str, owner: object, base: type) -> bool:
    """Return whether the owner's class, or the owner itself, overrides a method of the base class. None switches it off."""
    own = vars(owner)[method] if method in vars(owner) else getattr(type(owner), method, None)
    return own is not None and own is not getattr(base, method)


def hook_of(owner: object, method: str, base: type) -> Callable[..., Any]:
    """Return a hook of the owner, or the base class's if the owner has set it to None."""
    hook: Callable[..., Any] = getattr(owner, method)
    return hook if hook is not None else getattr(base, method).__get__(owner)

"""BaseFinetuning and BackboneFinetuning: train a part of a module first, and unfreeze the rest later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR
from torch.optim.swa_utils import SWALR

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.base import Callback
from trainwright.rank_zero import warn
from trainwright.tensor_names import clean_name, names_of

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer

PLANNED = (CyclicLR, OneCycleLR, SWALR)
"""Schedulers that keep the goal of every group's rate."""
Modules = nn.Module | Iterable["Modules"]


def multiplicative(epoch: int) -> float:
    """Return 2.0: the default factor of the backbone's learning rate from one epoch to the next."""
    return 2.0


class BaseFinetuning(Callback):
    """Freezes parts of a module before training, and unfreezes them at epochs of your choice.

    Override `freeze_before_training` and `finetune_function`. A resumed run has the same groups, parameters that train, and
    batch norms that collect statistics as the run that was saved. configure_optimizers passes the parameters that train then:
    `torch.optim.SGD(filter(lambda each: each.requires_grad, self.parameters()), lr=0.1)`.

    A scheduler treats a new group as if it had begun with the group's rate. LambdaLR and MultiplicativeLR use their last
    function for it.

    Raises:
        ValueError: before training, under a strategy whose optimizers take no further groups (ddp_sharded, deepspeed), or with
            a scheduler that plans every group from the beginning (OneCycleLR, CyclicLR, SWALR).

    >>> class Unfreeze(tw.callbacks.BaseFinetuning):
    ...     def freeze_before_training(self, module):
    ...         self.freeze(module.backbone)
    ...
    ...     def finetune_function(self, module, epoch, optimizer):
    ...         if epoch == 5:
    ...             self.unfreeze_and_add_param_group(module.backbone, optimizer, lr=1e-4)
    """

    adds_param_groups = True
    """Whether finetune_function adds groups to the optimizers. False in a subclass that only unfreezes."""
    reads_outputs = False

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._groups: dict[int, list[dict[str, Any]]] = {}
        """By optimizer, the groups that were added: the names of their parameters, and their plain options."""
        self._trainable: list[str] = []
        self._tracking: list[str] = []
        """The batch norms that collect statistics."""
        self._epoch = -1
        """The latest epoch that finetune_function was called for."""
        self._optimizer_index = 0
        """The number of the optimizer that finetune_function is called with."""

    def freeze_before_training(self, pl_module: Module) -> None:
        """Freeze the layers that do not train at the start. Called in setup."""
        raise NotImplementedError("Override freeze_before_training, such as with self.freeze(pl_module.backbone).")

    def finetune_function(self, pl_module: Module, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze the layers that train from this epoch on. Called at the start of every epoch, for every optimizer."""
        raise NotImplementedError("Override finetune_function, such as with self.unfreeze_and_add_param_group(...).")

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return the modules that hold parameters or have no children, each once, of a module or nested iterables."""
        if isinstance(modules, nn.Module):
            leaves = [m for m in modules.modules() if not list(m.children()) or list(m.parameters(recurse=False))]
        else:
            leaves = [leaf for each in modules for leaf in BaseFinetuning.flatten_modules(each)]
        return list(dict.fromkeys(leaves))

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters that do (or do not) require gradients, without batch norms' unless `train_bn`."""
        for module in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(module, _BatchNorm):
                yield from (each for each in module.parameters(recurse=False) if each.requires_grad == requires_grad)

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Let all parameters require gradients, and batch norms collect statistics."""
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, _BatchNorm):
                module.track_running_stats = True
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad = True

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the parameters of one module. A batch norm collects no statistics."""
        if isinstance(module, _BatchNorm):
            module.track_running_stats = False
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad = False

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze modules. Batch norms stay trainable with `train_bn`."""
        for module in BaseFinetuning.flatten_modules(modules):
            if train_bn and isinstance(module, _BatchNorm):
                BaseFinetuning.make_trainable(module)
            else:
                BaseFinetuning.freeze_module(module)

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that an optimizer does not have yet, and warn of the others."""
        present = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        given = list(params)
        new = [parameter for parameter in given if parameter not in present]
        if len(new) < len(given):
            warn(
                f"{len(given) - len(new)} of the {len(given)} parameters to unfreeze are in the optimizer already, and keep "
                "the learning rate that they have there. Pass only those that require gradients in configure_optimizers.",
                stacklevel=3,
            )
        return new

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze modules, and add their parameters to an optimizer as a new group.

        Args:
            modules: the modules to unfreeze.
            optimizer: the optimizer that finetune_function was given.
            lr: the group's learning rate, or None for the first group's, divided by `initial_denom_lr`.
            initial_denom_lr: divides the first group's rate if lr is None.
            train_bn: False leaves batch norms' parameters as they are.
        """
        trained = {*BaseFinetuning.filter_params(modules)}
        BaseFinetuning.make_trainable(modules)
        if not train_bn:
            norms = [layer for layer in BaseFinetuning.flatten_modules(modules) if isinstance(layer, _BatchNorm)]
            for parameter in {*BaseFinetuning.filter_params(norms)} - trained:
                parameter.requires_grad = False
        rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
        present = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        wanted = BaseFinetuning.filter_params(modules, train_bn=train_bn)
        unfrozen = [each for each in wanted if each not in trained & present]  # batch norms may have trained all along
        if new := BaseFinetuning.filter_on_optimizer(optimizer, unfrozen):
            optimizer.add_param_group({"params": new, "lr": rate})

    def state_dict(self) -> dict[str, Any]:
        groups = {str(index): added for index, added in self._groups.items()}
        return {"groups": groups, "trainable": self._trainable, "tracking": self._tracking, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._groups = {int(index): added for index, added in state["groups"].items()}
        self._trainable, self._tracking = list(state["trainable"]), list(state["tracking"])
        self._epoch = int(state["epoch"])

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        if stage != "fit":
            return
        if self.adds_param_groups and not trainer.strategy.capabilities.takes_param_groups:
            raise ValueError(
                f"{type(self).__name__} adds parameter groups during training, which strategy {trainer.strategy.name!r} does "
                "not take: its layout is fixed when training begins. Use 'ddp' or 'fsdp'; or put all parameters into groups in "
                "configure_optimizers, let finetune_function only call make_trainable, and set adds_param_groups = False."
            )
        self._begin()
        self.freeze_before_training(module)

    def on_fit_start(self, trainer: AnyTrainer, module: Module) -> None:
        """Bring a resumed run's groups back, before its optimizers' state is loaded."""
        if self.adds_param_groups:
            for config in trainer.lr_scheduler_configs:
                _refuse_planned(type(self).__name__, config.scheduler)
        if self._epoch < 0:
            return
        named, trainable = {name: each for each, name in names_of(module).items()}, set(self._trainable)
        for name, parameter in named.items():
            if isinstance(parameter, nn.Parameter):
                parameter.requires_grad = name in trainable
        for name, each in module.named_modules():
            if isinstance(each, _BatchNorm):
                each.track_running_stats = clean_name(name) in self._tracking
        for index, optimizer in enumerate(trainer.optimizers):
            for group in self._groups.get(index, []):
                optimizer.add_param_group({**group["options"], "params": [named[name] for name in group["names"]]})
                self._tell_schedulers(trainer, optimizer, [optimizer.param_groups[-1]])

    def on_train_epoch_start(self, trainer: AnyTrainer, module: Module) -> None:
        epoch = trainer.current_epoch
        if epoch == self._epoch:  # resumed within it
            return
        names = names_of(module)
        for index, optimizer in enumerate(trainer.optimizers):
            before = len(optimizer.param_groups)
            self._optimizer_index = index
            self.finetune_function(module, epoch, optimizer)
            self._tell_schedulers(trainer, optimizer, optimizer.param_groups[before:])
            for group in optimizer.param_groups[before:]:
                options = {key: value for key, value in group.items() if isinstance(value, (int, float, str, bool))}
                added = {"names": [names[each] for each in group["params"]], "options": options}
                self._groups.setdefault(index, []).append(added)
        self._epoch = epoch
        self._trainable = [name for parameter, name in names.items() if parameter.requires_grad]
        norms = ((name, each) for name, each in module.named_modules() if isinstance(each, _BatchNorm))
        self._tracking = [clean_name(name) for name, each in norms if each.track_running_stats]

    def _tell_schedulers(self, trainer: TrainerProtocol, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        """Let the schedulers of an optimizer set the rates of new groups too."""
        for config in trainer.lr_scheduler_configs if groups else ():
            if config.is_of(optimizer):
                for scheduler in _parts_of(config.scheduler):
                    if hasattr(scheduler, "base_lrs"):
                        scheduler.base_lrs += [group["lr"] for group in groups]
                    if hasattr(scheduler, "lr_lambdas"):
                        scheduler.lr_lambdas += scheduler.lr_lambdas[-1:] * len(groups)


def _parts_of(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for value in vars(scheduler).values():
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, LRScheduler):
                yield from _parts_of(part)


def _refuse_planned(callback: str, scheduler: Any) -> None:
    """Refuse a scheduler that says for every group of the beginning where its rate goes (ValueError)."""
    for part in _parts_of(scheduler):
        if isinstance(part, PLANNED):
            raise ValueError(
                f"{callback} adds parameter groups during training, and {type(part).__name__} has settings for each group of "
                "the beginning. Use another scheduler, such as LambdaLR or CosineAnnealingLR; or put all parameters into "
                "groups in configure_optimizers, let finetune_function only call make_trainable, and set adds_param_groups = "
                "False."
            )


class BackboneFinetuning(BaseFinetuning):
    """Trains only the head at first, then the `backbone` too, at a learning rate that grows to the head's.

    The module has its pretrained part as `self.backbone`.

    Args:
        unfreeze_backbone_at_epoch: the first epoch in which the backbone trains.
        lambda_func: returns the factor of the backbone's rate for an epoch.
        backbone_initial_ratio_lr: the backbone's first rate as a fraction of the head's, without `backbone_initial_lr`.
        backbone_initial_lr: the backbone's first rate.
        should_align: True keeps the backbone's rate at or below the head's. It is the rate of the groups that this callback
            adds: parameters that the optimizer holds already keep theirs.
        initial_denom_lr: accepted without effect, because the backbone's first rate is always known.
        train_bn: train the backbone's batch norms, also while it is frozen. False never trains them.
        verbose: print both rates at every epoch.
        rounding: digits of the printed rates.

    Raises:
        TypeError: from fit, if the module has no `backbone`.

    >>> class Tuned(Classifier):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.backbone = self.net[0]
    ...
    ...     def configure_optimizers(self):
    ...         return torch.optim.SGD((each for each in self.parameters() if each.requires_grad), lr=0.1)
    >>> unfreezing = tw.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.001)
    >>> trainer = tw.Trainer(callbacks=unfreezing, max_epochs=2, enable_model_summary=False)
    >>> trainer.fit(Tuned(), loader)
    >>> [group["lr"] for group in trainer.optimizers[0].param_groups]
    [0.1, 0.001]
    """

    @refuses_unknown
    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 10e-2,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        self.unfreeze_backbone_at_epoch, self.lambda_func = unfreeze_backbone_at_epoch, lambda_func
        self.backbone_initial_ratio_lr, self.backbone_initial_lr = backbone_initial_ratio_lr, backbone_initial_lr
        self.should_align, self.initial_denom_lr, self.train_bn = should_align, initial_denom_lr, train_bn
        self.verbose, self.rounding = verbose, rounding
        self.previous_backbone_lr: dict[int, float] = {}
        """By optimizer to which the backbone was added, its rate in the latest epoch."""

    def state_dict(self) -> dict[str, Any]:
        rates = {str(index): rate for index, rate in self.previous_backbone_lr.items()}
        return {**super().state_dict(), "previous_backbone_lr": rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.previous_backbone_lr = {int(index): rate for index, rate in state["previous_backbone_lr"].items()}

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        if stage == "fit" and not isinstance(getattr(module, "backbone", None), nn.Module):
            raise TypeError(
                f"BackboneFinetuning freezes module.backbone, and {type(module).__name__} has no module of that name; assign "
                "the pretrained part to self.backbone, or subclass BaseFinetuning."
            )
        self.previous_backbone_lr = {}
        super().setup(trainer, module, stage)

    def freeze_before_training(self, pl_module: Module) -> None:
        self.freeze(pl_module.backbone, train_bn=self.train_bn)

    def finetune_function(self, pl_module: Module, epoch: int, optimizer: Optimizer) -> None:
        head, index = float(optimizer.param_groups[0]["lr"]), self._optimizer_index
        if epoch == self.unfreeze_backbone_at_epoch:
            given = self.backbone_initial_lr
            rate = self._aligned(head * self.backbone_initial_ratio_lr if given is None else given, head)
            before = len(optimizer.param_groups)
            self.unfreeze_and_add_param_group(
                pl_module.backbone, optimizer, rate, initial_denom_lr=self.initial_denom_lr, train_bn=self.train_bn
            )
            if len(optimizer.param_groups) == before:  # it holds the backbone already
                return
        elif index in self.previous_backbone_lr:
            rate = self._aligned(self.lambda_func(epoch + 1) * self.previous_backbone_lr[index], head)
            names = {name for group in self._groups[index] for name in group["names"]}
            own = {parameter for parameter, name in names_of(pl_module).items() if name in names}
            for group in optimizer.param_groups:
                if not own.isdisjoint(group["params"]):
                    group["lr"] = rate
        else:
            return
        self.previous_backbone_lr[index] = rate
        if self.verbose:
            pl_module.print(f"learning rates: head {round(head, self.rounding)}, backbone {round(rate, self.rounding)}")

    def _aligned(self, rate: float, head: float) -> float:
        return min(rate, head) if self.should_align else rate

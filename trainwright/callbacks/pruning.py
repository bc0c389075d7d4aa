"""ModelPruning: sets weights to zero during training, with the methods of torch.nn.utils.prune."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.averaging import Averaging
from trainwright.callbacks.base import Callback
from trainwright.callbacks.pruning_checks import check_amount, checked_pairs, joined, refuse_lazy, refuse_shared
from trainwright.callbacks.pruning_method import ORIGINAL, PruningMethod, Target, check_resets, new_values
from trainwright.compiled_names import clean_name
from trainwright.data.seeding import derive_seed, isolate_rng, seed_generators
from trainwright.errors import a_type_of
from trainwright.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from trainwright.module import Module
    from trainwright.trainer.trainer import Trainer

Amount = int | float


class ModelPruning(Callback):
    """Prunes weights at the end of each training epoch, with the methods of torch.nn.utils.prune.

    They stay zero until the end of the fit, and in a fit that resumes it from a checkpoint. Another fit without one begins with
    no masks (except those of torch's parametrization), and trains these weights again.

    An epoch's pruning comes before the validation of its end, so that what is scored is what the epoch's checkpoint holds, and
    a rewind of the lottery ticket after both. All amounts count what is not pruned yet: 0.5 at each of two epochs prunes 3/4.

    The module keeps its own parameters, names and optimizers: pruned elements are set to zero after each optimizer step, and
    have no gradients. So a checkpoint holds the weights as any other run's does, and the masks in this callback's
    state; a resumed run ends bitwise as one that was not stopped. With `make_pruning_permanent=False` the module has torch's
    `weight_orig`, `weight_mask` and hooks instead, from the beginning on: also in checkpoints, which only a module that is
    pruned in the same way can load. That needs layers that exist before the module's `setup` and `configure_model`. Weights
    that several modules share are refused then, as is the `out_proj` of a MultiheadAttention, which the default leaves out.

    On several ranks rank 0 chooses, and all ranks have its masks.

    Args:
        pruning_fn: "l1_unstructured", "random_unstructured", "ln_structured" or "random_structured"; a subclass of
            torch.nn.utils.prune.BasePruningMethod; or a function of (module, name, amount) as in torch.nn.utils.prune.
        parameters_to_prune: pairs of a module and the name of its parameter; by default `parameter_names` of all modules, for a
            structured method those of more than one dimension.
        parameter_names: names that the default takes; "weight" and "bias" by default.
        use_global_unstructured: compare the elements of all parameters, rather than prune `amount` of each.
        amount: a fraction of the elements, a number of them, or a function of the epoch that returns one. Where fewer
            are left than the number, all are pruned, with one warning.
        apply_pruning: whether to prune, or a function of the epoch that returns it.
        make_pruning_permanent: see above.
        use_lottery_ticket_hypothesis: whether what is left returns to its initial values after each pruning, or a function of
            the epoch that returns it.
        resample_parameters: return to new values of the module's `reset_parameters` rather than to the initial ones.
        pruning_dim: the dimension that a structured method prunes along.
        pruning_norm: the norm by which "ln_structured" compares.
        verbose: 1 prints how much is pruned, 2 of each parameter, too.
        prune_on_train_epoch_end: False prunes before each validation of fit, those within an epoch too.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: a setting is out of its range, or settings do not fit together; before training, a strategy that divides the
            module over the ranks (fsdp, deepspeed), or a callback that averages weights.

    >>> first = module.net[0]
    >>> pruning = tw.ModelPruning("l1_unstructured", parameters_to_prune=[(first, "weight")], amount=0.25)
    >>> tw.Trainer(callbacks=pruning, max_epochs=1, enable_model_summary=False).fit(module, loader)
    >>> float((first.weight == 0).float().mean())
    0.25
    """

    counts_rounds = True
    reads_outputs = False
    PARAMETER_NAMES = ("weight", "bias")

    @refuses_unknown
    def __init__(
        self,
        pruning_fn: Callable[..., Any] | type[prune.BasePruningMethod] | str,
        parameters_to_prune: Sequence[tuple[nn.Module, str]] | None = None,
        parameter_names: Sequence[str] | None = None,
        use_global_unstructured: bool = True,
        amount: Amount | Callable[[int], Amount] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | float | str | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        for name, value in (
            ("apply_pruning", apply_pruning),
            ("use_lottery_ticket_hypothesis", use_lottery_ticket_hypothesis),
        ):
            if not isinstance(value, bool) and not callable(value):
                raise TypeError(f"{name}={value!r} is not accepted; pass True, False or a function of the epoch.")
        if verbose not in (0, 1, 2):
            raise ValueError(f"verbose={verbose!r} is not accepted; choose from 0, 1 and 2.")
        if not callable(amount):
            check_amount(amount)
        self._method = PruningMethod(pruning_fn, use_global_unstructured, pruning_dim, pruning_norm)
        self._given, self._names = checked_pairs(parameters_to_prune), tuple(parameter_names or self.PARAMETER_NAMES)
        self._amount, self._applies, self._rewinds = amount, apply_pruning, use_lottery_ticket_hypothesis
        self._is_permanent, self._resamples = make_pruning_permanent, resample_parameters
        self._verbose, self._is_at_epoch_end = verbose, prune_on_train_epoch_end
        self._owner_of_pairs: nn.Module | None = None
        """The module of the latest run, which gives the pairs their names."""
        self._targets: list[Target] = []
        self._hooks: dict[str, Any] = {}
        """The hooks of gradients, by the parameter's name."""
        self._is_fitting = False
        self._begin()

    def _begin(self) -> None:
        self._pruned: dict[str, Tensor] = {}
        """Where each parameter is pruned, by its name."""
        self._initial: dict[str, Tensor] = {}
        """The values to rewind to."""
        self._pruned_at = -1
        """The batches of the run at the latest pruning."""
        self._awaits_rewind = False
        self._seed: int | None = None
        self._masked_step = -1
        """The optimizer step after which the weights were last masked."""

    @property
    def masks(self) -> dict[str, Tensor]:
        """Return the masks by the parameter's name: 1 where it is kept."""
        return {name: ~pruned for name, pruned in self._pruned.items()}

    @property
    def state_key(self) -> str:
        names = list(self._names)
        if self._given is not None:
            found = {} if self._owner_of_pairs is None else _paths(self._owner_of_pairs)
            # Before a run, which tells the names, it only has to differ from those of others.
            names = [
                f"{found.get(id(owner), f'{type(owner).__name__}#{id(owner)}')}.{attribute}"
                for owner, attribute in self._given
            ]
        return f"ModelPruning[{self._method.name},{','.join(names)}]"

    def state_dict(self) -> dict[str, Any]:
        return {
            "pruned": self._pruned,
            "initial": self._initial,
            "pruned_at": self._pruned_at,
            "awaits_rewind": self._awaits_rewind,
            "seed": self._seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pruned, self._initial = dict(state["pruned"]), dict(state["initial"])
        self._pruned_at, self._awaits_rewind = int(state["pruned_at"]), bool(state["awaits_rewind"])
        self._seed = state["seed"]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_owner_of_pairs": None, "_targets": [], "_hooks": {}}

    # -- hooks -----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._is_fitting, self._owner_of_pairs = stage == "fit", module
        if self._is_fitting:
            self._refuse(trainer)
            self._begin()
        if self._is_fitting or not self._is_permanent:
            self._targets = self._find(module, is_early=True)
        for target in self._targets:
            if not self._is_permanent and not target.is_reparametrized:
                refuse_lazy(target)
                prune.identity(target.module, target.attribute)  # type: ignore[no-untyped-call]
            elif self._is_permanent and target.is_reparametrized:  # by the user, or an earlier run
                self._pruned[target.name] = getattr(target.module, target.mask_name) == 0
                prune.remove(target.module, target.attribute)  # type: ignore[no-untyped-call]

    def _refuse(self, trainer: Trainer) -> None:
        if not trainer.strategy.holds_modules:
            raise ValueError(
                f"ModelPruning compares and sets the elements of whole weights, of which each rank has a part, or a copy, "
                f"under strategy={trainer.strategy.name!r}. Use 'ddp' or 'ddp_sharded', or prune the weights after the run."
            )
        averaging = [type(each).__name__ for each in trainer.callbacks if isinstance(each, Averaging)]
        if averaging:
            raise ValueError(
                f"{averaging[0]} averages weights from before and after a pruning, so that its averages would not be pruned. "
                "Leave out one of the two callbacks."
            )

    def _refuse_others(self) -> None:
        """Refuse parameters that are not in the form that `setup` gives them."""
        for target in self._targets:
            if target.is_reparametrized is self._is_permanent:
                has, does, remedy = "lacks", "makes", "leave out make_pruning_permanent=False"
                if self._is_permanent:
                    has, does, remedy = "has", "removes", "do not prune it there"
                raise ValueError(
                    f"{target.name!r} {has} torch's {target.attribute}_{ORIGINAL} and {target.mask_name}, which ModelPruning "
                    f"{does} before the module's setup() and configure_model: one of these made the layer, or another "
                    f"ModelPruning has another make_pruning_permanent. Make it in __init__, or {remedy}; pass all the same."
                )

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        # Again: configure_model may have made some, and a strategy may have replaced them.
        self._targets = self._find(module)
        refuse_lazy(*self._targets)
        self._refuse_others()
        if self._resamples:
            check_resets(self._targets)
        own = {target.name: target.parameter for target in self._targets}
        for name, pruned in {**self._pruned, **self._initial}.items():
            if name not in own or own[name].shape != pruned.shape:
                raise ValueError(
                    f"The checkpoint's ModelPruning has pruned {name!r} of shape {list(pruned.shape)}, and this run prunes "
                    f"{f'one of shape {list(own[name].shape)}' if name in own else 'no parameter of that name'}. Resume with "
                    "the same module and parameters_to_prune."
                )
        self._pruned = {name: pruned.to(own[name].device) for name, pruned in self._pruned.items()}

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        if not self._initial and self._rewinds is not False and not self._resamples:
            self._initial = {each.name: each.parameter.detach().clone() for each in self._targets}
        if not self._is_at_epoch_end and not trainer.enable_validation:
            rank_zero_warn(
                "prune_on_train_epoch_end=False prunes before each validation, and this fit has none: nothing will be pruned. "
                "Pass a validation loader, or leave out the argument.",
                stacklevel=2,
            )
        if self._seed is None:
            self._seed = int(trainer.strategy.broadcast(torch.initial_seed() & 0x7FFF_FFFF))
        self._mask()

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        self._hook_gradients()  # of what was unfrozen

    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None:
        if self._awaits_rewind:
            self._rewind(trainer, module)

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._pruned and trainer.global_step != self._masked_step:
            self._masked_step = trainer.global_step
            self._mask()

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        is_within = trainer.state.progress.is_mid_epoch_validation
        if self._is_fitting and not trainer.sanity_checking and not (self._is_at_epoch_end and is_within):
            with torch.inference_mode(False):  # the masks are used in training
                self._prune_once(trainer, module)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        if (
            self._is_at_epoch_end and not trainer.state.progress.is_leaving
        ):  # a run that resumes within the epoch ends it
            self._prune_once(trainer, module)

    def on_fit_end(self, trainer: Trainer, module: Module) -> None:
        if self._awaits_rewind:
            self._rewind(trainer, module)

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._is_fitting = False

    # -- what they do ----------------------------------------------------------------------------------------------------

    def _find(self, module: nn.Module, is_early: bool = False) -> list[Target]:
        """Return the parameters to prune, each once; `is_early`: those that the module has before its own setup."""
        owners = _paths(module)
        is_tolerant = is_early and self._is_permanent
        unread = set() if self._is_permanent else _unread(module)
        early = (
            " With make_pruning_permanent=False layers must exist before the module's setup() and configure_model: if one of "
            "these makes them, make them in __init__, or leave out that argument."
            if is_early
            else ""
        )
        pairs = self._given or [(owner, name) for name in self._names for owner in module.modules()]
        found: dict[int, Target] = {}
        for owner, attribute in pairs:
            parameter = owner._parameters.get(f"{attribute}_{ORIGINAL}", owner._parameters.get(attribute))
            if self._given is not None and (parameter is None or id(owner) not in owners):
                if is_tolerant:
                    continue
                raise ValueError(
                    f"parameters_to_prune holds {attribute!r} of {a_type_of(owner)}, which {type(module).__name__} "
                    "does not have as a parameter; pass pairs of one of its modules and the name of that module's parameter, "
                    f"such as (model.layer, 'weight').{early}"
                )
            if id(owner) in unread:
                if self._given is None:
                    continue
                raise ValueError(
                    f"{joined(owners[id(owner)], attribute)!r} is read by a MultiheadAttention that never calls the "
                    "layer, so that torch's hook would not compute it, as make_pruning_permanent=False needs. Leave out that "
                    "argument, or the pair from parameters_to_prune."
                )
            is_flat = (
                self._given is None and self._method.is_structured and parameter is not None and parameter.ndim < 2
            )
            if parameter is not None and not is_flat:
                found.setdefault(
                    id(parameter), Target(joined(owners[id(owner)], attribute), owner, attribute, parameter)
                )
        if not self._is_permanent:
            refuse_shared(module, found)
        if not found and not is_tolerant:
            raise ValueError(
                f"{type(module).__name__} has no parameter to prune of the names {', '.join(self._names)}; pass "
                f"parameter_names, or parameters_to_prune with pairs of a module and a name.{early}"
            )
        return list(found.values())

    def _prune_once(self, trainer: Trainer, module: Module) -> None:
        """Prune, unless that was done after the latest batch. Collective."""
        if self._pruned_at == trainer.state.total_batches:
            return
        self._pruned_at = trainer.state.total_batches
        chosen: dict[str, Any] = {}
        trainer.engine.ranks.decide(lambda: chosen.update(self._choose(trainer)), "the pruning of a model")
        reply = trainer.strategy.broadcast(chosen)
        if not reply:
            return
        before, total = self._count(), sum(each.parameter.numel() for each in self._targets)
        devices = {each.name: each.parameter.device for each in self._targets}
        self._pruned = {name: pruned.to(devices[name]) for name, pruned in reply["pruned"].items()}
        self._awaits_rewind = bool(reply["rewinds"])
        self._mask()
        trainer.strategy.refresh_weights([module])
        if self._verbose:
            after = self._count()
            trainer.print(
                f"ModelPruning: {after:,} of {total:,} elements are pruned ({after / total:.1%}), {after - before:,} of them "
                f"in epoch {trainer.current_epoch}"
            )
        for name, pruned in self._pruned.items() if self._verbose == 2 else ():
            trainer.print(f"  {name}: {int(pruned.sum()):,} of {pruned.numel():,} ({float(pruned.float().mean()):.1%})")

    def _choose(self, trainer: Trainer) -> dict[str, Any]:
        """Return where the parameters are pruned from now on, and whether they rewind; {} to leave them. On rank 0."""
        epoch = trainer.current_epoch
        if not _answer(self._applies, epoch):
            return {}
        amount = self._amount(epoch) if callable(self._amount) else self._amount
        check_amount(amount, f" (of epoch {epoch})" if callable(self._amount) else "")
        if not amount:
            return {}
        so_far = dict(self._pruned)
        for other in trainer.callbacks:  # several may prune one parameter
            if isinstance(other, ModelPruning) and other is not self:
                for name, mask in other.masks.items():
                    so_far[name] = so_far[name] | ~mask if name in so_far else ~mask
        with _generators(derive_seed(self._seed or 0, self._pruned_at)):
            pruned = self._method.prune(self._targets, so_far, amount)
        return {"pruned": pruned, "rewinds": _answer(self._rewinds, epoch)}

    def _count(self) -> int:
        return sum(int(pruned.sum()) for pruned in self._pruned.values())

    @torch.no_grad()
    def _mask(self) -> None:
        """Set what is pruned to zero."""
        for target in self._targets:
            pruned = self._pruned.get(target.name)
            if pruned is None:
                continue
            if target.is_reparametrized:
                mask = getattr(target.module, target.mask_name)
                mask.copy_(~pruned)
                setattr(target.module, target.attribute, mask * target.parameter)  # now, not at the next forward
            else:
                target.parameter.masked_fill_(pruned, 0)
        self._hook_gradients()

    def _hook_gradients(self) -> None:
        """Let what is pruned have no gradients, so that norms leave it out and optimizers do not step it."""
        for target in self._targets:
            is_new = target.name in self._pruned and target.name not in self._hooks
            if is_new and target.parameter.requires_grad and not target.is_reparametrized:
                hook = target.parameter.register_hook(self._without(target.name))  # type: ignore[no-untyped-call]
                self._hooks[target.name] = hook

    def _without(self, name: str) -> Callable[[Tensor], Tensor]:
        return lambda gradient: _masked(gradient, self._pruned[name])

    @torch.no_grad()
    def _rewind(self, trainer: Trainer, module: Module) -> None:
        """Give what is left its initial values, or new ones. Collective."""
        self._awaits_rewind = False
        values: Mapping[str, Tensor] = self._initial
        if self._resamples:
            with _generators(derive_seed(self._seed or 0, self._pruned_at)):
                own = new_values(self._targets) if trainer.is_global_zero else {}
            values = trainer.strategy.broadcast(own)
        for target in self._targets:
            target.parameter.copy_(values[target.name])
        self._mask()
        trainer.strategy.refresh_weights([module])


@contextmanager
def _generators(seed: int) -> Iterator[None]:
    """Give a block generators of its seed alone, so that the run's are not shifted."""
    with isolate_rng():
        seed_generators(seed)
        torch.manual_seed(seed)  # those of accelerators, too
        yield


def _paths(module: nn.Module) -> dict[int, str]:
    """Return the names of the modules in one, by their ids."""
    return {id(each): clean_name(name) for name, each in module.named_modules()}


def _unread(module: nn.Module) -> set[int]:
    """Return the ids of modules that torch computes with and never calls, so that hooks before a call have no effect."""
    return {id(each.out_proj) for each in module.modules() if isinstance(each, nn.MultiheadAttention)}


def _masked(gradient: Tensor, pruned: Tensor) -> Tensor:
    """Return a gradient, dense or that of a sparse embedding, without what is pruned."""
    if not gradient.is_sparse:
        return gradient.masked_fill(pruned, 0)
    gradient = gradient.coalesce()
    rows = gradient.indices()
    values = gradient.values().masked_fill(pruned[tuple(rows)], 0)
    return torch.sparse_coo_tensor(rows, values, gradient.shape, check_invariants=False, is_coalesced=True)


def _answer(setting: bool | Callable[[int], bool], epoch: int) -> bool:
    return bool(setting(epoch)) if callable(setting) else setting

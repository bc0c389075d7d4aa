"""ModelPruning: sets weights to zero during training, chosen by the methods of torch.nn.utils.prune."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import Optimizer

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.averaging import Averaging
from trainwright.callbacks.base import Callback
from trainwright.data.seeding import derive_seed, isolate_rng, seed_generators
from trainwright.errors import a_type_of, did_you_mean
from trainwright.tensor_names import clean_name

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer

Amount = int | float
UNSTRUCTURED = ("l1_unstructured", "random_unstructured")
STRUCTURED = ("ln_structured", "random_structured")
METHODS = (*UNSTRUCTURED, *STRUCTURED)


class ModelPruning(Callback):
    """Prunes weights at the end of every training epoch, with the methods of torch.nn.utils.prune.
    They stay zero until the end of the fit, and in a fit that resumes it. A fit without a checkpoint begins with no masks.

    The pruning of an epoch comes before the validation at its end, so that the validation scores the weights of the epoch's
    checkpoint. A rewind of the lottery ticket comes after both. All amounts count the elements that are not pruned yet: 0.5 at
    each of two epochs prunes 3/4.

    The module keeps its parameters and names. Pruned elements have no gradients and are set to zero after every optimizer step.
    The masks are in this callback's state. On several ranks rank 0 chooses, and all ranks use its masks.

    Args:
        pruning_fn: "l1_unstructured", "random_unstructured", "ln_structured" or "random_structured", or the function of that
            name in torch.nn.utils.prune.
        parameters_to_prune: pairs of a module and the name of its parameter, by default `parameter_names` of all modules, for a
            structured method only parameters of more than one dimension.
        parameter_names: names that the default takes, by default "weight" and "bias".
        use_global_unstructured: compare the elements of all parameters, rather than prune `amount` of each.
        amount: a fraction of the elements (channels for a structured method), a number of them, or a function of the epoch that
            returns one. If fewer are left than the number, all are pruned.
        apply_pruning: whether to prune, or a function of the epoch that returns it.
        use_lottery_ticket_hypothesis: whether the remaining weights return to their initial values after every pruning, or a
            function of the epoch that returns it.
        pruning_dim: the dimension along which a structured method prunes.
        pruning_norm: the norm by which "ln_structured" compares.
        verbose: 1 prints the pruned fraction, 2 also prints it for every parameter.
        make_pruning_permanent, resample_parameters, prune_on_train_epoch_end: only the defaults are accepted.

    Raises:
        TypeError, ValueError: a setting is not accepted, or before training a strategy that divides the module (fsdp,
            deepspeed), or a callback that averages weights.

    >>> first = module.net[0]
    >>> pruning = tw.ModelPruning("l1_unstructured", parameters_to_prune=[(first, "weight")], amount=0.25)
    >>> tw.Trainer(callbacks=pruning, max_epochs=1, enable_model_summary=False).fit(module, loader)
    >>> float((first.weight == 0).float().mean())
    0.25
    """

    reads_outputs = False
    PARAMETER_NAMES = ("weight", "bias")

    @refuses_unknown
    def __init__(
        self,
        pruning_fn: Callable[..., Any] | str,
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
        if not make_pruning_permanent or resample_parameters or not prune_on_train_epoch_end:
            raise ValueError(
                "make_pruning_permanent=False, resample_parameters=True and prune_on_train_epoch_end=False are not accepted; "
                "apply torch.nn.utils.prune.custom_from_mask to the callback's `masks` after the fit, or write a callback."
            )
        if not callable(amount):
            _check_amount(amount)
        self._method = _checked_method(pruning_fn, use_global_unstructured, pruning_dim, pruning_norm)
        self._is_global, self._dim, self._norm = use_global_unstructured, pruning_dim, pruning_norm
        self._pairs = None if parameters_to_prune is None else list(parameters_to_prune)
        self._names = tuple(parameter_names or self.PARAMETER_NAMES)
        self._amount, self._applies, self._rewinds = amount, apply_pruning, use_lottery_ticket_hypothesis
        self._verbose = verbose
        self._root: nn.Module | None = None
        """The module of the latest run, in which the pairs have their names."""
        self._targets: dict[str, nn.Parameter] = {}
        self._begin()

    def _begin(self) -> None:
        self._pruned: dict[str, Tensor] = {}
        self._initial: dict[str, Tensor] = {}
        self._pruned_at = -1
        self._awaits_rewind = False
        self._seed: int | None = None

    @property
    def masks(self) -> dict[str, Tensor]:
        """Return the masks by the parameter's name. False marks a pruned element."""
        return {name: ~pruned for name, pruned in self._pruned.items()}

    @property
    def state_key(self) -> str:
        paths = {} if self._root is None else _paths(self._root)
        # Before a run, the module's names are unknown, and the key only has to differ from other callbacks' keys.
        owners = [paths.get(id(each), f"{type(each).__name__}#{id(each)}") for each, _ in self._pairs or ()]
        names = [f"{owner}.{name}" for owner, (_, name) in zip(owners, self._pairs or (), strict=True)] or self._names
        return f"ModelPruning[{self._method},{','.join(names)}]"

    def state_dict(self) -> dict[str, Any]:
        masks = {"pruned": self._pruned, "initial": self._initial}
        return {**masks, "pruned_at": self._pruned_at, "awaits_rewind": self._awaits_rewind, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pruned, self._initial = dict(state["pruned"]), dict(state["initial"])
        self._pruned_at, self._awaits_rewind = int(state["pruned_at"]), bool(state["awaits_rewind"])
        self._seed = state["seed"]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_root": None, "_targets": {}}

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        self._root, self._targets = module, {}
        if stage != "fit":
            return
        self._begin()
        if not trainer.strategy.capabilities.holds_modules:
            raise ValueError(
                f"ModelPruning needs whole weights, and strategy={trainer.strategy.name!r} divides or copies them. Use "
                "'ddp' or 'ddp_sharded', or prune the weights after the run."
            )
        averaging = [type(each).__name__ for each in trainer.callbacks if isinstance(each, Averaging)]
        if averaging:
            raise ValueError(
                f"{averaging[0]} averages weights from before and after a pruning, so that its averages would not be pruned. "
                "Remove one of the two callbacks."
            )

    def on_fit_start(self, trainer: AnyTrainer, module: Module) -> None:
        self._targets = self._find(module)
        self._pruned = {name: pruned.to(self._targets[name].device) for name, pruned in self._pruned.items()}

    def on_train_start(self, trainer: AnyTrainer, module: Module) -> None:
        if not self._initial and self._rewinds is not False:
            self._initial = {name: each.detach().clone() for name, each in self._targets.items()}
        if self._seed is None:
            self._seed = int(trainer.strategy.broadcast(torch.initial_seed() & 0x7FFF_FFFF))
        self._mask()

    def on_before_optimizer_step(self, trainer: AnyTrainer, module: Module, optimizer: Optimizer) -> None:
        for name, pruned in self._pruned.items():
            gradient = self._targets[name].grad
            if gradient is not None and not gradient.is_sparse:
                gradient.masked_fill_(pruned, 0)  # so that the norm and the optimizer's state omit these elements

    def on_train_batch_start(self, trainer: AnyTrainer, module: Module, batch: Any, batch_idx: int) -> None:
        self._rewind_if_due(trainer, module)

    def on_train_batch_end(self, trainer: AnyTrainer, module: Module, *_: Any) -> None:
        self._mask()

    def on_validation_start(self, trainer: AnyTrainer, module: Module) -> None:
        if self._targets and not trainer.sanity_checking and not trainer.state.progress.is_mid_epoch_validation:
            with torch.inference_mode(False):  # the masks are used in training
                self._prune_once(trainer, module)

    def on_train_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        if not trainer.state.progress.is_leaving:  # a run that resumes within the epoch ends it
            self._prune_once(trainer, module)

    def on_fit_end(self, trainer: AnyTrainer, module: Module) -> None:
        self._rewind_if_due(trainer, module)

    def _find(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters to prune by their names, each parameter once."""
        paths, found = _paths(module), dict[nn.Parameter, str]()
        for owner, attribute in self._pairs or [(owner, name) for name in self._names for owner in module.modules()]:
            parameter = dict(owner.named_parameters(recurse=False)).get(attribute)
            if self._pairs and (parameter is None or id(owner) not in paths):
                raise ValueError(
                    f"parameters_to_prune contains {attribute!r} of {a_type_of(owner)}, which {type(module).__name__} does not "
                    "have as a parameter. Pass pairs of its modules and their parameter names."
                )
            if parameter is not None and (self._pairs or self._method in UNSTRUCTURED or parameter.ndim > 1):
                found.setdefault(parameter, f"{paths[id(owner)]}.{attribute}".lstrip("."))
        if not found:
            raise ValueError(
                f"{type(module).__name__} has no parameter to prune with the names {', '.join(self._names)}. Pass "
                "parameter_names, or parameters_to_prune with pairs of a module and a name."
            )
        return {name: parameter for parameter, name in found.items()}

    def _prune_once(self, trainer: TrainerProtocol, module: Module) -> None:
        """Prune, if that was not done after the latest batch. Collective: call on every rank."""
        if self._pruned_at == trainer.state.total_batches:
            return
        self._pruned_at = trainer.state.total_batches
        chosen: dict[str, Any] = {}
        choose = partial(self._choose, chosen, trainer.current_epoch)
        trainer.engine.ranks.decide(choose, "the pruning of a model")
        reply = trainer.strategy.broadcast(chosen)
        if not reply:
            return
        self._pruned = {name: reply["pruned"][name].to(each.device) for name, each in self._targets.items()}
        self._awaits_rewind = bool(reply["rewinds"])
        self._mask()
        trainer.strategy.refresh_weights([module])
        counts = {name: (int(pruned.sum()), pruned.numel()) for name, pruned in self._pruned.items()}
        if self._verbose:
            count, total = map(sum, zip(*counts.values(), strict=True))
            share = f"{count:,} of {total:,} elements are pruned ({count / total:.1%})"
            trainer.print(f"ModelPruning: {share} in epoch {trainer.current_epoch}")
        for name, (count, total) in counts.items() if self._verbose == 2 else ():
            trainer.print(f"  {name}: {count:,} of {total:,} ({count / total:.1%})")

    @torch.no_grad()
    def _choose(self, chosen: dict[str, Any], epoch: int) -> None:
        """Set the new masks of pruned elements, and whether the weights rewind, if any are pruned. Called on rank 0."""
        applies, rewinds, amount = (_at(epoch, value) for value in (self._applies, self._rewinds, self._amount))
        _check_amount(amount)
        if not applies or not amount:
            return
        weights = [parameter.detach() for parameter in self._targets.values()]
        kept = [~mask for mask in self._pruned.values()] or [
            torch.ones_like(each, dtype=torch.bool) for each in weights
        ]
        with isolate_rng():
            seed_generators(seed := derive_seed(self._seed or 0, self._pruned_at))
            torch.manual_seed(seed)  # also of accelerators
            if self._is_global:
                flat = [torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (weights, kept)]
                parts = self._kept_after(amount, *flat).split([mask.numel() for mask in kept])  # type: ignore[no-untyped-call]
                kept = [part.view_as(mask) for part, mask in zip(parts, kept, strict=True)]
            else:
                kept = list(map(partial(self._kept_after, amount), weights, kept))
        chosen |= {"pruned": {name: ~mask for name, mask in zip(self._targets, kept, strict=True)}, "rewinds": rewinds}

    def _kept_after(self, amount: Amount, weights: Tensor, kept: Tensor) -> Tensor:
        """Return a mask of the elements that are left of `kept` after another pruning."""
        chosen: Any = kept
        units = kept  # elements or channels
        if self._dim is not None:
            units = kept.movedim(self._dim, 0).flatten(1).any(1)
            chosen = tuple(units if at == self._dim % kept.ndim else slice(None) for at in range(kept.ndim))
        left = int(units.sum())
        if isinstance(amount, int) and amount > units.numel():
            raise ValueError(f"amount={amount} is more than the {units.numel()} elements or channels of the parameter.")
        if not left:
            return kept
        amount = min(amount, left) if isinstance(amount, int) else amount
        arguments = {"ln_structured": (self._norm, self._dim), "random_structured": (self._dim,)}.get(self._method, ())
        method = getattr(prune, self._method.title().replace("_", ""))(amount, *arguments)  # such as prune.LnStructured
        after = kept.clone()
        after[chosen] = method.compute_mask(weights[chosen], kept[chosen].to(weights.dtype)).bool()
        return after

    @torch.no_grad()
    def _mask(self) -> None:
        """Set the pruned elements to zero."""
        for name, pruned in self._pruned.items():
            self._targets[name].masked_fill_(pruned, 0)

    @torch.no_grad()
    def _rewind_if_due(self, trainer: TrainerProtocol, module: Module) -> None:
        """Return the remaining weights to their initial values after a pruning. Collective: call on every rank."""
        if not self._awaits_rewind:
            return
        self._awaits_rewind = False
        for name, parameter in self._targets.items():
            parameter.copy_(self._initial[name])
        self._mask()
        trainer.strategy.refresh_weights([module])


def _paths(module: nn.Module) -> dict[int, str]:
    """Return the names of the modules within a module, by their ids."""
    return {id(each): clean_name(name) for name, each in module.named_modules()}


def _at(epoch: int, setting: Any) -> Any:
    return setting(epoch) if callable(setting) else setting


def _check_amount(amount: Any) -> None:
    is_number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
    if not is_number or amount < 0 or (isinstance(amount, float) and not amount <= 1.0):
        raise ValueError(
            f"amount={amount!r} is not accepted; pass a fraction from 0.0 to 1.0, or a number of elements (also by epoch)."
        )


def _checked_method(pruning_fn: Any, is_global: bool, dim: Any, norm: Any) -> str:
    """Return the name of a pruning method, if it fits the other settings."""
    name = getattr(pruning_fn, "__name__", str(pruning_fn))
    if name not in METHODS:
        raise ValueError(
            f"pruning_fn={pruning_fn!r} is not accepted; choose from {', '.join(METHODS)}.{did_you_mean(name, METHODS)} For "
            "your own function or class, write a callback that calls it in on_train_epoch_end."
        )
    if is_global and name in STRUCTURED:
        raise ValueError(
            f"pruning_fn={name} cannot compare elements of different tensors; pass use_global_unstructured=False, or an "
            "unstructured method, such as 'l1_unstructured'."
        )
    if name in STRUCTURED and (isinstance(dim, bool) or not isinstance(dim, int)):
        raise ValueError(f"{name} needs pruning_dim=, the dimension to prune along, such as 0; {dim!r} was given.")
    if name == "ln_structured" and norm is None:
        raise ValueError("ln_structured needs pruning_norm=, such as 2; None was given.")
    if name in UNSTRUCTURED and dim is not None:
        raise ValueError(f"pruning_dim={dim!r} does not fit {name}; omit it.")
    return str(name)

"""EngineCheckpoints: the part of an Engine that saves and loads its modules, its optimizers and the caller's state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainwright.checkpoint.contents import (
    MODEL,
    TRAINING,
    extra_states,
    fitting_extra_states,
    set_extra_states,
    with_parts,
)
from trainwright.checkpoint.discovery import is_checkpoint
from trainwright.checkpoint.editing import Edit, base_pieces, check_model, edit_for_load, edit_for_save, fill
from trainwright.checkpoint.filesystem import describe
from trainwright.checkpoint.frozen_base import FROZEN_BASE, Base, check_base
from trainwright.checkpoint.library_models import stored_recipes
from trainwright.checkpoint.reader import StoredCheckpoint, Verify, open_checkpoint
from trainwright.checkpoint.store import SAVE, CheckpointWriter
from trainwright.checkpoint.tensors import Piece
from trainwright.data.seeding import check_generator_states, derive_seed, derived_rng_state, rng_state
from trainwright.devices.generators import is_generator_state, owned, taken_over
from trainwright.devices.hardware import use, using
from trainwright.distributed.ranks import Ranks
from trainwright.engine.named_state import (
    check_optimizers,
    computed_keys,
    describe_optimizers,
    frozen_base,
    load_optimizers,
    loads_itself,
    model_pieces,
    named_optimizers,
    optimizer_pieces,
    prefix_of,
    stray_pieces,
)
from trainwright.engine.script_settings import ScriptSettings
from trainwright.errors import CheckpointError
from trainwright.faults.tensor_checks import not_finite
from trainwright.precision import Precision
from trainwright.rank_zero import rank_zero_warn
from trainwright.strategies import Strategy
from trainwright.tensor_names import named_tensors, own_name

Shapes = dict[str, tuple[int, ...]]
STATISTICS = ("running_mean", "running_var")
"""The buffers of norms that are checked for finiteness, as trained weights are."""


class OpenCheckpoint(NamedTuple):
    """A verified checkpoint with its state."""

    checkpoint: StoredCheckpoint
    state: dict[str, Any]
    tensors: dict[str, Tensor] | None
    """The model's tensors, if hooks may have changed them."""


class Restored(NamedTuple):
    """The part of a checkpoint that a load returns to one rank. Modules and optimizers are loaded in place."""

    state: dict[str, Any]
    """The caller's state."""
    rng: dict[str, Any] | None
    """The RNG states of this rank, if the checkpoint has them."""
    rank_state: dict[str, Any] | None
    """The state of a rank with this part of the data, or None if it stored none or the number of parts differs."""
    nearest_rank_state: dict[str, Any]
    """The same, or rank 0's state if the number of parts differs, for values that every rank stores under the same keys."""


class EngineCheckpoints:
    """Saves and loads checkpoints of the Engine that derives from it."""

    rank: int
    world_size: int
    data_rank: int
    num_data_ranks: int
    device: torch.device
    ranks: Ranks
    strategy: Strategy
    writer: CheckpointWriter
    script: ScriptSettings
    modules: list[nn.Module]
    optimizers: list[Optimizer]
    seed: int
    _is_known_finite: bool
    """Whether the weights have been found finite for the next save, equal on all ranks."""
    _base: Base | None
    """The frozen parameters at the fit's start, or None before `note_base` and the first save with `trained_only`."""
    _base_names: Collection[str] | None
    """The names that may belong to the base after a load, or None for all names."""

    @property
    def precision(self) -> Precision:
        """Return the precision in use; a strategy whose engine has its own loss scale may have replaced the chosen one."""
        return self.strategy.precision

    def save(
        self,
        path: str,
        *,
        step: int,
        epoch: int,
        state: dict[str, Any],
        rank_state: dict[str, Any] | None = None,
        weights_only: bool = False,
        trained_only: bool = False,
        edit: Edit | None = None,
        blocking: bool = True,
        number: int = 0,
        overwrite: bool = False,
        directory: str | None = None,
        parts: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Write a checkpoint of the modules, the optimizers and the caller's state. Collective: call on every rank.

        Weights that are not finite are stored with a warning, but never replace another checkpoint.

        Args:
            state: plain data and tensors, of which rank 0's are stored.
            rank_state: plain data and tensors of every rank, stored unless weights_only.
            weights_only: store no optimizers, and nothing else that only a resumed run needs.
            trained_only: store only digests of the parameters that require no gradients and that no optimizer steps.
            edit: may change the checkpoint's contents, as checkpoint/editing.py describes.
            blocking: False returns once everything is copied to host memory. A thread writes, and the next save waits for it.
            number: orders several saves of one step.
            overwrite: replace a complete checkpoint at the path, once the new one is committed.
            directory: the folder that the writer's `staged` yields for this path. Its files become part of the checkpoint.
            parts: tensors of the shapes of this rank's pieces, by section and name. Those of "model" replace the model's.
                Other sections are stored beside it, unless weights_only.

        Raises:
            CheckpointError: on every rank, of this save, which leaves nothing at the path, or of an earlier one in flight.
        """
        with using(self.device):
            # First, so that no collective of a save is paired with another one of ranks that do not save here.
            self.ranks.wait(f"a save of step {step}")
            self.strategy.check_gradients(partial(self.ranks.exchange, call=f"a save of step {step}"))
            self.finish_save()
            if lazy := [name for module in self.modules for name, p in module.named_parameters() if is_lazy(p)]:
                raise CheckpointError(
                    f"checkpoint {path} was not written: {lazy[0]!r} is an uninitialised lazy tensor, and a checkpoint stores "
                    "tensors with a shape. Save after a forward that reaches the layer, or pass the layer its size."
                )
            for module in self.modules:
                computed_keys(self.strategy, module)  # raises for entries that cannot be stored
            sections = with_parts(model_pieces(self.strategy, self.modules), parts or {})
            base, sections = self._without_base(sections, trained_only)
            pieces = sections.pop(MODEL)
            fault = "" if self._is_known_finite and not parts else self._fault(pieces)
            self._is_known_finite = False
            if fault and overwrite and self.ranks.broadcast(is_checkpoint(path), SAVE):
                raise CheckpointError(f"checkpoint {path} was not written: {fault}, and the one that is there stays.")
            if fault:
                rank_zero_warn(f"{fault}; checkpoint {path} is written with them.", stacklevel=3)
            if edit is not None:
                state, pieces = self._edited(path, state, pieces, {"epoch": epoch, "global_step": step}, edit)
            extra = {str(number): extra_states(module) for number, module in enumerate(self.modules)}
            contents: dict[str, Any] = {"seed": self.seed, "extra": extra, **base, **state}
            contents |= stored_recipes(self.modules, map(prefix_of, count()))
            if weights_only:
                sections, rank_state = {}, None
            else:
                sections |= self._training_sections(contents)
                # An RNG state belongs to this rank's device, even if another device was current when it was taken.
                rank_state = {
                    key: owned(value, self.device) if is_generator_state(value) else value
                    for key, value in {"rng": rng_state(), **(rank_state or {})}.items()
                }
            self.writer.save(
                path,
                sections={MODEL: pieces, **sections},
                state=contents,
                rank_state=rank_state,
                header={
                    "step": step,
                    "epoch": epoch,
                    "world_size": self.ranks.world_size,  # 1 if only this rank saves
                    "num_data_ranks": self.num_data_ranks,  # stored if it differs from the world size
                    "strategy": self.strategy.name,
                    "weights_only": weights_only,
                    "number": number,
                },
                blocking=blocking,
                overwrite=overwrite,
                directory=directory,
            )

    def note_base(self) -> None:
        """Take the digests of the frozen parameters, so that saves store those that change from now on. Collective."""
        if self._base is None:
            self._base = frozen_base(self.strategy, self.modules, self.optimizers, self.ranks, self._base_names)

    def _without_base(
        self, sections: dict[str, list[Piece]], trained_only: bool
    ) -> tuple[dict[str, Base], dict[str, list[Piece]]]:
        """Return the frozen base as an entry of the state, if it is omitted, and the sections to store. Collective."""
        if not trained_only:
            return {}, sections
        now = frozen_base(self.strategy, self.modules, self.optimizers, self.ranks, self._base_names)
        first = self._base = now if self._base is None else self._base
        base = {name: entry for name, entry in now.items() if first.get(name) == entry}
        stored = {name: [each for each in pieces if each.name not in base] for name, pieces in sections.items()}
        return {FROZEN_BASE: base}, stored

    def find_fault(self) -> str:
        """Return a text that names weights that are not finite on any rank, or "" if all are. Collective.

        Frozen parameters, buffers that are no running statistics, and optimizer states of one element are not checked, because
        they may contain such values by design (a mask of -inf). If the text is empty, the next save does not check again.
        """
        fault = self._fault(model_pieces(self.strategy, self.modules))
        self._is_known_finite = not fault
        return fault

    def _fault(self, pieces: Sequence[Piece]) -> str:
        trained = {
            prefix_of(number) + name
            for number, module in enumerate(self.modules)
            for name, tensor in named_tensors(module)
            if tensor.requires_grad or name.endswith(STATISTICS)
        }
        state = optimizer_pieces(self.strategy, named_optimizers(self.modules, self.optimizers))
        weights = not_finite((piece.name, piece.tensor) for piece in pieces if piece.name in trained)
        states = not_finite((piece.name, piece.tensor) for piece in state if piece.shape not in ((), (1,)))
        found = self.ranks.exchange((weights, states), SAVE)
        for subject, local in zip(("weights are", "optimizer's state is"), zip(*found, strict=True), strict=True):
            if names := list(dict.fromkeys(chain.from_iterable(local))):
                return f"the {subject} not finite (NaN or infinity in {names[0]!r}{' and more' * (len(names) > 1)})"
        return ""

    def _edited(
        self, path: str, state: dict[str, Any], pieces: list[Piece], header: dict[str, int], edit: Edit
    ) -> tuple[dict[str, Any], list[Piece]]:
        edited: list[Piece] = []
        state, read = edit_for_save(state, pieces, header, edit)
        self.ranks.run_on_all(
            lambda: edited.extend(read()),
            SAVE,
            subject=f"checkpoint {path} was not written",
            describe=partial(describe, path=path),
        )
        return state, edited

    def _training_sections(self, contents: dict[str, Any]) -> dict[str, list[Piece]]:
        """Add the state that only a resumed run needs to the contents, and return its sections of tensors. Collective."""
        named = named_optimizers(self.modules, self.optimizers)
        sections = {"optimizer": optimizer_pieces(self.strategy, named)}
        if strays := stray_pieces(self.strategy, self.modules, self.optimizers):
            sections["parameters"] = strays
        contents |= {"precision": self.precision.state_dict(), "strategy": self.strategy.state}
        contents["settings"] = self.script.stored
        contents["optimizers"] = describe_optimizers(self.strategy, named, self.ranks)
        return sections

    def finish_save(self) -> None:
        """Wait until a save with blocking=False has committed. Collective: call on every rank.

        Raises:
            CheckpointError: on every rank, if it failed. Earlier checkpoints are unchanged.
        """
        self.writer.finish()

    def verified(self, path: str, verify: Verify = "full") -> StoredCheckpoint:
        """Return a checkpoint after all ranks have verified its files, every rank a part of them. Collective.

        Raises:
            CheckpointError: no checkpoint, or a damaged one.
        """
        self.finish_save()  # which may be writing this one
        return open_checkpoint(path, verify, ranks=self.ranks)

    def open(
        self, source: str | StoredCheckpoint, *, edit: Edit | None = None, verify: Verify = "full"
    ) -> OpenCheckpoint:
        """Verify a checkpoint passed by its path, and allow `edit` to change its contents before a load. Collective.

        Raises:
            CheckpointError: no checkpoint, or a damaged one.
        """
        checkpoint = self.verified(source, verify) if isinstance(source, str) else source
        state = checkpoint.run_state()
        if edit is None:
            return OpenCheckpoint(checkpoint, state, None)
        header = {"epoch": int(checkpoint.header["epoch"]), "global_step": int(checkpoint.header["step"])}
        return OpenCheckpoint(checkpoint, *edit_for_load(checkpoint, state, header, edit))

    def load(
        self,
        source: str | OpenCheckpoint,
        *,
        weights_only: bool = False,
        strict: bool = True,
        check: Callable[[dict[str, Any]], None] = lambda _: None,
        fresh: Collection[str] = (),
    ) -> Restored:
        """Load the state of the modules and the optimizers from a checkpoint of any strategy and number of ranks.

        Nothing is changed unless all of it has been verified and fits. Collective: call on every rank.

        Args:
            source: a path, which is verified first, or the result of `open`.
            weights_only: load only the model's weights.
            strict: False skips tensors of the model that only one side has.
            check: called with the checkpoint's state, to raise if the caller cannot use it.
            fresh: "optimizer_settings" keeps the present settings of the optimizers, "schedulers" their learning rates.

        Raises:
            CheckpointError: no checkpoint, a damaged one, or one of another model or optimizer.
        """
        use(self.device)
        opened = source if isinstance(source, OpenCheckpoint) else self.open(source)
        checkpoint, state, tensors = opened
        named = named_optimizers(self.modules, self.optimizers)
        fit = _ModelFit(self.strategy, self.modules, opened, {} if weights_only else _shapes(checkpoint, TRAINING))
        strays = [] if weights_only else stray_pieces(self.strategy, self.modules, self.optimizers)
        seed = int(state.get("seed", self.seed))
        result = Restored(state, None, None, {})

        def fits() -> None:
            nonlocal result
            fit.check(strict)
            if not weights_only:
                check_optimizers(checkpoint, state, named)
                check_model(checkpoint.path, _shapes(checkpoint, "parameters"), strays, strict=True)
                result = _restored(checkpoint, state, seed, self)
            check(state)

        # If one rank rejects a checkpoint, all ranks raise, before any changes anything.
        run_on_all = partial(
            self.ranks.run_on_all, call="the load of a checkpoint", describe=partial(describe, path=checkpoint.path)
        )
        run_on_all(fits)
        if fit.base:
            check_base(checkpoint.path, fit.base, fit.frozen, self.ranks)
        self._base, self._base_names = None, frozenset(fit.base)
        run_on_all(lambda: fit.load_wholes(strict))
        if not weights_only:
            load_optimizers(checkpoint, state, self.strategy, named, fresh)
        if tensors is None:
            checkpoint.read_into(MODEL, fit.pieces)
        else:
            fill(fit.pieces, tensors)
        if fit.trained:
            checkpoint.read_into(TRAINING, fit.trained)
        if strays:
            checkpoint.read_into("parameters", strays)
        same_job = (checkpoint.header.get("strategy"), checkpoint.world_size) == (self.strategy.name, self.world_size)
        strategy_state = {} if weights_only or fresh or not same_job else state.get("strategy", {})
        self.strategy.refresh_weights(self.modules, strategy_state)
        run_on_all(fit.set_extra_states)
        if not weights_only:
            self.precision.load_state_dict(state.get("precision", {}))
            self.seed = seed  # the data continues in the saved run's order
        return result


class _ModelFit:
    """How a checkpoint's tensors fit the modules: which pieces are read in place, and which modules get a whole state_dict.

    Every process reads its part of the tensors of a plain module in place. A module with computed or other entries of its
    state_dict, with lazy tensors or with its own `load_state_dict` gets the whole state_dict, if the strategy keeps it whole.
    `trained` are the tensors that a resumed run trains on from, where the model stores averages. `frozen` has the pieces
    of the `base`, which the checkpoint omits.
    """

    def __init__(
        self, strategy: Strategy, modules: Sequence[nn.Module], opened: OpenCheckpoint, trained: Shapes
    ) -> None:
        self._strategy, self._modules, self._trained = strategy, modules, trained
        self._checkpoint, state, self._tensors = opened
        extra = state.get("extra") or {}
        self._extra: list[dict[str, Any]] = [extra.get(str(number), {}) for number in range(len(modules))]
        self._wholes: set[int] = set()
        """The numbers of the modules that get a whole state_dict."""
        self.base: Base = state.get(FROZEN_BASE) or {}
        self.pieces: list[Piece] = []
        self.trained: list[Piece] = []
        self.frozen: list[Piece] = []

    def check(self, strict: bool) -> None:
        """Raise CheckpointError if the checkpoint does not fit, and change nothing."""
        path = self._checkpoint.path
        for number, module in enumerate(self._modules):
            is_computed = bool(computed_keys(self._strategy, module))
            if is_computed or (self._strategy.capabilities.holds_modules and loads_itself(module)):
                self._wholes.add(number)
            else:
                self._extra[number] = fitting_extra_states(module, self._extra[number], path, strict)
        stored = self._checkpoint.tensors(MODEL) if self._tensors is None else self._tensors
        shapes = {name: tuple(entry.shape) for name, entry in stored.items() if self._is_filled(name)}
        trained = {name: shape for name, shape in self._trained.items() if self._is_filled(name)}
        pieces = model_pieces(self._strategy, self._modules)
        # A hook may have added a part of the base to the model.
        self.base = {name: entry for name, entry in self.base.items() if name not in stored}
        self.frozen = base_pieces(path, self.base, pieces, strict)
        filled = [each for each in pieces if each.name not in self.base and self._is_filled(each.name)]
        self.pieces = list(check_model(path, shapes, filled, strict))
        self.trained = list(check_model(path, trained, filled, False))

    def _is_filled(self, name: str) -> bool:
        return (int(name.split(".", 2)[1]) if name.startswith(".") else 0) not in self._wholes

    def load_wholes(self, strict: bool) -> None:
        """Load the modules that get a whole state_dict (CheckpointError)."""
        checkpoint, tensors = self._checkpoint, self._tensors
        for number in sorted(self._wholes):
            module, prefix = self._modules[number], prefix_of(number)
            state = dict(self._extra[number])
            for name in checkpoint.tensors(MODEL) if tensors is None else tensors:
                if name.startswith(prefix or ".") == bool(prefix):
                    if tensors is None or name in self._trained:
                        value = checkpoint.read_tensor(TRAINING if name in self._trained else MODEL, name)
                    else:
                        value = tensors[name]
                    state[name.removeprefix(prefix)] = value
            for piece in self.frozen:
                if piece.name.startswith(prefix or ".") == bool(prefix):
                    state[piece.name.removeprefix(prefix)] = piece.tensor
            try:
                module.load_state_dict({own_name(module, name): value for name, value in state.items()}, strict=strict)
            except Exception as error:  # from a user's method
                raise CheckpointError(f"{checkpoint.path}: {type(module).__name__} cannot load it: {error}") from error

    def set_extra_states(self) -> None:
        """Restore the extra state of the modules that are read in place."""
        for number, (module, states) in enumerate(zip(self._modules, self._extra, strict=True)):
            if number not in self._wholes:
                set_extra_states(module, states)


def _shapes(checkpoint: StoredCheckpoint, section: str) -> Shapes:
    stored = checkpoint.tensors(section) if section in checkpoint.sections else {}
    return {name: entry.shape for name, entry in stored.items()}


def _restored(checkpoint: StoredCheckpoint, state: dict[str, Any], seed: int, engine: EngineCheckpoints) -> Restored:
    """Return a rank's part of a checkpoint (CheckpointError if an RNG state is missing or malformed).

    It is from a rank with the same part of the data. If the saved run had no such rank, the generators start from seeds
    derived from the run's seed.
    """
    rank, device, saved_ranks = engine.data_rank, engine.device, checkpoint.num_data_ranks
    is_alike = (checkpoint.world_size, saved_ranks) == (engine.world_size, engine.num_data_ranks)
    saved_state = checkpoint.rank_state(engine.rank if is_alike else checkpoint.first_rank(rank))
    rng = saved_state.get("rng") if saved_state is not None else None
    check_generator_states(saved_state, checkpoint.path)
    start = (seed, int(checkpoint.header["step"]), rank)
    if rank >= saved_ranks:
        rng = derived_rng_state(derive_seed(*start))
    if rng is not None:
        rng = taken_over(rng, device, derive_seed(*start))
    if saved_ranks != engine.num_data_ranks:
        first = checkpoint.rank_state(0)
        check_generator_states(first, checkpoint.path)
        return Restored(state, rng, None, first or {})
    if saved_state is None:
        return Restored(state, rng, None, {})
    # RNG states of earlier moments of the run.
    taken = {
        key: taken_over(value, device, derive_seed(*start, number))
        for number, (key, value) in enumerate(saved_state.items())
        if is_generator_state(value) and key != "rng"
    }
    return Restored(state, rng, {**saved_state, **taken}, saved_state)

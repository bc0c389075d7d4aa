"""Averaging: the base of callbacks that average weights. Every rank averages its shards of the weights.

A checkpoint has the sections of `trainwright/checkpoint/contents.py`. The weights of a callback's evaluations are the model,
and the weights in training are apart from it. The averages are stored in float32 where the model has a different dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_swa_multi_avg_fn

from trainwright.callbacks.base import Callback
from trainwright.checkpoint.contents import AVERAGE, MODEL, TRAINING
from trainwright.checkpoint.editing import fill
from trainwright.checkpoint.reader import StoredCheckpoint
from trainwright.checkpoint.tensors import Piece, tied_groups
from trainwright.rank_zero import rank_zero_warn
from trainwright.tensor_names import named_tensors

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer
    from trainwright.strategies import Strategy

Fold = Callable[[list[Tensor], list[Tensor], int], None]
"""Changes averages by values and their count so far, as `multi_avg_fn` of torch's AveragedModel does."""
AverageFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
MOST_ELEMENTS = 2**24
"""Elements that are converted at once, so that the values of a model in bfloat16 need little memory beside it."""
LOW = frozenset({torch.float16, torch.bfloat16})


def fold_of(avg_fn: AverageFunction | None, multi_avg_fn: Callable[..., None] | None = None) -> Fold:
    """Return the fold of a user's function, which gets the count as a 0-dim tensor. Without a function it is the equal mean."""

    def fold(averages: list[Tensor], values: list[Tensor], count: int) -> None:
        if avg_fn is None and multi_avg_fn is None:
            get_swa_multi_avg_fn()(averages, values, torch.tensor(count))  # type: ignore[no-untyped-call]
            return
        number = torch.tensor(count, device=averages[0].device)
        if multi_avg_fn is not None:
            multi_avg_fn(averages, values, number)
        elif avg_fn is not None:
            for average, value in zip(averages, values, strict=True):
                average.copy_(avg_fn(average, value, number))

    return fold


class AveragedPieces:
    """The averages of this rank's shards of the trained tensors, by name, in float32 or a wider dtype.

    A frozen parameter has no average until it trains. Its value is the average so far. `device` is where the averages are
    stored, or None for the device of the tensor. With `use_buffers` floating-point buffers of the state_dict are averaged too.
    """

    def __init__(self, fold: Fold, device: torch.device | None, use_buffers: bool) -> None:
        self._fold, self._device, self._use_buffers = fold, device, use_buffers
        self._averages: dict[str, Tensor] = {}
        self._buffers: set[str] = set()
        self._infinite: set[int] = set()
        """The ids of the averages of buffers that have infinite elements by design, such as a mask: these have no mean."""
        self._frozen: list[nn.Parameter] = []
        self._kept: dict[str, Tensor] = {}
        """The weights in training, while the module holds the averages."""

    @property
    def are_shown(self) -> bool:
        """Return whether the module holds the averages."""
        return bool(self._kept)

    def join(self, strategy: Strategy, module: nn.Module) -> None:
        """Begin the missing averages of tensors that train."""
        self._begin(self._trained(strategy, module))

    def _begin(self, pieces: Iterable[Piece]) -> None:
        """Begin the averages of pieces that have none with their present values."""
        for group in tied_groups(piece for piece in pieces if piece.name not in self._averages):
            value = group[0].tensor
            dtype = torch.float32 if value.dtype in LOW else value.dtype
            # Without copy=True, `to` returns the weight itself where nothing is to be converted.
            average = value.to(self._device or value.device, dtype, copy=True)
            self._averages.update((piece.name, average) for piece in group)
            if group[0].name in self._buffers and not average.isfinite().all():
                self._infinite.add(id(average))

    def join_unfrozen(self, strategy: Strategy, module: nn.Module) -> None:
        """Call `join` if a frozen parameter trains again."""
        if any(parameter.requires_grad for parameter in self._frozen):
            self.join(strategy, module)

    def _trained(self, strategy: Strategy, module: nn.Module) -> list[Piece]:
        """Return the pieces of the tensors that train now, and record the frozen parameters."""
        named = named_tensors(module)
        self._frozen = [each for each in module.parameters() if not each.requires_grad]
        names = {name for name, each in named if each.requires_grad}
        if self._use_buffers:
            buffers = set(module.buffers())
            self._buffers = {name for name, each in named if each in buffers and _can_be_averaged(each)}
        return [piece for piece in strategy.model_pieces(module) if piece.name in names | self._buffers]

    @torch.no_grad()
    def update(self, strategy: Strategy, module: nn.Module, count: int) -> None:
        """Take the current weights into averages of `count` earlier ones."""
        if not count:
            self._averages.clear()
            self.join(strategy, module)
            return
        pairs = list(self._pairs(strategy.model_pieces(module)))
        for some in _portions(pairs):
            self._fold([average for average, _ in some], [_like(value, average) for average, value in some], count)
        # A mean with infinite elements became NaN. These elements get the current value.
        for average, value in pairs if self._infinite else ():
            if id(average) in self._infinite:
                average.copy_(torch.where(average.isfinite(), average, _like(value, average)))

    def _pairs(self, pieces: Iterable[Piece]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every average once, with the tensor that the module holds."""
        seen: set[int] = set()
        for piece in pieces:
            average = self._averages.get(piece.name)
            if average is not None and id(average) not in seen:
                seen.add(id(average))
                yield average, piece.tensor

    @torch.no_grad()
    def show(self, strategy: Strategy, module: nn.Module, kept: Collection[str] = ()) -> None:
        """Put the averages into the module, and keep its weights and the tensors named `kept`. Collective."""
        pieces = strategy.model_pieces(module)
        names = self._averages.keys() | set(kept)
        for group in tied_groups(piece for piece in pieces if piece.name in names):
            value = group[0].tensor.clone()
            self._kept.update((piece.name, value) for piece in group)
        for average, value in self._pairs(pieces):
            value.copy_(average)
        strategy.refresh_weights([module])
        strategy.broadcast_buffers([module])  # the averages of buffers are rank 0's

    @torch.no_grad()
    def put_back(self, strategy: Strategy, module: nn.Module, refreshes: bool = True) -> None:
        """Put the weights in training back into the module. Collective, unless `refreshes` is False."""
        if refreshes or not strategy.capabilities.pieces_are_collective:
            for piece in strategy.model_pieces(module):
                if piece.name in self._kept:
                    piece.tensor.copy_(self._kept[piece.name])
        self._kept.clear()
        if refreshes:
            strategy.refresh_weights([module])

    def leave(self, strategy: Strategy, module: nn.Module) -> None:
        """Drop the averages that the module holds itself, for good."""
        held = {piece.name: piece.tensor.dtype for piece in strategy.model_pieces(module)}
        self._averages = {name: each for name, each in self._averages.items() if held.get(name) != each.dtype}

    def parts(
        self, strategy: Strategy, module: nn.Module, is_model: bool, is_final: bool
    ) -> dict[str, dict[str, Tensor]]:
        """Return the tensors for a checkpoint, by section and name.

        `is_model`: the averages are its model. `is_final`: the module contains them, with later changes by its user.
        """
        found: dict[str, dict[str, Tensor]] = {}
        pieces = {piece.name: piece.tensor for piece in strategy.model_pieces(module)}
        averages = {name: average for name, average in self._averages.items() if name in pieces}
        if is_model:
            found[TRAINING] = self._kept or {name: pieces[name] for name in averages}
            found[AVERAGE] = {name: each for name, each in averages.items() if each.dtype != pieces[name].dtype}
            if not is_final:
                found[MODEL] = averages
        else:
            found = {TRAINING: self._kept, AVERAGE: averages}
        return {section: dict(tensors) for section, tensors in found.items() if tensors}

    @torch.no_grad()
    def load(
        self,
        strategy: Strategy,
        module: nn.Module,
        checkpoint: StoredCheckpoint,
        edited: Mapping[str, Tensor] | None,
        is_model: bool,
    ) -> None:
        """Read the averages of a checkpoint of any strategy and number of ranks.

        `edited` is its model if a hook has changed it. `is_model`: its model is the averages.

        Raises:
            CheckpointError: a file cannot be read.
        """
        stored_in = {name: set(checkpoint.tensors(name)) for name in (AVERAGE, TRAINING) if name in checkpoint.sections}
        apart, training = stored_in.get(AVERAGE, set()), stored_in.get(TRAINING, set())
        in_model = training - apart if is_model else set()
        self.join(strategy, module)
        pieces = strategy.model_pieces(module)
        self._begin(piece for piece in pieces if piece.name in apart | in_model)  # also those frozen since the save
        stored = [replace(each, tensor=self._averages[each.name]) for each in pieces if each.name in self._averages]
        if apart:
            checkpoint.read_into(AVERAGE, [piece for piece in stored if piece.name in apart])
        averages = [piece for piece in stored if piece.name in in_model]
        if edited is not None:
            fill([piece for piece in averages if piece.name in edited], edited)
        elif in_model:
            checkpoint.read_into(MODEL, averages)


def _can_be_averaged(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.layout is torch.strided


def _like(value: Tensor, average: Tensor) -> Tensor:
    return value.to(average.device, average.dtype)


def _portions(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Group pairs of an average and its value by the device and dtype of the average, and cut the groups to a size."""
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    elements = 0
    for average, value in pairs:
        elements += average.numel()
        groups.setdefault((average.device, average.dtype), []).append((average, value))
        if elements > MOST_ELEMENTS:
            yield from groups.values()
            groups, elements = {}, 0
    yield from groups.values()


class Averaging(Callback):
    """A callback that averages weights: the base of WeightAveraging and StochasticWeightAveraging."""

    reads_outputs = False
    _is_model = True
    """Whether the averages are the model of a checkpoint. Otherwise they are stored beside it."""

    def __init__(self, device: torch.device | str | int | None, use_buffers: bool) -> None:
        self._use_buffers = use_buffers
        self._device = None if device is None else torch.device(device)
        self.n_averaged = 0
        """How many times the weights were taken into the average."""
        self._pieces: AveragedPieces | None = None
        self._is_training = self._is_final = self._is_loaded = False

    def _fold(self) -> Fold:
        """Return how weights are taken into averages."""
        raise NotImplementedError

    @property
    def pieces(self) -> AveragedPieces:
        """The averages of this rank, from a fit's beginning on."""
        assert self._pieces is not None, "no fit has begun"
        return self._pieces

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_pieces": None}  # they are as large as the weights, and this process's part

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        self._is_training = stage == "fit"
        if not self._is_training:
            if not self._is_final:  # of a fit that failed
                self.n_averaged = 0
            return
        averaging = [type(each).__name__ for each in trainer.callbacks if isinstance(each, Averaging)]
        if len(averaging) > 1:
            raise ValueError(f"{' and '.join(averaging)} average the same weights; remove one of them.")
        self.n_averaged, self._is_final, self._is_loaded = 0, False, False
        self._pieces = AveragedPieces(self._fold(), self._device, self._use_buffers)

    def on_after_backward(self, trainer: AnyTrainer, module: Module) -> None:
        # Before the optimizer steps: the average of an unfrozen parameter begins with its untrained value.
        if self.n_averaged:
            self.pieces.join_unfrozen(trainer.strategy, module)

    def on_train_epoch_start(self, trainer: AnyTrainer, module: Module) -> None:
        if self.n_averaged:
            self.pieces.join(trainer.strategy, module)

    def _update(self, trainer: TrainerProtocol, module: Module) -> None:
        self.pieces.update(trainer.strategy, module, self.n_averaged)
        self.n_averaged += 1

    def _show(self, trainer: TrainerProtocol, module: Module, kept: Collection[str] = ()) -> bool:
        """Put the averages into the module, and return whether there are any. Collective."""
        if self.n_averaged and not self.pieces.are_shown:
            self.pieces.show(trainer.strategy, module, kept)
        return self.n_averaged > 0

    def on_train_end(self, trainer: AnyTrainer, module: Module) -> None:
        self._is_final = self._show(trainer, module)
        if self._is_final and self._is_model:
            self.pieces.leave(trainer.strategy, module)

    def on_exception(self, trainer: AnyTrainer, module: Module, exception: BaseException) -> None:
        self._put_back(trainer, module)

    def teardown(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        self._put_back(trainer, module)

    def _put_back(self, trainer: TrainerProtocol, module: Module) -> None:
        """Put the weights in training back after an evaluation that was not ended."""
        if self._pieces is not None and self._pieces.are_shown and not self._is_final:
            self._pieces.put_back(trainer.strategy, module, refreshes=trainer.world_size == 1)  # a rank may be gone

    def sharded_state_dict(self, trainer: AnyTrainer, module: Module) -> Mapping[str, Mapping[str, Tensor]]:
        if self._pieces is None or not self.n_averaged:
            return {}
        return self._pieces.parts(trainer.strategy, module, self._is_model, self._is_final)

    def load_sharded_state_dict(
        self, trainer: AnyTrainer, module: Module, checkpoint: StoredCheckpoint, edited: Mapping[str, Tensor] | None
    ) -> None:
        if self.n_averaged and not {AVERAGE, TRAINING} & set(checkpoint.sections):  # saved by a copy without its pieces
            self.n_averaged, self._is_loaded = 0, False
        if self.n_averaged:
            self.pieces.load(trainer.strategy, module, checkpoint, edited, self._is_model)

    def on_resume_start(self, trainer: AnyTrainer, module: Module) -> None:
        if not self._is_loaded:
            rank_zero_warn(
                f"{trainer.resume_source} holds no average of {type(self).__name__}: the run resumes from its weights, and "
                f"the average begins with the weights of its next update after step {trainer.global_step}.",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        return {"n_averaged": self.n_averaged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n_averaged, self._is_loaded = int(state["n_averaged"]), True

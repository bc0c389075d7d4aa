"""WeightAveraging, EMAWeightAveraging and the base of callbacks that average weights: every rank averages its shards.

A checkpoint has the sections of `trainwright/checkpoint/contents.py`: the weights of a callback's evaluations as the model, the
weights in training apart from it, and the averages in float32 where the model has a different dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from trainwright.arguments import refuses_unknown
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

    A parameter that is frozen has no average until it trains: its own value is the average so far. `device` is where they are
    kept, or None for the device of the tensor. With `use_buffers` floating-point buffers of the state_dict are averaged too.
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
        apart, in_model = (
            checkpoint.tensors(name).keys() if name in checkpoint.sections else set[str]()
            for name in (AVERAGE, TRAINING)
        )
        in_model = in_model - apart if is_model else set()
        own = set(module.parameters())
        parameters = {name for name, each in named_tensors(module) if each in own}
        self.join(strategy, module)
        pieces = strategy.model_pieces(module)
        self._begin(piece for piece in pieces if piece.name in parameters & (apart | in_model))  # frozen since the save
        stored = [replace(each, tensor=self._averages[each.name]) for each in pieces if each.name in self._averages]
        if apart:
            checkpoint.read_into(AVERAGE, [piece for piece in stored if piece.name in apart])
        if edited is not None:
            fill([piece for piece in stored if piece.name in in_model & edited.keys()], edited)
        elif in_model:
            checkpoint.read_into(MODEL, [piece for piece in stored if piece.name in in_model])


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
            raise ValueError(
                f"{' and '.join(averaging)} average the same weights, and a module can have one average; remove one of them."
            )
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
        """Take the weights into the average."""
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
        self.n_averaged = int(state["n_averaged"])
        self._is_loaded = True


class WeightAveraging(Averaging):
    """Averages the weights during training, by default with equal weights, as torch's AveragedModel does.

    The module holds the averages during every validation of fit, and once the training has ended. They are the model of a
    checkpoint too, so that ModelCheckpoint's best weights are the scored weights. A resumed run continues from the weights
    in training, bitwise. Before the first update, all of these are the weights in training.

    It works under every strategy: every rank averages the pieces of the weights that it holds, and a run resumes under another
    strategy or number of processes. Averages of float16 and bfloat16 weights are in float32. Parameters that are frozen
    have no average until they train. Buffers of integers keep their latest value, and so do elements of a buffer
    that have no finite mean (a mask of -inf).

    Override `should_update` to choose the steps or epochs after which the average is updated.

    Args:
        device: where the averages are kept, or None for where the weights are. "cpu" saves memory of a GPU, and every update
            copies the weights there.
        use_buffers: average the floating-point buffers of the state_dict too, such as running statistics. If False,
            evaluations use the latest ones.
        avg_fn: called with an average, the weights and a 0-dim tensor, the number of updates before. It returns the new
            average. It has to be elementwise: a rank may hold a 1-D part of a tensor.
        multi_avg_fn: the same for lists of tensors on one device and of one dtype. It changes the averages.

    Raises:
        ValueError: both functions are given, or in fit another callback averages too.
        TypeError: a function cannot be called.

    >>> class FromSecondEpoch(tw.WeightAveraging):
    ...     def should_update(self, step_idx=None, epoch_idx=None):
    ...         return epoch_idx is not None and epoch_idx >= 1
    >>> tw.Trainer(callbacks=FromSecondEpoch(), max_epochs=3, enable_model_summary=False).fit(module, loader, val_loader)
    """

    @refuses_unknown
    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        *,
        avg_fn: AverageFunction | None = None,
        multi_avg_fn: Callable[[list[Tensor], list[Tensor], Tensor], None] | None = None,
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise ValueError("avg_fn and multi_avg_fn both say how to average; pass one of them.")
        for name, function in (("avg_fn", avg_fn), ("multi_avg_fn", multi_avg_fn)):
            if function is not None and not callable(function):
                raise TypeError(f"{name}={function!r} cannot be called; pass a function of averages and weights.")
        super().__init__(device, use_buffers)
        self._avg_fn, self._multi_avg_fn = avg_fn, multi_avg_fn
        self._latest_step, self._latest_update_epoch = 0, -1
        """The steps that should_update has decided on, and the latest epoch after which it updated."""

    def _fold(self) -> Fold:
        return fold_of(self._avg_fn, self._multi_avg_fn)

    @property
    def state_key(self) -> str:
        """Return one key for all subclasses, which differ in when they update: each continues the average of another."""
        return "WeightAveraging"

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update the average now, by default after every optimizer step.

        Args:
            step_idx: the number of an optimizer step of the latest batch, from 0, or None at an epoch's end. If a batch makes
                several steps, this is called for each, and one update follows.
            epoch_idx: the number of the epoch that ends, from 0, before the validation of its end, or None after a step.
        """
        return step_idx is not None

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        super().setup(trainer, module, stage)
        if stage == "fit":
            self._latest_step, self._latest_update_epoch = 0, -1

    def on_train_batch_end(self, trainer: AnyTrainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._follow_step(trainer, module)

    def _follow_step(self, trainer: TrainerProtocol, module: Module) -> None:
        steps = range(self._latest_step, trainer.global_step)  # several, if a batch steps several optimizers
        self._latest_step = trainer.global_step
        due = [self.should_update(step_idx=each) for each in steps]  # each is decided on
        if any(due):
            self._update(trainer, module)

    def on_train_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        if not trainer.state.progress.is_leaving:  # a run that resumes within the epoch ends it
            self._follow_epoch(trainer, module)

    def _follow_epoch(self, trainer: TrainerProtocol, module: Module) -> None:
        epoch = trainer.current_epoch
        if epoch > self._latest_update_epoch and self.should_update(epoch_idx=epoch):
            self._update(trainer, module)
            self._latest_update_epoch = epoch

    def on_resume_end(self, trainer: AnyTrainer, module: Module) -> None:
        """Make the update that was due when an earlier callback wrote the checkpoint that the run resumes from."""
        self._follow_step(trainer, module)

    def on_resume_start(self, trainer: AnyTrainer, module: Module) -> None:
        super().on_resume_start(trainer, module)
        if not self._is_loaded:
            self._latest_step = trainer.global_step

    def on_validation_start(self, trainer: AnyTrainer, module: Module) -> None:
        if not self._is_training:
            return
        if not trainer.sanity_checking and not trainer.state.progress.is_mid_epoch_validation:
            with torch.inference_mode(False):  # later updates change the averages
                self._follow_epoch(trainer, module)  # so that the epoch's checkpoint contains the scored weights
        self._show(trainer, module)

    def on_validation_end(self, trainer: AnyTrainer, module: Module) -> None:
        if self._is_training and self.n_averaged:
            self.pieces.put_back(trainer.strategy, module)

    def state_dict(self) -> dict[str, Any]:
        steps = {"latest_update_step": self._latest_step, "latest_update_epoch": self._latest_update_epoch}
        return {**super().state_dict(), **steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._latest_step = int(state["latest_update_step"])
        self._latest_update_epoch = int(state["latest_update_epoch"])


class EMAWeightAveraging(WeightAveraging):
    """Keeps an exponential moving average of the weights: average = decay * average + (1 - decay) * weights.

    It begins with the weights of the first update. For the rest see WeightAveraging.

    Args:
        device, use_buffers: as in WeightAveraging.
        decay: from 0 to 1.
        update_every_n_steps: update after every optimizer step whose number, from 0, is a multiple of this, or 0 for none.
        update_starting_at_step: the number of the first such step, from 0, or None for the first of the run.
        update_starting_at_epoch: update also at the end of every epoch from this number, from 0, on, or None for none. For
            updates only after epochs, pass update_every_n_steps=0.

    Raises:
        ValueError: decay, a step or an epoch is out of its range, or no update would be made.

    >>> averaging = tw.EMAWeightAveraging(decay=0.99, update_starting_at_step=4)
    >>> best = tw.ModelCheckpoint("runs/averaged", monitor="val_loss")
    >>> trainer = tw.Trainer(callbacks=[averaging, best], max_epochs=1, enable_model_summary=False)
    >>> trainer.fit(module, loader, val_loader)  # val_loss and the checkpoint are of the averaged weights
    """

    @refuses_unknown
    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay={decay!r} is not accepted; pass a number from 0 (the latest weights) to 1.")
        if update_every_n_steps == 0 and update_starting_at_epoch is None:
            raise ValueError(
                "update_every_n_steps=0 makes no update. Pass 1 or more, or update_starting_at_epoch to update after epochs."
            )
        super().__init__(device, use_buffers)
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch
        for name in ("update_every_n_steps", "update_starting_at_step", "update_starting_at_epoch"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r} is negative; pass an integer of at least 0.")

    def _fold(self) -> Fold:
        fold: Fold = get_ema_multi_avg_fn(self.decay)  # type: ignore[no-untyped-call]
        return fold

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None:
            every = self.update_every_n_steps
            return every > 0 and step_idx >= (self.update_starting_at_step or 0) and step_idx % every == 0
        start = self.update_starting_at_epoch
        return start is not None and epoch_idx is not None and epoch_idx >= start

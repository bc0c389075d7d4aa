"""Prediction writers: one to subclass, and one that writes safetensors files, which `load_predictions` reads in order.

    predictions.json                   written last, by rank 0: the list of files, and how predictions are nested
    part-1f0c9a2b-00001-00003.safetensors   run, rank and number: the samples' keys and rows

A sample's key is its index in the dataset. Without indices it is its position in the stream of batches.
"""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor

from trainwright.arguments import refuses_unknown
from trainwright.callbacks.base import Callback
from trainwright.checkpoint.codec import decode, encode
from trainwright.checkpoint.filesystem import note_new, resolve
from trainwright.data.transfer import to_device
from trainwright.distributed.vendor import count_issued
from trainwright.errors import a_type_of
from trainwright.paths import absolute

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer

INTERVALS = ("batch", "epoch", "batch_and_epoch")
HOST = torch.device("cpu")
MANIFEST = "predictions.json"
KEYS = "keys"
ROWS_BITS = 32
"""A key without indices is the number of the batch, then this many bits for the row."""


class BasePredictionWriter(Callback):
    """The base of prediction writers: override `write_on_batch_end`, `write_on_epoch_end` or both.

    Predict with return_predictions=False, so that the predictions are not collected too.

    Every rank gets different batches. Together they are the whole dataset, with every sample once.

    Args:
        write_interval: "batch", "epoch" (this rank's predictions are kept on the host until then) or "batch_and_epoch".

    Raises:
        ValueError: the interval is unknown.
        NotImplementedError: from predict, if the method of the interval is not overridden.

    >>> class SaveBatches(tw.BasePredictionWriter):
    ...     def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
    ...         torch.save(prediction, f"{trainer.global_rank}-{batch_idx}.pt")
    >>> tw.Trainer(callbacks=SaveBatches()).predict(module, test_loader, return_predictions=False)
    >>> torch.load("0-7.pt").shape
    torch.Size([4, 3])
    """

    @refuses_unknown
    def __init__(self, write_interval: str = "batch") -> None:
        if write_interval not in INTERVALS:
            raise ValueError(f"write_interval={write_interval!r} is unknown; choose from {', '.join(INTERVALS)}.")
        self.write_interval = write_interval
        self._predictions: list[list[Any]] = []
        self._indices: list[list[Any]] = []
        self._communicates = False
        """Whether write_on_batch_end communicates, as seen in this rank's first batch."""

    def write_on_batch_end(
        self,
        trainer: AnyTrainer,
        module: Module,
        prediction: Any,
        batch_indices: list[Any] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Called after every batch on its rank. If it communicates, also on a rank without batches, with a dummy batch.

        `batch_indices` are the dataset indices of the samples, or None if the loader has none: an iterable dataset, a list
        of batches, several loaders combined.
        """
        raise NotImplementedError(f"{type(self).__name__} has no write_on_batch_end, but write_interval needs it.")

    def write_on_epoch_end(
        self, trainer: AnyTrainer, module: Module, predictions: list[Any], batch_indices: list[list[Any]]
    ) -> None:
        """Called once, with this rank's predictions: a list of batches, with several loaders a list of such lists.

        `batch_indices` has a list for every loader, with an entry for every batch.
        """
        raise NotImplementedError(f"{type(self).__name__} has no write_on_epoch_end, but write_interval needs it.")

    def on_predict_epoch_start(self, trainer: AnyTrainer, module: Module) -> None:
        loaders = len(trainer.num_predict_batches)
        self._predictions, self._indices = [[] for _ in range(loaders)], [[] for _ in range(loaders)]

    def on_predict_batch_end(
        self, trainer: AnyTrainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        # A dummy batch is written only if writing communicates: other ranks would wait.
        indices, is_own = trainer.batch_indices, not trainer.is_dummy_batch
        if self.write_interval != "epoch" and (is_own or self._communicates):
            before = count_issued() if batch_idx == 0 else None
            self.write_on_batch_end(trainer, module, outputs, indices, batch, batch_idx, dataloader_idx)
            if before is not None and is_own:
                self._communicates = count_issued() != before
        if self.write_interval != "batch" and is_own:
            self._predictions[dataloader_idx].append(to_device(outputs, HOST))
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        predictions, indices, self._predictions, self._indices = self._predictions, self._indices, [], []
        if self.write_interval != "batch":
            self.write_on_epoch_end(trainer, module, predictions[0] if len(predictions) == 1 else predictions, indices)


@dataclass
class Stream:
    """This rank's predictions for one loader: rows to be written, and written files."""

    nest: Any = None
    """How the tensors of a prediction are nested, as plain data."""
    form: Any = None
    """The shape of a row and the dtype of every tensor."""
    waiting: dict[str, list[Tensor]] = field(default_factory=dict)
    waiting_bytes: int = 0
    files: list[str] = field(default_factory=list)


class TensorPredictionWriter(BasePredictionWriter):
    """Writes predictions as they are computed, so that no process stores them all. `load_predictions` reads them.

    With fast_dev_run the predictions are checked, and nothing is written.
    predict_step returns a tensor with a row for every sample, or a nest (dict, list, tuple) of such tensors.

    Args:
        dirpath: a folder that all ranks share, or an fsspec URL. It must not hold the predictions of another run.
        file_megabytes: the approximate size of a file, in MiB.

    Raises:
        ValueError: file_megabytes is not positive, or in predict a tensor does not have a row for every sample.
        TypeError: from predict, if predict_step returns more than tensors, or nests them differently.
        FileExistsError: from predict, on every rank, if dirpath holds the predictions of another run.

    >>> writer = tw.TensorPredictionWriter("predictions")
    >>> tw.Trainer(callbacks=writer).predict(module, test_loader, return_predictions=False)
    >>> tw.load_predictions("predictions").shape
    torch.Size([32, 3])
    """

    @refuses_unknown
    def __init__(self, dirpath: str | os.PathLike[str], file_megabytes: float = 64.0) -> None:
        super().__init__("batch")
        if not file_megabytes > 0:
            raise ValueError(f"file_megabytes={file_megabytes!r} is not accepted; pass a number above 0.")
        self.dirpath = absolute(dirpath)
        self.file_bytes = int(file_megabytes * 2**20)
        self._run = ""
        self._streams: list[Stream] = []

    def on_predict_epoch_start(self, trainer: AnyTrainer, module: Module) -> None:
        """Create the folder, and raise FileExistsError on every rank if it holds predictions already. Collective."""
        files, path = resolve(self.dirpath)
        is_taken = False
        if trainer.is_global_zero and not trainer.fast_dev_run:
            for new in (path, f"{path}/{MANIFEST}") if files.has_rename else ():
                note_new(new)
            files.make_directories(path)
            is_taken = files.exists(f"{path}/{MANIFEST}")
        # The run's name keeps its files apart from the files of a run that did not end.
        self._run, is_taken = trainer.engine.ranks.broadcast([uuid.uuid4().hex[:8], is_taken], "the start of predict")
        if is_taken:
            raise FileExistsError(
                f"{self.dirpath} holds the predictions of another run, which are not overwritten. Choose another dirpath, or "
                "move them away."
            )
        self._streams = [Stream() for _ in trainer.num_predict_batches]

    def write_on_batch_end(
        self,
        trainer: AnyTrainer,
        module: Module,
        prediction: Any,
        batch_indices: list[Any] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        stream = self._streams[dataloader_idx]
        nest, tensors = encode(prediction, "predict_step's output")
        rows = {f"rows/{name}": tensor.detach().cpu() for name, tensor in tensors.items()}
        form = {name: (each.shape[1:], each.dtype) for name, each in rows.items()}
        if stream.form is None:
            stream.nest, stream.form = nest, form
        if (nest, form) != (stream.nest, stream.form) or not tensors:
            raise TypeError(
                f"predict_step returned {a_type_of(prediction)} with another nest, row shape or dtype than before, or with "
                "more than tensors. Return the same nest of tensors for each batch, and pad rows of different lengths."
            )
        first = next(iter(rows.values()))
        samples = len(batch_indices) if batch_indices is not None else len(first) if first.dim() else 0
        for each in rows.values():
            if each.dim() == 0 or len(each) != samples:
                raise ValueError(
                    f"predict_step returned a tensor of shape {tuple(each.shape)} for a batch of {samples} samples; a "
                    "TensorPredictionWriter takes tensors with a row for each sample."
                )
        rows[KEYS] = self._keys(trainer, batch_indices, batch_idx, samples)
        for name, each in rows.items():
            stream.waiting.setdefault(name, []).append(each)
            stream.waiting_bytes += each.nbytes
        if stream.waiting_bytes >= self.file_bytes:
            self._write(trainer, stream)

    def _keys(self, trainer: TrainerProtocol, indices: list[Any] | None, batch_idx: int, samples: int) -> Tensor:
        if indices is not None:
            return torch.tensor(indices, dtype=torch.int64)
        number = batch_idx * trainer.world_size + trainer.global_rank
        return torch.arange(samples, dtype=torch.int64) + (number << ROWS_BITS)

    def _write(self, trainer: TrainerProtocol, stream: Stream) -> None:
        if not stream.waiting:
            return
        files, path = resolve(self.dirpath)
        number = sum(len(each.files) for each in self._streams)
        name = f"part-{self._run}-{trainer.global_rank:05d}-{number:05d}.safetensors"
        tensors = {key: torch.cat(each) for key, each in stream.waiting.items()}
        if not trainer.fast_dev_run:
            files.put(f"{path}/{name}", safetensors.torch.save(tensors))
        stream.files.append(name)
        stream.waiting, stream.waiting_bytes = {}, 0

    def on_predict_epoch_end(self, trainer: AnyTrainer, module: Module) -> None:
        """Write the remaining rows, then on rank 0 the manifest. Collective."""
        for stream in self._streams:
            self._write(trainer, stream)
        ranks, call = trainer.engine.ranks, "the end of predict"
        written = ranks.exchange([[stream.nest, stream.files] for stream in self._streams], call)
        loaders = []
        for streams in zip(*written, strict=True):
            nests = [nest for nest, _ in streams if nest is not None]
            names = [name for _, names in streams for name in names]
            loaders.append({"nest": nests[0] if nests else None, "files": names})
        if trainer.is_global_zero and not trainer.fast_dev_run:
            files, path = resolve(self.dirpath)
            files.put(f"{path}/{MANIFEST}", json.dumps({"format": 1, "loaders": loaders}, indent=1).encode())
        ranks.wait(call)  # on every rank the manifest is there after this
        self._streams = []


def load_predictions(dirpath: str | os.PathLike[str]) -> Any:
    """Return the predictions of a TensorPredictionWriter: every sample once, in the order of the dataset.

    The tensors are nested as predict_step returned them, with a row for every sample. For several loaders it is a
    list. Any process may call it, whatever the number of ranks that wrote.

    Raises:
        FileNotFoundError: there are no predictions, or their run has not ended.

    >>> trainer = tw.Trainer(callbacks=tw.TensorPredictionWriter("scores"))
    >>> trainer.predict(module, test_loader, return_predictions=False)
    >>> classes = tw.load_predictions("scores").argmax(dim=1)
    >>> len(classes) == len(test_loader.dataset)
    True
    """
    files, path = resolve(str(dirpath))
    if not files.exists(f"{path}/{MANIFEST}"):
        raise FileNotFoundError(
            f"{dirpath} has no {MANIFEST}, which a TensorPredictionWriter writes at the end of predict; give the dirpath "
            "of a run that has ended."
        )
    with files.open(f"{path}/{MANIFEST}") as stream:
        manifest = json.loads(stream.read())
    loaded = [_read(str(dirpath), each["nest"], each["files"]) for each in manifest["loaders"]]
    return loaded[0] if len(loaded) == 1 else loaded


def _read(dirpath: str, nest: Any, names: list[str]) -> Any:
    files, path = resolve(dirpath)
    parts: dict[str, list[Tensor]] = {}
    for name in names:
        with files.open(f"{path}/{name}") as stream:
            for key, rows in safetensors.torch.load(stream.read()).items():
                parts.setdefault(key, []).append(rows)
    if not parts:
        return None
    # Stable, so that the same prediction of a repeated sample always stays.
    keys, order = torch.sort(torch.cat(parts.pop(KEYS)), stable=True)
    is_new = torch.ones_like(keys, dtype=torch.bool)
    is_new[1:] = keys[1:] != keys[:-1]  # a user's sampler may yield a sample twice
    return decode(nest, {key.removeprefix("rows/"): torch.cat(each)[order[is_new]] for key, each in parts.items()})

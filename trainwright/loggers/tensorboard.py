"""The TensorBoard logger: scalars, hyper-parameters and the graph, through torch's SummaryWriter."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from fsspec.core import url_to_fs
from torch import nn

from trainwright.arguments import refuse_unknown
from trainwright.devices.generators import forked_generators
from trainwright.errors import a_type_of
from trainwright.loggers.base import Params, SilentExperiment, flattened, to_dict, to_numbers
from trainwright.loggers.files import is_local
from trainwright.loggers.folder import FolderLogger, Row

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

ROWS_AT_ONCE = 100
FILE_SUFFIX = ".trainwright"
"""The suffix of our event files. Files of other writers in the folder are never touched."""
_WALL_TIME = "\0time"
WRITER_ARGUMENTS = {"comment", "purge_step", "max_queue", "flush_secs", "filename_suffix"}
"""Arguments of every SummaryWriter."""


class TensorBoardLogger(FolderLogger):
    """Writes TensorBoard event files and `hparams.json` into `<save_dir>/<name>/version_<n>`.

    Args:
        save_dir: a path, or an fsspec URL that tensorboard can write to, by default the trainer's default_root_dir.
        name: the folder of all runs.
        version: the run's folder, by default version_<n> with the next free n. A new run hides the steps of earlier ones.
        log_graph: log the graph of a module with `example_input_array`.
        default_hp_metric: log hp_metric=-1 with the hyper-parameters, so that TensorBoard's HPARAMS page has a metric.
        prefix: put before the name of every metric, with a dash.
        sub_dir: a folder within the run's folder.
        kwargs: other arguments of torch.utils.tensorboard.SummaryWriter. Our suffix is added to its filename_suffix.

    Raises:
        ImportError: tensorboard is not installed.
        TypeError: neither the logger nor SummaryWriter takes an argument.

    >>> logger = tw.TensorBoardLogger("runs", name="digits")
    >>> tw.Trainer(logger=logger, max_epochs=1, enable_model_summary=False).fit(module, loader)
    >>> logger.log_dir
    '...runs/digits/version_0'
    """

    kind = "tensorboard"

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = "trainwright_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ImportError("TensorBoardLogger needs tensorboard: pip install tensorboard, or use CSVLogger.")
        if not kwargs.keys() <= WRITER_ARGUMENTS:
            _refuse_unknown(kwargs)
        super().__init__(save_dir, name, version, prefix, ROWS_AT_ONCE)
        kwargs["filename_suffix"] = f"{kwargs.get('filename_suffix', '')}{FILE_SUFFIX}"
        self.sub_dir = os.fspath(sub_dir) if sub_dir is not None else None
        self._log_graph, self._default_hp_metric, self._kwargs = log_graph, default_hp_metric, kwargs
        self._experiment: SummaryWriter | None = None
        self._opening = threading.Lock()  # the writer's thread and the user's may both open it
        self._hp_metrics: dict[str, Any] = {}
        self._has_hp_metric = False
        self._latest_step = -1
        self._synced: dict[str, int] = {}
        self._num_unflushed = 0
        """The rows since the latest flush, which are lost if the next one fails."""
        self._earlier: dict[str, int] = {}
        """The event files that existed when the current one was opened, and their sizes."""

    def log_dir_in(self, folder: str) -> str:
        return f"{folder}/{self.sub_dir}" if self.sub_dir else folder

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue in the folder. Later events are removed once the run is restored.

        An open TensorBoard hides the steps after the checkpoint. Files of object stores, which cannot be truncated, keep them,
        and values of the checkpoint's step may appear twice.
        """
        if self._experiment is not None:
            self.close()
        super().load_state_dict(state)
        self._latest_step = int(state.get("purge_step", 0)) - 1
        self._has_hp_metric = bool(state.get("hparams"))

    def _leave_run(self) -> None:
        self.close()
        super()._leave_run()
        self._hp_metrics, self._has_hp_metric, self._latest_step, self._synced = {}, False, -1, {}

    def drop_later_rows(self) -> None:
        files = self._position.pop("files", None)
        if files is None or self._folder is None or not self._is_writer:
            return
        for path, size in (self._event_files() if self._experiment is None else self._earlier).items():
            length = files.get(os.path.basename(path))
            if length is None:
                os.unlink(path)  # of a resumed and killed run
            elif length < size:
                os.truncate(path, length)

    def _written(self) -> dict[str, Any]:
        """Write the buffered rows, and return the sizes of the event files."""
        self.flush()
        position = {"purge_step": self._latest_step + 1}
        if not is_local(str(self.log_dir)):
            return position
        files = self._event_files()
        for path, size in files.items():
            if self._synced.get(path) != size:
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        self._synced = files
        return {**position, "files": {os.path.basename(path): size for path, size in files.items()}}

    def _event_files(self) -> dict[str, int]:
        """Return the sizes of this logger's event files in a local folder, by path."""
        pattern = re.compile(rf"events\.out\.tfevents\..*{re.escape(self._kwargs['filename_suffix'])}")
        with contextlib.suppress(FileNotFoundError), os.scandir(url_to_fs(str(self.log_dir))[1]) as entries:
            files = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
            return {entry.path: entry.stat().st_size for entry in files if pattern.fullmatch(entry.name)}
        return {}

    @property
    def experiment(self) -> Any:
        """Return the SummaryWriter, or on other ranks than 0 an object that does nothing. It may begin a run folder."""
        self._start_alone()
        return self._open() if self._is_writer else SilentExperiment()

    def _open(self) -> SummaryWriter:
        with self._opening:
            if self._experiment is None:
                from torch.utils.tensorboard import SummaryWriter

                if self._is_first_here and not self._position:
                    self._position["purge_step"] = 0  # TensorBoard drops the steps of an earlier run in this folder
                self._is_first_here = False
                purge = {"purge_step": self._position.pop("purge_step")} if "purge_step" in self._position else {}
                self._earlier = self._event_files() if is_local(str(self.log_dir)) else {}
                arguments = {**purge, **self._kwargs}
                self._experiment = SummaryWriter(self.log_dir, **arguments)
                if self._earlier and max(files := self._event_files()) in self._earlier:
                    # Readers sort the names. Within a second, number 10 of this process comes before its number 9.
                    self._experiment.close()
                    for path in files.keys() - self._earlier.keys():
                        os.unlink(path)
                    time.sleep(1.01 - time.time() % 1)
                    self._experiment = SummaryWriter(self.log_dir, **arguments)
            return self._experiment

    def log_hyperparams(
        self,
        params: Params | None = None,
        metrics: Mapping[str, Any] | float | None = None,
        step: int | None = None,
    ) -> None:
        """Write the hyper-parameters for the HPARAMS page, with metrics. A number is hp_metric."""
        if not self._is_writer:
            return
        named = metrics if isinstance(metrics, Mapping) or metrics is None else {"hp_metric": metrics}
        if named:
            self._hp_metrics.update(to_numbers(named))
            self.log_metrics(named, step)
            self._hparams_digest = ""  # write them again, with these metrics
        super().log_hyperparams(to_dict(params or {}))

    def _on_hparams(self, params: dict[str, Any]) -> None:
        metrics = dict(self._hp_metrics)
        if not metrics and self._default_hp_metric:
            metrics = self._hp_metrics = {"hp_metric": -1}
            if not self._has_hp_metric:  # otherwise the resumed run has written it
                self._add_row({"step": 0, **metrics})
        shown = {name: _hyperparam(value) for name, value in flattened(params)}

        def write() -> None:
            from torch.utils.tensorboard.summary import hparams

            writer = self._open()._get_file_writer()  # type: ignore[no-untyped-call]
            for summary in hparams(shown, metrics):  # type: ignore[no-untyped-call]
                writer.add_summary(summary)

        self._writer.submit(write)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write images by name: arrays or tensors (rows, columns and channels, or channels first), or lists of images.

        SummaryWriter.add_images gets the `options`, such as dataformats="NHWC".

        Raises:
            ImportError: pillow, which encodes images, is not installed.
        """
        if not self._is_writer:
            return
        if importlib.util.find_spec("PIL") is None:
            raise ImportError("TensorBoardLogger.log_images needs pillow: pip install pillow.")
        self._step = step = self._step if step is None else step
        self._latest_step = max(self._latest_step, step)
        for name, images in values.items():
            array, layout = _as_images(images)
            self._writer.submit(
                partial(self._call, "add_images", name, array, step, **{"dataformats": layout, **options})
            )

    def log_texts(self, values: Mapping[str, str], step: int | None = None) -> bool:
        """Write texts by name."""
        if self._is_writer:
            self._step = step = self._step if step is None else step
            self._latest_step = max(self._latest_step, step)
            for name, text in values.items():
                name = f"{self.prefix}-{name}" if self.prefix else name
                self._writer.submit(partial(self._call, "add_text", name, text, step))
        return True

    def _call(self, method: str, *arguments: Any, **options: Any) -> None:
        getattr(self._open(), method)(*arguments, **options)

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Log the model's graph for these inputs, by default its `example_input_array`, or warn.

        The inputs are a tensor or a tuple of tensors. A run calls this for log_graph=True.
        """
        if input_array is not None:
            self._start_alone()
        elif not self._log_graph:
            return
        if not self._is_writer or self._folder is None:
            return
        example = getattr(model, "example_input_array", None) if input_array is None else input_array
        parts = tuple(example) if isinstance(example, (tuple, list)) else (example,)
        if not all(isinstance(part, torch.Tensor) for part in parts):
            warnings.warn(
                f"the graph was not logged: example_input_array of {type(model).__name__} is {a_type_of(example)}. Set it "
                "to a tensor, or a tuple of tensors, that forward takes.",
                stacklevel=2,
            )
            return
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        modes = [(module, module.training) for module in model.modules()]
        # With the name of the module's class, which the graph shows.
        stand_in: type[_StandIn] = type(type(model).__name__, (_StandIn,), {})
        try:
            with warnings.catch_warnings(), torch.no_grad(), forked_generators():
                warnings.simplefilter("ignore")  # the tracer is deprecated, and warns about the model's code
                model.eval()
                self._open().add_graph(stand_in(model), tuple(part.to(device) for part in parts))
        except Exception as error:  # tracing runs the user's forward
            warnings.warn(f"the graph was not logged: {type(error).__name__}: {error}", stacklevel=2)
        finally:
            for module, training in modes:
                module.training = training

    def close(self) -> None:
        try:
            self.flush()
        finally:
            experiment, self._experiment = self._experiment, None
            if experiment is not None:
                self._writer.submit(experiment.close)
                self._wait()

    def _add_row(self, row: Row) -> None:
        self._rows.append({**row, _WALL_TIME: time.time()})
        self._latest_step = max(self._latest_step, int(row["step"]))

    def _try(self, write: Callable[[], None]) -> None:
        """Write. After a failure the next row begins another file, since the thread of this file's writer has ended."""
        try:
            write()
        except OSError:
            self.num_missing, self._num_unflushed = self.num_missing + self._num_unflushed, 0
            self._experiment = None
            raise

    def _write_rows(self, rows: list[Row]) -> None:
        self._num_unflushed += len(rows)
        self._try(partial(self._add_rows, rows))

    def _add_rows(self, rows: list[Row]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        writer = self._open()._get_file_writer()  # type: ignore[no-untyped-call]
        for row in rows:
            step, moment = row.pop("step"), row.pop(_WALL_TIME)
            # One event per row: add_scalar writes one event per number, which takes six times as long.
            values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
            writer.add_summary(Summary(value=values), step, moment)

    def _submit_flush(self) -> None:
        def flush() -> None:
            if self._experiment is not None:  # read in the thread, which may be about to open it
                writers: dict[str, Any] = self._experiment.all_writers or {}
                for writer in list(writers.values()):  # add_scalars may add one meanwhile
                    writer.flush()
            self._num_unflushed = 0

        self._writer.submit(partial(self._try, flush))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_experiment": None, "_opening": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _opening=threading.Lock())


def _as_images(images: Any) -> tuple[Any, str]:
    """Return a copy of images as one array in host memory, and SummaryWriter's name of its layout."""
    import numpy

    def as_array(image: Any) -> Any:
        return numpy.array(image.detach().cpu().numpy() if isinstance(image, torch.Tensor) else image)

    data = numpy.stack([as_array(image) for image in images]) if isinstance(images, (list, tuple)) else as_array(images)
    if data.ndim == 2 or (data.ndim == 3 and isinstance(images, (list, tuple))):
        data = data[..., None]
    if data.ndim == 3:
        data = data[None]
    layouts = [layout for layout in ("NCHW", "NHWC") if data.ndim == 4 and data.shape[layout.index("C")] in (1, 3)]
    if not layouts:
        raise ValueError(
            f"log_images got an array of shape {tuple(data.shape)}; expected one image or a batch of images, with 1 or 3 "
            "channels first or last."
        )
    first = images[0] if isinstance(images, (list, tuple)) else images
    return data, layouts[0 if isinstance(first, torch.Tensor) else -1]  # if both fit: channels first for tensors


class _StandIn(nn.Module):
    """Has a module's parameters and calls it, since the tracer reads all properties, including `trainer`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self._hidden = (module,)
        self.training = False

    def forward(self, *inputs: Any) -> Any:
        return self._hidden[0](*inputs)


def _refuse_unknown(arguments: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that neither the logger nor the installed SummaryWriter accepts."""
    from torch.utils.tensorboard import SummaryWriter

    known = [*signature(TensorBoardLogger).parameters, *signature(SummaryWriter).parameters]
    known = [name for name in known if name not in ("kwargs", "log_dir")]
    refuse_unknown("TensorBoardLogger", {name: value for name, value in arguments.items() if name not in known}, known)


def _hyperparam(value: Any) -> Any:
    """Return a hyper-parameter for TensorBoard: a number, a bool or text."""
    if type(value).__module__ in ("numpy", "torch") and getattr(value, "ndim", 1) == 0:
        return value.item()
    return value if isinstance(value, (bool, int, float, str)) else str(value)

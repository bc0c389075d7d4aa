"""RunReport: at the end of a fit, one page on the run in the run's folder. plots/report.py makes the page itself."""

from __future__ import annotations

import json
import platform
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
from torch.nn.parameter import is_lazy

from trainwright import __version__
from trainwright.callbacks.base import Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.callbacks.model_summary import count_parameters
from trainwright.callbacks.work_tree import describe_work_tree
from trainwright.data.combined_loader import leaves
from trainwright.devices.hardware import MISSING, describe_devices, package_versions, peak_memory
from trainwright.distributed.environment import Environment
from trainwright.distributed.failures import is_secondary_failure
from trainwright.distributed.masking import Masked, masked, shown
from trainwright.distributed.sync_points import SyncPoint
from trainwright.loggers.base import RunResult
from trainwright.loggers.csv import CSVLogger
from trainwright.loggers.files import HPARAMS_NAME, is_local, write_file
from trainwright.loggers.folder import FolderLogger
from trainwright.loggers.run_record import RESULTS, find_record
from trainwright.plots import names_of_runs, panels_of
from trainwright.plots.curves import NOT_DRAWN, Panel
from trainwright.plots.page import GENERATOR
from trainwright.plots.report import Report, Section, with_section
from trainwright.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from trainwright.module import Module
    from trainwright.trainer.trainer import Trainer

REPORT_NAME = "report.html"
EVALUATIONS = {"test": "Test", "validate": "Validation after the fit"}
"""The calls whose metrics are added to the page of a fit, and the titles there."""
MOST_BYTES = 64 << 20
"""The most that is read of metrics.csv, or of an event file: a few seconds' work."""
MOST_METRICS = 100
"""The most metrics whose curves are drawn."""
LONGEST_HPARAMS = 1 << 20
"""The most bytes of hyper-parameters that are read."""
PACKAGE_FOLDER = Path(__file__).parents[1]


class RunReport(Callback):
    """Writes `report.html` into the run's folder at the end of a fit, also of a failed or stopped one, and prints its path.

    The page is one file that needs nothing else and loads nothing. It has the result (finished, stopped or failed, with the
    error and the user's frames), the curves, the checkpoints that are kept and their scores, the model's size, the
    hyper-parameters, where the time went (the profiler's table, if there is one), versions, devices, strategy and precision,
    the command line, and the git commit of the script. Values whose names say that they are secret are left out.

    The Trainer adds it if a CSVLogger or a TensorBoardLogger writes a folder; `Trainer(enable_report=False)` leaves it out.
    One rank writes, once everything else is closed: rank 0, or else the one that has failed, which ends the others. A resumed
    run writes the page again, with the curves of the whole run. The same Trainer's `test` and `validate` after the fit add
    their metrics to the page. Nothing is written with fast_dev_run, by predict, or by a fit that has not begun to train. If
    the page or a part of it cannot be made, that is one warning, since no run depends on it.

    >>> report = tw.RunReport()
    >>> trainer = tw.Trainer(callbacks=report, max_epochs=1, enable_model_summary=False)
    >>> trainer.fit(module, loader)
    report: .../trainwright_logs/version_0/report.html
    """

    def __init__(self) -> None:
        self.path = ""
        """The latest page; "" before it."""
        self._times, self._call = Times(), ""
        self._point: SyncPoint | None = None
        """Where the ranks that have failed agree on which of them writes."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_point": None}  # it belongs to this process's run

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._call = stage
        if stage == "fit":
            self._times = Times()
            self._point = trainer.engine.connection.sync_point("report")

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._times.begin_training(trainer.global_step, trainer.state.total_batches)

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        self._times.begin_validation()

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        self._times.end_validation()

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        self._times.end_training()

    def on_run_end(self, trainer: Trainer, module: Module, result: RunResult, error: BaseException | None) -> None:
        point, self._point = self._point, None
        loggers = [each for each in trainer.loggers if isinstance(each, FolderLogger) and each.log_dir]
        is_own = trainer.is_global_zero or (error is not None and not is_secondary_failure(error))
        if not loggers or trainer.fast_dev_run or not is_own:
            return
        logger = next((each for each in loggers if isinstance(each, CSVLogger)), loggers[0])
        folder = str(logger.log_dir)
        problems: list[str] = []
        try:
            if is_local(folder) and not Path(fsspec.core.url_to_fs(folder)[1]).is_dir():
                return  # it was moved away; the report alone does not bring it back
            if error is not None and point is not None and not _claim(point):
                return
            path = f"{folder}/{REPORT_NAME}"
            if self._call != "fit":
                if error is None and self.path == path and not _is_anothers(path):
                    self._add_scores(trainer, path)
            elif _is_anothers(path):
                problems.append(f"{path} is not a report of a run and is left alone; move it away")
            else:
                page = Facts(trainer, module, logger, self._times, problems).report(result, error).to_html()
                write_file(path, page.encode("utf-8", "replace"))
                self.path = path
                trainer.print(f"report: {path}")
        except Exception as failure:  # file systems and other packages raise errors of any type
            problems.append(f"{folder}/{REPORT_NAME} cannot be written ({type(failure).__name__}: {failure})")
        if problems:
            rank_zero_warn(
                f"RunReport: {'; '.join(problems)}. The run itself is not affected; enable_report=False leaves the report out.",
                stacklevel=2,
            )

    def _add_scores(self, trainer: Trainer, path: str) -> None:
        """Add the metrics of an evaluation to the page of the fit before it."""
        source = (trainer.ckpt_path or "none: the latest weights").removeprefix(f"{path.removesuffix(REPORT_NAME)}")
        rows = [("checkpoint", source), *((name, f"{each:.6g}") for name, each in trainer.callback_metrics.items())]
        with fsspec.open(path, "rb") as file:
            page = file.read().decode()
        write_file(path, with_section(page, Section(EVALUATIONS[self._call], rows)).encode())


def _claim(point: SyncPoint) -> bool:
    """Return whether this rank is the first of those that have failed; without the store, which may be gone, rank 0 is."""
    try:
        return point.claim()
    except RuntimeError:
        return point.rank == 0


class Times:
    """When a fit began, and how long its parts took; the counts when its training began."""

    def __init__(self) -> None:
        self.began = time.time()
        self.validations = 0
        self.seconds_of_validations = 0.0
        self.step = self.batch = 0
        self._began = time.monotonic()
        self._training: float | None = None
        self._validation: float | None = None
        self._end: float | None = None

    def begin_training(self, step: int, batch: int) -> None:
        self._training, self.step, self.batch = time.monotonic(), step, batch

    def begin_validation(self) -> None:
        self._validation = time.monotonic()

    def end_validation(self) -> None:
        if self._validation is not None and self._training is not None:  # the sanity check comes before
            self.validations += 1
            self.seconds_of_validations += time.monotonic() - self._validation
        self._validation = None

    def end_training(self) -> None:
        self._end = time.monotonic()

    @property
    def seconds(self) -> float:
        """Return how long the fit has taken."""
        return (self._end or time.monotonic()) - self._began

    @property
    def seconds_before(self) -> float:
        """Return how long what precedes the training took."""
        return (self._training or self._began) - self._began


class Facts:
    """What is known of a run at its end, as a report. A part that cannot be read becomes a sentence among the problems."""

    def __init__(
        self, trainer: Trainer, module: Module, logger: FolderLogger, times: Times, problems: list[str]
    ) -> None:
        self.trainer, self.module, self.logger, self.times, self.problems = trainer, module, logger, times, problems
        self.folder = str(logger.log_dir)
        self.command = _command()

    def report(self, result: RunResult, error: BaseException | None) -> Report:
        """Return the report."""
        trainer, state = self.trainer, RESULTS[result]
        took = _duration(self.times.seconds)
        summary = f"at step {trainer.global_step:,}, after {took}"
        if result == "success":
            summary = f"after {trainer.current_epoch:,} epochs and {trainer.global_step:,} steps, in {took}"
        if state == "finished" and (fault := self._not_finite()):
            state, summary = "finished with NaN", f"{summary}: {fault}"
        panels, notes = self._panels()
        first = [] if error is None else [self._error(error)]
        return Report(
            title=f"Run {names_of_runs([self.folder])[0]}",
            state=state,
            summary=summary,
            first=[*first, self._section("Checkpoints", self._checkpoints)],
            panels=panels,
            notes=notes,
            others=[
                self._section("Model and data", lambda: {"rows": list(self._sizes())}),
                self._section("Hyper-parameters", self._hyper_parameters),
                self._section("Time", self._time),
                *(each for each in [self._section("Profile", self._profile)] if each.text or each.notes),
                self._section("Environment", lambda: {"rows": list(self._environment())}),
                self._section("Command", self._source),
            ],
        )

    def _section(self, title: str, read: Callable[[], dict[str, Any]]) -> Section:
        """Return the section of what `read` returns; one that says what went wrong if it raises."""
        try:
            return Section(title, **read())
        except Exception as error:  # files, packages and settings of users fail in any way
            return Section(title, notes=[self._note_problem(title, error)])

    def _note_problem(self, title: str, error: Exception) -> str:
        problem = f"the part {title!r} cannot be made ({type(error).__name__}: {error})"
        self.problems.append(problem)
        return f"{problem[0].upper()}{problem[1:]}."

    def _error(self, error: BaseException) -> Section:
        kind = type(error)
        name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        title = "Error" if isinstance(error, Exception) else "Ended by"  # KeyboardInterrupt and SystemExit
        rank = f"rank {self.trainer.global_rank}: " if self.trainer.world_size > 1 else ""
        text = f"{rank}{name}: {error}\n\n{_frames(error)}"
        return Section(title, text=self.command.applied_to(text), wraps=True)

    def _not_finite(self) -> str:
        """Return a text that names this rank's weights, or the latest metrics, that are not finite; "" if all are."""
        named = self.module.named_parameters()
        weights = {name: each.detach() for name, each in named if each.requires_grad and not is_lazy(each)}
        for what, values in (("weights", weights), ("latest metrics", self.trainer.callback_metrics)):
            shards = {name: each.to_local() if hasattr(each, "to_local") else each for name, each in values.items()}
            if names := [name for name, each in shards.items() if not each.isfinite().all()]:
                more = f" and {len(names) - 1} more" if names[1:] else ""
                return f"the {what} are not finite (NaN or infinity in {names[0]}{more})"
        return ""

    def _sizes(self) -> Iterator[tuple[str, str]]:
        trainer, weights = self.trainer, list(self.module.parameters())
        trained = count_parameters(each for each in weights if each.requires_grad)
        yield "parameters", f"{count_parameters(weights):,}, of which {trained:,} are trained"
        sizes = [getattr(loader, "batch_size", None) or "unknown" for _, loader in leaves([trainer.train_dataloader])]
        yield "batch size", f"{', '.join(map(str, sizes))} in each process"
        yield "seed", str(trainer.engine.seed)
        yield "peak memory", peak_memory(trainer.strategy.root_device)

    def _panels(self) -> tuple[list[Panel], list[str]]:
        try:
            return self._read_panels()
        except Exception as error:
            return [], [self._note_problem("Curves", error)]

    def _read_panels(self) -> tuple[list[Panel], list[str]]:
        history = self.logger.history(MOST_BYTES)
        names = [name for name in history.series if name not in NOT_DRAWN]
        if not names:
            return [], ["Nothing was logged that could be drawn.", *history.problems]
        notes = list(history.problems)
        if len(names) > MOST_METRICS:
            notes.append(f"The first {MOST_METRICS} of {len(names)} metrics are drawn; `trainwright plot` draws all.")
        return panels_of([history], names[:MOST_METRICS]), notes

    def _checkpoints(self) -> dict[str, Any]:
        rows = []
        for each in self.trainer.callbacks:
            if not isinstance(each, ModelCheckpoint):
                continue
            sign = 1 if each.mode == "min" else -1
            scores = sorted(each.best_k_models.items(), key=lambda pair: sign * float(pair[1]))
            for number, (path, score) in enumerate(scores):
                newest = "newest" if path == each.last_model_path else ""
                which = ", ".join(word for word in ("best" if number == 0 else "", newest) if word)
                rows.append((self._within(path), f"{each.monitor} = {float(score):.6g}", which))
            if each.last_model_path and each.last_model_path not in each.best_k_models:
                rows.append((self._within(each.last_model_path), "", "newest"))
        if not rows:
            return {"notes": ["This run has kept none."]}
        return {"header": ("checkpoint", "score", ""), "rows": rows}

    def _within(self, path: str) -> str:
        return path.removeprefix(f"{self.folder}/")

    def _hyper_parameters(self) -> dict[str, Any]:
        filesystem, inside = fsspec.core.url_to_fs(f"{self.folder}/{HPARAMS_NAME}")
        rows: list[tuple[str, str]] = []
        if filesystem.isfile(inside):
            with filesystem.open(inside, "rb") as file:
                data = file.read(LONGEST_HPARAMS + 1)
            if len(data) > LONGEST_HPARAMS:
                return {"notes": [f"They are in {HPARAMS_NAME}, which is too long to be shown."]}
            rows = [(name, self.command.applied_to(value)) for name, value in _flat(shown("", json.loads(data)))]
        return {"rows": rows} if rows else {"notes": ["None were saved; save_hyperparameters() keeps them."]}

    def _time(self) -> dict[str, Any]:
        trainer, times = self.trainer, self.times
        record = find_record(self.folder).record
        rows = [("began", _moment(times.began))]
        if record is not None:
            rows = [("began", _of_record(record.began)), ("resumed", _of_record(record.resumed))]
            rows.append(("ended", _of_record(record.ended)))
        training = times.seconds - times.seconds_before
        steps, batches = trainer.global_step - times.step, trainer.state.total_batches - times.batch
        rest = training - times.seconds_of_validations
        rows += [
            ("duration in this process", _duration(times.seconds)),
            ("setup, data, sanity check", _duration(times.seconds_before)),
            ("training", _duration(rest)),
            ("validation", f"{_duration(times.seconds_of_validations)} for {times.validations:,} validations"),
            ("steps", f"{steps:,}, {_rate(steps, rest)} while training"),
            ("batches per rank", f"{batches:,}, {_rate(batches, rest)} while training"),
        ]
        return {"rows": [row for row in rows if row[1]]}

    def _profile(self) -> dict[str, Any]:
        trainer = self.trainer  # by this name, by which a test finds what callbacks use of it
        return {"text": trainer.profiler.summary()}

    def _environment(self) -> Iterator[tuple[str, str]]:
        trainer, strategy, job = self.trainer, self.trainer.strategy, Environment.detect()
        installed = {name: version for name, version in package_versions().items() if version != MISSING}
        yield "trainwright", __version__
        system = platform.uname()  # not platform.platform(), which starts a process
        yield "Python", f"{platform.python_version()} on {system.system} {system.release} {system.machine}"
        yield "torch", installed.pop("torch", "unknown")
        yield "packages", ", ".join(f"{name} {version}" for name, version in installed.items())
        yield "host", socket.gethostname()
        yield "its devices", describe_devices()
        yield f"device of rank {trainer.global_rank}", str(strategy.root_device)
        yield "strategy", strategy.name
        yield "processes", f"{trainer.world_size} on {job.num_nodes} machine(s)"
        yield "started by", "the script alone" if job.launched_by == "single" else job.launched_by
        yield "precision", strategy.precision.name
        yield "module", type(self.module).__qualname__

    def _source(self) -> dict[str, Any]:
        script = _script()
        rows = [("run folder", self.folder), ("resumed from", self.trainer.resume_source or "")]
        rows.append(("working directory", str(Path.cwd())))
        rows += [] if script is None else describe_work_tree(script, self.times.began)
        rows = [(name, self.command.applied_to(text)) for name, text in rows if text]
        return {"rows": rows, "text": self.command.text, "wraps": True}


def _is_anothers(path: str) -> bool:
    """Return whether there is something of this name that no RunReport has written."""
    filesystem, inside = fsspec.core.url_to_fs(path)
    if not filesystem.exists(inside):
        return False
    if not filesystem.isfile(inside):
        return True
    with filesystem.open(inside, "rb") as file:
        return GENERATOR.encode() not in file.read(1000)


def _script() -> Path | None:
    """Return the file that runs; None in a notebook or with `python -c`."""
    given = getattr(sys.modules["__main__"], "__file__", None)
    if (
        given is None or PACKAGE_FOLDER in Path(given).resolve().parents
    ):  # a worker of ours, which has the caller's arguments
        given = sys.argv[0]
    path = Path(given)
    return path.resolve() if path.is_file() else None


def _command() -> Masked:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    start = ["-m", spec.name.removesuffix(".__main__")] if spec is not None else sys.argv[:1]
    return masked(["python", *start, *sys.argv[1:]])


def _flat(values: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names and the texts of nested values."""
    for name, value in values.items():
        inner = f"{above}.{name}" if above else str(name)
        if isinstance(value, Mapping) and value:
            yield from _flat(value, inner)
        else:
            yield inner, value if isinstance(value, str) else json.dumps(value)


def _frames(error: BaseException) -> str:
    """Return the frames of the user's code and of other packages in a traceback, with the last three."""
    frames = traceback.extract_tb(error.__traceback__)
    chosen = [each for each in frames[:-3] if PACKAGE_FOLDER not in Path(each.filename).parents] + frames[-3:]
    return "".join(traceback.format_list(chosen))


def _of_record(moment: str | None) -> str:
    return "" if moment is None else _moment(datetime.fromisoformat(moment).timestamp())


def _moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:,.3g}/s" if seconds > 0 else "0/s"

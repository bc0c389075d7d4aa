"""RunReport: at the end of a fit, one page on the run in the run's folder. plots/page.py makes the page."""

from __future__ import annotations

import json
import platform
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
from torch.nn.parameter import is_lazy

from trainwright import __version__
from trainwright.callbacks.base import Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.callbacks.model_summary import count_parameters
from trainwright.data.combined_loader import leaves
from trainwright.devices.hardware import MISSING, describe_devices, package_versions, peak_memory
from trainwright.distributed.environment import Environment
from trainwright.distributed.failures import is_secondary_failure
from trainwright.distributed.masking import Masked, masked, shown
from trainwright.loggers.base import RunResult
from trainwright.loggers.csv import CSVLogger
from trainwright.loggers.files import HPARAMS_NAME, write_file
from trainwright.loggers.folder import FolderLogger
from trainwright.loggers.run_record import RESULTS, find_record
from trainwright.plots import names_of_runs, panels_of
from trainwright.plots.curves import NOT_DRAWN, Panel
from trainwright.plots.page import Report, Section
from trainwright.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer

REPORT_NAME = "report.html"
MOST_BYTES = 64 << 20
"""The most that is read of metrics.csv, or of an event file: a few seconds' work."""
MOST_METRICS = 100
"""The most metrics whose curves are drawn."""
NAMES_OF_PHASES = {"data": "waits for data", "step": "training steps"}
MOST_SECONDS = 3.0
"""The longest time for an answer of git: the difference of a large tree on a slow disk takes minutes."""


class RunReport(Callback):
    """Writes `report.html` into the run's folder at the end of a fit, also of a failed or stopped one, and prints its path.

    The page is one file that needs nothing else and loads nothing. It has the result (finished, stopped or failed, with the
    error and its traceback), the curves, and the stored checkpoints with their scores. The model's size, the hyper-parameters
    and the times follow, with the profiler's table, if there is one. The last parts are versions, devices, strategy and
    precision, the command line, and the git commit of the script. Values whose names say that they are secret are masked.

    The Trainer adds it if a CSVLogger or a TensorBoardLogger writes a folder, unless `enable_report=False`.
    One rank writes, once everything else is closed: rank 0, or the rank that has failed, which ends the others. A resumed
    run writes the page again, with the curves of the whole run. Nothing is written with fast_dev_run, by an evaluation, by a
    fit that has not begun to train, or by a finished fit that is started again. If the page cannot be made, that is one
    warning, since no run depends on it.

    >>> report = tw.RunReport()
    >>> trainer = tw.Trainer(callbacks=report, max_epochs=1, enable_model_summary=False)
    >>> trainer.fit(module, loader)
    report: .../trainwright_logs/version_0/report.html
    """

    def __init__(self) -> None:
        self.path = ""
        """The latest page, or "" before it."""
        self._times, self._is_fitting = Times(), False

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        self._is_fitting = stage == "fit"
        self._times = Times()

    def on_train_start(self, trainer: AnyTrainer, module: Module) -> None:
        self._times.mark("training")

    def teardown(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        self._times.mark("end")

    def on_run_end(self, trainer: AnyTrainer, module: Module, result: RunResult, error: BaseException | None) -> None:
        loggers = [logger for logger in trainer.loggers if isinstance(logger, FolderLogger) and logger.log_dir]
        has_failed_first = error is not None and not is_secondary_failure(error)
        may_write = trainer.is_global_zero or has_failed_first
        if not self._is_fitting or not loggers or trainer.fast_dev_run or not may_write:
            return
        logger = next((logger for logger in loggers if isinstance(logger, CSVLogger)), loggers[0])
        path = f"{logger.log_dir}/{REPORT_NAME}"
        try:
            if self._times.are_after_the_end_of(logger):
                return  # nothing was left to train, so the page of the finished fit stays
            if _is_first(trainer, error):
                report = Facts(trainer, module, logger, self._times).report(result, error)
                write_file(path, report.to_html().encode("utf-8", "replace"))
                self.path = path
                trainer.print(f"report: {path}")
        except Exception as failure:  # file systems and other packages raise errors of any type
            rank_zero_warn(
                f"RunReport: {path} cannot be written ({type(failure).__name__}: {failure}). The run itself is not affected; "
                "enable_report=False skips the report.",
                stacklevel=2,
            )


def _is_first(trainer: TrainerProtocol, error: BaseException | None) -> bool:
    """Return whether this rank writes the page: no rank failed, or this one failed first. If the store is gone, rank 0 does."""
    if error is None:
        return True
    try:
        return trainer.engine.connection.sync_point("report").claim()
    except RuntimeError:
        return trainer.is_global_zero


class Times:
    """When a fit and its training began."""

    def __init__(self) -> None:
        self.began = datetime.now(UTC)
        self._moments = {"start": time.monotonic()}

    def are_after_the_end_of(self, logger: FolderLogger) -> bool:
        """Return whether the logger's run had ended before this fit, which has not changed its record."""
        record = find_record(str(logger.log_dir)).record
        ended = record.ended if record is not None else None
        return ended is not None and datetime.fromisoformat(ended) < self.began.replace(microsecond=0)

    def mark(self, event: str) -> None:
        """Record that "training" or "end" begins now."""
        self._moments[event] = time.monotonic()

    def seconds_until(self, event: str) -> float:
        """Return the seconds of the fit until an event, or until now if it has not come."""
        return self._moments.get(event, time.monotonic()) - self._moments["start"]


class Facts:
    """The contents of a run's report."""

    def __init__(self, trainer: TrainerProtocol, module: Module, logger: FolderLogger, times: Times) -> None:
        self.trainer, self.module, self.logger, self.times = trainer, module, logger, times
        self.folder = str(logger.log_dir)
        self.command = _command()

    def report(self, result: RunResult, error: BaseException | None) -> Report:
        trainer, state = self.trainer, RESULTS[result]
        took = _duration(self.times.seconds_until("end"))
        summary = f"at step {trainer.global_step:,}, after {took}"
        if result == "success":
            summary = f"after {trainer.current_epoch:,} epochs and {trainer.global_step:,} steps, in {took}"
        if error is None and result != "interrupted" and (fault := self._not_finite()):
            state, summary = "finished with NaN", f"{summary}: {fault}"
        panels, notes = self._panels()
        profile = trainer.profiler.summary()
        return Report(
            title=f"Run {names_of_runs([self.folder])[0]}",
            state=state,
            summary=summary,
            first=[*([] if error is None else [self._error(error)]), self._checkpoints()],
            panels=panels,
            notes=notes,
            others=[
                Section("Model and data", list(self._sizes())),
                self._hyper_parameters(),
                self._time(),
                *([Section("Profile", text=profile)] if profile else []),
                Section("Environment", list(self._environment())),
                self._source(),
            ],
        )

    def _error(self, error: BaseException) -> Section:
        kind = type(error)
        name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        title = "Error" if isinstance(error, Exception) else "Ended by"  # KeyboardInterrupt and SystemExit
        rank = f"rank {self.trainer.global_rank}: " if self.trainer.world_size > 1 else ""
        text = f"{rank}{name}: {error}\n\n{''.join(traceback.format_tb(error.__traceback__))}"
        return Section(title, text=self.command.applied_to(text), wraps=True)

    def _not_finite(self) -> str:
        """Return a text that names this rank's weights, or the latest metrics, that are not finite, or "" if all are."""
        named = self.module.named_parameters()
        weights = {name: each.detach() for name, each in named if each.requires_grad and not is_lazy(each)}
        for kind, values in (("weights", weights), ("latest metrics", self.trainer.callback_metrics)):
            shards = {name: each.to_local() if hasattr(each, "to_local") else each for name, each in values.items()}
            if names := [name for name, each in shards.items() if not each.isfinite().all()]:
                more = f" and {len(names) - 1} more" if names[1:] else ""
                return f"the {kind} are not finite (NaN or infinity in {names[0]}{more})"
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
        history = self.logger.history(MOST_BYTES)
        names = [name for name in history.series if name not in NOT_DRAWN]
        if not names:
            return [], ["Nothing was logged that could be drawn.", *history.problems]
        notes = list(history.problems)
        if len(names) > MOST_METRICS:
            notes.append(f"The first {MOST_METRICS} of {len(names)} metrics are drawn; `trainwright plot` draws all.")
        return panels_of([history], names[:MOST_METRICS]), notes

    def _checkpoints(self) -> Section:
        rows = []
        for callback in self.trainer.callbacks:
            if not isinstance(callback, ModelCheckpoint):
                continue
            best, newest = callback.best_model_path, callback.last_model_path
            sign = 1 if callback.mode == "min" else -1
            scores = sorted(callback.best_k_models.items(), key=lambda pair: sign * float(pair[1]))
            texts = {path: f"{callback.monitor} = {float(score):.6g}" for path, score in scores}
            for path in dict.fromkeys([*texts, *filter(None, [newest])]):
                roles = {"best": path == best and path in texts, "newest": path == newest}
                role = ", ".join(name for name, applies in roles.items() if applies)
                rows.append((path.removeprefix(f"{self.folder}/"), texts.get(path, ""), role))
        if not rows:
            return Section("Checkpoints", notes=["This run has kept no checkpoint."])
        return Section("Checkpoints", rows, ("checkpoint", "score", ""))

    def _hyper_parameters(self) -> Section:
        filesystem, inside = fsspec.core.url_to_fs(f"{self.folder}/{HPARAMS_NAME}")
        rows: list[tuple[str, str]] = []
        if filesystem.isfile(inside):
            with filesystem.open(inside, "rb") as file:
                values = shown("", json.load(file))
            rows = [(name, self.command.applied_to(value)) for name, value in _flat(values)]
        notes = [] if rows else ["None were saved; save_hyperparameters() keeps them."]
        return Section("Hyper-parameters", rows, notes=notes)

    def _time(self) -> Section:
        times = self.times
        seconds, before = times.seconds_until("end"), times.seconds_until("training")
        timeline = self.trainer.state.timeline
        _, training = timeline.measure()
        rows = [
            ("began", f"{times.began:%Y-%m-%d %H:%M:%S} UTC"),
            ("duration in this process", _duration(seconds)),
            ("setup, data, sanity check", _duration(before)),
            *((NAMES_OF_PHASES.get(phase, phase), _duration(part)) for phase, part in timeline.seconds.items()),
            ("steps", f"{timeline.steps:,}, {_rate(timeline.steps, training)} while training"),
            ("batches per rank", f"{timeline.batches:,}, {_rate(timeline.batches, training)} while training"),
        ]
        return Section("Time", rows)

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
        yield "started by", "the script itself" if job.launched_by == "single" else job.launched_by
        yield "precision", strategy.precision.name
        yield "module", type(self.module).__qualname__

    def _source(self) -> Section:
        rows = [("run folder", self.folder), ("resumed from", self.trainer.resume_source or "")]
        rows += [("working directory", str(Path.cwd())), *describe_work_tree(Path(sys.argv[0]).resolve().parent)]
        rows = [(name, self.command.applied_to(text)) for name, text in rows if text]
        return Section("Command", rows, text=self.command.text, wraps=True)


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


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:,.3g}/s" if seconds > 0 else "0/s"


def describe_work_tree(folder: Path) -> list[tuple[str, str]]:
    """Return rows on the git work tree of a folder: its commit, and how far its files differ from it, if there is git."""
    commit = _ask_git(folder, "rev-parse", "--verify", "--quiet", "HEAD")
    if not commit:
        return []
    difference = _ask_git(folder, "diff", "--no-ext-diff", "--no-textconv", "--shortstat", "HEAD", "--")
    if difference is None:
        difference = f"unknown: git did not answer within {MOST_SECONDS:g} seconds"
    branch = _ask_git(folder, "branch", "--show-current") or ""
    return [("git commit", commit), ("branch", branch), ("files that differ from it", difference or "none")]


def _ask_git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git, or None if it fails, is missing, or takes too long."""
    # These options run nothing from the repository's settings, and take no lock that a user's git would wait for.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=MOST_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip()

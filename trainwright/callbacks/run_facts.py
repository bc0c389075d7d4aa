"""Facts: the contents of the report of a run, as far as they can be read. plots/report.py makes the page."""

from __future__ import annotations

import json
import platform
import socket
import subprocess
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
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.callbacks.model_summary import count_parameters
from trainwright.data.combined_loader import leaves
from trainwright.devices.hardware import MISSING, describe_devices, package_versions, peak_memory
from trainwright.distributed.environment import Environment
from trainwright.distributed.masking import Masked, masked, shown
from trainwright.loggers.base import RunResult
from trainwright.loggers.files import HPARAMS_NAME
from trainwright.loggers.folder import FolderLogger
from trainwright.loggers.run_record import RESULTS, find_record
from trainwright.plots import names_of_runs, panels_of
from trainwright.plots.curves import NOT_DRAWN, Panel
from trainwright.plots.report import Report, Section

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module

MOST_BYTES = 64 << 20
"""The most that is read of metrics.csv, or of an event file: a few seconds' work."""
MOST_METRICS = 100
"""The most metrics whose curves are drawn."""
LONGEST_HPARAMS = 1 << 20
"""The most bytes of hyper-parameters that are read."""
LONGEST_SECONDS = 5.0
"""The longest time that git may take in all: the difference of a large tree on a slow disk takes minutes."""
PACKAGE_FOLDER = Path(__file__).parents[1]


class Times:
    """When a fit and its parts began, and the counters when its training began."""

    def __init__(self) -> None:
        self.began = time.time()
        self.validations, self.seconds_of_validations = 0, 0.0
        self.step = self.batch = 0
        self._moments = {"start": time.monotonic()}

    def mark(self, event: str) -> None:
        """Record that "training", "validation" or "end" begins now."""
        self._moments[event] = time.monotonic()

    def end_validation(self) -> None:
        begin = self._moments.pop("validation", None)
        if begin is not None and "training" in self._moments:  # the sanity check comes before
            self.validations += 1
            self.seconds_of_validations += time.monotonic() - begin

    @property
    def seconds(self) -> float:
        """Return how long the fit has taken."""
        return self._moments.get("end", time.monotonic()) - self._moments["start"]

    @property
    def seconds_before(self) -> float:
        """Return how long the setup before the training took."""
        start = self._moments["start"]
        return self._moments.get("training", start) - start


class Facts:
    """The contents of a run's report. A part that cannot be read becomes a sentence among the problems."""

    def __init__(
        self, trainer: TrainerProtocol, module: Module, logger: FolderLogger, times: Times, problems: list[str]
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
        try:
            panels, notes = self._panels()
        except Exception as failure:  # see _section
            panels, notes = [], [self._note_problem("Curves", failure)]
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
        """Return the section of the result of `read`, or a section with the error if it raises."""
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

    def _checkpoints(self) -> dict[str, Any]:
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
            return {"notes": ["This run has kept no checkpoint."]}
        return {"header": ("checkpoint", "score", ""), "rows": rows}

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
        trainer = self.trainer  # a test looks for this name to find the members that callbacks use
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
        yield "started by", "the script itself" if job.launched_by == "single" else job.launched_by
        yield "precision", strategy.precision.name
        yield "module", type(self.module).__qualname__

    def _source(self) -> dict[str, Any]:
        script = _script()
        rows = [("run folder", self.folder), ("resumed from", self.trainer.resume_source or "")]
        rows.append(("working directory", str(Path.cwd())))
        rows += [] if script is None else describe_work_tree(script, self.times.began)
        rows = [(name, self.command.applied_to(text)) for name, text in rows if text]
        return {"rows": rows, "text": self.command.text, "wraps": True}


def _script() -> Path | None:
    """Return the file that runs, or None in a notebook or with `python -c`."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    # Our workers have the caller's arguments.
    path = Path(sys.argv[0] if file is None or PACKAGE_FOLDER in Path(file).resolve().parents else file)
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


def describe_work_tree(script: Path, began: float) -> list[tuple[str, str]]:
    """Return rows on the git work tree of a script: its commit when the run began, and how far its files differ from it.

    There are none without a work tree or git. `began` is the time in seconds since 1970.
    """
    until, folder = time.monotonic() + LONGEST_SECONDS, str(script.parent)
    moment = datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds")
    # The reflog knows which commit was checked out at that moment. Without a reflog, only the present commit is known.
    for name in (f"HEAD@{{{moment}}}", "HEAD"):
        if commit := _ask_git(folder, until, "rev-parse", "--verify", "--quiet", name):
            break
    else:
        return []
    branch = _ask_git(folder, until, "branch", "--show-current")
    difference = _ask_git(folder, until, "diff", "--no-ext-diff", "--no-textconv", "--shortstat", commit, "--")
    if difference is None:
        difference = f"unknown: git did not answer within {LONGEST_SECONDS:g} seconds"
    rows = [("git commit", commit), ("branch", branch or ""), ("files that differ from it", difference or "none")]
    return [row for row in rows if row[1]]


def _ask_git(folder: str, until: float, *arguments: str) -> str | None:
    """Return the output of git, or None if it fails, is missing, or takes too long."""
    # These options run nothing from the repository's settings, and take no lock that a user's git would wait for.
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", folder, *arguments]
    seconds = max(0.1, until - time.monotonic())
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip()

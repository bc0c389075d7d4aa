"""RunReport: at the end of a fit, one page on the run in the run's folder. run_facts.py collects its contents."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec

from trainwright.callbacks.base import Callback
from trainwright.callbacks.run_facts import Facts, Times
from trainwright.distributed.failures import is_secondary_failure
from trainwright.distributed.sync_points import SyncPoint
from trainwright.loggers.base import RunResult
from trainwright.loggers.csv import CSVLogger
from trainwright.loggers.files import is_local, write_file
from trainwright.loggers.folder import FolderLogger
from trainwright.plots.page import GENERATOR
from trainwright.plots.report import Section, with_section
from trainwright.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from trainwright.callbacks.trainer_protocol import TrainerProtocol
    from trainwright.module import Module
    from trainwright.module_hooks import AnyTrainer

REPORT_NAME = "report.html"
EVALUATIONS = {"test": "Test", "validate": "Validation after the fit"}
"""The calls whose metrics are added to the page of a fit, and the titles there."""


class RunReport(Callback):
    """Writes `report.html` into the run's folder at the end of a fit, also of a failed or stopped one, and prints its path.

    The page is one file that needs nothing else and loads nothing. It has the result (finished, stopped or failed, with the
    error and the user's frames), the curves, the checkpoints that are kept and their scores, the model's size, the
    hyper-parameters, where the time went (the profiler's table, if there is one), versions, devices, strategy and precision,
    the command line, and the git commit of the script. Values whose names say that they are secret are masked.

    The Trainer adds it if a CSVLogger or a TensorBoardLogger writes a folder, unless `enable_report=False`.
    One rank writes, once everything else is closed: rank 0, or the rank that has failed, which ends the others. A resumed
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
        """The latest page, or "" before it."""
        self._times, self._call = Times(), ""
        self._point: SyncPoint | None = None
        """Where the ranks that have failed agree on which of them writes."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_point": None}  # it belongs to this process's run

    def setup(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        self._call = stage
        if stage == "fit":
            self._times = Times()
            self._point = trainer.engine.connection.sync_point("report")

    def on_train_start(self, trainer: AnyTrainer, module: Module) -> None:
        self._times.mark("training")
        self._times.step, self._times.batch = trainer.global_step, trainer.state.total_batches

    def on_validation_start(self, trainer: AnyTrainer, module: Module) -> None:
        self._times.mark("validation")

    def on_validation_end(self, trainer: AnyTrainer, module: Module) -> None:
        self._times.end_validation()

    def teardown(self, trainer: AnyTrainer, module: Module, stage: str) -> None:
        self._times.mark("end")

    def on_run_end(self, trainer: AnyTrainer, module: Module, result: RunResult, error: BaseException | None) -> None:
        point, self._point = self._point, None
        loggers = [logger for logger in trainer.loggers if isinstance(logger, FolderLogger) and logger.log_dir]
        has_failed_first = error is not None and not is_secondary_failure(error)
        if not loggers or trainer.fast_dev_run or not (trainer.is_global_zero or has_failed_first):
            return
        logger = next((logger for logger in loggers if isinstance(logger, CSVLogger)), loggers[0])
        folder, problems = str(logger.log_dir), list[str]()
        try:
            if _exists(folder) and (error is None or point is None or _claim(point)):
                self._write(
                    f"{folder}/{REPORT_NAME}",
                    trainer,
                    result,
                    error,
                    Facts(trainer, module, logger, self._times, problems),
                )
        except Exception as failure:  # file systems and other packages raise errors of any type
            problems.append(f"{folder}/{REPORT_NAME} cannot be written ({type(failure).__name__}: {failure})")
        if problems:
            rank_zero_warn(
                f"RunReport: {'; '.join(problems)}. The run itself is not affected; enable_report=False skips the report.",
                stacklevel=2,
            )

    def _write(
        self, path: str, trainer: TrainerProtocol, result: RunResult, error: BaseException | None, facts: Facts
    ) -> None:
        """Write the page of a fit, or add the metrics of an evaluation to it."""
        is_foreign = _is_foreign(path)
        if self._call == "fit" and is_foreign:
            facts.problems.append(f"{path} is not a report of a run and stays as it is; move it away")
        elif self._call == "fit":
            write_file(path, facts.report(result, error).to_html().encode("utf-8", "replace"))
            self.path = path
            trainer.print(f"report: {path}")
        elif error is None and self.path == path and not is_foreign:
            self._add_scores(trainer, path)

    def _add_scores(self, trainer: TrainerProtocol, path: str) -> None:
        """Add the metrics of an evaluation to the page of the fit before it."""
        source = (trainer.ckpt_path or "none: the latest weights").removeprefix(f"{path.removesuffix(REPORT_NAME)}")
        rows = [("checkpoint", source), *((name, f"{each:.6g}") for name, each in trainer.callback_metrics.items())]
        with fsspec.open(path, "rb") as file:
            page = file.read().decode()
        write_file(path, with_section(page, Section(EVALUATIONS[self._call], rows)).encode())


def _exists(folder: str) -> bool:
    """Return False for a local folder that was moved away, which the report does not create again."""
    return not is_local(folder) or Path(fsspec.core.url_to_fs(folder)[1]).is_dir()


def _claim(point: SyncPoint) -> bool:
    """Return whether this rank is the first failed rank. Without the store, which may be gone, rank 0 is."""
    try:
        return point.claim()
    except RuntimeError:
        return point.rank == 0


def _is_foreign(path: str) -> bool:
    """Return whether there is something of this name that no RunReport has written."""
    filesystem, inside = fsspec.core.url_to_fs(path)
    if not filesystem.exists(inside):
        return False
    if not filesystem.isfile(inside):
        return True
    with filesystem.open(inside, "rb") as file:
        return GENERATOR.encode() not in file.read(1000)

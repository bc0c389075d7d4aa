"""Tracking: the loggers of a raw loop, under the names that Accelerate gives to trackers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainwright.distributed.ranks import Ranks
from trainwright.errors import a_type_of, did_you_mean
from trainwright.faults.failing_loggers import outlived
from trainwright.loggers import available_loggers, logger_class, name_of
from trainwright.loggers.base import Logger, SilentLogger, to_dict, to_numbers
from trainwright.loggers.files import flush_at_exit
from trainwright.loggers.folder import FolderLogger, start_loggers
from trainwright.loggers.position import logger_states, match_states, resume_loggers
from trainwright.loggers.remote import RemoteLogger
from trainwright.overrides import active_observer
from trainwright.rank_zero import rank_zero_warn

Chosen = list[tuple[str, type[Logger] | Logger]]
"""The loggers of log_with, by their names: classes, or the user's instances."""
Options = Mapping[str, Mapping[str, Any]]
"""Keyword arguments by a tracker's name."""


class Tracker:
    """A logger under its short name, such as "tensorboard". Attributes that it lacks are the logger's.

    Calls do nothing on the ranks that do not write.
    """

    def __init__(self, name: str, logger: Logger) -> None:
        self.name, self.logger = name, logger
        self._left_out: set[str] = set()
        """The names of values that the logger cannot write, once warned of."""

    def __getattr__(self, name: str) -> Any:
        if name in ("name", "logger", "_left_out"):  # a copy that has no attributes yet
            raise AttributeError(name)
        # After an AttributeError of these properties, the logger's error names the missing attribute.
        return getattr(self.logger, "experiment" if name in ("tracker", "writer") else name)

    @property
    def tracker(self) -> Any:
        """Return the logger's `experiment`, with which it writes."""
        return self.logger.experiment

    @property
    def writer(self) -> Any:
        """Return the same, as TensorBoard's users know it."""
        return self.logger.experiment

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write a row's numbers, and its other values apart from them. A user's logger gets the row unchanged."""
        write_others = getattr(self.logger, "log_texts", None)
        if write_others is None:
            outlived(self.logger, "log_metrics", values, step, **options)
            return
        numbers: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for key, value in values.items():
            try:
                numbers |= to_numbers({key: value})
            except TypeError:
                others[key] = value
        texts = {key: each for key, each in others.items() if isinstance(each, getattr(self.logger, "loggable", str))}
        is_written = bool(texts) and outlived(self.logger, "log_texts", texts, step)
        left_out = others.keys() - (texts.keys() if is_written else set()) - self._left_out
        if left_out:
            self._left_out |= left_out
            shown = ", ".join(f"{key!r} ({a_type_of(others[key])})" for key in sorted(left_out))
            rank_zero_warn(
                f"log: {type(self.logger).__name__} cannot write {shown}, and leaves it out; numbers are written.",
                stacklevel=4,
            )
        if numbers or not others:
            outlived(self.logger, "log_metrics", numbers, step, **options)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write images, if the logger can."""
        outlived(self.logger, "log_images", values, step, **options)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write hyper-parameters."""
        outlived(self.logger, "log_hyperparams", values)


def chosen_loggers(log_with: Any) -> Chosen:
    """Return the loggers that log_with= names or holds; "all" means all that can be used here.

    Raises:
        TypeError, ValueError, ImportError: it holds something else, an unknown name, or one whose package is missing.
    """
    is_several = isinstance(log_with, Iterable) and not isinstance(log_with, (str, Logger))
    given = list(log_with) if is_several else [] if log_with is None else [log_with]
    chosen: Chosen = []
    for each in given:
        if isinstance(each, Logger):
            chosen.append((name_of(each), each))
        elif not isinstance(text := getattr(each, "value", each), str):  # a member of an enum of names, too
            what = f"the class {each.__name__}" if isinstance(each, type) else a_type_of(each)
            raise TypeError(f"log_with holds {what}. Expected names, Logger instances, or lists of them.")
        else:
            names = available_loggers() if text == "all" else [text]
            chosen += [(name, logger_class(name)) for name in names if name not in [other for other, _ in chosen]]
    return chosen


class Trackers:
    """The loggers of one Accelerator: made by `init`, started on rank 0 by the first call that writes.

    So `load_state` may come before or after `init`: the loggers then continue in the run that the checkpoint was saved in.
    """

    def __init__(self, ranks: Ranks, chosen: Chosen, folder: str | None) -> None:
        self._is_writer, self._chosen, self._folder = ranks.rank == 0, chosen, folder
        self._trackers: list[Tracker] = []
        self._config: dict[str, Any] = {}
        self._is_made = self._is_started = False
        self._has_ended = False
        """Whether `end` has ended a run."""
        self._resumed: tuple[list[dict[str, Any]], str] = ([], "")
        """The loggers' states in the checkpoint that was loaded, and its path."""

    def init(self, project_name: str, config: Any, init_kwargs: Options | None) -> None:
        """Make the loggers. See `Accelerator.init_trackers`."""
        if not isinstance(project_name, str) or not project_name:
            raise ValueError(f"project_name={project_name!r} is not accepted. Pass a name, such as the experiment's.")
        if self._is_made:
            raise RuntimeError("init_trackers was called before. Call end_training() first to begin another run.")
        values = to_dict(config) if config is not None else {}
        options = self._options("init_kwargs", init_kwargs)
        made = []
        for name, each in self._chosen:
            chosen = options.get(name, {})
            logger = each if isinstance(each, Logger) else each.of_project(project_name, self._folder, **chosen)
            made.append(Tracker(name, logger))
        for tracker in made:
            if isinstance(tracker.logger, FolderLogger) and self._folder is not None:
                tracker.logger.use_root(self._folder)
        self._trackers, self._config, self._is_made = made, values, True
        if not self._is_writer:
            # Nothing is broadcast, since only rank 0 may call this.
            start_loggers([each.logger for each in made], lambda text: text, is_writer=False)

    @property
    def all(self) -> list[Tracker]:
        """Return the started trackers, or an empty list before `init`."""
        if self._is_made:
            self._start()
        return list(self._trackers)

    def get(self, name: str, unwrap: bool) -> Any:
        """Return a tracker, or its `experiment`. See `Accelerator.get_tracker`."""
        if not self._is_ready("get_tracker"):
            silent = SilentLogger()
            return silent.experiment if unwrap else Tracker(name, silent)
        found = next((each for each in self._trackers if name in (each.name, type(each.logger).__name__)), None)
        if found is None:
            raise ValueError(f"get_tracker: {self._unknown(name)}")
        return found.tracker if unwrap else found

    def log(self, values: Mapping[str, Any], step: Any, log_kwargs: Options | None) -> None:
        """Write a row with all loggers. See `Accelerator.log`."""
        if not isinstance(values, Mapping) or isinstance(step, str):
            raise TypeError(f"log({values!r:.80}, step={step!r}): expected a dict of numbers, and an integer as step.")
        if (observer := active_observer()) is not None:
            observer.note_logged(values)
        if self._is_ready("log"):
            options = self._options("log_kwargs", log_kwargs)
            for tracker in self._trackers:
                tracker.log(values, step, **options.get(tracker.name, {}))

    def log_images(self, values: Mapping[str, Any], step: int, log_kwargs: Options | None) -> None:
        """Write images with the loggers that can. See `Accelerator.log_images`."""
        if self._is_ready("log_images"):
            options = self._options("log_kwargs", log_kwargs)
            able = [each for each in self._trackers if type(each.logger).log_images is not Logger.log_images]
            for tracker in able or self._trackers:  # one that cannot warns
                tracker.log_images(values, step, **options.get(tracker.name, {}))

    def states(self) -> list[dict[str, Any]]:
        """Return the loggers' positions for a checkpoint, or an empty list on ranks that do not write."""
        if not self._is_made or not self._is_writer:
            return []
        self._start()
        return logger_states([each.logger for each in self._trackers])

    def resume(self, states: list[dict[str, Any]] | None, path: str, is_newest: bool) -> None:
        """Let loggers that have not started continue from their states in the newest checkpoint of its folder."""
        if states and is_newest:
            self._resumed = states, path

    def end(self) -> None:
        """Close the loggers. The next `init` begins another run."""
        if self._is_made and self._is_writer:
            # A run without a row gets its hyper-parameters and its end too.
            self._start()
            for tracker in reversed(self._trackers):
                outlived(tracker.logger, "finalize", "success")
                outlived(tracker.logger, "close")
                if isinstance(tracker.logger, RemoteLogger):
                    tracker.logger.end_run()
        self._trackers, self._is_made, self._is_started, self._resumed = [], False, False, ([], "")
        self._has_ended = True

    def _is_ready(self, call: str) -> bool:
        """Return whether there are loggers to call on this rank, and start them. RuntimeError on rank 0 before `init`."""
        if self._is_made:
            self._start()
            return self._is_writer or call == "get_tracker"
        if not self._is_writer:  # as in scripts for Accelerate, only rank 0 may have called init_trackers
            return False
        if self._has_ended:
            raise RuntimeError(
                f"{call} was called after end_training, which ended the run. Call it before, or begin another run with "
                "accelerator.init_trackers(name)."
            )
        raise RuntimeError(f"{call} was called before init_trackers. Call accelerator.init_trackers(name) first.")

    def _start(self) -> None:
        """Start the loggers on rank 0, which does all writing."""
        if self._is_started or not self._is_writer:
            return
        self._is_started = True
        loggers = [each.logger for each in self._trackers]
        states, path = self._resumed
        matches = match_states(loggers, states, path) if states else []
        resume_loggers(loggers, states, path, matches or [None] * len(loggers))
        start_loggers(loggers, lambda text: text, is_writer=True)
        for logger in loggers:
            if isinstance(logger, FolderLogger):
                logger.drop_later_rows()
        for logger in loggers if self._config else ():
            outlived(logger, "log_hyperparams", self._config)
        for logger in loggers:  # rows are buffered, and a loop may end without end_training
            flush_at_exit(logger)

    def _options(self, argument: str, given: Options | None) -> Options:
        for name in given or {}:
            if name not in [known for known, _ in self._chosen]:
                raise ValueError(f"{argument} is for {self._unknown(name)}")
        return given or {}

    def _unknown(self, name: str) -> str:
        known = [other for other, _ in self._chosen]
        return f"{name!r}, which is not in log_with. Its loggers are {', '.join(known) or '(none)'}.{did_you_mean(name, known)}"

"""The advanced profiler: shows the functions that take the time of an action."""

from __future__ import annotations

import cProfile
import io
import os
import pstats
import re

from trainwright.arguments import refuses_unknown
from trainwright.errors import a_type_of
from trainwright.profilers.base import Profiler


class AdvancedProfiler(Profiler):
    """Runs Python's cProfile for every action.

    The time of an action within another counts only for the inner action, because Python has one active profile.

    Args:
        dirpath: the output folder, a local path or a URL. The default is the run's log folder.
        filename: the middle of the files' names, between the stage and, on several processes, the rank.
            Without both, the text is printed.
        line_count_restriction: the number, or the fraction, of an action's functions to show.
        dump_stats: also write the profiles to .prof files, for tools such as snakeviz.

    Raises:
        TypeError, ValueError: line_count_restriction is not accepted.
        RuntimeError: from a run, if another profiling tool is active (since Python 3.12).

    >>> profiler = tw.AdvancedProfiler(filename="calls", line_count_restriction=10)
    >>> trainer = tw.Trainer(profiler=profiler, max_epochs=1, enable_model_summary=False)
    >>> trainer.fit(module, loader)  # writes fit-calls.txt into the run's log folder
    """

    @refuses_unknown
    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        lines = line_count_restriction
        if isinstance(lines, bool) or not isinstance(lines, (int, float)):
            raise TypeError(
                f"line_count_restriction={lines!r} is {a_type_of(lines)}; expected a number of lines (int) or a fraction of "
                "them (float). Pass for example 20 or 0.1."
            )
        if lines <= 0 or (isinstance(lines, float) and lines > 1):
            raise ValueError(
                f"line_count_restriction={lines!r} is out of range; expected an int of at least 1, or a float above 0 and "
                "up to 1.0. Pass for example 20 or 0.1."
            )
        self.line_count_restriction = lines
        self.dump_stats = dump_stats
        self.profiles: dict[str, cProfile.Profile] = {}
        self._running: list[str] = []

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | os.PathLike[str] | None = None) -> None:
        if self.stage is not None:  # the numbers of a previous run stay readable until here
            self.profiles = {}
        super().setup(stage, local_rank, log_dir)

    def start(self, action: str) -> None:
        if self._running:
            self.profiles[self._running[-1]].disable()
        profile = self.profiles.setdefault(action, cProfile.Profile())
        try:
            profile.enable()
        except ValueError as error:  # since Python 3.12
            raise RuntimeError(
                "another profiling tool is active in this process, and Python allows one at a time. Run without it, or "
                "without profiler='advanced'."
            ) from error
        self._running.append(action)

    def stop(self, action: str) -> None:
        if action not in self._running:
            raise RuntimeError(f"action={action!r} was stopped, but it is not running. Start it first.")
        self.profiles[self._running[-1]].disable()
        del self._running[len(self._running) - 1 - self._running[::-1].index(action)]  # actions may overlap
        if self._running:
            self.profiles[self._running[-1]].enable()

    def summary(self) -> str:
        parts = []
        for action, profile in self.profiles.items():
            if action not in self._running:
                text = io.StringIO()
                statistics = pstats.Stats(profile, stream=text).strip_dirs().sort_stats("cumulative")
                statistics.print_stats(self.line_count_restriction)
                parts.append(f"Profile of {self.stage or 'this run'}: {action}\n{text.getvalue().rstrip()}")
        return "\n\n".join(parts)

    def describe(self) -> None:
        super().describe()
        if self.dump_stats and self.rank == 0:
            for action, profile in self.profiles.items():
                if action not in self._running:
                    name = re.sub(r"[^\w.]+", "_", action).strip("_")
                    self.write(f"-{name}.prof", profile.dump_stats)

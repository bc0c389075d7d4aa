"""The advanced profiler: the functions that each action spends its time in."""

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
    """Runs Python's cProfile for each action.

    An action within another counts for the inner one only, since Python has one active profile.

    Args:
        dirpath: the output folder, a local path or a URL; by default the run's log folder.
        filename: the middle of the files' names, between the stage and, on several processes, the rank.
            Without both, the text is printed.
        line_count_restriction: the functions to show of each action: a number, or a fraction of all.
        dump_stats: also write each action's profile to a .prof file, for tools such as snakeviz.

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
                f"line_count_restriction={lines!r} is {a_type_of(lines)}; a number of lines (int) or a fraction of them "
                "(float) is accepted. Pass for example 20 or 0.1."
            )
        if lines <= 0 or (isinstance(lines, float) and lines > 1):
            raise ValueError(
                f"line_count_restriction={lines!r} is out of range; an int from 1 or a float above 0 and up to 1.0 is "
                "accepted. Pass for example 20 or 0.1."
            )
        self.line_count_restriction = lines
        self.dump_stats = dump_stats
        self.profiles: dict[str, cProfile.Profile] = {}
        self._running: list[str] = []
        self._has_ended = False

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | os.PathLike[str] | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        if self._has_ended:  # not at the previous run's end, so that its numbers stay readable
            self.profiles, self._has_ended = {}, False

    def start(self, action: str) -> None:
        if self._running:
            self.profiles[self._running[-1]].disable()
        profile = self.profiles.setdefault(action, cProfile.Profile())
        try:
            profile.enable()
        except ValueError as error:  # since Python 3.12
            raise RuntimeError(
                "another profiling tool is active in this process, and Python allows one at a time; run without it, or without "
                "profiler='advanced'."
            ) from error
        self._running.append(action)

    def stop(self, action: str) -> None:
        if action not in self._running:
            raise RuntimeError(f"action={action!r} was stopped, but it is not running; start it first.")
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

    def teardown(self, stage: str) -> None:
        self._has_ended = True

"""Where torch elastic sends the output of the ranks: pipes that `output.py` reads, or the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from trainwright.launch.output import PrefixedOutput


class PipeLogs(LogsSpecs):
    """Rank 0 inherits the terminal; the other ranks write into pipes. With a folder, each rank's output is kept in a file."""

    def __init__(self, folder: str | None, start_number: Callable[[], int]) -> None:
        super().__init__()
        self.output = PrefixedOutput()
        self._folder, self._start_number = folder, start_number

    @property
    def root_log_dir(self) -> str:
        return os.devnull  # elastic's own log folder is not used

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return where each rank's streams go; an empty path is the launcher's own stream."""
        self.output = PrefixedOutput()
        stdouts: dict[int, str] = {}
        stderrs: dict[int, str] = {}
        for local_rank, variables in envs.items():
            variables["TORCHELASTIC_ERROR_FILE"] = ""
            variables["TORCHELASTIC_RESTART_COUNT"] = str(self._start_number())
            rank = int(variables["RANK"])
            prefix = f"[rank{rank}] " if rank else ""
            log = None if self._folder is None else str(Path(self._folder, f"rank{rank}.log"))
            for streams, target in ((stdouts, sys.stdout), (stderrs, sys.stderr)):
                # In a terminal rank 0 writes directly, for its progress bars; elsewhere lines of ranks must not mix.
                is_direct = rank == 0 and log is None and target.isatty()
                streams[local_rank] = "" if is_direct else self.output.open_pipe(prefix, target, log)
            if rank == 0 and log is None and sys.stdout.isatty():
                continue
            if "PYTHONUNBUFFERED" not in os.environ:  # a pipe would buffer lines, and lose them in a crash
                variables["PYTHONUNBUFFERED"] = "1"
        return LogsDest(stdouts, stderrs, {}, {}, dict.fromkeys(envs, os.devnull))

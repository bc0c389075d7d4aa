"""One job on this machine: torch elastic's agent, with our rendezvous, our output and our way to end.

Importing this module imports torch elastic, so only the launcher process does it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from trainwright.distributed.agreement import PEER_FAILED_EXIT_CODE, FailureBoard, Store
from trainwright.distributed.environment import STORE_PREFIX
from trainwright.launch.output import PrefixedOutput

LOOPBACK = "127.0.0.1"
LEAVE_SECONDS = 1.0
"""How long the other ranks have to leave by themselves, with their output flushed, once a failure is posted."""
END_SECONDS = 2.0
"""How long a rank that has posted its failure has to end."""
CLOSE_SECONDS = 3.0
"""How long a rank has between SIGTERM and SIGKILL."""
TIDY_SECONDS = 0.5
"""How long the loader workers of a rank that has ended have between the two."""


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of one node over a store that only this machine can reach."""

    def __init__(self) -> None:
        # Bound here to a free port and handed over: TCPStore by itself listens on all interfaces.
        listener = socket.socket()
        listener.bind((LOOPBACK, 0))
        listener.listen()
        self._port = int(listener.getsockname()[1])
        stores = cast(Any, dist)
        self.store = stores.TCPStore(
            LOOPBACK, self._port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._agent_store = stores.PrefixStore("agent", self.store)
        self.board = FailureBoard(cast(Store, stores.PrefixStore(f"{STORE_PREFIX}/0", self.store)))

    @property
    def use_agent_store(self) -> bool:
        """The workers use this store too."""
        return True

    def get_backend(self) -> str:
        """Return the name that elastic puts into its records."""
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the only node's place."""
        return RendezvousInfo(self._agent_store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

    def is_closed(self) -> bool:
        """Nobody else can join."""
        return False

    def set_closed(self) -> None:
        """Nobody else can join."""

    def num_nodes_waiting(self) -> int:
        """Nobody else can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the job's name."""
        return f"trainwright-{os.getpid()}"

    def shutdown(self) -> bool:
        """The store ends with the launcher."""
        return True


class PipeLogs(LogsSpecs):
    """Rank 0 inherits the terminal; the other ranks write into pipes. No file is made."""

    def __init__(self, output: PrefixedOutput) -> None:
        super().__init__()
        self._output = output

    @property
    def root_log_dir(self) -> str:
        """There is none."""
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return where each rank's streams go; an empty path stands for the launcher's own stream."""
        stdouts: dict[int, str] = {}
        stderrs: dict[int, str] = {}
        for local_rank, variables in envs.items():
            variables["TORCHELASTIC_ERROR_FILE"] = ""
            prefix = f"[rank{local_rank}] " if local_rank else ""
            for streams, target in ((stdouts, sys.stdout), (stderrs, sys.stderr)):
                # In a terminal rank 0 writes to it directly, for its progress bars; elsewhere whole lines keep apart.
                is_direct = local_rank == 0 and target.isatty()
                streams[local_rank] = "" if is_direct else self._output.open_pipe(prefix, target)
            if local_rank == 0 and sys.stdout.isatty():
                continue
            if "PYTHONUNBUFFERED" not in os.environ:  # a pipe would else hold lines back, and lose them in a crash
                variables["PYTHONUNBUFFERED"] = "1"
        return LogsDest(stdouts, stderrs, {}, {}, dict.fromkeys(envs, os.devnull))


class JobAgent(LocalElasticAgent):
    """Elastic's agent for one node, which ends a failed job in seconds and knows who failed first.

    Args:
        command: what each worker runs.
        num_processes: how many workers.
    """

    def __init__(self, command: list[str], num_processes: int) -> None:
        self.rendezvous = LoopbackRendezvous()
        self.output = PrefixedOutput()
        bootstrap = str(Path(__file__).with_name("bootstrap.py"))
        spec = WorkerSpec(
            role="trainwright",
            local_world_size=num_processes,
            rdzv_handler=self.rendezvous,
            entrypoint=sys.executable,
            args=("-I", "-S", bootstrap, str(os.getpid()), *command),
            max_restarts=0,
            monitor_interval=0.05,
        )
        super().__init__(spec, PipeLogs(self.output))
        self._first_codes: dict[int, int] = {}
        self._reported_at: float | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids = cast("dict[int, Any]", super()._start_workers(worker_group))
        assert self._pcontext is not None
        # NOTE: elastic waits a fixed 30 s here for workers that do not end on SIGTERM.
        cast(Any, self._pcontext).close = self._close_workers
        for handler in self._handlers().values():
            for stream in (handler._stdout, handler._stderr):
                if stream is not None:
                    stream.close()
        self.output.start()
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = cast(RunResult, super()._monitor_workers(worker_group))
        if result.state != WorkerState.HEALTHY or self.rendezvous.board.count() == 0:
            return result
        # A failed rank may not come to its end, where one of its threads goes on.
        self._reported_at = self._reported_at or time.monotonic()
        if time.monotonic() - self._reported_at < END_SECONDS:
            return result
        return RunResult(state=WorkerState.FAILED)

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        # Elastic's own record asks for the fully qualified host name, which takes seconds where no name server answers.
        return Event(f"torchelastic.worker.status.{state}", source=source)

    def _handlers(self) -> dict[int, Any]:
        return cast("dict[int, Any]", getattr(self._pcontext, "subprocess_handlers", {}))

    def exit_codes(self) -> dict[int, int]:
        """Return the exit codes of the workers that have ended, by rank; negative for a signal."""
        codes = {rank: handler.proc.poll() for rank, handler in self._handlers().items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def _close_workers(self, death_sig: signal.Signals | None = None, timeout: float = 0.0) -> None:
        """End what still runs: after a failure the ranks may first leave by themselves, then SIGTERM, then SIGKILL."""
        codes = self.exit_codes()
        failed = {rank: code for rank, code in codes.items() if code != 0}
        if len(codes) == len(self._handlers()) and not failed:
            return
        if not self._first_codes and failed:
            self._first_codes = failed
            self._kill_groups(failed)
            self._post_first_failure()
            deadline = time.monotonic() + LEAVE_SECONDS
            while len(self.exit_codes()) < len(self._handlers()) and time.monotonic() < deadline:
                time.sleep(0.01)
        elif not failed:
            self.rendezvous.board.announce_end()
        running = set(self._handlers()) - set(self.exit_codes())
        assert self._pcontext is not None
        self._pcontext._close(death_sig or signal.SIGTERM, cast(int, CLOSE_SECONDS))
        self._kill_groups(running)

    def _post_first_failure(self) -> None:
        """Tell the ranks and the summary who died, unless a rank has told it already."""
        if self.rendezvous.board.count() == 0:
            rank = min(self._first_codes, key=lambda rank: (_order(self._first_codes[rank]), rank))
            self.rendezvous.board.post(rank, describe_exit(self._first_codes[rank]))
            self.rendezvous.board.mark_printed()  # there is nothing to wait for

    def _kill_groups(self, ranks: Any) -> None:
        """End what ended ranks have left behind in their process groups, such as loader workers.

        SIGTERM lets a loader worker remove its temporary folder.
        """
        groups = {self._handlers()[rank].proc.pid for rank in ranks}
        deadline = time.monotonic() + TIDY_SECONDS
        for signal_number in (signal.SIGTERM, 0, signal.SIGKILL):
            while groups:
                for group in list(groups):
                    try:
                        os.killpg(group, signal_number)
                    except (ProcessLookupError, PermissionError):
                        groups.discard(group)
                if signal_number or time.monotonic() > deadline:
                    break
                time.sleep(0.01)

    def kill_all(self) -> None:
        """End every worker that still runs, at once."""
        self._kill_groups(set(self._handlers()) - set(self.exit_codes()))

    def summarize(self) -> tuple[int, str]:
        """Return the exit code of the job, and who failed first."""
        report = self.rendezvous.board.first()
        world = len(self._handlers())
        if report is None:
            return 1, f"trainwright: a rank of {world} failed, but left no report; the job was ended.\n"
        code = self._first_codes.get(report.rank, 1)
        if code < 0:
            # A rank that told its error and was still busy ending when the job was closed counts as an error.
            code = 1 if report.traceback else 128 - code
        elif code in (0, PEER_FAILED_EXIT_CODE):
            code = 1
        text = f"trainwright: rank {report.rank} of {world} failed first ({report.summary}); the job was ended.\n"
        return code, text if report.was_printed else text + report.traceback


def _order(code: int) -> int:
    """Sort exit codes by how likely they are the cause: a kill from outside, an error, an answer to another's end."""
    if code == -signal.SIGKILL:
        return 0
    return 2 if code == PEER_FAILED_EXIT_CODE else 1


def describe_exit(code: int) -> str:
    """Say in words how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; on Linux this is often the out-of-memory killer" if code == -signal.SIGKILL else ""
    return f"killed by {name}{hint}"


def run(command: list[str], num_processes: int, report: str | None = None) -> int:
    """Run a command in that many workers until all are done or one has failed; return the exit code.

    `report` is a file to which the line about who failed first is written too.
    """
    for name in ("torch.distributed.elastic", "torchelastic"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())  # without a handler, Python prints its warnings
        logger.propagate = False
    agent = JobAgent(command, num_processes)
    result: RunResult | None = None
    text = ""
    try:
        result = agent.run()
        code = 0
        if result is not None and result.is_failed():
            code, text = agent.summarize()
            if report is not None:
                Path(report).write_text(text.partition("\n")[0].removeprefix("trainwright: "), encoding="utf-8")
    except SignalException as error:
        code = 128 + int(error.sigval)
    finally:
        agent.kill_all()
        agent.output.finish()
    sys.stderr.write(text)
    sys.stderr.flush()
    return code

"""A job's processes on this machine: torch elastic's agent with our rendezvous, our output and our shutdown.

The class overrides private methods of elastic's agent, read against torch 2.11 to 2.13.
Importing this module imports torch elastic, so only the launcher process does it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing.api import SignalException

from trainwright.distributed.failures import LOST_PEER_TEXTS, PEER_FAILED_EXIT_CODE, FailureReport
from trainwright.distributed.signals import STOPPED_EXIT_CODE
from trainwright.errors import LaunchError
from trainwright.launch.graceful_shutdown import GracefulShutdown
from trainwright.launch.nodes import Job
from trainwright.launch.output import PipeLogs
from trainwright.launch.rendezvous import GONE, NodeRendezvous

LEAVE_SECONDS = 1.0  # for the other ranks to flush their output and exit after a failure is posted
END_SECONDS = 2.0  # for a rank to end after posting its failure
CLOSE_SECONDS = 3.0  # between SIGTERM and SIGKILL to a rank
TIDY_SECONDS = 5.0  # between SIGTERM and SIGKILL to the loader workers of a rank that has ended
REPORT_SECONDS = 5.0  # to wait for the report of another node whose rank failed first
NODE_LOST = "its node was lost: the launcher there has ended or cannot be reached"


class JobAgent(LocalElasticAgent):
    """Elastic's agent for one node, which ends a failed job in seconds and knows which rank failed first."""

    def __init__(self, job: Job) -> None:
        self.shutdown = GracefulShutdown(self._send, job.grace_seconds)
        self.rendezvous = NodeRendezvous(job.nodes, job.num_processes, job.max_restarts, self._kill_all)
        self.failures = self.rendezvous.failures(0)
        self.logs = PipeLogs(job.logs, lambda: self.rendezvous.round.number)
        entry = str(Path(__file__).with_name("entry.py"))
        spec = WorkerSpec(
            role="trainwright",
            local_world_size=job.num_processes,
            rdzv_handler=self.rendezvous,
            entrypoint=sys.executable,
            args=("-I", "-S", entry, "attached", str(os.getpid()), *job.command),
            max_restarts=job.max_restarts,
            monitor_interval=0.05,
        )
        super().__init__(spec, self.logs)
        self._report = job.report
        self._stopped_code: int | None = None
        """The exit code of ranks that a signal has stopped, once all have left."""
        self._ended_before: list[int] = []
        self._first_codes: dict[int, int] = {}
        self._reported_at: float | None = None
        self._has_lost_main = False
        self._success: RunResult | None = None
        """The result of this node's ranks once all have ended well, while other nodes' ranks run."""
        self._reason, self._rest = "", ""
        """Why the ranks restart, and lines to print after that."""

    def run_job(self) -> tuple[int, str]:
        """Run the job to its end. Return its exit code and a text to print once the workers' output is."""
        try:
            result = self.run()
            if self._stopped_code is not None:
                return self._stopped_code, ""
            if result is None or not (result.is_failed() or self._first_codes or self._job_has_failed()):
                return 0, ""
            code, reason, rest = self._summarize()
        except SignalException as error:  # its handlers stay installed to the end
            number = signal.Signals(error.sigval)
            self._fail_other_nodes(f"its launcher was killed by {number.name}")
            return 128 + number, self.shutdown.describe() if self.shutdown.has_timed_out else ""
        line = f"{reason}; the job was ended."
        if self._report is not None:
            Path(self._report).write_text(line, encoding="utf-8")
        return code, f"trainwright: {line}\n{rest}"

    def close(self, code: int) -> None:
        """Kill the workers that still run, print the rest of their output, and leave the other nodes with the exit code."""
        self._kill_all()
        self.logs.output.finish()
        with contextlib.suppress(*GONE):
            self.rendezvous.leave(code)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._leave_if_signalled()
        self.failures = self.rendezvous.failures(self.rendezvous.round.number)
        self._first_codes, self._ended_before, self._reported_at = {}, [], None
        self._success, self._stopped_code = None, None
        self.shutdown.stop_timer()
        pids = cast("dict[int, Any]", super()._start_workers(worker_group))
        self.shutdown.install()
        assert self._pcontext is not None
        # NOTE: elastic waits a fixed 30 s here for workers that do not end on SIGTERM.
        cast(Any, self._pcontext).close = self._close_workers
        for handler in self._handlers().values():
            for stream in (handler._stdout, handler._stderr):
                if stream is not None:
                    stream.close()
        self.logs.output.start()
        return pids

    def _leave_if_signalled(self) -> None:
        if self.shutdown.number:
            raise SignalException("between two starts", sigval=signal.Signals(self.shutdown.number))

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._stop_workers(worker_group)
        self._kill_all()
        self.logs.output.finish()
        self._leave_if_signalled()  # before the wait for the other nodes, which nothing would end
        if self._stopped_code is None:
            _, self._reason, self._rest = self._summarize()
        try:
            super()._restart_workers(worker_group)
        except LaunchError:
            _print(f"trainwright: {self._reason}; the ranks could not be restarted.\n{self._rest}")
            raise

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        most, restarts = worker_group.spec.max_restarts, self.rendezvous.round.restarts
        self._remaining_restarts = most - restarts
        where = f" on {self.rendezvous.num_nodes} node(s)" if self.rendezvous.nodes.count > 1 else ""
        if self._reason:
            line = f"{self._reason}; restarting all ranks{where}, restart {restarts} of {most}."
            _print(f"trainwright: {line}\n{self._rest}")
        elif restarts:
            number = self.rendezvous.node_rank
            _print(
                f"trainwright: this node joins as node {number}; restarting all ranks{where}, restart {restarts} of {most}.\n"
            )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.shutdown.number:
            self._remaining_restarts = 0
        result = self._success or self._stopping() or cast(RunResult, super()._monitor_workers(worker_group))
        if result.state == WorkerState.SUCCEEDED:
            return self._wait_for_nodes(result)
        if result.state != WorkerState.HEALTHY or not self._job_has_failed():
            return result
        # A failed rank may not end by itself while one of its threads runs.
        self._reported_at = self._reported_at or time.monotonic()
        if time.monotonic() - self._reported_at < END_SECONDS:
            return result
        return RunResult(state=WorkerState.FAILED)

    def _wait_for_nodes(self, result: RunResult) -> RunResult:
        """Return this node's success once all nodes have succeeded: its launcher may hold the store that they need."""
        if self.rendezvous.nodes.count == 1:
            return result
        try:
            if self._success is None:
                self._success = result
                self.rendezvous.say_finished(self.shutdown.number)
            if self.rendezvous.all_finished():
                return RunResult(state=WorkerState.FAILED) if self._trains_on() else result
            if self.shutdown.has_timed_out:
                return result
        except GONE:
            self._has_lost_main = True
        if not self._job_has_failed():
            return RunResult(state=WorkerState.HEALTHY)
        return result if self._stopped_code is not None else RunResult(state=WorkerState.FAILED)

    def _trains_on(self) -> bool:
        """Return whether a signal has stopped all ranks, but only the launchers of nodes that a range may lose."""
        if self._stopped_code is None or self.rendezvous.nodes.rank is not None or self._remaining_restarts == 0:
            return False
        signals = self.rendezvous.signals()
        left = [node for node, number in enumerate(signals) if number == 0]
        if len(left) in (0, len(signals)) or left[0] != 0 or len(left) < self.rendezvous.nodes.least:
            return False
        gone = sorted(set(range(len(signals))) - set(left))
        hosts = ", ".join(f"node {node} ({self.rendezvous.round.members[node].host})" for node in gone)
        names = " and ".join(sorted({signal.Signals(number).name for number in signals if number}))
        self._reason, self._rest = f"{names} stopped {hosts}", ""
        return not self.shutdown.number

    def _send(self, number: int) -> int:
        running = [handler.proc for handler in self._handlers().values() if handler.proc.poll() is None]
        for each in running:
            each.send_signal(number)  # not to its process group: the rank ends its loader workers
        return len(running)

    def _stopping(self) -> RunResult | None:
        """Return the state of ranks that a signal is stopping, or None if there is no signal or a rank has failed.

        Raises:
            SignalException: the signal has killed a rank, or the ranks' time is over.
        """
        codes, number = self._exit_codes(), self.shutdown.number
        announced = self._announced_codes() if any(codes.values()) else set()
        if not number and not any(code and code in announced for code in codes.values()):
            return None
        self.shutdown.start_timer()  # also if only a rank was signalled
        others = [code for code in codes.values() if code != 0 and code not in announced]
        if number and others and all(code in (-number, 128 + number) for code in others):
            raise SignalException("a rank has not waited", sigval=signal.Signals(number))
        if others:
            self._remaining_restarts *= not number
            return None
        if len(codes) == len(self._handlers()):
            self._stopped_code = max(codes.values())
            workers = self._worker_group.workers
            return RunResult(WorkerState.SUCCEEDED, return_values={each.global_rank: None for each in workers})
        if self.shutdown.has_timed_out:
            ending = signal.Signals(number or signal.SIGTERM)
            self._fail_other_nodes(f"its launcher received {ending.name}, and its ranks did not exit in time")
            self._kill_all()
            raise SignalException("the ranks' time to exit is over", sigval=ending)
        return RunResult(state=WorkerState.HEALTHY)

    def _announced_codes(self) -> set[int]:
        """Return the exit codes that ranks stopped by a signal have agreed on."""
        if self.rendezvous.world_size == 1:
            return {STOPPED_EXIT_CODE, 128 + signal.SIGINT}  # a single rank has no store to announce it in
        with contextlib.suppress(*GONE):
            if (code := self.failures.stop_code()) is not None:
                return {code}
        return set()

    def _job_has_failed(self) -> bool:
        """Return whether a rank of any node has failed. The main node also posts a failure for a node whose launcher ended."""
        if not self._has_lost_main:  # otherwise torch prints a stack for every request
            try:
                if self.failures.count() > 0:
                    return True
                if lost := self.rendezvous.lost_nodes():
                    if self.rendezvous.is_main:
                        self._post(self.rendezvous.first_rank(lost[0]), NODE_LOST)
                        return True
                    self._has_lost_main = True
            except GONE:
                self._has_lost_main = True
        if self._has_lost_main:
            self._remaining_restarts = 0  # without it the nodes cannot meet
        return self._has_lost_main

    def _exit_barrier(self) -> None:
        """`_wait_for_nodes` has waited."""

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        # Elastic's record looks up the fully qualified host name, which takes seconds without a name server.
        return Event(f"torchelastic.worker.status.{state}", source=source)

    def _handlers(self) -> dict[int, Any]:
        return cast("dict[int, Any]", getattr(self._pcontext, "subprocess_handlers", {}))

    def _exit_codes(self) -> dict[int, int]:
        """Return the exit codes of the ended workers by local rank (negative: killed by a signal)."""
        codes = {rank: handler.proc.poll() for rank, handler in self._handlers().items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def _close_workers(self, death_sig: signal.Signals | None = None, timeout: float = 0.0) -> None:
        """End the running ranks: after a failure they may exit by themselves before SIGTERM and SIGKILL."""
        codes = self._exit_codes()
        failed = {rank: code for rank, code in codes.items() if code != 0}
        if self._stopped_code is not None:
            self._kill_groups(failed)
            return
        if len(codes) == len(self._handlers()) and not failed:
            return
        if not self._first_codes and failed:
            self._first_codes = failed
            self._ended_before = sorted(rank for rank, code in codes.items() if code == 0)
            self._kill_groups(failed)
            with contextlib.suppress(*GONE):
                if not self._has_lost_main:
                    self._post_first_failure()
            deadline = time.monotonic() + LEAVE_SECONDS
            while len(self._exit_codes()) < len(self._handlers()) and time.monotonic() < deadline:
                time.sleep(0.01)
        elif not failed:
            with contextlib.suppress(*GONE):
                if not self._has_lost_main:
                    self.failures.announce_end()
        running = set(self._handlers()) - set(self._exit_codes())
        assert self._pcontext is not None
        self._pcontext._close(death_sig or signal.SIGTERM, cast(int, CLOSE_SECONDS))
        self._kill_groups(running)

    def _post_first_failure(self) -> None:
        """Post which rank died, unless a rank has posted a failure already."""
        if self.failures.count() > 0:
            return
        if self.rendezvous.num_nodes > 1 and set(self._first_codes.values()) == {PEER_FAILED_EXIT_CODE}:
            return  # they left because a rank of another node failed
        local_rank = min(self._first_codes, key=lambda rank: (_order(self._first_codes[rank]), rank))
        self._post(self._first_rank() + local_rank, _describe_exit(self._first_codes[local_rank]))

    def _post(self, rank: int, summary: str) -> None:
        self.failures.post(rank, summary)
        self.failures.mark_printed()  # otherwise the ranks would wait for a traceback

    def _first_rank(self) -> int:
        return self.rendezvous.first_rank(self.rendezvous.node_rank)

    def _kill_groups(self, ranks: Any) -> None:
        """Kill the processes that ended ranks left behind. SIGTERM comes first, so that loader workers can clean up."""
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

    def _kill_all(self) -> None:
        self._kill_groups(set(self._handlers()) - set(self._exit_codes()))

    def _fail_other_nodes(self, summary: str) -> None:
        if self.rendezvous.num_nodes > 1:
            with contextlib.suppress(*GONE):
                self._post(self._first_rank(), summary)

    def _summarize(self) -> tuple[int, str, str]:
        """Return the exit code of the job, which rank failed first and how, and lines to print after that."""
        world = self.rendezvous.world_size
        if self._has_lost_main:
            return 1, "the launcher of node 0, the main node, has ended", ""
        try:
            report = self._first_report()
        except GONE:
            return 1, "the launcher of node 0, the main node, has ended", ""
        if report is None:
            return 1, f"a rank of {world} failed, but left no report", ""
        local_rank = report.rank - self._first_rank()
        code = self._first_codes.get(local_rank, 1)
        if code < 0:
            # A rank that had posted its error and was killed while it was ending counts as an error.
            code = 1 if report.traceback else 128 - code
        elif code in (0, PEER_FAILED_EXIT_CODE):
            code = 1
        where = ""
        if self.rendezvous.num_nodes > 1:
            node = self.rendezvous.node_of(report.rank)
            where = f", on node {node} ({self.rendezvous.round.members[node].host}),"
        reason, rest = f"rank {report.rank} of {world}{where} failed first ({report.summary})", ""
        if self._ended_before and any(each in report.summary.lower() for each in LOST_PEER_TEXTS):
            ended = ", ".join(str(self._first_rank() + rank) for rank in self._ended_before)
            rest = f"trainwright: before that, rank {ended} had reached the end of its script or exited with code 0.\n"
        # A rank of another node has printed its traceback there only.
        is_shown = report.was_printed and local_rank in self._handlers()
        return code, reason, rest if is_shown else rest + report.traceback

    def _first_report(self) -> FailureReport | None:
        report = self.failures.first()
        deadline = time.monotonic() + REPORT_SECONDS * (self.rendezvous.num_nodes > 1)
        while report is None and time.monotonic() < deadline and not self._has_lost_main:
            self._job_has_failed()
            report = self.failures.first(timeout_seconds=0.1)
            time.sleep(0.05)
        return report


def _order(code: int) -> int:
    """Sort exit codes by how likely they are the cause: a kill from outside, an error, the failure of a peer."""
    if code == -signal.SIGKILL:
        return 0
    return 2 if code == PEER_FAILED_EXIT_CODE else 1


_HINTS: dict[int, str] = {
    signal.SIGKILL: "; on Linux this is often the out-of-memory killer",
    signal.SIGABRT: "; torch's gloo ends so where ranks exchange other tensors, such as those of a branch that only some take",
}


def _describe_exit(code: int) -> str:
    """Return how a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}{_HINTS.get(-code, '')}"


def run(job: Job) -> int:
    """Run a job's workers on this node until all have ended or one has failed. Return the exit code."""
    for name in ("torch.distributed.elastic", "torchelastic"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())  # without a handler, Python prints its warnings
        logger.propagate = False
    try:
        agent, code = JobAgent(job), 1
        try:
            code, text = agent.run_job()
        finally:
            agent.close(code)
    except LaunchError as error:
        code, text = 1, f"trainwright: {error}\n"
    _print(text)
    return code


def _print(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)  # to stdout in a process without stderr

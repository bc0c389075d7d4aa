"""Kills training runs at random, restarts them with the same command, and compares the result with an uninterrupted run.

The launcher starts a run of soak_job.py. It is killed several times by SIGKILL (a rank, the launcher, or all of them; in a
step, a validation or a save, while it loads, right after it has resumed), restarted each time, and finally left to finish. Its
weights, optimizer, generators, counters, states of callbacks, logged rows and the samples of every batch must then be bitwise
those of the uninterrupted run of its strategy. After each kill every checkpoint must verify, the newest earlier one must still
exist, and within seconds nothing of the job may remain: no process, no listening port, no shared memory. The seed and the
run's number determine which kills a run gets. With `--faults`, processes are also stopped by SIGSTOP: for some seconds, after
which the run must continue, or until `hang_timeout` ends the job. One sample is then NaN, and
`nan_policy="skip"` skips its optimizer step, in the uninterrupted run too.

    python benchmarks/soak.py [--kills 200] [--faults] [--seed 0] [--strategies ddp,fsdp] [--out runs/soak-0] [--jobs 2]
    python benchmarks/soak.py --only 17 --seed 0       # run 17 of that soak again, by itself

An interrupted soak continues where it stopped. The exit code is 1 if anything differed, was lost or was left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from soak_job import FINAL, FORGETTABLE, num_samples
from soak_kills import Kill, plan
from soak_outcome import (
    Outcome,
    Result,
    count_checkpoints,
    differences,
    read_outcome,
    temporary_names,
    unseen_or_seen_twice,
)
from soak_traces import GONE_SECONDS, Traces, lives, processes_of

from trainwright.checkpoint.discovery import find_checkpoints
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.errors import CheckpointError

RANKS = {"ddp": 3, "single_device": 1}
"""Of the others two. With three, the order of a sum shows in its last bits."""
STRATEGIES = (
    "ddp",
    "ddp_sharded",
    "fsdp",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_3",
    "single_device",
)
HANG_SECONDS = 20.0
"""`hang_timeout` of the runs that also get other faults."""
PATIENCE_SECONDS = 180.0
"""A job that tells nothing for so long is taken to hang."""
ROOT = Path(__file__).resolve().parents[1]


class Job:
    """One start of the script of a run."""

    def __init__(self, soak: Soak, strategy: str, folder: Path, start: int) -> None:
        self.num_ranks = RANKS.get(strategy, 2)
        self.events_path, self.log_path = folder / f"events-{start}", folder / f"log-{start}"
        self.events_path.touch()
        self._read_bytes = 0
        self.events: list[dict[str, Any]] = []
        self.traces = Traces(f"{folder}#{start}")
        ignored = ["-W", "ignore:the loss"] if soak.options.faults else []  # the warning of a skipped step
        script = [
            sys.executable,
            "-W",
            "error",
            *ignored,
            str(ROOT / "benchmarks" / "soak_job.py"),
            "--strategy",
            strategy,
        ]
        script += ["--devices", str(self.num_ranks), "--folder", str(folder), "--epochs", str(soak.options.epochs)]
        script += ["--forget", soak.options.forget] if soak.options.forget and start else []
        script += ["--without-torchmetrics"] if soak.options.without_torchmetrics else []
        script += ["--with-nans", "--hang-timeout", str(HANG_SECONDS)] if soak.options.faults else []
        launcher = [sys.executable, "-m", "trainwright.launch.processes", f'{{"num_processes": {self.num_ranks}}}']
        variables = {
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "SOAK_EVENTS": str(self.events_path),
            **self.traces.variables,
        }
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                script if self.num_ranks == 1 else [*launcher, *script],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
            )

    def wait_for(self, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
        """Return the first matching event; None if the job ends first."""
        looked_at, deadline = 0, time.monotonic() + PATIENCE_SECONDS
        while True:
            has_ended = self.process.poll() is not None
            self._read()
            for event in self.events[looked_at:]:
                if is_it(event):
                    return event
            if len(self.events) > looked_at:
                looked_at, deadline = len(self.events), time.monotonic() + PATIENCE_SECONDS
            if has_ended:
                return None
            if time.monotonic() > deadline:
                self.kill("all")
                raise TimeoutError(f"the job told nothing for {PATIENCE_SECONDS:.0f} s; see {self.log_path}")
            time.sleep(0.002)

    def kill(self, victim: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank, to the launcher, or to all of them."""
        ranks = {event["rank"]: event["pid"] for event in self.events}
        if self.num_ranks == 1 or victim == "launcher":
            _kill(self.process.pid, number)
        elif victim == "all":
            for pid in (self.process.pid, *ranks.values()):
                _kill(pid, number)
        else:
            _kill(ranks[int(victim)], number)

    def wait(self) -> int:
        try:
            return self.process.wait(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill("all")
            raise TimeoutError(f"the job did not end in {PATIENCE_SECONDS:.0f} s; see {self.log_path}") from None

    def wait_for_end(self, pid: int) -> None:
        """Wait until a rank has ended and can no longer write; one that does not end is reported as left behind."""
        deadline = time.monotonic() + GONE_SECONDS
        while lives(pid) and time.monotonic() < deadline:
            time.sleep(0.005)

    def _read(self) -> None:
        with open(self.events_path, "rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        self.events += [json.loads(line) for line in whole.splitlines()]


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended in this moment
        os.kill(pid, number)


class Soak:
    """The runs of a soak, one after another or several at a time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out = Path(options.out).resolve()
        self.results: dict[int, Result] = {}
        self._locks = {strategy: threading.Lock() for strategy in STRATEGIES}
        self._lock = threading.Lock()
        self._checks = ThreadPoolExecutor(16)
        self._next = self._underway = 0

    def run_all(self) -> bool:
        """Run until the requested number of kills is reached; return whether everything was correct."""
        self._take_up()
        with ThreadPoolExecutor(self.options.jobs) as pool:
            for done in [pool.submit(self._work) for _ in range(self.options.jobs)]:
                done.result()
        is_sound = self.summarize()
        for path in (self.out / "soak.json", *self.out.glob("oracle-*.json")):
            path.unlink(missing_ok=True)  # the next soak may be of other code
        return is_sound

    def run_one(self, number: int) -> bool:
        if not (self.out / "soak.json").exists():
            for path in self.out.glob("oracle-*.json"):
                path.unlink()
        self.results[number] = self.run(number, self.options.per_run)
        return self.summarize()

    def summarize(self) -> bool:
        results = sorted(self.results.values(), key=lambda result: result.number)
        kills, seconds = sum(each.kills for each in results), sum(each.seconds for each in results) / self.options.jobs
        for each in results:
            if not each.is_sound:
                again = f"--only {each.number} --seed {self.options.seed} --per-run {self.options.per_run}"
                again += f" --epochs {self.options.epochs} --strategies {','.join(self.options.strategies)}"
                again += " --faults" * self.options.faults
                print(f"run {each.number} ({each.strategy}) was not as it has to be; again: {sys.argv[0]} {again}")
        noun = "faults" if self.options.faults else "kills"
        print(
            f"{kills} {noun} in {len(results)} runs of {len({each.strategy for each in results})} strategies: "
            f"{sum(bool(each.wrong) for each in results)} runs that differ, {sum(len(each.lost) for each in results)} lost "
            f"checkpoints, {sum(len(each.left) for each in results)} things left; {seconds / max(kills, 1):.1f} s a kill, all "
            f"gone {max((each.gone for each in results), default=0.0):.1f} s after one, "
            f"{sum(each.kept for each in results)} checkpoints more than without kills"
        )
        return all(each.is_sound for each in results)

    def _take_up(self) -> None:
        """Load the results of an earlier, interrupted soak with the same settings."""
        self.out.mkdir(parents=True, exist_ok=True)
        for pid in processes_of(f"{self.out}/", begins=True):
            _kill(pid)  # of the runs that were under way when it was cut
        path = self.out / "soak.json"
        names = ("seed", "strategies", "per_run", "epochs", "forget", "without_torchmetrics", "faults")
        self._settings = {name: getattr(self.options, name) for name in names}
        if path.exists():
            told = json.loads(path.read_text())
            if told["settings"] != self._settings:
                sys.exit(f"{self.out} holds a soak of {told['settings']}; go on with these, or give another --out.")
            self.results = {each["number"]: Result(**each) for each in told["results"]}
            print(f"going on after {sum(each.kills for each in self.results.values())} kills")

    def _work(self) -> None:
        while True:
            with self._lock:
                done = sum(each.kills for each in self.results.values()) + self._underway
                kills = min(self.options.per_run, self.options.kills - done)
                if kills <= 0:
                    return
                while self._next in self.results:
                    self._next += 1
                number, self._next, self._underway = self._next, self._next + 1, self._underway + kills
            result = self.run(number, kills)
            with self._lock:
                self._underway -= kills
                self.results[number] = result
                told = {"settings": self._settings, "results": [asdict(each) for each in self.results.values()]}
                (self.out / "soak.json.new").write_text(json.dumps(told))
                os.replace(self.out / "soak.json.new", self.out / "soak.json")

    def run(self, number: int, kills: int) -> Result:
        """Make one run with this many kills, and compare its result."""
        strategy = self.options.strategies[number % len(self.options.strategies)]
        oracle = self.oracle(strategy)
        folder = _emptied(self.out / f"run-{number}")
        result, began = Result(number, strategy), time.monotonic()
        checks: list[Future[tuple[float, list[str]]]] = []
        try:
            self._kill_and_go_on(folder, result, kills, checks)
            num_ranks = RANKS.get(strategy, 2)
            found = read_outcome(folder, FINAL, num_ranks)
            result.wrong += differences(found, oracle)
            result.wrong += unseen_or_seen_twice(found, num_samples(num_ranks), self.options.epochs)
            result.left += temporary_names(folder)
            result.kept = count_checkpoints(folder) - int(oracle["checkpoints"])
        except (TimeoutError, CheckpointError, RuntimeError) as error:
            result.wrong.append(f"{type(error).__name__}: {error}")
        result.seconds = time.monotonic() - began
        for check in checks:
            seconds, left = check.result()
            result.gone, result.left = max(result.gone, seconds), [*result.left, *left]
        said = "ends as the run that nobody killed" if result.is_sound else "is NOT as it has to be"
        ending = f"{said}, after {result.kills} kills in {result.seconds:.0f} s"
        print("\n    ".join([f"run {number:3d} {strategy:18s} {ending}", *result.told]), flush=True)
        if result.is_sound:
            shutil.rmtree(folder)
        return result

    def _kill_and_go_on(
        self, folder: Path, result: Result, kills: int, checks: list[Future[tuple[float, list[str]]]]
    ) -> None:
        """Start and kill the run repeatedly, then let it finish."""
        planned = plan(
            self.options.seed,
            result.number,
            self.options.per_run,
            RANKS.get(result.strategy, 2),
            self.options.epochs,
            only_kills=not self.options.faults,
        )
        newest = -1
        while True:
            job = Job(self, result.strategy, folder, result.kills)
            try:
                code, kill = self._strike(job, planned[:kills], newest, result)
                for pid in [event["pid"] for event in job.events if event["event"] == "load"]:
                    job.wait_for_end(pid)
            finally:
                job.kill("all")
                checks.append(self._checks.submit(job.traces.left))
            if code == 0:
                return
            if kill is None or (kill.kind == "kill" and code not in (128 + signal.SIGKILL, -signal.SIGKILL)):
                raise RuntimeError(f"start {result.kills} ended with {code}: {_tail(job.log_path)}")
            newest = self._look(folder, newest, result)
            told = f"{kill}; the newest checkpoint is of step {newest}"
            result.kills += 1
            print(f"run {result.number:3d} {result.strategy:18s} kill {result.kills}: {told}", flush=True)

    def _strike(self, job: Job, planned: list[Kill], newest: int, result: Result) -> tuple[int, Kill | None]:
        """Cause the next faults, until one ends the job. Return the exit code and that fault, or None at the regular end."""
        is_new = True
        while result.kills < len(planned):
            kill = planned[result.kills]
            if not self._wait_for_moment(job, kill, newest if is_new else None, result):
                break
            is_new = False
            job.traces.note_ports()
            time.sleep(kill.delay)
            job.kill(kill.victim, signal.SIGKILL if kill.kind == "kill" else signal.SIGSTOP)
            if kill.kind != "pause":
                code = job.wait()
                self._check_named(job, kill, code, result)
                return code, kill
            time.sleep(kill.seconds)
            job.kill(kill.victim, signal.SIGCONT)
            result.kills += 1
            print(f"run {result.number:3d} {result.strategy:18s} fault {result.kills}: {kill}", flush=True)
        return job.wait(), None

    def _wait_for_moment(self, job: Job, kill: Kill, newest: int | None, result: Result) -> bool:
        """Wait for the moment of a fault. Return whether it came before the job's end. `newest` is given for a new job."""
        if kill.moment == "load":
            return job.wait_for(lambda _: len({each["rank"] for each in job.events}) == job.num_ranks) is not None
        start = job.wait_for(lambda event: event["event"] == "start" and event["rank"] == 0)
        if start is None:
            return False
        if newest is not None and start["step"] != max(newest, 0):
            result.wrong.append(f"start {result.kills} went on from step {start['step']}, not from {newest}")
        if kill.moment == "start":
            return True
        latest = start["step"] if newest is not None else max(event["step"] for event in job.events)
        is_due = lambda each: each["event"] == kill.moment and each["step"] >= latest + kill.steps and each["rank"] == 0  # noqa: E731
        return job.wait_for(is_due) is not None

    def _check_named(self, job: Job, kill: Kill, code: int, result: Result) -> None:
        """Check that the launcher has named the killed or the hanging rank."""
        if not kill.victim.isdigit() or job.num_ranks == 1 or code == 0:
            return
        named = f"rank {kill.victim} of {job.num_ranks} failed first"
        named += " (killed by SIGKILL" if kill.kind == "kill" else ""
        if named not in job.log_path.read_text(errors="replace"):
            result.wrong.append(f"start {result.kills} did not say '{named}...': {_tail(job.log_path)}")

    def _look(self, folder: Path, newest: int, result: Result) -> int:
        """Verify every checkpoint after a kill, and return the step of the newest."""
        found = find_checkpoints(str(folder / "checkpoints"))
        for entry in found:
            try:
                open_checkpoint(entry.path)
            except CheckpointError as error:
                result.lost.append(f"after kill {result.kills + 1}: {error}")
        steps = [entry.step for entry in found] or [-1]
        if steps[-1] < newest:
            result.lost.append(
                f"after kill {result.kills + 1} the newest is of step {steps[-1]}, and there was {newest}"
            )
        return steps[-1]

    def oracle(self, strategy: str) -> Outcome:
        """Return the result of the uninterrupted run of a strategy."""
        with self._locks[strategy]:
            path = self.out / f"oracle-{strategy}.json"
            if path.exists():
                known: Outcome = json.loads(path.read_text())
                return known
            folder = _emptied(self.out / f"oracle-{strategy}")
            job = Job(self, strategy, folder, 0)
            if (code := job.wait()) != 0:
                sys.exit(
                    f"the uninterrupted run of {strategy} ended with {code}; see {job.log_path}\n{_tail(job.log_path)}"
                )
            if left := job.traces.left()[1]:
                sys.exit(f"the uninterrupted run of {strategy} has left {left}")
            outcome = read_outcome(folder, FINAL, job.num_ranks)
            path.write_text(json.dumps(outcome))
            shutil.rmtree(folder)
            return outcome


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-1500:]


def main(arguments: list[str] | None = None) -> int:
    """Run the soak of a command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="how many in all")
    parser.add_argument(
        "--faults", action="store_true", help="also pause and stop processes, and put NaNs into batches"
    )
    parser.add_argument("--seed", type=int, default=0, help="what the kills follow from")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="names, comma-separated")
    parser.add_argument("--out", help="the soak's folder; runs/soak-SEED by default")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--per-run", type=int, default=5, help="kills of one run")
    parser.add_argument("--epochs", type=int, default=8, help="epochs of one run")
    parser.add_argument("--only", type=int, help="make the run of this number alone")
    parser.add_argument("--forget", choices=FORGETTABLE, help="let resumed runs leave that out, which has to be found")
    parser.add_argument("--without-torchmetrics", action="store_true", help="whose import takes longer than torch's")
    options = parser.parse_args(arguments)
    options.strategies = options.strategies.split(",")
    if unknown := [each for each in options.strategies if each not in STRATEGIES]:
        parser.error(f"{unknown[0]!r} is unknown here; choose from {', '.join(STRATEGIES)}")
    for name in ("kills", "jobs", "per_run", "epochs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: give 1 or more")
    options.out = options.out or f"runs/soak-{options.seed}"
    soak = Soak(options)
    return 0 if (soak.run_all() if options.only is None else soak.run_one(options.only)) else 1


if __name__ == "__main__":
    sys.exit(main())

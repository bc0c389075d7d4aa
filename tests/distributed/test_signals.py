"""The watch records signals while the main thread is busy in C, in forked children, and beside other handlers."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from deadlines import deadline
from forked import run_python

from trainwright.distributed.signals import STOP_SIGNALS, SignalWatch, exit_code


def test_the_exit_code_says_whether_to_run_it_again() -> None:
    assert exit_code(signal.SIGTERM, True) == exit_code(signal.SIGUSR1, True) == 75
    assert exit_code(signal.SIGINT, True) == exit_code(signal.SIGINT, False) == 130
    assert exit_code(signal.SIGTERM, False) == 143


def test_it_is_asked_once_while_the_main_thread_runs_no_python(tmp_path: Path) -> None:
    asked: list[None] = []
    there = tmp_path / "asked"
    watch = SignalWatch(lambda: (asked.append(None), there.touch()))
    watch.open()
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        # Blocked, so that it is another thread which takes the signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        # The child's end is waited for in C, with the signal's handler due only after it.
        waits = f"until [ -e {there} ]; do sleep 0.01; done"
        assert os.system(f"timeout -s KILL {deadline(20)} sh -c '{waits}'") == 0
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        watch.close()
    assert watch.first == signal.SIGTERM
    assert len(asked) == 1


def test_a_forked_child_takes_its_signals_itself() -> None:
    watch = SignalWatch(lambda: None)
    watch.open()
    try:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        time.sleep(0.05)
        assert watch.first == 0
    finally:
        watch.close()


def test_an_inner_watch_does_not_end_the_outer_one() -> None:
    """A fit within a fit: forked children let go of both, and after the inner one's end of the outer one still."""
    before = [signal.getsignal(number) for number in STOP_SIGNALS]

    def child_has_none() -> bool:
        child = os.fork()
        if child == 0:
            is_free = [signal.getsignal(number) for number in STOP_SIGNALS] == before and signal.set_wakeup_fd(-1) == -1
            os._exit(0 if is_free else 1)
        return os.waitpid(child, 0)[1] == 0

    asked = threading.Event()
    outer, inner = SignalWatch(asked.set), SignalWatch(lambda: None)
    outer.open()
    try:
        inner.open()
        try:
            assert child_has_none()
        finally:
            inner.close()
        assert child_has_none()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert asked.wait(deadline(20))
        assert (outer.first, inner.first) == (signal.SIGUSR1, 0)
    finally:
        outer.close()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert child_has_none()


def test_an_ignored_signal_stays_ignored() -> None:
    program = (
        "import os, signal; from trainwright.distributed.signals import SignalWatch\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "watch = SignalWatch(lambda: None); watch.open()\n"
        "for _ in range(3): os.kill(os.getpid(), signal.SIGINT)\n"
        "watch.close(); print(watch.first)"
    )
    done = run_python("-c", program)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr

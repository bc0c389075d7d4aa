"""The programs that the launcher starts by path: `entry.py launcher|node|attached|worker ...`.

`python -m` would let a file in the current directory replace a standard module. Nothing of the package is imported before
the search path is right, so that `attached` takes about 20 ms.
"""

import os
import sys

PR_SET_PDEATHSIG = 1


def find_package() -> None:
    """Put the package's folder instead of this file's on the search path."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]
    sys.path.append(os.path.dirname(os.path.dirname(here)))


def attach(launcher_pid: int, command: list[str]) -> None:
    """Ask the kernel to kill this process when its launcher ends, then replace it by the command."""
    if sys.platform == "linux":
        import ctypes
        import signal

        # The setting survives exec.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    elif os.fork() == 0:
        watch(launcher_pid)
    if os.getppid() != launcher_pid:  # the launcher ended before the prctl took effect
        sys.exit(1)
    os.execv(command[0], command)


def watch(launcher_pid: int) -> None:
    """Kill this process's group when the launcher has ended: other kernels than Linux do not."""
    import signal
    import time

    rank = os.getppid()
    for fd in range(3):  # the launcher reads the rank's output to its end
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    while os.getppid() == rank:
        try:
            os.kill(launcher_pid, 0)
        except ProcessLookupError:
            os.killpg(0, signal.SIGKILL)
        time.sleep(0.2)
    os._exit(0)


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    if role == "attached":
        attach(int(rest[0]), rest[1:])
    elif role == "worker":
        import json

        # The caller may be reading its program from there.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # The search path and the arguments are the caller's.
        with open(f"{rest[0]}/search_path.json", encoding="utf-8") as file:
            sys.path[:], sys.argv[:] = json.load(file)
        from trainwright.launch.notebook import work

        work(rest[0])
    elif role == "launcher":
        find_package()
        from trainwright.launch.processes import main

        sys.exit(main(rest))
    else:
        find_package()
        sys.path.extend(path for path in rest if path not in sys.path)
        from trainwright.launch import node_supervisor

        sys.exit(node_supervisor.main())

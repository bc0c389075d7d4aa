"""Makes a worker end with its launcher, then becomes the worker: `bootstrap.py <launcher pid> <command> ...`.

Run by path in an isolated interpreter. It imports nothing of the package, so it takes about 20 ms.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(launcher_pid: int, command: list[str]) -> None:
    """Ask the kernel to kill this process when its launcher ends, and replace it by the command."""
    if sys.platform == "linux":
        import ctypes

        # The setting survives exec.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher_pid:  # the launcher ended before the prctl took effect
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

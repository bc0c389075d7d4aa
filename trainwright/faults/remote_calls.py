"""Calls to remote file systems: each has a time limit, and a call that fails for a passing reason is repeated.

NOTE: Python cannot end a thread, so a call that exceeds its limit is abandoned and may take effect later. Until it has ended,
its path is only changed by repetitions with the same content.
"""

from __future__ import annotations

import errno
import io
import os
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

LIMIT_SECONDS, BYTES_PER_SECOND = 60.0, 1 << 20
"""The limit of one call: a constant, and the time for its bytes over a slow network."""
BLOCK_BYTES = 64 << 20
"""The bytes that a file system may send in one write of a stream."""
DELAYS_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0, 30.0, 30.0, 30.0)
"""The pauses between attempts, which survive an outage of two minutes."""
PATIENCE_SECONDS = 180.0
"""No attempt begins later than this."""
READ_BYTES = 5 << 20
_CHANGES = {"pipe_file", "rm", "rm_file", "mv", "mkdir", "makedirs", "rmdir", "abort_mpu"}
_READS = {"info", "ls", "find", "isfile", "isdir", "cat_file", "list_multipart_uploads"}
_LASTING = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError, Warning)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# Clients have their own exceptions, without a common base.
_NETWORK = re.compile(r"Connect|Disconnect|Timeout|HTTP|Http|IncompleteRead|Payload|Network|Rpc|Unavailable")
_abandoned: dict[str, list[_Attempt]] = {}
"""The abandoned changes by address."""


def is_outage(error: BaseException) -> bool:
    """Return whether an error is from outside the program: of a disk, a network or a service."""
    named = any(_NETWORK.search(kind.__name__) for kind in type(error).__mro__)
    return isinstance(error, OSError) or (named and isinstance(error, Exception) and not isinstance(error, Warning))


class _Attempt(threading.Thread):
    """One call in a daemon thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(name=f"{threading.current_thread().name}-remote", daemon=True)
        self._call = call
        self.ended = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self._call()
        except BaseException as error:
            self.error = error
        self.ended.set()


def limited(call: Callable[[], Any], address: str, num_bytes: int = 0, *, is_change: bool = True) -> Any:
    """Return the result of a call, or raise TimeoutError after its limit. Signal handlers run meanwhile."""
    attempt, limit = _Attempt(call), LIMIT_SECONDS + num_bytes / BYTES_PER_SECOND
    try:
        attempt.start()
    except RuntimeError:  # from Python 3.12 on, no thread starts at the interpreter's end
        attempt.run()
    if not attempt.ended.wait(limit):
        if is_change:
            _abandoned.setdefault(address, []).append(attempt)
        raise TimeoutError(f"no answer within {limit:.0f} s")
    if attempt.error is not None:
        raise attempt.error
    return attempt.value


def repeated(call: Callable[[], Any], name: str, address: str, *, is_change: bool = True) -> Any:
    """Return the result of a call. After a passing failure call it again, up to PATIENCE_SECONDS.

    Raises:
        OSError: the failure has lasted, or an earlier change of the address has not ended.
    """
    began = time.monotonic()
    if is_change:
        _await_abandoned(name, address)
    for attempt, delay in enumerate((*DELAYS_SECONDS, None), 1):
        try:
            return call()
        except Exception as error:
            if attempt > 1 and name.startswith("rm") and isinstance(error, FileNotFoundError):
                return None  # an earlier attempt has removed it
            if isinstance(error, _LASTING) or getattr(error, "errno", None) in _FULL or not is_outage(error):
                raise
            seconds = time.monotonic() - began
            if delay is None or seconds > PATIENCE_SECONDS:
                raise OSError(
                    f"{name} of {address} failed {attempt} times in {seconds:.0f} s: {type(error).__name__}: {error}. Check "
                    "that the store answers, and run the same command again"
                ) from error
            # Not from Python's generator, whose state belongs to the user. Otherwise all ranks would come at once.
            time.sleep(delay * (0.5 + os.urandom(1)[0] / 256))


def _await_abandoned(name: str, address: str) -> None:
    """Wait for the abandoned changes of an address, and of the addresses below it."""
    for other in [other for other in [*_abandoned] if f"{other}/".startswith(f"{address}/")]:
        for attempt in _abandoned[other]:
            if not attempt.ended.wait(LIMIT_SECONDS):
                raise TimeoutError(
                    f"{name} of {address} would be overwritten by an earlier call on {other}, which got no answer and has not "
                    "ended. Check that the store answers, and run the same command again"
                )
        _abandoned.pop(other, None)


class RemoteFilesystem:
    """A remote file system of fsspec whose calls are limited and repeated. Other attributes are those of the file system."""

    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._fs, name)
        return partial(self._repeat, name, value) if name in _CHANGES or name in _READS else value

    def _repeat(self, name: str, method: Any, path: str, *arguments: Any, **options: Any) -> Any:
        address, is_change = self._fs.unstrip_protocol(path), name in _CHANGES
        num_bytes = sum(len(argument) for argument in arguments if isinstance(argument, bytes))
        call = partial(method, path, *arguments, **options)
        attempt = partial(limited, call, address, num_bytes, is_change=is_change)
        return repeated(attempt, name, address, is_change=is_change)

    def exists(self, path: str) -> bool:
        # fsspec's returns False after any error.
        try:
            self.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def open(self, path: str, mode: str = "rb") -> Any:
        """Open a file for reading, or for a single attempt to write it."""
        if mode == "wb":
            return _Upload(self._fs, path)
        size = self.info(path)["size"]
        return io.BufferedReader(_Download(self, path, size), READ_BYTES)


class _Upload:
    """A new remote file. It exists after a context without an exception, and otherwise never."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._address = filesystem.unstrip_protocol(path)
        self._stream = limited(partial(filesystem.open, path, "wb"), self._address)

    def write(self, data: bytes | memoryview) -> int:
        limited(partial(self._stream.write, data), self._address, BLOCK_BYTES)
        return len(data)

    def __enter__(self) -> _Upload:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                limited(self._stream.close, self._address, 2 * BLOCK_BYTES)
                return
        except BaseException:
            self._discard()
            raise
        self._discard()

    def _discard(self) -> None:
        try:
            limited(self._stream.discard, self._address)
            self._stream.closed = True  # otherwise its finalizer would upload it
        except Exception:  # its part of a file stays, and is removed at the next start
            pass


class _Download(io.RawIOBase):
    """A remote file for reading, by one stateless call per read."""

    def __init__(self, filesystem: RemoteFilesystem, path: str, size: int) -> None:
        self._fs, self._path, self._size, self._at = filesystem, path, size, 0

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        data = self._fs.cat_file(self._path, start=self._at, end=end) if end > self._at else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

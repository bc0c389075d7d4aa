"""Host waits: the lines of code at which the host waits for its device, as torch's synchronization debug mode reports them."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

TORCHS_TEXT = "called a synchronizing "
_TORCH = (os.path.dirname(torch.__file__) + os.sep, warnings.__file__, __file__)
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


class HostWaits:
    """Counts the waits of the host for its device by the user's line, from `start` to `stop`.

    `tell` gets a text for every new line. Not every wait is reported: `torch.cuda.set_sync_debug_mode` says which.
    """

    def __init__(self, device: torch.device, tell: Callable[[str], object]) -> None:
        self._backend: Any = torch.get_device_module(device)
        self._tell, self._show, self._filters = tell, warnings.showwarning, warnings.catch_warnings()
        self.counts: Counter[str] = Counter()
        """The waits by file, line and function."""
        self.num_internal = 0
        """The waits of this package, at rows of the log, ends of epochs and saves."""

    def start(self) -> bool:
        """Begin to count, and return whether torch reports the waits for this device."""
        if not hasattr(self._backend, "set_sync_debug_mode"):
            return False
        self._filters.__enter__()
        self._show = warnings.showwarning
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode is a prototype, as torch warns
            self._backend.set_sync_debug_mode("warn")
        warnings.filterwarnings("always", TORCHS_TEXT)
        warnings.showwarning = self._take
        return True

    def stop(self) -> None:
        """Stop counting, and print the lines, the most frequent first."""
        self._filters.__exit__(None, None, None)
        self._backend.set_sync_debug_mode("default")
        lines = [f"  {place}: {count:,} times" for place, count in self.counts.most_common()]
        head = f"detect_syncs: the host waited for the device at {len(lines)} line(s) outside of trainwright"
        tail = f"; trainwright waited {self.num_internal:,} times (rows of the log, epoch ends, saves, loss scales, policies)"
        self._tell("\n".join([head + tail + (":" if lines else "."), *lines]))

    def _take(self, message: Warning | str, *details: Any, **options: Any) -> None:
        if not str(message).startswith(TORCHS_TEXT):
            self._show(message, *details, **options)
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename.startswith(_PACKAGE):
            self.num_internal += 1
            return
        place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        if place not in self.counts:
            self._tell(f"detect_syncs: the host waits for the device at {place}")
        self.counts[place] += 1

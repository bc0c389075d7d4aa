"""Objects given up, so that their memory can be used again."""

from __future__ import annotations

from typing import Any

from trainwright.devices.out_of_memory import give_back


def release_memory(*objects: Any) -> list[None]:
    """Return one None for each object, for `a, b = release_memory(a, b)`, after freeing what nothing refers to any more.

    The names are the caller's last references, so the memory of these objects is freed when None is assigned to them; the
    accelerator's part of it goes back to its driver in the next call.
    """
    give_back()
    return [None] * len(objects)

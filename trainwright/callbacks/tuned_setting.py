"""TunedSetting: an attribute of a module, a data module or their hyper-parameters that a search sets."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any


class TunedSetting:
    """A setting that one or more objects hold, such as `module.lr` and `module.hparams.lr`; `set` changes all of them.

    Args:
        names: the names to look for, of which the first that is found counts; "optimizer.lr" is the attribute of an attribute.
        owners: the module, and the data module if there is one.
        search: what sets it, for the error.

    Raises:
        AttributeError: none of the owners has it.
    """

    def __init__(self, names: Sequence[str], owners: Sequence[Any], search: str) -> None:
        for name in names:
            self.name, self._holders = name, list(_holders_of(name, owners))
            if self._holders:
                return
        where = " or ".join(type(each).__name__ for each in owners)
        raise AttributeError(
            f"{search} sets {' or '.join(names)}, and {where} has no such attribute, nor its hyper-parameters; assign it in "
            "__init__ and use it there, or name a different attribute."
        )

    @property
    def value(self) -> Any:
        holder, key = self._holders[0]
        return holder[key] if isinstance(holder, MutableMapping) else getattr(holder, key)

    def set(self, value: Any) -> None:
        """Set it wherever it is held."""
        for holder, key in self._holders:
            if isinstance(holder, MutableMapping):
                holder[key] = value
            else:
                setattr(holder, key, value)


def _holders_of(name: str, owners: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    *path, last = name.split(".")
    for owner in owners:
        for start in (owner, getattr(owner, "hparams", None)):
            holder = start
            for part in path:
                holder = holder.get(part) if isinstance(holder, MutableMapping) else getattr(holder, part, None)
            if (isinstance(holder, MutableMapping) and last in holder) or (
                holder is not None and not isinstance(holder, MutableMapping) and hasattr(holder, last)
            ):
                yield holder, last

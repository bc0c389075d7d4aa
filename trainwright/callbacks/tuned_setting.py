"""TunedSetting: an attribute of a module, a data module or their hyper-parameters that a search sets."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, NoReturn

from trainwright.hyperparameters import kept_hyper_parameters


def refuse_within_run(callback: object, method: str) -> NoReturn:
    """Raise RuntimeError for a search that a hook calls, as Lightning's finders allow."""
    raise RuntimeError(
        f"{type(callback).__name__}.{method} was called within a run; here it searches before a fit alone, with copies of the "
        f"module. To search again at some epoch, end the fit there (max_epochs=), call tw.Tuner(trainer).{method}(module), and "
        "fit again."
    )


class TunedSetting:
    """A setting that one or more objects hold, such as `module.lr` and `module.hparams.lr`; `set` changes all of them.

    `restore` gives each its first value back.

    Args:
        names: the names to look for, of which the first that is found counts; "optimizer.lr" is the attribute of an attribute.
        owners: the module, and the data module if there is one.
        search: what sets it, for the error.

    Raises:
        AttributeError: none of the owners has it, or it cannot be set.
    """

    def __init__(self, names: Sequence[str], owners: Sequence[Any], search: str) -> None:
        for name in names:
            self.name, self._holders = name, list(_holders_of(name, owners))
            if self._holders:
                self._first = [_value_of(*each) for each in self._holders]
                self._check(search)
                return
        where = " or ".join(type(each).__name__ for each in owners)
        raise AttributeError(
            f"{search} sets {' or '.join(names)}, and {where} has no such attribute, nor its hyper-parameters; assign it in "
            "__init__ and use it there, or name a different attribute."
        )

    @property
    def value(self) -> Any:
        return _value_of(*self._holders[0])

    def set(self, value: Any) -> None:
        """Set it wherever it is held."""
        for holder, key in self._holders:
            _assign(holder, key, value)

    def restore(self) -> None:
        """Set it to what each of the objects held at first."""
        for (holder, key), value in zip(self._holders, self._first, strict=True):
            _assign(holder, key, value)

    def _check(self, search: str) -> None:
        """Set it to what it is: one that cannot be set is to fail before a search, not after it (AttributeError)."""
        try:
            self.restore()
        except AttributeError as error:
            raise AttributeError(
                f"{search} sets {self.name}, which cannot be set ({error}); give the property a setter, or name a different "
                "attribute."
            ) from error


def _value_of(holder: Any, key: str) -> Any:
    return holder[key] if isinstance(holder, MutableMapping) else getattr(holder, key)


def _assign(holder: Any, key: str, value: Any) -> None:
    if isinstance(holder, MutableMapping):
        holder[key] = value
    else:
        setattr(holder, key, value)


def _holders_of(name: str, owners: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    *path, last = name.removeprefix("hparams.").split(".")
    for owner in owners:
        # All, because save_hyperparameters keeps copies, which the loader hook and the loggers may read.
        for start in (
            kept_hyper_parameters(owner) if name.startswith("hparams.") else (owner, *kept_hyper_parameters(owner))
        ):
            holder = start
            for part in path:
                holder = holder.get(part) if isinstance(holder, MutableMapping) else getattr(holder, part, None)
            if (isinstance(holder, MutableMapping) and last in holder) or (
                holder is not None and not isinstance(holder, MutableMapping) and hasattr(holder, last)
            ):
                yield holder, last

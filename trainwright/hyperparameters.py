"""Hyper-parameters: the arguments of a Module's or DataModule's constructor, stored to construct it again.

The mixin `HyperParameters` collects them, and `build` constructs an instance. Callers read and write the checkpoints.
plain_forms.py turns values that are not plain data into plain data.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn, TypeVar

import fsspec

from trainwright.distributed.masking import HIDDEN
from trainwright.errors import a_type_of
from trainwright.plain_forms import CONTENT, LEFT_OUT, Form, form_of, readable, rebuild
from trainwright.rank_zero import warn

T = TypeVar("T")
AS_ARGUMENTS = "kwargs"
"""The `_hparams_name` of hyper-parameters that are the constructor's arguments, not the content of one argument."""


class AttributeDict(dict[str, Any]):
    """A dict whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"hyper-parameter {name!r} does not exist. Choose from: {_listed(self)}.")
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __repr__(self) -> str:
        keys = [f'"{name}":' for name in self]
        width = max(map(len, keys), default=0)
        return "\n".join(f"{key:<{width}} {value}" for key, value in zip(keys, self.values(), strict=True))


class classonly(classmethod):  # type: ignore[type-arg]
    """A class method that raises TypeError when it is called on an instance, which it would not change."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        bound = super().__get__(instance, owner)
        if instance is None:
            return bound
        name, kind = self.__func__.__name__, type(instance).__name__

        @functools.wraps(bound)  # raising in __get__ would break tools that look at every attribute of an instance
        def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            raise TypeError(f"{name} makes a new instance. Call it on the class: instance = {kind}.{name}(path).")

        return refuse


class HyperParameters:
    """Mixin: `save_hyperparameters()` in `__init__` stores its arguments in `hparams`, in checkpoints and in the loggers."""

    _hparams: AttributeDict | None = None
    _hparams_initial: AttributeDict | None = None
    _hparams_name: str | None = None
    """The argument whose content the hyper-parameters are, or `AS_ARGUMENTS`."""
    _is_omegaconf: bool = False
    """Whether they are the content of an OmegaConf container, which a new module gets again."""
    _log_hyperparams: bool = False

    def save_hyperparameters(
        self, *args: Any, ignore: str | Sequence[str] | None = None, frame: FrameType | None = None, logger: bool = True
    ) -> None:
        """Store the arguments of `__init__`, and of the subclasses' `__init__`, as `hparams`.

        Arguments have their values at the time of this call. `*args` are not stored. Checkpoints and loggers get plain data
        and values with a plain form: enum members, dataclasses, Namespaces, OmegaConf containers, classes and functions (by
        name), and partials of these. Pass other values (a network, a dataset, a lambda) to `load_from_checkpoint`.

        Args:
            args: names of the arguments to store, all of them by default, or one dict, Namespace or dataclass instance
                whose content becomes the hyper-parameters.
            ignore: names to skip, also if a base class has stored them.
            frame: where to look for the constructor's arguments, by default the calling frames.
            logger: whether the loggers get them.
        """
        arguments = _constructor_arguments(self, sys._getframe(1) if frame is None else frame)
        name: str | None = AS_ARGUMENTS
        if all(isinstance(value, str) for value in args):
            values = _chosen(self, arguments, args)
        elif len(args) > 1:
            raise TypeError(
                f"save_hyperparameters got {len(args)} values that are not all names. Pass names of arguments, or one dict, "
                "Namespace or dataclass instance."
            )
        else:
            values = _from_collection(args[0])
            self._is_omegaconf = type(args[0]).__module__.partition(".")[0] == "omegaconf"
            # `build` passes the content back in this argument.
            name = next((key for key, value in (arguments or {}).items() if value is args[0]), None)
        self.hparams.update(values)
        for key in (ignore,) if isinstance(ignore, str) else ignore or ():
            self.hparams.pop(key, None)
        self._hparams_name = name
        self._log_hyperparams = logger
        self._hparams_initial = _copied(self.hparams)

    @property
    def hparams(self) -> AttributeDict:
        """Return the hyper-parameters, by attribute (`self.hparams.lr`) and by key. They may be changed."""
        if self._hparams is None:
            self._hparams = AttributeDict()
        return self._hparams

    @hparams.setter
    def hparams(self, values: Mapping[str, Any] | argparse.Namespace) -> None:
        self._hparams = _from_collection(values)

    @property
    def hparams_initial(self) -> AttributeDict:
        """Return a copy of the hyper-parameters as they were saved, with the values that a search has set since."""
        return AttributeDict(_copied(self._hparams_initial or {}))


def kept_hyper_parameters(owner: Any) -> list[AttributeDict]:
    """Return the hyper-parameters of a module or a data module, and the copy that its loggers get."""
    both = (owner.hparams, owner._hparams_initial) if isinstance(owner, HyperParameters) else ()
    return [values for values in both if values is not None]


def divided(values: Mapping[str, Any], is_plain: Callable[[Any], bool]) -> tuple[dict[str, Any], dict[str, Form]]:
    """Return the hyper-parameters that are plain data, and the forms of the others."""
    plain: dict[str, Any] = {}
    forms: dict[str, Form] = {}
    for key, value in _nested(AttributeDict(values), dict).items():
        if is_plain(value) and not isinstance(value, enum.Enum):
            plain[key] = value
        else:
            forms[key] = form_of(value, is_plain)
    return plain, forms


def hyper_parameter_entries(
    owner: HyperParameters, prefix: str, is_plain: Callable[[Any], bool]
) -> tuple[dict[str, Any], list[str]]:
    """Return a checkpoint's entries for an owner, and the names of its values without a form."""
    plain, forms = divided(owner.hparams, is_plain)
    left_out = [name for name, form in forms.items() if form["form"] == LEFT_OUT]
    if not plain and not forms:
        return {}, left_out
    if owner._is_omegaconf and not forms:
        forms = {CONTENT: {"form": "omegaconf"}}
    stored = {f"{prefix}hyper_parameters": plain, f"{prefix}hparams_name": owner._hparams_name}
    return {**stored, f"{prefix}hyper_parameter_forms": forms} if forms else stored, left_out


def logged_hyper_parameters(owners: Iterable[HyperParameters | None], is_plain: Callable[..., bool]) -> dict[str, Any]:
    """Return the initial hyper-parameters of all owners that log theirs (ValueError if two differ)."""
    merged: dict[str, Any] = {}
    for owner in owners:
        if owner is None or not owner._log_hyperparams:
            continue
        plain, forms = divided(owner.hparams_initial, is_plain)
        plain |= {name: readable(form) for name, form in forms.items() if form["form"] != LEFT_OUT}
        different = sorted(key for key in merged.keys() & plain.keys() if repr(merged[key]) != repr(plain[key]))
        if different:
            raise ValueError(
                f"the module and the datamodule both log hyper-parameters named {', '.join(different)}, with different "
                "values. Rename one of them, or call save_hyperparameters(logger=False) in one of the two."
            )
        merged.update(plain)
    return merged


def build(
    cls: type[T],
    hyper_parameters: Mapping[str, Any],
    overrides: Mapping[str, Any],
    hparams_name: str | None = AS_ARGUMENTS,
    forms: Mapping[str, Form] | None = None,
) -> T:
    """Construct an instance from the stored hyper-parameters that its constructor takes.

    `overrides` win over the stored values. They are dropped with a warning if the constructor does not take them. If the
    hyper-parameters are the content of the argument `hparams_name`, overrides may name items of the content too.

    Raises:
        TypeError: an argument is missing, or its value has no form or cannot be rebuilt.
    """
    parameters = inspect.signature(cls).parameters.values()
    named = {each.name: each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    values: dict[str, Any] = {}
    forms = _without(forms or {}, overrides)
    if hparams_name not in named or hparams_name in (AS_ARGUMENTS, *hyper_parameters):
        rebuilt = {name: _rebuilt(cls, name, form) for name, form in forms.items() if takes_all or name in named}
        values = {**hyper_parameters, **rebuilt}
    elif hparams_name not in overrides:
        arguments = (overrides.keys() - hyper_parameters.keys()) | named.keys()
        items, overrides = _without(overrides, arguments), _without(overrides, overrides.keys() - arguments)
        values = {hparams_name: _content(cls, hparams_name, {**hyper_parameters, **items}, forms)}
    unknown = [] if takes_all else sorted(overrides.keys() - named.keys())
    if unknown:
        warn(
            f"{cls.__name__} takes no argument {', '.join(unknown)}, so load_from_checkpoint drops it. It takes "
            f"{_listed(named)}.",
            stacklevel=4,
        )
    values |= overrides
    values = _without(values, () if takes_all else values.keys() - named.keys())
    _refuse_missing(cls, named, values, hyper_parameters)
    return cls(**values)


def _without(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _refuse_missing(
    cls: type[Any], named: Mapping[str, inspect.Parameter], values: Mapping[str, Any], stored: Mapping[str, Any]
) -> None:
    """Raise TypeError if arguments without a default have no value."""
    missing = [name for name, parameter in named.items() if parameter.default is parameter.empty and name not in values]
    if missing:
        example = ", ".join(f"{name}=..." for name in missing)
        raise TypeError(
            f"{cls.__name__} cannot be constructed: its argument {', '.join(missing)} is not among the hyper-parameters "
            f"that were stored ({_listed(stored)}). Pass it: {cls.__name__}.load_from_checkpoint(path, {example})."
        )


def _content(cls: type[Any], name: str, stored: Mapping[str, Any], forms: Mapping[str, Form]) -> Any:
    """Return the argument whose content the hyper-parameters are: an AttributeDict, or the container that it was."""
    if CONTENT in forms:
        return _rebuilt(cls, name, {**forms[CONTENT], "content": {"form": "plain", "value": dict(stored)}})
    return _nested({**stored, **{key: _rebuilt(cls, key, form) for key, form in forms.items()}}, AttributeDict)


def read_hyper_parameters(path: str) -> dict[str, Any]:
    """Return the hyper-parameters of a .json or .yaml file, a path or an fsspec URL (`hparams_file=`)."""
    kind = path.rpartition(".")[2].lower()
    if kind not in ("json", "yaml", "yml"):
        raise ValueError(f"hparams_file={path!r} is of an unknown kind. Expected a .json, .yaml or .yml file.")
    loads = json.loads if kind == "json" else importlib.import_module("yaml").safe_load
    with fsspec.open(path, "r", encoding="utf-8") as file:
        text = file.read()
    try:
        values = loads(text)
    except Exception as error:  # the parsers have no common error
        raise ValueError(f"hparams_file={path!r} cannot be read as {kind}: {error!r}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"hparams_file={path!r} holds {a_type_of(values)}. It must hold names and values.")
    return {name: value for name, value in values.items() if value != HIDDEN}  # loggers write no secrets


def _constructor_arguments(owner: object, frame: FrameType | None) -> dict[str, Any] | None:
    """Return the arguments of every running `__init__` of the owner, a subclass's last, or None if none is running."""
    calls: list[dict[str, Any]] = []
    while frame is not None:
        code = frame.f_code
        # A wrapper of the constructor has another name. The constructor's frame is before or after it.
        if code.co_name == "__init__" and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is owner:
            names, _, keywords, values = inspect.getargvalues(frame)
            arguments = {name: values[name] for name in names[1:] if name in values}
            calls.append({**arguments, **values.get(keywords, {})} if keywords is not None else arguments)
        frame = frame.f_back
    return {key: value for arguments in calls for key, value in arguments.items()} if calls else None


def _chosen(owner: object, arguments: dict[str, Any] | None, names: Sequence[str]) -> dict[str, Any]:
    kind = type(owner).__name__
    if arguments is None:
        raise RuntimeError(
            f"save_hyperparameters() was called outside of {kind}.__init__. Call it there, or give it a dict of the "
            "hyper-parameters."
        )
    unknown = [name for name in names if name not in arguments]
    if unknown:
        raise ValueError(
            f"save_hyperparameters got {', '.join(map(repr, unknown))}, which {kind}.__init__ does not take. "
            f"Its arguments are {_listed(arguments)}."
        )
    return {name: arguments[name] for name in names} if names else arguments


def _from_collection(value: Any) -> AttributeDict:
    """Return the items of a dict, Namespace, dataclass instance or other Mapping, such as OmegaConf's."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if not isinstance(value, Mapping):
        raise TypeError(
            f"hyper-parameters were given as {value!r:.80}, {a_type_of(value)}. Expected names of arguments, "
            "or one dict, Namespace or dataclass instance."
        )
    return AttributeDict(value if isinstance(value, dict) else _opened(value))


def _opened(value: Any) -> Any:
    """Return the content of a configuration object: its Mappings as AttributeDict, its Sequences as list."""
    if isinstance(value, Mapping):
        return AttributeDict({key: _opened(item) for key, item in value.items()})
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, list, tuple)):
        return [_opened(item) for item in value]
    return value


def _nested(value: Any, kind: type[dict[str, Any]]) -> Any:
    """Return nested dicts and AttributeDicts as dicts of this kind."""
    if type(value) in (dict, AttributeDict):  # a user's subclass has a form of its kind
        return kind({key: _nested(item, kind) for key, item in value.items()})
    return value


def _rebuilt(cls: type[Any], name: str, form: Form) -> Any:
    call = f"{cls.__name__}.load_from_checkpoint(path, {name}=...)"
    if isinstance(form, Mapping) and form.get("form") == LEFT_OUT:
        raise TypeError(
            f"{cls.__name__} was trained with an argument {name!r} that is not in the checkpoint, since a "
            f"{form.get('kind')} has no plain form. Pass it: {call}."
        )
    try:
        return rebuild(form, cls)
    except Exception as error:  # also from the constructor of a dataclass
        raise TypeError(
            f"{cls.__name__} was trained with an argument {name!r} that cannot be rebuilt: {error}. Import its module and "
            f"allow it with torch.serialization.add_safe_globals, or pass it: {call}."
        ) from error


def _copied(value: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples, with the same objects in them."""
    if type(value) in (dict, AttributeDict):
        return type(value)({key: _copied(item) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)([_copied(item) for item in value])
    return value


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"

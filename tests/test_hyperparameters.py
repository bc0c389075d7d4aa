"""What a constructor was given comes back: as hparams, as plain data, and as an instance built anew."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import threading
import types
from collections import UserDict, UserList
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainwright.hyperparameters import (
    HyperParameters,
    build,
    logged_hyper_parameters,
    plain_hyper_parameters,
    read_hyper_parameters,
)


def is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


class Net(HyperParameters, nn.Module):
    def __init__(self, width: int, lr: float = 0.1, *rest: int, act: str = "relu", **extra: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


class SavesFirst(HyperParameters, nn.Module):
    def __init__(self, width: int, lr: float = 0.1) -> None:
        self.save_hyperparameters()
        super().__init__()
        self.layer = nn.Linear(width, 1)


class Sub(Net):
    def __init__(self, depth: int, secret: str = "s", **kwargs: Any) -> None:
        super().__init__(width=depth * 2, **kwargs)
        self.save_hyperparameters(ignore="secret")


class Silent(Net):
    """Saves nothing itself: its base does, for both."""

    def __init__(self, depth: int) -> None:
        super().__init__(3)


@dataclasses.dataclass(eq=False)
class Described(HyperParameters, nn.Module):
    width: int
    layers: list[int] = dataclasses.field(default_factory=lambda: [1, 2])

    def __post_init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Wrapped(HyperParameters):
    @traced
    def __init__(self, lr: float, width: int = 1) -> None:
        self.lr = lr
        self._keep()

    def _keep(self) -> None:
        def inner() -> None:
            self.save_hyperparameters(frame=inspect.currentframe())

        inner()


class Configured(HyperParameters):
    def __init__(self, config: Any, seed: int = 0) -> None:
        self.save_hyperparameters(config)


def test_the_arguments_of_the_constructor() -> None:
    net = Net(3, 0.5, 7, 8, act="gelu", heads=2)
    assert net.hparams == {"width": 3, "lr": 0.5, "act": "gelu", "heads": 2}
    assert (net.hparams.lr, net.hparams["heads"], net._hparams_name) == (0.5, 2, "kwargs")
    assert SavesFirst(3).hparams == {"width": 3, "lr": 0.1}
    assert Wrapped(0.2).hparams == {"lr": 0.2, "width": 1}
    described = Described(4)
    assert described.hparams == {"width": 4, "layers": [1, 2]}
    assert build(Described, described.hparams, {}).layers == [1, 2]


def test_a_subclass_adds_its_own_and_its_ignore_wins() -> None:
    assert Silent(2).hparams == {"width": 3, "lr": 0.1, "act": "relu", "depth": 2}
    assert Sub(2, lr=0.3).hparams == {"width": 4, "lr": 0.3, "act": "relu", "depth": 2}
    outer = types.SimpleNamespace()

    class Outer(HyperParameters):
        def __init__(self, depth: int) -> None:  # its arguments are not those of the module that it makes
            outer.inner = Net(1)

    Outer(5)
    assert outer.inner.hparams == {"width": 1, "lr": 0.1, "act": "relu"}


def test_names_choose_and_one_collection_becomes_the_hyper_parameters() -> None:
    class Chosen(HyperParameters):
        def __init__(self, lr: float, width: int, name: str = "x") -> None:
            self.save_hyperparameters("lr", "name", logger=False)

    chosen = Chosen(0.1, 2)
    assert chosen.hparams == {"lr": 0.1, "name": "x"}
    assert not chosen._log_hyperparams

    @dataclasses.dataclass
    class Config:
        lr: float = 0.1
        layers: tuple[int, ...] = (1, 2)

    nested = types.MappingProxyType({"lr": 0.1, "inner": UserDict(sizes=UserList([1, 2]))})
    for config in ({"lr": 0.1}, argparse.Namespace(lr=0.1), Config(), nested):
        configured = Configured(config)
        assert configured.hparams.lr == 0.1
        assert configured._hparams_name == "config"
    assert configured.hparams.inner.sizes == [1, 2]
    again = build(Configured, plain_hyper_parameters(configured, is_plain)[0], {"lr": 0.2, "seed": 3}, "config")
    assert (again.hparams.lr, again.hparams.inner.sizes) == (0.2, [1, 2])
    outside = Net(1)
    outside.save_hyperparameters({"later": 1})
    assert outside.hparams.later == 1
    assert outside.hparams.width == 1


def test_hparams_change_and_the_initial_ones_do_not() -> None:
    net = Net(3, layers=[1, 2])
    net.hparams.lr = 0.9
    net.hparams.layers.append(3)
    net.hparams["new"] = 1
    assert net.hparams_initial == {"width": 3, "lr": 0.1, "act": "relu", "layers": [1, 2]}
    net.hparams_initial["lr"] = 5
    assert net.hparams_initial.lr == 0.1
    del net.hparams.new
    with pytest.raises(AttributeError, match="no hyper-parameter 'new'; there are: width, lr"):
        net.hparams.new
    net.hparams = {"only": 1}
    assert net.hparams.only == 1
    assert HyperParameters().hparams == HyperParameters().hparams_initial == {}


def test_what_is_no_plain_data_is_kept_in_memory_and_named() -> None:
    lock, backbone, data = threading.Lock(), nn.Linear(1, 1), TensorDataset(torch.ones(2))
    computed = torch.ones(2, requires_grad=True) * 2  # has no deep copy
    net = Net(3, lock=lock, backbone=backbone, parts=[backbone, {"data": data}], function=lambda: 1, computed=computed)
    assert net.hparams.lock is net.hparams_initial.lock is lock
    assert net.hparams_initial.parts[1]["data"] is data  # a large thing is not copied
    plain, left_out = plain_hyper_parameters(net, is_plain)
    assert plain == {"width": 3, "lr": 0.1, "act": "relu"}
    assert left_out == ["lock", "backbone", "parts", "function", "computed"]
    with pytest.raises(
        TypeError, match=r"argument lr is not among .* \(width\)\. Pass it: Wrapped\.load_from.*lr=\.\.\."
    ):
        build(Wrapped, {"width": 1}, {})


def test_building_takes_what_the_constructor_takes() -> None:
    stored = {"width": 3, "lr": 0.5, "depth": 1, "act": "gelu"}
    assert build(SavesFirst, stored, {"lr": 0.7}).hparams == {"width": 3, "lr": 0.7}
    assert build(Net, stored, {}).hparams == stored

    class Positional(HyperParameters):
        def __init__(self, width: int, /, lr: float = 0.1) -> None:
            self.save_hyperparameters()

    assert build(Positional, Positional(4).hparams, {}).hparams.width == 4
    with pytest.raises(TypeError, match=r"SavesFirst takes no argument depht; it takes width, lr\."):
        build(SavesFirst, stored, {"depht": 2})


def test_logged_ones_of_module_and_datamodule() -> None:
    first, second, silent = Net(3), Configured({"batch_size": 4, "lr": 0.1}), SavesFirst(9)
    silent._log_hyperparams = False
    first.hparams.lr = 0.9
    merged, left_out = logged_hyper_parameters([first, None, second, silent], is_plain)
    assert merged == {"width": 3, "lr": 0.1, "act": "relu", "batch_size": 4}
    assert left_out == []
    with pytest.raises(ValueError, match=r"both log hyper-parameters named lr, with different"):
        logged_hyper_parameters([first, Configured({"lr": 0.2})], is_plain)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("widht",), ValueError, r"got 'widht', which Wrong\.__init__ does not take; its arguments are size"),
        ((3, 0.1), TypeError, "2 values that are not all names"),
        ((3,), TypeError, "given as 3, a int; accepted are names"),
        (({1: 2},), TypeError, "named by str; 1 is a int"),
    ],
)
def test_wrong_uses(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    class Wrong(Net):
        def __init__(self, size: int = 1) -> None:
            nn.Module.__init__(self)
            self.save_hyperparameters(*arguments)

    with pytest.raises(error, match=message):
        Wrong()
    with pytest.raises(RuntimeError, match=r"outside of Net\.__init__; call it there, or give it a dict"):
        Net(1).save_hyperparameters()


def test_a_file_of_hyper_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text('{"lr": 0.1, "layers": [1]}')
    (tmp_path / "a.yaml").write_text("lr: 0.1\nlayers: [1]\n")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "bad.json").write_text("{")
    assert read_hyper_parameters(str(tmp_path / "a.json")) == {"lr": 0.1, "layers": [1]}
    with pytest.raises(ValueError, match=r"accepted are \.json, \.yaml"):
        read_hyper_parameters("a.csv")
    with pytest.raises(ValueError, match="holds a list; it must hold names and values"):
        read_hyper_parameters(str(tmp_path / "list.json"))
    with pytest.raises(ValueError, match="cannot be read as json"):
        read_hyper_parameters(str(tmp_path / "bad.json"))
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(ImportError, match="pip install pyyaml"):
        read_hyper_parameters(str(tmp_path / "a.yaml"))
    loaded = types.SimpleNamespace(safe_load=lambda text: {"parsed": text})
    monkeypatch.setitem(__import__("sys").modules, "yaml", loaded)
    assert read_hyper_parameters(str(tmp_path / "a.yaml"))["parsed"].startswith("lr")

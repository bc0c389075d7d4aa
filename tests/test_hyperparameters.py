"""The arguments of a constructor come back: as hparams, as plain data, and in a new instance."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import json
import threading
import types
from collections import UserDict, UserList
from pathlib import Path
from typing import Any

import omegaconf
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainwright.checkpoint.codec import decode, encode
from trainwright.checkpoint.foreign_formats import is_plain as is_storable
from trainwright.hyperparameters import HyperParameters, build, divided, logged_hyper_parameters, read_hyper_parameters


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


class Configured(HyperParameters):
    def __init__(self, config: Any, seed: int = 0) -> None:
        self.save_hyperparameters(config)


def test_the_arguments_of_the_constructor_are_stored() -> None:
    net = Net(3, 0.5, 7, 8, act="gelu", heads=2)
    assert net.hparams == {"width": 3, "lr": 0.5, "act": "gelu", "heads": 2}
    assert (net.hparams.lr, net.hparams["heads"], net._hparams_name) == (0.5, 2, "kwargs")
    assert SavesFirst(3).hparams == {"width": 3, "lr": 0.1}


def test_a_subclass_adds_its_own_and_its_ignore_wins() -> None:
    assert Sub(2, lr=0.3).hparams == {"width": 4, "lr": 0.3, "act": "relu", "depth": 2}
    outer = types.SimpleNamespace()

    class Outer(HyperParameters):
        def __init__(self, depth: int) -> None:  # the inner module has other arguments
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
    again = build(Configured, divided(configured.hparams, is_plain)[0], {"lr": 0.2, "seed": 3}, "config")
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
    del net.hparams["new"]
    with pytest.raises(AttributeError, match=r"hyper-parameter 'new' does not exist. Choose from: width, lr"):
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
    plain, forms = divided(net.hparams, is_plain)
    assert plain == {"width": 3, "lr": 0.1, "act": "relu"}
    assert list(forms) == ["lock", "backbone", "parts", "function", "computed"]
    assert forms["backbone"] == {"form": "left_out", "kind": "torch.nn.modules.linear.Linear"}
    with pytest.raises(
        TypeError, match=r"argument width is not among .* \(lr\)\. Pass it: SavesFirst\.load_from.*width=\.\.\."
    ):
        build(SavesFirst, {"lr": 1.0}, {})


def test_building_takes_what_the_constructor_takes() -> None:
    stored = {"width": 3, "lr": 0.5, "depth": 1, "act": "gelu"}
    assert build(SavesFirst, stored, {"lr": 0.7}).hparams == {"width": 3, "lr": 0.7}
    assert build(Net, stored, {}).hparams == stored

    with pytest.warns(
        UserWarning, match=r"takes no argument depht, so load_from_checkpoint drops it. It takes width, lr\."
    ):
        build(SavesFirst, stored, {"depht": 2})


def test_hyperparameters_of_module_and_datamodule_are_logged() -> None:
    first, second, silent = Net(3), Configured({"batch_size": 4, "lr": 0.1}), SavesFirst(9)
    silent._log_hyperparams = False
    first.hparams.lr = 0.9
    merged = logged_hyper_parameters([first, None, second, silent], is_plain)
    assert merged == {"width": 3, "lr": 0.1, "act": "relu", "batch_size": 4}
    with pytest.raises(ValueError, match=r"both log hyper-parameters named lr, with different"):
        logged_hyper_parameters([first, Configured({"lr": 0.2})], is_plain)


@pytest.mark.parametrize(("arguments", "error", "message"), [
    (("widht",), ValueError, r"got 'widht', which Wrong\.__init__ does not take. Its arguments are size"),
    ((3, 0.1), TypeError, "2 values that are not all names"),
    ((3,), TypeError, "given as 3, an int. Expected names"),
])  # fmt: skip
def test_wrong_hyperparameters_are_rejected(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    class Wrong(Net):
        def __init__(self, size: int = 1) -> None:
            nn.Module.__init__(self)
            self.save_hyperparameters(*arguments)

    with pytest.raises(error, match=message):
        Wrong()
    with pytest.raises(RuntimeError, match=r"outside of Net\.__init__. Call it there, or give it a dict"):
        Net(1).save_hyperparameters()


def test_a_file_of_hyper_parameters_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"lr": 0.1, "layers": [1]}')
    (tmp_path / "a.yaml").write_text("lr: 0.1\nlayers: [1]\n")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "bad.json").write_text("{")
    assert read_hyper_parameters(str(tmp_path / "a.json")) == {"lr": 0.1, "layers": [1]}
    with pytest.raises(ValueError, match=r"Expected a \.json, \.yaml"):
        read_hyper_parameters("a.toml")
    with pytest.raises(ValueError, match=r"holds a list. It must hold names and values"):
        read_hyper_parameters(str(tmp_path / "list.json"))
    with pytest.raises(ValueError, match="cannot be read as json"):
        read_hyper_parameters(str(tmp_path / "bad.json"))
    assert read_hyper_parameters(str(tmp_path / "a.yaml")) == {"lr": 0.1, "layers": [1]}


class Color(enum.Enum):
    RED = 1
    BLUE = ("b", 2)


class Mode(str, enum.Enum):  # noqa: UP042, as in programs for older Pythons
    FAST = "fast"


@dataclasses.dataclass
class Schedule:
    warmup: int
    color: Color = Color.RED
    total: int = dataclasses.field(init=False, default=7)


def doubled(value: int) -> int:
    return 2 * value


FORMED: dict[str, Any] = {
    "enum": Color.BLUE,
    "str_enum": Mode.FAST,
    "dataclass": Schedule(3, Color.BLUE),
    "namespace": argparse.Namespace(a=1, b=Color.RED),
    "class": nn.Tanh,
    "own_function": doubled,
    "built_in": torch.tanh,
    "nested": {"a": [Color.RED, (Mode.FAST,)], "b": {"c": nn.Tanh}},
    "omega": omegaconf.OmegaConf.create({"lr": 0.1, "twice": "${lr}", "list": [1, {"a": 2}]}),
}


class Formed(HyperParameters):
    def __init__(self, value: Any = None, other: int = 1) -> None:
        self.value = value
        self.save_hyperparameters()


def through_json(value: Any) -> Any:
    plain, tensors = encode(value)
    return decode(json.loads(json.dumps(plain)), tensors)


@pytest.mark.parametrize("name", FORMED)
def test_what_has_a_plain_form_comes_back_as_it_was(name: str) -> None:
    value = FORMED[name]
    plain, forms = divided(Formed(value).hparams, is_storable)
    again = build(Formed, through_json(plain), {}, "kwargs", through_json(forms))
    assert type(again.value) is type(value)
    assert again.value == value
    json.dumps(logged_hyper_parameters([Formed(value)], is_storable))


def test_a_partial_comes_back() -> None:
    _, forms = divided(Formed(functools.partial(torch.optim.SGD, lr=0.5)).hparams, is_storable)
    again = build(Formed, {}, {}, "kwargs", forms).value
    assert (again.func, again.keywords) == (torch.optim.SGD, {"lr": 0.5})


def test_a_value_without_a_form_is_wanted_as_an_argument() -> None:
    plain, forms = divided(Formed(nn.Linear(1, 1)).hparams, is_storable)
    with pytest.raises(
        TypeError, match=r"trained with an argument 'value' that is not in the checkpoint, since a torch.nn.*Linear"
    ):
        build(Formed, plain, {}, "kwargs", forms)
    assert build(Formed, plain, {"value": 3}, "kwargs", forms).value == 3


@pytest.mark.parametrize(
    "path",
    ["os:system", "subprocess:run", "builtins:eval", "torch:load", "torch.hub:load", "torch:from_file", "json:loads",
     "test_hyperparameters:json.loads", "test_hyperparameters:subprocess.run", "torch.nn.functional:torch.load", "nowhere:run"],
)  # fmt: skip
def test_a_checkpoint_names_nothing_but_what_a_model_is_made_of(path: str) -> None:
    """Nothing is imported, and nothing that is imported can be named across modules."""
    with pytest.raises(TypeError, match="an argument 'value' that cannot be rebuilt"):
        build(Formed, {}, {}, "kwargs", {"value": {"form": "name", "path": path}})
    with pytest.raises(TypeError, match="an argument 'value' that cannot be rebuilt"):
        build(Formed, {}, {}, "kwargs", {"value": {"form": "dataclass", "path": path, "items": {}}})


def test_an_environment_variable_of_a_configuration_is_stored_unresolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    _, forms = divided(Formed(omegaconf.OmegaConf.create({"key": "${oc.env:SECRET}"})).hparams, is_storable)
    assert "hidden" not in json.dumps(forms)
    assert build(Formed, {}, {}, "kwargs", forms).value.key == "hidden"

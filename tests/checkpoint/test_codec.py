"""Plain data keeps its types through JSON. Anything else is rejected with its place."""

from __future__ import annotations

import datetime
import enum
import json
import math
import pathlib
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from trainwright.checkpoint.codec import MAX_DEPTH, decode, encode
from trainwright.errors import CheckpointError


def through_json(value: Any) -> Any:
    plain, tensors = encode(value)
    return decode(json.loads(json.dumps(plain, allow_nan=False)), tensors)


class Colour(enum.IntEnum):
    RED = 1


def name_of(value: Any) -> str:
    """Name a value as every process does, whatever the order of its sets."""
    if isinstance(value, int):
        return hex(value)[:20]
    shown = sorted(map(str, value)) if isinstance(value, set) else value
    return f"{type(value).__name__}-{str(shown)[:20]!a}"


@pytest.mark.parametrize("value", [
    None, True, False, 0, -7, 2**63, -(2**63) - 1, 10**5000, 0.1, -0.0, math.inf, -math.inf, "",
    "text \u00e9 \ud800 \x00", b"\x00\xff", [], [1, [2.0, None]], (), (1, ("a",)), {}, {"b": 1, "a": {"$tuple": 3}},
    {1: "int", True + 1: "two", None: 0, (1, "x"): [1], b"k": 2, 2.5: 3, frozenset({1}): 4}, set(), {1, "a", (2, 3)},
    frozenset({1.5}), torch.Size([2, 3]), torch.bfloat16, torch.device("cuda:1"), torch.device("cpu"),
    pathlib.Path("a/b.txt"), datetime.timedelta(days=-1, seconds=5, microseconds=7), random.Random(0).getstate(),
], ids=name_of)  # fmt: skip
def test_a_value_comes_back_with_its_type(value: Any) -> None:
    back = through_json(value)
    assert back == value
    assert type(back) is type(value)


def test_the_order_of_a_dict_and_the_sign_of_zero_are_kept() -> None:
    assert list(through_json({"z": 1, "a": 2, "m": 3})) == ["z", "a", "m"]
    assert list(through_json({3: 1, 1: 2})) == [3, 1]
    assert math.copysign(1, through_json(-0.0)) == -1
    assert math.isnan(through_json([float("nan")])[0])
    assert type(through_json({True: 1, 0: 2}).popitem()[0]) is int


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict(b=1, a=2),
        OrderedDict({1: {"$a": 2}}),
        Counter("aab"),
        Counter({3: 2}),
        defaultdict(list, x=[1]),
        Counter(),
    ]
    + [defaultdict(kind) for kind in (int, float, dict, set, bool, str, tuple)],
)
def test_kinds_of_dicts_come_back(value: Any) -> None:
    back = through_json([value])[0]
    assert (type(back), back) == (type(value), value)
    assert list(back) == list(value)
    assert getattr(back, "default_factory", None) is getattr(value, "default_factory", None)


def test_a_dict_with_a_default_of_the_users_own_becomes_a_dict() -> None:
    for value in (defaultdict(lambda: 3, x=[1]), defaultdict(None, x=[1])):
        back = through_json(value)
        assert type(back) is dict
        assert back == dict(value)


def test_tensors_are_set_aside_under_names_that_tell_where_they_stand() -> None:
    value = {"ema": {"w": torch.ones(2)}, "list": [torch.zeros(()), torch.nn.Parameter(torch.ones(1))]}
    plain, tensors = encode(value)
    assert set(tensors) == {"state.ema.w", "state.list[0]", "state.list[1]"}
    assert not tensors["state.list[1]"].requires_grad
    back = decode(plain, tensors)
    assert torch.equal(back["ema"]["w"], torch.ones(2))


def test_two_tensors_of_the_same_name_are_both_kept() -> None:
    value = {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)}
    back = through_json(value)
    assert (back["a"]["b"].item(), back["a.b"].item()) == (0.0, 1.0)


@pytest.mark.parametrize("array", [
    np.arange(6, dtype=np.uint32).reshape(2, 3), np.array(1.5), np.zeros((0, 2)), np.arange(6)[::-2],
    np.array([True, False]), np.arange(3, dtype=">f8"), np.array([1j], dtype=np.complex64),
], ids=lambda array: f"{array.dtype}-{array.shape}")  # fmt: skip
def test_numpy_arrays_come_back_as_arrays(array: np.ndarray[Any, Any]) -> None:
    back = through_json(array)
    assert isinstance(back, np.ndarray)
    assert back.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(back, array)


def test_numpy_scalars_and_generator_states_come_back() -> None:
    for scalar in (
        np.float32(0.1),
        np.float64("nan"),
        np.int8(-3),
        np.uint64(2**64 - 1),
        np.bool_(True),
        np.float16(0.1),
    ):
        back = through_json(scalar)
        assert type(back) is type(scalar)
        np.testing.assert_equal(back, scalar)
    state = np.random.RandomState(3).get_state()
    other = np.random.RandomState()
    other.set_state(through_json(state))
    assert other.rand() == np.random.RandomState(3).rand()


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(("value", "message"), [
    ({"ModelCheckpoint": {"best": object()}}, r"callbacks\.ModelCheckpoint\.best is a builtins\.object"),
    ([1, lambda: None], r"callbacks\[1\] is a builtins\.function"),
    ({"colour": Colour.RED}, r"callbacks\.colour is the enum member .*\.value"),
    ({"p": Point(1, 2)}, r"callbacks\.p is a .*Point; expected None, bool"),
    ({"x": np.array(["a"])}, r"callbacks\.x is a numpy\.ndarray of <U1"),
    ({"x": np.array([object()])}, r"callbacks\.x is a numpy\.ndarray of object"),
    ({"x": np.array([1j])}, r"callbacks\.x is a numpy\.ndarray of complex128"),
    ({"x": 1j}, r"callbacks\.x is a builtins\.complex"), ({torch.ones(1): 1}, r"a key of callbacks is a tensor"),
    ({"module": torch.nn.Linear(1, 1)}, r"callbacks\.module is a torch\.nn\.modules\.linear\.Linear"),
])  # fmt: skip
def test_anything_else_is_refused_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        encode(value, "callbacks")


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="nested deeper than 64 levels"):
        encode(value)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("plain", [
    {"$object": "os.system"}, {"$dtype": "load"}, {"$dtype": "nn"}, {"$device": "no such device"}, {"$device": 3},
    {"$tensor": "absent"}, {"$tensor": ["unhashable"]}, {"$set": [[1]]}, {"$dict": [[[1], 2]]}, {"$dict": [[1]]},
    {"$dict": 5}, {"$tuple": "text"}, {"$size": ["a"]}, {"$bytes": "*"}, {"$bytes": "\u00e9"}, {"$int": "zz"},
    {"$float": "1e5"}, {"$timedelta": [1, 2]}, {"$timedelta": [10**30, 0, 0]}, {"$numpy": ["object", 1]},
    {"$numpy": ["int8", "text"]}, {"$numpy": ["int8", 1000]}, {"$tuple": [], "other": 1}, nested(MAX_DEPTH + 1),
], ids=lambda plain: str(plain)[:40])  # fmt: skip
def test_hostile_data_is_refused(plain: Any) -> None:
    with pytest.raises(CheckpointError, match="plain data"):
        decode(plain, {})

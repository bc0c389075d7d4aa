"""The names of types in the texts of errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainwright.errors import a_type_of


@pytest.mark.parametrize(("value", "text"), [
    (3, "an int"),
    ("", "a str"),
    (nn.Identity(), "an Identity"),
    (torch.zeros(1), "a Tensor"),
    (type("OneHot", (), {})(), "a OneHot"),
    (type("", (), {})(), "a "),
])  # fmt: skip
def test_types_get_their_articles(value: Any, text: str) -> None:
    assert a_type_of(value) == text

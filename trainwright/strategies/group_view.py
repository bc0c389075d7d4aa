"""Group view: a parameter group as the user made it, over one that an engine has changed."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor


class GroupView(UserDict[str, Any]):
    """The group that is stepped, with the user's parameters in place of those that stand in it.

    What a scheduler or a load sets in the one is set in the other.

    Args:
        stepped: the group that the engine's step reads.
        parameters: the module's own parameters of this group.
    """

    def __init__(self, stepped: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        self.data = stepped
        self.parameters = list(parameters)

    def __getitem__(self, key: str) -> Any:
        return self.parameters if key == "params" else super().__getitem__(key)

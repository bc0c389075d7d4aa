"""Group view: a parameter group with the user's parameters, over the group that an engine steps."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor


class GroupView(UserDict[str, Any]):
    """Shares all options with the stepped group, so that schedulers and loads reach the step, but not its tensors.

    Args:
        stepped: the group that the engine's step reads.
        parameters: the module's own parameters of this group.
    """

    def __init__(self, stepped: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        self.data = stepped
        self.parameters = list(parameters)

    def __getitem__(self, key: str) -> Any:
        return self.parameters if key == "params" else super().__getitem__(key)

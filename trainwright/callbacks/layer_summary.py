"""LayerSummary: the children of a module and their parameters, as data and as the table that ModelSummary prints."""

from __future__ import annotations

from torch import nn

from trainwright.callbacks.model_summary import children_to, count_parameters, summarize


class LayerSummary:
    """The children of a module; Lightning's `utilities.model_summary.ModelSummary`.

    Args:
        model: the module.
        max_depth: levels of children: -1 for all, 0 for the totals only.
    """

    def __init__(self, model: nn.Module, max_depth: int = 1) -> None:
        self._model, self._max_depth = model, max_depth
        self._children = children_to(model, max_depth)

    @property
    def layer_names(self) -> list[str]:
        """Return the children's names."""
        return list(self._children)

    @property
    def layer_types(self) -> list[str]:
        """Return the children's classes."""
        return [type(each).__name__ for each in self._children.values()]

    @property
    def param_nums(self) -> list[int]:
        """Return the children's numbers of parameters."""
        return [count_parameters(each.parameters()) for each in self._children.values()]

    @property
    def total_parameters(self) -> int:
        """Return the module's number of parameters."""
        return count_parameters(self._model.parameters())

    @property
    def trainable_parameters(self) -> int:
        """Return the number of those that are trained."""
        return count_parameters(each for each in self._model.parameters() if each.requires_grad)

    def __str__(self) -> str:
        return summarize(self._model, self._max_depth)

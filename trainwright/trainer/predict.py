"""Predict: the outputs of predict_step, in the order of the dataset on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright.checkpoint.codec import decode, encode
from trainwright.data.transfer import to_device
from trainwright.distributed.collectives import gather_nests
from trainwright.trainer.evaluate import Evaluation, evaluate

if TYPE_CHECKING:
    from trainwright.engine.engine import Engine

HOST = torch.device("cpu")


def predict(evaluation: Evaluation, return_predictions: bool, *, own_only: bool = False) -> list[Any] | None:
    """Return the outputs of all batches on the host, a list per loader if there are several. None if unwanted.

    Every rank gets the outputs of all ranks, tensors of a subclass as plain tensors, and dicts of a subclass as dicts. With
    `own_only` it gets the outputs of this rank, of any kind. Collective: call on every rank.

    Raises:
        TypeError: on several ranks, at the first batch: outputs that are more than plain data and tensors.
    """
    engine = evaluation.run.engine
    gathers = engine.world_size > 1 and not own_only
    kept: dict[int, dict[int, Any]] = {}

    def keep(loader: int, index: int, outputs: Any) -> None:
        outputs = to_device(outputs, HOST)
        if gathers:
            outputs = plainer(outputs)
            if loader not in kept:
                encoded({index: outputs})  # raises before the work is done if it cannot be gathered
        # Batch i of this rank is batch i * world_size + rank of the dataset.
        kept.setdefault(loader, {})[index * engine.world_size + engine.rank] = outputs

    evaluate(evaluation, keep=keep if return_predictions else None)
    if not return_predictions:
        return None
    found = [kept.get(loader, {}) for loader in range(len(evaluation.loaders))]
    gathered = [gather_outputs(each, engine) if gathers else each for each in found]
    predictions = [[outputs[number] for number in sorted(outputs)] for outputs in gathered]
    return predictions[0] if len(predictions) == 1 else predictions


def gather_outputs(own: dict[int, Any], engine: Engine) -> dict[int, Any]:
    """Return the outputs of all ranks by the number of their batch. Collective: call on every rank."""
    if engine.world_size == 1:
        return own
    gathered: dict[int, Any] = {}
    for plain, tensors in gather_nests(*encoded(own)):
        gathered.update(decode(plain, tensors))
    return gathered


def encoded(outputs: dict[int, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Return outputs as plain data and its tensors. TypeError if they contain other objects."""
    try:
        return encode(outputs, "predict_step's outputs")
    except TypeError as error:
        raise TypeError(
            f"{error} On several ranks predictions are gathered as such. Return these, or pass "
            "return_predictions='own' to keep the outputs of every rank there."
        ) from error


def plainer(value: Any) -> Any:
    if isinstance(value, Tensor):
        is_wrapped = type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__  # its memory is elsewhere
        return value if type(value) is Tensor or is_wrapped else value.as_subclass(Tensor)
    if isinstance(value, Mapping):
        return {key: plainer(each) for key, each in value.items()}
    return type(value)(map(plainer, value)) if type(value) in (list, tuple) else value

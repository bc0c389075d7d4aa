"""Predict: what predict_step returns for each batch, in the order of the dataset, whatever the number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright.checkpoint.codec import decode, encode
from trainwright.checkpoint.shards import as_bytes
from trainwright.data.transfer import to_device
from trainwright.distributed import collectives
from trainwright.trainer.evaluate import Evaluation, evaluate

if TYPE_CHECKING:
    from trainwright.engine.engine import Engine

HOST = torch.device("cpu")


def predict(evaluation: Evaluation, return_predictions: bool) -> list[list[Any]]:
    """Return the outputs of each batch on the host, a list for each loader; empty lists where they are not wanted.

    On several ranks every one of them gets all outputs. Collective: call on every rank.

    Raises:
        TypeError: on several ranks, outputs that are more than plain data and tensors.
    """
    engine = evaluation.trainer.engine
    kept: dict[int, dict[int, Any]] = {}

    def keep(place: int, index: int, outputs: Any) -> None:
        kept.setdefault(place, {})[index * engine.world_size + engine.rank] = to_device(outputs, HOST)

    evaluate(evaluation, keep=keep if return_predictions else None)
    if not return_predictions:
        return []
    predictions = []
    for place in range(len(evaluation.loaders)):
        outputs = gather_outputs(kept.get(place, {}), engine)
        predictions.append([outputs[number] for number in sorted(outputs)])
    return predictions


def gather_outputs(own: dict[int, Any], engine: Engine) -> dict[int, Any]:
    """Return the outputs of all ranks by the number of their batch. Collective: call on every rank."""
    if engine.world_size == 1:
        return own
    try:
        plain, tensors = encode(own, "predict_step's outputs")
    except TypeError as error:
        raise TypeError(f"{error} On several ranks predictions are gathered as such; return these.") from error
    arrays = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = [[name, str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in arrays.items()]
    parts = [as_bytes(each) for each in arrays.values() if each.numel()]
    data = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    gathered: dict[int, Any] = {}
    blobs = collectives.gather_uneven(data)
    for (text, table), blob in zip(collectives.gather_object([plain, described]), blobs, strict=True):
        gathered.update(decode(text, _tensors_of(table, blob)))
    return gathered


def _tensors_of(table: list[Any], blob: Tensor) -> dict[str, Tensor]:
    tensors, start = {}, 0
    for name, dtype_name, shape in table:
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        part = blob[start : start + size].clone()  # its own memory, so that it is aligned and the rest can go
        tensors[name] = part.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
        start += size
    return tensors

"""The bytes that a step saves for backward, computed from shapes and measured in a real step."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trainwright as tw
from trainwright.memory.vendor import saved_bytes
from trainwright.precision import resolve_precision
from trainwright.tools.estimate import parse_batch


class Attends(tw.Module):
    """Attention, dropout, a batch norm, tied weights, and a branch whose graph is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.projections = nn.Linear(32, 96)
        self.norm = nn.BatchNorm1d(32)
        self.plain = torch.ones(32, dtype=torch.int64)  # neither a parameter nor a buffer
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.words.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        words, labels = batch
        heads = self.projections(self.words(words)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        self.log("dropped", self.head(mixed.square()).mean())
        hidden = functional.dropout(self.norm(mixed.mean(1)) * self.plain, 0.5)
        loss = functional.cross_entropy(self.head(hidden), labels)
        self.log("loss", loss)
        return loss


def really_saved(module: nn.Module, batch: Any, context: Any) -> int:
    saved: list[weakref.ref[Tensor]] = []

    def record(tensor: Tensor) -> Tensor:
        saved.append(weakref.ref(tensor))
        return tensor

    with context, torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        loss = module.training_step(batch, 0)  # type: ignore[operator]
    own = {each.data_ptr() for each in (*module.parameters(), *module.buffers())}
    tensors = [tensor for tensor in (ref() for ref in saved) if tensor is not None]
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert loss.requires_grad
    return sum(size for place, size in sizes.items() if place not in own)


@pytest.mark.parametrize("name", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.filterwarnings("ignore:self.log does nothing here")
def test_the_traced_step_saves_the_bytes_of_a_real_one(name: str) -> None:
    precision = resolve_precision(name, "cpu")
    with torch.device("meta"):
        module = Attends().to(precision.param_dtype)
    batch = parse_batch("6x20:int64,6:int64")
    traced = saved_bytes(module, batch, precision)
    real = Attends().to(precision.param_dtype)
    words = [torch.randint(50, (6, 20)), torch.randint(50, (6,))]
    saved = really_saved(real, words, precision.forward_context() or nullcontext())
    # Without values a batch norm's statistics have the dtype of its input under autocast.
    assert traced == (pytest.approx(saved, rel=0.01) if name == "bf16-mixed" else saved)
    assert all(each.is_meta for each in module.parameters())


def test_a_batch_is_parsed_by_shapes_dtypes_and_names() -> None:
    def sizes(batch: Any) -> Any:
        return tuple(batch.shape), batch.dtype

    assert sizes(parse_batch("8x3")) == ((8, 3), torch.float32)
    assert list(map(sizes, parse_batch("8:int64,"))) == [((8,), torch.int64)]
    assert {name: sizes(each) for name, each in parse_batch("x=2x3:bfloat16, y=2:bool").items()} == {
        "x": ((2, 3), torch.bfloat16),
        "y": ((2,), torch.bool),
    }


@pytest.mark.parametrize(("text", "said"), [
    ("8,x3", "--batch 8,x3: 'x3' is not the shape and dtype of a tensor. Pass a batch such as 8x128:int64,8:int64"),
    ("8:long8", "'8:long8' is not the shape and dtype"),
    ("x=8,8", "--batch x=8,8: expected different names for all tensors, or none"),
    ("x=8,x=8", "--batch x=8,x=8: expected different names for all tensors, or none"),
])  # fmt: skip
def test_a_wrong_batch_raises(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_batch(text)


def test_a_plain_module_is_called_with_the_batch() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x + y) * self.scale

    for text in ("4x5,4x5", "x=4x5,y=4x5"):
        assert saved_bytes(Adds(), parse_batch(text), resolve_precision("32-true", "cpu")) == 4 * 4 * 5
    linear = nn.Linear(5, 3)
    assert saved_bytes(linear, parse_batch("7x5"), resolve_precision("32-true", "cpu")) == 4 * 7 * 5

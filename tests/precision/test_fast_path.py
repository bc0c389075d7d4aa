"""Attention under autocast on the CPU, where torch's fast path does not work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainwright.precision import resolve_precision
from trainwright.precision.mixed import NoFastPath


@pytest.mark.parametrize("name", ["16-mixed", "bf16-mixed"])
def test_a_padding_mask_works_in_evaluation(name: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(3, 4, 8)
    padding = torch.arange(4) > torch.tensor([[1], [2], [3]])

    def evaluated() -> Tensor:
        with torch.no_grad():
            return encoder(x, src_key_padding_mask=padding)

    context = resolve_precision(name, "cpu").forward_context()
    assert context is not None
    with context:
        low = evaluated()
    assert torch.backends.mha.get_fastpath_enabled()
    with NoFastPath():
        wanted = evaluated()
    torch.testing.assert_close(low.float()[~padding], wanted[~padding], rtol=0.05, atol=0.05)


def test_what_was_set_comes_back() -> None:
    within = NoFastPath()
    with within:
        with within:
            assert not torch.backends.mha.get_fastpath_enabled()
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled()

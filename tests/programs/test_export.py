"""A trained module outside of the framework: exported, traced, compiled, copied, pickled and saved by torch."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from small import QUIET, Classifier, make_loader
from torch import Tensor
from torch.export import Dim

import trainwright as tw

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::torch.jit.TracerWarning")]


class Exported(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.fixture(params=[False, {"backend": "eager"}], ids=["plain", "compiled"])
def module(request: pytest.FixtureRequest) -> Exported:
    trained = Exported()
    trainer = tw.Trainer(max_epochs=1, compile=request.param, **QUIET)
    trainer.fit(trained, make_loader(8), make_loader(8))
    return trained.eval()


@pytest.fixture
def inputs(module: Exported) -> Tensor:
    return next(iter(make_loader(4)))[0]


def test_all_export_formats_are_equal(module: Exported, inputs: Tensor, tmp_path: Path) -> None:
    expected = module(inputs).detach()

    def check(made: Any) -> None:
        torch.testing.assert_close(made(inputs).detach(), expected)

    check(torch.export.export(module, (inputs,)).module())
    dynamic = torch.export.export(module, (inputs,), dynamic_shapes={"x": {0: Dim("batch", min=2, max=64)}}).module()
    check(dynamic)
    assert dynamic(torch.zeros(9, 8)).shape == (9, 3)
    check(torch.jit.trace(module, inputs))
    check(torch.fx.symbolic_trace(module))
    check(torch.compile(module, backend="eager"))
    check(copy.deepcopy(module))
    check(pickle.loads(pickle.dumps(module)))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    check(torch.load(file, weights_only=False))
    module.export(tmp_path / "weights.safetensors")
    assert (tmp_path / "weights.safetensors").stat().st_size


@pytest.mark.parametrize("module", [False], ids=["plain"], indirect=True)
def test_onnx_files_are_written(module: Exported, inputs: Tensor, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.to_onnx(tmp_path / "module.onnx", inputs)
        torch.onnx.export(module, (inputs,), dynamo=True).save(tmp_path / "dynamo.onnx")  # type: ignore[union-attr]
    for name in ("module", "dynamo"):
        assert (tmp_path / f"{name}.onnx").stat().st_size

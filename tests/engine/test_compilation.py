"""Compilation in place: the compiled modules, the number of graphs, and their complete removal."""

from __future__ import annotations

import copy
import pickle
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torchmetrics import MeanMetric

from trainwright.engine.compilation import Compiled

pytestmark = [  # torch's compiler meets these itself, and hides them where they are no errors
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
has_compiler = shutil.which("g++") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()
X = torch.ones(3, 4)


class Block(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.inner(x)) + 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Block(), nn.Dropout(0.0), Block())
        self.decoder = Block()

    def forward(self, x: Any) -> Any:
        return self.decoder(self.encoder(x))


class Root(nn.Module):
    """Its steps log, and call submodules at any depth."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = Net()
        self.blocks = nn.ModuleList(nn.ModuleDict({"block": Block()}) for _ in range(3))
        self.sizes = nn.ModuleList(Block(size) for size in range(5, 15))
        self.metric = MeanMetric()
        self.theirs = torch.compile(Block(), backend="eager")
        self.in_place = Block()
        self.in_place.compile(backend="eager")
        self.logged: list[Any] = []
        self.batch = 0

    def whole(self, x: Any) -> Any:
        self.batch += 1  # an int that changes at every batch and would cause a new graph if a graph read it
        y = self.net(x)
        self.logged.append(float(y.detach().mean()))
        self.metric.update(y.detach().mean())
        return y

    def parts(self, x: Any) -> Any:
        y = self.net.encoder(x)
        self.logged.append(float(y.detach().mean()))
        return self.net.decoder(y)


@pytest.fixture
def counter() -> Iterator[CompileCounterWithBackend]:
    torch._dynamo.reset()
    yield CompileCounterWithBackend("eager")
    torch._dynamo.reset()


def test_whatever_a_step_calls_is_one_graph_from_its_first_call_on(counter: CompileCounterWithBackend) -> None:
    module = Root()
    expected = module.whole(X)
    Compiled(module, {"backend": counter, "fullgraph": True})
    for _ in range(3):
        assert torch.equal(module.whole(X), expected)
    assert counter.frame_count == 1
    for _ in range(3):
        assert torch.equal(module.parts(X), expected)
    assert counter.frame_count == 3
    module.whole(X)
    assert counter.frame_count == 3
    module.eval()
    with torch.no_grad():
        module.whole(X)
        module.whole(X)
    assert counter.frame_count == 4


def test_items_of_containers_share_graphs_and_no_limit(counter: CompileCounterWithBackend) -> None:
    module = Root()
    Compiled(module, {"backend": counter, "fullgraph": True})
    for _ in range(2):
        for each in module.blocks:
            each["block"](X)
    assert counter.frame_count == 1  # alike in class and shapes
    for _ in range(2):
        for each in module.sizes:
            each(torch.ones(2, each.inner.in_features))
    assert counter.frame_count == 11  # more than the 8 that the compiler makes of one function


class Deep(nn.Module):
    """Twelve equal layers between an embedding and a head, all eager but the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(1, 4), nn.Linear(4, 1)
        self.layers = nn.ModuleList(Block() for _ in range(12))

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.embed(x))  # no view, for which torch makes one more graph
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_equal_layers_need_one_graph_and_thirty_lengths_two(counter: CompileCounterWithBackend) -> None:
    module = nn.ModuleDict({"net": Deep()})
    expected = module["net"](torch.ones(4, 7, 1))
    compiled = Compiled(module, {"backend": counter, "fullgraph": True})
    assert torch.equal(module["net"](torch.ones(4, 7, 1)), expected)
    assert counter.frame_count == 1
    for length in range(8, 38):
        module["net"](torch.ones(4, length, 1))
    assert counter.frame_count == 2
    assert len(compiled.recompiles) == 1
    assert "size mismatch at index 1. expected 7, actual 8" in compiled.recompiles[0]


def test_the_third_compilation_of_a_shape_is_warned_of_with_its_cause(counter: CompileCounterWithBackend) -> None:
    net = Deep()
    compiled = Compiled(nn.ModuleDict({"net": net}), {"backend": counter})
    for shape in ((4, 7, 1), (4, 8, 1), (5, 8, 1)):
        net(torch.ones(shape))
    with pytest.warns(
        UserWarning, match=r"compile= has compiled Block again 3 times.*The latest cause: .*dtype mismatch"
    ):
        net.double()(torch.ones(5, 8, 1, dtype=torch.float64))
    with torch.no_grad():
        net.eval()(torch.ones(5, 8, 1, dtype=torch.float64))  # an evaluation needs a graph too
    compiled.undo()
    assert len(compiled.recompiles) == 3


def test_the_option_whole_compiles_a_net_of_equal_layers_as_one_graph(counter: CompileCounterWithBackend) -> None:
    module = nn.ModuleDict({"net": Deep()})
    Compiled(module, {"backend": counter, "fullgraph": True, "whole": True})
    module["net"](torch.ones(4, 7, 1))
    assert (counter.frame_count, counter.op_count) == (1, 39)


def test_opaque_modules_are_not_compiled(counter: CompileCounterWithBackend) -> None:
    module = Root()
    in_place = module.in_place._compiled_call_impl
    compiled = Compiled(module, {"backend": counter})
    alone = {module, module.metric, module.theirs, module.theirs._orig_mod, module.in_place, module.in_place.inner}
    assert alone.isdisjoint(compiled.modules)
    assert not any(isinstance(each, (nn.ModuleList, nn.ModuleDict)) for each in compiled.modules)
    module.theirs(X)
    module.in_place(X)
    module.metric(torch.ones(2))
    assert counter.frame_count == 0
    compiled.undo()
    assert module.in_place._compiled_call_impl is in_place


def test_a_hook_within_a_graph_breaks_nothing(counter: CompileCounterWithBackend) -> None:
    module = Root()
    handle = module.net.encoder.register_forward_hook(lambda owner, args, output: output * 2)
    expected = module.whole(X)
    Compiled(module, {"backend": counter, "fullgraph": True})
    assert torch.equal(module.whole(X), expected)
    assert counter.frame_count == 1
    handle.remove()


def test_undo_copies_and_pickles_leave_plain_modules(counter: CompileCounterWithBackend) -> None:
    module = Root()
    del module.theirs, module.in_place  # modules that the user compiled cannot be pickled
    names = list(module.state_dict())
    compiled = Compiled(module, {"backend": counter})
    module.whole(X)
    assert list(module.state_dict()) == names
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(each._compiled_call_impl is None for each in other.modules())
        other.whole(X)
    assert counter.frame_count == 1
    compiled.undo()
    compiled.undo()
    assert all("_compiled_call_impl" not in vars(each) for each in module.modules())
    module.whole(X)
    assert counter.frame_count == 1
    Compiled(module, {"backend": counter})
    module.whole(X)
    assert counter.frame_count == 2


def test_an_error_within_leaves_it_as_it_was(counter: CompileCounterWithBackend) -> None:
    module = Root()
    compiled = Compiled(module, {"backend": counter})
    with pytest.raises(Exception, match=r"shape|size"):
        module.net(torch.ones(3, 5))
    assert not compiled.is_within
    module.net(X)
    assert counter.frame_count == 1


@pytest.mark.parametrize(("options", "match"), [
    ({"backend": "induktor"}, "Invalid backend: .induktor."),
    ({"fast": True}, "unexpected keyword argument 'fast'"),
    ({"mode": "max"}, "Unrecognized mode=max"),
])  # fmt: skip
def test_wrong_compile_options_raise(options: dict[str, Any], match: str) -> None:
    module = Root()
    with pytest.raises((RuntimeError, TypeError), match=match):
        Compiled(module, options)
    assert "_compiled_call_impl" not in vars(module.net)


@pytest.mark.parametrize(("options", "are_kept"), [
    ({}, False),
    ({"backend": "inductor", "mode": "default"}, False),
    ({"options": {"triton.cudagraphs": False}}, False),
    ({"options": {"triton.cudagraphs": True}}, True),
    ({"mode": "reduce-overhead"}, True),
    ({"mode": "max-autotune"}, True),
    ({"mode": "max-autotune-no-cudagraphs"}, False),
    ({"backend": "cudagraphs"}, True),
])  # fmt: skip
def test_gradients_are_kept_from_cuda_graphs(options: dict[str, Any], are_kept: bool) -> None:
    module = Root()
    compiled = Compiled(module, options)
    assert (compiled.gradients is not None) == are_kept
    if compiled.gradients is not None:  # nothing to do on the CPU
        module.theta = nn.Parameter(torch.ones(2))
        module.theta.grad = gradient = torch.ones(2)
        compiled.gradients.keep()
        assert module.theta.grad is gradient
    compiled.undo()


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler, reason="torch.compile needs g++, Python.h")
def test_the_real_compiler_trains_alike() -> None:
    ends = []
    for is_compiled in (False, True):
        module = Root()
        if is_compiled:
            Compiled(module, {})
        optimizer = torch.optim.SGD(module.net.parameters(), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            (module.whole if step % 2 else module.parts)(X).square().mean().backward()
            optimizer.step()
        ends.append([parameter.detach() for parameter in module.net.parameters()])
    for eager, other in zip(*ends, strict=True):
        torch.testing.assert_close(eager, other, rtol=1e-5, atol=1e-6)

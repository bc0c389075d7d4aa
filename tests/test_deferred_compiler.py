"""torch's compiler is imported by those who use it, and then is as it would have been from the start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import deadline

pytestmark = pytest.mark.launch

RUN = """
import sys
import torch
import trainwright as tw
from torch.utils.checkpoint import checkpoint

class Regression(tw.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    def training_step(self, batch, batch_idx):
        return checkpoint(self.net, batch, use_reentrant=False).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), fused=False)

def train(folder, **settings):
    trainer = tw.Trainer(max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
                         accelerator="cpu", default_root_dir=folder, **settings)
    trainer.fit(Regression(), torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2))

def is_imported():
    return "torch._dynamo.eval_frame" in sys.modules
"""

USES = """
import copy, importlib.util, inspect, io, json, os, pkgutil
from pathlib import Path
from unittest import mock
train("run", enable_checkpointing=True)
inspect.getmodule(lambda: 0)  # which looks through all modules
[name for name, module in sys.modules.items() if hasattr(module, "a_plugin_of_mine")]
import torch._dynamo
import torch._dynamo.config
config = sys.modules["torch._dynamo.config"]
assert torch._dynamo.config is config
folder = Path(torch._dynamo.__file__).parent
assert importlib.util.find_spec("torch._dynamo").origin == str(folder / "__init__.py")
assert "guards" in [each.name for each in pkgutil.iter_modules(torch._dynamo.__path__)]
assert type(torch._dynamo) is type(sys)  # which libraries pickle by name
assert not is_imported(), "the run imported it"
held = torch._dynamo

def check():
    real = sys.modules["torch._dynamo"]
    assert is_imported() and held is torch._dynamo is real and real.__spec__.origin.endswith("__init__.py")
    assert real.config is config and real.eval_frame.config is config
    for name, module in sys.modules.items():
        if name.startswith("torch._dynamo."):
            parent, _, last = name.rpartition(".")
            attribute = getattr(sys.modules[parent], last, module)
            assert attribute is module or not inspect.ismodule(attribute), name
            assert module.__spec__.loader.__class__.__name__ == "SourceFileLoader", name

def by_submodule():
    import torch._dynamo.utils
    import torch._dynamo.utils as utils
    assert torch._dynamo.utils is utils is sys.modules["torch._dynamo.utils"]

def by_new_submodule():
    import torch._dynamo.debug_utils  # which the compiler does not import itself
    assert "torch._dynamo.debug_utils" in sys.modules

def by_name():
    from torch._dynamo import graph_break, list_backends
    assert "inductor" in list_backends()

def by_held_module():
    assert held.trace_rules.lookup and held.utils.counters is sys.modules["torch._dynamo"].utils.counters
    assert held.graph_break() is None

def by_star():
    names = {}
    exec("from torch._dynamo import *", names)
    assert names["list_backends"] is held.list_backends

def by_dir():
    assert {"guards", "list_backends"} <= set(dir(held))

def by_own_attribute():
    held.allow_in_graph = check
    assert held.list_backends and held.allow_in_graph is check
    with mock.patch("torch._dynamo.list_backends", check):
        assert held.list_backends is check
    assert "inductor" in held.list_backends()

def by_file():
    assert torch.load(nested, weights_only=True).shape[0] == 2

def by_failure():
    found = []
    for _ in range(2):
        with mock.patch.dict(sys.modules, {"torch._dynamo.convert_frame": None}):
            try:
                held.list_backends
            except ImportError as error:
                found.append(str(error))
    assert len(found) == 2 and len(set(found)) == 1, found
    assert "inductor" in held.list_backends()

def by_own_function():
    disabled = torch._dynamo.disable(check)
    assert is_imported() and disabled is not check
    assert torch.compiler.disable(check) is not check
    assert torch.compiler.disable(checkpoint) is not checkpoint

def by_torchs_function():
    assert torch.compiler.disable(checkpoint) is not checkpoint

def by_unwrapped_function():
    assert torch._dynamo.disable(check, wrapping=False) is not check

def by_ddp_mode():
    def of_ddp():
        return eval("torch._dynamo.utils.get_optimize_ddp_mode()", vars(torch.nn.parallel.distributed))
    assert of_ddp() == "ddp_optimizer" and not is_imported()
    config.optimize_ddp = "python_reducer"
    assert of_ddp() == "python_reducer"

nested = "nested.pt"
if not os.fork():
    torch.save(torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged), nested)
    os._exit(0)
os.wait()
for use in (by_submodule, by_new_submodule, by_name, by_held_module, by_star, by_dir, by_own_attribute, by_file, by_failure,
            by_own_function, by_torchs_function, by_unwrapped_function, by_ddp_mode):
    child = os.fork()
    if not child:
        try:
            use()
            check()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, use
"""

COMPILED = """
import json
if "early" in sys.argv:
    import torch._dynamo.eval_frame
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(net.parameters(), foreach=False)

@torch._disable_dynamo  # as torch's optimizers have it
def twice(batch):
    return batch * 2

def step(batch):
    optimizer.zero_grad()
    loss = net(twice(batch + 1)).square().mean()
    loss = loss + 1
    loss.backward()
    optimizer.step()
    return loss

step(torch.ones(2, 4))
assert is_imported() == ("early" in sys.argv)
optimizer.state_dict()
from torch._dynamo.testing import CompileCounter
counter = CompileCounter()
compiled = torch.compile(step, backend=counter)
losses = [float(compiled(torch.full((2, 4), float(each)))) for each in range(3)]
assert isinstance(torch.compile(net), torch._dynamo.OptimizedModule)
print(json.dumps([counter.frame_count, counter.op_count, losses]))
"""

STRATEGIES = """
for strategy in ("ddp", "ddp_sharded", "fsdp", "deepspeed"):
    train(strategy, strategy=strategy, devices=2)
    assert not is_imported(), strategy
train("compiled", strategy="ddp", devices=2, compile={"backend": "eager"})
assert is_imported()
print("trained")
"""


def run(program: str, folder: Path, *arguments: str, warnings_are: str = "error") -> str:
    script = folder / "train.py"
    script.write_text(RUN + program)
    command = [sys.executable, "-W", warnings_are, str(script), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=deadline(180.0), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_use_finds_the_whole_compiler(tmp_path: Path) -> None:
    run(USES, tmp_path)


def test_it_compiles_what_it_would_have(tmp_path: Path) -> None:
    late, early = (
        json.loads(run(COMPILED, tmp_path, each, warnings_are="ignore").splitlines()[-1]) for each in ("late", "early")
    )
    assert late == early
    assert late[0] >= 2


def test_no_strategy_imports_it(tmp_path: Path) -> None:
    assert "trained" in run(STRATEGIES, tmp_path, warnings_are="ignore")

"""A device without float64, pinned memory, bfloat16 in autocast and a process group, like MPS."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from interpreters import run_command

if not hasattr(torch, "sim"):
    pytest.skip("the simulated device is not loaded; run make test-device", allow_module_level=True)

pytestmark = pytest.mark.device
TESTS = Path(__file__).parents[1]
PREPARED = f"""
import importlib.util, re, sys, warnings
warnings.simplefilter("error")
sys.path.insert(0, {str(TESTS)!r})
import pytest, torch, torchmetrics
import trainwright as tw
from small import QUIET, Classifier, assert_close, make_loader, weights
from trainwright.devices import abilities
settings = {{**QUIET, "accelerator": "gpu"}}
"""
POOR = """
assert not abilities.computes_in("sim", torch.float64)
assert not abilities.copies_aside("sim")
assert not abilities.autocasts("sim", torch.bfloat16)
assert abilities.autocasts("sim", torch.float16)
assert abilities.collective_backend("sim") is None

class Logs(Classifier):
    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log("lowest", loss, reduce_fx="min", on_step=False, on_epoch=True)
        self.log("weighed", loss, on_step=False, on_epoch=True, batch_size=1 + batch_idx % 3)
        return loss

def run(accelerator):
    module = Logs()
    trainer = tw.Trainer(max_epochs=2, **{**settings, "accelerator": accelerator})
    trainer.fit(module, make_loader(), make_loader())
    trainer.save_checkpoint(f"{accelerator}.ckpt")
    return module, {name: float(value) for name, value in trainer.callback_metrics.items()}

module, logged = run("gpu")
assert module.device.type == "sim" and module.on_gpu
host, expected = run("cpu")
assert logged.keys() == expected.keys()
for name in expected:
    assert logged[name] == pytest.approx(expected[name], rel=1e-5), name
assert_close(weights(module), weights(host), 1e-5)
resumed = Logs()
tw.Trainer(max_epochs=3, **settings).fit(resumed, make_loader(), ckpt_path="cpu.ckpt")

refused = {"64-true": "'32-true', '16-true', 'bf16-true'", "bf16-mixed": "'32-true'", "16-mixed": "'32-true'"}
for precision, has in refused.items():
    with pytest.raises(ValueError, match=f"precision='{precision}' .*sim.*; pass .*{re.escape(has)}"):
        tw.Trainer(precision=precision, **settings)
for more in ({"devices": 2}, {"devices": 1, "strategy": "fsdp"}):
    with pytest.raises(ValueError, match="has no process group for 'sim', so .*; pass devices=1"):
        tw.Trainer(**{**settings, **more})
"""
RICH = r"""
assert abilities.computes_in("sim", torch.float64) and abilities.widest_float("sim") == torch.float64
assert abilities.copies_aside("sim")
assert abilities.autocasts("sim", torch.bfloat16) and abilities.scales_losses("sim")
assert all(abilities.fuses("sim", name, torch.float32) for name in ("Adam", "SGD", "Adagrad"))

for name in ("auto", "gpu", "sim"):
    assert tw.Trainer(**{**settings, "devices": 1, "accelerator": name}).engine.device == torch.device("sim", 0)
has = "torch .* has 'sim' here; .*'auto' for 'sim', or 'cpu'"
with pytest.raises(RuntimeError, match=f"accelerator='cuda' was requested, but {has}"):
    tw.Trainer(**{**settings, "accelerator": "cuda"})
accepted = "auto, cpu, gpu, cuda, mps, xpu, sim"
with pytest.raises(ValueError, match=f"accelerator='simm' is unknown; choose from {accepted}. Did you mean 'sim'"):
    tw.Trainer(**{**settings, "accelerator": "simm"})
with pytest.raises(ValueError, match="torch sees no 'sim' 2; choose from 0, 1"):
    tw.Trainer(**{**settings, "devices": [2]})

def run(devices, epochs, path=None):
    module = Classifier(dropout=0.5)
    trainer = tw.Trainer(max_epochs=epochs, **{**settings, "devices": devices})
    trainer.fit(module, make_loader(), ckpt_path=path)
    assert module.device == torch.device("sim", devices[0])
    return trainer, weights(module)

# A run goes on with its own device's draws on a device of another number, and on fewer devices.
torch.manual_seed(0)
trainer, _ = run([1], 1)
trainer.save_checkpoint("first.ckpt")
torch.manual_seed(0)
_, whole = run([1], 2)
torch.manual_seed(5)
_, same = run([1], 2, "first.ckpt")
assert all(torch.equal(same[name], whole[name]) for name in whole)
_, other = run([0], 2, "first.ckpt")
assert all(torch.equal(other[name], whole[name]) for name in whole)

# What a strategy cannot compute on is refused where the Trainer is made, before any process is started.
if importlib.util.find_spec("deepspeed") is not None:
    with pytest.raises(ValueError, match="strategy='deepspeed' on 'sim': DeepSpeed does not support it"):
        tw.Trainer(**{**settings, "devices": 2, "strategy": "deepspeed"})

# What a first draw on another device moves is put back too.
torch.manual_seed(1)
with tw.isolate_rng():
    first_draw = torch.rand(3, device="sim:1")
assert torch.equal(torch.rand(3, device="sim:1"), first_draw)
for name in ("sim:0", "cpu:0"):
    with pytest.raises(ValueError, match=r"names a device by its number; pass accelerator='(sim' with devices=|cpu'\.)"):
        tw.Trainer(**{**settings, "accelerator": name})

# What else this process has drawn from is in the checkpoint, and said where it is not here.
torch.rand(3, device="sim:1")
from trainwright.devices import generators
zero = torch.device("sim", 0)
torch.accelerator.set_device_index(0)
state = generators.device_state()
assert (state["type"], state["index"], set(state["others"])) == ("sim", 0, {"1"})
before = torch.rand(3, device="sim:1")
generators.set_device_state(state)
assert torch.equal(torch.rand(3, device="sim:1"), before)

# Whichever device is current, all generators are restored, and the process's generator belongs to its device.
states = [torch.sim.get_rng_state(each) for each in range(2)]
with tw.isolate_rng():
    torch.accelerator.set_device_index(0)
    torch.rand(5, device="sim:0"), torch.rand(3, device="sim:1")
assert all(torch.equal(torch.sim.get_rng_state(each), states[each]) for each in range(2))
torch.accelerator.set_device_index(1)
own = generators.owned({"device": generators.device_state()}, zero)["device"]
assert own["index"] == 0 and torch.equal(own["state"], states[0]) and torch.equal(own["others"]["1"], states[1])

# A loader worker that was forked leaves the device's generators alone.
class Draws(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        with tw.isolate_rng():
            return torch.rand(())
assert len(list(torch.utils.data.DataLoader(Draws(), num_workers=1))) == 2
"""


APART = """
# A command that leaves the number open starts what a Trainer would: one process, since several could not work together.
from trainwright.launch.config import Config, resolve
assert resolve({}, Config(), lambda *_: None, {})[0]["devices"].value == 1
assert tw.Trainer(**settings).num_devices == 1
"""


def run(lines: str, folder: Path, **environment: str) -> None:
    done = run_command([sys.executable, "-c", PREPARED + lines], folder=folder, seconds=240, **environment)
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_device_may_lack_float64_pinned_memory_and_a_process_group(tmp_path: Path) -> None:
    lacks = dict.fromkeys(("SIM_FLOAT64", "SIM_PINNED", "SIM_BF16", "SIM_PROCESS_GROUP"), "0")
    run(POOR, tmp_path, SIM_DEVICES="1", **lacks)


def test_two_devices_work_together(tmp_path: Path) -> None:
    run(RICH, tmp_path, SIM_DEVICES="2")


def test_several_devices_without_a_process_group_are_used_singly(tmp_path: Path) -> None:
    run(APART, tmp_path, SIM_DEVICES="2", SIM_PROCESS_GROUP="0")

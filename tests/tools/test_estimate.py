"""`trainwright estimate`: sizes per device, from a class or a number, and rejected arguments."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainwright.__main__ import check_names
from trainwright.tools.estimate import estimate_command

SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width, depth=1):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(depth)])
        assert self.layers[0].weight.is_meta

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x

class Reads(nn.Linear):
    def __init__(self):
        super().__init__(2, int(torch.tensor([2, 3]).max()))

class Data(torch.utils.data.Dataset):
    def __init__(self, path):
        self.path = path

def small():
    return Net(4)

def sparse():
    return nn.Embedding(10, 4, sparse=True)

def block():
    return nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 1000))

def with_example(shape=(6, 8)):
    net = Net(8)
    net.example_input_array = torch.zeros(shape)
    return net

made = nn.Linear(3, 5)
number = 7
"""


@pytest.fixture(autouse=True)
def _search_path() -> Iterator[None]:
    before = list(sys.path), set(sys.modules)
    Path("net.py").write_text(SCRIPT)
    yield
    sys.path[:] = before[0]
    for name in set(sys.modules) - before[1]:
        if name in ("alone", "estimated_net"):
            del sys.modules[name]


def estimated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert estimate_command([*arguments, "--json"], check_names) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def row(found: dict[str, Any], precision: str, strategy: str, devices: int) -> dict[str, Any]:
    (one,) = (
        each
        for each in found["rows"]
        if (each["precision"], each["strategy"], each["devices"]) == (precision, strategy, devices)
    )
    return one


def test_a_number_of_parameters_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    count = 7_000_000_000
    found = estimated(
        capsys, "--params", "7e9", "--memory", "80GiB", "--precision", "16-mixed,bf16-true", "--devices", "1,8"
    )
    assert (found["parameters"], found["memory"]) == (count, 80 * 2**30)
    mixed = row(found, "16-mixed", "fsdp", 8)
    assert (mixed["parameters"], mixed["gradients"], mixed["verdict"]) == (4 * count / 8, 4 * count / 8, "fits")
    assert mixed["optimizer"] == pytest.approx(8 * count / 8, abs=8)
    true = row(found, "bf16-true", "fsdp", 8)
    assert true["total"] == pytest.approx(mixed["total"] / 2, abs=8)
    assert row(found, "16-mixed", "single_device", 1)["verdict"] == "too large"
    assert row(found, "bf16-true", "ddp", 8)["verdict"] == "tight"
    staged = row(found, "bf16-true", "deepspeed_stage_2", 8)
    assert (staged["parameters"], staged["gradients"], staged["masters"]) == (2 * count, 4 * count / 8, 4 * count / 8)
    assert staged["optimizer"] == pytest.approx(8 * count / 8, abs=8), "the optimizer steps float32 masters"


def test_a_class_of_a_script_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--args", '{"width": 1000, "depth": 3}', "--optimizer", "SGD", "--devices", "2", "--strategies", "ddp",
        "--precision", "all",
    )  # fmt: skip
    found = estimated(capsys, "net.py:Net", *options)
    assert found["parameters"] == 3_000_000
    assert [(each["precision"], each["optimizer"]) for each in found["rows"]] == [
        (name, 0) for name in ("32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true")
    ]
    assert [each["parameters"] for each in found["rows"]] == 3 * [12_000_000] + 2 * [6_000_000]
    assert estimated(capsys, "net.py:small")["parameters"] == 16
    assert estimated(capsys, "net.py:made")["parameters"] == 20
    assert estimated(capsys, "torch.nn:Linear", "--args", '{"in_features": 2, "out_features": 3}')["parameters"] == 9
    Path("alone.py").write_text(
        "from net import nn\nclass One(nn.Linear):\n    def __init__(self):\n        super().__init__(1, 1)"
    )
    assert estimated(capsys, "alone")["parameters"] == 2  # the one class that it defines, in a module of this folder


def test_precisions_with_equal_sizes_are_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        estimate_command(
            ["--params", "1B", "--memory", "12GiB", "--devices", "1,2,4", "--precision", "all"], check_names
        )
        == 0
    )
    said = capsys.readouterr().out
    assert said.startswith("--params 1B: 1,000,000,000 parameters, trained with AdamW. Bytes per device")
    assert "\n32-true, 16-mixed, bf16-mixed\n" in said
    assert "\n16-true, bf16-true\n" in said
    assert "fewest devices that fit: 2, with fsdp" in said
    assert "fewest devices that fit: 1, with single_device" in said
    assert "\nfsdp also gathers one block at a time, whose size --params does not show.\n" in said
    line = next(" ".join(line.split()) for line in said.splitlines() if line.startswith("  fsdp"))
    assert line == "fsdp 2 1.9 GiB 1.9 GiB 3.7 GiB - - - 7.5 GiB 5.6 GiB fits"


def test_the_usual_precisions_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate_command(["--params", "1B", "--memory", "12GiB"], check_names) == 0
    said = capsys.readouterr().out
    assert "\n32-true, 16-mixed, bf16-mixed\n" in said
    assert said.endswith(
        "--precision all also shows 16-true and bf16-true, which keep the parameters themselves in 16 bits.\n"
    )
    assert len(said.splitlines()) < 30


@pytest.mark.parametrize(("arguments", "said"), [
    (["none.py"], "the script 'none.py' does not exist; pass the path of a .py file, or the name of a module."),
    (["nonesuch.module"], "neither a script nor a module 'nonesuch.module' was found"),
    (["bert-base-cased"], "Models of a hub are not fetched: name a function that returns one, or pass --params."),
    (["net.py:Data"], "Data cannot be called with --args {} (Data.__init__() missing"),
    (["net.py:Nett"], "net.py has no 'Nett'. It defines Net, Reads. Did you mean 'Net'?"),
    (["net.py"], "net.py defines Net, Reads; add the class, or a function that returns it: net.py:NAME."),
    (["net.py:Net"], "Net cannot be called with --args {} (Net.__init__() missing 1 required positional argument"),
    (["net.py:Net", "--args", '{"widht": 2}'],
     "got an unexpected keyword argument 'widht'). Pass all of its arguments, such as '{\"width\": 512}'"),
    (["net.py:Net", "--args", "width=2"], "--args width=2 is not JSON"),
    (["net.py:made", "--args", "{}"], "--args {} was passed, but made is a module already. Omit --args"),
    (["net.py:Net", "--args", "[2]"], "--args [2] is not an object. Pass one such as"),
    (["net.py:Net", "--args", '{"width": "wide"}'], "Net cannot be called with --args {"),
    (["net.py:Reads"], "Reads cannot be made on the meta device, whose tensors have no values (RuntimeError"),
    (["net.py:number"], "number cannot be called with --args {} ('int' object is not callable)."),
    (["json:dumps", "--args", '{"obj": 1}'], "dumps returned a str; name a torch module"),
    (["fails.py"], "the import of fails.py failed (SystemExit: 3). Put its work under"),
    (["net.py:small", "--params", "3"], "pass either SCRIPT_OR_MODULE[:CLASS] or --params N."),
    ([], "pass either SCRIPT_OR_MODULE[:CLASS] or --params N."),
    (["--params", "9e18"], "--params 9e18: expected at most 1e+18 parameters, such as 7e9 or 7B."),
    (["bad.py"], "the import of bad.py failed (ValueError: a wrong number). Put its work under"),
    (["--params", "1", "--devices", "8", "--strategies", "single_device"], "selects nothing: single_device is"),
    (["--params", "many"], "--params many: expected a number such as 7e9 or 7B."),
    (["--params", "1", "--memory", "80GiBs"], "--memory 80GiBs: expected a number such as 80GiB."),
    (["--params", "1", "--devices", "1,x"], "--devices x: expected integers of at least 1, separated by commas."),
    (["--params", "1", "--strategies", "dpd"], "--strategies dpd: choose from single_device, ddp,"),
    (["--params", "1", "--precision", "bf17"], "precision='bf17' is unknown; choose from 64-true, 32-true,"),
    (["--params", "1", "--optimizer", "Adamw"], "Did you mean 'AdamW'?"),
    (["net.py:Reads"], "must not read data or values. Read data in setup() or in the loaders, and pass sizes that depend"),
    (["--params", "1", "--mesh", "replicate=2,shards=4"], "the axis 'shards' is unknown; choose from replicate, shard, "),
    (["--params", "1", "--mesh", "replicate=2,shards=4"], "Did you mean 'shard'?"),
    (["--params", "1", "--mesh", "data=2,context=4"], "the axis 'context' is not supported, because "),
    (["--params", "1", "--mesh", "replicate=2,tensor=4"], "has not the axes of one pair. Pass {'replicate': 2, 'shard': 2}"),
    (["--params", "1", "--mesh", "replicate=0,shard=4"], "data=D,tensor=T (layers that T ranks divide), with integers of "),
    (["--params", "1", "--mesh", "shard=2,shard=4"], "--mesh shard=2,shard=4 is not a mesh; pass replicate=R,shard=S"),
    (["--params", "1", "--mesh", "replicate=2,shard=4", "--tensor-plan", '{"up": "colwise"}'],
     "--tensor-plan is for a mesh with tensor ranks. Pass --mesh data=2,tensor=2 too."),
    (["net.py:block", "--mesh", "data=2,tensor=4", "--tensor-plan", '{"up": "colwise"}'],
     "tensor_plan['up'] matches no submodule of"),
    (["--params", "1", "--mesh", "data=2,tensor=4", "--tensor-plan", "null"], "--tensor-plan null names no layer. Pass"),
    (["--params", "1", "--mesh", "data=2,tensor=4", "--tensor-plan", "up"], "--tensor-plan up is not JSON ("),
    (["--params", "1", "--mesh", "replicate=2,shard=4", "--ranks", "16"],
     "--mesh replicate=2,shard=4 is for 8 ranks, the product, but --ranks is 16. Change one."),
    (["net.py:small", "--batch", "8y4"], "--batch 8y4: '8y4' is not the shape and dtype of a tensor. Pass a batch such as"),
    (["net.py:small", "--batch", "8x5"], "--batch 8x5: the step cannot be traced in 32-true (RuntimeError: "),
    (["net.py:small", "--batch", "8x5"], "Omit --batch if the step reads values"),
])  # fmt: skip
def test_estimate_rejects_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("fails.py").write_text("import sys\nsys.exit(3)")
    Path("bad.py").write_text("raise ValueError('a wrong number')")
    with pytest.raises(SystemExit) as caught:
        estimate_command(arguments, check_names)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_weights_that_layers_share_count_once_and_an_assumed_optimizer_is_said(capsys: Any) -> None:
    Path("alone.py").write_text(
        "from torch import nn\ntied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\ntied[1].weight = tied[0].weight"
    )
    found = estimated(capsys, "alone.py:tied", "--devices", "1", "--optimizer", "LBFGS", "--precision", "all")
    assert (found["parameters"], found["optimizer_is_assumed"]) == (24, True)
    assert [each["parameters"] for each in found["rows"]] == [96, 96, 96, 48, 48]
    assert estimate_command(["--params", "9", "--optimizer", "LBFGS"], check_names) == 0
    assert "LBFGS could not be tried on these sizes. Its state is counted like Adam's" in capsys.readouterr().out
    assert not estimated(capsys, "--params", "9")["optimizer_is_assumed"]


def test_meshes_are_rows_of_fsdp_for_their_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--mesh",
        "replicate=32,shard=8",
        "--mesh",
        "data=32, tensor=8",
        "--precision",
        "32-true",
        "--optimizer",
        "Adam",
    )
    found = estimated(capsys, "net.py:block", *options, "--ranks", "256,8", "--device-memory", "80GiB")
    hybrid, tensor = (each for each in found["rows"] if each["mesh"])
    assert (hybrid["mesh"], tensor["mesh"], tensor["devices"]) == ("replicate=32,shard=8", "data=32,tensor=8", 256)
    eight = row(found, "32-true", "fsdp", 8)
    for part in ("parameters", "gradients", "optimizer", "gathered"):
        assert hybrid[part] == eight[part] > 0
    assert hybrid["sent"] == eight["sent"] + 2 * hybrid["gradients"] * 31 // 32
    local = 4 * (2 * 125 * 64 + 1000)  # the bias is whole
    assert tensor["parameters"] == local / 32
    assert tensor["gathered"] == 2 * local
    assert tensor["sent"] == 2 * local * 31 // 32
    assert {each["devices"] for each in estimated(capsys, "net.py:block", *options)["rows"]} == {256}
    assert estimate_command(["net.py:block", *options], check_names) == 0
    said = capsys.readouterr().out
    assert (
        "\nAssumed: tensor ranks divide the matrices of Linear and Embedding layers, and save all activations." in said
    )
    assert "\n  fsdp replicate=32,shard=8      256 " in said


def test_activations_of_a_step_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    args = (
        "--args",
        '{"width": 8, "depth": 2}',
        "--devices",
        "2",
        "--strategies",
        "ddp,fsdp",
        "--precision",
        "32-true",
    )
    plain = row(estimated(capsys, "net.py:Net", *args), "32-true", "ddp", 2)
    traced = row(estimated(capsys, "net.py:Net", *args, "--batch", "6x8"), "32-true", "ddp", 2)
    assert (plain["activations"], traced["activations"]) == (0, 3 * 4 * 6 * 8)  # the input, and two results of tanh
    assert traced["total"] - plain["total"] == traced["activations"]
    assert estimate_command(["net.py:Net", *args, "--batch", "6x8"], check_names) == 0
    said = capsys.readouterr().out
    assert "with the activations of a step of 6x8.\n" in said
    assert "`fits` means that a fifth of it is free for temporary tensors" in said
    assert estimate_command(["net.py:with_example"], check_names) == 0
    said = capsys.readouterr().out
    assert "with the activations of a forward of example_input_array, without the loss.\n" in said
    assert "  384 bytes  " in said
    assert estimate_command(["net.py:with_example", "--args", '{"shape": [6, 7]}'], check_names) == 0
    said = capsys.readouterr().out
    assert (
        "Bytes per device, without activations: the forward of example_input_array cannot be traced in 32-true (R"
        in said
    )


def test_a_plan_says_which_strategies_reject_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    found = estimated(
        capsys, "net.py:sparse", "--ranks", "4", "--precision", "32-true", "--mesh", "replicate=4,shard=1"
    )
    rejected = {each["strategy"] + each["mesh"]: each["rejected"] for each in found["rows"]}
    assert rejected.pop("ddp") == ""
    for name, reason in rejected.items():
        expected = (
            "num_replicas=4 does not divide 4 processes" if "shard" in name[4:] and "=" in name else "sparse=True"
        )
        assert expected in reason, name
    assert {each["verdict"] for each in found["rows"]} == {"fits", "rejected"}
    (double,) = estimated(
        capsys, "net.py:block", "--ranks", "2", "--precision", "64-true", "--strategies", "deepspeed_stage_2"
    )["rows"]
    assert double["rejected"].startswith("precision='64-true': DeepSpeed computes in 32 or 16 bits.")
    assert estimate_command(["net.py:block", "--optimizer", "Muon", "--ranks", "4"], check_names) == 0
    said = capsys.readouterr().out
    assert "\n  fsdp rejects it: Muon steps whole matrices, and strategy='fsdp' gives a rank only a shard" in said
    assert "ddp_sharded rejects" not in said
    assert "fewest devices that fit: 4, with ddp\n" in said

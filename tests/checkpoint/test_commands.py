"""`trainwright checkpoint`: its output, the damage that it finds, and its exports and imports."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from forked import run_python
from safetensors import safe_open
from small import ON_HOST, QUIET, Classifier, assert_equal, make_loader, weights
from torch import nn

import trainwright as tw
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.tools.checkpoints import checkpoint_command

FIXTURES = Path(__file__).parent / "fixtures"


class Tied(Classifier):
    """Its head is tied to the last layer, which comes first."""

    def __init__(self, width: int = 3, lr: float = 0.05, token: str = "hunter2") -> None:
        super().__init__(lr=lr)
        self.save_hyperparameters()
        self.head = nn.Linear(13, width)
        self.head.weight = self.net[3].weight
        self.scale = nn.Parameter(torch.tensor(0.1, dtype=torch.bfloat16))


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tied]:
    """A checkpoint of a run, and the module as it was then."""
    path = tmp_path_factory.mktemp("commands") / "a.ckpt"
    module = Tied()
    trainer = tw.Trainer(max_epochs=1, limit_train_batches=2, **QUIET)
    trainer.fit(module, make_loader())
    trainer.save_checkpoint(path)
    return path, module


@pytest.fixture
def saved(origin: tuple[Path, Tied], tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(origin[0], tmp_path / "runs" / "a.ckpt"))


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    capsys.readouterr()
    code = checkpoint_command([str(each) for each in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def brought_in(path: Path, capsys: pytest.CaptureFixture[str], source: Path) -> str:
    code, said, err = run(capsys, "import", source, path)
    assert (code, err) == (0, "")
    assert run(capsys, "verify", path)[0] == 0
    return said


def test_show_tells_what_there_is(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "show", saved)
    lines = [line.strip() for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert lines[1] == "step 2, epoch 1"
    assert lines[2] == f"written by 1 process, strategy single_device, trainwright {tw.__version__}; format 1"
    # 8*13 + 13 + 13*3 + 3 + 3 (the head's bias) + 1, of which the last is bf16
    assert lines[3] == ("model: 7 tensors (1 of them another's second name), 163 parameters and buffers, 650 bytes")
    assert lines[4].startswith("optimizer: 12 tensors, ")
    assert {"width: 3", "lr: 0.05", 'token: "(not shown)"'} < set(lines)
    assert "head.weight" not in out
    (saved / "notes \x1b[2J.txt").touch()
    code, out, _ = run(capsys, "show", saved, "--tensors")
    assert "    scale  ()  BF16\n" in out
    assert "0/net.3.bias/exp_avg  (3,)  F32" in out
    assert "notes \\x1b[2J.txt  not of the checkpoint" in out


def test_show_prints_json_for_machines(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", saved, "--json", "--tensors")
    about = json.loads(out)
    assert code == 0
    assert (about["step"], about["epoch"], about["world_size"], about["strategy"]) == (2, 1, 1, "single_device")
    assert about["sections"]["model"] == {"tensors": 7, "shared": 1, "elements": 163, "bytes": 650}
    assert about["files"] == {
        each.name: each.stat().st_size for each in sorted(saved.iterdir()) if each.name != "manifest.json"
    }
    assert about["hyper_parameters"] == {"width": 3, "lr": 0.05, "token": "(not shown)"}
    assert about["tensors"]["model"]["net.0.weight"] == {"shape": [13, 8], "dtype": "F32"}


def test_verify_names_every_bad_file(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "verify", saved)
    size = sum(each.stat().st_size for each in saved.iterdir() if each.name != "manifest.json")
    assert (code, out, err) == (0, f"{saved}: ok, step 2, 6 files, {size / 1024:.1f} KiB\n", "")
    data = bytearray((saved / "optimizer-00000.safetensors").read_bytes())
    data[-1] ^= 1
    (saved / "optimizer-00000.safetensors").write_bytes(data)
    os.truncate(saved / "state.json", 5)
    (saved / "rank-00000.json").unlink()
    (saved / "rank-00000.safetensors").unlink()
    os.mkfifo(saved / "rank-00000.safetensors")
    (saved / "notes.txt").touch()
    code, out, err = run(capsys, "verify", saved)
    assert code == 77
    head, *lines = out.splitlines()
    assert head == f"{saved}: BAD"
    assert [line.strip().split(" ")[0] for line in sorted(lines)] == [
        "notes.txt",
        "optimizer-00000.safetensors",
        "rank-00000.json",
        "rank-00000.safetensors",
        "state.json",
    ]
    for text in ("does not match its digest", "is missing", "is not a plain file", "has 5 bytes and should have"):
        assert sum(text in line for line in lines) == 1
    assert err == (
        f"trainwright checkpoint verify: {saved} is damaged: a file differs from what was written. Use another "
        "checkpoint, or a good copy.\n"
    )


def test_verify_goes_through_a_directory(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved.parent
    shutil.copytree(saved, folder / "b.ckpt")
    shutil.copytree(saved, folder / "without-suffix")
    shutil.copytree(saved, folder / "unfinished.ckpt")
    (folder / "unfinished.ckpt" / "manifest.json").unlink()
    (folder / "b.ckpt" / "manifest.json").write_bytes(b"{}")
    (folder / "tensorboard").mkdir()
    (folder / "notes.txt").touch()
    code, out, err = run(capsys, "verify", folder)
    assert code == 77
    judged = [line for line in out.splitlines() if not line.startswith(" ")]
    ends = {"a.ckpt": "ok", "b.ckpt": "BAD", "unfinished.ckpt": "BAD", "without-suffix": "ok"}
    assert [(Path(line.split(": ")[0]).name, line.split(": ")[1].split(",")[0]) for line in judged] == [*ends.items()]
    assert "2 of 4 checkpoints are damaged" in err
    shutil.rmtree(folder / "b.ckpt")
    shutil.rmtree(folder / "unfinished.ckpt")
    assert run(capsys, "verify", folder)[0] == 0
    links = folder / "links.ckpt"  # neither its name nor a lost file in it makes it a checkpoint
    links.mkdir()
    (links / "model-00000.safetensors").touch()
    (links / "a").symlink_to(saved)
    assert run(capsys, "verify", links)[0] == 0


def test_an_export_is_read_by_the_safetensors_library(
    saved: Path, origin: tuple[Path, Tied], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "model.safetensors"
    code, said, err = run(capsys, "export", saved, out)
    assert (code, err) == (0, "")
    assert "head.weight is the same tensor as net.3.weight, and stored under that name" in said
    assert os.listdir(out.parent) == [out.name]
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "net.3.weight"}
    fresh = Tied()
    nn.init.zeros_(fresh.net[3].weight)
    assert safetensors.torch.load_model(fresh, out) == (set(), [])
    assert_equal(weights(fresh), weights(origin[1]))
    again = Tied.load_from_checkpoint(str(out))  # the name that is not stored is told in the file's metadata
    assert_equal(weights(again), weights(origin[1]))
    assert "7 tensors of a safetensors file" in brought_in(tmp_path / "b.ckpt", capsys, out)
    entries = open_checkpoint(str(tmp_path / "b.ckpt")).tensors("model")
    assert entries["head.weight"].pieces == entries["net.3.weight"].pieces
    before = out.read_bytes()
    code, _, err = run(capsys, "export", saved, out)
    assert (code, out.read_bytes()) == (2, before)
    assert "model.safetensors exists already and is not overwritten. Choose another name." in err
    with pytest.raises(SystemExit) as refused:
        run(capsys, "export", saved, tmp_path / "model.bin")
    assert refused.value.code == 2


@pytest.mark.host
def test_an_export_can_change_names_and_dtypes(
    saved: Path, origin: tuple[Path, Tied], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    renamed = ["--strip-prefix", "net.", "--prefix", "model.", "--dtype", "bf16"]
    code, said, _ = run(capsys, "export", saved, tmp_path / "a.safetensors", *renamed)
    assert code == 0
    assert "without 'net.', skipped: head.bias, head.weight, scale" in said
    loaded = safetensors.torch.load_file(tmp_path / "a.safetensors")
    expected = {f"model.{name}": value.bfloat16() for name, value in origin[1].net.state_dict().items()}
    assert_equal(dict(loaded), expected)
    code, _, _ = run(capsys, "export", saved, tmp_path / "b.safetensors", "--section", "optimizer")
    moments = safetensors.torch.load_file(tmp_path / "b.safetensors")
    assert code == 0
    assert moments["0/net.0.weight/exp_avg"].shape == (13, 8)
    code, _, err = run(capsys, "export", saved, tmp_path / "c.safetensors", "--strip-prefix", "nett.")
    assert code == 77
    assert "has no tensor whose name begins with 'nett.'; its names are for example scale, net.0.weight" in err
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors", "runs"]


def test_a_damaged_checkpoint_is_not_exported(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(saved / "model-00000.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    code, _, err = run(capsys, "export", saved, tmp_path / "a.safetensors")
    assert code == 77
    assert err.count("\n") == 1
    assert "model-00000.safetensors does not match its digest: it is damaged. Use another checkpoint" in err
    assert os.listdir(tmp_path) == ["runs"]


LARGE = """
import sys
from pathlib import Path
import torch
from trainwright.checkpoint.contents import collect
from trainwright.checkpoint.conversion import export_safetensors
from trainwright.checkpoint.tensors import Piece
from trainwright.checkpoint.store import write_checkpoint
from trainwright.checkpoint.weight_files import ExportSettings
from trainwright.distributed.ranks import Ranks

big = torch.arange(12 << 20, dtype=torch.float32)
pieces = [Piece(name, (12 << 20,), 0, tensor) for name, tensor in (("a", big), ("b", big + 1))]
write_checkpoint("large.ckpt", lambda: collect({"model": pieces}, {}, None, 0, 1), {"step": 0, "epoch": 0}, Ranks())
del big, pieces
torch.zeros(1).bfloat16()
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
before = peak()
export_safetensors("large.ckpt", "large.safetensors", settings=ExportSettings(dtype=torch.bfloat16))
print((peak() - before) // 1024)
"""


def test_an_export_never_holds_a_model(tmp_path: Path) -> None:
    done = run_python("-c", LARGE, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 40  # MiB, while the two tensors are 96
    with safe_open(tmp_path / "large.safetensors", "pt") as file:
        expected = torch.arange(12 << 20, dtype=torch.float32).add_(1).bfloat16()
        assert torch.equal(file.get_tensor("b"), expected)


def test_weights_come_in_from_files_of_others(origin: tuple[Path, Tied], tmp_path: Path, capsys: Any) -> None:
    module = origin[1]
    torch.save(module.state_dict(), tmp_path / "a.pt")
    halves = [dict(list(module.state_dict().items())[:3]), dict(list(module.state_dict().items())[3:])]
    for index, half in enumerate(halves):
        safetensors.torch.save_file(
            {name: value.clone() for name, value in half.items()}, tmp_path / f"{index}.safetensors"
        )
    places = {name: f"{index}.safetensors" for index, half in enumerate(halves) for name in half}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for kind, name in (("state_dict", "a.pt"), ("safetensors", "model.safetensors.index.json")):
        path = tmp_path / f"{kind}.ckpt"
        assert f"7 tensors of a {kind} file, 0 hyper-parameters" in brought_in(path, capsys, tmp_path / name)
        assert f"imported from a file of kind {kind}" in run(capsys, "show", path)[1]
        assert_equal(weights(Tied.load_from_checkpoint(str(path))), weights(module))
        tested = Tied()
        result = tw.Trainer(**QUIET).test(tested, make_loader(), ckpt_path=path, verbose=False)
        assert_equal(weights(tested), weights(module))
        assert result == tw.Trainer(**QUIET).test(module, make_loader(), verbose=False)
        accelerator = tw.Accelerator(cpu=ON_HOST)
        other = accelerator.prepare(Tied())
        accelerator.load_state(str(path), weights_only=True)
        assert_equal(weights(other), weights(module))
        with pytest.raises(tw.CheckpointError, match="holds weights only, so a run cannot be resumed from it"):
            tw.Trainer(max_epochs=1, **QUIET).fit(Tied(), make_loader(), ckpt_path=path)


def test_a_lightning_checkpoint_comes_in_with_its_hyper_parameters(tmp_path: Path, capsys: Any) -> None:
    said = brought_in(tmp_path / "in.ckpt", capsys, FIXTURES / "lightning.ckpt")
    assert "of a lightning file, 4 hyper-parameters" in said
    checkpoint = open_checkpoint(str(tmp_path / "in.ckpt"))
    assert (checkpoint.step, checkpoint.epoch) == (2, 0)
    state = checkpoint.run_state()
    assert state["hyper_parameters"] == {"width": 3, "lr": 0.1, "layers": (3, 4), "config": {"a": 1}}
    assert state["datamodule_hyper_parameters"] == {"batch_size": 4}

    class Net(tw.Module):
        def __init__(self, width: int, lr: float, layers: Any, config: Any) -> None:
            super().__init__()
            assert (width, lr, layers, config) == (3, 0.1, (3, 4), {"a": 1})
            self.net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))

    loaded = Net.load_from_checkpoint(str(tmp_path / "in.ckpt"))
    assert_equal(weights(loaded), weights(Net.load_from_checkpoint(str(FIXTURES / "lightning.ckpt"))))
    code, _, err = run(capsys, "import", FIXTURES / "lightning.ckpt", tmp_path / "in.ckpt")
    assert code == 2
    assert "in.ckpt exists already" in err


def put(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(("content", "message"), [
    ({"weight_map": {"w": "../outside.safetensors"}}, r"names the file '\.\./outside\.safetensors'; expected names"),
    ({"weight_map": {"w": "/etc/passwd"}}, "names the file '/etc/passwd'"),
    ({"weight_map": {"w": "a.index.json"}}, r"names the file 'a\.index\.json'"),
    ({"weight_map": {"w": "absent.safetensors"}}, r"absent\.safetensors does not exist"),
    ({"weight_map": {"v": "there.safetensors"}}, r"there\.safetensors has no 'v', though the index lists it there"),
    ({"weight_map": {"w": 3}}, 'has no "weight_map" of tensors and files'),
    ([], 'has no "weight_map"'),
    ('{"weight_map": {"w": "there.safetensors", "w": "there.safetensors"}}', "a key comes twice"),
    ("[" * 10**6, "is not valid JSON"),
])  # fmt: skip
def test_an_index_that_leads_elsewhere_is_refused(content: Any, message: str, tmp_path: Path, capsys: Any) -> None:
    safetensors.torch.save_file({"w": torch.ones(1)}, tmp_path / "there.safetensors")
    code, _, err = run(capsys, "import", put(tmp_path / "a.index.json", content), tmp_path / "out.ckpt")
    assert code == 77
    assert err.count("\n") == 1
    with pytest.raises(tw.CheckpointError, match=message):
        raise tw.CheckpointError(err)
    assert not (tmp_path / "out.ckpt").exists()


def test_bad_input_is_one_line_and_an_exit_code(saved: Path, tmp_path: Path) -> None:
    """In separate processes, because scripts depend on the exit code."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("text")
    (tmp_path / "bad" / "cut").mkdir(parents=True)
    (tmp_path / "bad" / "cut" / "model-00000.safetensors").touch()
    torch.save({}, tmp_path / "empty.pt")
    calls = [
        (2, [], "the following arguments are required: COMMAND"),
        (2, ["frob"], "invalid choice: 'frob' (choose from 'show', 'verify', 'export', 'import')"),
        (2, ["export", str(saved), "x.safetensors", "--dtype", "int8"], "invalid choice: 'int8'"),
        (77, ["show", "absent"], "absent is not a checkpoint: it does not exist. Give the directory of a checkpoint."),
        (
            77,
            ["verify", "absent"],
            "absent is not a checkpoint: it does not exist. Give the directory of a checkpoint.",
        ),
        (77, ["show", "file"], "it is a file, and a checkpoint is a directory."),
        (2, ["verify", "."], "there is no checkpoint in .. Pass a checkpoint, or the folder of several."),
        (77, ["verify", "bad/cut"], "bad/cut is damaged: a file differs from what was written."),
        (77, ["import", "pipe", "out.ckpt"], "pipe is a pipe or a device, not a file; expected a directory"),
        (77, ["import", "file", "out.ckpt"], "file is not a checkpoint: it begins with b'text'; expected"),
        (77, ["import", "empty.pt", "out.ckpt"], "empty.pt has no tensor. Pass a file with the weights of a model."),
        (2, ["export", str(saved), "x.pt"], "does not end in .safetensors"),
        (77, ["export", str(saved), "file/x.safetensors"], "the directory cannot be made (NotADirectoryError"),
    ]
    script = (
        "import sys, json\nfrom trainwright.__main__ import main\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    sys.argv[1:] = ['checkpoint', *arguments]\n"
        "    try:\n        code = main()\n    except SystemExit as exit:\n        code = exit.code\n"
        "    print(code, file=sys.stderr)\n"
    )
    done = run_python("-c", script, json.dumps([arguments for _, arguments, _ in calls]), folder=tmp_path)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("See `trainwright checkpoint")]
    assert len(lines) == 2 * len(calls), done.stderr
    for (code, arguments, message), line, found in zip(calls, lines[::2], lines[1::2], strict=True):
        assert int(found) == code, (arguments, line)
        assert message in line
        assert line.startswith("trainwright checkpoint")
    done = run_python("-m", "trainwright", "checkpoint", "verify", tmp_path / "absent")
    assert done.returncode == 77
    assert "absent is not a checkpoint: it does not exist" in done.stderr
    assert "Traceback" not in done.stderr

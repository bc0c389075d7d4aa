"""Checkpoints made to do harm: nothing in them is executed, imported or unpickled, and nothing beside them is opened."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreters import run_command
from small import QUIET, make_loader

import trainwright as tw

pytestmark = pytest.mark.launch

VICTIM = """
import json, os, resource, signal, sys
from pathlib import Path

sys.dont_write_bytecode = True
sys.path[:0] = json.loads(sys.argv[2])
import torch
import trainwright as tw
from trainwright.checkpoint.foreign_formats import read_weights
from trainwright.checkpoint.reader import candidates, examine
from trainwright.tools.checkpoints import summary
from trainwright.checkpoint.discovery import find_checkpoints, is_checkpoint
from trainwright.checkpoint.reader import open_checkpoint
from test_hostile import Net
from small import QUIET, make_loader

seen, root, armed = [], "", False
WATCHED = ("exec", "compile", "import", "pickle", "marshal", "subprocess", "os.", "shutil.", "socket.", "ctypes.", "code.",
           "builtins.input", "glob.", "tempfile.", "mmap", "http", "urllib", "ftplib", "sqlite3", "syslog", "fcntl", "signal.")
HARMLESS = ("os.scandir", "os.listdir")

def watch(event, arguments):
    if not armed:
        return
    if event in HARMLESS or event == "open":
        place = os.fspath(arguments[0]) if not isinstance(arguments[0], int) else root
        place = place.decode() if isinstance(place, bytes) else place
        writes = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        # A parent is listed to find the checkpoints in it; files are opened inside of the checkpoint alone.
        allowed = place == root or place.startswith(root + "/") or (event in HARMLESS and place == os.path.dirname(root))
        if writes or not allowed or ".." in place or os.path.realpath(place) != place:
            seen.append(f"{event} {place}")
    elif event.startswith(WATCHED):
        seen.append(f"{event} {str(arguments)[:200]}")

def read(path):
    for verify in ("full", "size", "off"):
        checkpoint = open_checkpoint(path, verify)
        checkpoint.check_layout()
        for section in checkpoint.sections:
            for name in checkpoint.tensors(section):
                checkpoint.read_tensor(section, name)
        checkpoint.run_state()
        for rank in range(min(checkpoint.world_size, 3)):
            checkpoint.rank_state(rank)
        summary(checkpoint)

def look(path):
    find_checkpoints(os.path.dirname(path)), is_checkpoint(path), candidates(path)
    if problems := examine(path).problems:
        raise tw.CheckpointError("; ".join(problems))

def weights(path):
    read_weights(path)

def build(path):
    Net.load_from_checkpoint(path)

def fit(path):
    tw.Trainer(max_epochs=2, limit_train_batches=1, **QUIET).fit(Net(), make_loader(), ckpt_path=path)

def test(path):
    tw.Trainer(limit_test_batches=1, **QUIET).test(Net(), make_loader(), ckpt_path=path, verbose=False)

def attempt(load, path):
    try:
        load(path)
        return ["loaded", ""]
    except Exception as error:
        return [type(error).__name__, str(error)[:300]]

LOADS = {each.__name__: each for each in (read, look, weights, build, fit, test)}
folder = Path(sys.argv[1])
for name in ("good.ckpt", "bad.ckpt", "good.pt", "bad.pt", "good.safetensors", "bad.safetensors"):
    for load in LOADS.values():  # what is imported when it is first used is imported now
        attempt(load, str(folder / "warm" / name / "a.ckpt" if name.endswith(".ckpt") else folder / "warm" / name))
tw.rank_zero_warn("the first warning makes a lock for tqdm's bars")
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), resource.RLIM_INFINITY))
def run(load, place):
    global root, armed
    root = str(place / "a.ckpt")
    seen.clear()
    signal.alarm(20)  # ends the process: a load that waits for a pipe is a failure
    armed = True
    outcome = attempt(load, root)
    armed = False
    signal.alarm(0)
    return outcome

sys.addaudithook(watch)
usual = {name: (run(load, folder / "warm" / "good.ckpt"), set(seen))[1] for name, load in LOADS.items()}  # of the machine
found = {}
for case in sorted(os.listdir(folder / "cases")):
    found[case] = {}
    for name, load in LOADS.items():
        outcome = run(load, folder / "cases" / case)
        found[case][name] = [*outcome, [each for each in seen if each not in usual[name]]]
found["usual"] = sorted({each for events in usual.values() for each in events})
print(json.dumps(found))
"""


class Net(tw.Module):
    """The module that loads the checkpoints. It accepts any state."""

    def __init__(self, width: int = 3, **kwargs: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(8, width)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Planted:
    """What a hostile pickle would run."""

    def __reduce__(self) -> Any:
        return os.system, ("touch planted",)


def forge(path: Path, files: dict[str, bytes] | None = None, change: Callable[[Any], Any] = lambda body: None) -> None:
    """Replace files and change the manifest, with digests that fit: an attacker can hash too."""
    body = json.loads((path / "manifest.json").read_bytes())["manifest"]
    for name, data in (files or {}).items():
        (path / name).unlink(missing_ok=True)
        (path / name).write_bytes(data)
        body["files"][name] = [len(data), hashlib.sha256(data).hexdigest()]
    changed = change(body)
    text = changed if isinstance(changed, bytes) else json.dumps(body).encode()
    (path / "manifest.json").write_bytes(
        b'{"sha256": "%s", "manifest": %s}\n' % (hashlib.sha256(text).hexdigest().encode(), text)
    )


def state(path: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads((path / "state.json").read_text())
    changed = change(content)
    forge(path, {"state.json": changed if isinstance(changed, bytes) else json.dumps(content).encode()})


M = "model-00000.safetensors"


def renamed(name: str, record: Callable[[Any], Any] = lambda old: old) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path.parent / "outside.json").write_bytes((path / "state.json").read_bytes())
        forge(path, change=lambda body: body["files"].__setitem__(name, record(body["files"].pop("state.json"))))

    return change


def tensor(**changed: Any) -> Callable[[Path], None]:
    return lambda path: forge(path, change=lambda body: body["sections"]["model"]["net.weight"].update(changed))


def replaced(name: str, make: Callable[[Path, bytes], Any]) -> Callable[[Path], None]:
    """Put something that is no plain file in the place of one."""

    def change(path: Path) -> None:
        data = (path / name).read_bytes()
        (path / name).unlink()
        make(path / name, data)

    return change


def link_outside(place: Path, data: bytes) -> None:
    outside = place.parents[1] / "outside"
    outside.write_bytes(data)
    place.symlink_to(outside)


def bind(place: Path, data: bytes) -> None:
    here = os.getcwd()
    os.chdir(place.parent)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(place.name)
    finally:
        os.chdir(here)


def header(table: Any, data: bytes = bytes(108)) -> Callable[[Path], None]:
    """Give the model's file another table, as bytes or JSON."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return lambda path: forge(path, {M: len(text).to_bytes(8, "little") + text + data})


def entry(*offsets: int, shape: Any = (3, 8), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def with_state(**items: Any) -> Callable[[Path], None]:
    return lambda path: state(path, lambda content: content.update(items))


def file_of(write: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Make the checkpoint a file in place of a directory."""

    def change(path: Path) -> None:
        shutil.rmtree(path)
        write(path)

    return change


def nested_in_each_other(path: Path) -> None:
    """Write 2 KB of lists that contain the next list twice."""
    content: list[Any] = []
    for _ in range(200):
        content = [content, content]
    torch.save({"state_dict": {}, "hyper_parameters": {"x": content}}, path)


def write_sparse(path: Path) -> None:
    text = json.dumps({"w": entry(0, 1 << 42, shape=(1 << 40,))}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + (1 << 42))


COLLIDING: list[Any] = [{"$int": hex(number * sys.hash_info.modulus)} for number in range(50_000)]
RUN = {"_target_": "os.system", "_args_": ["touch planted"]}
REFUSED: dict[str, Callable[[Path], None]] = {
    "name-parent": renamed("../outside.json"),
    "name-absolute": renamed("/etc/passwd", lambda old: [os.path.getsize("/etc/passwd"), old[1]]),
    "name-nested": renamed("deep/state.json"),
    "name-dots": renamed(".."),
    "name-null": renamed("a\0b"),
    "name-of-piece": tensor(pieces=[["../outside", "net.weight", 0, 24]]),
    "link-state": replaced("state.json", link_outside),
    "link-model": replaced(M, link_outside),
    "link-manifest": replaced("manifest.json", link_outside),
    "link-to-endless": replaced("state.json", lambda place, data: place.symlink_to("/dev/zero")),
    "link-manifest-endless": replaced("manifest.json", lambda place, data: place.symlink_to("/dev/zero")),
    "directory-for-state": replaced("state.json", lambda place, data: place.mkdir()),
    "link-to-directory": replaced(M, lambda place, data: place.symlink_to("/etc")),
    "pipe-state": replaced("state.json", lambda place, data: os.mkfifo(place)),
    "pipe-model": replaced(M, lambda place, data: os.mkfifo(place)),
    "pipe-manifest": replaced("manifest.json", lambda place, data: os.mkfifo(place)),
    "pipe-whole": file_of(os.mkfifo),
    "socket-state": replaced("state.json", bind),
    "shape-huge": tensor(shape=[1 << 40, 1 << 20]),
    "shape-huge-and-none": tensor(shape=[0, 1 << 61, 1 << 61], pieces=[]),
    "shape-negative": tensor(shape=[-3, -8]),
    "shape-long": tensor(shape=[1] * 10**5),
    "shape-float": tensor(shape=[3e300, 8]),
    "count-huge": tensor(pieces=[[M, "net.weight", 0, 1 << 61]]),
    "count-many": tensor(pieces=[[M, "net.weight", 0, 0]] * 10**4),
    "world-huge": lambda path: forge(path, change=lambda body: body["header"].update(world_size=1 << 70)),
    "nested-manifest": lambda path: forge(path, change=lambda body: b"[" * 10**6 + b"]" * 10**6),
    "nested-objects": lambda path: forge(path, change=lambda body: b'{"a":' * 10**6 + b"1" + b"}" * 10**6),
    "nested-state": lambda path: state(path, lambda content: b"[" * 10**6 + b"]" * 10**6),
    "nested-deeper": lambda path: state(path, lambda content: b'{"a":' * 500 + b"1" + b"}" * 500),
    "nested-header": header(b"[" * 10**6 + b"]" * 10**6),
    "integer-huge": lambda path: forge(path, change=lambda body: b"9" * 10**6),
    "integer-huge-state": lambda path: state(path, lambda content: b'{"seed": ' + b"9" * 10**6 + b"}"),
    "keys-twice": lambda path: state(path, lambda content: b'{"seed": 1, "seed": 2}'),
    "keys-twice-manifest": lambda path: forge(
        path, change=lambda body: json.dumps(body).encode()[:-1] + b', "files": {}}'
    ),
    "keys-twice-header": header(b'{"net.weight": 1, "net.weight": 2}'),
    "not-a-number": lambda path: state(path, lambda content: b'{"seed": NaN}'),
    "not-text": lambda path: state(path, lambda content: b"\xff\xfe"),
    "no-dict": lambda path: state(path, lambda content: b"[1]"),
    "hashes-equal-set": with_state(seed={"$set": COLLIDING}),
    "hashes-equal-dict": with_state(seed={"$dict": [[key, 0] for key in COLLIDING]}),
    "class": with_state(callbacks={"$class": "os.system"}),
    "object": with_state(extra={"$object": "subprocess.Popen", "args": ["touch", "planted"]}),
    "import": with_state(seed={"$import": "antigravity"}),
    "dtype": with_state(seed={"$dtype": "load"}),
    "device": with_state(seed={"$device": "__import__('os')"}),
    "tensor-of-nowhere": with_state(seed={"$tensor": "../../etc/passwd"}),
    "length-huge": lambda path: forge(path, {M: (1 << 62).to_bytes(8, "little") + b"{}"}),
    "offsets-apart": header({"net.weight": entry(12, 108), "net.bias": entry(0, 8, shape=(2,))}),
    "offsets-over": header({"net.weight": entry(0, 96), "net.bias": entry(90, 102, shape=(3,))}, bytes(102)),
    "offsets-beyond": header({"net.weight": entry(0, 1 << 50), "net.bias": entry(1 << 50, (1 << 50) + 12, shape=(3,))}),
    "header-shape": header(
        {"net.weight": entry(0, 96, shape=(1 << 40, 1 << 40)), "net.bias": entry(96, 108, shape=(3,))}
    ),
    "header-shape-long": header({"net.weight": entry(0, 96, shape=[1 << 61] * 300_000)}),
    "header-dtype": header({"net.weight": entry(0, 96, dtype="OBJECT"), "net.bias": entry(96, 108, shape=(3,))}),
    "header-none": header({}, b""),
    "pickle": file_of(lambda path: torch.save({"state_dict": {}, "hyper_parameters": {"x": Planted()}}, path)),
    "pickle-of-nested-lists": file_of(nested_in_each_other),
    "safetensors-sparse": file_of(write_sparse),
    "pickle-bare": file_of(lambda path: torch.save(Planted(), path, _use_new_zipfile_serialization=False)),
    "pickle-as-state": lambda path: torch.save(Planted(), path / "state.json"),
    "safetensors-length": file_of(lambda path: path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")),
    "safetensors-nested": file_of(lambda path: path.write_bytes((10**6).to_bytes(8, "little") + b'{"a":' * 200_000)),
    "safetensors-shape": file_of(
        lambda path: path.write_bytes(
            (len(text := json.dumps({"w": entry(0, 4, shape=(1 << 40,))}).encode())).to_bytes(8, "little")
            + text
            + b"aaaa"
        )
    ),
}
"""Every load rejects them with a CheckpointError."""
PLAIN: dict[str, Callable[[Path], None]] = {
    "target": with_state(hyper_parameters=RUN, hparams_name="kwargs"),
    "instantiator": with_state(
        hyper_parameters={"_instantiator": "os.system", "_class_path": "subprocess.Popen", "width": 3},
        hparams_name="kwargs",
    ),
    "name-of-an-argument": with_state(
        hyper_parameters={"width": 3}, hparams_name="__import__('os').system('touch planted')"
    ),
    "target-of-a-callback": with_state(
        callbacks={"os.system": RUN, "ModelCheckpoint": {"best_model_path": "/etc/passwd"}}
    ),
    "path": with_state(mine={"$path": "/etc/passwd"}),
    "strategy": lambda path: forge(path, change=lambda body: body["header"].update(strategy="os:system")),
    "number": lambda path: forge(path, change=lambda body: body["header"].update(number="os.system", weights_only=[])),
    "more-keys": lambda path: forge(path, change=lambda body: body.update(later={"$class": "os.system"})),
}
"""What they say is data like any other, and is taken as that."""


def write_warm(folder: Path, good: Path) -> None:
    """Write a good and a bad checkpoint of every kind. All loaders read them before the hook is set."""
    folder.mkdir()
    for name in ("good.ckpt", "bad.ckpt"):
        shutil.copytree(good, folder / name / "a.ckpt")
    forge(folder / "bad.ckpt" / "a.ckpt", {M: b"12345678"})
    torch.save({"state_dict": Net().state_dict(), "hyper_parameters": {}}, folder / "good.pt")
    torch.save(Planted(), folder / "bad.pt")
    import safetensors.torch

    safetensors.torch.save_file(Net().state_dict(), folder / "good.safetensors")
    (folder / "bad.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of all loads of all checkpoints, in a new process with an audit hook."""
    folder = tmp_path_factory.mktemp("hostile").resolve()
    trainer = tw.Trainer(max_epochs=1, limit_train_batches=1, **QUIET)
    trainer.fit(Net(), make_loader())
    trainer.save_checkpoint(folder / "good.ckpt")
    write_warm(folder / "warm", folder / "good.ckpt")
    for name, harm in {**REFUSED, **PLAIN}.items():
        shutil.copytree(folder / "good.ckpt", folder / "cases" / name / "a.ckpt")
        harm(folder / "cases" / name / "a.ckpt")
    places = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    before = {each for each in folder.rglob("*") if "cases" in each.parts}
    (folder / "here").mkdir()
    command = [sys.executable, "-c", VICTIM, folder, json.dumps(places)]
    done = run_command(command, folder=folder / "here", seconds=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert os.listdir(folder / "here") == []
    assert {each for each in folder.rglob("*") if "cases" in each.parts} == before
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def found(outcomes: dict[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """The same events, except the events of a good checkpoint's load."""
    assert all("open /sys/fs/cgroup/" in each for each in outcomes["usual"]), outcomes["usual"]
    return {case: loads for case, loads in outcomes.items() if case != "usual"}


def test_nothing_is_executed_imported_unpickled_or_opened_outside(found: dict[str, dict[str, list[Any]]]) -> None:
    assert found.keys() == REFUSED.keys() | PLAIN.keys()
    seen = {
        f"{case} {load}": events for case, loads in found.items() for load, (_, _, events) in loads.items() if events
    }
    assert seen == {}


def test_what_is_wrong_is_refused_as_a_checkpoint(found: dict[str, dict[str, list[Any]]]) -> None:
    other = {
        f"{case} {load}": f"{kind}: {text}"
        for case in REFUSED
        for load, (kind, text, _) in found[case].items()
        if kind != "CheckpointError"
    }
    assert other == {}


def test_what_is_plain_is_taken_as_plain(found: dict[str, dict[str, list[Any]]]) -> None:
    other = {
        f"{case} {load}": f"{kind}: {text}"
        for case in PLAIN
        for load, (kind, text, _) in found[case].items()
        if kind != "loaded"
    }
    assert other == {}

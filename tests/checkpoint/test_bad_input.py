"""Bad input is rejected before a run changes anything. The message has the value, the accepted values and a remedy."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_python
from small import QUIET, Classifier, assert_equal, make_loader, weights
from torch import nn

import trainwright as tw

FIXTURES = Path(__file__).parent / "fixtures"


class Watched(Classifier):
    """Notes whether anything was trained."""

    def __init__(self, hidden: int = 13, extra: bool = False) -> None:
        super().__init__()
        self.is_trained = False
        self.net = nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, 3))
        if extra:
            self.more = nn.Linear(2, 5)

    def on_train_batch_start(self, *_: Any) -> None:
        self.is_trained = True


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("origin") / "a.ckpt"
    trainer = tw.Trainer(max_epochs=1, limit_train_batches=2, **QUIET)
    trainer.fit(Watched(), make_loader())
    trainer.save_checkpoint(path)
    return path


def newer(path: Path) -> Path:
    body = json.loads((path / "manifest.json").read_bytes())["manifest"]
    body["format_version"] = 7
    text = json.dumps(body).encode()
    digest = hashlib.sha256(text).hexdigest().encode()
    (path / "manifest.json").write_bytes(b'{"sha256": "%s", "manifest": %s}\n' % (digest, text))
    return path


def flipped(path: Path) -> Path:
    with open(path / "model-00000.safetensors", "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\x5a")
    return path


def made(path: Path, content: bytes | None) -> Path:
    shutil.rmtree(path)
    path.mkdir() if content is None else path.write_bytes(content)
    return path


CASES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda path: path / "absent",
        r"absent is not a checkpoint: it does not exist\. Give the directory of a checkpoint\."),
    "empty directory": (lambda path: made(path, None),
        r"it has no manifest\.json that is a plain file\. Either its save never finished"),
    "file": (lambda path: made(path, b"text"),
        r"is not a checkpoint: it is a file, and a checkpoint is a directory\. The .*`trainwright checkpoint import`"),
    "Lightning's": (lambda path: FIXTURES / "lightning.ckpt",
        r"lightning\.ckpt is not a checkpoint: it is a file, .*load_from_checkpoint, and converted by"),
    "damaged": (flipped,
        r"model-00000\.safetensors does not match its digest: it is damaged\. Use another checkpoint, or a good copy"),
    "newer": (newer,
        r"format version 7; this trainwright reads version 1\. Install a trainwright that reads version 7"),
}  # fmt: skip


@pytest.mark.parametrize("call", ["fit", "test"])
@pytest.mark.parametrize("case", CASES)
def test_an_unusable_path_changes_neither_weights_nor_folder(
    case: str, call: str, origin: Path, tmp_path: Path
) -> None:
    make, message = CASES[case]
    path = make(Path(shutil.copytree(origin, tmp_path / "a.ckpt")))
    module = Watched()
    before = weights(module)
    saving = tw.ModelCheckpoint(tmp_path / "runs")
    trainer = tw.Trainer(max_epochs=2, callbacks=[saving], **{**QUIET, "enable_checkpointing": True})
    with pytest.raises(tw.CheckpointError, match=message):
        getattr(trainer, call)(module, make_loader(), ckpt_path=path)
    assert not module.is_trained
    assert_equal(weights(module), before)
    assert [each for each in tmp_path.rglob("*.ckpt") if each != tmp_path / "a.ckpt"] == []


@pytest.mark.parametrize(("module", "message"), [
    (lambda: Watched(hidden=7),
     r"other shape: net\.0\.weight \(13, 8\) there, \(7, 8\) here, net\.0\.bias \(13,\) there, \(7,\) here"),
    (lambda: Watched(extra=True), r"not in it: more\.bias \(5,\), more\.weight \(5, 2\)\)\. Build the model that was"),
    (lambda: Classifier(),
     r"not in it: net\.3\.bias \(3,\), net\.3\.weight \(3, 13\); only in it: net\.2\.bias \(3,\), net\.2\.weight"),
])  # fmt: skip
def test_a_model_with_other_parameters_is_rejected(module: Callable[[], tw.Module], message: str, origin: Path) -> None:
    model = module()
    before = weights(model)
    with pytest.raises(tw.CheckpointError, match=rf"a\.ckpt: it is of another model \(.*{message}"):
        tw.Trainer(max_epochs=2, **QUIET).fit(model, make_loader(), ckpt_path=origin)
    assert_equal(weights(model), before)
    with pytest.raises(tw.CheckpointError, match=message):
        tw.Trainer(**QUIET).test(module(), make_loader(), ckpt_path=origin)


class Extra(Watched):
    """Has a part whose extra state is saved too."""

    def __init__(self, held: Any = 3) -> None:
        super().__init__()
        self.part = self.Part()
        self.part.held = held

    class Part(nn.Module):
        held: Any

        def get_extra_state(self) -> Any:
            return {"seen": self.held}

        def set_extra_state(self, state: Any) -> None:
            self.state = state


def test_extra_state_of_a_missing_part_is_rejected(tmp_path: Path) -> None:
    trainer = tw.Trainer(max_epochs=1, limit_train_batches=1, **QUIET)
    trainer.fit(Extra(), make_loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module = Watched()
    before = weights(module)
    message = r"it is of another model \(extra state only in it: part\._extra_state\)\. .* strict_loading = False"
    with pytest.raises(tw.CheckpointError, match=message):
        tw.Trainer(max_epochs=2, **QUIET).fit(module, make_loader(), ckpt_path=tmp_path / "a.ckpt")
    assert_equal(weights(module), before)
    module.strict_loading = False
    tw.Trainer(max_epochs=2, limit_train_batches=1, **QUIET).fit(module, make_loader(), ckpt_path=tmp_path / "a.ckpt")
    assert module.is_trained


class Holding(tw.Callback):
    """Keeps an object in its state, from an epoch on."""

    def __init__(self, epoch: int = 0) -> None:
        self.is_held, self.epoch = epoch == 0, epoch

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.is_held = trainer.current_epoch >= self.epoch

    def state_dict(self) -> dict[str, Any]:
        return {"best": {"model": object() if self.is_held else None}}


class HoldingModule(Watched):
    """Leaves an object among the checkpoint's contents."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["tokenizer"] = {"rule": lambda text: text}


ACCEPTED = r"expected None, bool, int, .*\. Change the state_dict or hook that returned it: return plain data instead"


def test_state_that_is_no_plain_data_is_named_and_earlier_checkpoints_stay(tmp_path: Path) -> None:
    def fit(module: tw.Module, *callbacks: tw.Callback) -> None:
        saving = tw.ModelCheckpoint(tmp_path, save_top_k=-1)
        trainer = tw.Trainer(max_epochs=3, callbacks=[*callbacks, saving], **{**QUIET, "enable_checkpointing": True})
        trainer.fit(module, make_loader())

    with pytest.raises(
        tw.CheckpointError, match=rf"state\.callbacks\.Holding\.best\.model is a builtins\.object; {ACCEPTED}"
    ):
        fit(Watched(), Holding(1))
    assert [each.name for each in tmp_path.glob("*.ckpt")] == ["epoch=0-step=11.ckpt"]
    assert not list(tmp_path.glob(".*.tmp*"))
    Watched.load_from_checkpoint(str(tmp_path / "epoch=0-step=11.ckpt"))
    untrained = Watched()
    with pytest.raises(
        tw.CheckpointError,
        match=rf"checkpoints of this run could not be written: state\.callbacks\.Holding\.best\.model is a .*; {ACCEPTED}",
    ):
        fit(untrained, Holding())
    assert not untrained.is_trained
    module = HoldingModule()
    with pytest.raises(tw.CheckpointError, match=rf"state\.tokenizer\.rule is a builtins\.function; {ACCEPTED}"):
        fit(module)
    assert [each.name for each in tmp_path.glob("*.ckpt")] == ["epoch=0-step=11.ckpt"]


OR_ELSE = r"or remove it from its state_dict \(a buffer by persistent=False\)\."
UNSTORABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.eye(2).to_sparse(),
        r"torch\.sparse_coo on cpu, but a checkpoint stores dense tensors with data\. Convert"),
    "meta": (lambda: torch.ones(2, device="meta"),
        r"torch\.strided on meta, but a checkpoint stores dense tensors with data\. Convert"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2)]),
        r"nested on cpu, but a checkpoint stores dense .*\. Convert it"),
    "dtype": (lambda: torch.ones(2, dtype=torch.complex128),
        r"torch\.complex128; a checkpoint stores bool, .*\. Convert it,"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNSTORABLE)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_that_has_no_place_is_named_before_anything_is_trained(kind: str, tmp_path: Path) -> None:
    make, text = UNSTORABLE[kind]

    class Kept(tw.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"mask": [1, make()]}

    class Data(tw.DataModule):
        def train_dataloader(self) -> Any:
            return make_loader()

        def state_dict(self) -> dict[str, Any]:
            return {"mask": make()}

    for module, datamodule, callbacks, key in (
        (Watched(), None, [Kept()], r"state\.callbacks\..*Kept\.mask\[1\]"),
        (Watched(), Data(), [], r"state\.datamodule\.mask"),
    ):
        saving = tw.ModelCheckpoint(tmp_path)
        trainer = tw.Trainer(max_epochs=1, callbacks=[*callbacks, saving], **{**QUIET, "enable_checkpointing": True})
        match = rf"checkpoints of this run could not be written: tensor '{key}' is {text}.* {OR_ELSE}"
        with pytest.raises(tw.CheckpointError, match=match):
            trainer.fit(module, None if datamodule else make_loader(), datamodule=datamodule)
        assert not module.is_trained
    assert not list(tmp_path.rglob("*.ckpt"))


UNWRITABLE = """
import os, sys
import torch
import trainwright as tw

accelerator = tw.Accelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(2, 2))
accelerator.save_state(sys.argv[1])  # which imports what a save needs, while this user may read it
if os.geteuid() == 0:
    os.seteuid(65534)
for path in sys.argv[2:]:
    try:
        accelerator.save_state(path)
    except tw.CheckpointError as error:
        print(error)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can read, unlike pytest's folders."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_a_read_only_directory_is_named_in_the_error(open_folder: Path) -> None:
    (open_folder / "closed").mkdir()
    (open_folder / "closed").chmod(0o555)
    (open_folder / "file").touch()
    places = ["closed/a.ckpt", "closed/new/a.ckpt", "file/a.ckpt"]
    paths = [str(open_folder / place) for place in places]
    done = run_python("-c", UNWRITABLE, open_folder / "warm.ckpt", *paths, folder="/")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 3
    for path, line in zip(paths, said, strict=True):
        assert line.startswith(f"checkpoint {path} was not written: ")
    for line in said[:2]:
        assert "the directory cannot be written (PermissionError: [Errno 13] Permission denied: " in line
        assert line.endswith("Choose a directory that this user may write to, or change its permissions")
    assert "the directory cannot be made (NotADirectoryError" in said[2]
    assert said[2].endswith("Choose a path without a file as one of its parts")

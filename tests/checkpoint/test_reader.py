"""Damaged and hostile checkpoints are refused, with the name of the file, before anything is changed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright.checkpoint import filesystem
from trainwright.checkpoint.discovery import find_checkpoints, is_checkpoint
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.checkpoint.tensors import Piece
from trainwright.errors import CheckpointError

FILES = ["manifest.json", "model-00000.safetensors", "rank-00000.json", "state.json", "state.safetensors"]


def refused(path: Path, message: str, seats: Any) -> None:
    """Assert that one process rejects the checkpoint, and two ranks with the same error."""
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(path))
    ends = seats(2)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(open_checkpoint, str(path), ranks=ends[rank]) for rank in range(2)]
    errors = [future.exception() for future in futures]
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert str(errors[0]) == str(errors[1])


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_or_missing_file_is_noticed(name: str, tmp_path: Path, save: Any, seats: Any) -> None:
    save(tmp_path / "a.ckpt")
    file = tmp_path / "a.ckpt" / name
    whole = file.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        for verify in ("full", "size"):
            with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
                open_checkpoint(str(tmp_path / "a.ckpt"), verify)  # type: ignore[arg-type]
    file.write_bytes(whole + b"\0")
    refused(tmp_path / "a.ckpt", name, seats)
    file.unlink()
    refused(tmp_path / "a.ckpt", name, seats)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(whole)
    file.symlink_to(elsewhere)
    refused(tmp_path / "a.ckpt", rf"{name}.* plain file", seats)


def test_damage_that_comes_after_the_verification_is_an_error_too(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "a.ckpt")
    checkpoint = open_checkpoint(str(tmp_path / "a.ckpt"))
    os.truncate(tmp_path / "a.ckpt" / "model-00000.safetensors", 200)
    (tmp_path / "a.ckpt" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model-00000\.safetensors ends \d+ bytes early"):
        checkpoint.read_tensor("model", "w1")
    with pytest.raises(CheckpointError, match=r"state\.json does not match its digest"):
        checkpoint.run_state()


def test_verification_shared_over_ranks_hashes_each_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any, check: Any, seats: Any
) -> None:
    save(tmp_path / "a.ckpt", world_size=2)
    ends, opened = seats(2), []
    opener = filesystem.LocalFiles.open
    monkeypatch.setattr(
        filesystem.LocalFiles, "open", lambda self, path: opened.append(os.path.basename(path)) or opener(self, path)
    )
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(open_checkpoint, str(tmp_path / "a.ckpt"), ranks=ends[rank]) for rank in range(2)]
    for future in futures:
        check(future.result(), 1)
    names = sorted(os.listdir(tmp_path / "a.ckpt"))
    hashed = opened[: len(names) + 1]
    assert sorted(hashed) == sorted([*names, "manifest.json"])


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the manifest and give it a fitting digest, as an attacker would."""
    body = json.loads((path / "manifest.json").read_bytes())["manifest"]
    changed = change(body)
    text = changed if isinstance(changed, bytes) else json.dumps(body).encode()
    digest = hashlib.sha256(text).hexdigest().encode()
    (path / "manifest.json").write_bytes(b'{"sha256": "%s", "manifest": %s}\n' % (digest, text))


def rename_file(name: str) -> Callable[[Any], None]:
    return lambda body: body["files"].__setitem__(name, body["files"].pop("state.json"))


def set_tensor(**changed: Any) -> Callable[[Any], None]:
    return lambda body: body["sections"]["model"]["w0"].update(changed)


M = "model-00000.safetensors"


@pytest.mark.parametrize(("change", "message"), [
    (rename_file("../state.json"), r"names the file '\.\./state\.json'; expected plain file names"),
    (rename_file("/etc/passwd"), "names the file '/etc/passwd'"),
    (rename_file("a/b"), "names the file 'a/b'"),
    (rename_file("a\\b"), "names the file"),
    (rename_file(".."), r"names the file '\.\.'"),
    (rename_file(""), "names the file ''"),
    (rename_file("a\n"), "names the file"),
    (rename_file("manifest.json"), r"names the file 'manifest\.json'"),
    (lambda body: body["files"]["state.json"].__setitem__(0, -1), "malformed: .* size '-1'"),
    (lambda body: body["files"].__setitem__("state.json", 5), "malformed"),
    (lambda body: body["files"]["state.json"].__setitem__(1, "a"), "malformed: .* digest"),
    (lambda body: body["files"].clear(), f"lies in '{M}', which manifest.json does not list"),
    (set_tensor(shape=[10**15, 10**3]), "claims shape"),
    (set_tensor(shape=[3, 2] + [1] * 100), "malformed: .* shape"),
    (set_tensor(shape=[-3, -2]), "malformed: .* shape"),
    (set_tensor(shape=[3.0, 2]), "malformed: .* shape"),
    (set_tensor(shape=[True, 6]), "malformed: .* shape"),
    (set_tensor(shape=6), "malformed: .* shape"),
    (set_tensor(dtype="F31"), "malformed: KeyError: 'F31'"),
    (set_tensor(pieces=[]), "'w0' is incomplete: element 0 of 6"),
    (set_tensor(pieces=[[M, "w0", 0, 10**9]]), "'w0' claims 1000000000 elements"),
    (set_tensor(pieces=[[M, "w0", 0, 6], [M, "w0", 3, 3]]), "'w0': elements from 3 on are stored twice"),
    (set_tensor(pieces=[[M, "w0", -1, 7]]), "malformed: .* piece"),
    (set_tensor(pieces=[[M, "w0", 0]]), "malformed: TypeError"),
    (set_tensor(pieces=[["../x", "w0", 0, 6]]), r"lies in '\.\./x', which manifest.json does not list"),
    (lambda body: body.update(format="zip"), "has format 'zip'"),
    (lambda body: body.update(format_version=2), "format version 2; .* Install a trainwright that reads version 2"),
    (lambda body: body.update(sections=[1]), "malformed"),
    (lambda body: body.update(files=None), "malformed"),
    (lambda body: body["header"].pop("step"), "malformed: KeyError: 'step'"),
    (lambda body: body["header"].update(step="1"), "malformed: .* step '1'"),
    (lambda body: b"[" * 200_000 + b"]" * 200_000, r"manifest\.json is not valid JSON \(RecursionError"),
    (lambda body: b"9" * 10_000, r"manifest\.json is not valid JSON"),
    (lambda body: b"NaN", r"manifest\.json is not valid JSON \(ValueError: NaN"),
    (lambda body: b"[]", r"manifest\.json is malformed"),
    (lambda body: b"\xff", r"manifest\.json is not valid JSON"),
])  # fmt: skip
def test_a_hostile_manifest_is_refused(change: Callable[[Any], Any], message: str, tmp_path: Path, save: Any) -> None:
    save(tmp_path / "a.ckpt")
    rewrite(tmp_path / "a.ckpt", change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(tmp_path / "a.ckpt"), "off")
    assert not is_checkpoint(str(tmp_path / "a.ckpt"))
    assert find_checkpoints(str(tmp_path)) == []


@pytest.mark.parametrize(("changed", "message"), [
    ({"pieces": [[M, "w9", 0, 6]]}, f"{M} has no 'w9'"),
    ({"dtype": "I32"},
     f"{M} has 6 elements of torch.float32 as 'w0', but manifest.json lists 6 elements of torch.int32"),
    ({"shape": [4], "pieces": [[M, "w0", 0, 4]]}, f"{M} has 6 elements .* lists 4 elements of"),
    ({"pieces": [["state.json", "w0", 0, 6]]}, r"state\.json: the header claims"),
])  # fmt: skip
def test_a_manifest_that_does_not_fit_its_files_changes_nothing(
    changed: dict[str, Any], message: str, tmp_path: Path, save: Any
) -> None:
    save(tmp_path / "a.ckpt")
    rewrite(tmp_path / "a.ckpt", set_tensor(**changed))
    checkpoint = open_checkpoint(str(tmp_path / "a.ckpt"))
    targets = {name: torch.zeros(entry.shape) for name, entry in checkpoint.tensors("model").items()}
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read_into(
            "model", [Piece(n, tuple(t.shape), 0, t) for n, t in sorted(targets.items(), reverse=True)]
        )
    assert not any(target.any() for target in targets.values())


@pytest.mark.parametrize("text", [b'{"$object":"os.system"}', b"[" * 300 + b"]" * 300, b"[" * 10**6, b"\xff", b"nan"])
def test_hostile_plain_data_is_refused(text: bytes, tmp_path: Path, save: Any) -> None:
    save(tmp_path / "a.ckpt")
    (tmp_path / "a.ckpt" / "state.json").write_bytes(text)
    record = [len(text), hashlib.sha256(text).hexdigest()]
    rewrite(tmp_path / "a.ckpt", lambda body: body["files"].__setitem__("state.json", record))
    with pytest.raises(CheckpointError, match=r"state\.json"):
        open_checkpoint(str(tmp_path / "a.ckpt")).run_state()


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent is not a checkpoint: it does not exist"):
        open_checkpoint(str(tmp_path / "absent"))
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: it has no manifest\.json"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "weights.pt").write_bytes(b"\x80\x04N.")
    with pytest.raises(CheckpointError, match=r"weights\.pt is not a checkpoint"):
        open_checkpoint(str(tmp_path / "weights.pt"))
    with pytest.raises(ValueError, match="verify='fast' is unknown; choose from full, size, off"):
        open_checkpoint(str(tmp_path), "fast")  # type: ignore[arg-type]

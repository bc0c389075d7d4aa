"""Tensors of any layout and kind come back exactly, for any ranks that write and read its pieces."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from deadlines import deadline
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from trainwright.checkpoint.contents import collect
from trainwright.checkpoint.reader import StoredCheckpoint, open_checkpoint
from trainwright.checkpoint.shards import (
    HashingStream,
    read_header,
    write_shard,
)
from trainwright.checkpoint.store import write_checkpoint
from trainwright.checkpoint.tensors import DTYPES, Piece, StoredPiece, TensorEntry, assign_writers, merge
from trainwright.distributed.ranks import Ranks
from trainwright.errors import CheckpointError


class Meeting:
    """Exchanges between threads that stand for ranks."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=deadline(20))
        self.payloads = [b""] * world_size

    def seat(self, rank: int) -> Meeting.Seat:
        return Meeting.Seat(self, rank)

    class Seat:
        def __init__(self, meeting: Meeting, rank: int) -> None:
            self.meeting, self.rank, self.world_size = meeting, rank, len(meeting.payloads)

        def exchange(
            self, payload: bytes, *, call: str, timeout_seconds: float, for_first: bytes | None = None
        ) -> list[bytes]:
            self.meeting.payloads[self.rank] = payload + (for_first or b"")
            self.meeting.barrier.wait()
            replies = list(self.meeting.payloads)
            self.meeting.barrier.wait()
            return replies


def save(path: Path, *ranks: Sequence[Piece], state: Any = None) -> StoredCheckpoint:
    meeting = Meeting(len(ranks))

    def write(rank: int) -> None:
        write_checkpoint(
            str(path),
            lambda: collect({"model": ranks[rank]}, state, None, rank, len(ranks)),
            header={"step": 1, "epoch": 0},
            ranks=Ranks(meeting.seat(rank)),
        )

    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(write, range(len(ranks))))
    return open_checkpoint(str(path))


def whole(name: str, tensor: Tensor, writer: int | None = None) -> Piece:
    return Piece(name, tuple(tensor.shape), 0, tensor, writer)


def rows(name: str, tensor: Tensor, rank: int, world_size: int) -> Piece:
    """The rank's range of rows under FSDP. It is empty for the last ranks of a small tensor."""
    part = -(-tensor.shape[0] // world_size)
    begin = min(rank * part, tensor.shape[0]) * (tensor.numel() // tensor.shape[0])
    stop = min((rank + 1) * part, tensor.shape[0]) * (tensor.numel() // tensor.shape[0])
    return Piece(name, tuple(tensor.shape), begin, tensor.reshape(-1)[begin:stop].clone(), rank)


def odd_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5, 7, 3, 2, generator=generator)
    return {
        "prime": values[..., 0, 0].contiguous(),
        "transposed": values[0].transpose(0, 2),
        "strided": values[::2, 1::3],
        "channels_last": values.to(memory_format=torch.channels_last),
        "expanded": values[0, 0, 0, :1].expand(4, 6),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "bf16": values.bfloat16(),
        "negated": torch.view_as_complex(values).conj().imag,
        "complex64": torch.view_as_complex(values).conj(),
        "__metadata__": torch.arange(3),
        "name[0:3] / \u00e9 \U0001f600": torch.tensor([True, False]),
    }


def test_every_layout_comes_back(tmp_path: Path) -> None:
    tensors = odd_tensors()
    checkpoint = save(tmp_path / "a.ckpt", [whole(name, tensor) for name, tensor in tensors.items()])
    assert {name: entry.shape for name, entry in checkpoint.tensors("model").items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        back = checkpoint.read_tensor("model", name)
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor), name


def test_destinations_of_every_layout_are_filled_in_place(tmp_path: Path) -> None:
    tensors = odd_tensors()
    checkpoint = save(tmp_path / "a.ckpt", [whole(name, tensor) for name, tensor in tensors.items()])
    del tensors["expanded"], tensors["negated"]
    targets = {name: torch.zeros_like(tensor, memory_format=torch.preserve_format) for name, tensor in tensors.items()}
    strided = torch.zeros(5, 7, 3, 2)
    targets["strided"] = strided[::2, 1::3]
    targets["prime"].requires_grad_()
    strides = {name: tensor.stride() for name, tensor in targets.items()}
    checkpoint.read_into("model", [whole(name, tensor) for name, tensor in targets.items()])
    for name, tensor in tensors.items():
        assert torch.equal(targets[name], tensor), name
        assert targets[name].stride() == strides[name]
    assert torch.equal(strided[::2, 1::3], tensors["strided"])
    assert not strided[1].any()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    octets = torch.randint(0, 2 if dtype is torch.bool else 256, (6, 8 * dtype.itemsize), dtype=torch.uint8)
    tensor = octets.view(dtype)
    checkpoint = save(tmp_path / "a.ckpt", [whole("t", tensor), whole("u", tensor.t())])
    assert torch.equal(checkpoint.read_tensor("model", "t").view(torch.uint8), octets)
    back = torch.empty_like(tensor).t()
    checkpoint.read_into("model", [whole("u", back)])
    assert torch.equal(back.t().view(torch.uint8), octets)


def test_the_file_is_read_by_the_safetensors_library(tmp_path: Path) -> None:
    tensors = odd_tensors()
    save(tmp_path / "a.ckpt", [whole(name, tensor) for name, tensor in tensors.items()])
    loaded = load_file(tmp_path / "a.ckpt" / "model-00000.safetensors")
    loaded["__metadata__"] = loaded.pop("__metadata__+")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    weight = torch.arange(12.0).reshape(4, 3)
    save(tmp_path / "b.ckpt", *[[rows("w", weight, rank, 2)] for rank in range(2)])
    with safe_open(tmp_path / "b.ckpt" / "model-00001.safetensors", "pt") as shard:
        assert list(shard.keys()) == ["w[6:12]"]
        assert torch.equal(shard.get_slice("w[6:12]")[2:4], weight.reshape(-1)[8:10])


@pytest.mark.parametrize("readers", [1, 2, 3])
@pytest.mark.parametrize("writers", [1, 2])
def test_what_some_ranks_wrote_others_read(writers: int, readers: int, tmp_path: Path) -> None:
    tensors = {name: torch.randn(shape) for name, shape in {"a": (5, 3), "b": (1, 4), "c": (7,)}.items()}
    shared = torch.randn(3, 3)
    pieces = [
        [rows(name, tensor, rank, writers) for name, tensor in tensors.items()] + [whole("shared", shared)]
        for rank in range(writers)
    ]
    checkpoint = save(tmp_path / "a.ckpt", *pieces)
    for rank in range(readers):
        mine = [rows(name, torch.zeros_like(tensor), rank, readers) for name, tensor in tensors.items()]
        target = torch.zeros(3, 3)
        checkpoint.read_into("model", [*mine, whole("shared", target)])
        assert torch.equal(target, shared)
        for piece in mine:
            assert torch.equal(piece.tensor, tensors[piece.name].reshape(-1)[piece.start : piece.stop])
    strided = torch.zeros(3, 5).t()
    checkpoint.read_into("model", [whole("a", strided)])
    assert torch.equal(strided, tensors["a"])


def test_ranges_across_rows_are_read(tmp_path: Path) -> None:
    weight = torch.arange(35.0).reshape(5, 7)
    flat = weight.reshape(-1)
    cut = [Piece("w", (5, 7), begin, flat[begin:stop], rank) for rank, (begin, stop) in enumerate([(0, 11), (11, 35)])]
    checkpoint = save(tmp_path / "a.ckpt", [cut[0]], [cut[1]])
    for begin, stop in [(0, 35), (10, 12), (0, 1), (34, 35), (12, 12)]:
        target = torch.full((stop - begin,), -1.0)
        checkpoint.read_into("model", [Piece("w", (5, 7), begin, target)])
        assert torch.equal(target, flat[begin:stop])


def test_tied_names_are_stored_once_and_read_into_untied_ones(tmp_path: Path) -> None:
    weight = torch.randn(64, 64)
    other = weight[:32]
    checkpoint = save(tmp_path / "a.ckpt", *[[whole("in", weight), whole("out", weight), whole("half", other)]] * 2)
    names = {
        name: {(piece.file, piece.key) for piece in entry.pieces} for name, entry in checkpoint.tensors("model").items()
    }
    assert names["in"] == names["out"] != names["half"]
    stored = sum(file.stat().st_size for file in (tmp_path / "a.ckpt").glob("*.safetensors"))
    assert stored < 1.6 * weight.nbytes
    first, second = torch.zeros(64, 64), torch.zeros(64, 64)
    checkpoint.read_into("model", [whole("in", first), whole("out", second)])
    assert torch.equal(first, weight)
    assert torch.equal(second, weight)
    # A model that lists a tied weight under one of its names takes either.
    second.zero_()
    checkpoint.read_into("model", [whole("out", second)])
    assert torch.equal(second, weight)


def test_untied_names_are_read_into_tied_ones(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    checkpoint = save(tmp_path / "a.ckpt", [whole("in", weight), whole("out", weight.clone())])
    target = torch.zeros(4, 4)
    checkpoint.read_into("model", [whole("in", target), whole("out", target)])
    assert torch.equal(target, weight)


def test_another_dtype_is_converted(tmp_path: Path) -> None:
    weight = torch.randn(3, 4)
    checkpoint = save(tmp_path / "a.ckpt", [whole("w", weight), whole("h", weight.half())])
    narrow, wide = torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(3, 4, dtype=torch.float64)
    checkpoint.read_into("model", [whole("w", narrow), whole("h", wide)])
    assert torch.equal(narrow, weight.bfloat16())
    assert torch.equal(wide, weight.half().double())


@pytest.mark.parametrize("pieces", [[], [3], [3, 2, 2, 2], [1] * 7, [0, 0, 5]])
def test_dealing_is_complete_balanced_and_the_same_in_any_order(pieces: list[int]) -> None:
    replicated = [whole(f"t{index}", torch.zeros(size)) for index, size in enumerate(pieces)]
    shares = [assign_writers(replicated, rank, 3) for rank in range(3)]
    assert sorted(piece.name for share in shares for piece in share) == [piece.name for piece in replicated]
    assert [{p.name for p in share} for share in shares] == [
        {p.name for p in assign_writers(replicated[::-1], rank, 3)} for rank in range(3)
    ]
    loads = [sum(piece.tensor.numel() for piece in share) for share in shares]
    assert max(loads) - min(loads) <= max(pieces, default=0)


def test_dealing_keeps_what_has_a_writer_and_what_is_tied_together() -> None:
    weight = torch.zeros(4)
    pieces = [whole("a", weight), whole("b", weight), whole("mine", torch.zeros(9), 1), whole("c", torch.zeros(4))]
    assert [[piece.name for piece in assign_writers(pieces, rank, 2)] for rank in range(2)] == [
        ["a", "b"],
        ["mine", "c"],
    ]


@pytest.mark.parametrize(("start", "shape"), [(-1, (2,)), (11, (2,)), (0, (13,)), (0, (3, 3)), (1, (4, 3))])
def test_a_piece_outside_its_tensor_is_refused(start: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"piece of 'w' that starts at .* a 1-D range within its 12 elements"):
        Piece("w", (4, 3), start, torch.zeros(shape))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: torch.zeros(2, dtype=torch.complex128),
     r"tensor 'bad' is torch.complex128; a checkpoint stores BOOL|bool"),
    (lambda: torch.zeros(2, 2).to_sparse(), r"tensor 'bad' is torch.sparse_coo"),
    (lambda: torch.zeros(2, device="meta"), r"tensor 'bad' is torch.strided on meta"),
])  # fmt: skip
def test_what_has_no_place_in_a_file_is_refused_by_name(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / "a.ckpt", [whole("bad", make())])
    assert not list(tmp_path.iterdir())


def test_freed_memory_is_refused_by_name() -> None:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(CheckpointError, match="the memory of tensor 'w' was freed"):
        write_shard(HashingStream(io.BytesIO()), "f", [whole("w", tensor)])


def test_ranks_that_leave_a_hole_overlap_or_disagree_are_refused(tmp_path: Path) -> None:
    flat = torch.zeros(6)
    with pytest.raises(CheckpointError, match=r"'w' is incomplete: element 2 of 6 is in no file"):
        save(tmp_path / "a.ckpt", [Piece("w", (6,), 0, flat[:2], 0)], [Piece("w", (6,), 3, flat[3:], 1)])
    with pytest.raises(CheckpointError, match=r"'w': elements from 3 on are stored twice"):
        save(tmp_path / "a.ckpt", [Piece("w", (6,), 0, flat[:4], 0)], [Piece("w", (6,), 3, flat[3:], 1)])
    with pytest.raises(CheckpointError, match=r"the ranks disagree on tensor 'w'"):
        save(tmp_path / "a.ckpt", [Piece("w", (6,), 0, flat[:3], 0)], [Piece("w", (2, 3), 3, flat[3:], 1)])
    assert not list(tmp_path.iterdir())


def test_an_empty_tensor_may_come_from_every_rank() -> None:
    entry = TensorEntry((0, 2), torch.float32, (StoredPiece("f", "e", 0, 0),))
    assert merge([{"e": entry}, {"e": entry}]) == {"e": entry}


def test_a_wrong_shape_or_a_missing_name_does_not_change_tensors(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "a.ckpt", [whole("a", torch.ones(2)), whole("w", torch.ones(2, 3))])
    first, second = torch.zeros(2), torch.zeros(3, 2)
    with pytest.raises(CheckpointError, match=r"'w' has shape \(2, 3\) in the checkpoint and \(3, 2\) here"):
        checkpoint.read_into("model", [whole("a", first), whole("w", second)])
    with pytest.raises(CheckpointError, match=r"has no model tensor 'gone' \(1 in all\)"):
        checkpoint.read_into("model", [whole("a", first), whole("gone", second)])
    assert not first.any()
    with pytest.raises(CheckpointError, match=r"has no section 'optimizer'; it has model"):
        checkpoint.tensors("optimizer")


def shard(table: Any, data: bytes = b"") -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(*offsets: int, shape: Any = (1,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("data", [
    b"",
    b"1234567",
    (1 << 60).to_bytes(8, "little"),
    shard(b"{"),
    shard(b"[" * 100_000),
    shard([1]),
    shard({"a": 3}),
    shard({"a": entry(0, 4, dtype="F33")}, b"1234"),
    shard({"a": entry(0, 4, shape=(-1,))}, b"1234"),
    shard({"a": entry(0, 4, shape=(True,))}, b"1234"),
    shard({"a": entry(0, 4, shape=(10**12,))}, b"1234"),
    shard({"a": entry(0, 8, shape=(2,))}, b"1234"),
    shard({"a": entry(4, 8)}, b"12345678"),
    shard({"a": entry(0, 4), "b": entry(0, 4)}, b"1234"),
    shard({"a": entry(0, 4), "b": entry(3, 7)}, b"1234567"),
    shard({"a": entry(0, 4)}, b"12345"),
    shard({"a": entry(0, 4, 5)}, b"1234"),
])  # fmt: skip
def test_a_damaged_or_hostile_header_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"shard\.safetensors"):
        read_header(io.BytesIO(data), "shard.safetensors", len(data))


@pytest.mark.gpu
def test_tensors_on_a_device_are_restored(tmp_path: Path) -> None:
    device = torch.accelerator.current_accelerator()
    tensors = {"plain": torch.randn(4, 3, device=device), "strided": torch.randn(4, 6, device=device)[:, ::2]}
    checkpoint = save(tmp_path / "a.ckpt", [whole(name, tensor) for name, tensor in tensors.items()])
    for name, tensor in tensors.items():
        for target in (torch.zeros(4, 3, device=device), torch.zeros(4, 6, device=device)[:, 1::2], torch.zeros(4, 3)):
            checkpoint.read_into("model", [whole(name, target)])
            assert torch.equal(target.cpu(), tensor.cpu())

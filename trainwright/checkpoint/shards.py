"""Safetensors files. They are written piece by piece and hashed meanwhile, and ranges are read back in place.

Byte ranges work for local and remote files, and only the overlap of stored and requested ranges is read. A truncated file
raises an error, while a memory map would kill the process.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import torch

from trainwright.checkpoint.tensors import DTYPE_NAMES, DTYPES, Piece, StoredPiece, TensorEntry, tied_groups
from trainwright.errors import CheckpointError

CHUNK_BYTES = 8 << 20
THREADED_BYTES = 1 << 20
"""The size from which hashing in another thread pays for its start (about 0.1 ms)."""
MAX_HEADER_BYTES = 100_000_000  # the safetensors library reads no longer header
MAX_DIMENSIONS = 64
METADATA_KEY = "__metadata__"
_OR_ELSE = "or remove it from its state_dict (a buffer by persistent=False)."


class FileRecord(NamedTuple):
    """The size and digest of a file, as the manifest records them."""

    size: int
    sha256: str


class HashingStream:
    """A binary file that is being written, with its size and SHA-256 so far."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.size = 0
        self._digest = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        """Write all of the data. Large data is hashed in a thread meanwhile, because both take about the same time."""
        view = memoryview(data)
        thread: threading.Thread | None = None
        if len(view) >= THREADED_BYTES:
            thread = threading.Thread(target=self._digest.update, args=(view,), name="trainwright-hash")
            try:
                thread.start()
            except RuntimeError:  # Python 3.12.0 and 3.12.1 start no threads at interpreter exit
                thread = None
        if thread is None:
            self._digest.update(view)
        try:
            for begin in range(0, len(view), CHUNK_BYTES):
                self.stream.write(view[begin : begin + CHUNK_BYTES])
        finally:
            # After an error too, because the caller may change the data that the thread still reads.
            if thread is not None:
                thread.join()
        self.size += len(view)

    def record(self) -> FileRecord:
        """Return the size and digest of the written data."""
        return FileRecord(self.size, self._digest.hexdigest())


def write_shard(out: HashingStream, file_name: str, pieces: Sequence[Piece]) -> dict[str, TensorEntry]:
    """Write the pieces as one safetensors file and return its entries by tensor name.

    Tied names are stored once, and their entries point to one key. An empty piece of a tensor that is not empty is skipped.
    One tensor at a time is copied to host memory. CheckpointError names a tensor that cannot be stored.
    """
    entries: dict[str, TensorEntry] = {}
    stored: list[tuple[str, Sequence[int], torch.Tensor]] = []
    keys = {METADATA_KEY}
    for group in tied_groups(pieces):
        first = group[0]
        check_storable(first.name, first.tensor)
        is_whole = first.is_whole
        key = first.name if is_whole else f"{first.name}[{first.start}:{first.stop}]"
        while key in keys:
            key += "+"
        keys.add(key)
        has_data = is_whole or first.tensor.numel() > 0
        if has_data:  # an empty range stores no data, but its tensor's shape and dtype must be in the table
            stored.append((key, first.shape if is_whole else first.tensor.shape, first.tensor))
        for piece in group:
            ranges = (StoredPiece(file_name, key, piece.start, piece.tensor.numel()),) if has_data else ()
            shape, dtype = tuple(piece.shape), piece.tensor.dtype
            known = entries.get(piece.name, TensorEntry(shape, dtype))
            if (known.shape, known.dtype) != (shape, dtype):
                raise CheckpointError(f"two pieces of tensor {piece.name!r} differ in the shape or dtype of the whole.")
            entries[piece.name] = TensorEntry(shape, dtype, known.pieces + ranges)
    stored.sort(key=lambda item: -item[2].element_size())  # so every tensor is aligned, as in the library
    out.write(render_header(file_name, [(key, tensor.dtype, shape) for key, shape, tensor in stored]))
    for _, _, tensor in stored:
        out.write(host_bytes(tensor))
    return entries


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Reject a tensor whose kind or dtype a safetensors file cannot store (CheckpointError)."""
    kind = type(tensor)
    # A Parameter inherits it. A quantized weight or a DTensor defines it, because its values are elsewhere.
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise CheckpointError(
            f"tensor {name!r} is a {kind.__module__}.{kind.__qualname__}, whose values have a special format, but a "
            "checkpoint stores plain tensors. Use a layer or an optimizer with plain tensors."
        )
    if tensor.dtype not in DTYPE_NAMES:
        accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
        raise CheckpointError(
            f"tensor {name!r} is {tensor.dtype}; a checkpoint stores {accepted}. Convert it, {_OR_ELSE}"
        )
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        layout = "nested" if tensor.is_nested else str(tensor.layout)
        raise CheckpointError(
            f"tensor {name!r} is {layout} on {tensor.device}, but a checkpoint stores dense tensors with data. Convert it "
            f"(to_dense(), or to a device with memory), {_OR_ELSE}"
        )
    if tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0:
        raise CheckpointError(f"the memory of tensor {name!r} was freed. Gather the tensor, or pass this rank's range.")


def render_header(
    file_name: str,
    tensors: Collection[tuple[str, torch.dtype, Sequence[int]]],
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """Return the head of a safetensors file for tensors (key, dtype and shape) in this order."""
    table: dict[str, Any] = {METADATA_KEY: {**metadata, "format": "pt"}}
    stop = 0
    for key, dtype, shape in tensors:
        begin, stop = stop, stop + math.prod(shape) * dtype.itemsize
        table[key] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, stop]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=True).encode()
    # Padded like the library's headers, so that the data begins at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file_name} would have {len(tensors)} tensors, more than a safetensors header can list."
        )
    return len(text).to_bytes(8, "little") + text


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements in row-major order as bytes. Only a device or another layout needs a copy."""
    if tensor.numel() == 0:
        return memoryview(b"")
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return as_bytes(tensor).numpy().data


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as a row of bytes."""
    # A one-element tensor counts as contiguous with any strides, but such strides forbid a view of a different dtype.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@dataclass(frozen=True)
class StoredArray:
    """The location of one key's bytes in a safetensors file."""

    dtype: torch.dtype
    numel: int
    offset: int


def read_header(stream: BinaryIO, name: str, size: int) -> dict[str, StoredArray]:
    """Read the table of a safetensors file of `size` bytes. CheckpointError for wrong sizes or bounds, holes and overlaps."""
    length = int.from_bytes(_read_exactly(stream, 8, name), "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(f"{name}: the header claims {length} bytes in a file of {size}; the file is damaged.")
    try:
        table = json.loads(_read_exactly(stream, length, name).decode(), object_pairs_hook=unique_keys)
        arrays = _parse_header(table)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{name}: its safetensors header is not valid ({error}); the file is damaged.") from error
    reached = 0
    # Second by their ends, because an empty tensor begins at the same byte as the next tensor.
    for array, stop in sorted(arrays.values(), key=lambda item: (item[0].offset, item[1])):
        if array.offset != reached or stop - array.offset != array.numel * array.dtype.itemsize:
            raise CheckpointError(
                f"{name}: its tensors overlap, leave a hole or have a wrong size; the file is damaged."
            )
        reached = stop
    if reached != size - 8 - length:
        raise CheckpointError(f"{name}: its tensors end at byte {reached} of {size - 8 - length}; the file is damaged.")
    return {key: StoredArray(array.dtype, array.numel, 8 + length + array.offset) for key, (array, _) in arrays.items()}


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Reject repeated keys, which readers interpret differently."""
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a key comes twice in one object")
    return content


def _parse_header(table: Mapping[str, Any]) -> dict[str, tuple[StoredArray, int]]:
    arrays: dict[str, tuple[StoredArray, int]] = {}
    for key, item in table.items():
        if key == METADATA_KEY:
            continue
        shape, (begin, stop) = item["shape"], item["data_offsets"]
        # The product of a million sizes would take minutes.
        if len(shape) > MAX_DIMENSIONS or any(type(size) is not int or size < 0 for size in (*shape, begin, stop)):
            raise ValueError(f"{key!r} has a size that is not a count, or more than {MAX_DIMENSIONS} dimensions")
        arrays[key] = (StoredArray(DTYPES[item["dtype"]], math.prod(shape), begin), stop)
    return arrays


def _read_exactly(stream: BinaryIO, count: int, name: str) -> bytes:
    data = bytearray(count)
    fill(stream, memoryview(data), name)
    return bytes(data)


def fill(stream: BinaryIO, view: memoryview, name: str) -> None:
    """Read exactly as many bytes as the view holds."""
    while view:
        count = stream.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(f"{name} ends {len(view)} bytes early; the file is damaged or being changed.")
        view = view[count:]


@dataclass(frozen=True)
class Copy:
    """A range to read: `numel` elements from `first` on in `source`, to `to` in the destination."""

    source: StoredPiece
    first: int
    to: int
    numel: int


def plan_copies(entries: Mapping[str, TensorEntry], piece: Piece) -> list[Copy]:
    """Return the stored ranges that fill a destination. CheckpointError if its shape differs or an element is missing."""
    entry = entries[piece.name]
    if tuple(piece.shape) != entry.shape:
        raise CheckpointError(
            f"tensor {piece.name!r} has shape {entry.shape} in the checkpoint and {tuple(piece.shape)} here. "
            "Build the model as it was when the checkpoint was written."
        )
    copies, reached = [], piece.start
    for source in entry.pieces:
        begin, stop = max(source.start, piece.start), min(source.start + source.numel, piece.stop)
        if begin < stop and begin == reached:
            copies.append(Copy(source, begin - source.start, begin - piece.start, stop - begin))
            reached = stop
    if reached != piece.stop:
        raise CheckpointError(
            f"tensor {piece.name!r} is incomplete: element {reached} is in no file of the checkpoint."
        )
    return copies


def copy_into(
    piece: Piece,
    dtype: torch.dtype,
    copies: Iterable[Copy],
    locate: Callable[[str, str], tuple[BinaryIO, StoredArray]],
) -> None:
    """Fill a destination in place, and convert to its dtype. `locate` returns a key's open file and location."""
    target = piece.tensor.detach()
    if target.numel() == 0:
        return
    is_plain = target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous()
    # Without a conversion the bytes are read into the destination, with no second copy in memory.
    is_direct = is_plain and not target.is_neg() and not target.is_conj()
    buffer = target if is_direct else torch.empty(target.shape, dtype=dtype)
    view = as_bytes(buffer).numpy().data
    for copy in copies:
        stream, array = locate(copy.source.file, copy.source.key)
        stream.seek(array.offset + copy.first * dtype.itemsize)
        fill(stream, view[copy.to * dtype.itemsize : (copy.to + copy.numel) * dtype.itemsize], copy.source.file)
    if buffer is target:
        return
    try:
        target.copy_(buffer)
    except RuntimeError as error:
        raise CheckpointError(
            f"tensor {piece.name!r} is {dtype} and cannot be read as {target.dtype}: {error}"
        ) from error

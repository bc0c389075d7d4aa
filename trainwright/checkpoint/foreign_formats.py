"""Reads weights and hyper-parameters from our checkpoints, Lightning's, a state_dict, or safetensors.

One process reads them onto the CPU. A foreign file may be a pickle. torch's restricted reader accepts only tensors and plain
data, and runs nothing else. In a Lightning file an inert `_Placeholder` replaces every object of another class, except that
a defaultdict becomes a dict.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal, NoReturn

import fsspec
import safetensors.torch
import torch
from fsspec.implementations.local import LocalFileSystem
from safetensors import SafetensorError
from torch import Tensor

from trainwright.checkpoint.codec import MAX_DEPTH, check_sharing, encode
from trainwright.checkpoint.frozen_base import FROZEN_BASE, Base
from trainwright.checkpoint.last_link import pointed
from trainwright.checkpoint.manifest import FILE_NAME, MANIFEST_NAME, load_json
from trainwright.checkpoint.reader import Verify, check_verify, open_checkpoint
from trainwright.checkpoint.shards import METADATA_KEY
from trainwright.checkpoint.tensors import DTYPES
from trainwright.distributed.failures import summarize
from trainwright.errors import CheckpointError, MissingCheckpoint, a_type_of
from trainwright.plain_forms import CONTENT, LEFT_OUT, Form
from trainwright.tensor_names import clean_name, is_extra_state

LARGEST_PLAIN_TENSOR = 1000
INDEX_SUFFIX = ".index.json"
MAX_INDEX_BYTES = 64 << 20
MAX_CLASSES = 1024
DEFAULTDICT = "collections.defaultdict"
ACCEPTED = (
    "a directory that trainwright wrote, a Lightning .ckpt file, a file that torch.save wrote of a state_dict, a "
    ".safetensors file, the .index.json of several, or a folder with model.safetensors"
)
_REFUSED = re.compile(r"GLOBAL (\S+)|(?:class|function) (\S+)")
_DEEPSPEED = "DeepSpeed", "python {0}/zero_to_fp32.py {0} weights --safe_serialization"
_ENGINES = {
    ".metadata": (
        "torch.distributed.checkpoint",
        "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {0} weights.pt",
    ),
    "zero_to_fp32.py": _DEEPSPEED,
    "latest": _DEEPSPEED,
    "mp_rank_00_model_states.pt": (_DEEPSPEED[0], _DEEPSPEED[1].replace("{0}", "{0}/..")),
}
"""Files by which another library's sharded checkpoint is recognized, with its name and its converter."""
Source = str | BinaryIO
"""A local path, or an open file of another file system."""
_HUGGING_FACE = ("model.safetensors", f"model.safetensors{INDEX_SUFFIX}", "adapter_model.safetensors")
"""The weights in a folder of save_pretrained, of transformers or peft."""


@dataclass(frozen=True)
class Weights:
    """The data for rebuilding the model of a checkpoint. Values that the file lacks are None.

    Args:
        state_dict: the model's whole tensors on the CPU.
        hyper_parameter_forms: the forms of hyper-parameters that are not plain data; see plain_forms.py.
        hparams_name: the argument that contains the hyper-parameters, or "kwargs" if they are the arguments.
        contents: everything in the file except the tensors, for `on_load_checkpoint`.
        frozen_base: the parameters that the checkpoint omits, with their digests.
    """

    state_dict: dict[str, Any]
    kind: Literal["trainwright", "lightning", "state_dict", "safetensors"]
    hyper_parameters: dict[str, Any] = field(default_factory=dict)
    hyper_parameter_forms: dict[str, Any] = field(default_factory=dict)
    hparams_name: str | None = None
    datamodule_hyper_parameters: dict[str, Any] = field(default_factory=dict)
    datamodule_hyper_parameter_forms: dict[str, Any] = field(default_factory=dict)
    datamodule_hparams_name: str | None = None
    epoch: int | None = None
    global_step: int | None = None
    contents: dict[str, Any] = field(default_factory=dict)
    frozen_base: Base = field(default_factory=dict)


class _Placeholder:
    """An object in a pickle that is not loaded. It ignores its arguments, and its state except for OmegaConf's content."""

    content: Any = None
    """The plain content of an OmegaConf container or node, and None for other objects."""
    is_part: bool = False
    """Whether the OmegaConf container is in another one, which its interpolations may need."""

    def __new__(cls, *_: object) -> _Placeholder:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        if type(self).__name__.startswith("omegaconf.") and isinstance(state, dict):
            fields = {str(key).strip("_"): value for key, value in state.items()}
            # The nodes of a container get their states before the container.
            content = fields.get("content", fields.get("val"))
            if isinstance(content, dict):
                content = {key: _node_value(node) for key, node in content.items()}
            elif isinstance(content, list):
                content = [_node_value(node) for node in content]
            self.content, self.is_part = content, fields.get("parent") is not None


def _node_value(node: object) -> object:
    return node.content if isinstance(node, _Placeholder) else node


def _unpickled_dict(*_: object) -> dict[Any, Any]:
    """Return the dict that replaces a defaultdict. The pickle fills it afterwards."""
    return {}


def load_weights(path: str | os.PathLike[str], verify: Verify = "full") -> dict[str, Tensor]:
    """Return the whole tensors of a model on the CPU, by their names in its state_dict.

    Values that are not tensors, such as extra states, are omitted. A checkpoint that was saved with `trained_only` has the
    trained parameters and the buffers.

    Args:
        path: a checkpoint of any strategy and number of processes or a link to it, a Lightning `.ckpt`, a file that
            torch.save wrote of a state_dict, a `.safetensors` file, the `.index.json` of several, or a folder of
            transformers with `model.safetensors`.
        verify: how a checkpoint of a Trainer is verified first: "full" (every digest), "size", or "off".

    Raises:
        CheckpointError: there are no such weights, or they are damaged.

    >>> torch.save(module.state_dict(), "weights.pt")
    >>> weights = tw.load_weights("weights.pt")
    >>> module.load_state_dict(weights)
    <All keys matched successfully>
    """
    tensors = read_weights(path, verify).state_dict
    return {name: value for name, value in tensors.items() if isinstance(value, Tensor)}


def read_weights(path: str | os.PathLike[str], verify: Verify = "full") -> Weights:
    """Read the weights and hyper-parameters at a path or an fsspec URL. `verify` applies to our checkpoints."""
    check_verify(verify)
    name = pointed(os.fspath(path))
    filesystem, inside = fsspec.core.url_to_fs(name)
    filesystem.invalidate_cache()
    try:
        if filesystem.isdir(inside):
            names = {path.rstrip("/").rpartition("/")[2] for path in filesystem.ls(inside, False)}
            return _from_directory(name, names, verify)
        if not filesystem.exists(inside):
            raise MissingCheckpoint(f"{name} does not exist; expected {ACCEPTED}.")
        if isinstance(filesystem, LocalFileSystem) and not os.path.isfile(inside):
            raise CheckpointError(f"{name} is a pipe or a device, not a file; expected {ACCEPTED}.")
        if inside.endswith(INDEX_SUFFIX):
            # One byte above the limit shows that an index is too large, without reading all of it.
            return _from_index(name, filesystem.cat_file(inside, 0, MAX_INDEX_BYTES + 1))
        with filesystem.open(inside, "rb") as stream:
            start = stream.read(9)
            stream.seek(0)
            # torch.save writes a zip archive, and before torch 1.6 wrote a pickle of protocol 2.
            if start[:4] == b"PK\x03\x04" or start[:2] == b"\x80\x02":
                return _from_torch_file(name, inside if isinstance(filesystem, LocalFileSystem) else stream)
            # A safetensors file begins with the length of its header in 8 bytes, and the header is JSON.
            if start[8:] == b"{":
                return _from_safetensors(name, stream.read())
    except MissingCheckpoint:
        raise
    except (OSError, MemoryError) as error:  # a sparse file can claim any size
        raise CheckpointError(f"{name} cannot be read: {str(error) or 'it does not fit into memory'}") from error
    raise CheckpointError(f"{name} is not a checkpoint: it begins with {start!r}; expected {ACCEPTED}.")


def _from_index(path: str, data: bytes) -> Weights:
    """Read the files that an index names in its directory."""
    if len(data) > MAX_INDEX_BYTES:
        raise CheckpointError(f"{path} is larger than {MAX_INDEX_BYTES >> 20} MiB, too large for an index.")
    content = load_json(data, path)
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f'{path} has no "weight_map" of tensors and files; expected {ACCEPTED}.')
    parts, tensors = dict[str, Weights](), dict[str, Any]()
    for file in sorted(set(files.values())):
        if not FILE_NAME.fullmatch(file) or file.endswith(INDEX_SUFFIX):
            raise CheckpointError(
                f"{path} names the file {file[:200]!r}; expected names of files in its directory. Do not use it."
            )
        parts[file] = read_weights(f"{path.rpartition('/')[0] or '.'}/{file}")
        tensors |= parts[file].state_dict  # with all names of a tied tensor, of which the index lists one
    missing = [name for name, file in files.items() if clean_name(name) not in parts[file].state_dict]
    if missing:
        raise CheckpointError(
            f"{path}: {files[missing[0]]} has no {missing[0]!r}, though the index lists it there ({len(missing)} in all). "
            "Get the files that belong to this index."
        )
    listed = {clean_name(name): parts[file].state_dict[clean_name(name)] for name, file in files.items()}
    return Weights(tensors | listed, "safetensors")


def is_plain(value: Any, largest_tensor: int = LARGEST_PLAIN_TENSOR) -> bool:
    """Return whether a hyper-parameter may be stored: plain data without tensors of more than `largest_tensor` elements."""
    try:
        tensors = encode(value)[1].values()
    except TypeError:
        return False
    return all(
        tensor.numel() <= largest_tensor
        and tensor.dtype in DTYPES.values()
        and tensor.layout is torch.strided
        and not tensor.is_meta
        for tensor in tensors
    )


def _from_directory(path: str, names: set[str], verify: Verify) -> Weights:
    if MANIFEST_NAME not in names:
        if file := next((name for name in _HUGGING_FACE if name in names), None):
            return read_weights(f"{path}/{file}")
        engine, command = next((engine for name, engine in _ENGINES.items() if name in names), ("", ""))
        kind = f"a sharded checkpoint of {engine}" if engine else f"a directory without a {MANIFEST_NAME}"
        remedy = (
            f" Convert it first: {command.format(path)}"
            if engine
            else " Pass the file with the weights, if it has one."
        )
        raise CheckpointError(f"{path} is {kind}; expected {ACCEPTED}.{remedy}")
    checkpoint = open_checkpoint(path, verify)
    if "model" not in checkpoint.sections:
        raise CheckpointError(f"{path} has no model; its sections are {', '.join(checkpoint.sections) or 'none'}.")
    tensors: dict[str, Any] = {**checkpoint.read_tensors("model")}
    state = checkpoint.run_state()
    for number, states in state.get("extra", {}).items():  # the first module's names have no number
        tensors.update({name if number == "0" else f".{number}.{name}": value for name, value in states.items()})
    return Weights(
        _clean(tensors),
        "trainwright",
        **_hyper_parameters(path, state),
        epoch=checkpoint.epoch,
        global_step=checkpoint.step,
        contents={"epoch": checkpoint.epoch, "global_step": checkpoint.step, **state},
        frozen_base=state.get(FROZEN_BASE) or {},
    )


def _from_torch_file(path: str, source: Source) -> Weights:
    refused: Exception | None = None
    try:
        content = _unpickled(source)
    except Exception as error:  # damaged data causes errors of many types
        refused, content = error, _with_placeholders(source)
    if not isinstance(content, Mapping) or not isinstance(tensors := content.get("state_dict"), Mapping):
        if refused is not None:
            _refuse(path, refused)
        return Weights(_checked(path, content), "state_dict")
    epoch, step = (count if isinstance(count := content.get(key), int) else None for key in ("epoch", "global_step"))
    hyper_parameters = _hyper_parameters(path, content)
    plain = {key: value for key, value in content.items() if not _kind_in((key, value))}
    plain |= {key: value for key, value in hyper_parameters.items() if key in content}
    return Weights(
        _checked(path, tensors),
        "lightning",
        **hyper_parameters,
        epoch=epoch,
        global_step=step,
        contents={key: value for key, value in plain.items() if key != "state_dict"},
    )


def _rewound(source: Source) -> Source:
    if not isinstance(source, str):
        source.seek(0)
    return source


def _unpickled(source: Source) -> object:
    # weights_only rejects every object that could run code while it is unpickled.
    content: object = torch.load(_rewound(source), map_location="cpu", weights_only=True)
    check_sharing(content)
    return content


def _with_placeholders(source: Source) -> object:
    """Return a file's content with placeholders for the objects that torch's restricted reader rejects, or None.

    Nothing that the file names is imported. torch rejects some names in any case, such as `posix.system`, and reads many
    names in quadratic time.
    """
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(_rewound(source))[:MAX_CLASSES]
        safe: list[Any] = [(type(name, (_Placeholder,), {}), name) for name in names if name != DEFAULTDICT]
        with torch.serialization.safe_globals([*safe, (_unpickled_dict, DEFAULTDICT)]):
            return _unpickled(source)
    except Exception:  # the caller raises an error for the first read
        return None


def _kind_in(value: object, depth: int = 0) -> str:
    """Return the name of an object in nested plain data that a placeholder replaces, or "" if there is none."""
    if isinstance(value, type | _Placeholder):
        kind = value if isinstance(value, type) else type(value)
        return kind.__name__ if issubclass(kind, _Placeholder) else ""
    items = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    if not isinstance(items, (list, tuple, set, frozenset)):
        return ""
    if depth > MAX_DEPTH:
        return f"a nest of more than {MAX_DEPTH} levels"
    return next(filter(None, (_kind_in(item, depth + 1) for item in items)), "")


def _from_safetensors(path: str, data: bytes) -> Weights:
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} looks like a safetensors file and cannot be read: {error}") from error
    header = load_json(data[8 : 8 + int.from_bytes(data[:8], "little")], path)
    for name, stored in header.get(METADATA_KEY, {}).items():  # by convention, the other names of tied tensors
        if name not in tensors and stored in tensors:
            tensors[name] = tensors[stored]
    return Weights(_clean(tensors), "safetensors")


def _refuse(path: str, error: Exception) -> NoReturn:
    text = str(error)
    if "Weights" not in text and "weights_only" not in text:
        raise CheckpointError(
            f"{path} cannot be read as a file of torch.save; it may be damaged or cut short ({summarize(error)})."
        ) from error
    match = _REFUSED.search(text)
    kind = next((group for group in match.groups() if group), None) if match else None
    raise CheckpointError(
        f"{path} contains {kind or 'objects'}, but only tensors and plain data are read from a pickle: anything else could "
        "run code. If you trust the file, save only the weights in the program that wrote it "
        "(torch.save(model.state_dict(), ...)), or omit the object (save_hyperparameters(ignore=...)) and save again."
    ) from None


def _checked(path: str, content: Any) -> dict[str, Any]:
    """Check that the content is a state_dict, and return it with clean names."""
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} contains {a_type_of(content)}, not a dict of tensors; expected {ACCEPTED}.")
    if odd := next((f"{kind} as {key!r}" for key, value in content.items() if (kind := _kind_in(value))), None):
        raise CheckpointError(f"{path} contains {odd} of its state_dict, which can only be a tensor or plain data.")
    wrong = [
        key
        for key, value in content.items()
        if not isinstance(key, str) or not (isinstance(value, Tensor) or is_extra_state(key))
    ]
    if wrong:
        names = ", ".join(map(repr, list(content)[:8]))
        raise CheckpointError(
            f"{path} contains a dict with {names}, and {wrong[0]!r} is not a tensor: it is not a state_dict and has none "
            "under "
            f'"state_dict"; expected {ACCEPTED}.'
        )
    return _clean(content)


def _clean(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors under their names in an uncompiled module."""
    return {clean_name(name): value for name, value in tensors.items()}


def _hyper_parameters(path: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters, and the forms of values of other classes: their content in OmegaConf, or LEFT_OUT."""
    result: dict[str, Any] = {}
    for prefix in ("", "datamodule_"):
        values, name = content.get(f"{prefix}hyper_parameters") or {}, content.get(f"{prefix}hparams_name")
        stored = content.get(f"{prefix}hyper_parameter_forms")
        forms: dict[str, Form] = dict(stored) if isinstance(stored, Mapping) else {}
        if isinstance(values, _Placeholder):  # an object whose content the hyper-parameters are
            values, forms = _content_of(values, name in (None, "kwargs"))
        if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
            raise CheckpointError(f"{path}: its {prefix}hyper_parameters are not a dict of names and values.")
        for key, value in values.items():
            if kind := _kind_in(value):
                forms[key] = _config_form(value) or {"form": LEFT_OUT, "kind": kind}
        result[f"{prefix}hyper_parameters"] = {key: value for key, value in values.items() if key not in forms}
        result[f"{prefix}hyper_parameter_forms"] = forms
        result[f"{prefix}hparams_name"] = name if isinstance(name, str) else None
    return result


def _content_of(value: _Placeholder, has_arguments: bool) -> tuple[dict[str, Any], dict[str, Form]]:
    if not isinstance(value.content, dict) or not _config_form(value):
        return {CONTENT: value}, {}
    if not has_arguments:
        return value.content, {CONTENT: {"form": "omegaconf"}}
    unresolved = {"form": LEFT_OUT, "kind": "value with interpolations"}  # which need the rest of the configuration
    return value.content, {key: unresolved for key, part in value.content.items() if "${" in str(part)}


def _config_form(value: object) -> Form | None:
    """Return the form of an OmegaConf container of plain data, or None for another value."""
    if not isinstance(value, _Placeholder) or not isinstance(value.content, dict | list):
        return None
    try:
        check_sharing(value.content)
    except (ValueError, RecursionError):
        return None
    if _kind_in(value.content) or (value.is_part and "${" in str(value.content)):
        return None
    return {"form": "omegaconf", "content": {"form": "plain", "value": value.content}}

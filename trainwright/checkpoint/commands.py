"""`trainwright checkpoint show|verify|export|import`: inspects and converts checkpoints; a run uses reader.py."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from trainwright.checkpoint.codec import encode
from trainwright.checkpoint.conversion import EXPORT_DTYPES, export_safetensors, import_checkpoint
from trainwright.checkpoint.discovery import listing_of, read_manifest
from trainwright.checkpoint.filesystem import Files, resolve
from trainwright.checkpoint.last_link import is_last_link, pointed
from trainwright.checkpoint.manifest import FORMAT_VERSION, MANIFEST_NAME
from trainwright.checkpoint.reader import StoredCheckpoint, faults, open_checkpoint
from trainwright.checkpoint.tensors import DTYPE_NAMES, TensorEntry
from trainwright.distributed.masking import shown
from trainwright.errors import CheckpointError

FAILED, BAD_USAGE, INVALID, INTERRUPTED = 1, 2, 77, 130
"""Exit codes; 77 means that a checkpoint is damaged or is not a checkpoint."""
PROGRAM = "trainwright checkpoint"


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line that points to --help."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_USAGE, f"{self.prog}: {message}. See `{self.prog} --help`.\n")


def checkpoint_command(arguments: Sequence[str], _: Any = None) -> int:
    """Run a subcommand and return its exit code."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    if "out" in options and os.path.lexists(options.out):
        _complain(options.name, f"{options.out} exists already and is not overwritten. Choose another name.")
        return BAD_USAGE
    try:
        code = run(options)
        # Flushed here, where a closed pipe is caught below.
        sys.stdout.flush()
        return code
    except (CheckpointError, OSError, ValueError, ImportError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of the pipe has closed it (head, say)
            # Otherwise the interpreter flushes into the closed pipe at its end, and prints that this failed.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        _complain(options.name, f"{kind}{error}")
        return INVALID if isinstance(error, CheckpointError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> _Parser:
    parser = _Parser(prog=PROGRAM, description="Inspects and verifies checkpoints, and exports or imports weights.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, about: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        made.set_defaults(run=run, name=name)
        return made

    show = command("show", "Shows what a checkpoint holds.", _show)
    show.add_argument("path", metavar="PATH")
    show.add_argument("--tensors", action="store_true", help="list every tensor with its shape and dtype")
    show.add_argument("--json", action="store_true", help="print JSON")
    verify = command(
        "verify",
        "Reads every byte of a checkpoint, or of all checkpoints in a directory, and reports damage.",
        _verify,
    )
    verify.add_argument("path", metavar="PATH")
    export = command(
        "export", "Writes the weights as one safetensors file, for safetensors, transformers and others.", _export
    )
    export.add_argument("path", metavar="PATH")
    export.add_argument("out", metavar="OUT.safetensors", type=_export_name)
    export.add_argument(
        "--section",
        default="model",
        help="the section to export: model (the default), optimizer, or training and average of averaged weights",
    )
    export.add_argument(
        "--strip-prefix", default="", metavar="TEXT", help="export only names that begin with this, without it"
    )
    export.add_argument("--prefix", default="", metavar="TEXT", help="add this before each name")
    export.add_argument("--dtype", choices=EXPORT_DTYPES, help="convert floating-point tensors")
    bring = command(
        "import",
        "Writes a checkpoint of the weights in a Lightning .ckpt, a torch.save file of a state_dict, a .safetensors file, or "
        "an .index.json of several.",
        _import,
    )
    bring.add_argument("file", metavar="FILE")
    bring.add_argument("out", metavar="OUT.ckpt")
    return parser


def _show(options: argparse.Namespace) -> int:
    checkpoint = open_checkpoint(options.path, "size")
    about = summary(checkpoint)
    tensors = list_tensors(checkpoint) if options.tensors else None
    if options.json:
        print(json.dumps(about if tensors is None else {**about, "tensors": tensors}, indent=2))
        return 0
    lines = [
        _shown(options.path),
        f"  step {about['step']}, epoch {about['epoch']}",
        f"  {_origin(about)}; format {about['format_version']}",
    ]
    for name, size in about["sections"].items():
        shared = f" ({size['shared']} of them another's second name)" if size["shared"] else ""
        what = "parameters and buffers" if name == "model" else "elements"
        lines.append(
            f"  {name}: {size['tensors']} tensors{shared}, {size['elements']:,} {what}, {_bytes(size['bytes'])}"
        )
        for tensor, each in (tensors or {}).get(name, {}).items():
            lines.append(f"    {_shown(tensor)}  {tuple(each['shape'])}  {each['dtype']}")
    total = sum(about["files"].values())
    lines.append(
        f"  files: {len(about['files'])} and manifest.json, {_bytes(total)} (sizes match; verify checks every byte)"
    )
    lines += [f"    {name}  {_bytes(size)}" for name, size in about["files"].items()]
    lines += [f"    {_shown(name)}  not of the checkpoint" for name in about["extra_files"]]
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        if about[key]:
            lines.append(f"  {key.replace('_', ' ', 1) if key[0] == 'd' else key}:".replace("_", "-"))
            lines += [f"    {_shown(name)}: {_shown(json.dumps(value))}" for name, value in about[key].items()]
    print("\n".join(lines))
    return 0


def _origin(about: Mapping[str, Any]) -> str:
    version = about["trainwright_version"]
    by = f", trainwright {_shown(str(version))}" if version else ""
    if "imported_from" in about:
        return f"imported from a file of kind {_shown(str(about['imported_from']))}{by}"
    processes = "1 process" if about["world_size"] == 1 else f"{about['world_size']} processes"
    return f"written by {processes}, strategy {_shown(str(about.get('strategy')))}{by}"


def _verify(options: argparse.Namespace) -> int:
    verdicts = []
    files, inside = resolve(options.path)
    if not files.exists(inside):
        open_checkpoint(options.path, "size")  # raises, with the reason
    for path in candidates(options.path):
        verdicts.append(examine(path))
        print(_verdict_text(verdicts[-1]), flush=True)
    bad = [verdict.path for verdict in verdicts if verdict.problems]
    if not bad:
        return 0
    of = f"{len(bad)} of {len(verdicts)} checkpoints are damaged" if len(verdicts) > 1 else f"{bad[0]} is damaged"
    _complain("verify", f"{of}; every file has to be as it was written. Use another checkpoint, or a good copy.")
    return INVALID


def _verdict_text(verdict: Verdict) -> str:
    head = f"{_shown(verdict.path)}: "
    extra = [f"  {_shown(name)} is not of the checkpoint (left alone)" for name in verdict.extra_files]
    if verdict.problems:
        return "\n".join([f"{head}BAD", *(f"  {_shown(problem)}" for problem in verdict.problems), *extra])
    return "\n".join([f"{head}ok, step {verdict.step}, {verdict.num_files} files, {_bytes(verdict.num_bytes)}", *extra])


def _export_name(text: str) -> str:
    if not text.endswith(".safetensors"):
        raise argparse.ArgumentTypeError(f"{text} does not end in .safetensors, which is what an export writes")
    return text


def _export(options: argparse.Namespace) -> int:
    done = export_safetensors(
        options.path,
        options.out,
        section=options.section,
        strip_prefix=options.strip_prefix,
        prefix=options.prefix,
        dtype=EXPORT_DTYPES[options.dtype] if options.dtype else None,
    )
    print(f"{_shown(options.out)}: {len(done.names)} tensors, {_bytes(os.path.getsize(options.out))}")
    for name, other in done.shared.items():
        print(f"  {_shown(name)} is the same tensor as {_shown(other)}, and stored under that name")
    if done.left_out:
        print(f"  without {options.strip_prefix!r}, left out: {', '.join(map(_shown, done.left_out))}")
    if done.extra_states:
        print(f"  no tensors, left out: {', '.join(map(_shown, done.extra_states))}")
    return 0


def _import(options: argparse.Namespace) -> int:
    weights = import_checkpoint(options.file, options.out)
    print(
        f"{_shown(options.out)}: {len(weights.state_dict)} tensors of a {weights.kind} file, "
        f"{len(weights.hyper_parameters)} hyper-parameters; weights only, so fit cannot resume from it"
    )
    return 0


def _complain(name: str, text: str) -> None:
    print(f"{PROGRAM} {name}: {' '.join(_shown(line.strip()) for line in text.splitlines())}", file=sys.stderr)


def _shown(text: str) -> str:
    """Return the text without control characters: names come from untrusted files."""
    return text if text.isprintable() else ascii(text)[1:-1]


def _bytes(count: int) -> str:
    power = min(int(math.log(count, 1024)), 4) if count else 0
    return f"{count / 1024**power:.1f} {['bytes', 'KiB', 'MiB', 'GiB', 'TiB'][power]}" if power else f"{count} bytes"


@dataclass(frozen=True)
class Verdict:
    """The result of checking every byte of a checkpoint."""

    path: str
    problems: list[str] = field(default_factory=list)
    """One line for each bad file; empty if the checkpoint is complete."""
    extra_files: list[str] = field(default_factory=list)
    """Names in the directory that are not the checkpoint's."""
    step: int | None = None
    """None if the manifest cannot be read."""
    num_files: int = 0
    num_bytes: int = 0


def examine(path: str) -> Verdict:
    """Read each file whole, and return everything that is wrong with a checkpoint, not only the first fault."""
    path = pointed(path)
    files, inside = resolve(path)
    try:
        manifest = read_manifest(files, inside)
    except CheckpointError as error:
        return Verdict(path, [str(error)])
    listed = listing_of(files, inside, manifest)
    problems = list(faults(files, inside, manifest, listed))
    if not problems:
        try:
            checkpoint = open_checkpoint(path, "size")
            checkpoint.check_layout()
            checkpoint.run_state()
            for rank in range(checkpoint.world_size):
                checkpoint.rank_state(rank)
        except CheckpointError as error:
            problems.append(str(error).removeprefix(f"{path}: "))
    extra = sorted(listed.keys() - manifest.own_names)
    sizes = [record.size for record in manifest.all_files.values()]
    return Verdict(path, problems, extra, int(manifest.header["step"]), len(sizes) + 1, sum(sizes))


def candidates(path: str) -> list[str]:
    """Return the path itself, or the directories in it that look like checkpoints by their manifest or name."""
    files, inside = resolve(path)
    try:
        listed = files.listing(inside)
    except OSError:
        return [path]
    if MANIFEST_NAME in listed:
        return [path]
    names = sorted(name for name, size in listed.items() if size is None and not name.startswith("."))
    found = [name for name in names if name.endswith(".ckpt") or _has_manifest(files, f"{inside}/{name}")]
    paths = [f"{os.fspath(path).rstrip('/')}/{name}" for name in found]
    return [each for each in paths if not is_last_link(each)] or [path]


def _has_manifest(files: Files, path: str) -> bool:
    try:
        return MANIFEST_NAME in files.listing(path)
    except OSError:
        return False


def summary(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    """Return what a checkpoint holds as JSON-able data, without secret hyper-parameters."""
    state = checkpoint.run_state()
    about = {key: value for key, value in checkpoint.header.items() if key not in ("step", "epoch", "world_size")}
    return {
        "path": checkpoint.path,
        "step": checkpoint.step,
        "epoch": checkpoint.epoch,
        "world_size": checkpoint.world_size,
        **about,
        "trainwright_version": state.get("trainwright_version"),
        "format_version": FORMAT_VERSION,
        "sections": {name: size_of(checkpoint.tensors(name)) for name in checkpoint.sections},
        "files": checkpoint.file_sizes,
        "extra_files": checkpoint.extra_files,
        "hyper_parameters": shown("", encode(state.get("hyper_parameters") or {})[0]),
        "datamodule_hyper_parameters": shown("", encode(state.get("datamodule_hyper_parameters") or {})[0]),
    }


def size_of(table: Mapping[str, TensorEntry]) -> dict[str, int]:
    """Return the size of a section; tied tensors count once."""
    distinct = {(entry.pieces or name): entry for name, entry in table.items()}
    return {
        "tensors": len(table),
        "shared": len(table) - len(distinct),
        "elements": sum(entry.numel for entry in distinct.values()),
        "bytes": sum(entry.numel * entry.dtype.itemsize for entry in distinct.values()),
    }


def list_tensors(checkpoint: StoredCheckpoint) -> dict[str, dict[str, Any]]:
    """Return the shape and dtype of every tensor by section and name."""
    return {
        section: {
            name: {"shape": list(entry.shape), "dtype": DTYPE_NAMES[entry.dtype]}
            for name, entry in checkpoint.tensors(section).items()
        }
        for section in checkpoint.sections
    }

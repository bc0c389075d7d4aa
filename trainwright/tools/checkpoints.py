"""`trainwright checkpoint show|verify|export|import`: inspects and converts checkpoints."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainwright import CheckpointError
from trainwright.checkpoint.codec import encode
from trainwright.checkpoint.conversion import export_safetensors, import_checkpoint
from trainwright.checkpoint.filesystem import resolve
from trainwright.checkpoint.manifest import FORMAT_VERSION
from trainwright.checkpoint.reader import StoredCheckpoint, Verdict, candidates, examine, open_checkpoint
from trainwright.checkpoint.tensors import DTYPE_NAMES, TensorEntry
from trainwright.checkpoint.weight_files import EXPORT_DTYPES, FORMATS, export_settings, size_of
from trainwright.distributed.masking import shown
from trainwright.launch.cli import Parser
from trainwright.launch.config import printable
from trainwright.plain_forms import CONTENT, LEFT_OUT, readable

FAILED, BAD_USAGE, INVALID, INTERRUPTED = 1, 2, 77, 130
"""Exit codes. 77 means that a checkpoint is damaged or is not a checkpoint."""
PROGRAM = "trainwright checkpoint"


def checkpoint_command(arguments: Sequence[str], _: Any = None) -> int:
    """Run a subcommand and return its exit code."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    if "out" in options and os.path.lexists(options.out):
        _complain(options.name, f"{options.out} exists already and is not overwritten. Choose another name.")
        return BAD_USAGE
    try:
        code = run(options)
        # Flushed here, where an error from a closed pipe is caught.
        sys.stdout.flush()
        return code
    except (CheckpointError, OSError, ValueError, ImportError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of the pipe has ended, for example `head`
            # Otherwise the interpreter flushes into the closed pipe at its end, and prints that this failed.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        _complain(options.name, f"{kind}{error}")
        return INVALID if isinstance(error, CheckpointError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> Parser:
    parser = Parser(prog=PROGRAM, description="Inspects and verifies checkpoints, and exports or imports weights.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, about: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        subparser.set_defaults(run=run, name=name)
        return subparser

    show = command("show", "Shows the contents of a checkpoint.", _show)
    show.add_argument("path", metavar="PATH")
    show.add_argument("--tensors", action="store_true", help="list every tensor with its shape and dtype")
    show.add_argument("--json", action="store_true", help="print JSON")
    about = "Reads every byte of a checkpoint, or of all checkpoints in a directory, and reports damage."
    verify = command("verify", about, _verify)
    verify.add_argument("path", metavar="PATH")
    about = "Writes the weights as one safetensors file, or as a folder for transformers and others."
    export = command("export", about, _export)
    export.set_defaults(refuse=export.error)
    export.add_argument("path", metavar="PATH")
    export.add_argument("out", metavar="OUT", help="OUT.safetensors, or with --format a folder")
    about = "write a folder: huggingface for from_pretrained, safetensors under the module's names"
    export.add_argument("--format", choices=FORMATS, help=about)
    export.add_argument("--max-shard-size", metavar="SIZE", type=_size, help="of the folder's files, by default 5GB")
    export.add_argument("--tokenizer", metavar="DIR", help="a folder whose tokenizer is copied")
    export.add_argument("--model", metavar="NAME", help="the attribute with the model, if there are several")
    sections = "model (the default), optimizer, or training and average of averaged weights"
    export.add_argument("--section", default="model", help=f"the section to export: {sections}")
    shortens = "export only names that begin with this, without it"
    export.add_argument("--strip-prefix", default="", metavar="TEXT", help=shortens)
    export.add_argument("--prefix", default="", metavar="TEXT", help="add this before every name")
    export.add_argument("--dtype", choices=EXPORT_DTYPES, help="convert floating-point tensors")
    accepted = (
        "a Lightning .ckpt, a torch.save file of a state_dict, a .safetensors file, an .index.json of several, or a folder of "
        "transformers"
    )
    importing = command("import", f"Writes a checkpoint of the weights in {accepted}.", _import)
    importing.add_argument("file", metavar="FILE")
    importing.add_argument("out", metavar="OUT.ckpt")
    return parser


def _show(options: argparse.Namespace) -> int:
    checkpoint = open_checkpoint(options.path, "size")
    about = summary(checkpoint)
    tensors = _tensors_of(checkpoint) if options.tensors else None
    if options.json:
        print(json.dumps(about if tensors is None else {**about, "tensors": tensors}, indent=2))
        return 0
    lines = [printable(options.path), f"  step {about['step']}, epoch {about['epoch']}"]
    lines.append(f"  {_origin(about)}; format {about['format_version']}")
    if about["frozen_base"]:
        lines.append(f"  trained parameters only, base of {about['frozen_base']} tensors")
    for name, size in about["sections"].items():
        tied = f" ({size['shared']} of them another's second name)" if size["shared"] else ""
        kind = "parameters and buffers" if name == "model" else "elements"
        lines.append(f"  {name}: {size['tensors']} tensors{tied}, {size['elements']:,} {kind}, {_bytes(size['bytes'])}")
        for tensor, entry in (tensors or {}).get(name, {}).items():
            lines.append(f"    {printable(tensor)}  {tuple(entry['shape'])}  {entry['dtype']}")
    total = _bytes(sum(about["files"].values()))
    lines.append(f"  files: {len(about['files'])} and manifest.json, {total} (sizes match; verify checks every byte)")
    lines += [f"    {name}  {_bytes(size)}" for name, size in about["files"].items()]
    lines += [f"    {printable(name)}  not of the checkpoint" for name in about["extra_files"]]
    for key, title in (
        ("hyper_parameters", "hyper-parameters"),
        ("datamodule_hyper_parameters", "datamodule hyper-parameters"),
    ):
        if about[key]:
            lines.append(f"  {title}:")
            lines += [f"    {printable(name)}: {printable(json.dumps(value))}" for name, value in about[key].items()]
    print("\n".join(lines))
    return 0


def _origin(about: Mapping[str, Any]) -> str:
    version = about["trainwright_version"]
    by = f", trainwright {printable(str(version))}" if version else ""
    if "imported_from" in about:
        return f"imported from a file of kind {printable(str(about['imported_from']))}{by}"
    processes = "1 process" if about["world_size"] == 1 else f"{about['world_size']} processes"
    return f"written by {processes}, strategy {printable(str(about.get('strategy')))}{by}"


def _verify(options: argparse.Namespace) -> int:
    verdicts = []
    files, inside = resolve(options.path)
    if not files.exists(inside):
        open_checkpoint(options.path, "size")  # raises an error with the reason
    if not (paths := candidates(options.path)):
        _complain("verify", f"there is no checkpoint in {options.path}. Pass a checkpoint, or the folder of several.")
        return BAD_USAGE
    for path in paths:
        verdicts.append(examine(path))
        print(_verdict_text(verdicts[-1]), flush=True)
    bad = [verdict.path for verdict in verdicts if verdict.problems]
    if not bad:
        return 0
    of = f"{len(bad)} of {len(verdicts)} checkpoints are damaged" if len(verdicts) > 1 else f"{bad[0]} is damaged"
    _complain("verify", f"{of}: a file differs from what was written. Use another checkpoint, or a good copy.")
    return INVALID


def _verdict_text(verdict: Verdict) -> str:
    head = f"{printable(verdict.path)}: "
    extra = [f"  {printable(name)} is not of the checkpoint (ignored)" for name in verdict.extra_files]
    if verdict.problems:
        return "\n".join([f"{head}BAD", *(f"  {printable(problem)}" for problem in verdict.problems), *extra])
    return "\n".join([f"{head}ok, step {verdict.step}, {verdict.num_files} files, {_bytes(verdict.num_bytes)}", *extra])


def _check_export(options: argparse.Namespace) -> None:
    """Reject arguments that exclude each other, with the usage."""
    is_described = options.format == "huggingface"
    described = {"--tokenizer": options.tokenizer, "--model": options.model}
    renaming = {"--strip-prefix": options.strip_prefix, "--prefix": options.prefix}
    if wrong := [name for name, value in (renaming if is_described else described).items() if value]:
        options.refuse(f"{wrong[0]} is not accepted {'with' if is_described else 'without'} --format huggingface")
    if not options.format and not options.out.endswith(".safetensors"):
        options.refuse(
            f"{options.out} does not end in .safetensors, the format of an export. Pass --format for a folder"
        )


def _size(text: str) -> int:
    try:
        return size_of(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size. Pass bytes, or for example 10GB or 512MiB.") from None


def _export(options: argparse.Namespace) -> int:
    _check_export(options)
    size = options.max_shard_size or "5GB"
    settings = export_settings(options.format or "safetensors", options.dtype, size, options.model)
    names = {"section": options.section, "strip_prefix": options.strip_prefix, "prefix": options.prefix}
    done = export_safetensors(options.path, options.out, settings=settings, tokenizer=options.tokenizer, **names)
    files = [*Path(options.out).glob("*")] or [options.out]
    print(f"{printable(options.out)}: {len(done.names)} tensors, {_bytes(sum(map(os.path.getsize, files)))}")
    if options.format == "huggingface" and not options.tokenizer:
        print("  without a tokenizer: copy it into the folder, or pass --tokenizer DIR")
    for name, other in done.shared.items():
        print(f"  {printable(name)} is the same tensor as {printable(other)}, and stored under that name")
    if done.skipped:
        print(f"  without {options.strip_prefix!r}, skipped: {', '.join(map(printable, done.skipped))}")
    if done.extra_states:
        print(f"  no tensors, skipped: {', '.join(map(printable, done.extra_states))}")
    return 0


def _import(options: argparse.Namespace) -> int:
    weights = import_checkpoint(options.file, options.out)
    stored = _with_forms(weights.hyper_parameters, weights.hyper_parameter_forms)
    print(
        f"{printable(options.out)}: {len(weights.state_dict)} tensors of a {weights.kind} file, "
        f"{len(stored)} hyper-parameters; weights only, so fit cannot resume from it"
    )
    skipped = {**weights.hyper_parameter_forms, **weights.datamodule_hyper_parameter_forms}
    for name, form in skipped.items() if weights.kind == "lightning" else ():
        if kind := form.get("kind"):
            print(f"  hyper-parameter {printable(name)} skipped: a {printable(kind)}")
    return 0


def _complain(name: str, text: str) -> None:
    print(f"{PROGRAM} {name}: {' '.join(printable(line.strip()) for line in text.splitlines())}", file=sys.stderr)


def _bytes(count: int) -> str:
    power = min(int(math.log(count, 1024)), 4) if count else 0
    return f"{count / 1024**power:.1f} {['bytes', 'KiB', 'MiB', 'GiB', 'TiB'][power]}" if power else f"{count} bytes"


def summary(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    """Return the contents of a checkpoint as JSON-able data, without secret hyper-parameters."""
    state = checkpoint.run_state()
    about = {key: value for key, value in checkpoint.header.items() if key not in ("step", "epoch", "world_size")}
    values = {}
    for name in ("hyper_parameters", "datamodule_hyper_parameters"):
        forms = state.get(f"{name.removesuffix('s')}_forms") or {}
        values[name] = shown("", encode(_with_forms(state.get(name) or {}, forms))[0])
    return {
        **{name: getattr(checkpoint, name) for name in ("path", "step", "epoch", "world_size")},
        **about,
        "trainwright_version": state.get("trainwright_version"),
        "format_version": FORMAT_VERSION,
        "frozen_base": len(state.get("frozen_base") or ()),
        "sections": {name: _size_of(checkpoint.tensors(name)) for name in checkpoint.sections},
        "files": checkpoint.file_sizes,
        "extra_files": checkpoint.extra_files,
        **values,
    }


def _with_forms(plain: Mapping[str, Any], forms: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters with the content of those that are not plain data, unless it was skipped."""
    others = {name: form for name, form in forms.items() if name != CONTENT and form.get("form") != LEFT_OUT}
    return {**plain, **{name: readable(form) for name, form in others.items()}}


def _size_of(table: Mapping[str, TensorEntry]) -> dict[str, int]:
    """Return the size of a section. Tied tensors count once."""
    distinct = {(entry.pieces or name): entry for name, entry in table.items()}
    size = sum(entry.numel * entry.dtype.itemsize for entry in distinct.values())
    count = sum(entry.numel for entry in distinct.values())
    return {"tensors": len(table), "shared": len(table) - len(distinct), "elements": count, "bytes": size}


def _tensors_of(checkpoint: StoredCheckpoint) -> dict[str, dict[str, Any]]:
    """Return the shape and dtype of every tensor by section and name."""

    def described(section: str) -> dict[str, Any]:
        entries = checkpoint.tensors(section).items()
        return {name: {"shape": list(entry.shape), "dtype": DTYPE_NAMES[entry.dtype]} for name, entry in entries}

    return {section: described(section) for section in checkpoint.sections}

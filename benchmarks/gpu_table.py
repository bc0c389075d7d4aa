"""The table of benchmarks/gpu.py, as Markdown and as CSV."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from gpu_cases import LABELS
from gpu_records import Row, peak_flops

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("ms", "ms", "{:.3f}"),
    ("ratio", "ratio", "{:.3f}"),
    ("lowest", "lowest", "{:.3f}"),
    ("highest", "highest", "{:.3f}"),
    ("committed_ms", "committed ms", "{:.1f}"),
    ("samples_per_second", "samples/s", "{:.0f}"),
    ("tokens_per_second", "tokens/s", "{:.0f}"),
    ("mfu", "MFU", "{:.1%}"),
    ("idle", "idle", "{:.1%}"),
    ("peak_mib", "peak MiB", "{:.0f}"),
    ("syncs", "syncs a step", "{:.2f}"),
    ("h2d_kib", "KiB to the device", "{:.1f}"),
    ("d2h_kib", "KiB back", "{:.3f}"),
    ("first_s", "first step, s", "{:.2f}"),
    ("loss", "loss", "{:.4f}"),
)
"""A field of a Row, its heading, and how it is written."""
LEGEND = """\
`ms`: of a step, of a save's call, or of a process from its start to the end of its first step; the median of all rounds.
`ratio`: the median of the ratios to the loop by hand (torch's defaults) in the same round, between the `lowest` and the
`highest` of them. `committed`: until a save is written whole. `idle`: the part of a step in which nothing ran on the device:
1 - (time under kernels and copies, by torch.profiler over a few steps) / (`ms`, which is timed without it). `peak`: the most
that tensors took, after the warm-up. `syncs`: reads that the host waits for, as torch's sync debug mode warns of them. `KiB`:
copies between host and device a step, by the profiler. `first step`: with what is compiled and allocated in it, while the
others of its case warm up too. A loss with `!=` is not that by hand: the two did not do the same. Losses of two runs differ,
as a faster machine takes more steps in the time of a turn. An empty cell was not measured here."""


def markdown(rows: list[Row], environment: dict[str, Any], notes: Iterable[str]) -> str:
    """Return the table with the environment above it and the notes below."""
    filled = [column for column in COLUMNS if any(getattr(row, column[0]) is not None for row in rows)]
    headings = ["case", "implementation", "rounds", *(column[1] for column in filled), "note"]
    lines = ["# Measured on one device", "", *_facts(environment), "", _line(headings), _line(["---"] * len(headings))]
    for row in rows:
        cells = [_cell(row, key, form) for key, _, form in filled]
        lines.append(_line([f"`{row.case}`", LABELS[row.implementation], str(row.rounds), *cells, _plain(row.note)]))
    return "\n".join([*lines, "", LEGEND, "", *(f"- {each}" for each in notes), ""])


def _cell(row: Row, key: str, form: str) -> str:
    value = getattr(row, key)
    if value is None:
        return ""
    return form.format(value) + (" !=" if key == "loss" and row.is_loss_off else "")


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def _facts(environment: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in environment.get("versions", {}).items())
    memory = environment.get("memory_gib") or 0.0
    facts = [
        str(environment.get("name", "")) + (f", {memory:.0f} GiB" if memory else ""),
        f"driver {environment['driver']}" if environment.get("driver") else "",
        f"CUDA or HIP {environment['cuda']}" if environment.get("cuda") else "",
        f"torch {environment.get('torch')}",
        f"Python {environment.get('python')}",
        str(environment.get("machine", "")),
        "small models" if environment.get("small") else "",
    ]
    peak = peak_flops(str(environment.get("name", "")))
    told = f"MFU is against {peak / 1e12:.1f} TFLOP/s, dense bf16 by the maker's data sheet." if peak else ""
    models = "transformers' DistilBERT" if environment.get("with_transformers") else "a DistilBERT in plain torch"
    return [f"{'; '.join(each for each in facts if each)}. {versions}. {models}. {told}".strip()]


def write(folder: Path, rows: list[Row], environment: dict[str, Any], notes: Iterable[str]) -> None:
    """Write table.md and table.csv, each replaced atomically, so that a reader always finds a complete one."""
    _replace(folder / "table.md", markdown(rows, environment, notes))
    beside = folder / ".table.csv"
    with open(beside, "w", newline="") as stream:
        writer = csv.DictWriter(stream, [each.name for each in fields(Row)])
        writer.writeheader()
        writer.writerows({key: "" if value is None else value for key, value in asdict(row).items()} for row in rows)
    os.replace(beside, folder / "table.csv")


def _replace(path: Path, text: str) -> None:
    beside = path.with_name("." + path.name)
    beside.write_text(text)
    os.replace(beside, path)

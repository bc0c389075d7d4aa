"""The benchmark for a machine with a GPU, run on the CPU: all kinds of cases, failures, and the table."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from forked import run_python
from interpreters import run_command

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
OURS = ("by_hand", "trainwright", "trainwright_default", "trainwright_raw", "trainwright_background")
PATIENCE = 800
"""Seconds that a run may take on a machine that is busy with other work."""


def rows_of(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    with open(folder / "table.csv", newline="") as stream:
        return {(row["case"], row["implementation"]): row for row in csv.DictReader(stream)}


def small_run(folder: Path, cases: str, names: str, *more: str) -> Any:
    """Run cases once, without a limit that a slow machine could reach."""
    chosen = ("--cases", cases, "--implementations", names, "--out", str(folder))
    limits = ("--minutes", str(PATIENCE / 60), "--visits", "1", "--rounds", "2")
    command = [sys.executable, FOLDER / "gpu.py", "--device", "cpu", "--small", *chosen, *limits, *more]
    done = run_command(command, seconds=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return rows_of(folder)


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpu_records

    return gpu_records


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE + 60)
def test_loops_do_the_same_work_and_a_run_is_resumed_with_the_cases_that_were_not_visited(tmp_path: Path) -> None:
    cases = ("mlp", "distilbert-12-ragged-bf16-mixed")
    small_run(tmp_path, cases[0], ",".join(OURS))
    rows = small_run(tmp_path, ",".join(cases), "by_hand,trainwright", "--resume")
    assert set(rows) == {("mlp", name) for name in OURS[:-1]} | {(cases[1], name) for name in OURS[:2]}
    for key, row in rows.items():
        assert row["note"] == "", key
        assert row["rounds"] == "2", key
        assert float(row["ratio"]) > 0, key
        assert row["is_loss_off"] == "False", key
    table = (tmp_path / "table.md").read_text()
    assert "| `mlp` | trainwright `Trainer`, same flags | 2 |" in table
    assert (tmp_path / "ratios.png").exists() or (tmp_path / "ratios.svg").exists()
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    visited = [json.loads(line)["case"] for line in lines[1:]]
    assert list(dict.fromkeys(visited)) == list(cases)
    assert len(visited) == len(rows)  # once


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE + 60)
def test_cases_can_compile_save_and_start(tmp_path: Path) -> None:
    rows = small_run(tmp_path, "gpt,save,start", "by_hand,trainwright,trainwright_background")
    expected = {(case, name) for case in ("gpt", "save", "start") for name in ("by_hand", "trainwright")}
    assert set(rows) == {*expected, ("save", "trainwright_background")}
    for key, row in rows.items():
        assert row["note"] == "", key
        assert float(row["ms"]) > 0, key
        assert row["is_loss_off"] == "False", key
    in_background = rows["save", "trainwright_background"]
    assert float(in_background["committed_ms"]) > float(in_background["ms"])
    assert float(rows["gpt", "by_hand"]["tokens_per_second"]) > 0
    assert rows["gpt", "by_hand"]["mfu"] == ""  # no peak is known of a CPU


@pytest.mark.launch
def test_unknown_names_are_refused() -> None:
    done = run_python(FOLDER / "gpu.py", "--cases", "gtp")
    assert done.returncode == 2
    told = "--cases 'gtp' is unknown. Did you mean 'gpt'? Choose from distilbert-12-512-bf16-mixed, mlp, gpt, resnet"
    assert told in done.stderr


def test_a_trace_tells_what_was_under_way(records: ModuleType) -> None:
    from gpu_probes import read_trace

    def event(category: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": args}

    events = [
        event("kernel", "gemm", 0, 100),
        event("kernel", "add", 50, 100),  # on another stream, half of it beside the first
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 400, 50, bytes=4096),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 500, 10, bytes=2048),
        event("cuda_runtime", "cudaStreamSynchronize", 500, 900),
        event("cpu_op", "aten::add", 0, 1000),
        {"ph": "M", "name": "process_name"},
    ]
    found = read_trace(json.dumps({"traceEvents": events}), 2)
    assert found == {"busy_ms": 0.105, "kernels": 1.0, "waits": 0.5, "h2d_kib": 2.0, "d2h_kib": 1.0}
    assert read_trace(json.dumps({"traceEvents": events[4:]}), 2) == {}


def test_records_become_rows(records: ModuleType, tmp_path: Path) -> None:
    from gpu_cases import Case
    from gpu_picture import draw
    from gpu_table import markdown

    case = Case("gpt", model="gpt", compiled="default")
    environment = {"name": "NVIDIA H100 80GB HBM3", "torch": "2.11.0", "installed": []}
    kept = records.Records(tmp_path / "records.jsonl", environment, resumes=False)
    facts = {"samples": 4.0, "tokens": 100.0, "flops": 989.4e9}
    kept.add(
        records.Record("gpt", "by_hand", 0, [0.01, 0.03, 0.02], losses=[2.0, 1.0, 0.5], warm_loss=3.0, facts=facts)
    )
    ours = records.Record(
        "gpt", "trainwright", 0, [0.005, 0.03, 0.03], losses=[2.0, 1.0, 0.6], warm_loss=3.0, facts=facts
    )
    ours.probe = {"busy_ms": 27.0, "syncs": 0.5}
    kept.add(ours)
    kept.add(records.Record("gpt", "lightning", 0, [0.02], losses=[2.5], warm_loss=3.2, facts=facts))
    kept.add(records.Record("gpt", "ignite", 0, reason="RuntimeError: a | b"))
    again = records.Records(tmp_path / "records.jsonl", environment, resumes=True)
    assert not again.has_failed(case)
    by_hand, mine, lightning, ignite = rows = again.rows([case])
    assert (by_hand.ms, by_hand.ratio, by_hand.tokens_per_second) == (20.0, 1.0, 5000.0)
    assert by_hand.mfu == pytest.approx(0.05)
    assert (mine.ms, mine.ratio, mine.lowest, mine.highest) == (30.0, 1.0, 0.5, 1.5)
    assert mine.idle == pytest.approx(0.1)
    assert not mine.is_loss_off
    assert lightning.is_loss_off
    assert (ignite.ms, ignite.note) == (None, "RuntimeError: a | b")
    table = markdown(rows, environment, ["Not run: mlp."])
    assert "989.4 TFLOP/s" in table
    assert "| 2.5000 != |" in table
    assert "RuntimeError: a / b" in table
    drawn = draw(tmp_path, rows, environment)
    assert drawn.read_text().count("<rect") == 1 + 3

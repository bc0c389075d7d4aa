"""The benchmark of the ranks' memory: its counts on two and four ranks, and the plan of `trainwright estimate` beside them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from interpreters import run_command

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "sharded_memory.py"
NAMES = "ddp,ddp_sharded,deepspeed_stage_1,deepspeed_stage_2,fsdp,deepspeed_stage_3"
WIDTH = 304
"""The blocks have a million parameters, so they are groups by default."""
MODEL = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import trainwright as tw
from memory_models import TextTransformer

class Text(tw.Module):
    def __init__(self):
        super().__init__()
        self.network = TextTransformer({WIDTH})

    def training_step(self, batch, batch_idx):
        loss = self.network(batch)
        self.log("loss", loss)
        return loss
"""


def measured(out: Path, ranks: int, names: str) -> tuple[dict[str, Any], str]:
    """Return the records of the text transformer by strategy, and the benchmark's output."""
    arguments = ("--width", WIDTH, "--ranks", ranks, "--families", "text", "--strategies", names, "--budget", 0)
    done = run_command([sys.executable, SCRIPT, *map(str, arguments), "--out", out], seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    records = map(json.loads, (out / "sharded_memory.jsonl").read_text().splitlines())
    return {record["strategy"]: record for record in records}, done.stdout


def check_plan(out: Path, records: dict[str, Any], *arguments: str) -> None:
    """Compare `trainwright estimate` with the records: bytes per rank, activations, and bytes sent per step."""
    (out / "plan.py").write_text(MODEL)
    command = [
        sys.executable,
        "-m",
        "trainwright",
        "estimate",
        "plan.py:Text",
        *arguments,
        "--optimizer",
        "Adam",
        "--json",
    ]
    batch = ("--batch", "2x64:int64,2:int64", "--precision", "32-true", "--device-memory", "80GiB")
    done = run_command([*command, *batch], folder=out, seconds=100)
    assert done.returncode == 0, done.stderr
    names = {"": "", "replicate=2,shard=2": " hybrid", "data=2,tensor=2": " tensor"}
    rows = {row["strategy"] + names[row["mesh"]]: row for row in json.loads(done.stdout)["rows"]}
    assert rows.keys() == records.keys()
    for name, record in records.items():
        row = rows[name]
        parts = ("parameters", "gathered", "ahead", "gradients", "optimizer", "activations")
        assert row["total"] == pytest.approx(sum(record[part] for part in parts), rel=0.15), name
        assert row["activations"] == pytest.approx(record["activations"], rel=0.01), name
        if name == "fsdp tensor":  # whose ranks also send activations
            for part in ("parameters", "optimizer"):
                assert row[part] == pytest.approx(record[part], rel=0.15), part
            both = row["gradients"] + row["gathered"]  # the gathered part has whole gradients too
            assert both == pytest.approx(record["gradients"] + record["gathered"] + record["ahead"], rel=0.15)
            continue
        # gloo reduces to shards by an all-reduce, which sends twice as much as a ring, and to one rank by a ring that divides
        # the tensor, whose parts it sends on to that rank.
        shards = row["devices"] // (2 if row["mesh"] else 1)
        ring = 4 * record["count"] * (shards - 1) // shards
        again = {"ddp_sharded": ring // shards, "fsdp": ring, "deepspeed_stage_3": ring}.get(row["strategy"], 0)
        assert row["sent"] == pytest.approx(record["sent"] - again, rel=0.15), name
        assert (row["verdict"], row["rejected"]) == ("fits", ""), name


def test_two_ranks_hold_what_the_strategies_promise(tmp_path: Path) -> None:
    rows, output = measured(tmp_path, 2, NAMES)
    assert list(rows) == NAMES.split(",")
    whole = 4 * rows["ddp"]["count"]
    ddp, zero, fsdp = rows["ddp"], rows["deepspeed_stage_2"], rows["fsdp"]
    assert ddp["parameters"] == zero["parameters"] == whole
    assert ddp["gradients"] == 2 * whole  # its buckets too
    assert ddp["gathered"] == zero["gathered"] == 0
    assert ddp["optimizer"] == pytest.approx(2 * whole, rel=0.001)  # and the counts of its steps
    assert zero["optimizer"] == pytest.approx(1.5 * whole, rel=0.01)  # two moments and a master, halved
    assert fsdp["parameters"] == pytest.approx(0.5 * whole, rel=0.01)
    assert fsdp["optimizer"] == pytest.approx(whole, rel=0.01)
    assert 0 < fsdp["gathered"] < whole
    assert 0 < ddp["activations"] == zero["activations"] == fsdp["activations"]
    assert min(row["peak"] for row in rows.values()) > 0
    assert ddp["estimate"] == pytest.approx(5 * whole, rel=0.001)
    table = (tmp_path / "sharded_memory.md").read_text()
    assert table in output
    assert f"| text transformer, 5.7 M | `ddp` | {whole / 2**20:.1f} + 0.0 + {2 * whole / 2**20:.1f} + " in table
    assert (tmp_path / "sharded_memory.png").read_bytes().startswith(b"\x89PNG")
    check_plan(tmp_path, rows, "--ranks", "2")


def test_the_plan_of_a_mesh_is_what_four_ranks_hold_and_send(tmp_path: Path) -> None:
    rows, _ = measured(tmp_path, 4, f"{NAMES},fsdp hybrid,fsdp tensor")
    assert rows["fsdp hybrid"]["optimizer"] == pytest.approx(2 * rows["fsdp"]["optimizer"], rel=0.01)
    assert rows["fsdp tensor"]["activations"] < 0.8 * rows["fsdp"]["activations"]
    plan = {"network.words": "rowwise", "network.blocks.*.mlp.0": "colwise", "network.blocks.*.mlp.2": "rowwise"}
    meshes = ("--mesh", "replicate=2,shard=2", "--mesh", "data=2,tensor=2", "--tensor-plan", json.dumps(plan))
    check_plan(tmp_path, rows, *meshes)

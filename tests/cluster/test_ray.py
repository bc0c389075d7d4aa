"""Jobs of Ray Train on a real local Ray lose a worker and a node."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreters import run_command, search_path
from jobs import run_job
from small import Classifier, assert_equal, make_data, make_loader, weights
from started import ROOT, processes_of

import trainwright as tw

pytestmark = pytest.mark.cluster
(PROGRAM,) = re.findall(r"^```\n(import .*?)^```$", (ROOT / "docs/ray.md").read_text(), re.MULTILINE | re.DOTALL)
SAVES: dict[str, Any] = {"every_n_train_steps": 2, "save_top_k": -1}
LOST_STEP = 4
"""The step that four workers saved last."""


def run_with_ray(folder: Path, *command: str) -> str:
    """Run a program that uses Ray, and return its output. No process of Ray stays."""
    temporary, tag = tempfile.mkdtemp(prefix="ray"), uuid.uuid4().hex  # short, for the paths of sockets
    variables = {
        "PYTHONPATH": search_path(ROOT, ROOT / "tests", ROOT / "tests/cluster"),
        "HOME": temporary,  # Ray writes a token there
        "RAY_TMPDIR": temporary,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",  # Ray needs up to 20 s to notice that a node has gone
        "TEST_TAG": tag,
    }
    try:
        done = run_command([sys.executable, *command], folder=folder, seconds=300, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr
    finally:
        for process in processes_of(tag):
            process.kill()
        shutil.rmtree(temporary, ignore_errors=True)


def train_until_the_loss(folder: Path) -> None:
    trainer = tw.Trainer(max_steps=LOST_STEP, logger=False, callbacks=[tw.ModelCheckpoint(folder, **SAVES)])
    trainer.fit(Classifier(dropout=0.2), make_loader(88, shuffle=True), make_loader())


def train_on(folder: Path) -> dict[str, torch.Tensor]:
    module, (path,) = Classifier(dropout=0.2), folder.parent.glob(f"first/*-step={LOST_STEP}.ckpt")
    # Outside of a worker of Ray, RayReport changes nothing.
    trainer = tw.Trainer(max_epochs=2, logger=False, callbacks=[tw.ModelCheckpoint(folder, **SAVES), tw.RayReport()])
    trainer.fit(module, make_loader(88, shuffle=True), make_loader(), ckpt_path=path)
    return weights(module)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the job of ray_driver.py, and return its folder."""
    folder = tmp_path_factory.mktemp("job")
    run_with_ray(folder, str(Path(__file__).with_name("ray_driver.py")), str(folder))
    return folder


def read(folder: Path, pattern: str) -> list[Any]:
    return [json.loads(line) for path in folder.glob(pattern) for line in path.read_text().splitlines()]


def test_the_engine_takes_ranks_and_devices_of_ray(job: Path) -> None:
    starts = read(job, "start-*.json")
    assert len(starts) == 10
    for start in starts:
        assert start["ours"] == start["rays"]
        assert start["devices"] == ["cpu", "cpu"]
        assert start["launched_by"] == "ray"
    assert sorted(start["ours"][-1] for start in starts) == [0] * 6 + [1] * 4


def test_ray_gets_metrics_and_checkpoints_without_a_copy(job: Path) -> None:
    (result,) = read(job, "result.json")
    returned, reported = result["returned"], result["reported"]
    assert reported[returned["newest"]] == {"epoch": 2, "step": 18, **returned["metrics"]}
    assert {"loss_epoch", "val_loss"} <= returned["metrics"].keys()
    assert reported.keys() == {str(path.parent) for path in (job / "storage").rglob("manifest.json")}
    assert result["checkpoint"] == returned["stopped"][0]  # the last one in Ray's storage


def test_saves_in_the_background_and_within_an_epoch_are_reported(job: Path) -> None:
    (result,) = read(job, "result.json")
    returned, reported = result["returned"], result["reported"]
    assert sorted(reported[path]["step"] for path in returned["background"]) == [12, 12]
    assert result["metrics"]["step"] == 2


def test_a_checkpoint_outside_of_the_storage_of_ray_is_a_warning(job: Path) -> None:
    (result,) = read(job, "result.json")
    texts = [text for text in result["returned"]["warnings"] if "Ray gets the metrics without a checkpoint" in text]
    assert len(texts) == 1
    assert f"{job}/outside/epoch=0-step=6.ckpt is outside of its storage, {job}/storage/run. Omit" in texts[0]


def test_a_run_that_loses_a_worker_and_a_node_ends_with_the_same_bits(job: Path, tmp_path: Path) -> None:
    (result,) = read(job, "result.json")
    run_job(train_until_the_loss, 4, tmp_path / "first")
    uninterrupted = run_job(train_on, 2, tmp_path / "second")[0]
    assert_equal({name: torch.tensor(value) for name, value in result["returned"]["weights"].items()}, uninterrupted)


def test_each_epoch_has_each_sample_once(job: Path) -> None:
    wanted = sorted(make_data(88).tensors[0][:, 0].tolist())
    trained: dict[tuple[int, ...], set[tuple[float, ...]]] = {}
    for row in read(job, "samples-*.jsonl"):
        if row["size"] == (4 if row["step"] < LOST_STEP else 2):
            place = row["epoch"], row["step"], row["rank"]
            trained.setdefault(place, set()).add(tuple(row["samples"]))
    assert all(len(batches) == 1 for batches in trained.values())  # four workers trained step 2 twice, and alike
    for epoch in range(2):
        batches = [batch for (number, *_), found in trained.items() if number == epoch for batch in found]
        assert sorted(sample for batch in batches for sample in batch) == wanted


def test_each_strategy_trains_in_a_worker(job: Path) -> None:
    (result,) = read(job, "result.json")
    first, *others = result["returned"]["losses"].values()
    assert others == pytest.approx([first] * 4, abs=1e-5)


def test_a_restarted_worker_gets_the_latest_reported_checkpoint(job: Path) -> None:
    reported = [Path(start["reported"]).name for start in read(job, "start-*.json")]
    assert sorted(reported) == ["", "", "", "", *["epoch=0-step=2.ckpt"] * 4, *["epoch=0-step=4.ckpt"] * 2]


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    said = run_with_ray(tmp_path, "train.py")
    assert re.search(r"val_acc 0\.\d+, in \S+/runs/points/\S+/checkpoints/epoch=\S+\.ckpt", said), said

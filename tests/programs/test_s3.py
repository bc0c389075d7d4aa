"""A run with its checkpoints and its logs in S3, against a local server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import run_python
from started import Started, python

pytestmark = pytest.mark.slow
pytest.importorskip("s3fs")
pytest.importorskip("moto")

SERVER = """
import logging, threading, boto3
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel("ERROR")  # nothing reads the pipe, and a full one stops the server
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
address = "http://%s:%d" % server.get_host_and_port()
boto3.client("s3", endpoint_url=address).create_bucket(Bucket="bucket")
print(address, flush=True)
threading.Event().wait()
"""
TRAIN = """
import json, sys
import torch
import trainwright as tw
from small import Classifier, make_loader

tw.seed_everything(1)
module = Classifier(dropout=0.1)
saver = tw.ModelCheckpoint(sys.argv[2] + "/checkpoints", monitor="val_loss", async_save=True)
trainer = tw.Trainer(
    max_epochs=int(sys.argv[1]), default_root_dir=sys.argv[2] + "/logs", log_every_n_steps=1, callbacks=[saver],
    accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(module, make_loader(shuffle=True), make_loader(12), ckpt_path="auto")
print(json.dumps({"weights": torch.cat([w.flatten() for w in module.parameters()]).tolist(), "best": saver.best_model_path}))
"""
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Yield the variables with which a process reaches the server."""
    server = Started(python("-c", SERVER), tmp_path, **KEYS)
    try:
        server.wait_for("http")
        yield {**KEYS, "AWS_ENDPOINT_URL": server.stdout.split()[-1]}
    finally:
        server.close()


def test_a_run_in_s3_resumes_to_the_weights_of_an_uninterrupted_run(store: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)

    def train(epochs: int, folder: str) -> dict[str, object]:
        done = run_python(script, epochs, f"s3://bucket/{folder}", folder=tmp_path, variables=store, warnings_are=None)
        assert done.returncode == 0, done.stderr
        result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return result

    train(1, "resumed")
    resumed, whole = train(2, "resumed"), train(2, "whole")
    assert resumed["weights"] == whole["weights"]
    assert str(resumed["best"]).startswith("s3://bucket/resumed/checkpoints/")
    for command in (("checkpoint", "verify", "s3://bucket/resumed/checkpoints"), ("runs", "s3://bucket/resumed/logs")):
        done = run_python("-m", "trainwright", *command, folder=tmp_path, variables=store, warnings_are=None)
        assert done.returncode == 0, done.stderr
        assert "s3://bucket/resumed/checkpoints" in done.stdout
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("s3:")]

"""Strangers: other processes of the machine, checkpoints of unknown origin, and readers of what a run shows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deadlines import deadline
from fault_rows import record_row
from small import QUIET, Classifier, make_loader
from started import GONE_SECONDS, Started, python

import trainwright as tw
from trainwright.hyperparameters import read_hyper_parameters
from trainwright.tools.checkpoints import checkpoint_command

pytestmark = pytest.mark.faults

RANK = """
import os, time
if os.environ["RANK"] == "1":
    print("ready", os.environ["MASTER_PORT"], os.getpid(), flush=True)
time.sleep(600)
"""
STRANGER = """
import json, sys
from datetime import timedelta
import torch.distributed as dist

ports = json.loads(sys.argv[1])
report = {"rank": 0, "summary": "a", "traceback": "", "code": 0, "is_secondary": False, "was_printed": False}


def connect(port):
    base = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=60), wait_for_workers=False)
    return dist.PrefixStore("trainwright/0", base)


def report_success(store):
    text = "\\x1b[2J\\x1b]0;title\\x07line 1\\nline 2"
    store.set("failure/1", json.dumps(report | {"summary": text, "traceback": text * 100_000, "code": 256}))
    store.add("failure/count", 1)


def post_rubbish(store):
    others = [{"rank": -1}, {"rank": "0"}, {"summary": None}, {"code": 2.5}, {"more": 1}]
    values = ["[" * 10**6, "{", "9" * 10**5, "null", b"\\xff", *(json.dumps(report | other) for other in others)]
    for number, value in enumerate(values, start=1):
        store.set(f"failure/{number}", value)
    store.add("failure/count", 10**12)


attacks = {
    "success": report_success,
    "rubbish": post_rubbish,
    "counter": lambda store: store.set("failure/count", "not a number"),
    "stop": lambda store: store.set("stopped/code", "-9"),
}
for name, port in ports.items():
    attacks[name](store := connect(port))
    store.check(["failure/count"])
    print(name, flush=True)
"""
ATTACKS = ("success", "rubbish", "counter", "stop")


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[int, str, float]]]:
    """Jobs whose stores a stranger has written to: their exit codes, their messages, and the seconds until they ended."""
    folder = tmp_path_factory.mktemp("strangers")
    (folder / "rank.py").write_text(RANK)
    (folder / "stranger.py").write_text(STRANGER)
    jobs = {
        name: Started(python("-m", "trainwright", "launch", "--devices", "2", "rank.py"), folder) for name in ATTACKS
    }
    try:
        ports, ranks = {}, {}
        for name, job in jobs.items():
            job.wait_for("ready")
            ports[name], ranks[name] = (int(word) for word in job.stdout.split()[-2:])
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "stranger.py", json.dumps(ports)], cwd=folder, check=True, timeout=deadline(120)
        )
        os.kill(ranks["stop"], signal.SIGKILL)
        ends = {}
        for name, job in jobs.items():
            code = job.wait(60)
            ends[name] = code, job.stderr, time.monotonic() - began
            job.check_nothing_left()
        yield ends
    finally:
        for job in jobs.values():
            job.close()


def test_strangers_report_cannot_end_a_job_with_success_or_write_control_characters(
    attacked: dict[str, tuple[int, str, float]],
) -> None:
    code, message, seconds = attacked["success"]
    assert code == 1
    assert "rank 0 of 2 failed first (\\x1b[2J\\x1b]0;title\\x07line 1\\nline 2); the job was ended.\n" in message
    assert not [each for each in message if not each.isprintable() and each != "\n"]
    assert len(message) < 1_000_000
    assert seconds < deadline(GONE_SECONDS + 60)
    record_row("a stranger posts a failure with exit code 256", seconds, message.splitlines()[-1], f"exit code {code}")


def test_rubbish_in_the_store_ends_a_job_with_a_message(attacked: dict[str, tuple[int, str, float]]) -> None:
    code, message, seconds = attacked["rubbish"]
    assert code == 1
    assert "Traceback" not in message
    assert "rank 0 of 2 failed first (it left no report); the job was ended." in message
    record_row("a stranger posts rubbish", seconds, message.splitlines()[-1], f"exit code {code}")


def test_store_that_cannot_answer_ends_a_job_with_a_message(attacked: dict[str, tuple[int, str, float]]) -> None:
    code, message, seconds = attacked["counter"]
    assert code == 1
    assert "Traceback" not in message
    assert "trainwright: the store of this job at 127.0.0.1 port " in message
    record_row("a stranger replaces a counter", seconds, message.splitlines()[-1], f"exit code {code}")


def test_strangers_stop_code_does_not_hide_a_killed_rank(attacked: dict[str, tuple[int, str, float]]) -> None:
    code, message, seconds = attacked["stop"]
    assert code == 137
    assert "rank 1 of 2 failed first (killed by SIGKILL" in message
    record_row("a stranger posts a stop code, a rank is killed", seconds, message.splitlines()[-1], f"exit code {code}")


TOKENS = {
    "api_key": "a-secret-word",
    "hub": "hf_" + "aB3" * 12,
    "data": "s3://me:word@host/x",
    "tokens": ["sk-" + "a1" * 15],
}
PLAIN = {
    "pad_token": "[PAD]", "key_dim": 64, "tokenizer": "bert", "num_keys": 3, "max_tokens": 512, "token": 5, "lr": 0.1,
}  # fmt: skip
SECRETS = ("a-secret-word", "aB3aB3", "me:word", "a1a1a1")


class Secretive(Classifier):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_secrets_are_in_no_file_of_a_run_but_its_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loggers = [tw.CSVLogger(tmp_path / "csv"), tw.TensorBoardLogger(tmp_path / "board")]
    module = Secretive(**TOKENS, **PLAIN)
    trainer = tw.Trainer(max_steps=1, **(QUIET | {"logger": loggers, "enable_report": True}))
    trainer.fit(module, make_loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    logged = [path for kind in ("csv", "board") for path in (tmp_path / kind).rglob("*") if path.is_file()]
    assert {"hparams.yaml", "hparams.json", "report.html"} <= {path.name for path in logged}
    found = {path.name: word for path in logged for word in SECRETS if word.encode() in path.read_bytes()}
    assert found == {}
    assert read_hyper_parameters(str(next(tmp_path.rglob("hparams.yaml")))).items() >= PLAIN.items()

    assert checkpoint_command(["show", str(tmp_path / "a.ckpt")]) == 0
    shown = capsys.readouterr().out
    assert [word for word in SECRETS if word in shown] == []
    assert '"[PAD]"' in shown
    assert Secretive.load_from_checkpoint(tmp_path / "a.ckpt").hparams == TOKENS | PLAIN
    record_row("secrets in hyper-parameters", 0.0, "(not shown)", "in clear in the checkpoint only")


def test_launcher_shows_no_secret_argument(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    command = python("-m", "trainwright", "launch", "--dry-run", "a.py", "--api-key", TOKENS["api_key"], TOKENS["hub"])
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=deadline(60), check=True)
    assert [word for word in SECRETS if word in done.stdout + done.stderr] == []
    assert "--api-key (not shown) '(not shown)'" in done.stdout

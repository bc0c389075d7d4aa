"""Stores that hang, refuse, are slow or gone, and loggers that fail, against a real S3 server behind a proxy that breaks."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from deadlines import wait_until
from fault_rows import record_row
from programs.test_s3 import KEYS, SERVER
from small import QUIET, Classifier, make_loader
from started import Started, python

import trainwright as tw

pytestmark = pytest.mark.faults
s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")

TRAIN = """
import json, sys, time
from pathlib import Path
import torch
import trainwright as tw
from small import Classifier, make_loader
from trainwright.faults import remote_calls

remote_calls.LIMIT_SECONDS, remote_calls.PATIENCE_SECONDS = float(sys.argv[3]), float(sys.argv[4])
remote_calls.BLOCK_BYTES = 0

class Tell(tw.Callback):
    def on_train_batch_end(self, trainer, *_):
        print("step", trainer.global_step, flush=True)
        while trainer.global_step == 5 and Path("pause").exists():
            time.sleep(0.1)

tw.seed_everything(1)
module = Classifier(dropout=0.1)
saver = tw.ModelCheckpoint(sys.argv[1] + "/checkpoints", "{step}", every_n_train_steps=2, save_top_k=-1)
trainer = tw.Trainer(
    max_steps=int(sys.argv[2]), default_root_dir=sys.argv[1] + "/logs", log_every_n_steps=1, callbacks=[saver, Tell()],
    accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, logger="gone" not in sys.argv[1],
)
trainer.fit(module, make_loader(shuffle=True), ckpt_path="auto")
print(json.dumps(torch.cat([w.flatten() for w in module.parameters()]).tolist()))
"""


class Proxy:
    """Passes connections on to a server, and breaks requests by `mode`: pass, hang (PUT only), 503, down or slow."""

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("http://").split(":")
        self.mode, self.num_broken = "pass", 0
        self._server = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listening.accept()
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client, socket.create_connection(self._server) as server:
            threading.Thread(target=self._pass_back, args=(server, client), daemon=True).start()
            try:
                while data := client.recv(1 << 16):
                    is_request = data.split(b" ", 1)[0] in (b"PUT", b"GET", b"HEAD", b"POST", b"DELETE")
                    if self.mode == "hang" and data.startswith(b"PUT"):
                        self.num_broken += 1
                        while self.mode == "hang":
                            time.sleep(0.1)
                        return
                    if self.mode == "503" and is_request:
                        self.num_broken += 1
                        client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                        return
                    if self.mode == "down":
                        self.num_broken += 1
                        return
                    if self.mode == "slow":
                        self.num_broken += 1
                        time.sleep(0.3)
                    server.sendall(data)
            finally:
                server.shutdown(socket.SHUT_RDWR)  # which also ends a read of the other thread

    def _pass_back(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Proxy, dict[str, str]]]:
    """Yield a proxy before an S3 server, and the variables with which a process reaches it."""
    server = Started(python("-c", SERVER), tmp_path_factory.mktemp("server"), **KEYS)
    try:
        server.wait_for("http")
        proxy = Proxy(server.stdout.split()[-1])
        config = json.dumps({"config_kwargs": {"retries": {"max_attempts": 1}, "read_timeout": 30}})
        yield proxy, {**KEYS, "AWS_ENDPOINT_URL": proxy.address, "FSSPEC_S3": config}
    finally:
        server.close()


@pytest.fixture(autouse=True)
def healthy(store: tuple[Proxy, dict[str, str]]) -> Iterator[None]:
    yield
    store[0].mode = "pass"


def listing(store: tuple[Proxy, dict[str, str]], folder: str) -> list[str]:
    files = s3fs.S3FileSystem(key="key", secret="secret", endpoint_url=store[0].address, skip_instance_cache=True)
    return sorted(path.removeprefix(f"{folder}/") for path in files.find(folder))


def table(store: tuple[Proxy, dict[str, str]], folder: str) -> str:
    files = s3fs.S3FileSystem(key="key", secret="secret", endpoint_url=store[0].address, skip_instance_cache=True)
    return str(files.cat_file(f"bucket/{folder}/logs/trainwright_logs/version_0/metrics.csv"), "utf-8")


def begin(store: tuple[Proxy, dict[str, str]], folder: str, place: Path, *limits: float, steps: int = 12) -> Started:
    script = place / "train.py"
    script.write_text(TRAIN)
    limit, patience = limits or (3.0, 300.0)
    url = folder if "://" in folder else f"s3://bucket/{folder}"
    return Started(python(str(script), url, str(steps), str(limit), str(patience)), place, **store[1])


@pytest.fixture(scope="module")
def whole(store: tuple[Proxy, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return the weights and the table of a run without a fault."""
    run = begin(store, "whole", tmp_path_factory.mktemp("whole"))
    assert run.wait() == 0, run.stderr
    return run.stdout.splitlines()[-1], table(store, "whole")


def test_a_run_outlives_a_store_that_hangs_refuses_is_gone_and_is_slow(
    store: tuple[Proxy, dict[str, str]], whole: tuple[str, str], tmp_path: Path
) -> None:
    proxy = store[0]
    run = begin(store, "broken", tmp_path)
    try:
        for step, mode, seconds in ((2, "hang", 8), (4, "503", 5), (6, "down", 20), (8, "slow", 3)):
            run.wait_for(f"step {step}\n")
            before, proxy.mode = proxy.num_broken, mode
            wait_until(lambda before=before: proxy.num_broken > before, 60)
            time.sleep(seconds)
            proxy.mode = "pass"
        assert run.wait() == 0, run.stderr
    finally:
        run.close()
    assert (run.stdout.splitlines()[-1], table(store, "broken")) == whole
    record_row(
        "S3 hangs 8 s, answers 503 5 s, is gone 20 s, is slow", 0, "none: calls are repeated", "exit 0, same bits"
    )


def test_a_run_that_is_killed_within_an_upload_continues_its_folders_and_others_are_kept_out(
    store: tuple[Proxy, dict[str, str]], whole: tuple[str, str], tmp_path: Path
) -> None:
    proxy = store[0]
    (tmp_path / "pause").touch()
    run = begin(store, "killed", tmp_path, 600.0, 600.0)
    try:
        run.wait_for("step 5\n")
        other = begin(store, "killed", tmp_path)
        assert other.wait() == 1
        message = f"is in use by another run: process {run.process.pid} on {socket.gethostname()}"
        assert message in other.stderr
        record_row("two runs in one folder of S3", 0, message, "exit 1, the first run unharmed")
        before, proxy.mode = proxy.num_broken, "hang"
        (tmp_path / "pause").unlink()
        wait_until(lambda: proxy.num_broken > before, 60)
        run.process.send_signal(signal.SIGKILL)
    finally:
        run.close()
    proxy.mode = "pass"
    files = s3fs.S3FileSystem(key="key", secret="secret", endpoint_url=proxy.address, skip_instance_cache=True)
    files.pipe_file("bucket/killed/checkpoints/step=99.ckpt/model-00000.safetensors", b"half")
    again = begin(store, "killed", tmp_path)
    assert again.wait() == 0, again.stderr
    assert (again.stdout.splitlines()[-1], table(store, "killed")) == whole
    names = listing(store, "bucket/killed")
    assert not [name for name in names if "step=99" in name or "version_1" in name or name.endswith(".lock")], names
    record_row("SIGKILL within an upload to S3, then the same command", 0, "none", "same bits, same log folder")


def test_a_store_that_stays_away_ends_the_run_with_the_address_and_the_attempts(
    store: tuple[Proxy, dict[str, str]], tmp_path: Path
) -> None:
    limits = 8.0, 10.0
    run = begin(store, "gone", tmp_path, *limits)
    try:
        run.wait_for("step 3\n")
        store[0].mode, began = "hang", time.monotonic()
        run.wait_for_message("CheckpointError")
        seconds = time.monotonic() - began
        assert run.wait() == 1
    finally:
        run.close()
    last = [line for line in run.stderr.splitlines() if "Check that the store answers" in line][-1]
    assert "s3://bucket/gone/checkpoints/step=" in last
    assert " times in " in last
    record_row(f"S3 never answers a PUT (limits of {limits[0]:.0f} and {limits[1]:.0f} s)", seconds, last, "exit 1")
    missing = begin(store, "s3://missing/folder", tmp_path, *limits)
    assert missing.wait() == 1
    assert "step 1" not in missing.stdout
    assert "s3://missing/folder" in missing.stderr


class Flaky(tw.Logger):
    """Fails for some rows."""

    def __init__(self, error: type[Exception] = ConnectionError) -> None:
        self.error, self.steps = error, []  # type: ignore[var-annotated]

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if step in (2, 3):
            raise self.error("no network")
        self.steps.append(step)


def test_a_logger_that_fails_loses_rows_and_not_the_run(tmp_path: Path) -> None:
    trainer = tw.Trainer(**{**QUIET, "logger": Flaky()}, log_every_n_steps=1, max_steps=8)
    with pytest.warns(UserWarning, match="Flaky") as warned:
        trainer.fit(Classifier(), make_loader())
    texts = [str(warning.message) for warning in warned]
    assert "Flaky.log_metrics failed: ConnectionError: no network. Training continues" in texts[0]
    assert texts[1:] == ["Flaky works again; 2 rows lost."]
    with pytest.raises(TypeError, match="no network"):
        tw.Trainer(**{**QUIET, "logger": Flaky(TypeError)}, log_every_n_steps=1, max_steps=8).fit(
            Classifier(), make_loader()
        )
    record_row("a user's logger without network for two rows", 0, texts[0], "2 rows lost, said")


FULL = """
import resource, signal, sys, warnings
import trainwright as tw
from small import Classifier, make_loader

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
warnings.simplefilter("always")

class Fill(tw.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step in (4, 8):
            limit = 64 if trainer.global_step == 4 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

loggers = [tw.CSVLogger(sys.argv[1]), tw.TensorBoardLogger(sys.argv[1])]
tw.Trainer(
    max_steps=12, logger=loggers, log_every_n_steps=1, callbacks=[Fill()], accelerator="cpu", limit_train_batches=2,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
).fit(Classifier(), make_loader())
"""


def test_a_full_disk_under_the_logs_does_not_end_the_run(tmp_path: Path) -> None:
    script = tmp_path / "full.py"
    script.write_text(FULL)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = Started(python(str(script), str(tmp_path)), tmp_path)  # with pipes, which have no limit
    assert done.wait() == 0, done.stderr
    assert "CSVLogger.flush failed: OSError: CSVLogger could not write to" in done.stderr
    assert "CSVLogger works again; 0 rows lost" in done.stderr
    assert "TensorBoardLogger works again; " in done.stderr
    lines = (tmp_path / "trainwright_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert {line.split(",")[0] for line in lines[1:]} >= {str(step) for step in range(12)}
    record_row("full disk under the logs", 0, "CSVLogger.flush failed: ... works again; 0 rows lost", "exit 0")


def test_a_checkpoint_of_another_run_cuts_no_table(tmp_path: Path) -> None:
    def fit(steps: int, folder: str, ckpt_path: str | None = None) -> Any:
        saver = tw.ModelCheckpoint(tmp_path / folder, "{step}", every_n_train_steps=2, save_top_k=-1)
        settings = {
            **QUIET,
            "enable_checkpointing": True,
            "logger": tw.CSVLogger(tmp_path / "logs"),
            "callbacks": saver,
        }
        trainer = tw.Trainer(**settings, log_every_n_steps=1, max_steps=steps)
        torch.manual_seed(1)
        trainer.fit(Classifier(), make_loader(), ckpt_path=ckpt_path)
        return trainer.logger

    # Both runs have the same path, as in containers.
    foreign = fit(2, "foreign")
    os.rename(foreign.log_dir, tmp_path / "elsewhere")
    ours = fit(6, "ours")
    before = Path(ours.metrics_path).read_text()
    assert ours.log_dir == foreign.log_dir
    branch = fit(4, "other", str(tmp_path / "foreign" / "step=2.ckpt"))
    assert Path(ours.metrics_path).read_text() == before
    assert branch.log_dir != ours.log_dir

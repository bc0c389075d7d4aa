"""The cost of a checkpoint, saved while the loop waits, saved in the background, and verified, against the bare work and peers.

A perceptron of 20 M parameters with its AdamW state takes 240 MB. The bare work writes the same bytes to a file, syncs it, and
hashes them once with SHA-256, each rank its part. All methods take turns in each round, each after a sync of the disk. The
ratio is the median of the ratios within the rounds: to the bare work for saves, to reading and hashing the same files for
verification. For a background save `ms` is how long the loop is held up, and `whole` includes its thread. torch.save and
Lightning neither sync nor hash; DCP does not hash.

Then a Trainer saves every 100 steps by ModelCheckpoint, with and without async_save: how long a save holds up the loop, as a
part of the interval's steps, and how much slower steps are while the thread writes.

    python benchmarks/checkpoint.py [--parameters 20] [--rounds 7] [--steps 100] [--ranks 1,2] [--threads N] [--folder DIR]
    python benchmarks/checkpoint.py --small --rounds 1 --steps 4      # a tiny model, to try it
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import trainwright as tw
from trainwright.checkpoint.reader import open_checkpoint

WIDTH, SMALL_WIDTH = 1024, 32
BATCH = 16
ROOT = Path(__file__).resolve().parents[1]
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def make_net(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    width = SMALL_WIDTH if options.small else WIDTH
    layers = 3 if options.small else max(options.parameters * 1_000_000 // (width * width), 1)
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())))


def make_loader(options: argparse.Namespace, steps: int, ranks: int) -> Any:
    inputs = torch.randn(BATCH, SMALL_WIDTH if options.small else WIDTH)
    return torch.utils.data.DataLoader([inputs] * (steps * ranks), batch_size=None)


class Net(tw.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.net = make_net(options)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


# -- one save ------------------------------------------------------------------------------------------------------------


class Saves:
    """Methods to save a trained module with its optimizer; each returns the seconds that hold up the loop, and the total."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.trainer = tw.Trainer(max_steps=1, enable_checkpointing=False, devices=options.rank_count, **QUIET)
        self.module = Net(options)
        self.trainer.fit(self.module, make_loader(options, 1, options.rank_count))
        self.rank, self.ranks = self.trainer.global_rank, self.trainer.world_size
        optimizer = self.trainer.optimizers[0]
        self.tensors = [each.detach() for each in self.module.parameters()]
        self.tensors += [each[key] for each in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        self.bytes = sum(each.numel() * each.element_size() for each in self.tensors)
        self.state = {"model": self.module.state_dict(), "optimizer": optimizer.state_dict()}
        self.hash_seconds = 0.0
        self._lightning = self._make_lightning() if self.ranks == 1 and not options.without_lightning else None

    def ways(self) -> dict[str, Callable[[Path], tuple[float, float]]]:
        found = {
            "bare": self.bare,
            "trainwright": self.trainwright,
            "trainwright, background": self.trainwright_background,
            "DCP": self.dcp,
            "DCP, async_save": self.dcp_async,
        }
        if self.ranks == 1:
            found["torch.save"] = self.torch_save
        if self._lightning is not None:
            found["Lightning"] = self.lightning
        return found

    def bare(self, path: Path) -> tuple[float, float]:
        """Write, sync and hash this rank's part of the bytes."""
        parts = [each.view(-1).tensor_split(self.ranks)[self.rank] for each in self.tensors]
        mine = [each.numpy().data.cast("B") for each in parts]
        began = time.perf_counter()
        with open(f"{path}-{self.rank}", "xb", buffering=0) as stream:
            for view in mine:
                stream.write(view)
            os.fsync(stream.fileno())
        digest = hashlib.sha256()
        for view in mine:
            digest.update(view)
        seconds = time.perf_counter() - began
        return seconds, seconds

    def trainwright(self, path: Path) -> tuple[float, float]:
        return timed(lambda: self.trainer.save_checkpoint(path))

    def trainwright_background(self, path: Path) -> tuple[float, float]:
        return timed(lambda: self.trainer.save_checkpoint(path, blocking=False), self.trainer.engine.finish_save)

    def torch_save(self, path: Path) -> tuple[float, float]:
        return timed(lambda: torch.save(self.state, path))

    def dcp(self, path: Path) -> tuple[float, float]:
        import torch.distributed.checkpoint as dcp

        return timed(lambda: dcp.save(self.state, checkpoint_id=path, no_dist=self.ranks == 1))

    def dcp_async(self, path: Path) -> tuple[float, float]:
        import torch.distributed.checkpoint as dcp

        begun: list[Any] = []
        options = {"no_dist": True} if self.ranks == 1 else {}
        begin = lambda: begun.append(dcp.async_save(self.state, checkpoint_id=path, **options))  # noqa: E731
        return timed(begin, lambda: begun[0].result())

    def lightning(self, path: Path) -> tuple[float, float]:
        assert self._lightning is not None
        return timed(lambda: self._lightning.save_checkpoint(path))

    def verify(self, path: Path) -> tuple[float, float]:
        """Return the seconds to verify a checkpoint, and those to read and hash the same files."""
        verified, _ = timed(lambda: open_checkpoint(str(path)))
        buffer = memoryview(bytearray(8 << 20))

        def read() -> None:
            for each in sorted(path.iterdir()):
                digest = hashlib.sha256()
                with open(each, "rb", buffering=0) as stream:
                    while count := stream.readinto(buffer):
                        digest.update(buffer[:count])

        return verified, timed(read)[0]

    def _make_lightning(self) -> Any:
        try:
            import lightning.pytorch as pl
        except ImportError:
            return None
        options = self.options

        class LightningNet(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = make_net(options)

            training_step = Net.training_step
            configure_optimizers = Net.configure_optimizers

        trainer = pl.Trainer(max_steps=1, devices=1, enable_checkpointing=False, **QUIET)
        trainer.fit(LightningNet(), make_loader(options, 1, 1))
        return trainer


def timed(begin: Callable[[], Any], finish: Callable[[], Any] | None = None) -> tuple[float, float]:
    """Return the seconds of the first call, and the sum of both."""
    began = time.perf_counter()
    begin()
    held = time.perf_counter() - began
    if finish is not None:
        finish()
    return held, time.perf_counter() - began


def measure_saves(options: argparse.Namespace, folder: Path) -> None:
    saves = Saves(options, folder)
    ways = saves.ways()
    held: dict[str, list[float]] = {name: [] for name in ways}
    whole: dict[str, list[float]] = {name: [] for name in ways}
    verified: list[tuple[float, float]] = []
    for turn in range(-1, options.rounds):  # the first round warms up
        for number, (name, save) in enumerate(ways.items()):
            path = folder / f"{turn + 1}-{number}"
            if saves.rank == 0:
                os.sync()
            over_ranks(
                saves, (0.0, 0.0)
            )  # all ranks begin at once: no rank's wait for the disk counts as another's save
            slowest = over_ranks(saves, save(path))
            if turn >= 0:
                held[name].append(slowest[0])
                whole[name].append(slowest[1])
                if name == "trainwright" and saves.rank == 0:
                    verified.append(saves.verify(path))
            over_ranks(saves, (0.0, 0.0))
            if saves.rank == 0:
                for each in folder.glob(f"{path.name}*"):
                    shutil.rmtree(each) if each.is_dir() else each.unlink()
    if saves.rank == 0:
        report_saves(saves, held, whole, verified)


def over_ranks(saves: Saves, seconds: tuple[float, float]) -> list[float]:
    """Return the maximum over all ranks."""
    most = torch.tensor(seconds, dtype=torch.float64)
    if saves.ranks > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return [float(each) for each in most]


def report_saves(
    saves: Saves, held: dict[str, list[float]], whole: dict[str, list[float]], verified: list[tuple[float, float]]
) -> None:
    print(
        f"\n{saves.ranks} rank(s), {saves.bytes / 1e6:.1f} MB, {torch.get_num_threads()} thread(s) each, "
        f"{len(verified)} rounds\n{'save':28s} {'ms':>9s} {'ratio':>7s} {'lowest':>7s} {'highest':>8s} {'whole ms':>9s}"
    )
    for name in held:
        ratios = [mine / bare for mine, bare in zip(held[name], held["bare"], strict=True)]
        print(
            f"{name:28s} {1e3 * statistics.median(held[name]):9.2f} {statistics.median(ratios):7.3f} {min(ratios):7.3f} "
            f"{max(ratios):8.3f} {1e3 * statistics.median(whole[name]):9.2f}"
        )
    ratios = [mine / bare for mine, bare in verified]
    print(
        f"{'verify, one rank':28s} {1e3 * statistics.median(mine for mine, _ in verified):9.2f} "
        f"{statistics.median(ratios):7.3f} {min(ratios):7.3f} {max(ratios):8.3f}",
        flush=True,
    )


# -- a run ---------------------------------------------------------------------------------------------------------------


class TimedCheckpoint(tw.ModelCheckpoint):
    """Records how long a save holds up the loop."""

    def __init__(self, folder: Path, every: int, async_save: bool) -> None:
        super().__init__(str(folder), every_n_train_steps=every, async_save=async_save)
        self.held: list[float] = []

    def on_save_point(self, trainer: Any, module: Any) -> None:
        seconds, _ = timed(lambda: super(TimedCheckpoint, self).on_save_point(trainer, module))
        if trainer.global_step % self.every_n_train_steps == 0:
            self.held.append(seconds)


class StepClock(tw.Callback):
    """Records the seconds of each step, separately for those during which a save was written."""

    def __init__(self) -> None:
        self.alone: list[float] = []
        self.beside: list[float] = []
        self._began, self._is_beside = 0.0, False

    @staticmethod
    def _is_writing(trainer: Any) -> bool:
        save = trainer.engine.writer.in_flight
        return save is not None and not save.wait(0)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._is_beside = self._is_writing(trainer)
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        seconds = time.perf_counter() - self._began
        if self._is_beside == self._is_writing(trainer):  # wholly one or the other
            (self.beside if self._is_beside else self.alone).append(seconds)


def measure_runs(options: argparse.Namespace, folder: Path) -> None:
    steps = options.rounds * options.steps + options.steps // 2
    for async_save in (True, False):
        place = folder / ("async" if async_save else "blocking")
        clock, checkpoint = StepClock(), TimedCheckpoint(place, options.steps, async_save)
        trainer = tw.Trainer(
            max_steps=steps, max_epochs=-1, devices=options.rank_count, callbacks=[clock, checkpoint], **QUIET
        )
        trainer.fit(Net(options), make_loader(options, steps, options.rank_count))
        if trainer.is_global_zero:
            step = statistics.median(clock.alone)
            shares = [100 * each / (options.steps * step) for each in checkpoint.held]
            slower = f"{statistics.median(clock.beside) / step:7.2f} ({len(clock.beside)})" if clock.beside else "-"
            print(
                f"{'ModelCheckpoint, async_save' if async_save else 'ModelCheckpoint':28s} {1e3 * step:9.2f} "
                f"{1e3 * checkpoint.held[0]:9.1f} {1e3 * statistics.median(checkpoint.held):9.1f} "
                f"{statistics.median(shares):9.2f} % {slower:>16s}",
                flush=True,
            )
        trainer.engine.barrier()


# -- jobs ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def scratch(parent: str | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)


def run_rank(options: argparse.Namespace) -> None:
    """Make all measurements for one number of ranks; this process is one of the ranks."""
    torch.set_num_threads(options.threads or max((os.cpu_count() or 1) // options.rank_count, 1))
    warnings.filterwarnings("ignore")  # the peers' advice
    logging.disable(logging.WARNING)
    folder = Path(options.job_folder)
    measure_saves(options, folder)
    if int(os.environ.get("RANK", "0")) == 0:
        print(
            f"\n{'run, saves each ' + str(options.steps) + ' steps':28s} {'ms a step':>9s} {'first ms':>9s} {'held ms':>9s} "
            f"{'of interval':>11s} {'steps meanwhile':>16s}",
            flush=True,
        )
    measure_runs(options, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=20, help="millions of parameters")
    parser.add_argument(
        "--rounds", type=int, default=7, help="turns of each way, and saves of each run; the median counts"
    )
    parser.add_argument("--steps", type=int, default=100, help="steps between two saves of a run")
    parser.add_argument("--ranks", default="1,2", help="numbers of processes, comma-separated")
    parser.add_argument("--threads", type=int, default=0, help="threads of a rank; 0 shares out the cores")
    parser.add_argument("--folder", default=None, help="where to write; by default the folder of temporary files")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try it")
    parser.add_argument("--without-lightning", action="store_true", help="leave Lightning out")
    parser.add_argument("--job-folder", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--rank-count", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.rounds, options.steps, options.parameters) < 1:
        parser.error(
            f"--rounds {options.rounds} --steps {options.steps} --parameters {options.parameters}: each is 1 or more"
        )
    if options.job_folder is not None:
        run_rank(options)
        return
    if not all(each.isdecimal() and int(each) > 0 for each in options.ranks.split(",")):
        parser.error(f"--ranks {options.ranks}: numbers of processes, such as 1,2")
    if importlib.util.find_spec("lightning") is None:
        print("Lightning: left out, lightning is not installed")
    print(f"the machine's load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    for ranks in map(int, options.ranks.split(",")):
        with scratch(options.folder) as folder:
            command = [sys.executable, __file__, *sys.argv[1:], "--rank-count", str(ranks), "--job-folder", str(folder)]
            if ranks > 1:
                launcher = [sys.executable, "-m", "trainwright.launch.processes", f'{{"num_processes": {ranks}}}']
                command = [*launcher, *command]
            path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
            done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path})
        if done.returncode != 0:
            sys.exit(done.returncode)


if __name__ == "__main__":
    main()

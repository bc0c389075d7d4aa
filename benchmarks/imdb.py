"""The script `examples/imdb/2_trainer.py` on trainwright and, word for word, on Lightning: time, rate, accuracy, memory.

Lightning has the same names, so the script's text runs on both. Each run is a new process, and the rounds are interleaved, so
that noise hits both; ratios are taken within a round, and their medians count. Everything is on as the script has it: the best
checkpoint, the progress bar and the logger that each framework takes by itself. The rate is that of the second half of each
epoch, from the calls of `training_step`; on a GPU, which the host runs ahead of, look at the training time.

    python benchmarks/imdb.py [--rounds 3] [--precisions 32-true,bf16-mixed] [--full-size] [-- OPTIONS OF THE SCRIPT]
    trainwright ladder benchmarks/imdb.py -- --run trainwright --full-size -- --reviews 3000 --epochs 1 --learning-rate 5e-5

With `--full-size` the model is a DistilBERT of 67 million parameters with random weights, and the made reviews are about as
long as the published ones: log-normal, with a median of 174 and a mean of 234 words, cut after 512 tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import math
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "imdb"
SCRIPT = FOLDER / "2_trainer.py"
IMPORT = "import trainwright as tw\n"
FRAMEWORKS = ("trainwright", "lightning")
MEDIAN_WORDS, SPREAD = 174, 0.77
"""Of the published reviews' lengths, log-normal: their mean is 174 exp(0.77² / 2) = 234 words."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precisions", default="32-true", help="names separated by commas")
    parser.add_argument("--full-size", action="store_true", help="a whole DistilBERT, and reviews of a natural length")
    parser.add_argument("--run", choices=FRAMEWORKS, help=argparse.SUPPRESS)  # by the processes of the rounds
    parser.add_argument("options", nargs="*", help="after --: of the script, such as --reviews 3000 --epochs 1")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: expected an integer of at least 1")
    if options.run:
        print(json.dumps(run(options.run, options.precisions, options.full_size, options.options)))
        return 0
    frameworks = [each for each in FRAMEWORKS if importlib.util.find_spec(each) is not None]
    if len(frameworks) == 1:
        print("lightning is not installed (pip install lightning): trainwright runs alone")
    heads = f"{'training s':>12}{'ratio':>8}{'steps/s':>10}{'ratio':>8}{'memory MiB':>12}{'test %':>8}"
    print(f"{'precision':<12}{'framework':<14}{heads}")
    with tempfile.TemporaryDirectory() as cache:  # of the vocabulary, which is another one each time that it is trained
        options.options = ["--cache", cache, *options.options]
        for precision in options.precisions.split(","):
            show(precision, [measure(frameworks, precision, options) for _ in range(options.rounds)])
    return 0


def measure(frameworks: Sequence[str], precision: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Run each once, in a new process, and return their figures."""
    found = {}
    for framework in frameworks:
        command = [sys.executable, __file__, "--run", framework, "--precisions", precision]
        command += [*(["--full-size"] if options.full_size else []), "--", *options.options]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{framework} in {precision} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        found[framework] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(precision: str, rounds: Sequence[dict[str, dict[str, float]]]) -> None:
    """Print a row of each framework: medians, and the medians of the ratios to the last one."""
    reference = list(rounds[0])[-1]
    for framework in rounds[0]:
        figures = {name: statistics.median(each[framework][name] for each in rounds) for name in rounds[0][framework]}
        ratios = {
            name: statistics.median(each[framework][name] / each[reference][name] for each in rounds)
            for name in ("seconds", "rate")
        }
        print(
            f"{precision:<12}{framework:<14}{figures['seconds']:12.2f}{ratios['seconds']:8.3f}{figures['rate']:10.1f}"
            f"{ratios['rate']:8.3f}{figures['memory']:12.0f}{figures['accuracy']:8.2f}",
            flush=True,
        )


def run(framework: str, precision: str, full_size: bool, options: Sequence[str]) -> dict[str, float]:
    """Run the script here, and return its figures."""
    sys.path.insert(0, str(FOLDER))
    sys.argv[:] = [str(SCRIPT), *options]
    reviews = importlib.import_module("reviews")
    if full_size:
        reviews.DistilBertConfig = partial(whole_config, reviews.DistilBertConfig)
        reviews.made.make_reviews = partial(long_reviews, reviews.made.make_reviews)
    calls: list[list[float]] = []
    names = names_of(framework, precision, calls)
    text = SCRIPT.read_text()
    assert text.count(IMPORT) == 1
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(text.replace(IMPORT, ""), SCRIPT, "exec"), {"tw": names, "__name__": "__main__"})
    told = dict(re.findall(r"^(test accuracy|training time): ([\d.]+)", printed.getvalue(), re.MULTILINE))
    halves = [each[len(each) // 2 :] for each in calls]
    seconds = sum(each[-1] - each[0] for each in halves)
    return {
        "seconds": float(told["training time"]),
        "rate": sum(len(each) - 1 for each in halves) / seconds,
        "accuracy": float(told["test accuracy"]),
        "memory": peak_bytes() / 2**20,
    }


def whole_config(make: Any, num_labels: int, **_: Any) -> Any:
    """Return the configuration of a whole DistilBERT, which has the defaults."""
    return make(num_labels=num_labels)


def long_reviews(make: Any, number: int) -> list[tuple[str, int]]:
    """Return so many reviews of natural lengths, each of them short reviews with its label."""
    rng = random.Random(0)
    short: list[list[str]] = [[], []]
    for text, label in make(number):
        short[label].append(text)
    found = []
    for index in range(number):
        label, texts = index % 2, []
        words = rng.lognormvariate(math.log(MEDIAN_WORDS), SPREAD) - 10  # the last one is on average so much too long
        while words > 0:
            texts.append(rng.choice(short[label]))
            words -= texts[-1].count(" ") + 1
        found.append((" ".join(texts), label))
    return found


def names_of(framework: str, precision: str, calls: list[list[float]]) -> Any:
    """Return what the script uses of a framework; each call of `training_step` is noted, in a list for each epoch."""
    if framework == "trainwright":
        import trainwright as tw

        base, trainer, rest = tw.Module, tw.Trainer, tw
    else:
        import lightning.pytorch as pl
        from lightning.pytorch.callbacks import ModelCheckpoint

        rest = SimpleNamespace(ModelCheckpoint=ModelCheckpoint, seed_everything=pl.seed_everything)
        base, trainer = pl.LightningModule, LightningTrainer.of(pl.Trainer)

    class Module(base):  # type: ignore[misc,valid-type]
        def __init_subclass__(cls) -> None:
            step = cls.training_step

            def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
                if batch_idx == 0:
                    calls.append([])
                calls[-1].append(time.perf_counter())
                return step(self, batch, batch_idx)

            cls.training_step = training_step

    return SimpleNamespace(
        Module=Module,
        Trainer=partial(trainer, precision=precision),
        ModelCheckpoint=rest.ModelCheckpoint,
        seed_everything=rest.seed_everything,
    )


class LightningTrainer:
    """What the script calls of a Trainer and Lightning's lacks."""

    engine = SimpleNamespace(rank_zero_first=contextlib.nullcontext)

    @classmethod
    def of(cls, trainer: type) -> type:
        return type("Trainer", (cls, trainer), {})

    def test(self, **options: Any) -> Any:
        return super().test(self.lightning_module, **options)  # type: ignore[misc]


def peak_bytes() -> int:
    """Return the most memory that was in use: the GPU's, or the process's own."""
    import torch

    if torch.accelerator.is_available():
        return int(torch.accelerator.max_memory_allocated())
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    sys.exit(main())

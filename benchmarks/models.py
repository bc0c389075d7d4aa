"""Real models on one process of the CPU: a step of ours and of Lightning against a loop written by hand with torch's defaults.

    python benchmarks/models.py [--rounds 5] [--steps 12] [--cases transformer,resnet,checkpointing]

- `transformer`: 20 M parameters, AdamW, batches of 4 x 64 tokens that are in memory.
- `resnet`: ResNet-18 for 32 x 32 images, SGD, batches of 16 from a DataLoader with two workers that augment them.
- `checkpointing`: the peak memory of a transformer of 12 layers that recomputes its blocks, by hand with torch's `checkpoint`.

Each loop is a separate process, since the allocator's settings belong to a process. The loops take turns of `--steps` steps,
in an order that is reversed each round, while the others wait. A ratio is the median of the ratios within the rounds. `CPU`
is the ratio of the CPU time of a process, and `faults` the page faults of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import logging
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

CASES = ("transformer", "resnet", "checkpointing")
LOOPS = ("by_hand", "trainwright", "lightning")
WARMUP_STEPS = 4
WIDTH, VOCABULARY = 512, 1024


class Transformer(nn.Module):
    def __init__(self, num_layers: int, recomputes: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.recomputes = recomputes
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.recomputes else layer(hidden)
        return self.head(hidden).flatten(0, 1)


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.short(x))


def resnet() -> nn.Sequential:
    """Return the ResNet-18 of He et al., 2016, with the stem for images of 32 x 32."""
    widths = [
        (64, 64, 1),
        (64, 64, 1),
        (64, 128, 2),
        (128, 128, 1),
        (128, 256, 2),
        (256, 256, 1),
        (256, 512, 2),
        (512, 512, 1),
    ]
    blocks = [Residual(*sizes) for sizes in widths]
    stem = (nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Images(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        image = F.pad(torch.rand(3, 32, 32, generator=generator), (4, 4, 4, 4))
        top, left = torch.randint(0, 9, (2,), generator=generator).tolist()
        return image[:, top : top + 32, left : left + 32].sub(0.5), torch.tensor(index % 10)


def make(case: str, loop: str) -> tuple[nn.Module, Any]:
    """Return the net and the loader of a case."""
    torch.manual_seed(0)
    if case == "resnet":
        return resnet(), DataLoader(Images(), 16, num_workers=2)
    batch = 4 if case == "transformer" else 8
    tokens = torch.randint(0, VOCABULARY, (100_000, 64 if case == "transformer" else 128))
    net = Transformer(6 if case == "transformer" else 12, case == "checkpointing" and loop == "by_hand")
    return net, DataLoader(Pairs(tokens), batch)  # type: ignore[arg-type]


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index], self.tokens[index].flip(0)


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1].flatten())


def make_optimizer(case: str, net: nn.Module) -> torch.optim.Optimizer:
    if case == "resnet":
        return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    return torch.optim.AdamW(net.parameters(), lr=1e-4)


class Turns:
    """Waits for a turn of steps, and reports the time, the CPU time and the page faults of a step in it."""

    def __init__(self, steps: int, output: Any) -> None:
        self.steps, self.output, self.left = steps, output, WARMUP_STEPS
        self.is_warm = False

    def after_step(self) -> bool:
        """Count a step. Return whether the loop has to end."""
        self.left -= 1
        if self.left:
            return False
        now = self._now()
        peak = next(
            int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line
        )
        values = (
            [(after - before) / self.steps for after, before in zip(now, self.began, strict=True)]
            if self.is_warm
            else []
        )
        print(json.dumps([*values, peak * 1024]), file=self.output, flush=True)
        self.is_warm = True
        if sys.stdin.readline() != "go\n":
            return True
        self.left, self.began = self.steps, self._now()
        return False

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def by_hand(case: str, turns: Turns) -> None:
    net, loader = make(case, "by_hand")
    optimizer = make_optimizer(case, net)
    for batch in loader:
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()
        if turns.after_step():
            return


def library_of(name: str) -> Any:
    return importlib.import_module("trainwright" if name == "trainwright" else "lightning.pytorch")


def framework(case: str, turns: Turns, name: str) -> None:
    is_ours = name == "trainwright"
    library = library_of(name)
    net, loader = make(case, name)

    class Model(library.Module if is_ours else library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_of(self.net, batch)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = turns.after_step()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(case, self)

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    options = {"activation_checkpointing": True} if case == "checkpointing" and is_ours else {}
    library.Trainer(accelerator="cpu", devices=1, max_epochs=1, **quiet, **options).fit(Model(), loader)


@contextlib.contextmanager
def started(case: str, loops: list[str], steps: int) -> Iterator[dict[str, Any]]:
    """Start the loops one after another, and yield them warmed up."""
    processes: dict[str, Any] = {}
    try:
        for loop in loops:
            command = [sys.executable, __file__, "--cases", case, "--loop", loop, "--steps", str(steps)]
            processes[loop] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            json.loads(processes[loop].stdout.readline())
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def measure(case: str, options: argparse.Namespace) -> None:
    loops = [loop for loop in options.loops.split(",") if not (case == "checkpointing" and loop == "lightning")]
    rounds: list[dict[str, list[float]]] = []
    with started(case, loops, options.steps) as processes:
        for number in range(options.rounds):
            turn = {}
            for loop in loops if number % 2 == 0 else loops[::-1]:
                processes[loop].stdin.write("go\n")
                processes[loop].stdin.flush()
                turn[loop] = json.loads(processes[loop].stdout.readline())
            rounds.append(turn)
    for loop in loops:
        # No ratio of page faults: a step whose memory is kept has none.
        ratios = [[turn[loop][column] / turn["by_hand"][column] for column in (0, 1, 3)] for turn in rounds]
        seconds, cpu, memory = (statistics.median(column) for column in zip(*ratios, strict=True))
        own = [statistics.median(column) for column in zip(*(turn[loop] for turn in rounds), strict=True)]
        spread = f"{min(ratio[0] for ratio in ratios):.3f} to {max(ratio[0] for ratio in ratios):.3f}"
        name = loop.replace("_", " ")
        print(
            f"| `{case}` | {name} | {own[0] * 1e3:,.1f} | {seconds:.3f} | {spread} | {cpu:.3f} | "
            f"{own[2]:,.0f} | {own[3] / 2**20:,.0f} | {memory:.3f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--loops", default=",".join(LOOPS))
    parser.add_argument("--loop", choices=LOOPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        output = sys.stdout
        with contextlib.redirect_stdout(io.StringIO()):
            turns = Turns(options.steps, output)
            by_hand(options.cases, turns) if options.loop == "by_hand" else framework(
                options.cases, turns, options.loop
            )
        return
    print("| case | loop | ms per step | ratio | lowest to highest | CPU | faults | peak MiB | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in options.cases.split(","):
        measure(case, options)


if __name__ == "__main__":
    main()

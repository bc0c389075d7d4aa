"""The jobs of test_matrix.py: one saves under every strategy, one loads every checkpoint under every strategy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import trainwright as tw
from trainwright.checkpoint.tensors import Piece, StoredPiece, TensorEntry, check_coverage
from trainwright.engine.named_state import model_pieces, named_optimizers, optimizer_pieces
from trainwright.strategies.base import Strategy
from trainwright.strategies.ddp.strategy import DDPStrategy
from trainwright.strategies.fsdp2.strategy import FSDPStrategy
from trainwright.strategies.oss.strategy import ShardedDDPStrategy
from trainwright.strategies.zero.strategy import DeepSpeedStrategy

WORLDS = (1, 2, 4)
ROUND, STEPS = 8, 2
"""Samples of a round, whatever the world size, and the steps before a save."""
SMALL: dict[str, Any] = {"reduce_bucket_size": 100_000}
HELD: dict[str, Any] = {  # else a small model would stay gathered
    "stage3_max_live_parameters": 1,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 8,
}
MAKERS: dict[str, Callable[[], Strategy]] = {
    "single_device": Strategy,
    "ddp": DDPStrategy,
    "ddp_sharded": ShardedDDPStrategy,
    "fsdp": lambda: FSDPStrategy(auto_wrap_policy={nn.Conv2d, nn.Sequential}),
    "deepspeed_stage_1": lambda: DeepSpeedStrategy(stage=1, **SMALL),
    "deepspeed_stage_2": lambda: DeepSpeedStrategy(stage=2, **SMALL),
    "deepspeed_stage_3": lambda: DeepSpeedStrategy(stage=3, **SMALL, **HELD),
}
State = dict[str, dict[str, Tensor]]


class Body(nn.Module):
    """Every kind of tensor that a checkpoint must store, mostly in shapes that 2 and 4 do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.head = nn.Linear(5, 11)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.mix = nn.Parameter(torch.randn(7, 5).t())
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(7, 5), requires_grad=False)
        self.frozen_half = nn.Parameter(torch.randn(5).bfloat16(), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("scale", torch.randn(5).bfloat16())
        self.register_buffer("scratch", torch.ones(5), persistent=False)
        self.seen = MeanMetric()
        self.seen.persistent(True)

    def forward(self, words: Tensor, image: Tensor, criticism: Tensor) -> Tensor:
        with torch.no_grad():
            self.steps += 1
            self.seen.update(self.steps.float())
        x = self.embed(words).mean(1) + self.conv(image).mean((2, 3)) * (self.scale * self.frozen_half).float()
        x = x + criticism @ self.mix @ self.frozen * self.scratch
        return F.cross_entropy(self.head(x.tanh()) * self.factor, words[:, 0])


class Odd(nn.Module):
    """Two parts with one optimizer for every part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = Body()
        self.critic = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5))

    def forward(self, words: Tensor, image: Tensor) -> Tensor:
        return self.body(words, image, self.critic(image.mean((2, 3))))

    def optimizers(self, count: int) -> list[torch.optim.Optimizer]:
        """Return one optimizer of all parameters in three groups, or two of different kinds."""
        trained = [parameter for parameter in self.body.parameters() if parameter.requires_grad]
        groups = [
            {"params": [parameter for parameter in trained if parameter.dim() > 1]},
            {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
        ]
        critics = list(self.critic.parameters())
        settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3}
        if count == 1:
            return [AdamW([*groups, {"params": critics, "lr": 0.01}], **settings)]
        return [AdamW(groups, **settings), SGD(critics, lr=0.1, momentum=0.9)]


class Loop:
    """A raw loop over the odd module under one strategy. DeepSpeed trains one optimizer, all others train two too."""

    def __init__(self, name: str, optimizers: int) -> None:
        self.accelerator = tw.Accelerator(cpu=True, strategy=MAKERS[name]())
        engine = self.accelerator.engine
        generator = torch.Generator().manual_seed(5)
        words = torch.randint(0, 11, (ROUND * (STEPS + 1), 4), generator=generator)
        images = torch.randn(ROUND * (STEPS + 1), 3, 4, 4, generator=generator)
        self.odd = Odd()
        data = DataLoader(TensorDataset(words, images), batch_size=ROUND // engine.world_size)
        self.model, *self.optimizers, self.data = self.accelerator.prepare(
            self.odd, *self.odd.optimizers(optimizers), data
        )

    def steps(self) -> Iterator[int]:
        """Make a step at a time."""
        for number, (words, images) in enumerate(self.data, start=1):
            self.accelerator.backward(self.model(words, images))
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            yield number

    def sections(self) -> dict[str, list[Any]]:
        engine = self.accelerator.engine
        named = named_optimizers(engine.modules, engine.optimizers)
        return {
            "model": model_pieces(engine.strategy, engine.modules),
            "optimizer": optimizer_pieces(engine.strategy, named),
        }

    def state(self) -> State:
        """Return every tensor whole, by its name in a checkpoint. Collective."""
        return gathered(self.sections(), alone=self.accelerator.num_processes == 1)

    def close(self) -> None:
        self.accelerator.engine.close()


def gathered(sections: dict[str, list[Piece]], *, alone: bool = False) -> State:
    """Return every tensor whole, from pieces that cover every element once. Collective."""
    mine = {
        section: [(p.name, p.shape, p.start, p.tensor.detach().clone().reshape(-1), p.writer) for p in pieces]
        for section, pieces in sections.items()
    }
    ranks: list[Any] = [mine]
    if not alone:
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
    state: State = {}
    for section in mine:
        ranges: dict[str, list[StoredPiece]] = {}
        for rank, shares in enumerate(ranks):
            for name, shape, start, flat, writer in shares[section]:
                if (writer is None and rank == 0) or writer == rank:
                    whole = state.setdefault(section, {}).setdefault(name, torch.empty(shape, dtype=flat.dtype))
                    whole.view(-1)[start : start + flat.numel()] = flat
                    ranges.setdefault(name, []).append(StoredPiece(str(rank), name, start, flat.numel()))
        for name, stored in ranges.items():
            filled = sorted((p for p in stored if p.numel), key=lambda p: p.start)
            whole = state[section][name]
            check_coverage(name, TensorEntry(tuple(whole.shape), whole.dtype, tuple(filled)))
    return state


def cells(world_size: int) -> list[tuple[str, int]]:
    """Return the strategies and numbers of optimizers that can train on so many ranks."""
    names = [name for name in MAKERS if world_size == 1 or name != "single_device"]
    return [(name, count) for name in names for count in (1, 2) if count == 1 or not name.startswith("deepspeed")]


def saves(folder: Path) -> dict[str, Any]:
    """Save under every strategy, and keep the state then and after one more step."""
    warnings.filterwarnings("ignore")  # of DeepSpeed, which another test looks at
    found: dict[str, Any] = {}
    for name, optimizers in cells(world_size()):
        loop, start = Loop(name, optimizers), str(folder / f"start-{world_size()}-{name}-{optimizers}.ckpt")
        loop.accelerator.save_state(start)
        steps = loop.steps()
        for _ in range(STEPS):
            next(steps)
        state = loop.state()
        with CommDebugMode() as counted:
            loop.accelerator.save_state(str(folder / f"{world_size()}-{name}-{optimizers}.ckpt"))
        # Every rank writes its shards, and nothing is gathered.
        assert counted.get_total_counts() == 0, counted.get_comm_counts()
        next(steps)
        found[f"{name}-{optimizers}"] = (state, following := loop.state())
        loop.accelerator.load_state(start)  # when the optimizers had no state
        assert list(zip(range(STEPS + 1), loop.steps(), strict=False))
        assert distance(loop, following) <= 1e-6, name
        loop.close()
    return found


def loads(folder: Path) -> dict[str, Any]:
    """Load every checkpoint under every strategy, and return the distances from the saved state and its next step."""
    warnings.filterwarnings("ignore")
    found: dict[str, Any] = {}
    kept = torch.load(folder / "states.pt")
    for name, optimizers in cells(world_size()):
        loop = Loop(name, optimizers)
        for source, (state, following) in of_optimizers(kept, optimizers).items():
            loop.accelerator.load_state(str(folder / f"{source}.ckpt"))
            assert loop.data.epoch == 0  # a loop that reads it continues at the saved batch
            loaded = distance(loop, state)
            assert next(loop.steps()) == 1
            found[source, f"{name}-{optimizers}"] = (loaded, distance(loop, following))
        loop.close()
    return found


def of_optimizers(kept: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the states of the loops with so many optimizers."""
    return {name: states for name, states in kept.items() if name.endswith(f"-{count}")}


def distance(loop: Loop, wanted: State) -> float:
    """Return the largest difference between this rank's pieces and the whole tensors."""
    worst = 0.0
    for section, pieces in loop.sections().items():
        assert {each.name for each in pieces} <= wanted[section].keys()
        for piece in pieces:
            whole = wanted[section][piece.name]
            assert (whole.shape, whole.dtype) == (piece.shape, piece.tensor.dtype), piece.name
            part = whole.reshape(-1)[piece.start : piece.start + piece.tensor.numel()]
            if part.numel():
                worst = max(worst, float((part - piece.tensor.detach().reshape(-1)).abs().max()))
    return worst


def world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else int(_launched())


def _launched() -> int:
    from trainwright.distributed.environment import Environment

    return Environment.detect().world_size

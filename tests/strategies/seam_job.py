"""The job of test_seam.py: one strategy on every rank, called as the engine calls it.

A failed check raises on its rank, which ends the job.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.checkpoint.tensors import Piece, StoredPiece, TensorEntry, check_coverage
from trainwright.precision.base import Precision
from trainwright.strategies.base import Clipping, Optimization, Strategy
from trainwright.strategies.ddp.strategy import DDPStrategy
from trainwright.strategies.fsdp2.strategy import FSDPStrategy
from trainwright.strategies.oss.strategy import ShardedDDPStrategy
from trainwright.strategies.zero.strategy import DeepSpeedStrategy

State = dict[str, dict[str, Tensor]]
WORDS = 11
REPORTED: list[str] = []
"""The names of the figures that were checked."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class TinyLM(nn.Module):
    """A language model of one block with a tied head, in shapes that are not divisible by two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(WORDS, 5)
        self.block = Block()
        self.head = nn.Linear(5, WORDS)
        self.head.weight = self.embed.weight
        self.shift = nn.Parameter(torch.zeros(3, 1))
        self.register_buffer("scale", torch.tensor([2.0, 0.5, 1.0]))
        nn.init.normal_(self.embed.weight, std=0.5)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + (self.shift * self.scale[:, None]).sum()
        return self.head(self.block(x))

    def training_step(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    validation_step = training_step

    def configure_optimizers(self) -> list[Optimizer]:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        return [AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=0.02, weight_decay=0.1)]


class Pair(nn.Module):
    """Two players with an optimizer each, where the second loss leaves gradients on the first player.

    Args:
        together: one optimizer, with a group for each player.
        at_root: give the maker a parameter of the root module itself.
        toggle: freeze the critic while the maker's loss goes backward.
    """

    def __init__(self, *, together: bool = False, at_root: bool = False, toggle: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.together, self.toggle = together, toggle
        self.shift = nn.Parameter(torch.ones(3)) if at_root else None
        self.critic = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        self.maker = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5))

    def configure_optimizers(self) -> list[Optimizer]:
        makers = [*self.maker.parameters(), *([] if self.shift is None else [self.shift])]
        if self.together:
            return [SGD([{"params": list(self.critic.parameters())}, {"params": makers}], lr=0.1, momentum=0.9)]
        return [AdamW(self.critic.parameters(), lr=0.02), SGD(makers, lr=0.1, momentum=0.9)]

    def make(self, noise: Tensor) -> Tensor:
        return self.maker(noise if self.shift is None else noise * self.shift)

    def training_step(self, batch: Tensor, loop: Loop) -> Tensor:
        critic_optimizer, maker_optimizer = loop.optimizers[0], loop.optimizers[-1]
        strategy = loop.strategy
        made = self.make(batch[:, :3])
        critic_optimizer.zero_grad()
        strategy.backward(F.softplus(-self.critic(batch[:, 3:])).mean())  # two backwards, one step
        strategy.backward(F.softplus(self.critic(made.detach())).mean())
        strategy.step(critic_optimizer, Clipping(value=0.05))
        if self.toggle:
            self.critic.requires_grad_(False)
        loss = F.softplus(-self.critic(made)).mean()
        maker_optimizer.zero_grad()
        strategy.backward(loss)
        strategy.step(maker_optimizer, Clipping(norm=0.2))
        self.critic.requires_grad_(True)
        return loss.detach() + self.critic(self.make(batch[:, :3])).mean().detach()  # the stepped parameters, in use


def decay(step: int) -> float:
    return 0.9**step


class Loop:
    """The part of an engine that calls a strategy."""

    def __init__(
        self, strategy: Strategy, module: nn.Module, optimization: Optimization, *, alone: bool = False
    ) -> None:
        self.strategy, self.module, self.optimization = strategy, module, optimization
        rank, world_size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        strategy.connect(rank, world_size, torch.device("cpu"), Precision())
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.add_(rank)  # whatever the other ranks start from, rank 0's weights are the ones that count
        strategy.setup_module(module, optimization)
        self.names = {p: n for n, p in module.named_parameters()}
        originals = module.configure_optimizers()
        # Made by the user, so bound to the optimizer as it was before the strategy saw it.
        self.schedulers = [LambdaLR(each, decay) for each in originals]
        self.optimizers = strategy.setup_optimizers([module], originals, optimization)
        self.norms: list[float] = []

    def window(self, batches: list[Tensor]) -> list[float]:
        losses = []
        (optimizer,) = self.optimizers
        optimizer.zero_grad()
        for number, batch in enumerate(batches):
            self.strategy.sync_gradients(number == len(batches) - 1)
            loss = self.strategy.run(self.module, "training_step", (batch,), {})
            self.strategy.backward(loss / len(batches))
            losses.append(float(loss.detach()))
        clipping = Clipping(self.optimization.clip_norm, self.optimization.clip_value)
        result = self.strategy.step(optimizer, clipping)
        self.schedulers[0].step()
        if result.norm is not None:
            self.norms.append(float(result.norm))
        assert not result.skipped
        return losses

    def manual(self, batch: Tensor) -> float:
        self.strategy.sync_gradients(True)
        loss = float(self.strategy.run(self.module, "training_step", (batch, self), {}))
        for scheduler in self.schedulers:
            scheduler.step()
        return loss

    def evaluate(self, batches: list[Tensor], rounds: int) -> float:
        """Return the mean loss over the samples of all ranks. Collective: call on every rank."""
        self.strategy.broadcast_buffers([self.module])
        total = torch.zeros(2)
        with torch.no_grad():
            for number in range(rounds if self.strategy.capabilities.forward_is_collective else len(batches)):
                batch = batches[min(number, len(batches) - 1)]
                loss = self.strategy.run(self.module, "validation_step", (batch,), {})
                if number < len(batches):
                    total += torch.tensor([float(loss) * len(batch), float(len(batch))])
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def sections(self) -> dict[str, list[Any]]:
        found = {"model": self.strategy.model_pieces(self.module)}
        for index, optimizer in enumerate(self.optimizers):
            found[f"optimizer-{index}"] = self.strategy.optimizer_pieces(optimizer, self.names)
        return found

    def state(self, *, alone: bool = False) -> State:
        """Return every tensor whole, from pieces that cover every element once. Collective: call on every rank."""
        return gathered(self.sections(), alone=alone)

    def load(self, state: State, step: int) -> None:
        for index, optimizer in enumerate(self.optimizers):
            self.schedulers[index].last_epoch = step
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * decay(step)
            entries = {n: TensorEntry(tuple(t.shape), t.dtype) for n, t in state.get(f"optimizer-{index}", {}).items()}
            self.strategy.allocate_optimizer_state(optimizer, self.names, entries)
        with torch.no_grad():
            for section, pieces in self.sections().items():
                assert {p.name for p in pieces} <= set(state.get(section, {})), section
                for piece in pieces:
                    share = state[section][piece.name].reshape(-1)[piece.start : piece.start + piece.tensor.numel()]
                    piece.tensor.copy_(share.view(piece.tensor.shape))
        self.strategy.refresh_weights([self.module], {})


def gathered(sections: dict[str, list[Piece]], *, alone: bool = False) -> State:
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


def words(step: int, micro: int, rank: int | None) -> Tensor:
    """The batch of a rank, or of the one process that does the work of both."""
    shares = [
        torch.randint(0, WORDS, (3, 6), generator=torch.Generator().manual_seed(1000 * step + 10 * micro + each))
        for each in range(dist.get_world_size())
    ]
    return torch.cat(shares) if rank is None else shares[rank]


def numbers(step: int, rank: int | None) -> Tensor:
    shares = [
        torch.randn(4, 8, generator=torch.Generator().manual_seed(77 * step + each))
        for each in range(dist.get_world_size())
    ]
    return torch.cat(shares) if rank is None else shares[rank]


def distance(a: State, b: State) -> float:
    assert set(a) == set(b), set(a) ^ set(b)
    worst = 0.0
    for section in a:
        assert set(a[section]) == set(b[section]), (section, set(a[section]) ^ set(b[section]))
        for name, value in a[section].items():
            assert value.shape == b[section][name].shape, (section, name, value.shape, b[section][name].shape)
            if value.numel():
                worst = max(worst, float((value - b[section][name]).abs().max()))
    return worst


def report(name: str, figure: float, limit: float) -> None:
    REPORTED.append(name)
    assert figure <= limit, f"{name}: {figure} > {limit}"


LM = Optimization(clip_norm=0.2, accumulate=2)
GAN = Optimization(automatic=False)


def make_lm(strategy: Strategy, *, alone: bool = False, optimization: Optimization = LM) -> Loop:
    return Loop(strategy, TinyLM(), optimization, alone=alone)


def train_lm(loop: Loop, steps: range, *, alone: bool = False) -> list[float]:
    rank = None if alone else dist.get_rank()
    losses = []
    for step in steps:
        window = loop.window([words(step, micro, rank) for micro in range(2)])
        if not alone:
            mean = torch.tensor(window)
            dist.all_reduce(mean)
            window = (mean / dist.get_world_size()).tolist()
        losses += window
    return losses


def train_gan(loop: Loop, steps: range, *, alone: bool = False) -> None:
    for step in steps:
        loop.manual(numbers(step, None if alone else dist.get_rank()))


def check_automatic(make: Callable[[], Strategy]) -> None:
    for label, optimization in {
        "norm": LM,
        "value": Optimization(clip_value=0.01, accumulate=2),
        "no clip": Optimization(accumulate=2),
    }.items():
        one = make_lm(Strategy(), alone=True, optimization=optimization)
        expected = train_lm(one, range(5), alone=True)
        loop = make_lm(make(), optimization=optimization)
        got = train_lm(loop, range(5))
        report(f"automatic {label} losses", max(abs(a - b) for a, b in zip(got, expected, strict=True)), 1e-5)
        report(f"automatic {label} state", distance(loop.state(), one.state(alone=True)), 1e-5)
        if label == "norm":
            report("automatic norm", max(abs(a - b) for a, b in zip(loop.norms, one.norms, strict=True)), 1e-5)
        loop.strategy.close()

    # After a short window the gradients, divided by its planned length, are scaled up before clipping.
    loop = make_lm(make())
    planned = make_lm(Strategy(), alone=True)
    planned.window([words(0, 0, None)])
    loop.optimizers[0].zero_grad()
    loop.strategy.backward(loop.strategy.run(loop.module, "training_step", (words(0, 0, dist.get_rank()),), {}) / 2)
    result = loop.strategy.step(loop.optimizers[0], Clipping(norm=0.2, scale=2.0))
    assert result.norm is not None
    report("short window norm", abs(float(result.norm) - planned.norms[0]), 1e-5)
    report("short window state", distance(loop.state(), planned.state(alone=True)), 1e-5)
    loop.strategy.close()


def trains_one(make: Callable[[], Strategy]) -> bool:
    """Return whether a strategy trains only one optimizer."""
    return isinstance(make(), DeepSpeedStrategy)


def check_manual(make: Callable[[], Strategy]) -> None:
    together = trains_one(make)
    for label, options in {"plain": {}, "toggle": {"toggle": True}, "at root": {"at_root": True}}.items():
        one = Loop(Strategy(), Pair(together=together, **options), GAN, alone=True)
        train_gan(one, range(5), alone=True)
        loop = Loop(make(), Pair(together=together, **options), GAN)
        train_gan(loop, range(5))
        report(f"manual {label} state", distance(loop.state(), one.state(alone=True)), 1e-5)
        loop.strategy.close()


def check_evaluation(make: Callable[[], Strategy]) -> None:
    """Rank 0 has three batches, the other ranks two."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = [[words(50 + number, 0, each) for number in range(3 if each == 0 else 2)] for each in range(world_size)]
    loop = make_lm(make())
    train_lm(loop, range(2))
    before = loop.state()
    with CommDebugMode() as counted, torch.no_grad():
        loop.strategy.run(loop.module, "validation_step", (batches[rank][0],), {})
    assert bool(counted.get_total_counts()) == loop.strategy.capabilities.forward_is_collective, (
        counted.get_comm_counts()
    )
    got = loop.evaluate(batches[rank], rounds=3)
    report("evaluation leaves the state", distance(loop.state(), before), 0.0)
    train_lm(loop, range(2, 5))
    after = loop.state()
    loop.strategy.close()

    one = make_lm(Strategy(), alone=True)
    train_lm(one, range(2), alone=True)
    with torch.no_grad():
        flat = [batch for each in batches for batch in each]
        expected = sum(float(one.module.validation_step(batch)) * len(batch) for batch in flat) / sum(map(len, flat))
    report("evaluation loss", abs(got - expected), 1e-5)
    train_lm(one, range(2, 5), alone=True)
    report("training after evaluation", distance(after, one.state(alone=True)), 1e-5)


def check_resume(make: Callable[[], Strategy]) -> None:
    straight = make_lm(make())
    fresh = straight.state()
    train_lm(straight, range(2))
    kept = straight.state()
    train_lm(straight, range(2, 5))
    end = straight.state()
    straight.strategy.close()

    resumed = make_lm(make())
    resumed.load(kept, 2)
    report("state in and out", distance(resumed.state(), kept), 0.0)
    train_lm(resumed, range(2, 5))
    report("resumed (bitwise)", distance(resumed.state(), end), 0.0)
    resumed.load(kept, 2)  # also over an engine that has stepped
    train_lm(resumed, range(2, 5))
    report("loaded over (bitwise)", distance(resumed.state(), end), 0.0)
    resumed.load(fresh, 0)  # and back to before the first step, when the optimizer had no state
    train_lm(resumed, range(5))
    report("from the start (bitwise)", distance(resumed.state(), end), 0.0)
    resumed.strategy.close()

    gan = Loop(make(), Pair(together=trains_one(make)), GAN)
    train_gan(gan, range(2))
    kept = gan.state()
    train_gan(gan, range(2, 5))
    end = gan.state()
    gan.strategy.close()
    gan = Loop(make(), Pair(together=trains_one(make)), GAN)
    gan.load(kept, 2)
    train_gan(gan, range(2, 5))
    report("manual resumed (bitwise)", distance(gan.state(), end), 0.0)
    gan.strategy.close()


def check_accelerator(make: Callable[[], Strategy]) -> None:
    """Run a raw loop of two models, whose optimizers were made before they were prepared in two calls.

    A strategy that trains one optimizer prepares both models and one optimizer in one call.
    """
    draws = torch.randn(16, 8, generator=torch.Generator().manual_seed(4))

    def run(strategy: Strategy) -> State:
        accelerator = tw.Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2)
        pair = Pair(together=trains_one(make))
        loader = accelerator.prepare(DataLoader(TensorDataset(draws), batch_size=2))
        if pair.together:
            critic, maker, *optimizers = accelerator.prepare(pair.critic, pair.maker, *pair.configure_optimizers())
        else:
            critic, first = accelerator.prepare(pair.critic, AdamW(pair.critic.parameters(), lr=0.02))
            maker, second = accelerator.prepare(pair.maker, SGD(pair.maker.parameters(), lr=0.1, momentum=0.9))
            optimizers = [first, second]
        for _ in range(2):
            for (batch,) in loader:
                with accelerator.accumulate(critic, maker):
                    made = maker(batch[:, :3])
                    accelerator.backward(F.softplus(-critic(batch[:, 3:])).mean() + F.softplus(critic(made)).mean())
                    accelerator.clip_grad_norm_((pair if pair.together else critic).parameters(), 0.2)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
        modules = {"critic": pair.critic, "maker": pair.maker}
        state = gathered({name: strategy.model_pieces(module) for name, module in modules.items()})
        accelerator.engine.close()
        return state

    report("Accelerator against ddp", distance(run(make()), run(DDPStrategy())), 1e-5)


def seam(folder: Path) -> list[str]:
    """Make every check with the strategy that the folder is named after, and return the names of the figures."""
    warnings.simplefilter("default")  # of DeepSpeed and FairScale there are many
    dist.init_process_group("gloo")
    small = {"reduce_bucket_size": 100_000}
    held = {"stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 8}
    strategies: dict[str, Callable[[], Strategy]] = {
        "ddp": DDPStrategy,
        "ddp_sharded": ShardedDDPStrategy,
        "fsdp": lambda: FSDPStrategy(min_parameters=1),
        "zero1": lambda: DeepSpeedStrategy(stage=1, **small),
        "zero2": lambda: DeepSpeedStrategy(stage=2, **small),
        "zero3": lambda: DeepSpeedStrategy(stage=3, **small, **held),  # else a small model would stay gathered
    }
    make = strategies[folder.name]
    check_automatic(make)
    check_manual(make)
    check_evaluation(make)
    check_resume(make)
    check_accelerator(make)
    dist.barrier()
    dist.destroy_process_group()
    return REPORTED

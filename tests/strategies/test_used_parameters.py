"""Ranks that use different parameters in a step, because the batch chooses a branch."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_job import quiet
from jobs import run_job
from small import QUIET
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import trainwright as tw

WORLD = 2
RIGHT: dict[str, Any] = {
    "ddp_sharded": tw.ShardedDDPStrategy,
    "ddp_sharded, small buckets": lambda: tw.ShardedDDPStrategy(reduce_buffer_size=100),
    "ddp_sharded, no buckets": lambda: tw.ShardedDDPStrategy(reduce_buffer_size=0),
    "deepspeed_stage_1": lambda: tw.DeepSpeedStrategy(stage=1),
    "deepspeed_stage_2": lambda: tw.DeepSpeedStrategy(stage=2),
    "deepspeed_stage_2, small buckets": lambda: tw.DeepSpeedStrategy(stage=2, reduce_bucket_size=300),
}
REFUSED: dict[str, Any] = {
    "fsdp": tw.FSDPStrategy,
    "fsdp, groups": lambda: tw.FSDPStrategy(auto_wrap_policy={nn.Linear}),
}


DIFFERS = "some ranks gave other parameters gradients than the others"
FAILED = ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3", "fsdp")
NO_MORE = "an earlier forward or backward raised an error, and {} cannot train on"


class Branches(tw.Module):
    """Takes the branch that the batch names, which is never the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(8, 16)
        self.branches = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)])  # of one shape
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.head(self.branches[branch](self.stem(x).relu())).pow(2).mean()

    def training_step(self, batch: tuple[Tensor, int], batch_idx: int) -> Tensor:
        return self(*batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3, weight_decay=0.5)


def loader(branches: list[tuple[int, int]]) -> Any:
    """Return batches for which the two ranks take these branches."""
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, 8, generator=generator), each) for pair in branches for each in pair]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def fit(module: Branches, strategy: Any, branches: list[tuple[int, int]], **options: Any) -> None:
    trainer = tw.Trainer(strategy=strategy, devices=WORLD, max_epochs=1, **{**QUIET, **options})
    trainer.fit(module, loader(branches))


def trained(strategy: Any, branches: list[tuple[int, int]], **options: Any) -> dict[str, Tensor]:
    module = Branches()
    fit(module, strategy, branches, **options)
    return {key: each.detach().clone() for key, each in tw.gather_module(module, all_ranks=True).named_parameters()}


class Net(nn.Module):
    def __init__(self, seed: int, inputs: int, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Linear(inputs, 16)
        self.branches = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)])
        self.head = nn.Linear(16, outputs)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.head(self.branches[branch](self.stem(x).relu()))


class Wholes:
    """One process that adds the losses of all ranks, as the reference for a raw loop."""

    def prepare(self, *objects: Any) -> Any:
        return objects

    def free_memory(self) -> None: ...


def two_models(accelerator: Any, rank: int | None, together: bool) -> dict[str, Tensor]:
    """Return the weights of two models whose branches the ranks choose, with two optimizers or one `together`.

    Every second backward is dropped by zero_grad: of one model, or of the optimizer for both.
    """
    encoder, decoder = Net(1, 8, 6), Net(2, 6, 1)
    sgd = torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    adamw = torch.optim.AdamW(decoder.parameters(), lr=0.01, eps=1e-3, weight_decay=0.3)
    both = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=0.01, eps=1e-3, weight_decay=0.3)
    first, second, *optimizers = accelerator.prepare(encoder, decoder, *([both] if together else [sgd, adamw]))
    generator = torch.Generator().manual_seed(0)
    paths = [((0, 0), (0, 1)), ((1, 2), (0, 1)), ((0, 0), (1, 1)), ((2, 1), (1, 1))]
    for number, path in enumerate(paths * 2):
        for (one, other), x, which in zip(path, torch.randn(2, 4, 8, generator=generator), range(WORLD), strict=True):
            if rank in (None, which):
                loss = second(first(x, one), other).pow(2).mean()
                (loss / WORLD).backward() if rank is None else accelerator.backward(loss)
        if number % 2:
            for each in optimizers:
                each.step()
                each.zero_grad()
        else:
            (optimizers[0] if together else first).zero_grad()
    modules = [encoder, decoder] if rank is None else [tw.gather_module(m, all_ranks=True) for m in (encoder, decoder)]
    accelerator.free_memory()
    return {f"{at}.{key}": each.detach().clone() for at, m in enumerate(modules) for key, each in m.named_parameters()}


def exported(how: str) -> str:
    """Return the error of an export after a raw loop, in whose sixth step the ranks differ."""
    accelerator = tw.Accelerator(cpu=True, strategy="fsdp")
    model = Net(1, 8, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(6):
        accelerator.backward(model(torch.randn(4, 8), step // 5 * accelerator.process_index).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError) as refusal:
        getattr(accelerator, how)(*([] if how == "end_training" else [model]))
    accelerator.free_memory()
    return str(refusal.value)


def runs(folder: Path) -> dict[str, Any]:
    quiet()
    found: dict[str, Any] = {}
    paths = [(0, 1), (0, 0), (1, 0), (1, 1), (0, 1), (1, 0)]
    for accumulate in (1, 2):
        options = {"accumulate_grad_batches": accumulate}
        expected = trained(tw.DDPStrategy(find_unused_parameters=True), paths, **options)
        for name, make in RIGHT.items():
            weights = trained(make(), paths, **options)
            found[f"{name}, {accumulate}"] = {
                key: (weights[key] - expected[key]).abs().max().item() for key in expected
            }
    for name, make in RIGHT.items():
        rank, together = torch.distributed.get_rank(), name.startswith("deepspeed")
        expected = two_models(Wholes(), None, together)
        weights = two_models(tw.Accelerator(cpu=True, strategy=make()), rank, together)
        found[f"{name}, two models"] = {key: (weights[key] - expected[key]).abs().max().item() for key in expected}
    for how in ("get_state_dict", "end_training"):
        found[how] = exported(how)
    for name, make in REFUSED.items():
        with pytest.raises(RuntimeError) as refusal:
            trained(make(), [(0, 0), (1, 1), (0, 1), (0, 0)])
        found[name] = str(refusal.value)
        with pytest.raises(RuntimeError) as refusal:  # all have gradients by then
            trained(make(), [(0, 0), (1, 1), (0, 1), (0, 0)], accumulate_grad_batches=4)
        found[f"{name}, in a window"] = str(refusal.value)
    with pytest.raises(RuntimeError) as refusal:  # at the end of the fit
        trained("fsdp", [(0, 0)] * 5 + [(0, 1)])
    found["at the end"] = str(refusal.value)
    save = [tw.ModelCheckpoint(folder / "saves", every_n_train_steps=3)]
    with pytest.raises(RuntimeError) as refusal:
        trained("fsdp", [(0, 0), (0, 0), (1, 0), (0, 0)], callbacks=save, enable_checkpointing=True)
    found["at a save"] = str(refusal.value)
    accelerator = tw.Accelerator(strategy="fsdp", devices=WORLD)
    model, optimizer, batches = accelerator.prepare(
        module := Branches(), module.configure_optimizers(), loader([(0, 0)] * 2 + [(0, 1)])
    )
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(model(*batch))
        optimizer.step()
    with pytest.raises(RuntimeError) as refusal:
        accelerator.end_training()
    found["a loop"] = str(refusal.value)
    for name, least in (("deepspeed_stage_3", 100_000), ("deepspeed_stage_3, all sharded", 0)):
        found |= again(
            name, lambda least=least: tw.DeepSpeedStrategy(stage=3, stage3_param_persistence_threshold=least)
        )
    return found


class Fails(Branches):
    """Fails in its second forward, while parameters are gathered under stage 3."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0
        self.branches[0].register_forward_pre_hook(self.fail)

    def fail(self, module: nn.Module, args: Any) -> None:
        self.forwards += 1
        if self.forwards == 2:
            raise RuntimeError("the user's error")


def again(name: str, make: Any) -> dict[str, Any]:
    """Return the errors of two fits, and the distance of a second fit of each module from ddp, by name."""
    found: dict[str, Any] = {}
    for case, kind, paths in (("used", Branches, [(0, 1)]), ("failed", Fails, [(0, 0)] * 3)):
        module, expected = kind(), kind()
        with pytest.raises(RuntimeError) as refusal:
            fit(module, make(), paths)
        found[f"{name}, {case}"] = str(refusal.value)
        fit(module, make(), [(0, 0), (1, 1)])
        weights = tw.gather_module(module, all_ranks=True)
        if case == "failed":
            with pytest.raises(RuntimeError, match="the user's error"):
                fit(expected, "ddp_find_unused_parameters_true", paths)
        fit(expected, "ddp_find_unused_parameters_true", [(0, 0), (1, 1)])
        pairs = zip(weights.parameters(), expected.parameters(), strict=True)
        found[f"{name}, {case}, again"] = max((one - other).abs().max().item() for one, other in pairs)
    return found


@pytest.mark.slow
def test_ranks_may_take_different_branches(tmp_path: Path) -> None:
    ranks = run_job(runs, WORLD, tmp_path)
    for rank in ranks:
        for name in RIGHT:
            for case in ("1", "2", "two models"):
                assert max(rank[f"{name}, {case}"].values()) < 1e-5, (name, case, rank)
        names = (*REFUSED, *(f"{each}, in a window" for each in REFUSED), "get_state_dict", "end_training")
        for name in (*names, "at the end", "a loop", "at a save"):
            assert DIFFERS in rank[name], name
        for name in ("deepspeed_stage_3", "deepspeed_stage_3, all sharded"):
            assert f"{DIFFERS}, of the latest one 'branches.0.weight' and 3 more" in rank[f"{name}, used"], name
            assert rank[f"{name}, failed"] == "the user's error", name
            assert rank[f"{name}, used, again"] < 1e-5, (name, rank)
            assert rank[f"{name}, failed, again"] < 1e-5, (name, rank)
    assert list((tmp_path / "saves").glob("*.ckpt")) == []


def alone(folder: Path) -> dict[str, float]:
    """Return the distances of DeepSpeed on one process from plain torch, which skips unused parameters."""
    quiet()
    kinds: dict[str, Any] = {
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, weight_decay=0.5),
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1),
    }
    found = {}
    for (kind, make), window in ((kind, window) for kind in kinds.items() for window in (1, 2)):

        def weights(strategy: Any, make: Any = make, window: int = window) -> list[Tensor]:
            module = Branches()
            module.configure_optimizers = lambda: make(module.parameters())  # type: ignore[method-assign]
            trainer = tw.Trainer(strategy=strategy, devices=1, max_epochs=1, accumulate_grad_batches=window, **QUIET)
            trainer.fit(module, loader([(0, 0), (1, 1), (0, 1), (0, 0)]))
            return [each.detach().clone() for each in tw.gather_module(module, all_ranks=True).parameters()]

        expected = weights("auto")
        for stage in (1, 2, 3):
            pairs = zip(weights(tw.DeepSpeedStrategy(stage=stage)), expected, strict=True)
            found[f"{kind}, {window}, stage {stage}"] = max((one - other).abs().max().item() for one, other in pairs)
    return found


@pytest.mark.slow
def test_one_process_leaves_alone_what_a_step_does_not_use(tmp_path: Path) -> None:
    (found,) = run_job(alone, 1, tmp_path)
    assert len(found) == 12
    assert {name: each for name, each in found.items() if each > 1e-6} == {}


class Catches(Branches):
    """Goes on with the next batch if a backward fails: the second's reaches no parameter, the third's some."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, int], batch_idx: int) -> None:  # type: ignore[override]
        x, branch = batch
        hidden = self.branches[branch](self.stem(x).relu())
        loss = self.head(hidden).pow(2).mean()
        if batch_idx in (1, 2):
            (loss if batch_idx == 1 else hidden).register_hook(self.fail)
        optimizer = self.optimizers()
        with contextlib.suppress(ValueError):
            self.manual_backward(loss)
            optimizer.step()
        optimizer.zero_grad()

    def fail(self, gradient: Tensor) -> None:
        raise ValueError("the user's error")


def caught(folder: Path) -> dict[str, list[str]]:
    """Return the errors of a step and of a second fit after a caught error of backward."""
    quiet()
    found = {}
    for name in FAILED:
        module, errors = Catches(), []
        for _ in range(2):
            try:
                trainer = tw.Trainer(strategy=name, devices=1, max_epochs=1, **QUIET)
                trainer.fit(module, loader([(0, 0), (1, 1), (0, 1)]))
            except RuntimeError as error:
                errors.append(f"{error} after {trainer.global_step} steps")
        found[name] = errors
    return found


def test_step_after_a_backward_that_failed_is_rejected(tmp_path: Path) -> None:
    (found,) = run_job(caught, 1, tmp_path)
    for name, errors in found.items():
        first, second = errors
        assert first.startswith(NO_MORE.format(name))
        assert "load a checkpoint. 'ddp' and a single process train on" in first
        assert first.endswith("after 1 steps")
        # A second fit makes a new DeepSpeed engine, but the module under fsdp is still in the middle of that backward.
        assert second.endswith(f"after {0 if name == 'fsdp' else 1} steps")


def caught_under_ddp(folder: Path) -> dict[str, float]:
    """Return the distances of ddp on two ranks from plain torch after caught errors, by loop."""
    quiet()
    paths = [(0, 0), (1, 1), (0, 0), (1, 1), (0, 0)]
    module, plain = Catches(), Branches()
    tw.Trainer(strategy="ddp", devices=WORLD, max_epochs=1, **QUIET).fit(module, loader(paths))
    rank = torch.distributed.get_rank()
    optimizer, batches = plain.configure_optimizers(), list(loader(paths))
    for number in (0, 3, 4):
        (sum(plain(*batch) for batch in batches[WORLD * number :][:WORLD]) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {"manual": (module, plain)}

    for failing in ({0, 1}, {1}):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        alone = copy.deepcopy(model)
        accelerator = tw.Accelerator(cpu=True, strategy="ddp")
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        by_hand = torch.optim.SGD(alone.parameters(), lr=0.1)
        for number in range(4):
            halves = torch.randn(WORLD, 4, 8, generator=torch.Generator().manual_seed(number))
            if number in failing:
                hook = model[1].register_forward_hook(lambda _, __, out: out.register_hook(module.fail) and None)
                with pytest.raises(ValueError, match="the user's error"):
                    accelerator.backward(prepared(halves[rank]).pow(2).mean())
                hook.remove()
            else:
                accelerator.backward(prepared(halves[rank]).pow(2).mean())
                alone(halves.flatten(0, 1)).pow(2).mean().backward()
                optimizer.step()
                by_hand.step()
            optimizer.zero_grad()
            by_hand.zero_grad()
        accelerator.free_memory()
        found[f"a loop that fails at {failing}"] = (model, alone)
    return {
        name: max((x - y).abs().max().item() for x, y in zip(one.parameters(), other.parameters(), strict=True))
        for name, (one, other) in found.items()
    }


@pytest.mark.slow
def test_ddp_trains_on_after_a_backward_that_failed(tmp_path: Path) -> None:
    for found in run_job(caught_under_ddp, WORLD, tmp_path):
        assert len(found) == 3
        assert {name: each for name, each in found.items() if each > 1e-6} == {}


class Recomputed(tw.Module):
    """Wraps a layer that it calls twice in torch's `checkpoint_wrapper`, or says as transformers does how it recomputes it."""

    def __init__(self, is_reentrant: bool, is_wrapped: bool, is_on: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.is_wrapped = nn.Linear(8, 8), is_wrapped
        if is_wrapped:
            kind = CheckpointImpl.REENTRANT if is_reentrant else CheckpointImpl.NO_REENTRANT
            self.layer = checkpoint_wrapper(self.layer, kind)
        else:
            self.gradient_checkpointing = is_on
            self._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=is_reentrant)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = batch.requires_grad_()
        for _ in range(2):
            output = self.layer(output) if self.is_wrapped else self._gradient_checkpointing_func(self.layer, output)
        return output.pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def recomputed(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    data = DataLoader(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), batch_size=2)  # type: ignore[arg-type]
    kinds = ("ddp", "ddp_sharded", "fsdp", tw.DDPStrategy(static_graph=True))
    for number, strategy in enumerate(kinds):
        for is_reentrant, is_wrapped in ((True, True), (True, False), (False, True), (False, False)):
            module = Recomputed(is_reentrant, is_wrapped)
            key = number, is_reentrant, is_wrapped
            try:
                tw.Trainer(max_epochs=1, devices=WORLD, strategy=strategy, **QUIET).fit(module, data)
            except ValueError as error:
                found[str(key)] = str(error)
            else:
                found[str(key)] = tw.gather_module(module, all_ranks=True).layer.weight.detach()  # type: ignore[union-attr]
    return found


def test_reentrant_recomputation_is_rejected_on_several_ranks(tmp_path: Path) -> None:
    one = Recomputed(True, True)
    batches = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    tw.Trainer(max_epochs=1, **QUIET).fit(one, DataLoader(batches, batch_size=4))  # type: ignore[arg-type]
    for rank in run_job(recomputed, WORLD, tmp_path):
        for key, result in rank.items():
            number, is_reentrant, is_wrapped = ast.literal_eval(key)
            if is_reentrant and number < 3:
                layer = "'layer'" if is_wrapped else "''"
                assert f"{layer} of Recomputed recomputes activations with use_reentrant=True" in result
                assert "use_reentrant=False" in result
            else:
                torch.testing.assert_close(result, one.layer.weight)

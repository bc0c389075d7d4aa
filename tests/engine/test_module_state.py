"""A module that saves and loads itself does so in a resume, a test and a load of the Accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from small import ON_HOST, QUIET, SAVING, Classifier, assert_equal, make_loader
from torch import Tensor, nn

import trainwright as tw


class Packed(nn.Module):
    """Keeps two parameters as one entry of its state_dict, and a number and a text beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        self.count, self.note = 0, ""

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.first + self.second).sum()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}packed"] = torch.stack([self.first, self.second])
        destination[f"{prefix}count"], destination[f"{prefix}note"] = self.count, self.note

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *_: Any) -> None:
        with torch.no_grad():
            for parameter, value in zip((self.first, self.second), state_dict[f"{prefix}packed"], strict=True):
                parameter.copy_(value)
        self.count, self.note = state_dict[f"{prefix}count"], state_dict[f"{prefix}note"]


class Hooked(nn.Linear):
    """Stores its weight under another name, by hooks, and counts its loads."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.loads = 0
        self.register_state_dict_post_hook(self._rename)
        self.register_load_state_dict_pre_hook(self._name_back)
        self.register_load_state_dict_post_hook(self._count)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")

    @staticmethod
    def _name_back(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")

    @staticmethod
    def _count(module: Any, keys: Any) -> None:
        module.loads += 1


class Own(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.packed, self.hooked = Packed(), Hooked()
        self.metric = torchmetrics.MeanMetric()
        self.metric.persistent(True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.packed.count += 1
        self.packed.note = f"batch {batch_idx}"
        x = self.packed(self.hooked(batch[0]))
        self.metric.update(x.detach().mean())
        return super().training_step((x, batch[1]), batch_idx)


def trained(epochs: int, path: Any = None) -> tuple[tw.Trainer, Own]:
    trainer, module = tw.Trainer(max_epochs=epochs, **QUIET), Own()
    trainer.fit(module, make_loader(12), ckpt_path=path)
    return trainer, module


def test_a_resume_is_exact_and_every_way_of_loading_gives_the_same(tmp_path: Path) -> None:
    whole = trained(3)[1]
    trainer, first = trained(1)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    resumed = trained(3, tmp_path / "first.ckpt")[1]
    assert (resumed.packed.count, resumed.packed.note, resumed.hooked.loads) == (9, "batch 2", 1)
    assert_equal(dict(resumed.named_parameters()), dict(whole.named_parameters()))

    tested, loaded = Own(), Own.load_from_checkpoint(tmp_path / "first.ckpt")
    tw.Trainer(**QUIET).test(tested, make_loader(8), ckpt_path=tmp_path / "first.ckpt", verbose=False)
    looped = tw.Accelerator(cpu=ON_HOST)
    prepared = looped.prepare(Own())
    looped.load_state(tmp_path / "first.ckpt", weights_only=True)
    for module in (tested, loaded, looped.unwrap_model(prepared)):
        assert_equal(dict(module.named_parameters()), dict(first.named_parameters()))
        assert (module.packed.count, module.packed.note, module.hooked.loads) == (3, "batch 2", 1)
        assert torch.equal(module.metric.mean_value, first.metric.mean_value)


def test_a_module_that_cannot_take_a_checkpoint_says_so(tmp_path: Path) -> None:
    class Missing(Own):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(1, 1)

    trainer, _ = trained(1)
    path = tmp_path / "first.ckpt"
    trainer.save_checkpoint(path)
    with pytest.raises(tw.CheckpointError, match=r"(?s)Missing cannot load it.*more.weight"):
        tw.Trainer(**QUIET).test(Missing(), make_loader(8), ckpt_path=path)
    partly = Missing()
    partly.strict_loading = False
    tw.Trainer(**QUIET).test(partly, make_loader(8), ckpt_path=path, verbose=False)
    assert partly.packed.count == 3


class Counter(nn.Module):
    count = 0

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.counter = nn.Linear(2, 2), Counter()


def test_extra_state_has_the_names_of_a_plain_module_and_is_not_missed_in_silence(tmp_path: Path) -> None:
    compiled = tw.Accelerator(cpu=ON_HOST)
    module = Counts()
    module.counter.count = {"plain": (1, None), "tensor": torch.tensor([1, 2])}
    compiled.prepare(torch.compile(module, backend="eager"))
    compiled.save_state(tmp_path / "compiled.ckpt")
    for make in (Counts, lambda: torch.compile(Counts(), backend="eager")):
        plain = tw.Accelerator(cpu=ON_HOST)
        again = plain.prepare(make())
        plain.load_state(tmp_path / "compiled.ckpt")
        assert again.counter.count["plain"] == (1, None)
        assert again.counter.count["tensor"].tolist() == [1, 2]

    without = tw.Accelerator(cpu=ON_HOST)
    without.prepare(nn.ModuleDict({"layer": nn.Linear(2, 2)}))
    without.save_state(tmp_path / "without.ckpt")
    accelerator = tw.Accelerator(cpu=ON_HOST)
    accelerator.prepare(Counts())
    with pytest.raises(tw.CheckpointError, match=r"of another model \(extra state not in it: counter._extra_state\)"):
        accelerator.load_state(tmp_path / "without.ckpt")


@pytest.mark.parametrize(("value", "match"), [
    (torch.eye(3).to_sparse(), r"tensor 'odd' is torch.sparse_coo on cpu"),
    (torch.zeros(2, dtype=torch.complex128), r"tensor 'odd' is torch.complex128"),
])  # fmt: skip
def test_what_no_checkpoint_can_hold_is_refused_before_training(tmp_path: Path, value: Tensor, match: str) -> None:
    class Odd(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("odd", value)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.has_trained = True
            return super().training_step(batch, batch_idx)

    class Converts(tw.Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            del checkpoint["state_dict"]["odd"]

    module, settings = Odd(), {**SAVING, "default_root_dir": tmp_path}
    with pytest.raises(tw.CheckpointError, match=f"checkpoints of this run could not be written: {match}"):
        tw.Trainer(max_epochs=1, **settings).fit(module, make_loader(8))
    assert not hasattr(module, "has_trained")
    tw.Trainer(max_epochs=1, callbacks=[Converts()], **settings).fit(module, make_loader(8))


def test_a_save_rejects_sparse_state_of_an_optimizer(tmp_path: Path) -> None:
    class Words(Classifier):
        def __init__(self, momentum: float) -> None:
            super().__init__()
            self.words, self.momentum = nn.Embedding(9, 3, sparse=True), momentum

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + self.words(batch[1]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.words.parameters(), lr=0.1, momentum=self.momentum)

    settings = {**SAVING, "default_root_dir": tmp_path, "max_epochs": 1}
    with pytest.raises(tw.CheckpointError, match=r"is torch\.sparse_coo on cpu, but a checkpoint stores dense tensors"):
        tw.Trainer(**settings).fit(Words(0.9), make_loader(16))
    trainer = tw.Trainer(**settings)
    trainer.fit(Words(0.0), make_loader(16))
    assert trainer.global_step > 0

"""The contents of a Trainer's checkpoint, the hooks that change them, their restore, and saves that replace an earlier one."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from safetensors import safe_open
from small import QUIET, Classifier, assert_equal, loss_of, make_loader, weights
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau

import trainwright as tw
from trainwright.checkpoint.reader import open_checkpoint


def fit(module: tw.Module, ckpt_path: Any = None, epochs: int = 1, **settings: Any) -> tw.Trainer:
    trainer = tw.Trainer(
        **{"max_epochs": epochs, "num_sanity_val_steps": 0, "limit_train_batches": 2, **QUIET, **settings}
    )
    trainer.fit(module, make_loader(), make_loader(8), ckpt_path=ckpt_path)
    return trainer


def saved(trainer: tw.Trainer, path: Path, **kwargs: Any) -> Path:
    assert trainer.save_checkpoint(path, **kwargs)
    return path


def state_of(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((path / "state.json").read_text())
    return state


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Every tensor in the checkpoint's safetensors files."""
    found = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return found


class Scheduled(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [CosineAnnealingLR(optimizer, 4)]


def test_what_a_checkpoint_holds(tmp_path: Path) -> None:
    trainer = fit(Scheduled(), precision="16-mixed", callbacks=tw.EarlyStopping("val_loss"))
    state = state_of(saved(trainer, tmp_path / "full.ckpt"))
    kept = {"trainwright_version", "position", "lr_schedulers", "callbacks", "optimizers", "precision", "seed"}
    assert kept <= {*state}, "\n".join(state)
    assert [name for name in tmp_path.glob("**/*") if name.suffix not in (".json", ".safetensors", ".ckpt")] == []
    model = state_of(saved(trainer, tmp_path / "weights.ckpt", weights_only=True))
    assert not {"position", "lr_schedulers", "callbacks", "optimizers", "precision"} & {*model}
    with pytest.raises(tw.CheckpointError, match="holds weights only, so a run cannot be resumed from it"):
        fit(Scheduled(), tmp_path / "weights.ckpt", 2)


class Adding(Classifier):
    """Keeps an average beside its weights, leaves a layer out, and takes both back."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.loaded: dict[str, Any] = {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["average"] = {name: value * 0.5 for name, value in state.items()}
        checkpoint["words"] = ["a", {"b": 2.5, "nothing": None}, (1, True)]
        del state["frozen.weight"], state["frozen.bias"]
        state["more.scale"] = torch.full((3,), 7.0)
        checkpoint["hyper_parameters"] = {"lr": 0.25}
        del checkpoint["callbacks"]
        assert (checkpoint["epoch"], checkpoint["global_step"]) == (self.current_epoch, self.global_step)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = {**checkpoint, "state_dict": dict(checkpoint["state_dict"])}
        state = checkpoint["state_dict"]
        assert torch.equal(state.pop("more.scale"), torch.full((3,), 7.0))
        state["frozen.weight"], state["frozen.bias"] = torch.eye(2), torch.zeros(2)
        state["net.0.bias"] = torch.ones(13)


class AddingToo(tw.Callback):
    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["of the callback"] = torch.arange(3)

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        assert torch.equal(checkpoint["of the callback"], torch.arange(3))
        checkpoint["seen"] = True


def test_hooks_change_what_is_saved_and_what_is_taken(tmp_path: Path) -> None:
    module = Adding()
    trainer = fit(module, callbacks=[AddingToo(), tw.EarlyStopping("val_loss")])
    path = saved(trainer, tmp_path / "changed.ckpt")
    tensors, state = tensors_of(path), state_of(path)
    assert any(torch.equal(value, torch.full((3,), 7.0)) for value in tensors.values())
    halves = [value for value in tensors.values() if torch.equal(value, 0.5 * module.net[0].weight.cpu())]
    assert len(halves) == 1  # it is a tensor of a safetensors file, not numbers in the JSON
    assert not any(name.startswith("frozen") for name in tensors)
    assert "callbacks" not in state
    assert len((path / "state.json").read_text()) < 5_000

    resumed = Adding()
    trainer = fit(resumed, path, 1, callbacks=[AddingToo()])
    assert resumed.loaded["words"] == ["a", {"b": 2.5, "nothing": None}, (1, True)]
    assert torch.equal(resumed.loaded["average"]["net.0.weight"].cpu(), 0.5 * module.net[0].weight.cpu())
    assert resumed.loaded["seen"] is True  # callbacks are asked before the module
    assert (trainer.global_step, trainer.current_epoch) == (2, 1)
    assert torch.equal(resumed.frozen.weight.cpu(), torch.eye(2))
    assert torch.equal(resumed.net[0].bias.cpu(), torch.ones(13))
    assert torch.equal(resumed.net[3].weight, module.net[3].weight)

    tested = Adding()
    tw.Trainer(callbacks=AddingToo(), **QUIET).test(tested, make_loader(8), ckpt_path=path, verbose=False)
    assert_equal(weights(tested), weights(resumed))
    loaded = Adding.load_from_checkpoint(path)
    assert_equal(weights(loaded), weights(resumed))


def test_layers_may_be_built_from_a_checkpoint(tmp_path: Path) -> None:
    """on_load_checkpoint comes before the module is placed and its optimizers are made, in every kind of load."""

    class Growing(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict()

        def grow(self, names: list[str]) -> Growing:
            self.heads.update({name: nn.Linear(3, 3) for name in names})
            return self

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["heads"] = list(self.heads)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.grow(checkpoint["heads"])

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            outputs = self.net(batch[0])
            return nn.functional.cross_entropy(sum(head(outputs) for head in self.heads.values()), batch[1])

    module = Growing().grow(["a", "b"])
    path = saved(fit(module), tmp_path / "run.ckpt")
    assert_equal(weights(Growing.load_from_checkpoint(path)), weights(module))
    tested = Growing()
    tw.Trainer(**QUIET).validate(tested, make_loader(), ckpt_path=path)
    assert_equal(weights(tested), weights(module))
    resumed = Growing()
    assert fit(resumed, path, 2).current_epoch == 2
    assert weights(resumed).keys() == weights(module).keys()


def test_hyper_parameters_that_are_not_plain_are_left_out_with_one_warning(tmp_path: Path) -> None:
    class Hyper(Classifier):
        def __init__(self, net: nn.Module, make: Any, width: int = 3, lr: float = 0.05) -> None:
            super().__init__()
            self.save_hyperparameters()

    module = Hyper(nn.Linear(2, 2), lambda: None, width=5)
    saving = tw.ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        trainer = fit(module, callbacks=saving, logger=tw.CSVLogger(tmp_path), **{"enable_checkpointing": True})
    told = [str(each.message) for each in said if "net" in str(each.message)]
    assert len(told) == 1
    assert "(net, make) are left out" in told[0] or "(make, net)" in told[0]
    state = state_of(Path(saving.best_model_path))
    assert json.dumps(state["hyper_parameters"]).count("width") == 1
    assert "make" not in json.dumps(state["hyper_parameters"])
    loaded = Hyper.load_from_checkpoint(saving.best_model_path, net=nn.Linear(2, 2), make=print)
    assert (loaded.hparams.width, loaded.hparams.lr) == (5, 0.05)
    with pytest.raises(TypeError, match=r"make|net"):
        Hyper.load_from_checkpoint(saving.best_model_path)
    assert trainer.global_step == 2


class Activated(Classifier):
    def __init__(self, act: Any = nn.ReLU) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net.insert(1, act())


@pytest.mark.filterwarnings("ignore:the module.s hyper-parameters without a plain form")
def test_a_module_is_made_with_the_arguments_that_it_was_trained_with(tmp_path: Path) -> None:
    """Not with the defaults where an argument is no plain data."""
    path = saved(fit(Activated(nn.Tanh)), tmp_path / "tanh.ckpt")
    assert Activated.load_from_checkpoint(path).hparams.act is nn.Tanh
    path = saved(fit(Activated(lambda: nn.Tanh())), tmp_path / "unnamed.ckpt")
    with pytest.raises(TypeError, match=r"trained with an argument 'act' that is not in the checkpoint.* Pass it"):
        Activated.load_from_checkpoint(path)
    assert isinstance(Activated.load_from_checkpoint(path, act=nn.GELU).net[1], nn.GELU)


class Tuned(Classifier):
    def __init__(self, lr: float, *, name: str = "none", extra: bool = False) -> None:
        super().__init__(lr=lr)
        self.save_hyperparameters()
        if extra:
            self.head = nn.Linear(3, 2)


def test_a_module_is_made_from_a_checkpoint(tmp_path: Path) -> None:
    module = Tuned(0.2, name="first")
    path = saved(fit(module), tmp_path / "run.ckpt")
    loaded = Tuned.load_from_checkpoint(path)
    assert_equal(weights(loaded), weights(module))
    assert (dict(loaded.hparams), loaded.lr) == ({"lr": 0.2, "name": "first", "extra": False}, 0.2)
    assert loaded._trainer is None
    assert Tuned.load_from_checkpoint(str(path), lr=0.5, map_location="cpu").hparams.lr == 0.5
    with pytest.raises((RuntimeError, tw.CheckpointError), match=r"head\.weight"):
        Tuned.load_from_checkpoint(path, extra=True)
    with pytest.raises(tw.CheckpointError, match="or pass strict=False to load the matching part"):
        Tuned.load_from_checkpoint(path, extra=True)
    wider = Tuned.load_from_checkpoint(path, extra=True, strict=False)
    assert_equal({name: value for name, value in weights(wider).items() if "head" not in name}, weights(module))


def test_strict_loading_false_loads_matching_tensors(tmp_path: Path) -> None:
    """strict_loading = False: a checkpoint may lack tensors of the module, and have others."""
    path = saved(fit(Tuned(0.1, extra=True)), tmp_path / "with a head.ckpt")
    module = Tuned(0.1)
    trainer = tw.Trainer(**QUIET)
    with pytest.raises(
        tw.CheckpointError, match=r"only in it: head.bias \(\d+,\), head.weight \(.*strict_loading = False"
    ):
        trainer.test(module, make_loader(8), ckpt_path=path, verbose=False)
    module.strict_loading = False
    trainer.test(module, make_loader(8), ckpt_path=path, verbose=False)
    assert_equal(weights(module), {name: value for name, value in weights(module).items() if "head" not in name})
    path = saved(fit(module), tmp_path / "without.ckpt")
    other = Tuned(0.1, extra=True)
    other.strict_loading = False
    head = other.head.weight.clone()
    trainer.validate(other, make_loader(8), ckpt_path=path, verbose=False)
    assert torch.equal(other.head.weight.cpu(), head)
    assert torch.equal(other.net[0].weight, module.net[0].weight)


class Counted(tw.DataModule):
    """Its state is a count and a tensor."""

    def __init__(self, size: int = 8) -> None:
        self.save_hyperparameters()
        self.count, self.order = 0, torch.zeros(2)

    def setup(self, stage: str) -> None:
        self.count += 1

    def train_dataloader(self) -> Any:
        return make_loader(self.hparams.size)

    test_dataloader = train_dataloader

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "order": torch.tensor([1.0, 2.0])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count += 10 * state_dict["count"]
        self.order = state_dict["order"]


def test_the_datamodule_has_its_part() -> None:
    trainer = tw.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Classifier(), datamodule=Counted(12))
    assert trainer.save_checkpoint("memory://datamodule/run.ckpt")
    other = Counted()
    trainer = tw.Trainer(max_epochs=2, **QUIET)
    trainer.fit(Classifier(), datamodule=other, ckpt_path="memory://datamodule/run.ckpt")
    assert (other.count, other.order.tolist()) == (11, [1.0, 2.0])
    assert trainer.global_step == 3 + 2  # an epoch of 12 samples, then one of 8
    tested = Counted()
    trainer.test(Classifier(), datamodule=tested, ckpt_path="memory://datamodule/run.ckpt", verbose=False)
    assert (tested.count, tested.order.tolist()) == (11, [1.0, 2.0])
    assert Counted.load_from_checkpoint("memory://datamodule/run.ckpt").hparams.size == 12


class Falling(Classifier):
    """Its monitored value is known: it falls for three epochs, then rises."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return [optimizer], [CosineAnnealingLR(optimizer, 6), {"scheduler": plateau, "monitor": "score"}]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", float(abs(self.current_epoch - 2)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.net, (batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]))


MOMENTS = (
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_validation_start",
    "on_validation_end", "on_train_epoch_end", "on_train_end",
)  # fmt: skip


@pytest.mark.parametrize("interval", [None, 5])
def test_a_checkpoint_of_any_moment_is_gone_on_from(tmp_path: Path, interval: int | None) -> None:
    """Whatever hook asks for it: within an epoch, in the validation at its end, in on_train_epoch_end."""
    asked: dict[str, int] = {}

    def saving(name: str) -> Any:
        def save(self: Any, trainer: Any, *_: Any) -> None:
            asked[name] = asked.get(name, 0) + 1
            if asked[name] == 3 or name in ("on_train_start", "on_train_end"):
                trainer.save_checkpoint(tmp_path / f"{name}.ckpt")

        return save

    def run(callbacks: Any = (), ckpt_path: Path | None = None) -> Any:
        tw.seed_everything(3)
        module = Falling(dropout=0.2)
        settings = {"val_check_interval": interval, "num_sanity_val_steps": 0, "callbacks": callbacks, **QUIET}
        trainer = tw.Trainer(max_epochs=4, **settings)
        trainer.fit(module, make_loader(shuffle=True), make_loader(4), ckpt_path=ckpt_path)
        schedulers = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
        return weights(module), (trainer.global_step, trainer.state.validations, json.dumps(schedulers, default=str))

    tensors, facts = run(type("Saving", (tw.Callback,), {name: saving(name) for name in MOMENTS})())
    for name in MOMENTS:
        resumed, found = run(ckpt_path=tmp_path / f"{name}.ckpt")
        assert found == facts, name
        assert_equal(resumed, tensors)


def train(folder: Path, epochs: int, ckpt_path: Path | None = None, **saving: Any) -> dict[str, torch.Tensor]:
    """Run a script that ends with a save and a test."""
    torch.manual_seed(4)
    module = Classifier(dropout=0.3)
    trainer = small.fit(module, make_loader(shuffle=True), ckpt_path=ckpt_path, max_epochs=epochs)
    assert trainer.save_checkpoint(folder / "final.ckpt", **saving)
    trainer.test(module, make_loader(8), verbose=False)
    return weights(module)


@pytest.mark.parametrize("blocking", [True, False])
def test_the_script_is_run_again_and_goes_on_from_what_it_replaces(blocking: bool, tmp_path: Path) -> None:
    path = tmp_path / "final.ckpt"
    whole = train(tmp_path / "whole", 3)
    train(tmp_path, 1)
    with pytest.raises(tw.CheckpointError, match=r"final\.ckpt exists already, and overwrite=False was given; leave"):
        train(tmp_path, 1, overwrite=False)
    for epochs in (1, 2, 3):
        reached = train(tmp_path, epochs, path, blocking=blocking)
        assert open_checkpoint(str(path)).epoch == epochs
        assert sorted(os.listdir(tmp_path)) == ["final.ckpt", "whole"]
    assert_equal(reached, whole)


def test_a_hook_may_take_schedulers_and_callbacks_out(tmp_path: Path) -> None:
    """A changed schedule: the run goes on, the schedule begins anew."""

    class Takes(Scheduled):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            del checkpoint["lr_schedulers"], checkpoint["callbacks"]

    stopping = {"callbacks": tw.EarlyStopping("val_loss", mode="max")}
    path = saved(fit(Takes(), epochs=2, **stopping), tmp_path / "run.ckpt")
    trainer = fit(Takes(), path, 3, **stopping)
    assert trainer.current_epoch == 3
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1


def test_a_save_that_waits_for_its_windows_end_overwrites_too(tmp_path: Path) -> None:
    path = tmp_path / "newest.ckpt"

    class Saves(tw.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            at_end = batch_idx % 4 == 3
            assert trainer.save_checkpoint(path) is at_end

    small.fit(Classifier(), limit_train_batches=8, accumulate_grad_batches=4, callbacks=Saves())
    assert open_checkpoint(str(path)).step == 2
    assert os.listdir(tmp_path) == ["newest.ckpt"]


def test_weights_are_edited_beside_an_expanded_buffer(tmp_path: Path) -> None:
    class Masked(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(1).expand(3))

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"]["mask"] = checkpoint["state_dict"]["mask"] * 2

    module = Masked()
    fit(module, saved(fit(Masked()), tmp_path / "run.ckpt"), 2)
    assert module.mask.tolist() == [2.0, 2.0, 2.0]

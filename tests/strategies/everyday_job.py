"""The everyday calls under every strategy, as functions that run on every rank of a job and on one process."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_job import relative_distance
from small import QUIET
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.checkpoint.foreign_formats import read_weights

RANK_BATCH = 2
Case = Callable[[Any, int, Path], dict[str, Any]]
"""Called with a strategy (a name or a function), the number of ranks whose work this process does, and a path."""


class Regresses(tw.Module):
    """A net whose shapes are not divisible by two, with optional dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 3))
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def numbers(samples: int, seed: int = 6) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 5, generator=generator)
    return TensorDataset(x, x[:, :1] - x[:, 1:2].square())


def loader(samples: int, ranks: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(numbers(samples), batch_size=RANK_BATCH * ranks, **options)


def made(strategy: Any) -> Any:
    return strategy() if callable(strategy) else strategy


def trainer(strategy: Any, **settings: Any) -> tw.Trainer:
    return tw.Trainer(**{"strategy": made(strategy), "max_epochs": 1, **QUIET, **settings})


def uneven(strategy: Any, ranks: int, path: Path) -> dict[str, Any]:
    """The last round is of one sample, within a window of three."""
    used = trainer(strategy, accumulate_grad_batches=3, gradient_clip_val=0.3)
    used.fit(Regresses(), loader(21, ranks))
    used.save_checkpoint(str(path))
    return {"steps": used.global_step, "loss": float(used.callback_metrics["loss_epoch"])}


def one_sample_window(strategy: Any, ranks: int, path: Path) -> dict[str, Any]:
    """The last window has one sample, on one rank."""
    used = trainer(strategy, accumulate_grad_batches=5, gradient_clip_val=0.01, gradient_clip_algorithm="value")
    used.fit(Regresses(), loader(21, ranks))
    used.save_checkpoint(str(path))
    return {"steps": used.global_step, "loss": float(used.callback_metrics["loss_epoch"])}


def limits(strategy: Any, ranks: int, path: Path) -> dict[str, Any]:
    """Validations stand within accumulation windows, on shares of unequal length."""
    limits = {"limit_train_batches": 5, "val_check_interval": 3, "limit_val_batches": 3, "num_sanity_val_steps": 1}
    used = trainer(strategy, max_epochs=2, accumulate_grad_batches=2, **limits)
    used.fit(Regresses(), loader(40, ranks), loader(9, ranks))
    used.save_checkpoint(str(path))
    return {"steps": used.global_step, "val_loss": float(used.callback_metrics["val_loss"])}


def overfit(strategy: Any, ranks: int, path: Path) -> dict[str, Any]:
    used = trainer(strategy, max_epochs=2, overfit_batches=2)
    used.fit(Regresses(), loader(24, ranks))
    used.save_checkpoint(str(path))
    return {"steps": used.global_step}


class Collects(tw.Callback):
    """Collects garbage while it trains, such as the engines of another Trainer that has trained the module."""

    def on_train_batch_end(self, trainer: tw.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        gc.collect()


def all_stages(strategy: Any, ranks: int, path: Path) -> dict[str, Any]:
    """Fit, validate, test, save, predict and fit again with one Trainer and one module."""
    module, used = Regresses(), trainer(strategy)
    used.fit(module, loader(16, ranks), loader(9, ranks))
    found = {
        "validate": used.validate(module, loader(9, ranks), verbose=False)[0]["val_loss"],
        "test": used.test(module, loader(11, ranks), verbose=False)[0]["val_loss"],
        "predict": torch.cat(used.predict(module, loader(7, ranks))),
    }
    used.save_checkpoint(str(path.with_name("all_stages_tested.ckpt")), weights_only=True)
    used.fit(module, loader(16, ranks))
    del used
    another = trainer(strategy, callbacks=[Collects()])
    another.fit(module, loader(8, ranks))
    found["after"] = another.test(module, loader(11, ranks), verbose=False)[0]["val_loss"]
    another.save_checkpoint(str(path))
    return found


def callbacks(strategy: Any, ranks: int, path: Path) -> dict[str, Any]:
    """Ranks stop alike and keep the same checkpoint."""
    stop = tw.EarlyStopping("val_loss", patience=1, min_delta=0.15)
    keep = tw.ModelCheckpoint(dirpath=path.with_name("kept"), monitor="val_loss", filename="{epoch}")
    used = trainer(strategy, max_epochs=8, callbacks=[stop, keep], enable_checkpointing=True)
    module = Regresses()
    used.fit(module, loader(16, ranks), loader(9, ranks))
    used.save_checkpoint(str(path))
    (best,) = used.test(module, loader(9, ranks), ckpt_path="best", verbose=False)
    return {
        "epoch": used.current_epoch,
        "stopped": stop.stopped_epoch,
        "best": Path(keep.best_model_path).name,
        "score": float(keep.best_model_score),
        "tested": best["val_loss"],
    }


def plateau(strategy: Any, ranks: int, path: Path) -> dict[str, Any]:
    """A schedule by a metric, and one parameter that is frozen."""

    class Follows(Regresses):
        def configure_optimizers(self) -> Any:
            self.head.bias.requires_grad_(False)
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0, threshold=10.0, threshold_mode="abs"
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    used = trainer(strategy, max_epochs=4)
    used.fit(Follows(), loader(16, ranks), loader(9, ranks))
    used.save_checkpoint(str(path))
    return {"lr": used.optimizers[0].param_groups[0]["lr"]}


EQUAL: dict[str, Case] = {
    each.__name__: each for each in (uneven, one_sample_window, limits, overfit, all_stages, callbacks, plateau)
}
"""The cases whose results must match one process."""


def resumed(strategy: Any, folder: Path) -> None:
    """Save a whole run, and runs resumed at an epoch's end and within an epoch."""

    def run(seed: int, kept: str | None, ckpt_path: str | None = None, max_epochs: int = 2, **every: int) -> tw.Trainer:
        module = Regresses(0.3)
        torch.manual_seed(seed)
        keep = [tw.ModelCheckpoint(dirpath=folder / kept, save_top_k=-1, **every)] if kept is not None else []
        settings = {"callbacks": keep, "enable_checkpointing": bool(keep), "accumulate_grad_batches": 2}
        used = trainer(strategy, max_epochs=max_epochs, **settings)
        used.fit(module, loader(21, 1, shuffle=True), ckpt_path=ckpt_path)
        return used

    run(7, "epochs", max_epochs=1, every_n_epochs=1)
    run(8, "epochs", "last", every_n_epochs=1).save_checkpoint(str(folder / "resumed.ckpt"))
    run(7, "steps", every_n_train_steps=2).save_checkpoint(str(folder / "whole.ckpt"))
    within = min((folder / "steps").glob("epoch=1*"))
    run(9, None, str(within)).save_checkpoint(str(folder / "resumed_within.ckpt"))


def nothing_to_train(strategy: Any) -> dict[str, Any]:
    """No optimizer, no parameter, no loss, and no gradient at all."""

    class Idle(Regresses):
        def configure_optimizers(self) -> Any:
            return None

    class Bare(tw.Module):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.log("mean", batch[1].mean(), on_epoch=True)
            return batch[1].mean()

        def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.log("mean", batch[1].mean())

        def configure_optimizers(self) -> Any:
            return None

    class Empty(Regresses):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return None

    class Elsewhere(Regresses):
        """Its loss reaches no parameter of the optimizer."""

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self.head(batch[0][:, :3]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.body.parameters(), 0.1)

    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "configure_optimizers returned None")
        used = trainer(strategy)
        used.fit(Idle(), loader(8, 1), loader(8, 1))
        found["idle"] = float(used.callback_metrics["loss_epoch"])
        used = trainer(strategy)
        used.fit(Bare(), loader(8, 1))
        found["bare"] = float(used.callback_metrics["mean_epoch"])
        found["bare test"] = used.test(Bare(), loader(8, 1), verbose=False)[0]["mean"]
    used = trainer(strategy, gradient_clip_val=0.5)
    module = Elsewhere()
    used.fit(module, loader(8, 1))
    found["elsewhere"] = used.global_step
    with pytest.raises(RuntimeError, match=r"training_step returned None on one of 2 ranks"):
        trainer(strategy).fit(Empty(), loader(8, 1))
    return found


def everyday(strategy: Any, folder: Path) -> dict[str, Any]:
    """Make every check with a strategy, on this rank."""
    found = {name: case(strategy, 1, folder / f"{name}.ckpt") for name, case in EQUAL.items()}
    resumed(strategy, folder)
    found["nothing"] = nothing_to_train(strategy)
    return found


def under_ddp(folder: Path) -> dict[str, Any]:
    return everyday("ddp_find_unused_parameters_true", folder)


def alone(folder: Path) -> dict[str, Any]:
    """Return the results of one process that does the work of two ranks."""
    return {name: case("single_device", 2, folder / f"{name}.ckpt") for name, case in EQUAL.items()}


def assert_same_weights(path: Path, other: Path, tolerance: float = 1e-5) -> None:
    """Check that the weights of two checkpoints are close, or equal with a tolerance of 0."""
    left, right = read_weights(path).state_dict, read_weights(other).state_dict
    assert dict(relative_distance(left, right)) == pytest.approx(
        dict.fromkeys((n for n, v in right.items() if v.is_floating_point()), 0.0), abs=tolerance
    ), path.name


def assert_everyday(ranks: list[Mapping[str, Any]], expected: Mapping[str, Any], folder: Path, other: Path) -> None:
    for rank in ranks:
        for name in EQUAL:
            assert rank[name].keys() == expected[name].keys()
            for key, value in expected[name].items():
                if isinstance(value, Tensor):
                    torch.testing.assert_close(rank[name][key], value, rtol=1e-5, atol=1e-5)
                else:
                    wanted = pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value
                    assert rank[name][key] == wanted, (name, key)
            assert_same_weights(folder / f"{name}.ckpt", other / f"{name}.ckpt")
        assert rank["nothing"] == ranks[0]["nothing"]
        assert rank["nothing"]["elsewhere"] == 2
    for name in ("resumed", "resumed_within"):
        assert_same_weights(folder / f"{name}.ckpt", folder / "whole.ckpt", 0.0)

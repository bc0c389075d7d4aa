"""The config of a run: in its folder, in its checkpoints, and in the commands that resume it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_program import DEFAULTS, Data, Net, OwnOptimizer
from jobs import run_job

import trainwright as tw
from trainwright.checkpoint.discovery import find_checkpoints
from trainwright.cli import OptimizerCallable, SaveConfigCallback, TrainwrightCLI, stored_config

QUICK = {**DEFAULTS, "max_epochs": 1, "num_sanity_val_steps": 0}


def fitted(*args: str, **options: Any) -> TrainwrightCLI:
    """Return a CLI after its fit."""
    defaults = {**QUICK, **options.pop("trainer_defaults", {})}
    return TrainwrightCLI(OwnOptimizer, Data, args=["fit", *args], trainer_defaults=defaults, **options)


def made(*args: str, **options: Any) -> TrainwrightCLI:
    """Return a CLI that has only made its objects."""
    options = {"trainer_defaults": QUICK, **options}
    return TrainwrightCLI(OwnOptimizer, Data, args=list(args), run=False, **options)


def configs(folder: Path = Path(".")) -> list[str]:
    return sorted(str(path) for path in folder.rglob("config*.yaml"))


def fit(cli: TrainwrightCLI, **arguments: Any) -> None:
    cli.trainer.fit(cli.model, datamodule=cli.datamodule, **arguments)


VERSION = ("--trainer.logger=CSVLogger", "--trainer.logger.version=7")


def test_a_run_in_the_folder_of_another_one_is_rejected() -> None:
    """The same config, and the config of a resumed run, are accepted."""
    fit(made("--model.width=3", "--seed_everything=1", *VERSION))
    path = "trainwright_logs/version_7/config.yaml"
    assert configs() == [path]
    written = Path(path).read_text()
    assert written.startswith(f"# trainwright=={tw.__version__}\n")
    assert yaml.safe_load(written)["model"] == {"width": 3, "act": None, "num_classes": 3}

    other = made("--model.width=4", "--seed_everything=1", *VERSION)
    with pytest.raises(
        ValueError, match=r"config\.yaml is the config of another run.*Resume that run with --ckpt_path"
    ):
        fit(other)
    assert Path(path).read_text() == written

    resumed = made("--model.width=3", "--seed_everything=2", "--trainer.max_epochs=2", *VERSION)
    fit(resumed, ckpt_path="last")
    assert configs() == ["trainwright_logs/version_7/config-v1.yaml", path]
    assert resumed.trainer.current_epoch == 2
    again = made("--model.width=3", "--seed_everything=3", "--trainer.max_epochs=2", *VERSION)
    fit(again, ckpt_path="last")
    assert len(configs()) == 2  # another random seed is not another config

    replacing = made("--model.width=4", "--seed_everything=1", *VERSION, save_config_kwargs={"overwrite": True})
    fit(replacing)
    assert yaml.safe_load(Path(path).read_text())["model"]["width"] == 4


def test_a_config_is_written_only_if_a_run_begins() -> None:
    fit(made("--model.width=3", "--trainer.fast_dev_run=1"))
    fit(made("--model.width=3", save_config_callback=None, trainer_defaults={**QUICK, "logger": False}))
    with pytest.raises(RuntimeError, match="no data"):  # rejected before training, so no file is written
        fit(made("--model.width=3", trainer_defaults={**QUICK, "callbacks": Refusing()}))
    assert configs() == []
    for width in (3, 4, 3):  # a run without loggers has no run folder
        fit(made(f"--model.width={width}", "--seed_everything=1", "--trainer.logger=false"))
    assert configs() == ["config-v1.yaml", "config.yaml"]


class Refusing(tw.Callback):
    def on_fit_start(self, trainer: tw.Trainer, module: tw.Module) -> None:
        raise RuntimeError("no data")


class InLogger(SaveConfigCallback):
    """As in a user's program."""

    def save_config(self, trainer: Any, module: tw.Module, stage: str) -> None:
        trainer.logger.log_hyperparams({"config": self.parser.dump(self.config), "stage": stage})


def test_a_callback_can_store_it_elsewhere() -> None:
    options = {"save_config_callback": InLogger, "save_config_kwargs": {"save_to_log_dir": False}}
    cli = made("--model.width=3", **options)
    cli.trainer.validate(cli.model, datamodule=cli.datamodule, verbose=False)
    fit(cli)
    assert configs() == []
    logged = yaml.safe_load(Path(cli.trainer.log_dir or "", "hparams.yaml").read_text())
    assert logged["stage"] == "validate"
    assert yaml.safe_load(logged["config"])["model"]["width"] == 3


def test_a_checkpoint_tells_its_config() -> None:
    fit(made("--model.width=3"))
    (found,) = find_checkpoints("trainwright_logs/version_0/checkpoints")
    text = stored_config(found.path)
    assert text == Path("trainwright_logs/version_0/config.yaml").read_text()
    other = made(
        "--model.width=5", "--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.save_weights_only=true"
    )
    fit(other)
    (weights,) = find_checkpoints("trainwright_logs/version_1/checkpoints")
    assert yaml.safe_load(stored_config(weights.path) or "")["model"]["width"] == 5
    other.trainer.save_checkpoint("elsewhere.ckpt", weights_only=True)
    assert stored_config("elsewhere.ckpt") is None


def test_objects_are_stored_as_hyper_parameters() -> None:
    """save_hyperparameters stores the object of the config, and the checkpoint omits it."""

    class Holding(Net):
        def __init__(self, act: torch.nn.Module, lr: float = 0.1) -> None:
            super().__init__(4, act)
            self.save_hyperparameters()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    cli = TrainwrightCLI(
        Holding, Data, args=["--model.act=torch.nn.ELU", "--model.lr=0.5"], run=False, trainer_defaults=QUICK
    )
    assert isinstance(cli.model.hparams.act, torch.nn.ELU)
    with pytest.warns(UserWarning, match=r"without a plain form \(act\)"):
        fit(cli)
    (found,) = find_checkpoints("trainwright_logs/version_0/checkpoints")
    loaded = Holding.load_from_checkpoint(found.path, act=torch.nn.ELU())
    assert loaded.hparams.lr == 0.5
    assert yaml.safe_load(stored_config(found.path) or "")["model"]["act"]["class_path"] == "torch.nn.ELU"


def test_an_optimizer_of_the_config_is_made_again_from_a_checkpoint() -> None:
    class Choosing(Net):
        def __init__(self, optimizer: OptimizerCallable = torch.optim.SGD) -> None:
            super().__init__(4)
            self.save_hyperparameters()

        def configure_optimizers(self) -> Any:
            return self.hparams.optimizer(self.parameters())

    args = ["--model.optimizer=AdamW", "--model.optimizer.lr=0.25"]
    cli = TrainwrightCLI(Choosing, Data, args=args, run=False, trainer_defaults=QUICK, auto_configure_optimizers=False)
    fit(cli)
    (found,) = find_checkpoints("trainwright_logs/version_0/checkpoints")
    (again,) = [Choosing.load_from_checkpoint(found.path).configure_optimizers()]
    assert (type(again), again.defaults["lr"]) == (torch.optim.AdamW, 0.25)
    logged = yaml.safe_load(Path(cli.trainer.log_dir or "", "hparams.yaml").read_text())
    assert logged["optimizer"]["partial"].endswith("AdamW")


@pytest.mark.slow
def test_missing_arguments_are_taken_from_the_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    first = fitted(
        "--model.width=6", "--model.act=torch.nn.ReLU", "--trainer.default_root_dir=runs", "--data.batch_size=8"
    )
    assert capsys.readouterr().err == ""
    path = first.trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    resumed = fitted("--ckpt_path=last", "--trainer.default_root_dir", "runs", "--trainer.max_epochs=2")
    assert (
        f"arguments that are not in the command come from the config in {os.path.abspath(path)}"
        in capsys.readouterr().err
    )
    assert (resumed.trainer.current_epoch, resumed.trainer.global_step) == (2, 4)
    assert resumed.config.fit.model == first.config.fit.model
    assert resumed.config.fit.seed_everything == first.config.fit.seed_everything
    assert resumed.trainer.log_dir == first.trainer.log_dir

    args = ["predict", "--ckpt_path", path]
    tested = TrainwrightCLI(OwnOptimizer, Data, args=args, trainer_defaults=DEFAULTS)
    assert tested.model.hparams.width == 6
    assert tested.config.predict.ckpt_path == path
    capsys.readouterr()
    Path("own.yaml").write_text("model:\n  width: 6\n")
    own = fitted("--config=own.yaml", f"--ckpt_path={path}", "--trainer.max_epochs=2")
    assert own.config.fit.data.batch_size == 4  # the stored config is not read
    assert "come from the config" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_checkpoint_of_another_program_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    fitted("--model.width=6")
    for args in (["fit", "--ckpt_path=last"], ["fit", "--ckpt_path=missing.ckpt"]):
        with pytest.raises(SystemExit):
            TrainwrightCLI(Other, Data, args=args, trainer_defaults=QUICK)
    said = capsys.readouterr().err
    assert "Arguments that are not in the command come from the config in " in said
    assert "'fit.model' has no argument 'width'. Did you mean 'depth'?" in said
    assert "fit.model.depth" in said


class Other(OwnOptimizer):
    def __init__(self, depth: int) -> None:
        super().__init__(depth)


def fit_on_rank(folder: Path) -> Any:
    os.chdir(folder)
    cli = fitted("--model.width=6", "--trainer.devices=2", "--trainer.strategy=ddp", "--ckpt_path=auto")
    return cli.config.fit.seed_everything, cli.trainer.world_size, cli.trainer.global_step


@pytest.mark.slow
def test_one_rank_writes_the_config(tmp_path: Path) -> None:
    results = run_job(fit_on_rank, 2, tmp_path)
    assert results[0] == results[1]
    assert results[0][1:] == (2, 2)
    (path,) = configs(tmp_path)
    assert yaml.safe_load(Path(path).read_text())["seed_everything"] == results[0][0]

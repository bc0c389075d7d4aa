"""A TrainwrightCLI in this process: parsed arguments and configs, the objects made from them, and error messages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_program import DEFAULTS, Data, Net, OwnOptimizer, Program

import trainwright as tw
from trainwright.cli import (
    LightningArgumentParser,
    LightningCLI,
    ReduceLROnPlateau,
    SaveConfigCallback,
    TrainwrightArgumentParser,
    TrainwrightCLI,
    instantiate_class,
)

SGD = ("--optimizer=SGD", "--optimizer.lr=0.1")
FAST = {**DEFAULTS, "fast_dev_run": True}


def made(*args: str, kind: type[TrainwrightCLI] = TrainwrightCLI, **options: Any) -> TrainwrightCLI:
    """Return a CLI that runs nothing."""
    options = {"model_class": Net, "datamodule_class": Data, "trainer_defaults": DEFAULTS, **options}
    return kind(args=list(args), run=False, **options)


@pytest.fixture(scope="module")
def parser() -> TrainwrightArgumentParser:
    """Return the parser of a program without subcommands, to test wrong arguments."""
    return made("--model.width=3").parser


def refused(capsys: pytest.CaptureFixture[str], parse: Callable[[list[str]], Any], *args: str) -> str:
    """Return the error message of a rejected command."""
    with pytest.raises(SystemExit) as stopped:
        parse(list(args))
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage: ")
    assert "Traceback" not in said
    return said.partition("error: ")[2].strip()


@pytest.mark.parametrize(("argument", "said"), [
    ("--trainer.precision=half", "precision='half' is unknown; choose from "),
    ("--trainer.max_epochs=-5", "Trainer was given wrong settings: max_epochs=-5: expected an integer of at least -1"),
    ("--trainer.callbacks=[{class_path: Timer, init_args: {interval: x}}]", "interval='x' is unknown"),
    ("--trainer.logger={class_path: TensorBoardLogger, dict_kwargs: {nam: x}}",
     "TensorBoardLogger has no argument nam="),
    ("--trainer.profiler={class_path: SimpleProfiler, init_args: {filename: a/b}}",
     "filename='a/b' is not a plain name"),
])  # fmt: skip
def test_what_a_constructor_refuses_is_a_wrong_argument(capsys: Any, argument: str, said: str) -> None:
    said_at_once = refused(capsys, lambda args: made(*args), "--model.width=3", argument)
    assert said_at_once.startswith(said)
    assert "\n" not in said_at_once


class Fails(tw.Callback):
    def __init__(self, number: int = 0) -> None:
        tw.Timer(interval="epochs") if number == 1 else [][number]


@pytest.mark.parametrize(("number", "kind"), [(0, IndexError), (1, ValueError)])
def test_the_error_of_a_constructor_of_the_program_is_its_own(number: int, kind: type[Exception]) -> None:
    argument = f"--trainer.callbacks=[{{class_path: {__name__}.Fails, init_args: {{number: {number}}}}}]"
    with pytest.raises(kind) as raised:
        made("--model.width=3", argument)
    assert any(each.name == "__init__" and each.frame.f_globals["__name__"] == __name__ for each in raised.traceback)


def test_arguments_become_objects() -> None:
    cli = made(
        *("--model.width=5", "--model.act=torch.nn.ReLU", "--data.batch_size=2", "--seed_everything=7"),
        *("--trainer.max_epochs=3", "--trainer.precision=bf16-mixed", "--trainer.logger=CSVLogger"),
        *("--trainer.logger.name=runs", "--trainer.val_check_interval=0.5"),
        *("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor=val_loss"),
        *("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=loss"),
    )
    assert isinstance(cli.model, Net)
    assert isinstance(cli.datamodule, Data)
    assert cli.subcommand is None
    assert isinstance(cli.model.net[1], torch.nn.ReLU)
    assert cli.model.net[0].out_features == cli.model.hparams.width == cli.config.model.width == 5
    assert cli.datamodule.batch_size == 2
    assert cli.trainer.max_epochs == 3
    assert cli.trainer.val_check_interval == 0.5
    assert cli.config.seed_everything == torch.initial_seed() == 7
    assert [each.name for each in cli.trainer.loggers if isinstance(each, tw.CSVLogger)] == ["runs"]
    assert [each.monitor for each in cli.trainer.checkpoint_callbacks] == ["val_loss"]
    assert [each.monitor for each in cli.trainer.callbacks if isinstance(each, tw.EarlyStopping)] == ["loss"]
    assert any(isinstance(each, SaveConfigCallback) for each in cli.trainer.callbacks)


def test_names_of_lightning_are_accepted() -> None:
    assert LightningCLI is tw.cli.TrainwrightCLI
    assert LightningArgumentParser is TrainwrightArgumentParser


def test_any_model_can_be_chosen_by_name() -> None:
    cli = made(
        "--model=OwnOptimizer", "--model.width=4", "--data=cli_program.Data", model_class=None, datamodule_class=None
    )
    assert type(cli.model) is OwnOptimizer
    assert type(cli.datamodule) is Data
    without = made(
        "--model=OwnOptimizer", "--model.width=4", model_class=Net, datamodule_class=None, subclass_mode_model=True
    )
    assert type(without.model) is OwnOptimizer
    assert without.datamodule is None


def test_functions_can_replace_classes() -> None:
    def make_net(width: int = 6) -> Net:
        return Net(width)

    def make_trainer(epochs: int = 2) -> tw.Trainer:
        return tw.Trainer(max_epochs=epochs, **DEFAULTS)

    cli = made(
        "--trainer.epochs=4",
        model_class=make_net,
        trainer_class=make_trainer,
        trainer_defaults=None,
        save_config_callback=None,
    )
    assert cli.trainer.max_epochs == 4
    assert cli.model.hparams.width == 6


@pytest.mark.parametrize(("arguments", "scheduler", "monitor"), [
    ([], None, None),
    (["--lr_scheduler=CosineAnnealingLR", "--lr_scheduler.T_max=5"], torch.optim.lr_scheduler.CosineAnnealingLR, None),
    (["--lr_scheduler=ReduceLROnPlateau", "--lr_scheduler.monitor=val_loss"], ReduceLROnPlateau, "val_loss"),
])  # fmt: skip
def test_optimizers_and_schedulers_are_made_from_a_config(arguments: list[str], scheduler: Any, monitor: Any) -> None:
    cli = made("--model.width=3", "--optimizer=AdamW", "--optimizer.lr=0.25", *arguments)
    returned = cli.model.configure_optimizers()
    if isinstance(returned, dict):
        assert returned["lr_scheduler"]["monitor"] == monitor
        returned = [returned["optimizer"]], [returned["lr_scheduler"]["scheduler"]]
    optimizer = returned if scheduler is None else returned[0][0]
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["params"][0] is cli.model.net[0].weight
    assert scheduler is None or type(returned[1][0]) is scheduler


def test_an_optimizer_replaces_the_modules_own() -> None:
    own = made("--model.width=3", model_class=OwnOptimizer)
    assert type(own.model.configure_optimizers()) is torch.optim.SGD
    with pytest.warns(UserWarning, match="replaces the configure_optimizers of OwnOptimizer"):
        replaced = made("--model.width=3", "--optimizer=Adam", model_class=OwnOptimizer)
    assert type(replaced.model.configure_optimizers()) is torch.optim.Adam


def test_optimizers_can_be_linked_to_the_model() -> None:
    class TwoRates(Net):
        def __init__(self, width: int, first: dict, second: dict) -> None:  # type: ignore[type-arg]
            super().__init__(width)
            self.inits = first, second

    class Linked(TrainwrightCLI):
        def add_arguments_to_parser(self, parser: TrainwrightArgumentParser) -> None:
            parser.add_optimizer_args(nested_key="first", link_to="model.first")
            parser.add_optimizer_args(torch.optim.Adam, nested_key="second", link_to="model.second")

    cli = made(
        "--model.width=3", "--first=SGD", "--first.lr=0.5", "--second.lr=0.25", kind=Linked, model_class=TwoRates
    )
    made_of = [instantiate_class(cli.model.parameters(), each) for each in cli.model.inits]  # type: ignore[union-attr]
    assert [(type(each), each.param_groups[0]["lr"]) for each in made_of] == [
        (torch.optim.SGD, 0.5),
        (torch.optim.Adam, 0.25),
    ]


def test_a_subclass_of_the_cli_can_add_arguments() -> None:
    class Stopping(Program):
        def add_arguments_to_parser(self, parser: TrainwrightArgumentParser) -> None:
            super().add_arguments_to_parser(parser)
            parser.add_lightning_class_args(tw.EarlyStopping, "stopping")
            parser.set_defaults({"stopping.monitor": "val_loss", "stopping.patience": 4})
            parser.add_argument("--note", default="none")

    timer = tw.Timer()
    cli = made(
        *("--model.width=3", "--data.num_classes=5", "--stopping.patience=9", "--note=hello"),
        kind=Stopping,
        trainer_defaults={**DEFAULTS, "callbacks": timer, "max_epochs": 2},
    )
    assert cli.model.net[2].out_features == 5  # type: ignore[union-attr]
    assert cli.datamodule is not None
    assert cli.datamodule.batch_size == 8  # type: ignore[attr-defined]
    (stopping,) = [each for each in cli.trainer.callbacks if isinstance(each, tw.EarlyStopping)]
    assert (stopping.monitor, stopping.patience, cli.config.note) == ("val_loss", 9, "hello")
    assert timer in cli.trainer.callbacks
    assert cli.trainer.max_epochs == 2


@pytest.mark.slow
def test_a_config_can_be_an_object_and_hooks_are_called() -> None:
    told = []

    class Told(TrainwrightCLI):
        def before_instantiate_classes(self) -> None:
            told.append(hasattr(self, "model"))

        def before_fit(self) -> None:
            told.append("before")

        def after_fit(self) -> None:
            told.append(self.trainer.global_step)

    args = {"subcommand": "fit", "fit": {"model": {"width": 3}, "trainer": {"fast_dev_run": 2}}}
    cli = Told(OwnOptimizer, Data, args=args, trainer_defaults=DEFAULTS)
    assert cli.subcommand == "fit"
    assert cli.config.fit.trainer.fast_dev_run == 2
    assert told == [False, "before", 2]


@pytest.mark.slow
def test_a_printed_config_is_accepted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        Program(Net, Data, args=["fit", "--model.width=9", *SGD, "--print_config"], trainer_defaults=FAST)
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"# trainwright=={tw.__version__}\n")
    assert "num_classes" not in yaml.safe_load(printed)["model"]  # it is linked
    (tmp_path / "printed.yaml").write_text(printed)
    cli = Program(Net, Data, args=["fit", f"--config={tmp_path / 'printed.yaml'}"], trainer_defaults=FAST)
    assert cli.model.hparams.width == 9
    assert cli.trainer.global_step == 1
    assert not (tmp_path / "trainwright_logs").exists()


@pytest.mark.slow
def test_variables_of_the_environment_are_read(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("TW_MODEL__WIDTH", "11")
    monkeypatch.setenv("TW_TRAINER__MAX_EPOCHS", "3")
    cli = made(parser_kwargs={"default_env": True})
    assert (cli.model.hparams.width, cli.trainer.max_epochs) == (11, 3)
    assert "model.width" in refused(capsys, lambda args: made(*args))  # they are not read unless that is asked for
    monkeypatch.setenv("TW_FIT__MODEL__WIDTH", "12")
    other = TrainwrightCLI(OwnOptimizer, Data, args=["fit"], parser_kwargs={"default_env": True}, trainer_defaults=FAST)
    assert other.model.hparams.width == 12


@pytest.mark.parametrize(("text", "lines"), [
    ("model: {width: 3}\ntrainer:\n  max_epoch: 3\n",
     ["'trainer' has no argument 'max_epoch'. Did you mean 'max_epochs'?"]),
    ("modl:\n  width: 3\ndatas: 1\n", ["no argument 'modl'. Did you mean 'model'?"]),
    ("model: {width: 3}\ntrainer:\n  callbacks:\n  - class_path: ModelCheckpoint\n    init_args:\n      monitr: loss\n",
     ["ModelCheckpoint has no argument 'monitr'. Did you mean 'monitor'?"]),
    ("model:\n  width: 3\n  act:\n    class_path: torch.nn.Softmax\n    init_args: {axis: 1}\n",
     ["Softmax has no argument 'axis'. Accepted are dim."]),
    ("model:\n  width: 3\ntrainer:\n  max_epochs: many\n", ['Parser key "trainer.max_epochs"']),
    ("model:\n  width: 3\noptimizer:\n  class_path: SDG\n",
     ["optimizer: 'SDG' is not an imported class. Did you mean 'SGD'?"]),
    ("model:\n  width: 3\noptimizer: StepLR\n", ["optimizer: 'StepLR' is not a class that it accepts."]),
    ("model: {width: 3}\ntrainer:\n  callbacks:\n  - class_path: CSVLogger\n",
     ["trainer.callbacks: 'CSVLogger' is not a class that it accepts."]),
    ("model: {width: 3}\noptimizer:\n  lr: 0.1\n", ["optimizer needs class_path, the name of a class"]),
    ("model:\n  width: 3\n trainer: 1\n", ["the config is not YAML", ", line 3"]),
    ("trainer: &common\n  max_epochs: 1\nmodel:\n  width: 3\ndata:\n  <<: &sizes {num_classes: 7}\n  batch_sise: 1\n",
     ["'data' has no argument 'batch_sise'. Did you mean 'batch_size'?"]),
    ("model:\n  <<: 3\n", ["the config is not YAML", ", line 2"]),
    ("model: {width: 3}\ntrainer: 5\n", ["key 'trainer' is 5; it needs the names and values of its arguments."]),
    ("model: {width: 3}\ndata:\n- n: 7\n", ["key 'data' is [{'n': 7}]; it needs the names and values"]),
])  # fmt: skip
def test_a_wrong_config_is_explained(
    text: str, lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], parser: TrainwrightArgumentParser
) -> None:
    (tmp_path / "wrong.yaml").write_text(text)
    said = refused(capsys, parser.parse_args, "--config", str(tmp_path / "wrong.yaml"))
    for line in lines:
        assert line in said


def test_a_missing_checkpoint_is_a_wrong_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["test", "--model.width=3", "--ckpt_path=nope.ckpt"]
    said = refused(capsys, lambda given: TrainwrightCLI(OwnOptimizer, Data, args=given, trainer_defaults=FAST), *args)
    assert said.startswith(f"ckpt_path='nope.ckpt': {tmp_path / 'nope.ckpt'} is not a checkpoint: it does not exist.")


@pytest.mark.parametrize("text", ["", "# only\n", "- a\n- b\n", "trainer:\n"])
def test_a_config_without_settings_is_rejected(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], parser: TrainwrightArgumentParser
) -> None:
    (tmp_path / "none.yaml").write_text(text)
    assert "the config has no settings" in refused(capsys, parser.parse_args, "--config", str(tmp_path / "none.yaml"))


def test_a_config_of_another_version_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], parser: TrainwrightArgumentParser
) -> None:
    (tmp_path / "new.yaml").write_text("# trainwright==9.0.0\nmodel:\n  width: 3\n  depth: 2\n")
    said = refused(capsys, parser.parse_args, "--config", str(tmp_path / "new.yaml"))
    assert "'model' has no argument 'depth'. Did you mean 'width'?" in said
    (tmp_path / "new.yaml").write_text("# trainwright==9.0.0\nmodel:\n  width: 3\n")
    config = parser.parse_args(["--config", str(tmp_path / "new.yaml")])  # it is accepted if all it says is known
    assert config.model.width == 3


@pytest.mark.parametrize(("arguments", "said"), [
    (["--trainer.max_epoch=3"], "Did you mean --trainer.max_epochs?"),
    ([*SGD, "--optimizer.rl=1"], "SGD has no argument 'rl'. Did you mean 'lr'?"),
    (["--trainer.callbacks+=ModelChekpoint"], "Did you mean 'ModelCheckpoint'?"),
    (["--config=missing.yaml"], "File does not exist"),
    (["--model.width=wide"], "Expected a <class 'int'>"),
    (["--optimizer=SGD", "--optimizer.lr=high"], "Expected a <class 'float'>"),  # or a tensor
])  # fmt: skip
def test_wrong_arguments_are_explained(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], parser: TrainwrightArgumentParser
) -> None:
    assert said in refused(capsys, parser.parse_args, "--model.width=3", *arguments)


@pytest.mark.slow
def test_wrong_arguments_of_a_subcommand_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def parse(args: list[str]) -> None:
        TrainwrightCLI(Net, Data, args=args, trainer_defaults=FAST)

    (tmp_path / "all.yaml").write_text("fit:\n  model:\n    widht: 3\n")
    said = refused(capsys, parse, "--config", str(tmp_path / "all.yaml"), "fit")
    assert "'fit.model' has no argument 'widht'. Did you mean 'width'?" in said
    (tmp_path / "all.yaml").write_text("fit:\n  trainer:\n    max_epochs: many\n")
    for given in (["--model.width=3"], [f"--config={tmp_path / 'right.yaml'}"], ["--trainer.max_epochs=2"]):
        (tmp_path / "right.yaml").write_text("trainer: {max_epochs: 1}\nmodel: {width: 3}\n")
        said = refused(capsys, parse, "--config", str(tmp_path / "all.yaml"), "fit", *given)
        assert said.startswith('Parser key "trainer.max_epochs"')
    assert "{fit,validate,test,predict}" in refused(capsys, parse)
    scheduler = ("--lr_scheduler=StepLR", "--lr_scheduler.step_size=1")
    assert "needs an optimizer. Pass --optimizer." in refused(capsys, parse, "fit", "--model.width=3", *scheduler)


def test_wrong_uses_in_the_program() -> None:
    parser = TrainwrightArgumentParser()
    with pytest.raises(TypeError, match=r"optimizer got .*Linear.*; expected Optimizer"):
        parser.add_optimizer_args(torch.nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="neither a class nor a function"):
        parser.add_lightning_class_args(3, "model")
    with pytest.raises(ValueError, match=r"config_filename='a/b.yaml' is not accepted"):
        SaveConfigCallback(parser, parser.parse_args([]), config_filename="a/b.yaml")


def test_a_script_runs_with_the_programs_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program.py", "validate", "--model.width=3"])
    cli = TrainwrightCLI(Net, Data, trainer_defaults={**DEFAULTS, "logger": False, "limit_val_batches": 1})
    assert set(cli.trainer.callback_metrics) == {"val_loss"}

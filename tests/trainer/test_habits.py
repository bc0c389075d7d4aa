"""Habits of Lightning scripts around a run: hooks that are off, settings that are read and set, copies, advice."""

from __future__ import annotations

import copy
import io
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import small
import torch
from jobs import run_job
from small import QUIET, SAVING, Classifier, make_loader
from torch.utils.data import DataLoader, Dataset

import trainwright as tw
from trainwright.gradient_norms import grad_norm


def trainer_of(**settings: Any) -> tw.Trainer:
    return tw.Trainer(**{"max_epochs": 1, **QUIET, **settings})


class Validated(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch_idx)

    def val_dataloader(self) -> Any:
        return make_loader(8)

    def on_train_start(self) -> None:
        self.seen.append("start")


@pytest.mark.parametrize("on_class", [False, True])
def test_a_hook_that_is_none_is_switched_off(on_class: bool) -> None:
    module = type("Own", (Validated,), {})()
    owner = type(module) if on_class else module
    for name in (
        "val_dataloader",
        "on_train_start",
        "configure_callbacks",
        "configure_model",
        "on_validation_model_eval",
    ):
        setattr(owner, name, None)
    trainer_of().fit(module, make_loader(16))
    assert module.seen == []
    trainer_of(num_sanity_val_steps=0).fit(module, make_loader(16), make_loader(8))
    assert module.seen == [0, 1]


def test_loaders_without_a_validation_step_are_a_warning() -> None:
    for module in (Classifier(), Validated()):
        module.validation_step = None
        trainer = trainer_of()
        with pytest.warns(UserWarning, match="has no validation_step, so fit does not validate"):
            trainer.fit(module, make_loader(16), make_loader(8))
        assert trainer.global_step == 4


def test_steps_that_are_none_are_missing() -> None:
    module = Validated()
    module.validation_step = None
    with pytest.raises(TypeError, match="validate needs validation_step"):
        trainer_of().validate(module, make_loader(16))
    module.training_step = None
    with pytest.raises(TypeError, match="fit needs training_step"):
        trainer_of().fit(module, make_loader(16))


def test_a_datamodules_hooks_are_switched_off_too() -> None:
    class Data(tw.DataModule):
        def train_dataloader(self) -> Any:
            return make_loader(16)

        def val_dataloader(self) -> Any:
            return make_loader(8)

    data, module = Data(), Validated()
    data.val_dataloader = data.setup = data.teardown = None
    module.val_dataloader = None
    trainer_of().fit(module, datamodule=data)
    assert module.seen == ["start"]


def test_hooks_of_earlier_versions_are_named() -> None:
    class Old(Classifier):
        def configure_sharded_model(self) -> None:
            raise AssertionError

    with pytest.warns(UserWarning, match="Old.configure_sharded_model .* did you mean configure_model"):
        trainer_of().fit(Old(), make_loader(16))
    del Old.configure_sharded_model
    Old.on_epoch_end = lambda self: None
    with pytest.warns(UserWarning, match="Old.on_epoch_end .* did you mean on_train_epoch_end"):
        trainer_of().fit(Old(), make_loader(16))
    del Old.on_epoch_end
    Old.training_epoch_end = lambda self, outputs: None
    with pytest.raises(TypeError, match=r"Old.training_epoch_end is never called\. Define on_train_epoch_end"):
        trainer_of().fit(Old(), make_loader(16))


def test_what_a_run_will_do_is_known_in_setup() -> None:
    class Planned(Validated):
        def setup(self, stage: str) -> None:
            self.planned = (self.trainer.estimated_stepping_batches, self.trainer.num_training_batches)

    module, trainer = Planned(), trainer_of(max_epochs=3, accumulate_grad_batches=2, val_check_interval=2)
    assert trainer.num_training_batches == float("inf")
    trainer.fit(module, make_loader(16))
    assert module.planned == (6, 4)
    assert trainer.estimated_stepping_batches == 6
    assert module.seen == [0, 1, "start", *[0, 1] * 6]
    assert trainer_of(max_epochs=None, max_steps=7).estimated_stepping_batches == 7


def test_settings_are_attributes_and_can_be_set_between_runs() -> None:
    trainer = trainer_of(num_sanity_val_steps=-1, overfit_batches=2)
    assert (trainer.limit_train_batches, trainer.limit_test_batches) == (2, 1.0)
    assert (trainer.overfit_batches, trainer.num_sanity_val_steps) == (2, float("inf"))
    trainer.overfit_batches = 0
    trainer.limit_train_batches, trainer.max_epochs, trainer.accumulate_grad_batches = 3, 2, 2
    trainer.fit(Classifier(), make_loader(16))
    assert (trainer.global_step, trainer.current_epoch) == (4, 2)
    with pytest.raises(ValueError, match="max_epochs='a': expected an integer"):
        trainer.max_epochs = "a"
    with pytest.raises(AttributeError, match=r"trainer.world_size cannot be set|can't set|has no setter"):
        trainer.world_size = 3
    trainer.fit_loop.min_epochs, trainer.fit_loop.max_steps = 1, 50
    assert (trainer.min_epochs, trainer.fit_loop.min_epochs, trainer.max_steps) == (1, 1, 50)
    loop = trainer.fit_loop
    loop.max_epochs = 3
    loop.max_epochs += 2
    assert loop.max_epochs == trainer.max_epochs == 5
    with pytest.raises(AttributeError):
        trainer.fit_loop.max_epoch = 3  # type: ignore[attr-defined]

    class Changes(Classifier):
        def on_train_start(self) -> None:
            for wrong in (0, 2.5, "4", True):
                with pytest.raises(ValueError, match=r"accumulate_grad_batches=.* integer of at least 1"):
                    self.trainer.accumulate_grad_batches = wrong
            self.trainer.accumulate_grad_batches = numpy.int64(2)
            self.trainer.limit_val_batches = 1

    with pytest.raises(RuntimeError, match="limit_val_batches was set while"):
        trainer.fit(Changes(), make_loader(16))


def test_ckpt_path_can_be_set_for_the_next_calls(tmp_path: Path) -> None:
    trainer = trainer_of()
    trainer.fit(Classifier(), make_loader(16))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    again = trainer_of(max_epochs=2)
    again.ckpt_path = tmp_path / "one.ckpt"
    assert again.ckpt_path == str(tmp_path / "one.ckpt")
    again.fit(Classifier(), make_loader(16))
    assert again.global_step == 8


def test_a_variable_sets_what_the_script_leaves_open(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("TRAINWRIGHT_TRAINER_LIMIT_TRAIN_BATCHES", "3")
    monkeypatch.setenv("TRAINWRIGHT_TRAINER_MAX_EPOCHS", "7")
    for _ in range(2):
        trainer = trainer_of()
        assert (trainer.limit_train_batches, trainer.max_epochs) == (3, 1)
    said = "trainwright: TRAINWRIGHT_TRAINER_LIMIT_TRAIN_BATCHES=3 sets Trainer(limit_train_batches=3).\n"
    assert capsys.readouterr().err == said
    monkeypatch.setenv("TRAINWRIGHT_TRAINER_PRECISON", "bf16")
    with pytest.raises(ValueError, match=r"no argument precison\. .* Did you mean 'precision'\?"):
        trainer_of()


def test_a_trainer_is_not_copied() -> None:
    with pytest.raises(TypeError, match="A Trainer cannot be copied or pickled"):
        copy.deepcopy(trainer_of())


def test_predictions_of_several_loaders_need_no_index() -> None:
    module = Classifier()
    module.predict_step = lambda batch, batch_idx: len(batch[0])
    assert trainer_of().predict(module, [make_loader(8), make_loader(4)]) == [[4, 4], [4]]


class Asks(Classifier):
    def on_fit_start(self) -> None:
        strategy, rank = self.trainer.strategy, self.trainer.strategy.global_rank
        strategy.barrier("here")
        self.got = (
            strategy.broadcast({"rank": rank}, src=1),
            strategy.reduce(torch.tensor(float(rank)), reduce_op="sum").item(),
            strategy.all_gather(torch.tensor([rank])).tolist(),
            strategy.reduce_boolean_decision(rank == 0),
            strategy.reduce_boolean_decision(rank == 0, all=False),
            strategy.is_global_zero == (rank == 0),
            strategy.lightning_module is self,
            strategy.root_device.type,
        )


def job(folder: Path) -> Any:
    module, trainer = Asks(), trainer_of(devices=2)
    trainer.fit(module, make_loader(16))
    module.predict_step = lambda batch, batch_idx: Odd(2 * batch_idx + trainer.global_rank)
    with pytest.raises(TypeError, match="return_predictions='own' to keep the outputs"):
        trainer.predict(module, make_loader(16))
    own = trainer.predict(module, make_loader(16), return_predictions="own")
    strategy = tw.FSDPStrategy(min_parameters=7)
    for _ in range(2):  # the second Trainer gets a strategy that holds the shards of the first one's module
        trainer = trainer_of(devices=2, strategy=strategy)
        trainer.fit(Classifier(), make_loader(8))
    other = trainer.trial().engine.strategy
    assert other is not strategy
    assert isinstance(other, tw.FSDPStrategy)
    assert (other.options.min_parameters, other.model) == (7, None)
    return module.got, [each.number for each in own]


class Odd:
    def __init__(self, number: int) -> None:
        self.number = number


def test_two_ranks_use_the_methods_of_the_strategy(tmp_path: Path) -> None:
    expected = ({"rank": 1}, 1.0, [[0], [1]], False, True, True, True, small.ACCELERATOR)
    assert run_job(job, 2, tmp_path) == [(expected, [0, 2]), (expected, [1, 3])]
    strategy = trainer_of().strategy
    assert strategy.broadcast("x") == "x"
    assert strategy.reduce(torch.ones(2)).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="reduce was given the group 3; expected None"):
        strategy.reduce(torch.ones(2), group=3)


def test_map_location_is_that_of_torch_load(tmp_path: Path) -> None:
    trainer = trainer_of()
    trainer.fit(Classifier(), make_loader(16))
    trainer.save_checkpoint(tmp_path / "a.ckpt")

    def loaded(location: Any) -> str:
        return Classifier.load_from_checkpoint(tmp_path / "a.ckpt", map_location=location).device.type

    assert loaded(lambda storage, place: storage) == "cpu"
    assert loaded("meta") == loaded(torch.device("meta")) == "meta"
    with pytest.raises(TypeError, match=r"map_location=\{'a': 'cpu'\} is not accepted; pass one device"):
        loaded({"a": "cpu"})


def test_weights_are_exported(tmp_path: Path) -> None:
    module = Classifier()
    module.twin = module.net[0]
    path = tmp_path / "out" / "model.safetensors"
    module.export(path, strip_prefix="net.", dtype=torch.bfloat16)
    stored = safetensors.torch.load_file(path)
    assert torch.equal(stored["0.weight"], module.net[0].weight.detach().bfloat16().cpu())
    assert sorted(stored) == sorted(module.net.state_dict())
    with pytest.raises(tw.CheckpointError, match="exists already"):
        module.export(path)
    with pytest.raises(
        tw.CheckpointError, match=r"no tensor whose name begins with 'nte\.'; its names are for example net"
    ):
        module.export(tmp_path / "b.safetensors", strip_prefix="nte.")
    module.export(tmp_path / "all.safetensors")
    assert len(safetensors.torch.load_file(tmp_path / "all.safetensors")) == 4  # the twin is the same tensors


def test_oversights_are_named() -> None:
    for match, settings, loaders in (
        ("the validation loader shuffles", {}, (make_loader(16), make_loader(8, shuffle=True))),
        ("trains 1000 epochs. Pass max_epochs=", {"max_epochs": None, "callbacks": Ends()}, (make_loader(16),)),
    ):
        with pytest.warns(UserWarning, match=match) as caught:
            trainer_of(**settings).fit(Classifier(), *loaders)
        assert len(caught) == 1


def test_parts_in_evaluation_mode_are_named_once() -> None:
    class Fine(tw.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = small.make_net(0.1), torch.nn.Linear(3, 3)
            self.norm = torch.nn.BatchNorm1d(3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return small.loss_of(torch.nn.Sequential(self.body, self.norm, self.head), batch)

        validation_step = training_step

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loaders = (make_loader(16), make_loader(16))
    named, whole, frozen, chosen, quiet = (Fine() for _ in range(5))
    quiet.body = small.make_net(0.0).eval()  # acts the same in training
    named.body.eval()
    whole.eval()
    frozen.body.eval().requires_grad_(False)
    chosen.norm.eval()  # its user keeps the statistics
    chosen.body[2].eval()
    for module, match in (
        (named, "'body' is in evaluation mode as training begins"),
        (whole, "Fine is in evaluation mode"),
    ):
        with pytest.warns(UserWarning, match=match) as caught:
            trainer_of(max_epochs=2).fit(module, *loaders)
        assert len(caught) == 1
    trainer = trainer_of(max_epochs=2)
    for module in (frozen, chosen, quiet, Fine()):  # warnings are errors
        trainer.fit(module, *loaders)
        trainer.validate(module, loaders[1], verbose=False)
        trainer.fit(module, *loaders)


def test_an_error_in_a_step_names_its_batch() -> None:
    class Fails(Validated):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0].double() if self.stage == "train" and batch_idx == 1 else batch[0]).sum()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.stage == "val" and batch_idx == 1:
                raise IndexError("no such class")

        def on_train_epoch_end(self) -> None:
            raise ValueError("after the batches")

    named = {"train": ["In training_step, with batch 1: (float32 [4, 8], int64 [4])."], "end": []}
    named["val"] = ["In validation_step, with batch 1: {'x': float32 [2, 8], 'names': (str)}."]
    batches = [{"x": torch.ones(2, 8), "names": ["a"]}] * 2
    for stage, notes in named.items():
        module = Fails()
        module.stage = stage
        with pytest.raises((RuntimeError, IndexError, ValueError)) as caught:
            trainer_of(num_sanity_val_steps=2).fit(module, make_loader(16, 4), batches)
        assert getattr(caught.value, "__notes__", []) == notes


def test_a_script_tests_its_best_checkpoint_after_fast_dev_run(capsys: Any) -> None:
    settings: dict[str, Any] = {**SAVING, "fast_dev_run": True}
    trainer, module = tw.Trainer(**settings, callbacks=tw.ModelCheckpoint(monitor="loss")), Classifier()
    with pytest.raises(tw.CheckpointError, match="Run fit first"):
        trainer.test(module, make_loader(8), ckpt_path="best")
    trainer.fit(module, make_loader(8))
    trainer.test(module, make_loader(8), ckpt_path="best")
    assert (
        "trainer.test: fast_dev_run saves no checkpoint, so the weights in memory are taken." in capsys.readouterr().out
    )


def test_a_line_of_the_trainer_reaches_a_file_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(written := io.BytesIO())
    monkeypatch.setattr(sys, "stdout", stream)
    trainer_of().print("the table")
    assert written.getvalue() == b"the table\n"


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
def test_a_compiled_module_is_rejected_and_compile_is_named() -> None:
    with pytest.raises(TypeError, match="Pass the module itself, and compile=True to the Trainer"):
        trainer_of().fit(torch.compile(Classifier()), make_loader(8))


class Ends(tw.Callback):
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.should_stop = True


class Reading(Dataset[Any]):
    """Samples that take a while to read."""

    def __init__(self, read: Callable[[], None]) -> None:
        self.read = read

    def __len__(self) -> int:
        return 15

    def __getitem__(self, index: int) -> Any:
        self.read()
        return torch.zeros(8), 0


@pytest.mark.parametrize(
    ("seconds", "cores", "is_named"),
    [(0.5, 4, True), (0.5, 1, False), (0.25, 4, False)],
    ids=["slow", "slow without idle cores", "fast"],
)
def test_waiting_for_data_beside_idle_cores_is_named(
    seconds: float, cores: int, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def spend(seconds: float) -> None:
        now[0] += seconds

    class Computing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            spend(1.0)
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr("trainwright.trainer.timeline.perf_counter", lambda: now[0])
    loader = DataLoader(Reading(lambda: spend(seconds)))
    if not is_named:
        trainer_of(max_epochs=4).fit(Computing(), loader)
        return
    with pytest.warns(UserWarning, match=r"during 32% of its time: .* num_workers=0, and this process has 4") as said:
        trainer_of(max_epochs=4).fit(Computing(), loader)
    assert len(said) == 1


def test_other_loaders_may_count_workers_in_their_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))
    loader = type("Own", (list,), {"num_workers": None})(make_loader())
    trainer = trainer_of()
    trainer.fit(Classifier(), loader)
    assert trainer.global_step == 11


def test_a_dataset_that_sleeps_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr("trainwright.trainer.timeline.LONG_WAIT_SECONDS", 0.1)
    monkeypatch.setattr("trainwright.trainer.timeline.LARGE_SHARE", 0.01)
    with pytest.warns(UserWarning, match="training has waited for data"):
        trainer_of().fit(Classifier(), DataLoader(Reading(lambda: time.sleep(0.01))))


def test_a_misspelled_monitor_is_named_before_training() -> None:
    watched = [tw.EarlyStopping("vall_loss"), tw.EarlyStopping("loss")]
    with pytest.warns(UserWarning, match="EarlyStopping follows 'vall_loss'.* Did you mean 'val_loss'") as said:
        with pytest.raises(ValueError, match="follows 'vall_loss', which was not logged"):
            trainer_of(callbacks=watched, num_sanity_val_steps=1).fit(Classifier(), make_loader(8), make_loader(8))
    assert len(said) == 1


def test_objects_of_lightnings_classes_are_named() -> None:
    theirs = type("RichThing", (), {"__module__": "lightning.pytorch.callbacks.rich"})()
    for use in (
        lambda: trainer_of(callbacks=[theirs]),
        lambda: trainer_of(logger=[theirs]),
        lambda: trainer_of(strategy=theirs),
        lambda: trainer_of(profiler=theirs),
        lambda: trainer_of(precision=theirs),
        lambda: trainer_of(plugins=[theirs]),
        lambda: trainer_of().fit(theirs, make_loader(16)),
        lambda: trainer_of().fit(Classifier(), theirs),
        lambda: trainer_of().fit(Classifier(), datamodule=theirs),
    ):
        with pytest.raises(TypeError, match=r"of Lightning's own classes. Import its base from trainwright too"):
            use()


def test_a_property_shows_the_error_of_the_users_code() -> None:
    class Misspelt(Classifier):
        def train_dataloader(self) -> Any:
            return make_loader(self.datset)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1 / self.trainer.estimated_stepping_batches)

    with pytest.raises(AttributeError, match="'Misspelt' object has no attribute 'datset'"):
        trainer_of().fit(Misspelt())


def test_loggers_that_are_set_are_arranged(tmp_path: Path) -> None:
    trainer = trainer_of(default_root_dir=tmp_path, log_every_n_steps=1)
    trainer.logger = tw.CSVLogger()
    trainer.fit(Classifier(), make_loader(8))
    assert (tmp_path / "trainwright_logs" / "version_0" / "metrics.csv").exists()
    trainer.logger = True
    assert trainer.log_dir == f"{tmp_path}/trainwright_logs/version_1"
    trainer.logger = None
    assert trainer.loggers == []
    trainer.loggers = [tw.CSVLogger()]
    trainer.loggers = None  # type: ignore[assignment]  # mypy takes the getter's type
    assert (trainer.loggers, trainer.logger) == ([], None)
    with pytest.raises(TypeError, match="logger= holds 'csv', a str"):
        trainer.logger = "csv"  # type: ignore[assignment]


class Writes(Classifier):
    lr = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.log_metrics({"mine": 1.0}, self.global_step)
        return super().training_step(batch, batch_idx)


def test_a_trial_has_a_logger_and_takes_overfit_batches(tmp_path: Path) -> None:
    finder = tw.LearningRateFinder(num_training_steps=15)
    trainer = trainer_of(logger=tw.CSVLogger(tmp_path), overfit_batches=2, callbacks=[finder])
    trainer.fit(Writes(), make_loader(16))
    assert finder.optimal_lr is not None
    assert len((Path(trainer.log_dir or "") / "metrics.csv").read_text().splitlines()) == 5
    assert trainer.trial().strategy is not trainer.trial().strategy


def test_norms_of_sparse_and_low_precision_gradients_are_exact() -> None:
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    embedding(torch.tensor([1, 1, 2])).sum().backward()
    assert grad_norm(embedding, 2)["grad_2.0_norm_total"] == pytest.approx((3 * 4 + 3) ** 0.5)
    linear = torch.nn.Linear(1000, 100, bias=False, dtype=torch.float16)
    linear.weight.grad = torch.full_like(linear.weight, 300.0)
    norms = grad_norm(linear, 2)
    assert norms["grad_2.0_norm_total"] == norms["grad_2.0_norm/weight"] == pytest.approx(300.0 * 1e5**0.5, rel=1e-3)


def test_variables_are_read_as_their_argument(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINWRIGHT_TRAINER_LOGGER", "false")
    monkeypatch.setenv("TRAINWRIGHT_TRAINER_DEFAULT_ROOT_DIR", "2024")
    monkeypatch.setenv("TRAINWRIGHT_TRAINER_NUM_SANITY_VAL_STEPS", "-1")
    trainer = tw.Trainer(max_epochs=1)
    assert trainer.loggers == []
    assert Path(trainer.default_root_dir) == tmp_path / "2024"
    trainer.num_sanity_val_steps = trainer.num_sanity_val_steps
    assert trainer.num_sanity_val_steps == float("inf")


def test_an_export_leaves_the_mode_of_each_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", types.ModuleType("onnxscript"))
    modes = []
    monkeypatch.setattr(torch.onnx, "export", lambda module, *args, **options: modes.append(module.training))
    module = Classifier().train()
    frozen = next(each for each in module.modules() if isinstance(each, torch.nn.Linear)).eval()
    module.to_onnx("unused.onnx", torch.zeros(1, 4))
    assert modes == [False]
    assert (module.training, frozen.training) == (True, False)


@pytest.mark.parametrize(("call", "meant"), [
    (lambda: tw.Trainer(**QUIET).fit(Classifier(), val_dataloader=[]),
     r"fit has no argument val_dataloader=.*mean val_dataloaders="),
    (lambda: tw.Trainer().test(Classifier(), dataloader=[]), r"test has no argument dataloader= .*dataloaders="),
    (lambda: tw.ModelCheckpoint(monitr="loss"), r"ModelCheckpoint has no argument monitr= .*monitor="),
    (lambda: tw.EarlyStopping("loss", patiense=2), r"EarlyStopping has no argument patiense= .*patience="),
    (lambda: tw.Trainer().fit(Classifier(), dataloaders=[]),
     r"fit has no .* Did you mean train_dataloaders= or val_dataloaders=\?"),
    (lambda: tw.CSVLogger(savedir="runs"), r"CSVLogger has no argument savedir= .*save_dir="),
    (lambda: tw.TensorBoardLogger(savedir="runs"), r"TensorBoardLogger has no argument savedir= .*save_dir="),
    (lambda: tw.SimpleProfiler(dir_path="runs"), r"SimpleProfiler has no argument dir_path= .*dirpath="),
])  # fmt: skip
def test_a_misspelt_argument_names_the_nearest(call: Any, meant: str) -> None:
    with pytest.raises(TypeError, match=meant):
        call()

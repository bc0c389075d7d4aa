"""Wrong uses and their errors, which name the value, the accepted values and the remedy. No wrong use leaves a trace."""

from __future__ import annotations

import inspect
import multiprocessing
import random
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from small import QUIET, Classifier, Stream, assert_equal, loss_of, make_data, make_loader, weights
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw

SETTINGS: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 1, "enable_progress_bar": False}
"""Loggers and checkpoints stay on, so that traces of a rejected run show."""


class Counted(TensorDataset):
    """A dataset that counts how often it was read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


class Scene:
    """The parts of a wrong use: a right module, right data, and checkpoints of an earlier run."""

    def __init__(self) -> None:
        self.module = Classifier()
        self._changed: list[str] = []
        self.trainer: tw.Trainer | None = None
        self.data = Counted(*make_data(12).tensors)
        self.loader: Any = DataLoader(self.data, batch_size=4)

    def make(self, **settings: Any) -> tw.Trainer:
        self.trainer = tw.Trainer(**{**SETTINGS, **settings})
        return self.trainer

    def fit(self, **given: Any) -> None:
        """Fit with some arguments of fit, settings of the Trainer and parts of the module in the place of right ones."""
        call = {name: given.pop(name) for name in list(given) if name in ("val_dataloaders", "datamodule", "ckpt_path")}
        loader = given.pop("train_dataloaders", None if "datamodule" in call else self.loader)
        module = given.pop("model", self.module)
        settings = {name: given.pop(name) for name in list(given) if name in SIGNATURE}
        self.change(**given)
        self.make(**settings).fit(module, loader, **call)

    def change(self, **parts: Any) -> None:
        """Give the module other parts: functions become its methods."""
        for name, part in parts.items():
            if isinstance(part, types.FunctionType):  # by its real name, which errors say
                code = part.__code__.replace(co_name=name)
                named = types.FunctionType(code, part.__globals__, name, part.__defaults__, part.__closure__)
                part = types.MethodType(named, self.module)
            setattr(self.module, name, part)
            self._changed.append(name)

    def mend(self) -> None:
        """Undo `change`."""
        for name in self._changed:
            self.module.__dict__.pop(name, None)


class WrongUse(NamedTuple):
    name: str
    use: Callable[[Scene], Any]
    error: type[Exception]
    message: str
    """A regular expression of the error."""
    has_begun: bool = False
    """Whether the run had begun, so that its files may be there."""


SIGNATURE = [name for name in inspect.signature(tw.Trainer).parameters if name != "unknown"]
OBJECT, CLASS = object(), Adam


def adam(module: nn.Module) -> Adam:
    return Adam(module.parameters(), lr=0.01)


def returns(value: Any) -> Callable[..., Any]:
    return lambda self, *arguments: value


def logs(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return a training_step that logs so."""

    def training_step(self: Classifier, batch: Any, batch_idx: int) -> Any:
        self.log(*args, **kwargs)
        return loss_of(self.net, batch)

    return training_step


def in_hook(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return a hook that logs so."""
    return lambda self, *arguments: self.log(*(args or ("a", 1.0)), **kwargs)


def optimizers(make: Callable[[Any], Any]) -> dict[str, Any]:
    return {"configure_optimizers": lambda self: make(self)}


def plateau(module: Classifier, **settings: Any) -> dict[str, Any]:
    optimizer = adam(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), **settings}}


def step_lr(module: Classifier, **settings: Any) -> dict[str, Any]:
    optimizer = adam(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1), **settings}}


def scheduled_adamw(module: Classifier) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(module.parameters())
    return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1)}


class NoSuper(tw.Module):
    def __init__(self) -> None:
        self.lr = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> None: ...


class OnlyStep(tw.Module):
    def training_step(self, batch: Any, batch_idx: int) -> None: ...


class OnlyOptimizers(tw.Module):
    def configure_optimizers(self) -> None: ...


class Width(Classifier):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="width")
        self.layer = nn.Linear(width, 1)


class Forward(Classifier):
    def forward(self, batch: Any) -> Any:
        return self.net(batch[0])


class ForTests(tw.DataModule):
    def test_dataloader(self) -> Any:
        return make_loader(12)


CONSTRUCTION = [
    ({"strategy": "dpp"}, ValueError, r"strategy='dpp' is unknown; choose from .*'ddp'\?"),
    ({"strategy": "ddp_fork"}, ValueError, r"strategy='ddp_fork' is not supported.* Choose 'ddp_notebook'"),
    ({"strategy": tw.DDPStrategy}, TypeError, r"strategy=.*Pass an instance, not its class"),
    ({"strategy": "single_device", "devices": 2}, ValueError,
     r"strategy='single_device' runs on one process, but 2 .* Pass devices=1, or"),
    ({"precision": "b16-mixed"}, ValueError, r"precision='b16-mixed' is unknown; choose from .*Did you mean 'bf16-mixed'\?"),
    ({"precision": "float16"}, ValueError, r"Did you mean '16-mixed'\?"),
    ({"precision": torch.float16}, TypeError, r"precision=torch.float16 is a dtype; expected"),
    ({"accelerator": "gpuu"}, ValueError, r"accelerator='gpuu' is unknown.*mean 'gpu'\?"),
    ({"profiler": "advancd"}, ValueError, r"profiler='advancd' is unknown.*mean 'advanced'\?"),
    ({"profiler": tw.SimpleProfiler}, TypeError, r"profiler=.*Pass an instance, not its class"),
    ({"devices": 0}, ValueError, r"devices=0 is below 1; pass a number of devices, -1 for all"),
    ({"devices": [0, 1]}, ValueError, r"devices=\[0, 1\] names devices of an accelerator.* devices=2"),
    ({"devices": ["cuda:0"]}, TypeError, r"devices=\['cuda:0'\] is not a list of GPUs; pass"),
    ({"devices": "mps"}, TypeError, r"devices='mps' is a str; expected a number of devices, a list"),
    ({"num_nodes": 2}, ValueError,
     r"num_nodes=2 needs node_rank .* Set NODE_RANK and MASTER_ADDR on every machine, or start the script with trainwr"),
    ({"max_epochs": 2.0}, ValueError, r"max_epochs=2.0: expected an integer of at least -1"),
    ({"max_epochs": -2}, ValueError, r"max_epochs=-2: expected an integer of at least -1"),
    ({"num_sanity_val_steps": -2}, ValueError, r"num_sanity_val_steps=-2: .* at least -1 \(-1 is all"),
    ({"max_time": "01:00:00"}, ValueError, r"max_time='01:00:00' is not accepted. Expected 'DD:HH:MM:SS'"),
    ({"max_time": 60}, ValueError, r"max_time=60 is not accepted. Expected 'DD:HH:MM:SS' .*. Give for"),
    ({"limit_val_batches": 1.5}, ValueError, r"limit_val_batches=1.5: expected a number of "),
    ({"limit_train_batches": "10%"}, ValueError, r"limit_train_batches='10%': expected a number"),
    ({"val_check_interval": 2.0}, ValueError, r"val_check_interval=2.0: expected .* up to 1.0"),
    ({"val_check_interval": 0}, ValueError, r"val_check_interval=0: expected a number of batches"),
    ({"accumulate_grad_batches": {0: 2}}, ValueError,
     r"accumulate_grad_batches=\{0: 2\}: .*GradientAccumulationScheduler"),
    ({"gradient_clip_algorithm": "agc"}, ValueError, r"gradient_clip_algorithm='agc': .*'norm'"),
    ({"gradient_clip_val": -1.0}, ValueError, r"gradient_clip_val=-1.0: expected a number"),
    ({"compile": "max-autotune"}, ValueError, r"compile='max-autotune': .* a dict of torch.compile's"),
    ({"deterministic": "warning"}, ValueError, r"deterministic='warning': expected True, False, 'warn'"),
    ({"max_epochs": "3", "min_steps": -1}, ValueError, r"max_epochs='3': .*; min_steps=-1: "),
    ({"default_root_dir": 3}, TypeError, r"default_root_dir=3 is an int. Expected a path"),
    ({"min_epochs": 3, "max_epochs": 2}, ValueError, r"min_epochs=3 is above max_epochs=2"),
    ({"check_val_every_n_epoch": None, "val_check_interval": 0.5}, ValueError, r"check_val_every_n_epoch=None .* number of "),
    ({"barebones": True, "enable_progress_bar": True}, ValueError, r"barebones=True .* Omit one"),
    ({"enable_checkpointing": False, "callbacks": tw.ModelCheckpoint()}, ValueError,
     r"enable_checkpointing=False, but callbacks= holds a ModelCheckpoint. Omit one"),
    ({"precision": 16, "plugins": tw.Precision()}, ValueError, r"precision=16 and plugins=.* Pass one"),
    ({"callbacks": tw.ModelCheckpoint}, TypeError, r"callbacks= holds .*ModelCheckpoint.* instances of"),
    ({"callbacks": [print]}, TypeError, r"callbacks= holds <built-in .* Expected instances of"),
    ({"callbacks": [tw.ModelCheckpoint(), tw.ModelCheckpoint()]}, ValueError,
     r"callbacks= holds two of one state_key .*\. Give them settings or a state_key that differ"),
    ({"logger": "tensorboard"}, TypeError,
     r"logger= holds 'tensorboard', a str. Expected True, False or .*TensorBoardLogger\("),
    ({"logger": tw.CSVLogger}, TypeError, r"logger=.*CSVLogger.* Expected True, False or Logger inst"),
    ({"plugins": "ddp_sharded"}, TypeError, r"plugins= holds 'ddp_sharded', .*. Pass a strategy as strategy="),
    ({"gpus": 2}, TypeError, r"no gpus= \(it was given gpus=2\): pass devices=, with accelerator='gpu'"),
    ({"resume_from_checkpoint": "a"}, TypeError, r"resume_from_checkpoint=.*ckpt_path= to trainer"),
    ({"auto_lr_find": True}, TypeError, r"Trainer has no auto_lr_find= .*: pass a LearningRateFinder in"),
    ({"max_epoch": 3}, TypeError, r"no argument max_epoch= \(it was given max_epoch=3\). Did you mean max_epochs=\?"),
    ({"zzz": 3}, TypeError, r"no argument zzz= .* Its arguments are accelerator, strategy, "),
]  # fmt: skip
"""Settings of the Trainer, refused by its constructor."""

FIT = [
    ("no module", {"model": None}, TypeError, r"trainer.fit was given no module.* Pass a trainwright.Module"),
    ("a torch module", {"model": nn.Linear(2, 2)}, TypeError, r"given a Linear. Expected .*Subclass trainwright.Module"),
    ("a class", {"model": Classifier}, TypeError, r"trainer.fit was given the class Classifier. Pass an instance"),
    ("no training_step", {"model": OnlyOptimizers()}, TypeError, r"trainer.fit needs training_step, which OnlyOptimizers"),
    ("no configure_optimizers", {"model": OnlyStep()}, TypeError, r"fit needs configure_optimizers, which OnlyStep does not"),
    ("no super().__init__()", {"model": NoSuper.__new__(NoSuper)}, TypeError, r"NoSuper.__init__ did not call super\(\)"),
    ("no loader", {"train_dataloaders": None}, TypeError,
     r"fit was given no train_dataloaders. Pass a torch DataLoader.*or define train_dataloader on"),
    ("a name as loader", {"train_dataloaders": "mnist"}, TypeError, r"train_dataloaders is a str. Expected a torch Data"),
    ("a dataset's class", {"train_dataloaders": TensorDataset}, TypeError, r"train_dataloaders is a type. Expected a tor"),
    ("an empty list", {"train_dataloaders": []}, ValueError, r"training loader has no batches .*. Give it data"),
    ("empty by drop_last", {"train_dataloaders": make_loader(3, 4, drop_last=True)}, ValueError, r"no batches .*drop_last"),
    ("loaders and datamodule", {"train_dataloaders": make_loader(8), "datamodule": ForTests()}, ValueError,
     r"fit was given both train_dataloaders= and datamodule=. Pass one"),
    ("a datamodule's class", {"datamodule": ForTests}, TypeError, r"the class ForTests. Pass an instance of it"),
    ("a datamodule without the hook", {"datamodule": ForTests()}, TypeError,
     r"given no train_dataloaders\. .* on the module or on a DataModule"),
    ("train_dataloader returns None", {"train_dataloaders": None, "train_dataloader": returns(None)}, TypeError,
     r"Classifier.train_dataloader\(\) returned None. Return a torch DataLoader"),
    ("interval beyond the epoch", {"val_check_interval": 100, "val_dataloaders": make_loader(8)}, ValueError,
     r"val_check_interval=100 is more than the 3 training batches .*. Pass at most"),
    ("a fraction of no length", {"val_check_interval": 0.5, "val_dataloaders": make_loader(8),
     "train_dataloaders": DataLoader(Stream(12), batch_size=4)}, ValueError, r"val_check_interval=0.5 .* no length. Pass a nu"),
    ("configure_optimizers: a class", optimizers(lambda m: [CLASS]), TypeError, r"item 0 .* a type, not an Optimizer"),
    ("configure_optimizers: the class", optimizers(lambda m: CLASS), TypeError, r"returned the class Adam; expected"),
    ("configure_optimizers: keys", optimizers(lambda m: {"optimizr": adam(m)}), ValueError, r"'optimizr'.*mean 'optimizer'\?"),
    ("configure_optimizers: key", optimizers(lambda m: {"optimizer": adam(m), "scheduler": 1}), ValueError,
     r"keys \['optimizer', 'scheduler'\]; expected 'optimizer', 'lr_scheduler'"),
    ("a scheduler beside the optimizer", optimizers(lambda m: [adam(m), StepLR(adam(m), 1)]), TypeError,
     r"item 1 .* StepLR, not an Optimizer.*a pair \(\[optimizers\], \[schedulers\]\)"),
    ("the pair the wrong way round", optimizers(lambda m: ([StepLR(adam(m), 1)], [adam(m)])), TypeError,
     r"StepLR, not an Optimi"),
    ("a scheduler that is none", optimizers(lambda m: {"optimizer": adam(m), "lr_scheduler": 3}), TypeError,
     r"a scheduler was expected, got an int; pass a torch LRScheduler"),
    ("plateau without monitor", optimizers(plateau), ValueError, r"ReduceLROnPlateau needs the metric .*'monitor': 'val_loss'"),
    ("unknown interval", optimizers(lambda m: step_lr(m, interval="batch")), ValueError, r"interval='batch' .*epoch, step, va"),
    ("frequency 0", optimizers(lambda m: step_lr(m, frequency=0)), ValueError,
     r"frequency=0 of a scheduler is not accepted; pass an integer"),
    ("unknown key of a scheduler", optimizers(lambda m: step_lr(m, intervall="step")), UserWarning,
     r"keys \['intervall'\], which have no effect.*Did you mean 'interval'\?"),
    ("configure_optimizers: None", optimizers(lambda m: None), UserWarning,
     r"returned None, so nothing will be trained; return an"),
    ("two under automatic", optimizers(lambda m: [adam(m), adam(m)]), ValueError, r"returned 2 optimizers, but .*. Set automa"),
    ("accumulation under manual", {"automatic_optimization": False, "accumulate_grad_batches": 2}, ValueError,
     r"accumulate_by and gradient_clip_val need automatic optimization.*Accumulate and clip in training_step"),
    ("clipping under manual", {"automatic_optimization": False, "gradient_clip_val": 1.0}, ValueError, r"clip in training_st"),
    ("training_step without a batch", {"training_step": lambda self: None}, TypeError, r"training_step\(\) cannot be called: "),
    ("training_step of four", {"training_step": lambda self, a, b, c, d: None}, TypeError, r"\(a, b, c, d\) cannot be called"),
    ("training_step with a dataloader_idx", {"training_step": lambda self, a, b, dataloader_idx: None}, TypeError,
     r"training_step\(a, b, dataloader_idx\) cannot be called: it is given the batch, and batch_idx if"),
    ("validation_step without a batch", {"validation_step": lambda self: None, "val_dataloaders": make_loader(8)}, TypeError,
     r"validation_step\(\) cannot be called: it is given the batch, and batch_idx and dataloader_idx"),
    ("several loaders, no index", {"val_dataloaders": [make_loader(8), make_loader(8)]}, TypeError,
     r"takes no dataloader_idx, but there are 2 loaders. Add .* or pass the loaders in a dict"),
    ("ckpt_path: another type", {"ckpt_path": 3}, TypeError, r"ckpt_path=3 is an int. Pass a path, 'best', 'last' or 'auto'"),
    ("ckpt_path: best of none", {"ckpt_path": "best"}, tw.CheckpointError, r"'best': no checkpoint was saved .*Run fit first"),
    ("ckpt_path: last of none", {"ckpt_path": "last"}, tw.CheckpointError,
     r"'last': no checkpoint was saved .*For a first start pass 'auto', or pass a path"),
    ("ckpt_path: best without a callback", {"ckpt_path": "best", "enable_checkpointing": False}, ValueError,
     r"ckpt_path='best' .*this trainer has none. Pass a path, or leave enable_checkpointing"),
    ("ckpt_path: of another optimizer", {"ckpt_path": "SAVED/full", **optimizers(lambda m: SGD(m.parameters(), lr=0.1))},
     tw.CheckpointError, r"optimizer 0 was saved by AdamW, but this run's is a SGD. Build the same"),
    ("ckpt_path: of other schedulers", {"ckpt_path": "SAVED/full", **optimizers(scheduled_adamw)}, tw.CheckpointError,
     r"saved with 0 as schedulers, and this run has StepLR. Build the same"),
    ("ckpt_path: weights alone", {"ckpt_path": "SAVED/weights"}, tw.CheckpointError,
     r"holds weights only, so a run cannot be resumed"),
    ("configure_callbacks: a class", {"configure_callbacks": returns([tw.Timer])}, TypeError, r"configure_callbacks returned "),
]  # fmt: skip
"""Arguments of fit, parts of the module and settings that do not fit them, refused before the first batch."""

RUNNING = [
    ("loss without a gradient", {"training_step": returns(torch.zeros(()))}, RuntimeError, r"a loss that no parameter .*. Com"),
    ("loss of several elements", {"training_step": returns(torch.zeros(2))}, RuntimeError, r"shape \(2,\). Expected one"),
    ("loss, a name", {"training_step": returns("loss")}, TypeError, r"training_step returned a str. Expected a loss tens"),
    ("loss, a number", {"training_step": returns(1.5)}, TypeError, r"training_step returned a float\. .* loss tensor"),
    ("a dict without loss", {"training_step": returns({"los": 1})}, TypeError,
     r"returned a dict of \{'los': 'int'\}\. .* under 'loss'"),
    ("checkpoint follows nobody", {"callbacks": tw.ModelCheckpoint(monitor="acc", mode="max")}, ValueError,
     r"ModelCheckpoint.* 'acc', which was not logged; there are loss, loss_epoch, loss_step. Log it with self.log"),
    ("log in on_train_end", {"on_train_end": in_hook()}, RuntimeError, r"'a'.* where nothing is collected"),
    ("a vector", {"training_step": logs("a", torch.zeros(3))}, ValueError, r"'a', .*shape \(3,\). Expected one element. R"),
    ("a text", {"training_step": logs("a", "high")}, TypeError, r"'a', .*got a str. Expected a number, a tensor"),
    ("a list", {"training_step": logs("a", [1.0])}, TypeError, r"'a', .*got a list. Expected a number, a tensor"),
    ("None", {"training_step": logs("a", None)}, TypeError, r"'a', .*got a NoneType. Expected a number, a tensor"),
    ("one name, two settings", {"training_step": lambda self, batch, index: self.log("a", 1.0, prog_bar=bool(index))
     or loss_of(self.net, batch)}, ValueError, r"'a', .*training_step with prog_bar=False and then True. Use one"),
    ("manual_backward of a number", {"automatic_optimization": False, "training_step":
     lambda self, batch, index: self.manual_backward(1.5)}, TypeError, r"manual_backward was given a float. Expected a l"),
    ("manual_backward under automatic", {"training_step": lambda self, batch, index:
     self.manual_backward(loss_of(self.net, batch))}, RuntimeError,
     r"manual_backward was called, but .* set automatic_optimization = False"),
    ("clipping by another way", {"automatic_optimization": False, "training_step": lambda self, batch, index:
     self.clip_gradients(self.optimizers(), 1.0, "agc")}, ValueError, r"gradient_clip_algorithm='agc' .*choose from norm"),
    ("a save over a file", {"on_train_end": lambda self: self.trainer.save_checkpoint(__file__)}, tw.CheckpointError,
     r"test_wrong_uses.py.*(exists|is there)"),
]  # fmt: skip
"""Wrong uses that show only in a step or a hook of a run."""

OTHERS = [
    WrongUse("validate without a module", lambda s: s.make().validate(), TypeError,
             r"trainer.validate was given no module, and none was run before. Pass a trainwright.Module"),
    WrongUse("test without test_step", lambda s: s.make().test(OnlyStep(), s.loader), TypeError,
             r"trainer.test needs test_step, which OnlyStep does not define"),
    WrongUse("test without a loader", lambda s: s.make().test(s.module), TypeError,
             r"trainer.test was given no dataloaders. Pass a torch DataLoader.*or define test_dataloader on"),
    WrongUse("test with no batch", lambda s: s.make().test(s.module, make_loader(3, 4, drop_last=True)), RuntimeError,
             r"test loader yielded no batches .*. Give it data"),
    WrongUse("validation of fit with no batch", lambda s: s.fit(val_dataloaders=[]), RuntimeError,
             r"validation loader yielded no b"),
    WrongUse("predict with loaders and datamodule", lambda s: s.make().predict(Forward(), s.loader, datamodule=ForTests()),
             ValueError, r"trainer.predict was given both dataloaders= and datamodule=. Pass one"),
    WrongUse("validate with a datamodule for tests", lambda s: s.make().validate(s.module, datamodule=ForTests()), TypeError,
             r"trainer.validate was given no dataloaders.* define val_dataloader"),
    WrongUse("save before fit", lambda s: s.make().save_checkpoint("a.ckpt"), RuntimeError,
             r"nothing to save: save_checkpoint works from fit's beginning on"),
    WrongUse("save after a test", lambda s: (s.make(logger=False).test(s.module, s.loader), s.trainer.save_checkpoint("a")),
             RuntimeError, r"an evaluation has no optimizer to save.*Pass weights_only=True, or save after fit",
             has_begun=True),
    WrongUse("stop_soon outside of fit", lambda s: s.make().stop_soon(), RuntimeError, r"stop_soon works in trainer.fit only"),
    WrongUse("estimated_stepping_batches outside of fit", lambda s: s.make().estimated_stepping_batches, RuntimeError,
             r"estimated_stepping_batches follows from the training data"),
    WrongUse("optimizers() outside of a run", lambda s: s.module.optimizers(), RuntimeError,
             r"Classifier is attached to no trainer\. Use self\.trainer inside trainer\.fit"),
    WrongUse("log outside of a run", lambda s: s.module.log("a", 1.0), UserWarning, r"self.log does nothing here: Classifier"),
    WrongUse("a step that is not there", lambda s: OnlyOptimizers().training_step(None, 0), RuntimeError,
             r"OnlyOptimizers has no training_step. Define it to call trainer.fit"),
    WrongUse("load from an instance", lambda s: s.module.load_from_checkpoint("SAVED/width"), TypeError,
             r"makes a new instance. Call it on the class: instance = Classifier.load_from_checkpoint"),
    WrongUse("an empty ckpt_path", lambda s: s.make().test(s.module, s.loader, ckpt_path=""), ValueError,
             r"ckpt_path='' is an empty path. Pass a checkpoint's path, 'best', 'last' or 'auto'"),
    WrongUse("a strategy in capitals", lambda s: s.make(strategy="FSDP"), ValueError,
             r"strategy='FSDP' is unknown; .*Did you mean 'fsdp'\?"),
    WrongUse("predict with nothing to call", lambda s: s.make().predict(OnlyStep(), s.loader), NotImplementedError,
             r"missing the required .forward. function", has_begun=True),
    WrongUse("load without an argument", lambda s: Width.load_from_checkpoint("SAVED/width"), TypeError,
             r"its argument width is not among the hyper-parameters .*Width.load_from_checkpoint\(path, width=\.\.\.\)"),
    WrongUse("a seed that is none", lambda s: tw.seed_everything("a"), (TypeError, ValueError), r"seed='a'"),
    WrongUse("Accelerator, a precision", lambda s: tw.Accelerator(mixed_precision="fp61"), ValueError,
             r"mixed_precision='fp61' is unknown. Choose from no, fp16, bf16"),
    WrongUse("Accelerator, the Trainer's word", lambda s: tw.Accelerator(mixed_precision="bf16-mixed"), ValueError,
             r"precision='bf16-mixed' means mixed_precision='bf16'"),
    WrongUse("Accelerator, two kinds of device", lambda s: tw.Accelerator(cpu=True, accelerator="mps"), ValueError,
             r"cpu=True and accelerator='mps' were both given. Pass one"),
    WrongUse("Accelerator, two precisions", lambda s: tw.Accelerator(mixed_precision="fp16", precision=16), ValueError,
             r"mixed_precision='fp16' and precision=16 were both given. Pass one"),
    WrongUse("Accelerator, no step", lambda s: tw.Accelerator(gradient_accumulation_steps=0), ValueError,
             r"gradient_accumulation_steps=0 is not accepted. Pass an integer of at least 1"),
    WrongUse("Accelerator prepares a dict", lambda s: tw.Accelerator(cpu=True).prepare({}), TypeError,
             r"prepare was given an object of type dict. Expected torch modules, optimizers"),
    WrongUse("Accelerator prepares a class", lambda s: tw.Accelerator(cpu=True).prepare(nn.Linear), TypeError,
             r"prepare was given .*Linear. Expected torch modules|prepare was given an object of type type. Expected"),
    WrongUse("Accelerator's backward of a number", lambda s: tw.Accelerator(cpu=True).backward(1.5), TypeError,
             r"backward was given a float. Expected a loss tensor"),
]  # fmt: skip
"""The other calls."""

ALL = [
    *(WrongUse(" ".join(given), lambda s, given=given: s.make(**given), *told) for given, *told in CONSTRUCTION),
    *(WrongUse(name, lambda s, given=given: s.fit(**given), *told) for name, given, *told in FIT),
    *(WrongUse(name, lambda s, given=given: s.fit(**given), *told, has_begun=True) for name, given, *told in RUNNING),
    *OTHERS,
]
WRONG_FOR_EVERY_RUN = ("callbacks", "limit_train_batches", "accumulate_grad_batches", "gradient_clip_val", "precision")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of an earlier run."""
    folder = tmp_path_factory.mktemp("saved")
    for name, module, options in (
        ("full", Classifier(), {}),
        ("weights", Classifier(), {"weights_only": True}),
        ("width", Width(3), {}),
    ):
        trainer = tw.Trainer(**QUIET, max_epochs=1)
        trainer.fit(module, make_loader(8))
        trainer.save_checkpoint(folder / name, **options)
    return folder


def global_state() -> dict[str, Any]:
    """Return the state of the process that a wrong use must not change."""
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": numpy.random.get_state()[1].tolist(),  # type: ignore[index]
        "python": random.getstate(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "children": len(multiprocessing.active_children()),
    }


def files(folder: Path) -> list[str]:
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if "SAVED" not in str(each))


@pytest.mark.parametrize("use", ALL, ids=lambda use: use.name)
def test_wrong_use_is_rejected(use: WrongUse, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "SAVED").symlink_to(saved)
    scene = Scene()
    modes = {name: child.training for name, child in scene.module.named_modules()}
    before = global_state()

    with pytest.raises(use.error) as caught:
        use.use(scene)

    assert re.search(use.message, str(caught.value).replace("\n", " ")), str(caught.value)
    after = global_state()
    if use.has_begun or scene.trainer is not None:  # a module's step may draw numbers
        before = {name: value for name, value in before.items() if name not in ("torch", "numpy", "python")}
    assert {name: after[name] for name in before} == before
    if not use.has_begun:
        assert files(tmp_path) == []
        assert scene.data.reads == 0
    assert {name: child.training for name, child in scene.module.named_modules()} == modes


REPEATED = [each for each in FIT if not any(name in each[1] for name in WRONG_FOR_EVERY_RUN)]


@pytest.mark.parametrize("use", REPEATED, ids=lambda use: use[0])
def test_a_right_use_follows_a_wrong_one(use: tuple[Any, ...], saved: Path, tmp_path: Path) -> None:
    """The trainer and the module of a refused run train bitwise as new ones do."""
    (tmp_path / "SAVED").symlink_to(saved)
    scene = Scene()
    with pytest.raises(use[2]):
        scene.fit(**use[1])
    scene.mend()
    start = {name: value.clone() for name, value in scene.module.state_dict().items()}

    scene.trainer.fit(scene.module, scene.loader)

    fresh = Classifier()
    fresh.load_state_dict(start)
    tw.Trainer(**QUIET, max_epochs=1).fit(fresh, make_loader(12))
    assert_equal(weights(scene.module), weights(fresh))
    assert_equal(start, weights(Classifier()))  # the wrong use changed nothing
    assert (scene.trainer.global_step, scene.trainer.current_epoch) == (3, 1)
    assert {each.split("/")[1] for each in files(tmp_path) if each.count("/") > 0} == {"version_0"}


@pytest.mark.parametrize("name", SIGNATURE)
@pytest.mark.parametrize("value", [OBJECT, [OBJECT], float("nan"), Adam], ids=["object", "list", "nan", "class"])
def test_every_argument_refuses_what_it_is_not(name: str, value: Any, tmp_path: Path) -> None:
    before = global_state()
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}="):
        tw.Trainer(**{"accelerator": "cpu", name: value})
    assert global_state() == before
    assert files(tmp_path) == []


def test_a_refused_trainer_sets_no_switch() -> None:
    with pytest.raises(ValueError, match="strategy='dpp'"):
        tw.Trainer(accelerator="cpu", deterministic=True, benchmark=True, strategy="dpp")
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark


def test_the_same_trainer_goes_on_after_its_run_failed_in_a_step(tmp_path: Path) -> None:
    scene = Scene()
    with pytest.raises(RuntimeError, match="a loss of shape"):
        scene.fit(training_step=returns(torch.zeros(2)))
    scene.mend()
    assert scene.trainer is not None
    scene.trainer.fit(scene.module, scene.loader)
    assert scene.trainer.global_step == 3

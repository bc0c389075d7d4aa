"""Scripts in which only the package's name was changed find their imports."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from forked import run_python
from package import ROOT
from small import QUIET, Classifier, make_loader
from torch import nn

import trainwright as tw
from trainwright.data.transfer import to_device
from trainwright.engine.prepared import PreparedOptimizer
from trainwright.gradient_norms import grad_norm
from trainwright.import_paths import PATHS
from trainwright.replaced_names import ELSEWHERE
from trainwright.step_types import STEP_OUTPUT
from trainwright.trainer.missing_names import MISSING


def test_each_path_finds_the_public_names() -> None:
    for path in PATHS.split():
        assert importlib.import_module(f"trainwright.{path}").Module is tw.Module, path
    assert tw.utilities is importlib.import_module("trainwright.utilities")
    assert tw.pytorch.callbacks.EarlyStopping is tw.EarlyStopping


def test_names_that_are_found_there_alone() -> None:
    def found(path: str, name: str) -> object:
        return getattr(importlib.import_module(f"trainwright.{path}"), name)

    assert found("core.optimizer", "LightningOptimizer") is PreparedOptimizer
    assert found("trainer", "Trainer") is tw.Trainer
    assert found("trainer", "seed_everything") is tw.seed_everything
    assert found("utilities", "grad_norm") is grad_norm
    assert found("utilities", "move_data_to_device") is to_device
    assert found("utilities.types", "STEP_OUTPUT") is STEP_OUTPUT


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("local_sgd", "LocalSGD"),
        ("state", "PartialState"),
        ("data_loader", "skip_first_batches"),
        ("launchers", "notebook_launcher"),
        ("utils.memory", "find_executable_batch_size"),
        ("utils.dataclasses", "DistributedType"),
        ("utils.operations", "gather"),
        ("utils.random", "set_seed"),
    ],
)
def test_paths_of_accelerate(path: str, name: str) -> None:
    assert getattr(importlib.import_module(f"trainwright.{path}"), name) is getattr(tw, name)


def test_hooks_of_ddp_by_their_enum() -> None:
    kind = importlib.import_module("trainwright.utils").DDPCommunicationHookType
    assert kind is tw.DDPCommunicationHookType
    options = tw.DistributedDataParallelKwargs(comm_hook=kind.BF16)
    assert options.strategy("ddp").comm_hook == "bf16"  # type: ignore[union-attr]


def test_what_to_use_instead_of_names_of_accelerate() -> None:
    with pytest.raises(ImportError, match=r"no 'get_logger', as in trainwright\.logging\.get_logger: use logging"):
        from trainwright.logging import get_logger  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(ImportError, match=r"'GeneralTracker'.*: subclass tw\.Logger"):
        from trainwright.tracking import GeneralTracker  # type: ignore[import-not-found]  # noqa: F401


@pytest.mark.parametrize(
    ("path", "name", "instead"),
    [
        ("plugins.io", "AsyncCheckpointIO", r"ModelCheckpoint\(async_save=True\)"),
        ("plugins.environments", "SLURMEnvironment", "is detected"),
        ("plugins", "MixedPrecision", "precision="),
        ("demos.boring_classes", "BoringModel", "write a small Module"),
        ("utilities.memory", "garbage_collection_cuda", "release_memory"),
        ("accelerators", "Accelerator", "trainer.accelerator is"),
        ("core.hooks", "ModelHooks", "have the hooks"),
        ("fabric", "Fabric", "tw.Accelerator"),
        ("loggers", "NeptuneLogger", "subclass tw.Logger"),
        ("profilers", "XLAProfiler", "TPUs are not supported"),
        ("strategies", "ParallelStrategy", "subclass tw.Strategy"),
        ("cli", "instantiate_module", "stored_config"),
        ("callbacks", "EarlyStoping", "Did you mean 'EarlyStopping'"),
        ("tuner.lr_finder", "_LRFinder", "private"),
        ("trainer.states", "TrainerState", "fn, stage and status"),
        ("callbacks.timer", "Interval", "'step' or 'epoch'"),
        ("callbacks.prediction_writer", "WriteInterval", "write_interval takes"),
        ("profilers.pytorch", "ScheduleWrapper", "torch.profiler.profile"),
        ("utilities.warnings", "PossibleUserWarning", "filter UserWarning"),
        ("trainer", "Fabric", "tw.Accelerator"),
    ],
)
def test_what_to_use_instead_of_names_of_lightning(path: str, name: str, instead: str) -> None:
    with pytest.raises(ImportError, match=rf"no '{name}', as in trainwright\.{path}\.{name}.*{instead}"):
        exec(f"from trainwright.{path} import {name}")
    module = importlib.import_module(f"trainwright.{path}")
    assert not hasattr(module, name)
    with pytest.raises(AttributeError, match=instead):
        getattr(module, name)


def test_the_package_itself_says_what_to_use() -> None:
    with pytest.raises(ImportError, match=r"'Fabric': for your own loop use tw\.Accelerator"):
        from trainwright import Fabric  # noqa: F401
    with pytest.raises(ImportError, match="leave out pytorch"):
        import trainwright.pytorch  # noqa: F401


def test_the_page_lists_each_missing_name() -> None:
    page = (ROOT.parent / "docs" / "migrating.md").read_text()
    assert [name for name in ELSEWHERE if f"`{name.rpartition('.')[2]}`" not in page] == []
    assert [name for name in MISSING if f"`{name}`" not in page] == []


def test_one_device_has_a_strategy_of_that_name() -> None:
    from trainwright.strategies import SingleDeviceStrategy

    assert type(tw.Trainer(**QUIET).strategy) is SingleDeviceStrategy
    with pytest.raises(TypeError, match=r"has no device= .*: pass accelerator= to the Trainer"):
        SingleDeviceStrategy(device="cpu")


def test_a_name_that_is_missing() -> None:
    message = r"no 'Nonsense', as in trainwright\.utilities\.Nonsense; docs/migrating\.md lists"
    with pytest.raises(ImportError, match=message):
        from trainwright.utilities import Nonsense  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"trainwright\.nothing"):
        importlib.import_module("trainwright.nothing")


def test_norms_of_gradients() -> None:
    net = nn.Linear(2, 1)
    assert grad_norm(net, 2) == {}
    net.weight.grad, net.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([-4.0])
    assert grad_norm(net, 2) == {"grad_2.0_norm/weight": 3.0, "grad_2.0_norm/bias": 4.0, "grad_2.0_norm_total": 5.0}
    assert grad_norm(net, "inf")["grad_inf_norm_total"] == 4.0
    assert grad_norm(net, 1, ".")["grad_1.0_norm.bias"] == 4.0
    for wrong in (0, -1, math.nan):
        with pytest.raises(ValueError, match="pass a number above 0"):
            grad_norm(net, wrong)


def test_norms_are_logged() -> None:
    class Logs(Classifier):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.log_dict(grad_norm(self, 2))

    trainer = tw.Trainer(**QUIET, max_epochs=1)
    trainer.fit(Logs(), make_loader())
    assert {f"grad_2.0_norm/{name}" for name, _ in Classifier().named_parameters()} < set(trainer.callback_metrics)


def test_a_module_answers_as_any_other() -> None:
    import trainwright.utilities

    assert not hasattr(trainwright.utilities, "foo")
    from trainwright.callbacks.progress import tqdm_progress

    assert tqdm_progress.TQDMProgressBar is tw.TQDMProgressBar


def test_a_system_without_posix_locks_is_refused_at_the_import() -> None:
    code = "import sys; [sys.modules.pop(each) for each in list(sys.modules) if each.split('.')[0] == 'trainwright']; "
    done = run_python("-c", code + "sys.modules['fcntl'] = None; import trainwright")
    assert done.returncode == 1
    assert "ImportError: trainwright needs Linux or macOS; Windows is not supported. Use WSL there." in done.stderr

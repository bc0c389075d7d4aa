"""The LightningModule itself: hyper-parameters, properties and exports."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from projects import loader, part, raised, refusal, regression, trainer


def _module(L: Any, init: Any) -> type[Any]:
    return type("Module", (L.LightningModule,), {"__init__": init})


def case_save_hyperparameters(L: Any, folder: Any) -> Any:
    class Module(L.LightningModule):
        def __init__(self, a: int, b: str = "x", *, c: float = 1.0) -> None:
            super().__init__()
            self.save_hyperparameters()

    module = Module(1, c=2.0)
    hparams = module.hparams
    return [dict(hparams), hparams.a, hparams["b"], "c" in hparams, sorted(hparams), type(hparams).__name__]


def case_save_hyperparameters_by_name(L: Any, folder: Any) -> Any:
    class Module(L.LightningModule):
        def __init__(self, a: int, b: str = "x", c: float = 1.0) -> None:
            super().__init__()
            self.save_hyperparameters("a", "c")

    return dict(Module(1).hparams)


def case_save_hyperparameters_ignore(L: Any, folder: Any) -> Any:
    class Module(L.LightningModule):
        def __init__(self, net: Any, a: int = 1, b: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters(ignore=["net", "b"])

    class One(L.LightningModule):
        def __init__(self, net: Any, a: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters(ignore="net")

    return [dict(Module(torch.nn.Linear(1, 1)).hparams), dict(One(None).hparams)]


def case_save_hyperparameters_of_kwargs(L: Any, folder: Any) -> Any:
    class Module(L.LightningModule):
        def __init__(self, a: int, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

    return dict(Module(1, b=2, c="d").hparams)


def case_save_hyperparameters_of_a_dict(L: Any, folder: Any) -> Any:
    class Module(L.LightningModule):
        def __init__(self, conf: Any) -> None:
            super().__init__()
            self.save_hyperparameters(conf)

    return [dict(Module({"a": 1, "b": {"c": 2}}).hparams), dict(Module(argparse.Namespace(a=3)).hparams)]


def case_save_hyperparameters_of_a_dataclass(L: Any, folder: Any) -> Any:
    @dataclass
    class Config:
        width: int = 3
        name: str = "n"

    class Module(L.LightningModule):
        def __init__(self, conf: Config) -> None:
            super().__init__()
            self.save_hyperparameters()

    hparams = Module(Config(width=5)).hparams
    return [sorted(hparams), hparams.conf.width]


def case_save_hyperparameters_of_omegaconf(L: Any, folder: Any) -> Any:
    from omegaconf import OmegaConf

    class Module(L.LightningModule):
        def __init__(self, conf: Any) -> None:
            super().__init__()
            self.save_hyperparameters(conf)

    hparams = Module(OmegaConf.create({"a": 1, "b": {"c": [1, 2]}})).hparams
    return [hparams.a, hparams.b.c[1], sorted(hparams)]


def case_hyperparameters_of_a_subclass(L: Any, folder: Any) -> Any:
    class Base(L.LightningModule):
        def __init__(self, a: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters()

    class Child(Base):
        def __init__(self, b: int = 2, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.save_hyperparameters()

    return [dict(Child(b=3).hparams), dict(Child(b=3, a=7).hparams)]


def case_hyperparameters_can_be_changed(L: Any, folder: Any) -> Any:
    class Module(L.LightningModule):
        def __init__(self, a: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.hparams.added = 5

    module = Module()
    module.hparams["a"] = 9
    module.hparams.update({"z": 0})
    return [dict(module.hparams), dict(module.hparams_initial)]


def case_hyperparameters_without_the_logger(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def __init__(self, a: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters(logger=False)

    logger = part(L, "loggers").CSVLogger(folder)
    trainer(L, folder, logger=logger).fit(Module(), loader(4))
    return [dict(Module().hparams), "a" in "".join(path.read_text() for path in folder.rglob("hparams.yaml"))]


def case_missing_hyperparameter(L: Any, folder: Any) -> Any:
    class Module(L.LightningModule):
        def __init__(self, a: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters()

    return [
        raised(lambda: Module().hparams.unheard),
        raised(lambda: Module().hparams["unheard"]),
        Module().hparams.get("x", 4),
        dict(L.LightningModule().hparams),
    ]


def case_hyperparameters_as_an_attribute(L: Any, folder: Any) -> Any:
    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.hparams.update({"a": 1})

    return dict(Module().hparams)


def case_hyperparameters_shown(L: Any, folder: Any) -> Any:
    class Module(L.LightningModule):
        def __init__(self, a: int = 1, bcd: str = "x") -> None:
            super().__init__()
            self.save_hyperparameters()

    return repr(Module().hparams)


def case_freeze_and_unfreeze(L: Any, folder: Any) -> Any:
    module = regression(L)()
    module.freeze()
    frozen = [module.training, module.layer.weight.requires_grad]
    module.unfreeze()
    return [frozen, module.training, module.layer.weight.requires_grad]


def case_properties_without_a_trainer(L: Any, folder: Any) -> Any:
    module = regression(L)()
    names = (
        "device", "dtype", "current_epoch", "global_step", "global_rank", "local_rank", "logger", "loggers", "on_gpu",
        "automatic_optimization", "strict_loading", "example_input_array",
    )  # fmt: skip
    return [{name: str(getattr(module, name)) for name in names}, refusal(lambda: module.trainer)]


def case_properties_in_a_run(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append([str(self.device), str(self.dtype), self.current_epoch, self.global_step, self.global_rank])
            seen.append([self.trainer.world_size, self.local_rank, self.logger, self.trainer.training])
            return self.loss(batch)

    trainer(L, folder).fit(Module(), loader(8))
    return seen


def case_device_and_dtype_follow(L: Any, folder: Any) -> Any:
    module = regression(L)()
    found = [str(module.dtype)]
    module.double()
    found.append(str(module.dtype))
    module.to(torch.bfloat16)
    found += [str(module.dtype), str(module.device)]
    module.half().float()
    return [*found, str(module.dtype)]


def case_buffers_made_on_the_device(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.mean += batch[0].mean(0) + torch.zeros(2, device=self.device)
            return self.loss(batch)

    module = Module()
    trainer(L, folder).fit(module, loader(8))
    return module.mean


def case_all_gather_on_one_process(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(list(self.all_gather(batch[0]).shape))
            seen.append(self.all_gather({"a": torch.ones(2)}))
            return self.loss(batch)

    trainer(L, folder).fit(Module(), loader(4))
    return seen


def case_to_onnx_is_there(L: Any, folder: Any) -> Any:
    return [
        callable(getattr(regression(L), name, None)) for name in ("to_onnx", "load_from_checkpoint", "forward", "print")
    ]


def case_use_outside_of_a_trainer(L: Any, folder: Any) -> Any:
    module = regression(L)()
    optimizer = module.configure_optimizers()
    batch = next(iter(loader(4)))
    loss = module.loss(batch)
    loss.backward()
    optimizer.step()
    return [module(torch.ones(1, 2)), module.training_step(batch, 0), list(module.state_dict())]


def case_state_dict_is_clean(L: Any, folder: Any) -> Any:
    module = regression(L)()
    trainer(L, folder).fit(module, loader(8))
    return [list(module.state_dict()), module.training, module.layer.weight.grad is None]


def case_copies_and_pickles(L: Any, folder: Any) -> Any:
    import copy

    module = regression(L)()
    trainer(L, folder).fit(module, loader(4))
    other = copy.deepcopy(module)
    return [torch.equal(other.layer.weight, module.layer.weight), other is module]


def case_utilities(L: Any, folder: Any) -> Any:
    seen: list[Any] = []
    zero = part(L, "utilities")

    @zero.rank_zero_only
    def once() -> str:
        seen.append("called")
        return "value"

    names = ("rank_zero_only", "rank_zero_info", "rank_zero_warn", "grad_norm", "CombinedLoader")
    return [once(), seen, [hasattr(zero, name) for name in names], zero.rank_zero_only.rank]


def case_move_data_to_device(L: Any, folder: Any) -> Any:
    move = part(L, "utilities").move_data_to_device
    moved = move({"a": torch.ones(2), "b": [torch.zeros(1), "text", 3]}, torch.device("cpu"))
    return moved


def case_exceptions(L: Any, folder: Any) -> Any:
    kinds = part(L, "utilities.exceptions")
    return [issubclass(kinds.MisconfigurationException, Exception), refusal(lambda: kinds.Unheard)]


def case_type_names(L: Any, folder: Any) -> Any:
    types = part(L, "utilities.types")
    return [
        hasattr(types, name)
        for name in ("STEP_OUTPUT", "EVAL_DATALOADERS", "TRAIN_DATALOADERS", "OptimizerLRScheduler")
    ]


def case_names_of_the_package(L: Any, folder: Any) -> Any:
    names = (
        "Trainer", "LightningModule", "LightningDataModule", "Callback", "seed_everything", "__version__", "pytorch",
    )  # fmt: skip
    return [hasattr(L, name) for name in names]


def case_configure_model(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.late = None
            self.count = 0

        def configure_model(self) -> None:
            self.count += 1
            if self.late is None:
                self.late = torch.nn.Linear(1, 1)

    run, module = trainer(L, folder), Module()
    run.fit(module, loader(4))
    run.test(module, loader(4), verbose=False)
    return [module.count, sorted(module.state_dict())]


def case_nested_lightning_modules(L: Any, folder: Any) -> Any:
    class Outer(regression(L)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = regression(L)()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.inner.loss(batch)

    run, module = trainer(L, folder), Outer()
    run.fit(module, loader(4))
    return [run.global_step, module.inner.trainer is run, module.inner.current_epoch]


def case_simple_namespace_attributes(L: Any, folder: Any) -> Any:
    module = regression(L)()
    module.config = SimpleNamespace(a=1)
    trainer(L, folder).fit(module, loader(4))
    return module.config.a


def case_strict_loading_attribute(L: Any, folder: Any) -> Any:
    class More(regression(L)):  # type: ignore[misc]
        strict_loading = False

        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.Linear(1, 1)

    run = trainer(L, folder)
    run.fit(regression(L)(), loader(4))
    run.save_checkpoint(folder / "a.ckpt")
    return sorted(More.load_from_checkpoint(folder / "a.ckpt").state_dict())

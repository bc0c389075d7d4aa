"""Optimizers and schedulers: forms of configure_optimizers, the moments of steps, and stepping by hand."""

from __future__ import annotations

from typing import Any

import torch
from projects import loader, part, refusal, regression, trainer
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau, StepLR


def _with(L: Any, configure: Any) -> Any:
    return type("Configured", (regression(L),), {"configure_optimizers": configure})()


def case_forms_of_configure_optimizers(L: Any, folder: Any) -> Any:
    def optimizer(self: Any) -> Any:
        return SGD(self.parameters(), lr=0.1)

    def named(self: Any) -> Any:
        return {"optimizer": optimizer(self)}

    def listed(self: Any) -> Any:
        return [optimizer(self)]

    def pair(self: Any) -> Any:
        made = optimizer(self)
        return [made], [StepLR(made, 1)]

    def pair_with_dict(self: Any) -> Any:
        made = optimizer(self)
        return [made], [{"scheduler": StepLR(made, 1), "interval": "step", "name": "x"}]

    def plain_scheduler(self: Any) -> Any:
        made = optimizer(self)
        return {"optimizer": made, "lr_scheduler": StepLR(made, 1)}

    found = []
    for configure in (optimizer, named, listed, pair, pair_with_dict, plain_scheduler):
        run = trainer(L, folder)
        run.fit(_with(L, configure), loader(8))
        rates = [each.param_groups[0]["lr"] for each in run.optimizers]
        configs = [[each.interval, each.frequency, each.name, each.monitor] for each in run.lr_scheduler_configs]
        found.append([rates, configs, run.global_step])
    return found


def case_wrong_forms_of_configure_optimizers(L: Any, folder: Any) -> Any:
    wrong = (
        lambda self: 3,
        lambda self: {"optimizer": SGD(self.parameters(), lr=0.1), "lr_scheduler": {"interval": "step"}},
        lambda self: [SGD(self.parameters(), lr=0.1), SGD(self.parameters(), lr=0.1)],
    )
    return [refusal(lambda each=each: trainer(L, folder).fit(_with(L, each), loader(4))) for each in wrong]


def _rates(L: Any, folder: Any, scheduler: Any, *, batches: int = 16, epochs: int = 3, **options: Any) -> Any:
    """Return the learning rates of the batches, and the last rate."""
    seen: list[float] = []

    class Module(regression(L)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            return {"optimizer": optimizer, "lr_scheduler": scheduler(optimizer)}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            return 0.0 * super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", 1.0)

    run = trainer(L, folder, max_epochs=epochs, **options)
    run.fit(Module(), loader(batches), loader(4))
    return [seen, run.optimizers[0].param_groups[0]["lr"]]


def case_schedule_by_epochs(L: Any, folder: Any) -> Any:
    return _rates(L, folder, lambda optimizer: StepLR(optimizer, 1))


def case_schedule_by_steps(L: Any, folder: Any) -> Any:
    return _rates(L, folder, lambda optimizer: {"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"})


def case_schedule_with_a_frequency_of_epochs(L: Any, folder: Any) -> Any:
    return _rates(L, folder, lambda optimizer: {"scheduler": ExponentialLR(optimizer, 0.5), "frequency": 2}, epochs=5)


def case_schedule_with_a_frequency_of_steps(L: Any, folder: Any) -> Any:
    options = {"interval": "step", "frequency": 2}
    return _rates(L, folder, lambda optimizer: {"scheduler": ExponentialLR(optimizer, 0.5), **options})


def case_schedule_with_a_frequency_that_does_not_divide_the_epoch(L: Any, folder: Any) -> Any:
    options = {"interval": "step", "frequency": 2}
    return _rates(L, folder, lambda optimizer: {"scheduler": ExponentialLR(optimizer, 0.5), **options}, batches=12)


def case_schedule_by_steps_with_accumulation(L: Any, folder: Any) -> Any:
    return _rates(
        L,
        folder,
        lambda optimizer: {"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"},
        accumulate_grad_batches=2,
    )


def case_schedule_by_a_plateau(L: Any, folder: Any) -> Any:
    return _rates(
        L, folder, lambda optimizer: {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "val"}, epochs=5
    )


def case_schedule_by_a_plateau_within_epochs(L: Any, folder: Any) -> Any:
    options = {"monitor": "val", "interval": "step", "frequency": 2}
    return _rates(
        L, folder, lambda optimizer: {"scheduler": ReduceLROnPlateau(optimizer, patience=0), **options},
        val_check_interval=2,
    )  # fmt: skip


def case_plateau_without_its_monitor(L: Any, folder: Any) -> Any:
    found = []
    for options in ({}, {"monitor": "unheard"}, {"monitor": "unheard", "strict": False}):
        found.append(
            refusal(lambda options=options: _rates(
                L, folder, lambda optimizer: {"scheduler": ReduceLROnPlateau(optimizer), **options}))
        )  # fmt: skip
    return found


def case_plateau_follows_a_training_metric(L: Any, folder: Any) -> Any:
    return _rates(
        L,
        folder,
        lambda optimizer: {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "train_loss"},
        epochs=4,
    )


def case_lr_scheduler_step_override(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1), "interval": "step"}}

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            seen.append([type(scheduler).__name__, metric])
            scheduler.step()

    trainer(L, folder).fit(Module(), loader(8))
    return seen


def case_lr_schedulers_of_a_module(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            return [optimizer], [StepLR(optimizer, 1)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.lr_schedulers().step()
            seen.append([type(self.lr_schedulers()).__name__, self.lr_schedulers().get_last_lr()])

    trainer(L, folder).fit(Module(), loader(8))
    return seen


def case_optimizer_step_override(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            seen.append([epoch, batch_idx, self.trainer.global_step])
            if self.trainer.global_step < 2:
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 * (self.trainer.global_step + 1)
            optimizer.step(closure=optimizer_closure)

    module = Module()
    trainer(L, folder, max_epochs=2).fit(module, loader(8))
    return [seen, module.layer.weight]


def case_optimizer_step_with_accumulation(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            seen.append([epoch, batch_idx, self.trainer.global_step])
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    trainer(L, folder, accumulate_grad_batches=2, max_epochs=2).fit(Module(), loader(16))
    return seen


def case_optimizer_zero_grad_override(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            seen.append([epoch, batch_idx])
            optimizer.zero_grad(set_to_none=False)

    trainer(L, folder).fit(Module(), loader(8))
    return seen


def case_configure_gradient_clipping_override(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            seen.append([gradient_clip_val, gradient_clip_algorithm])
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
            seen.append(torch.cat([each.grad.flatten() for each in self.parameters()]).norm())

    trainer(L, folder).fit(Module(), loader(8))
    return seen


def case_clipping_by_norm_and_value(L: Any, folder: Any) -> Any:
    found = []
    for options in ({"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}):
        module = regression(L)()
        trainer(L, folder, **options).fit(module, loader(12))
        found.append([module.layer.weight, module.layer.bias])
    return found


def case_gradients_of_on_before_optimizer_step(L: Any, folder: Any) -> Any:
    seen: list[Any] = []
    grad_norm = part(L, "utilities").grad_norm

    class Module(regression(L)):  # type: ignore[misc]
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(grad_norm(self.layer, norm_type=2))

    trainer(L, folder, gradient_clip_val=0.001).fit(Module(), loader(4))
    return seen


def case_override_of_backward(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            seen.append([loss, args, kwargs])
            loss.backward(retain_graph=True)

    trainer(L, folder, accumulate_grad_batches=2).fit(Module(), loader(8))
    return seen


class _Gan:
    @staticmethod
    def module(L: Any, seen: list[Any]) -> Any:
        class Module(regression(L)):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False
                self.second = torch.nn.Linear(2, 1, bias=False)
                torch.nn.init.ones_(self.second.weight)

            def training_step(self, batch: Any, batch_idx: int) -> None:
                first, second = self.optimizers()
                self.toggle_optimizer(first)
                seen.append([self.layer.weight.requires_grad, self.second.weight.requires_grad])
                first.zero_grad()
                self.manual_backward(self.loss(batch))
                self.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                first.step()
                self.untoggle_optimizer(first)
                self.toggle_optimizer(second)
                seen.append([self.layer.weight.requires_grad, self.second.weight.requires_grad])
                second.zero_grad()
                self.manual_backward(self.second(batch[0]).pow(2).mean())
                second.step()
                self.untoggle_optimizer(second)

            def configure_optimizers(self) -> Any:
                return SGD(self.layer.parameters(), lr=0.1), Adam(self.second.parameters(), lr=0.01)

        return Module()


def case_two_optimizers_by_hand(L: Any, folder: Any) -> Any:
    seen: list[Any] = []
    module, run = _Gan.module(L, seen), trainer(L, folder)
    run.fit(module, loader(8))
    return [seen, run.global_step, module.layer.weight, module.second.weight, len(run.optimizers)]


def case_wrapped_and_plain_optimizers(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            wrapped, plain = self.optimizers(), self.optimizers(use_pl_optimizer=False)
            seen.append([isinstance(wrapped, SGD), type(plain).__name__, wrapped.optimizer is plain])
            seen.append([wrapped.param_groups[0]["lr"], len(wrapped.state), sorted(wrapped.state_dict())])

    trainer(L, folder).fit(Module(), loader(4))
    return seen


def case_accumulation_by_hand(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch) / 2)
            if (batch_idx + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()

    module, run = Module(), trainer(L, folder)
    run.fit(module, loader(16))
    return [run.global_step, module.layer.weight]


def case_manual_optimization_refuses_settings(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        automatic_optimization = False

    found = [
        refusal(lambda options=options: trainer(L, folder, **options).fit(Module(), loader(4)))
        for options in ({"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2})
    ]

    class Automatic(regression(L)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))

    return [*found, refusal(lambda: trainer(L, folder).fit(Automatic(), loader(4)))]


def case_step_with_a_closure_by_hand(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> Any:
                loss = self.loss(batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)

    module, run = Module(), trainer(L, folder)
    run.fit(module, loader(8))
    return [run.global_step, module.layer.weight]


def case_lbfgs(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    module, run = Module(), trainer(L, folder)
    run.fit(module, loader(8))
    return [run.global_step, module.layer.weight, module.layer.bias]


def case_no_optimizer(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def configure_optimizers(self) -> None:
            return None

    module, run = Module(), trainer(L, folder)
    run.fit(module, loader(8))
    return [run.global_step, module.layer.weight]


def case_warmup_of_a_lambda(L: Any, folder: Any) -> Any:
    return _rates(
        L, folder, lambda optimizer: {"scheduler": LambdaLR(optimizer, lambda step: (step + 1) / 4), "interval": "step"},
        epochs=1,
    )  # fmt: skip


def case_sequential_schedule(L: Any, folder: Any) -> Any:
    from torch.optim.lr_scheduler import ConstantLR, SequentialLR

    return _rates(
        L,
        folder,
        lambda o: {"scheduler": SequentialLR(o, [ConstantLR(o, 0.1, 2), ExponentialLR(o, 0.9)], [2])},
        epochs=4,
    )


def case_one_cycle_by_estimated_steps(L: Any, folder: Any) -> Any:
    class Module(regression(L)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.1, total_steps=self.trainer.estimated_stepping_batches
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    module, run = Module(), trainer(L, folder, max_epochs=2)
    run.fit(module, loader(12))
    return [run.optimizers[0].param_groups[0]["lr"], module.layer.weight]


def case_lr_in_on_train_epoch_end(L: Any, folder: Any) -> Any:
    seen: list[Any] = []

    class Module(regression(L)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            return [optimizer], [StepLR(optimizer, 1)]

        def _note(self, where: str) -> None:
            seen.append([where, self.trainer.optimizers[0].param_groups[0]["lr"]])

        def on_validation_epoch_start(self) -> None:
            self._note("val")

        def on_train_epoch_end(self) -> None:
            self._note("end")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self._note("batch")

    trainer(L, folder, max_epochs=2, num_sanity_val_steps=0).fit(Module(), loader(8), loader(4))
    return seen

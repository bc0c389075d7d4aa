"""The order of the hooks, as trainer/hooks.py draws it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import QUIET, Classifier, make_loader

import trainwright as tw
from trainwright.module import is_overridden
from trainwright.trainer.hooks import HOOKS


def recording(base: type, names: list[str], who: str, calls: list[str]) -> type:
    """Return a subclass that records each of its hooks before it runs it."""

    def record(name: str) -> Any:
        inner = getattr(base, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(f"{who}.{name}")
            return inner(self, *args, **kwargs)

        return call

    return type(f"Recording{base.__name__}", (base,), {name: record(name) for name in names})


def run(**settings: Any) -> list[str]:
    calls: list[str] = []
    steps = ["training_step", "validation_step", "test_step", "configure_optimizers"]
    module = recording(Classifier, [*(name for name in HOOKS if hasattr(tw.Module, name)), *steps], "M", calls)()
    callback = recording(tw.Callback, list(HOOKS), "C", calls)()
    trainer = tw.Trainer(max_epochs=1, limit_train_batches=1, callbacks=[callback], **{**QUIET, **settings})
    trainer.fit(module, make_loader(), make_loader(4, 4))
    return calls


VALIDATION = """C.on_validation_start M.on_validation_start C.on_validation_epoch_start M.on_validation_epoch_start
    C.on_validation_batch_start M.on_validation_batch_start M.validation_step C.on_validation_batch_end
    M.on_validation_batch_end C.on_validation_epoch_end M.on_validation_epoch_end C.on_validation_end M.on_validation_end"""
FIT = f"""C.setup M.setup M.configure_optimizers C.on_fit_start M.on_fit_start
    C.on_sanity_check_start {VALIDATION} C.on_sanity_check_end
    C.on_train_start M.on_train_start C.on_train_epoch_start M.on_train_epoch_start
    C.on_train_batch_start M.on_train_batch_start C.on_before_zero_grad M.on_before_zero_grad M.training_step
    C.on_before_backward M.on_before_backward C.on_after_backward M.on_after_backward
    C.on_before_optimizer_step M.on_before_optimizer_step C.on_train_batch_end M.on_train_batch_end
    {VALIDATION} C.on_train_epoch_end M.on_train_epoch_end C.on_train_end M.on_train_end C.on_fit_end M.on_fit_end
    M.teardown C.teardown"""


def test_fit_calls_the_hooks_in_order() -> None:
    assert run() == FIT.split()


def test_test_calls_the_hooks_in_order() -> None:
    calls: list[str] = []
    module = recording(Classifier, [name for name in HOOKS if hasattr(tw.Module, name)], "M", calls)()
    tw.Trainer(**QUIET).test(module, make_loader(4, 4))
    expected = """setup on_test_start on_test_epoch_start on_test_batch_start on_test_batch_end on_test_epoch_end
        on_test_end teardown"""
    assert calls == [f"M.{name}" for name in expected.split()]


def test_gradients_are_unscaled_when_before_optimizer_step_is_called() -> None:
    norms: dict[str, list[torch.Tensor]] = {}

    class Watch(tw.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            gradient = torch.cat([p.grad.flatten() for p in module.parameters()])
            norms.setdefault(trainer.engine.precision.name, []).append(gradient.norm())

    for precision in ("32-true", "16-mixed"):
        tw.Trainer(max_epochs=1, precision=precision, callbacks=[Watch()], **QUIET).fit(Classifier(), make_loader())
    torch.testing.assert_close(norms["16-mixed"], norms["32-true"], rtol=0.05, atol=0.01)


def test_minus_one_from_batch_start_ends_the_epoch() -> None:
    class Stop(tw.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    trainer = tw.Trainer(max_epochs=2, callbacks=[Stop()], **QUIET)
    trainer.fit(Classifier(), make_loader())
    assert trainer.global_step == 6
    assert trainer.current_epoch == 2


def test_an_exception_is_told_and_the_run_is_taken_down() -> None:
    calls: list[str] = []

    class Watch(tw.Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            calls.append(str(exception))

        def teardown(self, trainer: Any, module: Any, stage: str) -> None:
            calls.append(stage)

    class Broken(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise ArithmeticError("no such luck")

    with pytest.raises(ArithmeticError, match="no such luck"):
        tw.Trainer(max_epochs=1, callbacks=[Watch()], **QUIET).fit(Broken(), make_loader())
    assert calls == ["no such luck", "fit"]


def test_a_hook_set_on_the_instance_counts_as_overridden() -> None:
    module = Classifier()
    assert not is_overridden("on_train_start", module, tw.Module)
    seen: list[int] = []
    module.on_train_start = lambda: seen.append(1)  # type: ignore[method-assign]
    tw.Trainer(max_epochs=1, **QUIET).fit(module, make_loader())
    assert seen == [1]

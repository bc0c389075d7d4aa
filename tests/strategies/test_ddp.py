"""DDP's options on two ranks beside plain ddp, and its errors for models that it cannot train."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import everyday_job
import pytest
import torch
import torch.distributed as dist
from deadlines import deadline
from everyday_job import assert_everyday, under_ddp
from jobs import run_job
from small import QUIET, Classifier, assert_close, assert_equal, loss_of, make_loader, weights
from torch import Tensor, nn

import trainwright as tw

SAMPLES = 45
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "view": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.0001},
    "searching": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "fp16": {"comm_hook": "fp16"},
    "bf16": {"comm_hook": "bf16"},
    "function": {"comm_hook": lambda state, bucket: averaged(state, bucket), "comm_state": []},
    "power_sgd": {"comm_hook": "power_sgd", "comm_state": {"start_powerSGD_iter": 2}},
}
EXACT = ("view", "small buckets", "searching", "static", "function")


def averaged(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    state.append(bucket.index())
    work = dist.all_reduce(bucket.buffer() / 2, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def train(options: dict[str, Any], accumulate: int = 1) -> dict[str, Tensor]:
    module = Classifier()
    losses: list[float] = []
    watch = tw.LambdaCallback(
        on_train_epoch_end=lambda trainer, *_: losses.append(float(trainer.callback_metrics["loss_epoch"]))
    )
    settings = {**QUIET, "max_epochs": 3, "accumulate_grad_batches": accumulate, "num_sanity_val_steps": 1}
    trainer = tw.Trainer(callbacks=[watch], strategy=tw.DDPStrategy(**options), **settings)
    trainer.fit(module, make_loader(SAMPLES, 4), make_loader(21, 4))
    return {**weights(module), "losses": torch.tensor(losses)}


class Branches(Classifier):
    """Uses its spare branch in no step, or only in the first."""

    def __init__(self, is_used_first: bool = False) -> None:
        super().__init__()
        self.spare = nn.ModuleDict({"first": nn.Linear(8, 3), "second": nn.Linear(3, 3, bias=False)})
        self.is_used_first = is_used_first

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.net(batch[0])
        if self.is_used_first and batch_idx == 0:
            outputs = outputs + self.spare["second"](self.spare["first"](batch[0]))
        return nn.functional.cross_entropy(outputs, batch[1])


def unused(**settings: Any) -> tuple[str, int]:
    """Return the error and the number of steps before it."""
    trainer = tw.Trainer(max_epochs=1, strategy="ddp", **{**QUIET, **settings})
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(Branches(is_used_first="limit_train_batches" in settings), make_loader(SAMPLES, 4))
    return str(caught.value), trainer.global_step


def resumed(folder: Path, hook: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Return the weights of a whole run and of a resumed run, and the warnings at resume."""
    options: dict[str, Any] = {"comm_hook": hook}
    if hook == "power_sgd":
        options["comm_state"] = {"start_powerSGD_iter": 2}

    def run(epochs: int, path: Path | None = None) -> tuple[dict[str, Tensor], tw.Trainer]:
        module = Classifier()
        trainer = tw.Trainer(max_epochs=epochs, strategy=tw.DDPStrategy(**options), **QUIET)
        trainer.fit(module, make_loader(SAMPLES, 4), ckpt_path=path)
        return weights(module), trainer

    whole, _ = run(4)
    run(2)[1].save_checkpoint(folder / f"{hook}.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rest, _ = run(4, folder / f"{hook}.ckpt")
    return whole, rest, [str(each.message) for each in caught]


def accelerated(options: dict[str, Any]) -> dict[str, Tensor]:
    """Run a raw loop with two models and two optimizers."""
    accelerator = tw.Accelerator(cpu=True, strategy=tw.DDPStrategy(**options), gradient_accumulation_steps=2)
    first, second = Classifier().net, Classifier().net
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    one, two, *optimizers, loader = accelerator.prepare(first, second, *optimizers, make_loader(40, 4))
    for batch in loader:
        for model, optimizer in zip((one, two), optimizers, strict=True):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    return {**weights(first), **{f"second.{name}": value for name, value in weights(second).items()}}


class Manual(Classifier):
    automatic_optimization = False


def refusal() -> str:
    with pytest.raises(ValueError) as caught:
        tw.Trainer(max_epochs=1, strategy=tw.DDPStrategy(static_graph=True), **QUIET).fit(Manual(), make_loader())
    return str(caught.value)


def timed_out() -> tuple[str, float, float, float]:
    """Return the error of rank 0 that waits for rank 1 in vain. It breaks the group, so it comes last."""
    limit = float(round(deadline(1.5)))
    engine = tw.Engine(accelerator="cpu", strategy=tw.DDPStrategy(timeout=timedelta(seconds=limit)))
    began, text = time.monotonic(), ""
    if engine.rank == 0:
        with pytest.raises(RuntimeError) as caught:
            engine.reduce(torch.ones(3))
        text = str(caught.value)
    waited = time.monotonic() - began
    after = engine.connection.channel.subchannel("after")  # which does not tell rank 1 that rank 0 is in another call
    after.exchange(b"", call="a test", timeout_seconds=deadline(60.0))
    return text, waited, engine.ranks.timeout_seconds, limit


def job(folder: Path) -> dict[str, Any]:
    return {
        **{name: train(options) for name, options in OPTIONS.items()},
        "function's state": OPTIONS["function"]["comm_state"],
        "accumulated": {name: train(OPTIONS[name], accumulate=4) for name in ("plain", "static")},
        "accelerated": {name: accelerated(OPTIONS[name]) for name in ("plain", "static", "fp16")},
        "resumed": {hook: resumed(folder, hook) for hook in ("fp16", "power_sgd")},
        "unused": unused(),
        "unused by accumulation": unused(accumulate_grad_batches=2),
        "unused later": unused(limit_train_batches=4),
        "refusal": refusal(),
        "timeout": timed_out(),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_job(job, 2, tmp_path_factory.mktemp("ddp"))


@pytest.mark.slow
@pytest.mark.slow
def test_everyday_calls_match_one_process_under_ddp(tmp_path: Path) -> None:
    folder, alone = tmp_path / "ranks", tmp_path / "alone"
    assert_everyday(run_job(under_ddp, 2, folder), everyday_job.alone(alone), folder, alone)


@pytest.mark.parametrize("name", EXACT)
def test_ddp_options_do_not_change_the_weights(results: list[dict[str, Any]], name: str) -> None:
    assert_equal(results[0][name], results[1][name])
    assert_close(results[0][name], results[0]["plain"], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_gradients_travel_at_half_the_size(results: list[dict[str, Any]], name: str) -> None:
    assert_equal(results[0][name], results[1][name])
    assert_close(results[0][name], results[0]["plain"], 2e-2)
    assert any(not torch.equal(results[0][name][key], value) for key, value in results[0]["plain"].items())


@pytest.mark.slow
def test_power_sgd_trains(results: list[dict[str, Any]]) -> None:
    assert_equal(results[0]["power_sgd"], results[1]["power_sgd"])
    first, *_, last = results[0]["power_sgd"]["losses"].tolist()
    assert last < first
    assert any(not torch.equal(results[0]["power_sgd"][key], value) for key, value in results[0]["plain"].items())


@pytest.mark.slow
def test_a_hook_of_ones_own_is_called_with_its_state(results: list[dict[str, Any]]) -> None:
    assert len(results[0]["function's state"]) >= 18  # three epochs of six batches


@pytest.mark.slow
def test_a_static_graph_does_not_change_accumulated_steps(results: list[dict[str, Any]]) -> None:
    for kind in ("accumulated", "accelerated"):
        plain, static = results[0][kind]["plain"], results[0][kind]["static"]
        assert_equal(results[0][kind]["static"], results[1][kind]["static"])
        assert_close(static, plain, 1e-6)
    assert_close(results[0]["accelerated"]["fp16"], results[0]["accelerated"]["plain"], 2e-2)


@pytest.mark.slow
def test_a_comm_hook_with_separate_state_warns_at_resume(results: list[dict[str, Any]]) -> None:
    whole, rest, said = results[0]["resumed"]["fp16"]
    assert_equal(whole, rest)
    assert said == []
    whole, rest, said = results[0]["resumed"]["power_sgd"]
    assert_close(whole, rest, 0.2)
    assert [text for text in said if "comm_hook='power_sgd' keeps a separate state" in text]
    assert results[1]["resumed"]["power_sgd"][2] == []  # rank 0 says it for all


@pytest.mark.slow
def test_unused_parameters_are_named_in_the_next_step(results: list[dict[str, Any]]) -> None:
    for result in results:
        for case in ("unused", "unused by accumulation"):
            text, steps = result[case]
            assert "step: spare.first.weight, spare.first.bias, spare.second.weight." in text
            assert "DDPStrategy(find_unused_parameters=True)" in text
            assert steps == 1  # torch tells it in the next forward
        text, steps = result["unused later"]
        assert "step: spare.first.weight, spare.first.bias, spare.second.weight." in text
        assert steps == 2


@pytest.mark.slow
def test_what_cannot_be_trained_is_refused_alike(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert "static_graph=True needs automatic optimization" in result["refusal"]


@pytest.mark.slow
def test_the_timeout_reaches_the_process_group(results: list[dict[str, Any]]) -> None:
    text, waited, seconds, limit = results[0]["timeout"]
    assert seconds == limit
    assert "tim" in text.lower()
    assert limit - 0.1 < waited < limit + deadline(20.0)


@pytest.mark.parametrize(("options", "kind", "text"), [
    ({"comm_hook": "fp8"}, ValueError, "comm_hook='fp8' is unknown. Choose from fp16, bf16, power_sgd, or pass"),
    ({"comm_state": {}}, ValueError, "comm_state={} was given with comm_hook=None, which keeps no state"),
    ({"comm_hook": "power_sgd", "comm_state": 3}, TypeError, "comm_state=3 .* Pass a dict of PowerSGDState's"),
    ({"comm_hook": "power_sgd", "comm_state": {"rank": 1}}, ValueError, "is not accepted by torch's PowerSGDState"),
    ({"comm_hook": "power_sgd", "comm_state": {"start_powerSGD_iter": 1}}, ValueError, "PowerSGDState"),
    ({"timeout": 0}, ValueError, "timeout=0 is not above 0 and finite. Pass seconds"),
    ({"timeout": "1 h"}, TypeError, "timeout='1 h' is not accepted. Pass seconds, a timedelta, or None"),
])  # fmt: skip
def test_unknown_ddp_options_are_rejected(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        tw.DDPStrategy(**options)

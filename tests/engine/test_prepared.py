"""Prepared objects have the attributes of the user's objects, can be copied and pickled, and are prepared once."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from small import (
    ON_HOST,
    QUIET,
    Averaging,
    Classifier,
    assert_close,
    assert_equal,
    loss_of,
    make_loader,
    make_net,
    weights,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import trainwright as tw


class Output(OrderedDict[str, Any]):
    """As transformers' ModelOutput: items are attributes too, and may not be updated or taken out."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("You cannot use ``update`` on a ModelOutput instance.")

    pop = setdefault = __delitem__ = update  # type: ignore[assignment]


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module, self.weight = nn.Linear(3, 2), nn.Parameter(torch.ones(2))
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor, name: Any = None, module: Any = None) -> Output:
        output = Output()
        output["logits"], output["name"] = self.norm(self.module(x) * self.weight), (name, module)
        return output


def in_bfloat16(module: nn.Module) -> Any:
    return tw.Accelerator(cpu=ON_HOST, mixed_precision="bf16").prepare(module)


def test_any_output_and_keyword_is_accepted() -> None:
    model = in_bfloat16(Named())
    output = model(torch.ones(4, 3), name="a", module="b")
    assert isinstance(output, Output)
    assert output["logits"].dtype == output.logits.dtype == torch.float32
    assert output["name"] == ("a", "b")
    assert tw.Accelerator(cpu=ON_HOST).gather_for_metrics(output["logits"]).shape == (4, 2)


def test_predictions_keep_their_type() -> None:
    class Predicts(Classifier):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            output = Output()
            output["logits"] = self.net(batch[0])
            return output

    predicted = tw.Trainer(precision="bf16-true", **QUIET).predict(Predicts(), make_loader(6, 4))
    assert [each["logits"].shape for each in predicted] == [(4, 3), (2, 3)]
    assert [each.logits.dtype for each in predicted] == [torch.bfloat16] * 2


def test_a_prepared_model_has_its_own_names() -> None:
    plain = Named()
    model = in_bfloat16(plain)
    assert not isinstance(model, Named)
    for prepared, own in (
        (model.state_dict(), plain.state_dict()),
        (dict(model.named_parameters()), dict(plain.named_parameters())),
        (dict(model.named_buffers()), dict(plain.named_buffers())),
        (dict(model.named_modules()), dict(plain.named_modules())),
    ):
        assert prepared.keys() == own.keys()
    assert model.get_submodule("module") is plain.module
    other = in_bfloat16(Named())
    with torch.no_grad():
        plain.weight.fill_(3.0)
    other.load_state_dict(plain.state_dict())
    plain.load_state_dict(other.state_dict())
    assert_equal(weights(other), weights(plain))
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({})


def test_a_prepared_model_is_copied_averaged_and_pickled() -> None:
    model = in_bfloat16(Named())
    copied = copy.deepcopy(model)
    assert copied.module is not model.module
    with torch.no_grad():
        copied.module.weight.zero_()
    assert model.module.weight.sum() == 2.0
    assert copied(torch.ones(4, 3))["logits"].dtype == torch.float32

    average = AveragedModel(model, use_buffers=True)
    average.update_parameters(model)
    assert "module.module.bias" in average.state_dict()  # of the average, and of the model in it
    again = AveragedModel(in_bfloat16(Named()), use_buffers=True)
    again.load_state_dict(average.state_dict())
    assert_equal(weights(again), weights(average))
    assert torch.equal(average(torch.ones(4, 3))["logits"], model(torch.ones(4, 3))["logits"])

    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for read in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model))):
        assert type(read) is Named
        assert_equal(weights(read), weights(model))


def test_a_prepared_loader_has_what_its_loader_has() -> None:
    class Own(DataLoader[Any]):
        note = "own"

    loader = Own(list(range(10)), batch_size=4, collate_fn=torch.tensor)
    prepared = tw.Accelerator(cpu=ON_HOST).prepare(loader)
    assert len(prepared.dataset) == 10
    assert (prepared.batch_size, prepared.num_workers, prepared.note) == (4, 0, "own")
    for name in ("dataset", "sampler", "batch_sampler", "collate_fn"):
        assert getattr(prepared, name) is getattr(loader, name)
    assert not hasattr(prepared, "nothing")
    assert [batch.tolist() for batch in copy.copy(prepared)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_prepared_optimizer_has_its_own_methods() -> None:
    accelerator = tw.Accelerator(cpu=ON_HOST)
    net = make_net()
    model, optimizer = accelerator.prepare(net, Averaging(net.parameters(), 0.1))
    before = weights(model)
    optimizer.train()
    accelerator.backward(loss_of(model, next(iter(make_loader()))))
    seen = []
    handle = optimizer.register_step_post_hook(lambda own, *_: seen.append(own))
    optimizer.step()
    handle.remove()
    assert seen
    assert all(each is optimizer.optimizer for each in seen)
    moved = weights(model)
    optimizer.eval()
    assert_equal({name: 0.5 * value for name, value in moved.items()}, weights(model))
    assert not torch.equal(before["0.weight"], weights(model)["0.weight"])
    assert optimizer.param_groups[0]["train_mode"] is False
    assert not hasattr(optimizer, "nothing")


def test_a_module_can_call_methods_of_its_optimizer() -> None:
    class Tells(Classifier):
        def configure_optimizers(self) -> Any:
            return Averaging(self.parameters(), 0.1)

        def on_train_epoch_start(self) -> None:
            self.optimizers().train()

        def on_train_epoch_end(self) -> None:
            self.optimizers().eval()

    module = Tells()
    tw.Trainer(max_epochs=2, **QUIET).fit(module, make_loader())
    by_hand = make_net()
    optimizer = Averaging(by_hand.parameters(), 0.1)
    for _ in range(2):
        optimizer.train()
        for batch in make_loader():
            optimizer.zero_grad()
            loss_of(by_hand, batch).backward()
            optimizer.step()
        optimizer.eval()
    assert_equal(weights(module.net), weights(by_hand))


def test_what_is_prepared_stays_as_it_is() -> None:
    accelerator = tw.Accelerator(cpu=ON_HOST, mixed_precision="bf16")
    net, loader = make_net(), make_loader()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    given = (net, optimizer, loader, scheduler)
    prepared = accelerator.prepare(*given)
    for again in (accelerator.prepare(*prepared), accelerator.prepare(*given)):
        assert all(one is other for one, other in zip(prepared, again, strict=True))
    assert all(one is other for one, other in zip(accelerator.prepare(net, net), (prepared[0],) * 2, strict=True))
    assert len(accelerator.engine.modules) == 1
    other = tw.Accelerator(cpu=ON_HOST)
    model, again, shared, rated = other.prepare(*prepared)
    assert model is net
    assert (again.optimizer, shared.loader, rated.scheduler) == (optimizer, loader, scheduler)
    assert prepared[3].last_epoch == scheduler.last_epoch
    assert prepared[3].base_lrs == [0.1]


def test_an_optimizer_made_before_its_meta_model_had_values_trains_it() -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.device("meta"):
            net = nn.Linear(4, 2)
        return net, torch.optim.SGD(net.parameters(), 0.1)

    accelerator = tw.Accelerator(cpu=ON_HOST)
    model, optimizer = accelerator.prepare(*made())
    before = weights(model)
    accelerator.backward(model(torch.ones(3, 4)).sum())
    optimizer.step()
    assert_close({"weight": before["weight"] - 0.3, "bias": before["bias"] - 0.3}, weights(model))
    net, optimizer = made()
    optimizer.state[net.weight] = {"step": 1}
    with pytest.raises(ValueError, match="has state for a parameter that the strategy has replaced"):
        tw.Accelerator(cpu=ON_HOST).prepare(net, optimizer)


def test_an_optimizer_of_another_kind_is_no_scheduler() -> None:
    class Wrapper:
        def __init__(self, base: Any) -> None:
            self.base, self.param_groups = base, base.param_groups

        def step(self) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            return {}

    with pytest.raises(TypeError, match=r"of type Wrapper. Expected torch modules, optimizers \(subclasses of"):
        tw.Accelerator(cpu=ON_HOST).prepare(Wrapper(torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)))

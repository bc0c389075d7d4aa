"""The Accelerator in one process: preparing, windows, gathering and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import ON_HOST, Stream, assert_equal, loss_of, make_loader, make_net, weights
from torch import nn
from torch.utils.data import DataLoader

import trainwright as tw


def prepared(**settings: Any) -> tuple[Any, ...]:
    accelerator = tw.Accelerator(cpu=ON_HOST, **settings)
    net = make_net()
    return accelerator, *accelerator.prepare(net, torch.optim.Adam(net.parameters(), 0.05), make_loader())


def test_prepare_keeps_the_order_and_the_model_as_it_is() -> None:
    accelerator = tw.Accelerator(cpu=ON_HOST)
    net, loader = make_net(), make_loader()
    optimizer = torch.optim.Adam(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    a, b, c, d = accelerator.prepare(loader, scheduler, optimizer, net)
    assert a.loader is loader
    assert b.scheduler is scheduler
    assert c.optimizer is optimizer
    assert isinstance(c, torch.optim.Optimizer)
    assert d is net
    assert accelerator.unwrap_model(d) is net


def test_each_iteration_is_an_epoch_of_its_own_order() -> None:
    accelerator = tw.Accelerator(cpu=ON_HOST)
    loader = accelerator.prepare(make_loader(shuffle=True))
    first, second = ([batch[1].tolist() for batch in loader] for _ in range(2))
    assert first != second
    assert loader.epoch == 2
    assert len(loader) == 11


def test_damage_that_only_the_load_sees_changes_nothing(tmp_path: Path) -> None:
    """The sizes are right, so the damage in this rank's state is found when it is read, before the model's state."""

    def make(seed: int) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        accelerator, model = tw.Accelerator(cpu=ON_HOST), nn.Linear(3, 3)
        return accelerator, *accelerator.prepare(model, torch.optim.Adam(model.parameters()))

    accelerator, model, adam = make(0)
    accelerator.backward(model(torch.ones(1, 3)).sum())
    adam.step()
    accelerator.save_state(str(tmp_path / "state.ckpt"))
    file = tmp_path / "state.ckpt" / "rank-00000.json"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    again, model, adam = make(1)
    before, generator = weights(model), torch.get_rng_state()
    with pytest.raises(tw.CheckpointError, match=r"state\.ckpt: rank-00000\.json does not match its digest"):
        again.load_state(str(tmp_path / "state.ckpt"), verify="size")
    assert_equal(weights(model), before)
    assert not adam.state
    assert torch.equal(torch.get_rng_state(), generator)


def test_calls_refused() -> None:
    accelerator, *_ = prepared()
    with pytest.raises(ValueError, match="do not belong to one prepared optimizer"):
        accelerator.clip_grad_norm_(nn.Linear(1, 1).parameters(), 1.0)
    with pytest.raises(ValueError, match=r"no parameters to clip were passed. Pass a list: an iterator is empty"):
        accelerator.clip_grad_norm_(iter([]), 1.0)


def test_an_epoch_left_in_its_middle_is_over() -> None:
    accelerator = tw.Accelerator(cpu=ON_HOST)
    loader = accelerator.prepare(make_loader(20, 4, shuffle=True))
    firsts = [next(iter(loader))[1].tolist() for _ in range(2)]
    assert loader.epoch == 1
    again = tw.Accelerator(cpu=ON_HOST)
    other = again.prepare(make_loader(20, 4, shuffle=True))
    again.engine.seed = accelerator.engine.seed
    assert [list(other)[0][1].tolist() for _ in range(2)] == firsts  # noqa: RUF015 - the whole epoch, every time


def test_a_window_without_known_length_can_end_early() -> None:
    def train(known: bool) -> dict[str, torch.Tensor]:
        accelerator = tw.Accelerator(cpu=ON_HOST, gradient_accumulation_steps=4)
        net = make_net()
        loader = make_loader() if known else DataLoader(Stream(), batch_size=4)
        model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.5), loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
        return weights(model)

    for name, value in train(known=True).items():
        torch.testing.assert_close(train(known=False)[name], value, rtol=1e-6, atol=1e-6)


def test_clipping_is_refused_where_it_would_leave_something_out() -> None:
    accelerator = tw.Accelerator(cpu=ON_HOST)
    net = make_net()
    halves = [torch.optim.SGD(part.parameters(), 0.1) for part in (net[0], net[3])]
    model, *_ = accelerator.prepare(net, *halves)
    accelerator.backward(model(torch.ones(2, 8)).sum())
    with pytest.raises(ValueError, match="Pass the parameters of one optimizer"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert accelerator.clip_grad_norm_(net[0].parameters(), 1.0) is not None
    whole = make_net()
    whole[0].requires_grad_(False)
    accelerator, trained = tw.Accelerator(cpu=ON_HOST), [each for each in whole.parameters() if each.requires_grad]
    model, _ = accelerator.prepare(whole, torch.optim.SGD(whole.parameters(), 0.1))
    accelerator.backward(model(torch.ones(2, 8)).sum())
    assert accelerator.clip_grad_norm_(trained, 1.0) is not None


def test_a_save_within_a_window_is_refused(tmp_path: Path) -> None:
    accelerator, model, _, loader = prepared(gradient_accumulation_steps=4)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
        with pytest.raises(RuntimeError, match="within an accumulation window"):
            accelerator.save_state(str(tmp_path / "within.ckpt"))
        break
    with pytest.warns(UserWarning, match="left its loader after 1 of the 4 batches of an accumulation window"):
        accelerator.save_state(str(tmp_path / "left.ckpt"))
    assert all(parameter.grad is None for parameter in model.parameters())

"""ModelPruning: masks as torch's pruning makes them, rejected settings, several ranks, and exact resumes."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, Classifier, loss_of, make_data, make_loader, make_net
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader

import trainwright as tw

FIRST = ("net.0.weight", "net.3.weight", "net.0.bias", "net.3.bias")
TRAINS_ON = {"use_lottery_ticket_hypothesis": False}


def fit(callback: tw.ModelPruning, epochs: int = 2, *, module: Any = None, more: Any = (), **options: Any) -> Any:
    tw.seed_everything(1, verbose=False)
    module = module or Classifier(dropout=0.1)
    ckpt_path, val = options.pop("ckpt_path", None), options.pop("val", make_loader(8))
    trainer = tw.Trainer(max_epochs=epochs, callbacks=[callback, *more], **{**QUIET, **options})
    trainer.fit(module, make_loader(shuffle=True), val, ckpt_path=ckpt_path)
    return module


def zeros(module: nn.Module) -> list[float]:
    return [float((parameter == 0).float().mean()) for parameter in module.parameters()]


def by_hand(is_global: bool, rewinds: bool) -> list[torch.Tensor]:
    """Train and prune in a loop with torch's functions."""
    net = make_net()
    parameters = list(net.parameters())  # torch's pruning changes their order in the module
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    initial = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    pairs = [(net[0], "weight"), (net[3], "weight"), (net[0], "bias"), (net[3], "bias")]
    for _ in range(3):
        for batch in make_loader():
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)
            optimizer.step()
        net(batch[0])  # torch's hooks compute the weights that its functions compare
        if is_global:
            prune.global_unstructured(pairs, pruning_method=prune.L1Unstructured, amount=0.3)
        else:
            for layer, name in pairs[:2]:
                prune.ln_structured(layer, name, 0.3, n=2, dim=0)
        with torch.no_grad():
            for layer, name in (pairs if is_global else pairs[:2]) if rewinds else ():
                getattr(layer, f"{name}_orig").copy_(initial[f"{0 if layer is net[0] else 3}.{name}"])
        net(batch[0])
    return [getattr(layer, name).detach() for layer, name in pairs]


@pytest.mark.host
@pytest.mark.parametrize(("is_global", "rewinds"), [(True, False), (False, True), (True, True)])
def test_it_trains_as_a_loop_with_torchs_pruning(is_global: bool, rewinds: bool) -> None:
    module = Classifier()
    structured = {"pruning_dim": 0, "pruning_norm": 2, "use_global_unstructured": False}
    callback = tw.ModelPruning(
        "l1_unstructured" if is_global else prune.ln_structured,  # torch's functions are known by themselves
        amount=0.3,
        use_lottery_ticket_hypothesis=rewinds,
        **({} if is_global else structured),
    )
    settings = {**QUIET, "fused_optimizers": False, "gradient_clip_val": 0.1}
    tw.Trainer(max_epochs=3, callbacks=[callback], **settings).fit(module, make_loader())
    assert not prune.is_pruned(module)
    got = [module.net[0].weight, module.net[3].weight, module.net[0].bias, module.net[3].bias]
    for mine, expected in zip(got, by_hand(is_global, rewinds), strict=True):
        assert torch.equal(mine, expected)
    assert sorted(name for name, _ in module.net[0].named_parameters()) == ["bias", "weight"]


class Saves(tw.Callback):
    """Saves within epochs and at their ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step in (7, 11, 14):
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"end-{trainer.current_epoch}.ckpt")


@pytest.mark.parametrize(
    "settings",
    [{"pruning_fn": "l1_unstructured"}, {"pruning_fn": "random_unstructured", **TRAINS_ON}],
    ids=["ticket", "random"],
)
def test_a_resumed_run_ends_as_an_uninterrupted_one(settings: dict[str, Any], tmp_path: Path) -> None:
    make = partial(tw.ModelPruning, amount=0.3, **settings)
    whole = fit(make(), more=[Saves(tmp_path)]).state_dict()
    assert len(list(tmp_path.iterdir())) == 5
    for path in sorted(tmp_path.iterdir()):
        tw.seed_everything(5, verbose=False)
        resumed = fit(make(), ckpt_path=path).state_dict()
        assert list(resumed) == list(whole)
        for name, value in whole.items():
            assert torch.equal(resumed[name], value), (path, name)


def test_a_checkpoint_holds_what_was_scored_and_a_plain_module_loads_it(tmp_path: Path) -> None:
    scored: list[Any] = []

    class Watches(tw.Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                scored.append(copy.deepcopy(module.state_dict()))

    best = tw.ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1, filename="{epoch}")
    module = fit(tw.ModelPruning("l1_unstructured"), more=[Watches(), best], enable_checkpointing=True)
    for epoch in (0, 1):
        plain = Classifier()
        tw.Trainer(**QUIET).validate(plain, make_loader(8), ckpt_path=tmp_path / f"epoch={epoch}.ckpt", verbose=False)
        for name, value in plain.state_dict().items():
            assert torch.equal(value.cpu(), scored[epoch][name].cpu())
    assert sum((value == 0).sum() for value in scored[1].values()) >= 0.74 * 159
    initial = dict(Classifier(dropout=0.1).named_parameters())  # the ticket: after the last checkpoint, too
    for name, value in module.named_parameters():
        assert torch.equal(value.cpu(), torch.where(value.cpu() == 0, 0.0, initial[name]))


def test_amounts_depend_on_the_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    module = Classifier()
    pairs = [(module.net[0], "weight")]
    callback = tw.ModelPruning(
        "l1_unstructured",
        pairs,
        amount=lambda epoch: [10, 0, 0.5, 1][epoch],
        apply_pruning=lambda epoch: epoch != 2,
        verbose=2,
        **TRAINS_ON,
    )
    fit(callback, 4, module=module)
    assert int((module.net[0].weight == 0).sum()) == 11
    assert int((~callback.masks["net.0.weight"]).sum()) == 11
    lines = [line for line in capsys.readouterr().out.splitlines() if "of 104" in line]
    assert lines == [
        "ModelPruning: 10 of 104 elements are pruned (9.6%) in epoch 0",
        "  net.0.weight: 10 of 104 (9.6%)",
        "ModelPruning: 11 of 104 elements are pruned (10.6%) in epoch 3",
        "  net.0.weight: 11 of 104 (10.6%)",
    ]
    with pytest.raises(ValueError, match="amount=1000 is more than the 159 elements"):
        fit(tw.ModelPruning("l1_unstructured", amount=1000), 1)


def test_channels_are_pruned_by_a_structured_method() -> None:
    settings = {"pruning_fn": "random_structured", "use_global_unstructured": False, "pruning_dim": 0}
    assert zeros(fit(tw.ModelPruning(**settings, **TRAINS_ON), 1)) == pytest.approx([6 / 13, 0.0, 2 / 3, 0.0])


@pytest.mark.host
@pytest.mark.parametrize("options", [{"precision": "16-mixed"}, {"precision": "bf16-true"}], ids=str)
def test_pruning_works_in_every_precision(options: dict[str, Any]) -> None:
    callback = tw.ModelPruning("l1_unstructured", amount=0.5, **TRAINS_ON)
    module = fit(callback, 2, accumulate_grad_batches=3, **options)
    module.net(torch.zeros(1, 8).to(module.net[0].bias.dtype))
    own = [getattr(module.net[index], name) for index in (0, 3) for name in ("weight", "bias")]
    assert (
        sum(int((each == 0).sum()) for each in own)
        == 120
        == sum(int((~each).sum()) for each in callback.masks.values())
    )


def test_gradients_of_pruned_elements_are_zero() -> None:
    class Watches(tw.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            for name, parameter in module.named_parameters():
                if name in callback.masks:
                    assert not parameter.grad[~callback.masks[name]].any()

    callback = tw.ModelPruning("l1_unstructured", **TRAINS_ON)
    module = fit(callback, 2, more=[Watches()])
    loss_of(module.net.cpu(), next(iter(make_loader()))).backward()  # the hooks have ended with the run
    assert module.net[0].weight.grad[module.net[0].weight == 0].any()


def test_what_it_refuses() -> None:
    for settings, error, match in (
        ({"pruning_fn": "l1_unstructred"}, ValueError, "is not accepted; choose .* Did you mean 'l1_unstructured'"),
        ({"pruning_fn": 3}, ValueError, "pruning_fn=3 is not accepted; choose from l1_unstructured, "),
        ({"pruning_fn": prune.L1Unstructured}, ValueError, "your own function or class, write a callback"),
        ({"pruning_fn": "l1_unstructured", "make_pruning_permanent": False}, ValueError, "custom_from_mask"),
        ({"pruning_fn": "l1_unstructured", "resample_parameters": True}, ValueError, "or write a callback"),
        ({"pruning_fn": "l1_unstructured", "prune_on_train_epoch_end": False}, ValueError, "or write a callback"),
        ({"pruning_fn": "ln_structured"}, ValueError, "use_global_unstructured=False"),
        ({"pruning_fn": "ln_structured", "use_global_unstructured": False}, ValueError, "needs pruning_dim="),
        (
            {"pruning_fn": "ln_structured", "use_global_unstructured": False, "pruning_dim": 0},
            ValueError,
            "pruning_norm=",
        ),
        ({"pruning_fn": "l1_unstructured", "amount": 1.5}, ValueError, "amount=1.5 is not accepted"),
        ({"pruning_fn": "l1_unstructured", "amount": True}, ValueError, "amount=True is not accepted"),
    ):
        with pytest.raises(error, match=match):
            tw.ModelPruning(**settings)


def test_what_it_refuses_before_training() -> None:
    for settings, options, match in (
        (
            {"parameters_to_prune": [(nn.Linear(1, 1), "weight")]},
            {},
            "'weight' of a Linear, which Classifier does not have",
        ),
        ({"parameter_names": ["gain"]}, {}, "no parameter to prune with the names gain"),
        ({}, {"more": [tw.EMAWeightAveraging()]}, "EMAWeightAveraging averages weights from before"),
    ):
        with pytest.raises(ValueError, match=match):
            fit(tw.ModelPruning("l1_unstructured", **settings), 1, **options)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"pruning_fn": "l1_unstructured", "amount": 70}, [159]),
        ({"pruning_fn": "random_unstructured", "amount": 2, "use_global_unstructured": False}, [6, 6, 6, 3]),
        (
            {"pruning_fn": "random_structured", "amount": 2, "use_global_unstructured": False, "pruning_dim": 0},
            [6 * 8, 0, 3 * 13, 0],
        ),
    ],
    ids=["global", "each", "structured"],
)
def test_an_amount_of_more_than_is_left_prunes_all(settings: dict[str, Any], expected: list[int]) -> None:
    module = fit(tw.ModelPruning(**settings, **TRAINS_ON), 4 if len(expected) == 1 else 3)
    found = [int((each == 0).sum()) for each in module.parameters()]
    assert (found if len(expected) > 1 else [sum(found)]) == expected


def test_different_pairs_are_pruned_by_two_callbacks(tmp_path: Path) -> None:
    def both(module: Classifier) -> list[tw.ModelPruning]:
        return [
            tw.ModelPruning("l1_unstructured", [(module.net[index], "weight")], amount=amount, **TRAINS_ON)
            for index, amount in ((0, 0.5), (3, 0.25))
        ]

    module, resumed = Classifier(), Classifier()
    callbacks = both(module)
    fit(callbacks[0], 2, module=module, more=[callbacks[1], Saves(tmp_path)])
    assert callbacks[0].state_key == "ModelPruning[l1_unstructured,net.0.weight]"
    callbacks = both(resumed)
    fit(callbacks[0], 2, module=resumed, more=[callbacks[1]], ckpt_path=tmp_path / "end-0.ckpt")
    for mine, expected in zip(resumed.parameters(), module.parameters(), strict=True):
        assert torch.equal(mine, expected)
    assert [int((~each.masks[name]).sum()) for each, name in zip(callbacks, FIRST[:2], strict=True)] == [78, 17]
    twins = [both(other := Classifier())[0], both(other)[0]]
    with pytest.raises(ValueError, match=r"two of one state_key \(ModelPruning\[l1_unstructured,Linear#\d+.weight\]\)"):
        fit(twins[0], 1, module=other, more=twins[1:])


def on_ranks(folder: Path) -> Any:
    """Prune under every strategy that can."""
    results: dict[str, Any] = {}
    for strategy in ("ddp", "ddp_sharded"):
        for settings in ({"pruning_fn": "random_unstructured"}, {"pruning_fn": "l1_unstructured", **TRAINS_ON}):
            tw.seed_everything(4, verbose=False)
            torch.manual_seed(4 + torch.distributed.get_rank() if torch.distributed.is_initialized() else 4)
            callback = tw.ModelPruning(amount=0.3, **settings)
            module = Classifier()
            trainer = tw.Trainer(max_epochs=2, devices=2, strategy=strategy, callbacks=[callback], **QUIET)
            trainer.fit(module, DataLoader(make_data(23), batch_size=3, shuffle=True), make_loader(5))
            state = {name: value.cpu().clone() for name, value in module.state_dict().items()}
            masks = {name: mask.cpu() for name, mask in callback.masks.items()}
            results[f"{strategy} {settings['pruning_fn']}"] = {"state": state, "masks": masks}
    try:
        tw.Trainer(
            devices=2, strategy="fsdp", callbacks=[tw.ModelPruning("l1_unstructured")], max_epochs=1, **QUIET
        ).fit(Classifier(), make_loader())
    except ValueError as error:
        results["fsdp"] = str(error)
    return results


def test_all_ranks_have_the_same_masks(tmp_path: Path) -> None:
    first, second = run_job(on_ranks, 2, tmp_path / "job")
    for run in ("random_unstructured", "l1_unstructured"):
        for strategy in ("ddp", "ddp_sharded"):
            one, two = first[f"{strategy} {run}"], second[f"{strategy} {run}"]
            assert sum(int((~mask).sum()) for mask in one["masks"].values()) == 81
            for name, mask in one["masks"].items():
                assert torch.equal(mask, two["masks"][name])
                assert torch.equal(one["state"][name], two["state"][name])
                assert torch.equal(one["state"][name], first[f"ddp {run}"]["state"][name])
                assert not one["state"][name][~mask].any()
    assert "strategy='fsdp' divides or copies them. Use 'ddp' or 'ddp_sharded'" in first["fsdp"]
    assert first["fsdp"] == second["fsdp"]

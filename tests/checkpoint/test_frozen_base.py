"""Checkpoints of only the trained parameters: their contents, exact resumes, and the comparison of the frozen base."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job
from small import QUIET, Classifier, assert_close, assert_equal, fit, make_loader, weights
from torch import Tensor, nn

import trainwright as tw
from trainwright.checkpoint.frozen_base import digests
from trainwright.checkpoint.reader import open_checkpoint
from trainwright.checkpoint.tensors import DTYPES, Piece
from trainwright.tools.checkpoints import checkpoint_command

STRATEGIES = ["ddp", "ddp_sharded", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
FROZEN = {"net.0.weight", "net.0.bias", "net.3.weight", "net.3.bias", "head.weight", "head.bias"}
TRAINED = {"adapter.weight", "adapter.bias", "scale"}
BUFFERS = {"count"}
OTHER_BASE = (
    r"stores only the trained parameters, and the base model \(6 frozen tensors\) differs .* in 1 of them, first in "
)


class Adapted(Classifier):
    """A frozen net with a tied layer and an adapter. `scale` is frozen again after the first epoch, except under DeepSpeed."""

    count: Tensor

    def __init__(self, shift: float = 0.0, freezes: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.head = self.net[3]
        with torch.no_grad():
            self.net[0].weight[12, 7] += shift
        self.net.requires_grad_(False)
        self.adapter, self.scale = nn.Linear(8, 3, bias), nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.freezes = freezes

    def on_train_epoch_start(self) -> None:
        self.scale.requires_grad_(not self.freezes or self.current_epoch == 0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        return nn.functional.cross_entropy(self.net(batch[0]) * self.scale + self.adapter(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((each for each in self.parameters() if each.requires_grad), lr=0.05)


def train(folder: Path | None, ranks: int, resume: Path | None = None, shift: float = 0.0, **options: Any) -> Any:
    """Train two epochs, and return the whole weights."""
    freezes = options.pop("freezes", "deepspeed" not in options.get("strategy", ""))
    module, callbacks = Adapted(shift, freezes), [tw.EMAWeightAveraging(decay=0.5)] if options.pop("ema", False) else []
    if folder is not None:
        saves = tw.ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=3, trained_only=True)
        callbacks.append(saves)  # type: ignore[arg-type]
    settings = {**QUIET, "max_epochs": 2, "callbacks": callbacks, **options}
    trainer = tw.Trainer(**settings | {"enable_checkpointing": folder is not None})
    trainer.fit(module, make_loader(48, 12 // ranks), ckpt_path=resume)
    whole = tw.gather_module(module)
    return None if whole is None else weights(whole)


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(tw.CheckpointError) as caught:
        train(*arguments, **options)
    return str(caught.value)


def adapt(folder: Path, strategies: list[str], ranks: int) -> dict[str, Any]:
    """Train under every strategy, resume the run, and try to resume it with another base."""
    found = {}
    for strategy in strategies:
        options: dict[str, Any] = {"strategy": strategy, "devices": ranks}
        path = folder / strategy / "step=6.ckpt"  # in the second epoch
        whole, resumed = train(folder / strategy, ranks, **options), train(None, ranks, path, **options)
        found[strategy] = {"whole": whole, "resumed": resumed, "refusal": refusal(None, ranks, path, 1e-4, **options)}
    return found


def adapt_quickly(folder: Path) -> dict[str, Any]:
    return adapt(folder, ["fsdp"], 2)


def adapt_all(folder: Path) -> dict[str, Any]:
    return adapt(folder, STRATEGIES, 2)


def adapt_on_three(folder: Path) -> dict[str, Any]:
    return adapt(folder, ["ddp", "fsdp"], 3)


def check(folder: Path, ranks: list[dict[str, Any]], alone: Path) -> None:
    base = open_checkpoint(str(alone / "step=6.ckpt")).run_state()["frozen_base"]
    for strategy, first in ranks[0].items():
        assert_equal(first["resumed"], first["whole"])
        for rank in ranks:
            assert re.search(f"{OTHER_BASE}'net.0.weight'", rank[strategy]["refusal"])
        path = folder / strategy / "step=6.ckpt"
        checkpoint = open_checkpoint(str(path))
        assert checkpoint.tensors("model").keys() == TRAINED | BUFFERS
        assert checkpoint.run_state()["frozen_base"] == base
        assert_close(train(None, 1, path, freezes="deepspeed" not in strategy), first["whole"])  # on one process


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of one process."""
    folder = tmp_path_factory.mktemp("alone")
    assert train(folder, 1) is not None
    return folder


def test_a_sharded_adapter_resumes_exactly(tmp_path: Path, alone: Path) -> None:
    check(tmp_path, run_job(adapt_quickly, 2, tmp_path), alone)


@pytest.mark.slow
def test_an_adapter_resumes_exactly_under_every_strategy(tmp_path: Path, alone: Path) -> None:
    check(tmp_path, run_job(adapt_all, 2, tmp_path), alone)


@pytest.mark.slow
def test_an_adapter_resumes_exactly_on_three_ranks(tmp_path: Path, alone: Path) -> None:
    check(tmp_path, run_job(adapt_on_three, 3, tmp_path), alone)


def test_digests_of_ranges_add_up_to_the_digest_of_a_tensor() -> None:
    bits = torch.randint(0, 2, (7, 5), generator=torch.Generator().manual_seed(1))
    exchanged = bits.flatten()  # two unlike elements
    first, last = int((exchanged == 0).nonzero()[0]), int(exchanged.nonzero()[-1])
    exchanged = exchanged.index_copy(0, torch.tensor([first, last]), exchanged[[last, first]])
    for dtype in DTYPES.values():
        tensor, changed = bits.to(dtype), exchanged.to(dtype)
        flat = tensor.flatten()
        pieces = [Piece("part", (7, 5), 0, flat[:11]), Piece("rest", (7, 5), 11, flat[11:])]
        whole, other, *parts = digests([
            Piece("whole", (7, 5), 0, tensor.t().contiguous().t()), Piece("other", (35,), 0, changed), *pieces,
        ]).values()  # fmt: skip
        assert (sum(parts) - whole) % (1 << 64) == 0, dtype
        assert (other - whole) % (1 << 64) != 0, dtype
    assert digests([Piece("empty", (0, 5), 0, torch.empty(0, 5))]) == {"empty": 0}


class Custom(Adapted):
    """It loads its state_dict itself."""

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.loaded = set(state_dict)
        return super().load_state_dict(state_dict, *args, **kwargs)


def saved(path: Path, module: Adapted | None = None, **options: Any) -> Adapted:
    module = module or Adapted()
    fit(module).save_checkpoint(path, **{"trained_only": True, **options})
    return module


def test_a_load_completes_the_model_and_rejects_another_base(tmp_path: Path, capsys: Any) -> None:
    module, other = saved(tmp_path / "a.ckpt"), Adapted(1e-4)
    trainer, path = tw.Trainer(**QUIET), str(tmp_path / "a.ckpt")
    loaded = tw.load_weights(path)
    assert loaded.keys() == TRAINED | BUFFERS
    assert_equal(loaded, {name: value for name, value in weights(module).items() if name in loaded})
    again, custom = Adapted(), Custom()
    for target in (again, custom):
        trainer.test(target, make_loader(), ckpt_path=path, verbose=False)
        assert_equal(weights(target), weights(module))
    assert custom.loaded == module.state_dict().keys()
    assert_equal(weights(Adapted.load_from_checkpoint(path)), weights(module))
    before = weights(other)
    accelerator = tw.Accelerator(cpu=True)
    prepared = accelerator.prepare(other)
    for load in (
        lambda: trainer.test(other, make_loader(), ckpt_path=path, verbose=False),
        lambda: Adapted.load_from_checkpoint(path, shift=1e-4),
        lambda: accelerator.load_state(path, weights_only=True),
    ):
        with pytest.raises(
            tw.CheckpointError, match=f"{OTHER_BASE}'net.0.weight'. Construct the module with the same pre"
        ):
            load()
        assert_equal(weights(other), before)
    del prepared
    with pytest.raises(tw.CheckpointError, match=r"F32 there and BF16 here.*: use the precision of the saved run"):
        trainer.test(Adapted().bfloat16(), make_loader(), ckpt_path=path, verbose=False)
    with pytest.raises(
        tw.CheckpointError, match=r"other model \(only in it: .*head\.bias \(3,\), head\.weight \(3, 13\)"
    ):
        trainer.test(Classifier(), make_loader(), ckpt_path=path, verbose=False)
    assert checkpoint_command(["show", path]) == 0
    assert "  trained parameters only, base of 6 tensors\n" in capsys.readouterr().out
    assert checkpoint_command(["export", path, str(tmp_path / "a.safetensors")]) == 0
    assert tw.load_weights(tmp_path / "a.safetensors").keys() == TRAINED | BUFFERS
    assert checkpoint_command(["import", path, str(tmp_path / "b.ckpt")]) == 0
    assert_equal(weights(Adapted.load_from_checkpoint(str(tmp_path / "b.ckpt"))), weights(module))


def test_a_base_in_lower_precision_is_recognized(tmp_path: Path) -> None:
    module = Adapted()
    fit(module, precision="bf16-true").save_checkpoint(tmp_path / "a.ckpt", trained_only=True, weights_only=True)
    loaded = weights(Adapted.load_from_checkpoint(str(tmp_path / "a.ckpt")))  # in float32
    assert_equal({name: loaded[name] for name in TRAINED}, {n: weights(module)[n].float() for n in TRAINED})
    with pytest.raises(tw.CheckpointError, match=f"{OTHER_BASE}'net.0.weight', BF16 there and F32 here"):
        Adapted.load_from_checkpoint(str(tmp_path / "a.ckpt"), shift=1.0)


def test_an_averaged_adapter_resumes_exactly(tmp_path: Path) -> None:
    options: dict[str, Any] = {"ema": True, "freezes": False}
    whole = train(tmp_path / "a", 1, **options)
    assert_equal(train(None, 1, tmp_path / "a" / "step=6.ckpt", **options), whole)
    checkpoint = open_checkpoint(str(tmp_path / "a" / "step=6.ckpt"))
    assert checkpoint.tensors("training").keys() == TRAINED


class Editing(Adapted):
    """Its hooks rename a tensor of the state_dict."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["old"] = checkpoint["state_dict"].pop("scale")
        self.seen = set(checkpoint["state_dict"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["scale"] = checkpoint["state_dict"].pop("old")


def test_a_hook_changes_the_trained_parameters(tmp_path: Path) -> None:
    module = saved(tmp_path / "a.ckpt", Editing())
    assert module.seen == TRAINED - {"scale"} | {"old"} | BUFFERS  # type: ignore[attr-defined]
    again = Editing()
    tw.Trainer(**QUIET).test(again, make_loader(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert_equal(weights(again), weights(module))
    assert_equal(weights(Editing.load_from_checkpoint(str(tmp_path / "a.ckpt"))), weights(module))


class Taught(Adapted):
    """Its frozen head is a momentum teacher, which follows the adapter."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.head.bias.lerp_(self.adapter.bias, 0.1)


def test_a_frozen_parameter_that_the_module_writes_is_stored(tmp_path: Path) -> None:
    def run(folder: Path, source: Path | None = None) -> dict[str, Tensor]:
        module, keep = (
            Taught(freezes=False),
            tw.ModelCheckpoint(folder, filename="{step}", save_top_k=-1, trained_only=True),
        )
        trainer = tw.Trainer(max_epochs=2, **{**QUIET, "enable_checkpointing": True}, callbacks=[keep])
        trainer.fit(module, make_loader(), ckpt_path=source)
        return weights(module)

    whole, first = (
        run(tmp_path / "a"),
        min((tmp_path / "a").iterdir(), key=lambda path: int(path.stem.partition("=")[2])),
    )
    written = {"head.bias", "net.3.bias"}
    assert open_checkpoint(str(first)).run_state()["frozen_base"].keys() == FROZEN - written
    assert_equal(run(tmp_path / "b", first), whole)
    for path in (tmp_path / "b").iterdir():  # a run that was resumed knows which it has loaded
        assert open_checkpoint(str(path)).run_state()["frozen_base"].keys() == FROZEN - written


def test_a_save_computes_digests_of_the_parameters_that_are_frozen(tmp_path: Path) -> None:
    module, trainer, bases = Adapted(), tw.Trainer(max_epochs=1, **QUIET), []
    for number in range(2):
        module.adapter.requires_grad_(True)
        trainer.fit(module, make_loader())
        module.adapter.requires_grad_(False)
        module.scale.requires_grad_(True)
        trainer.fit(module, make_loader())
        trainer.save_checkpoint(tmp_path / f"{number}.ckpt", trained_only=True)
        bases.append(open_checkpoint(str(tmp_path / f"{number}.ckpt")).run_state()["frozen_base"])
    assert bases[0].keys() == bases[1].keys() == FROZEN | {"adapter.weight", "adapter.bias"}
    assert {name for name in bases[0] if bases[0][name] != bases[1][name]} == {"adapter.weight", "adapter.bias"}


def test_a_module_without_frozen_parameters_is_stored_whole(tmp_path: Path) -> None:
    module = Classifier()
    fit(module).save_checkpoint(tmp_path / "a.ckpt", trained_only=True)
    assert_equal(tw.load_weights(tmp_path / "a.ckpt"), weights(module))
    assert_equal(weights(Classifier.load_from_checkpoint(str(tmp_path / "a.ckpt"))), weights(module))


class Failing(Adapted):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 2:
            raise RuntimeError("the disk is full")
        return super().training_step(batch, batch_idx)


def test_a_failed_run_is_saved_with_only_the_trained_parameters(tmp_path: Path) -> None:
    saves = tw.ModelCheckpoint(tmp_path, trained_only=True, save_on_exception=True)
    with pytest.raises(RuntimeError, match="the disk is full"):
        fit(Failing(), callbacks=[saves], enable_checkpointing=True)
    path = tmp_path / "exception-epoch=0-step=2.ckpt"
    assert tw.load_weights(path).keys() == TRAINED | BUFFERS
    whole = Adapted()
    fit(whole)
    resumed = Adapted()
    fit(resumed, ckpt_path=path)
    assert_equal(weights(resumed), weights(whole))


def test_a_raw_loop_saves_only_the_trained_parameters(tmp_path: Path) -> None:
    accelerator = tw.Accelerator(cpu=True)
    module = Adapted()
    model, optimizer = accelerator.prepare(module, module.configure_optimizers())
    batch = next(iter(make_loader()))
    accelerator.backward(model.training_step(batch, 0))
    optimizer.step()
    accelerator.save_state(str(tmp_path / "a"), trained_only=True)
    expected = weights(module)
    assert tw.load_weights(tmp_path / "a").keys() == TRAINED | BUFFERS
    with torch.no_grad():
        module.adapter.weight.zero_()
    accelerator.load_state(str(tmp_path / "a"))
    assert_equal(weights(module), expected)

"""Activation checkpointing on one process: the same gradients, the user's module afterwards, and what is rejected."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from small import ON_HOST, QUIET
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import trainwright as tw
from trainwright.memory.activation_checkpointing import ActivationCheckpointing, repeated_blocks, without_updates


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.norm(self.conv(x))))


class Deep(tw.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Conv1d(2, 4, 1), *(Block() for _ in range(3)), nn.Conv1d(4, 1, 1))
        self.stored_bytes = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        def stored(tensor: Tensor) -> Tensor:
            self.stored_bytes += tensor.nbytes
            return tensor

        with saved_tensors_hooks(stored, lambda tensor: tensor):
            return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def trained(option: Any, folder: Path | None = None, **settings: Any) -> Deep:
    module = Deep()
    data = TensorDataset(torch.randn(12, 2, 64, generator=torch.Generator().manual_seed(3)))
    torch.manual_seed(5)
    trainer = tw.Trainer(**QUIET, max_epochs=2, activation_checkpointing=option, **settings)
    trainer.fit(module, DataLoader(data, batch_size=4))
    if folder is not None:
        trainer.save_checkpoint(folder / "end.ckpt")
    return module


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("option", [True, "selective", {Block}, {"blocks": [Block], "selective": True}])
def test_training_is_bitwise_the_same(option: Any, precision: str) -> None:
    plain, saving = trained(False, precision=precision), trained(option, precision=precision)
    for (name, one), other in zip(plain.state_dict().items(), saving.state_dict().values(), strict=True):
        assert torch.equal(one, other), name  # with dropout, and with the running statistics of batch norm
    assert saving.stored_bytes < 0.7 * plain.stored_bytes
    assert not any("forward" in vars(layer) for layer in saving.modules())


def test_keys_of_checkpoints_stay(tmp_path: Path) -> None:
    module = trained(True, tmp_path)
    assert Deep.load_from_checkpoint(tmp_path / "end.ckpt").state_dict().keys() == module.state_dict().keys()


def test_a_copy_of_a_module_in_training_calls_its_own_blocks() -> None:
    module = Deep()
    ActivationCheckpointing.read(True).install(module, "cpu")  # type: ignore[union-attr]
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.net[1].conv.weight.fill_(9.0)
    x = torch.ones(1, 4, 8)
    module.eval(), other.eval()
    assert not torch.equal(module.net[1](x), other.net[1](x))


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's compiler meets it itself
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_compiled_blocks_keep_the_weights_of_a_plain_run() -> None:
    class Plain(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0]).square().mean()

    ends = []
    for option in (False, True):
        module = Plain()
        for layer in module.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        settings = {"activation_checkpointing": option, "compile": {"backend": "aot_eager", "fullgraph": True}}
        tw.Trainer(**QUIET, max_steps=2, **settings).fit(module, [[torch.ones(2, 2, 16)]] * 2)
        ends.append(module.state_dict())
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], msg=name)


@pytest.mark.parametrize("option", [True, "selective"])
def test_a_decoder_of_transformers_trains_without_its_cache(option: Any) -> None:
    torch.manual_seed(2)
    config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    model, words, gradients = LlamaForCausalLM(config), torch.tensor([[1, 2, 3], [4, 5, 0]]), []
    for is_plain in (True, False):
        undo = None if is_plain else ActivationCheckpointing.read(option).install(model, "cpu")  # type: ignore[union-attr]
        model(words, attention_mask=(words > 0).long(), labels=words).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    assert all(map(torch.equal, *gradients))
    assert not model.config.use_cache
    undo()  # type: ignore[misc]
    assert model.config.use_cache


def test_recomputation_leaves_the_statistics_and_the_counter_of_a_norm() -> None:
    norm = nn.BatchNorm1d(3)
    norm(torch.randn(4, 3))
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    with without_updates(norm, nullcontext()):
        assert norm.num_batches_tracked is not None  # SyncBatchNorm needs one
        norm(torch.randn(4, 3))
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


def test_repeated_blocks_are_the_outermost_items_of_one_class() -> None:
    layers = [nn.TransformerEncoderLayer(8, 2, 8) for _ in range(2)]
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.ModuleList(layers), nn.ModuleDict({"a": Block()}))
    assert repeated_blocks(net) == layers


def test_wrong_settings_are_rejected_with_the_accepted_ones() -> None:
    for value in (1, "full", [], {3}, {"blocks": {Block}, "offloads": True}, {"selective": 1}):
        with pytest.raises(ValueError, match=r"activation_checkpointing=.* is not accepted. Pass True"):
            tw.Trainer(activation_checkpointing=value)
    strategy = tw.FSDPStrategy(activation_checkpointing_policy=True)
    with pytest.raises(ValueError, match=r"would recompute blocks twice. Omit activation_checkpointing_policy"):
        ActivationCheckpointing.read(True).install(nn.Linear(2, 2), "cpu", strategy)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"activation_checkpointing=1 is not accepted. Pass True"):
        tw.Accelerator(cpu=ON_HOST, activation_checkpointing=1)

    class Blok(nn.Module):
        pass

    with pytest.raises(ValueError, match=r"names Blok, of which Deep has no submodule\. Did you mean 'Block'"):
        trained({Blok})
    with pytest.raises(ValueError, match="finds no repeated block in Linear"):
        ActivationCheckpointing.read(True).install(nn.Linear(2, 2), "cpu")  # type: ignore[union-attr]


@pytest.mark.skipif(not ON_HOST, reason="of the CPU")
def test_offload_on_the_cpu_warns_that_nothing_is_moved() -> None:
    with pytest.warns(UserWarning, match="'offload' moves tensors from a GPU to the host. This run is on the CPU"):
        trained({"offload": True})

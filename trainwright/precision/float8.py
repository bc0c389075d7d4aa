"""Float8: bf16-mixed precision, in which torchao multiplies the matrices of linear layers in float8.

Micikevicius et al., 2022, "FP8 Formats for Deep Learning". Every row of a matrix gets a scale when it is converted, so
there is no loss scale and no state.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from types import MethodType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from trainwright.devices.abilities import autocasts
from trainwright.devices.cuda import multiplies_float8
from trainwright.optim import last_linear
from trainwright.precision.mixed import MixedPrecision
from trainwright.rank_zero import rank_zero_info

MULTIPLE = 16  # of the dimensions of matrices that the kernels take


class Float8Precision(MixedPrecision):
    """bf16-mixed with the products of linear layers, forward and backward, in float8 (torchao's recipe "rowwise").

    Weights, gradients, the optimizer's state and checkpoints stay in float32. Every nn.Linear is converted for the run,
    except the last one in the order of `module.modules()`, which usually is the output head, layers whose weight is tied to
    an embedding, and layers whose features are not multiples of 16. Subclasses of nn.Linear are not converted.

    Args:
        device_type: "cuda", or another one with `emulate`.
        emulate: multiply the float8 values in float32 on any device, for tests. This is slow.

    Raises:
        ImportError: when it is used, if torchao is not installed.
        ValueError: when it is used on a device without float8 kernels, unless `emulate`.

    >>> precision = tw.Float8Precision("cpu", emulate=True)
    >>> tw.Trainer(precision=precision, accelerator="cpu", max_epochs=1, enable_model_summary=False).fit(module, loader)
    """

    def __init__(self, device_type: str = "cuda", *, emulate: bool = False) -> None:
        super().__init__("bf16-mixed", device_type)
        self.name = "fp8-mixed"
        self.emulate = emulate
        self._added_attributes: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()
        self._logged = ""

    def check(self, device: torch.device) -> None:
        if importlib.util.find_spec("torchao") is None:
            raise ImportError("precision='fp8-mixed' needs torchao. Run: pip install 'trainwright[torchao]'")
        if not (multiplies_float8(device) or (self.emulate and autocasts(device.type, torch.bfloat16))):
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"the device {str(device)!r}"
            raise ValueError(
                f"precision='fp8-mixed' needs a GPU with float8 kernels (compute capability 8.9 or newer, such as L4, H100 or "
                f"RTX 40), and {name} has none. Pass precision='bf16-mixed', or, to test a script, "
                f"precision=tw.Float8Precision({device.type!r}, emulate=True)."
            )
        if device.type != self._device_type:
            raise ValueError(
                f"Float8Precision({self._device_type!r}) does not run on {device}; pass {device.type!r} to it."
            )

    def convert_module(self, module: nn.Module) -> None:
        """Make linear layers compute in float8, and log which ones do not. Names and tensors do not change."""
        if module in self._added_attributes:  # a part of a module that was on the meta device
            return
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        self._added_attributes.update(dict.fromkeys(module.modules(), ()))
        recipe = Float8LinearConfig.from_recipe_name("rowwise")
        # Batches of other sizes than multiples of 16 are padded with zeros for the kernels.
        config = dataclasses.replace(recipe, emulate=self.emulate, pad_inner_dim=True)
        plain = nn.Sequential(nn.Linear(MULTIPLE, MULTIPLE, device="meta"))
        pattern = next(convert_to_float8_training(plain, config=config).children())
        num_converted, others, last = 0, [], last_linear(module)
        tied = {layer.weight for layer in module.modules() if isinstance(layer, nn.Embedding)}
        for name, layer in module.named_modules():
            if type(layer) is not nn.Linear or "forward" in vars(layer):
                continue
            if layer is last or layer.weight in tied:
                others.append(f"{name} ({'the last layer' if layer is last else 'tied to an embedding'})")
            elif layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
                others.append(f"{name} ({layer.in_features} x {layer.out_features} features)")
            else:
                self._added_attributes[layer] = _convert(layer, pattern)
                num_converted += 1
        text = (
            f"fp8-mixed: {num_converted} linear layers compute in float8, in bfloat16: {', '.join(others) or 'none'}."
        )
        if text != self._logged:
            self._logged = text
            rank_zero_info(text)

    def restore_module(self, module: nn.Module) -> None:
        """Make the layers compute as nn.Linear again."""
        for layer in module.modules():
            for name in self._added_attributes.pop(layer, ()):
                del vars(layer)[name]


def _convert(layer: nn.Linear, pattern: nn.Module) -> tuple[str, ...]:
    """Make a linear layer compute as torchao's layer `pattern`, in place for hooks. Return the added attributes."""
    forward = type(pattern).forward

    def compute(layer: nn.Linear, inputs: Tensor) -> Tensor:
        device_type = layer.weight.device.type
        if torch.is_autocast_enabled(device_type):
            inputs = inputs.to(torch.get_autocast_dtype(device_type))
        return forward(layer, inputs)  # type: ignore[no-any-return]

    settings = {name: value for name, value in vars(pattern).items() if name not in vars(layer)}
    vars(layer).update(settings, forward=MethodType(compute, layer))
    return (*settings, "forward")

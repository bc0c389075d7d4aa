"""A hand-written loop on a device, the reference for runs on an accelerator, and the parts that both share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from small import QUIET
from torch import Tensor, nn

from trainwright.data.transfer import to_device
from trainwright.devices.abilities import fuses

ON_DEVICE: dict[str, Any] = {**QUIET, "accelerator": "gpu", "devices": 1}
"""Trainer arguments for a run on the accelerator that writes nothing."""

DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm": {"clip_norm": 0.1},
    "value": {"clip_value": 0.01},
    "accumulation": {"accumulate": 4},  # 11 batches: windows of 4, 4 and 3
    "accumulation and norm": {"accumulate": 4, "clip_norm": 0.1},
}
"""Settings of `train_by_hand`."""
TOLERANCE = 1e-4
"""Between two kinds of device, after a few steps in float32."""


@dataclass
class Trained:
    """The results of a hand-written loop."""

    losses: Tensor
    scale: float = 1.0
    skipped: int = 0


def adamw(net: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    """Return the optimizer as the Trainer makes it of itself: fused where the device can."""
    first = next(net.parameters())
    return torch.optim.AdamW(net.parameters(), lr=lr, fused=fuses(first.device.type, "Adam", first.dtype) or None)


def train_by_hand(
    net: nn.Module,
    batches: Iterable[Any],
    device: torch.device,
    *,
    epochs: int = 2,
    precision: str = "32-true",
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    loss_in_autocast: bool = True,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> Trained:
    """Train a net in place, as torch's tutorials do."""
    net.to(device)
    optimizer, dtype = make_optimizer(net), DTYPES.get(precision)
    scheduler = None if make_scheduler is None else make_scheduler(optimizer)
    scaler = scaler or torch.amp.GradScaler(device.type, enabled=precision == "16-mixed")
    count, losses, skipped = len(batches), [], 0  # type: ignore[arg-type]
    for _ in range(epochs):
        for index, batch in enumerate(batches):
            batch = to_device(batch, device)
            first = index - index % accumulate
            window = min(accumulate, count - first)
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                outputs = net(batch[0])
                loss = nn.functional.cross_entropy(outputs, batch[1]) if loss_in_autocast else None
            if loss is None:
                loss = nn.functional.cross_entropy(outputs.float(), batch[1])
            losses.append(loss.detach())
            scaler.scale(loss / window if window > 1 else loss).backward()
            if index - first + 1 < window:
                continue
            scaler.unscale_(optimizer)
            if clip_value is not None:
                nn.utils.clip_grad_value_(net.parameters(), clip_value)
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before
            if scheduler is not None and scaler.get_scale() >= before:
                scheduler.step()
            optimizer.zero_grad()
    return Trained(torch.stack(losses).float().cpu(), scaler.get_scale(), skipped)


def on_host(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in values.items()}

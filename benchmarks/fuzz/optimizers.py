"""The optimizers and schedulers of *state*: torch's, those of installed extras, and one defined here."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler as S
from torch.optim.swa_utils import SWALR

O = torch.optim  # noqa: E741
Make = Callable[[Any], Any]


class PlainState(O.Optimizer):
    """State in plain numbers, a shared count, and a group's own count."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                state["n"] = state.get("n", 0) + 1
                state.setdefault("m", torch.zeros_like(each)).mul_(0.9).add_(each.grad)
                each.sub_(state["m"] * group["lr"] / (state["n"] ** 0.5 + 0.1 * group["k"]))
            group["k"] += 1


# An epsilon keeps a sum in another order from being amplified by a division by a root near zero.
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: O.SGD(p, 0.05),
    "SGD momentum": lambda p: O.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD dampening": lambda p: O.SGD(p, 0.05, momentum=0.9, dampening=0.5),
    "Adam": lambda p: O.Adam(p, 0.02, eps=1e-3),
    "Adam amsgrad": lambda p: O.Adam(p, 0.02, eps=1e-3, amsgrad=True),
    "Adam tensor lr": lambda p: O.Adam(p, torch.tensor(0.02), eps=1e-3),
    "AdamW": lambda p: O.AdamW(p, 0.02, eps=1e-3, weight_decay=0.3),
    "AdamW foreach": lambda p: O.AdamW(p, 0.02, eps=1e-3, foreach=True),
    "AdamW plain": lambda p: O.AdamW(p, 0.02, eps=1e-3, fused=False, foreach=False),
    "NAdam": lambda p: O.NAdam(p, 0.02, eps=1e-3),
    "RAdam": lambda p: O.RAdam(p, 0.02, eps=1e-3),
    "Adamax": lambda p: O.Adamax(p, 0.02, eps=1e-3),
    "ASGD": lambda p: O.ASGD(p, 0.05, t0=3),
    "Rprop": lambda p: O.Rprop(p, 0.01),
    "RMSprop": lambda p: O.RMSprop(p, 0.01, eps=1e-3, momentum=0.5, centered=True),
    "Adadelta": lambda p: O.Adadelta(p, 0.5, eps=1e-3),
    "Adagrad": lambda p: O.Adagrad(p, 0.05, lr_decay=0.01, initial_accumulator_value=0.1, eps=1e-3),
    "Adagrad plain": lambda p: O.Adagrad(p, 0.05, fused=False, weight_decay=0.1, eps=1e-3),
    "Adafactor": lambda p: O.Adafactor(p, 0.05),
    "Muon": lambda p: O.Muon(p, 0.05),
    "LBFGS": lambda p: O.LBFGS(p),
    "SparseAdam": lambda p: O.SparseAdam(p, 0.05),
    "PlainState": lambda p: PlainState(p, 0.05),
}
SCHEDULERS: dict[str, Make] = {
    "Lambda": lambda o: S.LambdaLR(o, lambda n: 0.9**n),
    "Lambda of groups": lambda o: S.LambdaLR(o, [lambda n: 1 / (n + 1), lambda n: 1.0, lambda n: 0.5]),
    "Multiplicative": lambda o: S.MultiplicativeLR(o, lambda n: 0.95),
    "Step": lambda o: S.StepLR(o, 3, 0.5),
    "MultiStep": lambda o: S.MultiStepLR(o, [2, 7], 0.5),
    "Constant": lambda o: S.ConstantLR(o, 0.5, 5),
    "Linear": lambda o: S.LinearLR(o, 0.2, 1.0, 6),
    "Exponential": lambda o: S.ExponentialLR(o, 0.9),
    "Cosine": lambda o: S.CosineAnnealingLR(o, 8),
    "Polynomial": lambda o: S.PolynomialLR(o, 12, 2.0),
    "WarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycle": lambda o: S.OneCycleLR(o, 0.1, 12),
    "Cyclic": lambda o: S.CyclicLR(o, 0.01, 0.1, 3),
    "Sequential": lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.2, 1.0, 4), S.ExponentialLR(o, 0.9)], [4]),
    "Chained": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.5, 4), S.ExponentialLR(o, 0.9)]),
    "Plateau": lambda o: S.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "SWA": lambda o: SWALR(o, 0.01, 3),
}
WITH_MOMENTUM = ("Lambda", "OneCycle", "Cyclic", "Plateau")
"""Schedulers that are tried with SGD too: some set its momentum."""


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


if is_installed("schedulefree"):
    free: Any = importlib.import_module("schedulefree")
    OPTIMIZERS |= {
        "ScheduleFree AdamW": lambda p: free.AdamWScheduleFree(p, 0.02, eps=1e-3, warmup_steps=3, weight_decay=0.1),
        "ScheduleFree SGD": lambda p: free.SGDScheduleFree(p, 0.05, warmup_steps=3),
        "ScheduleFree RAdam": lambda p: free.RAdamScheduleFree(p, 0.02, eps=1e-3),
    }
if is_installed("transformers"):
    rates: Any = importlib.import_module("transformers.optimization")
    OPTIMIZERS |= {
        "transformers Adafactor": lambda p: rates.Adafactor(p, 0.02, scale_parameter=False, relative_step=False),
        "transformers Adafactor relative": lambda p: rates.Adafactor(p, warmup_init=True),
    }
    SCHEDULERS |= {
        "transformers linear": lambda o: rates.get_linear_schedule_with_warmup(o, 3, 12),
        "transformers cosine": lambda o: rates.get_cosine_with_hard_restarts_schedule_with_warmup(o, 3, 12, 2),
        "transformers polynomial": lambda o: rates.get_polynomial_decay_schedule_with_warmup(o, 3, 12),
        "transformers inverse root": lambda o: rates.get_inverse_sqrt_schedule(o, 3),
        "transformers stable": lambda o: rates.get_wsd_schedule(o, 2, 4, num_training_steps=12),
    }
if is_installed("deepspeed"):
    zero: Any = importlib.import_module("deepspeed.runtime.lr_schedules")
    SCHEDULERS |= {
        "DeepSpeed WarmupLR": lambda o: zero.WarmupLR(o, 0.001, 0.05, 5),
        "DeepSpeed WarmupDecayLR": lambda o: zero.WarmupDecayLR(o, 12, 0.001, 0.05, 5),
        "DeepSpeed WarmupCosineLR": lambda o: zero.WarmupCosineLR(o, 12, warmup_num_steps=4),
        "DeepSpeed OneCycle": lambda o: zero.OneCycle(o, 0.001, 0.05, cycle_first_step_size=4),
        "DeepSpeed LRRangeTest": lambda o: zero.LRRangeTest(o, 0.001, 3),
    }

"""The norms of a module's gradients, to be logged."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainwright.tensor_names import clean_name


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, float]:
    """Return the norms of all parameters' gradients, and the total. Call it in on_before_optimizer_step.

    Collective where the strategy shards parameters (fsdp): call it on every rank.

    Args:
        module: its parameters without a gradient are skipped.
        norm_type: p of the p-norm, above 0, or "inf" for the largest magnitude.
        group_separator: joins `grad_2.0_norm` and the name of a parameter.

    Returns:
        `{"grad_2.0_norm/layer.weight": ..., "grad_2.0_norm_total": ...}`, empty without gradients.
    """
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type={norm_type!r} is not accepted. Pass a number above 0, or 'inf'.")
    gradients = ((name, parameter.grad) for name, parameter in module.named_parameters())
    norms = {clean_name(name): _norm(grad.detach(), p) for name, grad in gradients if grad is not None}
    if not norms:
        return {}
    total = torch.linalg.vector_norm(torch.stack(list(norms.values())), p)
    values = torch.stack([*norms.values(), total]).tolist()  # one wait for the device
    names = [f"grad_{p}_norm{group_separator}{name}" for name in norms]
    return dict(zip([*names, "_".join(["grad", str(p), "norm", "total"])], values, strict=True))


def _norm(gradient: Tensor, p: float) -> Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    # A sum of squares soon exceeds float16's largest number.
    norm: Tensor = torch.linalg.vector_norm(values, p, dtype=torch.promote_types(values.dtype, torch.float32))
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

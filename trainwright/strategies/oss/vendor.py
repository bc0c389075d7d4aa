"""The private names of FairScale that ddp_sharded needs, as read in FairScale 0.4.13, its last version."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from trainwright.strategies.divided_optimizers import parameters_of


def make_oss(own: Optimizer) -> tuple[Any, dict[Tensor, int]]:
    """Return an OSS around the user's optimizer, which then keeps only this rank's parameters, and the parameters' ranks."""
    from fairscale.optim import OSS

    owners: dict[Tensor, int] = {}

    class BalancedOSS(OSS):  # type: ignore[misc]
        """OSS that assigns the largest tensors first, so that the ranks hold about the same."""

        def partition_parameters(self) -> list[list[dict[str, Any]]]:
            if not owners:
                sizes = [0] * self.world_size
                for p in sorted(parameters_of(self), key=lambda p: (not p.requires_grad, -p.numel())):
                    owners[p] = sizes.index(min(sizes))
                    sizes[owners[p]] += p.numel() if p.requires_grad else 1
            return [
                [{**group, "params": [p for p in group["params"] if owners[p] == rank]} for group in self.param_groups]
                for rank in range(self.world_size)
            ]

    def take_own(groups: list[dict[str, Any]], **_: Any) -> Optimizer:
        # OSS would construct a new one, but its arguments are unknown, and schedulers and hooks are bound to this one.
        mine = {p for group in groups for p in group["params"]}
        own.param_groups = groups
        for parameter in [p for p in own.state if p not in mine]:
            del own.state[parameter]
        return own

    return BalancedOSS([dict(group) for group in own.param_groups], optim=take_own), owners


def send(oss: Any) -> None:
    """Broadcast every rank's parameters. Collective: call on every rank."""
    oss._broadcast_params()

"""Module checks: a module's tensors that are alike on all ranks, and layers that a strategy cannot train."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.parameter import is_lazy

from trainwright.strategies.ddp.vendor import rank_local_names, recomputes_reentrantly
from trainwright.value_kinds import is_dtensor


def replicated(module: nn.Module, named: Iterable[tuple[str, Tensor]]) -> list[Tensor]:
    """Return the parameters or buffers of a module that are equal on every rank."""
    local = rank_local_names(module)
    return [tensor for name, tensor in named if name not in local]


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the replicated parameters that require gradients, by name."""
    local = rank_local_names(module)
    return {name: p for name, p in module.named_parameters() if p.requires_grad and name not in local}


def changed(before: Mapping[str, nn.Parameter], now: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of parameters that only one side has, or whose parameters differ."""
    return sorted(name for name in {**before, **now} if before.get(name) is not now.get(name))


def graph_leaves(loss: Tensor) -> set[Tensor]:
    """Return the tensors to which the loss's backward adds gradients, or an empty set if a part of the graph cannot be seen."""
    leaves: set[Tensor] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            return set()  # such as a checkpoint's, which builds its part in backward
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        waiting.extend(following for following, _ in node.next_functions)
    return leaves


def refuse_sparse_weights(module: nn.Module, name: str, is_trained: object) -> None:
    for layer_name, layer in module.named_modules() if is_trained else ():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and layer.weight.requires_grad:
            raise ValueError(
                f"{layer_name!r} of {type(module).__name__} is an {type(layer).__name__} with sparse=True, and "
                f"strategy={name!r} only reduces dense gradients. Omit sparse, or choose strategy='ddp'."
            )


def refuse_reentrant(module: nn.Module, name: str, is_trained: object) -> None:
    for path, layer in module.named_modules() if is_trained else ():
        if recomputes_reentrantly(layer):
            raise ValueError(
                f"{path!r} of {type(module).__name__} recomputes activations with use_reentrant=True. Under "
                f"strategy={name!r} the gradients of a layer that is called twice would be wrong. Pass use_reentrant=False: "
                "checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT), or, in transformers, "
                "gradient_checkpointing_kwargs={'use_reentrant': False}."
            )


def refuse_sharded(module: nn.Module, name: str) -> None:
    for parameter_name, parameter in module.named_parameters():
        if is_dtensor(parameter) or hasattr(parameter, "ds_id"):
            raise ValueError(
                f"parameter {parameter_name!r} of {type(module).__name__} was sharded by fsdp or ZeRO stage 3, and "
                f"strategy={name!r} needs it whole. Continue with the strategy that sharded it, pass the whole copy that "
                "tw.gather_module(module, all_ranks=True) returns, or create the module again and load a checkpoint."
            )


def refuse_copy(*_: Any) -> None:
    """Raise RuntimeError as the `__deepcopy__` of a module that a strategy has sharded."""
    raise RuntimeError(
        "a module that fsdp or ZeRO stage 3 has sharded cannot be copied, because a rank holds only a part of it. "
        "tw.gather_module(module), called on all ranks, returns a whole, plain copy in host memory."
    )


def refuse_lazy(module: nn.Module, name: str) -> None:
    for parameter_name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {parameter_name!r} of {type(module).__name__} is lazy: its shape is not known before a forward, "
                f"and strategy={name!r} needs it before. Run a forward on a sample in the module's __init__, or give the "
                "layer its size."
            )


def refuse_row_norms(module: nn.Module, name: str) -> None:
    for layer_name, layer in module.named_modules():
        is_written = isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None
        if is_written and layer.weight.requires_grad:
            raise ValueError(
                f"{layer_name!r} of {type(module).__name__} is an {type(layer).__name__} with max_norm={layer.max_norm}, which "
                f"scales the rows that a batch looks up. Under strategy={name!r} the ranks would scale different rows. Omit "
                "max_norm and bound the rows after every step (torch.renorm under no_grad), or train on one process."
            )


def refuse_unreplicable(module: nn.Module, name: str, is_trained: object) -> None:
    refuse_lazy(module, name)
    if is_trained:
        refuse_row_norms(module, name)
    if names := sorted(rank_local_names(module)):
        raise ValueError(
            f"{type(module).__name__}._ddp_params_and_buffers_to_ignore keeps {names[0]!r} separate on every rank, but "
            f"strategy={name!r} trains one model. Use strategy='ddp', or delete that attribute."
        )


def refuse_unshardable(module: nn.Module, name: str, is_trained: object, is_parallel: bool = True) -> None:
    """Raise ValueError for a module whose training cannot be sharded, or a module that cannot be replicated."""
    refuse_unreplicable(module, name, is_parallel and is_trained)
    refuse_reentrant(module, name, is_parallel and is_trained)
    refuse_sparse_weights(module, name, is_trained)


def refuse_unaveraged(strategy: str, modules: Iterable[nn.Module], unknown: Collection[Tensor]) -> None:
    """Raise RuntimeError if a module trains a parameter that the strategy does not know.

    Other unknown parameters belong to the user, who may train them separately on every rank.
    """
    for module in modules if unknown else ():
        for name, parameter in trained(module).items():
            if any(parameter is other for other in unknown):
                raise RuntimeError(
                    f"{name!r} of {type(module).__name__} was replaced, added or unfrozen within an epoch, so {strategy} "
                    "has not averaged its gradient over the ranks. Do that between epochs: in on_train_epoch_start, or before "
                    "a pass over a prepared loader."
                )

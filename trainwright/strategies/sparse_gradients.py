"""Sparse gradients: finds the layers that produce them, and refuses them where they cannot be reduced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn


def sparse_weights(modules: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield the name, the embedding and its weight for each weight with sparse gradients."""
    embeddings: list[tuple[str, nn.Module, Tensor]] = []
    elsewhere: set[Tensor] = set()
    for module in modules:
        for name, layer in module.named_modules():
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
                embeddings.append((name, layer, layer.weight))
            else:
                elsewhere.update(layer.parameters(recurse=False))
    # A sparse and a dense gradient of a tied weight add up to a dense one.
    yield from (each for each in embeddings if each[2] not in elsewhere)


def refuse_sparse_weights(module: nn.Module, name: str, is_trained: object) -> None:
    """Raise ValueError for trained layers with sparse gradients, which the strategy cannot reduce."""
    for layer_name, layer, weight in sparse_weights([module] if is_trained else []):
        if weight.requires_grad:
            raise ValueError(
                f"{layer_name!r} of {type(module).__name__} is an {type(layer).__name__} with sparse=True, and "
                f"strategy={name!r} only reduces dense gradients. Leave sparse out, or choose strategy='ddp'."
            )

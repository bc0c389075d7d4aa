"""Functions of torch's private module for nested structures, read against torch 2.11 to 2.13."""

from torch.utils._pytree import MappingKey, tree_leaves, tree_map, tree_map_with_path

__all__ = ["MappingKey", "tree_leaves", "tree_map", "tree_map_with_path"]

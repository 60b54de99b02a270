"""Token trees: from parents to depths and to who may look at whom.

A pass over a tree scores M = N + 1 nodes: node 0 is the root (the last committed token), node 1 + i is draft
node i. A chain is the tree in which every node is the parent of the next.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def with_root(parents: Int[Tensor, "B N"]) -> Int[Tensor, "B M"]:
    """Parents as nodes of the pass; the root is its own parent."""
    root = parents.new_zeros(parents.shape[0], 1)
    return torch.cat([root, parents + 1], dim=1)


def ancestors(parents: Int[Tensor, "B N"], levels: int) -> Bool[Tensor, "B M M"]:
    """[b, i, j]: node j lies on the way from the root to node i, both ends included.

    Args:
        parents: draft columns of the parents, -1 for the root.
        levels: an upper bound of the depth; the closure takes log2(levels) products.
    """
    nodes = with_root(parents)
    batch, count = nodes.shape
    reach = torch.eye(count, device=nodes.device).expand(batch, count, count).clone()
    reach.scatter_(2, nodes.unsqueeze(2), 1.0)
    for _ in range(max(levels - 1, 0).bit_length()):
        reach = torch.bmm(reach, reach).clamp_(max=1.0)
    return reach.bool()


def depths(reach: Bool[Tensor, "B M M"]) -> Int[Tensor, "B M"]:
    """Nodes between each node and the root; 0 for the root."""
    return reach.sum(2) - 1

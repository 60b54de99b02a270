"""The draft tree of a network of one layer on a CPU in one call of the C++ kernels, see ``methods.engine.cpu_kernels``.

Such a network reads 10 MB a level, a fraction of a millisecond, and as torch's operators a tree of two levels is a
hundred calls. The call reads the pairs that are new, lets the tree of the most probable paths grow level by level, and
yields its nodes: the same bits as the operators (``methods.speculative.ranked_tree``).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from methods.engine.causal_layers import RMSNorm
from methods.engine.cpu_kernels import KINDS, Matrix, NormNumbers, library
from methods.engine.fused_layers import FusedLayers, ModelNumbers, norm_numbers
from methods.engine.kv_cache import Cache
from methods.engine.linear import KernelLinear


class _Network(Structure):
    _fields_ = [
        ("model", ModelNumbers),
        *((name, NormNumbers) for name in ("token", "feature", "scored")),
        ("mix", Matrix),
        ("taps", c_int64),
        ("score", Matrix),
        ("embedding", c_void_p),
        ("ids", c_void_p),
        *((name, c_int64) for name in ("feeds_scored", "nodes", "levels", "width")),
        ("least", c_float),
    ]


class _Growth(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("taps", "rows")),
        ("mixed", c_int64),
        ("tokens", c_void_p),
        ("fresh", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("rotary", c_int64),
        ("cache", c_void_p),
        *((name, c_int64) for name in ("begin", "length", "capacity")),
        *((name, c_void_p) for name in ("ids", "parents", "scores", "grown", "work")),
        ("threads", c_int64),
    ]


@dataclass(frozen=True)
class TreeSizes:
    """Of a tree of the most probable paths.

    Attributes:
        nodes: the best of all candidates.
        levels: of the tree.
        width: candidates of a node, and nodes of a level that get children.
        least: log-probability of a level's best path below which no further level grows.
    """

    nodes: int
    levels: int
    width: int
    least: float = -math.inf


class Grown(NamedTuple):
    """A tree of one row.

    Attributes:
        ids: of the nodes.
        parents: columns of their parents (-1: the root).
        scores: log-probabilities of their paths.
        levels: that have grown.
    """

    ids: Int[Tensor, "1 N"]
    parents: Int[Tensor, "1 N"]
    scores: Float[Tensor, "1 N"]
    levels: int


class FusedTree:
    """What one call needs of a network that reads the norm of a token's embedding beside a feature (EAGLE-3).

    Args:
        layers: the network's one layer.
        token: norm of embeddings.
        feature: norm of the residual; None: the residual is the feature as it is.
        scored: norm before the scores.
        mix: makes a feature of the target's states side by side; None: these come mixed.
        score: output matrix over the draft vocabulary.
        embedding: of all tokens.
        ids: of the draft vocabulary; None: all tokens.
        feeds_scored: the next pair has the feature after the norm before the scores.
        sizes: of the tree.

    Attributes:
        mixes: whether ``grow`` takes states that are not mixed.
    """

    def __init__(
        self,
        layers: FusedLayers,
        token: RMSNorm,
        feature: RMSNorm | None,
        scored: RMSNorm,
        mix: KernelLinear | None,
        score: KernelLinear,
        embedding: Float[Tensor, "V D"],
        ids: Int[Tensor, "v"] | None,
        feeds_scored: bool,
        sizes: TreeSizes,
    ) -> None:
        found = library()
        assert found is not None, "no kernels"
        norms, kept = zip(*(norm_numbers(norm) for norm in (token, scored)), strict=True)
        of_feature, more = (NormNumbers(), []) if feature is None else norm_numbers(feature)
        self._kept = [*kept, more, layers, mix, score, embedding, ids]  # whose addresses are in the structure
        self.sizes, self.mixes = sizes, mix is not None
        mixing = Matrix() if mix is None else mix.panels.matrix
        self._network = _Network(
            layers.model, norms[0], of_feature, norms[1], mixing, mixing.inputs // embedding.shape[1],
            score.panels.matrix, embedding.data_ptr(),
            None if ids is None else ids.data_ptr(), feeds_scored, sizes.nodes, sizes.levels, sizes.width,
            sizes.least,
        )  # fmt: skip
        self._grow: Callable[..., Any] = getattr(found, f"grow_{KINDS[embedding.dtype]}")
        self._grow.argtypes = [POINTER(_Network), POINTER(_Growth)]
        self._room: Callable[..., int] = found.growing_workspace
        found.growing_workspace.restype = c_int64
        found.growing_workspace.argtypes = [POINTER(_Network), *[c_int64] * 3]

    def grow(
        self,
        states: Sequence[Float[Tensor, "1 N D"]],
        rows: Sequence[int],
        tokens: Sequence[int],
        cos: Float[Tensor, "1 P 1 r"],
        sin: Float[Tensor, "1 P 1 r"],
        cache: Cache,
        mixed: bool,
    ) -> Grown:
        """Read the pairs that are new, and draft after the last of them; the cache's length does not change.

        Args:
            states: the target's states after each tap.
            rows: those of these pairs.
            tokens: of these pairs, W.
            cos, sin: of their places and those of all levels of the tree but the last, P = W + levels - 1.
            cache: of one row, with slots for these pairs and the nodes that get children after its length.
            mixed: ``states`` are features already, a single tensor of them.
        """
        assert mixed or self.mixes, "the mixture is not part of the call"
        read, sizes, fresh = [each.contiguous() for each in states], self.sizes, len(tokens)
        length, threads = cache.written[0], torch.get_num_threads()
        slots = cache.begin + length + fresh + (sizes.levels - 1) * sizes.width
        assert slots <= cache.capacity, f"{slots} slots in a cache of {cache.capacity}"
        ids, parents = torch.empty(2, 1, sizes.nodes, dtype=torch.long)
        scores = torch.empty(1, sizes.nodes)
        work = torch.empty(self._room(byref(self._network), fresh, length, threads))
        given, places, grown = (c_int64 * fresh)(*tokens), (c_int64 * fresh)(*rows), c_int64()
        taps = (c_void_p * len(read))(*(each.data_ptr() for each in read))
        described = _Growth(
            ctypes.addressof(taps), ctypes.addressof(places), mixed, ctypes.addressof(given), fresh,
            cos.data_ptr(), sin.data_ptr(), cos.shape[-1],
            cache.store.data_ptr(), cache.begin, length, cache.capacity,
            ids.data_ptr(), parents.data_ptr(), scores.data_ptr(), ctypes.addressof(grown), work.data_ptr(), threads,
        )  # fmt: skip
        self._grow(byref(self._network), byref(described))
        nodes = min(sizes.nodes, sizes.width + (grown.value - 1) * sizes.width**2)
        return Grown(ids[:, :nodes], parents[:, :nodes], scores[:, :nodes], grown.value)

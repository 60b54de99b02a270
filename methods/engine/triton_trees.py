"""Triton kernels of draft trees that grow level by level, see ``methods.speculative.ranked_tree``.

One program makes a level of one row, and one chooses the nodes of its tree. Scores are 32 bit; of equal ones the first
is the best, and what is chosen is exactly what torch's operators choose. Other kernels make what a draft network reads:
the tokens that a round kept, and pairs of a feature and a token. Nothing is read from the device.

Without a GPU the kernels run in Triton's interpreter, see ``methods.engine.triton_kernels``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.standard import _elementwise_max, _sum_combine

_MOST_CHILDREN = 16  # of a node: all pairs of a level's candidates are compared at once
_MOST_CANDIDATES = 4096  # of a row
_LEAST = tl.constexpr(-(2**31))
_LARGE_LEVEL, _LARGE_ROW = 256, 2048  # from here on a row takes more threads


def takes(top_k: int, levels: int) -> bool:
    """Whether the kernels make trees of such sizes."""
    return top_k <= _MOST_CHILDREN and top_k + (levels - 1) * top_k**2 <= _MOST_CANDIDATES


@dataclass(frozen=True, slots=True)
class Candidates:
    """Room for all candidates of a tree, level by level.

    Attributes:
        scores: log-probabilities of the paths to them.
        tokens: ids.
        parents: columns here; -1: the root.
    """

    scores: Float[Tensor, "B C"]
    tokens: Int[Tensor, "B C"]
    parents: Int[Tensor, "B C"]

    @classmethod
    def room(cls, batch: int, count: int, device: torch.device) -> Candidates:
        """Of ``count`` candidates in each row."""
        tokens, parents = torch.empty(2, batch, count, dtype=torch.long, device=device)
        return cls(torch.empty(batch, count, device=device), tokens, parents)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The best candidates of a level, the best first.

    Attributes:
        scores: see ``Candidates``.
        tokens: ids.
        source: which of those chosen on the level before is the parent of each; 0 on the first level.
        columns: in ``Candidates``.
    """

    scores: Float[Tensor, "B k"]
    tokens: Int[Tensor, "B k"]
    source: Int[Tensor, "B k"]
    columns: Int[Tensor, "B k"]


# -- a level ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["start", "room"])
@no_type_check
def _next_level(
    ABOVE,
    ABOVE_COLUMNS,
    GAINED,
    PLACES,
    IDS,
    SCORES,
    TOKENS,
    PARENTS,
    BEST,
    BEST_TOKENS,
    SOURCE,
    COLUMNS,
    start,
    room,
    K: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOT: tl.constexpr,
    SHARED: tl.constexpr,
    TABLE: tl.constexpr,
    CHOOSE: tl.constexpr,
) -> None:
    """COUNT candidates of one row. Their order is that of the bits of their scores, with a sign that is turned."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, parent = at < COUNT, at // K
    found = row * K + at % K if SHARED else row * COUNT + at
    scores = tl.load(GAINED + found, mask=inside, other=float("-inf"))
    tokens = tl.load(PLACES + found, mask=inside, other=0)
    if TABLE:
        tokens = tl.load(IDS + tokens, mask=inside, other=0)
    if ROOT:
        columns = tl.full([BLOCK], -1, tl.int64)
    else:
        above = tl.load(ABOVE + row * K + parent, mask=inside, other=float("-inf"))
        columns = tl.load(ABOVE_COLUMNS + row * K + parent, mask=inside, other=0)
        bits = above.to(tl.int32, bitcast=True)
        bits = tl.where(above == 0.0, _LEAST + 1, tl.where(above > 0.0, bits - 1, bits + 1))
        below = tl.where(above > float("-inf"), bits.to(tl.float32, bitcast=True), above)
        scores = tl.minimum(below, above + scores)
    every = row * room + start + at
    tl.store(SCORES + every, scores, mask=inside)
    tl.store(TOKENS + every, tokens, mask=inside)
    tl.store(PARENTS + every, columns, mask=inside)
    if CHOOSE:
        bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
        keys = tl.where(inside, bits ^ ((bits >> 31) & 0x7FFFFFFF), _LEAST)
        ahead = (keys[None, :] == keys[:, None]) & (at[None, :] < at[:, None])
        ahead = ahead | (keys[None, :] > keys[:, None])
        rank = tl.reduce(ahead.to(tl.int32), 1, _sum_combine)
        chosen = inside & (rank < K)
        out = row * K + rank
        tl.store(BEST + out, scores, mask=chosen)
        tl.store(BEST_TOKENS + out, tokens, mask=chosen)
        tl.store(SOURCE + out, (at // K).to(tl.int64), mask=chosen)
        tl.store(COLUMNS + out, (start + at).to(tl.int64), mask=chosen)


def next_level(
    above: Chosen | None,
    gained: Float[Tensor, "B m k"],
    places: Int[Tensor, "B m k"],
    ids: Int[Tensor, "v"] | None,
    candidates: Candidates,
    start: int,
    choose: bool = True,
) -> Chosen | None:
    """Write a level's candidates: the children of those that were chosen on the level before.

    A child's score is below its parent's, also where the child is sure.

    Args:
        above: None: the first level, of ``m = 1``.
        gained: log-probabilities of the children of each of them; ``m = 1``: they share theirs.
        places: of the children in the draft vocabulary.
        ids: of its tokens; None: a place is an id.
        candidates: where these are written.
        start: the column of the first.
        choose: find the best of them.

    Returns:
        The best k; None: they are not asked for.
    """
    batch, shared, k = len(gained), gained.shape[1] == 1, gained.shape[2]
    count, room, device = k if above is None else k * k, candidates.scores.shape[1], gained.device
    best = torch.empty(batch, k, device=device)
    tokens, source, columns = torch.empty(3, batch, k, dtype=torch.long, device=device)
    _next_level[(batch,)](
        *((best, columns) if above is None else (above.scores, above.columns)),
        *(gained.contiguous(), places.contiguous(), places if ids is None else ids),
        *(candidates.scores, candidates.tokens, candidates.parents, best, tokens, source, columns, start, room),
        K=k, COUNT=count, BLOCK=triton.next_power_of_2(count), ROOT=above is None, SHARED=shared,
        TABLE=ids is not None, CHOOSE=choose, num_warps=8 if count > _LARGE_LEVEL // 2 else 4,
    )  # fmt: skip
    return Chosen(best, tokens, source, columns) if choose else None


# -- the tree ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["count", "room"])
@no_type_check
def _best_nodes(
    SCORES, TOKENS, PARENTS, NODE_TOKENS, NODE_PARENTS, GAINS, count, room, NODES: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """One row. The least score that is kept is found digit by digit: its bits, ordered as the scores are."""
    row, at, digit = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, 16)
    inside = at < count
    scores = tl.load(SCORES + row * room + at, mask=inside, other=float("-inf"))
    tokens = tl.load(TOKENS + row * room + at, mask=inside, other=0)
    parents = tl.load(PARENTS + row * room + at, mask=inside, other=0).to(tl.int32)
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF) ^ _LEAST).to(tl.uint32, bitcast=True)
    keys = tl.where(inside, keys, 0)
    least = tl.full([16], 0, tl.uint32)
    for number in tl.static_range(8):
        tried = least + (digit << (28 - 4 * number)).to(tl.uint32, bitcast=True)
        held = tl.reduce((keys[None, :] >= tried[:, None]).to(tl.int32), 1, _sum_combine)
        least += tl.reduce(tl.where(held >= NODES, tried - least, 0), 0, _elementwise_max)
    least = tl.reduce(least, 0, _elementwise_max)
    better, equal = keys > least, keys == least
    left = NODES - tl.reduce(better.to(tl.int32), 0, _sum_combine)
    kept = better | (equal & (tl.associative_scan(equal.to(tl.int32), 0, _sum_combine) <= left))
    place = tl.associative_scan(kept.to(tl.int32), 0, _sum_combine) - 1
    above = tl.where(parents < 0, -1, tl.gather(place, tl.maximum(parents, 0), 0))
    out = row * NODES + place
    tl.store(NODE_TOKENS + out, tokens, mask=kept)
    tl.store(NODE_PARENTS + out, above.to(tl.int64), mask=kept)
    tl.store(GAINS + out, tl.exp(scores), mask=kept)


def best_nodes(
    candidates: Candidates, count: int, nodes: int
) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"], Float[Tensor, "B N"]]:
    """The best ``nodes`` of the first ``count`` candidates, in the order of their columns.

    Returns:
        Tokens, parents (as columns of the result; -1: the root) and probabilities of their paths.
    """
    batch, room = candidates.scores.shape
    nodes, block, device = min(nodes, count), triton.next_power_of_2(count), candidates.scores.device
    tokens, parents = torch.empty(2, batch, nodes, dtype=torch.long, device=device)
    gains = torch.empty(batch, nodes, device=device)
    _best_nodes[(batch,)](
        *(candidates.scores, candidates.tokens, candidates.parents, tokens, parents, gains, count, room),
        NODES=nodes, BLOCK=block, num_warps=8 if block >= _LARGE_ROW else 4,
    )  # fmt: skip
    return tokens, parents, gains


# -- what a draft network reads ---------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["width"])
@no_type_check
def _kept_tokens(REPORT, FOLLOWING, COUNTS, width, BLOCK: tl.constexpr) -> None:
    """One row: its bonus, ``width`` kept nodes, and the tokens of its draft nodes but the root."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, report = at < width, REPORT + row * 2 * width
    path = tl.load(report + 1 + at, mask=inside, other=-1)
    count = tl.reduce((path >= 0).to(tl.int32), 0, _sum_combine)
    tokens = tl.load(report + 1 + width + at, mask=at < width - 1, other=0)
    tokens = tl.where(at == count - 1, tl.load(report), tokens)
    tl.store(FOLLOWING + row * width + at, tl.maximum(tokens, 0), mask=inside)
    tl.store(COUNTS + row, count.to(tl.int64))


def kept_tokens(report: Int[Tensor, "B R"]) -> tuple[Int[Tensor, "B P"], Int[Tensor, "B"]]:
    """The tokens after those that a round kept, and how many these are; see ``recorded_network.KeptTokens``.

    Args:
        report: see ``methods.engine.greedy_round.Round``.
    """
    batch, width = len(report), report.shape[1] // 2
    following = torch.empty(batch, width, dtype=torch.long, device=report.device)
    counts = torch.empty(batch, dtype=torch.long, device=report.device)
    block = triton.next_power_of_2(width)
    _kept_tokens[(batch,)](report.contiguous(), following, counts, width, BLOCK=block, num_warps=1)
    return following, counts


@triton.jit(do_not_specialize=["nodes", "given", "place", "last", "earlier"])
@no_type_check
def _enter_pairs(
    FEATURE,
    SOURCE,
    TOKENS,
    EMBEDDING,
    TOKEN_WEIGHT,
    FEATURE_WEIGHT,
    COS_TABLE,
    SIN_TABLE,
    LENGTH,
    ABOVE_BITS,
    RESIDUAL,
    READ,
    COS,
    SIN,
    BITS,
    eps,
    nodes,
    given,
    place,
    last,
    earlier,
    WIDTH,
    TURNED,
    BLOCK: tl.constexpr,
    TURNED_BLOCK: tl.constexpr,
    FOLLOW: tl.constexpr,
    SHARED: tl.constexpr,
    CHAIN: tl.constexpr,
    NORM: tl.constexpr,
    NORM_RESIDUAL: tl.constexpr,
) -> None:
    """One pair of one row."""
    at = tl.program_id(0).to(tl.int64)
    batch, node = at // nodes, at % nodes
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    from_ = node * 0 if SHARED else node
    if FOLLOW:
        from_ = tl.load(SOURCE + at)
    feature = tl.load(FEATURE + (batch * given + from_) * WIDTH + column, mask=inside, other=0.0)
    embedding = tl.load(EMBEDDING + tl.load(TOKENS + at) * WIDTH + column, mask=inside, other=0.0)
    residual = feature
    if NORM:
        x = embedding.to(tl.float32)
        x = x * tl.rsqrt(tl.reduce(x * x, 0, _sum_combine) / WIDTH + eps)
        weight = tl.load(TOKEN_WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
        embedding = (x * weight).to(embedding.dtype)
        x = feature.to(tl.float32)
        x = x * tl.rsqrt(tl.reduce(x * x, 0, _sum_combine) / WIDTH + eps)
        weight = tl.load(FEATURE_WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
        feature = (x * weight).to(feature.dtype)
    if NORM_RESIDUAL:
        residual = feature
    tl.store(READ + at * 2 * WIDTH + column, embedding, mask=inside)
    tl.store(READ + (at * 2 + 1) * WIDTH + column, feature, mask=inside)
    tl.store(RESIDUAL + at * WIDTH + column, residual, mask=inside)
    position = tl.load(LENGTH + batch) + place
    if CHAIN:
        position += node
    position = tl.minimum(position, last)
    turn = tl.arange(0, TURNED_BLOCK)
    turned = turn < TURNED
    cos = tl.load(COS_TABLE + position * TURNED + turn, mask=turned, other=0.0)
    sin = tl.load(SIN_TABLE + position * TURNED + turn, mask=turned, other=0.0)
    tl.store(COS + at * TURNED + turn, cos, mask=turned)
    tl.store(SIN + at * TURNED + turn, sin, mask=turned)
    if not CHAIN:
        bits = (node * 0 + 1) << (earlier + node)
        if FOLLOW:
            bits |= tl.load(ABOVE_BITS + batch * given + from_)
        tl.store(BITS + at, bits)


def enter_pairs(
    feature: Float[Tensor, "B m D"],
    tokens: Int[Tensor, "B M"],
    embedding: Float[Tensor, "V D"],
    norms: tuple[Float[Tensor, "D"], Float[Tensor, "D"], float] | None,
    norm_residual: bool,
    table: tuple[Float[Tensor, "S 1 r"], Float[Tensor, "S 1 r"]],
    length: Int[Tensor, "B"],
    last: int,
    level: int | None = None,
    source: Int[Tensor, "B M"] | None = None,
    above: Int[Tensor, "B m"] | None = None,
    earlier: int = 0,
) -> tuple[
    Float[Tensor, "B M D"],
    Float[Tensor, "B M E"],
    Float[Tensor, "B M 1 r"],
    Float[Tensor, "B M 1 r"],
    Int[Tensor, "B M"] | None,
]:
    """Pairs of a feature and the token after it.

    Args:
        feature: of each pair; of a level of guesses, after the nodes of the level before, or after the root.
        embedding: of all tokens.
        norms: RMSNorms of the embeddings and of the features: their weights, and what is added to the mean square;
            None: neither is normalised.
        norm_residual: the residual is the feature after its norm.
        table: cosines and sines of all positions.
        length: pairs of each row before these.
        last: the last position that is looked up.
        level: of guesses, which all are at one position; None: a chain of pairs.
        source: of guesses, which node of the level before is the parent of each; None: the root.
        above: which guesses the nodes of the level before see, see ``triton_kernels.pack_bits``.
        earlier: guesses before these.

    Returns:
        The residuals; the embeddings and the features side by side; cosines and sines of the positions; which guesses
        each sees, its ancestors and itself, None of a chain.
    """
    (batch, given, width), nodes = feature.shape, tokens.shape[1]
    turned, chain, device = table[0].shape[-1], level is None, feature.device
    residual = torch.empty(batch, nodes, width, dtype=feature.dtype, device=device)
    read = torch.empty(batch, nodes, 2 * width, dtype=feature.dtype, device=device)
    cos, sin = torch.empty(2, batch, nodes, 1, turned, dtype=table[0].dtype, device=device)
    bits = torch.empty(batch, nodes, dtype=torch.long, device=device)
    token_weight, feature_weight, eps = norms or (embedding, embedding, 0.0)
    _enter_pairs[(batch * nodes,)](
        *(feature.contiguous(), bits if source is None else source.contiguous(), tokens.contiguous()),
        *(embedding.contiguous(), token_weight, feature_weight, *table, length, bits if above is None else above),
        *(residual, read, cos, sin, bits, eps, nodes, given, level or 0, last, earlier, width, turned),
        BLOCK=triton.next_power_of_2(width), TURNED_BLOCK=triton.next_power_of_2(turned), FOLLOW=source is not None,
        SHARED=given == 1, CHAIN=chain, NORM=norms is not None, NORM_RESIDUAL=norm_residual,
        num_warps=8 if width >= _LARGE_ROW else 4,
    )  # fmt: skip
    return residual, read, cos, sin, None if chain else bits

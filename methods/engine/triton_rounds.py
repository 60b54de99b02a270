"""Triton kernels of what is around the layers in a round of greedy decoding.

Before them one kernel embeds the nodes, gathers their rotary tables and finds what they see. After them two find the
most likely tokens, one settles which nodes are kept, and one packs these in the cache; ``methods.engine.greedy_round``
and ``Cache.pack`` do the same in torch, in some fifty small kernels. As in ``methods.engine.triton_kernels``, what
differs from round to round is read on the device.

Nodes that a node sees are the bits of one number, so that passes have up to ``MOST_NODES`` of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.standard import _elementwise_max, _sum_combine

from methods.engine.greedy_round import kept_nodes
from methods.engine.kv_cache import Cache
from methods.engine.token_tree import ABSENT, Parents, closure_steps

_VOCABULARY = 2048  # columns whose largest one program finds
_LEAST = tl.constexpr(-(2**63))  # below the key of any number
_ABSENT = tl.constexpr(ABSENT)
_MOST_MOVED = 4096  # numbers of a head that one program moves
_LARGE_ROW = 2048  # from here on an embedded row takes more threads


@triton.jit
@no_type_check
def _count_bits(x):
    """Bits that are set in numbers of 64 bit."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    x = x + (x >> 32)
    return x & 0x7F


# -- before the layers ------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["nodes", "steps", "positions"])
@no_type_check
def _lay_out(
    TOKENS,
    PARENTS,
    EMBEDDING,
    FACTOR,
    COS,
    SIN,
    LENGTH,
    HIDDEN,
    TURN_COS,
    TURN_SIN,
    BITS,
    nodes,
    steps,
    positions,
    width,
    embedding_row,
    cos_row,
    cos_column,
    sin_row,
    sin_column,
    TURNED: tl.constexpr,
    SCALE: tl.constexpr,
    TREE: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    TABLE: tl.constexpr,
) -> None:
    """One node: its embedding, its rows of the rotary tables, and the nodes that it sees."""
    at = tl.program_id(0).to(tl.int64)
    batch, node = at // nodes, at % nodes
    column = tl.arange(0, BLOCK)
    token = tl.maximum(tl.load(TOKENS + at), 0)
    x = tl.load(EMBEDDING + token * embedding_row + column, mask=column < width, other=0.0)
    if SCALE:
        x = (x.to(tl.float32) * tl.load(FACTOR).to(tl.float32)).to(x.dtype)
    tl.store(HIDDEN + at * width + column, x, mask=column < width)
    depth = node
    if TREE:
        place = tl.arange(0, NODES)
        drafted = (place > 0) & (place < nodes)
        above = tl.load(PARENTS + batch * (nodes - 1) + place - 1, mask=drafted, other=-1).to(tl.int32) + 1
        one = tl.full([NODES], 1, tl.int64)
        bits = (one << place) | (one << above)
        for _ in range(steps):  # each time from twice as many levels above
            bits = bits | tl.gather(bits, above, 0)
            above = tl.gather(above, above, 0)
        own = tl.reduce(tl.where(place == node, bits, 0), 0, _sum_combine)
        tl.store(BITS + at, own)
        depth = _count_bits(own) - 1
    position = tl.load(LENGTH + batch) + depth
    turned = tl.arange(0, TABLE)
    inside = (turned < TURNED) & (position < positions)
    cos = tl.load(COS + position * cos_row + turned * cos_column, mask=inside, other=0.0)
    sin = tl.load(SIN + position * sin_row + turned * sin_column, mask=inside, other=0.0)
    tl.store(TURN_COS + at * TURNED + turned, cos, mask=turned < TURNED)
    tl.store(TURN_SIN + at * TURNED + turned, sin, mask=turned < TURNED)


class Laid(NamedTuple):
    """What layers read of a pass: embeddings, rotary tables, and what each node sees (None: a chain)."""

    hidden: Float[Tensor, "B M D"]
    cos: Float[Tensor, "B M 1 r"]
    sin: Float[Tensor, "B M 1 r"]
    bits: Int[Tensor, "B M"] | None


def lay_out(
    tokens: Int[Tensor, "B M"],
    parents: Parents,
    levels: int | None,
    embedding: Float[Tensor, "V D"],
    factor: Float[Tensor, ""] | None,
    cos: Float[Tensor, "1 S 1 r"],
    sin: Float[Tensor, "1 S 1 r"],
    length: Int[Tensor, "B"],
) -> Laid:
    """Nodes of a pass as the layers read them; see ``CausalLM.begin``.

    Args:
        tokens: the root in front; those below 0 are embedded as 0 is.
        parents: of the other nodes; None: a chain.
        levels: of the tree, if known.
        embedding: of all tokens.
        factor: of the embeddings; None: 1.
        cos, sin: of all positions.
        length: tokens of each row before the pass.
    """
    batch, nodes = tokens.shape
    width, turned = embedding.shape[1], cos.shape[-1]
    hidden = embedding.new_empty(batch, nodes, width)
    turns = cos.new_empty(2, batch, nodes, 1, turned)
    bits = None if parents is None else torch.empty_like(tokens, memory_format=torch.contiguous_format)
    _lay_out[(batch * nodes,)](
        *(tokens.contiguous(), length if parents is None else parents.contiguous()),
        *(embedding, embedding if factor is None else factor, cos, sin, length),
        *(hidden, turns[0], turns[1], length if bits is None else bits),
        *(nodes, closure_steps(levels or nodes), cos.shape[1], width, embedding.stride(0)),
        *(cos.stride(1), cos.stride(3), sin.stride(1), sin.stride(3)),
        TURNED=turned, SCALE=factor is not None, TREE=bits is not None, NODES=triton.next_power_of_2(nodes),
        BLOCK=triton.next_power_of_2(width), TABLE=triton.next_power_of_2(turned),
        num_warps=4 if width >= _LARGE_ROW else 1,
    )  # fmt: skip
    return Laid(hidden, turns[0], turns[1], bits)


# -- the most likely token --------------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def _best_of_chunk(LOGITS, TOPS, width, chunks, BLOCK: tl.constexpr) -> None:
    """BLOCK columns of one row: the largest number and its column in one integer, see ``_top_of_chunk``."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(LOGITS + row * width + column, mask=inside, other=float("-inf")).to(tl.float32)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
    tl.store(TOPS + row * chunks + chunk, tl.reduce(tl.where(inside, keys, _LEAST), 0, _elementwise_max))


@triton.jit
@no_type_check
def _best_of_row(TOPS, IDS, chunks, CHUNKS: tl.constexpr) -> None:
    """One row: the column of the largest number of its chunks."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    keys = tl.load(TOPS + row * chunks + part, mask=part < chunks, other=_LEAST)
    tl.store(IDS + row, 0x7FFFFFFF - (tl.reduce(keys, 0, _elementwise_max) & 0x7FFFFFFF))


def argmax(logits: Float[Tensor, "*batch V"]) -> Int[Tensor, "*batch"]:
    """The most likely token of each row, of equal ones the first; see ``methods.engine.sampling.argmax``."""
    width = logits.shape[-1]
    rows = logits.reshape(-1, width).contiguous()
    count, chunks = len(rows), triton.cdiv(width, _VOCABULARY)
    tops = torch.empty(count, chunks, dtype=torch.long, device=logits.device)
    ids = torch.empty(logits.shape[:-1], dtype=torch.long, device=logits.device)
    block = min(triton.next_power_of_2(width), _VOCABULARY)
    _best_of_chunk[(count, chunks)](rows, tops, width, chunks, BLOCK=block)
    _best_of_row[(count,)](tops, ids, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1)
    return ids


# -- the kept nodes ---------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["nodes", "most", "places", "wanted_batch", "wanted_node"])
@no_type_check
def _settle(
    TOKENS,
    PARENTS,
    BITS,
    WANTED,
    LENGTH,
    BONUS,
    REPORT,
    PATH,
    KEPT,
    MOVED,
    nodes,
    most,
    places,
    wanted_batch,
    wanted_node,
    TREE: tl.constexpr,
    NODES: tl.constexpr,
) -> None:
    """One row: of the nodes that the target wants with all above them, the line to the deepest one."""
    row, node = tl.program_id(0).to(tl.int64), tl.arange(0, NODES)
    inside, drafted = node < nodes, (node > 0) & (node < nodes)
    token = tl.load(TOKENS + row * nodes + node, mask=inside, other=_ABSENT)
    root = tl.load(TOKENS + row * nodes)
    wanted = tl.load(WANTED + row * wanted_batch + node * wanted_node, mask=inside, other=_ABSENT)
    length = tl.load(LENGTH + row)
    one = tl.full([NODES], 1, tl.int64)
    if TREE:
        above = tl.load(PARENTS + row * (nodes - 1) + node - 1, mask=drafted, other=-1).to(tl.int32) + 1
        seen = tl.load(BITS + row * nodes + node, mask=inside, other=0)
    else:
        above = tl.maximum(node - 1, 0)
        seen = ((one << node) << 1) - 1
    wrong = drafted & (token != tl.gather(wanted, above, 0))
    wrong = tl.reduce(tl.where(wrong, one << node, 0), 0, _sum_combine)
    alive = inside & ((seen & wrong) == 0)
    rank = tl.where(alive, _count_bits(seen) * 64 + 63 - node, -1)  # of equal ones the first node has the highest
    end = 63 - (tl.reduce(rank, 0, _elementwise_max) & 63)
    line = tl.reduce(tl.where(node == end, seen, 0), 0, _sum_combine)
    place = _count_bits(line & ((one << node) - 1))
    moved = tl.reduce(tl.where(((line >> node) & 1) == 1, 1, 0), 0, _sum_combine)
    moved = tl.minimum(moved, most)
    kept = (((line >> node) & 1) == 1) & (place < moved)
    bonus = tl.reduce(tl.where(kept & (place == moved - 1), wanted, 0), 0, _sum_combine)
    out = REPORT + row * 2 * places
    tl.store(BONUS + row, bonus)
    tl.store(out, bonus)
    tl.store(out + 1 + place, node.to(tl.int64), mask=kept)
    tl.store(out + places + place, token, mask=kept & (place > 0))
    tl.store(KEPT + row * places + place, node.to(tl.int64), mask=kept)
    after = (node >= moved) & (node < places)
    tl.store(out + 1 + node, _ABSENT, mask=after)
    tl.store(out + places + node, root, mask=after)
    tl.store(KEPT + row * places + node, 0, mask=after)
    tl.store(PATH + row * places + node, tl.where(after, _ABSENT, node), mask=node < places)
    tl.store(MOVED + row, moved.to(tl.int64))
    tl.store(LENGTH + row, length + moved)


class Settled(NamedTuple):
    """What a round keeps, see ``greedy_round.Round``.

    Attributes:
        bonus, report, path: of a round.
        kept: nodes on the path, 0 after the last.
        moved: tokens committed.
    """

    bonus: Int[Tensor, "B"]
    report: Int[Tensor, "B R"]
    path: Int[Tensor, "B P"]
    kept: Int[Tensor, "B P"]
    moved: Int[Tensor, "B"]


def settle(
    tokens: Int[Tensor, "B M"],
    parents: Parents,
    bits: Int[Tensor, "B M"] | None,
    levels: int,
    places: int,
    wanted: Int[Tensor, "B M"],
    length: Int[Tensor, "B"],
) -> Settled:
    """What ``greedy_round.kept_path`` and ``settled`` find; the lengths grow.

    Args:
        tokens: of the nodes, the root in front; ``ABSENT``: there is none.
        parents: of the other nodes; None: a chain.
        bits: nodes that each node sees, see ``lay_out``; None: a chain.
        levels: of the tree, or more.
        places: P, for nodes that are kept.
        wanted: the target's token after each node.
        length: tokens of each row before the pass.
    """
    batch, nodes = tokens.shape
    bonus, moved = tokens.new_empty(2, batch)
    report = tokens.new_empty(batch, 2 * places)
    path, kept = tokens.new_empty(2, batch, places)
    tree = (length, length) if parents is None or bits is None else (parents.contiguous(), bits)
    _settle[(batch,)](
        *(tokens.contiguous(), *tree, wanted, length, bonus, report, path, kept, moved),
        *(nodes, min(levels + 1, nodes, places), places, wanted.stride(0), wanted.stride(1)),
        TREE=bits is not None, NODES=triton.next_power_of_2(nodes), num_warps=1,
    )  # fmt: skip
    return Settled(bonus, report, path, kept, moved)


@triton.jit(do_not_specialize=["places"])
@no_type_check
def _pack(
    STORE,
    PATH,
    LENGTH,
    MOVED,
    places,
    path_batch,
    store_layer,
    store_batch,
    store_slot,
    store_head,
    BATCH: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK columns of one head of one row in one layer: all kept nodes are read before one is written."""
    at = tl.program_id(0).to(tl.int64)
    head, row, layer = at % HEADS, at // HEADS % BATCH, at // HEADS // BATCH
    place, column = tl.arange(0, PLACES), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    node = tl.load(PATH + row * path_batch + place, mask=place < places, other=_ABSENT)
    root = tl.load(LENGTH + row) - tl.load(MOVED + row)
    moves = ((node > 0) & (node != place))[:, None] & (column < DIM)[None, :]
    begin = STORE + layer * store_layer + row * store_batch + head * store_head + root * store_slot
    heads = tl.load(begin + node[:, None] * store_slot + column[None, :], mask=moves, other=0.0)
    tl.debug_barrier()
    tl.store(begin + place.to(tl.int64)[:, None] * store_slot + column[None, :], heads, mask=moves)


def pack(
    store: Float[Tensor, "L B S KV d"], path: Int[Tensor, "B P"], length: Int[Tensor, "B"], moved: Int[Tensor, "B"]
) -> None:
    """Move the kept nodes of a pass together, see ``Cache.pack``.

    Args:
        store: see ``Cache``.
        path: the kept nodes, the root in front; ``ABSENT`` after the last.
        length: tokens of each row, the kept ones among them.
        moved: how many these are.
    """
    layers, batch, _, heads, dim = store.shape
    places = path.shape[1]
    lines = triton.next_power_of_2(places)
    block = min(triton.next_power_of_2(dim), max(_MOST_MOVED // lines, 16))
    _pack[(layers * batch * heads, triton.cdiv(dim, block))](
        *(store, path, length, moved, places, path.stride(0), *store.stride()[:4]),
        BATCH=batch, HEADS=heads, DIM=dim, PLACES=lines, BLOCK=block, num_warps=4 if lines * block > 1024 else 1,
    )  # fmt: skip


def end_round(
    tokens: Int[Tensor, "B M"],
    parents: Parents,
    bits: Int[Tensor, "B M"] | None,
    levels: int,
    places: int,
    wanted: Int[Tensor, "B M"],
    states: Sequence[Float[Tensor, "B M _"]],
    cache: Cache,
) -> tuple[Int[Tensor, "B"], Int[Tensor, "B P"], Int[Tensor, "B R"], list[Float[Tensor, "B P _"]]]:
    """See ``greedy_round.end_round``; ``bits`` are in the place of ``reach``."""
    found = settle(tokens, parents, bits, levels, places, wanted, cache.length)
    if parents is None:
        return found.bonus, found.path, found.report, list(states)
    pack(cache.store, kept_nodes(found.report), cache.length, found.moved)
    nodes = found.kept[:, :, None]
    kept = [each.gather(1, nodes.expand(-1, -1, each.shape[2])) for each in states]
    return found.bonus, found.path, found.report, kept

"""Triton kernels of a pass over few nodes: attention to a cache, and what is between the products of a layer.

Everything that differs from pass to pass is read on the device: the rows' lengths and the tree. Grids and addresses
depend on shapes alone, so a CUDA graph of a pass is valid for all lengths up to the cache's capacity.

Attention cuts the keys of a row into splits that run at the same time, and merges them by the logarithms of their sums
(Flash-Decoding, Dao et al. 2023). Sums are in 32 bit. The other kernels round where torch's operators do.

``*_eager`` are the same functions in torch. Without a GPU the kernels run in Triton's interpreter, if
TRITON_INTERPRET=1 is set before this module is imported. It multiplies no bfloat16, and rounds to it towards zero.
"""

from __future__ import annotations

from functools import cache
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor
from triton.language.standard import (
    _elementwise_max,
    _sum_combine,
)  # tl.max and tl.sum, also for an interpreter set late

MOST_NODES = 64  # of a pass: the ancestors of a node are the bits of one number
_LEAST_TILE = 16  # rows, keys and numbers of a head that a product on the device takes
_MOST_ROWS = {2: 64, 4: 16}  # of a tile, by the bytes of a number: products in 32 bit are long code
_KEYS = {2: 64, 4: 32}  # of a tile
_MOST_SPLITS = 32
_HEADS = 8  # that one program turns
_COLUMNS = 1024  # that one program gates
_VOCABULARY = 1024  # columns whose largest one program finds
_LEAST = tl.constexpr(-(2**63))  # below the key of any number
_LARGE_ROW = 2048  # from here on a row of a norm takes more threads
_PROGRAMS = 4  # that the interpreter runs, one after another


# -- attention --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["nodes", "earlier", "capacity"])
@no_type_check
def _attend_split(
    QUERY,
    STORE,
    LENGTH,
    BITS,
    OUT,
    ACC,
    BEST,
    TOTAL,
    scale,
    nodes,
    earlier,
    capacity,
    store_batch,
    store_slot,
    store_head,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TREE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """One key head of one row of the batch, one split of its keys, ROWS of its nodes * GROUPS queries."""
    pair, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = pair // KV_HEADS, pair % KV_HEADS
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    node = row // GROUPS
    asked = row < nodes * GROUPS
    at = ((batch * nodes + node) * KV_HEADS + head) * GROUPS + row % GROUPS
    column = tl.arange(0, WIDTH)
    inside = asked[:, None] & (column < DIM)[None, :]
    query = tl.load(QUERY + at[:, None] * DIM + column[None, :], mask=inside, other=0.0)
    if WIDEN:
        query = query.to(tl.float32)
    length = tl.load(LENGTH + batch).to(tl.int32)
    end = tl.minimum(length + earlier + nodes, capacity)
    tiles = (end + KEYS - 1) // KEYS
    each = (tiles + SPLITS - 1) // SPLITS
    if TREE:
        bits = tl.load(BITS + batch * nodes + node, mask=asked, other=0)
    keys = STORE + batch * store_batch + head * store_head
    values = keys + KV_HEADS * store_head
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, WIDTH], 0.0, tl.float32)
    for tile in range(split * each, tl.minimum((split + 1) * each, tiles)):
        slot = tile * KEYS + tl.arange(0, KEYS)
        held = (slot < end)[:, None] & (column < DIM)[None, :]
        place = slot.to(tl.int64)[:, None] * store_slot + column[None, :]
        key = tl.load(keys + place, mask=held, other=0.0)
        value = tl.load(values + place, mask=held, other=0.0)
        if WIDEN:
            key, value = key.to(tl.float32), value.to(tl.float32)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        of_pass = slot - length  # the node whose key the slot holds; below 0: committed
        if TREE:
            shift = tl.minimum(tl.maximum(of_pass, 0), 63)
            seen = (of_pass < 0)[None, :] | (((bits[:, None] >> shift[None, :]) & 1) == 1)
        else:
            seen = of_pass[None, :] <= earlier + node[:, None]
        scores = tl.where(seen & (slot < end)[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.reduce(scores, 1, _elementwise_max))
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
        weights = tl.exp(scores - finite[:, None])
        shrink = tl.exp(best - finite)
        total = total * shrink + tl.reduce(weights, 1, _sum_combine)
        acc = acc * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        best = higher
    if SPLITS == 1:
        share = acc / tl.where(asked, total, 1.0)[:, None]
        tl.store(OUT + at[:, None] * DIM + column[None, :], share.to(OUT.dtype.element_ty), mask=inside)
    else:
        part = at * SPLITS + split
        tl.store(ACC + part[:, None] * DIM + column[None, :], acc, mask=inside)
        tl.store(BEST + part, best, mask=asked)
        tl.store(TOTAL + part, total, mask=asked)


@triton.jit
@no_type_check
def _merge_splits(ACC, BEST, TOTAL, OUT, DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr) -> None:
    """One query: the mean of its splits, weighted by their sums."""
    query, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    part = query * SPLITS + tl.arange(0, SPLITS)
    best = tl.load(BEST + part)
    weights = tl.exp(best - tl.reduce(best, 0, _elementwise_max))
    total = tl.reduce(weights * tl.load(TOTAL + part), 0, _sum_combine)
    acc = tl.load(ACC + part[:, None] * DIM + column[None, :], mask=(column < DIM)[None, :], other=0.0)
    mixed = tl.reduce(acc * weights[:, None], 0, _sum_combine) / total
    tl.store(OUT + query * DIM + column, mixed.to(OUT.dtype.element_ty), mask=column < DIM)


def attend(
    query: Float[Tensor, "B M H d"],
    store: Float[Tensor, "B S KV d"],
    length: Int[Tensor, "B"],
    bits: Int[Tensor, "B M"] | None,
    scale: float,
    splits: int | None = None,
    earlier: int = 0,
) -> Float[Tensor, "B M H d"]:
    """Attention of the nodes of a pass to the tokens before it, and to those nodes of it that they see.

    Args:
        query: after the rotary embedding.
        store: K key heads of a slot, then K value heads (``Cache.store``); those of the pass are in it already.
        length: tokens of each row before the pass.
        bits: of the earlier nodes and of these that each node sees, see ``pack_bits``; None: a chain.
        scale: of the scores.
        splits: of the keys of a row, a power of 2; None: as many as keep the device busy.
        earlier: nodes that were run before and are not part of the rows' lengths.
    """
    batch, nodes, heads, dim = query.shape
    capacity, kv_heads = store.shape[1], store.shape[2] // 2
    groups, width = heads // kv_heads, _tile(dim)
    rows, keys = min(_tile(nodes * groups), _MOST_ROWS[query.element_size()]), _KEYS[query.element_size()]
    tiles = triton.cdiv(nodes * groups, rows)
    splits = splits or _splits(batch * kv_heads * tiles, triton.cdiv(capacity, keys), query.device)
    query, out = query.contiguous(), torch.empty_like(query, memory_format=torch.contiguous_format)
    count = batch * nodes * heads if splits > 1 else 0
    acc = torch.empty(count, splits, dim, dtype=torch.float32, device=query.device)
    best, total = torch.empty(2, count, splits, dtype=torch.float32, device=query.device)
    _attend_split[(batch * kv_heads, splits, tiles)](
        *(query, store, length, length if bits is None else bits, out, acc, best, total),
        *(scale, nodes, earlier, capacity, *store.stride()[:3]),
        KV_HEADS=kv_heads, GROUPS=groups, DIM=dim, WIDTH=width, TREE=bits is not None,
        ROWS=rows, KEYS=keys, SPLITS=splits, WIDEN=INTERPRETED and query.dtype == torch.bfloat16, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _merge_splits[(count,)](acc, best, total, out, DIM=dim, WIDTH=width, SPLITS=splits)
    return out


def attend_eager(
    query: Float[Tensor, "B M H d"],
    store: Float[Tensor, "B S KV d"],
    length: Int[Tensor, "B"],
    bits: Int[Tensor, "B M"] | None,
    scale: float,
    earlier: int = 0,
) -> Float[Tensor, "B M H d"]:
    """See ``attend``; all keys at once, in 32 bit."""
    nodes, heads = query.shape[1:3]
    every = earlier + nodes
    keys, values = (part.repeat_interleave(heads // part.shape[2], 2).float() for part in store.chunk(2, dim=2))
    of_pass = (torch.arange(store.shape[1], device=store.device) - length[:, None])[:, None]
    if bits is None:
        seen = of_pass <= torch.arange(earlier, every, device=store.device)[:, None]
    else:
        inside = (of_pass >= 0) & (of_pass < every)
        seen = torch.where(inside, (bits[:, :, None] >> of_pass.clamp(0, every - 1)) & 1 == 1, of_pass < 0)
    scores = torch.einsum("bmhd,bshd->bhms", query.float(), keys) * scale
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhms,bshd->bmhd", weights, values).to(query.dtype)


def pack_bits(reach: Bool[Tensor, "B M G"]) -> Int[Tensor, "B M"]:
    """Bit j of [b, i]: node i sees node j."""
    return (reach.long() << torch.arange(reach.shape[2], device=reach.device)).sum(2)


# -- residuals and norms ----------------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def _add_norm(
    HIDDEN, UPDATE, WEIGHT, SUM, OUT, factor, eps, WIDTH, ADD: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """One row: hidden + factor * update, and its norm."""
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    stored = tl.load(HIDDEN + at, mask=inside, other=0.0)
    if ADD:
        update = tl.load(UPDATE + at, mask=inside, other=0.0).to(tl.float32) * factor
        stored = (stored.to(tl.float32) + update.to(stored.dtype).to(tl.float32)).to(stored.dtype)
        tl.store(SUM + at, stored, mask=inside)
    if NORM:
        x = stored.to(tl.float32)
        rows = x * tl.rsqrt(tl.reduce(x * x, 0, _sum_combine) / WIDTH + eps)
        weight = tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(OUT + at, (rows * weight).to(stored.dtype), mask=inside)


def add_norm(
    hidden: Float[Tensor, "R D"],
    update: Float[Tensor, "R D"] | None,
    weight: Float[Tensor, "D"] | None,
    eps: float = 0.0,
    factor: float = 1.0,
) -> tuple[Float[Tensor, "R D"], Float[Tensor, "R D"]]:
    """``hidden + factor * update``, and that after an RMSNorm.

    Args:
        update: None: nothing is added.
        weight: of the norm; None: no norm, and the sum is both results.
    """
    if update is None and weight is None:
        return hidden, hidden
    rows, width = hidden.shape
    hidden = hidden.contiguous()
    added = hidden if update is None else torch.empty_like(hidden)
    normed = added if weight is None else torch.empty_like(hidden)
    _add_norm[(rows,)](
        *(hidden, hidden if update is None else update.contiguous(), hidden if weight is None else weight),
        *(added, normed, factor, eps, width),
        ADD=update is not None, NORM=weight is not None, BLOCK=triton.next_power_of_2(width),
        num_warps=8 if width >= _LARGE_ROW else 4,
    )  # fmt: skip
    return added, normed


def add_norm_eager(
    hidden: Float[Tensor, "R D"],
    update: Float[Tensor, "R D"] | None,
    weight: Float[Tensor, "D"] | None,
    eps: float = 0.0,
    factor: float = 1.0,
) -> tuple[Float[Tensor, "R D"], Float[Tensor, "R D"]]:
    """See ``add_norm``."""
    added = hidden if update is None else hidden + update * factor
    if weight is None:
        return added, added
    return added, F.rms_norm(added.float(), weight.shape, weight.float(), eps).to(added.dtype)


# -- rotary positions and the cache -----------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["nodes", "earlier", "capacity"])
@no_type_check
def _turn_write(
    HEADS,
    COS,
    SIN,
    LENGTH,
    QUERY,
    STORE,
    nodes,
    earlier,
    capacity,
    table_batch,
    store_batch,
    store_slot,
    store_head,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK heads of one node: queries go to QUERY, keys and values into the cache."""
    at = tl.program_id(0).to(tl.int64)
    batch, node = at // nodes, at % nodes
    head, column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    EVERY: tl.constexpr = QUERIES + 2 * KV_HEADS
    inside = (head < EVERY)[:, None] & (column < DIM)[None, :]
    begin = HEADS + (at * EVERY + head)[:, None] * DIM
    x = tl.load(begin + column[None, :], mask=inside, other=0.0)
    if TURNED > 0:
        turns = inside & (head < QUERIES + KV_HEADS)[:, None] & (column < TURNED)[None, :]
        partner = tl.where(column < TURNED // 2, column + TURNED // 2, column - TURNED // 2)
        swapped = tl.load(begin + partner[None, :], mask=turns, other=0.0).to(tl.float32)
        table = batch * table_batch + node * TURNED + column
        cos = tl.load(COS + table, mask=column < TURNED, other=0.0).to(tl.float32)
        sin = tl.load(SIN + table, mask=column < TURNED, other=0.0).to(tl.float32)
        straight = (x.to(tl.float32) * cos[None, :]).to(x.dtype).to(tl.float32)
        across = (swapped * sin[None, :]).to(x.dtype).to(tl.float32)
        x = tl.where(turns, (straight + across).to(x.dtype), x)
    queries = inside & (head < QUERIES)[:, None]
    tl.store(QUERY + (at * QUERIES + head)[:, None] * DIM + column[None, :], x, mask=queries)
    slot = tl.load(LENGTH + batch) + earlier + node
    kept = inside & (head >= QUERIES)[:, None] & (slot < capacity)
    place = batch * store_batch + slot * store_slot + (head - QUERIES).to(tl.int64)[:, None] * store_head
    tl.store(STORE + place + column[None, :], x, mask=kept)


def turn_write(
    heads: Float[Tensor, "B M E d"],
    cos: Float[Tensor, "b M 1 r"] | None,
    sin: Float[Tensor, "b M 1 r"] | None,
    store: Float[Tensor, "B S KV d"],
    length: Int[Tensor, "B"],
    earlier: int = 0,
) -> Float[Tensor, "B M H d"]:
    """Rotary embedding of queries and keys; keys and values are written after the rows' ends.

    Args:
        heads: H query, K key and K value heads.
        cos, sin: see ``Pass``; None: no rotary embedding.
        store: see ``attend``.
        length: tokens of each row before the pass.
        earlier: see ``attend``.

    Returns:
        The queries.
    """
    batch, nodes, every, dim = heads.shape
    kv_heads = store.shape[2] // 2
    queries = torch.empty(batch, nodes, every - 2 * kv_heads, dim, dtype=heads.dtype, device=heads.device)
    heads = heads.contiguous()
    turned = 0 if cos is None else cos.shape[-1]
    tables = (heads, heads) if cos is None or sin is None else (cos.contiguous(), sin.contiguous())
    table_batch = 0 if len(tables[0]) == 1 else nodes * turned
    block = min(triton.next_power_of_2(every), _HEADS)
    _turn_write[(batch * nodes, triton.cdiv(every, block))](
        *(heads, *tables, length, queries, store, nodes, earlier, store.shape[1], table_batch, *store.stride()[:3]),
        QUERIES=every - 2 * kv_heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=triton.next_power_of_2(dim),
        TURNED=turned, BLOCK=block,
    )  # fmt: skip
    return queries


def turn_write_eager(
    heads: Float[Tensor, "B M E d"],
    cos: Float[Tensor, "b M 1 r"] | None,
    sin: Float[Tensor, "b M 1 r"] | None,
    store: Float[Tensor, "B S KV d"],
    length: Int[Tensor, "B"],
    earlier: int = 0,
) -> Float[Tensor, "B M H d"]:
    """See ``turn_write``."""
    batch, nodes, every, _ = heads.shape
    kv = store.shape[2]
    heads = heads.clone()
    if cos is not None and sin is not None:
        width = cos.shape[-1]
        part = heads[:, :, : every - kv // 2, :width]
        part.copy_(part * cos + part.roll(width // 2, -1) * sin)
    rows = torch.arange(batch, device=heads.device)[:, None]
    slots = length[:, None] + torch.arange(earlier, earlier + nodes, device=heads.device)
    store[rows, slots] = heads[:, :, every - kv :]
    return heads[:, :, : every - kv]


# -- gates ------------------------------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def _gate_up(BOTH, OUT, WIDTH, BLOCK: tl.constexpr) -> None:
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(BOTH + row * 2 * WIDTH + column, mask=inside, other=0.0)
    up = tl.load(BOTH + (row * 2 + 1) * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    swish = (x / (1.0 + tl.exp(-x))).to(gate.dtype).to(tl.float32)
    tl.store(OUT + row * WIDTH + column, (swish * up).to(gate.dtype), mask=inside)


def gate_up(both: Float[Tensor, "R G"]) -> Float[Tensor, "R F"]:
    """SiLU of the first half of each row, times the second."""
    rows, width = both.shape[0], both.shape[1] // 2
    out = torch.empty(rows, width, dtype=both.dtype, device=both.device)
    block = min(triton.next_power_of_2(width), _COLUMNS)
    if rows:
        _gate_up[(rows, triton.cdiv(width, block))](both.contiguous(), out, width, BLOCK=block)
    return out


def gate_up_eager(both: Float[Tensor, "R G"]) -> Float[Tensor, "R F"]:
    """See ``gate_up``."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


# -- the most likely tokens --------------------------------------------------------------------------------------------


@triton.jit
@no_type_check
def _top_of_chunk(LOGITS, TOPS, BEST, TOTAL, width, chunks, K: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """BLOCK columns of one row: the K largest, their maximum, and the sum of exp(x - maximum).

    A number and its column are one integer, which is larger for a larger number, and of equal ones for the first.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(LOGITS + row * width + column, mask=inside, other=float("-inf")).to(tl.float32)
    best = tl.reduce(x, 0, _elementwise_max)
    finite = tl.where(best == float("-inf"), 0.0, best)
    part = row * chunks + chunk
    tl.store(BEST + part, best)
    tl.store(TOTAL + part, tl.reduce(tl.exp(x - finite), 0, _sum_combine))
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
    keys = tl.where(inside, keys, _LEAST)
    for number in tl.static_range(K):
        top = tl.reduce(keys, 0, _elementwise_max)
        tl.store(TOPS + part * K + number, top)
        keys = tl.where(keys == top, _LEAST, keys)


@triton.jit
@no_type_check
def _top_of_row(
    TOPS, BEST, TOTAL, IDS, LOG_PROBS, chunks, K: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr
) -> None:
    """One row: the K largest of its chunks, as columns and log-probabilities."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    best = tl.load(BEST + row * chunks + part, mask=part < chunks, other=float("-inf"))
    total = tl.load(TOTAL + row * chunks + part, mask=part < chunks, other=0.0)
    most = tl.reduce(best, 0, _elementwise_max)
    log_total = most + tl.log(tl.reduce(total * tl.exp(best - most), 0, _sum_combine))
    at = tl.arange(0, BLOCK)
    keys = tl.load(TOPS + row * chunks * K + at, mask=at < chunks * K, other=_LEAST)
    for number in tl.static_range(K):
        top = tl.reduce(keys, 0, _elementwise_max)
        ordered = (top >> 32).to(tl.int32)
        logit = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(IDS + row * K + number, 0x7FFFFFFF - (top & 0x7FFFFFFF))
        tl.store(LOG_PROBS + row * K + number, logit - log_total)
        keys = tl.where(keys == top, _LEAST, keys)


def top_log_probs(
    logits: Float[Tensor, "*batch V"], k: int
) -> tuple[Float[Tensor, "*batch k"], Int[Tensor, "*batch k"]]:
    """Log-probabilities of the k most likely tokens, in 32 bit, and their ids; of equal ones the first."""
    width = logits.shape[-1]
    rows = logits.reshape(-1, width).contiguous()
    count, chunks = len(rows), triton.cdiv(width, _VOCABULARY)
    tops = torch.empty(count, chunks, k, dtype=torch.long, device=logits.device)
    best, total = torch.empty(2, count, chunks, device=logits.device)
    ids = torch.empty(count, k, dtype=torch.long, device=logits.device)
    log_probs = torch.empty(count, k, device=logits.device)
    block = min(triton.next_power_of_2(width), _VOCABULARY)
    _top_of_chunk[(count, chunks)](rows, tops, best, total, width, chunks, K=k, BLOCK=block)
    sizes = {"BLOCK": triton.next_power_of_2(chunks * k), "CHUNKS": triton.next_power_of_2(chunks)}
    _top_of_row[(count,)](tops, best, total, ids, log_probs, chunks, K=k, **sizes)
    shape = *logits.shape[:-1], k
    return log_probs.view(shape), ids.view(shape)


def top_log_probs_eager(
    logits: Float[Tensor, "*batch V"], k: int
) -> tuple[Float[Tensor, "*batch k"], Int[Tensor, "*batch k"]]:
    """See ``top_log_probs``."""
    found, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    return found[..., :k] - logits.float().logsumexp(-1, keepdim=True), ids[..., :k]


# -- sizes ------------------------------------------------------------------------------------------------------------

INTERPRETED = not isinstance(_gate_up, triton.runtime.JITFunction)


def _tile(size: int) -> int:
    return max(triton.next_power_of_2(size), _LEAST_TILE)


def _splits(programs: int, most: int, device: torch.device) -> int:
    """A power of 2: splits with which so many programs occupy the device, each with a tile of keys or more."""
    wanted = min(_wanted_programs(device) // programs, most, _MOST_SPLITS)
    return 1 << (max(wanted, 1).bit_length() - 1)


@cache
def _wanted_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROGRAMS
    properties: Any = torch.cuda.get_device_properties(device)
    return 2 * int(properties.multi_processor_count)

"""What a round of the target costs on this machine: the measured verify-cost curve.

A round scores M nodes in one pass. Its time over M, at the contexts a run has, turns acceptance counts into a
predicted speed-up; the gap to the measured one is the method's own overhead.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bench.analysis.cost_curve import CostCurve, CostSurface

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from methods.engine.causal_lm import CausalLM
    from methods.engine.kv_cache import Cache

NODES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32, 64)  # a row more than a tile of a kernel holds makes a step


def grid(most: int) -> tuple[int, ...]:
    """Node counts to measure for a method whose largest pass has ``most`` nodes."""
    return tuple(nodes for nodes in NODES if nodes < most) + ((most,) if most else ())


def measure_rows(
    target: CausalLM, batch: int, nodes: Sequence[int], contexts: Sequence[int], repeats: int = 5
) -> CostSurface:
    """As ``measure``, with all rows of a batch, a quarter of them and one; with all alone where finished rows stay."""
    sizes = {1, batch // 4 or 1, batch} if target.pays_to_drop(1, batch) else {batch}
    return CostSurface(tuple(measure(target, size, nodes, contexts, repeats) for size in sorted(sizes)))


def measure(
    target: CausalLM,
    batch: int = 1,
    nodes: Sequence[int] = NODES,
    contexts: Sequence[int] = (256,),
    repeats: int = 5,
    seed: int = 0,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> CostCurve:
    """Time rounds of the target: a pass over a chain, the choice of tokens, and the read by the host.

    What is in a round is in every point, so ``seconds(1, ...)`` is a round of autoregression. Points are measured in a
    new random order each time, so that a drift of the machine falls on all of them alike. Rows of a batch differ in
    length by one, as they do once rows have accepted different numbers of tokens.

    Args:
        target: the model.
        batch: rows in lockstep.
        nodes: scored nodes per row.
        contexts: committed tokens per row; each must leave room for the most nodes within the model's context.
        repeats: timed rounds per point, after one that is not timed (two where the second one captures a graph).
    """
    ordered, lengths = sorted(set(nodes)), sorted(set(contexts))
    cache = filled_cache(target, batch, max(lengths) + max(ordered) + 1)
    tokens = random_tokens(target, batch, max(ordered), seed)
    points = [(context, count) for context in lengths for count in ordered]
    taken: dict[tuple[int, int], list[int]] = {point: [] for point in points}
    shuffler = random.Random(seed)
    from methods.engine.cuda_graphs import GraphedLM

    untimed = 2 if isinstance(target, GraphedLM) else 1
    for repeat in range(untimed + repeats):
        shuffler.shuffle(points)
        for context, count in points:
            ns = time_round(target, cache, tokens[:, :count], context, clock)
            if repeat >= untimed:
                taken[context, count].append(ns)
    table = tuple(tuple(statistics.median(taken[c, n]) / 1e9 for n in ordered) for c in lengths)
    return CostCurve(tuple(ordered), batch, tuple(lengths), table)


def filled_cache(target: CausalLM, batch: int, capacity: int) -> Cache:
    """A cache full of numbers.

    Pages that were never written would be read from one page of zeros, faster than real ones.
    """
    cache = target.new_cache(batch, capacity)
    store = cache.store
    store[:, :, :1].normal_()
    store[:, :, 1:] = store[:, :, :1]
    return cache


def random_tokens(target: CausalLM, batch: int, nodes: int, seed: int) -> Tensor:
    """[B, M] ids."""
    import torch

    ids = torch.randint(target.vocab_size, (batch, nodes), generator=torch.Generator().manual_seed(seed))
    return ids.to(target.device)


def time_round(target: CausalLM, cache: Cache, tokens: Tensor, context: int, clock: Callable[[], int]) -> int:
    """Nanoseconds of one round at a context; the cache is as before afterwards."""
    cache.set_lengths([max(1, context - row % 2) for row in range(tokens.shape[0])])
    _synchronise(target.device)
    start = clock()
    _round(target, cache, tokens)
    _synchronise(target.device)
    return clock() - start


def _round(target: CausalLM, cache: Cache, tokens: Tensor) -> None:
    """A pass and its read: recorded whole where the decoders' rounds are."""
    import torch

    from methods.engine.cuda_graphs import GraphedLM
    from methods.engine.sampling import argmax

    if isinstance(target, GraphedLM) and target.records_rounds:
        with torch.inference_mode():
            made = target.round([tokens], None, cache)
        if made is not None:
            cache.advanced([len(new) for _, new in made.read()])
            return
    argmax(target.forward(tokens, None, cache).logits).tolist()
    cache.advance([1] * len(tokens))


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)

"""What a round of the target costs on this machine: the measured verify-cost curve.

A round scores M nodes in one pass. Its time over M, at the contexts a run has, turns acceptance counts into a
predicted speed-up; the gap to the measured one is the method's own overhead.
"""

from __future__ import annotations

import random
import statistics
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from methods.engine.causal_lm import CausalLM
    from methods.engine.kv_cache import Cache

NODES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of a round over its nodes, at one batch size.

    Attributes:
        nodes: measured node counts per row, ascending.
        batch: rows in lockstep.
        contexts: measured context lengths, ascending.
        table: [contexts][nodes] seconds, the median of the repeats.
    """

    nodes: tuple[int, ...]
    batch: int
    contexts: tuple[int, ...]
    table: tuple[tuple[float, ...], ...]

    def seconds(self, nodes: int | float, batch: int, context: int | float) -> float:
        """Time of a round: piecewise linear in nodes and context.

        Beyond the measured nodes the last slope goes on, beyond the measured contexts the value stays. A smaller
        last batch of a data set is priced like a full one: ``batch`` must not exceed the one measured.

        Raises:
            ValueError: a larger batch than the one measured.
        """
        if batch > self.batch:
            raise ValueError(f"The cost curve was measured with {self.batch} rows and cannot price {batch}.")
        at_contexts = [_interpolate(self.nodes, row, nodes) for row in self.table]
        clamped = min(max(context, self.contexts[0]), self.contexts[-1])
        return _interpolate(self.contexts, at_contexts, clamped)

    def to_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "nodes": list(self.nodes),
            "batch": self.batch,
            "contexts": list(self.contexts),
            "seconds": [list(row) for row in self.table],
        }

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> CostCurve:
        """The inverse of ``to_dict``."""
        table = tuple(tuple(float(value) for value in row) for row in stored["seconds"])
        return cls(tuple(stored["nodes"]), stored["batch"], tuple(stored["contexts"]), table)


@dataclass(frozen=True, slots=True)
class CostSurface:
    """Cost curves of one model on one machine, at several batch sizes.

    Attributes:
        curves: ascending in their batch.
    """

    curves: tuple[CostCurve, ...]

    def seconds(self, nodes: int | float, batch: int, context: int | float) -> float:
        """Time of a round: as ``CostCurve``, and piecewise linear between the measured batch sizes.

        Raises:
            ValueError: a larger batch than any measured.
        """
        batches = [curve.batch for curve in self.curves]
        place = min(bisect_left(batches, batch), len(batches) - 1)
        above = self.curves[place].seconds(nodes, batch, context)
        if place == 0 or batches[place] == batch:
            return above
        below = self.curves[place - 1].seconds(nodes, batches[place - 1], context)
        return _interpolate(batches[place - 1 : place + 1], (below, above), batch)

    def to_dict(self) -> list[dict[str, Any]]:
        """For a record."""
        return [curve.to_dict() for curve in self.curves]

    @classmethod
    def from_dict(cls, stored: Sequence[dict[str, Any]]) -> CostSurface:
        """The inverse of ``to_dict``."""
        curves = [CostCurve.from_dict(curve) for curve in stored]
        return cls(tuple(sorted(curves, key=lambda curve: curve.batch)))


def grid(most: int) -> tuple[int, ...]:
    """Node counts to measure for a method whose largest pass has ``most`` nodes."""
    return tuple(nodes for nodes in NODES if nodes < most) + ((most,) if most else ())


def measure(
    target: CausalLM,
    batch: int = 1,
    nodes: Sequence[int] = NODES,
    contexts: Sequence[int] = (256,),
    repeats: int = 7,
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
    untimed = 1 if target.graphs is None else 2
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
    from methods.engine.sampling import argmax

    batch = tokens.shape[0]
    cache.set_lengths([max(1, context - row % 2) for row in range(batch)])
    _synchronise(target.device)
    start = clock()
    output = target.forward(tokens, None, cache)
    argmax(output.logits).tolist()
    cache.advance([1] * batch)
    _synchronise(target.device)
    return clock() - start


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _interpolate(xs: Sequence[int], ys: Sequence[float], x: int | float) -> float:
    """Piecewise linear through (xs, ys), the end pieces extended; constant where there is one point."""
    if len(xs) == 1:
        return ys[0]
    right = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

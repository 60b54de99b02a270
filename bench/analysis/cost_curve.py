"""The time of a target pass over its number of tokens, as recorded."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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

        Beyond the measured nodes the slope over their upper half continues, since two neighbours may have a step
        between them; beyond the measured contexts the value stays. A smaller last batch of a data set is priced like a
        full one: ``batch`` must not exceed the one measured.

        Raises:
            ValueError: a larger batch than the one measured.
        """
        if batch > self.batch:
            raise ValueError(f"The cost curve was measured with {self.batch} rows and cannot price {batch}.")
        at_contexts = [self._at(row, nodes) for row in self.table]
        clamped = min(max(context, self.contexts[0]), self.contexts[-1])
        return _interpolate(self.contexts, at_contexts, clamped)

    def _at(self, times: Sequence[float], nodes: int | float) -> float:
        if nodes <= self.nodes[-1] or len(self.nodes) == 1:
            return _interpolate(self.nodes, times, nodes)
        low = max(bisect_right(self.nodes, self.nodes[-1] // 2) - 1, 0)
        return _interpolate((self.nodes[low], self.nodes[-1]), (times[low], times[-1]), nodes)

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

    def to_manifest(self) -> dict[str, Any]:
        """For the manifest of a run: the curve of the most rows, and with it those of fewer."""
        *fewer, most = self.curves
        return most.to_dict() | ({"fewer_rows": [curve.to_dict() for curve in fewer]} if fewer else {})

    @classmethod
    def from_manifest(cls, stored: dict[str, Any]) -> CostSurface:
        """The inverse of ``to_manifest``; an older record has one curve."""
        return cls.from_dict([stored, *stored.get("fewer_rows", ())])

    def to_dict(self) -> list[dict[str, Any]]:
        """For a record."""
        return [curve.to_dict() for curve in self.curves]

    @classmethod
    def from_dict(cls, stored: Sequence[dict[str, Any]]) -> CostSurface:
        """The inverse of ``to_dict``."""
        curves = [CostCurve.from_dict(curve) for curve in stored]
        return cls(tuple(sorted(curves, key=lambda curve: curve.batch)))


def _interpolate(xs: Sequence[int], ys: Sequence[float], x: int | float) -> float:
    """Piecewise linear through (xs, ys), the end pieces extended; constant where there is one point."""
    if len(xs) == 1:
        return ys[0]
    right = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

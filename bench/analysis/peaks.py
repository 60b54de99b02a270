"""Measured limits of a device, from the times of probes; see ``bench.measure.probes``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

Peaks = Mapping[str, Mapping[str, float]]  # rates per second by probe, of the best and of the median repeat


def peaks(timings: Mapping[str, Sequence[int]], amounts: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Rates per second of each probe: the best and the median repeat.

    Args:
        timings: nanoseconds of the repeats, by probe.
        amounts: bytes or FLOPs of one call, by probe.
    """
    return {
        name: {"best": amounts[name] * 1e9 / min(ns), "median": amounts[name] * 1e9 / statistics.median(ns)}
        for name, ns in timings.items()
        if ns
    }


def peak_bandwidth(found: Peaks) -> float | None:
    """Bytes per second of the faster memory probe."""
    return max((found[name]["best"] for name in ("triad", "sum") if name in found), default=None)


def peak_flops(found: Peaks) -> float | None:
    """FLOPs per second of the product."""
    return found["matmul"]["best"] if "matmul" in found else None

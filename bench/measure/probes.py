"""Measured limits of the device: work that is bound by memory or by arithmetic alone, and its times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from bench.analysis.peaks import peaks
from bench.utils import memory

if TYPE_CHECKING:
    import torch

    from methods.engine.linear import LinearForm

ARRAY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}  # larger than the caches of today's processors
MATRIX = {"cpu": 2048, "cuda": 8192}  # rows and columns of the product
_CALLS = 10  # between two events of a GPU, so that their launches do not count
_REPEATS = 5
_SHARE = 16  # of the free memory, at most one part of so many for each array


@dataclass(frozen=True, slots=True)
class Probe:
    """Work of known size that is limited by memory or by arithmetic alone.

    Attributes:
        amount: bytes moved, or FLOPs, of one call.
        unit: of ``amount``.
        call: does it; the device may still be busy when it returns.
    """

    name: str
    amount: int
    unit: str
    call: Callable[[], object]


def of_memory(device: torch.device, dtype: torch.dtype, array_bytes: int | None = None) -> list[Probe]:
    """Triad and sum.

    The triad (a = b + s c) counts three arrays, as STREAM does; on a CPU its writes move more, so the sum, which only
    reads, as decoding mostly does, may show a higher bandwidth. The sum is in 32 bit, since in 16 bit the conversion
    would be timed.

    Args:
        array_bytes: of each array; None: by the kind of device and its free memory.
    """
    import torch

    most = memory.free_bytes(device) // _SHARE // 4096 * 4096
    size = min(ARRAY_BYTES[device.type], most) if array_bytes is None else array_bytes
    a, b, c = (torch.ones(size // dtype.itemsize, dtype=dtype, device=device) for _ in range(3))
    read = a.view(torch.float32)
    return [
        Probe("triad", 3 * size, "bytes", lambda: torch.add(b, c, alpha=0.5, out=a)),
        Probe("sum", size, "bytes", lambda: torch.sum(read)),
    ]


def of_arithmetic(
    device: torch.device, dtype: torch.dtype, linear: LinearForm = "auto", rows: int | None = None
) -> list[Probe]:
    """A square product.

    Args:
        linear: form of the product, see ``methods.engine.linear``.
        rows: rows and columns; None: by the kind of device.
    """
    import torch

    from methods.engine.linear import make_linear

    size = rows or MATRIX[device.type]
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    product = make_linear([right], [None], linear)
    return [Probe("matmul", 2 * size**3, "flops", lambda: product(left))]


def time_probe(probe: Probe, device: torch.device, clock: Callable[[], int]) -> int:
    """Nanoseconds of one call: on a GPU by events around several, elsewhere by the clock until the device is done."""
    from methods.engine.stopwatch import Stopwatch, synchronize

    synchronize(device)
    if device.type == "cuda":
        watch = Stopwatch(device)
        watch.start()
        for _ in range(_CALLS):
            probe.call()
        watch.stop()
        synchronize(device)
        return watch.ns() // _CALLS
    start = clock()
    probe.call()
    return clock() - start


@cache
def bandwidth(device: torch.device, dtype: torch.dtype, threads: int) -> dict[str, dict[str, float]]:
    """Rates of both memory probes, measured once in a process.

    Args:
        threads: of a CPU, as they are set; a result is of so many.
    """
    probes = of_memory(device, dtype)
    timings: dict[str, list[int]] = {probe.name: [] for probe in probes}
    for repeat in range(1 + _REPEATS):
        for probe in probes:
            ns = time_probe(probe, device, time.perf_counter_ns)
            if repeat:  # the first call is not timed
                timings[probe.name].append(ns)
    amounts = {probe.name: probe.amount for probe in probes}
    del probes, probe
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()  # the arrays are no memory of the run
    return peaks(timings, amounts)

"""Bytes and FLOPs of a pass, from the sizes of the model, and the measured limits of the device.

Bytes are those no implementation can avoid: every weight once, keys and values of all rows once, those of the new
nodes, the embeddings read and the logits. Of a mixture of experts, those that the tokens of a pass are expected to
choose are read (an estimate, ``methods.engine.expert_layers.expected_experts``), and of a layer with a sliding window
the keys and values that the window shows. FLOPs are those of the matrix products, two per multiply-add; norms,
rotations and activation functions are left out. The peaks are measured in the run's number type and threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.models.architectures import Architecture

if TYPE_CHECKING:
    import torch

    from methods.engine.linear import LinearForm

ARRAY_BYTES = 256 << 20  # larger than the caches of today's processors
MATRIX = {"cpu": 2048, "cuda": 8192}  # rows and columns of the product


@dataclass(frozen=True, slots=True)
class Work:
    """A pass over ``nodes`` nodes in each of ``batch`` rows of ``context`` tokens.

    Attributes:
        flops: of all matrix products, attention included.
        weight_bytes: every matrix once, but experts that no token is expected to choose.
        cache_bytes: keys and values of all rows read once, those of the nodes written.
        other_bytes: embeddings read, logits written.
    """

    flops: int
    weight_bytes: int
    cache_bytes: int
    other_bytes: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.other_bytes

    def to_dict(self) -> dict[str, int]:
        return asdict(self) | {"bytes": self.bytes}


def work(shape: Architecture, itemsize: int, batch: int, nodes: int, context: int) -> Work:
    """Bytes and FLOPs of a pass over a chain, whose node i attends to the context and nodes 0..i.

    Args:
        shape: sizes of the model.
        itemsize: bytes of a weight, a key and a logit.
        batch: rows.
        nodes: scored nodes per row.
        context: committed tokens per row.
    """
    tokens = batch * nodes
    kinds = ((shape.layers - shape.window_layers, context + nodes), (shape.window_layers, shape.window))
    seen = sum(layers * sum(min(most, context + i + 1) for i in range(nodes)) for layers, most in kinds)
    read = sum(layers * min(most + nodes - 1, context + nodes) for layers, most in kinds)
    slot = 2 * shape.kv_heads * shape.head_dim
    return Work(
        # attention: scores, and the mean of the values
        flops=2 * tokens * shape.token_weights + 4 * batch * shape.heads * shape.head_dim * seen,
        weight_bytes=round(itemsize * shape.read_weights(tokens)),
        cache_bytes=itemsize * slot * (batch * read + shape.layers * tokens),
        other_bytes=itemsize * tokens * (shape.hidden_size + shape.vocab_size),
    )


# ------------------------------------------------------------------------------------------------------ the device


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


def probes(
    device: torch.device,
    dtype: torch.dtype,
    linear: LinearForm = "auto",
    array_bytes: int = ARRAY_BYTES,
    rows: int | None = None,
) -> list[Probe]:
    """Triad and sum for the memory, a square product for the arithmetic.

    The triad (a = b + s c) counts three arrays, as STREAM does; on a CPU its writes move more, so the sum, which only
    reads, as decoding mostly does, may show a higher bandwidth. The sum is in 32 bit, since in 16 bit the conversion
    would be timed.

    Args:
        linear: form of the product, see ``methods.engine.linear``.
        array_bytes: of each array.
        rows: rows and columns of the product; None: by the kind of device.
    """
    import torch

    from methods.engine.linear import make_linear

    a, b, c = (torch.ones(array_bytes // dtype.itemsize, dtype=dtype, device=device) for _ in range(3))
    size = rows or MATRIX[device.type]
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    product = make_linear([right], [None], linear)
    read = a.view(torch.float32)
    return [
        Probe("triad", 3 * array_bytes, "bytes", lambda: torch.add(b, c, alpha=0.5, out=a)),
        Probe("sum", array_bytes, "bytes", lambda: torch.sum(read)),
        Probe("matmul", 2 * size**3, "flops", lambda: product(left)),
    ]


def time_probe(probe: Probe, device: torch.device, clock: Callable[[], int]) -> int:
    """Nanoseconds of one call, until the device is done."""
    from methods.engine.stopwatch import synchronize

    synchronize(device)
    start = clock()
    probe.call()
    synchronize(device)
    return clock() - start


def peaks(timings: Mapping[str, Sequence[int]], amounts: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Rates per second of each probe: the best and the median repeat.

    Args:
        timings: nanoseconds of the repeats, by probe.
        amounts: bytes or FLOPs of one call, by probe.
    """
    import statistics

    return {
        name: {"best": amounts[name] * 1e9 / min(ns), "median": amounts[name] * 1e9 / statistics.median(ns)}
        for name, ns in timings.items()
        if ns
    }


def peak_bandwidth(found: Mapping[str, Mapping[str, float]]) -> float | None:
    """Bytes per second of the faster memory probe."""
    return max((found[name]["best"] for name in ("triad", "sum") if name in found), default=None)


def peak_flops(found: Mapping[str, Mapping[str, float]]) -> float | None:
    return found["matmul"]["best"] if "matmul" in found else None


def limits(found: Mapping[str, Mapping[str, float]]) -> str | None:
    """``28.1 GB/s, 0.31 TFLOP/s``; None if either was not measured."""
    bandwidth, flops = peak_bandwidth(found), peak_flops(found)
    if bandwidth is None or flops is None:
        return None
    return f"{_three(bandwidth / 1e9)} GB/s, {_three(flops / 1e12)} TFLOP/s"


def _three(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# --------------------------------------------------------------------------------------------------------- the plot


def plot(points: Iterable[Mapping[str, Any]], machine: Mapping[str, Any], title: str, file: Path) -> None:
    """Draw the verify-cost curves and the roofline side by side.

    Args:
        points: of a cost record's summary.
        machine: its ``peaks``.
        title: model and machine.
        file: PNG.
    """
    import pandas as pd
    import seaborn as sns
    from matplotlib.figure import Figure

    table = pd.DataFrame(list(points)).rename(columns={"batch": "rows", "context": "context (tokens)"})
    table["TFLOP/s"] = table["flops"] / table["seconds"] / 1e12
    table["FLOPs per byte"] = table["flops"] / table["bytes"]
    table["milliseconds"] = table["seconds"] * 1e3
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = sns.color_palette("viridis", table["rows"].nunique())
    style = {"hue": "rows", "style": "context (tokens)", "palette": colours, "data": table}
    sns.lineplot(x="nodes", y="milliseconds", ax=left, markers=True, dashes=True, legend=False, **style)
    left.set(xscale="log", yscale="log", xlabel="nodes scored per row", ylabel="time of a round (ms)")
    left.set_xscale("log", base=2)
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    sns.scatterplot(x="FLOPs per byte", y="TFLOP/s", ax=right, **style)
    right.set(xscale="log", yscale="log")
    _draw_roof(right, machine, table["FLOPs per byte"])
    right.legend(fontsize="small", loc="lower right")
    figure.suptitle(title)
    scratch = file.with_suffix(".tmp.png")
    figure.savefig(scratch, dpi=120)
    scratch.replace(file)


def _draw_roof(axes: Any, machine: Mapping[str, Any], intensities: Any) -> None:
    import numpy as np

    bandwidth, flops = peak_bandwidth(machine), peak_flops(machine)
    if bandwidth is None or flops is None:
        return
    x = np.geomspace(min(intensities) / 2, max(max(intensities), flops / bandwidth) * 2, 200)
    axes.plot(
        x, np.minimum(x * bandwidth, flops) / 1e12, color="black", linewidth=1, label=f"measured: {limits(machine)}"
    )

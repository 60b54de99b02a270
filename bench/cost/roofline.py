"""Bytes and FLOPs of a pass, from the sizes of the model, and the measured limits of the device.

Bytes are those no implementation can avoid: every weight once, keys and values of all rows once, those of the new
nodes, the embeddings read and the logits. Of a mixture of experts, those that the tokens of a pass are expected to
choose are read (an estimate, ``methods.engine.expert_layers.expected_experts``), and of a layer with a sliding window
the keys and values that the window shows. FLOPs are those of the matrix products, two per multiply-add; norms,
rotations and activation functions are left out. The peaks are measured in the run's number type and threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.analysis.peaks import peak_bandwidth, peak_flops
from bench.models.architectures import Architecture


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


# ---------------------------------------------------------------------------------------------------- the device


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

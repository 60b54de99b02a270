"""Figures of the leaderboard: each function draws one onto the axes it is given, from ``bench.report.leaderboard``.

Full marks are EXACT, hollow ones are not; colours as in ``bench.report.style``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.analysis import pairs
from bench.errors import UserError
from bench.report import leaderboard
from bench.report.leaderboard import ComparisonGroup, QualitySpeedPlot, Row
from bench.report.style import style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GREY = "0.35"
_RATIOS = (0.1, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4, 6, 8, 12, 16)


def _mark(row: Row) -> dict[str, Any]:
    shown = style_of(row.method)
    full = row.guarantee == leaderboard.GUARANTEES[0]
    return {"marker": shown.mark, "color": shown.colour, "markerfacecolor": shown.colour if full else "white"}


def _ratio_axis(axis: Any, low: float, high: float) -> None:
    """A logarithmic axis with plain numbers on it."""
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
    ticks = [value for value in _RATIOS if low <= value <= high]
    apart = [tick for place, tick in enumerate(ticks) if len(ticks) <= 8 or tick == 1 or place % 2 == 0]
    axis.set_major_locator(FixedLocator(apart))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _speed(row: Row) -> float:
    assert row.speed is not None, "only ranked runs are drawn"
    return row.speed


def _note(size: int, right: int, up: int) -> dict[str, Any]:
    return {"fontsize": size, "color": _GREY, "xytext": (right, up), "textcoords": "offset points"}


def _ends(row: Row) -> tuple[float, float]:
    """The interval, or the value where it has none."""
    total = row.summary["speedup"]["total"]
    return (total["value"], total["value"]) if total["low"] is None else (total["low"], total["high"])


def intervals(ax: Axes, group: ComparisonGroup) -> None:
    """Ranking: speed-up with its 95 % interval, the guarantees apart, each with its fastest above."""
    for place, row in enumerate(group.valid):
        low, high = _ends(row)
        ax.plot([low, high], [place, place], color=style_of(row.method).colour, linewidth=2)
        ax.plot(_speed(row), place, linestyle="", markersize=7, **_mark(row))
    ax.axvline(1, color=_GREY, linewidth=1, linestyle="--")
    ends = [end for row in group.valid for end in _ends(row)] or [1.0]
    _ratio_axis(ax.xaxis, min(0.8, *ends) * 0.95, max(1.25, *ends) * 1.05)
    names = [f"{row.label}  ({row.guarantee.replace('_MODEL', '')})"[:60] for row in group.valid]
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set(xlabel="speed-up, 95 % interval", title=group.heading)


def prompt_speedups(row: Row) -> Any:
    """Baseline seconds over method seconds of each conversation, ascending; empty where the samples are gone."""
    try:
        units = pairs.read(row.record.path).units
    except UserError:
        return np.empty(0)
    return np.sort((units["baseline_s"] / units["method_s"]).to_numpy(float))


def ecdf(ax: Axes, group: ComparisonGroup, most: int = 10) -> None:
    """Share of conversations with at most a speed-up, a line per run of the ``most`` fastest ones."""
    fastest = sorted(group.valid, key=lambda row: -(row.speed or 0.0))[:most]
    found = {row.name: prompt_speedups(row) for row in fastest}
    for row in fastest:
        if len(ratios := found[row.name]):
            shown = style_of(row.method)
            ax.ecdf(ratios, color=shown.colour, linestyle=shown.line, linewidth=1.8, label=row.label[:40])
    ax.axvline(1, color=_GREY, linewidth=1, linestyle="--")
    ends = np.concatenate([np.ones(1), *found.values()])
    _ratio_axis(ax.xaxis, float(ends.min()) * 0.95, float(ends.max()) * 1.05)
    ax.set(xlabel="speed-up of a conversation", ylabel="share of conversations", title=group.heading)
    ax.legend(fontsize=8, loc="lower right")


def steps_and_speed(ax: Axes, group: ComparisonGroup) -> None:
    """Tokens per step against speed-up: measured (mark), predicted (dash), and lines of free drafts."""
    drawn = [row for row in group.valid if row.summary.get("tokens_per_step")]
    steps = [float(row.summary["tokens_per_step"]) for row in drawn] or [1.0]
    right = max(steps) * 1.15
    for row, step in zip(drawn, steps, strict=True):
        ax.plot(step, _speed(row), linestyle="", markersize=8, label=row.label[:40], **_mark(row))
        if (predicted := row.summary.get("predicted_speedup")) is not None:
            colour = style_of(row.method).colour
            ax.plot([step, step], [_speed(row), predicted], color=colour, linewidth=1)
            ax.plot(step, predicted, marker="_", markersize=11, color=colour)
    ax.axhline(1, color=_GREY, linewidth=1, linestyle="--")
    ends = [value for row in drawn for value in (row.speed, row.summary.get("predicted_speedup")) if value]
    top = 1.15 * max([1.0, *ends])
    for width, slope in leaderboard.slopes(group).items():
        end = min(right, top / slope)
        ax.plot([1, end], [slope, slope * end], color="0.75", linewidth=1, zorder=0)
        ax.annotate(f"M = {width}", (end, slope * end), **_note(7, 2, 2))
    ax.set_ylim(0, top)
    ax.set(xlim=(0.95, right * 1.05), xlabel="tokens per step", ylabel="speed-up", title=group.heading)
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1))


def heat_map(ax: Axes, group: ComparisonGroup) -> None:
    """Speed-up of each valid run by category; the colour is its logarithm, white at 1."""
    import seaborn as sns

    values = leaderboard.categories(group)
    reach = float(np.nanmax(np.abs(np.log(values.to_numpy(float)))))
    sns.heatmap(
        np.log(values.astype(float)),
        annot=values.astype(float),
        fmt=".2f",
        cmap="vlag_r",
        vmin=-reach,
        vmax=reach,
        cbar=False,
        ax=ax,
    )
    ax.set_title(group.heading)
    ax.tick_params(axis="x", rotation=30)
    ax.tick_params(axis="y", rotation=0)


def pareto(ax: Axes, plot: QualitySpeedPlot) -> None:
    """Quality against prompts per second: runs by method and guarantee, their baselines, and the front."""
    drawn: set[str] = set()
    models = {str(point.row.summary["model"]) for point in plot.points}
    for before in {point.before for point in plot.points if point.before}:
        ax.plot(*before, marker="x", color="0.6", markersize=5, linestyle="", zorder=0)
    for point in plot.points:
        row = point.row
        if row.rank is None:
            continue
        label = f"{row.method} ({row.family})"
        known = None if label in drawn else label
        ax.plot(point.rate, point.quality, linestyle="", markersize=8, label=known, **_mark(row))
        drawn.add(label)
        note = " ".join(filter(None, [str(row.summary["model"]) if len(models) > 1 else "", row.setting]))
        if note and row.name in plot.front:
            ax.annotate(note[:30], (point.rate, point.quality), **_note(7, 5, 4))
    front = sorted((point.rate, point.quality) for point in plot.points if point.row.name in plot.front)
    if front:
        ax.step(*zip(*front, strict=True), where="pre", color=_GREY, linewidth=1, zorder=0)
    ax.set(xscale="log", xlabel="prompts per second, all rows together", ylabel=plot.metric)
    ax.set_title(plot.heading, fontsize=9)
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1))


def batch_curves(axes: Sequence[Axes], heading: str, lines: Mapping[str, Sequence[Row]]) -> None:
    """Speed-up (left) and throughput (right) against the batch size, a line per method; dotted is the baseline."""
    speed, rate = axes
    over_batches(speed, lines, _speed)
    over_batches(rate, lines, lambda row: row.summary["tokens_per_s"], lambda row: row.summary["baseline_tokens_per_s"])
    speed.axhline(1, color=_GREY, linewidth=1, linestyle="--")
    speed.set(ylabel="speed-up", title=heading)
    speed.legend(fontsize=8)
    rate.set(ylabel="tokens per second, all rows", ylim=(0, None))


def over_batches(
    ax: Axes,
    lines: Mapping[str, Sequence[Row]],
    of: Callable[[Row], float | None],
    before: Callable[[Row], float | None] | None = None,
) -> None:
    """A quantity against the batch size, a line per method; dotted that of its own baseline."""
    for label, rows in lines.items():
        sizes = [row.summary["batch_size"] for row in rows]
        shown, marks = style_of(rows[0].method), _mark(rows[0])
        ax.plot(sizes, [_or_gap(of(row)) for row in rows], linestyle=shown.line, label=label[:40], **marks)
        if before is not None:
            ax.plot(sizes, [_or_gap(before(e)) for e in rows], color="0.6", linewidth=1, linestyle=":", zorder=0)
    every = sorted({row.summary["batch_size"] for rows in lines.values() for row in rows})
    ax.set_xscale("log", base=2)
    ax.set_xticks(every, [str(size) for size in every])
    ax.set_xlabel("batch size")


def _or_gap(value: float | None) -> float:
    return float("nan") if value is None else value

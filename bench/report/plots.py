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
from bench.report.leaderboard import Board, Entry, Market
from bench.report.style import look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GREY = "0.35"
_RATIOS = (0.1, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4, 6, 8, 12, 16)


def _mark(entry: Entry) -> dict[str, Any]:
    shown = look(entry.method)
    full = entry.guarantee == leaderboard.GUARANTEES[0]
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


def _speed(entry: Entry) -> float:
    assert entry.speed is not None, "only ranked runs are drawn"
    return entry.speed


def _note(size: int, right: int, up: int) -> dict[str, Any]:
    return {"fontsize": size, "color": _GREY, "xytext": (right, up), "textcoords": "offset points"}


def _ends(entry: Entry) -> tuple[float, float]:
    """The interval, or the value where it has none."""
    total = entry.summary["speedup"]["total"]
    return (total["value"], total["value"]) if total["low"] is None else (total["low"], total["high"])


def intervals(ax: Axes, board: Board) -> None:
    """Ranking: speed-up with its 95 % interval, the guarantees apart, each with its fastest above."""
    for place, entry in enumerate(board.valid):
        low, high = _ends(entry)
        ax.plot([low, high], [place, place], color=look(entry.method).colour, linewidth=2)
        ax.plot(_speed(entry), place, linestyle="", markersize=7, **_mark(entry))
    ax.axvline(1, color=_GREY, linewidth=1, linestyle="--")
    ends = [end for entry in board.valid for end in _ends(entry)] or [1.0]
    _ratio_axis(ax.xaxis, min(0.8, *ends) * 0.95, max(1.25, *ends) * 1.05)
    names = [f"{entry.label}  ({entry.guarantee.replace('_MODEL', '')})"[:60] for entry in board.valid]
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set(xlabel="speed-up, 95 % interval", title=board.heading)


def prompt_speedups(entry: Entry) -> Any:
    """Baseline seconds over method seconds of each conversation, ascending; empty where the samples are gone."""
    try:
        units = pairs.read(entry.record.path).units
    except UserError:
        return np.empty(0)
    return np.sort((units["baseline_s"] / units["method_s"]).to_numpy(float))


def ecdf(ax: Axes, board: Board, most: int = 10) -> None:
    """Share of conversations with at most a speed-up, a line per run of the ``most`` fastest ones."""
    fastest = sorted(board.valid, key=lambda entry: -(entry.speed or 0.0))[:most]
    found = {entry.name: prompt_speedups(entry) for entry in fastest}
    for entry in fastest:
        if len(ratios := found[entry.name]):
            shown = look(entry.method)
            ax.ecdf(ratios, color=shown.colour, linestyle=shown.line, linewidth=1.8, label=entry.label[:40])
    ax.axvline(1, color=_GREY, linewidth=1, linestyle="--")
    ends = np.concatenate([np.ones(1), *found.values()])
    _ratio_axis(ax.xaxis, float(ends.min()) * 0.95, float(ends.max()) * 1.05)
    ax.set(xlabel="speed-up of a conversation", ylabel="share of conversations", title=board.heading)
    ax.legend(fontsize=8, loc="lower right")


def steps_and_speed(ax: Axes, board: Board) -> None:
    """Tokens per step against speed-up: measured (mark), predicted (dash), and lines of free drafts."""
    drawn = [entry for entry in board.valid if entry.summary.get("tokens_per_step")]
    steps = [float(entry.summary["tokens_per_step"]) for entry in drawn] or [1.0]
    right = max(steps) * 1.15
    for entry, step in zip(drawn, steps, strict=True):
        ax.plot(step, _speed(entry), linestyle="", markersize=8, label=entry.label[:40], **_mark(entry))
        if (predicted := entry.summary.get("predicted_speedup")) is not None:
            colour = look(entry.method).colour
            ax.plot([step, step], [_speed(entry), predicted], color=colour, linewidth=1)
            ax.plot(step, predicted, marker="_", markersize=11, color=colour)
    ax.axhline(1, color=_GREY, linewidth=1, linestyle="--")
    ends = [value for entry in drawn for value in (entry.speed, entry.summary.get("predicted_speedup")) if value]
    top = 1.15 * max([1.0, *ends])
    for width, slope in leaderboard.slopes(board).items():
        end = min(right, top / slope)
        ax.plot([1, end], [slope, slope * end], color="0.75", linewidth=1, zorder=0)
        ax.annotate(f"M = {width}", (end, slope * end), **_note(7, 2, 2))
    ax.set_ylim(0, top)
    ax.set(xlim=(0.95, right * 1.05), xlabel="tokens per step", ylabel="speed-up", title=board.heading)
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1))


def heat_map(ax: Axes, board: Board) -> None:
    """Speed-up of each valid run by category; the colour is its logarithm, white at 1."""
    import seaborn as sns

    values = leaderboard.categories(board)
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
    ax.set_title(board.heading)
    ax.tick_params(axis="x", rotation=30)
    ax.tick_params(axis="y", rotation=0)


def pareto(ax: Axes, market: Market) -> None:
    """Quality against prompts per second: runs by method and guarantee, their baselines, and the front."""
    drawn: set[str] = set()
    models = {str(trade.entry.summary["model"]) for trade in market.trades}
    for before in {trade.before for trade in market.trades if trade.before}:
        ax.plot(*before, marker="x", color="0.6", markersize=5, linestyle="", zorder=0)
    for trade in market.trades:
        entry = trade.entry
        if entry.rank is None:
            continue
        label = f"{entry.method} ({entry.family})"
        known = None if label in drawn else label
        ax.plot(trade.rate, trade.quality, linestyle="", markersize=8, label=known, **_mark(entry))
        drawn.add(label)
        note = " ".join(filter(None, [str(entry.summary["model"]) if len(models) > 1 else "", entry.setting]))
        if note and entry.name in market.front:
            ax.annotate(note[:30], (trade.rate, trade.quality), **_note(7, 5, 4))
    front = sorted((trade.rate, trade.quality) for trade in market.trades if trade.entry.name in market.front)
    if front:
        ax.step(*zip(*front, strict=True), where="pre", color=_GREY, linewidth=1, zorder=0)
    ax.set(xscale="log", xlabel="prompts per second, all rows together", ylabel=market.metric)
    ax.set_title(market.heading, fontsize=9)
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1))


def batch_curves(axes: Sequence[Axes], heading: str, lines: Mapping[str, Sequence[Entry]]) -> None:
    """Speed-up (left) and throughput (right) against the batch size, a line per method; dotted is the baseline."""
    speed, rate = axes
    over_batches(speed, lines, _speed)
    over_batches(
        rate, lines, lambda entry: entry.summary["tokens_per_s"], lambda entry: entry.summary["baseline_tokens_per_s"]
    )
    speed.axhline(1, color=_GREY, linewidth=1, linestyle="--")
    speed.set(ylabel="speed-up", title=heading)
    speed.legend(fontsize=8)
    rate.set(ylabel="tokens per second, all rows", ylim=(0, None))


def over_batches(
    ax: Axes,
    lines: Mapping[str, Sequence[Entry]],
    of: Callable[[Entry], float | None],
    before: Callable[[Entry], float | None] | None = None,
) -> None:
    """A quantity against the batch size, a line per method; dotted that of its own baseline."""
    for label, entries in lines.items():
        sizes = [entry.summary["batch_size"] for entry in entries]
        shown, marks = look(entries[0].method), _mark(entries[0])
        ax.plot(sizes, [_or_gap(of(entry)) for entry in entries], linestyle=shown.line, label=label[:40], **marks)
        if before is not None:
            ax.plot(sizes, [_or_gap(before(e)) for e in entries], color="0.6", linewidth=1, linestyle=":", zorder=0)
    every = sorted({entry.summary["batch_size"] for entries in lines.values() for entry in entries})
    ax.set_xscale("log", base=2)
    ax.set_xticks(every, [str(size) for size in every])
    ax.set_xlabel("batch size")


def _or_gap(value: float | None) -> float:
    return float("nan") if value is None else value

"""Figures of recorded runs: each function draws one onto the axes it is given, from ``bench.report.leaderboard``.

Full marks are EXACT, hollow ones are not; colours and marks as in ``bench.report.style``. Runs are named directly, so
the only legend is the one of families, outside the axes (``legend``).
"""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.analysis import metrics, pairs
from bench.errors import UserError
from bench.report import leaderboard
from bench.report.leaderboard import ComparisonGroup, QualitySpeedPlot, QualitySpeedPoint, Row
from bench.report.style import COLOURS, style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GREY, _LIGHT = "#737373", "0.75"
_SVG_GREY = "#767b85"  # text that is readable on a white page and on a black one
_SMALL = 8  # points
_AROUND = np.array([(1, 0), (-1, 0), (1, 0.8), (-1, 0.8), (1, -0.8), (-1, -0.8), (0, 1), (0, -1)])  # a dot
_TICKS = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4, 6, 8, 12, 16, 25, 40, 60, 100, 160, 250, 400,
    600, 1000, 1600, 2500, 4000, 6000, 10_000, 25_000, 100_000,
)  # fmt: skip


def label(row: Row) -> str:
    """The short name of a run, and whether it is the user's."""
    return short_name(row.method, row.setting) + (" (yours)" if row.record.source == "own" else "")


def short_name(method: str, setting: str) -> str:
    """The method and the values of its settings, without their keys, switches and None."""
    values = [word.partition("=")[2] or word for word in setting.split()]  # "#1f3a" tells equal settings apart
    return " ".join([method, *(value for value in values if value not in ("True", "False", "None"))])


def title(heading: str, rows: Iterable[Row], width: int = 70) -> str:
    """The heading of a figure in lines of at most ``width`` characters, with whose records these are."""
    sources = {row.record.source for row in rows}
    own, reference = "your runs" if "own" in sources else "", "reference records" if "reference" in sources else ""
    whose = " and ".join(filter(None, (reference, own)))
    return textwrap.fill(f"{heading}; {whose}", width)


def legend(figure: Figure, rows: Iterable[Row]) -> None:
    """Below the axes: a colour for each family, and what hollow and crossed marks are."""
    from matplotlib.lines import Line2D

    drawn = list(rows)
    families = [name for name in COLOURS if name in {row.family for row in drawn}]
    dots = [Line2D([], [], linestyle="", marker="o", color=COLOURS[name], label=name) for name in families]
    if not all(map(_exact, drawn)):
        hollow: dict[str, Any] = {"marker": "o", "color": _GREY, "markerfacecolor": "none"}
        dots.append(Line2D([], [], linestyle="", label="hollow: may change the text", **hollow))
    if not all(row.valid for row in drawn):
        dots.append(Line2D([], [], linestyle="", marker="x", color="black", label="crossed: INCONCLUSIVE"))
    figure.legend(handles=dots, loc="outside lower center", ncols=len(dots), frameon=False)


def _exact(row: Row) -> bool:
    return row.guarantee == leaderboard.GUARANTEES[0]


def _mark(row: Row, hollow: str = "white") -> dict[str, Any]:
    shown = style_of(row.method, row.family)
    return {"marker": shown.mark, "color": shown.colour, "markerfacecolor": shown.colour if _exact(row) else hollow}


def plain_log_axis(axis: Any, low: float, high: float, ticks: Sequence[float] = ()) -> None:
    """A logarithmic axis from ``low`` to ``high`` with plain numbers at ``ticks``, or else at a few round values."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log", f"{axis.axis_name}lim": (low, high)})
    kept = list(ticks) or _few(low, high)
    axis.set_major_locator(FixedLocator(kept))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FixedFormatter([f"{tick:g}" for tick in kept]))


def _few(low: float, high: float) -> list[float]:
    """The round values from ``low`` to ``high``, those nearest to 1 first, without any too near to another."""
    kept: list[float] = []
    for tick in sorted((tick for tick in _TICKS if low <= tick <= high), key=lambda tick: abs(np.log(tick))):
        if all(abs(np.log(tick / other)) > np.log(high / low) / 14 for other in kept):
            kept.append(float(tick))
    return kept


def _one(ax: Axes, *, vertical: bool) -> None:
    """The line of plain decoding."""
    (ax.axvline if vertical else ax.axhline)(1, color=_GREY, linewidth=1, linestyle="--", zorder=0)


def _speed(row: Row) -> float:
    assert row.speed is not None, "only runs with a speed-up are drawn"
    return row.speed


def _ends(row: Row) -> tuple[float, float]:
    """The interval, or the value where it has none."""
    found = row.headline
    return (found["value"], found["value"]) if found["low"] is None else (found["low"], found["high"])


# ---- one row for each run


def intervals(ax: Axes, group: ComparisonGroup, hollow: str = "white") -> None:
    """Speed-up with its 95 % interval, a row for each ranked run, the fastest above; numbers on the right.

    Args:
        hollow: the colour inside the marks of runs that are not EXACT.
    """
    rows = sorted(group.ranked, key=_speed, reverse=True)
    for place, row in enumerate(rows):
        low, high = _ends(row)
        ax.plot([low, high], [place, place], color=style_of(row.method, row.family).colour, linewidth=2)
        ax.plot(_speed(row), place, linestyle="", markersize=7, **_mark(row, hollow))
        known = row.headline["low"] is not None
        text = f"{_speed(row):.2f}×" + (f" ({low:.2f}–{high:.2f})" if known else "")
        ax.annotate(text, (1.02, place), xycoords=("axes fraction", "data"), va="center", fontsize=_SMALL)
    _one(ax, vertical=True)
    ends = [end for row in rows for end in _ends(row)] or [1.0]
    plain_log_axis(ax.xaxis, min(0.8, *ends) * 0.95, max(1.25, *ends) * 1.05)
    _names(ax, rows)
    ax.set_xlabel("speed-up over plain decoding, 95 % interval")


def _names(ax: Axes, rows: Sequence[Row]) -> None:
    ax.set_yticks(range(len(rows)), list(map(label, rows)))
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)


def prompt_speedups(row: Row) -> Any:
    """Speed-up of each conversation, of the headline's kind, ascending; empty where the samples are gone."""
    try:
        units = pairs.read(row.record.path).units
    except UserError:
        return np.empty(0)
    return np.sort(metrics.unit_ratios(units, row.headline["of"]).to_numpy(float))


def conversations(ax: Axes, group: ComparisonGroup) -> None:
    """How the speed-up of single conversations spreads, a row for each run whose samples exist.

    The box has the middle half, the whiskers nine tenths; on the right the share of conversations that became slower.
    """
    known = {row.name: ratios for row in group.valid if len(ratios := prompt_speedups(row))}
    rows = sorted((row for row in group.valid if row.name in known), key=lambda row: -float(np.median(known[row.name])))
    for place, row in enumerate(rows):
        ratios, colour = known[row.name], style_of(row.method, row.family).colour
        far_low, low, middle, high, far_high = np.quantile(ratios, (0.05, 0.25, 0.5, 0.75, 0.95))
        ax.plot([far_low, far_high], [place, place], color=colour, linewidth=1)
        ax.plot([low, high], [place, place], color=colour, linewidth=6, alpha=0.5, solid_capstyle="butt")
        ax.plot(middle, place, linestyle="", markersize=7, **_mark(row))
        text = f"{np.mean(ratios < 1):.0%} of {len(ratios)} slower"
        ax.annotate(text, (1.02, place), xycoords=("axes fraction", "data"), va="center", fontsize=_SMALL)
    _one(ax, vertical=True)
    ends = np.concatenate([np.ones(1), *(np.quantile(known[row.name], (0.05, 0.95)) for row in rows)])
    plain_log_axis(ax.xaxis, float(ends.min()) * 0.95, float(ends.max()) * 1.05)
    _names(ax, rows)
    ax.set_xlabel("speed-up of a conversation")


def heat_map(ax: Axes, group: ComparisonGroup, least: int = 1) -> None:
    """Speed-up of each valid run by category of at least so many conversations; the colour is its logarithm."""
    import seaborn as sns

    values = leaderboard.categories(group, least=least).astype(float)
    values.index = list(map(label, group.valid))
    reach = float(np.nanmax(np.abs(np.log(values.to_numpy()))))
    look = {"cmap": "vlag_r", "vmin": -reach, "vmax": reach, "cbar": False, "linewidths": 1}
    sns.heatmap(np.log(values), annot=values, fmt=".2f", annot_kws={"fontsize": _SMALL}, ax=ax, **look)
    ax.tick_params(axis="x", rotation=30)
    ax.tick_params(axis="y", rotation=0)


# ---- named dots on a plane


def drafts(row: Row) -> bool:
    """Whether a step of the run gives more than its own token."""
    return (row.summary.get("tokens_per_step") or 1.0) > 1.02


def steps_and_speed(ax: Axes, group: ComparisonGroup) -> None:
    """Tokens per step against speed-up: measured (mark), predicted (dash), and lines of free drafts."""
    rows = [row for row in group.valid if drafts(row) or row.family == leaderboard.BASELINE]
    steps = [float(row.summary["tokens_per_step"]) for row in rows]
    right = max([1.0, *steps]) * 1.15
    for row, step in zip(rows, steps, strict=True):
        ax.plot(step, _speed(row), linestyle="", markersize=8, **_mark(row))
        if (predicted := row.summary.get("predicted_speedup")) is not None:
            colour = style_of(row.method, row.family).colour
            ax.plot([step, step], [_speed(row), predicted], color=colour, linewidth=1)
            ax.plot(step, predicted, marker="_", markersize=11, color=colour)
    _one(ax, vertical=False)
    ends = [value for row in rows for value in (row.speed, row.summary.get("predicted_speedup")) if value]
    top = 1.2 * max([1.0, *ends])
    ax.set(xlim=(0.95, right), ylim=(0, top), xlabel="tokens per step", ylabel="speed-up")
    lines = [
        _free_drafts(ax, width, slope, right, top) for width, slope in leaderboard.slopes(group, (1, 8, 32)).items()
    ]
    name_dots(ax, [(step, _speed(row), label(row)) for row, step in zip(rows, steps, strict=True)], lines)


def _free_drafts(ax: Axes, width: int, slope: float, right: float, top: float) -> Any:
    """The line for passes over ``width`` tokens, from one token per step on, with its name on it."""
    end = min(right, top / slope)
    ax.plot([0.95, end], [0.95 * slope, slope * end], color=_LIGHT, linewidth=1, zorder=0)
    at = 0.95 + 0.93 * (end - 0.95)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    return ax.text(at, slope * at, f"M = {width}", fontsize=_SMALL, color=_GREY, ha="center", va="center", bbox=box)


def pareto(ax: Axes, plot: QualitySpeedPlot) -> None:
    """Quality against prompts per second: valid runs, the baselines of their models (crosses), and the front.

    Thin lines join the settings of one method; the fastest one and those on the front are named.
    """
    points = [point for point in plot.points if point.row.valid]
    names = []
    for same in _by_method(points):
        front = {point.row.name for point in same} & plot.front
        first, colour = same[0].row, style_of(same[0].row.method, same[0].row.family).colour
        ax.plot([p.rate for p in same], [p.quality for p in same], color=colour, linewidth=0.8, alpha=0.5, zorder=1)
        for point in same:
            ax.plot(point.rate, point.quality, linestyle="", markersize=8, **_mark(point.row))
        if first.family != leaderboard.BASELINE:
            names += [(p.rate, p.quality, label(p.row)) for p in same if p is same[-1] or p.row.name in front]
    baselines = {str(p.row.summary["model"]): p.before for p in points if p.before}
    baselines |= {
        str(p.row.summary["model"]): (p.rate, p.quality) for p in points if p.row.family == leaderboard.BASELINE
    }
    shared = len(os.path.commonprefix(list(baselines))) if len(baselines) > 1 else 0
    for model, (rate, quality) in baselines.items():
        ax.plot(rate, quality, marker="x", color=_GREY, markersize=7, linestyle="", zorder=0)
        names.append((rate, quality, f"autoregressive {model[shared:]}"))
    on_front = sorted((point.rate, point.quality) for point in points if point.row.name in plot.front)
    if on_front:
        ax.step(*zip(*on_front, strict=True), where="pre", color=_LIGHT, linewidth=1, zorder=0)
    rates = [rate for rate, _, _ in names] or [1.0]
    plain_log_axis(ax.xaxis, min(rates) * 0.7, max(rates) * 1.4)
    ax.set(xlabel="prompts per second, all rows together", ylabel=plot.metric)
    ax.margins(y=0.08)
    name_dots(ax, names)


def _by_method(points: Sequence[QualitySpeedPoint]) -> list[list[QualitySpeedPoint]]:
    """The runs of each method with each model, the slowest first."""
    found: dict[tuple[str, Any], list[QualitySpeedPoint]] = {}
    for point in sorted(points, key=lambda point: point.rate):
        found.setdefault((point.row.method, point.row.summary["model"]), []).append(point)
    return list(found.values())


def name_dots(ax: Axes, dots: Sequence[tuple[float, float, str]], taken: Sequence[Any] = ()) -> None:
    """Write each name as near to its dot as possible, over no mark, no other name and none of the ``taken`` artists."""
    figure = ax.get_figure()
    assert figure is not None
    figure.canvas.draw()
    point = figure.dpi / 72
    marks = [line.get_xydata() for line in ax.lines if line.get_marker() not in ("None", "_", "")]
    centres = ax.transData.transform(np.concatenate([np.empty((0, 2)), *marks]))
    boxes = [*np.hstack([centres - 5 * point, centres + 5 * point])]
    boxes += [artist.get_window_extent().extents for artist in taken]
    inside = ax.get_window_extent().extents
    for x, y, name in sorted(dots):
        text = ax.annotate(name, (x, y), fontsize=_SMALL, ha="center", va="center")
        half = np.array([text.get_window_extent().width, text.get_window_extent().height]) / 2
        at = ax.transData.transform((x, y))
        offsets = [_AROUND * (half + away * point) for away in range(7, 90, 4)]
        found = at + np.concatenate(offsets)
        places = np.hstack([found - half, found + half])
        overlap = np.array([_overlap(place, np.array(boxes)) for place in places])
        outside = (places[:, :2] < inside[:2]).any(axis=1) | (places[:, 2:] > inside[2:]).any(axis=1)
        best = int(np.lexsort((np.arange(len(places)), overlap, outside))[0])
        boxes.append(places[best])
        shift = (found[best] - at) / point
        text.remove()
        line = {"arrowstyle": "-", "color": _LIGHT, "linewidth": 0.8} if best > 1 else None
        look: dict[str, Any] = {"fontsize": _SMALL, "ha": "center", "va": "center", "arrowprops": line}
        ax.annotate(name, (x, y), shift, textcoords="offset points", **look)


def _overlap(box: Any, boxes: Any) -> float:
    """The area that a box shares with others; boxes are left, bottom, right, top."""
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    return float(sides.clip(min=0).prod(axis=1).sum())


# ---- lines over batch sizes


def over_batches(
    ax: Axes,
    lines: Mapping[str, Sequence[Row]],
    of: Callable[[Row], float | None],
    before: Callable[[Row], float | None] | None = None,
) -> None:
    """A quantity against the batch size, a line per run, named at its right end; dotted that of its own baseline.

    Points of INCONCLUSIVE runs are crossed; where the quantity is the speed-up, they have their interval.
    """
    ends = []
    for rows in lines.values():
        sizes, values = [row.summary["batch_size"] for row in rows], [_or_gap(of(row)) for row in rows]
        shown = style_of(rows[0].method, rows[0].family)
        ax.plot(sizes, values, linestyle=shown.line, markersize=6, linewidth=1.4, **_mark(rows[0]))
        for row in (row for row in rows if not row.valid):
            _cross(ax, row, of(row), shown.colour)
        if before is not None:
            ax.plot(sizes, [_or_gap(before(row)) for row in rows], color=_LIGHT, linewidth=1, linestyle=":", zorder=0)
        if np.isfinite(values[-1]):
            ends.append((float(sizes[-1]), values[-1], label(rows[0]), shown.colour))
    every = sorted({row.summary["batch_size"] for rows in lines.values() for row in rows})
    ax.set_xscale("log", base=2)
    ax.set_xticks(every, [str(size) for size in every])
    ax.set_xlabel("batch size")
    drawn = [value for line in ax.lines for value in np.asarray(line.get_ydata(), float) if np.isfinite(value)]
    plain_log_axis(ax.yaxis, min(drawn, default=1) / 1.2, max(drawn, default=1) * 1.2)
    _name_ends(ax, ends)


def _cross(ax: Axes, row: Row, value: float | None, colour: str) -> None:
    """Mark a point whose speed-up shows nothing."""
    size, found = row.summary["batch_size"], row.headline
    if value == row.speed and found["low"] is not None and found["high"] is not None:
        ax.vlines(size, found["low"], found["high"], color=colour, linewidth=1)
    ax.plot([size], [_or_gap(value)], linestyle="", marker="x", markersize=9, color="black", zorder=3)


def _name_ends(ax: Axes, ends: Sequence[tuple[float, float, str, str]], gap: float = 0.05) -> None:
    """Names right of the axes: as near to the heights of their lines' last points as a gap between them allows."""
    from scipy.optimize import isotonic_regression

    if not ends:
        return
    ordered = sorted(ends, key=lambda end: end[1])
    in_axes = ax.transData + ax.transAxes.inverted()
    wanted = in_axes.transform([(x, y) for x, y, _, _ in ordered])[:, 1]
    steps = gap * np.arange(len(ordered))
    heights = isotonic_regression(wanted - steps).x + steps
    for (x, y, name, colour), height in zip(ordered, heights, strict=True):
        line = {"arrowstyle": "-", "color": _LIGHT, "linewidth": 0.7, "shrinkA": 0}
        look: dict[str, Any] = {"fontsize": _SMALL, "color": colour, "va": "center", "annotation_clip": False}
        ax.annotate(name, (x, y), (1.04, height), "data", "axes fraction", line, **look)


def _or_gap(value: float | None) -> float:
    return float("nan") if value is None else float(value)


# ---- a picture of its own


def speedup_svg(group: ComparisonGroup) -> str:
    """``intervals`` as an SVG, see ``svg``."""
    inches = 0.26 * len(group.ranked) + 1.3

    def draw(figure: Figure, ax: Axes) -> None:
        intervals(ax, group, hollow="none")
        figure.text(0.03, 1 - 0.2 / inches, group.heading)
        legend(figure, group.ranked)

    return svg(draw, (8.0, inches), (0.22, 0.95 / inches, 0.6, 1 - 1.3 / inches))


def svg(
    draw: Callable[[Figure, Axes], None], inches: tuple[float, float], place: tuple[float, float, float, float]
) -> str:
    """A picture as an SVG with a transparent background, the same text for the same records.

    Text stays text and margins are fixed, so no font of this machine has an influence.

    Args:
        draw: onto the figure and its axes.
        place: of the axes in the figure: left, bottom, width and height as shares.
    """
    import matplotlib
    from matplotlib.figure import Figure

    grey = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
    fixed = {"svg.fonttype": "none", "svg.hashsalt": "decodebench", "font.family": "sans-serif", "font.size": 10}
    look: dict[Any, Any] = {**dict.fromkeys(grey, _SVG_GREY), **fixed}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(look)
        figure = Figure(inches)
        ax = figure.add_axes(place)
        draw(figure, ax)
        for drawn in figure.axes:
            drawn.spines[["top", "right"]].set_visible(False)
        stream = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(stream, format="svg", transparent=True, metadata=nothing)
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def categories(ax: Axes, summary: Mapping[str, Any]) -> None:
    """Speed-up of one run with its 95 % interval: of each category of prompts, and below them of all prompts."""
    speedup, shown = summary["speedup"], style_of(summary["method"])
    named = {f"{name}  (n = {ratio['n']})": ratio for name, ratio in speedup["by_category"].items()}
    whole = metrics.headline(summary)
    everything = named | {"all": whole}
    ratios = {name: ratio for name, ratio in everything.items() if ratio["value"] is not None}
    ends = [1.0]
    for place, ratio in enumerate(ratios.values()):
        interval = [ratio["value"] if ratio[end] is None else ratio[end] for end in ("low", "high")]
        colour = _GREY if ratio is whole else shown.colour
        ax.plot(interval, [place, place], color=colour, linewidth=2)
        ax.plot(ratio["value"], place, linestyle="", marker=shown.mark, markersize=7, color=colour)
        ends += interval
    _one(ax, vertical=True)
    plain_log_axis(ax.xaxis, min(0.8, *ends) * 0.95, max(1.25, *ends) * 1.05)
    ax.set_yticks(range(len(ratios)), list(ratios))
    ax.set_ylim(len(ratios) - 0.5, -0.5)
    ax.set_xlabel("speed-up, 95 % interval")
    ax.set_title(f"{summary['method']}, {summary['model']}, {summary['dataset']}")

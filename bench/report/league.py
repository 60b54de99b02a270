"""``python -m bench league``: what drafters reach that learnt from the same tokens with the same budget.

Runs of ``sweep=league``, in groups of comparable ones: speed-up on all and on novel text, by processor minutes of
training. The minutes, and what a head does on held-out text, are those of its card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from bench.analysis import metrics
from bench.config import league
from bench.report import collect, plots, tables, terminal
from bench.report.collect import Record
from bench.report.style import style_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADER = (
    "drafter", "minutes", "steps", "answer tokens", "parameters", "held out", "speed-up", "95 %", "novel",
    "tokens/step", "accepted", "drafting", "result",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One drafter of one budget.

    Attributes:
        name: of the arm.
        budget: processor minutes that its training was given.
        minutes: those that it took.
        facts: of its card.
        summary: of its run.
    """

    name: str
    budget: float
    minutes: float
    facts: Mapping[str, Any]
    summary: Mapping[str, Any]

    @property
    def speed(self) -> float:
        """Speed-up on all text; 0 where the run has none."""
        return float(metrics.headline(self.summary)["value"] or 0.0)


@dataclass(frozen=True)
class Standings:
    """Comparable entries, the fastest first."""

    heading: str
    entries: list[Entry]


def standings(found: Sequence[Record]) -> list[Standings]:
    """The runs of the sweep's arms; of several of one arm and budget the last."""
    entries: dict[int, Entry] = {}
    for record in found:
        if record.finished and record.summary and (entry := _entry(record)):
            entries[id(record.summary)] = entry
    groups = collect.groups(dict(entry.summary) for entry in entries.values())
    by_id = {str(entry.summary["run_id"]): entry for entry in entries.values()}
    result = []
    for group in groups:
        latest = {(e.name, e.budget): e for e in (by_id[str(summary["run_id"])] for summary in group)}
        heading = f"{group[0].get('dataset')}, {terminal.place(group[0])}, {terminal.how(group[0])}"
        result.append(Standings(heading, sorted(latest.values(), key=lambda entry: -entry.speed)))
    return result


def _entry(record: Record) -> Entry | None:
    facts = ((record.manifest.get("part") or {}).get("card") or {}).get("facts") or {}
    method, minutes = record.manifest.get("method") or {}, facts.get("minutes")
    name = next((arm.name for arm in league.arms() if arm.measures(method)), None)
    budget = league.budget_of(PurePath(str(method.get("checkpoint"))))
    if name is None or budget is None or minutes is None or record.summary is None:
        return None
    return Entry(name, budget, float(minutes), facts, record.summary)


# ---------------------------------------------------------------------------------------------------------- the table


def cells(table: Standings) -> list[list[str]]:
    """The table of one group, as text."""
    return [_line(entry) for entry in table.entries]


def _line(entry: Entry) -> list[str]:
    summary, facts, head = entry.summary, entry.facts, metrics.headline(entry.summary)
    drafting, held_out = summary.get("draft_share"), facts.get("tokens_per_step_of_a_chain")
    accepted = [_share(each) for each in summary.get("acceptance_at_conditional") or []]
    return [
        entry.name,
        f"{entry.minutes:.1f}",
        str(facts.get("steps", "-")),
        f"{facts.get('answer_tokens', 0):,}",
        f"{facts.get('parameters', 0) / 1e6:.1f} M",
        "-" if held_out is None else f"{held_out:.2f}",
        terminal.times(head["value"]),
        "-" if head["low"] is None else terminal.interval(head),
        terminal.times(terminal.novel(summary)),
        terminal.number(summary.get("tokens_per_step")),
        " ".join(accepted[:6]) or "-",
        "-" if drafting is None else f"{drafting:.0%}",
        collect.result(summary),
    ]


def by_budget(table: Standings) -> str:
    """One line for each drafter and three cells for each budget, in Markdown: updates, speed-up on all and novel text.

    The fastest of the largest budget comes first.
    """
    budgets = sorted({entry.budget for entry in table.entries})
    found = {(entry.name, entry.budget): entry for entry in table.entries}
    best = {name: max((e.budget, e.speed) for e in table.entries if e.name == name) for name, _ in found}
    columns = [HEADER.index(column) for column in ("steps", "speed-up", "95 %", "novel")]
    cells = []
    for name in sorted(best, key=lambda each: best[each], reverse=True):
        cells.append([name])
        for budget in budgets:
            line = _line(found[name, budget]) if (name, budget) in found else ["-"] * len(HEADER)
            steps, speed, interval, novel = (line[column] for column in columns)
            cells[-1] += [steps, speed if interval == "-" else f"{speed} ({interval})", novel]
    header = ["drafter"]
    for budget in budgets:
        header += [f"updates in {budget:g} min", "speed-up", "novel"]
    return tables.markdown(header, cells)


def _share(value: float | None) -> str:
    """As in .75; None: no node was judged."""
    if value is None:
        return "-"
    return f"{value:.2f}"[1:] if value < 1 else "1"


def text(found: Sequence[Standings]) -> str:
    """All tables, aligned, for the terminal."""
    parts = [f"{each.heading}\n\n{tables.aligned(HEADER, cells(each))}" for each in found]
    return "\n\n".join(parts) or _NONE


def markdown(found: Sequence[Standings]) -> str:
    """All tables for reading in a repository."""
    parts = [f"## {each.heading}\n\n{tables.markdown(HEADER, cells(each))}" for each in found]
    return "\n\n".join(parts or [_NONE]) + "\n"


_NONE = (
    "No run of a trained arm of the league. Train them: python -m bench train league. Measure them: python -m bench "
    "sweep=league"
)

# --------------------------------------------------------------------------------------------------------- the figure


def draw(ax: Axes, table: Standings, *, novel: bool = False) -> None:
    """Speed-up against minutes of training, a line for each drafter; names at its last point.

    Args:
        novel: on novel text instead of all.
    """
    lines: dict[str, list[tuple[float, float, tuple[float, float] | None]]] = {}
    for entry in table.entries:
        if (point := _point(entry, novel)) is not None:
            lines.setdefault(entry.name, []).append(point)
    ends = []
    for name, points in lines.items():
        points.sort()
        style = style_of(str(_method_of(name)))
        minutes, speeds = [point[0] for point in points], [point[1] for point in points]
        ax.plot(minutes, speeds, marker=style.mark, linestyle=style.line, markersize=6, label=name)
        colour = ax.lines[-1].get_color()
        for minute, _, interval in points:
            if interval:
                ax.plot([minute, minute], interval, color=colour, linewidth=1, alpha=0.5)
        ends.append((minutes[-1], speeds[-1], name, colour))
    ax.axhline(1, color="#737373", linewidth=1, linestyle="--", zorder=0)
    if not lines:
        ax.text(0.5, 0.25, "too few texts for a speed-up", transform=ax.transAxes, ha="center", color="#737373")
        ax.set_xticks([])
    else:
        every = [minutes for points in lines.values() for minutes, _, _ in points]
        budgets = sorted({entry.budget for entry in table.entries})
        plots.plain_log_axis(ax.xaxis, min(every) / 1.5, max(every) * 2.5, budgets)
        _name(ax, ends)
    ax.set_xlabel("processor minutes of training")
    ax.set_ylabel(f"speed-up on {'novel' if novel else 'all'} text")


def figure(table: Standings) -> Figure:
    """All text on the left, novel text on the right."""
    import matplotlib.pyplot as plt

    made, (all_text, novel_text) = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    draw(all_text, table)
    draw(novel_text, table, novel=True)
    made.suptitle(table.heading, fontsize=9, x=0.01, ha="left")
    return made


def svg(table: Standings) -> str:
    """The figure without its heading, the same text for the same records."""

    def both(figure: Figure, ax: Axes) -> None:
        right = figure.add_axes((0.57, 0.14, 0.42, 0.82), sharey=ax)
        draw(ax, table)
        draw(right, table, novel=True)

    return plots.svg(both, (9.0, 4.0), (0.08, 0.14, 0.42, 0.82))


def _point(entry: Entry, novel: bool) -> tuple[float, float, tuple[float, float] | None] | None:
    """Minutes, speed-up and its interval; None: there is no such speed-up."""
    if novel:
        value, found = terminal.novel(entry.summary), entry.summary["speedup"].get("novel") or {}
    else:
        found = metrics.headline(entry.summary)
        value = found["value"]
    if value is None:
        return None
    low, high = found.get("low"), found.get("high")
    return entry.minutes, float(value), None if low is None or high is None else (float(low), float(high))


def _method_of(name: str) -> str:
    words = next(arm.run for arm in league.arms() if arm.name == name)
    return next(word.removeprefix("method=") for word in words if word.startswith("method="))


def _name(ax: Axes, ends: Sequence[tuple[float, float, str, Any]]) -> None:
    """Names beside the last points, moved apart where they would cover one another."""
    low, high = ax.get_ylim()
    least, height = (high - low) / 22, -float("inf")
    for minutes, speed, name, colour in sorted(ends, key=lambda end: end[1]):
        height = max(speed, height + least)
        ax.annotate(name, (minutes, speed), (minutes * 1.1, height), fontsize=8, va="center", color=colour)

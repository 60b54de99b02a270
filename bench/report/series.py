"""How speed-ups change over batch sizes, temperatures and lengths of the prompt, and where an advantage ends.

A series joins groups of comparable runs that differ in one such quantity alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bench.analysis import audit
from bench.report import frontier, leaderboard, tables, terminal
from bench.report.leaderboard import ComparisonGroup, Row
from bench.report.terminal import plural

if TYPE_CHECKING:
    import pandas as pd

_FILL = re.compile(r"synthetic fill to ([\d,]+) tokens")  # see ``bench.analysis.summary.data_set``
Series = dict[str, list[Row]]  # by label, runs in the order of the quantity


@dataclass(frozen=True)
class Axis:
    """The quantity in which the groups of a series differ.

    Attributes:
        apart: those of ``terminal.JOIN_KEYS`` in which they may differ for that.
        value: of a summary; None: a run that is in no such series.
        column: a value as the header of a column.
        words: a value in a sentence.
        part: what names the value in the heading of a group.
        alone: whether the speed-up of decoding without the prompt is shown beside that with it.
    """

    apart: tuple[str, ...]
    value: Callable[[Mapping[str, Any]], float | None]
    column: Callable[[float], str]
    words: Callable[[float], str]
    part: re.Pattern[str]
    alone: bool = False

    def at(self, row: Row) -> float:
        """The value of a run that is in such a series."""
        found = self.value(row.summary)
        assert found is not None, f"{row.name} is in no such series"
        return found


def _temperature(summary: Mapping[str, Any]) -> float | None:
    sampling = summary.get("sampling")
    if not isinstance(sampling, Mapping) or sampling.get("top_k") or sampling.get("top_p", 1.0) < 1:
        return None
    return float(sampling.get("temperature", 0.0))


def _context(summary: Mapping[str, Any]) -> float | None:
    found = _FILL.search(str(summary.get("dataset")))
    return float(found.group(1).replace(",", "")) if found else None


BATCH_SIZE = Axis(  # a larger batch may have been given more prompts
    apart=("batch_size", "dataset_revision"),
    value=lambda summary: float(summary["batch_size"]),
    column=lambda size: f"B = {size:.0f}",
    words=lambda size: plural(int(size), "row"),
    part=re.compile(r"batch \d+"),
)
TEMPERATURE = Axis(
    apart=("sampling",),
    value=_temperature,
    column=lambda degree: f"T = {degree:g}",
    words=lambda degree: f"T = {degree:g}",
    part=re.compile(r"greedy|temperature .+"),
)
CONTEXT = Axis(  # the longest prompts may have been fewer
    apart=("dataset", "dataset_revision"),
    value=_context,
    column=lambda tokens: f"{tokens:,.0f} tokens",
    words=lambda tokens: f"{tokens:,.0f} tokens",
    part=_FILL,
    alone=True,
)
AXES = {"batch_size": BATCH_SIZE, "temperature": TEMPERATURE, "context": CONTEXT}


def of(found: Sequence[ComparisonGroup], axis: Axis = BATCH_SIZE) -> list[tuple[str, Series]]:
    """Groups that differ in one quantity alone: heading, and by label the runs in its order, if several.

    INCONCLUSIVE runs are among them, as they show where an advantage ends; INVALID ones are not.
    """
    made = []
    for heading, lines in _joined(found, axis, lambda group: group.sound):
        several = {name: [line[at] for at in sorted(line)] for name, line in lines.items() if len(line) > 1}
        if several:
            made.append((heading, several))
    return made


def coverage(found: Sequence[ComparisonGroup], sizes: Sequence[int]) -> list[tuple[str, pd.DataFrame]]:
    """As ``of`` over batch sizes, of all runs: by label (rows) the speed-up, INVALID or ``-`` at each size."""
    import pandas as pd

    made = []
    for heading, lines in _joined(found, BATCH_SIZE, lambda group: group.rows):
        columns = sorted({*map(float, sizes), *(size for line in lines.values() for size in line)})
        cells = {
            name: {BATCH_SIZE.column(size): _recorded(line.get(size)) for size in columns}
            for name, line in lines.items()
        }
        made.append((heading, pd.DataFrame.from_dict(cells, orient="index")))
    return made


def _recorded(row: Row | None) -> str:
    if row is None:
        return "-"
    return terminal.times(row.speed) if row.valid else audit.result(row.summary)


def _joined(
    found: Sequence[ComparisonGroup], axis: Axis, rows: Callable[[ComparisonGroup], Sequence[Row]]
) -> Iterator[tuple[str, dict[str, dict[float, Row]]]]:
    """Of groups that differ in one quantity alone: heading, and by label and value a run, valid if any is."""
    alike: dict[tuple[str, str], list[ComparisonGroup]] = {}
    for group in found:
        if axis.value(group.first) is not None:
            parts = leaderboard.heading_of(group.first).split(", ")
            heading = ", ".join(part for part in parts if not axis.part.fullmatch(part))
            alike.setdefault((heading, leaderboard.shared(group, axis.apart)), []).append(group)
    for (heading, _), groups in alike.items():
        settings = frontier.settings([row.record for group in groups for row in rows(group)])
        lines: dict[str, dict[float, Row]] = {}
        for row in sorted((row for group in groups for row in rows(group)), key=lambda row: not row.valid):
            named = replace(row, setting=settings[str(row.summary["run_id"])])
            lines.setdefault(named.label, {}).setdefault(axis.at(row), named)
        yield heading, dict(sorted(lines.items()))


# ------------------------------------------------------------------------------------------------------------- tables


def advantage_ends(rows: Sequence[Row], axis: Axis = BATCH_SIZE) -> str:
    """The first value at which the interval of a method is not above 1; a run without an interval shows neither.

    Args:
        rows: of one method, in the order of the quantity.
    """
    known = [row for row in rows if terminal.interval(row.headline) != terminal.MISSING]
    if not known:
        return "not known"
    faster = {axis.at(row): bool(row.headline["low"] > 1) for row in known}
    if not any(faster.values()):
        return "never faster" if all(row.headline["high"] <= 1 for row in known) else "never shown faster"
    first = next((value for value, above in faster.items() if not above), None)
    if first is None:
        return f"beyond {axis.words(max(faster))}"
    return f"{'at' if faster[min(faster)] else 'none at'} {axis.words(first)}"


def markdown(groups: Sequence[ComparisonGroup], axis: Axis = BATCH_SIZE) -> Iterator[tuple[str, str]]:
    """Heading and table of each series: speed-ups, and where advantages end."""
    for heading, found in of(groups, axis):
        lines = {name: rows for name, rows in found.items() if rows[0].family != leaderboard.BASELINE}
        if not lines:
            continue
        values = sorted({axis.at(row) for rows in lines.values() for row in rows})
        cells = []
        for name, rows in lines.items():
            speeds = {axis.at(row): _speed(row, axis.alone) for row in rows}
            cells.append([name, *(speeds.get(value, "-") for value in values), advantage_ends(rows, axis)])
        yield heading, tables.markdown(["method", *map(axis.column, values), "advantage ends"], cells)


def _speed(row: Row, alone: bool) -> str:
    """Its speed-up; one that shows nothing has a question mark and its interval."""
    shown = terminal.times(row.speed)
    if not row.valid:
        span = terminal.interval(row.headline)
        shown = f"{shown}? ({'no interval' if span == terminal.MISSING else span})"
    return f"{shown} / {terminal.times(row.summary['speedup'].get('decode'))}" if alone else shown

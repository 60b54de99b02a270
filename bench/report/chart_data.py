"""Numbers of the charts of the HTML report, as plain data that ``page/charts.js`` reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.analysis import audit
from bench.analysis.ranking import NAMES as SCORES
from bench.analysis.ranking import first_score
from bench.report import series, terminal
from bench.report.leaderboard import ComparisonGroup, Row
from bench.report.style import COLOURS, style_of
from bench.utils.files import read_json

_COSTS = "costs"
_MEMORY, _ARITHMETIC = ("triad", "sum"), "matmul"  # probes of a cost record


def charts(groups: Sequence[ComparisonGroup], ids: Mapping[Path, str]) -> dict[str, Any]:
    """What the page draws.

    Args:
        groups: of ``leaderboard.groups``, the most important first.
        ids: by folder of the run, the id of its row on the page.
    """
    over_sizes = [
        {"heading": heading, "rows": [_point(row, ids) for line in lines.values() for row in line]}
        for heading, lines in series.of(groups)
    ]
    return {
        "colours": COLOURS,
        "tables": [_table(group, ids) for group in groups if len(group.valid) > 1],
        "batches": sorted(over_sizes, key=_importance),
        "roofs": list(_roofs(groups)),
    }


def _importance(lines: Mapping[str, Any]) -> tuple[bool, int]:
    """Own runs first, then many."""
    return all(row["source"] == "reference" for row in lines["rows"]), -len(lines["rows"])


def score(rows: Sequence[Row]) -> str | None:
    """The first score of the runs, if all that have scores share it."""
    firsts = {next(iter(found)) for row in rows if (found := row.summary.get("quality"))}
    return firsts.pop() if len(firsts) == 1 else None


def quality(row: Row) -> tuple[str, float, float] | None:
    """Score, value and the baseline's value of a run whose prompts are of one kind; None where there is none.

    Scores of several kinds of prompts, each for a part of them, say nothing about the whole.
    """
    if len(row.summary["speedup"].get("by_category", {})) > 1:
        return None
    return first_score(row.summary)


def sources(group: ComparisonGroup) -> str:
    """``own``, ``reference`` or ``own and reference``."""
    return " and ".join(sorted({row.record.source for row in group.rows}))


def _table(group: ComparisonGroup, ids: Mapping[Path, str]) -> dict[str, Any]:
    scores = {row.name: quality(row) for row in group.valid}
    known = [score for score in scores.values() if score]
    name = known[0][0] if known else None
    return {
        "heading": group.heading,
        "source": sources(group),
        "metric": f"{SCORES.get(name, name)}" if name else "tokens identical to the target (%)",
        "before": known[0][2] if known else None,
        "rows": [_point(row, ids) | {"quality": _judged(row, name)} for row in group.valid],
    }


def _judged(row: Row, name: str | None) -> float | None:
    """The score, or without one the agreement with the target in percent."""
    if name is None:
        share = (row.summary.get("agreement") or {}).get("exact")
        return None if share is None else _brief(100 * share)
    found = quality(row)
    return _brief(found[1]) if found and found[0] == name else None


def _point(row: Row, ids: Mapping[Path, str]) -> dict[str, Any]:
    summary, found = row.summary, row.headline
    return {
        "run": ids[row.record.path],
        "label": row.label,
        "family": row.family,
        "mark": style_of(row.method, row.family).mark,
        "guarantee": row.guarantee,
        "source": row.record.source,
        "batch": summary.get("batch_size"),
        **{key: _brief(found[key]) for key in ("value", "low", "high")},
        "novel": _brief(terminal.novel(summary)),
        "worst": _brief((summary["speedup"].get("floor") or {}).get("minimum")),
        "repeated": _brief((summary.get("predictability") or {}).get("mean_share")),
        "result": audit.result(row.summary),
        "rank": row.rank,
        "reason": row.reason,
        "steps": _brief(summary.get("tokens_per_step")),
        "categories": {
            name: [*(_brief(found[key]) for key in ("value", "low", "high")), found["n"]]
            for name, found in summary["speedup"].get("by_category", {}).items()
            if found["value"] is not None
        },
    }


def _brief(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.7g}")


def _roofs(groups: Sequence[ComparisonGroup]) -> Iterator[dict[str, Any]]:
    """The cost records beside the runs (``python -m bench cost``), each with its limits and points."""
    folders = {row.record.path.parent / _COSTS: row.record.source for group in groups for row in group.rows}
    for folder, source in folders.items():
        for file in sorted(folder.glob("*/summary.json")):
            if (found := read_json(file)) and (roof := _roof(found, file.parent)):
                yield roof | {"source": source}


def _roof(found: Mapping[str, Any], folder: Path) -> dict[str, Any] | None:
    """None for a record without points or without the device's limits."""
    peaks, points = found.get("peaks") or {}, found.get("points") or []
    bandwidth = max((peaks[name]["best"] for name in _MEMORY if name in peaks), default=None)
    if not points or bandwidth is None or _ARITHMETIC not in peaks:
        return None
    model = (found.get("model") or {}).get("name", folder.name)
    threads = found.get("threads")
    place = ", ".join(map(str, filter(None, [found.get("hardware"), found.get("dtype")])))
    return {
        "heading": f"{model} ({place}{f', {threads} threads' if threads else ''})",
        "bandwidth": bandwidth / 1e9,
        "flops": peaks[_ARITHMETIC]["best"] / 1e9,
        "points": [
            {key: point[key] for key in ("batch", "context", "nodes")}
            | {
                "intensity": _brief(point["flops"] / point["bytes"]),
                "rate": _brief(point["flops"] / point["seconds"] / 1e9),
                "ms": _brief(point["seconds"] * 1e3),
            }
            for point in points
        ],
    }

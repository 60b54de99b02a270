"""Recorded runs as ranked groups, for RESULTS.md, the report and the notebooks.

A group holds the runs that may be in one table (``bench.report.terminal.JOIN_KEYS``). Methods of different guarantees
are ranked separately; runs without a rank (``bench.analysis.ranking``) come last, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.analysis import audit, metrics
from bench.analysis import ranking as rules
from bench.analysis.cost_curve import CostCurve
from bench.report import collect, frontier, terminal
from bench.report.collect import Record
from bench.utils.stats import pareto

if TYPE_CHECKING:
    import pandas as pd

GUARANTEES = ("EXACT", "RELAXED", "INDEPENDENT_MODEL")
BASELINE, PEER, OTHER = "baseline", "peer", "other"
_FAMILIES = {
    "autoregressive": BASELINE,
    "beam_search": BASELINE,
    "speculative": "speculative",
    "early_exit": "early exit",
    "non_autoregressive": "non-autoregressive",
    "peers": PEER,
    "external": PEER,
    "baseline": BASELINE,
}
_OF_MODEL = ("model", "model_revision")
_OF_BATCH = ("batch_size", "dataset_revision")  # a larger batch may have been given more prompts


@dataclass(frozen=True)
class Row:
    """A run on its group.

    Attributes:
        summary: of the record.
        setting: the settings of its method in which it differs from others on the group.
        rank: among the ranked runs of its guarantee, from 1; None where it has none.
        reason: why it has no rank; empty where it has one.
        tie: whether its interval overlaps that of the next better rank, so that their order is not shown.
    """

    record: Record
    summary: dict[str, Any]
    family: str
    setting: str
    rank: int | None
    reason: str = ""
    tie: bool = False

    @property
    def name(self) -> str:
        return self.record.path.name

    @property
    def method(self) -> str:
        return str(self.summary["method"])

    @property
    def guarantee(self) -> str:
        return str(self.summary["guarantee"])

    @property
    def label(self) -> str:
        return f"{self.method} {self.setting}".strip()

    @property
    def valid(self) -> bool:
        return collect.is_valid(self.summary)

    @property
    def headline(self) -> Mapping[str, Any]:
        """The speed-up with its interval."""
        return metrics.headline(self.summary)

    @property
    def speed(self) -> float | None:
        value = self.headline["value"]
        return None if value is None else float(value)

    @property
    def note(self) -> str:
        """The first reason why a VALID run has no rank; empty for others, whose result says it."""
        return self.reason.partition("; ")[0] if audit.result(self.summary) == "VALID" else ""


@dataclass(frozen=True)
class ComparisonGroup:
    """Comparable runs by guarantee and rank, those without a rank last; the heading is unique."""

    heading: str
    rows: list[Row]

    @property
    def first(self) -> Mapping[str, Any]:
        """The summary of one run, for what all share."""
        return self.rows[0].summary

    @property
    def valid(self) -> list[Row]:
        """The runs whose speed-up can be trusted, with a rank or without."""
        return [row for row in self.rows if row.valid and row.speed is not None]

    @property
    def sound(self) -> list[Row]:
        """The runs with a speed-up that are not INVALID; some may be INCONCLUSIVE."""
        return [row for row in self.rows if row.speed is not None and audit.result(row.summary) != "INVALID"]

    @property
    def ranked(self) -> list[Row]:
        """The runs that have a rank."""
        return [row for row in self.rows if row.rank is not None]


def family(manifest: Mapping[str, Any]) -> str:
    """As its class declares; of a record of before they did so, by the package of the class."""
    words = str((manifest.get("method") or {}).get("_target_", "")).split(".")
    package = words[1] if words[0] == "methods" and len(words) > 1 else OTHER
    return _FAMILIES.get(manifest.get("family", package), OTHER)


def groups(found: Iterable[Record]) -> list[ComparisonGroup]:
    """The finished runs, by what makes their numbers comparable."""
    by_summary = {id(record.summary): record for record in found if record.finished and record.summary}
    alike = collect.groups(record.summary for record in by_summary.values() if record.summary)
    return [
        ComparisonGroup(heading, _rows([by_summary[id(summary)] for summary in summaries]))
        for heading, summaries in zip(_headings([summaries[0] for summaries in alike]), alike, strict=True)
    ]


def _headings(firsts: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the runs of each group share; two that would read the same have their number of prompts, or revisions."""
    revisions = ("schema_version", "model_revision", "dataset_revision")
    prompts = [f"{first.get('n_prompts')} prompts" for first in firsts]
    every = [", ".join(f"{key} {terminal.join_value(first, key)}" for key in revisions) for first in firsts]
    return _apart(_apart([heading_of(first) for first in firsts], prompts), every)


def _apart(names: Sequence[str], marks: Sequence[str]) -> list[str]:
    """The names, those that occur several times with their mark."""
    count = Counter(names)
    return [name if count[name] == 1 else f"{name}, {mark}" for name, mark in zip(names, marks, strict=True)]


def heading_of(first: Mapping[str, Any]) -> str:
    """What the runs of a group share, as text, from one of their summaries."""
    limit = f"{first.get('max_new_tokens')} new tokens at most"
    return ", ".join([str(first.get("dataset")), terminal.place(first), terminal.how(first), limit])


def _rows(records: Sequence[Record]) -> list[Row]:
    """Of the records of a group, the fastest first."""
    settings, ranks = _settings(records), dict.fromkeys(GUARANTEES, 0)
    summaries = [record.summary for record in records if record.summary is not None]
    above: dict[str, Row] = {}
    rows = []
    for record, summary, reason in zip(records, summaries, rules.in_table(summaries), strict=True):
        row = Row(record, summary, family(record.manifest), settings[record.path.name], None, reason)
        if not reason:
            ranks[row.guarantee] += 1
            row = replace(row, rank=ranks[row.guarantee], tie=_tie(above.get(row.guarantee), row))
            above[row.guarantee] = row
        rows.append(row)
    return sorted(rows, key=lambda e: (e.rank is None, e.rank is not None and GUARANTEES.index(e.guarantee)))


def _tie(above: Row | None, row: Row) -> bool:
    """Whether the intervals of two neighbours overlap; an interval that is not known overlaps with all."""
    if above is None:
        return False
    low, high = above.headline["low"], row.headline["high"]
    return low is None or high is None or bool(low <= high)


def _settings(records: Sequence[Record]) -> dict[str, str]:
    """By folder; runs with the same settings of their method get the end of their names."""
    known = frontier.settings(records)
    of = {record.path.name: known[str((record.summary or {})["run_id"])] for record in records}
    methods = {record.path.name: (record.summary or {})["method"] for record in records}
    count = Counter((methods[name], setting) for name, setting in of.items())
    return {
        name: setting if count[methods[name], setting] == 1 else f"{setting} #{name[-4:]}".strip()
        for name, setting in of.items()
    }


# ------------------------------------------------------------------------------------------------------------- tables


def ranking(group: ComparisonGroup) -> pd.DataFrame:
    """One row per run, as text; with a score for translations and where the text may change."""
    import pandas as pd

    judged = any(row.guarantee != GUARANTEES[0] or terminal.translates(row.summary) for row in group.rows)
    named = (name for row in group.rows for name in row.summary.get("quality") or {})
    scores = list(dict.fromkeys(named)) if judged else []
    frame = pd.DataFrame([_ranking_row(row, scores[:1]) for row in group.rows])
    return frame if frame["not ranked"].any() else frame.drop(columns="not ranked")


def _ranking_row(row: Row, scores: Sequence[str]) -> dict[str, str]:
    own, before = row.summary.get("quality") or {}, row.summary["baseline"].get("quality") or {}
    cells = {name: cell(row.summary) for name, cell in terminal.COLUMNS.items() if name not in ("method", "guarantee")}
    return {
        "guarantee": row.guarantee,
        "rank": rank(row),
        "family": row.family,
        "method": row.label,
        **{name: cell for name, cell in cells.items() if name != "result"},
        "predicted": terminal.times(row.summary.get("predicted_speedup")),
        **{
            f"{name} (was)": f"{terminal.number(own.get(name))} ({terminal.number(before.get(name))})"
            for name in scores
        },
        "result": cells["result"],
        "not ranked": row.note,
        "run": row.name,
    }


def rank(row: Row) -> str:
    """The rank as text: ``2``, ``2 tie`` or ``-``."""
    return "-" if row.rank is None else f"{row.rank}{' tie' if row.tie else ''}"


def winners(found: Sequence[ComparisonGroup]) -> pd.DataFrame:
    """The fastest ranked run of each family and guarantee in each group, and how many have no rank."""
    import pandas as pd

    return pd.DataFrame([line for group in found for line in _winners(group)])


def _winners(group: ComparisonGroup) -> Iterator[dict[str, Any]]:
    kinds = sorted({(row.family, row.guarantee) for row in group.rows})
    for kind in kinds:
        runs = [row for row in group.rows if (row.family, row.guarantee) == kind]
        ranked = [row for row in runs if row.rank is not None]
        best = ranked[0] if ranked else None
        yield {
            "table": group.heading,
            "family": kind[0],
            "guarantee": kind[1],
            "fastest": best.label if best else "-",
            "speed-up": terminal.times(best.speed) if best else "-",
            "95 %": terminal.interval(best.headline) if best else "-",
            "ranked": len(ranked),
            "not ranked": len(runs) - len(ranked),
        }


def categories(group: ComparisonGroup, *, least: int = 1) -> pd.DataFrame:
    """Speed-up of each valid run (rows) by category of prompts (columns), of at least so many conversations."""
    import pandas as pd

    found = [row.summary["speedup"].get("by_category", {}) for row in group.valid]
    values = [{name: each["value"] for name, each in of.items() if each["n"] >= least} for of in found]
    return pd.DataFrame(values, index=[row.label for row in group.valid])


def fastest(group: ComparisonGroup) -> ComparisonGroup:
    """Of each method and guarantee only the fastest ranked run, the user's and the reference ones separately."""
    kept: dict[tuple[str, str, str], Row] = {}
    for row in sorted(group.ranked, key=lambda row: -(row.speed or 0.0)):
        kept.setdefault((row.method, row.guarantee, row.record.source), row)
    return ComparisonGroup(group.heading, list(kept.values()))


# ---------------------------------------------------------------------------------------------- across several groups


@dataclass(frozen=True)
class QualitySpeedPoint:
    """Quality and prompts per second of a run; ``before``: those of its model's baseline."""

    row: Row
    quality: float
    rate: float
    before: tuple[float, float] | None


@dataclass(frozen=True)
class QualitySpeedPlot:
    """Runs over the same prompts on one machine at one batch size; ``front``: names on the Pareto front."""

    heading: str
    metric: str
    points: list[QualitySpeedPoint]
    front: set[str]


def quality_speed_plots(found: Sequence[ComparisonGroup], metric: str, dataset: str) -> list[QualitySpeedPlot]:
    """Quality against prompts per second for all models of one data set.

    Between runs the machine drifts, which slows both arms. So the rate of a run is its speed-up in prompts per second
    times the median rate of its model's baseline.

    Args:
        metric: the score.
        dataset: a name, or its beginning.
    """
    alike: dict[str, list[Row]] = {}
    for group in found:
        if str(group.first.get("dataset")).startswith(dataset):
            alike.setdefault(shared(group, _OF_MODEL), []).extend(group.rows)
    made = (_quality_speed_plot(rows, metric) for rows in alike.values())
    return [plot for plot in made if plot.points]


def _quality_speed_plot(rows: Sequence[Row], metric: str) -> QualitySpeedPlot:
    baselines = _baseline_rates(rows)
    points = [point for row in rows if (point := _quality_speed_point(row, metric, baselines))]
    models = sorted({str(row.summary["model"]) for row in rows})
    summary = rows[0].summary
    facts = [summary.get("dataset"), summary.get("hardware"), summary.get("dtype"), terminal.how(summary)]
    front = pareto({p.row.name: (p.rate, p.quality) for p in points if p.row.valid})
    return QualitySpeedPlot(f"{', '.join(map(str, facts))}; models: {', '.join(models)}", metric, points, front)


def _baseline_rates(rows: Sequence[Row]) -> dict[Any, float]:
    """By model, the prompts per second of its baseline: the median over its valid runs, or over all if none is."""
    found: dict[Any, dict[bool, list[float]]] = {}
    for row in rows:
        if rate := row.summary["baseline"].get("prompts_per_s"):
            found.setdefault(row.summary["model"], {}).setdefault(row.valid, []).append(float(rate))
    return {model: median(rates.get(True) or rates[False]) for model, rates in found.items()}


def _quality_speed_point(row: Row, metric: str, baselines: Mapping[Any, float]) -> QualitySpeedPoint | None:
    """None where one of the two was not measured."""
    summary, baseline = row.summary, row.summary["baseline"]
    quality, rate = (summary.get("quality") or {}).get(metric), summary.get("prompts_per_s")
    own_before, quality_before = baseline.get("prompts_per_s"), (baseline.get("quality") or {}).get(metric)
    if quality is None or rate is None:
        return None
    if not own_before:
        return QualitySpeedPoint(row, float(quality), float(rate), None)
    rate_before = baselines[summary["model"]]
    before = None if quality_before is None else (rate_before, float(quality_before))
    return QualitySpeedPoint(row, float(quality), rate / own_before * rate_before, before)


def shared(group: ComparisonGroup, apart: Sequence[str]) -> str:
    """What makes groups alike that may differ in some of ``terminal.JOIN_KEYS``."""
    return repr([terminal.join_value(group.first, key) for key in terminal.JOIN_KEYS if key not in apart])


def slopes(group: ComparisonGroup, widths: Sequence[int] = (1, 4, 8, 16, 32, 64)) -> dict[int, float]:
    """By number of verified tokens M: time of a one-token pass over that of M tokens, the median over the runs.

    Times tokens per step it is the speed-up with free drafts.
    """
    import numpy as np

    found: dict[int, list[float]] = {}
    for row in group.valid:
        if not (stored := row.record.manifest.get("cost_curve")):
            continue
        curve = CostCurve.from_dict(stored)
        context = float(np.median(curve.contexts))
        single = curve.seconds(1, curve.batch, context)
        for width in widths:
            if width <= max(curve.nodes):
                found.setdefault(width, []).append(single / curve.seconds(width, curve.batch, context))
    return {width: float(np.median(ratios)) for width, ratios in sorted(found.items())}

"""``python -m bench frontier``: what speed costs in quality, and which points of a lossy method count.

Each threshold, depth or table of a method that may change the text is a point in quality and time. Such a point counts
only if it is faster than

- its own baseline, the same weights one token at a time,
- the fastest EXACT method,
- every static depth of at least its quality,
- the original weights, if it runs on weights trained to exit (``original=MODEL``), at no lower quality.

Quality is the data set's first score; without one, or with prompts of several categories, ROUGE-L of ids to the
baseline's output. INVALID runs are shown and do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.analysis import metrics, pairs
from bench.errors import UserError
from bench.report import collect, tables, terminal
from bench.report.collect import Record, Source
from bench.utils.stats import pareto
from bench.utils.text import flatten

STATIC = "static_depth"
OPEN, MISSING = "open", "not measured"
_OF_MODEL = ("model", "model_revision")
_FIRST = ("threshold", "depth")  # settings that come first in a label


@dataclass(frozen=True)
class Point:
    """One run as a point.

    Attributes:
        run_id, method, guarantee, valid: of the run.
        source: whose record it is.
        setting: the settings of the method in which its points differ.
        speed: speed-up over the autoregressive baseline of the same run, the headline.
        low, high: its 95 % interval; None where it has none.
        per_token: speed-up by tokens per second.
        quality: in the units of ``metric``.
        full: quality of the baseline.
        agreement: share of tokens that the target would have written.
        rouge_l: to the baseline's output, mean over prompts.
        length_ratio: output tokens over the baseline's.
        layer_equivalents: per token, output matrices and filled caches included; None if not counted.
        confidence: share of the time spent on deciding whether to exit; None if it was not measured.
        layers: share of the target's layers per token.
        certified: whether a calibration certified the threshold; None without calibration.
        seconds: of all prompts together, in the method and in the baseline.
    """

    run_id: str
    source: Source
    method: str
    guarantee: str
    valid: bool
    setting: str
    speed: float | None
    low: float | None
    high: float | None
    per_token: float | None
    metric: str
    quality: float | None
    full: float | None
    agreement: float | None
    rouge_l: float | None
    length_ratio: float | None
    layer_equivalents: float | None
    confidence: float | None
    layers: float | None
    certified: bool | None
    seconds: tuple[float | None, float | None]

    @property
    def exact(self) -> bool:
        return self.guarantee == "EXACT"


@dataclass(frozen=True)
class Frontier:
    """The points of comparable runs, the fastest first, and what each beats.

    Attributes:
        verdicts: per point, by name of the rival (``baseline``, ``exact``, ``static depth``, ``original``): yes, no,
            open (the intervals overlap), or not measured.
    """

    heading: str
    points: list[Point]
    verdicts: list[dict[str, str]] = field(default_factory=list)

    def counts(self, place: int) -> str:
        """``yes``, else the rivals that are not beaten."""
        verdicts = self.verdicts[place]
        if not verdicts:
            return ""
        if all(verdict == "yes" for verdict in verdicts.values()):
            return "yes"
        lost = [name for name, verdict in verdicts.items() if verdict == "no"]
        if lost:
            return f"no: {', '.join(lost)}"
        return "; ".join(f"{name} {verdict}" for name, verdict in verdicts.items() if verdict != "yes")


def frontiers(found: Sequence[Record], original: str | None = None, metric: str | None = None) -> list[Frontier]:
    """Points of all groups of comparable runs that contain a lossy one.

    Args:
        original: name of the model from whose weights the others were trained.
        metric: score used as quality; None: as above.

    Raises:
        UserError: a metric that no run of a group has.
    """
    by_summary = {id(record.summary): record for record in found if record.finished and record.summary}
    groups = collect.groups(record.summary for record in by_summary.values() if record.summary)
    lossy = [group for group in groups if any(run["guarantee"] != "EXACT" for run in group)]
    originals = [run for run in (record.summary for record in by_summary.values()) if run and run["model"] == original]
    return [_frontier(group, by_summary, originals, original, metric) for group in lossy]


def _frontier(
    group: Sequence[Mapping[str, Any]],
    by_summary: Mapping[int, Record],
    originals: Sequence[Mapping[str, Any]],
    original: str | None,
    metric: str | None,
) -> Frontier:
    group = sorted(group, key=lambda run: (not collect.is_valid(run), -(metrics.headline(run)["value"] or 0.0)))
    scored = _metric(group, metric)
    shown = settings([by_summary[id(run)] for run in group])
    points = [_point(by_summary[id(run)], scored, shown[str(run["run_id"])]) for run in group]
    beside = None
    if original is not None and group[0]["model"] != original:
        beside = [_point(by_summary[id(run)], scored, "") for run in originals if _alike(run, group[0])]
    heading = f"{group[0].get('dataset')}, {terminal.place(group[0])}, {terminal.how(group[0])}"
    return Frontier(heading, points, [_verdicts(point, points, beside) for point in points])


def _alike(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    return all(ours.get(key) == theirs.get(key) for key in terminal.JOIN_KEYS if key not in _OF_MODEL)


def _metric(group: Sequence[Mapping[str, Any]], wanted: str | None) -> str:
    known = dict.fromkeys(name for run in group for name in run.get("quality") or {})
    if wanted not in (None, "rouge_l", *known):
        raise UserError(
            f"quality must be one of {', '.join([*known, 'rouge_l'])} for {group[0].get('dataset')}, got {wanted}."
        )
    if wanted is not None:
        return wanted
    several = any(len(run["speedup"].get("by_category") or {}) > 1 for run in group)
    return "rouge_l" if several else next(iter(known), "rouge_l")


def _point(record: Record, metric: str, setting: str) -> Point:
    summary = record.summary
    assert summary is not None, "only finished runs have a point"
    found, similarity = metrics.headline(summary), similarity_to_baseline(record.path)
    scores = {"rouge_l": similarity} | (summary.get("quality") or {})
    full = {"rouge_l": 1.0} | (summary["baseline"].get("quality") or {})
    tokens, before = summary.get("n_output_tokens"), summary["baseline"].get("n_output_tokens")
    calibration = summary.get("calibration")
    return Point(
        run_id=str(summary["run_id"]),
        source=record.source,
        method=str(summary["method"]),
        guarantee=str(summary["guarantee"]),
        valid=collect.is_valid(summary),
        setting=setting,
        speed=found["value"],
        low=found["low"],
        high=found["high"],
        per_token=summary["speedup"].get("per_token"),
        metric=metric,
        quality=scores.get(metric),
        full=full.get(metric),
        agreement=(summary.get("agreement") or {}).get("exact"),
        rouge_l=similarity,
        length_ratio=tokens / before if tokens and before else None,
        layer_equivalents=(summary.get("method_facts") or {}).get("layer_equivalents_per_token"),
        confidence=(summary.get("method_facts") or {}).get("confidence_share"),
        layers=summary.get("layers_per_token"),
        certified=calibration["certified"] if calibration else None,
        seconds=(_seconds(summary), _seconds(summary["baseline"])),
    )


def _seconds(rates: Mapping[str, Any]) -> float | None:
    found = (rates.get("time_s") or {}).get("total")
    return None if found is None else float(found)


def similarity_to_baseline(folder: Path) -> float | None:
    """Mean ROUGE-L between both arms over the measured prompts; None without records of them."""
    try:
        return pairs.read(folder).similarity
    except UserError:
        return None


def settings(found: Sequence[Record]) -> dict[str, str]:
    """By run: the settings, chosen threshold included, in which it differs from another run of its method."""
    given: dict[str, dict[str, Any]] = {}
    for record in found:
        flat = dict(flatten(record.manifest.get("method") or {}))
        if calibration := record.manifest.get("calibration"):
            flat["threshold"] = calibration["threshold"]
        given[str((record.summary or {})["run_id"])] = flat
    shown = {}
    for name, flat in given.items():
        same = [other for other in given.values() if other.get("name") == flat.get("name")]
        differing = [key for key in flat if any(other.get(key) != flat[key] for other in same)]
        differing = [key for key in differing if key != "checkpoint" or flat[key] is not None]  # the project's own
        differing.sort(key=lambda key: (key not in _FIRST, "." in key))
        usual = [key for key in _FIRST if flat.get(key) is not None and key not in differing]
        shown[name] = " ".join(f"{key.rpartition('.')[2]}={_text(flat[key])}" for key in [*usual, *differing])
    return shown


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


# ----------------------------------------------------------------------------------------------------------- dominance


def _verdicts(point: Point, points: Sequence[Point], beside: Sequence[Point] | None) -> dict[str, str]:
    """What a point beats; empty if it is EXACT or INVALID."""
    if point.exact or not point.valid or point.speed is None:
        return {}
    valid = [other for other in points if other.valid and other.speed is not None]
    exact = sorted((other for other in valid if other.exact), key=lambda other: -(other.speed or 0.0))
    verdicts = {"baseline": _above(point, 1.0, 1.0), "exact": _faster(point, exact[0]) if exact else MISSING}
    if point.method != STATIC:
        verdicts["static depth"] = _against_static(point, [other for other in valid if other.method == STATIC])
    if beside is not None:
        verdicts["original"] = _against_original(point, beside)
    return verdicts


def _faster(point: Point, rival: Point) -> str:
    """``open`` if the intervals overlap, or one has none."""
    return OPEN if rival.low is None or rival.high is None else _above(point, rival.low, rival.high)


def _above(point: Point, low: float, high: float) -> str:
    if point.low is None or point.high is None:
        return OPEN
    if point.low > high:
        return "yes"
    return "no" if point.high < low else OPEN


def _against_static(point: Point, statics: Sequence[Point]) -> str:
    if not statics or point.quality is None:
        return MISSING
    as_good = [other for other in statics if other.quality is not None and other.quality >= point.quality]
    verdicts = {_faster(point, other) for other in as_good}
    return next((verdict for verdict in ("no", OPEN) if verdict in verdicts), "yes")


def _against_original(point: Point, beside: Sequence[Point]) -> str:
    """Against the fastest EXACT run of the original weights, by seconds, as the two have no common baseline."""
    fastest = min((o for o in beside if o.valid and o.exact), key=_own_seconds, default=None)
    if fastest is None or None in (point.seconds[0], fastest.seconds[0], point.quality, fastest.full):
        return MISSING
    assert point.quality is not None and fastest.full is not None
    return "yes" if _own_seconds(point) < _own_seconds(fastest) and point.quality >= fastest.full else "no"


def _own_seconds(point: Point) -> float:
    return float("inf") if point.seconds[0] is None else point.seconds[0]


def on_frontier(points: Iterable[Point]) -> set[str]:
    """Valid runs that no other one is both faster and better than, ties aside."""
    return pareto({point.run_id: (point.speed, point.quality) for point in points if point.valid})


# ---------------------------------------------------------------------------------------------------------- the table

HEADER = (
    "method", "setting", "guarantee", "speed-up", "95 %", "per token", "agreement", "ROUGE-L", "quality", "retained",
    "length", "layers", "layer-eq.", "deciding", "certified", "frontier", "counts",
)  # fmt: skip


def cells(frontier: Frontier) -> list[list[str]]:
    """The table of one group, as text."""
    best = on_frontier(frontier.points)
    lines = []
    for place, point in enumerate(frontier.points):
        kept = point.quality / point.full if point.quality is not None and point.full else None
        lines.append(
            [
                point.method,
                point.setting,
                point.guarantee,
                _shown(point.speed, "{:.2f}x"),
                "-" if point.low is None or point.high is None else f"{point.low:.2f}-{point.high:.2f}",
                _shown(point.per_token, "{:.2f}x"),
                _shown(point.agreement, "{:.1%}"),
                _shown(point.rouge_l, "{:.3f}"),
                _shown(point.quality, "{:.2f}"),
                _shown(kept, "{:.1%}"),
                _shown(point.length_ratio, "{:.2f}"),
                _shown(point.layers, "{:.2f}"),
                _shown(point.layer_equivalents, "{:.1f}"),
                _shown(point.confidence, "{:.0%}"),
                "-" if point.certified is None else ("yes" if point.certified else "no"),
                "yes" if point.run_id in best else "",
                frontier.counts(place) if point.valid else "INVALID",
            ]
        )
    return lines


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def text(found: Sequence[Frontier]) -> str:
    """All tables, aligned, for the terminal."""
    parts = [
        f"{frontier.heading}\nquality: {frontier.points[0].metric}\n\n{tables.aligned(HEADER, cells(frontier))}"
        for frontier in found
    ]
    return "\n\n".join(parts) or "No run of a method that may lose quality. Run: python -m bench sweep=frontier"


def markdown(found: Sequence[Frontier]) -> str:
    """All tables for reading in a repository."""
    parts = [
        f"## {frontier.heading}\n\nQuality: {frontier.points[0].metric}\n\n" + tables.markdown(HEADER, cells(frontier))
        for frontier in found
    ]
    return "\n\n".join(parts) + "\n"

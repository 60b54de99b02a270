"""The report as one self-contained HTML page: sort, filter, and open a run to see its record.

Text from records is escaped or in a block of JSON that is shown as text only; a content policy allows only the page's
own script. The tables work without scripts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import count
from pathlib import Path
from typing import Any

from bench.errors import UserError
from bench.records import run_folder
from bench.report import leaderboard, terminal
from bench.report.leaderboard import ComparisonGroup, Row
from bench.report.style import style_of

TITLE = "DecodeBench: results"
_PAGE = Path(__file__).parent / "page"
_SAMPLES, _TEXT, _LIST = 3, 1500, 12  # prompts shown of a run, characters of a text, rows of a list
_FILTERS = {
    "family": lambda row: row.family,
    "guarantee": lambda row: row.guarantee,
    "dataset": lambda row: str(row.summary.get("dataset")),
    "model": lambda row: str(row.summary.get("model")),
    "batch": lambda row: f"{row.summary.get('batch_size')}{', refilled' if row.summary.get('refill') else ''}",
    "hardware": lambda row: f"{row.summary.get('hardware')}, {row.summary.get('dtype')}",
}
Span = tuple[terminal.Number, terminal.Number]
_LABELS = {"dataset": "data set", "batch": "batch size"}


def render(groups: Sequence[ComparisonGroup], open_runs: Sequence[str]) -> str:
    """The page.

    Args:
        groups: of ``leaderboard.groups``.
        open_runs: a line for each run without numbers.
    """
    style, script = ((_PAGE / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    names = (f"run-{number}" for number in count())
    ids = {id(row): next(names) for group in groups for row in group.rows}
    body = "\n".join(_section(group, ids) for group in groups)
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{TITLE}</title>\n<style>{style}</style>\n</head>\n<body>\n<h1>{TITLE}</h1>",
            _INTRODUCTION,
            _filters([row for group in groups for row in group.rows]),
            '<p id="count" role="status"></p>\n<main>',
            body or "<p>No finished run yet. Run: <code>python -m bench</code></p>",
            _unfinished(open_runs),
            f'</main>\n<script type="application/json" id="data">{_data(groups, ids)}</script>',
            f"<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


_INTRODUCTION = """<p>Each table holds runs that share model, data, machine, type, sampling, batch size and limit.
Speed-ups are over a baseline measured in the same run, with 95 % intervals over the prompts. Ranks count within one
guarantee; INVALID runs have none and come last, however the table is sorted.</p>"""


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _unfinished(open_runs: Sequence[str]) -> str:
    if not open_runs:
        return ""
    items = "\n".join(f"<li>{escape(line)}</li>" for line in open_runs)
    return f"<section><h2>Not finished</h2>\n<ul>\n{items}\n</ul></section>"


def _filters(rows: Sequence[Row]) -> str:
    selects = "\n".join(_select(name, {of(row) for row in rows}) for name, of in _FILTERS.items())
    return (
        f'<form id="filters" hidden aria-label="Filters">\n{selects}\n'
        '<label>words <input type="search" name="text"></label>\n'
        '<label class="check"><input type="checkbox" name="invalid" checked> INVALID runs</label>\n'
        '<button type="reset">all runs</button>\n</form>'
    )


def _select(name: str, choices: Iterable[str]) -> str:
    options = "".join(f"<option>{escape(choice)}</option>" for choice in sorted(choices, key=_naturally))
    label = _LABELS.get(name, name)
    return f'<label>{label} <select name="{name}"><option value="">all</option>{options}</select></label>'


def _naturally(word: str) -> tuple[int, str]:
    return (int(word), "") if word.isdigit() else (0, word)


# ------------------------------------------------------------------------------------------------------------- tables

_Number = Callable[[Row], Any]
# By heading: the value to sort by, None for text. The rank begins with the first, all others with the highest.
_SORTED: dict[str, _Number] = {
    "rank": lambda row: row.rank,
    "speed-up": lambda row: row.speed,
    "predicted": lambda row: row.summary.get("predicted_speedup"),
    "tokens/step": lambda row: row.summary.get("tokens_per_step"),
    "tokens/s": lambda row: row.summary.get("tokens_per_s"),
    "memory": lambda row: row.summary.get("peak_memory_bytes"),
    "agreement": lambda row: (row.summary.get("agreement") or {}).get("exact"),
    "quality": lambda row: next(iter((row.summary.get("quality") or {}).values()), None),
}
_COLUMNS = (
    "rank", "method", "family", "guarantee", "speed-up", "95 %", "predicted", "tokens/step", "tokens/s", "memory",
    "agreement", "quality", "result", "run",
)  # fmt: skip


def _cells(row: Row) -> dict[str, str]:
    """Text of all columns but the interval and the run."""
    own, before = row.summary.get("quality") or {}, row.summary["baseline"].get("quality") or {}
    name = next(iter(own), None)
    cells = {name: cell(row.summary) for name, cell in terminal.COLUMNS.items()} | {
        "rank": "-" if row.rank is None else str(row.rank),
        "method": row.label,
        "family": row.family,
        "guarantee": row.guarantee,
        "predicted": terminal.times(row.summary.get("predicted_speedup")),
        "quality": f"{name} {terminal.number(own[name])} (was {terminal.number(before.get(name))})" if name else "-",
    }
    return {name: "-" if cell == terminal.MISSING else cell for name, cell in cells.items()}


def _section(group: ComparisonGroup, ids: Mapping[int, str]) -> str:
    span = _span(group)
    head = "".join(map(_heading, _COLUMNS))
    lines = "\n".join(_table_row(row, place, ids[id(row)], span) for place, row in enumerate(group.rows))
    heading = escape(group.heading)
    return (
        f'<section class="group">\n<h2>{heading}</h2>\n{_scatter(group, ids)}\n'
        f'<div class="scroll" role="region" tabindex="0" aria-label="{heading}">\n<table>\n'
        f"<caption>{heading}</caption>\n"
        f"<thead><tr><td></td>{head}</tr></thead>\n"
        f"<tbody>\n{lines}\n</tbody>\n</table>\n</div>\n</section>"
    )


def _heading(name: str) -> str:
    first = "descending" if name in _SORTED and name != "rank" else "ascending"
    sortable = "" if name == "95 %" else f' data-first="{first}"'
    return f'<th scope="col"{sortable}>{escape(name)}</th>'


def _table_row(row: Row, place: int, name: str, span: Span) -> str:
    texts = _cells(row)
    cells = "".join(_cell(column, texts, row, span) for column in _COLUMNS)
    facts = {key: of(row) for key, of in _FILTERS.items()}
    words = " ".join([row.name, *texts.values(), *facts.values()]).lower()
    data = {**facts, "words": words, "place": str(place), "name": f"{row.label}, {texts['speed-up']}"}
    attributes = " ".join(f'data-{key}="{escape(value)}"' for key, value in data.items())
    kind = "run" if row.valid else "run invalid"
    return f'<tr class="{kind}" id="{name}" {attributes}><td></td>{cells}</tr>'


def _cell(column: str, texts: Mapping[str, str], row: Row, span: Span) -> str:
    if column == "95 %":
        return f'<td class="number">{_interval(row, span)} {escape(texts[column])}</td>'
    if column == "run":
        reasons = (row.summary.get("verdict") or {}).get("reasons", [])
        why = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
        note = f"<details><summary>why INVALID</summary><ul>{why}</ul></details>" if why else ""
        return f"<td><code>{escape(row.name)}</code>{note}</td>"
    if column not in _SORTED:
        return f"<td>{escape(texts[column])}</td>"
    value = _SORTED[column](row)
    return f'<td class="number" data-value="{"" if value is None else value}">{escape(texts[column])}</td>'


# ------------------------------------------------------------------------------------------------------------ pictures

_WIDE, _HIGH = 120, 16  # of an interval
_PLOT = (460, 240, 44, 32)  # width, height, room at the left and below


def _span(group: ComparisonGroup) -> Span:
    """Ends of the axis that the intervals of a table share."""
    totals = [row.summary["speedup"]["total"] for row in group.valid]
    ends = [total[key] for total in totals for key in ("low", "high", "value") if total[key]]
    return min([0.9, *ends]), max([1.1, *ends])


def _interval(row: Row, span: Span) -> str:
    """Dot and interval on the table's logarithmic axis, with a line at 1; nothing for a run without a rank."""
    total = row.summary["speedup"]["total"]
    if row.rank is None or not total["value"]:
        return ""
    low, high = (total["value"], total["value"]) if not total["low"] else (total["low"], total["high"])
    a, b, dot, one = (round(_place(value, span), 1) for value in (low, high, total["value"], 1.0))
    colour, middle = style_of(row.method).colour, _HIGH / 2
    return (
        f'<svg width="{_WIDE}" height="{_HIGH}" aria-hidden="true">'
        f'<path d="M{one} 0V{_HIGH}" stroke="#888" stroke-dasharray="2 2"/>'
        f'<path d="M{a} {middle}H{b}" stroke="{colour}" stroke-width="2"/>{_dot(dot, middle, row)}</svg>'
    )


def _place(value: terminal.Number, span: Span) -> float:
    low, high = map(math.log, span)
    return 5 + (_WIDE - 10) * (math.log(value) - low) / (high - low)


def _dot(x: float, y: float, row: Row) -> str:
    """Full for EXACT, hollow for what may change the text."""
    colour = style_of(row.method).colour
    fill = colour if row.guarantee == leaderboard.GUARANTEES[0] else "#fff"
    return f'<circle cx="{x}" cy="{y}" r="4" fill="{fill}" stroke="{colour}" stroke-width="2"/>'


def _scatter(group: ComparisonGroup, ids: Mapping[int, str]) -> str:
    """Tokens per step against speed-up and, where the text may change, speed-up against quality."""
    steps = [(row, _SORTED["tokens/step"](row), row.speed) for row in group.valid]
    plots = [_plot("tokens per step", "speed-up", steps, ids)]
    if any(row.guarantee != leaderboard.GUARANTEES[0] for row in group.valid):
        scores = [(row, row.speed, _SORTED["quality"](row)) for row in group.valid]
        name = next((key for row in group.valid for key in row.summary.get("quality") or {}), "quality")
        plots.append(_plot("speed-up", name, scores, ids))
    return f'<div class="plots">{"".join(plots)}</div>'


def _plot(x_name: str, y_name: str, points: Sequence[tuple[Row, Any, Any]], ids: Mapping[int, str]) -> str:
    known = [(row, float(x), float(y)) for row, x, y in points if x is not None and y is not None]
    if len(known) < 2:
        return ""
    wide, high, left, below = _PLOT
    x_axis = _Axis([x for _, x, _ in known], wide - left)
    y_axis = _Axis([y for _, _, y in known], high - below)
    marks = "".join(
        _point(row, left + x_axis.at(x), high - below - y_axis.at(y), f"{row.label}: {x:.2f}, {y:.2f}", ids)
        for row, x, y in known
    )
    lines = "".join(
        [f'<path d="M{left} 0V{high - below}H{wide}" fill="none" stroke="#888"/>']
        + [
            f'<text x="{left + x_axis.at(t):.1f}" y="{high - below + 14}" text-anchor="middle">{t:g}</text>'
            for t in x_axis.ticks
        ]
        + [
            f'<text x="{left - 5}" y="{high - below - y_axis.at(t) + 4:.1f}" text-anchor="end">{t:g}</text>'
            for t in y_axis.ticks
        ]
    )
    label = f"{escape(y_name)} (upwards) against {escape(x_name)} (to the right); the values are in the table"
    return (
        f'<figure><svg width="{wide}" height="{high}" role="img" aria-label="{label}">{lines}{marks}</svg>'
        f"<figcaption>{escape(y_name)} against {escape(x_name)}; full dots are EXACT</figcaption></figure>"
    )


def _point(row: Row, x: float, y: float, title: str, ids: Mapping[int, str]) -> str:
    dot = _dot(round(x, 1), round(y, 1), row)
    return f'<g data-run="{ids[id(row)]}"><title>{escape(title)}</title>{dot}</g>'


class _Axis:
    """Values to pixels, with round numbers as ticks."""

    def __init__(self, values: Sequence[float], size: int) -> None:
        low, high = min(values), max(values)
        room = (high - low or abs(high) or 1.0) * 0.08
        self.low, self.high, self.size = low - room, high + room, size
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / 2))
        step = next(step * by for by in (0.5, 1, 2, 5, 10) if (self.high - self.low) / (step * by) <= 6)
        first = math.ceil(self.low / step)
        self.ticks = [round(i * step, 9) for i in range(first, math.floor(self.high / step) + 1)]

    def at(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low) * self.size


# ------------------------------------------------------------------------------------------------------------- details


def _data(groups: Sequence[ComparisonGroup], ids: Mapping[int, str]) -> str:
    """Details of all runs as JSON without characters of markup."""
    found = {ids[id(row)]: _details(row) for group in groups for row in group.rows}
    text = json.dumps(found, default=str, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _details(row: Row) -> dict[str, Any]:
    summary, manifest = row.summary, row.record.manifest
    verdict = summary.get("verdict") or {}
    numbers = (
        "ttft_s",
        "tpot_s",
        "latency_s",
        "time_s",
        "acceptance_rate",
        "acceptance_at",
        "alpha",
        "layers_per_token",
    )
    categories = summary["speedup"].get("by_category", {})
    return {
        "reasons": verdict.get("reasons", []),
        "warnings": verdict.get("warnings", []),
        "command": f"python -m {' '.join(map(str, manifest.get('argv') or []))}",
        "agreement": summary.get("agreement"),
        "numbers": _brief({name: summary.get(name) for name in numbers})
        | {f"speed-up, {name}": _interval_text(found) for name, found in categories.items()}
        | {f"quality, {name}": value for name, value in (summary.get("quality") or {}).items()},
        "samples": list(_samples(row)),
        "manifest": _brief(manifest),
    }


def _interval_text(found: Mapping[str, Any]) -> str:
    return f"{terminal.times(found['value'])}, 95 % {terminal.interval(found)}, n = {found['n']}"


def _brief(value: Any) -> Any:
    """The same with long lists and texts cut."""
    if isinstance(value, Mapping):
        return {str(key): _brief(inner) for key, inner in value.items()}
    if isinstance(value, list):
        more = [f"... {len(value) - _LIST} more"] if len(value) > _LIST else []
        return [_brief(inner) for inner in value[:_LIST]] + more
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return f"{value[:_TEXT]} ..." if isinstance(value, str) and len(value) > _TEXT else value


def _samples(row: Row) -> Iterator[dict[str, Any]]:
    """What both arms wrote to the first prompts."""
    found: dict[str, dict[str, Any]] = {}
    for line in _lines(run_folder.samples_file(row.record.path)):
        if line.get("phase") != "measure" or line.get("repeat"):
            continue
        prompt = str(line.get("prompt_id"))
        if prompt not in found and len(found) == _SAMPLES:
            break
        shown = found.setdefault(prompt, {"prompt": prompt, "category": str(line.get("category")), "arms": {}})
        shown["arms"][f"{line.get('arm')}, {line.get('n_output_tokens')} tokens"] = _brief(str(line.get("text")))
    yield from found.values()


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Rows one by one; a torn one ends them."""
    try:
        for line in run_folder.read_lines(file) if file.is_file() else ():
            yield dict(json.loads(line))
    except (UserError, ValueError, TypeError):
        return

"""The report as one self-contained HTML page: charts, and tables to sort, filter and open.

Text from records is escaped or in a packed block of JSON that is shown as text only; a content policy allows only the
page's own scripts. Only the first rows of the tables are in the page as markup, and these work without scripts; the
other rows and the details of runs are unpacked when they are shown.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from bench.analysis import audit
from bench.analysis.ranking import SCORE_LOSS
from bench.records.rivals import Row as Imported
from bench.report import chart_data, leaderboard, rivals, run_details, terminal
from bench.report.leaderboard import ComparisonGroup, Row
from bench.report.style import style_of

TITLE = "DecodeBench: results"
EXACT = leaderboard.GUARANTEES[0]
_PAGE = Path(__file__).parent / "page"
_SCRIPTS = ("vendor/d3/d3.min.js", "vendor/plot/plot.umd.min.js", "unpack.js", "charts.js", "report.js")
_STYLE_OF_PLOT = re.compile(r'append\("style"\)\.text\(`(:where\(\.\$\{\w\}\) \{.*?)`\)')
_CLASS = "chart"  # of each drawing, as charts.js names it
_FILTERS: dict[str, Callable[[Row], str]] = {
    "family": lambda row: row.family,
    "guarantee": lambda row: row.guarantee,
    "dataset": lambda row: str(row.summary.get("dataset")),
    "model": lambda row: str(row.summary.get("model")),
    "batch": lambda row: f"{row.summary.get('batch_size')}{', refilled' if row.summary.get('refill') else ''}",
    "hardware": lambda row: f"{row.summary.get('hardware')}, {row.summary.get('dtype')}",
    "source": lambda row: row.record.source,
}
_LABELS = {"dataset": "data set", "batch": "batch size"}
STEP = 100  # rows of a table that are shown at first, and that each press of a button adds
_STATIC = 500  # rows of all tables that are in the page as markup
_PACKED = 64  # runs whose details are unpacked together
Span = tuple[terminal.Number, terminal.Number]
Ids = Mapping[Path, str]


def render(groups: Sequence[ComparisonGroup], open_runs: Sequence[str], imported: Sequence[Imported] = ()) -> str:
    """The page.

    Args:
        groups: of ``leaderboard.groups``; those with own runs are put first, then the largest.
        open_runs: a line for each run without numbers.
        imported: figures of other engines, in a section of their own.
    """
    groups = sorted(groups, key=lambda group: ("own" not in chart_data.sources(group), -len(group.valid)))
    rows = [row for group in groups for row in group.rows]
    ids = {row.record.path: f"run-{number}" for number, row in enumerate(rows)}
    tables = _made(groups, ids)
    style, *scripts = ((_PAGE / name).read_text(encoding="utf-8") for name in ("report.css", *_SCRIPTS))
    style += _hidden_columns()
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, scripts)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{TITLE}</title>\n<style>{style}</style>\n</head>\n<body>\n<h1>{TITLE}</h1>",
            _INTRODUCTION,
            _tiles(groups, ids) if rows else "",
            _contents(tables),
            _filters(rows),
            '<p id="count" role="status"></p>',
            _NO_SCRIPTS if any(table.packed for table in tables) else "",
            _CHARTS,
            f'<main data-hidden="{" ".join(_HIDDEN)}">',
            "\n".join(table.markup for table in tables)
            or "<p>No finished run yet. Run: <code>python -m bench</code></p>",
            rivals.html(imported),
            _unfinished(open_runs),
            f"</main>\n{_packed('charts-data', chart_data.charts(groups, ids))}",
            _packed("index-data", _index(tables)),
            *(_packed(f"rows-{place}", table.packed) for place, table in enumerate(tables) if table.packed),
            *_details(rows),
            *(f"<script>{script}</script>" for script in scripts),
            "</body>\n</html>\n",
        ]
    )


_INTRODUCTION = """<p>Each table holds runs that share model, data, machine, type, sampling, batch size and limit.
Speed-ups are over a baseline measured in the same run, with 95 % intervals over the prompts. Ranks count within one
guarantee, <em>tie</em> marks an interval that overlaps that of the row above. Runs that are INVALID, that show nothing,
or that lost quality have none, and come last, however the table is sorted. <em>own</em> runs were measured here,
<em>reference</em> records are part of the project.</p>"""

_NO_SCRIPTS = """<noscript><p>Without scripts the tables show their first runs only. <code>python -m bench report
out=page.md</code> writes all of them.</p></noscript>"""

_CHARTS = """<section id="charts" hidden aria-label="Charts">
<h2>Charts</h2>
<ul class="legend"></ul>
<div class="figures"></div>
</section>"""


def _policy(style: str, scripts: Sequence[str]) -> str:
    """Only this style, these scripts, and the style that Plot puts into a drawing."""
    found = _STYLE_OF_PLOT.search(scripts[1])
    assert found, "the vendored Plot puts its style into a drawing in another way"
    drawn = re.sub(r"\$\{\w\}", _CLASS, found[1]).replace("\\n", "\n")
    styles, allowed = " ".join(map(_hash, (style, drawn))), " ".join(map(_hash, scripts))
    return f"default-src 'none'; style-src {styles}; script-src {allowed}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _packed(name: str, value: Any) -> str:
    """Data as gzip in base64, which has no character of markup."""
    text = json.dumps(value, default=str, separators=(",", ":"))
    packed = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    return f'<script type="application/gzip" id="{name}">{packed}</script>'


def _details(rows: Sequence[Row]) -> Iterator[str]:
    """What rows show when they are opened, many runs to a block; the place of a run is the number in its id."""
    for start in range(0, len(rows), _PACKED):
        found = [run_details.details(row) for row in rows[start : start + _PACKED]]
        facts = [dict(each.pop("manifest")) for each in found]
        names = list(dict.fromkeys(name for each in facts for name in each))
        manifests = [[each.get(name) for each in facts] for name in names]  # alike ones side by side pack well
        yield _packed(f"details-{start // _PACKED}", {"runs": found, "names": names, "manifests": manifests})


def _unfinished(open_runs: Sequence[str]) -> str:
    if not open_runs:
        return ""
    items = "\n".join(f"<li>{escape(line)}</li>" for line in open_runs)
    return f'<section id="unfinished"><h2>Not finished</h2>\n<ul>\n{items}\n</ul></section>'


# -------------------------------------------------------------------------------------------------------------- tiles


def _tiles(groups: Sequence[ComparisonGroup], ids: Ids) -> str:
    ranked = [row for group in groups for row in group.ranked]
    exact = [row for row in ranked if row.guarantee == EXACT]
    kept = [row for row in ranked if row.guarantee != EXACT and chart_data.quality(row)]
    rows = [row for group in groups for row in group.rows]
    results = Counter(audit.result(row.summary) for row in rows)
    by_source = Counter(row.record.source for row in rows)
    machines = Counter(str(row.summary.get("hardware")) for row in rows)
    types = Counter(_FILTERS["hardware"](row) for row in rows)
    tiles = [
        _best("Best exact speed-up", exact, ids, ""),
        _best("Best at kept quality", kept, ids, f"at least {100 * (1 - SCORE_LOSS):.0f} % of the baseline's score"),
        _tile(
            "Records",
            str(len(rows)),
            ", ".join(f"{results[result]} {result}" for result in audit.RESULTS if results[result]),
            ", ".join(f"{count} {source}" for source, count in sorted(by_source.items())),
        ),
        _tile(
            "Machines" if len(machines) > 1 else "Machine",
            str(len(machines)) if len(machines) > 1 else next(iter(machines)),
            *(f"{name}: {terminal.plural(count, 'run')}" for name, count in types.most_common(4)),
        ),
    ]
    return f'<ul class="tiles">\n{"".join(tiles)}</ul>'


def _best(name: str, among: Sequence[Row], ids: Ids, rule: str) -> str:
    """The run whose interval begins highest, an own one if there is any: few prompts give wide intervals."""
    sure = [row for row in among if row.headline["low"]]
    own = [row for row in sure if row.record.source == "own"]
    if not sure:
        return _tile(name, "-", "no ranked run with an interval", rule)
    row = max(own or sure, key=lambda row: float(row.headline["low"]))
    total, summary = row.headline, row.summary
    score = chart_data.quality(row) if rule else None
    judged = f"{chart_data.SCORES.get(score[0], score[0])} {score[1]:.1f} (baseline {score[2]:.1f}); " if score else ""
    return _tile(
        name,
        terminal.times(total["value"]),
        f"95 % {terminal.interval(total)}",
        f'<a href="#{ids[row.record.path]}">{escape(row.label)}</a>',
        f"{summary.get('model')} on {summary.get('dataset')}, batch {summary.get('batch_size')}, {row.record.source}",
        f"{judged}{rule}",
    )


def _tile(name: str, value: str, *lines: str) -> str:
    """A line that begins with a link is markup already."""
    shown = "".join(f"<span>{line if line.startswith('<a ') else escape(line)}</span>" for line in lines if line)
    return f"<li><h2>{escape(name)}</h2><strong>{escape(value)}</strong>{shown}</li>\n"


# --------------------------------------------------------------------------------------------- filters and contents


def _filters(rows: Sequence[Row]) -> str:
    selects = "\n".join(_select(name, {of(row) for row in rows}) for name, of in _FILTERS.items())
    boxes = "\n".join(map(_box, (name for name in _COLUMNS if name != "method")))
    return (
        f'<form id="filters" hidden aria-label="Filters">\n{selects}\n'
        '<label>words <input type="search" name="text"></label>\n'
        '<label class="check"><input type="checkbox" name="invalid" checked> INVALID runs</label>\n'
        '<button type="reset">all runs</button>\n'
        f'<details class="columns"><summary>columns</summary><div>{boxes}</div></details>\n</form>'
    )


def _box(column: str) -> str:
    """Whether a column shows."""
    facts = f"{'' if column in _HIDDEN else ' checked'}{' data-phone' if column in _ON_A_PHONE else ''}"
    return f'<label class="check"><input type="checkbox" value="{_css(column)}"{facts}> {escape(column)}</label>'


def _select(name: str, choices: Iterable[str]) -> str:
    options = "".join(f"<option>{escape(choice)}</option>" for choice in sorted(choices, key=_naturally))
    label = _LABELS.get(name, name)
    return f'<label>{label} <select name="{name}"><option value="">all</option>{options}</select></label>'


def _naturally(word: str) -> tuple[int, str]:
    return (int(word), "") if word.isdigit() else (0, word)


def _contents(tables: Sequence[_Table]) -> str:
    items = "\n".join(f'<li><a href="#table-{place}">{table.line}</a></li>' for place, table in enumerate(tables))
    title = terminal.plural(len(tables), "table")
    return f'<nav aria-label="Contents"><details><summary>Contents: {title}</summary>\n<ol>{items}</ol></details></nav>'


# ------------------------------------------------------------------------------------------------------------- tables

_Number = Callable[[Row], Any]
# By heading: the value to sort by, None for text.
_SORTED: dict[str, _Number] = {
    "speed-up": lambda row: row.speed,
    "novel": lambda row: terminal.novel(row.summary),
    "worst": lambda row: (row.summary["speedup"].get("floor") or {}).get("minimum"),
    "slower": lambda row: (row.summary["speedup"].get("floor") or {}).get("slower_share"),
    "predicted": lambda row: row.summary.get("predicted_speedup"),
    "tokens/step": lambda row: row.summary.get("tokens_per_step"),
    "tokens/s": lambda row: row.summary.get("tokens_per_s"),
    "memory": lambda row: row.summary.get("peak_memory_bytes"),
    "agreement": lambda row: (row.summary.get("agreement") or {}).get("exact"),
    "identical": lambda row: (row.summary.get("agreement") or {}).get("identical_to_baseline"),
    "quality": lambda row: next(iter((row.summary.get("quality") or {}).values()), None),
}
_RANK, _SETTING, _REASON = "rank", "setting", "not ranked"
_COLUMNS = (
    _SETTING, "method", _RANK, "guarantee", "speed-up", "95 %", "novel", "worst", "slower", "tokens/step", "tokens/s",
    "agreement", "identical", "quality", "result", _REASON, "run", "family", "predicted", "memory", "source",
)  # fmt: skip
_HIDDEN = ("slower", "identical", "family", "predicted", "memory", "source")  # until they are chosen
_ON_A_PHONE = ("speed-up", "95 %", "result")  # besides the method
_ASCENDING = (_RANK, "memory", "slower")  # numbers of which the least comes first


def _css(column: str) -> str:
    """A column as the name of a class."""
    return re.sub(r"\W+", "", column) or column


def _hidden_columns() -> str:
    """Which columns show is an attribute of <main>."""
    return "".join(f'main[data-hidden~="{_css(name)}"] .c-{_css(name)} {{ display: none; }}\n' for name in _COLUMNS)


def _cells(row: Row, setting: str, metric: str | None) -> dict[str, str]:
    """Text of all columns but the interval and the run; a score that is not the table's ``metric`` is named."""
    own, before = row.summary.get("quality") or {}, row.summary["baseline"].get("quality") or {}
    name = next(iter(own), None)
    shown = "" if name == metric else f"{chart_data.SCORES.get(str(name), name)} "
    cells = {name: cell(row.summary) for name, cell in terminal.COLUMNS.items()} | {
        _SETTING: setting,
        _RANK: leaderboard.rank(row),
        _REASON: row.note,
        "method": row.label,
        "family": row.family,
        "guarantee": row.guarantee.replace("_MODEL", ""),
        "predicted": terminal.times(row.summary.get("predicted_speedup")),
        "quality": f"{shown}{terminal.number(own[name])} (was {terminal.number(before.get(name))})" if name else "-",
        "source": row.record.source,
    }
    return {name: "-" if cell == terminal.MISSING else cell for name, cell in cells.items()}


@dataclass(frozen=True)
class _Table:
    """One table of the page.

    Attributes:
        line: of the contents.
        markup: heading and first rows.
        packed: by id, markup of the other rows.
        index: by what each row is found and sorted: id, 0 ranked, 1 not, 2 INVALID, name, words, values of the filters,
            values of the columns by heading.
    """

    line: str
    markup: str
    packed: dict[str, str]
    index: list[list[Any]]


def _index(tables: Sequence[_Table]) -> dict[str, Any]:
    """What the page has to know before it shows anything."""
    return {"filters": list(_FILTERS), "tables": [t.index for t in tables], "step": STEP, "details": _PACKED}


def _made(groups: Sequence[ComparisonGroup], ids: Ids) -> list[_Table]:
    made, left = [], _STATIC
    for place, (heading, shown) in enumerate(_tables(groups)):
        facts = _facts(shown[0]) if len(shown) == 1 else terminal.plural(len(shown), "run")
        line = f'{escape(heading)} <span class="facts">{escape(facts)}</span>'
        made.append(_table(heading, line, shown, ids, place, min(STEP, left)))
        left -= len(made[-1].index) - len(made[-1].packed)
    return made


def _tables(groups: Sequence[ComparisonGroup]) -> Iterator[tuple[str, list[ComparisonGroup]]]:
    """Own runs first, then reference records; groups of a single run share one table."""
    for source in ("own", "reference"):
        alike = [group for group in groups if ("own" in chart_data.sources(group)) == (source == "own")]
        alone = [group for group in alike if len(group.rows) == 1]
        folded = alone if len(alone) > 1 else []
        yield from ((group.heading, [group]) for group in alike if group not in folded)
        if folded:
            yield f"Settings with a single run, {source}", folded


def _facts(group: ComparisonGroup) -> str:
    best = max((row for row in group.ranked if row.guarantee == EXACT), key=lambda row: row.speed or 0.0, default=None)
    fastest = f"best EXACT {best.label} {terminal.times(best.speed)}" if best else ""
    facts = [chart_data.sources(group), terminal.plural(len(group.rows), "run"), fastest]
    return " · ".join(filter(None, facts))


def _table(heading: str, line: str, groups: Sequence[ComparisonGroup], ids: Ids, place: int, static: int) -> _Table:
    alone = len(groups) == 1
    columns = [name for name in _COLUMNS if name != (_SETTING if alone else _RANK)]
    rows = [(group, row) for group in groups for row in group.rows]
    span = _span([row for _, row in rows if row.rank is not None])
    metric = chart_data.score([row for _, row in rows])
    named = f"quality, {chart_data.SCORES.get(metric, metric)}" if metric else "quality"
    head = "".join(_heading(name, named if name == "quality" else name) for name in columns)
    index, made = [], {}
    for number, (group, row) in enumerate(rows):
        name, texts = ids[row.record.path], _cells(row, group.heading, metric)
        index.append(_indexed(row, name, number, texts, columns))
        made[name] = _table_row(row, name, span, columns, texts)
    names = list(made)
    lines = "\n".join(made[name] for name in names[:static])
    markup = (
        f'<section class="group" id="table-{place}">\n<details{"" if place else " open"}>'
        f"<summary><h2>{line}</h2></summary>\n"
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(heading)}">\n<table>\n'
        f"<caption>{escape(heading)}</caption>\n"
        f"<thead><tr><td></td>{head}</tr></thead>\n"
        f"<tbody>\n{lines}\n</tbody>\n</table>\n</div>\n</details>\n</section>"
    )
    return _Table(line, markup, {name: made[name] for name in names[static:]}, index)


def _indexed(row: Row, name: str, place: int, texts: Mapping[str, str], columns: Sequence[str]) -> list[Any]:
    """See ``_Table``."""
    facts = [of(row) for of in _FILTERS.values()]
    words = " ".join(dict.fromkeys([row.name, *texts.values(), *facts])).lower()
    kind = 2 if not row.valid else 0 if row.rank else 1
    values = [_value(column, row, place, texts) for column in columns]
    return [name, kind, f"{row.label}, {texts['speed-up']}", words, facts, values]


def _value(column: str, row: Row, place: int, texts: Mapping[str, str]) -> Any:
    """What a column is sorted by; ranks guarantee by guarantee, as the table begins."""
    if column == _RANK:
        return place
    if column in ("95 %", "run"):
        return row.name if column == "run" else None
    return _SORTED[column](row) if column in _SORTED else texts[column]


def _heading(name: str, shown: str) -> str:
    first = "descending" if name in _SORTED and name not in _ASCENDING else "ascending"
    sortable = "" if name == "95 %" else f' data-first="{first}"'
    kind = " number" if name in (*_SORTED, _RANK, "95 %") else ""
    return f'<th scope="col" class="c-{_css(name)}{kind}"{sortable}>{escape(shown)}</th>'


def _table_row(row: Row, name: str, span: Span, columns: Sequence[str], texts: Mapping[str, str]) -> str:
    cells = "".join(_cell(column, texts, row, span) for column in columns)
    kind = "run invalid" if not row.valid else "run" if row.rank else "run unranked"
    return f'<tr class="{kind}" id="{name}"><td></td>{cells}</tr>'


def _cell(column: str, texts: Mapping[str, str], row: Row, span: Span) -> str:
    kind = f"c-{_css(column)}"
    if column == "95 %":
        return f'<td class="{kind} number">{escape(texts[column])} {_interval(row, span)}</td>'
    if column == "run":
        why = "".join(f"<li>{escape(reason)}</li>" for reason in audit.explained(row.summary))
        note = f"<details><summary>why {texts['result']}</summary><ul>{why}</ul></details>" if why else ""
        short = escape(row.name.rpartition("-")[2][:6])
        return f'<td class="{kind}"><code title="{escape(row.name)}">{short}</code>{note}</td>'
    if column == "method":
        own = ' <span class="own">own</span>' if row.record.source == "own" else ""
        return f'<td class="{kind}">{escape(texts[column])}{own}</td>'
    number = " number" if column == _RANK or column in _SORTED else ""
    return f'<td class="{kind}{number}">{escape(texts[column])}</td>'


_WIDE, _HIGH = 90, 16  # of an interval


def _span(rows: Sequence[Row]) -> Span:
    """Ends of the axis that the intervals of a table share: those of the values, with room."""
    values = [row.speed or 1.0 for row in rows]
    return min([0.9, *values]) * 0.8, max([1.1, *values]) * 1.25


def _interval(row: Row, span: Span) -> str:
    """Dot and interval on the table's logarithmic axis, with a line at 1; empty for an INVALID run."""
    total = row.headline
    if not row.valid or not total["value"]:
        return f'<svg width="{_WIDE}" height="{_HIGH}" aria-hidden="true"></svg>'
    low, high = (total["value"], total["value"]) if not total["low"] else (total["low"], total["high"])
    a, b, x, one = (round(_place(value, span), 1) for value in (low, high, total["value"], 1.0))
    colour, middle = style_of(row.method, row.family).colour, _HIGH / 2
    hollow = "" if row.guarantee == EXACT else ' class="hollow"'
    return (
        f'<svg width="{_WIDE}" height="{_HIGH}" viewBox="0 0 {_WIDE} {_HIGH}" aria-hidden="true" fill="{colour}" '
        f'stroke="{colour}" stroke-width="2"><path class="one" d="M{one} 0V{_HIGH}"/><path d="M{a} {middle}H{b}"/>'
        f'<circle{hollow} cx="{x}" cy="{middle}" r="4"/></svg>'
    )


def _place(value: terminal.Number, span: Span) -> float:
    low, high = map(math.log, span)
    return 5 + (_WIDE - 10) * min(1.0, max(0.0, (math.log(value) - low) / (high - low)))

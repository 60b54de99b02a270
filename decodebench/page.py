"""Measurements as HTML for notebooks: no script, no colour of its own for text, everything from outside escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd

from bench.analysis import audit, metrics
from bench.report import terminal

MOST_ROWS, MOST_LETTERS = 10, 160
_CELL = "text-align:left;vertical-align:top;padding:.2em .8em .2em 0;border-top:1px solid rgba(128,128,128,.4)"
_HEAD = f"{_CELL};white-space:nowrap"
_FRAMES = {"VALID": "solid #2e9e5b", "INCONCLUSIVE": "dotted #b58900", "INVALID": "dashed #d9534f"}
_FACTS = ("tokens/step", "tokens/s", "memory", "agreement")


def measurement(summary: Mapping[str, Any], table: pd.DataFrame) -> str:
    """The speed-up, what else was measured, and the first prompts with both texts."""
    found = metrics.headline(summary)
    facts = [f"{terminal.COLUMNS[name](summary)} {name}" for name in _FACTS]
    if summary["acceptance_rate"] is not None:
        facts.insert(1, f"{terminal.number(summary['acceptance_rate'])} acceptance")
    shown = table.head(MOST_ROWS)
    before = shown["baseline text"].mask(shown["identical"], "same")
    rows = zip(shown["prompt"], shown["text"], before, shown["speed-up"].map(terminal.times), strict=True)
    more = len(table) - len(shown)
    return _block(
        f"<b>{escape(str(summary['method']))}: {terminal.times(found['value'])}</b>, 95 % {terminal.interval(found)} "
        f"{_verdict(summary)}",
        _lines([*_place(summary), *facts]),
        *_reasons(summary),
        _table(["prompt", "text", "baseline's text", "speed-up"], rows),
        f"<small>and {terminal.plural(more, 'prompt')} more: to_dataframe()</small>" if more else "",
    )


def leaderboard(summaries: Sequence[Mapping[str, Any]]) -> str:
    """One row per method, the fastest first, those without a rank last, and why they have none."""
    summaries = terminal.ordered(summaries)
    rows = [[column(each).replace(terminal.MISSING, "-") for column in terminal.COLUMNS.values()] for each in summaries]
    notes = [f"<small>not ranked: {escape(line)}</small>" for line in terminal.without_rank(summaries)]
    return _block(_lines(_place(summaries[0])), _table(list(terminal.COLUMNS), rows), *notes)


def _place(summary: Mapping[str, Any]) -> list[str]:
    prompts = terminal.plural(summary["n_prompts"], "prompt")
    return [terminal.place(summary), f"{summary['dataset']}: {prompts}", terminal.how(summary)]


def _verdict(summary: Mapping[str, Any]) -> str:
    """Framed, in words: colours differ between themes."""
    result = audit.result(summary)
    return f'<span style="border:2px {_FRAMES[result]};padding:0 .4em">{result}</span>'


def _reasons(summary: Mapping[str, Any]) -> Iterable[str]:
    found = audit.explained(summary)
    return [f"<ul>{''.join(f'<li>{escape(reason)}</li>' for reason in found)}</ul>"] if found else []


def _lines(facts: Iterable[Any]) -> str:
    return f"<small>{' &middot; '.join(escape(str(fact)) for fact in facts)}</small>"


def _table(header: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    head, body = _row("th", header, _HEAD), "".join(_row("td", row) for row in rows)
    return f'<table style="border-collapse:collapse"><thead>{head}</thead><tbody>{body}</tbody></table>'


def _row(tag: str, cells: Iterable[Any], style: str = _CELL) -> str:
    shown = (f'<{tag} style="{style}">{escape(_short(cell))}</{tag}>' for cell in cells)
    return f"<tr>{''.join(shown)}</tr>"


def _short(cell: Any) -> str:
    text = "" if cell is None or cell != cell else str(cell)
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 1]}…"


def _block(*parts: str) -> str:
    return f'<div style="max-width:80em">{"".join(f"<div>{part}</div>" for part in parts if part)}</div>'

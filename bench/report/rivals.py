"""The imported figures of other engines as a table: terminal, Markdown and HTML. It has no ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from bench.records.rivals import Figures, Row, Spread
from bench.report import tables, terminal

TITLE = "Other engines, measured by themselves"
NOTE = (
    "Imported: the benchmark of each engine measured these figures, not DecodeBench. They have no rank and no verdict, "
    "and no table of runs contains them. Times are median / 99th percentile. Per token: mean time per token of the "
    "baseline divided by the row's, with a 95 % interval where the files have the times of requests. The accepted "
    "length counts the target's own token."
)
_NOT_SAID = "-"


def text(rows: Sequence[Row]) -> str:
    """For the terminal: facts that all rows share above the table, columns that no row has left out."""
    columns = {name: cells for name, cells in _columns(rows).items() if set(cells) != {_NOT_SAID}}
    alike = {name: cells[0] for name, cells in columns.items() if name in _FACTS and len(set(cells)) == 1 < len(rows)}
    shared = [f"{cell} requests" if name == "requests" else cell for name, cell in alike.items()]
    shown = {name: cells for name, cells in columns.items() if name not in alike}
    right = [place for place, name in enumerate(shown) if name not in _TEXTS]
    table = tables.aligned(list(shown), list(zip(*shown.values(), strict=True)), right)
    head = "   ".join(shared)
    return "\n".join([*([head, ""] if head else []), table])


def markdown(rows: Sequence[Row]) -> str:
    """A section of the report."""
    columns = {name: [escape(cell, quote=False) for cell in cells] for name, cells in _columns(rows).items()}
    return f"## {TITLE}\n\n{NOTE}\n\n{tables.markdown(list(columns), list(zip(*columns.values(), strict=True)))}"


def html(rows: Sequence[Row]) -> str:
    """A section of the page, without scripts; empty without rows."""
    if not rows:
        return ""
    columns = _columns(rows)
    kinds = ["" if name in _TEXTS else ' class="number"' for name in columns]
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(columns, kinds, strict=True))
    body = "\n".join(
        f"<tr>{''.join(f'<td{kind}>{escape(cell)}</td>' for cell, kind in zip(line, kinds, strict=True))}</tr>"
        for line in zip(*columns.values(), strict=True)
    )
    return (
        f'<section id="rivals">\n<h2>{TITLE}</h2>\n<p>{NOTE}</p>\n'
        f'<div class="scroll" role="region" tabindex="0" aria-label="{TITLE}">\n<table>\n<caption>{TITLE}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>\n</section>"
    )


# ---------------------------------------------------------------------------------------------------------- cells


def _columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    made = {name: [cell(row) for row in rows] for name, cell in _CELLS.items()}
    return {name: [_NOT_SAID if cell == terminal.MISSING else cell for cell in cells] for name, cells in made.items()}


def _of(cell: Callable[[Figures], str | None]) -> Callable[[Row], str]:
    return lambda row: cell(row.figures) or _NOT_SAID


def _engine(figures: Figures) -> str:
    return " ".join(filter(None, (figures.engine, figures.version)))


def _load(figures: Figures) -> str:
    """How many requests run at a time, and how they arrive."""
    if figures.batch_size:
        return f"batch {figures.batch_size}"
    most = f"concurrency {figures.concurrency}" if figures.concurrency else ""
    rate = figures.request_rate
    arriving = "" if rate in (None, "inf") else f"{rate:g} requests/s" if isinstance(rate, float) else f"rate {rate}"
    return ", ".join(filter(None, (most, arriving))) or ("all at once" if rate == "inf" else "")


def _rate(figures: Figures) -> str:
    """Output tokens per second, or all where the file does not say which are output."""
    if figures.tokens_per_s is None and figures.total_tokens_per_s is not None:
        return f"{terminal.rate_number(figures.total_tokens_per_s)} with prompts"
    return terminal.rate_number(figures.tokens_per_s)


def _ms(spread: Spread) -> str:
    """Median and 99th percentile."""
    both = [None if value is None else value * 1e3 for value in (spread.median, spread.p99)]
    middle, high = (_NOT_SAID if ms is None else f"{ms:,.0f}" if ms >= 1000 else f"{ms:.4g}" for ms in both)
    return _NOT_SAID if middle == high == _NOT_SAID else f"{middle} / {high}"


def _accepted(figures: Figures) -> str:
    length = "" if figures.accepted_length is None else f"{figures.accepted_length:.2f}"
    rate = "" if figures.acceptance_rate is None else f"{100 * figures.acceptance_rate:.0f} %"
    return " / ".join(filter(None, (length, rate)))


def _per_token(row: Row) -> str:
    ratio = row.against.per_token if row.against else None
    return terminal.times(ratio.value if ratio else None)


def _interval(row: Row) -> str:
    ratio = row.against.per_token if row.against else None
    return terminal.interval({"low": ratio.low, "high": ratio.high}) if ratio else _NOT_SAID


_CELLS: dict[str, Callable[[Row], str]] = {
    "file": _of(lambda figures: figures.name),
    "benchmark": _of(lambda figures: figures.tool),
    "engine": _of(_engine),
    "model": _of(lambda figures: figures.model),
    "requests": _of(lambda figures: None if figures.requests is None else f"{figures.requests}"),
    "load": _of(_load),
    "tokens": _of(lambda figures: None if figures.output_tokens is None else f"{figures.output_tokens}"),
    "tokens/s": _of(_rate),
    "TTFT ms": _of(lambda figures: _ms(figures.ttft_s)),
    "TPOT ms": _of(lambda figures: _ms(figures.tpot_s)),
    "latency ms": _of(lambda figures: _ms(figures.latency_s)),
    "accepted": _of(_accepted),
    "per token": _per_token,
    "95 %": _interval,
    "throughput": lambda row: terminal.times(row.against.throughput if row.against else None),
    "result": lambda row: row.status,
}
_FACTS = ("benchmark", "engine", "model", "requests", "load")  # that rows often share
_TEXTS = ("file", "benchmark", "engine", "model", "load", "result")

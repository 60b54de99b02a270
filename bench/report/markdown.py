"""``python -m bench report``: one table per group of comparable runs, as HTML (``bench.report.html``) or Markdown.

Text from records is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from bench.analysis import audit, oracle
from bench.analysis.summary import summarise
from bench.errors import UserError
from bench.records import digests, run_folder
from bench.records.rivals import Row
from bench.report import html, leaderboard, rivals, robustness, series, tables, terminal
from bench.report.collect import Record
from bench.report.leaderboard import ComparisonGroup
from bench.utils import files

_SERIES = (
    "Speed-ups by batch size, temperature and length of the prompt; those of INCONCLUSIVE runs have a question mark "
    "and their interval. Behind a slash is the speed-up of decoding alone, without the prompt. An advantage ends at "
    "the first value whose interval is not above 1."
)
_ORACLE = "Computed from these records and not ranked: what the drafts would give if their length were known before."


def rebuild(found: Sequence[Record], *, everything: bool = False) -> tuple[list[Record], list[str]]:
    """Rebuild missing summaries, or ``everything``, from manifest and samples.

    Returns:
        The records with their summaries, and a message for each run that could not be read or summed up.
    """
    made, problems = [], []
    for record in found:
        condensed = (record.path / run_folder.PAIRS).is_file()  # its summary cannot be derived again
        if record.source == "own" and record.finished and (record.summary is None or (everything and not condensed)):
            if run_folder.DIGEST in record.manifest and not digests.damaged_summary_alone(record.path, record.manifest):
                changed = digests.changed(record.path, record.manifest)
                problems.append(f"{record.path}: {changed[0]}.")
                made.append(replace(record, summary=None))
                continue
            try:
                summary = summarise(record.path).content
                run_folder.write_summary(record.path, summary)
                record = replace(record, summary=summary, problem="")
            except (UserError, KeyError, TypeError, ValueError, OSError) as error:
                problems.append(f"{record.path.name} cannot be summed up: {type(error).__name__}: {error}")
        elif record.problem:
            problems.append(record.problem)
        made.append(record)
    return made, problems


def unfinished(found: Sequence[Record]) -> list[str]:
    """One line for each run that is interrupted, failed or still running."""
    return [
        f"{record.path.name}: {record.manifest.get('status')}{_why(record.manifest.get('error'))}"
        for record in found
        if not record.finished and not record.problem
    ]


def _why(error: Any) -> str:
    """The last line of a traceback says what happened."""
    lines = [line.strip() for line in str(error or "").splitlines() if line.strip()]
    return f", {lines[-1]}" if lines else ""


# ----------------------------------------------------------------------------------------------------------- Markdown


def to_markdown(
    groups: Sequence[ComparisonGroup], open_runs: Sequence[str], folder: str = "", imported: Sequence[Row] = ()
) -> str:
    """The report in Markdown.

    Args:
        groups: of ``leaderboard.groups``.
        open_runs: a line for each run without numbers.
        folder: of the runs, relative to the file, for links; empty for none.
        imported: figures of other engines, in a section of their own.
    """
    parts = [f"# {html.TITLE}", *(_index(groups) if len(groups) > 1 else [])]
    parts += [_plain(noise)] if (noise := robustness.noise(groups)) else []
    parts += [_section(group, folder) for group in groups] or ["No finished run yet. Run: python -m bench"]
    over = [f"{head}:\n\n{table}" for axis in series.AXES.values() for head, table in series.markdown(groups, axis)]
    if over:
        parts.append("\n\n".join(["## Where advantages end", _SERIES, *over]))
    if imported:
        parts.append(rivals.markdown(imported))
    if open_runs:
        parts.append("## Not finished\n\n" + "\n".join(f"- {_plain(line)}" for line in open_runs))
    return "\n\n".join(parts) + "\n"


def _index(groups: Sequence[ComparisonGroup]) -> Iterator[str]:
    header = ["table", "runs", "ranked", "fastest EXACT", "fastest of the others"]
    cells = []
    for group in groups:
        exact = [row for row in group.ranked if row.guarantee == leaderboard.GUARANTEES[0]]
        others = [row for row in group.ranked if row not in exact]
        fastest = (max(rows, key=lambda row: row.speed or 0.0, default=None) for rows in (exact, others))
        link = f"[{_plain(group.heading)}](#{_anchor(group.heading)})"
        best = (f"{_plain(row.label)} {terminal.times(row.speed)}" if row else "-" for row in fastest)
        cells.append([link, str(len(group.rows)), str(len(group.ranked)), *best])
    yield tables.markdown(header, cells)


def _anchor(heading: str) -> str:
    """As code hosts name the anchors of headings."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _section(group: ComparisonGroup, folder: str) -> str:
    frame = leaderboard.ranking(group)
    header = [name for name in frame.columns if name != "run"]
    cells = [
        [_plain(str(value)) for value in line[:-1]] + [_link(line[-1], folder)]
        for line in frame.itertuples(index=False)
    ]
    body = f"## {_plain(group.heading)}\n\n{tables.markdown([*header, 'run'], cells)}"
    equal = robustness.over_equal_lengths(group)
    return "\n\n".join([body, *([_plain(str(equal))] if equal else []), *_oracles(group), *_notes(group)])


def _oracles(group: ComparisonGroup) -> Iterator[str]:
    """What perfect knowledge would give with the recorded drafts, never ranked, see ``bench.analysis.oracle``."""
    runs = [
        oracle.Run(row.label, row.record.manifest, run_folder.read_samples(row.record.path))
        for row in group.rows
        if row.guarantee == leaderboard.GUARANTEES[0] and run_folder.samples_file(row.record.path).is_file()
    ]
    cells: dict[str, dict[str, str]] = {}
    single = []
    for found in oracle.oracle_rows(runs):
        if len(found["runs"]) == 1 and found["draft_length"] != 0:
            (name,) = found["runs"]
            cells.setdefault(name, {"replayed": terminal.times(found["recorded"])})
            cells[name][found["oracle"]] = terminal.times(found["speedup"])
        elif not found["runs"]:
            single.append(f"{found['oracle']}: {terminal.times(found['speedup'])}")
        elif len(found["runs"]) > 1:
            share = f"on the {found['coverage']:.0%} of the text that all runs share, where the best of them has"
            best = terminal.times(found["recorded"])
            single.append(f"{found['oracle']}: {terminal.times(found['speedup'])} {share} {best}")
    drafting = {name: row for name, row in cells.items() if len(row) > 2}
    if drafting:
        header = ["ORACLE", *next(iter(drafting.values()))]
        rows = [[_plain(name), *row.values()] for name, row in drafting.items()]
        yield "\n\n".join([_ORACLE, tables.markdown(header, rows), "\n".join(f"- {line}" for line in single)])


def _notes(group: ComparisonGroup) -> Iterator[str]:
    """Why runs are INCONCLUSIVE or INVALID."""
    for result in audit.RESULTS[1:]:
        rows = [row for row in group.rows if audit.result(row.summary) == result]
        notes = [f"- {_plain(row.name)}: {_plain(reason)}" for row in rows for reason in audit.explained(row.summary)]
        if notes:
            yield f"{result}:\n\n" + "\n".join(notes)


def _link(name: str, folder: str) -> str:
    return f"[{_plain(name.rpartition('-')[2])}]({folder}/{name}/)" if folder else _plain(name)


def _plain(text: str) -> str:
    return escape(text, quote=False)


def write(
    groups: Sequence[ComparisonGroup], open_runs: Sequence[str], file: Path, imported: Sequence[Row] = ()
) -> None:
    """As .html or .md, by the ending.

    Raises:
        UserError: another ending, or a file that cannot be there.
    """
    forms: dict[str, Callable[..., str]] = {".html": html.render, ".md": to_markdown}
    if file.suffix not in forms:
        raise UserError(f"out must end in {' or '.join(forms)}, got {file}.")
    files.write_output(file, forms[file.suffix](groups, open_runs, imported=imported))

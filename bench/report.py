"""``python -m bench report``: a page with one table per group of runs that may be compared, from results/.

Self-contained HTML or Markdown, by the ending of the file. Whatever comes from a record is escaped: a model's name or
a message cannot put markup into the page. INVALID runs stand last, are greyed and have no rank.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import yaml

from bench import collect, records, table
from bench.collect import Record
from bench.config import RunConfig
from bench.errors import UserError

_NO_TRACKER = {"name": "none", "_target_": "bench.track.NoTracker"}
_TITLE = "DecodeBench: results"


@dataclass(frozen=True)
class Group:
    """Runs of one table: heading, and per run its cells, whether it is valid and what is to be said of it."""

    heading: str
    rows: list[tuple[list[str], bool, list[str]]]


def rebuild(found: Sequence[Record], *, everything: bool = False) -> tuple[list[Record], list[str]]:
    """Make summaries again from manifest and samples, where they are missing, or all of them.

    Args:
        found: of ``collect.read``.
        everything: rewrite those that are there, too; as long as the bootstrap takes, a second or so for each.

    Returns:
        The records with their summaries, and a message for each finished run that could not be summed up.
    """
    made, problems = [], []
    for record in found:
        if record.finished and (everything or record.summary is None):
            try:
                record = replace(record, summary=_summed_up(record.path))
            except (UserError, KeyError, TypeError, ValueError, OSError) as error:
                problems.append(f"{record.path.name} cannot be summed up: {type(error).__name__}: {error}")
        made.append(record)
    return made, problems


def _summed_up(path: Path) -> dict[str, Any]:
    """By the code that a run ends with, so that both give the same."""
    from bench import run

    stored = yaml.safe_load((path / records.CONFIG).read_text(encoding="utf-8"))
    cfg = RunConfig.from_dict(stored | {"tracker": _NO_TRACKER})
    with contextlib.redirect_stdout(io.StringIO()):
        return run.report(cfg, path).summary


def tabulate(found: Sequence[Record]) -> list[Group]:
    """The finished runs in their groups."""
    summaries = [record.summary for record in found if record.finished and record.summary]
    return [Group(_heading(runs[0]), [_line(run) for run in runs]) for runs in collect.groups(summaries)]


def columns() -> list[str]:
    """Headings of every table."""
    return ["rank", *table._COLUMNS, "run"]


def _heading(run: Mapping[str, Any]) -> str:
    return ", ".join(
        [str(run.get("dataset")), table.place(run), table.how(run), f"{run.get('max_new_tokens')} new tokens at most"]
    )


def _line(run: Mapping[str, Any]) -> tuple[list[str], bool, list[str]]:
    verdict = run.get("verdict") or {}
    cells = [cell(run) for cell in table._COLUMNS.values()]
    return [*cells, str(run.get("run_id"))], collect.is_valid(run), [*verdict.get("reasons", [])]


def _ranked(group: Group) -> Iterator[tuple[list[str], bool, list[str]]]:
    rank = 0
    for cells, valid, reasons in group.rows:
        rank += valid
        yield [str(rank) if valid else "-", *cells], valid, reasons


def unfinished(found: Sequence[Record]) -> list[str]:
    """One line for each run that is cut, failed or still going."""
    return [
        f"{record.path.name}: {record.manifest.get('status')}{_why(record.manifest.get('error'))}"
        for record in found
        if not record.finished
    ]


def _why(error: Any) -> str:
    """The last line of a traceback says what happened."""
    lines = [line.strip() for line in str(error or "").splitlines() if line.strip()]
    return f", {lines[-1]}" if lines else ""


# ------------------------------------------------------------------------------------------------------ the two forms


def to_markdown(groups: Sequence[Group], open_runs: Sequence[str]) -> str:
    """The report for reading in a repository."""
    parts = [f"# {_TITLE}", *(_markdown_group(group) for group in groups)]
    if not groups:
        parts.append("No finished run yet. Run: python -m bench")
    if open_runs:
        parts.append("## Not finished\n\n" + "\n".join(f"- {_plain(line)}" for line in open_runs))
    return "\n\n".join(parts) + "\n"


def _markdown_group(group: Group) -> str:
    lines = list(_ranked(group))
    cells = [[_plain(cell) for cell in line] for line, _, _ in lines]
    body = f"## {_plain(group.heading)}\n\n{collect.markdown(columns(), cells)}"
    notes = [f"- {_plain(line[-1])}: {_plain(reason)}" for line, _, reasons in lines for reason in reasons]
    return body + ("\n\nINVALID:\n\n" + "\n".join(notes) if notes else "")


def _plain(text: str) -> str:
    return escape(text, quote=False)


def to_html(groups: Sequence[Group], open_runs: Sequence[str]) -> str:
    """One page that needs nothing beside itself."""
    body = "\n".join(map(_html_group, groups)) or "<p>No finished run yet. Run: <code>python -m bench</code></p>"
    if open_runs:
        items = "\n".join(f"<li>{escape(line)}</li>" for line in open_runs)
        body += f"\n<h2>Not finished</h2>\n<ul>\n{items}\n</ul>"
    return _PAGE.replace("%TITLE%", _TITLE).replace("%BODY%", body)


def _html_group(group: Group) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns())
    lines = "\n".join(_html_line(*line) for line in _ranked(group))
    return (
        f"<table>\n<caption>{escape(group.heading)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{lines}\n</tbody>\n</table>"
    )


def _html_line(cells: Sequence[str], valid: bool, reasons: Sequence[str]) -> str:
    opened = "<tr>" if valid else '<tr class="invalid">'
    plain = "".join(f"<td>{escape(cell)}</td>" for cell in cells[:-1])
    why = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    note = f"<details><summary>why INVALID</summary><ul>{why}</ul></details>" if why else ""
    return f"{opened}{plain}<td><code>{escape(cells[-1])}</code>{note}</td></tr>"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>%TITLE%</title>
<style>
body { font: 15px/1.4 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; margin: 2rem 0; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top; }
tr.invalid { color: #6b6b6b; background: #f5f5f5; }
</style>
</head>
<body>
<h1>%TITLE%</h1>
<p>Each table holds runs that share model, data, machine, type, sampling, batch size and limit; the fastest first.
Speed-ups are over a baseline measured in the same run, with 95 % intervals over the prompts.</p>
%BODY%
</body>
</html>
"""


def write(groups: Sequence[Group], open_runs: Sequence[str], file: Path) -> None:
    """As .html or .md, by the ending.

    Raises:
        UserError: another ending.
    """
    forms = {".html": to_html, ".md": to_markdown}
    if file.suffix not in forms:
        raise UserError(f"out={file} came; it must end in {' or '.join(forms)}. Set out=FILE.")
    with records.machine_failures():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(forms[file.suffix](groups, open_runs), encoding="utf-8")

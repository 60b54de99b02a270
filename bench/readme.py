"""Writes the measured tables of README.md, and RESULTS.md, from the committed records: ``python -m bench.readme``.

A test compares both with what this makes, so no figure in them can be typed by hand or go stale.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.config.schema import checkout
from bench.report import collect, leaderboard, markdown, terminal

_BLOCK = re.compile(r"<!-- (table: [^ ]+|leaderboard(?:: [^>]+)?|lossless) -->\n.*?<!-- end -->", re.DOTALL)


def written(text: str, results: Path) -> str:
    """The README with its blocks filled from the records under ``results``."""
    return _BLOCK.sub(lambda found: _block(found.group(1), results), text)


def _block(what: str, results: Path) -> str:
    if what == "lossless":
        body = _lossless(results)
    elif what.startswith("leaderboard"):
        body = _leaderboards(results, what.removeprefix("leaderboard").removeprefix(": ").split())
    else:
        body = _table(what.removeprefix("table: "), results)
    lines = "\n".join(f"    {line}".rstrip() for line in body.splitlines())
    return f"<!-- {what} -->\n{lines}\n<!-- end -->"


def _leaderboards(results: Path, filters: Sequence[str]) -> str:
    """One table for each set of runs that may stand in one, of those that the filters of ``collect`` let through."""
    rows = [collect.row(record) | {"record": record} for record in collect.read(results)]
    kept = [row["record"] for row in collect.select(rows, filters)]
    groups = (
        [entry.summary | {"method": entry.label} for entry in board.entries] for board in leaderboard.boards(kept)
    )
    return "\n\n".join(map(terminal.leaderboard, groups)) or "(no record yet)"


def _runs(results: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Committed runs, ordered by data set and speed-up."""
    found = [(file.parent, json.loads(file.read_text())) for file in sorted(results.glob("*/summary.json"))]
    order = ("dataset", "dtype", "batch_size", "method")
    return sorted(found, key=lambda run: [str(run[1][key]) for key in order])


def _table(prefix: str, results: Path) -> str:
    for folder, summary in _runs(results):
        if folder.name.startswith(prefix):
            return terminal.render(summary, Path("results") / folder.name)
    return "(no record yet)"


def _lossless(results: Path) -> str:
    from bench.lossless import report

    found = sorted((results / "lossless").glob("sampling-*/result.json"))
    if not found:
        return "(no record yet)"
    return "\n".join(report.rules_table(json.loads(found[0].read_text())))


def results_page(results: Path) -> str:
    """RESULTS.md: every run of the committed records, by what may stand in one table, and the laboratory's."""
    found = collect.read(results)
    body = markdown.to_markdown(leaderboard.boards(found), markdown.unfinished(found), results.name)
    title, _, tables = body.partition("\n\n")
    return f"{title}\n\n{_PREFACE}\n\n{tables}{_laboratory(results)}"


_PREFACE = """\
Made by `python -m bench.readme` from the records in [results/](results/); do not edit. `python -m bench validate
results` checks the records, `python -m bench report` makes a page of them to sort, filter and open, and
[notebooks/leaderboard.ipynb](notebooks/leaderboard.ipynb) draws them.

Each table holds runs that share model, data, machine, number type, sampling, batch size and limit; nothing is ranked
across tables. Ranks count within one guarantee: EXACT methods write the target's own text, RELAXED ones may change it,
INDEPENDENT_MODEL ones are models of their own. INVALID runs have no rank. Speed-ups are over a baseline that was
measured interleaved in the same run, with 95 % intervals over the prompts; behind a score stands the baseline's."""


def _laboratory(results: Path) -> str:
    """The experiments on losslessness, which are no runs and have no speed."""
    cells = []
    for file in sorted((results / "lossless").glob("*/result.json")):
        manifest = json.loads((file.parent / "manifest.json").read_text(encoding="utf-8"))
        passed = json.loads(file.read_text(encoding="utf-8"))["passed"]
        name = f"[{file.parent.name}]({results.name}/lossless/{file.parent.name}/)"
        facts = [
            manifest["experiment"],
            manifest["config"]["method"]["name"],
            manifest["model"]["name"],
            manifest["dtype"],
        ]
        cells.append([*facts, "yes" if passed else "no", name])
    if not cells:
        return ""
    header = ["experiment", "method", "model", "type", "as promised", "record"]
    return f"\n## Losslessness laboratory\n\n{collect.markdown(header, cells)}\n"


def main() -> None:
    """Rewrite README.md in place, and RESULTS.md."""
    root = checkout()
    assert root is not None, "README.md and RESULTS.md belong to a checkout"
    readme = root / "README.md"
    readme.write_text(written(readme.read_text(encoding="utf-8"), root / "results"), encoding="utf-8")
    (root / "RESULTS.md").write_text(results_page(root / "results"), encoding="utf-8")


if __name__ == "__main__":
    main()

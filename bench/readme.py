"""Writes the measured tables of README.md from the committed records: ``python -m bench.readme``.

A test compares the file with what this makes, so no figure in it can be typed by hand or go stale.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bench import table
from bench.config import checkout

_BLOCK = re.compile(r"<!-- (table: [^ ]+|leaderboard|lossless) -->\n.*?<!-- end -->", re.DOTALL)


def written(text: str, results: Path) -> str:
    """The README with its blocks filled from the records under ``results``."""
    return _BLOCK.sub(lambda found: _block(found.group(1), results), text)


def _block(what: str, results: Path) -> str:
    if what == "lossless":
        body = _lossless(results)
    elif what == "leaderboard":
        body = _leaderboards(results)
    else:
        body = _table(what.removeprefix("table: "), results)
    lines = "\n".join(f"    {line}".rstrip() for line in body.splitlines())
    return f"<!-- {what} -->\n{lines}\n<!-- end -->"


def _leaderboards(results: Path) -> str:
    """One table for each set of runs that may stand in one."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for _, summary in _runs(results):
        groups.setdefault(str([summary.get(key) for key in table.JOIN_KEYS]), []).append(summary)
    return "\n\n".join(map(table.leaderboard, groups.values())) or "(no record yet)"


def _runs(results: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Committed runs, ordered by data set and speed-up."""
    found = [(file.parent, json.loads(file.read_text())) for file in sorted(results.glob("*/summary.json"))]
    order = ("dataset", "dtype", "batch_size", "method")
    return sorted(found, key=lambda run: [str(run[1][key]) for key in order])


def _table(prefix: str, results: Path) -> str:
    for folder, summary in _runs(results):
        if folder.name.startswith(prefix):
            return table.render(summary, Path("results") / folder.name)
    return "(no record yet)"


def _lossless(results: Path) -> str:
    from bench.lossless import report

    found = sorted((results / "lossless").glob("sampling-*/result.json"))
    if not found:
        return "(no record yet)"
    return "\n".join(report.rules_table(json.loads(found[0].read_text())))


def main() -> None:
    """Rewrite README.md in place."""
    root = checkout()
    assert root is not None, "the README belongs to a checkout"
    readme = root / "README.md"
    readme.write_text(written(readme.read_text(encoding="utf-8"), root / "results"), encoding="utf-8")


if __name__ == "__main__":
    main()

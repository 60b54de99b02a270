"""What lies in a results folder: runs, experiments of the laboratory, cost curves; each checked, and listed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.analysis import pairs
from bench.cost import records as cost_records
from bench.errors import UserError
from bench.records import run_folder
from bench.utils.files import read_json

RUN, LABORATORY, COSTS = "run", "laboratory record", "cost curve"
_RESULT, _LOSSLESS, _COSTS = "result.json", "lossless", "costs"
_EXPERIMENTS = ("greedy", "sampling", "joint")


@dataclass(frozen=True)
class Kept:
    """One folder of records; ``problems`` in plain words, empty where there are none."""

    path: Path
    kind: str
    problems: list[str]

    def line(self) -> str:
        """What is wrong with it, the first of the reasons in full."""
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        return f"{self.path}: {self.problems[0]}{more}" if self.problems else f"{self.path}: ok"


def counted(kept: Sequence[Kept]) -> str:
    """How many records there are of each kind, and how many are bad."""
    condensed = sum((each.path / run_folder.PAIRS).is_file() for each in kept)
    gone = f" (samples not kept of {condensed})" if condensed else ""
    kinds = [f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in Counter(k.kind for k in kept).items()]
    bad = sum(bool(each.problems) for each in kept)
    return f"{', '.join(kinds) or 'no record'}{gone}: {f'{bad} bad' if bad else 'ok'}"


def is_shelf(folder: Path) -> bool:
    """Whether a folder holds folders of records rather than being one."""
    return folder.is_dir() and not _holds_records(folder)


def check(results: Path) -> Iterator[Kept]:
    """Every folder of records below a results folder, by kind and name.

    Folders that hold no record (those of a tracker, hidden ones) are left out.

    Raises:
        UserError: no such folder.
    """
    if not results.is_dir():
        raise UserError(f"{results} is no folder; the folder that holds the runs is needed. See paths.results.")
    for pattern in ("*", f"{_LOSSLESS}/*", f"{_COSTS}/*"):
        for folder in sorted(results.glob(pattern)):
            if not folder.name.startswith(".") and _holds_records(folder):
                yield check_one(folder)


def check_one(folder: Path) -> Kept:
    """The same of a single folder, by where it lies and what lies in it."""
    above = folder.resolve().parent.name
    if above == _LOSSLESS or (folder / _RESULT).is_file():
        return Kept(folder, LABORATORY, list(_laboratory_problems(folder)))
    if above == _COSTS or (folder / cost_records.POINTS).is_file():
        return Kept(folder, COSTS, _costs_problems(folder))
    return Kept(folder, RUN, _run_problems(folder))


def _holds_records(folder: Path) -> bool:
    names = (
        run_folder.MANIFEST,
        run_folder.SAMPLES,
        run_folder.PACKED,
        run_folder.SUMMARY,
        _RESULT,
        cost_records.POINTS,
    )
    return any((folder / name).is_file() for name in names)


def _run_problems(folder: Path) -> list[str]:
    """What ``records.validate`` finds, and a summary whose headline does not follow from the samples."""
    if problems := run_folder.validate(folder):
        return problems
    total = ((read_json(folder / run_folder.SUMMARY) or {}).get("speedup") or {}).get("total") or {}
    units = pairs.read(folder).units
    value = None if units.empty else float(units["baseline_s"].sum() / units["method_s"].sum())
    stored = total.get("value")
    if stored == value or (stored and value and math.isclose(stored, value, rel_tol=1e-6)):
        return []
    return [f"{run_folder.SUMMARY} says speed-up {stored}, the samples {value}; make it anew with report rebuild=true"]


def _laboratory_problems(folder: Path) -> Iterator[str]:
    """A verdict must follow from what it was drawn from."""
    manifest, result = read_json(folder / run_folder.MANIFEST), read_json(folder / _RESULT)
    if not manifest or not result:
        yield f"{_RESULT if manifest else run_folder.MANIFEST} is missing or no JSON"
        return
    experiment = manifest.get("experiment")
    if experiment not in _EXPERIMENTS or not folder.resolve().name.startswith(f"{experiment}-"):
        yield f"{run_folder.MANIFEST} is of experiment {experiment!r}, the folder is called {folder.resolve().name!r}"
        return
    try:
        passed = _passed(experiment, result)
    except (KeyError, TypeError) as error:
        yield f"{_RESULT} cannot be read: {type(error).__name__}: {error}"
        return
    if passed is not result.get("passed"):
        yield f"{_RESULT} says passed: {result.get('passed')}, its own figures say {passed}"


def _passed(experiment: str, result: dict[str, Any]) -> bool:
    """As the experiments judge, from the cells they recorded."""
    if experiment == "greedy":
        return not any(row["violation"] for row in result["prompts"])
    if experiment == "joint":
        return all(cell["p_value"] > result["bound"] for cell in result["cells"])
    fails = {(cell["rule"], cell["exact"]): False for cell in result["cells"]}
    for cell in result["cells"]:
        fails[cell["rule"], cell["exact"]] |= cell["p_value"] <= result["bound"]
    return all(failed is not exact for (_, exact), failed in fails.items())  # a wrong rule has to be caught


def _costs_problems(folder: Path) -> list[str]:
    try:
        summary = cost_records.read_summary(folder)
    except (UserError, KeyError, TypeError) as error:
        return [str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"]
    return [] if summary["curves"] else ["no curve can be made of its points"]

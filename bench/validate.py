"""Check the records in a results folder: runs, lossless experiments, cost curves and tested promises."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.analysis import audit, metrics, pairs
from bench.analysis.summary import summarise
from bench.cost import records as cost_records
from bench.errors import UserError
from bench.promise import records as promises
from bench.records import digests, run_folder, schemas, signatures
from bench.records.signatures import Signature
from bench.utils import files
from bench.utils.files import read_json

if TYPE_CHECKING:
    import pandas as pd

RUN, LOSSLESS, COSTS, PROMISE = "run", "lossless record", "cost curve", "tested promise"
_RESULT, _LOSSLESS, _COSTS, _REFERENCE = "result.json", "lossless", "costs", "reference"
_PROMISE = promises.FOLDER
_SHORT = 60  # letters of a value in a message
_EXPERIMENTS = ("greedy", "sampling", "rounds", "joint", "served")


@dataclass(frozen=True)
class FolderCheck:
    """One folder of records and what is wrong with it."""

    path: Path
    kind: str
    problems: list[str]
    signature: Signature | None = None

    def line(self) -> str:
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        return f"{self.path}: {self.problems[0]}{more}" if self.problems else f"{self.path}: ok"


def counted(checks: Sequence[FolderCheck]) -> str:
    """The number of records of each kind, of bad ones, and of signed ones."""
    condensed = sum((each.path / run_folder.PAIRS).is_file() for each in checks)
    gone = f" (samples not kept of {condensed})" if condensed else ""
    kinds = [f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in Counter(c.kind for c in checks).items()]
    bad = sum(bool(each.problems) for each in checks)
    signed = Counter(str(each.signature) for each in checks if each.signature and each.signature.key)
    whose = "".join(f", {count} signed by {name}" for name, count in signed.most_common())
    return f"{', '.join(kinds) or 'no record'}{gone}: {f'{bad} bad' if bad else 'ok'}{whose}"


def is_results(folder: Path) -> bool:
    """Whether a folder contains folders of records instead of being one."""
    return folder.is_dir() and not _holds_records(folder)


def folders(results: Path) -> list[Path]:
    """Every folder of records in a results folder, by kind and name; others, as those of a tracker, are left out.

    Of any other folder it is the folder itself.
    """
    if not is_results(results):
        return [results]
    kinds = ("*", f"{_LOSSLESS}/*", f"{_COSTS}/*", f"{_PROMISE}/*")
    patterns = (*kinds, *(f"{_REFERENCE}/{kind}" for kind in kinds))
    found = (folder for pattern in patterns for folder in sorted(results.glob(pattern)))
    return [folder for folder in found if not folder.name.startswith(".") and _holds_records(folder)]


def check(results: Path, *, derive: bool = False, signers: Path | None = None) -> Iterator[FolderCheck]:
    """Check every folder of records in a results folder, see ``folders`` and ``check_one``; one alone is derived."""
    derive = derive or not is_results(results)
    yield from (check_one(folder, derive=derive, signers=signers) for folder in folders(results))


def check_one(folder: Path, *, derive: bool = False, signers: Path | None = None) -> FolderCheck:
    """Check one folder; its kind follows from its place and its files.

    Args:
        derive: read the samples of a run and derive its summary again, although its digests are right.
        signers: file of allowed signers, who are named; see ``bench.records.signatures``.

    Raises:
        UserError: there is no such file, or a signed run and no ssh-keygen.
    """
    above = folder.resolve().parent.name
    if above == _PROMISE:
        return FolderCheck(folder, PROMISE, list(promises.problems(folder)))
    if above == _LOSSLESS or (folder / _RESULT).is_file():
        return FolderCheck(folder, LOSSLESS, list(_lossless_problems(folder)))
    if above == _COSTS or (folder / cost_records.POINTS).is_file():
        return FolderCheck(folder, COSTS, _costs_problems(folder))
    problems, signature = _run_problems(folder, derive), signatures.read(folder, signers)
    if signature and signature.problem:
        problems.append(signature.problem)
    return FolderCheck(folder, RUN, problems, signature)


def add_digests(folder: Path) -> bool:
    """Give a finished run digests that was made before there were any, with the time at which it got them.

    Returns:
        False if it has them.

    Raises:
        UserError: no finished run, records that are not sound, or another process writes them.
    """
    manifest = (run_folder.read_manifest(folder) or {}) if folder.is_dir() else {}
    if run_folder.DIGEST in manifest:
        return False
    if wrong := [*_structure(folder, manifest), *_derived_problems(folder)]:
        raise UserError(f"{folder} cannot get digests: {wrong[0]}.")
    with run_folder.claimed(folder):
        added = {digests.ADDED: datetime.now(timezone.utc).isoformat(timespec="seconds")}
        files.atomic_write(folder / run_folder.MANIFEST, digests.resealed(folder, manifest, **added))
    return True


def _holds_records(folder: Path) -> bool:
    runs = (run_folder.MANIFEST, run_folder.SAMPLES, run_folder.PACKED, run_folder.SUMMARY)
    return any((folder / name).is_file() for name in (*runs, _RESULT, cost_records.POINTS))


def _run_problems(folder: Path, derive: bool) -> list[str]:
    """What was changed after the run ended; where it has no digests, or with ``derive``, all that does not fit."""
    try:
        manifest = run_folder.read_manifest(folder)
        problems = digests.changed(folder, manifest or {})
    except UserError as error:
        return [str(error)]
    vouched = manifest is not None and run_folder.DIGEST in manifest and manifest.get("status") == "finished"
    if vouched and not problems and not derive:
        return [*run_folder.manifest_problems(folder, manifest), *_verdict_problems(folder)]
    problems += _structure(folder, manifest)
    if not problems:
        problems += _derived_problems(folder)
    if not problems and not vouched:
        problems.append(f"{run_folder.MANIFEST} has no digests, so changes are not found; add them: {_ADD} {folder}")
    return problems


_ADD = "python -m bench pack"


def _structure(folder: Path, manifest: Mapping[str, Any] | None) -> list[str]:
    """The problems that ``run_folder.validate`` finds, and a verdict or a speed-up that does not follow."""
    if problems := run_folder.validate(folder):
        return problems
    if problems := _verdict_problems(folder):
        return problems
    summary = read_json(folder / run_folder.SUMMARY) or {}
    try:
        units = pairs.read(folder).units
    except UserError as error:
        return [str(error)]
    shown = {"speed-up": metrics.headline(summary), "total speed-up": summary["speedup"]["total"] | {"of": "total"}}
    return [wrong for name, found in shown.items() if (wrong := _speedup_problem(name, found, units))]


def _verdict_problems(folder: Path) -> list[str]:
    summary = read_json(folder / run_folder.SUMMARY)
    wrong = schemas.problem("summary", summary)
    said = f"is damaged: {wrong}" if wrong else _verdict_problem((summary or {}).get("verdict") or {})
    return [f"{run_folder.SUMMARY} {said}; derive it again with report rebuild=true"] if said else []


def _derived_problems(folder: Path) -> list[str]:
    """The first value of a summary that does not follow from samples and manifest; of a condensed run none does."""
    stored = read_json(folder / run_folder.SUMMARY)
    if stored is None or (folder / run_folder.PAIRS).is_file():
        return []
    try:
        derived = json.loads(json.dumps(summarise(folder).content, default=str))
    except (UserError, KeyError, TypeError, ValueError, IndexError) as error:
        return [f"no summary follows from {run_folder.MANIFEST} and samples: {type(error).__name__}: {error}"]
    key, found, given = next(_different(stored, derived), ("", None, None))
    said = f"{run_folder.SUMMARY} has {key} {_short(found)}, manifest and samples give {_short(given)}"
    return [f"{said}; derive it again with report rebuild=true"] if key else []


def _different(stored: Any, derived: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Values that differ by more than rounding; keys that came later are none of an older summary.

    Of the verdict's texts, whose wording may have changed, it counts whether there are any; warnings do not count.
    """
    if key in ("verdict.reasons", "verdict.inconclusive"):
        stored, derived = bool(stored), bool(derived)
    if key == "verdict.warnings":
        return
    if isinstance(stored, dict) and isinstance(derived, dict):
        for name, value in stored.items():
            yield from _different(value, derived.get(name), f"{key}.{name}" if key else name)
    elif isinstance(stored, list) and isinstance(derived, list) and len(stored) == len(derived):
        for place, (a, b) in enumerate(zip(stored, derived, strict=True)):
            yield from _different(a, b, f"{key}[{place}]")
    elif not _same(stored, derived):
        yield key, stored, derived


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool) or not (isinstance(a, int | float) and isinstance(b, int | float)):
        return bool(a == b)
    return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) or (math.isnan(a) and math.isnan(b))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]} ..."


def _speedup_problem(name: str, shown: Mapping[str, Any], units: pd.DataFrame) -> str:
    """How a speed-up is another one than that of the conversations; empty if it is theirs."""
    sums = units.drop(columns="category").astype(float).sum(skipna=False)
    value = None if units.empty else float(sums["baseline_s"] / sums["method_s"])
    if value and shown["of"] == "per_token":
        value *= float(sums["method_tokens"] / sums["baseline_tokens"])
    stored = shown.get("value")
    if stored == value or (stored and value and (math.isnan(value) or math.isclose(stored, value, rel_tol=1e-6))):
        return ""  # not a number where an older record did not keep the tokens
    return f"{run_folder.SUMMARY} has {name} {stored}, the samples {value}; derive it again with report rebuild=true"


def _verdict_problem(verdict: dict[str, Any]) -> str:
    """How a verdict contradicts its own reasons; empty if it does not."""
    if verdict and verdict["valid"] is bool(verdict["reasons"]):
        return f"has verdict.valid: {str(verdict['valid']).lower()} and {len(verdict['reasons'])} reasons"
    stored, found = verdict.get("result"), audit.outcome(verdict.get("valid", False), verdict.get("inconclusive") or ())
    return f"has verdict.result: {stored}, its reasons give {found}" if stored not in (None, found) else ""


def _lossless_problems(folder: Path) -> Iterator[str]:
    """A verdict must follow from its figures."""
    manifest, result = read_json(folder / run_folder.MANIFEST), read_json(folder / _RESULT)
    if not manifest or not result:
        yield f"{_RESULT if manifest else run_folder.MANIFEST} is missing or not JSON"
        return
    experiment = manifest.get("experiment")
    if experiment not in _EXPERIMENTS or not folder.resolve().name.startswith(f"{experiment}-"):
        yield f"{run_folder.MANIFEST} has experiment {experiment!r}, the folder is named {folder.resolve().name!r}"
        return
    try:
        passed = _passed(experiment, result)
    except (KeyError, TypeError, AttributeError) as error:
        yield f"{_RESULT} cannot be read: {type(error).__name__}: {error}"
        return
    if passed is not result.get("passed"):
        yield f"{_RESULT} has passed: {result.get('passed')}, its figures give {passed}"


def _passed(experiment: str, result: dict[str, Any]) -> bool:
    """The verdict of the experiment, from its cells."""
    if experiment == "greedy":
        return not any(row["violation"] for row in result["prompts"])
    if experiment == "served":
        deviates = any(row["violation"] or row["cut"] for row in result["prompts"])
        return not deviates and all(cell["p_value"] > result["bound"] for cell in result["cells"])
    fails: dict[tuple[str, bool], bool] = {}
    for cell in result["cells"]:
        key = cell.get("rule", ""), cell.get("exact", True)  # the decoder's own rule where none is named
        fails[key] = fails.get(key, False) or cell["p_value"] <= result["bound"]
    return all(failed is not exact for (_, exact), failed in fails.items())  # a wrong rule must fail


def _costs_problems(folder: Path) -> list[str]:
    try:
        summary = cost_records.read_summary(folder)
    except (UserError, KeyError, TypeError, AttributeError) as error:
        return [str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"]
    return [] if summary["curves"] else ["no curve can be made of its points"]

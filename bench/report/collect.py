"""``python -m bench collect``: one table of all recorded runs, filtered, to the terminal or into a file.

A row is the flattened summary of a run plus facts of its manifest, columns named by dotted keys
(``speedup.headline.value``). Unfinished runs have a row without numbers.
"""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bench.analysis import audit, metrics, ranking
from bench.config.typecheck import did_you_mean
from bench.errors import UserError
from bench.records import digests, run_folder, schemas
from bench.report import tables, terminal
from bench.utils import files
from bench.utils.files import read_json
from bench.utils.text import flatten

if TYPE_CHECKING:
    import pandas as pd

_MANY = frozenset({"dataset_revision", "speedup.by_category", "verdict"})  # kept as one cell of JSON, not as columns
_WIDTH = 100  # of a table where there is no terminal
FlatRow = dict[str, Any]
Source = Literal["own", "reference"]  # measured by the user, or shipped with the project


@dataclass(frozen=True)
class Record:
    """A run folder.

    Attributes:
        summary: None if the run is not finished, or its summary is missing or damaged.
        problem: what cannot be read of it; empty if all can.
    """

    path: Path
    manifest: dict[str, Any]
    summary: dict[str, Any] | None
    source: Source = "own"
    problem: str = ""

    @property
    def finished(self) -> bool:
        return self.manifest.get("status") == "finished"


def read_all(results: Path, reference: Path | None) -> list[Record]:
    """The user's runs, then the reference records; of one folder that is both, reference records."""
    known = reference is not None and reference.is_dir()
    shipped = read(reference, "reference") if reference and known else []
    if known and (not results.is_dir() or results.samefile(str(reference))):
        return shipped
    return [*read(results), *shipped]


def read(results: Path, source: Source = "own") -> list[Record]:
    """Every run below a results folder, by name. Only manifests and summaries are opened.

    Raises:
        UserError: no such folder.
    """
    if not results.is_dir():
        raise UserError(f"paths.results must be the folder of the runs, got {results}, which is not a folder.")
    return [_record(folder, source) for folder in run_folder.folders(results)]


def _record(folder: Path, source: Source) -> Record:
    """A run as far as it can be read; a damaged manifest counts as a run that is not finished."""
    try:
        manifest = run_folder.read_manifest(folder) or {}
    except UserError as error:
        return Record(folder, {"status": "damaged", "error": str(error)}, None, source, str(error))
    summary, file = read_summary(folder), folder / run_folder.SUMMARY
    if (summary is not None or not file.is_file()) and (wrong := digests.changed(folder, manifest, data=False)):
        return Record(folder, manifest, None, source, f"{folder}: {wrong[0]}.")
    if summary is not None or not file.is_file():
        return Record(folder, manifest, summary, source)
    damage = schemas.problem("summary", read_json(file))
    return Record(
        folder, manifest, None, source, f"{file} is damaged: {damage}. Derive it again: python -m bench report"
    )


def read_summary(folder: Path) -> dict[str, Any] | None:
    """summary.json of a run; None if it is missing or damaged, as it can be rebuilt."""
    found = read_json(folder / run_folder.SUMMARY)
    return None if schemas.problem("summary", found) else found


def row(record: Record) -> FlatRow:
    """The run as one flat row."""
    manifest, summary = record.manifest, record.summary if record.finished else None
    named = {key: (manifest.get(key) or {}).get("name") for key in ("method", "dataset", "model")}
    facts = {
        "run_id": record.path.name,
        "source": record.source,
        "status": manifest.get("status"),
        **named,
        "weights": (manifest.get("model") or {}).get("weights") or "full",
        "result": None if summary is None else result(summary),
        "valid": None if summary is None else is_valid(summary),
        "reasons": record.problem or "; ".join(audit.explained(summary or {})),
        "started_at": manifest.get("started_at"),
        "seed": manifest.get("seed"),
        "measure": (manifest.get("measure") or {}).get("name"),
        "git": (manifest.get("git") or {}).get("sha"),
        "part": (manifest.get("part") or {}).get("sha256"),
    }
    settings = {f"method.{key}": _cell(value) for key, value in _settings(manifest)}
    measured = flatten(_as_today(summary) if summary else {}, whole=_MANY)
    return facts | settings | {key: _cell(value) for key, value in measured if key not in facts}


def _as_today(summary: Mapping[str, Any]) -> dict[str, Any]:
    """An older summary with the headline and the ranking that it would have now."""
    speedup = {**summary["speedup"], "headline": dict(metrics.headline(summary))}
    return {**summary, "speedup": speedup, "ranking": asdict(ranking.ranking(summary))}


def result(summary: Mapping[str, Any]) -> audit.Result:
    """VALID, INCONCLUSIVE or INVALID; summaries from before the second one are judged by the numbers they hold."""
    return audit.result(summary)


def is_valid(summary: Mapping[str, Any]) -> bool:
    """Whether the run is VALID: nothing is wrong with it, and noise alone does not explain its speed-up."""
    return result(summary) == "VALID"


def _settings(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    method = manifest.get("method") or {}
    yield from ((key, value) for key, value in method.items() if key not in ("name", "_target_"))


def _cell(value: Any) -> Any:
    """A group as JSON text; a list stays one."""
    return json.dumps(value) if isinstance(value, Mapping) else value


# -------------------------------------------------------------------------------------------------------- filtering


def select(rows: Sequence[FlatRow], filters: Iterable[str]) -> list[FlatRow]:
    """The rows that every filter lets through.

    Args:
        rows: of ``row``.
        filters: ``column=value``, several values with commas between them, each with ``*`` and ``?`` as in file names;
            ``column!=value`` keeps the others.

    Raises:
        UserError: a filter that cannot be read, or a column that no run has.
    """
    kept = list(rows)
    columns = dict.fromkeys(name for each in rows for name in each)
    for word in filters:
        passes = _filter(word, columns)
        kept = [each for each in kept if passes(each)]
    return kept


def _filter(word: str, columns: Mapping[str, Any]) -> Callable[[FlatRow], bool]:
    name, equals, wanted = word.partition("=")
    if not equals:
        raise UserError(f"A filter must be column=value, got '{word}'. Example: collect method=eagle valid=true")
    unwanted, name = name.endswith("!"), name.removesuffix("!")
    _require(name, columns)
    patterns = [pattern.strip() for pattern in wanted.split(",")]
    return lambda each: any(fnmatchcase(_text(each.get(name)), pattern) for pattern in patterns) is not unwanted


def require_column(rows: Sequence[FlatRow], name: str) -> None:
    """Raise UserError unless a row has the column, or there is no row."""
    _require(name, dict.fromkeys(key for each in rows for key in each))


def _require(name: str, columns: Mapping[str, Any]) -> None:
    if columns and name not in columns:
        hint = did_you_mean(name, columns)
        raise UserError(f"No run has a column '{name}'.{hint} (python -m bench collect out=all.csv has them all)")


def _text(value: Any) -> str:
    """As it is written on a command line."""
    return json.dumps(value) if value is None or isinstance(value, bool | list) else str(value)


# ----------------------------------------------------------------------------------------------------------- output


def to_frame(rows: Sequence[FlatRow]) -> pd.DataFrame:
    """One column per key that any row has, numbers as numbers, lists as lists; a column of several kinds as text."""
    import pandas as pd

    frame = pd.DataFrame(list(rows)).convert_dtypes()
    mixed = [name for name in frame.select_dtypes(object).columns if not _holds_lists(frame[name].dropna())]
    return frame.assign(**{name: frame[name].map(_text, na_action="ignore").astype("string") for name in mixed})


def _holds_lists(cells: Iterable[Any]) -> bool:
    """Whether all cells are lists of one kind, numbers or texts, with gaps."""
    kinds: set[type] = set()
    for cell in cells:
        if not isinstance(cell, list):
            return False
        kinds |= {float if type(item) is int else type(item) for item in cell if item is not None}
    return len(kinds) <= 1 and not kinds & {list, dict}


def write(rows: Sequence[FlatRow], file: Path) -> None:
    """Into a .csv, .parquet, .json or .md file, by its ending; lists are JSON text in .csv and .md.

    Raises:
        UserError: another ending, or a file that cannot be there.
    """
    writers: dict[str, Callable[[pd.DataFrame], Any]] = {
        ".csv": lambda frame: frame.map(lambda cell: _text(cell) if isinstance(cell, list) else cell).to_csv(
            index=False
        ),
        ".parquet": lambda frame: frame.to_parquet(None, index=False),
        ".json": lambda frame: frame.to_json(None, orient="records", indent=1),
        ".md": lambda _: tables.markdown(*_shown_table(rows)) + "\n",
    }
    if file.suffix not in writers:
        raise UserError(f"out must end in {', '.join(writers)}, got {file}.")
    files.write_output(file, writers[file.suffix](to_frame(rows)))


def _csv_cell(cell: Any) -> Any:
    return _text(cell) if isinstance(cell, list) else cell


def text(rows: Sequence[FlatRow], width: int | None = None) -> str:
    """A table for the terminal: of runs the columns that matter most, of anything else all.

    Args:
        width: most characters of a line; None: those of the terminal, else 100.
    """
    width = width or shutil.get_terminal_size((_WIDTH, 24)).columns
    header, cells = _shown_table(rows)
    columns = dict(zip(header, map(list, zip(*cells, strict=True)), strict=True))
    lines: list[str] = []
    shared = {name: columns.pop(name)[0] for name in _ALIKE if len(rows) > 1 and len(set(columns.get(name, "?-"))) == 1}
    shared.pop("source", None)
    if shared:
        lines = [*textwrap.wrap("All: " + ", ".join(map(" ".join, shared.items())), width), ""]
    if not any(columns.get("setting", ["-"])):
        del columns["setting"]
    if "run" in columns and tables.fitting(columns, width, _LEAST)[1]:
        columns["run"] = [name.rpartition("-")[2] for name in columns["run"]]  # that of no other run
    table, left_out = tables.fitting(columns, width, _LEAST)
    lines += [line if len(line) <= width else f"{line[: width - 2]}.." for line in table.splitlines()]
    if left_out:
        lines += ["", *textwrap.wrap(f"Not shown: {', '.join(left_out)}. A file has all columns: out=runs.csv", width)]
    return "\n".join(lines)


def _shown_table(rows: Sequence[FlatRow]) -> tuple[list[str], list[list[str]]]:
    """Header and cells; of runs a choice of columns."""
    found = dict.fromkeys(name for each in rows for name in each)
    if "run_id" not in found:
        return list(found), [[_shown(each.get(name)) for name in found] for each in rows]
    columns = {name: key for name, key in _ALIKE.items() if key in found}
    measured = {name: cell for name, (key, cell) in _MEASURED.items() if key in found}
    named = ["method", *(["setting"] if "setting" in found else [])]
    cells = [
        [
            *(_shown(each.get(name)) for name in named),
            *(_shown(each.get(key)) for key in columns.values()),
            *("-" if each.get(_MEASURED[name][0]) is None else cell(each) for name, cell in measured.items()),
            _result(each),
            str(each["run_id"]),
        ]
        for each in rows
    ]
    return [*named, *columns, *measured, "result", "run"], cells


def _result(each: FlatRow) -> str:
    """The verdict; without one the status of the run."""
    return str(each.get("result") or each.get("status"))


def _novel(each: FlatRow) -> str:
    found = {name: each.get(f"speedup.novel.{name}") for name in ("value", "n")}
    return terminal.times(terminal.novel({"speedup": {"novel": found}})).replace(terminal.MISSING, "-")


def _interval(each: FlatRow) -> str:
    found = {name: each.get(f"speedup.headline.{name}") for name in ("low", "high", "n")}
    return terminal.interval(found).replace(terminal.MISSING, "-")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else _text(value)


# Columns for the terminal, heading and key: settings, which are shown where runs differ, and numbers with their form.
_ALIKE = {
    "dataset": "dataset",
    "model": "model",
    "dtype": "dtype",
    "batch": "batch_size",
    "refill": "refill",
    "prefix cache": "prefix_cache",
    "compile": "compile",
    "kernels": "kernels",
    "source": "source",
}
_MEASURED: dict[str, tuple[str, Callable[[FlatRow], str]]] = {
    "speed-up": ("speedup.headline.value", lambda each: terminal.times(each["speedup.headline.value"])),
    "95 %": ("speedup.headline.low", _interval),
    "novel": ("speedup.novel.value", _novel),
    "tokens/step": ("tokens_per_step", lambda each: terminal.number(each["tokens_per_step"])),
    "tokens/s": ("tokens_per_s", lambda each: terminal.rate_number(each["tokens_per_s"])),
    "agreement": ("agreement.exact", lambda each: f"{each['agreement.exact']:.1%}"),
}
# Left out in this order where the terminal is narrow.
_LEAST = (
    "source",
    "kernels",
    "compile",
    "refill",
    "prefix cache",
    "novel",
    "agreement",
    "tokens/step",
    "tokens/s",
    "run",
    "dtype",
    "batch",
    "95 %",
)


def groups(summaries: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Comparable runs (``bench.report.terminal.JOIN_KEYS``); in each group the fastest first, runs without a rank last.

    Of these the VALID ones come first, then the INCONCLUSIVE and then the INVALID ones.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for summary in summaries:
        found.setdefault(repr([terminal.join_value(summary, key) for key in terminal.JOIN_KEYS]), []).append(summary)
    for group in found.values():
        group[:] = terminal.ordered(group)
    return sorted(found.values(), key=lambda group: _order(group[0]))


def _order(summary: Mapping[str, Any]) -> list[str]:
    """Data set, model, machine, type, and within these small batches first."""
    keys = ("dataset", "model", "hardware", "dtype", "threads")
    return [*(str(summary.get(key)) for key in keys), f"{summary.get('batch_size') or 0:09}"] + [
        str(terminal.join_value(summary, key)) for key in terminal.JOIN_KEYS
    ]

"""The tables of ``python -m bench collect``: a row per run, per metric, per category, or per decoded prompt.

The last three are tidy: one observation per row, the same columns for every run, units in ``unit`` or in the name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from bench.errors import UserError
from bench.records import run_folder, schemas
from bench.records.run_folder import Sample
from bench.report import collect, frontier
from bench.report.collect import FlatRow, Record
from bench.utils import stats

What = Literal["runs", "long", "categories", "samples"]
ALL = "all"  # category of a metric over all prompts
# Columns of a table that can be filtered, beside those of the runs.
OWN: dict[What, tuple[str, ...]] = {
    "runs": (),
    "long": ("category", "metric", "unit"),
    "categories": ("category",),
    "samples": ("prompt_id", "category", "turn", "repeat", "arm", "finish"),
}
# Keys of a summary that say what was measured, and intervals that belong to another key.
_NO_METRICS = frozenset(
    {"schema_version", "dataset_revision", "threads", "batch_size", "refill", "refill_queue", "sampling", "calibration"}
    | {"sort_by_length", "ignore_eos", "max_new_tokens", "made_ahead", "compile", "kernels", "graphs_left", "verdict"}
    | {"prefix_cache", "geometric_interval"}
)
_NS = 1e9


def table(what: What, found: Sequence[Record]) -> list[FlatRow]:
    """One of the tables, of records in their order; runs without numbers have a row among ``runs`` alone."""
    finished = [record for record in found if record.finished and record.summary]
    settings = frontier.settings(finished)
    labels = {id(record): settings[str((record.summary or {})["run_id"])] for record in finished}
    if what == "runs":
        return [collect.row(record) | {"setting": labels.get(id(record), "")} for record in found]
    rows: Callable[[Record], Iterator[FlatRow]] = {"long": metrics, "categories": categories, "samples": samples}[what]
    return [facts(record, labels[id(record)]) | row for record in finished for row in rows(record)]


def facts(record: Record, setting: str) -> FlatRow:
    """What identifies a run in every table."""
    named = {key: (record.summary or {}).get(key) for key in ("method", "model", "dataset")}
    return {"run": record.path.name, "setting": setting} | named


def metrics(record: Record) -> Iterator[FlatRow]:
    """Every number of the summary by its dotted name, with its interval if it has one; places of lists count from 1."""
    summary = record.summary or {}
    for path, found in _numbers(summary, ()):
        category, shown = ALL, list(path)
        if path[:2] == ("speedup", "by_category"):
            category, shown = path[2], ["speedup", "headline" if "headline" in summary["speedup"] else "total"]
        yield {"category": category, "metric": ".".join(shown), **found}


def _numbers(node: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], FlatRow]]:
    """Every number below a node: its path, value, interval and unit."""
    for key, value in node.items():
        here = (*path, key)
        unit, alone = schemas.unit("summary", here), {"low": None, "high": None}
        if key in _NO_METRICS:
            continue
        if isinstance(value, Mapping) and {"value", "low", "high"} <= value.keys():
            unit = schemas.unit("summary", (*here, "value"))
            yield here, {"value": value["value"], **_bounds(value), "unit": unit}
        elif isinstance(value, Mapping):
            yield from _numbers(value, here)
        elif _is_number(value):
            low, high = node.get(f"{key}_interval") or (None, None)
            yield here, {"value": value, "low": low, "high": high, "unit": unit}
        elif isinstance(value, list):
            numbered = ((str(place), item) for place, item in enumerate(value, start=1) if _is_number(item))
            yield from (((*here, place), {"value": item, **alone, "unit": unit}) for place, item in numbered)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def categories(record: Record) -> Iterator[FlatRow]:
    """Speed-up by category of prompts; ``n`` counts conversations."""
    for name, found in ((record.summary or {})["speedup"].get("by_category") or {}).items():
        yield {"category": name, "speedup": found["value"], **_bounds(found), "n": found["n"]}


def _bounds(found: Mapping[str, Any]) -> FlatRow:
    """An interval; older records have one of fewer than 5 pairs, too, which says nothing."""
    few = (found.get("n") or stats.FEWEST_PAIRS) < stats.FEWEST_PAIRS
    return {bound: None if few else found[bound] for bound in ("low", "high")}


def samples(record: Record) -> Iterator[FlatRow]:
    """Every measured prompt and arm, without texts and ids; none where the samples are not kept.

    Raises:
        UserError: samples that cannot be read.
    """
    if (record.path / run_folder.PAIRS).is_file():
        return
    for sample in run_folder.read_samples(record.path):
        if sample.phase == "measure":
            yield _sample(sample)


def _sample(sample: Sample) -> FlatRow:
    names = ("prompt_id", "category", "turn", "repeat", "arm", "order", "batch", "batch_size", "finish")
    counts = ("n_prompt_tokens", "n_kept_tokens", "n_output_tokens", "peak_bytes", "energy_j")
    sums = ("step_drafted", "step_accepted", "step_target_passes", "step_draft_passes")
    return {
        **{name: getattr(sample, name) for name in names + counts},
        "latency_s": sum(sample.step_ns) / _NS,
        "prefill_s": sample.prefill_ns / _NS,
        "batch_s": sample.batch_ns / _NS,
        "n_steps": len(sample.step_ns),
        **{f"n_{name.removeprefix('step_')}": sum(getattr(sample, name)) for name in sums},
        **{f"quality.{name}": value for name, value in sample.quality.items()},
    }


def without_samples(found: Sequence[Record]) -> int:
    """How many finished runs keep times of prompts alone, so that they have no row among the samples."""
    return sum(record.finished and (record.path / run_folder.PAIRS).is_file() for record in found)


def order(rows: Sequence[FlatRow], column: str) -> list[FlatRow]:
    """The rows by a column, ``-column`` for the largest first; those without a value come last.

    Raises:
        UserError: a column that no row has.
    """
    name = column.removeprefix("-")
    collect.require_column(rows, name)
    known = [row for row in rows if row.get(name) is not None]
    try:
        known.sort(key=lambda row: row[name], reverse=column.startswith("-"))
    except TypeError as error:
        raise UserError(f"sort must name a column of numbers or of texts, got '{name}' with several kinds.") from error
    return [*known, *(row for row in rows if row.get(name) is None)]

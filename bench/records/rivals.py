"""What ``python -m bench rivals import`` stores: figures that another engine's own benchmark wrote.

They are no runs. Nothing here was measured or checked by this suite, so they have no verdict and no rank, and no table
of runs contains them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bench.utils import files
from bench.utils.stats import Interval

FOLDER, FORMAT, STORED = "rivals", "decodebench rivals", 1
STATUS = "imported"  # of every row, in the place of VALID or INVALID
_LONGEST_NAME = 80


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds, over requests or batches; None: the file does not say it."""

    mean: float | None = None
    median: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """One entry of a file; None: the file does not say it.

    Attributes:
        name: file name, with the number of the entry where the file has several.
        tool: the benchmark that wrote it.
        engine: the engine, as far as the file names it.
        version: of the engine.
        label: what the user of the benchmark called the entry.
        model: as the file or the user of the import names it.
        dataset: the benchmark's name of the prompts.
        requests: finished ones; of one batch its size.
        failed: requests that broke.
        concurrency: most requests at a time.
        batch_size: of a benchmark of one batch.
        request_rate: per second; ``"inf"`` for all at once; another text for a rate that changes.
        input_tokens: of all requests.
        output_tokens: likewise.
        total_tokens: both.
        duration_s: of the whole benchmark, or of one batch.
        tokens_per_s: output tokens per second of ``duration_s``.
        total_tokens_per_s: input and output tokens per second of ``duration_s``.
        ttft_s: from the start of a request to its first token.
        tpot_s: (latency - TTFT) / (output tokens - 1) of a request.
        latency_s: of a request or of a batch.
        accepted_length: tokens of a round, the target's own token counted.
        acceptance_rate: accepted / drafted tokens.
        acceptance_at: share of the drafts whose i-th token was accepted.
    """

    name: str
    tool: str
    engine: str
    version: str | None = None
    label: str | None = None
    model: str | None = None
    dataset: str | None = None
    requests: int | None = None
    failed: int = 0
    concurrency: int | None = None
    batch_size: int | None = None
    request_rate: float | str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    duration_s: float | None = None
    tokens_per_s: float | None = None
    total_tokens_per_s: float | None = None
    ttft_s: Spread = Spread()
    tpot_s: Spread = Spread()
    latency_s: Spread = Spread()
    accepted_length: float | None = None
    acceptance_rate: float | None = None
    acceptance_at: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Against:
    """An entry against the entry of the baseline that was measured in the same way.

    Attributes:
        baseline: name of that entry, or of the file where there is none.
        reasons: why the two cannot be compared; empty if they can.
        of: what ``per_token`` is the ratio of, ``mean TPOT`` or ``mean latency``.
        per_token: baseline's time over this entry's; above 1 this entry is faster.
        throughput: tokens per second of this entry over the baseline's.
    """

    baseline: str
    reasons: tuple[str, ...] = ()
    of: str | None = None
    per_token: Interval | None = None
    throughput: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A stored entry; ``against`` is None if it was imported without a baseline, or is the baseline."""

    figures: Figures
    against: Against | None = None
    is_baseline: bool = False

    @property
    def status(self) -> str:
        """``imported``, and whether it is a baseline, which one it is compared with, or why it is not."""
        if self.is_baseline:
            return f"{STATUS}, baseline"
        if self.against and self.against.reasons:
            return f"{STATUS}, not comparable: {'; '.join(self.against.reasons)}"
        return f"{STATUS}, against {self.against.baseline}" if self.against else STATUS


def write(results: Path, source: Path, digest: str, rows: Sequence[Row]) -> Path:
    """Store the rows of one file; the file of an earlier import of the same content is replaced.

    Args:
        results: folder of the results.
        source: the file that was read.
        digest: its sha256.
        rows: its entries.
    """
    stem = re.sub(r"[^\w.-]+", "_", source.stem).lstrip(".")[:_LONGEST_NAME] or "file"
    out = results / FOLDER / f"{stem}-{digest[:12]}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "stored": STORED, "status": STATUS, "file": source.name, "sha256": digest}
    files.write_json(out, content | {"entries": [asdict(row) for row in rows]})
    return out


def read_all(results: Path) -> tuple[list[Row], list[str]]:
    """Every stored row below a results folder by file, and a message for each file that cannot be read."""
    rows: list[Row] = []
    problems = []
    for file in sorted((results / FOLDER).glob("*.json")):
        try:
            rows += _read(file)
        except (KeyError, TypeError, ValueError):
            problems.append(f"{file} must be what rivals import wrote, got something else. Delete it and import again.")
    return rows, problems


def _read(file: Path) -> Iterator[Row]:
    content = files.read_json(file) or {}
    if (content["format"], content["stored"]) != (FORMAT, STORED):
        raise ValueError
    for entry in content["entries"]:
        against = entry["against"]
        yield Row(_figures(entry["figures"]), _against(against) if against else None, bool(entry["is_baseline"]))


def _figures(stored: Mapping[str, Any]) -> Figures:
    named = {field.name: stored[field.name] for field in fields(Figures) if field.name in stored}
    times = {name: Spread(*map(_number, _parts(named[name]))) for name in ("ttft_s", "tpot_s", "latency_s")}
    at = tuple(float(share) for share in named["acceptance_at"])
    for field in fields(Figures):
        value = named[field.name]
        if field.type in _NUMBERS or not isinstance(value, str | None | Mapping | list):
            _number(value)
        elif field.type in _TEXTS and not isinstance(value, str | None):
            raise TypeError(field.name)
    return Figures(**{**named, **times, "acceptance_at": at})


_NUMBERS = ("int", "int | None", "float | None")
_TEXTS = ("str", "str | None")


def _parts(stored: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    return stored["mean"], stored["median"], stored["p99"]


def _number(value: Any) -> Any:
    if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
        raise TypeError(value)
    return value


def _against(stored: Mapping[str, Any]) -> Against:
    ratio = stored["per_token"]
    if ratio:
        ratio = Interval(**ratio)
        _ = [_number(value) for value in (ratio.value, ratio.low, ratio.high, ratio.n)]
    reasons = tuple(str(reason) for reason in stored["reasons"])
    return Against(str(stored["baseline"]), reasons, stored["of"], ratio or None, _number(stored["throughput"]))

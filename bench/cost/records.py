"""Records of ``python -m bench cost``: every timing as a line, and the curves derived from them.

``results/costs/<id>/``: manifest.json (model, machine, settings, one entry per session), config.yaml, points.jsonl
(appended and flushed; the only source of truth; an incomplete last line is ignored), summary.json (derived) and
roofline.png. Later calls for the same model and machine add to the same folder.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.analysis import peaks
from bench.analysis.cost_curve import CostCurve
from bench.cost import roofline
from bench.errors import UserError
from bench.models.architectures import Architecture
from bench.records.run_folder import device_name, machine_failures
from bench.utils import files
from bench.utils.files import read_json, write_entries

MANIFEST, CONFIG, POINTS, SUMMARY, PLOT = "manifest.json", "config.yaml", "points.jsonl", "summary.json", "roofline.png"
SCHEMA_VERSION = 1
_LOCK = ".lock"

Point = tuple[int, int, int]  # batch, context, nodes
Line = dict[str, Any]


class CostFolder:
    """The folder of one model on one machine while it is written; one process at a time.

    Args:
        path: the folder.
        fresh: discard earlier measurements.

    Attributes:
        manifest: the content of manifest.json; change it with ``update``.
        lines: all timings.

    Raises:
        UserError: another process writes it, or a line in the middle cannot be read.
        RunFailed: it cannot be written.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path = path
        with ExitStack() as opened, machine_failures():
            path.mkdir(parents=True, exist_ok=True)
            busy = f"{path} is being written by another process; wait for it."
            opened.enter_context(files.locked(path / _LOCK, busy))
            for name in (POINTS, SUMMARY, MANIFEST, PLOT) if fresh else ():
                (path / name).unlink(missing_ok=True)
            self.manifest: dict[str, Any] = read_json(path / MANIFEST) or {}
            self.lines = _recover(path / POINTS)
            self._file = opened.enter_context(open(path / POINTS, "a", encoding="utf-8"))
            self._opened = opened.pop_all()

    def append(self, line: Line) -> None:
        """Record one timing before the next one starts."""
        with machine_failures():
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        self.lines.append(line)

    def update(self, **facts: Any) -> None:
        """Change the manifest atomically."""
        self.manifest |= facts
        with machine_failures():
            write_entries(self.path / MANIFEST, self.manifest)

    def __enter__(self) -> CostFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary, derived from the timings.

    Raises:
        UserError: the folder has none.
    """
    manifest = read_json(folder / MANIFEST)
    if manifest is None:
        raise UserError(f"{folder} is no cost record. python -m bench cost writes them to results/costs/.")
    return summarise(read_lines(folder / POINTS), manifest)


def read_lines(file: Path) -> list[Line]:
    """All lines of a points.jsonl; an incomplete last one is left out.

    Raises:
        UserError: a line that is not the last one cannot be read.
    """
    raw = file.read_bytes().split(b"\n") if file.is_file() else []
    found: list[Line] = []
    for number, text in enumerate(raw, start=1):
        if not text:
            continue
        try:
            found.append(dict(json.loads(text)))
        except (ValueError, TypeError) as error:
            if any(raw[number:]):
                raise UserError(
                    f"{file}, line {number} cannot be read: {error}. Remove the line, or measure again with --fresh."
                ) from error
    return found


def _recover(file: Path) -> list[Line]:
    """All lines; an incomplete last one is removed from the file, since the next one is appended."""
    found = read_lines(file)
    whole = "".join(json.dumps(line) + "\n" for line in found)
    if file.is_file() and not file.read_bytes().endswith(b"\n") and file.stat().st_size:
        files.atomic_write(file, whole)
    return found


# ------------------------------------------------------------------------------------------------------- derived


def timings(lines: Iterable[Line]) -> dict[Point, list[int]]:
    """Nanoseconds of all repeats of each point."""
    found: dict[Point, list[int]] = defaultdict(list)
    for line in lines:
        if line["kind"] == "pass":
            found[line["batch"], line["context"], line["nodes"]].append(line["ns"])
    return dict(found)


def probe_timings(lines: Iterable[Line]) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Nanoseconds of the repeats of each probe, and its bytes or FLOPs per call."""
    found: dict[str, list[int]] = defaultdict(list)
    amounts: dict[str, int] = {}
    for line in lines:
        if line["kind"] == "probe":
            found[line["name"]].append(line["ns"])
            amounts[line["name"]] = line["amount"]
    return dict(found), amounts


def spread(values: Sequence[int] | Sequence[float]) -> float | None:
    """IQR over median; None for fewer than four values."""
    if len(values) < 4:
        return None
    low, middle, high = np.percentile(values, [25, 50, 75])
    return float((high - low) / middle) if middle else None


def summarise(lines: Sequence[Line], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The content of summary.json, derived from the records only."""
    machine = peaks.peaks(*probe_timings(lines))
    found = timings(lines)
    points = [_point(point, ns, manifest, machine) for point, ns in sorted(found.items())]
    return {
        "schema_version": SCHEMA_VERSION,
        "id": manifest["id"],
        "model": manifest["model"],
        "dtype": manifest["dtype"],
        "hardware": device_name(manifest["hardware"]),
        "threads": manifest["hardware"]["threads"],
        "peaks": machine,
        "curves": [curve.to_dict() for curve in curves(found)],
        "points": points,
        "drafts": drafts(lines, manifest),
        "failed": manifest.get("failed", []),
        **({"invariance": equal} if (equal := manifest.get("invariance")) else {}),
    }


def _point(
    point: Point, ns: Sequence[int], manifest: Mapping[str, Any], machine: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    batch, context, nodes = point
    seconds = statistics.median(ns) / 1e9
    needed = roofline.work(Architecture(**manifest["architecture"]), manifest["itemsize"], batch, nodes, context)
    if read := manifest["model"].get("read_bytes"):
        needed = replace(needed, weight_bytes=round(read))
    spread_out = manifest["model"].get("parallel", 1) > 1  # over devices, whose limits are measured for one
    bandwidth, flops = (None, None) if spread_out else (peaks.peak_bandwidth(machine), peaks.peak_flops(machine))
    return {
        "batch": batch,
        "context": context,
        "nodes": nodes,
        "seconds": seconds,
        "spread": spread(ns),
        "repeats": len(ns),
        **needed.to_dict(),
        "bandwidth_utilisation": needed.bytes / seconds / bandwidth if bandwidth else None,
        "flops_utilisation": needed.flops / seconds / flops if flops else None,
    }


def curves(found: Mapping[Point, Sequence[int]]) -> list[CostCurve]:
    """One curve per batch size, over the points that form a full table.

    If points are missing, contexts without a single-node round are left out first, then node counts that lack a
    context.
    """
    made = []
    for batch in sorted({point[0] for point in found}):
        contexts = sorted({context for b, context, nodes in found if (b, nodes) == (batch, 1)})
        counts = sorted({nodes for b, _, nodes in found if b == batch})
        nodes = [n for n in counts if contexts and all((batch, context, n) in found for context in contexts)]
        if nodes:
            table = [[statistics.median(found[batch, c, n]) / 1e9 for n in nodes] for c in contexts]
            made.append(CostCurve(tuple(nodes), batch, tuple(contexts), tuple(map(tuple, table))))
    return made


def drafts(lines: Iterable[Line], manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Cost of a proposal by method and batch size: mean, median and spread over the timed rounds."""
    rounds: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for line in lines:
        if line["kind"] == "draft":
            rounds[line["key"], line["batch"]] += zip(line["draft_ns"], line["passes"], strict=True)
    return [_draft(key, batch, found, manifest) for (key, batch), found in sorted(rounds.items()) if found]


def _draft(key: str, batch: int, found: Sequence[tuple[int, int]], manifest: Mapping[str, Any]) -> dict[str, Any]:
    seconds = [ns / 1e9 for ns, _ in found]
    return {
        "method": manifest["drafts"][key]["method"],
        "batch": batch,
        "seconds": statistics.fmean(seconds),
        "median": statistics.median(seconds),
        "spread": spread(seconds),
        "passes": statistics.fmean(passes for _, passes in found),
        "rounds": len(found),
    }

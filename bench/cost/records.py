"""What ``python -m bench.cost`` leaves behind: every timing as a line, and the curves derived from them.

``results/costs/<id>/``: manifest.json (model, machine, settings, one entry per session), config.yaml, points.jsonl
(append and flush; the only source of truth; a torn last line is tolerated), summary.json (derived) and roofline.png.
Later calls for the same model and machine add points, repeats and methods to the same folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.analysis.cost_curve import CostCurve
from bench.cost import roofline
from bench.errors import UserError
from bench.models.architectures import Architecture
from bench.records.run_folder import machine_failures
from bench.utils import files
from bench.utils.files import read_json, write_json

MANIFEST, CONFIG, POINTS, SUMMARY, PLOT = "manifest.json", "config.yaml", "points.jsonl", "summary.json", "roofline.png"
SCHEMA_VERSION = 1
_LOCK = ".lock"

Point = tuple[int, int, int]  # batch, context, nodes
Line = dict[str, Any]


class CostFolder:
    """The folder of one model on one machine while it is written; one process at a time.

    Args:
        path: the folder.
        fresh: forget what was measured before.

    Attributes:
        manifest: what manifest.json holds; change it through ``update``.
        lines: everything recorded so far.

    Raises:
        UserError: another process writes it, or a line in the middle cannot be read.
        RunFailed: it cannot be written.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path = path
        with machine_failures():
            path.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._claim()
            with machine_failures():
                for name in (POINTS, SUMMARY, MANIFEST, PLOT) if fresh else ():
                    (path / name).unlink(missing_ok=True)
                self.manifest: dict[str, Any] = read_json(path / MANIFEST) or {}
                self.lines = _recover(path / POINTS)
                self._file = open(path / POINTS, "a", encoding="utf-8")  # noqa: SIM115  closed with the folder
        except BaseException:
            os.close(self._handle)
            raise

    def append(self, line: Line) -> None:
        """Record one timing, on the disk before anything else is timed."""
        with machine_failures():
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        self.lines.append(line)

    def update(self, **facts: Any) -> None:
        """Change the manifest; a reader sees the old one or the new one."""
        self.manifest |= facts
        with machine_failures():
            write_json(self.path / MANIFEST, self.manifest)

    def close(self) -> None:
        """Let other processes write the folder again."""
        self._file.close()
        os.close(self._handle)

    def __enter__(self) -> CostFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _claim(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go when the process ends
        except BlockingIOError:
            raise UserError(f"{self.path} is being written by another process; wait for it.") from None


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary, derived anew from the records.

    Raises:
        UserError: the folder holds none.
    """
    manifest = read_json(folder / MANIFEST)
    if manifest is None:
        raise UserError(f"{folder} holds no cost record; python -m bench.cost makes them under results/costs/.")
    return summarise(read_lines(folder / POINTS), manifest)


def read_lines(file: Path) -> list[Line]:
    """All lines of a points.jsonl; a torn last one is left out.

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
                    f"{file}, line {number} cannot be read: {error}. Remove the line, or measure anew with --fresh."
                ) from error
    return found


def _recover(file: Path) -> list[Line]:
    """What is there; a torn last line is cut off, for the next one would be written behind it."""
    found = read_lines(file)
    whole = "".join(json.dumps(line) + "\n" for line in found)
    if file.is_file() and not file.read_bytes().endswith(b"\n") and file.stat().st_size:
        files.replace(file, whole)
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
    """Nanoseconds of the repeats of each probe, and what one call of it moves or calculates."""
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
    """What summary.json says: a function of the records alone."""
    machine = roofline.peaks(*probe_timings(lines))
    found = timings(lines)
    points = [_point(point, ns, manifest, machine) for point, ns in sorted(found.items())]
    return {
        "schema_version": SCHEMA_VERSION,
        "id": manifest["id"],
        "model": manifest["model"],
        "dtype": manifest["dtype"],
        "hardware": device_name(manifest),
        "threads": manifest["hardware"]["threads"],
        "peaks": machine,
        "curves": [curve.to_dict() for curve in curves(found)],
        "points": points,
        "drafts": drafts(lines, manifest),
        "failed": manifest.get("failed", []),
    }


def device_name(manifest: Mapping[str, Any]) -> str:
    """The GPU, or the processor."""
    facts = manifest["hardware"]
    return str(facts["gpu"]["name"] if facts["gpu"] else facts["cpu"])


def _point(
    point: Point, ns: Sequence[int], manifest: Mapping[str, Any], machine: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    batch, context, nodes = point
    seconds = statistics.median(ns) / 1e9
    needed = roofline.work(Architecture(**manifest["architecture"]), manifest["itemsize"], batch, nodes, context)
    bandwidth, flops = roofline.peak_bandwidth(machine), roofline.peak_flops(machine)
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
    """One curve per batch size, over the points that make a full table.

    Where some did not fit, contexts without a single-node round are left out first, then the node counts that lack
    one of the contexts left.
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
    """What a proposal costs, by method and batch size: mean, median and spread over the rounds that were timed."""
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

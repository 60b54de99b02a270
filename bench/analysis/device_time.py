"""Where the time of a round goes, and how fast its pass reads memory: rates of the times that decoders report.

A round after the prefill is a draft, the target's pass with the rule that judges it, and what the host does between: it
reads the tokens, keeps the books and starts the next round. Drafts and passes are timed on a GPU by events, so the
device waits for the host in the rest of a round (``host``); elsewhere by the clock, and the rest is the time outside of
both. A draft without a pass of a drafter (a search in the text) is work of the host, too.

A pass reads all weights once and the keys and values of all rows; those of a mixture's experts are the expected ones,
and the attention of an encoder-decoder to its source is left out. The share of the peak is that of the faster of the
two memory probes of ``bench.measure.probes``. Rounds of continuous batching are left out: their times are not those of
one row.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from bench.analysis import metrics
from bench.analysis.peaks import peak_bandwidth
from bench.records.run_folder import Sample

_NS = 1e9


def device_time(samples: Sequence[Sample], manifest: Mapping[str, Any]) -> dict[str, dict[str, float | None]] | None:
    """The rates of both arms by arm; None where the baseline did not report its passes.

    Args:
        samples: of a run.
        manifest: with ``bytes_read`` and ``peaks``, where the run has them.
    """
    rows = metrics.paired(metrics.frame(samples))
    if rows.empty or rows["queue"].notna().any():
        return None
    done = metrics.batches(rows)
    read, peak = manifest.get("bytes_read"), peak_bandwidth(manifest.get("peaks") or {})
    found = {arm: _rates(done[done["arm"] == arm], read, peak) for arm in ("method", "baseline")}
    return {arm: rates for arm, rates in found.items() if rates is not None} if found["baseline"] else None


def clock_range(log: Mapping[str, Any]) -> dict[str, float]:
    """Least, median and highest clock (MHz) while a run was measured, from the readings in its manifest."""
    clocks = [row[log["columns"].index("mhz")] for row in log["readings"]] if "mhz" in log["columns"] else []
    known = [value for value in clocks if value is not None]
    return {"least": min(known), "median": statistics.median(known), "most": max(known)} if known else {}


def _rates(done: pd.DataFrame, read: Mapping[str, Any] | None, peak: float | None) -> dict[str, float | None] | None:
    """Of one arm; None where it did not report its passes, or made no round."""
    if done["step_pass_ns"].map(lambda times: not isinstance(times, list)).any():
        return None
    sums = np.zeros(6)
    each: Iterable[Any] = done.itertuples()
    for batch in each:
        sums += batch.weight * _sums(batch, read)
    rounds, whole, draft, drafting, passes, moved = sums
    if not rounds:
        return None
    busy = passes + drafting
    rate = moved / passes if moved and passes else None
    found = {
        "rounds": sum(len(steps) - 1 for steps in done["step_ns"]),
        "round_s": whole / rounds,
        "draft_s": draft / rounds,
        "pass_s": passes / rounds,
        "host_s": max(0.0, whole - draft - passes) / rounds,
        "busy_share": min(1.0, busy / whole),
        "exposed_share": max(0.0, 1 - busy / whole),
        "pass_bytes_per_s": rate,
        "round_bytes_per_s": moved / whole if moved else None,
        "pass_share_of_peak": rate / peak if rate and peak else None,
        "round_share_of_peak": moved / whole / peak if moved and peak else None,
    }
    return {name: None if value is None else float(value) for name, value in found.items()}


def _sums(batch: Any, read: Mapping[str, Any] | None) -> metrics.Array:
    """Rounds; seconds of them, of drafts, of drafts by a network, of passes; bytes that the passes read."""
    rounds = range(1, len(batch.step_ns))
    whole = sum(batch.step_ns[1:]) / _NS
    drafts = [(ns or 0) / _NS for ns in batch.step_draft_ns]
    networks = sum(drafts[step] for step in rounds if batch.step_draft_passes[step])
    passes = sum(batch.step_pass_ns[1:]) / _NS
    moved = sum(_bytes(batch, step, read) for step in rounds) if read else 0.0
    return np.array([len(rounds), whole, sum(drafts[1:]), networks, passes, moved])


def _bytes(batch: Any, step: int, read: Mapping[str, Any]) -> float:
    """That the target's passes of a step read: weights, and keys and values of all rows with the new ones."""
    rows = batch.step_rows[step] if isinstance(batch.step_rows, list) else batch.batch_size
    nodes, layers = batch.step_nodes[step], min(1.0, batch.step_layers[step])
    weights = float(np.interp(rows * nodes, read["tokens"], read["weights"]))
    slots = rows * (batch.contexts[step - 1] + nodes)
    return float(batch.step_target_passes[step] * layers * (weights + slots * read["token"]))

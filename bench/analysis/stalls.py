"""Batches that the machine held up: they took far longer than their own counters explain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bench.analysis import metrics
from bench.records.run_folder import Sample

FACTOR = 3.0  # times the expected time, whatever the other arm took
ALONE = 2.0  # times the expected time, and times what the other arm took of its own: the machine was not slow
FEWEST_BATCHES = 5  # of an arm; the median of fewer is no norm

Array = NDArray[np.float64]


def stalled(samples: Iterable[Sample]) -> list[tuple[int, int, str, float]]:
    """Batch, repeat, arm and factor of every measured batch that was held up, the worst first; see ``held_up``.

    Args:
        samples: of a run, both arms; only those of phase ``"measure"`` without an error count.
    """
    rows = metrics.frame(sample for sample in samples if sample.phase == "measure" and sample.error is None)
    found = held_up(metrics.batches(rows))
    columns = (found[name].tolist() for name in ("batch", "repeat", "arm", "factor"))
    return list(zip(*columns, strict=True))


def held_up(done: pd.DataFrame) -> pd.DataFrame:
    """The batches that were held up: arm, batch, repeat, ``batch_ns``, ``expected_ns`` and ``factor``, the worst first.

    The factor is the time of a batch over what its counters explain, see ``_expected_ns``. It must exceed ``FACTOR``;
    ``ALONE`` is enough if the other arm, on the same prompts right before or after, was not slow. So a machine whose
    speed halves for some minutes is not taken for one that stalls.

    Args:
        done: of ``bench.analysis.metrics.batches``.
    """
    parts = [_expected_ns(arm) for _, arm in done.groupby("arm") if len(arm) >= FEWEST_BATCHES]
    expected = pd.concat(parts) if parts else pd.Series(dtype=float)
    timed = done[["arm", "batch", "repeat", "batch_ns"]].assign(expected_ns=expected.reindex(done.index))
    timed["factor"] = timed["batch_ns"] / timed["expected_ns"]
    pair = timed.groupby(["batch", "repeat"])["factor"]
    other = (pair.transform("sum") - timed["factor"]).clip(lower=1.0)
    stalls = timed[timed["factor"] > np.minimum(FACTOR, ALONE * other)]
    return stalls.sort_values("factor", ascending=False, kind="stable").reset_index(drop=True)


def _expected_ns(arm: pd.DataFrame) -> pd.Series:
    """Time that the counters of each batch of an arm explain, at the arm's median paces.

    Rounds differ in size with what was drafted, accepted and skipped, so no single measure of work fits every method:
    the one that explains most time counts, of reading the prompt and of the rounds each. A batch that does more of
    anything than others is therefore not a stall.
    """
    steps = arm["step_ns"].map(len).to_numpy(float)
    first = arm["step_ns"].map(lambda times: times[0]).to_numpy(float)
    passes, layers = arm["step_target_passes"], arm["step_layers"]
    run = [np.dot(share[1:], count[1:]) for share, count in zip(layers, passes, strict=True)]
    counted = [arm[f"step_{name}"].map(lambda each: sum(each[1:])) for name in ("nodes", "target_passes")]
    drafts = arm["step_draft_passes"].map(lambda each: sum(each[1:]))
    rounds = [steps - 1, np.array(run), *(each.to_numpy(float) for each in (*counted, drafts))]
    reading = _most_explained(first, [np.ones(len(arm)), arm["n_prompt_tokens"].to_numpy(float)])
    return pd.Series(reading + _most_explained(arm["batch_ns"].to_numpy(float) - first, rounds), index=arm.index)


def _most_explained(spent_ns: Array, work: Sequence[Array]) -> Array:
    """For each batch the largest time that a measure of its work explains."""
    found = np.zeros(len(spent_ns))
    for amount in work:
        some = amount > 0
        if some.any():
            found = np.maximum(found, np.median(spent_ns[some] / amount[some]) * amount)
    return found

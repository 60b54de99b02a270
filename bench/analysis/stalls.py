"""Batches that the machine held up: slow ones, those without a processor, and those in which a clock was set.

A slow batch took far longer than its own counters explain. In a stopped one the process had no processor for a while:
it was suspended, or other programs ran. Where the system's clock moves against the monotonic one, the machine slept or
the time was set.
"""

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
STOPPED = 0.15  # share of a batch without a processor, beyond what is usual in its arm
SHORTEST_STOP_NS = 20_000_000  # longer than what a scheduler gives another program in turn
JUMP = (0.1, 0.01)  # seconds, and share of the batch, that the system's clock moved against the monotonic one

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
    """The batches that were held up: arm, batch, repeat, ``batch_ns``, ``expected_ns``, ``factor`` and ``why``.

    The worst come first. ``factor`` is ``batch_ns`` over ``expected_ns``, the time that it should have taken. ``why``
    is ``slow``, ``stopped`` or ``clock``, see ``_slow``, ``_stopped`` and ``_jumped``.

    Args:
        done: of ``bench.analysis.metrics.batches``.
    """
    found = pd.concat([_jumped(done), _stopped(done), _slow(done)])
    found["factor"] = found["batch_ns"] / found["expected_ns"]
    worst = found.sort_values("factor", ascending=False, kind="stable")
    return worst.drop_duplicates(["arm", "batch", "repeat"]).reset_index(drop=True)


def _timed(done: pd.DataFrame, expected_ns: pd.Series, why: str) -> pd.DataFrame:
    return done[["arm", "batch", "repeat", "batch_ns"]].assign(expected_ns=expected_ns.astype(float), why=why)


def _jumped(done: pd.DataFrame) -> pd.DataFrame:
    """Batches in which the system's clock moved by more than ``JUMP``; how long they should have taken is not known."""
    moved = done["jump_ns"].to_numpy(float)  # not a number where it was not recorded
    far = np.abs(moved) > 1e9 * JUMP[0] + JUMP[1] * done["batch_ns"].to_numpy(float)
    return _timed(done, done["batch_ns"], "clock")[far]


def _stopped(done: pd.DataFrame) -> pd.DataFrame:
    """Batches that lacked processor time, of which others of the arm get as much as they take, or a usual share.

    A process that computes on a CPU, or waits for a GPU, keeps one processor busy; more threads do not count.
    """
    used, wall = done["cpu_ns"].to_numpy(float), done["batch_ns"].to_numpy(float).clip(min=1.0)
    shares = pd.Series(np.minimum(1.0, used / wall), index=done.index)
    arms = shares.groupby(done["arm"])
    usual = arms.transform("median").where(arms.transform("size") >= FEWEST_BATCHES, shares.median())
    lost = wall - used / usual.to_numpy(float)
    far = (lost > SHORTEST_STOP_NS) & (lost > STOPPED * wall)
    return _timed(done, pd.Series(np.maximum(1.0, wall - lost), index=done.index), "stopped")[far]


def _slow(done: pd.DataFrame) -> pd.DataFrame:
    """Batches that took more than ``FACTOR`` times what their counters explain, see ``_expected_ns``.

    ``ALONE`` is enough if the other arm, on the same prompts right before or after, was not slow. So a machine whose
    speed halves for some minutes is not taken for one that stalls.
    """
    parts = [_expected_ns(arm) for _, arm in done.groupby("arm") if len(arm) >= FEWEST_BATCHES]
    expected = pd.concat(parts) if parts else pd.Series(dtype=float)
    timed = _timed(done, expected.reindex(done.index), "slow")
    factor = timed["batch_ns"] / timed["expected_ns"]
    other = (factor.groupby([timed["batch"], timed["repeat"]]).transform("sum") - factor).clip(lower=1.0)
    return timed[factor > np.minimum(FACTOR, ALONE * other)]


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
    read = (arm["n_prompt_tokens"] - arm["n_kept_tokens"]).to_numpy(float)
    reading = _most_explained(first, [np.ones(len(arm)), read])
    return pd.Series(reading + _most_explained(arm["batch_ns"].to_numpy(float) - first, rounds), index=arm.index)


def _most_explained(spent_ns: Array, work: Sequence[Array]) -> Array:
    """For each batch the largest time that a measure of its work explains."""
    found = np.zeros(len(spent_ns))
    for amount in work:
        some = amount > 0
        if some.any():
            found = np.maximum(found, np.median(spent_ns[some] / amount[some]) * amount)
    return found

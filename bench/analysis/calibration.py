"""What a calibrated threshold loses on the prompts of the run, beside the tolerance that was promised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.records.run_folder import Sample
from bench.scoring.rouge import rouge_l
from bench.utils import stats


def measured(samples: Sequence[Sample], calibration: Mapping[str, Any]) -> dict[str, Any] | None:
    """Mean loss over the measured prompts with its 95 % interval, and whether that is above the tolerance.

    The loss is the one that was calibrated: 1 - ROUGE-L to the baseline's text (``against=textual``), or what the
    score against the reference lost, gains not counted (``against=risk``).

    Args:
        samples: of the run.
        calibration: its choice, as in the manifest.

    Returns:
        The keys of ``bench.utils.stats.Interval`` and ``tolerance``, ``kept``: False if the whole interval is above
        the tolerance, True if the mean is at most the tolerance, None between. None without a loss.
    """
    rows = [sample for sample in samples if sample.phase == "measure" and not sample.repeat and sample.error is None]
    arms = {arm: {row.prompt_id: row for row in rows if row.arm == arm} for arm in ("baseline", "method")}
    losses = [
        loss
        for name, before in arms["baseline"].items()
        if (after := arms["method"].get(name)) and (loss := _loss(before, after, calibration.get("metric"))) is not None
    ]
    tolerance = calibration.get("tolerance")
    if not losses or tolerance is None:
        return None
    found = stats.mean(losses)
    kept = True if (found.value or 0.0) <= tolerance else False if (found.low or 0.0) > tolerance else None
    return asdict(found) | {"tolerance": tolerance, "kept": kept}


def _loss(before: Sample, after: Sample, metric: str | None) -> float | None:
    if metric is None:
        return 1.0 - rouge_l(before.output_ids, after.output_ids)
    if metric not in before.quality or metric not in after.quality:
        return None
    was, now = (min(1.0, row.quality[metric] / 100) for row in (before, after))
    return max(0.0, was - now)

"""What a calibrated run loses on its own prompts, with an interval, beside the tolerance."""

from __future__ import annotations

from typing import Any

import pytest

from bench.analysis.calibration import measured
from bench.records.run_folder import Sample
from tests.helpers.sample_rows import both


def rows(wrong: list[int], **method: Any) -> list[Sample]:
    """One prompt of ten tokens for each entry, with so many tokens of the method that the baseline does not have."""
    found: list[Sample] = []
    for place, count in enumerate(wrong):
        ids = list(range(10))
        other = [*ids[: 10 - count], *range(100, 100 + count)]
        found += both(f"{place + 1}/1", {"output_ids": ids}, {"output_ids": other} | method)
    return found


@pytest.mark.parametrize(
    ("wrong", "tolerance", "kept"),
    [([0, 1, 0, 1, 0, 1], 0.1, True), ([3] * 3 + [4] * 3, 0.1, False), ([0, 5] * 3, 0.2, None)],
)
def test_the_loss_of_the_texts(wrong: list[int], tolerance: float, kept: bool | None) -> None:
    found = measured(rows(wrong), {"tolerance": tolerance, "metric": None}) or {}
    mean = sum(wrong) / 10 / len(wrong)
    assert found["value"] == pytest.approx(mean) and found["low"] < mean < found["high"]
    assert (found["n"], found["tolerance"], found["kept"]) == (6, tolerance, kept)


def test_the_loss_of_scores_counts_no_gain() -> None:
    choice = {"tolerance": 0.1, "metric": "bleu"}
    samples = [
        *both("1/1", {"quality": {"bleu": 50.0}}, {"quality": {"bleu": 30.0}}),
        *both("2/1", {"quality": {"bleu": 20.0}}, {"quality": {"bleu": 90.0}}),
        *both("3/1", {"quality": {}}, {"quality": {}}),
    ]
    found = measured(samples, choice) or {}
    assert found["value"] == pytest.approx(0.1) and found["n"] == 2 and found["low"] is None
    assert measured(samples[-2:], choice) is None

"""Which runs may have a rank, and why others have none."""

from __future__ import annotations

from typing import Any

import pytest

from bench.analysis import ranking as rules
from bench.analysis.ranking import LOGPROB_LOSS, TEXT_LOSS, ranking

GOOD = {"distinct_4": 0.7, "longest_loop": 20.0, "repeated_lines": 0.1}

SEVERAL = {"headline": {"value": 1.5}, "by_category": {"a": {}, "b": {}}}


def summary(guarantee: str = "RELAXED", **changes: Any) -> dict[str, Any]:
    """A valid run without references whose text is almost the baseline's."""
    return {
        "guarantee": guarantee,
        "verdict": {"valid": True, "reasons": [], "inconclusive": []},
        "speedup": {"headline": {"value": 1.5}, "by_category": {}},
        "quality": {},
        "baseline": {"quality": {}},
        "agreement": {"mean_logprob": -0.5, "baseline": {"mean_logprob": -0.48}},
        "degeneration": {"method": GOOD, "baseline": GOOD},
        "ranking": {"text_loss": 0.1},
    } | changes


def scored(value: float, before: float, **changes: Any) -> dict[str, Any]:
    return summary(quality={"bleu": value}, baseline={"quality": {"bleu": before}}, **changes)


def repeating(**worse: float) -> dict[str, Any]:
    return {"degeneration": {"method": GOOD | worse, "baseline": GOOD}}


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (summary(), ""),
        (summary("EXACT", degeneration={}, ranking={}), ""),
        (summary("EXACT", verdict={"valid": False, "reasons": ["x"], "inconclusive": []}), "INVALID"),
        (summary("EXACT", verdict={"valid": True, "reasons": [], "inconclusive": ["x"]}), "INCONCLUSIVE"),
        (summary("EXACT", speedup={"headline": {"value": None}}), "no speed-up"),
        (summary("EXACT", method_facts={"oracle": True}), "ORACLE: it drafts the target's own text"),
        (summary("EXACT", method_facts={"steps": 3}), ""),
        (summary(ranking={}), "quality unknown"),
        (summary(degeneration={}), "quality unknown"),
        (summary(agreement=None), "quality unknown"),
        (summary(sampling={"temperature": 0.7}), "quality unknown"),
        (
            summary(ranking={"text_loss": TEXT_LOSS + 0.1}),
            "quality lost: ROUGE-L 0.55 to the baseline's text, at least 0.65",
        ),
        (
            summary(agreement={"mean_logprob": -0.49 - LOGPROB_LOSS, "baseline": {"mean_logprob": -0.48}}),
            "quality lost: log-probability -0.55 under the target, was -0.48",
        ),
        (summary(**repeating(longest_loop=26.0)), "degenerate: loops of 26 tokens, was 20"),
        (
            summary(**repeating(distinct_4=0.6, repeated_lines=0.2)),
            "degenerate: distinct 4-grams 0.60, was 0.70, repeated lines 0.20, was 0.10",
        ),
        (summary(**repeating(distinct_4=0.9, longest_loop=0.0, repeated_lines=0.0)), ""),
        (scored(19.1, 20.0, agreement=None, ranking={}, degeneration={}), ""),
        (scored(18.9, 20.0), "quality lost: BLEU 18.90, was 20.00"),
        (scored(19.9, 20.0, **repeating(longest_loop=26.0)), "degenerate: loops of 26 tokens, was 20"),
        (scored(0.0, 0.0, ranking={}), "quality unknown"),  # a score that says nothing
        (scored(20.0, 20.0, speedup=SEVERAL, ranking={}), "quality unknown"),
        (scored(18.0, 20.0, guarantee="INDEPENDENT_MODEL"), "quality lost: BLEU 18.00, was 20.00"),
        (scored(18.0, 20.0, n_prompts=140, quality_prompts={"bleu": 70}), "quality lost: BLEU 18.00, was 20.00"),
        (scored(18.0, 20.0, n_prompts=140, quality_prompts={"bleu": 69}), ""),  # the other texts are the baseline's
        (scored(20.0, 20.0, n_prompts=140, quality_prompts={"bleu": 69}, ranking={}), "quality unknown"),
        (scored(18.0, 20.0, n_prompts=140, quality_change={"bleu": {"n": 20}}), ""),  # an older record
        (scored(18.0, 20.0, n_prompts=140, quality_change={"bleu": {"n": 140}}), "quality lost: BLEU 18.00, was 20.00"),
        (scored(18.0, 20.0, speedup=SEVERAL), ""),  # of how many prompts is not known
    ],
)
def test_only_kept_quality_is_ranked(run: dict[str, Any], reason: str) -> None:
    found = ranking(run)
    assert (found.ranked, found.reason) == (not reason, reason)


def test_a_score_of_few_prompts_leaves_the_first_place_to_one_of_most() -> None:
    run = summary(quality={"bleu": 1.0, "rougeL": 30.0}, baseline={"quality": {"bleu": 2.0, "rougeL": 31.0}})
    assert rules.first_score(run | {"n_prompts": 9, "quality_prompts": {"bleu": 4, "rougeL": 5}}) == (
        "rougeL",
        30.0,
        31.0,
    )
    assert rules.first_score(run | {"n_prompts": 9, "quality_prompts": {"bleu": 4, "rougeL": 4}}) is None


def test_a_measured_loss_counts_before_the_recorded_one() -> None:
    assert ranking(summary(), text_loss=0.9).text_loss == 0.9 and not ranking(summary(), text_loss=0.9).ranked
    assert ranking(summary()).text_loss == 0.1


def test_a_table_has_one_state_of_the_machine() -> None:
    rates = [500.0, 510.0, 420.0, 430.0, 844.0, None]
    runs = [summary("EXACT", baseline_tokens_per_s=rate) for rate in rates]
    runs.append(
        summary("EXACT", baseline_tokens_per_s=9.0, verdict={"valid": False, "reasons": ["x"], "inconclusive": []})
    )
    reasons = rules.in_table(runs)
    text = "baseline 844 tokens/s, the table's 500: not measured under the same conditions"
    assert reasons == ["", "", text.replace("844", "420"), "", text, "", "INVALID"]
    assert rules.other_conditions([]) == []

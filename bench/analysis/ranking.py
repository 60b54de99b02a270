"""Whether the speed of a run may be ranked: an EXACT run by speed alone, any other only at a measured, kept quality.

The limits of text without references are taken from the records of SmolLM2-135M in bfloat16, on MT-bench and
Spec-Bench. There the texts of EXACT methods, which rounding alone sends apart, lose up to 0.35 of ROUGE-L and 0.03 of
log-probability, have 0.01 fewer distinct 4-grams, loops that are 4 tokens longer and 0.04 more repeated lines. Broken
texts (half of the layers, hash tables) lose 0.75 and more, 0.5 and more, 0.18, 18 tokens and 0.14.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.analysis import audit, metrics, oracle

SCORED_SHARE = 0.5  # of the prompts: a score of fewer says less of the run than its other texts
SCORE_LOSS = 0.05  # of the baseline's score: twice the half of the 95 % interval that 1,000 paired translations give
TEXT_LOSS = 0.35  # 1 - ROUGE-L to the baseline's ids: what rounding alone reaches
LOGPROB_LOSS = 0.06  # nats per token under the target: twice what rounding alone reaches
DISTINCT_LOSS = LINES_GAIN = 0.05  # shares, see ``bench.analysis.degeneration``
LOOP_GAIN = 5.0  # tokens
SPEED_RANGE = 0.15  # of the median speed of a table's baselines: beyond, a run saw the machine in another state
NAMES = {
    "bleu": "BLEU", "chrf": "chrF", "rougeL": "ROUGE-L", "rouge1": "ROUGE-1", "rouge2": "ROUGE-2",
    "exact_match": "exact match", "exact_match_strict": "exact match, strict",
    "exact_match_flexible": "exact match, flexible", "contains_answer": "contains the answer", "pass@1": "pass@1",
    "length_ratio": "length ratio", "repetition": "repetition",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ranking:
    """Whether a run may have a rank.

    Attributes:
        reason: why not; empty if it may.
        text_loss: 1 - ROUGE-L between the ids of both arms; None where it is not known.
    """

    ranked: bool
    reason: str
    text_loss: float | None


def ranking(summary: Mapping[str, Any], text_loss: float | None = None) -> Ranking:
    """Judge a run.

    Args:
        summary: of the run, with its verdict.
        text_loss: 1 - ROUGE-L between the ids of both arms; None: the one that the summary has.
    """
    if text_loss is None:
        text_loss = (summary.get("ranking") or {}).get("text_loss")
    if (result := audit.result(summary)) != "VALID":
        reason: str = result
    elif metrics.headline(summary)["value"] is None:
        reason = "no speed-up"
    elif oracle.is_oracle(summary):
        reason = f"{oracle.MARK}: it drafts the target's own text"
    else:
        reason = "" if summary["guarantee"] == "EXACT" else "; ".join(_losses(summary, text_loss))
    return Ranking(not reason, reason, text_loss)


def in_table(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why each run of a table has no rank in it; empty for those that have one.

    Besides its own reasons: its baseline was more than ``SPEED_RANGE`` faster or slower than the table's median.
    """
    reasons, apart = [ranking(summary).reason for summary in summaries], other_conditions(summaries)
    return [reason or other for reason, other in zip(reasons, apart, strict=True)]


def other_conditions(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each run of a table whose baseline was faster or slower than most, by how much; else empty."""
    rates = [summary.get("baseline_tokens_per_s") for summary in summaries]
    sound = [rate for rate, run in zip(rates, summaries, strict=True) if rate and audit.result(run) != "INVALID"]
    middle = median(sound or [rate for rate in rates if rate] or [1.0])
    return [
        ""
        if not rate or abs(rate / middle - 1) <= SPEED_RANGE
        else f"baseline {rate:.0f} tokens/s, the table's {middle:.0f}: not measured under the same conditions"
        for rate in rates
    ]


def _losses(summary: Mapping[str, Any], text_loss: float | None) -> Iterator[str]:
    """What quality was lost. A score of a part of the prompts does not stand for the others, see ``SCORED_SHARE``."""
    score = first_score(summary)
    judged = score is not None and score[2] > 0  # a baseline without any right answer loses none
    if score is not None and score[1] < (1 - SCORE_LOSS) * score[2]:
        yield f"quality lost: {NAMES.get(score[0], score[0])} {score[1]:.2f}, was {score[2]:.2f}"
    if not judged or len(summary["speedup"].get("by_category") or {}) > 1:
        yield from _text_losses(summary, text_loss)
    yield from _degenerate(summary.get("degeneration") or {})


def first_score(summary: Mapping[str, Any]) -> tuple[str, float, float] | None:
    """Name, value and the baseline's value of the first score that both arms have, of ``SCORED_SHARE`` of the prompts
    or more.
    """
    before = summary["baseline"].get("quality") or {}
    for name, value in (summary.get("quality") or {}).items():
        was = before.get(name)
        if value is not None and was is not None and (_scored_share(summary, name) or 0.0) >= SCORED_SHARE:
            return name, float(value), float(was)
    return None


def _scored_share(summary: Mapping[str, Any], name: str) -> float | None:
    """Share of the prompts that have a score.

    None in an older record of several kinds of prompts, of which each may have its own score, unless the score's change
    has their number.
    """
    n = (summary.get("quality_prompts") or {}).get(name)
    if n is None:
        n = ((summary.get("quality_change") or {}).get(name) or {}).get("n")
    if n is not None:
        return float(n / summary["n_prompts"])
    return 1.0 if len(summary["speedup"].get("by_category") or {}) <= 1 else None


def _text_losses(summary: Mapping[str, Any], text_loss: float | None) -> Iterator[str]:
    agreement = summary.get("agreement") or {}
    own, before = agreement.get("mean_logprob"), (agreement.get("baseline") or {}).get("mean_logprob")
    drawn = bool((summary.get("sampling") or {}).get("temperature"))  # two texts that were drawn are never alike
    if drawn or text_loss is None or own is None or before is None or not summary.get("degeneration"):
        yield "quality unknown"
        return
    if text_loss > TEXT_LOSS:
        yield f"quality lost: ROUGE-L {1 - text_loss:.2f} to the baseline's text, at least {1 - TEXT_LOSS:.2f}"
    if own < before - LOGPROB_LOSS:
        yield f"quality lost: log-probability {own:.2f} under the target, was {before:.2f}"


def _degenerate(found: Mapping[str, Mapping[str, float | None]]) -> Iterator[str]:
    """Text that repeats itself more than the baseline's."""
    limits = (
        ("distinct_4", -DISTINCT_LOSS, "distinct 4-grams {:.2f}, was {:.2f}"),
        ("longest_loop", LOOP_GAIN, "loops of {:.0f} tokens, was {:.0f}"),
        ("repeated_lines", LINES_GAIN, "repeated lines {:.2f}, was {:.2f}"),
    )
    worse = []
    for key, limit, text in limits:
        own, before = ((found.get(arm) or {}).get(key) for arm in ("method", "baseline"))
        if own is not None and before is not None and (own - before) * (1 if limit > 0 else -1) > abs(limit):
            worse.append(text.format(own, before))
    if worse:
        yield f"degenerate: {', '.join(worse)}"

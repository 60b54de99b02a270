"""Metrics of frames computed by hand; the arithmetic stands beside each expectation."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from bench.analysis import metrics
from bench.records.run_folder import Sample
from tests.helpers.sample_rows import MS, both, row

# Two prompts, two categories. Baseline: one token a round. Method: rounds of several.
#   prompt 1, "qa":    baseline 20 + 10 x 10 ms = 120 ms, 11 tokens
#                      method   20 + 4 x 15 ms  =  80 ms, 1 + 3 + 1 + 4 + 2 = 11 tokens
#   prompt 2, "code":  baseline 30 + 5 x 10 ms  =  80 ms, 6 tokens
#                      method   30 + 2 x 10 ms  =  50 ms, 1 + 3 + 2 = 6 tokens
# Drafts of the method (depth 3 each): accepted 2, 0, 3, 1 and 2, 3 (the last round of prompt 2 was cut: 4 -> 2 tokens)
PLAIN = [
    *both(
        "1/1",
        {"ms": [20] + [10] * 10},
        {"ms": [20] + [15] * 4, "tokens": [1, 3, 1, 4, 2], "accepted": [0, 2, 0, 3, 1], "depth": [0, 3, 3, 3, 3]},
    ),
    *both(
        "2/1",
        {"ms": [30] + [10] * 5},
        {"ms": [30, 10, 10], "tokens": [1, 3, 2], "accepted": [0, 2, 3], "depth": [0, 3, 3]},
        category="code",
    ),
]


def summary(samples: list[Sample], **options: Any) -> dict[str, Any]:
    return metrics.summarise(samples, **{"guarantee": "EXACT", "n_bootstrap": 200} | options)


def test_speedups_by_hand() -> None:
    found = summary(PLAIN)["speedup"]
    assert found["total"]["value"] == pytest.approx(200 / 130)
    assert found["geometric"] == pytest.approx(math.sqrt(120 / 80 * 80 / 50))
    # method 11 / 0.080 and 6 / 0.050 tokens per second, baseline 11 / 0.120 and 6 / 0.080
    assert found["spec_bench"] == pytest.approx((137.5 + 120) / (91.6666667 + 75))
    assert found["per_token"] == pytest.approx(200 / 130)  # both arms wrote 17 tokens
    assert (found["prefill"], found["decode"]) == (pytest.approx(1.0), pytest.approx(150 / 80))
    assert {name: (part["value"], part["n"]) for name, part in found["by_category"].items()} == {
        "code": (pytest.approx(1.6), 1),
        "qa": (pytest.approx(1.5), 1),
    }
    assert (found["total"]["n"], found["total"]["low"], found["geometric_interval"]) == (2, None, None)
    assert "2 pairs are too few" in found["total"]["reason"]


# The method stops early in conversation 1 and writes on in conversation 2, 10 ms a token in both arms but for the
# method's conversation 3, which takes 5 ms a token.
#   seconds  baseline 80, 40, 60 = 180 ms   method 40, 80, 30 = 150 ms
#   tokens   baseline  8,  4,  6 =  18      method  4,  8,  6 =  18
UNEQUAL = [
    *both("1/1", {"ms": [10] * 8}, {"ms": [10] * 4}),
    *both("2/1", {"ms": [10] * 4}, {"ms": [10] * 8}, category="code"),
    *both("3/1", {"ms": [10] * 6}, {"ms": [5] * 6}),
]


def test_the_headline_compares_equal_work() -> None:
    shorter = summary(UNEQUAL[:2] + UNEQUAL[4:])["speedup"]
    # conversations 1 and 3: 140 ms over 70 ms, but 14 tokens over 10: (140 / 14) / (70 / 10)
    assert (shorter["headline"]["value"], shorter["headline"]["of"]) == (pytest.approx(10 / 7), "per_token")
    assert shorter["total"]["value"] == pytest.approx(2.0)
    assert shorter["per_token"] == pytest.approx(10 / 7)
    assert shorter["by_category"]["qa"]["value"] == pytest.approx(10 / 7)
    assert shorter["headline"]["n"] == 2 and "2 pairs are too few" in shorter["headline"]["reason"]
    at_once = summary(UNEQUAL[:2] + UNEQUAL[4:], one_pass=True)["speedup"]
    assert at_once["headline"] == at_once["total"] | {"of": "total"}
    assert at_once["by_category"]["qa"]["value"] == pytest.approx(2.0)


def test_median_and_floor_by_hand() -> None:
    found = summary(UNEQUAL)["speedup"]  # per token 1, 1 and 2
    assert (found["median"], found["floor"]) == (pytest.approx(1.0), {"minimum": pytest.approx(1.0), "slower_share": 0})
    found = summary(UNEQUAL, one_pass=True)["speedup"]  # seconds 80 / 40, 40 / 80, 60 / 30
    assert found["median"] == pytest.approx(2.0)
    assert found["floor"] == {"minimum": pytest.approx(0.5), "slower_share": pytest.approx(1 / 3)}


def test_lengths_that_are_equal_leave_the_total() -> None:
    found = summary([s for i in range(6) for s in both(f"{i + 1}/1", {"ms": [10, 7 + i]}, {"ms": [5, 5 + i * i]})])
    assert found["speedup"]["headline"] == found["speedup"]["total"] | {"of": "per_token"}
    assert found["speedup"]["headline"]["kind"] == "t"


def test_headline_of_an_older_summary_is_the_total() -> None:
    found = summary(PLAIN)
    assert metrics.headline(found) == found["speedup"]["headline"]
    del found["speedup"]["headline"]
    assert metrics.headline(found) == found["speedup"]["total"] | {"of": "total"}


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        ({"one_pass": True, "family": "other", "guarantee": "RELAXED"}, True),
        ({"one_pass": False, "family": "non_autoregressive", "guarantee": "INDEPENDENT_MODEL"}, False),
        ({"family": "non_autoregressive", "guarantee": "INDEPENDENT_MODEL"}, True),
        ({"method": {"_target_": "methods.non_autoregressive.ctc.Ctc"}, "guarantee": "INDEPENDENT_MODEL"}, True),
        ({"method": {"_target_": "methods.non_autoregressive.diffusion.Diffusion"}, "guarantee": "RELAXED"}, False),
        ({"method": {"_target_": "methods.early_exit.calm.Calm"}, "guarantee": "RELAXED"}, False),
        ({"method": {"_target_": "mine.Decoder"}, "guarantee": "INDEPENDENT_MODEL"}, False),
        ({}, False),
    ],
)
def test_which_records_are_of_one_pass_writers(manifest: dict[str, Any], expected: bool) -> None:
    assert metrics.one_pass(manifest) is expected


@pytest.mark.parametrize(
    ("prompt", "output", "n", "share"),
    [
        ([1, 2, 3, 4], [5, 6, 7, 8], 2, 0.0),
        ([1, 2, 3, 4], [9, 2, 3, 4, 8], 3, 3 / 5),  # copied from the prompt
        ([], [1, 2, 9, 1, 2, 8, 1, 2], 2, 4 / 8),  # the first of the three is new
        ([], [7] * 6, 2, 5 / 6),  # an occurrence may overlap with the one before; 7 7 begins again at the second 7
        ([1, 2, 3, 1], [2, 3, 9], 3, 2 / 3),  # 1 2 3 begins in the prompt and ends in the output
        ([1, 2], [3, 1, 2, 3, 1, 2, 4], 3, 5 / 7),  # 1 2 3, 2 3 1 and 3 1 2: all but the first and the last
        ([1, 2, 3], [1, 2], 8, 0.0),
        ([1, 2, 3], [], 2, 0.0),
    ],
)
def test_repeated_share_by_hand(prompt: list[int], output: list[int], n: int, share: float) -> None:
    assert metrics.repeated_share(prompt, output, n) == pytest.approx(share)


def test_repeated_share_is_that_of_its_definition() -> None:
    draw = random.Random(0)
    for _ in range(200):
        prompt, output = ([draw.randrange(3) for _ in range(draw.randrange(25))] for _ in range(2))
        text = [*prompt, *output]
        grams = [tuple(text[i : i + 4]) for i in range(len(text) - 3)]
        covered = {i + k for i, gram in enumerate(grams) if gram in grams[:i] for k in range(4)}
        expected = sum(place >= len(prompt) for place in covered) / max(1, len(output))
        assert metrics.repeated_share(prompt, output, 4) == pytest.approx(expected)


def texts(name: str, repeated: int, baseline_ms: int, method_ms: int, turns: int = 1) -> list[Sample]:
    """A conversation of 20 tokens a turn, of which the baseline's last ``repeated`` stand in the prompt."""
    ids = [int(name) * 100 + i for i in range(20)]
    prompt = ids[20 - repeated :]
    common = {"prompt_ids": prompt, "n_prompt_tokens": len(prompt), "output_ids": ids}
    own = {"output_ids": [1] * 20}  # only the baseline's text counts
    return [
        sample
        for turn in range(1, turns + 1)
        for sample in both(
            f"{name}/{turn}",
            {"ms": [baseline_ms] * 20},
            {"ms": [method_ms] * 20} | own,
            batch=10 * int(name) + turn,
            **common,
        )
    ]


def test_novel_conversations_by_hand() -> None:
    # Two of three conversations are novel: 40 + 60 ms over 20 + 60; the third is copied from its prompt, 9 of 20.
    samples = [
        *texts("1", 0, 2, 1),
        *texts("2", 7, 3, 3),  # below 8 tokens nothing is an 8-gram
        *texts("3", 9, 4, 1),
    ]
    found = summary([replace(s, prompt_ids=s.prompt_ids or [9], n_prompt_tokens=1) for s in samples])
    assert found["predictability"] == {"mean_share": pytest.approx(9 / 20 / 3), "n_novel": 2, "n_units": 3}
    assert (found["speedup"]["novel"]["value"], found["speedup"]["novel"]["n"]) == (pytest.approx(100 / 80), 2)
    assert found["speedup"]["novel"]["of"] == "per_token"
    assert found["speedup"]["headline"]["value"] == pytest.approx(180 / 100)


def test_a_tenth_is_still_novel_and_turns_are_added() -> None:
    # 8 of 80 tokens of the conversation
    first = texts("1", 8, 2, 1, turns=4)
    samples = [replace(s, prompt_ids=s.prompt_ids if s.turn == 1 else [9]) for s in first]
    found = summary(samples)
    assert found["predictability"] == {"mean_share": pytest.approx(0.1), "n_novel": 1, "n_units": 1}
    found = summary([*samples, *texts("2", 20, 2, 1)])
    assert found["speedup"]["novel"]["n"] == 1


def test_novel_is_none_where_nothing_is_novel_or_prompts_are_unknown() -> None:
    copied, unknown = summary(texts("1", 20, 2, 1)), summary(PLAIN)
    assert copied["predictability"] == {"mean_share": 1.0, "n_novel": 0, "n_units": 1}
    assert unknown["predictability"] == {"mean_share": None, "n_novel": None, "n_units": 2}
    for found in (copied, unknown):
        assert found["speedup"]["novel"]["value"] is None and found["speedup"]["novel"]["reason"]


def test_shares_kept_of_one_answer() -> None:
    made = replace(PLAIN[1], step_accepted=[0, 2, 0, 1, 0], step_depth=[0, 3, 3, 1, 0])
    assert metrics.kept_at(made) == [2 / 3, 1 / 2, 0.0]
    assert metrics.kept_at(replace(made, step_depth=[0] * 5)) == []


def test_counts_by_hand() -> None:
    found = summary(PLAIN)
    # rounds after the prefill: 3 + 1 + 4 + 2 + 3 + 2 = 15 tokens in 6 passes
    assert found["tokens_per_step"] == pytest.approx(15 / 6)
    assert found["baseline"]["tokens_per_step"] == 1.0
    # accepted 2 + 0 + 3 + 1 + 2 + 3 = 11 of 18 drafted; judged 3 + 1 + 3 + 2 + 3 + 3 = 15
    assert found["acceptance_rate"] == pytest.approx(11 / 18)
    assert found["alpha"] == pytest.approx(11 / 15)
    # position 1 kept in 5 of 6 drafts, position 2 in 4, position 3 in 2
    assert found["acceptance_at"] == pytest.approx([5 / 6, 4 / 6, 2 / 6])
    assert found["acceptance_at_conditional"] == pytest.approx([5 / 6, 4 / 5, 2 / 4])
    assert (found["n_prompts"], found["n_repeats"], found["n_errors"]) == (2, 1, 0)
    assert found["layers_per_token"] == 1.0
    assert found["guarantee"] == "EXACT"


def test_times_by_hand() -> None:
    found = summary(PLAIN)
    assert found["tokens_per_s"] == pytest.approx(17 / 0.130)
    assert found["baseline_tokens_per_s"] == pytest.approx(17 / 0.200)
    assert found["ttft_s"]["mean"] == pytest.approx(0.025)
    # (80 - 20) / 10 = 6 ms and (50 - 30) / 5 = 4 ms per token
    assert found["tpot_s"]["mean"] == pytest.approx(0.005)
    assert (found["latency_s"]["p50"], found["latency_s"]["p99"]) == (pytest.approx(0.065), None)
    assert found["latency_s"]["p90"] == pytest.approx(0.077)  # 50 + 0.9 * 30
    assert found["step_s"]["mean"] == pytest.approx((4 * 15 + 2 * 10) / 6 / 1000)
    # every token counted: 4 rounds of 15 ms and 2 of 10 ms gave 15 tokens
    assert found["itl_s"]["mean"] == pytest.approx(0.080 / 15)
    # gaps per token: 3 x 5, 1 x 15, 4 x 3.75, 2 x 7.5, 3 x 3.33, 2 x 5 ms; the 8th of 15 is 5
    assert found["itl_s"]["p50"] == pytest.approx(0.005)
    assert found["time_s"] == {
        "total": pytest.approx(0.130), "prefill": pytest.approx(0.050), "decode": pytest.approx(0.080)
    }  # fmt: skip


def test_p99_needs_100_requests() -> None:
    def p99(count: int) -> float | None:
        samples = [s for i in range(count) for s in both(f"{i}/1", {"ms": [10, i + 1]}, {"ms": [5, i + 1]})]
        return summary(samples)["latency_s"]["p99"]

    assert p99(99) is None
    assert p99(100) == pytest.approx(np.percentile([(5 + i + 1) / 1000 for i in range(100)], 99))


def test_a_gap_without_tokens_belongs_to_the_next_token() -> None:
    samples = both("1/1", {}, {"ms": [10, 4, 6, 5], "tokens": [1, 0, 2, 1]})
    # 4 + 6 ms for two tokens, 5 ms for one
    assert summary(samples)["itl_s"]["mean"] == pytest.approx((5 + 5 + 5) / 3 / 1000)


def test_repeats_are_averaged_per_prompt_first() -> None:
    # Prompt 1 was measured three times, prompt 2 once: each counts as one prompt.
    # Baseline 30, 30, 30 -> 30 and 30; method 10, 20, 30 -> 20 and 10 ms: 60 / 30.
    samples = [
        *[s for i in range(3) for s in both("1/1", {"ms": [15, 15]}, {"ms": [5 * (i + 1)] * 2}, repeat=i)],
        *both("2/1", {"ms": [15, 15]}, {"ms": [5, 5]}),
    ]
    found = summary(samples)
    assert found["speedup"]["total"]["value"] == pytest.approx(2.0)
    assert found["speedup"]["total"]["n"] == 2
    assert found["tokens_per_s"] == pytest.approx(4 / 0.030)
    assert found["n_repeats"] == 3
    assert found["ttft_s"]["mean"] == pytest.approx((10 + 5) / 2 / 1000)


def test_only_measured_pairs_without_errors_count() -> None:
    noise = [
        *both("3/1", {"ms": [1000, 1]}, {"ms": [1, 1]}, phase="warmup"),
        row("baseline", "4/1", ms=[1000, 1]),  # the other arm is missing
        *both("5/1", {"ms": [1000, 1]}, {"ms": [1, 1], "error": "scoring failed"}),
    ]
    with_noise, without = summary([*PLAIN, *noise]), summary(PLAIN)
    assert with_noise["n_errors"] == 1
    assert with_noise | {"n_errors": 0} == without


def test_turns_of_a_conversation_are_one_pair() -> None:
    # Two conversations of two turns: 2 pairs, although 4 prompts.
    samples = [s for i in (1, 2) for t in (1, 2) for s in both(f"{i}/{t}", {"ms": [10, 10 * t]}, {"ms": [5, 5 * i]})]
    found = summary(samples)
    assert (found["n_prompts"], found["speedup"]["total"]["n"]) == (4, 2)
    # conversation 1: (20 + 30) / (10 + 10), conversation 2: (20 + 30) / (15 + 15)
    assert found["speedup"]["geometric"] == pytest.approx(math.sqrt(50 / 20 * 50 / 30))


def lockstep(arm: str, step_ms: float, rows: dict[str, list[int]], batch: int = 0, **changes: Any) -> list[Sample]:
    """Rows of one batch: all share the steps, a finished row has no further entries."""
    longest = max(map(len, rows.values()))
    return [
        row(
            arm,
            prompt,
            ms=[step_ms] * len(tokens),
            tokens=tokens,
            batch=batch,
            batch_size=len(rows),
            batch_ns=round(longest * step_ms * MS),
            **changes,
        )
        for prompt, tokens in rows.items()
    ]


BATCH = [
    *lockstep("baseline", 10, {"1/1": [1, 1, 1, 1], "2/1": [1, 1]}, energy_j=3.0, peak_bytes=500),
    *lockstep("method", 12, {"1/1": [1, 3], "2/1": [1, 1]}, energy_j=1.5, peak_bytes=700),
]


def test_energy_is_told_of_five_seconds_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    long = [
        *lockstep("baseline", 1000, {"1/1": [1] * 5}, energy_j=9.0),
        *lockstep("method", 999, {"1/1": [1] * 5}, energy_j=9.0),
    ]
    found = summary(long)
    assert found["energy_j_per_token"] is None and found["baseline"]["energy_j_per_token"] == pytest.approx(9 / 5)
    monkeypatch.setattr(metrics, "ENERGY_BLOCK_S", 4.9)
    assert summary(long)["energy_j_per_token"] == pytest.approx(9 / 5)


def test_a_batch_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "ENERGY_BLOCK_S", 0.0)
    found = summary(BATCH)
    # 6 tokens in 40 ms and in 24 ms; the energy of the whole batch is in every row of it
    assert found["speedup"]["total"]["value"] == pytest.approx(40 / 24)
    assert found["tokens_per_s"] == pytest.approx(6 / 0.024)
    assert found["energy_j_per_token"] == pytest.approx(1.5 / 6)
    assert found["baseline"]["energy_j_per_token"] == pytest.approx(3.0 / 6)
    assert (found["peak_memory_bytes"], found["baseline"]["peak_memory_bytes"]) == (700, 500)
    # per row: 3 + 1 tokens in one pass each; autoregression is 1.00 at every batch size
    assert found["tokens_per_step"] == pytest.approx(2.0)
    assert found["baseline"]["tokens_per_step"] == 1.0
    assert found["latency_s"]["p50"] == pytest.approx(0.024)
    assert found["baseline"]["latency_s"]["p50"] == pytest.approx(0.030)  # 40 and 20 ms


def test_a_batch_with_a_failed_row_is_left_out_whole() -> None:
    broken = [replace(sample, error="x") if i == 3 else sample for i, sample in enumerate(BATCH)]
    later = [
        *lockstep("baseline", 10, {"3/1": [1, 1], "4/1": [1, 1]}, batch=1),
        *lockstep("method", 5, {"3/1": [1, 1], "4/1": [1, 1]}, batch=1),
    ]
    found = summary([*broken, *later])
    assert (found["n_prompts"], found["n_errors"]) == (2, 1)
    assert found["speedup"]["total"]["value"] == pytest.approx(2.0)


def test_categories_of_a_mixed_batch() -> None:
    samples = [replace(sample, category="qa" if sample.prompt_id == "1/1" else "code") for sample in BATCH]
    assert set(summary(samples)["speedup"]["by_category"]) == {metrics.MIXED}


def test_prediction_by_hand() -> None:
    # A pass costs 8 ms + 1 ms per node + 0.01 ms per token of context.
    def cost(nodes: int, batch: int, context: int) -> float:
        assert batch == 1
        return (8 + nodes + 0.01 * context) / 1000

    samples = both(
        "1/1",
        {"ms": [20, 10, 10, 10], "tokens": [1, 1, 1, 1]},
        {"ms": [20, 18], "tokens": [1, 3], "depth": [0, 4], "accepted": [0, 2], "step_draft_ns": [None, 2 * MS]},
    )
    # baseline: 20 + (9 + 1.01) + (9 + 1.02) + (9 + 1.03) = 50.06 ms; method: 20 + (8 + 5 + 1.01) + 2 = 36.01 ms
    found = summary(samples, cost_curve=cost)
    assert found["predicted_speedup"] == pytest.approx(50.06 / 36.01)
    assert found["predicted_ratio"] == pytest.approx((50 / 38) / (50.06 / 36.01))
    assert found["draft_share"] == pytest.approx(2 / 38)


def test_a_round_is_priced_at_the_rows_it_computed() -> None:
    # 5 ms and 1 ms per row; a row leaves after the first round
    left = [replace(sample, step_rows=[2, 2, 1, 1][: len(sample.step_ns)]) for sample in BATCH]
    whole, dropped = (summary(s, cost_curve=lambda nodes, rows, context: (5 + rows) / 1000) for s in (BATCH, left))
    # prefill 10 ms, then rounds of 7, 6 and 6 ms in place of 7 each; the method: prefill 12 ms and one round of 7
    assert whole["predicted_speedup"] == pytest.approx((10 + 3 * 7) / (12 + 7))
    assert dropped["predicted_speedup"] == pytest.approx((10 + 7 + 6 + 6) / (12 + 7))


def test_the_prediction_is_of_the_same_work_as_the_headline() -> None:
    def cost(nodes: int, batch: int, context: int) -> float:
        return 0.010

    # The rounds are those of autoregression, the text is half as long: no speed-up, measured or predicted.
    found = summary(UNEQUAL[:2], cost_curve=cost)
    assert found["predicted_speedup"] == pytest.approx(1.0) == found["predicted_ratio"]
    at_once = summary(UNEQUAL[:2], cost_curve=cost, one_pass=True)
    assert (at_once["predicted_speedup"], at_once["predicted_ratio"]) == (None, None)


def test_prediction_takes_the_curve_of_the_suite() -> None:
    from bench.analysis.cost_curve import CostCurve

    curve = CostCurve(nodes=(1, 5), batch=2, contexts=(100,), table=((0.010, 0.012),))
    # baseline 10 + 3 x 10, method 12 + 11 (3 nodes: half way from 10 to 12 ms)
    assert summary(BATCH, cost_curve=curve)["predicted_speedup"] == pytest.approx(40 / 23)


def test_prediction_counts_passes_and_layers() -> None:
    def cost(nodes: int, batch: int, context: int) -> float:
        return 0.010

    half = both("1/1", {"ms": [10, 10]}, {"ms": [10, 5], "step_layers": [1.0, 0.5]})
    twice = both("1/1", {"ms": [10, 10]}, {"ms": [10, 20], "step_target_passes": [1, 2]})
    assert summary(half, cost_curve=cost)["predicted_speedup"] == pytest.approx(20 / 15)
    assert summary(twice, cost_curve=cost)["predicted_speedup"] == pytest.approx(20 / 30)
    dear = summary(half, cost_curve=cost, cost_over_layers=1.6)  # deciding whether to leave costs more than it saves
    assert dear["predicted_speedup"] == pytest.approx(20 / (10 + 0.5 * 1.6 * 10))


def test_no_prediction_without_the_time_of_the_drafter() -> None:
    samples = both("1/1", {}, {"step_draft_passes": [0, 2, 2]})
    assert summary(samples, cost_curve=lambda nodes, batch, context: 0.01)["predicted_speedup"] is None
    assert summary(PLAIN)["predicted_speedup"] is None  # no curve
    assert summary(PLAIN)["draft_share"] is None


def test_alpha_of_a_simulated_drafter_is_recovered() -> None:
    # A chain of 5 whose tokens are accepted independently with 0.7: acceptance_at is 0.7^i, alpha 0.7, while the
    # acceptance rate is lower, since what stands behind a rejection counts as drafted.
    rng = np.random.default_rng(0)
    accepted = [int(np.argmin([*(rng.random(5) < 0.7), False])) for _ in range(20_000)]
    method = {
        "ms": [1] * 20_001, "tokens": [1, *(a + 1 for a in accepted)], "accepted": [0, *accepted],
        "depth": [0, *[5] * 20_000],
    }  # fmt: skip
    found = summary(both("1/1", {"ms": [1, 1]}, method))
    assert found["alpha"] == pytest.approx(0.7, abs=0.01)
    assert found["acceptance_at"] == pytest.approx([0.7**i for i in range(1, 6)], abs=0.015)
    assert found["acceptance_at_conditional"] == pytest.approx([0.7] * 5, abs=0.03)
    assert found["acceptance_rate"] == pytest.approx(sum(0.7**i for i in range(1, 6)) / 5, abs=0.01)
    expected = sum(0.7**i for i in range(6))  # Leviathan eq. 1
    assert found["tokens_per_step"] == pytest.approx(expected, abs=0.03)


def test_trees_are_judged_along_the_path() -> None:
    tree = both(
        "1/1",
        {"ms": [10, 10, 10]},
        {"tokens": [1, 2, 1], "depth": [0, 2, 2], "accepted": [0, 1, 0], "step_drafted": [0, 6, 6]},
    )
    found = summary(tree)
    # 1 of 12 nodes; on the paths 1 of 2 + 1 judged; position 1 kept in 1 of 2 trees, position 2 in none
    assert found["acceptance_rate"] == pytest.approx(1 / 12)
    assert found["alpha"] == pytest.approx(1 / 3)
    assert found["acceptance_at"] == [0.5, 0.0]
    assert found["acceptance_at_conditional"] == [0.5, 0.0]


def test_a_position_nothing_reached_is_not_measured() -> None:
    never = both("1/1", {}, {"tokens": [1, 1, 1], "depth": [0, 2, 2], "accepted": [0, 0, 0]})
    assert summary(never)["acceptance_at"] == [0.0, 0.0]
    assert summary(never)["acceptance_at_conditional"] == [0.0, None]


def test_layers_are_weighted_by_tokens() -> None:
    early = both("1/1", {}, {"tokens": [1, 1, 2], "step_layers": [1.0, 0.5, 0.25]})
    assert summary(early)["layers_per_token"] == pytest.approx((1 + 0.5 + 2 * 0.25) / 4)


def test_quality_and_extra_are_means_over_prompts() -> None:
    samples = [
        *[s for i in range(2) for s in both("1/1", {}, {"quality": {"em": float(i)}, "extra": {"hits": 4}}, repeat=i)],
        *both("2/1", {}, {"quality": {"em": 1.0}, "extra": {"hits": 1, "note": "x"}}),
        *both("3/1", {}, {"quality": {"bleu": 7.0}}),
    ]
    found = summary(samples)
    assert found["quality"] == {"bleu": pytest.approx(7.0), "em": pytest.approx(0.75)}  # (0.5 + 1) / 2
    assert found["quality_prompts"] == {"bleu": 1, "em": 2}
    assert found["extra"] == {"hits": pytest.approx(2.5)}
    assert found["baseline"]["quality"] == {}


def test_not_measured_is_null_and_zero_is_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "ENERGY_BLOCK_S", 0.0)
    found = summary(both("1/1", {}, {"energy_j": 0.0}))
    assert found["energy_j_per_token"] == 0.0
    assert found["baseline"]["energy_j_per_token"] is None
    assert found["peak_memory_bytes"] is None
    assert (found["alpha"], found["acceptance_rate"], found["acceptance_at"]) == (None, None, [])


def test_a_single_token_has_no_time_per_token() -> None:
    found = summary(both("1/1", {"ms": [10]}, {"ms": [10]}))
    assert found["tpot_s"] == found["itl_s"] == dict.fromkeys(("mean", "p50", "p90", "p99"))
    assert found["tokens_per_step"] is None
    assert found["speedup"]["total"]["value"] == 1.0 and found["speedup"]["decode"] is None


@pytest.mark.parametrize("samples", [[], [row("baseline")], [row("method", error="x")]])
def test_nothing_measured_gives_nulls(samples: list[Sample]) -> None:
    found = summary(samples, cost_curve=lambda nodes, batch, context: 0.01)
    assert found["speedup"]["total"]["value"] is None and found["speedup"]["total"]["reason"]
    assert found["n_prompts"] == 0 and found["tokens_per_s"] is None and found["predicted_speedup"] is None
    json.dumps(found, allow_nan=False)


def test_dictionaries_are_as_good_as_samples_and_the_result_is_json() -> None:
    found = summary(PLAIN)
    assert metrics.summarise([asdict(s) for s in PLAIN], guarantee="EXACT", n_bootstrap=200) == found
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_every_key_that_is_promised_is_there() -> None:
    promised = {
        "n_prompts", "n_errors", "speedup", "tokens_per_s", "baseline_tokens_per_s", "tokens_per_step",
        "acceptance_rate", "alpha", "acceptance_at", "layers_per_token", "ttft_s", "tpot_s", "itl_s", "latency_s",
        "peak_memory_bytes", "energy_j_per_token", "predicted_speedup", "quality", "guarantee", "agreement",
    }  # fmt: skip
    assert promised <= set(summary(PLAIN))
    assert promised <= set(summary([]))


def steady(levels: list[float], slope_ms: float = 0.0) -> list[Sample]:
    """Baselines of 9 rounds of ``levels[i]`` ms, longer by ``slope_ms`` for every 100 tokens of prompt."""
    samples = []
    for i, level in enumerate(levels):
        step = level + slope_ms * i
        samples += both(f"{i + 1}/1", {"ms": [10] + [step] * 9}, {"ms": [10, 10]}, n_prompt_tokens=100 * (i + 1))
    return samples


def steadiness(samples: list[Sample]) -> dict[str, float | None]:
    return metrics.steadiness(metrics.paired(metrics.frame(samples)))


def test_spread_and_jitter_by_hand() -> None:
    # Theil-Sen over 10, 12, 10, 12, 10: slopes are symmetric about 0, so nothing is removed; quartiles 10 and 12, and
    # of the differences 2, -2, 2, -2 they are -2 and 2
    found = steadiness(steady([10, 12, 10, 12, 10]))
    assert found == pytest.approx({"spread": 2 / 10, "jitter": 4 / math.sqrt(2) / 10})


def test_a_drift_is_spread_and_not_jitter() -> None:
    # twice 40 batches at 10 and at 15 ms, in no order of their contexts: one of the 79 differences is not 0
    samples = [replace(s, n_prompt_tokens=100 + 7919 * s.batch % 97) for s in steady([10] * 40 + [15] * 40)]
    found = steadiness(samples)
    assert found["spread"] == pytest.approx(0.4, abs=0.1) and found["jitter"] == pytest.approx(0, abs=1e-3)


def test_independent_noise_is_as_much_jitter_as_spread() -> None:
    draw = random.Random(0)
    found = steadiness(steady([10 + draw.gauss(0, 1) for _ in range(2000)]))
    assert found["spread"] == pytest.approx(0.1349, rel=0.1) and found["jitter"] == pytest.approx(0.1349, rel=0.1)


def test_the_machine_is_not_blamed_for_long_contexts() -> None:
    # From 10 to 20 ms over the contexts, exactly on a line
    found = steadiness(steady([10] * 6, slope_ms=2))
    assert found == pytest.approx({"spread": 0, "jitter": 0}, abs=1e-9)


def test_rounds_of_fewer_rows_are_no_unsteadiness() -> None:
    def shrinking(index: int) -> Sample:
        steps = [10.0] * (9 + index) + [3.0] * (20 - index)  # the later rows leave, the longer rounds are dear
        rows = [2] * (9 + index) + [1] * (20 - index)
        return row("baseline", f"{index + 1}/1", ms=steps, batch_size=2, step_rows=rows)

    samples = [s for index in range(6) for s in (shrinking(index), row("method", f"{index + 1}/1", batch_size=2))]
    assert steadiness(samples) == pytest.approx({"spread": 0, "jitter": 0}, abs=1e-9)
    older = steadiness([replace(sample, step_rows=None) for sample in samples])
    assert older["spread"] > 0.05


def test_steadiness_needs_4_batches_of_8_rounds_and_one_size() -> None:
    def found(samples: list[Sample]) -> float | None:
        return steadiness(samples)["jitter"]

    assert found(steady([10, 11, 12])) is None
    assert found(PLAIN) is None
    assert found([replace(sample, batch_size=2 if sample.batch < 6 else 1) for sample in steady([10] * 5)]) is None

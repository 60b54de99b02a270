"""Oracle rows by hand: perfect drafters, choices among recorded rounds, hindsight lengths; a run alone gives itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.analysis import metrics, oracle
from bench.analysis.cost_curve import CostCurve
from bench.analysis.oracle import Run
from bench.records.run_folder import Sample, read_manifest, read_samples
from tests.helpers.sample_rows import MS, both

ROOT = Path(__file__).resolve().parents[3]
RUNS = sorted(path.parent for path in ROOT.glob("results/reference/*/samples.jsonl.gz"))
NAMES = (
    "eagle-mtbench",
    "prompt_lookup-mtbench",
    "suffix-spec_bench",
    "lookahead-",
    "speculative_sampling-",
    "hybrid-mtbench",
)
FLAT = CostCurve((1, 8), 1, (100,), ((0.010, 0.017),))  # 9 ms and 1 ms per node


def run(name: str, samples: Sequence[Sample], **changes: Any) -> Run:
    manifest = {
        "method": {"name": name},
        "guarantee": "EXACT",
        "sampling": {"temperature": 0.0},
        "batch_size": 1,
        "cost_curve": FLAT.to_dict(),
    }
    return Run(name, manifest | changes, samples)


def chain(name: str, tokens: Sequence[int], depth: int, draft_ms: int, prompt: str = "1/1", **changes: Any) -> Run:
    """Rounds that commit ``tokens``, after a prefill of one, each with a draft of ``depth``; 20 ms of prefill."""
    total = 1 + sum(tokens)
    method = {
        "ms": [20, *(10 for _ in tokens)],
        "tokens": [1, *tokens],
        "depth": [0, *(depth for _ in tokens)],
        "accepted": [0, *(count - 1 for count in tokens)],
        "step_draft_ns": [None, *(draft_ms * MS for _ in tokens)],
    }
    samples = both(prompt, {"ms": [20, *[10] * (total - 1)], "tokens": [1] * total}, method | changes)
    return run(name, samples)


def rows_by_oracle(runs: Sequence[Run]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["oracle"], row["method"]): row for row in oracle.oracle_rows(runs)}


# seven tokens after the prefill, 70 ms by autoregression
RIGHT_FIRST = chain("a", [4, 1, 1, 1], depth=3, draft_ms=1)
RIGHT_LAST = chain("b", [1, 1, 1, 4], depth=3, draft_ms=2)


def test_perfect_drafts_take_the_length_that_the_curve_favours() -> None:
    """Seven tokens: one round of 7 nodes takes 16 ms, two of 4 take 13 each."""
    rows = rows_by_oracle([RIGHT_FIRST])
    free = rows[oracle.PERFECT, ""]
    assert (free["draft_length"], free["recorded"]) == (6, None)
    assert free["speedup"] == pytest.approx((20 + 70) / (20 + 16))
    assert free["decode_speedup"] == pytest.approx(70 / 16)
    paid = rows[oracle.PERFECT_PAID, "a"]
    assert paid["decode_speedup"] == pytest.approx(70 / (16 + 1)), "a search costs the same for any length"


def test_a_draft_of_a_pass_per_token_is_paid_by_its_tokens() -> None:
    """A drafted token costs 10 ms, as much as a pass: a perfect drafter drafts nothing."""
    modelled = chain("a", [4, 1, 1, 1], depth=3, draft_ms=30, step_draft_passes=[0, 3, 3, 3, 3])
    paid = rows_by_oracle([modelled])[oracle.PERFECT_PAID, "a"]
    assert (paid["draft_length"], paid["decode_speedup"]) == (0, pytest.approx(1.0))


def test_hindsight_lengths_score_accepted_tokens_alone() -> None:
    """Rounds of 4, 1, 1 and 1 nodes: 13 + 3 x 10, and one search; recorded: 4 x (13 + 1)."""
    row = rows_by_oracle([RIGHT_FIRST])[oracle.LENGTH, "a"]
    assert row["decode_speedup"] == pytest.approx(70 / (13 + 1 + 3 * 10))
    assert row["recorded"] == pytest.approx((20 + 70) / (20 + 4 * 14))
    assert row["tokens_per_step"] == pytest.approx(7 / 4)


def test_the_best_run_of_every_round_takes_both_long_drafts() -> None:
    """a: 13 + 1 for four tokens; then b stands within nothing, its last round begins at position 4, one token before.

    From position 5 the rest of b's round of four, which commits three: a chain of 3 nodes, 12 + 2 ms.
    """
    row = rows_by_oracle([RIGHT_FIRST, RIGHT_LAST])[oracle.RUN, "a + b"]
    assert row["decode_speedup"] == pytest.approx(70 / (14 + 14))
    assert row["rounds"] == (0.5, 0.5) and row["coverage"] == 1
    assert row["recorded"] == pytest.approx((20 + 70) / (20 + 4 * 14)), "a alone, the cheaper of the two"


def test_no_mixture_is_slower_than_its_runs() -> None:
    runs = [RIGHT_FIRST, RIGHT_LAST, chain("c", [2, 2, 2, 1], depth=7, draft_ms=5)]
    (text,) = oracle.texts(runs)
    alone = [oracle.alone(text, FLAT.seconds, place).seconds for place in range(3)]
    assert oracle.best_run(text, FLAT.seconds).seconds <= min(alone)


def test_texts_count_up_to_where_the_runs_part() -> None:
    other = chain("b", [1, 1, 1, 4], depth=3, draft_ms=2)
    ids = other.samples[1].output_ids
    parted = replace(other, samples=[other.samples[0], replace(other.samples[1], output_ids=[*ids[:5], 99, *ids[6:]])])
    (text,) = oracle.texts([RIGHT_FIRST, parted])
    assert (text.length, text.written, text.prefill_s) == (5, 8, pytest.approx(0.020 * 5 / 8))
    assert oracle.plain(text, FLAT.seconds).seconds == pytest.approx(0.040)
    elsewhere = replace(parted, samples=[replace(each, prompt_ids=[7]) for each in parted.samples])
    assert oracle.texts([RIGHT_FIRST, elsewhere]) == []


def test_routes_follow_what_is_left_of_the_first_draft() -> None:
    """a drafts three tokens in every round: up to a threshold of 3 it is a alone, from 4 on b plus a's search."""
    rows = oracle.routed_rows(RIGHT_FIRST, RIGHT_LAST, least=(1, 3, 4))
    assert [row["rounds"] for row in rows] == [(1.0, 0.0), (1.0, 0.0), (0.0, 1.0)]
    assert rows[0]["decode_speedup"] == rows[1]["decode_speedup"] == pytest.approx(70 / (4 * 14))
    assert rows[2]["decode_speedup"] == pytest.approx(70 / (4 * (15 + 1)))
    assert {row["result"] for row in rows} == {"ORACLE"} and not any(row["ranked"] for row in rows)


def test_a_route_has_a_lower_and_an_upper_bound() -> None:
    """a is taken at 1; of b's rounds at 1, 4 and 7 the rest takes three, whole rounds from 2 on two."""
    first = run("a", chain("a", [1, 1, 1, 1, 1, 1, 1], depth=1, draft_ms=1).samples)
    drafts = [0, 2, 1, 1, 1, 1, 1, 1]
    first = replace(
        first, samples=[first.samples[0], replace(first.samples[1], step_depth=drafts, step_drafted=drafts)]
    )
    (row,) = oracle.routed_rows(first, chain("b", [3, 3, 1], depth=2, draft_ms=2), least=(2,))
    assert row["rounds"] == (0.25, 0.75)
    assert row["decode_speedup"] == pytest.approx(70 / (11 + 1 + (11 + 12 + 12) + 3 * (2 + 1)))
    assert row["most"] == pytest.approx((20 + 70) / (20 + 11 + 1 + 2 * (12 + 2 + 1)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"guarantee": "RELAXED"}, "must be EXACT, got RELAXED"),
        ({"sampling": {"temperature": 0.7}}, "greedy, got sampling.temperature=0.7"),
        ({"batch_size": 4}, "batch size must be 1, got 4"),
    ],
)
def test_runs_that_cannot_be_mixed_say_why_and_are_left_out(changes: dict[str, Any], said: str) -> None:
    other = run("b", RIGHT_LAST.samples, **changes)
    assert said in other.unfit()
    assert rows_by_oracle([RIGHT_FIRST, other]).keys() == rows_by_oracle([RIGHT_FIRST]).keys()


def test_a_draft_model_that_was_not_timed_cannot_be_priced() -> None:
    untimed: dict[str, Any] = {"step_draft_ns": [None] * 5, "step_draft_passes": [0, 3, 3, 3, 3]}
    assert "not timed" in chain("a", [4, 1, 1, 1], depth=3, draft_ms=1, **untimed).unfit()


def test_nothing_comes_of_no_runs_and_of_runs_without_a_curve() -> None:
    assert oracle.oracle_rows([]) == oracle.oracle_rows([run("a", RIGHT_FIRST.samples, cost_curve=None)]) == []
    assert oracle.oracle_rows([run("a", RIGHT_FIRST.samples, cost_curve=None)], FLAT)


def test_a_recorded_run_alone_gives_its_own_prediction() -> None:
    off = {}
    for folder in (path for path in RUNS if path.name.startswith(NAMES)):
        each = Run(folder.name, read_manifest(folder) or {}, read_samples(folder))
        if each.unfit() or each.curve is None:
            continue
        rows = metrics.paired(metrics.frame(each.samples))
        over = metrics.cost_over_layers(each.manifest)
        predicted = metrics.predicted_speedup(rows, each.curve, over)
        found = oracle.replayed(each)
        assert predicted and found
        off[each.name] = found / predicted - 1
    assert len(off) >= len(NAMES)
    assert {name: value for name, value in off.items() if abs(value) > 0.02} == {}

"""Every audit catches what it is for, says so in words, and leaves a good run alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.analysis import metrics
from bench.analysis.audit import CHECKS, AuditResult, audit, doubts, explained, result
from bench.records.run_folder import Sample
from tests.helpers.sample_rows import EOS, MS, both, row

MANIFEST: dict[str, Any] = {
    "eos_ids": [EOS],
    "dtype": "bfloat16",
    "hardware": {"threads": 2, "logical_cores": 4},
    "load_average": {"start": [0.1, 0.2, 0.3], "end": [2.2, 1.0, 0.5]},
}
AGREEMENT: dict[str, Any] = {
    "exact": 0.96,
    "near_tie": 0.04,
    "violation": 0.0,
    "n_violations": 0,
    "near_tie_gap": 0.5,
    "baseline": {"exact": 0.97, "near_tie": 0.03, "violation": 0.0, "n_violations": 0},
}
ENDS = {"finish": "eos"}
GOOD = [
    sample
    for i in range(1, 7)
    for sample in both(
        f"{i}/1",
        {"ms": [20] + [10 + i % 2 / 10] * 10, **ENDS},
        {"ms": [20, 15, 15, 15], "tokens": [1, 4, 2, 4], "accepted": [0, 3, 1, 4], "depth": [0, 5, 5, 5], **ENDS},
    )
]


def verdict(
    samples: list[Sample] = GOOD,
    guarantee: str = "EXACT",
    agreement: dict[str, Any] | None = AGREEMENT,
    manifest: dict[str, Any] | None = None,
    **summary: Any,
) -> AuditResult:
    derived = metrics.summarise(samples, guarantee=guarantee, agreement=agreement, n_bootstrap=100)
    return audit(samples, derived | summary, MANIFEST | (manifest or {}))


def changed(arm: str, index: int = 0, **fields: Any) -> list[Sample]:
    """The good run with one row of an arm changed."""
    chosen = [sample for sample in GOOD if sample.arm == arm][index]
    return [replace(sample, **fields) if sample is chosen else sample for sample in GOOD]


def only_reason(found: AuditResult) -> str:
    assert not found.valid and len(found.reasons) == 1, found
    return found.reasons[0]


def only_warning(found: AuditResult) -> str:
    assert found.valid and not found.reasons and len(found.warnings) == 1, found
    return found.warnings[0]


def test_a_good_run_is_valid() -> None:
    assert verdict() == AuditResult(True, [], [])


def test_without_a_manifest_the_rest_is_checked() -> None:
    derived = metrics.summarise(GOOD, guarantee="EXACT", agreement=AGREEMENT, n_bootstrap=100)
    assert audit(GOOD, derived).valid
    assert not audit(changed("method", n_output_tokens=12), derived).valid


def test_an_error_is_a_reason() -> None:
    reason = only_reason(verdict(changed("method", error="scoring failed: KeyError: 'x'")))
    assert "1 measured rows failed" in reason and "--fresh" in reason
    assert "Prompt 1/1, repeat 0, method: scoring failed" in reason


def test_an_error_in_the_warm_up_is_none() -> None:
    assert verdict([*GOOD, row("method", "9/1", phase="warmup", error="x")]).valid


def test_a_missing_partner_is_a_reason() -> None:
    reason = only_reason(verdict(GOOD[:-1]))
    assert "1 prompts were measured by one arm only" in reason and "prompt 6/1, repeat 0" in reason


def test_nothing_measured_is_a_reason() -> None:
    assert "No prompt was measured" in only_reason(verdict([]))


@pytest.mark.parametrize(("arm", "blamed"), [("method", "the method is wrong"), ("baseline", "the engine is wrong")])
def test_violations_of_the_target_are_a_reason(arm: str, blamed: str) -> None:
    wrong = {"violation": 0.003, "n_violations": 12}
    agreement = AGREEMENT | (wrong if arm == "method" else {"baseline": AGREEMENT["baseline"] | wrong})
    reason = only_reason(verdict(agreement=agreement))
    assert f"12 (0.30%) tokens of the {arm}" in reason and blamed in reason and "within 0.5" in reason


def test_logits_that_are_no_numbers_are_a_reason() -> None:
    places = ["prompt 1/1, token 4", "prompt 2/1, token 1"]
    reason = only_reason(verdict(agreement=AGREEMENT | {"not_finite": places, "violation": 1.0, "n_violations": 40}))
    assert "NaN or infinite in 2 texts" in reason and "prompt 1/1, token 4" in reason


def test_one_token_for_ever_is_a_reason() -> None:
    stuck = [replace(each, output_ids=[7] * len(each.output_ids)) for each in GOOD]
    assert "repeats a single token in 6 of 6 texts" in " ".join(verdict(stuck).reasons)
    half = [replace(each, output_ids=[7] * len(each.output_ids)) if each.prompt_id < "4" else each for each in GOOD]
    assert not any("single token" in reason for reason in verdict(half).reasons)


def test_a_relaxed_method_may_differ_from_the_target() -> None:
    assert verdict(guarantee="RELAXED", agreement=AGREEMENT | {"violation": 0.2, "n_violations": 90}).valid


def test_agreement_that_was_not_measured_is_a_warning() -> None:
    assert "measure.agreement=true" in only_warning(verdict(agreement=None))
    assert not verdict(agreement=None, guarantee="INDEPENDENT_MODEL").warnings
    drawn = dict.fromkeys(AGREEMENT) | {"reason": "tokens were drawn", "baseline": {"violation": None}}
    assert verdict(agreement=drawn) == AuditResult(True, [], [])


def test_in_full_precision_near_ties_are_a_warning() -> None:
    assert "4.00% of the tokens" in only_warning(verdict(manifest={"dtype": "float32"}))
    assert not verdict(manifest={"dtype": "float32"}, agreement=AGREEMENT | {"exact": 1.0}).warnings


IDS = [sample for sample in GOOD if sample.arm == "method"][0].output_ids


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n_output_tokens": 10}, "reported 10 tokens, kept 11 ids"),
        ({"output_ids": IDS[1:]}, "kept 10 ids"),
        ({"output_ids": [EOS, *IDS[1:]]}, "end-of-sequence at token 1 of 11"),
        ({"output_ids": [*IDS[:-2], EOS, IDS[0]]}, "end-of-sequence at token 10 of 11"),
        ({"output_ids": [*IDS[:-2], EOS, EOS]}, "end-of-sequence at token 10 of 11"),
        ({"finish": "length"}, "finish is 'length', but the text ends"),
        ({"output_ids": [*IDS[:-1], 7]}, "finish is 'eos', but the text does not end"),
        ({"batch_ns": 1_000_000}, "its steps took 65.0 ms of 1.0 ms"),
    ],
)
def test_records_that_contradict_themselves_are_a_reason(fields: dict[str, Any], said: str) -> None:
    reason = next(reason for reason in verdict(changed("method", **fields)).reasons if "contradict" in reason)
    assert said in reason and "Prompt 1/1, repeat 0, method" in reason


def test_without_known_end_tokens_the_end_is_not_judged() -> None:
    assert verdict(changed("method", finish="length"), manifest={"eos_ids": []}).valid


def shorter(tokens: int, of: int = 20) -> list[Sample]:
    """The method writes ``tokens`` where the baseline writes ``of``."""
    return [
        sample
        for i in range(1, 7)
        for sample in both(f"{i}/1", {"ms": [10] + [10] * (of - 1)}, {"ms": [10] + [5] * (tokens - 1)})
    ]


def lengths(found: AuditResult) -> list[str]:
    assert not any("baseline's tokens" in reason for reason in found.reasons)
    return [warning for warning in found.warnings if "baseline's tokens" in warning]


@pytest.mark.parametrize(("tokens", "doubted"), [(51, False), (49, False), (48, True), (52, True), (40, True)])
def test_an_exact_run_of_other_lengths_than_the_baseline_is_inconclusive(tokens: int, doubted: bool) -> None:
    found = verdict(shorter(tokens, of=50))
    assert (found.result, len(found.inconclusive)) == (("INCONCLUSIVE", 1) if doubted else ("VALID", 0))
    assert found.valid and not lengths(found)
    if doubted:
        (why,) = found.inconclusive
        assert f"wrote {tokens / 50:.1%} of the baseline's tokens" in why and "at most 2%" in why
        assert why.endswith("Set measure.ignore_eos=true to time texts of one length.")


def test_lengths_are_judged_where_ends_count() -> None:
    derived = metrics.summarise(shorter(40, of=50), guarantee="EXACT", agreement=AGREEMENT, n_bootstrap=100)
    assert len(doubts(derived)) == 1
    assert not doubts(derived | {"ignore_eos": True}), "both arms write max_new_tokens"
    assert not doubts(derived | {"guarantee": "RELAXED"})
    lengths_not_kept = derived["speedup"]["headline"] | {"of": "total"}
    assert not doubts(derived | {"speedup": derived["speedup"] | {"headline": lengths_not_kept}})


@pytest.mark.parametrize(("tokens", "warned"), [(45, 0), (55, 0), (44, 1), (56, 1)])
def test_other_lengths_of_a_method_that_may_change_texts_are_a_warning(tokens: int, warned: int) -> None:
    found = verdict(shorter(tokens, of=50), guarantee="RELAXED")
    assert found.result == "VALID" and len(lengths(found)) == warned
    for warning in lengths(found):
        assert f"wrote {tokens / 50:.1%}" in warning and "is per token" in warning and "So far apart" in warning


@pytest.mark.parametrize(("tokens", "warned"), [(45, 0), (44, 1), (42, 1), (56, 1)])
def test_lengths_of_a_one_pass_writer_are_judged_as_quality(tokens: int, warned: int) -> None:
    samples = shorter(tokens, of=50)
    derived = metrics.summarise(samples, guarantee="INDEPENDENT_MODEL", one_pass=True, n_bootstrap=100)
    found = audit(samples, derived, MANIFEST)
    assert found.valid and len(lengths(found)) == warned
    assert not warned or "words are missing" in lengths(found)[0]


def repeated(later_ms: float, baseline_ms: float = 10) -> list[Sample]:
    """Three repeats of four prompts; from the second on the method takes ``later_ms`` a round instead of 10."""
    return [
        sample
        for i in range(1, 5)
        for repeat in range(3)
        for sample in both(
            f"{i}/1",
            {"ms": [baseline_ms if repeat else 10] * 10},
            {"ms": [later_ms if repeat else 10] * 10},
            repeat=repeat,
        )
    ]


def test_a_method_that_remembers_prompts_is_caught() -> None:
    assert verdict(repeated(9.2)).valid
    reason = only_reason(verdict(repeated(8)))
    assert "The method decoded repeated prompts 25% faster" in reason
    assert verdict(repeated(14)).valid  # slower later is no cheating


def test_a_machine_that_was_not_warm_is_caught() -> None:
    assert "The baseline decoded repeated prompts 25% faster" in " ".join(verdict(repeated(10, baseline_ms=8)).reasons)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"step_accepted": [0, 2, 1, 4]}, "round 1 kept 4 tokens with 2 accepted"),
        ({"step_accepted": [0, 3, 1, 2]}, "round 3 kept 4 tokens with 2 accepted"),  # the last one may lose, not gain
        ({"step_accepted": [0, 5, 1, 4], "step_depth": [0, 4, 5, 5]}, "round 1 accepted 5 of a path of 4"),
        ({"step_drafted": [0, 5, 4, 5]}, "round 2 accepted 1 of a path of 5 among 4 nodes"),
        ({"step_accepted": [0, 3, -1, 4]}, "round 2 accepted -1"),
    ],
)
def test_counters_that_do_not_fit_are_a_reason(fields: dict[str, Any], said: str) -> None:
    assert said in only_reason(verdict(changed("method", **fields)))


def test_only_exact_rounds_keep_accepted_plus_one() -> None:
    free = changed("method", step_accepted=[0, 2, 1, 4])
    assert verdict(free, guarantee="RELAXED").valid
    baseline = changed("baseline", step_accepted=[0, 1, *[0] * 9], step_depth=[0, 1, *[0] * 9], step_drafted=[1] * 11)
    assert "baseline: round 1 kept 1 tokens with 1 accepted" in only_reason(verdict(baseline, guarantee="RELAXED"))


@pytest.mark.parametrize(
    ("tokens", "passes", "said"),
    [
        ([1, 8, 2], [4, 8, 8], None),  # the text ends within the last block
        ([1, 8, 2], [4, 7, 8], "round 1 kept 8 tokens with 0 accepted"),
        ([1, 8, 2], [4, 8, 1], "round 2 kept 2 tokens with 0 accepted"),
        ([3, 0, 8], [4, 0, 8], "round 1 kept 0 tokens with 0 accepted"),
    ],
)
def test_a_baseline_that_fills_in_masks_writes_a_token_in_each_pass(
    tokens: list[int], passes: list[int], said: str | None
) -> None:
    old = next(sample for sample in GOOD if sample.arm == "baseline")
    new = row("baseline", old.prompt_id, ms=[30] * 3, tokens=tokens, accepted=[0] * 3, step_target_passes=passes)
    rows = [new if sample is old else sample for sample in GOOD]
    found = [reason for reason in verdict(rows, guarantee="RELAXED").reasons if "Counters of" in reason]
    assert len(found) == (said is not None) and (said or "") in "".join(found)


OUTCOMES = {"ok": (True, 0), "warn": (True, 1), "invalid": (False, 0)}  # valid, number of warnings


@pytest.mark.parametrize(("jitter", "outcome"), [(None, "ok"), (0.09, "ok"), (0.11, "warn"), (0.26, "invalid")])
def test_a_machine_that_changes_from_batch_to_batch_cannot_measure(jitter: float | None, outcome: str) -> None:
    found = verdict(jitter=jitter, spread=None)
    assert (found.valid, len(found.warnings)) == OUTCOMES[outcome]
    if jitter and outcome != "ok":
        assert f"varied by {jitter:.0%} between batches" in " ".join([*found.warnings, *found.reasons])


@pytest.mark.parametrize(("spread", "warned"), [(None, 0), (0.09, 0), (0.11, 1), (0.9, 1)])
def test_a_drift_is_told_and_leaves_the_speedup(spread: float | None, warned: int) -> None:
    found = verdict(jitter=0.05, spread=spread)
    assert (found.valid, len(found.warnings)) == (True, warned)
    if spread and warned:
        assert f"varied by {spread:.0%} over the run" in found.warnings[0]


def test_steadiness_comes_from_the_baseline() -> None:
    slow = {"ms": [20] + [16] * 10, **ENDS}
    waver = [
        sample
        for i in range(7, 17)
        for sample in both(f"{i}/1", {"ms": [20] + [10 + i % 2 * 6] * 10, **ENDS}, {"ms": [10] * 11, **ENDS})
    ]
    assert any("between batches" in reason for reason in verdict([*GOOD, *waver], spread=None).reasons)
    drifted = [*GOOD, *[s for i in range(7, 12) for s in both(f"{i}/1", slow, {"ms": [10] * 11, **ENDS})]]
    assert any("drifted" in warning for warning in verdict(drifted).warnings)


@pytest.mark.parametrize(("load", "outcome"), [(2.3, "ok"), (1.0, "ok"), (2.6, "warn"), (3.2, "invalid")])
def test_other_load(load: float, outcome: str) -> None:
    # 2 threads of our own on 4 cores: 0.6 busy cores of others are 15 %, 1.2 are 30 %
    found = verdict(manifest={"load_average": {"start": [9, 9, 9], "end": [load, 9, 9]}})
    assert (found.valid, len(found.warnings)) == OUTCOMES[outcome]
    if outcome == "invalid":
        assert "kept 1.2 of 4 cores busy" in only_reason(found)


@pytest.mark.parametrize("average", [None, {}, {"start": None, "end": None}])
def test_an_unknown_load_is_not_judged(average: Any) -> None:
    assert verdict(manifest={"load_average": average}) == AuditResult(True, [], [])


def test_a_busy_gpu() -> None:
    assert "15 % busy" in only_warning(verdict(manifest={"gpu_utilisation": {"start": 15.0}}))
    assert "80 % busy" in only_reason(verdict(manifest={"gpu_utilisation": {"start": 80}}))


@pytest.mark.parametrize(
    ("start", "end", "minutes", "load"),
    [
        ([0, 0, 0], [2, 2, 2], 4, 2.0),  # too short for more than the last minute
        ([0, 0, 0], [2, 3.2, 2], 4, 2.0),
        ([0, 0, 0], [2, 2.53, 2], 5, 4.0),  # of 5 minutes with a load of 4 an average from 0 shows 63 %
        ([4, 4, 4], [2, 2.74, 2], 5, 2.0),  # what was there before the run does not count
        ([0, 0, 0], [2, 2, 2.53], 15, 4.0),
    ],
)
def test_load_over_the_whole_run(start: list[float], end: list[float], minutes: int, load: float) -> None:
    times = {"started_at": "2026-01-01T00:00:00+00:00", "ended_at": f"2026-01-01T00:{minutes:02}:00+00:00"}
    found = verdict(manifest={"load_average": {"start": start, "end": end}} | times)
    assert found.valid == (load <= 2)
    assert found.valid or f"kept {load - 2:.1f} of 4 cores" in only_reason(found)


def timed(cpu_ms: list[float], method_ms: float | None = None, **manifest: Any) -> AuditResult:
    """A run whose arms took this processor time in each batch of 100 ms."""
    other = {} if method_ms is None else {"cpu_ns": round(method_ms * MS)}
    samples = [
        sample
        for i, cpu in enumerate(cpu_ms, start=1)
        for sample in both(f"{i}/1", {"ms": [50] * 2, "cpu_ns": round(cpu * MS)}, {"ms": [50] * 2} | other)
    ]
    return verdict(samples, manifest=manifest)


@pytest.mark.parametrize(
    ("cpu_ms", "outcome"),
    [
        ([99] * 10, "ok"),
        ([93] * 10, "warn"),
        ([99] * 7 + [30] * 3, "invalid"),  # shared in three
        ([50] * 10, "invalid"),  # less than one processor
        ([250] * 10, "ok"),  # of four threads some may have no work
        ([250] * 6 + [100] * 4, "invalid"),
    ],
)
def test_processor_time_that_others_took(cpu_ms: list[float], outcome: str) -> None:
    found = timed(cpu_ms)
    assert (found.valid, len(found.warnings)) == OUTCOMES[outcome]
    if outcome != "ok":
        share = sum(cpu_ms) / 1000 / max(1, sorted(cpu_ms)[5] / 100)
        assert f"The baseline got {share:.0%} of its processor time" in " ".join([*found.reasons, *found.warnings])
        assert found.noisy is (outcome == "invalid")


@pytest.mark.parametrize(("method_ms", "outcome"), [(92, "ok"), (99, "invalid")])
def test_processor_time_that_one_arm_lost_moves_the_speed_up(method_ms: float, outcome: str) -> None:
    found = timed([90] * 10, method_ms)
    assert found.valid == (outcome == "ok")
    assert found.valid or "The baseline got 90% of its processor time, the other arm more" in only_reason(found)


@pytest.mark.parametrize(
    ("cpu_ms", "outcome"),
    [
        ([6.4] * 6 + [3.0] * 4, "ok"),  # what two threads used says nothing
        ([6.4] * 6 + [1.5] * 4, "invalid"),  # less than one processor in four of ten
        ([6.4] * 9 + [2.0], "ok"),
        ([6.4] * 8 + [2.0] * 2, "warn"),
    ],
)
def test_batches_of_a_few_milliseconds_need_one_processor(cpu_ms: list[float], outcome: str) -> None:
    parts = [{"ms": [1.5] * 2, "cpu_ns": round(cpu * MS)} for cpu in cpu_ms]
    found = verdict([sample for i, part in enumerate(parts) for sample in both(f"{i}/1", part, part)])
    assert found.valid == (outcome != "invalid")
    assert any("of its processor time" in text for text in [*found.reasons, *found.warnings]) == (outcome != "ok")


def test_batches_that_used_more_threads_than_most_take_nothing_from_the_other_arm() -> None:
    usual, more = ({"ms": [50] * 2, "cpu_ns": round(ms * MS)} for ms in (100, 190))
    samples = [sample for i in range(10) for sample in both(f"{i}/1", usual, more if i < 4 else usual)]
    assert verdict(samples).valid


def test_processor_time_says_nothing_where_a_gpu_computes() -> None:
    assert timed([5] * 10, hardware={"gpu": {"name": "H200"}}).warnings == []


def held_up(factors: dict[int, float], prompts: int = 40) -> list[Sample]:
    """Batches of the baseline that took so many times longer than the others."""
    return [
        sample
        for i in range(1, prompts + 1)
        for sample in both(f"{i}/1", {"ms": [10] * 8 + [10 + 90 * (factors.get(i, 1) - 1)]}, {"ms": [5] * 9})
    ]


def test_a_stall_is_a_warning_until_it_moves_the_speed_up() -> None:
    assert not verdict(held_up({})).warnings
    small = [warning for warning in verdict(held_up({7: 5}, prompts=400)).warnings if "stalled" in warning]
    assert "in 1 batch, worst at prompt 7/1 (baseline, 5.0 times" in small[0] and "1.0% of" in small[0]
    found = verdict(held_up({7: 5, 9: 4}))
    assert "in 2 batches, worst at prompt 7/1" in only_reason(found) and found.noisy


def test_a_stop_that_is_left_invalidates_and_says_for_how_long() -> None:
    found = timed([99] * 9 + [10])
    stop = "worst at prompt 10/1 (baseline, the process had no processor for 0.09 of 0.10 s). That is 9.0% of"
    assert not found.valid and found.noisy and any(stop in reason for reason in found.reasons)


def test_a_clock_that_was_set_invalidates() -> None:
    samples = [replace(s, jump_ns=-(10**9)) if s.prompt_id == GOOD[0].prompt_id else s for s in GOOD]
    found = verdict(samples)
    assert "the system's clock was set, or the machine slept" in only_reason(found) and found.noisy


def test_pairs_measured_again_are_named() -> None:
    first = replace(GOOD[0], phase="stalled", batch_ns=6 * 10**9, cpu_ns=10**9)
    (warning,) = verdict([*GOOD, first]).warnings
    assert warning == (
        f"1 prompt was measured again, as the machine stalled or the process was stopped: {first.prompt_id}. The "
        "longest took 6.00 s (5.00 s without a processor). The first measurements do not count."
    )


@pytest.mark.parametrize(("key", "said"), [("median", "the median"), ("geometric", "the geometric mean")])
def test_averages_that_disagree_are_a_warning(key: str, said: str) -> None:
    one_pass = key == "geometric"  # it is one of total times
    derived = metrics.summarise(GOOD, guarantee="RELAXED", one_pass=one_pass, n_bootstrap=100)
    value = metrics.headline(derived)["value"]
    for ratio, warned in ((1.04, 0), (1.06, 1), (0.94, 1)):
        summary = derived | {"speedup": derived["speedup"] | {key: value * ratio}}
        warnings = audit(GOOD, summary, MANIFEST).warnings
        assert len(warnings) == warned
        assert not warned or f"{said} of the pairs is {value * ratio:.2f}x" in warnings[0]


def summary_of(value: float, low: float | None, high: float | None, n: int = 20, **verdict: Any) -> dict[str, Any]:
    headline = {"value": value, "low": low, "high": high, "n": n, "kind": "bca", "reason": None}
    return {"speedup": {"total": headline}, "verdict": {"valid": True, "reasons": []} | verdict}


@pytest.mark.parametrize(
    ("summary", "outcome", "said"),
    [
        (summary_of(1.30, 1.20, 1.40), "VALID", ""),
        (summary_of(0.70, 0.60, 0.80), "VALID", ""),
        (summary_of(1.00, 0.90, 1.10), "VALID", ""),  # as fast
        (summary_of(1.05, 1.03, 1.07), "VALID", ""),
        (summary_of(1.40, 0.56, 3.53), "INCONCLUSIVE", "neither faster nor slower"),
        (summary_of(0.90, 0.79, 1.03), "INCONCLUSIVE", "neither faster nor slower"),
        (summary_of(1.05, 1.01, 1.09), "INCONCLUSIVE", "neither faster nor slower"),  # 1.02 is as fast
        (summary_of(0.95, 0.92, 0.99), "INCONCLUSIVE", "neither faster nor slower"),
        (summary_of(3.00, 1.90, 4.10), "INCONCLUSIVE", "wider than a factor of 2"),
        (summary_of(1.00, 0.68, 1.40), "INCONCLUSIVE", "wider than a factor of 2"),
        (summary_of(2.00, None, None, 3), "INCONCLUSIVE", "3 pairs are too few"),
        (summary_of(2.00, 1.9, 2.1, 3), "INCONCLUSIVE", "3 pairs are too few"),  # older records have such intervals
        (summary_of(1.40, 0.56, 3.53, valid=False, reasons=["x"]), "INVALID", "x"),
        (summary_of(1.40, 0.56, 3.53, inconclusive=[]), "VALID", ""),  # as it was judged
        (summary_of(1.30, 1.20, 1.40, inconclusive=["y"]), "INCONCLUSIVE", "y"),
        ({"speedup": {"total": {"value": None, "low": None, "high": None}}}, "INVALID", ""),
    ],
)
def test_the_result_of_a_summary(summary: dict[str, Any], outcome: str, said: str) -> None:
    assert result(summary) == outcome
    assert said in " ".join(explained(summary)) and bool(said) == bool(explained(summary))


def test_doubts_say_what_to_do() -> None:
    for doubted in (summary_of(1.1, 0.5, 3.0), summary_of(2.0, None, None, 3)):
        assert doubts(doubted)
        assert all("easure more prompts (dataset.limit)" in each and each.endswith(".") for each in doubts(doubted))


def test_one_prompt_is_inconclusive() -> None:
    found = verdict(GOOD[:2])
    assert found.valid and found.result == "INCONCLUSIVE" and "one pair has no spread" in found.inconclusive[0]
    assert verdict().result == "VALID" and verdict(changed("method", error="x")).result == "INVALID"


def made(captured: int, missed: int = 0) -> dict[str, Any]:
    before = {"captured": 8, "seconds": 0.3, "missed": 0}
    return {"graphs": {"before": before, "in_all": before | {"captured": captured, "missed": missed}}}


def test_what_is_captured_or_compiled_within_measured_time_is_a_reason() -> None:
    assert verdict(manifest=made(8)).valid
    assert "3 CUDA graphs were captured within measured time" in only_reason(verdict(manifest=made(11)))
    compiled = {"before": {"functions": 2, "seconds": 9.0}, "in_all": {"functions": 3, "seconds": 12.0}}
    assert "1 functions were compiled within" in only_reason(verdict(manifest={"compiled": compiled}))
    assert "5 passes ran kernel by kernel" in only_warning(verdict(manifest=made(8, missed=5)))


def test_a_slow_harness_is_a_warning() -> None:
    assert "3.0% of the loop" in only_warning(verdict(harness_share=0.03))
    assert not verdict(harness_share=0.01).warnings


def test_a_gpu_s_clock_that_falls_is_a_warning_and_a_cpu_s_is_none() -> None:
    clocks = {"least": 1500.0, "median": 1980.0, "most": 1980.0}
    gpu = {"hardware": {**MANIFEST.get("hardware", {}), "gpu": {"name": "H100"}}}
    assert "fell to 1,500 MHz" in only_warning(verdict(manifest=gpu, clocks=clocks))
    assert not verdict(manifest=gpu, clocks=clocks | {"least": 1900.0}).warnings
    assert not verdict(clocks=clocks).warnings


def test_reasons_add_up() -> None:
    found = verdict(changed("method", error="x", n_output_tokens=9), jitter=0.9)
    assert len(found.reasons) == 3 and not found.valid


def test_every_reason_says_what_to_do() -> None:
    """What was found, and what to do."""
    rows = changed("method", error="x", n_output_tokens=9, step_accepted=[0, 9, 9, 9])[:-1]
    broken = verdict(
        [replace(each, output_ids=[7] * 8) if each.arm == "baseline" else each for each in rows],
        agreement=AGREEMENT | {"violation": 0.1, "n_violations": 1},
        manifest=made(9) | {"load_average": {"end": [9, 9, 9]}, "gpu_utilisation": {"start": 99}},
        jitter=0.9,
    )
    assert len(broken.reasons) >= len(CHECKS) - 8  # which warn only, or find nothing here
    assert all(". " in reason and reason.endswith(".") for reason in broken.reasons)

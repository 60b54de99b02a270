"""Every audit catches what it is for, says so in words, and leaves a good run alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.analysis import metrics
from bench.analysis.audit import CHECKS, AuditResult, audit
from bench.records.run_folder import Sample
from tests.helpers.sample_rows import EOS, both, row

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


def shorter(tokens: int) -> list[Sample]:
    """The method writes ``tokens`` where the baseline writes 20."""
    return [
        sample
        for i in range(1, 7)
        for sample in both(f"{i}/1", {"ms": [10] + [10] * 19}, {"ms": [10] + [5] * (tokens - 1)})
    ]


@pytest.mark.parametrize(("tokens", "fine"), [(18, True), (17, False), (22, True), (23, False)])
def test_lengths_may_differ_by_10_percent(tokens: int, fine: bool) -> None:
    found = verdict(shorter(tokens), guarantee="INDEPENDENT_MODEL")
    assert found.valid == fine
    if not fine:
        assert f"got {tokens / 20:.0%}" in only_reason(found) and "speedup.per_token" in only_reason(found)


def test_other_lengths_of_an_exact_method_are_a_warning() -> None:
    assert "got 50%" in only_warning(verdict(shorter(10)))


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
    assert "between batches" in only_reason(verdict([*GOOD, *waver], spread=None))
    drifted = [*GOOD, *[s for i in range(7, 12) for s in both(f"{i}/1", slow, {"ms": [10] * 11, **ENDS})]]
    assert "drifted" in only_warning(verdict(drifted))


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


def test_one_prompt_has_no_interval() -> None:
    assert "no interval" in only_warning(verdict(GOOD[:2]))


def test_a_slow_harness_is_a_warning() -> None:
    assert "3.0% of the loop" in only_warning(verdict(harness_share=0.03))
    assert not verdict(harness_share=0.01).warnings


def test_reasons_add_up() -> None:
    found = verdict(changed("method", error="x", n_output_tokens=9), jitter=0.9)
    assert len(found.reasons) == 3 and not found.valid


def test_every_reason_says_what_to_do() -> None:
    """What was found, and what to do."""
    broken = verdict(
        changed("method", error="x", n_output_tokens=9, step_accepted=[0, 9, 9, 9])[:-1],
        agreement=AGREEMENT | {"violation": 0.1, "n_violations": 1},
        manifest={"load_average": {"end": [9, 9, 9]}, "gpu_utilisation": {"start": 99}},
        jitter=0.9,
    )
    assert len(broken.reasons) >= len(CHECKS) - 3
    assert all(". " in reason and reason.endswith(".") for reason in broken.reasons)

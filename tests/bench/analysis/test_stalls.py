"""A batch that the machine held up is found; one that had more to do is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.analysis import metrics
from bench.analysis.stalls import FEWEST_BATCHES, held_up, stalled
from bench.records.run_folder import Sample
from tests.helpers.sample_rows import MS, both


def pairs(changes: dict[int, dict[str, Any]], count: int = 12) -> list[Sample]:
    """Baseline and method of 9 rounds after a prefill; ``changes`` to the method's rows, by number of the prompt."""
    usual: dict[str, Any] = {"ms": [20] + [8] * 9}
    found = (both(f"{i}/1", {"ms": [20] + [10] * 9}, usual | changes.get(i, {})) for i in range(1, count + 1))
    return [sample for pair in found for sample in pair]


def test_a_stalled_round_is_found_with_its_factor() -> None:
    (found,) = stalled(pairs({4: {"ms": [20] + [8] * 8 + [284]}}))  # 368 ms instead of 92
    assert found == (6, 0, "method", pytest.approx(4.0))
    assert [batch for batch, *_ in stalled(pairs({4: {"ms": [240] + [8] * 9}, 7: {"ms": [20] + [8] * 8 + [500]}}))] == [
        12,
        6,
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"ms": [20] + [40] * 9, "tokens": [1] + [5] * 9},  # larger drafts: more nodes in each pass
        {"ms": [20] + [40] * 9, "step_draft_passes": [0] + [5] * 9},
        {"ms": [20] + [40] * 9, "step_layers": [1.0] + [5.0] * 9},
        {"ms": [20] + [40] * 9, "step_target_passes": [1] + [5] * 9},
        {"ms": [20] + [8] * 60},  # a longer text
        {"ms": [800] + [8] * 9, "n_prompt_tokens": 4000},  # a longer prompt
        {"ms": [20] + [8] * 9, "n_prompt_tokens": 1},
    ],
)
def test_a_batch_with_more_to_do_is_no_stall(fields: dict[str, Any]) -> None:
    others = {i: {"step_draft_passes": [0] + [1] * 9} for i in range(1, 13)}
    assert stalled(pairs(others | {4: fields})) == []


def test_half_the_speed_is_a_stall_only_if_the_other_arm_kept_its_speed() -> None:
    slow = {"ms": [50] + [20] * 9}
    assert [factor for *_, factor in stalled(pairs({4: slow}))] == [pytest.approx(2.5)]
    both_slow = [
        replace(s, **_slower(s)) if s.prompt_id == "4/1" and s.arm == "baseline" else s for s in pairs({4: slow})
    ]
    assert stalled(both_slow) == []


def _slower(sample: Sample) -> dict[str, Any]:
    """At half of its speed."""
    steps = [2 * ns for ns in sample.step_ns]
    return {"step_ns": steps, "prefill_ns": steps[0], "batch_ns": sum(steps)}


def test_a_batch_without_a_processor_is_found_whatever_its_counters_explain() -> None:
    """Also among few batches, where no median says what is usual."""
    stop = {"ms": [20] + [8] * 8 + [70], "cpu_ns": 92 * MS}  # 154 ms, of which 62 without a processor
    for count in (2, FEWEST_BATCHES - 1, 12):
        (found,) = stalled(busy({2: stop}, count))
        assert found == (2, 0, "method", pytest.approx(154 / 92))
    assert stalled(busy({2: stop | {"cpu_ns": 150 * MS}})) == []
    assert stalled(busy({2: {"cpu_ns": 74 * MS}})) == []  # 18 ms: a scheduler's slices
    assert stalled(busy({i: {"cpu_ns": 60 * MS} for i in range(1, 13)})) == []  # usual here


def busy(changes: dict[int, dict[str, Any]], count: int = 12) -> list[Sample]:
    """Pairs of which both arms kept a processor busy, but for ``changes``."""
    found = pairs({i: {"cpu_ns": 92 * MS} | changes.get(i, {}) for i in range(1, count + 1)}, count)
    return [replace(sample, cpu_ns=sample.batch_ns) if sample.arm == "baseline" else sample for sample in found]


@pytest.mark.parametrize(("ms", "found"), [(-200, True), (200, True), (6000, True), (90, False), (-90, False)])
def test_a_clock_that_was_set_is_found(ms: int, found: bool) -> None:
    held = held_up(metrics.batches(metrics.frame(pairs({4: {"jump_ns": ms * MS}}))))
    assert held["why"].tolist() == ["clock"] * found


def test_only_what_counts_is_judged() -> None:
    held: dict[str, Any] = {"ms": [20] + [8] * 8 + [900]}
    assert stalled(pairs({4: held | {"phase": "stalled"}})) == []
    assert stalled(pairs({4: held | {"error": "x"}})) == []
    assert stalled(pairs({2: held}, count=FEWEST_BATCHES - 1)) == []
    assert stalled([]) == []

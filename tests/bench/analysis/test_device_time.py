"""Where the time of a round goes: sums over known steps, shares of a peak, and what is left out."""

from __future__ import annotations

from typing import Any

import pytest

from bench.analysis.device_time import clock_range, device_time
from bench.records.run_folder import Sample

MS = 1_000_000
READ = {"token": 10, "tokens": [1, 3], "weights": [1000.0, 1000.0]}


def sample(arm: str, passes: list[int] | None, drafts: list[int | None], **changes: Any) -> Sample:
    """A prefill and two rounds of 10 ms over a prompt of 5 tokens."""
    rounds = [1, 2, 2] if arm == "method" else [1, 1, 1]
    given: dict[str, Any] = {
        "prompt_id": "a/1", "category": "c", "turn": 1, "repeat": 0, "order": 0, "arm": arm, "phase": "measure",
        "seed": 0, "batch": 0, "batch_size": 1, "n_prompt_tokens": 5, "n_output_tokens": sum(rounds),
        "finish": "length", "prefill_ns": 50 * MS, "batch_ns": 70 * MS, "step_ns": [50 * MS, 10 * MS, 10 * MS],
        "step_tokens": rounds, "step_drafted": [0, 2, 2], "step_accepted": [0, 1, 1], "step_depth": [0, 2, 2],
        "step_nodes": [1, 3, 3] if arm == "method" else [1, 1, 1], "step_layers": [1.0] * 3, "step_draft_ns": drafts,
        "step_target_passes": [1] * 3, "step_draft_passes": [0, 1, 1] if arm == "method" else [0] * 3,
        "output_ids": [4] * sum(rounds), "text": "", "step_pass_ns": passes,
    }  # fmt: skip
    return Sample(**given | changes)


def pair(**changes: Any) -> list[Sample]:
    method = sample("method", [40 * MS, 5 * MS, 5 * MS], [None, 2 * MS, 2 * MS], **changes)
    return [sample("baseline", [40 * MS, 8 * MS, 8 * MS], [0, 0, 0]), method]


def test_a_round_is_draft_pass_and_host() -> None:
    found = device_time(pair(), {}) or {}
    method, baseline = found["method"], found["baseline"]
    assert method["rounds"] == 2 and method["round_s"] == pytest.approx(0.010)
    assert method["draft_s"] == pytest.approx(0.002) and method["pass_s"] == pytest.approx(0.005)
    assert method["host_s"] == pytest.approx(0.003), "the prefill of 50 ms is no round"
    assert method["busy_share"] == pytest.approx(0.7) and method["exposed_share"] == pytest.approx(0.3)
    assert baseline["busy_share"] == pytest.approx(0.8) and baseline["pass_bytes_per_s"] is None


def test_a_search_in_the_text_is_work_of_the_host() -> None:
    found = device_time(pair(step_draft_passes=[0, 0, 0]), {}) or {}
    assert found["method"]["draft_s"] == pytest.approx(0.002)
    assert found["method"]["busy_share"] == pytest.approx(0.5)


def test_bytes_are_those_of_weights_and_of_the_text_so_far() -> None:
    manifest = {
        "bytes_read": READ,
        "peaks": {"triad": {"best": 4e5, "median": 1.0}, "sum": {"best": 3e5, "median": 1.0}},
    }
    found = device_time(pair(), manifest) or {}
    # contexts before the rounds: 6 and 8 tokens, and 3 nodes each
    moved = 2 * 1000 + 10 * (6 + 3 + 8 + 3)
    assert found["method"]["pass_bytes_per_s"] == pytest.approx(moved / 0.010)
    assert found["method"]["round_bytes_per_s"] == pytest.approx(moved / 0.020)
    assert found["method"]["pass_share_of_peak"] == pytest.approx(moved / 0.010 / 4e5), "the faster probe"
    half = device_time(pair(step_layers=[1.0, 0.5, 0.5]), manifest) or {}
    assert half["method"]["pass_bytes_per_s"] == pytest.approx(moved / 2 / 0.010), "layers that did not run"


def test_decoders_that_do_not_time_their_passes_have_no_times() -> None:
    assert list(device_time(pair(step_pass_ns=None), {}) or {}) == ["baseline"]
    old = [sample("baseline", None, [0, 0, 0]), sample("method", None, [None, 1, 1])]
    assert device_time(old, {}) is None and device_time([], {}) is None
    queued = [sample(arm, [1, 1, 1], [0, 0, 0], queue=3, admitted=0) for arm in ("baseline", "method")]
    assert device_time(queued, {}) is None


def test_the_range_of_a_clock() -> None:
    log = {"columns": ["s", "mhz"], "readings": [[0.0, 1980.0], [1.0, 1755.0], [2.0, None], [3.0, 1900.0]]}
    assert clock_range(log) == {"least": 1755.0, "median": 1900.0, "most": 1980.0}
    assert clock_range({"columns": ["s", "power_w"], "readings": [[0.0, 70.0]]}) == {}

"""The teacher-forced check and the cost curve: on a model whose logits are written down, and on a tiny real one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bench.analysis import cost_curve
from bench.contract import checks
from bench.measure import agreement, verify_cost
from bench.measure.agreement import check, check_run, near_tie_gap
from methods.engine.cuda_graphs import GraphedLM
from tests.bench.records.test_run_folder import sample


class Table:
    """The logits behind id i are row i of a table."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, rows: list[list[float]]) -> None:
        self.rows = torch.tensor(rows)
        self.calls = 0

    def score(self, tokens: Tensor, start: int = 0) -> Tensor:
        self.calls += 1
        return self.rows[tokens[start:]]


TABLE = [[0.0, 2.0, 1.9], [5.0, 5.0, 0.0], [0.0, 0.0, 3.0]]


def test_every_id_is_the_argmax_a_near_tie_or_a_violation() -> None:
    found = check(Table(TABLE), [1, 0], [1, 0, 2, 0], near_tie=0.5)  # judged by rows 0, 1, 0, 2
    assert found.gaps == pytest.approx([0.0, 0.0, 0.1, 3.0])
    assert (found.exact, found.near_ties, found.violations) == (2, 1, 1)
    assert found.first_divergence == 2 and found.max_gap == pytest.approx(3.0)


def test_equal_logits_are_both_the_argmax() -> None:
    assert check(Table(TABLE), [1], [1], near_tie=0.0).exact == check(Table(TABLE), [1], [0], near_tie=0.0).exact == 1


def test_log_probability_is_that_of_the_softmax() -> None:
    wanted = math.log(math.exp(1.9) / (1 + math.exp(2.0) + math.exp(1.9)))
    assert check(Table(TABLE), [0], [2], near_tie=0.5).logprob == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("logits", [[math.nan, 1.0, 2.0], [0.0, math.inf, 2.0], [-math.inf] * 3])
def test_logits_that_are_no_numbers_agree_with_nothing_and_are_named(logits: list[float]) -> None:
    rows = [sample("a/1", arm, 0, prompt_ids=[1], output_ids=[0, 2, 0]) for arm in ("baseline", "method")]
    found = check_run(Table([TABLE[0], TABLE[1], logits]), rows, near_tie=0.5, greedy=True)
    assert found["not_finite"] == ["prompt a/1, token 3"] and found["violation"] == 1.0
    assert found["max_gap"] is None and found["mean_logprob"] is None, "JSON has no such numbers"
    never = check_run(Table([[-math.inf, 1.0, 0.0]] * 3), rows, near_tie=0.5, greedy=True)
    assert "not_finite" not in never, "some models never write some tokens"


def test_a_run_is_summed_over_tokens_and_shared_outputs_are_scored_once() -> None:
    rows = [
        sample("a/1", "baseline", 0, prompt_ids=[0], output_ids=[1, 0, 1]),
        sample("a/1", "method", 0, prompt_ids=[0], output_ids=[1, 0, 1]),
        sample("b/1", "baseline", 1, prompt_ids=[0], output_ids=[1]),
        sample("b/1", "method", 1, prompt_ids=[0], output_ids=[0]),
        sample("b/1", "method", 1, prompt_ids=[0], output_ids=[2], repeat=1),
        sample("c/1", "method", 0, prompt_ids=[0], output_ids=[2], phase="warmup"),
    ]
    target = Table(TABLE)
    found = check_run(target, rows, 0.5, greedy=True)
    assert target.calls == 3
    assert (found["exact"], found["near_tie"], found["violation"]) == (0.75, 0.0, 0.25)
    assert (found["n_tokens"], found["n_violations"], found["first_divergence"]) == (4, 1, 0)
    assert found["max_gap"] == pytest.approx(2.0) and found["identical_to_baseline"] == 0.5
    assert found["baseline"]["violation"] == 0.0 and found["baseline"]["max_gap"] == 0.0


def test_drawn_tokens_are_judged_by_their_log_probability_alone() -> None:
    found = check_run(Table(TABLE), [sample("a/1", "method", 0, prompt_ids=[0], output_ids=[2])], 0.5, greedy=False)
    assert found["exact"] is found["violation"] is found["identical_to_baseline"] is None
    assert "drawn" in found["reason"] and found["mean_logprob"] < 0


def test_the_stated_gap_follows_the_dtype_unless_given() -> None:
    assert near_tie_gap(torch.float32) == 1e-3 and near_tie_gap(torch.bfloat16) == 0.5
    assert near_tie_gap(torch.bfloat16, 0.1) == 0.1
    ulp = torch.finfo(torch.bfloat16).eps * 16  # spacing of the logits between 16 and 32
    assert ulp == 0.125 and agreement.NEAR_TIE_GAP[torch.bfloat16] == 4 * ulp


def test_the_target_agrees_with_its_own_greedy_text_and_not_with_a_changed_one() -> None:
    target = checks.tiny_target()
    (prompt,) = checks.prompts(target.vocab_size, (9,))
    written = checks.greedy_reference(target, prompt, 12)
    ids = prompt.tolist()
    own = check(target, ids, written, near_tie_gap(target.dtype))
    assert own.exact == 12 and own.max_gap == 0.0 and own.first_divergence is None
    changed = written[:5] + [(written[5] + 1) % target.vocab_size] + written[6:]
    assert check(target, ids, changed, near_tie_gap(target.dtype)).first_divergence == 5


# ---------------------------------------------------------------------------------------------------- cost curve

CURVE = cost_curve.CostCurve((1, 4, 8), 2, (100, 300), ((1.0, 1.6, 2.0), (2.0, 2.6, 3.0)))


@pytest.mark.parametrize(
    ("nodes", "context", "seconds"),
    [(1, 100, 1.0), (4, 300, 2.6), (2, 100, 1.2), (6, 200, 2.3), (12, 100, 2.4), (1, 50, 1.0), (1, 900, 2.0)],
)
def test_cost_is_linear_between_the_points_and_goes_on_in_nodes(nodes: int, context: int, seconds: float) -> None:
    assert CURVE.seconds(nodes, 2, context) == pytest.approx(seconds)


def test_a_step_between_the_last_two_points_does_not_go_on() -> None:
    curve = cost_curve.CostCurve((1, 3, 6, 7), 1, (100,), ((1.0, 1.2, 1.2, 2.0),))
    assert curve.seconds(6, 1, 100) == 1.2 and curve.seconds(7, 1, 100) == 2.0
    assert curve.seconds(11, 1, 100) == pytest.approx(2.0 + 4 * 0.2)


def test_a_curve_survives_the_manifest_and_does_not_price_larger_batches() -> None:
    assert cost_curve.CostCurve.from_dict(CURVE.to_dict()) == CURVE
    assert CURVE.seconds(1, 1, 100) == 1.0
    with pytest.raises(ValueError, match="measured with 2 rows and cannot price 3"):
        CURVE.seconds(1, 3, 100)


@pytest.mark.parametrize(
    ("most", "nodes"),
    [
        (1, (1,)),
        (6, (1, 2, 3, 4, 5, 6)),
        (11, (1, 2, 3, 4, 5, 6, 7, 8, 9, 11)),
        (25, (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 25)),
        (64, verify_cost.NODES),
        (80, (*verify_cost.NODES, 80)),
    ],
)
def test_the_grid_ends_at_the_methods_largest_pass(most: int, nodes: tuple[int, ...]) -> None:
    assert verify_cost.grid(most) == nodes


@pytest.mark.parametrize("batch", [1, 3])
def test_measuring_takes_the_median_of_what_the_clock_says(batch: int) -> None:
    ticks = iter(range(10**9))
    curve = verify_cost.measure(
        checks.tiny_target(), batch, (2, 1), (20, 8), repeats=3, clock=lambda: next(ticks) * 1000
    )
    assert curve == cost_curve.CostCurve((1, 2), batch, (8, 20), ((1e-6, 1e-6), (1e-6, 1e-6)))


@pytest.mark.parametrize(("batch", "sizes"), [(1, [1]), (2, [1, 2]), (9, [1, 2, 9])])
def test_fewer_rows_are_measured_too_where_rows_can_leave(batch: int, sizes: list[int]) -> None:
    target = checks.tiny_target(layers=1)
    for lm, wanted in ((target, sizes), (GraphedLM.of(target, capture=False), [batch])):
        surface = verify_cost.measure_rows(lm, batch, (1,), (8,), repeats=1)
        assert [curve.batch for curve in surface.curves] == wanted


def test_a_wider_pass_takes_longer() -> None:
    curve = verify_cost.measure(checks.tiny_target(), 8, (1, 256), (16,), repeats=5)
    assert curve.seconds(256, 8, 16) > curve.seconds(1, 8, 16) > 0

"""Exit thresholds with a promise: p-values by enumeration, the promise by simulation, the plan by carrying it out.

A count of false alarms is compared with its bound by a binomial test at ``ALPHA``; seeds are fixed, so a test that
passes once passes always.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
from scipy import stats

from methods.early_exit.free_threshold import GRID, NEVER, Beta, BetaMixture
from methods.early_exit.risk_control import (
    FULL_MODEL,
    Procedure,
    PValue,
    Redraws,
    bonferroni,
    calibrate,
    chance_to_certify,
    fewest_prompts,
    fixed_sequence,
    naive_threshold,
    p_values,
    prompts_needed,
    redraw,
)

KINDS: list[PValue] = list(get_args(PValue))
PROCEDURES: list[Procedure] = list(get_args(Procedure))
ALPHA = 1e-4


def at_most(count: int, draws: int, rate: float) -> bool:
    """Whether so many events in so many draws are compatible with a rate of at most ``rate``."""
    return float(stats.binom.sf(count - 1, draws, rate)) > ALPHA


def more_than(count: int, draws: int, rate: float) -> bool:
    """Whether so many events in so many draws show a rate above ``rate``."""
    return float(stats.binom.sf(count - 1, draws, rate)) < ALPHA


# -------------------------------------------------------------------------------------------------------- p-values


def every_outcome(values: list[float], chances: list[float], n: int) -> tuple[np.ndarray, np.ndarray]:
    """All sequences of n independent losses, one per column, and their probabilities."""
    places = np.array(list(product(range(len(values)), repeat=n))).T
    return np.array(values)[places], np.array(chances)[places].prod(axis=0)


def largest_excess(p: np.ndarray, chance: np.ndarray) -> float:
    """Largest P(p <= u) / u over all u; at most 1 for a valid p-value."""
    order = np.argsort(p)
    below = np.cumsum(chance[order])
    last_of_ties = np.append(np.diff(p[order]) > 0, True)
    return float((below[last_of_ties] / p[order][last_of_ties]).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tolerance", [0.05, 0.1, 0.3, 0.5, 0.9])
def test_p_values_are_super_uniform_for_losses_of_0_and_1(kind: PValue, tolerance: float) -> None:
    for n in (1, 2, 5, 11):
        losses, chance = every_outcome([0.0, 1.0], [1 - tolerance, tolerance], n)
        assert chance.sum() == pytest.approx(1)
        assert largest_excess(p_values(losses, tolerance, kind), chance) <= 1 + 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_p_values_are_super_uniform_for_losses_of_three_values(kind: PValue) -> None:
    losses, chance = every_outcome([0.0, 0.3, 1.0], [0.75, 0.2, 0.05], 8)  # mean 0.11
    assert largest_excess(p_values(losses, 0.11, kind), chance) <= 1 + 1e-9
    assert largest_excess(p_values(losses, 0.06, kind), chance) <= 1 + 1e-9  # further inside the hypothesis


@pytest.mark.parametrize("kind", ["hoeffding", "hoeffding_bentkus"])
@pytest.mark.parametrize("n", [20, 100, 300])
def test_p_values_of_the_mean_are_super_uniform_for_many_prompts(kind: PValue, n: int) -> None:
    losses = (np.arange(n)[:, None] < np.arange(n + 1)).astype(float)  # column k: k losses of 1
    for tolerance in (0.02, 0.05, 0.2):
        chance = stats.binom.pmf(np.arange(n + 1), n, tolerance)
        assert largest_excess(p_values(losses, tolerance, kind), chance) <= 1 + 1e-9


@pytest.mark.parametrize("level", [0.001, 0.05, 0.3])
def test_betting_is_valid_at_whatever_level_its_stakes_are_aimed(level: float) -> None:
    losses, chance = every_outcome([0.0, 1.0], [0.8, 0.2], 11)
    assert largest_excess(p_values(losses, 0.2, "betting", level), chance) <= 1 + 1e-9


def test_the_enumeration_sees_a_p_value_that_is_not_valid() -> None:
    losses, chance = every_outcome([0.0, 1.0], [0.9, 0.1], 11)
    z_test = stats.norm.cdf((losses.mean(axis=0) - 0.1) / math.sqrt(0.09 / 11))
    assert largest_excess(z_test, chance) > 1.5
    not_predictable = p_values(np.sort(losses, axis=0), 0.1, "betting")  # the order depends on the losses
    assert largest_excess(not_predictable, chance) > 1.5


def null_losses(name: str, rng: np.random.Generator, n: int, draws: int) -> np.ndarray:
    """Losses of mean exactly 0.05, one sample per column."""
    if name == "bernoulli":
        return (rng.random((n, draws)) < 0.05).astype(float)
    if name == "beta":
        return rng.beta(0.5, 9.5, (n, draws))
    # as textual losses look: most outputs unchanged, some changed a little, few lost altogether
    changed = np.where(rng.random((n, draws)) < 0.1, 1.0, rng.beta(2, 6, (n, draws)))
    return np.where(rng.random((n, draws)) < 0.05 / 0.325, changed, 0.0)


@pytest.mark.parametrize("name", ["bernoulli", "beta", "outputs"])
@pytest.mark.parametrize("n", [30, 200])
def test_p_values_are_super_uniform_in_simulation(name: str, n: int) -> None:
    draws = 4000
    losses = null_losses(name, np.random.default_rng(n), n, draws)
    assert losses.mean() == pytest.approx(0.05, abs=0.002)
    for kind in KINDS:
        p = p_values(losses, 0.05, kind)
        for level in (0.01, 0.05, 0.1, 0.3):
            assert at_most(int((p <= level).sum()), draws, level), (kind, level)


def test_betting_is_nearly_exact_where_hoeffding_is_far_from_it() -> None:
    losses = null_losses("bernoulli", np.random.default_rng(3), 300, 4000)
    share = {kind: float((p_values(losses, 0.05, kind) <= 0.05).mean()) for kind in KINDS}
    assert share["hoeffding"] < 0.001 < 0.01 < share["hoeffding_bentkus"] < 0.03 < share["betting"] <= 0.06


def test_betting_equals_its_slow_twin() -> None:
    rng = np.random.default_rng(0)
    losses, tolerance, level = rng.beta(0.5, 9, (50, 3)), 0.1, 0.05
    for column, found in zip(losses.T, p_values(losses, tolerance, "betting", level), strict=True):
        wealth = largest = 1.0
        total, squares, variance = 0.5, 0.25, 0.25
        for t, loss in enumerate(column.tolist(), 1):
            stake = min(1.0, math.sqrt(2 * math.log(1 / level) / (len(column) * variance)))
            wealth *= 1 - stake * (loss - tolerance)
            largest = max(largest, wealth)
            total += loss
            squares += (loss - total / (t + 1)) ** 2
            variance = squares / (t + 1)
        assert found == pytest.approx(1 / largest, rel=1e-9)


def test_hoeffding_and_bentkus_by_hand() -> None:
    one_of_40 = np.array([[1.0]] + [[0.0]] * 39)
    assert p_values(one_of_40, 0.1, "hoeffding")[0] == pytest.approx(math.exp(-80 * 0.075**2))
    # h(0.025, 0.1) = 0.025 log 0.25 + 0.975 log(0.975 / 0.9); the other term is e P[Bin(40, 0.1) <= 1]
    chernoff = math.exp(-40 * (0.025 * math.log(0.25) + 0.975 * math.log(0.975 / 0.9)))
    bentkus = math.e * (0.9**40 + 40 * 0.1 * 0.9**39)
    assert p_values(one_of_40, 0.1, "hoeffding_bentkus")[0] == pytest.approx(min(chernoff, bentkus))
    assert bentkus > chernoff
    seven_of_100 = (np.arange(100)[:, None] < 7).astype(float)  # here the second term is the smaller one
    expected = math.e * stats.binom.cdf(7, 100, 0.2)
    assert p_values(seven_of_100, 0.2, "hoeffding_bentkus")[0] == pytest.approx(expected)


def test_a_sum_is_not_rounded_up_for_its_last_bit() -> None:
    tenths = np.array([[0.1]] * 10 + [[0.0]] * 20)  # np.cumsum of ten 0.1 is 0.9999999999999999, of 3 x 0.1 above 0.3
    ones = np.array([[1.0]] + [[0.0]] * 29)
    thirds = np.array([[0.7], [0.1], [0.2]] * 10)  # adds up to 10.000000000000002 one after the other
    tens = np.array([[1.0], [0.0], [0.0]] * 10)
    for fractions, whole in ((tenths, ones), (thirds, tens)):
        found = p_values(np.hstack([fractions, whole]), 0.5, "hoeffding_bentkus")
        assert found[0] == found[1]


@pytest.mark.parametrize("kind", KINDS)
def test_losses_at_or_above_the_tolerance_show_nothing(kind: PValue) -> None:
    assert p_values(np.full((200, 1), 0.1), 0.1, kind)[0] == 1
    assert p_values(np.ones((200, 1)), 0.1, kind)[0] == 1
    assert p_values(np.full((200, 1), 0.1, dtype=np.float32), 0.2, kind)[0] < 0.1


# ------------------------------------------------------------------------------------------------------ procedures


def test_a_fixed_sequence_stops_at_the_first_that_is_not_rejected() -> None:
    p = np.array([0.001, 0.05, 0.051, 0.001])
    assert fixed_sequence(p, 0.05).tolist() == [True, True, False, False]
    assert fixed_sequence(p[2:], 0.05).tolist() == [False, False]
    assert bonferroni(p, 0.05).tolist() == [True, False, False, True]
    assert bonferroni(np.array([0.0125]), 0.05).tolist() == [True]


def steps(*shares: float, n: int = 400) -> np.ndarray:
    """Losses of 0 and 1 of which exactly these shares are 1."""
    return (np.arange(n)[:, None] < np.round(n * np.array(shares))).astype(float)


def test_the_last_rejected_threshold_is_chosen_not_the_one_behind_it() -> None:
    found = calibrate(steps(0, 0.01, 0.1, 0.2), [0.9, 0.8, 0.7, 0.6], tolerance=0.05)
    assert found.p_values[1] <= 0.05 < found.p_values[2]
    assert (found.threshold, found.passed, found.certified) == (0.8, (True, True, False, False), True)
    assert found.risks == (0, 0.01, 0.1, 0.2)
    assert (found.prompts, found.tolerance, found.error_rate, found.p_value) == (400, 0.05, 0.05, "betting")
    assert "threshold 0.8" in found.explain() and "probability at least 0.95" in found.explain()


def test_bonferroni_gets_past_a_bump_that_stops_a_fixed_sequence() -> None:
    losses, thresholds = steps(0, 0.1, 0.005, 0.3), [0.9, 0.8, 0.7, 0.6]
    assert calibrate(losses, thresholds, tolerance=0.05).threshold == 0.9
    found = calibrate(losses, thresholds, tolerance=0.05, procedure="bonferroni")
    assert (found.threshold, found.passed) == (0.7, (True, False, True, False))
    assert found.falls == 38  # 40 prompts lost at 0.8, two of them at 0.7 too


@pytest.mark.parametrize("procedure", PROCEDURES)
def test_nothing_certified_is_the_full_model_and_says_so(procedure: Procedure) -> None:
    found = calibrate(steps(0.05, 0.2), [0.9, 0.8], tolerance=0.05, procedure=procedure)
    assert (found.threshold, found.certified, found.passed) == (FULL_MODEL, False, (False, False))
    assert "no threshold passed" in found.explain() and "full model" in found.explain()


def test_a_calibration_can_be_recorded() -> None:
    for procedure in PROCEDURES:
        found = calibrate(steps(0, 0.01, 0.1), [0.9, 0.8, 0.7], tolerance=0.05, procedure=procedure)
        record = json.loads(json.dumps(found.record()))
        assert record["threshold"] == found.threshold and record["thresholds"] == [0.9, 0.8, 0.7]
        assert record["passed"] == list(found.passed) and record["certified"] is found.certified


def test_the_seed_orders_the_prompts_for_betting_alone() -> None:
    losses = np.random.default_rng(0).beta(0.5, 20, (100, 2))
    for kind in KINDS:
        first, again, other = (
            calibrate(losses, [0.9, 0.8], tolerance=0.2, p_value=kind, seed=seed) for seed in (1, 1, 2)
        )
        assert first == again
        assert (first.p_values == other.p_values) is (kind != "betting")


class Population:
    """Losses whose expectation is known at each threshold: 0 or 1, or spread out, dependent across thresholds."""

    thresholds = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4]

    def __init__(self, risks: list[float], spread: bool) -> None:
        self.risks, self.spread = np.array(risks), spread
        self.risk = {FULL_MODEL: 0.0, **dict(zip(self.thresholds, risks, strict=True))}

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        hardness = rng.random((n, 1))  # one per prompt: a hard prompt loses at many thresholds
        if self.spread:
            return (hardness < self.risks).astype(float)
        return self.risks * (hardness + rng.random((n, len(self.risks))))


@pytest.mark.parametrize("procedure", ["fixed_sequence", "bonferroni"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spread", [True, False])
def test_a_wrong_certificate_is_as_rare_as_promised(procedure: Procedure, kind: PValue, spread: bool) -> None:
    # From the fourth threshold on the risk is the tolerance or more; at the tolerance itself a wrong one is likeliest.
    population = Population([0.0, 0.005, 0.02, 0.1, 0.1, 0.2], spread)
    rng, draws = np.random.default_rng(5), 300
    wrong = found_any = 0
    for _ in range(draws):
        losses = population.draw(rng, 250)
        found = calibrate(
            losses,
            population.thresholds,
            tolerance=0.1,
            error_rate=0.1,
            p_value=kind,
            procedure=procedure,
        )
        wrong += population.risk[found.threshold] >= 0.1
        found_any += found.certified
    assert at_most(wrong, draws, 0.1)
    assert found_any > draws / 2
    if (procedure, kind, spread) == ("fixed_sequence", "betting", True):
        assert more_than(wrong, draws, 0.02)  # the bound is nearly reached, so the test would see it broken


def test_without_a_procedure_the_error_rate_is_not_kept() -> None:
    """Each threshold tested at the full error rate, and the lowest rejected one taken: wrong far too often."""
    rng, draws = np.random.default_rng(0), 400
    losses = [(rng.random((200, 20)) < 0.1).astype(float) for _ in range(draws)]  # every threshold at the tolerance
    uncorrected = sum(bool((p_values(sample, 0.1, "betting", 0.1) <= 0.1).any()) for sample in losses)
    sequence = sum(bool(fixed_sequence(p_values(sample, 0.1, "betting", 0.1), 0.1).any()) for sample in losses)
    assert more_than(uncorrected, draws, 0.5) and at_most(sequence, draws, 0.1)


def recorded_losses() -> tuple[np.ndarray, list[float]]:
    """A table as a run records it: 500 outputs, each unchanged down to a threshold of its own, then losing."""
    rng = np.random.default_rng(11)
    thresholds = [round(0.95 - 0.05 * step, 2) for step in range(19)]
    breaks_at = 1 - rng.beta(3, 1.2, (500, 1))
    lost = np.clip(rng.beta(2, 5, (500, 1)) + rng.normal(0, 0.1, (500, 19)), 0, 1)
    return np.where(np.array(thresholds) < breaks_at, lost, 0.0), thresholds


def test_the_promise_holds_over_redraws_and_naive_selection_breaks_it() -> None:
    losses, thresholds = recorded_losses()
    draws = 300

    def redraws(choose: Callable[[np.ndarray], float]) -> Redraws:
        return redraw(losses, thresholds, choose, tolerance=0.05, prompts=120, draws=draws)

    def by(kind: PValue) -> Redraws:
        return redraws(lambda sample: calibrate(sample, thresholds, tolerance=0.05, p_value=kind).threshold)

    naive = redraws(lambda sample: naive_threshold(sample, thresholds, 0.05))
    assert more_than(naive.broken, draws, 0.1)
    betting, bentkus = by("betting"), by("hoeffding_bentkus")
    assert at_most(betting.broken, draws, 0.05) and at_most(bentkus.broken, draws, 0.05)
    assert np.mean(naive.thresholds) < np.mean(betting.thresholds) - 0.05  # the price of the promise,
    assert np.mean(betting.thresholds) < np.mean(bentkus.thresholds) - 0.05  # which is lower for betting


def test_naive_selection_by_hand() -> None:
    assert naive_threshold(steps(0, 0.05, 0.06, 0.01), [0.9, 0.8, 0.7, 0.6], 0.05) == 0.8
    assert naive_threshold(steps(0.1, 0.01), [0.9, 0.8], 0.05) == FULL_MODEL


# ------------------------------------------------------------------------------------------------------- conformal


def test_conformal_by_hand() -> None:
    # (n mean + 1) / (n + 1): with 99 prompts 3, 4 and 5 losses of 1 give 0.04, 0.05, 0.06
    found = calibrate(steps(3 / 99, 4 / 99, 5 / 99, n=99), [0.9, 0.8, 0.7], tolerance=0.05, procedure="conformal")
    assert (found.threshold, found.passed) == (0.8, (True, True, False))
    assert not found.certified and "in expectation" in found.explain() and "not certified" in found.explain()
    assert (found.p_value, found.error_rate, found.p_values) == (None, None, ())


def test_conformal_counts_the_largest_loss_at_any_safer_threshold() -> None:
    found = calibrate(steps(0, 0.2, 0.0), [0.9, 0.8, 0.7], tolerance=0.05, procedure="conformal")
    assert (found.threshold, found.falls, found.risks) == (0.9, 80, (0, 0.2, 0))
    here, there = steps(0.03, n=400), steps(0.03, n=400)[::-1]  # other prompts lose at the lower threshold
    assert calibrate(np.hstack([here, there]), [0.9, 0.8], tolerance=0.05, procedure="conformal").threshold == 0.9


def test_conformal_keeps_the_tolerance_on_average_only() -> None:
    population, rng, draws = (
        Population([0.01, 0.04, 0.08, 0.12, 0.16, 0.2], spread=True),
        np.random.default_rng(2),
        1000,
    )
    chosen = [
        calibrate(population.draw(rng, 60), population.thresholds, tolerance=0.1, procedure="conformal").threshold
        for _ in range(draws)
    ]
    risks = np.array([population.risk[threshold] for threshold in chosen])
    assert risks.mean() <= 0.1 + 4 * risks.std() / math.sqrt(draws)
    assert more_than(int((risks > 0.1).sum()), draws, 0.05)  # no error rate of 0.05 is kept, nor promised


# --------------------------------------------------------------------------------------------------------- planner


def test_fewest_prompts_by_formula() -> None:
    for tolerance in (0.01, 0.02, 0.05, 0.1):
        bentkus = math.ceil(math.log(0.05) / math.log(1 - tolerance))  # (1 - tolerance)^n <= 0.05
        assert fewest_prompts(tolerance, 0.05, "hoeffding_bentkus") == bentkus
        assert fewest_prompts(tolerance, 0.05, "hoeffding") == math.ceil(-math.log(0.05) / (2 * tolerance**2))
        assert bentkus <= fewest_prompts(tolerance, 0.05, "betting") <= 1.15 * bentkus
    assert [fewest_prompts(t, p_value="hoeffding_bentkus") for t in (0.01, 0.02, 0.05, 0.1)] == [299, 149, 59, 29]
    assert [fewest_prompts(t, procedure="conformal") for t in (0.01, 0.05, 0.1, 0.9)] == [99, 19, 9, 1]


@pytest.mark.parametrize("procedure", PROCEDURES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_fewest_prompts_certify_and_one_less_is_refused(kind: PValue, procedure: Procedure) -> None:
    settings: dict[str, Any] = {"tolerance": 0.1, "error_rate": 0.1, "p_value": kind, "procedure": procedure}
    n = fewest_prompts(**settings, n_thresholds=3)
    found = calibrate(np.zeros((n, 3)), [0.9, 0.8, 0.7], **settings)
    assert found.threshold == 0.7 and found.certified is (procedure != "conformal")
    with pytest.raises(ValueError, match=rf"expected {n} or more.*got {n - 1} calibration prompts.*larger tolerance"):
        calibrate(np.zeros((n - 1, 3)), [0.9, 0.8, 0.7], **settings)


def certified_share(kind: PValue, n: int, risk: float, deviation: float | None, draws: int) -> float:
    """Share of calibrations, drawn here and not by the planner, that certify one threshold of this expected loss."""
    rng = np.random.default_rng(99)
    passed = 0
    for _ in range(draws):
        if deviation is None:
            losses = (rng.random((n, 1)) < risk).astype(float)
        else:
            shapes = risk * (1 - risk) / deviation**2 - 1
            losses = rng.beta(risk * shapes, (1 - risk) * shapes, (n, 1))
        passed += calibrate(losses, [0.9], tolerance=0.1, p_value=kind).certified
    return passed / draws


@pytest.mark.parametrize(
    ("kind", "deviation"),
    [("hoeffding", None), ("hoeffding_bentkus", None), ("betting", None), ("betting", 0.08)],
)
def test_the_planned_number_of_prompts_certifies(kind: PValue, deviation: float | None) -> None:
    n, draws = prompts_needed(0.05, 0.1, p_value=kind, power=0.8, deviation=deviation), 500
    error = math.sqrt(0.8 * 0.2 / draws) + math.sqrt(0.8 * 0.2 / 2000)  # of this simulation and of the planner's
    assert certified_share(kind, n, 0.05, deviation, draws) >= 0.8 - 3 * error
    assert certified_share(kind, n, 0.05, deviation, draws) <= 0.8 + 0.07 + 3 * error  # and is not far more than needed
    assert certified_share(kind, max(n // 2, fewest_prompts(0.1, p_value=kind)), 0.05, deviation, draws) < 0.7


def test_the_exact_chance_and_the_simulated_one_agree() -> None:
    # A deviation as wide as losses of 0 and 1 simulates what is otherwise computed.
    exact = chance_to_certify(300, 0.05, 0.1, p_value="hoeffding_bentkus")
    simulated = chance_to_certify(300, 0.05, 0.1, p_value="hoeffding_bentkus", deviation=math.sqrt(0.05 * 0.95))
    assert 0.5 < exact < 0.95
    assert simulated == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 2000))


def test_betting_certifies_more_where_losses_spread_little_and_less_for_0_and_1() -> None:
    # Expected loss half the tolerance of 0.05, 200 prompts, deviation 0.05: the mean alone is not enough.
    chances = {kind: chance_to_certify(200, 0.025, 0.05, p_value=kind, deviation=0.05) for kind in KINDS}
    assert chances["betting"] > 0.95 and chances["hoeffding"] == 0 and chances["hoeffding_bentkus"] < 0.05
    needed = {kind: prompts_needed(0.05, 0.1, p_value=kind) for kind in KINDS}
    assert needed["hoeffding_bentkus"] < needed["betting"] < needed["hoeffding"]


def test_a_plan_without_any_loss_needs_the_fewest_prompts() -> None:
    for kind in KINDS:
        assert prompts_needed(0.0, 0.1, p_value=kind) == fewest_prompts(0.1, p_value=kind)
        assert chance_to_certify(fewest_prompts(0.1, p_value=kind) - 1, 0.0, 0.1, p_value=kind) == 0


# ------------------------------------------------------------------------------------------------ losses and errors


@pytest.mark.parametrize("loss", [31.0, float("nan"), -0.1])
def test_losses_outside_of_0_to_1_are_refused(loss: float) -> None:
    with pytest.raises(ValueError, match=r"expected \[0, 1\].*divide percentages by 100"):
        calibrate(np.full((100, 1), loss), [0.5], tolerance=0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tolerance": 0.0}, r"expected above 0 and below 1, got tolerance=0; "),
        ({"tolerance": 1.0}, r"expected above 0 and below 1, got tolerance=1; "),
        ({"error_rate": 0.0}, r"expected above 0 and below 1, got error_rate=0; "),
        ({"thresholds": [0.8, 0.9]}, r"expected a falling sequence.*, got thresholds 0.8, 0.9; sort"),
        ({"thresholds": [1.0, 0.9]}, r"expected a falling sequence.*, got thresholds 1, 0.9; sort"),
        ({"thresholds": [0.9]}, r"expected one row.*2 thresholds, for 1 thresholds; decode every"),
        ({"losses": np.full((200, 2), 1.5)}, r"expected \[0, 1\].*, got losses with values from 0 to 1.5; divide"),
        ({"losses": np.full((200, 2), np.nan)}, r"expected \[0, 1\].*, got losses .*; divide"),
        ({"losses": np.zeros((0, 2))}, r"expected one row.*, got losses of 0 prompts .*; decode"),
        (
            {"losses": np.zeros((40, 2))},
            r"expected 63 or more.*, got 40 calibration prompts for tolerance=0.05 .*; cali",
        ),
    ],
)
def test_bad_input_is_refused_in_three_parts(change: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"losses": np.zeros((200, 2)), "thresholds": [0.9, 0.8], "tolerance": 0.05, **change}
    with pytest.raises(ValueError, match=message):
        calibrate(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"risk": 0.05, "tolerance": 0.05},
            r"expected .*below the tolerance of 0.05.* risk of 0.05; allow a larger",
        ),
        ({"risk": 0.0499, "tolerance": 0.05}, r"expected a gap that 100000 prompts.* risk of 0.0499 .*; allow"),
        ({"risk": -0.1, "tolerance": 0.05}, r"expected at least 0 .* risk of -0.1; allow"),
        ({"risk": 0.01, "tolerance": 0.05, "power": 1.0}, r"expected above 0 and below 1, got power=1; ask"),
        ({"risk": 0.01, "tolerance": 0.05, "deviation": 0.2}, r"expected 0 to 0.0995.*, got deviation=0.2 .*; leave"),
    ],
)
def test_an_impossible_plan_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prompts_needed(**settings, p_value="hoeffding_bentkus")


# ---------------------------------------------------------------------------------------------------- beta mixture

AGREE, DISAGREE = (6.0, 1.5), (2.0, 3.0)


def tokens(base_rate: float, n: int = 20_000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    agreed = rng.random(n) < base_rate
    return np.where(agreed, rng.beta(*AGREE, n), rng.beta(*DISAGREE, n)), agreed


def true_threshold(base_rate: float, wished: float) -> float:
    """Where the posterior of the true mixture, which rises with the confidence, crosses the wished rate."""
    grid = np.linspace(0.0005, 0.9995, 9991)
    top, bottom = base_rate * stats.beta.pdf(grid, *AGREE), (1 - base_rate) * stats.beta.pdf(grid, *DISAGREE)
    return float(grid[np.argmax(top / (top + bottom) >= wished)])


def test_a_beta_distribution_has_the_moments_it_was_made_of() -> None:
    made = Beta.of_moments(0.8, 0.02)
    assert stats.beta.stats(made.alpha, made.beta) == pytest.approx((0.8, 0.02))
    assert made.log_density(GRID) == pytest.approx(stats.beta.logpdf(GRID, made.alpha, made.beta))


@pytest.mark.parametrize("base_rate", [0.2, 0.5, 0.8, 0.95])
def test_a_known_mixture_is_recovered(base_rate: float) -> None:
    mixture = BetaMixture(0.9).fit(*tokens(base_rate))
    for moments, shapes in ((mixture.agreeing, AGREE), (mixture.disagreeing, DISAGREE)):
        found = moments.distribution()
        assert (found.alpha, found.beta) == pytest.approx(shapes, rel=0.15)
    assert mixture.base_rate == pytest.approx(base_rate, abs=0.01)
    assert mixture.threshold() == pytest.approx(true_threshold(base_rate, 0.9), abs=0.025)


@pytest.mark.parametrize("base_rate", [0.2, 0.5, 0.8, 0.95])
def test_tokens_that_exit_agree_as_often_as_wished(base_rate: float) -> None:
    threshold = BetaMixture(0.9).fit(*tokens(base_rate)).threshold()
    confidences, agreed = tokens(base_rate, 50_000, seed=1)
    leaves = confidences >= threshold
    assert leaves.sum() > 1000 or base_rate == 0.2
    assert agreed[leaves].mean() >= 0.9


def test_base_rates_lower_the_threshold_of_a_good_exit_and_raise_that_of_a_bad_one() -> None:
    with_rates = {rate: BetaMixture(0.9).fit(*tokens(rate)).threshold() for rate in (0.2, 0.5, 0.95)}
    without = {rate: BetaMixture(0.9, base_rates=False).fit(*tokens(rate)).threshold() for rate in with_rates}
    assert with_rates[0.95] < without[0.95] - 0.2
    assert with_rates[0.2] > without[0.2] + 0.05
    assert with_rates[0.5] == pytest.approx(without[0.5], abs=0.005)
    assert max(without.values()) - min(without.values()) < 0.03  # blind to how often the exit is right
    confidences, agreed = tokens(0.2, 50_000, seed=1)
    assert agreed[confidences >= without[0.2]].mean() < 0.88  # so the wished 0.9 is missed


def test_one_token_at_a_time_is_all_at_once() -> None:
    confidences, agreed = tokens(0.7, 300)
    stream, batch = BetaMixture(0.8), BetaMixture(0.8).fit(confidences, agreed)
    for confidence, same in zip(confidences.tolist(), agreed.tolist(), strict=True):
        stream.update(confidence, same)
    for one, other in ((stream.agreeing, batch.agreeing), (stream.disagreeing, batch.disagreeing)):
        assert (one.n, one.mean, one.squares) == pytest.approx((other.n, other.mean, other.squares))
    assert stream.threshold() == batch.threshold() < 1
    assert batch.fit(confidences[:50], agreed[:50]).agreeing.n == agreed[:50].sum()  # a fit forgets


def test_confidences_close_to_1_do_not_cancel() -> None:
    mixture = BetaMixture(0.8)
    for step in range(1000):
        mixture.update(1 - 1e-9 * (step % 2), True)
    assert mixture.agreeing.squares / 1000 == pytest.approx(0.25e-18, rel=1e-3)


@pytest.mark.parametrize("agreed", [True, False])
def test_one_kind_of_token_alone_lets_none_exit(agreed: bool) -> None:
    mixture = BetaMixture(0.5).fit(np.linspace(0.1, 0.9, 500), np.full(500, agreed))
    assert mixture.threshold() == NEVER and not mixture.known
    for _ in range(9):
        mixture.update(0.2 if agreed else 0.95, not agreed)
    assert mixture.threshold() == NEVER
    mixture.update(0.2 if agreed else 0.95, not agreed)
    assert mixture.known


def test_nothing_seen_lets_no_token_exit() -> None:
    mixture = BetaMixture(0.9)
    assert (mixture.threshold(), mixture.base_rate) == (NEVER, 0.5)
    assert json.loads(json.dumps(mixture.stats()))["shapes"] == {"agree": None, "disagree": None}


@pytest.mark.parametrize(
    ("agreeing", "disagreeing", "low", "high"),
    [
        (0.9, 0.5, 0.5, 0.9),  # two points: the threshold lies between them
        (1.0, 0.0, 0.0, 1.0),  # mass at the ends
        (1.0, 0.98, 0.98, 1.0),
    ],
)
def test_confidences_without_spread_have_a_threshold(
    agreeing: float, disagreeing: float, low: float, high: float
) -> None:
    mixture = BetaMixture(0.9).fit([agreeing] * 20 + [disagreeing] * 20, [True] * 20 + [False] * 20)
    assert low < mixture.threshold() < high
    assert np.isfinite(mixture.posterior(GRID)).all()


@pytest.mark.parametrize(("wished", "threshold"), [(0.7, GRID[0]), (0.8, NEVER)])
def test_one_confidence_for_all_tokens_leaves_the_base_rate(wished: float, threshold: float) -> None:
    mixture = BetaMixture(wished).fit([0.6] * 40, [True] * 30 + [False] * 10)
    assert mixture.threshold() == threshold


def test_confidences_of_0_and_1_alone_are_fitted() -> None:
    mixture = BetaMixture(0.9).fit([1.0] * 90 + [0.0] * 10 + [0.0] * 90 + [1.0] * 10, [True] * 100 + [False] * 100)
    assert np.isfinite(mixture.posterior(GRID)).all() and 0 < mixture.threshold() <= 1


def test_a_posterior_that_falls_again_is_not_taken_at_its_first_high_point() -> None:
    # Agreeing tokens have confidences near 0 and near 1, the others in the middle: the posterior is high, low, high.
    rng = np.random.default_rng(0)
    ends, middle = rng.beta(0.5, 0.5, 4000), rng.beta(5, 5, 4000)
    mixture = BetaMixture(0.9).fit(np.append(ends, middle), np.arange(8000) < 4000)
    assert mixture.posterior(GRID)[0] > 0.9 and mixture.posterior(np.array([0.5]))[0] < 0.5
    assert 0.7 < mixture.threshold() < 0.95
    # The other way round it is high in the middle only: a token exits at every confidence above, so none may.
    upside_down = BetaMixture(0.6).fit(np.append(ends, middle), np.arange(8000) >= 4000)
    assert upside_down.posterior(np.array([0.5]))[0] > 0.6 and upside_down.threshold() == NEVER


def test_a_higher_wish_is_a_higher_threshold() -> None:
    confidences, agreed = tokens(0.8)
    found = [BetaMixture(wished).fit(confidences, agreed).threshold() for wished in (0.7, 0.8, 0.9, 0.95, 0.98)]
    assert found == sorted(found) and len(set(found)) == 5


def test_the_facts_can_be_recorded() -> None:
    mixture = BetaMixture(0.9).fit(*tokens(0.8))
    facts = json.loads(json.dumps(mixture.stats()))
    assert facts["threshold"] == mixture.threshold() and facts["agree"]["tokens"] == mixture.agreeing.n
    assert facts["shapes"]["agree"] == pytest.approx(AGREE, rel=0.15)


def test_bad_confidences_and_settings_are_refused_in_three_parts() -> None:
    for wished in (0.0, 1.0):
        with pytest.raises(ValueError, match=r"wished_rate must be above 0 and below 1, got .*Try"):
            BetaMixture(wished)
    with pytest.raises(ValueError, match=r"fewest must be at least 2, .*got 1.*Try 10"):
        BetaMixture(0.9, fewest=1)
    for confidence in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"must be in \[0, 1\], got .*Use"):
            BetaMixture(0.9).update(confidence, True)
        with pytest.raises(ValueError, match=r"must be in \[0, 1\], got .*Use"):
            BetaMixture(0.9).fit([0.5, confidence], [True, True])
    with pytest.raises(ValueError, match=r"one label per confidence, got 2 confidences and 1 labels. Pair"):
        BetaMixture(0.9).fit([0.5, 0.6], [True])

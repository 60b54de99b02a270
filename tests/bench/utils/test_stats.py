"""Intervals by hand, in degenerate cases, and by how often they cover the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.utils.stats import FEWEST_FOR_BOOTSTRAP, Interval, geometric_mean, ratio_of_totals, ratio_per_token


def ratio(top: list[float], bottom: list[float], n_resamples: int = 500, seed: int = 0) -> Interval:
    return ratio_of_totals(top, bottom, n_resamples=n_resamples, seed=seed)


def population(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Method times of log-normal texts, and baseline times 1.5 times as long with 20 % noise, unrelated to length."""
    method = np.exp(rng.normal(0, 0.5, n))
    return method * 1.5 * np.exp(rng.normal(-0.02, 0.2, n)), method  # mean of the noise: exp(-0.02 + 0.2^2 / 2) = 1


def test_t_interval_by_hand() -> None:
    # With equal denominators L_(i) = log((sum - b_i) / 4): b = 1, 2, 3, 4, 5 has sum 15, so R = 3 and leaving one out
    # gives 14/4, 13/4, 12/4, 11/4, 10/4. Pseudo-values 5 log 3 - 4 log(those) = 0.48201, 0.77844, 1.09861, 1.44666,
    # 1.82790; their sd is 0.53192, the standard error 0.53192 / sqrt(5) = 0.23788, t(0.975, 4) = 2.77645, so the half
    # width is 0.66046 around log 3.
    found = ratio([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5)
    assert (found.value, found.n, found.kind) == (3.0, 5, "t")
    assert found.low == pytest.approx(3 * math.exp(-0.66046), rel=1e-4)
    assert found.high == pytest.approx(3 * math.exp(0.66046), rel=1e-4)


def test_geometric_mean_by_hand() -> None:
    # log ratios 0, 1, 2, 3, 4 times log 2: mean log 4, sd sqrt(2.5) log 2, standard error log 2 / sqrt 2; t(0.975, 4) =
    # 2.77645, so the half width is 1.96325 log 2
    found = geometric_mean([1.0, 2.0, 4.0, 8.0, 16.0], [1.0] * 5)
    assert found.value == pytest.approx(4.0)
    assert found.high == pytest.approx(4 * 2**1.96325, rel=1e-4)
    assert found.low == pytest.approx(4 / 2**1.96325, rel=1e-4)


def test_the_ratio_of_totals_is_not_a_mean_of_ratios() -> None:
    assert ratio([10.0, 1.0], [5.0, 2.0]).value == 11 / 7
    assert geometric_mean([10.0, 1.0], [5.0, 2.0]).value == pytest.approx(1.0)


@pytest.mark.parametrize("n", [1, 4, 5, 19, 20, 60])
def test_per_token_is_the_ratio_of_totals_where_both_wrote_the_same(n: int) -> None:
    top, bottom = population(np.random.default_rng(n), n)
    tokens = np.arange(1.0, n + 1)
    found = ratio_per_token((top, bottom), (tokens, tokens), n_resamples=300, seed=1)
    assert found == ratio_of_totals(top, bottom, n_resamples=300, seed=1)


def test_per_token_by_hand() -> None:
    # 12 s for 6 tokens against 8 s for 5 tokens: 2 / 1.6
    found = ratio_per_token(([10.0, 2.0], [7.0, 1.0]), ([4.0, 2.0], [3.0, 2.0]), n_resamples=100, seed=0)
    assert (found.value, found.low, found.n) == (pytest.approx(1.25), None, 2)
    assert found.reason and "2 pairs are too few" in found.reason


def test_t_interval_of_a_ratio_per_token_by_hand() -> None:
    # Denominator: 1 s and 1 token a pair. Numerator: 1, 2, 3, 4, 5 s and 2, 1, 1, 1, 1 tokens, so R = 15 / 6 = 2.5;
    # leaving one out gives 14/4, 13/5, 12/5, 11/5, 10/5. Pseudo-values 5 log 2.5 - 4 log(those) = -0.42960, 0.75941,
    # 1.07958, 1.42762, 1.80886; their sd is 0.85440, the half width 2.77645 * 0.85440 / sqrt(5) = 1.06088.
    ones = [1.0] * 5
    found = ratio_per_token(
        ([1.0, 2.0, 3.0, 4.0, 5.0], ones), ([2.0, 1.0, 1.0, 1.0, 1.0], ones), n_resamples=100, seed=0
    )
    assert (found.value, found.kind) == (pytest.approx(2.5), "t")
    assert found.low == pytest.approx(2.5 * math.exp(-1.06088), rel=1e-4)
    assert found.high == pytest.approx(2.5 * math.exp(1.06088), rel=1e-4)


def test_a_shorter_text_is_no_speed_up() -> None:
    # The same 10 ms for every token of both arms; the method stops early in every third text.
    tokens = np.random.default_rng(4).integers(20, 90, 60).astype(float)
    fewer = np.where(np.arange(60) % 3, tokens, tokens // 2)
    seconds = (tokens * 0.01, fewer * 0.01)
    found = ratio_per_token(seconds, (tokens, fewer), n_resamples=300, seed=0)
    assert [found.value, found.low, found.high] == pytest.approx([1.0] * 3)
    assert ratio_of_totals(*seconds, n_resamples=300, seed=0).low > 1.1  # type: ignore[operator]


def test_equal_seconds_of_other_lengths_still_have_an_interval() -> None:
    # Twice as fast in every pair, but the lengths vary: only lengths in one proportion have no spread.
    seconds, tokens = np.linspace(0.1, 0.7, 30), np.linspace(10, 70, 30)
    apart = tokens - np.arange(30) % 4
    varied = ratio_per_token((2 * seconds, seconds), (tokens, apart), n_resamples=300, seed=0)
    alike = ratio_per_token((2 * seconds, seconds), (tokens, tokens / 2), n_resamples=300, seed=0)
    assert varied.kind == "bca" and varied.low is not None and varied.low < varied.value < varied.high  # type: ignore[operator]
    assert alike.kind == "equal" and alike.low == alike.high == alike.value == pytest.approx(1.0)


def test_tokens_must_be_above_0() -> None:
    with pytest.raises(ValueError, match="needs tokens above 0"):
        ratio_per_token(([1.0], [1.0]), ([0.0], [1.0]), n_resamples=10, seed=0)
    with pytest.raises(ValueError, match="one length"):
        ratio_per_token(([1.0], [1.0]), ([1.0, 2.0], [1.0, 2.0]), n_resamples=10, seed=0)


def test_bootstrap_from_20_pairs_on() -> None:
    top, bottom = population(np.random.default_rng(0), FEWEST_FOR_BOOTSTRAP)
    assert ratio_of_totals(top, bottom, n_resamples=500, seed=0).kind == "bca"
    assert ratio_of_totals(top[1:], bottom[1:], n_resamples=500, seed=0).kind == "t"


def test_the_seed_fixes_the_bootstrap() -> None:
    top, bottom = population(np.random.default_rng(1), 40)
    first, again, other = (ratio_of_totals(top, bottom, n_resamples=300, seed=seed) for seed in (7, 7, 8))
    assert first == again != other


def test_pairing_removes_what_both_arms_share() -> None:
    # Texts differ in length by a factor of 100, ratios only by 1 %: an unpaired interval would be wide.
    rng = np.random.default_rng(2)
    method = np.exp(rng.uniform(0, math.log(100), 60))
    found = ratio_of_totals(2 * method * rng.normal(1, 0.01, 60), method, n_resamples=500, seed=0)
    assert found.low is not None and found.high is not None
    assert 1.98 < found.low < 2 < found.high < 2.02


@pytest.mark.parametrize("n", [5, 19, 20, 50])
def test_equal_ratios_are_their_own_interval(n: int) -> None:
    times = np.linspace(0.1, 0.7, n)
    found = ratio_of_totals(3 * times, times, n_resamples=300, seed=0)
    assert found.kind == "equal"
    assert found.low == found.high == found.value == pytest.approx(3.0)
    assert geometric_mean(3 * times, times).kind == "equal"


def test_few_pairs_have_no_interval() -> None:
    for found in (ratio([3.0], [2.0]), geometric_mean([3.0], [2.0])):
        assert (found.value, found.low, found.high, found.n) == (pytest.approx(1.5), None, None, 1)
        assert found.reason and "one pair" in found.reason
    for found in (ratio([3.0, 3.0, 4.0, 2.0], [2.0] * 4), geometric_mean([2.0] * 4, [2.0] * 4)):
        assert (found.low, found.high, found.n, found.kind) == (None, None, 4, None)
        assert found.reason and "4 pairs are too few for an interval, 5 are needed; measure more" in found.reason
    for found in (ratio([], []), geometric_mean([], [])):
        assert (found.value, found.low, found.n) == (None, None, 0) and found.reason


def test_a_failing_bootstrap_falls_back_on_t(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.utils import stats

    monkeypatch.setattr(stats, "_bca", lambda *_: (math.nan, math.nan))
    top, bottom = population(np.random.default_rng(3), 30)
    found = ratio_of_totals(top, bottom, n_resamples=300, seed=0)
    assert found.kind == "t" and found.low is not None and math.isfinite(found.low)


def test_one_outlier_among_equal_pairs_still_gives_a_finite_interval() -> None:
    found = ratio([2.0] * 29 + [9.0], [1.0] * 30)
    assert found.low is not None and found.high is not None
    assert 2.0 <= found.low <= found.value <= found.high  # type: ignore[operator]


@pytest.mark.parametrize(("top", "bottom"), [([1.0], [0.0]), ([1.0], [-1.0]), ([math.nan], [1.0]), ([1.0, 2.0], [1.0])])
def test_what_is_no_time_is_refused(top: list[float], bottom: list[float]) -> None:
    with pytest.raises(ValueError, match=r"times above 0|one length"):
        ratio(top, bottom)
    with pytest.raises(ValueError, match=r"times above 0|one length"):
        geometric_mean(top, bottom)


@pytest.mark.parametrize(("n", "runs", "low", "high"), [(8, 1000, 0.91, 0.97), (40, 400, 0.90, 0.98)])
def test_a_95_percent_interval_covers_the_truth(n: int, runs: int, low: float, high: float) -> None:
    # The true ratio is 1.5. With 400 (1000) runs the share that covers has a standard error of 1.1 (0.7) points; the
    # bounds leave four of them, and two points for what small samples of skewed ratios cost.
    rng = np.random.default_rng(11)
    intervals = [ratio_of_totals(*population(rng, n), n_resamples=400, seed=run) for run in range(runs)]
    covered = sum(found.low <= 1.5 <= found.high for found in intervals) / runs  # type: ignore[operator]
    assert low <= covered <= high


def test_the_interval_of_the_geometric_mean_would_not_cover_the_ratio_of_totals() -> None:
    # Long texts gain more here, so totals have a larger ratio than the typical prompt: why the t interval below 20
    # pairs is not the one of the plain log ratios. The truth is a mean over 2 million pairs.
    rng = np.random.default_rng(12)

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        method = np.exp(rng.normal(0, 0.6, n))
        return method**1.2 * 1.5 * np.exp(rng.normal(0, 0.2, n)), method

    top, bottom = draw(2_000_000)
    truth = top.sum() / bottom.sum()
    covered = np.zeros(2)
    for _ in range(500):
        pairs = draw(15)
        both = ratio_of_totals(*pairs, n_resamples=100, seed=0), geometric_mean(*pairs)
        covered += [found.low <= truth <= found.high for found in both]  # type: ignore[operator]
    assert covered[0] / 500 > 0.87 > 0.75 > covered[1] / 500

"""From logits to a distribution and to a draw from it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from methods.engine.sampling import Sampling, argmax, draw
from tests.helpers.host_reads import no_host_reads

LEVEL = 1e-4  # probability of a false alarm per test, were the seeds not fixed


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def reference(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The definition, token by token."""
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = order[: top_k or None]
    mass, kept = sum(weights[token] for token in order), 0.0
    chosen = []
    for token in order:
        if chosen and kept / mass >= top_p:
            break
        chosen.append(token)
        kept += weights[token]
    return [weights[token] / kept if token in chosen else 0.0 for token in range(len(weights))]


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.integers(-400, 400), min_size=1, max_size=12, unique=True),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.013, 0.31, 0.57, 0.83, 0.977, 1.0]),
)
def test_probs_are_the_definition(logits, temperature, top_k, top_p):
    scaled = [x / 100 for x in logits]
    found = Sampling(temperature, top_k, top_p).probs(torch.tensor(scaled, dtype=torch.double))
    wanted = torch.tensor(reference(scaled, temperature, top_k, top_p), dtype=torch.double)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_the_order_is_temperature_then_top_k_then_top_p():
    logits = torch.tensor([0.40, 0.25, 0.20, 0.15], dtype=torch.double).log()
    # behind top_k = 2 the first token has 0.615 of the mass: alone it reaches 0.6, of the whole it would not
    assert Sampling(1.0, top_k=2, top_p=0.6).probs(logits).tolist() == [1.0, 0.0, 0.0, 0.0]
    # at temperature 0.5 the masses are 0.561, 0.219, ...: top_p sees these
    assert (Sampling(0.5, top_p=0.56).probs(logits) > 0).tolist() == [True, False, False, False]
    assert (Sampling(1.0, top_p=0.56).probs(logits) > 0).tolist() == [True, True, False, False]


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_equals_at_the_threshold_do_not_widen_top_k(top_k):
    probs = Sampling(1.0, top_k=top_k).probs(torch.zeros(3, 9))
    assert ((probs > 0).sum(-1) == top_k).all()
    torch.testing.assert_close(probs.amax(-1), torch.full((3,), 1 / top_k))


def test_equals_at_the_threshold_of_top_p_are_taken_from_the_front():
    assert Sampling(1.0, top_p=0.5).probs(torch.zeros(8)).tolist() == [0.25] * 4 + [0.0] * 4


def test_top_p_keeps_the_most_likely_token_whatever_it_says():
    assert Sampling(1.0, top_p=1e-9).probs(torch.tensor([0.0, 3.0, 1.0])).tolist() == [0.0, 1.0, 0.0]


def test_top_p_keeps_the_prefix_that_just_reaches_it():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.double).log()
    assert (Sampling(1.0, top_p=0.75).probs(logits) > 0).sum() == 2
    assert (Sampling(1.0, top_p=0.75001).probs(logits) > 0).sum() == 3


def test_greedy_is_one_hot_at_the_lowest_argmax():
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    assert Sampling().probs(logits).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert Sampling().pick(logits, rng()).tolist() == [1, 0]
    assert Sampling(top_k=3, top_p=0.2).greedy, "temperature 0 is greedy whatever else is set"


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8), Sampling(0.8, 5), Sampling(0.8, 5, 0.7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_precision_and_shape(sampling, dtype):
    logits = torch.randn(2, 3, 11, generator=rng()).to(dtype)
    probs = sampling.probs(logits)
    assert probs.shape == logits.shape
    assert probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(probs.sum(-1), torch.ones_like(probs[..., 0]))
    assert sampling.pick(logits, rng()).shape == (2, 3)


def test_forbidden_tokens_stay_forbidden():
    logits = torch.tensor([1.0, -torch.inf, 0.5, -torch.inf])
    for sampling in (Sampling(1.0), Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.999)):
        assert sampling.probs(logits)[[1, 3]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "values",
    [{"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": 1e-30}]
    + [{"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.01}, {"top_p": math.nan}],
    ids=str,
)
def test_values_out_of_range_are_refused(values):
    (name, value), *_ = values.items()
    with pytest.raises(ValueError, match=f"temperature 0 or at least .*, got .*{name}={value}"):
        Sampling(**values)


# -- draws ------------------------------------------------------------------------------------------------------------


def goodness(counts: torch.Tensor, probs: torch.Tensor) -> float:
    assert counts[probs == 0].sum() == 0, "a token without probability was drawn"
    support, probs = probs > 0, probs.double()
    return float(chisquare(counts[support], probs[support] / probs.sum() * counts.sum()).pvalue)


@pytest.mark.parametrize("vocab", [1, 2, 7, 255, 256, 257, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_follow_the_weights(vocab, dtype):
    """Vocabularies around the block size, with holes in the support at both ends and unnormalised."""
    weights = torch.rand(vocab, generator=rng(vocab), dtype=dtype) + 0.05
    if vocab > 2:
        weights[0] = weights[-1] = weights[vocab // 2] = 0.0
    drawn = draw((3 * weights).expand(40_000, vocab), rng(1))
    if vocab > 1:
        assert goodness(torch.bincount(drawn, minlength=vocab), weights) > LEVEL
    assert drawn.min() >= 0 and drawn.max() < vocab


def test_draws_of_a_large_vocabulary():
    """49,152 tokens in 32 bit, half of the mass in the far tail: by groups of 1,024."""
    vocab = 49_152
    weights = torch.full((vocab,), 0.5 / (vocab - 1))
    weights[5] = 0.5
    drawn = torch.cat([draw(weights.expand(500, vocab), rng(seed)) for seed in range(40)])
    groups = weights.double().view(-1, 1024).sum(1)
    assert goodness(torch.bincount(drawn // 1024, minlength=len(groups)), groups) > LEVEL


def test_rows_are_drawn_each_from_its_own_weights():
    weights = torch.eye(6).expand(4, 6, 6)
    assert (draw(weights, rng()) == torch.arange(6)).all()
    assert draw(weights[:0], rng()).shape == (0, 6)


def test_rows_are_independent():
    weights = torch.full((200_000, 2, 2), 0.5)
    pairs = draw(weights, rng(3)) @ torch.tensor([2, 1])
    assert goodness(torch.bincount(pairs, minlength=4), torch.full((4,), 0.25)) > LEVEL


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spot", [0.0, 1 - 2**-53, 1 - 2**-24, 0.5])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(monkeypatch, dtype, spot):
    """0 and the largest number below 1 are where inverse transforms slip onto tokens of weight 0."""
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype, device, generator: torch.full(shape, spot, dtype=dtype))
    for vocab in (5, 256, 600):
        for start, end in ((0, vocab), (2, vocab), (0, vocab - 3), (2, 4), (vocab - 2, vocab - 1)):
            weights = torch.zeros(1, vocab, dtype=dtype)
            weights[0, start:end] = torch.rand_like(weights[0, start:end]) * 1e-3 + 1e-30
            token = int(draw(weights, rng()))
            assert weights[0, token] > 0, f"spot {spot}: token {token} lies outside [{start}, {end})"


@settings(max_examples=100, deadline=None)
@given(
    exponents=st.lists(st.one_of(st.none(), st.integers(-44, 37)), min_size=1, max_size=40).filter(any),
    seed=st.integers(0, 2**31),
)
def test_weights_of_any_scale_draw_possible_tokens(exponents, seed):
    weights = torch.tensor([0.0 if e is None else 10.0**e for e in exponents]).expand(50, -1)
    drawn = draw(weights, rng(seed))
    assert (weights.gather(1, drawn[:, None]) > 0).all()


def test_a_row_without_weight_gives_some_token_and_no_error():
    assert 0 <= int(draw(torch.zeros(1, 300), rng())) < 300


def test_draws_repeat_with_the_seed_and_leave_the_global_generator_alone():
    weights, state = torch.rand(50, 20, generator=rng()), torch.get_rng_state()
    assert torch.equal(draw(weights, rng(7)), draw(weights, rng(7)))
    assert not torch.equal(draw(weights, rng(7)), draw(weights, rng(8)))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8), Sampling(0.8, 5, 0.7)])
def test_nothing_is_read_back(sampling):
    with no_host_reads():
        sampling.pick(torch.randn(3, 2, 300), rng())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(3, 512), (2, 4, 1024), (5, 256), (3, 700), (1, 1)])
def test_argmax_is_the_first_of_the_largest(shape, dtype):
    scores = torch.randint(0, 9, shape, generator=rng(1)).to(dtype)  # full of ties
    scores[..., :1] = -torch.inf
    wanted = (scores == scores.amax(-1, keepdim=True)).int().argmax(-1)
    assert argmax(scores).equal(wanted)

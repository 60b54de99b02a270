"""Guesses for the kernels: the table of n-grams as it is counted by hand, rounds with guesses as those without."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from methods.engine import cpu_kernels
from methods.engine.causal_lm import CausalLM
from methods.engine.fused_layers import Drawing, Ran
from methods.engine.guesses import EACH, GuessedRounds, Guesses, NgramTable
from methods.engine.kv_cache import Cache
from tests.engine.test_causal_lm import tiny

kernels = pytest.mark.skipif(cpu_kernels.library() is None, reason="the kernels cannot be compiled here")
VOCAB = 5


def joined(documents: list[list[int]]) -> np.ndarray:
    return np.array([token for document in documents for token in [*document, -1]], np.int64)


def by_hand(documents: list[list[int]], context: tuple[int, ...], least: tuple[int, int, int]) -> dict[int, float]:
    """Shares after a context, of the likeliest tokens that are there of the context and of the one shorter by one."""
    seen = Counter(
        document[at + len(context)]
        for document in documents
        for at in range(len(document) - len(context))
        if tuple(document[at : at + len(context)]) == context
    )
    if sum(seen.values()) < least[len(context) - 1]:
        return {}
    below = by_hand(documents, context[1:], least) if len(context) > 1 else {}
    # only the most frequent tokens of a context are kept, before and after they are weighed
    often = dict(sorted(seen.items(), key=lambda item: (-item[1], item[0]))[:EACH])
    shares = {t: (often.get(t, 0) + 4 * below.get(t, 0.0)) / (seen.total() + 4) for t in {*often, *below}}
    return dict(sorted(shares.items(), key=lambda item: -item[1])[:EACH])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=25), min_size=1, max_size=4),
    st.sampled_from([(1, 1, 1), (2, 2, 3), (1, 2, 2)]),
)
def test_a_table_has_the_shares_that_are_counted_by_hand(
    documents: list[list[int]], least: tuple[int, int, int]
) -> None:
    table = NgramTable(joined(documents), VOCAB, least)
    for length in (1, 2, 3):
        for number in range(VOCAB**length):
            context = tuple(number // VOCAB**place % VOCAB for place in range(length))
            wanted = next(
                (found for n in range(length, 0, -1) if (found := by_hand(documents, context[-n:], least))), {}
            )
            found = table.following(list(context))
            assert sorted(found.values()) == pytest.approx(sorted(wanted.values()))
            for token, share in found.items():  # of equally likely ones any may be left out
                assert share == pytest.approx(wanted.get(token, min(wanted.values())))


def test_a_table_of_few_or_no_tokens_says_nothing() -> None:
    for documents in ([], [[1]], [[1, 2]]):
        table = NgramTable(joined(documents), VOCAB)
        assert table.following([1]) == table.following([0, 1, 2]) == table.following([]) == {}
    assert NgramTable(joined([[1, 2] * 9]), VOCAB).nbytes > 0


def test_ids_of_a_large_vocabulary_stay_apart() -> None:
    vocab = 262_144
    table = NgramTable(joined([[vocab - 1, vocab - 2, vocab - 3, vocab - 4]] * 3), vocab)
    assert table.following([vocab - 1, vocab - 2, vocab - 3]).keys() == {vocab - 4}


# --------------------------------------------------------------------------------------------------------- the rounds


@pytest.fixture(scope="module", params=["llama", "qwen3", "glm4"])
def lm(request: pytest.FixtureRequest) -> CausalLM:
    """All of a head turns, or a part."""
    return CausalLM.from_hf(tiny(request.param, head_dim=16).float(), linear="panels")


def text_of(lm: CausalLM) -> list[int]:
    """A text that repeats itself, and then does not."""
    return [*[7, 8, 9, 11] * 3, 30, 7, 8]


def begun(lm: CausalLM, text: list[int]) -> Cache:
    cache = lm.new_cache(1, 64)
    lm.prefill([torch.tensor(text[:-1])], cache)
    return cache


def plain(lm: CausalLM, text: list[int], count: int, drawing: Drawing | None = None) -> tuple[list[int], Cache]:
    """Rounds without guesses, and the cache with what they wrote."""
    cache = begun(lm, text)
    ran = lm.rounds(text[-1:], cache, count, [True], (), drawing=drawing)
    cache.advance([count])
    return [row[0] for row in ran.tokens], cache


def table_of(lm: CausalLM, text: list[int], wrong: bool = False) -> NgramTable:
    """One that knows what the model writes after a text, or the token beside each of them."""
    free, _ = plain(lm, text, 16)
    grams = [[*text, *free][at : at + 4] for at in range(len(text) - 3, len(text) + 13)]
    grams = [[*gram[:3], (gram[3] + wrong) % lm.vocab_size] for gram in grams]
    return NgramTable(joined(grams * 3), lm.vocab_size)


def run(
    lm: CausalLM, text: list[int], guesses: Guesses, wanted: int, most: int, drawing: Drawing | None = None
) -> tuple[Ran, Cache]:
    cache = begun(lm, text)
    ran = lm.rounds(text[-1:], cache, most, [True], (), drawing=drawing, guessed=GuessedRounds(guesses, text, wanted))
    assert cache.lengths == [len(text) - 1], "the caller says what is committed"
    assert sorted(ran.times) == ran.times and len(ran.times) <= len(ran.tokens) <= most
    return ran, cache


@kernels
@pytest.mark.parametrize("known", ["nothing", "right", "wrong"])
def test_rounds_with_guesses_write_what_rounds_without_write(lm: CausalLM, known: str) -> None:
    text = text_of(lm)
    free, twin = plain(lm, text, 12)
    table = None if known == "nothing" else table_of(lm, text, wrong=known == "wrong")
    ran, cache = run(lm, text, Guesses(6, table, least=0.0), wanted=12, most=12)
    assert [row[0] for row in ran.tokens] == free
    length = len(text) - 1 + 12  # of tokens that passes have read
    torch.testing.assert_close(cache.store[:, :, :length], twin.store[:, :, :length], rtol=0, atol=0)
    if known == "right":
        assert len(ran.times) <= 4, "guesses that are right save passes"
    assert ran.spent == len(ran.times), "without costs a pass is a pass"


@kernels
@pytest.mark.parametrize("known", ["nothing", "right", "wrong"])
def test_drawn_rounds_with_guesses_draw_what_rounds_without_draw(lm: CausalLM, known: str) -> None:
    """By the same luck, from the same distributions, to the bit."""
    text, luck = text_of(lm), torch.rand(12, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    luck[:6] = 0.0  # the first tokens in the order of ids, which the table does not know
    alone, beside = (Drawing(0.9, luck, torch.zeros(12, 1, lm.vocab_size)) for _ in range(2))
    free, twin = plain(lm, text, 12, alone)
    if known == "nothing":
        table = None
    else:
        grams = [[*text, *free][at : at + 4] for at in range(len(text) - 3, len(text) + 9)]
        table = NgramTable(
            joined([[*g[:3], (g[3] + (known == "wrong")) % lm.vocab_size] for g in grams] * 3), lm.vocab_size
        )
    ran, cache = run(lm, text, Guesses(6, table, least=0.0), 12, 12, beside)
    assert [row[0] for row in ran.tokens] == free and torch.equal(alone.probs, beside.probs)
    assert torch.equal(cache.store[:, :, : len(text) + 11], twin.store[:, :, : len(text) + 11])
    assert known != "right" or len(ran.times) <= 4


@kernels
def test_the_last_pass_may_yield_more_than_is_wanted(lm: CausalLM) -> None:
    text = text_of(lm)
    free, _ = plain(lm, text, 12)
    ran, _ = run(lm, text, Guesses(6, table_of(lm, text), least=0.0), wanted=1, most=12)
    assert len(ran.times) == 1 and 1 < len(ran.tokens) <= 7
    assert [row[0] for row in ran.tokens] == free[: len(ran.tokens)]
    bound, _ = run(lm, text, Guesses(6, table_of(lm, text), least=0.0), wanted=2, most=2)
    assert [row[0] for row in bound.tokens] == free[:2]


@kernels
def test_rounds_end_with_a_token_that_ends_a_text(lm: CausalLM) -> None:
    text = text_of(lm)
    free, _ = plain(lm, text, 12)
    place = next(at for at in range(2, 12) if free[at] not in free[:at])
    rounds = GuessedRounds(Guesses(6, table_of(lm, text), least=0.0), text, 12)
    ran = lm.rounds(text[-1:], begun(lm, text), 12, [True], [free[place]], guessed=rounds)
    assert [row[0] for row in ran.tokens] == free[: place + 1]


@kernels
def test_as_many_are_judged_as_pay(lm: CausalLM) -> None:
    """Sure guesses at 0.4 of a pass each pay, and none at 3 of a pass each."""
    text = text_of(lm)
    cheap, dear = ([1.0 + each * count for count in range(7)] for each in (0.1, 3.0))
    ran, _ = run(lm, text, Guesses(6, table_of(lm, text), cheap, least=0.0), 12, 12)
    assert len(ran.times) < 12 and ran.spent > len(ran.times)
    alone, _ = run(lm, text, Guesses(6, table_of(lm, text), dear, least=0.0), 12, 12)
    assert len(alone.times) == 12 and alone.spent == 12
    unlikely, _ = run(lm, text, Guesses(6, table_of(lm, text), least=1.1), 12, 12)
    assert len(unlikely.times) == 12


@kernels
def test_guesses_that_are_wrong_are_trusted_less(lm: CausalLM) -> None:
    """Tokens of which none is ever right pay at first, by what text and table say of them, and later seldom."""
    text, costs = text_of(lm), [1.0, 1.3, 1.6]
    guesses = Guesses(2, table_of(lm, text, wrong=True), costs, least=0.0)
    first, *others = (run(lm, text, guesses, 1, 1)[0] for _ in range(60))
    assert first.spent > 1.25 and sum(ran.spent for ran in others[-20:]) / 20 < 1.2
    guesses.reset()
    assert run(lm, text, guesses, 1, 1)[0].spent == first.spent


@kernels
@pytest.mark.parametrize(
    ("text", "path"),
    [
        ([5, 6] * 20, [5, 6, 5, 6, 5, 6]),
        ([3] * 40, [3] * 6),
        ([*range(10, 30)] * 2, [10, 11, 12, 13, 14, 15]),
        ([8, 9, 10, 11, 12, 8, 9], [10, 11]),  # no longer than what matched
        ([8, 20, 8, 21, 8, 21, 30, 8], [21]),
        ([4, 5, 6], []),
    ],
)
def test_a_text_that_repeats_itself_is_guessed_to_go_on(lm: CausalLM, text: list[int], path: list[int]) -> None:
    """How many guesses a pass judged, by what they cost; which ones, by what it left in the cache."""
    costs = [1.0 + 1e-4 * count for count in range(7)]
    ran, cache = run(lm, text, Guesses(6, None, costs), 1, 7)
    assert ran.spent == pytest.approx(1.0 + 1e-4 * len(path), abs=2e-5)
    twin = begun(lm, text)
    lm.forward(torch.tensor([[text[-1], *path]]), None, twin)
    slots = slice(0, len(text) + len(path))
    assert torch.equal(cache.store[:, :, slots], twin.store[:, :, slots])

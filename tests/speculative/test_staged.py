"""Staged drafts: a copy of 4 bits in the target's cache, lookups for it, and the number of tokens that pays."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.decoder import Guarantee
from methods.drafting import Context
from methods.engine import cpu_kernels
from methods.engine.causal_lm import CausalLM
from methods.engine.guesses import NgramTable
from methods.engine.sampling import Sampling
from methods.speculative.budget import ALLOWANCE, Costs
from methods.speculative.staged import ChainLength, Staged
from tests.helpers.rounded_targets import BY, rounded_target

GREEDY = Sampling()
COSTS = [[0, 4.8], [1, 1.0], [2, 1.05], [4, 1.15], [8, 1.4], [16, 1.9]]
kernels = pytest.mark.skipif(cpu_kernels.library() is None, reason="the kernels cannot be compiled here")


@pytest.fixture(scope="module", params=BY)
def target(request: pytest.FixtureRequest) -> CausalLM:
    return rounded_target(request.param, layers=4)


def begun(decoder: Staged, texts: list[list[int]], limit: int = 40) -> Context:
    """A decode of these texts, each of which ends with its root, before its first proposal."""
    target = decoder.target
    cache = target.new_cache(len(texts), max(map(len, texts)) + limit + 2 * decoder.drafter.nodes)
    decoder.drafter.reset([text[:-1] for text in texts], limit)
    output = target.prefill([torch.tensor(text[:-1]) for text in texts], cache)
    root = torch.tensor([text[-1] for text in texts])
    return Context(texts, root, output, None, decoder.sampling, torch.Generator().manual_seed(0), cache=cache)


def written(view: CausalLM, target: CausalLM, text: list[int], count: int) -> list[int]:
    """What a view writes after a text whose states are the target's."""
    cache, last, new = target.new_cache(1, len(text) + count), text[-1], list[int]()
    target.prefill([torch.tensor(text[:-1])], cache)
    while len(new) < count:
        last = int(view.forward(torch.tensor([[last]]), None, cache).logits.argmax())
        cache.advance([1])
        new.append(last)
    return new


# --------------------------------------------------------------------------------------------------------- the drafts


@kernels
@pytest.mark.parametrize("lookup", [False, True])
def test_a_chain_is_what_the_copy_writes_after_the_targets_states(target: CausalLM, lookup: bool) -> None:
    decoder = Staged(target, GREEDY, gamma=7, lookup=lookup, alone=99)
    pattern = checks.prompts(target.vocab_size, (6,))[0].tolist()
    for text in (pattern, [*pattern * 3, pattern[0]], [3] * 9):
        context = begun(decoder, [text])
        draft = decoder.drafter.propose(context)
        assert draft.tokens[0].tolist() == written(decoder.drafter.light, target, text, 7)
        assert draft.is_chain and draft.gains is None and context.cache is not None
        assert context.cache.lengths == [len(text) - 1], "what was drafted is not committed"
        assert 1 <= draft.passes <= 7
        if not lookup:
            assert draft.passes == 7


@kernels
@pytest.mark.parametrize(("wrong", "passes"), [(None, 3), (1, 6), (0, 12)])
def test_guesses_save_the_copy_passes(target: CausalLM, wrong: int | None, passes: int) -> None:
    """Of chains of three tokens from a table, of which every one at ``wrong`` is not what the copy writes."""
    text = [5, 6, 7]
    plain = Staged(target, GREEDY, lookup=False).drafter.light
    if not plain.rounds_fused:
        pytest.skip("the copy judges guesses in the kernels alone")
    whole = [*text, *written(plain, target, text, 16)]
    if len({tuple(whole[at : at + 3]) for at in range(16)}) < 16:
        pytest.skip("the copy repeats itself")
    grams = [[-1, *whole[at : at + 4]] for at in range(16)]
    if wrong is not None:
        for number, gram in enumerate(grams):
            gram[4] = (gram[4] + (number % (1 + wrong) == wrong)) % target.vocab_size
    table = NgramTable(np.array([token for gram in grams for token in gram * 3]), target.vocab_size)
    decoder = Staged(target, GREEDY, gamma=12, alone=99, guesses=3, table=table)
    assert decoder.drafter.guesses is not None
    decoder.drafter.guesses.least = 0.3  # only what the table is sure of
    draft = decoder.drafter.propose(begun(decoder, [text]))
    assert draft.tokens[0].tolist() == whole[3:15] and draft.passes == passes


@kernels
def test_rows_draft_together_what_they_draft_alone(target: CausalLM) -> None:
    decoder = Staged(target, GREEDY, gamma=4, alone=99)
    texts = [prompt.tolist() for prompt in checks.prompts(target.vocab_size, (3, 8, 5))]
    together = decoder.drafter.propose(begun(decoder, texts))
    for row, text in enumerate(texts):
        assert together.tokens[row].tolist() == written(decoder.drafter.light, target, text, 4)


@kernels
def test_a_long_match_is_drafted_without_the_copy(target: CausalLM) -> None:
    decoder = Staged(target, GREEDY, gamma=4, alone=3)
    text = [7, 8, 9, 10, 11, 12, 7, 8, 9]
    draft = decoder.drafter.propose(begun(decoder, [text]))
    assert draft.tokens.tolist() == [[10, 11, 12]] and draft.passes == 0
    assert Staged(target, GREEDY, gamma=4, lookup=False).drafter.nodes == 4
    none = Staged(target, GREEDY, gamma=4, alone=4)
    assert none.drafter.propose(begun(none, [text])).passes > 0


@kernels
@pytest.mark.parametrize(("share", "alone"), [(0.99, False), (0.3, True)])
def test_a_lookup_drafts_without_the_copy_where_it_promises_more_per_time(
    target: CausalLM, share: float, alone: bool
) -> None:
    """After a match of three tokens, the more rarely the copy's tokens were kept lately."""
    cheap = [[0, 1.6], *COSTS[1:]]
    decoder = Staged(target, GREEDY, gamma=8, costs=cheap)
    length, text = decoder.drafter.length, [7, 8, 9, 10, 11, 12, 7, 8, 9]
    context = begun(decoder, [text])
    length._kept, length._judged, length.account.balance = share * 100, 100.0, 4.0
    costs, gains = Costs.of(cheap), [3 / 4, 3 / 5, 3 / 6]
    by_lookup = max((1 + sum(gains[:n])) / costs.time(1 + n) for n in range(4))
    each = costs.draft / 8
    by_copy = max(sum(share**k for k in range(n + 1)) / (n * each + costs.time(1 + n)) for n in range(1, 9))
    assert (by_lookup > by_copy) == alone
    assert (decoder.drafter.propose(context).passes == 0) == alone


@kernels
def test_chains_end_with_the_text_and_before_its_limit(target: CausalLM) -> None:
    text = [4, 5, 6]
    free = written(Staged(target, GREEDY).drafter.light, target, text, 8)
    ended = target.skip()
    ended.eos_ids = frozenset({free[3]})
    first = free.index(free[3]) + 1
    for lookup in (False, True):
        draft = Staged(ended, GREEDY, gamma=8, lookup=lookup, alone=99)
        assert draft.drafter.propose(begun(draft, [text])).tokens[0].tolist() == free[:first]
        short = Staged(target, GREEDY, gamma=8, lookup=lookup, alone=99)
        context = begun(short, [text], limit=5)  # the root is the first of them, and a round commits one more
        assert short.drafter.propose(context).tokens.shape[1] == 3


@kernels
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_drawn_chains_report_what_they_were_drawn_from(
    target: CausalLM, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm, calls = Sampling(0.8, top_p=top_p), []
    decoder = Staged(target, warm, gamma=3, alone=1)
    context = begun(decoder, [[7, 8, 9, 7, 8]])
    rounds = decoder.drafter.light.rounds
    monkeypatch.setattr(
        decoder.drafter.light, "rounds", lambda *given, **named: calls.append(1) or rounds(*given, **named)
    )
    draft = decoder.drafter.propose(context)
    whole = top_p == 1.0 and decoder.drafter.light.rounds_fused
    assert len(calls) == whole, "the kernels draw from whole distributions in one call"
    assert draft.tokens.shape == (1, 3) and draft.probs is not None and draft.passes == 3
    light, cache = decoder.drafter.light, target.new_cache(1, 16)
    target.prefill([torch.tensor([7, 8, 9, 7])], cache)
    for place, token in enumerate([8, *draft.tokens[0, :-1].tolist()]):
        probs = warm.probs(light.forward(torch.tensor([[token]]), None, cache).logits[:, 0])
        torch.testing.assert_close(draft.probs[:, place], probs)
        cache.advance([1])
    assert context.cache is not None and context.cache.lengths == [4]


@kernels
def test_the_cache_holds_the_targets_states_alone(target: CausalLM) -> None:
    made, view = [], target.skip()
    new_cache = view.new_cache
    view.new_cache = lambda *shape: made.append(new_cache(*shape)) or made[-1]  # type: ignore[method-assign]
    decoder = Staged(view, GREEDY, gamma=5)
    prompt = checks.prompts(target.vocab_size, (7,))[0]
    text = checks.outputs(decoder, [prompt], 14)[0]
    length, twin = made[0].lengths[0], target.new_cache(1, 40)
    target.prefill([torch.cat([prompt, torch.tensor(text)])[:length]], twin)
    torch.testing.assert_close(made[0].store[:, :, :length], twin.store[:, :, :length], rtol=1e-4, atol=1e-4)
    assert decoder.guarantee is Guarantee.EXACT and decoder.memory()["copy"]


@kernels
@pytest.mark.parametrize("options", [{}, {"lookup": False, "gamma": 3}, {"costs": COSTS}, {"alone": 1}])
def test_texts_are_the_targets_alone_and_in_a_batch(target: CausalLM, options: dict) -> None:
    prompts = [*checks.prompts(target.vocab_size, (9, 3, 14)), torch.tensor([7, 8, 9] * 5)]
    wanted = checks.outputs(Autoregressive(target, GREEDY), prompts, 30)
    decoder = Staged(target, GREEDY, **options)
    assert checks.outputs(decoder, prompts, 30) == wanted
    assert [checks.outputs(decoder, [prompt], 30)[0] for prompt in prompts] == wanted
    shares = decoder.stats()
    assert shares["rounds_by_copy"] > 0 and 0.0 < shares["kept_of_the_copy"] <= 1.0
    assert sum(share for name, share in shares.items() if name.startswith("rounds_by_")) == pytest.approx(1.0, abs=1e-3)


# -------------------------------------------------------------------------------------------------- how long they are


def brute(length: ChainLength, share: float, each: float, costs: Costs, most: int) -> int:
    kept = list(accumulate([share] * most, lambda a, b: a * b))
    rates = [(1 + sum(kept[:n])) / (n * each + costs.time(1 + n)) for n in range(1, most + 1)]
    return 1 + rates.index(max(rates))


@pytest.mark.parametrize("share", [0.3, 0.6, 0.8, 0.9, 0.97, 0.995])
def test_a_chain_has_as_many_tokens_as_make_the_fastest_round(share: float) -> None:
    length = ChainLength(12)
    length.costs = Costs.of(COSTS)
    length.account.balance = 4.0
    for _ in range(200):
        length.note_drafted(12, 12)
        length._kept, length._judged = share * 100, 100.0
    assert length.each == pytest.approx(0.4)
    allowed = [n for n in range(1, 13) if n == 1 or n * 0.4 + length.costs.time(1 + n) - 1 <= 4.0 + ALLOWANCE]
    best = brute(length, share, 0.4, length.costs, max(allowed))
    rate = (1 + sum(share**n for n in range(1, best + 1))) / (best * 0.4 + length.costs.time(1 + best))
    assert length.choose(12) == (best, pytest.approx(rate))
    assert length.choose(2)[0] == min(best, brute(length, share, 0.4, length.costs, 2))


def test_without_costs_chains_are_whole_and_end_with_the_text() -> None:
    length = ChainLength(6)
    assert [length.choose(room)[0] for room in (100, 6, 2, 0, -3)] == [6, 6, 2, 0, 0]


def test_chains_that_are_not_kept_end_up_in_pauses_and_those_that_are_grow() -> None:
    lost, won = ChainLength(12), ChainLength(12)
    for length, kept in ((lost, 0.0), (won, 1.0)):
        length.costs = Costs.of(COSTS)
        chosen = []
        for _ in range(300):
            count = 0 if length.pauses() else length.choose(12)[0]
            chosen.append(count)
            if count:
                length.note_drafted(count, count)
                length.note_kept(count, kept * count, 1.0 - kept)
        if kept:
            assert chosen[-1] > 6 and 0 not in chosen
        else:
            spent = sum(count * 0.4 + length.costs.time(1 + count) - 1 for count in chosen if count)
            assert spent < 5.0 and chosen.count(0) > 280 and set(chosen[20:]) == {0, 1}


@kernels
def test_rounds_go_without_a_draft_where_lookups_and_copy_lose(target: CausalLM) -> None:
    """A text that repeats itself for a target that never keeps what is drafted."""
    decoder = Staged(target, GREEDY, gamma=4, alone=1, costs=COSTS)
    drafter, costs = decoder.drafter, Costs.of(COSTS)
    context = begun(decoder, [[7, 8] * 10], limit=400)
    lost, empty = 0.0, 0
    for token in [7, 8] * 100:
        before = dict(drafter.rounds)
        nodes = drafter.propose(context).tokens.shape[1]
        copied = drafter.rounds["copy"] > before["copy"]
        lost += costs.time(1 + nodes) - 1.0 + nodes * (costs.draft / 4 if copied else 0.0)
        empty += nodes == 0
        context.tokens[0].append(token)
    assert drafter.rounds["lookup"] and empty > 180 and lost < 8.0, (drafter.rounds, lost)


def test_lookups_make_a_token_cheaper() -> None:
    length = ChainLength(12)
    length.costs = Costs.of(COSTS)
    before = length.each
    for _ in range(50):
        length.note_drafted(10, 4)
    assert before == pytest.approx(0.4) and length.each == pytest.approx(0.4 * 0.4, rel=0.1)


@kernels
def test_costs_are_asked_for_and_taken(target: CausalLM) -> None:
    decoder = Staged(target, GREEDY, gamma=5, costs="auto")
    assert decoder.costs_wanted == 1 + 24 and decoder.drafter.length.costs is None
    decoder.use_costs(COSTS)
    assert decoder.costs_wanted == 0 and decoder.drafter.length.costs == Costs.of(COSTS)
    own, fused = decoder.drafter.guesses, decoder.drafter.light.rounds_fused
    assert not fused or (own is not None and own.costs is not None and len(own.costs) == 1 + own.nodes), "the copy's"
    decoder.forget_costs()
    assert decoder.costs_wanted and (own is None or own.costs is None)
    given = Staged(target, GREEDY, costs=COSTS)
    for _ in range(2):
        assert given.drafter.length.costs == Costs.of(COSTS)
        assert not fused or (given.drafter.guesses is not None and given.drafter.guesses.costs is not None)
        given.forget_costs()


# ------------------------------------------------------------------------------------------------------- its options


@kernels
def test_options_out_of_range_are_refused(target: CausalLM) -> None:
    with pytest.raises(ValueError, match="gamma >= 1 and alone >= 1, got gamma=0"):
        Staged(target, GREEDY, gamma=0)
    with pytest.raises(ValueError, match="guesses must be at least 0, got -1"):
        Staged(target, GREEDY, guesses=-1)
    with pytest.raises(ValueError, match="costs must be auto"):
        Staged(target, GREEDY, costs=[[1, 1.0]])
    with pytest.raises(ValueError, match="Layers rounded to 4 bits need bfloat16 or float32"):
        Staged(checks.tiny_target(), GREEDY)

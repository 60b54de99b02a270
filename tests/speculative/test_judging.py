"""Greedy verification on the host, and as a recorded round has it, keeps what the rule keeps."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from bench.contract import checks
from methods.drafting import ABSENT, Draft
from methods.engine.causal_lm import Output
from methods.engine.greedy_round import kept_path, settled
from methods.engine.sampling import Sampling
from methods.engine.token_tree import ancestors
from methods.speculative import judging
from methods.speculative.verification import DeterministicTree, Greedy, Typical

VOCAB, NODES = 2, 9


def made(shape, rows, seed):
    """Random drafts without equal siblings, some nodes absent at the end, and logits that often want a node."""
    rng = torch.Generator().manual_seed(seed)
    tokens, parents = torch.zeros(rows, NODES, dtype=torch.long), torch.zeros(rows, NODES, dtype=torch.long)
    for row in range(rows):
        used = set()
        for column in range(NODES):
            parent = column - 1 if shape == "chain" else int(torch.randint(-1, column, (1,), generator=rng))
            free = [token for token in range(VOCAB) if (parent, token) not in used]
            if not free:
                parent, free = column - 1, list(range(VOCAB))
            token = free[int(torch.randint(len(free), (1,), generator=rng))]
            used.add((parent, token))
            tokens[row, column], parents[row, column] = token, parent
        tokens[row, NODES - row % 3 :] = ABSENT
    logits = torch.randn(rows, 1 + NODES, VOCAB, generator=rng)
    return Draft(tokens, parents, levels=None if shape == "chain" else NODES, sizes=[NODES] * rows), logits


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_the_host_keeps_what_the_rule_keeps(shape, rows):
    for seed in range(40 // rows):
        draft, logits = made(shape, rows, seed)
        rule, sampling, rng = Greedy(), Sampling(), torch.Generator()
        device = judging._on_device(draft, logits, rule, sampling, rng, 0)
        for best in (None, logits.argmax(-1)):
            host = judging.judge(draft, Output(logits, logits, best=best), rule, sampling, rng)
            assert host.columns == device.columns and host.tokens == device.tokens
            assert torch.equal(host.bonus, device.bonus)
            width = host.path.shape[1]
            assert torch.equal(host.path, device.path[:, :width]) and (device.path[:, width:] == ABSENT).all()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_best_tokens_of_a_pass_are_the_bonus_of_greedy_rounds_only(temperature):
    """Of a pass that claims others than its logits, to tell the two apart."""
    logits, empty = torch.tensor([[[0.0, 40.0]], [[0.0, 40.0]]]), Draft.chain(torch.empty(2, 0, dtype=torch.long))
    output = Output(logits, logits, best=torch.zeros(2, 1, dtype=torch.long))
    judged = judging.judge(empty, output, Greedy(), Sampling(temperature), torch.Generator().manual_seed(0))
    assert judged.bonus.tolist() == ([0, 0] if temperature == 0.0 else [1, 1])


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_what_the_host_draws_has_the_law_of_the_rule(shape):
    """Cold, it keeps what the greedy rule keeps; warm, texts are as frequent as the target makes them."""
    draft, logits = made(shape, 40, 2)
    wanted = judging._on_device(draft, logits, Greedy(), Sampling(), torch.Generator(), 0)
    cold = judging.judge(draft, Output(logits, logits), DeterministicTree(), Sampling(1e-5), torch.Generator())
    assert (cold.columns, cold.tokens) == (wanted.columns, wanted.tokens) and torch.equal(cold.bonus, wanted.bonus)
    count, rng = 6000, torch.Generator().manual_seed(0)
    one = Draft(draft.tokens[:1].repeat(count, 1), draft.parents[:1].repeat(count, 1), levels=draft.levels)
    same, probs = logits[:1].expand(count, -1, -1), logits[0].softmax(-1)
    seen = Counter(map(tuple, judging.judge(one, Output(same, same), DeterministicTree(), Sampling(1.0), rng).tokens))
    expected, walks = {}, [((), -1, 1.0)]
    for text, node, chance in walks:
        for token in range(VOCAB):
            child = [c for c in range(NODES) if (draft.tokens[0, c], draft.parents[0, c]) == (token, node)]
            further = chance * float(probs[1 + node, token])
            if child:
                walks.append(((*text, token), child[0], further))
            else:
                expected[(*text, token)] = further
    assert set(seen) <= set(expected) and sum(expected.values()) == pytest.approx(1.0)
    common = [text for text, chance in expected.items() if chance * count > 5]
    counts = [seen[text] for text in common]
    share = sum(counts) / sum(expected[text] for text in common)
    assert len(common) > 3 and chisquare(counts, [expected[text] * share for text in common]).pvalue > 1e-3


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_recorded_round_keeps_what_the_rule_keeps(shape):
    draft, logits = made(shape, 60, 5)
    wanted = logits.argmax(-1)
    tokens = torch.cat([torch.zeros(60, 1, dtype=torch.long), draft.tokens], 1)
    parents = None if shape == "chain" else draft.parents
    reach = None if parents is None else ancestors(parents, NODES)
    path = kept_path(tokens, parents, reach, NODES, wanted)
    bonus, moved, report = settled(tokens, path, wanted)
    rule = judging._on_device(draft, logits, Greedy(), Sampling(), torch.Generator(), 0)
    assert torch.equal(path, rule.path) and torch.equal(bonus, rule.bonus)
    assert moved.tolist() == [len(new) for new in rule.tokens]
    assert torch.equal(report[:, : 1 + path.shape[1]], torch.cat([bonus[:, None], path], 1))
    assert max(map(len, rule.columns)) > 2, "some paths are long"


@pytest.mark.parametrize("rule", [Greedy(), Typical()])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_bonus_without_a_draft_is_that_of_an_empty_draft(rule, temperature):
    logits, sampling = torch.randn(5, 1, VOCAB), Sampling(temperature)
    empty = Draft.chain(torch.empty(5, 0, dtype=torch.long))
    judged = rule(empty, logits, sampling, torch.Generator().manual_seed(3))
    assert torch.equal(rule.bonus(logits[:, 0], sampling, torch.Generator().manual_seed(3)), judged.bonus)


def test_a_row_is_packed_as_a_batch_is():
    target, caches = checks.tiny_target(), []
    for _ in range(2):
        cache = target.new_cache(1, 40)
        target.prefill([torch.arange(5)], cache)
        target.forward(torch.arange(8)[None] + 9, torch.tensor([[-1, -1, 0, 2, 1, 4, 5]]), cache)
        caches.append(cache)
    caches[0].pack_row([0, 2, 3])
    caches[1].pack(torch.tensor([[0, 2, 3, ABSENT]]))
    assert torch.equal(caches[0].store[:, :, :9], caches[1].store[:, :, :9])


def test_lengths_grow_alike_on_host_and_device():
    cache = checks.tiny_target().new_cache(3, 40)
    for counts in ([2, 2, 2], [1, 0, 3], [4, 4, 4]):
        cache.advance(counts)
        assert cache.length.tolist() == cache.lengths
    with pytest.raises(AssertionError, match="asked to hold"):
        cache.advance([40, 1, 1])

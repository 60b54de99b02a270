"""The loop with drafters whose acceptance is known beforehand, and with random trees."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.contract import checks
from methods.drafting import ABSENT, Draft, StatelessDrafter
from methods.engine.sampling import Sampling, draw
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.prompt_lookup import PromptLookup
from methods.speculative.verification import (
    ChainRejection,
    DeterministicTree,
    Greedy,
    TreeWithoutReplacement,
    TreeWithReplacement,
)


@pytest.fixture(scope="module")
def target():
    return checks.tiny_target()


@pytest.fixture(scope="module")
def small_vocab():
    return checks.tiny_target(vocab_size=8, seed=3)


class Oracle:
    """Drafts the target's own greedy text, with the tokens at some draft positions made wrong."""

    hidden_layers = ()

    def __init__(self, target, nodes, wrong=()):
        self.target, self.nodes, self.wrong = target, nodes, set(wrong)

    def reset(self, prompts, limit):
        longest = limit + self.nodes + 1
        self.text = [p + checks.greedy_reference(self.target, torch.tensor(p), longest) for p in prompts]

    def keep_rows(self, rows):
        self.text = [self.text[row] for row in rows]

    def propose(self, context):
        rows = []
        for text, tokens in zip(self.text, context.tokens, strict=True):
            assert text[: len(tokens)] == tokens, "what was committed is not the target's greedy text"
            rows.append(text[len(tokens) : len(tokens) + self.nodes])
        tokens = torch.tensor([row + [0] * (self.nodes - len(row)) for row in rows])
        for place in self.wrong:
            tokens[:, place] = (tokens[:, place] + 1) % self.target.vocab_size
        return Draft.chain(tokens)


@pytest.mark.parametrize("limit", [1, 2, 7, 20])
def test_always_right_is_always_accepted(target, limit):
    decoder = SpeculativeDecoder(target, Sampling(), Oracle(target, 5), Greedy())
    batch = checks.prompts(target.vocab_size, (7, 1, 12))
    steps = list(decoder.decode(batch, limit, torch.Generator()))
    assert all(step.accepted == step.drafted for step in steps)
    assert len(steps) == 1 + -(-(limit - 1) // 6)


@pytest.mark.parametrize("place", [0, 2, 4])
def test_acceptance_ends_at_the_first_wrong_token(target, place):
    decoder = SpeculativeDecoder(target, Sampling(), Oracle(target, 5, wrong=[place]), Greedy())
    steps = list(decoder.decode(checks.prompts(target.vocab_size, (7, 3)), 15, torch.Generator()))
    assert all(n in (place, 0) for step in steps[1:] for n in step.accepted)
    assert steps[1].accepted == [place, place]


class RandomTrees(StatelessDrafter):
    """Trees of random shape; the greedy token hides in them now and then. Absent nodes at the end of some rows."""

    def __init__(self, vocab, nodes, seed=0):
        self.vocab, self.nodes = vocab, nodes
        self.generator = torch.Generator().manual_seed(seed)

    def propose(self, context):
        batch = len(context.tokens)
        tokens = torch.randint(0, self.vocab, (batch, self.nodes), generator=self.generator)
        parents = torch.stack(
            [torch.stack([torch.randint(-1, i, (), generator=self.generator) for i in range(self.nodes)])] * batch
        )
        tokens[::2, -2:] = ABSENT
        sizes = [self.nodes - 2 * (row % 2 == 0) for row in range(batch)]
        return Draft(tokens, parents, sizes=sizes, depths=sizes, levels=self.nodes)


@pytest.mark.parametrize("nodes", [1, 3, 12, 40])
def test_greedy_trees(small_vocab, nodes):
    def make(target, sampling):
        return SpeculativeDecoder(target, sampling, RandomTrees(8, max(nodes, 3)), Greedy())

    checks.check_greedy_identity(make, small_vocab)
    batch = checks.prompts(8, (4, 9, 1))
    found = checks.outputs(make(small_vocab, Sampling()), batch, 17)
    assert found == [checks.greedy_reference(small_vocab, prompt, 17) for prompt in batch]


def test_random_trees_are_sometimes_accepted(small_vocab):
    decoder = SpeculativeDecoder(small_vocab, Sampling(), RandomTrees(8, 12), Greedy())
    steps = list(decoder.decode(checks.prompts(8, (4, 9)), 40, torch.Generator()))
    assert max(n for step in steps for n in step.accepted) >= 2, "the tree path was never exercised"


def test_deterministic_trees_sample_the_target(small_vocab):
    checks.check_sampling(
        lambda t, s: SpeculativeDecoder(t, s, RandomTrees(8, 6), DeterministicTree()), small_vocab, Sampling(1.0)
    )


class DrawnTrees(StatelessDrafter):
    """Two levels of k children each, drawn from a fixed distribution with or without replacement."""

    def __init__(self, vocab, children, replacement):
        self.vocab, self.children, self.replacement = vocab, children, replacement
        self.nodes = children + children**2
        self.probs = torch.softmax(torch.linspace(1.0, -1.0, vocab, dtype=torch.double), 0)

    def propose(self, context):
        batch, k = len(context.tokens), self.children
        families = batch * (1 + k)
        if self.replacement:
            drawn = draw(self.probs.expand(families * k, -1), context.rng).view(families, k)
        else:
            drawn = torch.multinomial(self.probs.expand(families, -1), k, generator=context.rng)
        tokens = drawn.view(batch, self.nodes)
        parents = torch.tensor([-1] * k + [i for i in range(k) for _ in range(k)]).expand(batch, -1)
        probs = self.probs.expand(batch, self.nodes, -1)
        depths = [2] * batch
        return Draft(tokens, parents, probs, depths=depths, levels=2, width=k)


@pytest.mark.parametrize("children", [1, 2, 3])
@pytest.mark.parametrize("replacement", [True, False])
def test_drawn_trees_sample_the_target(small_vocab, children, replacement):
    rule = TreeWithReplacement() if replacement else TreeWithoutReplacement()
    checks.check_sampling(
        lambda t, s: SpeculativeDecoder(t, s, DrawnTrees(8, children, replacement), rule), small_vocab, Sampling(0.8)
    )


class TopTrees(DrawnTrees):
    """The most likely children, passed off as drawn."""

    def propose(self, context):
        draft = super().propose(context)
        return replace(draft, tokens=(torch.arange(self.nodes) % self.children).expand_as(draft.tokens))


def test_a_wrong_pairing_is_noticed(small_vocab):
    with pytest.raises(AssertionError, match="joint distribution differs"):
        checks.check_sampling(
            lambda t, s: SpeculativeDecoder(t, s, TopTrees(8, 3, True), TreeWithReplacement()),
            small_vocab,
            Sampling(0.8),
        )


def test_chain_rule_on_drawn_chains(small_vocab):
    checks.check_sampling(
        lambda t, s: SpeculativeDecoder(t, s, DrawnChain(8), ChainRejection()), small_vocab, Sampling(0.9, top_k=6)
    )


class DrawnChain(DrawnTrees):
    def __init__(self, vocab):
        super().__init__(vocab, 1, True)
        self.nodes = 3

    def propose(self, context):
        batch = len(context.tokens)
        tokens = draw(self.probs.expand(batch * 3, -1), context.rng).view(batch, 3)
        return Draft.chain(tokens, self.probs.expand(batch, 3, -1))


def test_a_draft_longer_than_any_pass_should_be_is_refused(target):
    with pytest.raises(ValueError, match=r"at most 4,096 tokens, got 100,000\. Set a smaller draft"):
        PromptLookup(target, Sampling(), gamma=100_000)

"""Lookahead: the window by hand, the pool, the tree a round scores, and auxiliary in the loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.contract import checks
from methods.drafting import ABSENT, AuxiliaryNodes, Context, Draft
from methods.engine import token_tree
from methods.engine.causal_lm import Output
from methods.engine.sampling import Sampling
from methods.speculative.lookahead import Lookahead, LookaheadDrafter, NgramPool, Window, auxiliary_parents
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.verification import Greedy
from tests.helpers.host_reads import no_host_reads
from tests.speculative.test_loop import Oracle, RandomTrees


@pytest.fixture(scope="module")
def target():
    return checks.tiny_target()


# -- auxiliary nodes in the loop -------------------------------------------------------------------------------


class WithScouts:
    """Another drafter with auxiliary behind its nodes: a chain from the root, and one child of the first draft node."""

    def __init__(self, drafter, vocab_size, chain=3):
        self.drafter, self.hidden_layers, self.chain, self.vocab_size = (
            drafter,
            drafter.hidden_layers,
            chain,
            vocab_size,
        )
        self.nodes = drafter.nodes + chain + 1
        self.contexts = []

    def reset(self, prompts, limit):
        self.drafter.reset(prompts, limit)
        self.contexts.clear()

    def keep_rows(self, rows):
        self.drafter.keep_rows(rows)

    def propose(self, context):
        self.contexts.append(replace(context, tokens=[list(row) for row in context.tokens]))
        draft = self.drafter.propose(context)
        batch, drafted = draft.tokens.shape
        chain = [-1, *range(drafted, drafted + self.chain - 1)]
        parents = torch.tensor([*chain, 0]).expand(batch, -1)
        tokens = torch.arange(batch * (self.chain + 1)).view(batch, -1) % self.vocab_size
        self.last = AuxiliaryNodes(tokens, parents, levels=self.chain, asked=2)
        return replace(draft, auxiliary=self.last)


@pytest.mark.parametrize("wrong", [[], [1], [0, 2]])
def test_scouts_change_nothing_of_a_chain(target, wrong):
    batch = checks.prompts(target.vocab_size, (7, 1, 12))

    def steps(drafter):
        return list(SpeculativeDecoder(target, Sampling(), drafter, Greedy()).decode(batch, 14, torch.Generator()))

    plain = steps(Oracle(target, 4, wrong))
    auxiliary_tokens = steps(WithScouts(Oracle(target, 4, wrong), target.vocab_size))
    assert [step.nodes for step in auxiliary_tokens[1:]] == [step.nodes + 4 for step in plain[1:]]
    assert [replace(step, nodes=0, draft_ns=0, pass_ns=0) for step in auxiliary_tokens] == [
        replace(step, nodes=0, draft_ns=0, pass_ns=0) for step in plain
    ]


def test_scouts_behind_trees_change_nothing(target):
    batch = checks.prompts(target.vocab_size, (4, 9))
    drafter = WithScouts(RandomTrees(target.vocab_size, 12), target.vocab_size)
    decoder = SpeculativeDecoder(target, Sampling(), drafter, Greedy())
    found = checks.outputs(decoder, batch, 15)
    assert found == [checks.greedy_reference(target, prompt, 15) for prompt in batch]


def test_what_stands_behind_the_scouts_comes_back(target):
    """The last of the chain sees root and chain; the child of the first draft node sees root, that node and itself."""
    drafter = WithScouts(Oracle(target, 2), target.vocab_size)
    decoder = SpeculativeDecoder(target, Sampling(), drafter, Greedy())
    decoder_steps = decoder.decode(checks.prompts(target.vocab_size, (7, 3)), 20, torch.Generator())
    for _ in range(3):
        next(decoder_steps)
    assert drafter.contexts[0].auxiliary_tokens == []
    before, after = drafter.contexts
    oracle, auxiliary = drafter.drafter, drafter.last.tokens.tolist()
    for row, text in enumerate(before.tokens):
        drafted = oracle.text[row][len(text)]
        behind_chain = checks.greedy_reference(target, torch.tensor(text + auxiliary[row][:3]), 1)
        behind_child = checks.greedy_reference(target, torch.tensor([*text, drafted, auxiliary[row][3]]), 1)
        assert after.auxiliary_tokens[row] == behind_chain + behind_child


# -- the window -------------------------------------------------------------------------------------------------------


def test_window_by_hand():
    """W = 3, N = 4: three levels, first guesses at even distances of the prompt, oldest level dropped."""
    window = Window([10, 11, 12, 13, 14], width=3, levels=3)
    assert window.levels == [[10, 11, 12], [11, 12, 13], [12, 13, 14]]
    window.anchor(99)
    assert window.auxiliary() == [11, 12, 11, 12, 13, 12, 13, 14]
    assert window.grams([20, 21, 22]) == [(99, 11, 12, 20), (11, 12, 13, 21), (12, 13, 14, 22)]
    window.advance([20, 21, 22])
    window.anchor(98)
    assert window.levels == [[98, 12, 13], [12, 13, 14], [20, 21, 22]]
    assert window.grams([30, 31, 32]) == [(98, 12, 20, 30), (12, 13, 21, 31), (13, 14, 22, 32)]


@pytest.mark.parametrize("prompt", [[5], [5, 6], list(range(50))])
def test_first_window_comes_from_the_prompt(prompt):
    window = Window(prompt, width=4, levels=2)
    tokens = {token for level in window.levels for token in level}
    assert tokens <= set(prompt) and len(tokens) == min(5, len(prompt))


def brute_force_visible(width, levels):
    """What each scout sees beside prefix and root, as the paper's figure 2 has it."""
    names = [(0, column) for column in range(1, width)]
    names += [(level, column) for level in range(1, levels) for column in range(width)]
    seen = []
    for level, column in names:
        first = {(0, c) for c in range(1, column + 1)}
        own = {(above, column) for above in range(1, level + 1)}
        seen.append({names.index(name) for name in first | own})
    return seen, [level + column for level, column in names]


@pytest.mark.parametrize("width, levels", [(1, 2), (2, 2), (3, 2), (4, 3), (15, 4)])
def test_window_attends_as_in_the_paper(width, levels):
    parents = torch.tensor([auxiliary_parents(width, levels)])
    reach = token_tree.ancestors(parents, width + levels)
    seen, positions = brute_force_visible(width, levels)
    assert [set(row.nonzero().flatten().tolist()) for row in reach[0, 1:, 1:]] == seen
    assert token_tree.depths(reach)[0, 1:].tolist() == positions
    assert max(positions) == width + levels - 2


# -- the pool ---------------------------------------------------------------------------------------------------------


def test_pool_keeps_the_newest_of_every_key():
    pool = NgramPool(2)
    for gram in [(1, 2, 3), (1, 4, 5), (7, 8, 9), (1, 2, 3), (1, 6, 6)]:
        pool.add(gram)
    assert pool.find(1) == [(6, 6), (2, 3)]
    assert pool.find(7) == [(8, 9)] and pool.find(2) == []


def test_trie_merges_common_beginnings():
    tokens, parents = token_tree.trie([(1, 2, 3), (4, 2, 3), (1, 2, 5), (1, 2, 3)])
    assert tokens == [1, 2, 3, 4, 2, 3, 5] and parents == [-1, 0, 1, -1, 3, 4, 1]
    assert token_tree.trie([]) == ([], [])


# -- the drafter ------------------------------------------------------------------------------------------------------


def context_of(tokens, auxiliary_tokens=()):
    none = torch.empty(len(tokens), 1, 0)
    root = torch.tensor([row[-1] for row in tokens])
    return Context(tokens, root, Output(none, none), None, Sampling(), torch.Generator(), list(auxiliary_tokens))


def test_rounds_by_hand():
    """W = 2, N = 3, G = 2 over two rows: what is drafted after each answer of a target that exists on paper only."""
    drafter = LookaheadDrafter(window=2, ngram=3, guesses=2, pool_from_prompt=False)
    drafter.reset([[1, 2, 3], [7]], limit=9)
    draft = drafter.propose(context_of([[1, 2, 3, 4], [7, 8]]))
    assert draft.tokens.shape == (2, 0) and draft.sizes == draft.depths == [0, 0]
    assert draft.auxiliary.tokens.tolist() == [[2, 2, 3], [7, 7, 7]]
    assert draft.auxiliary.parents.tolist() == [[-1, -1, 0]] * 2
    assert (draft.auxiliary.levels, draft.auxiliary.asked) == (2, 2)
    # grams of row 0: (4, 2, 5), (2, 3, 6); of row 1: (8, 7, 8), (7, 7, 9)
    draft = drafter.propose(context_of([[1, 2, 3, 4, 2], [7, 8, 8]], [[5, 6], [8, 9]]))
    assert draft.tokens.tolist() == [[3, 6], [7, 8]] and draft.parents.tolist() == [[-1, 0]] * 2
    assert draft.auxiliary.tokens.tolist() == [[3, 5, 6], [7, 8, 9]]
    assert draft.auxiliary.parents.tolist() == [[-1, -1, 2]] * 2
    # grams of row 0: (2, 5, 7), (3, 6, 8); of row 1: (8, 8, 1), (7, 9, 2)
    draft = drafter.propose(context_of([[1, 2, 3, 4, 2, 3, 6, 2], [7, 8, 8, 3]], [[7, 8], [1, 2]]))
    assert draft.tokens.tolist() == [[5, 7, 3, 6], [ABSENT] * 4]
    assert draft.parents[0].tolist() == [-1, 0, -1, 2]
    assert (draft.sizes, draft.depths, draft.max_depth, draft.width) == ([4, 0], [2, 0], 2, 2)


def test_prompt_fills_the_pool():
    drafter = LookaheadDrafter(window=2, ngram=3, guesses=1, pool_from_prompt=True)
    drafter.reset([[4, 5, 6, 4, 7, 8], [1]], limit=9)
    draft = drafter.propose(context_of([[4, 5, 6, 4, 7, 8, 4], [1, 1]]))
    assert draft.tokens.tolist() == [[7, 8], [ABSENT, ABSENT]]


@pytest.mark.parametrize("pool_from_prompt", [True, False])
def test_what_is_written_enters_the_pool_with_the_prompt(pool_from_prompt):
    """Of several tokens kept at once each ends an n-gram; rows that leave and rows that begin anew keep their texts."""
    drafter = LookaheadDrafter(window=1, ngram=3, guesses=3, pool_from_prompt=pool_from_prompt)
    drafter.reset([[1], [2, 3]], limit=9)
    drafter.propose(context_of([[1, 5], [2, 3, 4]]))
    drafter.skip(context_of([[1, 5, 6, 7, 8], [2, 3, 4, 9]]))
    grams = [[pool.find(key) for key in range(1, 8)] for pool in drafter._pools]
    assert grams[0] == ([[(5, 6)], [], [], [], [(6, 7)], [(7, 8)], []] if pool_from_prompt else [[]] * 7)
    assert grams[1] == ([[], [(3, 4)], [(4, 9)], [], [], [], []] if pool_from_prompt else [[]] * 7)
    drafter.keep_rows([1])
    drafter.reset_rows({0: [6, 6, 7]})
    draft = drafter.propose(context_of([[6, 6, 7, 6]]))
    assert draft.tokens.tolist() == ([[7, 6, 6, 7]] if pool_from_prompt else [[]])


@pytest.mark.parametrize("window, ngram, guesses", [(15, 5, 15), (1, 3, 1), (4, 3, 4)])
def test_a_round_fits_the_declared_nodes(target, window, ngram, guesses):
    decoder = Lookahead(target, Sampling(), window, ngram, guesses, pool_from_prompt=True)
    most = decoder.drafter.nodes
    assert most == (ngram - 1) * (window + guesses) - 1
    steps = list(decoder.decode(checks.prompts(target.vocab_size, (40, 9)), 40, torch.Generator()))
    assert all(step.nodes <= 1 + most for step in steps)
    assert all(max(step.drafted) <= guesses * (ngram - 1) for step in steps)
    assert max(step.drafted[0] for step in steps) > 0


def test_a_full_match_is_followed_by_the_bonus(target):
    """The target repeats itself (8 tokens, greedy); once the pool holds the cycle, whole n-grams are kept."""
    small = checks.tiny_target(vocab_size=8, seed=3)
    decoder = Lookahead(small, Sampling(), window=6, ngram=4, guesses=6)
    steps = list(decoder.decode(checks.prompts(8, (9,)), 60, torch.Generator()))
    assert max(step.accepted[0] for step in steps) == 3
    assert max(len(step.tokens[0]) for step in steps) == 4


def test_a_round_reads_nothing_from_the_device(target):
    drafter = LookaheadDrafter(window=4, ngram=3, guesses=4, pool_from_prompt=True)
    drafter.reset([[1, 2, 1, 2, 1]], limit=9)
    with no_host_reads():
        drafter.propose(context_of([[1, 2, 1, 2, 1, 2]], [[3, 4, 5, 6]]))


@pytest.mark.parametrize("options", [{"window": 0}, {"ngram": 2}, {"guesses": 0}])
def test_refuses(options, target):
    with pytest.raises(ValueError, match="needs window >= 1, ngram >= 3 and guesses >= 1, got "):
        Lookahead(target, Sampling(), **options)


def test_a_draft_without_scouts_is_what_it_was():
    assert Draft.chain(torch.zeros(1, 3, dtype=torch.long)).auxiliary is None

"""Token recycling: tree, matrix and fill by hand. Suffix decoding: the automaton against a naive search."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.contract import checks
from methods.drafting import ABSENT, Context
from methods.engine import token_tree
from methods.engine.causal_lm import Output
from methods.engine.sampling import Sampling, top_candidates
from methods.engine.token_tree import Shape
from methods.speculative.suffix_decoding import SuffixAutomaton, SuffixDecoding, SuffixDrafter
from methods.speculative.token_recycling import (
    TREES,
    CandidateMatrix,
    RecyclingDrafter,
    TokenRecycling,
)
from tests.helpers.host_reads import no_host_reads

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target():
    return checks.tiny_target()


@pytest.fixture(scope="module")
def small_vocab():
    return checks.tiny_target(vocab_size=8, seed=3)


def context_of(tokens, logits, path=None):
    root = torch.tensor([row[-1] for row in tokens])
    kept = None if path is None else torch.tensor(path)
    return Context(tokens, root, Output(logits, logits), kept, Sampling(), torch.Generator())


# -- shapes -----------------------------------------------------------------------------------------------------------


def paths_of(shape):
    """Ranks from the root to every node."""
    paths = []
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        paths.append((paths[parent] if parent >= 0 else ()) + (rank,))
    return paths


def test_the_papers_tree():
    shape = Shape.of_children(TREES["paper"])
    paths = paths_of(shape)
    assert Counter(map(len, paths)) == {1: 8, 2: 21, 3: 25, 4: 15, 5: 8, 6: 3}
    assert len(set(paths)) == 80 and shape.width == 8 and shape.level_ends == (8, 29, 54, 69, 77, 80)
    for path in paths:  # a node's elder siblings and, by the way the tree was found, its likelier cousins are there
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths
    deepest = [path for path in paths if len(path) == 6]
    assert deepest == [(0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 1), (0, 0, 0, 1, 0, 0)]
    assert {(1, 3), (0, 2, 1), (0, 7, 0), (1, 1, 0), (5, 0, 0), (0, 0, 4, 0), (3, 0, 0, 0)} <= set(paths)


@pytest.mark.parametrize("name", TREES)
def test_levels_of_named_trees(name):
    shape = Shape.of_children(TREES[name])
    depths = token_tree.depths(token_tree.ancestors(torch.tensor([shape.parents]), len(shape.level_ends)))[
        0, 1:
    ].tolist()
    assert depths == sorted(depths) == [len(path) for path in paths_of(shape)]
    assert all(parent < column for column, parent in enumerate(shape.parents))


def test_trailing_nodes_have_no_children():
    shape = Shape.of_children([[3], [0, 2], [1]])
    assert shape.parents == (-1, -1, -1, 1, 1, 3) and shape.ranks == (0, 1, 2, 0, 1, 0)
    assert shape.level_ends == (3, 5, 6) and Shape.of_children([]).parents == ()


@pytest.mark.parametrize("counts", [[[1, 1]], [[2], [1, 1, 1]], [[2], [0, 0]], [[2], []], [[-1]], [[2], [2, -1]]])
def test_impossible_trees_are_refused(counts):
    with pytest.raises(ValueError, match="at most one number of children per node"):
        Shape.of_children(counts)


# -- the matrix -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab, k", [(40, 3), (600, 2), (2048, 4), (2100, 8), (5000, 1)])
def test_top_candidates_are_those_of_topk(vocab, k):
    logits = torch.randn(2, 5, vocab, generator=torch.Generator().manual_seed(vocab), dtype=torch.double)
    logits[0, 0, :k] = 9.0 + torch.arange(k)  # all of them in one block
    assert torch.equal(top_candidates(logits, k), logits.topk(k).indices)


def test_of_equal_tokens_the_highest_rank_counts():
    matrix = CandidateMatrix(vocab_size=9, k=2, warm=False, device=CPU)
    matrix.reset(2)
    tokens = torch.tensor([[4, 5, 4, 4], [4, 4, 6, 6]])
    candidates = torch.arange(16).view(2, 4, 2) % 9
    matrix.learn(tokens, candidates, torch.tensor([[0, 1, 7, 3], [2, 1, -5, -4]]))
    ranks = torch.tensor([0, 1, 0, 1])
    assert matrix.find(torch.tensor([[4, 4, 5, 5], [4, 4, 6, 6]]), ranks).tolist() == [[4, 5, 2, 3], [8, 0, 5, 6]]
    assert matrix.find(torch.tensor([[1, 1, 6, 6], [5, 5, 0, 0]]), ranks).tolist() == [[0] * 4] * 2


def test_rounds_by_hand():
    """A tree of five nodes; every scored node teaches, the kept occurrence of a token overrides the others."""
    shape = Shape.of_children([[2], [2, 0], [1]])
    drafter = RecyclingDrafter(shape, vocab_size=6, warm=False, device=CPU)
    drafter.reset([[1, 2]], limit=9)
    after = torch.zeros(1, 1, 6)
    after[0, 0, [3, 4]] = torch.tensor([2.0, 1.0])
    draft = drafter.propose(context_of([[1, 2, 2]], after))  # the prompt ended in 2, the target chose 2 again
    assert draft.tokens.tolist() == [[3, 4, 0, 0, 0]] and draft.parents.tolist() == [[-1, -1, 0, 0, 2]]
    assert (draft.max_depth, draft.max_width) == (3, 2)
    # Scored: root 2, then 3 4 0 0 0. Kept: 3 and its child 0 (column 3); the bonus is 5.
    best = [(3, 1), (0, 5), (2, 2), (1, 1), (5, 3), (4, 4)]
    logits = torch.zeros(1, 6, 6)
    for node, (first, second) in enumerate(best):
        logits[0, node, second] = 1.0
        logits[0, node, first] = 2.0
    draft = drafter.propose(context_of([[1, 2, 2, 3, 0, 5]], logits, path=[[0, 1, 4, -1]]))
    # 5 is unknown, so 0 follows; 0 was scored three times, the kept one said 5 and 3.
    assert draft.tokens.tolist() == [[0, 0, 5, 3, 0]]
    other = drafter.propose(context_of([[1, 2, 2, 3, 0, 5, 2]], torch.zeros(1, 6, 6), path=[[0, -1, -1, -1]]))
    assert other.tokens[0, :2].tolist() == [3, 1], "what was learnt about 2 two rounds ago is still known"


def naive_matrix(matrix, scored, logits, path, k):
    """The update in words: off the path from the back to the front, then along the path."""
    kept = [node for node in path if node >= 0]
    order = [node for node in reversed(range(len(scored))) if node not in kept] + kept
    for node in order:
        matrix[scored[node]] = logits[node].topk(k).indices.tolist()


def naive_bigrams(prompt, k):
    """Candidates before anything was scored: what followed each token in the prompt, latest first, zeros behind."""
    matrix = {}
    for token in range(8):
        found = [prompt[place] for place in range(len(prompt) - 1, 0, -1) if prompt[place - 1] == token]
        matrix[token] = ([new for i, new in enumerate(found) if new not in found[:i]] + [0] * k)[:k]
    return matrix


def test_bigrams_fill_only_what_is_unknown():
    matrix = CandidateMatrix(vocab_size=9, k=2, warm=True, device=CPU)
    matrix.reset(2)
    matrix.learn(torch.tensor([[4], [5]]), torch.tensor([[[7, 8]], [[7, 8]]]))
    for row in range(2):
        matrix.suggest(row, [4, 5, 6, 5, 3, 5, 6, 4])
        matrix.suggest(row, [2])
    every = torch.tensor([[4, 4, 5, 5, 6, 6, 3, 3, 2, 2]] * 2)
    found = matrix.find(every, torch.tensor([0, 1] * 5)).tolist()
    assert found == [[7, 8, 6, 3, 4, 5, 5, 0, 0, 0], [5, 0, 7, 8, 4, 5, 5, 0, 0, 0]]


def test_drafts_equal_a_naive_twin(small_vocab):
    """The decoder's drafts on a real run, against dictionaries and loops."""
    shape = Shape.of_children(TREES["small"])
    paths = paths_of(shape)

    class Twin(RecyclingDrafter):
        def reset(self, prompts, limit):
            super().reset(prompts, limit)
            self.twins = [naive_bigrams(prompt, shape.width) for prompt in prompts]
            self.last = [[prompt[-1]] for prompt in prompts]

        def propose(self, context):
            draft = super().propose(context)
            for row, twin in enumerate(self.twins):
                path = [0] if context.path is None else context.path[row].tolist()
                naive_matrix(twin, self.last[row], context.output.logits[row], path, shape.width)
                nodes = {(): context.tokens[row][-1]}
                for ranks in paths:
                    nodes[ranks] = twin[nodes[ranks[:-1]]][ranks[-1]]
                self.last[row] = list(nodes.values())
                assert draft.tokens[row].tolist() == self.last[row][1:]
            return draft

    decoder = TokenRecycling(small_vocab, Sampling(), tree="small")
    decoder.drafter = Twin(shape, 8, False, CPU)
    steps = list(decoder.decode(checks.prompts(8, (9, 4)), 30, torch.Generator()))
    assert max(step.accepted[0] for step in steps) >= 2


def test_warm_keeps_the_matrix_and_the_text(target):
    first, second = checks.prompts(target.vocab_size, (11, 7))
    cold, warm = (TokenRecycling(target, Sampling(), tree="small", warm=warm) for warm in (False, True))
    for decoder in (cold, warm):
        checks.outputs(decoder, [first], 20)

    def steps(decoder, batch):
        return list(decoder.decode(batch, 20, torch.Generator()))

    again = [len(steps(decoder, [first])) for decoder in (cold, warm)]
    assert again[1] < again[0], "a warm matrix knows the text it has written before"
    for batch in ([second], [first, second, first], [second, first]):
        assert checks.outputs(warm, batch, 15) == checks.outputs(cold, batch, 15)


def test_a_round_of_recycling_reads_nothing_from_the_device():
    drafter = RecyclingDrafter(Shape.of_children(TREES["paper"]), 300, False, CPU)
    drafter.reset([[1, 2], [3]], limit=9)
    first = context_of([[1, 2, 5], [3, 4]], torch.randn(2, 1, 300))
    second = context_of([[1, 2, 5, 6], [3, 4, 4]], torch.randn(2, 81, 300), path=[[0, 3, -1], [0, -1, -1]])
    with no_host_reads():
        drafter.propose(first)
        drafter.propose(second)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tree": "large"}, "paper, small"),
        ({"tree": []}, "must have 1 to 61 children, .*got 0"),
        ({"tree": [[62]]}, "1 to 61"),
        ({"tree": [[2], [1, 1, 1]]}, "at most one number of children per node"),
    ],
)
def test_recycling_refuses(options, message, target):
    with pytest.raises(ValueError, match=message):
        TokenRecycling(target, Sampling(), **options)


# -- the suffix automaton ---------------------------------------------------------------------------------------------


def naive_match(text):
    """Length of the longest ending of a text that ends elsewhere in it too."""
    for length in range(len(text) - 1, 0, -1):
        if any(text[end - length : end] == text[-length:] for end in range(length, len(text))):
            return length
    return 0


def naive_followers(text, gram):
    """Behind each earlier occurrence: the token, and where it stands."""
    places = range(len(gram), len(text))
    return [(text[place], place) for place in places if text[place - len(gram) : place] == gram]


def texts():
    generator = random.Random(0)
    for alphabet, length in [(2, 40), (3, 60), (6, 80), (40, 60)]:
        for _ in range(6):
            yield [generator.randrange(alphabet) for _ in range(length)]
    yield [0] * 30
    yield [0, 1, 2] * 9 + [0]
    yield [0, 1, 0, 0, 1, 0, 1, 0, 0, 1, 0, 0, 1] * 2


@pytest.mark.parametrize("text", list(texts()), ids=lambda text: f"{len(text)}of{len(set(text))}")
def test_match_and_frequencies_equal_a_naive_search(text):
    automaton = SuffixAutomaton()
    for end in range(1, len(text) + 1):
        automaton.extend(text[end - 1 : end])
        state, length = automaton.match()
        assert length == naive_match(text[:end])
        if not length or end > 45:  # counts are exact while a text has few endings that occur elsewhere
            continue
        followers = naive_followers(text[:end], text[end - length : end])
        counts = Counter(token for token, _ in followers)
        latest = dict(followers)
        most = max(counts, key=lambda token: (counts[token], latest[token]))
        token, _, share = automaton.likeliest(state)
        assert (token, share) == (most, pytest.approx(counts[most] / len(followers)))


def test_states_stay_linear_and_appending_stays_cheap():
    """At most 2n - 1 states and 3n - 4 transitions, whatever the text (Blumer et al. 1985)."""
    for text in itertools.islice(texts(), 0, None, 3):
        automaton = SuffixAutomaton(text)
        assert len(automaton._next) <= 2 * len(text)
        assert sum(map(len, automaton._next)) <= max(3 * len(text) - 3, 2)


def test_empty_and_single_texts_match_nothing():
    assert SuffixAutomaton().match() == (0, 0) and SuffixAutomaton([5]).match()[1] == 0


def drafts(drafter, prompt, *continuations):
    drafter.reset([prompt], limit=99)
    text = list(prompt)
    for new in continuations:
        text += new
        draft = drafter.propose(context_of([text], torch.empty(1, 1, 0)))
    assert draft.sizes == [draft.tokens.shape[1]] and draft.is_chain
    return draft.tokens[0].tolist()


def test_a_draft_is_as_long_as_its_match():
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert drafts(SuffixDrafter(24, 1.0, 1, 0.1), prompt, [1, 2]) == [3, 4]
    assert drafts(SuffixDrafter(24, 1.5, 1, 0.1), prompt, [1], [2, 3]) == [4, 5, 6, 7]
    assert drafts(SuffixDrafter(3, 1.5, 1, 0.1), prompt, [1], [2, 3]) == [4, 5, 6]
    assert drafts(SuffixDrafter(24, 1.0, 3, 0.1), prompt, [1, 2]) == []
    assert drafts(SuffixDrafter(24, 1.0, 1, 0.1), prompt, [77]) == []


def test_repetitions_are_drafted_beyond_the_end_of_the_text():
    assert drafts(SuffixDrafter(7, 9.0, 1, 0.1), [0, 1, 2, 0, 1], [2, 0]) == [1, 2, 0, 1, 2, 0, 1]
    assert drafts(SuffixDrafter(5, 9.0, 1, 0.1), [4, 4, 4], [4]) == [4] * 5


def test_the_most_frequent_continuation_wins_and_rare_ones_end_the_draft():
    prompt = [1, 2, 8, 1, 3, 9, 1, 2, 7]
    assert drafts(SuffixDrafter(9, 9.0, 1, 0.0), prompt, [1])[:2] == [2, 7]
    assert drafts(SuffixDrafter(9, 9.0, 1, 0.6), prompt, [1]) == [2]
    assert drafts(SuffixDrafter(9, 9.0, 1, 0.7), prompt, [1]) == []


def naive_path(text, match, most, least):
    """The most frequent path after the last ``match`` tokens, by searching the whole text for every token."""
    string, path, prob, score = text[-match:], [], 1.0, 0.0
    while len(path) < most:
        followers = []
        while not followers:
            size = len(string)
            ends = [end for end in range(size, len(text)) if text[end - size : end] == string]
            followers, string = [(text[end], end) for end in ends], string if ends else string[1:]
        counts = Counter(token for token, _ in followers)
        token = max(counts, key=lambda t: (counts[t], max(end for other, end in followers if other == t)))
        prob *= counts[token] / len(followers)
        if prob < least:
            break
        score, path, string = score + prob, [*path, token], [*string, token]
    return score, path


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=30),
    st.integers(1, 6),
    st.sampled_from([1.0, 1.5, 3.0]),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.1, 0.4]),
)
def test_the_best_of_all_match_lengths_is_found(text, gamma, factor, least, floor):
    """As Arctic Inference scores them: the sum of the probabilities of a path; of equal scores the longer match."""
    best = (0.0, [])
    for match in range(1, len(text)):
        if not any(text[end - match : end] == text[-match:] for end in range(match, len(text))):
            break
        if match >= least:
            found = naive_path(text, match, min(gamma, int(factor * match)), floor)
            best = found if found[0] >= best[0] else best
    drafter = SuffixDrafter(gamma, factor, least, floor, "all")
    assert drafts(drafter, text[:-1], text[-1:]) == best[1]
    assert drafter.find(0, text).expected == best[0]


def test_a_shorter_match_with_surer_followers_can_win():
    text = [1, 2, 5, 1, 2, 6, 9, 2, 7, 8, 4, 2, 7, 8, 3, 2, 7, 8, 1]
    assert drafts(SuffixDrafter(2, 4.0, 1, 0.0), text, [2]) == [6, 9]  # after 1 2: once 5, once 6, the later one
    assert drafts(SuffixDrafter(2, 4.0, 1, 0.0, "all"), text, [2]) == [7, 8]  # after 2: three times of five


def test_rows_have_automata_of_their_own():
    drafter = SuffixDrafter(9, 2.0, 1, 0.1)
    drafter.reset([[1, 2, 3], [5, 6]], limit=9)
    draft = drafter.propose(context_of([[1, 2, 3, 1], [5, 6, 9]], torch.empty(2, 1, 0)))
    assert draft.tokens.tolist() == [[2, 3], [ABSENT, ABSENT]] and draft.sizes == [2, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"gamma": 0},
        {"min_match": 0},
        {"min_prob": 1.5},
        {"min_prob": -0.1},
        {"factor": 0.9},
        {"factor": float("nan")},
        {"factor": float("inf")},
    ],
)
def test_suffix_refuses(options, target):
    with pytest.raises(ValueError, match="(needs gamma >= 1|must be finite and at least 1).*, got "):
        SuffixDecoding(target, Sampling(), **options)


def test_suffix_accepts_whole_drafts_where_the_target_repeats_itself(small_vocab):
    decoder = SuffixDecoding(small_vocab, Sampling(), gamma=4)
    steps = list(decoder.decode(checks.prompts(8, (5,)), 80, torch.Generator()))
    assert max(step.accepted[0] for step in steps) == 4

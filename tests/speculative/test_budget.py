"""The number of nodes is the best one, a useless drafter costs no more than its bound, a good one is left alone."""

from __future__ import annotations

import math
import random
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.config import compose
from bench.contract import checks
from methods.drafting import ABSENT, Context, Draft, StatelessDrafter
from methods.engine.causal_lm import Output
from methods.engine.sampling import Sampling
from methods.speculative import budget
from methods.speculative.budget import Costs, Pace, Places, Ratio, Tally, Texts, affordable, size
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.prompt_lookup import PromptLookup
from methods.speculative.rest import Rest
from methods.speculative.rest_datastore import Datastore
from methods.speculative.suffix_decoding import SuffixDecoding
from methods.speculative.verification import DeterministicTree, Greedy

CPU = [[0, 0.1], [1, 1.0], [2, 1.16], [4, 1.18], [8, 1.4], [16, 1.73], [32, 2.54], [64, 4.15]]


@pytest.fixture(scope="module")
def target():
    return checks.tiny_target()


@pytest.fixture(scope="module")
def small_vocab():
    return checks.tiny_target(vocab_size=8)


# -- costs ------------------------------------------------------------------------------------------------------------


def test_costs_are_relative_to_a_pass_over_one_node():
    costs = Costs.of([[0, 5], [1, 10], [2, 12], [4, 20]])
    assert costs.draft == 0.5
    assert [costs.time(n) for n in (1, 2, 3, 4, 6)] == pytest.approx([1.0, 1.2, 1.6, 2.0, 2.8])
    assert Costs.of([[2, 3.0], [3, 4.5]]).time(1) == 1.0, "below the first pair its time holds"


@pytest.mark.parametrize(
    "pairs",
    [[], [[1, 1.0]], [[0, 0.1], [1, 1.0]], [[1, 1.0], [1, 2.0]], [[2, 1.0], [1, 2.0]], [[1, 0.0], [2, 1.0]], [[1], [2]],
     [[0, -0.1], [1, 1.0], [2, 2.0]], [[-1, 1.0], [2, 2.0]]],
)  # fmt: skip
def test_impossible_costs_are_refused(pairs):
    with pytest.raises(ValueError, match="costs must be auto, null, or two or more pairs .*, got "):
        Costs.given(pairs)


# -- size -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1), max_size=12), st.lists(st.floats(0, 0.5), min_size=13, max_size=13), st.floats(0, 0.5))
def test_the_size_is_the_best_one(gains, slopes, draft):
    gains = sorted(gains, reverse=True)
    times = [1.0 + sum(slopes[:n]) for n in range(13)]
    costs = Costs.of([[n + 1, time] for n, time in enumerate(times)])

    def rate(nodes):
        return (1 + sum(gains[:nodes])) / (draft + times[nodes])

    assert rate(size(gains, costs, draft)) >= max(map(rate, range(len(gains) + 1))) * (1 - 1e-9)
    some = {1, 3, 6}
    among = [n for n in range(len(gains) + 1) if n + 1 in some or n == 0]
    assert rate(size(gains, costs, draft, passes=some)) >= max(map(rate, among)) * (1 - 1e-9)


def test_a_round_risks_no_more_than_allowed():
    costs = Costs.of([[1, 1.0], [11, 2.0]])
    assert size([1.0] * 10, costs) == 10
    assert size([1.0] * 10, costs, most=0.35) == 3
    assert size([1.0] * 10, costs, draft=0.2, most=0.35) == 1
    assert size([0.09] * 10, costs) == 0, "each node costs a tenth of a pass"
    assert size([0.15] * 10, costs, base=3) > 0, "nodes beside the draft are paid anyway"


# -- what was kept ----------------------------------------------------------------------------------------------------


def test_longer_and_longer_pauses_between_texts_end_with_one_that_gains():
    costs, cheap, texts = Costs.of([[0, 0.5], [1, 1], [2, 1]]), Costs.of([[0, 0.1], [1, 1], [2, 1]]), Texts()
    assert not any(texts.sits_out(cheap, -1.0) for _ in range(5))
    gained, drafted = None, []
    for text in range(60):
        out = texts.sits_out(costs, gained)
        gained = None if out else -1.0
        if not out:
            drafted.append(text)
    assert drafted == [0, 2, 5, 10, 19, 36, 53]
    assert not texts.sits_out(costs, 1.0)
    assert texts.sits_out(costs, -1.0) and not texts.sits_out(costs, None), "the pause begins at one text again"


def test_a_drafter_is_affordable_if_good_drafts_would_pay():
    assert affordable(Costs.of([[0, 0.5], [1, 1], [2, 1.3], [8, 2.5]]), 5)
    assert affordable(Costs.of([[0, 2.0], [1, 1], [8, 1.1]]), 7), "a long chain pays where one node does not"
    assert not affordable(Costs.of([[0, 2.0], [1, 1], [8, 1.1]]), 2)
    assert not affordable(Costs.of([[0, 0.5], [1, 1], [2, 2], [8, 8]]), 7)


def test_a_ratio_follows_what_is_kept_and_fades():
    ratio = Ratio()
    assert ratio.value == 1.0
    for _ in range(30):
        ratio.note(0.2, 0.8)
    assert ratio.value == pytest.approx(0.25, abs=0.1)
    for _ in range(60):
        ratio.note(0.0, 0.0)
    assert ratio.value == pytest.approx(1.0, abs=0.05)


def test_places_learn_by_depth_and_rank():
    places, tree = Places(), [-1, -1, 0, 1, 2]  # two children of the root, one below each, one below the first of these
    before = places.gains(tree)
    assert all(gain <= before[parent] for gain, parent in zip(before, tree, strict=True) if parent >= 0)
    for _ in range(60):
        places.note(tree, [0])
    first, second, below, other, last = places.gains(tree)
    assert first > 0.8 > 0.2 > second and below < 0.2 and other <= second and last <= below


# -- pace -------------------------------------------------------------------------------------------------------------


class Chains(StatelessDrafter):
    """Chains of a length, with scores."""

    def __init__(self, nodes, score=0.9, passes=0, batch=1, promises=True):
        self.nodes, self.score, self.passes, self.batch, self.promises = nodes, score, passes, batch, promises
        self.proposed = self.skipped = 0

    def propose(self, context):
        self.proposed += 1
        draft = Draft.chain(torch.zeros(self.batch, self.nodes, dtype=torch.long), passes=self.passes)
        gains = [[self.score ** (n + 1) for n in range(self.nodes)]] * self.batch
        return replace(draft, gains=gains if self.promises else None)

    def skip(self, context):
        self.skipped += 1


def context(batch=1):
    return Context([[0]] * batch, torch.zeros(batch, dtype=torch.long), None, None, Sampling(), torch.Generator())


def simulate(drafter, pairs, accept, rounds, seed=0):
    """Tokens and time of so many rounds, where each node of a chain is kept with probability ``accept``."""
    costs, drawn, tally = Costs.of(pairs), random.Random(seed), Tally()
    pace, tokens, time = Pace(drafter, costs, tally), 0, 0.0
    for _ in range(rounds):
        asked = drafter.proposed
        draft = pace.propose(context(drafter.batch), [True] * drafter.batch)
        nodes = draft.tokens.shape[1]
        kept = next((n for n in range(nodes) if drawn.random() >= accept), nodes)
        pace.note([list(range(kept))] * drafter.batch, [True] * drafter.batch)
        tokens += 1 + kept
        time += costs.time(1 + nodes) + (costs.draft if drafter.proposed > asked else 0.0)
    return tokens, time, tally


def bound(rounds, draft):
    probe = draft + max(budget.RISK, Costs.of(CPU).time(2) - 1)
    return budget.ALLOWANCE + probe * (1 + math.log2(1 + rounds / 8))


@pytest.mark.parametrize("score, promises", [(0.99, True), (0.6, True), (0.5, False)])
@pytest.mark.parametrize("nodes", [1, 5, 60])
@pytest.mark.parametrize("draft", [0.0, 0.1, 0.5])
def test_a_useless_drafter_ends_up_undrafted(score, promises, nodes, draft):
    drafter = Chains(nodes, score, passes=1, promises=promises)
    for rounds in (10, 64, 128):
        tokens, time, _ = simulate(Chains(nodes, score, 1, 1, promises), [[0, draft], *CPU[1:]], 0.0, rounds)
        assert time - tokens <= bound(rounds, draft)
    tokens, time, tally = simulate(drafter, [[0, draft], *CPU[1:]], 0.0, 1000)
    if draft:
        assert drafter.proposed < 40 and drafter.proposed + drafter.skipped == 1000
    assert (time - tokens) / 1000 < 0.012 and tally.stats()["undrafted_rounds"] > 0.95


@pytest.mark.parametrize("accept", [0.6, 0.8])
@pytest.mark.parametrize("seed", range(3))
def test_a_good_drafter_is_not_throttled(accept, seed):
    tokens, time, tally = simulate(Chains(8, accept, 1), CPU, accept, 1000, seed)
    costs = Costs.of(CPU)
    expected = [accept**n for n in range(1, 9)]
    best = max((1 + sum(expected[:n])) / (costs.draft + costs.time(1 + n)) for n in range(9))
    assert tokens / time > 0.95 * best and tally.stats()["undrafted_rounds"] < 0.1


@pytest.mark.parametrize("promises", [True, False])
def test_a_drafter_that_turns_good_is_found_by_a_probe(promises):
    drafter = Chains(4, 0.8, 1, promises=promises)
    pace = Pace(drafter, Costs.of(CPU), Tally())
    kept = []
    for number in range(600):
        nodes = pace.propose(context(), [True]).tokens.shape[1]
        pace.note([list(range(nodes if number >= 300 else 0))], [True])
        kept.append(nodes)
    assert sum(map(bool, kept[200:300])) <= 5 and sum(map(bool, kept[-100:])) > 90


def test_an_overconfident_drafter_drafts_less():
    _, _, modest = simulate(Chains(12, 0.95, 1), CPU, 0.5, 400)
    _, _, honest = simulate(Chains(12, 0.95, 1), CPU, 0.95, 400)
    assert modest.stats()["nodes_per_round"] < 3 < 8 < honest.stats()["nodes_per_round"]


def test_rounds_in_which_no_node_pays_let_the_past_fade():
    """One node pays only while its probability is believed: after a miss again some rounds later."""

    class One(Chains):
        def propose(self, context):
            return replace(Draft.chain(torch.zeros(1, 1, dtype=torch.long)), gains=[[0.6]])

    pace, drafted = Pace(One(1), Costs.of([[1, 1.0], [2, 1.5]]), Tally()), []
    for number in range(20):
        drafted += [number] * pace.propose(context(), [True]).tokens.shape[1]
        pace.note([[]], [True])
    assert drafted[0] == 0 and len(drafted) > 1 and drafted[1] > 5


def test_parts_of_a_tree_are_calibrated_apart():
    """One of two parts promises as much and nothing of it is kept; the other's nodes go on being drafted."""

    class Parts(StatelessDrafter):
        nodes = 4

        def propose(self, context):
            tokens, parents = torch.tensor([[10, 11, 20, 21]]), torch.tensor([[-1, 0, -1, 2]])
            gains, sources = [[0.6, 0.5, 0.6, 0.5]], [["a", "a", "b", "b"]]
            return Draft(tokens, parents, sizes=[4], depths=[2], levels=2, width=2, gains=gains, sources=sources)

    pace, drafted = Pace(Parts(), Costs.of([[1, 1.0], [5, 1.4]]), Tally()), []
    for _ in range(100):
        tokens = pace.propose(context(), [True]).tokens[0].tolist()
        pace.note([[tokens.index(token) for token in (20, 21) if token in tokens]], [True])
        drafted.append(tokens)
    assert drafted[0] == [10, 11, 20, 21]
    assert drafted[50:] == [[20, 21]] * 50


def test_a_part_that_does_not_pay_sits_out_rounds_in_which_the_other_drafts():
    """Nothing of the network is kept, everything of the lookup; its gain does not pay for the network."""

    class Parts(StatelessDrafter):
        parts, nodes = ("lookup", "network"), 2

        def propose(self, context):
            return self.propose_by(context, self.parts)

        def propose_by(self, context, parts):
            asked.append(list(parts))
            if parts == ["lookup"]:
                return replace(Draft.chain(torch.tensor([[20]])), gains=[[0.6]], source="lookup")
            tokens, parents, sources = torch.tensor([[20, 10]]), torch.tensor([[-1, -1]]), [["lookup", "network"]]
            shape = {"sizes": [2], "depths": [1], "levels": 1, "width": 2, "source": "both"}
            return Draft(tokens, parents, gains=[[0.6, 0.5]], sources=sources, **shape)

    asked, rounds, costs = [], 1000, Costs.of([[0, 0.15], [1, 1.0], [3, 1.2]])
    pace, faded = Pace(Parts(), costs, Tally()), []
    pace._places.fade = lambda: faded.append(len(asked))
    for _ in range(rounds):
        tokens = pace.propose(context(), [True]).tokens[0].tolist()
        assert tokens[0] == 20, "the lookup paused"
        pace.note([[0]], [True])
    most = budget.ALLOWANCE + 0.25 * (1 + math.log2(1 + rounds / 8))
    assert 4 < sum(len(parts) == 2 for parts in asked) < most / 0.15
    assert not faded, "every round had a draft"


def test_nodes_of_a_part_are_those_beyond_the_parts_before_it():
    costs, sources = Costs.of([[1, 1.0], [2, 1.1], [4, 1.4]]), [["lookup", "network", "network"]]
    extra = budget._extra(["lookup", "network"], sources, costs, 0.2, 1, 3)
    assert extra == pytest.approx({"lookup": 0.1, "network": 0.3 + 0.2})
    assert budget._extra(["network"], [["network"]], costs, 0.2, 2, 1) == pytest.approx({"network": 0.25 + 0.2})


def test_rows_share_a_size_and_rows_that_ended_do_not_count():
    class Two(Chains):
        def propose(self, context):
            gains = [[0.9, 0.8, 0.7, 0.6], [0.02, 0.01, 0.0, 0.0]]
            return replace(Draft.chain(torch.zeros(2, 4, dtype=torch.long)), gains=gains)

    dear = Costs.of([[1, 1.0], [2, 1.3], [3, 1.7], [5, 3.0]])
    sizes = {
        rows: Pace(Two(4), dear, Tally()).propose(context(2), rows).tokens.shape
        for rows in ((True, True), (True, False), (False, True))
    }
    assert sizes == {(True, True): (2, 1), (True, False): (2, 2), (False, True): (2, 0)}


def test_a_tree_is_cut_to_its_best_nodes():
    class Tree(StatelessDrafter):
        nodes = 5
        trimmed = None

        def propose(self, context):
            tokens, parents = torch.tensor([[10, 11, 12, 13, 14]]), torch.tensor([[-1, -1, 0, 1, 2]])
            return Draft(tokens, parents, levels=3, width=2, passes=1, gains=torch.tensor([[0.4, 0.9, 0.1, 0.8, 0.1]]))

        def trim(self, columns):
            self.trimmed = columns.tolist()

    drafter = Tree()
    pace = Pace(drafter, Costs.of([[1, 1.0], [4, 1.3], [5, 2.0]]), Tally())
    draft = pace.propose(context(), [True])
    assert drafter.trimmed == [[0, 1, 3]]
    assert (draft.tokens.tolist(), draft.parents.tolist()) == ([[10, 11, 13]], [[-1, -1, 1]])
    assert (draft.sizes, draft.depths, draft.levels, draft.width, draft.passes) == ([3], [2], 2, 2, 1)
    chain = Pace(Tree(), Costs.of([[1, 1.0], [3, 1.2], [4, 2.0]]), Tally()).propose(context(), [True])
    assert chain.is_chain and chain.tokens.tolist() == [[11, 13]]


def test_a_network_that_drafts_in_vain_while_the_host_searches_pays_for_it():
    class Both(Chains):
        """A lookup that always finds something, and a network that was launched beside it."""

        parts = ("lookup", "network")

        def launch(self, report, output, given):
            self.launched += 1
            return Draft.chain(torch.zeros(1, self.nodes, dtype=torch.long))

        def propose(self, given):
            return self.propose_by(given, self.parts)

        def propose_by(self, given, parts):
            return replace(super().propose(given), source="lookup")

    drafter = Both(4, 0.9)
    drafter.launched, output = 0, Output(torch.zeros(1, 1, 0), torch.zeros(1, 1, 4))
    pace = Pace(drafter, Costs.of([[0, 0.3], [1, 1.0], [5, 1.05]]), Tally())
    for _ in range(40):
        begun = pace.launch(torch.zeros(1, 2, dtype=torch.long), output, context())
        assert begun is None or not pace.whole(begun), "the host has to search first"
        pace.propose(context(), [True])
        pace.note([[0, 1, 2]], [True])
    assert pace.tally.undrafted == 0 and pace.tally.gained["lookup"] > 0.0 > pace.tally.gained["network"]
    assert 2 < drafter.launched < 10, "a network that is never used is launched for probes alone"


def test_recorded_rounds_judge_drafts_whole_where_their_nodes_cost_nothing():
    class Unread(Chains):
        """Its gains must not be read from the device."""

        def propose(self, context):
            return replace(super().propose(context), gains=torch.empty(1, self.nodes, device="meta"))

    flat, steep = Costs.of([[0, 0.1], [1, 1.0], [31, 1.19]]), Costs.of([[0, 0.1], [1, 1.0], [31, 1.22]])
    pace = Pace(Unread(30, 0.5), flat, Tally(), fixed_passes=True)
    for _ in range(20):
        assert pace.propose(context(), [True]).tokens.shape[1] == 30
        pace.note([[0]], [True])
    for _ in range(80):
        pace.propose(context(), [True])
        pace.note([[]], [True])
    assert 0 < pace.tally.undrafted < 80, "what drafting takes is booked all the same"
    for costs, fixed in ((steep, True), (flat, False)):
        with pytest.raises(NotImplementedError):
            Pace(Unread(30, 0.5), costs, Tally(), fixed_passes=fixed).propose(context(), [True])


def test_without_costs_everything_is_drafted():
    drafter = Chains(30, 0.01)
    pace = Pace(drafter, None, Tally())
    for _ in range(50):
        assert pace.propose(context(), [True]).tokens.shape[1] == 30
        pace.note([[]], [True])
    assert drafter.skipped == 0


# -- whole decoders ---------------------------------------------------------------------------------------------------


class RandomTrees(StatelessDrafter):
    """Trees of random shape and tokens, with or without scores; absent nodes at the end of some rows."""

    def __init__(self, vocab, nodes, scores):
        self.vocab, self.nodes, self.scores = vocab, nodes, scores
        self.generator = torch.Generator().manual_seed(0)

    def propose(self, context):
        batch, draw = len(context.tokens), self.generator
        tokens = torch.randint(0, self.vocab, (batch, self.nodes), generator=draw)
        parents = torch.stack(
            [torch.stack([torch.randint(-1, i, (), generator=draw) for i in range(self.nodes)])] * batch
        )
        tokens[::2, -2:] = ABSENT
        sizes = [self.nodes - 2 * (row % 2 == 0) for row in range(batch)]
        gains = torch.rand(batch, self.nodes, generator=draw) if self.scores else None
        return Draft(tokens, parents, sizes=sizes, depths=sizes, levels=self.nodes, gains=gains)


@pytest.mark.parametrize("scores", [True, False])
def test_cut_trees_keep_the_contract(scores, small_vocab):
    def make(rule):
        return lambda t, s: SpeculativeDecoder(t, s, RandomTrees(8, 9, scores), rule, [[1, 1.0], [6, 1.1], [12, 4.0]])

    checks.check_greedy_identity(make(Greedy()), small_vocab)
    checks.check_batch(make(Greedy()), small_vocab)
    checks.check_counters(make(Greedy()), small_vocab)
    checks.check_sampling(make(DeterministicTree()), small_vocab, Sampling(1.0))
    decoder = make(Greedy())(small_vocab, Sampling())
    checks.outputs(decoder, checks.prompts(8, (4, 9)), 60)
    assert 0.0 < decoder.stats()["nodes_per_round"] < 6


def rest(target, texts, **options):
    with tempfile.TemporaryDirectory() as folder:
        Datastore.build(texts, target.vocab_size).save(Path(folder))
        return Rest(target, Sampling(), nodes=8, min_ngram=1, occurrences=64, checkpoint=Path(folder), **options)


@pytest.mark.parametrize("name", ["prompt_lookup", "rest"])
def test_a_lookup_drafts_less_where_nodes_are_dear_and_sits_out_rounds_that_lose(name, target):
    """The text is what it is with whole drafts, which no costs and costs of nothing both give."""
    prompts = checks.prompts(target.vocab_size, (9, 6))
    noise = [[random.Random(row).randrange(target.vocab_size) for _ in range(40)] for row in range(200)]
    make = {"prompt_lookup": partial(PromptLookup, target, Sampling()), "rest": partial(rest, target, noise)}[name]
    whole, dear, free = make(), make(costs=CPU), make(costs=[[1, 1.0], [64, 1.0001]])
    assert whole.costs_wanted == 0 and make(costs="auto").costs_wanted == 1 + whole.drafter.nodes
    texts = checks.outputs(whole, prompts, 80)
    assert checks.outputs(dear, prompts, 80) == checks.outputs(free, prompts, 80) == texts
    assert whole.stats() == {} and dear.stats()["nodes_per_round"] < free.stats()["nodes_per_round"]
    assert dear.stats()["undrafted_rounds"] > free.stats()["undrafted_rounds"]


@pytest.mark.parametrize("name", ["prompt_lookup", "rest"])
def test_a_lookup_is_sized_by_default_and_whole_on_request(name):
    assert compose.compose([f"method={name}"]).method["costs"] == "auto"
    assert compose.compose([f"method={name}", "method.costs=null"]).method["costs"] is None


def test_a_decoder_asks_for_costs_once(target):
    decoder = SuffixDecoding(target, Sampling(), gamma=6, costs="auto")
    assert decoder.costs_wanted == 7
    text = checks.prompts(target.vocab_size, (9,))
    whole = checks.outputs(decoder, text, 20)
    assert decoder.stats() == {}, "nothing is sized before costs are known"
    decoder.use_costs(CPU)
    assert decoder.costs_wanted == 0 and decoder.costs == Costs.of(CPU)
    assert checks.outputs(decoder, text, 20) == whole and decoder.stats().keys() == {
        "nodes_per_round",
        "undrafted_rounds",
    }
    assert SuffixDecoding(target, Sampling()).costs_wanted == 0
    assert SuffixDecoding(target, Sampling(), costs=CPU).costs == Costs.of(CPU)

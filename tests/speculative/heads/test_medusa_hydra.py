"""Medusa and Hydra: the tree, which state and which tokens a head reads, training, files, acceptance."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.decoder import Guarantee
from methods.engine.checkpoint_files import CONFIG, WEIGHTS
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import Sampling
from methods.speculative.budget import Costs
from methods.speculative.heads import candidate_tree, hydra, medusa
from methods.speculative.heads.candidate_tree import RANKS, TREES, Tree, accuracies, planned, search
from methods.speculative.heads.hydra import Block, HydraDrafter, HydraHeads
from methods.speculative.heads.hydra_training import HydraLearner, HydraTraining
from methods.speculative.heads.medusa import Medusa, MedusaDrafter
from methods.speculative.heads.medusa_training import DraftStates, MedusaLearner, MedusaTraining
from methods.training import trainer
from methods.training.answers import AnswerRecipe
from methods.training.features import Batch
from methods.training.interface import Example, TrainingContext
from methods.training.losses import DraftLoss
from methods.training.trainer import TrainingConfig
from tests.helpers import tiny_head_trees
from tests.helpers.host_reads import no_host_reads
from tests.helpers.tiny_head_trees import FACTS, counting_target, heads_of
from tests.helpers.tiny_heads import batch_of, learn_by_heart

MAKERS = {"medusa": tiny_head_trees.medusa, "hydra_heads": tiny_head_trees.hydra}
LEARNERS = {"medusa": MedusaLearner, "hydra_heads": HydraLearner}
TRAININGS = {"medusa": MedusaTraining, "hydra_heads": HydraTraining}
DECODERS = {"medusa": Medusa, "hydra_heads": HydraHeads}
both = pytest.mark.parametrize("name", DECODERS)


@pytest.fixture(scope="module")
def target():
    return checks.tiny_target()


@pytest.fixture(scope="module")
def counter():
    return counting_target()


@pytest.fixture(scope="module")
def texts(target):
    batch = checks.prompts(target.vocab_size, (3, 9, 5, 14))
    rows = checks.outputs(Autoregressive(target, Sampling()), batch, 24)
    return tuple(tuple(prompt.tolist() + row) for prompt, row in zip(batch, rows, strict=True))


def prompts_of(texts):
    return [torch.tensor(text[:-24]) for text in texts]


def decode(decoder, batch, limit=20, seed=0):
    return list(decoder.decode(batch, limit, torch.Generator().manual_seed(seed)))


def stored(name, target, texts, folder):
    """A part as training leaves it."""
    heads_of(LEARNERS[name], target, texts).save(folder, target, FACTS)
    return folder


# -- the tree ---------------------------------------------------------------------------------------------------------


def test_the_published_tree():
    paths = TREES["mc_sim_7b_63"]
    assert len(set(paths)) == 63 and [sum(len(p) == n for p in paths) for n in (1, 2, 3, 4)] == [10, 28, 23, 2]
    for place, path in enumerate(paths):
        assert len(path) == 1 or path[:-1] in paths[:place], "a node stands behind its parent"
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths[:place], "and behind its likelier sibling"
    assert Tree(paths).levels == 4 and Tree(paths).width == 10 and max(max(path) for path in paths) == 9


def greedy_by_hand(ranks, nodes):
    """Node after node, each time the one that is kept most often among those whose parent is there."""
    tree: list[tuple[int, ...]] = []
    while len(tree) < nodes:
        open_ends = [
            (*parent, rank)
            for parent in [(), *tree]
            for rank in range(RANKS)
            if len(parent) < ranks.shape[1] and (*parent, rank) not in tree
        ]
        kept = {path: sum(tuple(row[: len(path)]) == path for row in ranks.tolist()) for path in open_ends}
        best = min(open_ends, key=lambda path: (-kept[path], len(path), path))
        if not kept[best]:
            break
        tree.append(best)
    return tree


def test_search_adds_the_best_node_each_time():
    rng = torch.Generator().manual_seed(0)
    ranks = (torch.rand(400, 3, generator=rng) ** 3 * 14).long().clamp(max=RANKS)
    found = search(ranks, 40)
    assert list(found.paths) == greedy_by_hand(ranks, 40)
    for path, value in zip(found.paths, found.values, strict=True):
        assert value == pytest.approx((ranks[:, : len(path)] == torch.tensor(path)).all(1).float().mean().item())
    assert found.tokens_per_step == pytest.approx(1 + sum(found.values))


def test_value_of_a_node_is_the_product_where_heads_are_independent():
    """The paper's value, from every combination of ranks in proportion to its probability."""
    shares = [[5, 3, 2], [6, 2, 2]]
    rows = [[a, b] for a, b in itertools.product(range(3), repeat=2) for _ in range(shares[0][a] * shares[1][b])]
    found = search(torch.tensor(rows))
    for path, value in zip(found.paths, found.values, strict=True):
        product = shares[0][path[0]] / 10 * (shares[1][path[1]] / 10 if len(path) == 2 else 1)
        assert value == pytest.approx(product)


def test_value_of_a_node_knows_that_heads_are_right_together():
    """Easy places, where both first candidates are right, and hard ones, where no second one is."""
    ranks = torch.tensor([[0, 0]] * 5 + [[1, RANKS]] * 5)
    found = search(ranks)
    assert found.paths == ((0,), (1,), (0, 0)) and found.values == (0.5, 0.5, 0.5), "the product would be 0.25"


def test_heads_that_are_never_right_draft_one_token():
    assert search(torch.full((7, 2), RANKS)) == Tree(((0,),), (0.0,))


def test_accuracies_are_those_of_the_judged():
    ranks = torch.tensor([[0, 1], [0, RANKS], [2, RANKS]])
    judged = torch.tensor([[True, True], [True, True], [True, False]])
    table = accuracies(ranks, judged)
    assert table[0][:4] == [0.6667, 0.0, 0.3333, 0.0] and table[1][:3] == [0.0, 0.5, 0.0] and len(table[0]) == RANKS


def test_shape_is_breadth_first():
    shape = Tree(((0,), (0, 0), (0, 0, 2), (1,), (1, 3), (0, 1))).shape()
    assert shape.parents == (-1, -1, 0, 0, 1, 2) and shape.ranks == (0, 1, 0, 1, 3, 2)
    assert shape.level_ends == (2, 5, 6)


def nodes_planned(values, pairs):
    tree = Tree(((0,), (1,), (0, 0), (0, 1)), values)
    return planned(tree, Costs.of(pairs)).paths


def test_a_tree_is_planned_by_costs():
    values = (0.5, 0.2, 0.1, 0.05)
    assert len(nodes_planned(values, ((1, 1.0), (64, 1.0)))) == 4, "where nodes are free all of them pay"
    assert nodes_planned(values, ((1, 1.0), (2, 1.01), (3, 1.3), (64, 9.0))) == ((0,), (1,)), "the best, and one more"
    # 1.7 / 1.1 pays, and 1.8 / 1.2 for the third node does not; but easier texts may want it, if it is no level deeper.
    assert nodes_planned(values, ((1, 1.0), (2, 1.05), (3, 1.1), (4, 1.2))) == ((0,), (1,))
    assert len(nodes_planned(values, ((1, 1.0), (2, 1.05), (3, 1.1), (4, 1.12)))) == 4
    assert len(nodes_planned(values, ((0, 1.0), (1, 1.0), (2, 1.05), (3, 1.1), (4, 1.12)))) == 2, (
        "a level costs as well"
    )


@both
def test_costs_that_arrive_choose_the_tree_anew(name, target):
    pairs = [[0, 0.1], [1, 1.0], [2, 1.1], [3, 3.0]]
    decoder = MAKERS[name](target, Sampling(), costs="auto")
    whole = decoder.tree
    assert decoder.costs_wanted == 1 + len(whole.paths)
    decoder.use_costs(pairs)
    given = MAKERS[name](target, Sampling(), costs=pairs)
    for found in (decoder, given):
        assert found.tree == planned(whole, Costs.of(pairs)) and len(found.tree.paths) < len(whole.paths)
        assert found.costs_wanted == 0 and found.drafter.nodes == len(found.tree.paths)
        assert found.costs.draft == pytest.approx(0.1 * found.tree.levels / whole.levels)


@pytest.mark.parametrize("paths", [[], [[]], [[-1]], [[0, 0]], [[0], [0]], [[0, 0], [0]]])
def test_impossible_trees_are_refused(paths):
    with pytest.raises(ValueError, match="must be different paths of ranks .*, got "):
        candidate_tree.named(paths)


# -- which token a head proposes --------------------------------------------------------------------------------------


def medusa_oracle(target, shift=0):
    """Heads with outputs of their own that are always right on the counting target, or off by ``shift``."""
    zero = torch.zeros(32, 32).double(), torch.zeros(32).double()
    directions = target.embed(torch.arange(target.vocab_size))
    outputs = [directions.roll(2 + head + shift, 0) for head in range(4)]
    return medusa.Heads([[zero]] * 4, DraftVocabulary.all(target.vocab_size), outputs)


def hydra_oracle(target, shift=0):
    """Heads that read the last drafted token alone, and are right about what follows it."""
    blocks = []
    for head in range(4):
        residual = torch.zeros(32, 32 * (head + 2)).double()
        residual[:, -32:] = torch.eye(32)
        blocks.append([Block(torch.zeros_like(residual), torch.zeros(32).double(), residual)])
    directions = target.embed(torch.arange(target.vocab_size))
    outputs = [(directions.roll(1 + shift, 0), None)] * 4
    return hydra.Heads(blocks, DraftVocabulary.all(target.vocab_size), outputs)


def oracle(name, target, sampling, monkeypatch, shift=0, **options):
    heads = (medusa_oracle if name == "medusa" else hydra_oracle)(target, shift)
    module = medusa if name == "medusa" else hydra
    monkeypatch.setattr(module.Heads, "published", classmethod(lambda *_: heads))
    return DECODERS[name](target, sampling, checkpoint="somebody/heads", **options)


@both
@pytest.mark.parametrize("tree", [[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], "mc_sim_7b_63"], ids=["chain", "tree"])
def test_heads_that_are_right_have_everything_accepted(name, tree, counter, monkeypatch):
    decoder = oracle(name, counter, Sampling(), monkeypatch, tree=tree)
    batch = [torch.tensor([5]), torch.tensor([3, 9, 28]), torch.tensor([1, 7, 2, 20, 11])]
    steps = decode(decoder, batch, 26)
    assert len(steps) == 6, "the prefill gives one token, every pass five"
    assert all(step.accepted == step.depth == [4, 4, 4] for step in steps[1:])


@both
@pytest.mark.parametrize("shift", [-1, 1])
def test_heads_that_are_one_place_off_have_nothing_accepted(name, shift, counter, monkeypatch):
    decoder = oracle(name, counter, Sampling(), monkeypatch, shift, tree=[[0], [0, 0]])
    assert not any(map(sum, (step.accepted for step in decode(decoder, [torch.tensor([5]), torch.tensor([3, 9])]))))


@both
def test_heads_nobody_measured_get_the_published_tree(name, counter, monkeypatch):
    assert oracle(name, counter, Sampling(), monkeypatch).tree.paths == TREES["mc_sim_7b_63"]
    assert oracle(name, counter, Sampling(), monkeypatch, nodes=5).tree.paths == TREES["mc_sim_7b_63"][:5]


def medusa_by_hand(heads, target, state, root, tree):
    """Head by head: layers, output matrix, the best ids; a node's token is its head's candidate of its rank."""
    weight, _ = target.output_rows(heads.vocabulary.ids)
    lists = []
    for layers in heads.blocks:
        z = state
        for matrix, bias in layers:
            z = z + F.silu(matrix @ z + bias)
        lists.append(heads.vocabulary.ids[(weight @ z).argsort(descending=True)].tolist())
    return {path: lists[len(path) - 1][path[-1]] for path in tree.paths}


def hydra_by_hand(heads, target, state, root, tree):
    """Node by node: the state, the root and the tokens on the way to the node's parent."""
    weight, _ = target.output_rows(heads.vocabulary.ids)
    tokens: dict[tuple[int, ...], int] = {}
    for path in sorted(tree.paths, key=len):
        way = [root] + [tokens[path[:length]] for length in range(1, len(path))]
        z = torch.cat([state, *(target.embed(torch.tensor(token)) for token in way)])
        for block in heads.blocks[len(path) - 1]:
            own = z if block.residual is None else block.residual @ z + block.residual_bias
            z = own + F.silu(block.weight @ z + block.bias)
        tokens[path] = int(heads.vocabulary.ids[(weight @ z).argsort(descending=True)[path[-1]]])
    return tokens


BY_HAND = {"medusa": medusa_by_hand, "hydra_heads": hydra_by_hand}


@both
def test_drafts_are_those_of_the_formulas(name, target, texts, tmp_path, monkeypatch):
    """In every round, for ragged rows, from the state that wrote the root, which a plain pass over the text gives."""
    drafter = {"medusa": MedusaDrafter, "hydra_heads": HydraDrafter}[name]
    proposed, propose = [], drafter.propose

    def watched(self, context):
        draft = propose(self, context)
        proposed.append(([list(row) for row in context.tokens], draft))
        return draft

    monkeypatch.setattr(drafter, "propose", watched)
    decoder = DECODERS[name](target, Sampling(), checkpoint=stored(name, target, texts, tmp_path), nodes=9)
    unknown = checks.prompts(target.vocab_size, (6, 11, 8), seed=9)
    batch = [*prompts_of(texts)[:2], *unknown]
    steps = decode(decoder, batch)
    assert len({len(row) for step in steps[1:4] for row in step.tokens}) > 1, "rows go on by different numbers"
    heads = {"medusa": medusa, "hydra_heads": hydra}[name].Heads.load(tmp_path, target)
    order = sorted(decoder.tree.paths, key=lambda path: (len(path), path))
    for committed, draft in proposed:
        full = batch_of(target, committed, [1] * len(committed))
        for row, text in enumerate(committed):
            if len(text) >= len(batch[row]) + 20:
                continue  # it waits at its limit, and what is drafted for it is lost
            state = full.hidden[row, len(text) - 2].to(target.dtype)
            wanted = BY_HAND[name](heads, target, state, text[-1], decoder.tree)
            assert draft.tokens[row].tolist() == [wanted[path] for path in order]
            parents = [order.index(path[:-1]) if len(path) > 1 else -1 for path in order]
            assert draft.parents[row].tolist() == parents
    assert draft.max_depth == decoder.tree.levels and draft.passes == (1 if name == "medusa" else decoder.tree.levels)
    assert draft.max_width == max(parents.count(parent) for parent in parents)


@both
def test_one_path_is_drafted_as_a_chain(name, target, texts):
    decoder = MAKERS[name](target, Sampling(), texts, tree=[[0], [0, 2]])
    steps = decode(decoder, prompts_of(texts)[:1])
    assert {step.depth[0] for step in steps[1:]} == {2} and {step.nodes for step in steps[1:]} == {3}


@both
def test_drafting_reads_nothing_back(name, target, texts, monkeypatch):
    drafter = {"medusa": MedusaDrafter, "hydra_heads": HydraDrafter}[name]
    propose = drafter.propose

    def guarded(self, context):
        with no_host_reads():
            return propose(self, context)

    monkeypatch.setattr(drafter, "propose", guarded)
    assert len(decode(MAKERS[name](target, Sampling(), texts), prompts_of(texts))) > 2


@both
def test_memory_beside_the_targets(name, target, texts):
    decoder = MAKERS[name](target, Sampling(), texts, tree=[[0], [0, 0]])
    heads = 2 * 2 * (32 * 32) if name == "medusa" else (2 * (2 + 3) + 2) * 32 * 32
    assert decoder.memory() == {"heads": 8 * heads, "draft_output_matrix": 8 * 61 * 32}


# -- acceptance -------------------------------------------------------------------------------------------------------


@both
def test_typical_acceptance_is_relaxed(name, target, texts):
    for sampling in (Sampling(), Sampling(0.8)):
        assert MAKERS[name](target, sampling, texts).guarantee is Guarantee.EXACT
        decoder = MAKERS[name](target, sampling, texts, acceptance="typical")
        assert decoder.guarantee is Guarantee.RELAXED
        assert (decoder.rule.epsilon, decoder.rule.delta) == (0.09, 0.3)
    anything = MAKERS[name](target, Sampling(), texts, acceptance="typical", epsilon=0.0)
    steps = decode(anything, prompts_of(texts))
    assert all(step.accepted == step.depth for step in steps[1:4]), "with epsilon 0 whatever is possible is kept"


# -- training ---------------------------------------------------------------------------------------------------------


def test_draft_states_are_places_of_the_answer(target):
    """Prompts teach nothing: the published label mask, an ``or`` where an ``and`` is meant, lets them."""
    batch = batch_of(target, [[9, 8, 7, 1, 2, 3], [5, 6, 4]], [3, 1])
    found = DraftStates.of(batch, heads=3)
    assert found.tokens[:, 0].tolist() == [1, 2, 6], "the roots"
    assert found.judged.tolist() == [[True, True, False], [True, False, False], [True, False, False]]
    assert found.tokens[found.judged.nonzero()[:, 0], found.judged.nonzero()[:, 1] + 1].tolist() == [2, 3, 3, 4]
    assert torch.equal(found.hidden, batch.hidden[[0, 0, 1], [2, 3, 0]])
    assert torch.equal(found.later[0, :2], batch.hidden[0, 3:5]), "the states that wrote the labels"


@both
def test_untrained_heads_are_the_targets_own(name, target, texts):
    """Their first distribution is that of the root; from there they learn."""
    batch = batch_of(target, [list(text) for text in texts], [1] * 4)
    learner = LEARNERS[name](target, DraftVocabulary.all(61), 3, 2)
    found = DraftStates.of(batch, 3)
    for state in learner.states(found):
        own = target.head(found.hidden.double()).float()
        assert torch.allclose(learner.logits(state), own, atol=1e-4)


@both
def test_tokens_outside_the_vocabulary_are_no_lesson_and_a_miss(name, target, texts):
    batch = batch_of(target, [list(text) for text in texts], [1] * 4)
    vocabulary = DraftVocabulary(torch.arange(0, 61, 2), 61)
    torch.manual_seed(1)
    learner = LEARNERS[name](target, vocabulary, 2, 1, labels="hard")
    for parameter in learner.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    found = DraftStates.of(batch, 2)
    total = 0.0
    for head, state in enumerate(learner.states(found)):
        places = vocabulary.of(found.tokens[:, head + 1])
        counted = (places >= 0) & found.judged[:, head]
        assert 0 < counted.sum() < found.judged[:, head].sum()
        total += F.cross_entropy(learner.logits(state)[counted], places[counted]).detach()
    assert float(learner.loss(batch)[0].detach()) == pytest.approx(float(total), rel=1e-5)
    ranks, judged = learner.ranks(batch)
    outside = vocabulary.of(found.tokens[:, 1:]) < 0
    assert (ranks[outside] == RANKS).all() and torch.equal(judged, found.judged)


@both
def test_hits_of_a_draft_count_where_its_earlier_tokens_were_right(name, target, texts):
    batch = batch_of(target, [list(text) for text in texts], [1] * 4)
    torch.manual_seed(0)
    learner = LEARNERS[name](target, DraftVocabulary.all(61), 3, 1)
    learn_by_heart(learner, batch, steps=12)
    ranks, judged = learner.ranks(batch)
    right, count = learner.hits(batch)
    assert right.shape == (3, RANKS) and 0 < int(count[2]) < int(count[1]) < int(count[0]) == int(judged[:, 0].sum())
    wanted, reached = torch.zeros(3, RANKS, dtype=torch.long), [0, 0, 0]
    for row, seen in zip(ranks.tolist(), judged.tolist(), strict=True):
        for head in range(3):
            if not seen[head] or any(row[:head]):
                break
            reached[head] += 1
            if row[head] < RANKS:
                wanted[head, row[head]] += 1
    assert torch.equal(right, wanted) and count.tolist() == reached


@both
def test_soft_labels_are_the_targets_distribution_where_the_label_was_written(name, target, texts):
    batch = batch_of(target, [list(text) for text in texts], [1] * 4)
    torch.manual_seed(0)
    vocabulary = DraftVocabulary(torch.arange(0, 61, 2), 61)
    learner = LEARNERS[name](target, vocabulary, 2, 1, labels="soft")
    for parameter in learner.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    found, total = DraftStates.of(batch, 2), 0.0
    for head, state in enumerate(learner.states(found)):
        counted = (vocabulary.of(found.tokens[:, head + 1]) >= 0) & found.judged[:, head]
        probs = target.head(found.later[:, head].double())[:, vocabulary.ids].softmax(-1)
        total += -(probs * learner.logits(state).log_softmax(-1)).sum(-1)[counted].mean()
    assert float(learner.loss(batch)[0].detach()) == pytest.approx(float(total.detach()), rel=1e-5)


@both
def test_a_loss_of_acceptance_is_the_share_of_drafts_that_are_refused(name, target, texts):
    """Against the answers themselves: what a head leaves to other tokens."""
    batch = batch_of(target, [list(text) for text in texts], [1] * 4)
    learner = LEARNERS[name](target, DraftVocabulary.all(61), 2, 1, labels="hard", draft_loss=DraftLoss("tv"))
    found, total = DraftStates.of(batch, 2), 0.0
    for head, state in enumerate(learner.states(found)):
        chosen = learner.logits(state).softmax(-1).gather(1, found.tokens[:, head + 1 : head + 2])[:, 0]
        total += 1 - chosen[found.judged[:, head]].mean()
    assert float(learner.loss(batch)[0].detach()) == pytest.approx(float(total.detach()), rel=1e-5)


def test_decay_weighs_later_heads(target, texts):
    batch = batch_of(target, [list(text) for text in texts], [1] * 4)
    loss, curves = MedusaLearner(target, DraftVocabulary.all(61), 3, 1, decay=0.5).loss(batch)
    assert float(loss.detach()) == pytest.approx(
        float(curves["loss_2"] + 0.5 * curves["loss_3"] + 0.25 * curves["loss_4"]), rel=1e-6
    )


def test_the_scale_of_embeddings_goes_into_the_weights(target, texts, tmp_path):
    """Heads trained on scaled embeddings propose the same from embeddings as they are."""
    batch = batch_of(target, [list(text) for text in texts], [1] * 4)
    torch.manual_seed(0)
    learner = HydraLearner(target, DraftVocabulary.all(61), 2, 2, scale=3.7)
    learn_by_heart(learner, batch, steps=5)
    found = DraftStates.of(batch, 2)
    trained = learner.trained(learner.ranks(batch)[0])
    inputs = torch.cat([found.hidden[:, None], target.embed(found.tokens[:, :2]).float()], 1).flatten(1)
    for head, state in enumerate(learner.states(found)):
        ours = hydra.HydraHead(target, trained.blocks[head])(inputs[:, : 32 * (head + 2)])
        assert torch.allclose(ours, state, atol=1e-4)


def context(target, folder, points=None, count=60):
    """Prompts of a target whose answers count on from them."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = [Example([(7 * n) % 29, (5 * n + 3) % 29], []) for n in range(count)]
    log = [].append if points is None else points.append
    shared = {"shared_cache": folder.parent / "common", "model": target, "examples": corpus}
    return TrainingContext(output=folder, seed=3, log=log, **shared)


def training(name, **changes):
    recipe = TrainingConfig(steps=120, batch_size=8, learning_rate=2e-2, precision="float32", evaluations=4)
    answers = AnswerRecipe(tokens=600, limit=12, longest_prompt=9, batch=20)
    return TRAININGS[name](**{"heads": 3, "vocabulary": 29, "answers": answers, "recipe": recipe} | changes)


@both
@pytest.mark.parametrize("labels", ["hard", "soft"])
def test_training_learns_a_periodic_text(name, labels, counter, tmp_path):
    loss = "lk_hybrid" if labels == "soft" else "ce"
    trainable, points = training(name, labels=labels, loss=loss), []
    facts = trainable.fit(context(counter, tmp_path / "part", points))
    assert sum(facts["acceptance"]) > 2.9, "all three heads know it; untrained ones repeat the root"
    losses = [point["loss"] for point in points if "loss" in point]
    assert losses[-1] < 0.9 * losses[0] and {"loss_2", "loss_3", "loss_4"} <= set(points[0])
    assert facts["accuracies"][2][0] > 0.9 and facts["held_out_coverage"] == 1.0
    assert facts["tokens_per_step_of_trees"]["63"] > 3.4, "near the end of an answer a draft reaches beyond it"
    assert sorted(path.name for path in (tmp_path / "part").iterdir()) == [CONFIG, WEIGHTS]
    decoder = DECODERS[name](counter, Sampling(), checkpoint=tmp_path / "part", costs=[[1, 1.0], [64, 1.01]])
    steps = decode(decoder, [torch.tensor([4]), torch.tensor([3, 9, 13])], 21)
    assert len(steps) <= 7, "one token, then about four a pass"


@both
def test_an_interrupted_training_ends_as_another(name, counter, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "SAVE_EVERY_S", 0.0)
    trainable = training(name, recipe=replace(training(name).recipe, steps=24))
    trainable.fit(context(counter, tmp_path / "whole"))

    class Killed(Exception):
        pass

    class Points(list):
        def append(self, point):
            if point["step"] == 20:
                raise Killed

    with pytest.raises(Killed):
        trainable.fit(context(counter, tmp_path / "halves", Points()))
    assert not (tmp_path / "halves" / WEIGHTS).exists()
    trainable.fit(context(counter, tmp_path / "halves"))
    for file in (WEIGHTS, CONFIG):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "halves" / file).read_bytes()


@both
@pytest.mark.parametrize("changes", [{"heads": 0}, {"blocks": 0}, {"vocabulary": 0}, {"decay": 0.0}])
def test_impossible_sizes_are_refused(name, changes):
    with pytest.raises(ValueError, match=r"must be (at least 1|above 0), got 0.*\. Set train\."):
        TRAININGS[name](**changes)


# -- files ------------------------------------------------------------------------------------------------------------


@both
def test_what_is_saved_is_what_is_loaded(name, target, texts, tmp_path):
    heads = heads_of(LEARNERS[name], target, texts)
    heads.save(tmp_path, target, FACTS)
    again = {"medusa": medusa, "hydra_heads": hydra}[name].Heads.load(tmp_path, target)
    assert torch.equal(again.ranks, heads.ranks) and torch.equal(again.vocabulary.ids, heads.vocabulary.ids)
    assert len(again.blocks) == len(heads.blocks) == 3 and len(again.blocks[0]) == len(heads.blocks[0]) == 2
    for one, other in zip(flat(again), flat(heads), strict=True):
        assert one.dtype == target.dtype and torch.equal(one, other.bfloat16().double())
    assert json.loads((tmp_path / CONFIG).read_text())["accuracies"] == FACTS["accuracies"]
    assert all(
        tensor.dtype in (torch.bfloat16, torch.uint8, torch.int32) for tensor in load_file(tmp_path / WEIGHTS).values()
    )


def flat(heads):
    blocks = (block for head in heads.blocks for block in head)
    for block in blocks:
        parts = (block.weight, block.bias, block.residual, block.residual_bias) if isinstance(block, Block) else block
        yield from (part for part in parts if part is not None)


@both
def test_without_heads_the_training_is_named(name, target):
    with pytest.raises(ValueError, match=f"{name} has no heads .* bench.train method={name} model=MODEL; .*checkpoint"):
        DECODERS[name](target, Sampling())


@both
def test_heads_of_another_model_are_refused(name, target, texts, tmp_path):
    stored(name, target, texts, tmp_path)
    other = checks.tiny_target(layers=2)
    with pytest.raises(ValueError, match=r"must be of a model like .*'layers': 2.*, got .*'layers': 4.*\. Train"):
        DECODERS[name](other, Sampling(), checkpoint=tmp_path)


@both
def test_damaged_files_are_refused(name, target, texts, tmp_path):
    stored(name, target, texts, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    key = next(key for key in tensors if key.endswith("weight"))
    for changed in ({key: tensors[key][:1].contiguous()}, {"more": torch.ones(1)}, {"ranks": tensors["ranks"][:, :2]}):
        save_file({name: t.contiguous() for name, t in (tensors | changed).items()}, tmp_path / WEIGHTS)
        with pytest.raises(ValueError, match=rf"announced .*got .*{next(iter(changed))}.*Copy both files again"):
            DECODERS[name](target, Sampling(), checkpoint=tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(ValueError, match="must hold config.json .* as the training of .*, got .*Name another folder"):
        DECODERS[name](target, Sampling(), checkpoint=str(tmp_path))


def test_heads_of_the_other_method_are_refused(target, texts, tmp_path):
    for name, other in itertools.permutations(DECODERS):
        stored(other, target, texts, tmp_path)
        with pytest.raises(ValueError, match="Copy both files again"):
            DECODERS[name](target, Sampling(), checkpoint=tmp_path)


@both
@pytest.mark.parametrize(
    "options, message",
    [
        ({"nodes": 0}, "nodes must be auto or at least 1, got 0"),
        ({"nodes": "many"}, "nodes=many"),
        ({"tree": "oak"}, "tree must be measured, mc_sim_7b_63 or paths .*got oak"),
        ({"tree": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}, "at most 3 heads .*needs 4 heads"),
        ({"tree": [[61]]}, "61 candidates of each, .* 62 candidates"),
        ({"tree": [[0, 0]]}, "each after its parent"),
        ({"acceptance": "typical", "epsilon": 2.0}, "epsilon=2.0"),
        ({"costs": [[1, 1.0]]}, "two or more pairs"),
    ],
)
def test_impossible_options_are_refused(name, options, message, target):
    if options.get("nodes") == "many":
        with pytest.raises((ValueError, TypeError)):
            MAKERS[name](target, Sampling(), **options)
        return
    with pytest.raises(ValueError, match=message):
        MAKERS[name](target, Sampling(), **options)


# -- published heads --------------------------------------------------------------------------------------------------


def write(folder, file, tensors, config):
    """A checkpoint as its authors publish it; the reader has tests of its own."""
    torch.save(tensors, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_published_heads_of_medusa(counter, tmp_path):
    theirs, tensors = medusa_oracle(counter), {}
    for head, output in enumerate(theirs.outputs):
        ((weight, bias),) = theirs.blocks[head]
        tensors |= {f"{head}.0.linear.weight": weight, f"{head}.0.linear.bias": bias, f"{head}.1.weight": output}
    checkpoint = write(tmp_path, "medusa_lm_head.pt", tensors, {"medusa_num_heads": 4, "medusa_num_layers": 1})
    decoder = Medusa(counter, Sampling(), checkpoint=checkpoint, nodes=12)
    assert decoder.tree.paths == TREES["mc_sim_7b_63"][:12] and decoder.tree.levels == 3
    assert len(decode(decoder, [torch.tensor([5, 6])], 13)) == 4
    assert decoder.memory()["draft_output_matrix"] == 3 * 29 * 32 * 8
    assert (
        "drafts implausibly badly" in decoder.acceptance_warning([[0.05, 0.0]] * 3)
        and decoder.acceptance_warning([[0.6, 0.3]] * 3) is None
    )
    with pytest.raises(ValueError, match="must hold heads of Hydra for method=hydra_heads, got MedusaWeights. Use"):
        HydraHeads(counter, Sampling(), checkpoint=checkpoint)


def test_published_heads_of_hydra(counter, tmp_path):
    theirs, tensors = hydra_oracle(counter), {}
    for head, (output, _) in enumerate(theirs.outputs):
        (block,) = theirs.blocks[head]
        name = f"hydra_mlp.{head}.0"
        tensors |= {f"{name}.linear.weight": block.weight, f"{name}.linear.bias": block.bias}
        tensors |= {f"{name}.res_connection.weight": block.residual, f"{name}.res_connection.bias": torch.zeros(32)}
        tensors |= {f"hydra_lm_head.{head}.weight": output, f"hydra_lm_head.{head}.bias": torch.zeros(29)}
    config = {"hydra_num_heads": 4, "hydra_num_layers": 1, "hydra_head_arch": "mlp", "grounded_heads": True}
    checkpoint = write(tmp_path, "hydra_lm_head.pt", tensors, config)
    decoder = HydraHeads(counter, Sampling(), checkpoint=checkpoint, tree=[[0], [1], [0, 0], [0, 0, 0]])
    assert len(decode(decoder, [torch.tensor([5, 6])], 13)) == 4
    assert "drafts implausibly badly" in decoder.acceptance_warning([[0.05]] * 3)
    with pytest.raises(ValueError, match="must hold heads of Medusa for method=medusa, got HydraWeights. Use"):
        Medusa(counter, Sampling(), checkpoint=checkpoint)


@both
def test_heads_trained_here_are_not_doubted(name, target, texts):
    assert MAKERS[name](target, Sampling(), texts).acceptance_warning([[0.0]] * 3) is None


def test_found_of_a_batch_without_answers_are_none():
    hidden = torch.zeros(1, 3, 4)
    batch = Batch(torch.zeros(1, 3, dtype=torch.long), hidden, {}, [2], [3])
    assert len(DraftStates.of(batch, 2).hidden) == 0, "one token of the answer: a root with nothing behind it"

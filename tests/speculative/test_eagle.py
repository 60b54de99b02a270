"""EAGLE 1 to 3: the network in training and in decoding, its trees, its losses, its files."""

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
from methods.drafting import Context
from methods.engine.checkpoint_files import CONFIG, WEIGHTS, MissingPart
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.linear import make_linear
from methods.engine.sampling import Sampling
from methods.engine.token_tree import Shape
from methods.speculative.draft_layers import rotary_table
from methods.speculative.eagle import decoder as eagle
from methods.speculative.eagle import trees
from methods.speculative.eagle.checkpoint import Part
from methods.speculative.eagle.decoder import Eagle, EagleDrafter
from methods.speculative.eagle.network import Network, Reader
from methods.speculative.eagle.training import (
    DraftModule,
    EagleLearner,
    EagleTraining,
    Places,
    begin_state_norms,
    default_taps,
    spec_of,
)
from methods.speculative.eagle.trees import TREES, Chain, Dynamic, Static
from methods.speculative.verification import ChainRejection, DeterministicTree, Greedy, TreeWithoutReplacement
from methods.training.answers import AnswerRecipe, Answers
from methods.training.features import Features
from methods.training.interface import Example, TrainingContext
from methods.training.losses import DraftLoss
from methods.training.trainer import TrainingConfig
from tests.helpers.host_reads import no_host_reads
from tests.helpers.tiny_eagle import eagle_learner
from tests.helpers.tiny_heads import batch_of, learn_by_heart

VERSIONS = [1, 3]


EAGLE_3_1 = {"fc_norm": True, "norm_output": True}


@pytest.fixture(scope="module")
def target():
    return checks.tiny_target()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_plain_form_of_a_packed_weight_is_the_original(dtype):
    torch.manual_seed(0)
    weights = [torch.randn(n, 48).to(dtype) for n in (33, 7)]
    assert torch.equal(make_linear(weights, [None, None]).dense, torch.cat(weights))


def test_default_taps_are_outputs():
    """Inputs of layers 2, L / 2, L - 3 are the outputs of those before them."""
    assert default_taps(30) == (1, 14, 26)
    assert default_taps(32) == (1, 15, 28)


# -- training ---------------------------------------------------------------------------------------------------------


def learner_of(target, version, unroll=3, output="shared", vocabulary=None, random=True, **flags):
    """A learner in 64 bit; random weights make every part of it matter."""
    chosen = vocabulary or DraftVocabulary.all(target.vocab_size)
    torch.manual_seed(0)
    learner = EagleLearner(target, spec_of(target, version, **flags), chosen, unroll, output, noise=0.0)
    if random:
        with torch.no_grad():
            for parameter in learner.parameters():
                parameter.normal_(0.0, 0.4)
    learner = learner.double()
    learner.output = target.output_rows(chosen.ids)[0]  # unrounded
    learner._rotary = rotary_table(learner.spec, target.device, torch.float64)
    return learner


def ragged(target, lengths=(9, 4, 12), prompts=(3, 2, 7)):
    texts = [text.tolist() for text in checks.prompts(target.vocab_size, lengths)]
    batch = batch_of(target, texts, list(prompts), range(target.n_layers))
    return type(batch)(
        batch.tokens,
        batch.hidden.double(),
        {tap: state.double() for tap, state in batch.hidden_layers.items()},
        batch.prompts,
        batch.lengths,
    )


def slow_features(learner, batch, row, place, count):
    """What a draft that begins at one place computes, one pair after the other with a growing list of keys."""
    network, spec = learner.network, learner.spec
    attention = network.layer.self_attn
    tokens = batch.tokens[row]

    def turned(heads, at):
        cos, sin = (table[at] for table in (learner._rotary._cos, learner._rotary._sin))
        half = heads.shape[-1] // 2
        rolled = torch.cat([heads[:, half:], heads[:, :half]], dim=1)
        return heads * cos + rolled * sin

    keys, values, made = [], [], []
    feature = network.feature(batch.hidden[row], [batch.hidden_layers[tap][row] for tap in spec.taps])[0]
    for at in range(place + count):
        if at <= place:
            feature = network.feature(batch.hidden[row, at], [batch.hidden_layers[tap][row, at] for tap in spec.taps])
        before = network.fed_back(feature) if at > place else feature
        residual, read = network.enter(before, learner._embed(tokens[at + 1]))
        keys.append(turned(attention.k_proj(read).view(-1, spec.head_dim), at))
        values.append(attention.v_proj(read).view(-1, spec.head_dim))
        if at < place:
            continue
        query = turned(attention.q_proj(read).view(-1, spec.head_dim), at)
        mixed = []
        for head, q in enumerate(query):
            kv = head // (spec.heads // spec.kv_heads)
            scores = torch.stack([(q * k[kv]).sum() for k in keys]) * spec.head_dim**-0.5
            mixed.append((scores.softmax(0)[:, None] * torch.stack([v[kv] for v in values])).sum(0))
        feature = network.leave(residual, torch.cat(mixed))
        made.append(feature)
    return torch.stack(made)


@pytest.mark.parametrize("version, flags", [*((version, {}) for version in VERSIONS), (3, EAGLE_3_1)])
def test_training_time_test_is_the_draft_it_stands_for(version, flags, target):
    """Every step of every place: keys of true features up to it, then one of each step of the same draft."""
    learner, batch = learner_of(target, version, **flags), ragged(target)
    places = Places.of(batch)
    with torch.no_grad():
        steps = torch.stack(list(learner.steps(batch, places, 3)), dim=1)
        for number, (row, place) in enumerate(zip(places.row.tolist(), places.place.tolist(), strict=True)):
            count = min(3, batch.lengths[row] - 1 - place)
            torch.testing.assert_close(steps[number, :count], slow_features(learner, batch, row, place, count))
    assert len(places.row) == sum(
        length - prompt - 1 for length, prompt in zip(batch.lengths, batch.prompts, strict=True)
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_loss_is_the_sum_over_places(version, target):
    vocabulary = DraftVocabulary(torch.arange(0, target.vocab_size, 2), target.vocab_size)
    learner, batch = learner_of(target, version, vocabulary=vocabulary), ragged(target)
    weight, _ = target.output_rows(vocabulary.ids)
    wanted, rows = 0.0, range(len(batch.lengths))
    for step in range(3):
        entropy, distance = [], []
        for row in rows:
            for place in range(batch.prompts[row] - 1, batch.lengths[row] - 2 - step):
                feature = slow_features(learner, batch, row, place, step + 1)[-1]
                distance.append(F.smooth_l1_loss(feature, batch.hidden[row, place + 1 + step]))
                if int(batch.tokens[row, place + 2 + step]) % 2 == 0:
                    taught = (batch.hidden[row, place + 1 + step] @ weight.T).softmax(-1)
                    entropy.append(-(taught * (learner.network.scored(feature) @ weight.T).log_softmax(-1)).sum())
        loss = torch.stack(entropy).mean()
        wanted = wanted + 0.8**step * (loss if version == 3 else torch.stack(distance).mean() + 0.1 * loss)
    found, curves = learner.loss(batch)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
    assert set(curves) >= {"loss_1", "loss_2", "loss_3", "overlap_3"}
    ours = torch.autograd.grad(found, list(learner.network.parameters()))
    theirs = torch.autograd.grad(wanted, list(learner.network.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_loss_of_acceptance_and_its_weights(target):
    """1 - overlap, with steps weighted as in HASS; its term over the likeliest tokens adds to each."""
    learner, batch = learner_of(target, 3), ragged(target)
    learner.decay, learner.draft_loss = 0.5, DraftLoss("tv")
    total, curves = learner.loss(batch)
    torch.testing.assert_close(total, sum(0.5**step * (1 - curves[f"overlap_{step + 1}"]) for step in range(3)))
    learner.draft_loss = DraftLoss("tv", 5, 0.1)
    assert learner.loss(batch)[0] > total


@pytest.mark.parametrize("version", VERSIONS)
def test_hits_follow_chains(version, target):
    """A position is judged where all earlier ones were right; ranks are those of the draft's own logits."""
    learner, batch = learner_of(target, version), ragged(target, (14, 9), (2, 3))
    with torch.no_grad():
        hits, judged = learner.hits(batch)
        right, count = torch.zeros(5, 10, dtype=torch.long), torch.zeros(5, dtype=torch.long)
        for row, (prompt, length) in enumerate(zip(batch.prompts, batch.lengths, strict=True)):
            for place in range(prompt - 1, length - 2):
                for step in range(min(5, length - 2 - place)):
                    feature = slow_features(learner, batch, row, place, step + 1)[-1]
                    logits = learner.network.scored(feature) @ learner.output.T
                    rank = int((logits > logits[batch.tokens[row, place + 2 + step]]).sum())
                    count[step] += 1
                    if rank < 10:
                        right[step, rank] += 1
                    if rank:
                        break
    assert torch.equal(hits, right) and torch.equal(judged, count)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("output", ["shared", "own"])
def test_a_periodic_text_is_learnt(version, output, target):
    texts = [([3, 9, 27, 14, 50][start:] + [3, 9, 27, 14, 50] * 4)[:18] for start in range(5)]
    batch = batch_of(target, texts, [4] * 5, range(target.n_layers))
    vocabulary = DraftVocabulary(torch.tensor([3, 9, 14, 27, 50, 60]), target.vocab_size)
    torch.manual_seed(0)
    learner = EagleLearner(target, spec_of(target, version), vocabulary, 2, output, noise=0.0)
    # what the target itself would say plays no part here: the text is the teacher
    learner._taught = lambda batch: text_as_teacher(learner, batch)
    learner.classification = 1.0
    losses = learn_by_heart(learner, batch, 120)
    hits, judged = learner.hits(batch)
    assert losses[-1] < losses[0] / 2
    assert (hits[:2, 0] / judged[:2]).min() > 0.9


def text_as_teacher(learner, batch):
    written = batch.shifted(1)[1]
    labels = learner.vocabulary.of(batch.shifted(1)[0][written])
    return F.one_hot(labels, len(learner.vocabulary)).float(), (written.flatten().cumsum(0) - 1).view(written.shape)


def test_it_begins_as_the_targets_last_layer(target):
    network = learner_of(target, 3, random=False).network
    assert isinstance(network, DraftModule)
    x = torch.randn(5, target.hidden_size, dtype=torch.double)
    source = target.layers[-1]
    torch.testing.assert_close(network.layer.hidden_norm(x), source.attention.norm(x), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(
        network.layer.self_attn["q_proj"].weight[:, 32:], source.attention.qkv.dense[:32], atol=1e-6, rtol=1e-6
    )
    gate, up = source.mlp.gate_up(source.mlp.norm(x)).chunk(2, dim=-1)
    wanted = source.mlp.down(source.mlp.activation(gate) * up)
    torch.testing.assert_close(network.layer.feed_forward(x), wanted, atol=1e-4, rtol=1e-4)


# -- the network in decoding ------------------------------------------------------------------------------------------


def network_of(target, version, **options):
    """A random network in decoding, and the learner it comes from."""
    learner = learner_of(target, version, **options)
    return Network(target, learner.part()), learner


def cut(batch, tap=None):
    return batch.hidden if tap is None else batch.hidden_layers[tap]


@pytest.mark.parametrize("version, flags", [*((version, {}) for version in VERSIONS), (3, EAGLE_3_1)])
@pytest.mark.parametrize("output", ["shared", "own"])
def test_the_network_in_decoding_is_the_one_that_was_trained(version, flags, output, target):
    """Committed pairs in ragged portions, then a chain of guesses: the features and logits of the module."""
    options = {"output": output, "vocabulary": DraftVocabulary(torch.arange(5, 40), 61), **flags}
    network, learner = network_of(target, version, **options)
    batch = ragged(target, (13, 9, 12), (3, 2, 7))
    taps = [batch.hidden_layers[tap] for tap in learner.spec.taps]
    feature = network.feature(batch.hidden, taps)
    reader = Reader(network, 3, 40)
    for counts in ([4, 3, 4], [2, 1, 0], [1, 1, 3]):
        starts = reader.lengths
        width = max(counts)
        pairs = torch.tensor([[min(start + i, 20) for i in range(width)] for start in starts]).clamp(max=11)
        found = reader.read(
            feature.gather(1, pairs[:, :, None].expand(-1, -1, 32)), batch.tokens.gather(1, pairs + 1), counts
        )
        rows = [row for row, count in enumerate(counts) if count]
        for row in rows:
            wanted = slow_features(learner, batch, row, starts[row] + counts[row] - 1, 1)[0]
            torch.testing.assert_close(found[row, 0], wanted)
    for level in range(2):
        logits, found = network.logits(found)
        for row, length in enumerate(reader.lengths):
            wanted = slow_features(learner, batch, row, length - 1, level + 1)[-1]
            torch.testing.assert_close(found[row, 0], learner.network.fed_back(wanted))
            weight, bias = learner._output
            torch.testing.assert_close(logits[row, 0], F.linear(learner.network.scored(wanted), weight.double(), bias))
        following = torch.tensor([length + 1 + level for length in reader.lengths])[:, None]
        found = reader.guess(found, batch.tokens.gather(1, following), level)


# -- trees ------------------------------------------------------------------------------------------------------------


def context_of(network, target, sampling=None, lengths=(7, 11)):
    """What a drafter sees behind the prefill of some prompts."""
    prompts = checks.prompts(target.vocab_size, lengths)
    cache = target.new_cache(len(prompts), 40)
    output = target.prefill(prompts, cache, hidden_layers=network.spec.taps or (target.n_layers - 1,))
    root = output.logits[:, 0].argmax(-1)
    rows = [prompt.tolist() + [token] for prompt, token in zip(prompts, root.tolist(), strict=True)]
    rng = torch.Generator().manual_seed(0)
    return Context(rows, root, output, None, sampling or Sampling(), rng)


class Paths:
    """Log-probabilities behind any path of one row, each path read anew as a chain."""

    def __init__(self, network, context, row):
        self.network, self.tokens = network, context.tokens[row]
        output = context.output
        self.hidden = output.hidden[row : row + 1, : len(self.tokens) - 1]
        self.taps = [output.hidden_layers[tap][row : row + 1, : len(self.tokens) - 1] for tap in network.spec.taps]

    def behind(self, path):
        reader = Reader(self.network, 1, 60)
        tokens = torch.tensor([self.tokens[1:]])
        feature = reader.read(self.network.feature(self.hidden, self.taps), tokens, [tokens.shape[1]])
        logits, feature = self.network.logits(feature)
        for level, token in enumerate(path):
            logits, feature = self.network.logits(reader.guess(feature, torch.tensor([[token]]), level))
        return logits[0, 0].log_softmax(-1)

    def ranked(self, path, count):
        """The likeliest tokens behind a path with their log-probabilities."""
        scores = self.behind(path)
        best = scores.topk(count)
        return list(zip(self.network.vocabulary.tokens(best.indices).tolist(), best.values.tolist(), strict=True))


def nodes_of(draft, row):
    """Paths of the nodes, in the order of their columns."""
    paths = []
    for token, parent in zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True):
        assert parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def brute_force(paths, nodes, levels, top_k):
    """EAGLE-2, sec. 4, path by path: expansion of the best, then the best of all."""
    every, beam = {}, {(): 0.0}
    for _ in range(levels):
        found = {
            (*path, token): score + gained
            for path, score in beam.items()
            for token, gained in paths.ranked(path, top_k)
        }
        every |= found
        beam = dict(sorted(found.items(), key=lambda item: -item[1])[:top_k])
    return {path for path, _ in sorted(every.items(), key=lambda item: -item[1])[:nodes]}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("nodes, levels, top_k", [(9, 3, 3), (4, 4, 2), (2, 1, 5), (20, 3, 4), (6, 6, 1)])
def test_the_dynamic_tree_is_that_of_brute_force(version, nodes, levels, top_k, target):
    network, _ = network_of(target, version, vocabulary=DraftVocabulary(torch.arange(3, 50), 61))
    context = context_of(network, target)
    drafter = EagleDrafter(network, Dynamic(nodes, levels, top_k, target.device), target.n_layers - 1)
    drafter.reset([row[:-1] for row in context.tokens], 20)
    draft = drafter.propose(context)
    for row in range(2):
        found = nodes_of(draft, row)
        assert len(set(found)) == nodes
        assert set(found) == brute_force(Paths(network, context, row), nodes, levels, top_k)
    assert (draft.levels, draft.width, draft.passes, draft.probs) == (levels, top_k, levels, None)


def test_a_sure_child_never_stands_without_its_parent(target):
    """log q = 0 makes a child as good as its parent, and many of them equal."""
    network, _ = network_of(target, 3)
    scale = torch.zeros(target.vocab_size, dtype=torch.double)
    scale[:3] = torch.tensor([1e4, 0.0, 0.0])
    network._score = lambda rows: scale.expand(len(rows), -1)
    context = context_of(network, target)
    for nodes in range(5, 12):
        drafter = EagleDrafter(network, Dynamic(nodes, 5, 3, target.device), target.n_layers - 1)
        drafter.reset([row[:-1] for row in context.tokens], 20)
        paths = nodes_of(drafter.propose(context), 0)
        assert (0, 0, 0, 0, 0) in paths and len(set(paths)) == nodes


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("children", [TREES["paper"], TREES["small"], [[1], [2], [0, 3], [1, 0, 1]]])
def test_the_static_tree_holds_the_likeliest_children(version, children, target):
    network, _ = network_of(target, version)
    shape = Shape.of_children(children)
    context = context_of(network, target)
    drafter = EagleDrafter(network, Static(shape, False, target.device), target.n_layers - 1)
    drafter.reset([row[:-1] for row in context.tokens], 20)
    draft = drafter.propose(context)
    assert tuple(draft.parents[0].tolist()) == shape.parents and draft.passes == len(shape.level_ends)
    for row in range(2):
        paths = Paths(network, context, row)
        for path, rank in zip(nodes_of(draft, row), shape.ranks, strict=True):
            assert paths.ranked(path[:-1], shape.width)[rank][0] == path[-1]


def test_the_published_tree_has_the_published_paths():
    shape = Shape.of_children(TREES["paper"])
    paths = []
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        paths.append((paths[parent] if parent >= 0 else "") + str(rank))
    published = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
    assert paths == published.split()


@pytest.mark.parametrize("growth", ["chain", "static"])
def test_drawn_children_differ_and_report_what_they_were_drawn_from(growth, target):
    vocabulary = DraftVocabulary(torch.arange(3, 50), 61)
    network, _ = network_of(target, 1, vocabulary=vocabulary)
    context = context_of(network, target, Sampling(0.7, top_k=4))
    shape = Shape.of_children([[6], [5, 1]])
    grown = Chain(3, True) if growth == "chain" else Static(shape, True, target.device)
    drafter = EagleDrafter(network, grown, target.n_layers - 1)
    drafter.reset([row[:-1] for row in context.tokens], 20)
    draft = drafter.propose(context)
    assert draft.probs.shape == (*draft.tokens.shape, 61)
    torch.testing.assert_close(draft.probs.sum(-1), torch.ones(draft.tokens.shape, dtype=draft.probs.dtype))
    for row in range(2):
        paths, found = Paths(network, context, row), nodes_of(draft, row)
        assert len(set(found)) == len(found)
        for column, path in enumerate(found):
            wanted = torch.zeros(61, dtype=torch.double)
            wanted[vocabulary.ids] = context.sampling.probs(paths.behind(path[:-1]))
            torch.testing.assert_close(draft.probs[row, column], wanted, atol=1e-6, rtol=1e-5)
            assert draft.probs[row, column, path[-1]] > 0


def test_draws_without_replacement_have_the_right_law():
    """First and second draw over four tokens, 40,000 times; the bound is five standard errors."""
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05]).expand(1, 40_000, 4)
    context = Context([], torch.empty(0, dtype=torch.long), None, None, Sampling(1.0), torch.Generator().manual_seed(0))
    drawn = trees._draw_different(chances, 2, context)[0]
    for first, second in itertools.permutations(range(4), 2):
        p = chances[0, 0]
        wanted = float(p[first] * p[second] / (1 - p[first]))
        found = float(((drawn[:, 0] == first) & (drawn[:, 1] == second)).float().mean())
        assert abs(found - wanted) < 5 * (wanted / 40_000) ** 0.5


# -- decoding ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(target):
    prompts = checks.prompts(target.vocab_size, (5, 9, 3, 12))
    written = checks.outputs(Autoregressive(target, Sampling()), prompts, 24)
    return [prompt.tolist() + row for prompt, row in zip(prompts, written, strict=True)]


@pytest.fixture(scope="module", params=VERSIONS)
def folder(request, target, texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"eagle{request.param}")
    eagle_learner(target, request.param, texts, 40, steps=150).part().save(folder)
    return folder


def version_of(folder):
    return json.loads((folder / CONFIG).read_text())["version"]


def decode(decoder, texts, limit=20):
    prompts = [torch.tensor(text[: len(text) - 24]) for text in texts]
    return list(decoder.decode(prompts, limit, torch.Generator().manual_seed(0)))


class Oracle(Reader):
    """Knows each row's text: a feature holds its row and its place."""

    def read(self, feature, tokens, counts):
        super().read(feature, tokens, counts)
        rows = torch.arange(len(counts), dtype=feature.dtype)
        found = torch.zeros(len(counts), 1, feature.shape[2], dtype=feature.dtype)
        found[:, 0, 0], found[:, 0, 1] = rows, torch.tensor(self.lengths, dtype=feature.dtype)
        return found

    def guess(self, feature, tokens, level, reach=None):
        super().guess(feature, tokens, level, reach)
        found = feature.clone()
        found[..., 1] += 1
        return found


@pytest.mark.parametrize(
    "options",
    [{"tree": "chain", "gamma": 3}, {"tree": "static"}, {"tree": "dynamic", "depth": 4, "top_k": 3, "nodes": 9}],
)
def test_an_oracle_is_accepted_in_full(options, target, texts, folder, monkeypatch):
    monkeypatch.setattr(eagle, "Reader", Oracle)
    decoder = Eagle(target, Sampling(), version=version_of(folder), checkpoint=folder, **options)
    network = decoder.drafter.network

    def logits(feature):
        scores = torch.randn(*feature.shape[:2], len(network.vocabulary), dtype=feature.dtype).clamp(max=4)
        for (row, column), place in zip(
            itertools.product(*map(range, feature.shape[:2])), feature[..., 1].flatten().tolist(), strict=True
        ):
            text = texts[int(feature[row, column, 0])]
            token = text[min(int(place) + 1, len(text) - 1)]
            scores[row, column, network.vocabulary.of(torch.tensor(token))] = 30.0
        return scores, feature

    monkeypatch.setattr(network, "vocabulary", DraftVocabulary.all(target.vocab_size))
    monkeypatch.setattr(network, "logits", logits)
    steps = decode(decoder, texts, limit=16)
    levels = decoder.drafter.growth.levels
    for step in steps[1:]:
        assert all(kept == levels for kept, tokens in zip(step.accepted, step.tokens, strict=True) if tokens)


def test_a_network_that_knows_the_text_drafts_most_of_it(target, texts, folder):
    decoder = Eagle(target, Sampling(), version=version_of(folder), checkpoint=folder, tree="chain", gamma=3)
    steps = decode(decoder, texts)
    assert sum(len(row) for step in steps[1:] for row in step.tokens) > 1.8 * 4 * (len(steps) - 1) * 0.75
    assert [row[:20] for row in collected(steps)] == [text[-24:-4] for text in texts]


def collected(steps):
    rows = [[] for _ in steps[0].tokens]
    for step in steps:
        for row, new in zip(rows, step.tokens, strict=True):
            row.extend(new)
    return rows


def test_kept_tokens_are_read_again_with_true_features(target, texts, folder, monkeypatch):
    """Each round's catch-up is what one pass of the target over the committed text gives, pair by pair."""
    decoder = Eagle(
        target, Sampling(), version=version_of(folder), checkpoint=folder, tree="dynamic", depth=3, top_k=3, nodes=8
    )
    spec, seen = decoder.drafter.network.spec, []
    read = Reader.read

    def watched(self, feature, tokens, counts):
        seen.append((list(self.lengths), feature, tokens, list(counts)))
        return read(self, feature, tokens, counts)

    monkeypatch.setattr(Reader, "read", watched)
    decode(decoder, texts)
    cache = target.new_cache(4, 60)
    output = target.prefill([torch.tensor(text) for text in texts], cache, hidden_layers=spec.taps or (0,))
    true = decoder.drafter.network.feature(output.hidden, [output.hidden_layers[tap] for tap in spec.taps])
    assert any(min(counts) != max(counts) for _, _, _, counts in seen[1:])
    for starts, feature, tokens, counts in seen:
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            end = min(start + count, len(texts[row]) - 1)
            torch.testing.assert_close(feature[row, : end - start], true[row, start:end], atol=1e-8, rtol=1e-6)
            assert tokens[row, : end - start].tolist() == texts[row][start + 1 : end + 1]


@pytest.mark.parametrize(
    "options", [{"tree": "chain"}, {"tree": "static"}, {"tree": "dynamic", "nodes": 12, "depth": 3}]
)
def test_proposing_asks_nothing_of_the_device(options, target, folder):
    decoder = Eagle(target, Sampling(), version=version_of(folder), checkpoint=folder, **{"top_k": 4, **options})
    drafter = decoder.drafter
    context = context_of(drafter.network, target)
    drafter.reset([row[:-1] for row in context.tokens], 20)
    with torch.inference_mode(), no_host_reads():
        drafter.propose(context)


@pytest.mark.parametrize(
    "sampling, options, rule",
    [
        (Sampling(), {"tree": "static", "draw": True}, Greedy),
        (Sampling(1.0), {"tree": "dynamic"}, DeterministicTree),
        (Sampling(1.0), {"tree": "chain"}, DeterministicTree),
        (Sampling(1.0), {"tree": "chain", "draw": True}, ChainRejection),
        (Sampling(1.0), {"tree": "static", "draw": True}, TreeWithoutReplacement),
    ],
)
def test_rules(sampling, options, rule, target, folder):
    decoder = Eagle(target, sampling, version=version_of(folder), checkpoint=folder, **options)
    assert type(decoder.rule) is rule and decoder.guarantee is Guarantee.EXACT


@pytest.mark.parametrize("version, growth", [(1, Static), (2, Dynamic), (3, Dynamic)])
def test_auto_takes_the_tree_of_the_version(version, growth, target, tmp_path):
    eagle_learner(target, version if version == 3 else 1).part().save(tmp_path)
    decoder = Eagle(target, Sampling(), version=version, checkpoint=tmp_path)
    assert type(decoder.drafter.growth) is growth
    assert decoder.drafter.growth.nodes == (25 if version == 1 else 59)


def test_own_bytes_count_what_is_held_beside_the_target(target, folder):
    version = version_of(folder)
    held = Eagle(target, Sampling(), version=version, checkpoint=folder).memory()
    weights = sum(t.numel() for name, t in load_file(folder / WEIGHTS).items() if t.dim() == 2)
    assert held == {"draft_network": 8 * weights, "draft_output_matrix": 8 * 40 * 32}


def test_the_whole_vocabulary_needs_no_matrix_of_its_own(target, tmp_path):
    eagle_learner(target, 1).part().save(tmp_path)
    assert Eagle(target, Sampling(), version=1, checkpoint=tmp_path).memory()["draft_output_matrix"] == 0


# -- the preparation, and files ---------------------------------------------------------------------------------------


@pytest.fixture
def shop(target, tmp_path):
    (tmp_path / "part").mkdir()
    corpus = [Example(prompt.tolist(), [1]) for prompt in checks.prompts(target.vocab_size, (3, 8, 5, 13) * 6)]
    points = []
    shared = {"shared_cache": tmp_path / "common", "model": target, "examples": corpus}
    return TrainingContext(output=tmp_path / "part", log=points.append, **shared), points


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "lk_hybrid", "top_k": 3, "decay": 0.5},
        {"version": 1},
        {"version": 2, "unroll": 2},
        {"output": "own"},
        {"precision": "bfloat16"},
        {"fc_norm": True, "norm_output": True, "unroll": 3},
    ],
)
def test_training_writes_a_network_that_decodes(options, target, shop):
    context, points = shop
    precision = options.pop("precision", "float32")
    recipe = TrainingConfig(steps=40, batch_size=8, learning_rate=5e-3, precision=precision, evaluations=2)
    trainable = EagleTraining(
        vocabulary=40, answers=AnswerRecipe(tokens=400, limit=16, batch=8), recipe=recipe, **options
    )
    facts = trainable.fit(context)
    assert {path.name for path in context.output.iterdir()} == {WEIGHTS, CONFIG}
    losses = [point["loss"] for point in points if "loss" in point]
    assert losses[-1] < losses[0]
    assert len(facts["acceptance"]) == 5 and facts["draft_vocabulary"] <= 40 and 0 < facts["held_out_coverage"] <= 1
    version = options.get("version", 3)
    unrolled = options.get("unroll", 7 if version == 3 else 1)
    assert sum(name.startswith("loss_") for name in points[0]) == unrolled
    stored = load_file(context.output / WEIGHTS)
    assert ("lm_head.weight" in stored) == (options.get("output") == "own")
    checks.check_greedy_identity(
        lambda t, s: Eagle(t, s, version=version, checkpoint=context.output, depth=3, top_k=3, nodes=7),
        target,
        lengths=(5,),
    )


@pytest.mark.parametrize("options", [{"unroll": 0}, {"vocabulary": 0}, {"noise": -1.0}])
def test_training_refuses(options):
    with pytest.raises(ValueError, match=r"must be at least [01], got -?[01].*\. Set train\."):
        EagleTraining(**options)


def test_training_goes_on_from_a_trained_network(target, tmp_path):
    first = learner_of(target, 3)
    first.part().save(tmp_path)
    found = Part.load(tmp_path, target)
    options = {"unroll": 2, "vocabulary": 40, "start": str(tmp_path)}
    unread = Features(Answers((Example([1], [2]), Example([1], [3])), tmp_path, ""))
    learner = EagleTraining(**options).learner(target, first.vocabulary, unread)
    for name, parameter in learner.network.named_parameters():
        assert parameter.requires_grad and torch.equal(parameter, found.tensors[name].float()), name
    assert len(learner.start_sha256) == 64
    with pytest.raises(ValueError, match=r"train\.start must be a network of the sizes.*norm_output \(False instead"):
        EagleTraining(norm_output=True, **options).learner(target, first.vocabulary, unread)


def test_norms_of_states_begin_as_none(target):
    """On average; version 3 alone has the flags of EAGLE-3.1."""
    learner, batch = learner_of(target, 3, random=False, **EAGLE_3_1), ragged(target)
    begin_state_norms(learner.network.fc_norm, learner.spec.taps, batch)
    for norm, tap in zip(learner.network.fc_norm, learner.spec.taps, strict=True):
        states = batch.hidden_layers[tap][batch.present]
        assert float((norm(states).square().mean() / states.square().mean()).sqrt()) == pytest.approx(1, abs=1e-3)
    with pytest.raises(ValueError, match=r"must be false for version 1"):
        EagleTraining(version=1, norm_output=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_part_comes_back_as_it_was_written(version, target, tmp_path):
    part = eagle_learner(target, version, [[1, 2, 3, 4] * 4], 4).part()
    part.save(tmp_path)
    found = Part.load(tmp_path, target)
    assert found.spec == part.spec and torch.equal(found.vocabulary.ids, part.vocabulary.ids)
    for name, tensor in part.tensors.items():
        assert torch.equal(found.tensors[name], tensor.bfloat16())


def test_a_missing_part_names_the_command(target):
    with pytest.raises(MissingPart, match=r"no draft network.*bench train method=eagle.*method\.checkpoint="):
        Eagle(target, Sampling())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tree": "chain", "gamma": 0}, r"gamma must be at least 1, got 0\. Set"),
        ({"tree": "static", "shape": "oak"}, r"shape must be paper, small .*, got oak"),
        ({"tree": "static", "shape": [[41]]}, r"1 to 40 children, .*got 41 .*\. Name"),
        ({"tree": "dynamic", "depth": 0}, r"tree=dynamic needs .*got depth=0.*\. Correct"),
        ({"tree": "dynamic", "top_k": 41}, r"tree=dynamic needs .*got .*top_k=41.*\. Correct"),
        ({"tree": "dynamic", "depth": 6, "nodes": 5}, r"tree=dynamic needs .*got .*nodes=5.*\. Correct"),
        ({"tree": "dynamic", "depth": 2, "top_k": 2, "nodes": 7}, r"tree=dynamic needs .*got .*nodes=7.*\. Correct"),
        ({"block": True}, r"block=true needs tree=chain and draw=true, got tree=auto, draw=False"),
        ({"tree": "dynamic", "draw": True}, r"draw=True.* set method\.tree=static to draw"),
    ],
)
def test_eagle_refuses(options, message, target, folder):
    with pytest.raises(ValueError, match=message):
        Eagle(target, Sampling(), **{"version": version_of(folder), "checkpoint": folder, **options})


def test_a_network_of_another_version_is_refused(target, folder):
    other = 1 if version_of(folder) == 3 else 3
    with pytest.raises(
        ValueError, match=rf"version must be that of the trained network, .*got {other}\. Set method\.version="
    ):
        Eagle(target, Sampling(), version=other, checkpoint=folder)


def of_other_target(folder):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"layers": 9}))


def without_weight(folder):
    tensors = load_file(folder / WEIGHTS)
    tensors.pop("fc.weight")
    save_file(tensors, folder / WEIGHTS)


def with_more(folder):
    save_file(load_file(folder / WEIGHTS) | {"fd.weight": torch.ones(3)}, folder / WEIGHTS)


def torn(folder):
    (folder / WEIGHTS).write_bytes(b"torn")


def without_config(folder):
    (folder / CONFIG).unlink()


@pytest.mark.parametrize(
    "damage, message",
    [
        (of_other_target, "must be of a model like .*, got .*. Train"),
        (without_weight, r"fc\.weight \(32, .*, got .*fc\.weight missing\. Copy"),
        (with_more, r"fd\.weight none, got .*fd\.weight \(3,\)\. Copy"),
        (torn, "must hold .* as the training of method=eagle writes them, got .* Name another folder"),
        (without_config, "must hold .* as the training of method=eagle writes them, got .* Name another folder"),
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_damaged_parts_are_refused(damage, message, version, target, tmp_path):
    eagle_learner(target, version).part().save(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        Eagle(target, Sampling(), version=version, checkpoint=tmp_path)


# -- published networks -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep():
    """Enough layers for the three default taps to differ."""
    return checks.tiny_target(layers=8)


def publish(part, target, folder):
    """A part in the authors' form."""
    spec = part.spec
    tensors = {name: tensor.bfloat16() for name, tensor in part.tensors.items()}
    if spec.version == 3:
        ids = part.vocabulary.ids
        tensors["lm_head.weight"] = target.output_rows(ids)[0].bfloat16()
        tensors["d2t"] = ids - torch.arange(len(ids))
    save_file(tensors, folder / "model.safetensors")
    config = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": spec.rms_eps,
        "rope_theta": 500.0,
        "vocab_size": spec.vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_published_network_drafts_what_ours_does(version, deep, tmp_path):
    learner = eagle_learner(deep, version, [list(range(3, 33))] if version == 3 else [], 30 if version == 3 else None)
    part = learner.part()
    part = Part(replace(part.spec, rope={"rope_type": "default", "rope_theta": 500.0}), part.tensors, part.vocabulary)
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    part.save(tmp_path / "ours")
    publish(part, deep, tmp_path / "theirs")
    drafts = []
    for name in ("ours", "theirs"):
        decoder = Eagle(deep, Sampling(), 3 if version == 3 else 2, checkpoint=tmp_path / name, nodes=12, top_k=4)
        drafter = decoder.drafter
        assert drafter.network.spec == part.spec
        context = context_of(drafter.network, deep)
        drafter.reset([row[:-1] for row in context.tokens], 20)
        drafts.append(nodes_of(drafter.propose(context), 0))
    assert drafts[0] == drafts[1]


def test_heads_of_another_method_are_refused(deep, tmp_path):
    hidden, vocab = deep.hidden_size, deep.vocab_size
    tensors = {
        "0.0.linear.weight": torch.zeros(hidden, hidden),
        "0.0.linear.bias": torch.zeros(hidden),
        "0.1.weight": torch.zeros(vocab, hidden),
    }
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match=r"must hold heads of EAGLE, got heads of Medusa\. Use"):
        Eagle(deep, Sampling(), checkpoint=tmp_path)


def test_unproven_rotary_positions_are_refused(deep, tmp_path):
    part = eagle_learner(deep, 1).part()
    publish(part, deep, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"proven \(default, .*\), got type dynamic\. Choose"):
        Eagle(deep, Sampling(), 1, checkpoint=tmp_path)


def test_variants_of_version_3(target):
    """Norms before fc, the normalised residual, the normalised feature of a guess, biases, an embedding of its own."""
    learner = learner_of(target, 3)
    spec = replace(
        learner.spec, norm_before_residual=True, norm_before_fc=True, fc_norm=True, norm_output=True, rms_eps=1e-6
    )
    torch.manual_seed(1)
    tensors = {name: torch.randn(shape).double() for name, shape in (spec.shapes() | spec.optional()).items()}
    part = Part(spec, tensors, DraftVocabulary.all(target.vocab_size))
    part.require_shapes("here")
    network = Network(target, part)

    def normed(x, name):
        return F.rms_norm(x, x.shape[-1:], tensors[f"{name}.weight"], spec.rms_eps)

    taps = [torch.randn(1, 5, 32).double() for _ in spec.taps]
    mixed = torch.cat([normed(tap, f"fc_norm.{number}") for number, tap in enumerate(taps)], dim=-1)
    feature = F.linear(normed(mixed, "input_norm"), tensors["fc.weight"], tensors["fc.bias"])
    torch.testing.assert_close(network.feature(taps[0], taps), feature)
    tokens = torch.arange(5)[None]
    residual, beside = network.enter(feature, tokens)
    heads = network.heads(residual, beside)
    wanted = normed(feature, "midlayer.hidden_norm")
    torch.testing.assert_close(residual, wanted)
    read = torch.cat([normed(tensors["embed_tokens.weight"][tokens], "midlayer.input_layernorm"), wanted], dim=-1)
    query = F.linear(read, *(tensors[f"midlayer.self_attn.q_proj.{kind}"] for kind in ("weight", "bias")))
    torch.testing.assert_close(heads[:, :, : spec.heads].flatten(2), query)
    logits, following = network.logits(feature)
    torch.testing.assert_close(following, normed(feature, "norm"))
    torch.testing.assert_close(logits, target.head(following))

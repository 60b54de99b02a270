"""DFlash and DSpark: the network against the published computation, its drafts, its files."""

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
from methods.drafting import ABSENT, Context
from methods.engine.checkpoint_files import CONFIG, WEIGHTS, MissingPart
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import Sampling
from methods.speculative.dflash.checkpoint import Part, spread_taps
from methods.speculative.dflash.decoder import BlockDrafter, DFlash, DSpark
from methods.speculative.dflash.network import Network, Reader
from methods.speculative.dflash.trees import Chain, Dynamic
from methods.speculative.verification import BlockRejection, ChainRejection, DeterministicTree, Greedy
from tests.helpers.host_reads import no_host_reads
from tests.helpers.tiny_block_drafter import DSPARK, block_drafter, part_of, random_part, spec_of

SIZES = {
    "dflash": {},
    "dflash of DeepSpec": {"sample_from_anchor": True, "mask": 5},
    "no norms of heads": {"qk_norm": False, "heads": 2, "draft_layers": 1},
    "dspark": DSPARK,
    "dspark of speculators": {**DSPARK, "sample_from_anchor": False, "confidence_reads_markov": False, "mask": 5},
}
VOCABULARY = DraftVocabulary(torch.arange(3, 50), 61)

every_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())


@pytest.fixture(scope="module")
def target():
    return checks.tiny_target()


# -- the network ------------------------------------------------------------------------------------------------------


class Published:
    """The computation as it is published, from scratch: every layer reads all features and the block anew."""

    def __init__(self, part, target):
        self.spec, self.ids = part.spec, part.vocabulary.ids
        self.tensors = {name: tensor.double() for name, tensor in part.tensors.items()}
        everything = torch.arange(target.vocab_size)
        self.embedding = self.tensors.get("embed_tokens.weight", target.embed(everything))
        self.output = self.tensors.get("lm_head.weight", target.output_rows(self.ids)[0])

    def norm(self, x, name):
        return x * (x.square().mean(-1, keepdim=True) + self.spec.rms_eps).rsqrt() * self.tensors[f"{name}.weight"]

    def product(self, x, name):
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def turned(self, heads, first):
        """Rotary positions of heads [place, head, d], by pairs of halves."""
        half = heads.shape[-1] // 2
        frequencies = 1.0 / self.spec.rope["rope_theta"] ** (torch.arange(half).float() / half)  # in 32 bit, as theirs
        angles = (first + torch.arange(len(heads)).float())[:, None, None] * frequencies
        (a, b), cos, sin = heads.split(half, dim=-1), angles.cos().double(), angles.sin().double()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def hidden(self, taps, anchor):
        """What the output matrix reads at every place of a block after the features of ``taps`` [n, D] each."""
        spec, places = self.spec, len(taps[0])
        features = self.norm(self.product(torch.cat(taps, dim=-1), "fc"), "hidden_norm")
        mask = self.tensors["mask_embedding"] if spec.mask is None else self.embedding[spec.mask]
        x = torch.stack([self.embedding[anchor], *[mask] * (spec.block - 1)])
        for number in range(spec.draft_layers):
            layer = f"layers.{number}"
            normed = self.norm(x, f"{layer}.input_layernorm")
            both = torch.cat([features, normed])
            query = self.product(normed, f"{layer}.self_attn.q_proj").unflatten(-1, (-1, spec.head_dim))
            key = self.product(both, f"{layer}.self_attn.k_proj").unflatten(-1, (-1, spec.head_dim))
            value = self.product(both, f"{layer}.self_attn.v_proj").unflatten(-1, (-1, spec.head_dim))
            if spec.qk_norm:
                query = self.norm(query, f"{layer}.self_attn.q_norm")
                key = self.norm(key, f"{layer}.self_attn.k_norm")
            query, key = self.turned(query, places), self.turned(key, 0)
            groups = spec.heads // spec.kv_heads
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            weights = torch.einsum("qhd,khd->hqk", query, key).mul(spec.head_dim**-0.5).softmax(-1)
            mixed = torch.einsum("hqk,khd->qhd", weights, value).flatten(1)
            x = x + self.product(mixed, f"{layer}.self_attn.o_proj")
            normed = self.norm(x, f"{layer}.post_attention_layernorm")
            gate = F.silu(self.product(normed, f"{layer}.mlp.gate_proj"))
            x = x + self.product(gate * self.product(normed, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
        return self.norm(x, "norm")[spec.block - spec.drafted :]

    def logits(self, hidden, place, before):
        """Of one place, given the token before it."""
        found = hidden[place] @ self.output.T
        if self.spec.markov_rank:
            rows, out = self.tensors["markov_head.markov_w1.weight"], self.tensors["markov_head.markov_w2.weight"]
            found = found + out @ rows[before]
        return found

    def confidence(self, hidden, place, before):
        read = hidden[place]
        if self.spec.confidence_reads_markov:
            read = torch.cat([read, self.tensors["markov_head.markov_w1.weight"][before]])
        return self.product(read, "confidence_head.proj").sigmoid()[0]

    def chain(self, taps, anchor):
        """The greedy draft: tokens and the product of confidences up to each."""
        hidden, before, tokens, kept = self.hidden(taps, anchor), anchor, [], []
        for place in range(self.spec.drafted):
            if self.spec.confidence:
                kept.append(float(self.confidence(hidden, place, before)))
            before = int(self.ids[self.logits(hidden, place, before).argmax()])
            tokens.append(before)
        return tokens, list(itertools.accumulate(kept, lambda a, b: a * b))


def texts_and_states(target, taps, lengths=(13, 9, 12)):
    texts = checks.prompts(target.vocab_size, lengths)
    cache = target.new_cache(len(texts), max(lengths))
    output = target.prefill(texts, cache, hidden_layers=taps)
    return [text.tolist() for text in texts], [output.hidden_layers[tap] for tap in taps]


@every_size
@pytest.mark.parametrize("optional", [(), ("embed_tokens.weight", "lm_head.weight", "bias")], ids=["shared", "own"])
def test_the_network_computes_what_is_published(sizes, optional, target):
    """Committed places in ragged portions, rows that leave, a block after each; the reference reads all of it anew."""
    part = random_part(spec_of(target, **sizes), VOCABULARY, optional)
    network, slow = Network(target, part), Published(part, target)
    texts, states = texts_and_states(target, part.spec.taps)
    reader, rows = Reader(network, 3, 40), [0, 1, 2]
    for counts in ([4, 3, 4], [3, 4, 3], [2, 1, 0], [1, 3]):
        if len(counts) < len(rows):
            reader.keep_rows([2, 0])
            rows = [2, 0]
        starts = reader.lengths
        places = torch.tensor(
            [[min(s + i, len(texts[r]) - 1) for i in range(max(counts))] for s, r in zip(starts, rows, strict=True)]
        )
        chosen = [state[rows].gather(1, places[:, :, None].expand(-1, -1, state.shape[2])) for state in states]
        reader.read(chosen, counts)
        anchors = [texts[row][length] for row, length in zip(rows, reader.lengths, strict=True)]
        hidden = reader.block(torch.tensor(anchors))
        logits = network.logits(hidden)
        for number, row in enumerate(rows):
            length = reader.lengths[number]
            wanted = slow.hidden([state[row, :length] for state in states], anchors[number])
            torch.testing.assert_close(hidden[number], wanted)
            torch.testing.assert_close(logits[number], wanted @ slow.output.T)


def context_of(part, target, sampling=None, lengths=(7, 11)):
    """What a drafter sees behind the prefill of some prompts."""
    prompts = checks.prompts(target.vocab_size, lengths)
    cache = target.new_cache(len(prompts), 40)
    output = target.prefill(prompts, cache, hidden_layers=part.spec.taps)
    root = output.logits[:, 0].argmax(-1)
    rows = [prompt.tolist() + [token] for prompt, token in zip(prompts, root.tolist(), strict=True)]
    return Context(rows, root, output, None, sampling or Sampling(), torch.Generator().manual_seed(0))


def proposed(part, target, growth, context):
    drafter = BlockDrafter(Network(target, part), growth)
    drafter.reset([row[:-1] for row in context.tokens], 20)
    return drafter.propose(context)


def taps_of(part, context, row):
    length = len(context.tokens[row]) - 1
    return [context.output.hidden_layers[tap][row, :length] for tap in part.spec.taps]


@every_size
def test_the_greedy_chain_is_the_published_one(sizes, target):
    part = random_part(spec_of(target, **sizes), VOCABULARY)
    context = context_of(part, target)
    draft = proposed(part, target, Chain(part.spec.drafted, draw=False), context)
    for row in range(2):
        tokens, kept = Published(part, target).chain(taps_of(part, context, row), context.tokens[row][-1])
        assert draft.tokens[row].tolist() == tokens
        if kept:
            torch.testing.assert_close(draft.gains[row].tolist(), kept)
    assert draft.is_chain and draft.passes == 1 and draft.probs is None


@every_size
def test_likelihoods_of_a_chain_fall_with_its_length(sizes, target):
    part = random_part(spec_of(target, **sizes), VOCABULARY)
    gains = proposed(part, target, Chain(part.spec.drafted, draw=False), context_of(part, target)).gains
    assert ((gains > 0) & (gains < 1)).all() and (gains.diff(dim=1) < 0).all()


def test_a_chain_ends_where_confidence_does(target):
    """Rows end on their own; the columns are those of the longest; absent tokens come after present ones."""
    part = random_part(spec_of(target, **DSPARK), VOCABULARY)
    context = context_of(part, target, lengths=(7, 11, 4))
    whole = proposed(part, target, Chain(4, draw=False), context)
    every = sorted(whole.gains.flatten().tolist())
    for least in [every[0] / 2, *((a + b) / 2 for a, b in zip(every, every[1:], strict=False)), (1 + every[-1]) / 2]:
        draft = proposed(part, target, Chain(4, False, least), context)
        sizes = [sum(gain >= least for gain in row) for row in whole.gains.tolist()]
        assert draft.sizes == sizes and draft.tokens.shape[1] == max(sizes) == draft.gains.shape[1]
        for row, size in enumerate(sizes):
            assert draft.tokens[row].tolist() == whole.tokens[row].tolist()[:size] + [ABSENT] * (max(sizes) - size)


def test_where_a_drawn_chain_ends_does_not_depend_on_its_last_token(target):
    """Two draws that agree before a place agree on whether there is a token at that place."""
    part = random_part(spec_of(target, **DSPARK), VOCABULARY)
    network, ends = Network(target, part), {}
    least = float(proposed(part, target, Chain(4, False), context_of(part, target, lengths=(7,))).gains[0, 2])
    for seed in range(60):
        context = context_of(part, target, Sampling(3.0), lengths=(7,))
        context.rng.manual_seed(seed)
        drafter = BlockDrafter(network, Chain(4, True, least))
        drafter.reset([row[:-1] for row in context.tokens], 20)
        draft = drafter.propose(context)
        tokens = draft.tokens[0].tolist()
        for place in range(len(tokens) + 1):
            assert ends.setdefault(tuple(tokens[:place]), len(tokens) == place) is (len(tokens) == place)
    assert len({len(path) for path, ended in ends.items() if ended}) > 1


@every_size
def test_a_drawn_chain_reports_what_it_was_drawn_from(sizes, target):
    part = random_part(spec_of(target, **sizes), VOCABULARY)
    context = context_of(part, target, Sampling(0.7, top_k=4))
    draft = proposed(part, target, Chain(part.spec.drafted, draw=True), context)
    slow = Published(part, target)
    assert draft.gains is None
    for row in range(2):
        hidden, before = slow.hidden(taps_of(part, context, row), context.tokens[row][-1]), context.tokens[row][-1]
        for place, token in enumerate(draft.tokens[row].tolist()):
            wanted = torch.zeros(61, dtype=torch.double)
            wanted[VOCABULARY.ids] = context.sampling.probs(slow.logits(hidden, place, before))
            torch.testing.assert_close(draft.probs[row, place], wanted)
            assert wanted[token] > 0
            before = token


def nodes_of(draft, row):
    """Paths of the nodes, in the order of their columns."""
    paths = []
    for token, parent in zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True):
        assert parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def scored_paths(slow, hidden, anchor, levels, top_k, width):
    """Log-probabilities of paths: the ``top_k`` likeliest tokens after each of the ``width`` best nodes of a level."""
    every, beam = {}, {(): 0.0}
    for level in range(levels):
        found = {}
        for path, score in beam.items():
            log_probs = slow.logits(hidden, level, path[-1] if path else anchor).log_softmax(-1)
            best = log_probs.topk(top_k)
            for place, gained in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                found[(*path, int(slow.ids[place]))] = score + gained
        every |= found
        beam = dict(sorted(found.items(), key=lambda item: -item[1])[:width])
    return every


@every_size
@pytest.mark.parametrize("nodes, levels, top_k", [(9, 3, 3), (3, 3, 2), (2, 1, 5), (20, 3, 4), (7, 2, 7)])
def test_the_dynamic_tree_has_the_most_probable_paths(sizes, nodes, levels, top_k, target):
    """Of all paths where the frontier is as wide as the tree (a heap over their sums), else of those within it."""
    part = random_part(spec_of(target, **sizes), VOCABULARY)
    context = context_of(part, target)
    draft = proposed(part, target, Dynamic(nodes, levels, top_k, target.device), context)
    slow = Published(part, target)
    for row in range(2):
        anchor, hidden = context.tokens[row][-1], slow.hidden(taps_of(part, context, row), context.tokens[row][-1])
        wanted = scored_paths(slow, hidden, anchor, levels, top_k, top_k)
        best = sorted(wanted.items(), key=lambda item: -item[1])[:nodes]
        found = nodes_of(draft, row)
        assert set(found) == {path for path, _ in best} and len(found) == nodes
        gains = torch.tensor([wanted[path] for path in found], dtype=torch.double).exp()
        torch.testing.assert_close(draft.gains[row], gains)
        if top_k >= nodes:
            everything = scored_paths(slow, hidden, anchor, levels, 20, 10**6 if levels < 3 else 50)
            heap = sorted(everything.items(), key=lambda item: -item[1])[:nodes]
            assert set(found) == {path for path, _ in heap}
    assert (draft.levels, draft.width, draft.passes, draft.probs) == (levels, top_k, 1, None)


@pytest.mark.parametrize("sizes", [{}, DSPARK], ids=["dflash", "dspark"])
@pytest.mark.parametrize("growth", ["chain", "drawn chain", "tree"])
def test_drafting_reads_nothing_from_the_device(sizes, growth, target):
    part = random_part(spec_of(target, **sizes), VOCABULARY)
    context = context_of(part, target, Sampling(1.0))
    chosen = Dynamic(8, 3, 4, target.device) if growth == "tree" else Chain(3, growth == "drawn chain")
    drafter = BlockDrafter(Network(target, part), chosen)
    drafter.reset([row[:-1] for row in context.tokens], 20)
    with no_host_reads():
        drafter.propose(context)


# -- decoding ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(target):
    prompts = checks.prompts(target.vocab_size, (5, 9, 3, 12))
    written = checks.outputs(Autoregressive(target, Sampling()), prompts, 24)
    return [prompt.tolist() + row for prompt, row in zip(prompts, written, strict=True)]


@pytest.mark.parametrize("sizes", [{}, DSPARK], ids=["dflash", "dspark"])
def test_what_a_network_knows_of_the_texts_is_accepted(sizes, target, texts):
    prompts = [torch.tensor(text[:-24]) for text in texts]
    decoder = block_drafter(target, Sampling(), texts, sizes=sizes)
    steps = list(decoder.decode(prompts, 24, torch.Generator().manual_seed(0)))
    accepted = sum(sum(step.accepted) for step in steps)
    assert accepted > sum(sum(step.drafted) for step in steps) / 10, "random tokens: one in 60 at most"
    assert all(step.draft_passes == 1 for step in steps[1:])


def test_skipped_rounds_are_read(target, texts):
    """A drafter that sat out some rounds drafts as one that did not."""
    part = part_of(target, tuple(map(tuple, texts)), None, tuple(sorted(DSPARK.items())))
    drafters = [BlockDrafter(Network(target, part), Chain(4, False)) for _ in range(2)]
    rows = [torch.tensor(text) for text in texts[:2]]
    cache = target.new_cache(2, 60)
    output = target.prefill([row[:4] for row in rows], cache, hidden_layers=part.spec.taps)
    first, roots = [row[:5].tolist() for row in rows], torch.stack([row[4] for row in rows])
    context = Context(first, roots, output, None, Sampling(), torch.Generator())
    for drafter in drafters:
        drafter.reset([row[:4].tolist() for row in rows], 30)
    for number, length in enumerate((5, 7, 8)):
        draft = drafters[0].propose(context)
        if number == 2:
            again = drafters[1].propose(context)
            assert torch.equal(draft.tokens, again.tokens)
            torch.testing.assert_close(draft.gains, again.gains)
            return
        drafters[1].skip(context)
        following = (7, 8)[number]
        nodes = torch.stack([row[length - 1 : following] for row in rows])[:, :-1]
        context.output = target.forward(nodes, None, cache, hidden_layers=part.spec.taps)
        cache.advance([nodes.shape[1]] * 2)
        context.path = torch.arange(nodes.shape[1]).expand(2, -1)
        context.tokens = [row[:following].tolist() for row in rows]
        context.root = torch.stack([row[following - 1] for row in rows])


@pytest.mark.parametrize(
    "options, rule",
    [
        ({"tree": "chain"}, DeterministicTree),
        ({"tree": "chain", "draw": True}, ChainRejection),
        ({"tree": "chain", "draw": True, "block": True}, BlockRejection),
        ({"tree": "dynamic"}, DeterministicTree),
    ],
)
def test_the_rule_fits_the_draft(options, rule, target):
    assert type(block_drafter(target, Sampling(1.0), sizes=DSPARK, **options).rule) is rule
    assert type(block_drafter(target, Sampling(), sizes=DSPARK, **options).rule) is Greedy


def test_memory_counts_what_is_beside_the_target(target):
    plain = block_drafter(target, Sampling()).memory()
    heads = block_drafter(target, Sampling(), sizes=DSPARK).memory()
    assert plain["draft_output_matrix"] == 0 == plain["draft_heads"] and plain["draft_network"] > 0
    assert heads["draft_heads"] > 0
    reduced = block_drafter(target, Sampling(), [list(range(20))], vocabulary=10).memory()
    assert reduced["draft_output_matrix"] == 10 * target.hidden_size * target.dtype.itemsize


# -- options and files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, options, message",
    [
        (DSPARK, {"gamma": 0}, r"gamma must be 1 to 4, .*got 0\. Correct"),
        (DSPARK, {"gamma": 5}, r"gamma must be 1 to 4, .*got 5\. Correct"),
        ({}, {"gamma": 4}, r"gamma must be 1 to 3, .*got 4\. Correct"),
        (DSPARK, {"confidence": 1.0}, r"confidence must be 0, .*got confidence=1\.0.* Set method.confidence=0"),
        (DSPARK, {"confidence": 0.5, "tree": "dynamic"}, r"tree=dynamic and a network with that head"),
        ({"markov_rank": 4}, {"confidence": 0.5}, r"a network without that head"),
        (DSPARK, {"tree": "dynamic", "nodes": 3}, r"tree=dynamic needs .*got .*nodes=3"),
        (DSPARK, {"tree": "dynamic", "top_k": 62}, r"tree=dynamic needs .*got .*top_k=62"),
        (DSPARK, {"tree": "dynamic", "draw": True}, r"draw=True.* set method\.tree=chain to draw"),
        (DSPARK, {"block": True}, r"block=true needs tree=chain and draw=true"),
        (
            DSPARK,
            {"method": DFlash},
            r"method=dflash must be one of that method, got one of dspark\. Use method=dspark",
        ),
        ({}, {"method": DSpark}, r"method=dspark must be one of that method, got one of dflash\. Use method=dflash"),
        ({"taps": (0, 4)}, {}, r"taps of the dflash checkpoint must be layers of the target, 0 to 3, got 4"),
    ],
)
def test_what_is_refused(sizes, options, message, target):
    with pytest.raises(ValueError, match=message):
        block_drafter(target, Sampling(), sizes=sizes, **options)


@pytest.mark.parametrize("method", [DFlash, DSpark])
def test_without_a_network(method, target):
    with pytest.raises(MissingPart, match=f"{method.kind} has no draft network .*bench train method={method.kind}"):
        method(target, Sampling())


@every_size
def test_files_bring_back_the_network(sizes, target, tmp_path):
    part = random_part(spec_of(target, **sizes), VOCABULARY, ("lm_head.weight",))
    part.save(tmp_path)
    found = Part.load(tmp_path, target)
    assert found.spec == part.spec and torch.equal(found.vocabulary.ids, part.vocabulary.ids)
    assert found.tensors.keys() == part.tensors.keys()
    for name, tensor in part.tensors.items():
        assert torch.equal(found.tensors[name], tensor.bfloat16())


def test_files_of_another_network_are_refused(target, tmp_path):
    random_part(spec_of(target, **DSPARK), VOCABULARY).save(tmp_path)
    weights, config = load_file(tmp_path / WEIGHTS), json.loads((tmp_path / CONFIG).read_text())
    save_file({name: tensor for name, tensor in weights.items() if name != "norm.weight"}, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"norm\.weight .*missing"):
        Part.load(tmp_path, target)
    save_file(weights, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"must be of a model like .*'vocab_size': 62"):
        Part.load(tmp_path, checks.tiny_target(vocab_size=62))
    (tmp_path / CONFIG).write_text(json.dumps({**config, "blocks": 4}))
    with pytest.raises(ValueError, match="training of method=dspark"):
        Part.load(tmp_path, target)


def test_taps_are_spread_as_published():
    assert spread_taps(36, 5) == (1, 9, 17, 25, 33)
    assert spread_taps(30, 3) == (1, 14, 27)
    assert spread_taps(30, 1) == (15,)
    for layers, count in ((4, 2), (30, 0), (5, 3)):
        with pytest.raises(ValueError, match=f"for a model of {layers} layers, got {count}"):
            spread_taps(layers, count)


def test_a_spec_says_its_method(target):
    assert [spec_of(target, **sizes).kind for sizes in ({}, {"markov_rank": 2}, {"confidence": True})] == [
        "dflash",
        "dspark",
        "dspark",
    ]
    assert replace(spec_of(target), sample_from_anchor=True).drafted == 4

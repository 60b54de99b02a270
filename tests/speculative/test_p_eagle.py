"""P-EAGLE: the network against the published computation, its drafts, its training, its files, published ones."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.drafting import Context
from methods.engine.checkpoint_files import CONFIG, WEIGHTS, MissingPart
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import Sampling
from methods.speculative.dflash.trees import Chain, Dynamic
from methods.speculative.eagle.training import Places
from methods.speculative.p_eagle import network as p_eagle_network
from methods.speculative.p_eagle.checkpoint import Part
from methods.speculative.p_eagle.decoder import PEagle, PEagleDrafter
from methods.speculative.p_eagle.network import Network, Reader
from methods.speculative.p_eagle.training import PEagleLearner, PEagleTraining, begin_masks
from methods.speculative.published.formats import PEagleWeights, read
from methods.speculative.verification import BlockRejection, ChainRejection, DeterministicTree, Greedy
from methods.training.answers import AnswerRecipe
from methods.training.interface import Example, TrainingContext
from methods.training.trainer import TrainingConfig
from tests.helpers.host_reads import no_host_reads
from tests.helpers.tiny_heads import batch_of, learn_by_heart
from tests.helpers.tiny_p_eagle import p_eagle, part_of, random_part, spec_of

SIZES = {
    "own mask": {},
    "a token as mask": {"mask": 5, "layers": 3},
    "norms of states": {"fc_norm": True, "layers": 1},
    "norm before the residual": {"norm_before_residual": True},
}
VOCABULARY = DraftVocabulary(torch.arange(3, 50), 61)

every_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())


@pytest.fixture(scope="module")
def target():
    return checks.tiny_target()


# -- the network ------------------------------------------------------------------------------------------------------


class Published:
    """The computation as it is published, from scratch: every place of a text anew, then the masked ones."""

    def __init__(self, part, target):
        self.spec, self.ids = part.spec, part.vocabulary.ids
        self.tensors = {name: tensor.double() for name, tensor in part.tensors.items()}
        self.embedding = self.tensors.get("embed_tokens.weight", target.embed(torch.arange(target.vocab_size)))
        self.output = self.tensors.get("lm_head.weight", target.output_rows(self.ids)[0])

    def norm(self, x, name):
        return x * (x.square().mean(-1, keepdim=True) + self.spec.rms_eps).rsqrt() * self.tensors[f"{name}.weight"]

    def product(self, x, name):
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def turned(self, heads):
        """Rotary positions of heads [place, head, d] from place 0 on, by pairs of halves."""
        half = heads.shape[-1] // 2
        frequencies = 1.0 / self.spec.rope["rope_theta"] ** (torch.arange(half).float() / half)  # in 32 bit, as theirs
        angles = torch.arange(len(heads)).float()[:, None, None] * frequencies
        (a, b), cos, sin = heads.split(half, dim=-1), angles.cos().double(), angles.sin().double()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def feature(self, taps):
        if self.spec.fc_norm:
            taps = [self.norm(tap, f"fc_norm.{number}") for number, tap in enumerate(taps)]
        return self.product(torch.cat(list(taps), dim=-1), "fc")

    def hidden(self, taps, tokens, masks):
        """What the output matrix reads at the last of some pairs and at masked places after it."""
        spec, width = self.spec, self.spec.hidden_size
        states = [torch.cat([tap, m.expand(masks, -1)]) for tap, m in zip(taps, self.mask_states(), strict=True)]
        mask = self.tensors["mask_embedding"] if spec.mask is None else self.embedding[spec.mask]
        beside, x = torch.cat([self.embedding[tokens], mask.expand(masks, -1)]), self.feature(states)
        for number in range(spec.draft_layers):
            layer = f"layers.{number}"
            if number == 0:
                normed = self.norm(x, f"{layer}.hidden_norm")
                x = normed if spec.norm_before_residual else x
                normed = torch.cat([self.norm(beside, f"{layer}.input_layernorm"), normed], dim=-1)
            else:
                normed = self.norm(x, f"{layer}.input_layernorm")
            query, key, value = (
                self.product(normed, f"{layer}.self_attn.{name}_proj").unflatten(-1, (-1, spec.head_dim))
                for name in "qkv"
            )
            query, key, groups = self.turned(query), self.turned(key), spec.heads // spec.kv_heads
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            scores = torch.einsum("qhd,khd->hqk", query, key) * spec.head_dim**-0.5
            scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
            x = x + self.product(mixed, f"{layer}.self_attn.o_proj")
            normed = self.norm(x, f"{layer}.post_attention_layernorm")
            gate = F.silu(self.product(normed, f"{layer}.mlp.gate_proj"))
            x = x + self.product(gate * self.product(normed, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
        assert x.shape[1] == width
        return self.norm(x, "norm")[-1 - masks :]

    def mask_states(self):
        return self.tensors["mask_hidden"].view(len(self.spec.taps), -1)

    def chain(self, taps, tokens, count):
        return self.ids[(self.hidden(taps, tokens, count - 1) @ self.output.T).argmax(-1)].tolist()


def texts_and_states(target, taps, lengths=(13, 9, 12)):
    texts = checks.prompts(target.vocab_size, lengths)
    cache = target.new_cache(len(texts), max(lengths))
    output = target.prefill(texts, cache, hidden_layers=taps)
    return texts, [output.hidden_layers[tap] for tap in taps]


@every_size
@pytest.mark.parametrize("optional", [(), ("embed_tokens.weight", "lm_head.weight", "bias")], ids=["shared", "own"])
@pytest.mark.parametrize("most", [1024, 3], ids=["at once", "in pieces"])
def test_the_network_computes_what_is_published(most, sizes, optional, target, monkeypatch):
    """Committed pairs in ragged portions, rows that leave, masked places after each; the reference reads all anew."""
    monkeypatch.setattr(p_eagle_network, "_MOST_ROWS", most)
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
            [[min(s + i, len(texts[r]) - 2) for i in range(max(counts))] for s, r in zip(starts, rows, strict=True)]
        )
        chosen = [state[rows].gather(1, places[:, :, None].expand(-1, -1, state.shape[2])) for state in states]
        tokens = torch.stack([texts[row][place + 1] for row, place in zip(rows, places, strict=True)])
        found = reader.draft(network.feature(chosen), tokens, counts, 3)
        assert reader.lengths == [start + count for start, count in zip(starts, counts, strict=True)]
        for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if count:
                end = reader.lengths[place]
                wanted = slow.hidden([state[row, :end] for state in states], texts[row][1 : end + 1], 3)
                torch.testing.assert_close(found[place], wanted)
                torch.testing.assert_close(network.logits(found)[place], wanted @ slow.output.T)


# -- drafts -----------------------------------------------------------------------------------------------------------


def context_of(target, taps, sampling=None, lengths=(7, 11)):
    """What a drafter sees behind the prefill of some prompts."""
    prompts = checks.prompts(target.vocab_size, lengths)
    cache = target.new_cache(len(prompts), 40)
    output = target.prefill(prompts, cache, hidden_layers=taps)
    root = output.logits[:, 0].argmax(-1)
    rows = [prompt.tolist() + [token] for prompt, token in zip(prompts, root.tolist(), strict=True)]
    return Context(rows, root, output, None, sampling or Sampling(), torch.Generator().manual_seed(0))


@every_size
def test_a_chain_is_the_published_draft_and_takes_one_pass(sizes, target):
    part = random_part(spec_of(target, **sizes), VOCABULARY)
    context, slow = context_of(target, part.spec.taps), Published(part, target)
    drafter = PEagleDrafter(Network(target, part), Chain(5, False))
    drafter.reset([row[:-1] for row in context.tokens], 10)
    draft = drafter.propose(context)
    assert draft.passes == 1 and draft.is_chain
    for row, tokens in enumerate(context.tokens):
        taps = [context.output.hidden_layers[tap][row, : len(tokens) - 1] for tap in part.spec.taps]
        assert draft.tokens[row].tolist() == slow.chain(taps, torch.tensor(tokens[1:]), 5)


@pytest.mark.parametrize("growth", ["chain", "dynamic"])
def test_proposing_asks_nothing_of_the_device(growth, target):
    network = Network(target, random_part(spec_of(target), VOCABULARY))
    grown = Chain(4, False) if growth == "chain" else Dynamic(7, 3, 3, target.device)
    context, drafter = context_of(target, network.spec.taps), PEagleDrafter(network, grown)
    drafter.reset([row[:-1] for row in context.tokens], 10)
    with no_host_reads():
        drafter.propose(context)


def test_a_network_that_knows_the_text_drafts_some_of_it(target):
    batch = checks.prompts(target.vocab_size, (1, 2, 9, 17) * 4)
    texts = checks.outputs(Autoregressive(target, Sampling()), batch, 16)
    whole = [prompt.tolist() + text for prompt, text in zip(batch, texts, strict=True)]
    steps = list(p_eagle(target, Sampling(), whole, steps=200).decode(batch, 16, torch.Generator()))
    drafted, kept = sum(sum(step.drafted) for step in steps), sum(sum(step.accepted) for step in steps)
    assert kept > 0.2 * drafted, "of drafts of four, where the first wrong token ends a draft; 0.004 if drawn blindly"


@pytest.mark.parametrize(
    "sampling, options, rule",
    [
        (Sampling(), {"draw": True}, Greedy),
        (Sampling(0.7), {}, DeterministicTree),
        (Sampling(0.7), {"draw": True}, ChainRejection),
        (Sampling(0.7), {"draw": True, "block": True}, BlockRejection),
        (Sampling(0.7), {"tree": "dynamic"}, DeterministicTree),
    ],
)
def test_rules(sampling, options, rule, target):
    assert isinstance(p_eagle(target, sampling, **options).rule, rule)


def test_skipped_rounds_are_read_later(target):
    """A drafter that sits out rounds drafts as one that read each of them; rows that have ended stay as they are."""
    texts, part = checks.prompts(target.vocab_size, (30, 30)), part_of(target, (), None)
    network = Network(target, part)
    cache = target.new_cache(2, 40)
    prompts = [text[:9] for text in texts]
    output = target.prefill(prompts, cache, hidden_layers=part.spec.taps)
    drafters = [PEagleDrafter(network, Chain(3, False)) for _ in range(2)]
    for drafter in drafters:
        drafter.reset([prompt.tolist() for prompt in prompts], 20)
    rng = torch.Generator()
    for length in range(9, 14):
        root = torch.stack([text[length] for text in texts])
        context = Context([text[: length + 1].tolist() for text in texts], root, output, None, Sampling(), rng)
        drafts = [drafters[0].propose(context)]
        if length < 13:
            drafters[1].skip(context)
        output = target.forward(root[:, None], None, cache, hidden_layers=part.spec.taps)
        cache.advance([1, 1])
    drafts.append(drafters[1].propose(context))
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)


# -- training ---------------------------------------------------------------------------------------------------------


def learner_of(target, even=False, **sizes):
    """Random weights make every part of it matter; ``even``: only tokens of even id can be drafted."""
    torch.manual_seed(1)
    vocabulary = DraftVocabulary(torch.arange(0, target.vocab_size, 1 + even), target.vocab_size)
    learner = PEagleLearner(target, spec_of(target, **sizes), vocabulary)
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return learner


def ragged(target, lengths=(9, 4, 12), prompts=(3, 2, 7)):
    texts = [text.tolist() for text in checks.prompts(target.vocab_size, lengths)]
    return batch_of(target, texts, list(prompts), range(target.n_layers))


@pytest.mark.parametrize("sizes", [{}, {"layers": 1}, {"layers": 3, "fc_norm": True}])
def test_every_depth_of_every_place_is_what_decoding_computes(sizes, target):
    learner, batch = learner_of(target, **sizes).eval(), ragged(target)
    network, places = Network(target, learner.part()), Places.of(batch)
    with torch.no_grad():
        steps = [learner.network.scored(state) for state in learner.steps(batch, places, 4)]
        assert [len(step) for step in steps] == [len(places.row)] * 4
        for number, (row, place) in enumerate(zip(places.row.tolist(), places.place.tolist(), strict=True)):
            taps = [batch.hidden_layers[tap][row, None, : place + 1].double() for tap in learner.spec.taps]
            reader = Reader(network, 1, 40)
            feature = network.feature([tap.to(target.dtype) for tap in taps])
            found = reader.draft(feature, batch.tokens[row, None, 1 : place + 2], [place + 1], 3)
            wanted = torch.stack([step[number] for step in steps])
            torch.testing.assert_close(found[0].float(), wanted, atol=2e-4, rtol=2e-4)


def test_later_depths_keep_fewer_places_and_each_has_all_depths_before(target):
    learner, batch = learner_of(target, depths=6), ragged(target, (40, 30), (2, 2))
    places = learner.places(batch)
    count = len(places.row)
    assert sorted(zip(places.row.tolist(), places.place.tolist(), strict=True)) == sorted(
        zip(*(x.tolist() for x in (Places.of(batch).row, Places.of(batch).place)), strict=True)
    )
    with torch.no_grad():
        shares = [len(step) for step in learner.train().steps(batch, places, 6)]
        whole = list(learner.eval().steps(batch, places, 6))
        part = list(learner.train().steps(batch, places, 6))
    assert shares == [int(count * max(0.7**k, 0.2)) for k in range(6)]
    for kept, every in zip(part, whole, strict=True):
        torch.testing.assert_close(kept, every[: len(kept)], atol=1e-5, rtol=1e-5)
    orders = {tuple(learner.places(batch).place.tolist()) for _ in range(4)}
    assert len(orders) == 4, "the places of later depths are drawn anew"


def test_the_loss_is_the_mean_over_depths(target):
    learner, batch = learner_of(target, even=True).eval(), ragged(target)
    places, (weight, _) = Places.of(batch), target.output_rows(learner.vocabulary.ids)
    wanted = 0.0
    with torch.no_grad():
        for depth, state in enumerate(learner.steps(batch, places, 4)):
            entropy = []
            for number, (row, place) in enumerate(zip(places.row.tolist(), places.place.tolist(), strict=True)):
                at = place + 2 + depth
                if at < batch.lengths[row] and int(batch.tokens[row, at]) % 2 == 0:
                    taught = (batch.hidden[row, at - 1].double() @ weight.double().T).softmax(-1)
                    logits = learner.network.scored(state[number]).double() @ weight.double().T
                    entropy.append(-(taught * logits.log_softmax(-1)).sum())
            wanted += torch.stack(entropy).mean() / 4
        found, curves = learner.loss(batch)
    assert float(found) == pytest.approx(float(wanted), rel=1e-4)
    assert {f"overlap_{depth}" for depth in range(1, 5)} <= curves.keys()


def test_a_periodic_text_is_learnt(target):
    """Also by the masked places, whose inputs are all equal."""
    batch = batch_of(target, [[4, 9, 14, 19, 24, 29] * 5, [14, 19, 24, 29, 4, 9] * 4], [1, 1], range(target.n_layers))
    torch.manual_seed(0)
    learner = PEagleLearner(target, spec_of(target), DraftVocabulary.all(target.vocab_size), rate=1.0)
    begin_masks(learner.network, batch)
    written = batch.shifted(1)[1]
    taught = F.one_hot(batch.shifted(1)[0][written], target.vocab_size).float()
    learner._taught = lambda _: (taught, (written.flatten().cumsum(0) - 1).clamp(min=0).view(written.shape))
    losses = learn_by_heart(learner, batch, 60)
    hits, judged = learner.eval().hits(batch)
    assert losses[-1] < losses[0] / 2 and (hits[:4, 0] / judged[:4]).min() > 0.9


@pytest.mark.parametrize(
    "options",
    [{"loss": "lk_hybrid", "decay": 0.5}, {"output": "own", "fc_norm": True, "layers": 1}, {"precision": "bfloat16"}],
)
def test_training_writes_a_network_that_decodes(options, target, tmp_path):
    precision, points = options.pop("precision", "float32"), []
    recipe = TrainingConfig(steps=40, batch_size=8, learning_rate=5e-3, precision=precision, evaluations=2)
    (tmp_path / "part").mkdir()
    corpus = [Example(prompt.tolist(), [1]) for prompt in checks.prompts(target.vocab_size, (3, 8, 5, 13) * 6)]
    context = TrainingContext(
        output=tmp_path / "part", shared_cache=tmp_path / "common", model=target, examples=corpus, log=points.append
    )
    answers = AnswerRecipe(tokens=400, limit=16, batch=8)
    facts = PEagleTraining(vocabulary=40, depths=3, answers=answers, recipe=recipe, **options).fit(context)
    assert {path.name for path in context.output.iterdir()} == {WEIGHTS, CONFIG}
    losses = [point["loss"] for point in points if "loss" in point]
    assert losses[-1] < losses[0] and len(facts["acceptance"]) == 5 and facts["drafted"] == 3
    checks.check_greedy_identity(lambda t, s: PEagle(t, s, checkpoint=context.output), target, lengths=(5,))


@pytest.mark.parametrize(
    "options", [{"layers": 0}, {"depths": 0}, {"rate": 0.0}, {"rate": 1.5}, {"least": -0.1}, {"decay": 0.0}]
)
def test_training_refuses(options):
    with pytest.raises(ValueError, match=r"must be .*, got .*\. Set train\."):
        PEagleTraining(**options)
    with pytest.raises(ValueError, match=r"layers must be at most 4.*got 9"):
        PEagleTraining(layers=9).spec(checks.tiny_target())


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_part_comes_back_as_it_was_written(target, tmp_path):
    part = random_part(spec_of(target, fc_norm=True), VOCABULARY, ("lm_head.weight",))
    part.save(tmp_path)
    found = Part.load(tmp_path, target)
    assert found.spec == part.spec and torch.equal(found.vocabulary.ids, VOCABULARY.ids)
    assert all(torch.equal(found.tensors[name], tensor.bfloat16()) for name, tensor in part.tensors.items())


def test_refusals(target, tmp_path):
    with pytest.raises(MissingPart, match=r"no draft network.*bench train method=p_eagle"):
        PEagle(target, Sampling())
    with pytest.raises(ValueError, match=r"gamma must be at least 1 or null, got 0"):
        p_eagle(target, Sampling(), gamma=0)
    with pytest.raises(ValueError, match=r"layers_counted must be auto"):
        p_eagle(target, Sampling(), layers_counted="inputs")
    with pytest.raises(ValueError, match=r"block=true needs"):
        p_eagle(target, Sampling(1.0), block=True)
    spec = spec_of(target)
    for change, message in (({"layers": 9}, "must be of a model like"), ({"taps": (0, 1, 7)}, "taps of the p_eagle")):
        random_part(replace(spec, **change), VOCABULARY).save(tmp_path)
        with pytest.raises(ValueError, match=message):
            PEagle(target, Sampling(), checkpoint=tmp_path)
    part = random_part(spec, VOCABULARY)
    part.tensors["mask_hidden"] = torch.zeros(5)
    part.save(tmp_path)
    with pytest.raises(ValueError, match="mask_hidden"):
        PEagle(target, Sampling(), checkpoint=tmp_path)


# -- published networks -----------------------------------------------------------------------------------------------

V, LAYERS, MASK, THETA = 61, 12, 7, 1e6
IDS = torch.arange(20) * 3 + 1


@pytest.fixture(scope="module")
def deep():
    return checks.tiny_target(V, LAYERS)


def published_part(target, **sizes):
    rope = {"rope_type": "default", "rope_theta": THETA}
    spec = replace(spec_of(target, mask=MASK, **sizes), rope=rope, rms_eps=1e-6)
    return random_part(spec, DraftVocabulary(IDS, V), ("lm_head.weight",))


def layers_of(spec):
    """The configuration of a language model."""
    sizes = {"num_hidden_layers": spec.draft_layers, "num_attention_heads": spec.heads, "vocab_size": V}
    sizes |= {"num_key_value_heads": spec.kv_heads, "head_dim": spec.head_dim, "rms_norm_eps": spec.rms_eps}
    return sizes | {"hidden_size": spec.hidden_size, "intermediate_size": spec.intermediate_size, "rope_theta": THETA}


def of_speculators(spec):
    proposal = {"proposal_type": "greedy", "speculative_tokens": spec.depths}
    return {
        "speculators_model_type": "peagle",
        "mask_token_id": MASK,
        "draft_vocab_size": len(IDS),
        "fc_norm": spec.fc_norm,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in spec.taps],
        "transformer_layer_config": layers_of(spec),
        "speculators_config": {"algorithm": "peagle", "proposal_methods": [proposal]},
    }


def of_vllm(spec):
    own = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(spec.taps)}, "draft_vocab_size": len(IDS)}
    return (
        layers_of(spec) | own | {"ptd_token_id": MASK, "num_speculative_tokens": spec.depths, "fc_norm": spec.fc_norm}
    )


def write(folder, part, config, rename=lambda name: name, **more):
    """Both files, ``mask_hidden`` in the shape of theirs; tensors None are left out."""
    folder.mkdir(exist_ok=True)
    maps = {"d2t": IDS - torch.arange(len(IDS)), "t2d": torch.isin(torch.arange(V), IDS)}
    tensors = {rename(name): tensor for name, tensor in part.tensors.items()} | maps
    tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)
    tensors = {name: tensor for name, tensor in {**tensors, **more}.items() if tensor is not None}
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def midlayer(name):
    return name.replace("layers.0.", "midlayer.")


@pytest.mark.parametrize(
    "config, rename", [(of_speculators, str), (of_vllm, str), (of_vllm, midlayer)], ids=["speculators", "vLLM", "mid"]
)
def test_both_forms_draft_as_the_same_network_in_our_files(config, rename, deep, tmp_path):
    part = published_part(deep, fc_norm=True)
    (ours := tmp_path / "ours").mkdir()
    part.save(ours)
    rounded = replace(part, tensors={name: tensor.bfloat16() for name, tensor in part.tensors.items()})
    unused = {"layers.1.hidden_norm.weight": torch.ones(deep.hidden_size)}
    theirs = write(tmp_path / "theirs", rounded, config(part.spec), rename, **unused)
    found = read(theirs, deep)
    assert isinstance(found, PEagleWeights) and found.part.spec == part.spec and not found.notes
    steps = [
        [
            (step.tokens, step.accepted)
            for step in PEagle(deep, Sampling(), checkpoint=folder).decode(
                checks.prompts(V, (6, 3)), 12, torch.Generator()
            )
        ]
        for folder in (ours, theirs)
    ]
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    "change, more, message",
    [
        ({"mask_token_id": None}, {}, "the token of masked places"),
        ({"norm_output": True}, {}, "norm_output=True, a variant"),
        ({"speculators_config": {"algorithm": "eagle3"}}, {}, "names the algorithm eagle3; peagle is read"),
        ({}, {"mask_hidden": torch.zeros(1, 1, 5)}, "mask_hidden has the shape"),
        ({}, {"layers.1.input_layernorm.weight": None}, "missing: layers.1.input_layernorm.weight"),
        ({}, {"surplus": torch.zeros(1)}, "not known: surplus"),
    ],
)
def test_what_does_not_fit_is_refused(change, more, message, deep, tmp_path):
    part = published_part(deep)
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path, part, of_speculators(part.spec) | change, **more), deep)


def test_heads_of_another_method_are_refused(deep, tmp_path):
    from methods.speculative.eagle.decoder import Eagle

    part = published_part(deep)
    folder = write(tmp_path, part, of_speculators(part.spec))
    with pytest.raises(ValueError, match="must hold heads of EAGLE, got heads of PEagle"):
        Eagle(deep, Sampling(), checkpoint=folder)

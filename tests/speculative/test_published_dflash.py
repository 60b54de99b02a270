"""Published networks of DFlash and DSpark: three forms of a configuration, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import Sampling
from methods.speculative.dflash.decoder import DFlash, DSpark
from methods.speculative.eagle.decoder import Eagle
from methods.speculative.published.formats import DFlashWeights, read
from tests.helpers.tiny_block_drafter import random_part, spec_of

V, LAYERS, TAPS, MASK, THETA = 61, 8, (1, 3, 5), 7, 1e6
HEADS = {"markov_rank": 6, "confidence": True, "sample_from_anchor": True}
IDS = torch.arange(20) * 3 + 1

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def target():
    return checks.tiny_target(V, LAYERS)


def part_of(target, ids=None, optional=(), **sizes):
    rope = {"rope_type": "default", "rope_theta": THETA}
    sizes = {"taps": TAPS, "mask": MASK, "block": 5, "rope": rope, "confidence_reads_markov": False} | sizes
    if sizes.get("confidence"):
        sizes["confidence_reads_markov"] = True
    vocabulary = DraftVocabulary.all(V) if ids is None else DraftVocabulary(ids, V)
    return random_part(spec_of(target, **sizes), vocabulary, optional)


def layers_of(spec):
    """The configuration of a language model."""
    return {
        "model_type": "qwen3",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.draft_layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.rms_eps,
        "rope_theta": THETA,
        "vocab_size": V,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * spec.draft_layers,
    }


def of_authors(spec, **more):
    nested = {"mask_token_id": MASK, "target_layer_ids": list(TAPS)} | more.pop("nested", {})
    return layers_of(spec) | {"block_size": spec.block, "num_target_layers": LAYERS, "dflash_config": nested} | more


def of_deepspec(spec, **more):
    own = {"block_size": spec.block, "mask_token_id": MASK, "target_layer_ids": list(TAPS)}
    own |= {"markov_rank": spec.markov_rank, "enable_confidence_head": spec.confidence, "num_target_layers": LAYERS}
    if spec.markov_rank:
        own |= {"markov_head_type": "vanilla", "confidence_head_with_markov": True}
    return layers_of(spec) | own | more


def of_speculators(spec, **more):
    own = {"block_size": spec.block, "mask_token_id": MASK, "speculators_model_type": spec.kind}
    own |= {"aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS], "transformer_layer_config": layers_of(spec)}
    own |= {"sample_from_anchor": spec.sample_from_anchor, "speculators_config": {"algorithm": spec.kind}}
    if spec.kind == "dspark":
        own |= {"markov_rank": spec.markov_rank, "enable_confidence_head": spec.confidence}
    return own | more


def write(folder, part, config, **more):
    """Both files; tensors None are left out."""
    folder.mkdir(exist_ok=True)
    tensors = {name: tensor for name, tensor in {**part.tensors, **more}.items() if tensor is not None}
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def same(found, part):
    assert found.spec == part.spec and torch.equal(found.vocabulary.ids, part.vocabulary.ids)
    assert found.tensors.keys() == part.tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in part.tensors.items())


FORMS = {
    "authors of DFlash": ({}, of_authors),
    "DeepSpec, DFlash": ({"sample_from_anchor": True}, of_deepspec),
    "DeepSpec, DSpark": (HEADS, of_deepspec),
    "speculators, DFlash": ({}, of_speculators),
    "speculators, DSpark": (HEADS, of_speculators),
}


@pytest.mark.parametrize("sizes, config", FORMS.values(), ids=FORMS.keys())
def test_every_form_says_the_same(sizes, config, target, tmp_path):
    part = part_of(target, **sizes)
    found = read(write(tmp_path, part, config(part.spec)), target)
    assert isinstance(found, DFlashWeights) and not found.notes
    same(found.part, part)


@pytest.mark.parametrize("sizes, config", FORMS.values(), ids=FORMS.keys())
def test_a_published_network_drafts_as_the_same_one_in_our_files(sizes, config, target, tmp_path):
    part = part_of(target, **sizes)
    (ours := tmp_path / "ours").mkdir()
    part.save(ours)
    rounded = {name: tensor.bfloat16() for name, tensor in part.tensors.items()}
    theirs = write(tmp_path / "theirs", part, config(part.spec), **rounded)
    method = DSpark if part.spec.kind == "dspark" else DFlash
    batch = checks.prompts(V, (6, 3))
    steps = [
        [
            (step.tokens, step.accepted)
            for step in method(target, Sampling(), checkpoint=folder).decode(batch, 12, torch.Generator())
        ]
        for folder in (ours, theirs)
    ]
    assert steps[0] == steps[1]
    texts = checks.outputs(method(target, Sampling(), checkpoint=theirs), batch, 12)
    assert texts == checks.outputs(Autoregressive(target, Sampling()), batch, 12)


@pytest.mark.parametrize("own", [True, False])
def test_a_reduced_vocabulary_of_speculators(own, target, tmp_path):
    """The output matrix is kept unless it is a copy of the target's rows; what belongs to the verifier is left out."""
    part = part_of(target, IDS, ("lm_head.weight",), **HEADS)
    if not own:
        part.tensors["lm_head.weight"].copy_(target.output_rows(IDS)[0])
    maps = {"d2t": IDS - torch.arange(20), "t2d": torch.isin(torch.arange(V), IDS)}
    folder = write(tmp_path, part, of_speculators(part.spec, draft_vocab_size=20), **maps, verifier_x=torch.zeros(1))
    found = read(folder, target).part
    assert ("lm_head.weight" in found.tensors) is own
    same(found, part if own else type(part)(part.spec, found.tensors, part.vocabulary))


def test_copies_of_the_targets_matrices_take_no_memory(target, tmp_path):
    """DeepSpec writes both, though they are frozen; an embedding of its own is kept."""
    part, every = part_of(target, **HEADS), torch.arange(V)
    copies = {"lm_head.weight": target.output_rows(every)[0], "embed_tokens.weight": target.embed(every)}
    same(read(write(tmp_path / "copy", part, of_deepspec(part.spec), **copies), target).part, part)
    noise = torch.randn(V, target.hidden_size, generator=torch.Generator().manual_seed(0))
    scale = copies["embed_tokens.weight"].std()
    copies["embed_tokens.weight"] = copies["embed_tokens.weight"] + 0.5 * scale * noise
    found = read(write(tmp_path / "own", part, of_deepspec(part.spec), **copies), target)
    assert "embed_tokens.weight" in found.part.tensors and "embedding is its own" in found.notes[0]


def test_defaults_of_speculators(target, tmp_path):
    for number, (sizes, anchor) in enumerate((({}, False), (HEADS, True))):
        part = part_of(target, **sizes)
        config = of_speculators(part.spec)
        del config["sample_from_anchor"]
        assert read(write(tmp_path / str(number), part, config), target).part.spec.sample_from_anchor is anchor


REFUSED = {
    "sliding window": (of_authors, {"layer_types": ["full_attention", "sliding_attention"]}, {}, "sliding windows"),
    "causal block": (of_authors, {"is_causal": True}, {}, "is_causal=True, a variant that is not read"),
    "limit of logits": (of_deepspec, {"final_logit_softcapping": 30.0}, {}, "final_logit_softcapping=30.0"),
    "gated": (of_deepspec, {"markov_head_type": "gated"}, {}, "markov_head_type=gated, a variant"),
    "unknown setting": (of_authors, {"nested": {"selector_rank": 4}}, {}, "selector_rank, of which nothing is known"),
    "unknown tensor": (of_authors, {}, {"candidate_selector.x": torch.zeros(1)}, "not known: candidate_selector.x"),
    "missing tensor": (of_authors, {}, {"norm.weight": None}, "missing: norm.weight"),
    "shape": (of_authors, {}, {"layers.0.mlp.up_proj.weight": torch.zeros(3, 32)}, r"the shape \(3, 32\)"),
    "rank": (of_deepspec, {"markov_rank": 4}, {}, "says markov_rank 4, its file has 0"),
    "mask": (of_deepspec, {"mask_token_id": None}, {}, "mask_token_id must be a token of the target, it is None"),
    "mask beyond": (of_deepspec, {"mask_token_id": V}, {}, f"it is {V}"),
    "block": (of_deepspec, {"block_size": 1}, {}, "block_size must be at least 2, it is 1"),
    "other model": (of_authors, {"num_target_layers": 36}, {}, f"a model of 36 layers, the target has {LAYERS}"),
    "other width": (of_authors, {"vocab_size": 99}, {}, f"a vocabulary of 99, the target has {V}"),
    "no taps": (of_authors, {"nested": {"target_layer_ids": None}}, {}, "target_layer_ids must be .* it is missing"),
    "embedding tapped": (of_authors, {"nested": {"target_layer_ids": [-1, 1, 3]}}, {}, r"it is \[-1, 1, 3\]"),
    "tap beyond": (of_speculators, {"aux_hidden_state_layer_ids": [1, 3, 9]}, {}, r"1 to 8, it is \[1, 3, 9\]"),
    "settings missing": (of_authors, {"block_size": None}, {}, "block_size must be at least 2, it is None"),
}


@pytest.mark.parametrize("config, settings, tensors, message", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_read_is_refused(config, settings, tensors, message, target, tmp_path):
    part = part_of(target, sample_from_anchor=config is of_deepspec)
    folder = write(tmp_path, part, config(part.spec, **settings), **tensors)
    with pytest.raises(ValueError, match=f"a block drafter in the form of .*does not fit .*{message}"):
        read(folder, target)


def test_rotary_positions_that_are_not_proven(target, tmp_path):
    part = part_of(target)
    config = of_authors(part.spec, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ValueError, match="rotary positions that are proven .*got type dynamic"):
        read(write(tmp_path, part, config), target)


def test_heads_of_another_method(target, tmp_path):
    part = part_of(target)
    folder = write(tmp_path / "dflash", part, of_authors(part.spec))
    with pytest.raises(ValueError, match="heads of EAGLE, got heads of DFlash"):
        Eagle(target, Sampling(), checkpoint=folder)
    with pytest.raises(ValueError, match=r"method=dspark must be one of that method, got one of dflash"):
        DSpark(target, Sampling(), checkpoint=folder)
    medusa = tmp_path / "medusa"
    medusa.mkdir()
    heads = {"0.0.linear.weight": (32, 32), "0.0.linear.bias": (32,), "0.1.weight": (V, 32)}
    save_file({name: torch.zeros(shape) for name, shape in heads.items()}, medusa / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match="a network of method=dflash, got heads of Medusa"):
        DFlash(target, Sampling(), checkpoint=medusa)

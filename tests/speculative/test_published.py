"""Published heads: every format with the very names of its files, good and broken; the hub by a stand-in."""

from __future__ import annotations

import json
import pickle
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bench.contract import checks
from methods.speculative.published.files import tensors_of
from methods.speculative.published.formats import (
    LEAST_ACCEPTANCE,
    EagleWeights,
    HydraWeights,
    MedusaWeights,
    check_plausible,
    read,
)

H, V, LAYERS, INNER = 32, 61, 8, 48
HEADS, GROUPS, SIZE = 4, 2, 8
DRAFT = 20
TAPS = (1, 3, 4)  # outputs of layers 1, L // 2 - 1, L - 4

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def target():
    return checks.tiny_target(V, LAYERS)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).half()


def write(folder, file, tensors, config=None):
    folder.mkdir(exist_ok=True)
    if file.endswith(".safetensors"):
        save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


# -- Medusa -----------------------------------------------------------------------------------------------------------


def medusa(heads=5, layers=1, hidden=H, vocab=V, prefix=""):
    tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{prefix}{head}.{layer}.linear.weight"] = random(hidden, hidden, seed=head)
            tensors[f"{prefix}{head}.{layer}.linear.bias"] = random(hidden, seed=head)
        tensors[f"{prefix}{head}.{layers}.weight"] = random(vocab, hidden, seed=head)
    return tensors


MEDUSA = {"medusa_num_heads": 5, "medusa_num_layers": 1, "base_model_name_or_path": "owner/llama"}


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_1(file, layers, target, tmp_path):
    tensors = medusa(3, layers)
    write(tmp_path, file, tensors, MEDUSA | {"medusa_num_heads": 3, "medusa_num_layers": layers})
    found = read(tmp_path, target)
    assert isinstance(found, MedusaWeights) and not found.notes
    assert len(found.blocks) == len(found.outputs) == 3 and {len(head) for head in found.blocks} == {layers}
    for head in range(3):
        for layer, (weight, bias) in enumerate(found.blocks[head]):
            assert torch.equal(weight, tensors[f"{head}.{layer}.linear.weight"])
            assert torch.equal(bias, tensors[f"{head}.{layer}.linear.bias"])
        assert torch.equal(found.outputs[head], tensors[f"{head}.{layers}.weight"])


def test_a_file_is_enough(target, tmp_path):
    write(tmp_path, "medusa_lm_head.pt", medusa(2))
    assert len(read(str(tmp_path / "medusa_lm_head.pt"), target).outputs) == 2


def test_heads_are_counted_whatever_the_configuration_says(target, tmp_path):
    write(tmp_path, "medusa_lm_head.pt", medusa(5), MEDUSA | {"medusa_num_heads": 2})
    with pytest.warns(UserWarning, match="medusa_num_heads 2, its file has 5"):
        found = read(tmp_path, target)
    assert len(found.outputs) == 5 and "the file is right" in found.notes[0]


def test_a_base_model_of_another_name_is_noted(target, tmp_path):
    write(tmp_path, "medusa_lm_head.pt", medusa(), MEDUSA | {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3"})
    with pytest.warns(UserWarning, match="trained for lmsys/vicuna-7b-v1.3, the target is llama"):
        read(tmp_path, target)


def without(tensors, key):
    return {name: tensor for name, tensor in tensors.items() if name != key}


@pytest.mark.parametrize(
    "tensors, message",
    [
        (medusa(hidden=16), "for hidden size 16, the target has 32"),
        (medusa(vocab=60), "for a vocabulary of 60, the target has 61"),
        (without(medusa(), "3.0.linear.bias"), r"missing: 3\.0\.linear\.bias"),
        (without(medusa(), "2.1.weight"), r"missing: 2\.1\.weight"),
        (without(without(medusa(), "0.0.linear.weight"), "0.0.linear.bias"), r"missing: 0\.0"),
        (medusa() | {"6.0.linear.weight": random(H, H)}, r"missing: 5\.0\.linear\.weight, .*6\.1\.weight"),
        (medusa() | {"lm_head.weight": random(V, H)}, r"not known: lm_head\.weight"),
        (medusa() | {"1.0.linear.bias": random(H + 1)}, r"1\.0\.linear\.bias has the shape \(33,\), \(32,\) is needed"),
    ],
    ids=["hidden", "vocabulary", "bias", "output", "first", "gap", "extra", "shape"],
)
def test_medusa_that_does_not_fit(tensors, message, target, tmp_path):
    write(tmp_path, "medusa_lm_head.pt", tensors, MEDUSA)
    with pytest.raises(ValueError, match=f"read as heads of Medusa, does not fit llama: .*{message}"):
        read(tmp_path, target)


def test_all_that_is_wrong_is_said_at_once(target, tmp_path):
    tensors = without(medusa(vocab=60), "0.0.linear.bias") | {"extra": random(2)}
    write(tmp_path, "medusa_lm_head.pt", tensors)
    with pytest.raises(ValueError, match="vocabulary of 60.*missing: 0.*not known: extra"):
        read(tmp_path, target)


# -- Medusa-2 ---------------------------------------------------------------------------------------------------------

WHOLE = {"num_hidden_layers": LAYERS, "hidden_size": H, "architectures": ["LlamaForCausalLM"]}


def beside_the_model(folder):
    write(folder, "model.safetensors", {"model.norm.weight": random(H)}, MEDUSA | WHOLE)
    return write(folder, "medusa_lm_head.pt", medusa(2))


def among_the_weights(folder):
    tensors = {"lm_head.weight": random(V, H), **medusa(2, prefix="medusa_head.")}
    return write(folder, "model.safetensors", tensors, MEDUSA | WHOLE)


def in_shards(folder):
    heads = medusa(2, prefix="medusa_head.")
    write(folder, "model-00001-of-00002.safetensors", {"model.norm.weight": random(H)}, MEDUSA | WHOLE)
    write(folder, "model-00002-of-00002.safetensors", {"lm_head.weight": random(V, H), **heads})
    places = {"model.norm.weight": "model-00001-of-00002.safetensors"}
    places |= dict.fromkeys(["lm_head.weight", *heads], "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize("lay", [beside_the_model, among_the_weights, in_shards])
def test_medusa_2_wants_the_model_it_was_trained_with(lay, target, tmp_path, monkeypatch):
    folder = lay(tmp_path / "tuned")
    with pytest.raises(ValueError, match=f"Medusa-2.*the target is llama: model=hf model.name={folder}"):
        read(folder, target)
    monkeypatch.setattr(target, "name", str(folder / ".." / "tuned"))
    found = read(folder, target)
    assert len(found.outputs) == 2 and torch.equal(found.outputs[1], medusa(2)["1.1.weight"])


def test_a_missing_shard_is_named(target, tmp_path):
    (in_shards(tmp_path / "tuned") / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00002.safetensors, .* is missing"):
        read(tmp_path / "tuned", target)


def test_a_model_without_a_head_is_refused(target, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": "a"}}))
    with pytest.raises(ValueError, match="got a language model without a draft head"):
        read(tmp_path, target)


# -- Hydra ------------------------------------------------------------------------------------------------------------

HYDRA = {"hydra_num_heads": 3, "hydra_num_layers": 4, "hydra_head_arch": "mlp", "grounded_heads": True}


def hydra(dropout=True, heads=3, layers=4, hidden=H, vocab=V):
    """As a state dict gives it: all blocks behind the first of a head are one module, written once for each place."""
    tensors = {}
    for head in range(heads):
        for layer in range(layers):
            name = f"hydra_mlp.{head}.{2 * layer + 1 if dropout else layer}"
            width = (head + 2) * hidden if layer == 0 else hidden
            for part in ("linear", "res_connection") if layer == 0 else ("linear",):
                seed = 100 * head + (layer > 0) + 10 * (part == "linear")
                tensors[f"{name}.{part}.weight"] = random(hidden, width, seed=seed)
                tensors[f"{name}.{part}.bias"] = random(hidden, seed=seed)
        output = f"hydra_lm_head.{head}.1" if dropout else f"hydra_lm_head.{head}"
        tensors[f"{output}.weight"] = random(vocab, hidden, seed=head)
        tensors[f"{output}.bias"] = random(vocab, seed=head)
    return tensors


@pytest.mark.parametrize("dropout", [True, False])
def test_hydra(dropout, target, tmp_path):
    tensors = hydra(dropout)
    write(tmp_path, "hydra_lm_head.pt", tensors, HYDRA)
    found = read(tmp_path, target)
    assert isinstance(found, HydraWeights) and not found.notes
    assert [len(head) for head in found.blocks] == [4, 4, 4]
    for head, blocks in enumerate(found.blocks):
        weight, bias, rest, rest_bias = blocks[0]
        first = f"hydra_mlp.{head}.{1 if dropout else 0}"
        assert weight.shape == rest.shape == (H, (head + 2) * H)
        assert torch.equal(weight, tensors[f"{first}.linear.weight"]) and torch.equal(
            bias, tensors[f"{first}.linear.bias"]
        )
        assert torch.equal(rest, tensors[f"{first}.res_connection.weight"])
        assert torch.equal(rest_bias, tensors[f"{first}.res_connection.bias"])
        assert all(rest is rest_bias is None for _, _, rest, rest_bias in blocks[1:])
        assert all(torch.equal(blocks[1][0], block[0]) for block in blocks[2:])  # shared, as they were trained
        assert torch.equal(found.outputs[head][0], random(V, H, seed=head))
        assert torch.equal(found.outputs[head][1], random(V, seed=head))


@pytest.mark.parametrize(("noise", "noted"), [(0.0, False), (0.3, True)])
def test_hydra_with_the_embedding_that_the_authors_save(noise, noted, target, tmp_path):
    """Their heads hold the base model's embedding as a module, so a state dict has it."""
    copy = target.embed(torch.arange(V)).float()
    copy = copy + noise * copy.std() * torch.randn(copy.shape, generator=torch.Generator().manual_seed(3))
    write(tmp_path, "hydra_lm_head.pt", hydra() | {"input_embed_fn.weight": copy.half()}, HYDRA)
    found = read(tmp_path, target)
    assert isinstance(found, HydraWeights) and [len(head) for head in found.blocks] == [4, 4, 4]
    assert bool(found.notes) is noted and found.prefix is None


def test_hydra_without_a_bias_of_the_output(target, tmp_path):
    write(
        tmp_path,
        "hydra_lm_head.pt",
        {k: t for k, t in hydra().items() if not k.endswith("1.bias") or "mlp" in k},
        HYDRA,
    )
    assert all(bias is None for _, bias in read(tmp_path, target).outputs)


@pytest.mark.parametrize(
    "tensors, config, message",
    [
        (
            hydra() | {"prefix_embeding_layer.layers.0.mlp.up_proj.weight": random(4, 4)},
            HYDRA,
            "read as heads of Hydra.., .*missing: prefix_embeding_layer.layers.0.self_attn.q_proj.weight",
        ),
        (hydra(), HYDRA | {"hydra_head_arch": "eagle-attn"}, "architecture mlp or prefix-mlp, .*got eagle-attn"),
        (hydra(), HYDRA | {"grounded_heads": False}, "got mlp with grounded_heads=false"),
        (hydra(), HYDRA | {"hidden_state_offset": 1}, "last state .*got mlp with hidden_state_offset=1"),
        (hydra() | {"input_embed_fn.weight": random(V, 16)}, HYDRA, r"has the shape \(61, 16\), \(61, 32\)"),
        (hydra() | {"input_embed_fn.weight": random(V, H)}, HYDRA, "embedding is that of another model"),
        ({"hydra_other.weight": random(2)}, HYDRA, "Heads of Hydra must have .*, got hydra_other.weight"),
        (hydra(hidden=16), HYDRA, "for hidden size 16"),
        (hydra(vocab=62), HYDRA, "for a vocabulary of 62"),
        (without(hydra(), "hydra_mlp.1.1.res_connection.bias"), HYDRA, "missing: hydra_mlp.1.1.res_connection.bias"),
        (without(hydra(), "hydra_mlp.2.7.linear.weight"), HYDRA, "missing: hydra_mlp.2.7.linear.weight"),
        (without(hydra(), "hydra_lm_head.1.1.weight"), HYDRA, "missing: hydra_lm_head.1.weight"),
        (hydra() | {"hydra_mlp.0.1.linear.weight": random(H, 3 * H)}, HYDRA, r"has the shape \(32, 96\), \(32, 64\)"),
        (hydra() | {"odd": random(1)}, HYDRA, "not known: odd"),
    ],
)
def test_hydra_that_is_refused(tensors, config, message, target, tmp_path):
    write(tmp_path, "hydra_lm_head.pt", tensors, config)
    with pytest.raises(ValueError, match=message):
        read(tmp_path, target)


# -- EAGLE ------------------------------------------------------------------------------------------------------------

LLAMA = {
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "rms_norm_eps": 1e-5,
}


def layer(prefix, read_width, hidden=H):
    width = HEADS * SIZE * hidden // H
    groups = width // 2
    return {
        f"{prefix}self_attn.q_proj.weight": random(width, read_width),
        f"{prefix}self_attn.k_proj.weight": random(groups, read_width),
        f"{prefix}self_attn.v_proj.weight": random(groups, read_width, seed=1),
        f"{prefix}self_attn.o_proj.weight": random(hidden, width),
        f"{prefix}mlp.gate_proj.weight": random(INNER, hidden),
        f"{prefix}mlp.up_proj.weight": random(INNER, hidden, seed=1),
        f"{prefix}mlp.down_proj.weight": random(hidden, INNER),
        f"{prefix}post_attention_layernorm.weight": random(hidden),
    }


def eagle1(hidden=H, bias=True):
    tensors = {"fc.weight": random(hidden, 2 * hidden), **layer("layers.0.", hidden, hidden)}
    return tensors | ({"fc.bias": random(hidden)} if bias else {})


def embedding_of(target):
    return target.embed(torch.arange(V)).half()


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("bias", [True, False])
def test_eagle_1(file, bias, target, tmp_path):
    tensors = eagle1(bias=bias) | {"embed_tokens.weight": embedding_of(target)}
    write(tmp_path, file, tensors, LLAMA if bias else LLAMA | {"bias": False})
    found = read(tmp_path, target)
    assert isinstance(found, EagleWeights) and found.version == 1 and found.taps == () and not found.notes
    assert set(found.tensors) == set(tensors) - {"embed_tokens.weight"}
    assert all(torch.equal(found.tensors[key], tensors[key]) for key in found.tensors)
    assert found.config["rms_norm_eps"] == 1e-5


def test_a_missing_bias_that_the_configuration_implies(target, tmp_path):
    write(tmp_path, "pytorch_model.bin", eagle1(bias=False), LLAMA)
    with pytest.warns(UserWarning, match="bias=True, its file has no fc.bias"):
        read(tmp_path, target)


def test_biases_of_qwen2_and_computed_tables(target, tmp_path):
    biases = {f"layers.0.self_attn.{k}_proj.bias": random(n) for k, n in (("q", 32), ("k", 16), ("v", 16))}
    tables = {"layers.0.self_attn.rotary_emb.inv_freq": random(4)}
    write(tmp_path, "pytorch_model.bin", eagle1() | biases | tables, LLAMA)
    assert set(read(tmp_path, target).tensors) == set(eagle1() | biases)


def test_an_embedding_that_was_trained_comes_along(target, tmp_path):
    own = embedding_of(target) + 0.3 * target.embed(torch.arange(V)).std() * torch.randn(V, H).half()
    write(tmp_path, "pytorch_model.bin", eagle1() | {"embed_tokens.weight": own.half()}, LLAMA)
    with pytest.warns(UserWarning, match="token embedding is its own"):
        assert torch.equal(read(tmp_path, target).tensors["embed_tokens.weight"], own.half())


@pytest.mark.parametrize(
    "tensors, config, message",
    [
        (eagle1(hidden=16), LLAMA, "for hidden size 16, the target has 32"),
        (eagle1(), LLAMA | {"vocab_size": 64}, "for a vocabulary of 64, the target has 61"),
        (eagle1(), None, "config.json lacks hidden_size, num_attention_heads, vocab_size"),
        (without(eagle1(), "layers.0.mlp.up_proj.weight"), LLAMA, "missing: layers.0.mlp.up_proj.weight"),
        (
            eagle1() | {"layers.0.input_layernorm.weight": random(H)},
            LLAMA,
            "not known: layers.0.input_layernorm.weight",
        ),
        (eagle1() | {"layers.1.mlp.up_proj.weight": random(H)}, LLAMA, "not known: layers.1"),
        (eagle1(), LLAMA | {"num_key_value_heads": 4}, r"k_proj.weight has the shape \(16, 32\), \(32, 32\) is needed"),
        (
            eagle1() | {"fc.weight": random(H, 3 * H)},
            LLAMA,
            r"fc.weight has the shape \(32, 96\), \(32, 64\) is needed",
        ),
        (eagle1() | {"embed_tokens.weight": random(V, H)}, LLAMA, "token embedding is that of another model"),
        (eagle1() | {"embed_tokens.weight": random(V + 3, H)}, LLAMA, "embed_tokens.weight has the shape"),
    ],
)
def test_eagle_1_that_is_refused(tensors, config, message, target, tmp_path):
    write(tmp_path, "pytorch_model.bin", tensors, config)
    with pytest.raises(ValueError, match=f"read as a head of EAGLE 1 or 2, does not fit llama: .*{message}"):
        read(tmp_path, target)


IDS = torch.arange(DRAFT) * 3 + 1


def vocabulary(ids=IDS):
    return {"d2t": ids - torch.arange(len(ids)), "t2d": torch.isin(torch.arange(V), ids)}


def eagle3(prefix="midlayer.", taps=3, draft=DRAFT, hidden=H):
    return {
        "fc.weight": random(hidden, taps * hidden),
        **layer(prefix, 2 * hidden, hidden),
        f"{prefix}hidden_norm.weight": random(hidden),
        f"{prefix}input_layernorm.weight": random(hidden, seed=1),
        "norm.weight": random(hidden, seed=2),
        "lm_head.weight": random(draft, hidden),
    }


EAGLE3 = LLAMA | {"draft_vocab_size": DRAFT}


def forge(**options):
    return EAGLE3 | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": options}


def speculators(**options):
    inner = {key: value for key, value in LLAMA.items() if key != "num_hidden_layers"} | {"model_type": "llama"}
    verifier = {"name_or_path": "owner/llama"}
    return {
        "speculators_config": {"algorithm": "eagle3", "verifier": verifier},
        "speculators_model_type": "eagle3",
        "transformer_layer_config": inner,
        "draft_vocab_size": DRAFT,
        "norm_before_residual": False,
    } | options


DIALECTS = {
    "authors": ("midlayer.", EAGLE3 | {"num_hidden_layers": 40}),  # as one of the authors' says
    "SpecForge": ("midlayer.", forge()),
    "SpecForge with ids": ("midlayer.", forge(eagle_aux_hidden_state_layer_ids=list(TAPS), use_aux_hidden_state=True)),
    "speculators": ("layers.0.", speculators()),
    "speculators with ids": ("layers.0.", speculators(eagle_aux_hidden_state_layer_ids=[2, 4, 5])),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_dialects_of_eagle_3_say_the_same(dialect, target, tmp_path):
    prefix, config = DIALECTS[dialect]
    write(tmp_path, "model.safetensors", eagle3(prefix) | vocabulary(), config)
    found = read(tmp_path, target)
    assert isinstance(found, EagleWeights) and found.version == 3 and found.taps == TAPS and not found.notes
    assert not (found.norm_before_residual or found.norm_before_fc or found.fc_norm or found.norm_output)
    assert set(found.tensors) == {*eagle3(), "d2t"}
    assert all(torch.equal(found.tensors[key], tensor) for key, tensor in eagle3().items())
    assert found.tensors["d2t"].dtype == torch.int64
    assert torch.equal(torch.arange(DRAFT) + found.tensors["d2t"], IDS)
    assert (found.config["num_attention_heads"], found.config["hidden_size"]) == (HEADS, H)


def test_pickles_of_the_authors(target, tmp_path):
    write(tmp_path, "pytorch_model.bin", eagle3() | vocabulary(), EAGLE3)
    assert read(tmp_path, target).taps == TAPS


def test_a_whole_draft_vocabulary_needs_no_map(target, tmp_path):
    config = LLAMA | {"draft_vocab_size": V}
    for folder, more in (("none", {}), ("zero", vocabulary(torch.arange(V)))):
        write(tmp_path / folder, "model.safetensors", eagle3(draft=V) | more, config)
        assert read(tmp_path / folder, target).tensors["d2t"] is None


def test_flags_of_speculators(target, tmp_path):
    norms = {"input_norm.weight": random(2 * H), **{f"fc_norm.{i}.weight": random(H, seed=i) for i in range(2)}}
    flags = dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), True)
    config = speculators(eagle_aux_hidden_state_layer_ids=[3, 8], **flags)
    write(tmp_path, "model.safetensors", eagle3("layers.0.", taps=2) | vocabulary() | norms, config)
    found = read(tmp_path, target)
    assert found.taps == (2, 7)
    assert all(getattr(found, flag) for flag in flags)
    assert all(torch.equal(found.tensors[key], tensor) for key, tensor in norms.items())


def test_numbers_of_specforge_in_a_converted_configuration_are_recognised(target, tmp_path):
    config = speculators(eagle_aux_hidden_state_layer_ids=list(TAPS))
    write(tmp_path, "model.safetensors", eagle3("layers.0.") | vocabulary(), config)
    with pytest.warns(UserWarning, match=r"SpecForge's default, which counts outputs.*outputs of \[0, 2, 3\]"):
        assert read(tmp_path, target).taps == TAPS


def test_numbers_of_vllm_in_a_configuration_of_specforge_are_noted(target, tmp_path):
    write(tmp_path, "model.safetensors", eagle3() | vocabulary(), forge(eagle_aux_hidden_state_layer_ids=[2, 4, 5]))
    with pytest.warns(UserWarning, match="look like the inputs that vLLM counts"):
        assert read(tmp_path, target).taps == (2, 4, 5)


@pytest.mark.parametrize(("counted", "taps"), [("outputs", (2, 4, 5)), ("inputs", (1, 3, 4))])
def test_the_user_may_say_how_layers_are_counted(counted, taps, target, tmp_path):
    """In every dialect, and where the form alone does not tell."""
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    forms = {
        "a": (eagle3(), forge(**ids)),
        "b": (eagle3("layers.0."), speculators(**ids)),
        "c": (eagle3(), EAGLE3 | ids),
    }
    for folder, (tensors, config) in forms.items():
        write(tmp_path / folder, "model.safetensors", tensors | vocabulary(), config)
        found = read(tmp_path / folder, target, counted)
        assert found.taps == taps and not found.notes
    write(tmp_path / "d", "model.safetensors", eagle3() | vocabulary(), EAGLE3)
    with pytest.raises(ValueError, match=f"no eagle_aux_hidden_state_layer_ids, which layers_counted={counted} is"):
        read(tmp_path / "d", target, counted)


def test_numbers_of_specforge_s_default_can_be_read_as_inputs(target, tmp_path):
    config = speculators(eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    write(tmp_path, "model.safetensors", eagle3("layers.0.") | vocabulary(), config)
    assert read(tmp_path, target, "inputs").taps == (0, 2, 3)


def test_another_verifier_is_noted(target, tmp_path):
    verifier = {"algorithm": "eagle3", "verifier": {"name_or_path": "Qwen/Qwen3-8B"}}
    write(tmp_path, "model.safetensors", eagle3("layers.0.") | vocabulary(), speculators(speculators_config=verifier))
    with pytest.warns(UserWarning, match="trained for Qwen/Qwen3-8B"):
        read(tmp_path, target)


def offsets(ids):
    return {"d2t": torch.tensor(ids) - torch.arange(len(ids))}


GOOD = eagle3() | vocabulary()
ODD = {
    "hidden size": (eagle3(hidden=16) | vocabulary(), EAGLE3, "for hidden size 16, the target has 32"),
    "vocabulary": (GOOD, EAGLE3 | {"vocab_size": 64}, "for a vocabulary of 64, the target has 61"),
    "narrow": (eagle3(hidden=16), EAGLE3 | {"target_hidden_size": H}, "its own hidden size is 16, not its target's"),
    "missing": (without(GOOD, "midlayer.hidden_norm.weight"), EAGLE3, "missing: midlayer.hidden_norm.weight"),
    "extra": (GOOD | {"midlayer.self_attn.q_norm.weight": random(8)}, EAGLE3, "not known: midlayer.self_attn.q_norm"),
    "no map": (eagle3(), EAGLE3, "d2t is missing, and lm_head.weight has 20 rows for a vocabulary of 61"),
    "map length": (GOOD | {"d2t": torch.zeros(7).long()}, EAGLE3, r"d2t has the shape \(7,\), \(20,\) is needed"),
    "map range": (eagle3() | offsets([*range(19), 61]), EAGLE3, "d2t leads to ids from 0 to 61 of a vocabulary of 61"),
    "map below": (eagle3() | offsets([-1, *range(1, 20)]), EAGLE3, "d2t leads to ids from -1 to 19"),
    "map repeats": (eagle3() | offsets([0, 0, *range(2, 20)]), EAGLE3, "repeated or unordered ids"),
    "map empty": (eagle3() | offsets(range(20)), EAGLE3, "d2t is zero throughout"),
    "t2d": (GOOD | {"t2d": torch.arange(V) < DRAFT}, EAGLE3, "t2d marks 20 ids that are not the 20 which d2t leads to"),
    "t2d length": (GOOD | {"t2d": torch.ones(60).bool()}, EAGLE3, "t2d has the shape"),
    "taps beyond": (
        GOOD,
        forge(eagle_aux_hidden_state_layer_ids=[1, 14, 28]),
        r"layers \[1, 14, 28\] \(outputs of layers, as SpecForge counts\), and the target has layers 0 to 7",
    ),
    "taps unordered": (GOOD, forge(eagle_aux_hidden_state_layer_ids=[4, 3, 1]), "in ascending order are possible"),
    "taps twice": (GOOD, forge(eagle_aux_hidden_state_layer_ids=[1, 1, 4]), "different ones of these"),
    "two taps": (
        GOOD,
        forge(eagle_aux_hidden_state_layer_ids=[1, 4]),
        r"fc.weight has the shape \(32, 96\), \(32, 64\)",
    ),
    "no convention": (GOOD, EAGLE3 | {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, "is not known"),
    "no taps": (GOOD, forge(use_aux_hidden_state=False), "use_aux_hidden_state=False, a variant that is not read"),
    "input of layer 0": (
        eagle3("layers.0.") | vocabulary(),
        speculators(eagle_aux_hidden_state_layer_ids=[0, 3, 5]),
        r"layers \[-1, 2, 4\] \(\[0, 3, 5\] as inputs of layers, as speculators and vLLM count, less 1\)",
    ),
    "algorithm": (
        eagle3("layers.0.") | vocabulary(),
        speculators(speculators_config={"algorithm": "dflash"}),
        "names the algorithm dflash; eagle3 is read",
    ),
    "flag without norm": (
        eagle3("layers.0.") | vocabulary(),
        speculators(norm_before_fc=True),
        "missing: input_norm.weight",
    ),
    "norm without flag": (
        eagle3("layers.0.") | vocabulary() | {"input_norm.weight": random(3 * H)},
        speculators(),
        "not known: input_norm.weight",
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_eagle_3_that_is_refused(case, target, tmp_path):
    tensors, config, message = ODD[case]
    write(tmp_path, "pytorch_model.bin", tensors, config)
    with pytest.raises(ValueError, match=f"does not fit llama: .*{message}"):
        read(tmp_path, target)


def test_a_target_too_small_for_the_default_taps(tmp_path):
    write(tmp_path, "pytorch_model.bin", eagle3() | vocabulary(), EAGLE3)
    with pytest.raises(ValueError, match=r"outputs of layers \[1, 1, 0\].*layers 0 to 3"):
        read(tmp_path, checks.tiny_target(V, 4))


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensors",
    [{"blocks.0.layers.0.weight": random(H, H), "lm_heads.0.weight": random(V, H)}, {"layers.0.fc": random(2)}, {}],
)
def test_an_unknown_format_is_refused_with_what_was_recognised(tensors, target, tmp_path):
    write(tmp_path, "pytorch_model.bin", tensors)
    with pytest.raises(ValueError, match=f"known format .*speculators.*got {len(tensors)} tensors"):
        read(tmp_path, target)


class Runs:
    def __reduce__(self):
        return (Path.touch, (Path(__file__).with_name("was_run"),))


def test_a_pickle_cannot_run_anything(target, tmp_path):
    torch.save({"0.0.linear.weight": Runs()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="holds more than tensors, or is damaged"):
        read(tmp_path, target)
    (tmp_path / "medusa_lm_head.pt").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(ValueError, match="holds more than tensors, or is damaged"):
        read(tmp_path, target)
    assert not Path(__file__).with_name("was_run").exists()


def test_pickles_are_mapped_where_their_format_allows_it(tmp_path, monkeypatch):
    torch.save(medusa(1), tmp_path / "new.pt")
    torch.save(medusa(1), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    calls, load = [], torch.load

    def watched(file, **options):
        calls.append(options)
        return load(file, **options)

    monkeypatch.setattr(torch, "load", watched)
    for name in ("new.pt", "old.pt"):
        assert set(tensors_of(tmp_path / name)) == set(medusa(1))
    assert all(options["weights_only"] for options in calls)
    assert [bool(options.get("mmap")) for options in calls] == [True, True, False]


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("length", [0, 200])
def test_torn_files(file, length, target, tmp_path):
    write(tmp_path, file, medusa(1))
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:length])
    with pytest.raises(ValueError, match="damaged"):
        read(tmp_path, target)


def test_a_pickle_of_something_else(target, tmp_path):
    torch.save([1, 2], tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="must hold tensors by name .*, got list"):
        read(tmp_path, target)


@pytest.mark.parametrize("text, message", [("{", "must be JSON"), ("[1]", "must hold a JSON object, got list")])
def test_a_configuration_that_is_none(text, message, target, tmp_path):
    write(tmp_path, "medusa_lm_head.pt", medusa())
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read(tmp_path, target)


def test_empty_and_missing_places(target, tmp_path):
    with pytest.raises(ValueError, match="must hold a draft head .one of medusa_lm_head.safetensors.* got none"):
        read(tmp_path, target)
    for name in ("./owner/name", "~nobody/name", "a/b/c", "name"):
        with pytest.raises(ValueError, match="must be a file, a folder or a hub id"):
            read(name, target)


# -- the hub ----------------------------------------------------------------------------------------------------------


class Hub:
    """A stand-in for the hub's client: one repository, fetched file by file."""

    def __init__(self, repository, cache):
        self.repository, self.cache, self.asked = repository, cache / "0123abc", []

    def snapshot_download(self, name, allow_patterns, revision=None):
        assert (name, revision) == ("owner/heads", None)
        self.asked.append(set(allow_patterns))
        self.cache.mkdir(parents=True, exist_ok=True)
        for file in allow_patterns:
            if (self.repository / file).is_file():
                (self.cache / file).write_bytes((self.repository / file).read_bytes())
        return str(self.cache)

    def fetched(self):
        return {path.name for path in self.cache.iterdir()}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    (tmp_path / "repository").mkdir()
    found = Hub(tmp_path / "repository", tmp_path / "cache")
    module = types.SimpleNamespace(snapshot_download=found.snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return found


def test_heads_of_the_hub(hub, target):
    write(hub.repository, "medusa_lm_head.pt", medusa(), MEDUSA)
    write(hub.repository, "pytorch_model.bin", medusa())
    found = read("owner/heads", target)
    assert len(found.outputs) == 5 and found.notes == ["from the hub, revision 0123abc"]
    assert hub.fetched() == {"config.json", "medusa_lm_head.pt"} and len(hub.asked) == 1


def test_one_model_file_of_the_hub_is_enough(hub, target):
    for file in ("model.safetensors", "pytorch_model.bin"):
        write(hub.repository, file, eagle1(), LLAMA)
    read("owner/heads", target)
    assert hub.fetched() == {"config.json", "model.safetensors"}


def test_pickles_of_the_hub(hub, target):
    write(hub.repository, "pytorch_model.bin", eagle1(), LLAMA)
    assert read("owner/heads", target).version == 1


def test_only_the_shards_with_heads_are_fetched(hub, target, monkeypatch):
    in_shards(hub.repository)
    monkeypatch.setattr(target, "name", "owner/heads")
    assert len(read("owner/heads", target).outputs) == 2
    assert "model-00001-of-00002.safetensors" not in hub.fetched()


def test_the_hub_in_its_own_cache_is_the_same_model(target, tmp_path, monkeypatch):
    folder = tmp_path / "models--owner--heads" / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    in_shards(folder)
    monkeypatch.setattr(target, "name", "owner/heads")
    assert len(read(folder, target).outputs) == 2


def test_without_a_network(target, monkeypatch):
    def refuse(*args, **options):
        raise ConnectionError("no route to the hub\nand more")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=refuse))
    with pytest.raises(ValueError, match=r"hub id that can be reached \(no route to the hub\)\..*name its folder\.$"):
        read("owner/heads", target)


# -- plausible acceptance ---------------------------------------------------------------------------------------------


def test_a_head_that_drafts_next_to_nothing_is_noticed():
    warning = check_plausible("owner/heads", [[0.05, 0.5], [0.1, 0.4], []])
    assert warning is not None and "owner/heads" in warning and "8% are accepted over 2 prompts" in warning
    assert "chat template" in warning and "layer ids" in warning


@pytest.mark.parametrize("acceptance", [[[0.6, 0.4], [0.5]], [[LEAST_ACCEPTANCE]], [[0.0], [0.0], [0.9]], [], [[], []]])
def test_plausible_heads_and_silence_are_not(acceptance):
    assert check_plausible("owner/heads", acceptance) is None


def test_good_heads_give_no_warnings(target, tmp_path):
    write(tmp_path, "medusa_lm_head.pt", medusa(), MEDUSA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(tmp_path, target)

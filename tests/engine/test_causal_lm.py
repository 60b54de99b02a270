"""The engine equals transformers, for every proven family, over chains, trees, ragged rows and skipped layers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from methods.engine import linear, token_tree
from methods.engine.causal_layers import PROVEN, UnsupportedModel
from methods.engine.causal_lm import CausalLM
from methods.engine.cpu_kernels import library
from methods.engine.linear import Linear, PackedLinear, make_linear, packable

MULTIPLIERS = {
    "granite": {
        "residual_multiplier": 0.22,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "attention_multiplier": 0.0156,
    }
}


def tiny(family: str, **options):
    """A random model of a family with every weight, biases and norms included, away from its initial value."""
    config = AutoConfig.for_model(
        family,
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=5,  # SmolLM3 leaves rotary positions out of every fourth layer
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **{"head_dim": 8} | MULTIPLIERS.get(family, {}) | options,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        mean = 1.0 if parameter.dim() == 1 and family != "gemma" else 0.0
        torch.nn.init.normal_(parameter.data, mean=mean, std=0.2)
    return model


def full(model, ids):
    with torch.no_grad():
        return model(ids).logits


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


FUSED = [family for family in PROVEN if family not in ("gemma", "olmo")]  # another activation, another norm


@pytest.fixture(scope="module", params=[*PROVEN, *(f"{family}-fused" for family in FUSED)])
def pair(request):
    family, _, fused = request.param.partition("-")
    if not fused:
        model = tiny(family)
        return model, CausalLM.from_hf(model, keep_hf=True)
    if library() is None:
        pytest.skip("the kernels cannot be compiled here")
    model = tiny(family, head_dim=16)
    lm = CausalLM.from_hf(model, linear="panels", keep_hf=True)
    assert lm.fused
    return model, lm


def test_forward_equals_transformers(pair):
    model, lm = pair
    ids = torch.randint(3, 97, (2, 13))
    close(lm.forward(ids, None, lm.new_cache(2, 16)).logits, full(model, ids))


def test_chunked_ragged_prefill_then_tree(pair):
    model, lm = pair
    prompts = [torch.randint(3, 97, (n,)) for n in (9, 1, 5)]
    cache = lm.new_cache(3, 32)
    first = lm.prefill(prompts, cache, chunk=4)
    for row, prompt in enumerate(prompts):
        close(first.logits[row, 0], full(model, prompt[None])[0, -1])
    parents = torch.tensor([[-1, -1, 0, 2, 1], [-1, 0, 0, 1, 2], [-1, 0, 1, 2, 3]])
    tokens = torch.randint(3, 97, (3, 6))
    tree_logits = lm.forward(tokens, parents, cache).logits
    for row, node in ((r, n) for r in range(3) for n in range(6)):
        path = [node]
        while path[0]:
            path.insert(0, int(parents[row, path[0] - 1]) + 1)
        text = torch.cat([prompts[row], tokens[row, path]])
        close(tree_logits[row, node], full(model, text[None])[0, -1])


def test_pack_keeps_the_path(pair):
    model, lm = pair
    prompts = [torch.randint(3, 97, (n,)) for n in (6, 3)]
    cache = lm.new_cache(2, 32)
    lm.prefill(prompts, cache)
    parents, tokens = torch.tensor([[-1, -1, 0, 1, 3], [-1, 0, -1, 2, 3]]), torch.randint(3, 97, (2, 6))
    lm.forward(tokens, parents, cache)
    cache.pack(torch.tensor([[1, 3, 4], [2, 3, -1]]))
    cache.advance([4, 3])
    kept = [torch.cat([prompts[0], tokens[0, [0, 2, 4, 5]]]), torch.cat([prompts[1], tokens[1, [0, 3, 4]]])]
    root = torch.randint(3, 97, (2, 1))
    logits = lm.forward(root, None, cache).logits
    for row in range(2):
        close(logits[row, 0], full(model, torch.cat([kept[row], root[row]])[None])[0, -1])


def test_score_is_teacher_forcing(pair):
    model, lm = pair
    ids = torch.randint(3, 97, (11,))
    close(lm.score(ids, 4), full(model, ids[None])[0, 4:])


@pytest.mark.parametrize("family", ["llama", "olmo2", "gemma"])
def test_skip_view_leaves_sublayers_out(family):
    model = tiny(family)
    lm = CausalLM.from_hf(model, keep_hf=True)
    ids = torch.randint(3, 97, (1, 7))
    view = lm.skip(attention=[1], mlp=[1, 3])
    ours = view.forward(ids, None, view.new_cache(1, 8)).logits
    for layer, part in ((1, "self_attn"), (1, "mlp"), (3, "mlp")):
        module = getattr(model.model.layers[layer], part)
        out = module.o_proj if part == "self_attn" else module.down_proj
        out.weight.data.zero_()
    if family == "olmo2":  # a norm behind a zero output is still zero
        assert model.model.layers[1].post_attention_layernorm is not None
    close(ours, full(model, ids))
    assert lm.skipped_attention == frozenset()


def test_taps_are_the_hidden_states_of_transformers():
    model = tiny("qwen3")
    lm = CausalLM.from_hf(model, keep_hf=True)
    ids = torch.randint(3, 97, (1, 9))
    out = lm.forward(ids, None, lm.new_cache(1, 16), hidden_layers=(0, 3))
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    close(out.hidden_layers[0], states[1])
    close(out.hidden_layers[3], states[4])
    close(out.hidden, states[-1])
    ragged = [ids[0], ids[0, :4]]
    read = lm.prefill(ragged, lm.new_cache(2, 16), hidden_layers=(3,), chunk=4)
    close(read.hidden_layers[3][0], states[4][0])
    close(read.hidden[1, :4], states[-1][0, :4])


def test_unproven_models_are_refused_by_name():
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=16)
    )
    with pytest.raises(UnsupportedModel, match="proven equal .*llama.*got 'gpt2'"):
        CausalLM.from_hf(model)
    scaled = tiny("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(UnsupportedModel, match="'dynamic'"):
        CausalLM.from_hf(scaled)


def test_sliding_window_bounds_the_context():
    assert CausalLM.from_hf(tiny("mistral", sliding_window=32)).max_positions == 32
    assert CausalLM.from_hf(tiny("qwen2", sliding_window=32, use_sliding_window=False)).max_positions == 128


@pytest.mark.parametrize("scaling", ["linear", "llama3", "yarn"])
def test_rotary_scaling(scaling):
    parameters = {"rope_type": scaling, "factor": 4.0, "rope_theta": 1e4}
    if scaling == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    if scaling == "yarn":
        parameters |= {"original_max_position_embeddings": 32}
    model = tiny("llama", rope_parameters=parameters)
    lm = CausalLM.from_hf(model, keep_hf=True)
    ids = torch.randint(3, 97, (1, 40))
    close(lm.forward(ids, None, lm.new_cache(1, 64)).logits, full(model, ids))


def test_positions_grow_beyond_the_first_table():
    model = tiny("llama")
    model.config.max_position_embeddings = 600
    lm = CausalLM.from_hf(model, keep_hf=True)
    prompts = [torch.randint(3, 97, (n,)) for n in (300, 280)]
    cache = lm.new_cache(2, 310)
    lm.prefill(prompts, cache)
    step = lm.forward(torch.tensor([[5], [6]]), None, cache).logits
    for row, token in enumerate((5, 6)):
        close(step[row, 0], full(model, torch.cat([prompts[row], torch.tensor([token])])[None])[0, -1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_linear_equals_plain(dtype):
    if not packable(torch.device("cpu"), dtype):
        pytest.skip("oneDNN cannot pack this type here")
    weights = [torch.randn(40, 64, dtype=dtype), torch.randn(24, 64, dtype=dtype)]
    biases = [torch.randn(40, dtype=dtype), torch.randn(24, dtype=dtype)]
    plain, packed = make_linear(weights, biases, "plain"), make_linear(weights, biases, "packed")
    assert type(plain) is Linear and isinstance(packed, PackedLinear)
    for rows in (1, 2, 7, 64):
        x = torch.randn(rows, 64, dtype=dtype)
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(packed(x), plain(x), **tolerance)


@pytest.mark.skipif(not packable(torch.device("cpu"), torch.float32), reason="needs oneDNN")
@pytest.mark.skipif(library() is None, reason="needs a compiler")
@pytest.mark.parametrize(
    ("times", "chosen", "of_library"),
    [
        ((100, 90, 85), "panels", "packed"),
        ((100, 90, 100), "panels", "packed"),
        ((100, 60, 100), "packed", "packed"),
        ((60, 100, 80), "plain", "plain"),
        ((85, 100, 130), "packed", "packed"),
    ],
)
def test_the_form_is_chosen_by_measurement(times, chosen, of_library, monkeypatch):
    def time(product):
        return dict(zip(("plain", "packed", "panels"), times, strict=True))[product.func.form]

    monkeypatch.setattr(linear, "_fastest", time)
    linear.faster_form.cache_clear()
    try:
        assert make_linear([torch.randn(4, 4)], [None]).form == chosen
        assert linear.library_form(torch.device("cpu"), torch.float32) == of_library
        odd = make_linear([torch.randn(4, 5)], [None])
        assert odd.form == (of_library if chosen == "panels" else chosen)
        assert isinstance(make_linear([torch.randn(4, 4)], [None], "packed"), PackedLinear), "what was asked for holds"
    finally:
        linear.faster_form.cache_clear()


def test_packed_is_refused_where_it_cannot_be():
    with pytest.raises(ValueError, match="hardware.linear=auto"):
        make_linear([torch.randn(4, 4, dtype=torch.float64)], [None], "packed")


def test_weights_are_released_unless_kept():
    model = tiny("llama")
    size = sum(p.numel() for p in model.parameters())
    lm = CausalLM.from_hf(model)
    assert lm.hf is None
    assert sum(p.numel() for p in model.parameters()) == 0
    assert lm.weight_bytes < 4 * size + 4 * 97 * 48
    assert lm.forward(torch.tensor([[3, 4]]), None, lm.new_cache(1, 4)).logits.isfinite().all()


def test_ancestors_and_depths():
    parents = torch.tensor([[-1, 0, 0, 2, -1]])
    reach = token_tree.ancestors(parents, levels=3)
    assert token_tree.depths(reach).tolist() == [[0, 1, 2, 2, 3, 1]]
    assert reach[0, 4].tolist() == [True, True, False, True, True, False]


def test_caches_refuse_to_overflow():
    lm = CausalLM.from_hf(tiny("llama"))
    cache = lm.new_cache(1, 4)
    with pytest.raises(AssertionError, match="needs 5 slots"):
        lm.forward(torch.tensor([[1, 2, 3, 4, 5]]), None, cache)


def test_skip_refuses_unknown_layers():
    with pytest.raises(ValueError, match=r"\[5\].*0 to 4"):
        CausalLM.from_hf(tiny("llama")).skip(attention=[5])

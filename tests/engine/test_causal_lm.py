"""The engine equals transformers, for every proven family, over chains, trees, ragged rows and skipped layers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from methods.engine import causal_lm, linear, token_tree
from methods.engine.causal_layers import DENSE, PROVEN, SPARSE, UnsupportedModel
from methods.engine.causal_lm import CausalLM
from methods.engine.cpu_kernels import library, reading_groups
from methods.engine.cuda_graphs import GraphedLM
from methods.engine.linear import Linear, PackedLinear, make_linear, packable
from tests.helpers.rounds import check_rounds

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
OPTIONS = {
    "granite": {
        "residual_multiplier": 0.22,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "attention_multiplier": 0.0156,
    },
    "gemma2": {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0},
    "gemma3_text": {
        "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
        },
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
    },
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 40},
    "qwen3_moe": EXPERTS,
    "mixtral": LOCAL_EXPERTS,
    "glm4_moe": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "gpt_oss": {**LOCAL_EXPERTS, "swiglu_limit": 0.8},
}
VARIANTS = {
    **{family: (family, {}) for family in PROVEN},
    "gemma2 without caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3 with a cap": ("gemma3_text", {"final_logit_softcapping": 4.0}),
    "qwen2_moe with dense layers": ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "qwen2_moe normalised": ("qwen2_moe", {"norm_topk_prob": True, "num_experts_per_tok": 4}),
    "qwen3_moe with dense layers": ("qwen3_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True}),
    "glm4_moe without norms": ("glm4_moe", {"use_qk_norm": False, "norm_topk_prob": False, "first_k_dense_replace": 3}),
    "gpt_oss default positions": ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "glm4 turned whole": ("glm4", {"partial_rotary_factor": 1.0, "attention_bias": False}),
}
NEWER = ("gemma2", "gemma3_text", "glm4", *SPARSE)
FIRST_IS_FULL = ["full_attention", *["sliding_attention"] * 4]
USED = {"use_sliding_window": True, "max_window_layers": 2}
WINDOWS = {  # of all layers, or of some
    **{family: (family, {}) for family in ("mistral", "phi3", "mixtral", "gemma2", "gemma3_text", "gpt_oss")},
    **{family: (family, USED) for family in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3")},
    "smollm3": ("smollm3", {"use_sliding_window": True, "layer_types": FIRST_IS_FULL}),
    "gpt_oss, last layers": ("gpt_oss", {"layer_types": FIRST_IS_FULL}),
}


def tiny(family: str, **options):
    """A random model of a family with every weight, biases and norms included, away from its initial value."""
    sizes = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 5,  # SmolLM3 leaves rotary positions out of every fourth layer
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = AutoConfig.for_model(family, **(sizes | OPTIONS.get(family, {}) | options))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        mean = 1.0 if parameter.dim() == 1 and not family.startswith("gemma") else 0.0
        torch.nn.init.normal_(parameter.data, mean=mean, std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.2)
    return model


def full(model, ids):
    with torch.no_grad():
        return model(ids).logits


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


FUSED = [family for family in DENSE if not family.startswith("gemma") and family != "olmo"]  # SiLU and RMS norms


@pytest.fixture(scope="module", params=[*VARIANTS, *(f"{family}, fused" for family in FUSED)])
def pair(request):
    if request.param in VARIANTS:
        family, options = VARIANTS[request.param]
        model = tiny(family, **options)
        return model, CausalLM.from_hf(model, keep_hf=True)
    if library() is None:
        pytest.skip("the kernels cannot be compiled here")
    model = tiny(request.param.removesuffix(", fused"), head_dim=16)
    lm = CausalLM.from_hf(model, linear="panels", keep_hf=True)
    assert lm.fused
    return model, lm


@pytest.fixture(scope="module", params=WINDOWS)
def windowed(request):
    """A model whose contexts are longer than its window of 5 tokens."""
    family, options = WINDOWS[request.param]
    model = tiny(family, **{"sliding_window": 5, **options})
    lm = CausalLM.from_hf(model, keep_hf=True)
    assert lm.window == 5 and lm.max_positions == 128
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
    check_tree(model, lm, cache, prompts, torch.tensor([[-1, -1, 0, 2, 1], [-1, 0, 0, 1, 2], [-1, 0, 1, 2, 3]]))


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


def test_contexts_longer_than_the_window(windowed):
    model, lm = windowed
    ids = torch.randint(3, 97, (2, 23))
    whole = full(model, ids)
    close(lm.forward(ids, None, lm.new_cache(2, 24)).logits, whole)
    close(lm.score(ids[0], 4), whole[0, 4:])
    cache = lm.new_cache(2, 32)
    lm.prefill(list(ids[:, :9]), cache, chunk=4)
    for begin, end in ((9, 10), (10, 13), (13, 14), (14, 23)):  # of rows of the same length
        close(lm.forward(ids[:, begin:end], None, cache).logits, whole[:, begin:end])
        cache.advance([end - begin] * 2)


def test_trees_over_ragged_rows_longer_than_the_window(windowed):
    model, lm = windowed
    prompts = [torch.randint(3, 97, (n,)) for n in (17, 2, 11)]
    cache = lm.new_cache(3, 40)
    first = lm.prefill(prompts, cache, chunk=6)
    for row, prompt in enumerate(prompts):
        close(first.logits[row, 0], full(model, prompt[None])[0, -1])
    deep = [-1, -1, -1, 2, 3, 4, 5, 6]  # seven levels: positions in the tree are not those of its columns
    parents = torch.tensor([[-1, -1, 0, 2, 1, 3, 5, 6], deep, [-1, 0, 1, 2, 3, 4, 5, 6]])
    check_tree(model, lm, cache, prompts, parents)
    together = [torch.randint(3, 97, (8,)) for _ in range(2)]
    cache = lm.new_cache(2, 24)
    lm.prefill(together, cache)
    check_tree(model, lm, cache, together, parents[:2])


def check_tree(model, lm, cache, prompts, parents):
    """Every node's logits are those after its prompt and its ancestors."""
    tokens = torch.randint(3, 97, (len(prompts), parents.shape[1] + 1))
    logits = lm.forward(tokens, parents, cache).logits
    for row, node in ((r, n) for r in range(len(prompts)) for n in range(tokens.shape[1])):
        path = [node]
        while path[0]:
            path.insert(0, int(parents[row, path[0] - 1]) + 1)
        text = torch.cat([prompts[row], tokens[row, path]])
        close(logits[row, node], full(model, text[None])[0, -1])


def test_passes_of_fixed_shape_keep_the_window(windowed):
    """As CUDA graphs run them: attention reads a bucket of slots, whatever the lengths."""
    model, lm = windowed
    fixed = GraphedLM.of(lm, capture=False)
    for lengths in ((17, 13), (4, 2), (17, 3)):
        prompts = [torch.randint(3, 97, (n,)) for n in lengths]
        tokens = torch.randint(3, 97, (2, 4))
        cache = fixed.new_cache(2, 40)
        fixed.prefill(prompts, cache)
        for _ in range(3):
            logits = fixed.forward(tokens, None, cache).logits
        del cache  # the next one is the same
        for row, prompt in enumerate(prompts):
            close(logits[row], full(model, torch.cat([prompt, tokens[row]])[None])[0, -4:])
    assert fixed.graphs.captured == 1


def test_states_are_filled_with_the_positions_of_their_layer(windowed):
    """What an early exit writes for layers above it, in layers with and without a window."""
    _, lm = windowed
    prompts, tokens = [torch.randint(3, 97, (n,)) for n in (9, 4)], torch.randint(3, 97, (2, 2))
    caches = [lm.new_cache(2, 16) for _ in range(2)]
    for cache in caches:
        lm.prefill(prompts, cache)
    for layer in range(lm.n_layers):
        lm.run(lm.begin(tokens, None, caches[0]), [layer])  # every layer sees the same state: the embeddings
    lm.fill(lm.begin(tokens, None, caches[1]), range(lm.n_layers))
    torch.testing.assert_close(caches[1].store, caches[0].store, rtol=1e-5, atol=1e-5)


def test_a_window_reads_no_slot_before_it(windowed):
    """Keys before the window do not change the text, unless a layer without one sees them."""
    _, lm = windowed
    near = [i for i, layer in enumerate(lm.layers) if layer.attention.window]
    view = lm.skip(attention=[i for i in range(lm.n_layers) if i != near[0]])
    ids, root = torch.randint(3, 97, (2, 12)), torch.randint(3, 97, (2, 1))
    results = []
    for noise in (0.0, 100.0):
        cache = view.new_cache(2, 16)
        view.prefill(list(ids), cache)
        cache.store[:, :, :8] += noise  # slots 8 to 11, and its own, are the window of the 13th token
        results.append(view.forward(root, None, cache).logits)
    assert torch.equal(*results)
    cache.store[:, :, 8] += 100.0
    assert not torch.equal(results[1], view.forward(root, None, cache).logits)


@pytest.mark.parametrize("family", ["llama", "olmo2", "gemma", *NEWER])
def test_skip_view_leaves_sublayers_out(family):
    model = tiny(family)
    lm = CausalLM.from_hf(model, keep_hf=True)
    ids = torch.randint(3, 97, (1, 7))
    view = lm.skip(attention=[1], mlp=[1, 3])
    ours = view.forward(ids, None, view.new_cache(1, 8)).logits
    for layer, part in ((1, "self_attn"), (1, "mlp"), (3, "mlp")):
        module = getattr(model.model.layers[layer], part)
        for name, parameter in module.named_parameters():
            if "o_proj" in name or "down_proj" in name:  # of experts, too; biases with them
                parameter.data.zero_()
    if family == "olmo2":  # a norm behind a zero output is still zero
        assert model.model.layers[1].post_attention_layernorm is not None
    close(ours, full(model, ids))
    assert lm.skipped_attention == frozenset()


@pytest.mark.parametrize("family", ["qwen3", *NEWER])
def test_taps_are_the_hidden_states_of_transformers(family):
    model = tiny(family)
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


def test_options_without_an_equality_test_are_refused():
    with pytest.raises(UnsupportedModel, match="use_bidirectional_attention"):
        CausalLM.from_hf(tiny("gemma3_text", use_bidirectional_attention=True))
    with pytest.raises(UnsupportedModel, match="attn_logit_softcapping"):  # transformers leaves it out
        CausalLM.from_hf(tiny("gemma3_text", attn_logit_softcapping=30.0))
    with pytest.raises(UnsupportedModel, match="among all experts of a layer, got n_group=2"):
        CausalLM.from_hf(tiny("glm4_moe", n_group=2, topk_group=1))
    local = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    kinds = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": local}
    with pytest.raises(UnsupportedModel, match="'dynamic'"):
        CausalLM.from_hf(tiny("gemma3_text", rope_parameters=kinds))


def test_a_window_that_no_layer_uses_is_none():
    lm = CausalLM.from_hf(tiny("qwen2", sliding_window=32, use_sliding_window=False))
    assert lm.window is None and lm.max_positions == 128


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

    monkeypatch.setattr(linear, "_time", time)
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
    rows = [[-1, 0, 0, 2, -1], [-1, -1, 1, 1, 3]]
    every = token_tree.ancestors(torch.tensor(rows), levels=4)
    assert torch.equal(token_tree.ancestors_on_host(rows), every)
    places = torch.tensor([[7], [30]]) + token_tree.depths(every)
    assert token_tree.places_on_host(rows, [7, 30]) == places.tolist()


def test_caches_refuse_to_overflow():
    lm = CausalLM.from_hf(tiny("llama"))
    cache = lm.new_cache(1, 4)
    with pytest.raises(AssertionError, match="needs 5 slots"):
        lm.forward(torch.tensor([[1, 2, 3, 4, 5]]), None, cache)


def test_skip_refuses_unknown_layers():
    with pytest.raises(ValueError, match=r"\[5\].*0 to 4"):
        CausalLM.from_hf(tiny("llama")).skip(attention=[5])


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "smollm3", "glm4"])
def test_rounds_in_one_call_are_passes_one_by_one(family, dtype):
    """Three rows of different lengths, of which the second stands still; all of a head turns, a part, or nothing."""
    lm = CausalLM.from_hf(tiny(family, head_dim=16).to(dtype), linear="panels")
    assert lm.runs_rounds
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 97, (count,), generator=generator) for count in (7, 4, 9)]
    cache = lm.new_cache(3, 40)
    lm.prefill(prompts, cache)
    check_rounds(lm, cache)


def test_only_short_passes_run_several_rounds_in_one_call(monkeypatch):
    lm = CausalLM.from_hf(tiny("llama", head_dim=16), linear="panels")
    assert lm.runs_rounds == lm.fused
    monkeypatch.setattr(causal_lm, "_SHORT", lm.pass_bytes(1) - 1)
    assert not lm.runs_rounds and not GraphedLM.of(lm, capture=False).runs_rounds


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7))
def test_prompts_are_grouped_by_length_with_the_least_padding(lengths):
    def cost(groups):
        return sum(len(group) * max(lengths[row] for row in group) + 16 for group in groups)

    def partitions(rows):  # into runs
        for count in range(1, len(rows)):
            for rest in partitions(rows[count:]):
                yield [rows[:count], *rest]
        if rows:
            yield [rows]

    groups = reading_groups(lengths)
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    assert [row for group in groups for row in group] == order
    assert cost(groups) == min(map(cost, partitions(order)))


def test_a_prefill_in_groups_is_one_of_all_rows(pair, monkeypatch):
    _, lm = pair
    prompts = [torch.randint(3, 97, (n,)) for n in (21, 3, 40, 1, 22)]
    cache, together = lm.new_cache(5, 60), lm.new_cache(5, 60)
    assert len(reading_groups([len(prompt) for prompt in prompts])) > 1
    read = lm.prefill(prompts, cache, hidden_layers=(1,), chunk=7)
    monkeypatch.setattr("methods.engine.causal_lm.reading_groups", lambda lengths: [list(range(len(lengths)))])
    whole = lm.prefill(prompts, together, hidden_layers=(1,), chunk=7)
    assert cache.lengths == together.lengths == [len(prompt) for prompt in prompts]
    torch.testing.assert_close(read.logits, whole.logits)
    for row, prompt in enumerate(prompts):
        for layers in (lambda out: out.hidden, lambda out: out.hidden_layers[1]):
            torch.testing.assert_close(layers(read)[row, : len(prompt)], layers(whole)[row, : len(prompt)])
    root = torch.full((5, 1), 5)
    torch.testing.assert_close(lm.forward(root, None, cache).logits, lm.forward(root, None, together).logits)

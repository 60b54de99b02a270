"""GGUF files of the engine's models: read back with the format's own library, and run by transformers' reader of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, dequantize
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from methods.engine.causal_lm import CausalLM
from methods.external import gguf_file

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama_untied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "llama_biased": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True)),
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True)),
}


def random_model(name, dtype=torch.float32):
    """Every parameter is random, norms and biases too."""
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            offset = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(offset + 0.3 * torch.randn(parameter.shape))
    return model.to(dtype)


def engine(name, dtype=torch.float32):
    return CausalLM.from_hf(random_model(name, dtype), keep_hf=True)


def read(file):
    reader = GGUFReader(file)
    return {tensor.name: tensor for tensor in reader.tensors}, {
        name: field.contents() for name, field in reader.fields.items()
    }


def halves_apart(rows, heads):
    """The rows of the format in the order of transformers."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("llama3", "llama_biased")])
def test_transformers_reads_the_same_model(name, tmp_path):
    """Its reader is not ours, and knows the conventions of the format: order of rows, names, sizes.

    It takes no biases or factors of frequencies of a Llama from the file, nor the size of a head of a Qwen3.
    """
    target = engine(name)
    file = gguf_file.write(target, tmp_path)
    sizes = {"config": target.config} if name == "qwen3" else {}
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32, **sizes)
    ids = torch.randint(0, SIZES["vocab_size"], (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, target.hf(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_full_weights_are_the_models_bit_by_bit(dtype, tmp_path):
    target = engine("llama_biased", dtype)
    tensors, fields = read(gguf_file.write(target, tmp_path))
    kind = {torch.float32: Type.F32, torch.bfloat16: Type.BF16, torch.float16: Type.F16}[dtype]
    found = {name: dequantize(tensor.data, tensor.tensor_type) for name, tensor in tensors.items()}
    state = {name: tensor.float().numpy() for name, tensor in target.hf.state_dict().items()}
    layer, own = "model.layers.1.", "blk.1."
    assert np.array_equal(found["token_embd.weight"], state["model.embed_tokens.weight"])
    assert np.array_equal(found["output.weight"], state["lm_head.weight"])
    assert np.array_equal(found["output_norm.weight"], state["model.norm.weight"])
    assert np.array_equal(found[own + "attn_norm.weight"], state[layer + "input_layernorm.weight"])
    assert np.array_equal(found[own + "ffn_norm.weight"], state[layer + "post_attention_layernorm.weight"])
    for part in ("weight", "bias"):
        assert np.array_equal(halves_apart(found[own + f"attn_q.{part}"], 4), state[layer + f"self_attn.q_proj.{part}"])
        assert np.array_equal(halves_apart(found[own + f"attn_k.{part}"], 2), state[layer + f"self_attn.k_proj.{part}"])
        assert np.array_equal(found[own + f"attn_v.{part}"], state[layer + f"self_attn.v_proj.{part}"])
        assert np.array_equal(found[own + f"attn_output.{part}"], state[layer + f"self_attn.o_proj.{part}"])
    for ours, theirs in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
        assert np.array_equal(found[own + f"ffn_{ours}.weight"], state[layer + f"mlp.{theirs}.weight"])
    assert {tensor.tensor_type for tensor in tensors.values() if len(tensor.shape) == 2} == {kind}
    assert {tensor.tensor_type for tensor in tensors.values() if len(tensor.shape) == 1} == {Type.F32}
    assert fields["general.architecture"] == "llama" and fields["tokenizer.ggml.model"] == "none"
    assert fields["llama.vocab_size"] == SIZES["vocab_size"] and fields["llama.context_length"] == 256
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(target.config.rms_norm_eps)


def test_llama_3_divides_its_frequencies(tmp_path):
    """The factors are those of its rule, written down anew: whole below 16 turns, all above, mixed between."""
    target = engine("llama3")
    tensors, fields = read(gguf_file.write(target, tmp_path))
    steps = 500000.0 ** -(np.arange(0, 16, 2) / 16)
    lengths = 2 * np.pi / steps
    share = (64 / lengths - 1.0) / (4.0 - 1.0)
    mixed = 1 / ((1 - share) / 8.0 + share)
    wanted = np.where(lengths < 64 / 4.0, 1.0, np.where(lengths > 64 / 1.0, 8.0, mixed))
    assert len({round(float(factor), 3) for factor in wanted}) > 2, "all three ranges"
    np.testing.assert_allclose(tensors["rope_freqs.weight"].data, wanted, rtol=1e-5)
    assert fields["llama.rope.freq_base"] == 500000.0


@pytest.mark.parametrize(("weights", "kind", "levels"), [("q8_0", Type.Q8_0, 254), ("q4_0", Type.Q4_0, 15)])
def test_quantised_weights_are_near(weights, kind, levels, tmp_path):
    target = engine("llama")
    tensors, _ = read(gguf_file.write(target, tmp_path, weights, "q8_0"))
    assert tensors["token_embd.weight"].tensor_type == Type.Q8_0 and "output.weight" not in tensors
    down = tensors["blk.0.ffn_down.weight"]
    assert down.tensor_type == kind
    plain = target.hf.model.layers[0].mlp.down_proj.weight.detach().numpy()
    off = np.abs(dequantize(down.data, kind) - plain).reshape(-1, 3, 32)
    largest = np.abs(plain).reshape(-1, 3, 32).max(axis=2, keepdims=True)
    assert (off <= 2.3 * largest / levels).all() and off.max() > 0


def test_blocks_of_16_levels_keep_their_numbers(tmp_path):
    """What was read from Q4_1 is written as it was, up to the rounding of scale and least number to 16 bit."""
    model = random_model("llama")
    levels = torch.randint(0, 16, (64, 3, 32), generator=torch.Generator().manual_seed(1)).float()
    levels[:, :, 0], levels[:, :, 1] = 0, 15
    weight = (0.25 * levels - 2).flatten(1)  # scales and least numbers that 16 bit hold
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.copy_(weight)
    tensors, _ = read(gguf_file.write(CausalLM.from_hf(model), tmp_path, "q4_1"))
    down = tensors["blk.0.ffn_down.weight"]
    assert down.tensor_type == Type.Q4_1
    assert np.array_equal(dequantize(down.data, Type.Q4_1), weight.numpy())
    assert tensors["token_embd.weight"].tensor_type == Type.F32, "the output matrix has its own setting"


def test_the_file_is_named_by_its_content_and_written_once(tmp_path):
    first = gguf_file.write(engine("llama"), tmp_path)
    written = first.stat().st_mtime_ns
    assert gguf_file.write(engine("llama"), tmp_path) == first and first.stat().st_mtime_ns == written
    changed = random_model("llama")
    with torch.no_grad():
        changed.model.layers[1].input_layernorm.weight[0] += 1e-3
    others = {
        gguf_file.write(CausalLM.from_hf(changed), tmp_path),
        gguf_file.write(engine("llama"), tmp_path, "q8_0"),
        gguf_file.write(engine("llama"), tmp_path, "q8_0", "q8_0"),
        gguf_file.write(engine("llama3"), tmp_path),
    }
    assert {first, *others} == set(tmp_path.iterdir()) and len(others) == 4


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_file, "_encoded", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gguf_file.write(engine("llama"), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": GPT2Config.model_type}, "must be one of llama, mistral, qwen2, qwen3, got 'gpt2'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "must be default or llama3, got 'yarn'"),
        ({"hidden_act": "gelu"}, "must have SiLU"),
        ({"intermediate_size": 100}, "multiple of 32, got 64, 64, 100"),
    ],
)
def test_what_cannot_be_written_is_refused(change, said, tmp_path, monkeypatch):
    target = engine("llama")
    for name, value in change.items():
        monkeypatch.setattr(target.config, name, value)
    with pytest.raises(ValueError, match=said):
        gguf_file.write(target, tmp_path / "models", "q8_0")
    assert not list(tmp_path.iterdir())


def test_a_window_that_ends_before_the_context_is_refused(tmp_path):
    for size in (64, 512):
        lm = CausalLM.from_hf(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=size)).eval())
        if size < lm.max_positions:
            with pytest.raises(ValueError, match="sliding window of 64 tokens"):
                gguf_file.write(lm, tmp_path)
        else:
            assert gguf_file.write(lm, tmp_path).is_file()

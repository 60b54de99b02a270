"""Products with weights of 4 bits equal those with the rounded weights, of any number of rows and in whole models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from methods.engine import linear
from methods.engine.causal_lm import CausalLM
from methods.engine.linear import BLOCK, FEW_ROWS, Int4Linear, dequantised, make_linear, packable, quantised

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(not packable(torch.device("cpu"), BF16), reason="oneDNN has no bfloat16 here")


def weight_of(outputs: int = 48, inputs: int = 96, seed: int = 0) -> Tensor:
    return (torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) / 8).to(BF16)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16, 31, 64])
def test_a_product_is_that_with_the_rounded_weight(rows: int, with_bias: bool) -> None:
    weight, bias = weight_of(), torch.linspace(-1, 1, 48).to(BF16) if with_bias else None
    product = make_linear([weight[:32], weight[32:]], [None, None] if bias is None else [bias[:32], bias[32:]], "int4")
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows)).to(BF16)
    wanted = x.double() @ dequantised(*quantised(weight)).double().T + (0.0 if bias is None else bias.double())
    torch.testing.assert_close(product(x).double(), wanted, rtol=2**-7, atol=2**-6)  # the type's own rounding, twice
    assert not torch.equal(wanted, x.double() @ weight.double().T)


def test_few_rows_are_multiplied_with_blocks_and_many_with_the_copy() -> None:
    product = Int4Linear(weight_of())
    x = torch.ones(FEW_ROWS + 1, 96, dtype=BF16)
    assert torch.equal(product(x), linear.PackedLinear(product.dense)(x))
    product.weight = linear.PackedLinear(torch.zeros(48, 96, dtype=BF16)).weight
    assert product(x[:FEW_ROWS]).abs().sum() > 0 and product(x).abs().sum() == 0


def test_the_rounding_is_at_most_half_a_step_and_of_the_type() -> None:
    weight = weight_of()
    numbers, scale, zero = quantised(weight)
    assert numbers.amin() == 0 and numbers.amax() == 15
    error = (dequantised(numbers, scale, zero).float() - weight.float()).unflatten(1, (-1, BLOCK)).abs()
    bound = 0.5 * scale.float() + 2**-8 * (15 * scale.float() + 2 * zero.float().abs())
    assert (error <= bound[:, :, None]).all() and error.amax() > 0


def test_blocks_are_regained_from_their_weights() -> None:
    """What was stored in blocks is rounded no second time."""
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randint(0, 16, (32, 3, BLOCK), generator=generator, dtype=torch.int32)
    numbers[:, :, 5], numbers[:, :, 9] = 0, 15
    scale, zero = torch.rand(32, 3, generator=generator) + 0.01, torch.randn(32, 3, generator=generator)
    stored = ((numbers - 8) * scale[:, :, None] + zero[:, :, None]).flatten(1).to(BF16)
    assert torch.equal(quantised(stored)[0], numbers)
    flat = torch.full((16, BLOCK), 0.25, dtype=BF16)
    assert torch.equal(dequantised(*quantised(flat)), flat)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(16, 32), "needs bfloat16 on a CPU with oneDNN, got float32 on cpu"),
        (torch.zeros(16, 32, dtype=BF16, device="meta"), "got bfloat16 on meta"),
        (torch.zeros(16, 48, dtype=BF16), "inputs are a multiple of 32 and outputs of 16, got 48 and 16"),
        (torch.zeros(24, 32, dtype=BF16), "got 32 and 24"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(weight: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_linear([weight], [None], "int4")


@pytest.fixture(scope="module")
def models() -> tuple[CausalLM, CausalLM]:
    """A model with 4-bit weights, and one with the rounded weights in bfloat16."""
    config = LlamaConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).to(BF16).eval()
    rounded = CausalLM.from_hf(model, weights="int4", keep_hf=True)
    for layer in model.model.layers:
        for parameter in layer.parameters():
            if parameter.dim() == 2:
                parameter.data = dequantised(*quantised(parameter.data))
    return rounded, CausalLM.from_hf(model, keep_hf=True)


def close(ours: Tensor, theirs: Tensor) -> None:
    assert float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < 0.03  # some steps of bfloat16


@pytest.mark.parametrize("nodes", [1, 2, 4, 5, 9, 64])
def test_ragged_rows_and_chains(models: tuple[CausalLM, CausalLM], nodes: int) -> None:
    prompts = [torch.arange(3, 3 + length) for length in (7, 1, 12)]
    tokens = torch.arange(3 * nodes).view(3, nodes) % 90
    found = []
    for lm in models:
        cache = lm.new_cache(3, 100)
        first = lm.prefill(prompts, cache).logits
        found.append((first, lm.forward(tokens, None, cache).logits))
    close(found[0][0], found[1][0])
    close(found[0][1], found[1][1])


def test_trees_and_skipped_layers(models: tuple[CausalLM, CausalLM]) -> None:
    parents, found = torch.tensor([[-1, -1, 0, 2, 1]]), []
    for lm in (model.skip(attention=[1], mlp=[0]) for model in models):
        cache = lm.new_cache(1, 32)
        lm.prefill([torch.arange(5, 12)], cache)
        found.append(lm.forward(torch.tensor([[3, 5, 8, 2, 40, 41]]), parents, cache).logits)
    close(*found)


def test_keys_and_values_of_skipped_layers(models: tuple[CausalLM, CausalLM]) -> None:
    found = []
    for lm in models:
        cache = lm.new_cache(1, 8)
        state = lm.begin(torch.tensor([[4]]), None, cache)
        lm.run(state, range(1))
        lm.fill(state, range(1, 3))
        found.append(torch.cat([cache.view(2, 1)[0], cache.view(2, 1)[1]]))
    close(*found)


def test_bytes_name_both_copies(models: tuple[CausalLM, CausalLM]) -> None:
    rounded, plain = models
    weights = sum(p.numel() for layer in plain.hf.model.layers for p in layer.parameters() if p.dim() == 2)
    assert rounded.int4_bytes == weights // 2 + weights // BLOCK * 4 and plain.int4_bytes == 0
    assert rounded.weight_bytes == plain.weight_bytes + rounded.int4_bytes


def test_the_blocks_of_smollm2_are_rounded_no_second_time(smollm2_dir) -> None:
    """Its weights lie on 16 steps of each block, up to their rounding to bfloat16 (a thirtieth of a step)."""
    from safetensors import safe_open

    with safe_open(smollm2_dir / "model.safetensors", framework="pt") as tensors:
        for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.29.mlp.down_proj.weight"):
            weight = tensors.get_tensor(name)
            blocks = weight.float().unflatten(1, (-1, BLOCK))
            least, most = blocks.aminmax(dim=2)
            steps = (blocks - least[:, :, None]) / ((most - least) / 15)[:, :, None]
            assert float((steps - quantised(weight)[0]).abs().amax()) < 0.05


def test_greedy_texts_of_smollm2_agree(smollm2_dir) -> None:
    """Teacher forcing over the text of the full weights: nearly always the same choice, by one row and by many."""
    from transformers import AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=BF16).requires_grad_(False)
    full = CausalLM.from_hf(model, keep_hf=True)
    rounded = CausalLM.from_hf(model, weights="int4")
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    same = [0, 0]
    for request in ("Name three rivers of Europe.", "Why is the sky blue?"):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": request}], add_generation_prompt=True, return_dict=False
        )
        cache = full.new_cache(1, len(ids) + 40)
        text = [int(full.prefill([torch.tensor(ids)], cache).logits[0, 0].argmax())]
        while len(text) < 32:
            text.append(int(full.forward(torch.tensor([[text[-1]]]), None, cache).logits[0, 0].argmax()))
            cache.advance([1])
        many = rounded.score(torch.tensor(ids + text[:-1]), len(ids) - 1).argmax(-1)
        cache = rounded.new_cache(1, len(ids) + 40)
        one = [int(rounded.prefill([torch.tensor(ids)], cache).logits[0, 0].argmax())]
        for token in text[:-1]:
            one.append(int(rounded.forward(torch.tensor([[token]]), None, cache).logits[0, 0].argmax()))
            cache.advance([1])
        for form, found in enumerate((one, many.tolist())):
            same[form] += sum(a == b for a, b in zip(found, text, strict=True))
    assert min(same) >= 60, same  # of 64

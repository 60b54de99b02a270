"""Products with weights of 4 and 8 bits: what they round, their sums, and whole models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from methods.engine.causal_lm import CausalLM
from methods.engine.cpu_kernels import BLOCK, blocks_usable
from methods.engine.linear import LinearForm, dequantised, draft_form, make_linear, quantised

BF16 = torch.bfloat16
BITS: dict[LinearForm, int] = {"int4": 4, "int8": 8}
pytestmark = pytest.mark.skipif(
    not blocks_usable(torch.device("cpu"), BF16, BLOCK), reason="the kernels cannot be compiled here"
)


def weight_of(outputs: int = 48, inputs: int = 96, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    return (torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) / 8).to(dtype)


def rounded_rows(x: Tensor) -> Tensor:
    """What the kernels multiply: blocks of 32 numbers rounded to 255 steps, ties to even."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    most = blocks.abs().amax(dim=2, keepdim=True)
    inverse = torch.where(most > 0, torch.full_like(most, 127) / most, 0)
    return ((blocks.double() * inverse.double()).round() * (most / 127)).flatten(1)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 96), (1, 32), (65, 416), (200, 32)])
def test_a_product_is_that_of_rounded_rows_with_the_rounded_weight(
    form: LinearForm, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    weight, bias = weight_of(outputs, inputs, dtype=dtype), torch.linspace(-1, 1, outputs).to(dtype)
    product = make_linear([weight], [bias], form)
    exact = dequantised(quantised(weight, BITS[form]), BITS[form]).double()
    assert torch.equal(product.dense, exact.to(dtype)) and product.form == form
    for rows in (1, 2, 3, 5, 6, 7, 13, 64):
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
        x[0, :BLOCK] = 0
        found = product(x)
        wanted = rounded_rows(x).double() @ exact.T + bias.double()
        bound = {"rtol": 2**-8, "atol": 2**-9} if dtype == BF16 else {"rtol": 1e-5, "atol": 2e-6}
        torch.testing.assert_close(found.double(), wanted, **bound)
        assert all(torch.equal(product(x[row : row + 1])[0], found[row]) for row in range(rows))


def test_joined_weights_are_one_product() -> None:
    first, second, x = weight_of(32), weight_of(16, seed=1), torch.ones(3, 96, dtype=BF16)
    both = make_linear([first, second], [None, None], "int4")
    parts = [make_linear([weight], [None], "int4")(x) for weight in (first, second)]
    assert torch.equal(both(x), torch.cat(parts, dim=1))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_extremes_of_both_are_exact(bits: int) -> None:
    """Sums of the largest products, which 16-bit instructions would clip."""
    weight = torch.ones(16, 64)
    weight[:, ::2] = -1
    product = make_linear([weight], [None], "int4" if bits == 4 else "int8")
    exact = dequantised(quantised(weight, bits), bits)
    for x in (torch.full((2, 64), 3.0), torch.full((2, 64), -3.0), weight[:2], -weight[:2]):
        torch.testing.assert_close(product(x), x @ exact.T, rtol=1e-6, atol=1e-5)


def test_the_rounding_is_at_most_half_a_step_and_of_the_type() -> None:
    weight = weight_of()
    numbers, scale, zero = found = quantised(weight, 4)
    assert numbers.amin() == 0 and numbers.amax() == 15
    error = (dequantised(found, 4) - weight.float()).unflatten(1, (-1, BLOCK)).abs()
    bound = 0.5 * scale.float() + 2**-8 * (15 * scale.float() + 2 * zero.float().abs())
    assert (error <= bound[:, :, None]).all() and error.amax() > 0
    found = quantised(weight, 8)
    assert found.numbers.amin() == 1 and found.numbers.amax() == 255 and not found.zero.any()
    error = (dequantised(found, 8) - weight.float()).unflatten(1, (-1, BLOCK)).abs()
    assert (error <= ((0.5 + 127 * 2**-9) * found.scale.float())[:, :, None]).all()


def test_blocks_are_regained_from_their_weights() -> None:
    """What was stored in blocks is rounded no second time."""
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randint(0, 16, (32, 3, BLOCK), generator=generator, dtype=torch.uint8)
    numbers[:, :, 5], numbers[:, :, 9] = 0, 15
    scale, zero = torch.rand(32, 3, generator=generator) + 0.01, torch.randn(32, 3, generator=generator)
    stored = ((numbers.float() - 8) * scale[:, :, None] + zero[:, :, None]).flatten(1).to(BF16)
    assert torch.equal(quantised(stored, 4).numbers, numbers)
    numbers = torch.randint(1, 256, (32, 3, BLOCK), generator=generator, dtype=torch.uint8)
    numbers[:, :, 7] = 255
    stored = ((numbers.float() - 128) * scale[:, :, None]).flatten(1)
    assert torch.equal(quantised(stored, 8).numbers, numbers)
    flat = torch.full((16, BLOCK), 0.25, dtype=BF16)
    assert torch.equal(dequantised(quantised(flat, 4), 4), flat)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (
            torch.zeros(16, 32, dtype=torch.float16),
            r"needs bfloat16 or float32 on a CPU, and a C\+\+ compiler, or bfloat16 on an NVIDIA GPU, got float16",
        ),
        (torch.zeros(16, 32, dtype=BF16, device="meta"), "got bfloat16 on meta"),
        (torch.zeros(16, 48, dtype=BF16), "inputs are a multiple of 32, got 48"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(weight: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_linear([weight], [None], "int4")


@pytest.fixture(scope="module")
def models() -> tuple[CausalLM, CausalLM]:
    """A model with rounded weights as the kernels run it, and one of torch's operators with the same weights."""
    config = LlamaConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).to(BF16).eval()
    rounded = CausalLM.from_hf(model, weights="int4", keep_hf=True)
    for layer in model.model.layers:
        for parameter in layer.parameters():
            if parameter.dim() == 2:
                parameter.data = dequantised(quantised(parameter.data, 4), 4).to(BF16)
    model.lm_head.weight.data = dequantised(quantised(model.lm_head.weight.data, 8), 8).to(BF16)
    return rounded, CausalLM.from_hf(model, keep_hf=True, linear="plain")


def close(ours: Tensor, theirs: Tensor) -> None:
    assert (
        float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < 0.06
    )  # rows of 8 bits, on weights that are large for a model


def test_kernels_run_the_layers(models: tuple[CausalLM, CausalLM]) -> None:
    rounded, plain = models
    assert rounded.fused and rounded.batch_invariant and rounded.linear_form == rounded.weights == "int4"
    assert plain.linear_form == "plain" and not plain.int4_bytes


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


@pytest.mark.usefixtures("two_threads")
def test_bits_depend_on_nothing_else_in_a_pass(models: tuple[CausalLM, CausalLM]) -> None:
    lm, prompt, tokens = models[0], torch.arange(5, 25), torch.arange(12)[None]
    caches = [lm.new_cache(1, 64) for _ in range(2)]
    for cache, chunk in zip(caches, (512, 7), strict=True):
        lm.prefill([prompt], cache, chunk=chunk)
    together = lm.forward(tokens, None, caches[0]).logits
    for place in range(12):
        step = lm.forward(tokens[:, place : place + 1], None, caches[1]).logits
        assert torch.equal(step[0, 0], together[0, place])
        caches[1].advance([1])


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


def test_bytes_are_those_that_a_pass_reads(models: tuple[CausalLM, CausalLM]) -> None:
    rounded, plain = models
    per_block = BLOCK // 2 + 4  # numbers, scale and zero
    shapes = [p.shape for layer in plain.hf.model.layers for p in layer.parameters() if p.dim() == 2]
    least = sum(shape.numel() // BLOCK * per_block for shape in shapes)
    assert least <= rounded.int4_bytes <= 2 * least  # whole panels of outputs
    assert rounded.weight_bytes < plain.weight_bytes


def test_the_blocks_of_smollm2_are_rounded_no_second_time(smollm2_dir) -> None:
    """Its weights lie on 16 steps of each block, up to their rounding to bfloat16 (a thirtieth of a step)."""
    from safetensors import safe_open

    with safe_open(smollm2_dir / "model.safetensors", framework="pt") as tensors:
        for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.29.mlp.down_proj.weight"):
            weight = tensors.get_tensor(name)
            blocks = weight.float().unflatten(1, (-1, BLOCK))
            least, most = blocks.aminmax(dim=2)
            steps = (blocks - least[:, :, None]) / ((most - least) / 15)[:, :, None]
            assert float((steps - quantised(weight, 4).numbers).abs().amax()) < 0.05


def test_greedy_texts_of_smollm2_agree(smollm2_dir) -> None:
    """Teacher forcing over the text of the full weights: nearly always the same choice, by one row and by many."""
    from transformers import AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=BF16).requires_grad_(False)
    full = CausalLM.from_hf(model, keep_hf=True)
    rounded = CausalLM.from_hf(model, weights="int4")
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    same = 0
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
        assert one == many.tolist()
        same += sum(a == b for a, b in zip(one, text, strict=True))
    assert same >= 58  # of 64


# -- networks that draft ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "target", "weight", "form"),
    [
        ("auto", "panels", weight_of(), "int8"),
        ("auto", "int4", weight_of(), "int8"),
        ("auto", "panels", weight_of(dtype=torch.float32), "panels"),
        ("auto", "panels", weight_of(inputs=48), "panels"),
        ("auto", "panels", weight_of(inputs=33), "auto"),
        ("auto", "packed", weight_of(), "packed"),
        ("full", "panels", weight_of(), "panels"),
        ("full", "plain", weight_of(), "plain"),
        ("int4", "plain", weight_of(dtype=torch.float32), "int4"),
        ("int4", "panels", weight_of(inputs=48), "panels"),
    ],
)
def test_weights_that_draft_are_rounded_where_that_is_faster(wanted, target, weight, form) -> None:
    assert draft_form(wanted, target, weight) == form


def test_weights_that_draft_in_a_type_without_kernels_are_refused() -> None:
    with pytest.raises(ValueError, match="hardware.draft_weights=int8 needs bfloat16 or float32 .* got float16 on cpu"):
        draft_form("int8", "panels", weight_of().half())

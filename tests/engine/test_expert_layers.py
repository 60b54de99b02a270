"""Mixtures of experts: every form computes the same sum, and only of the experts that were chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from methods.engine import expert_layers
from methods.engine.causal_lm import CausalLM
from methods.engine.cpu_kernels import BLOCK, blocks_usable
from methods.engine.expert_layers import ClampedSwish, ExpertWeights, Router, SeparateExperts, StackedExperts
from methods.engine.linear import Linear, packable
from tests.engine.test_causal_lm import tiny
from tests.helpers import host_reads

COUNT, WIDTH, INNER = 7, 32, 64


def some_weights(biases: bool = False, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    torch.manual_seed(1)
    matrices = torch.randn(COUNT, 2 * INNER, WIDTH, dtype=dtype), torch.randn(COUNT, WIDTH, INNER, dtype=dtype)
    vectors = torch.randn(COUNT, 2 * INNER, dtype=dtype), torch.randn(COUNT, WIDTH, dtype=dtype)
    return ExpertWeights(*matrices, *(vectors if biases else ()))


def by_hand(own, activation, rows, chosen, shares):
    """One row and one expert at a time."""
    total = torch.zeros(rows.shape)
    for row, (experts, weights) in enumerate(zip(chosen, shares, strict=True)):
        for expert, weight in zip(experts.tolist(), weights, strict=True):
            both = own.gate_up[expert] @ rows[row]
            both = both if own.gate_up_bias is None else both + own.gate_up_bias[expert]
            gate, up = both.chunk(2)
            clamped = isinstance(activation, ClampedSwish)
            hidden = activation.join(gate[None], up[None])[0] if clamped else activation(gate) * up
            made = own.down[expert] @ hidden
            total[row] += weight * (made if own.down_bias is None else made + own.down_bias[expert])
    return total


def forms(own, activation):
    yield SeparateExperts(own, activation, "plain")
    if packable(torch.device("cpu"), own.gate_up.dtype):
        yield SeparateExperts(own, activation, "packed")
    grouped, every = StackedExperts(own, activation), StackedExperts(own, activation)
    assert grouped.in_groups
    every.in_groups = False
    yield from (grouped, every)


def some_rows(rows: int, active: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    chosen = torch.rand(rows, COUNT).topk(active).indices
    return torch.randn(rows, WIDTH), chosen, torch.rand(rows, active)


@pytest.mark.parametrize("rows, active", [(1, 1), (1, 3), (5, 2), (40, 4), (3, COUNT)])
@pytest.mark.parametrize("activation", [F.silu, ClampedSwish(1.7, 0.9)], ids=["swish", "clamped"])
@pytest.mark.parametrize("biases", [False, True], ids=["", "biases"])
def test_every_form_computes_the_same_sum(rows, active, activation, biases):
    own, (given, chosen, shares) = some_weights(biases), some_rows(rows, active)
    wanted = by_hand(own, activation, given, chosen, shares)
    for experts in forms(own, activation):
        found = experts(given, chosen, shares, CausalLM.gate)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_experts_that_are_not_chosen_are_not_computed():
    own = some_weights()
    own.gate_up[[0, 3]] = torch.nan
    rows, _, shares = some_rows(6, 2)
    chosen = torch.tensor([[1, 2], [6, 5], [4, 1], [2, 4], [5, 6], [1, 6]])
    for experts in [*forms(own, F.silu)][:-1]:
        assert experts(rows, chosen, shares, CausalLM.gate).isfinite().all()
    chosen[3, 1] = 3
    for experts in forms(own, F.silu):
        assert experts(rows, chosen, shares, CausalLM.gate)[3].isnan().all()


def test_a_stack_of_experts_reads_nothing_on_the_host(monkeypatch):
    """On a CPU, torch's product of groups itself reads their ends; on a GPU it is one kernel."""
    own, (rows, chosen, shares) = some_weights(True), some_rows(9, 3)
    router = Router(Linear(torch.randn(COUNT, WIDTH)), 3, softmax_first=True, normalised=True)
    ends = []

    def product(given, weight, offs):
        ends.append(offs)
        return given.new_zeros(len(given), weight.shape[2])

    monkeypatch.setattr(F, "grouped_mm", product)
    with host_reads.no_host_reads():
        router(rows)
        for experts in [*forms(own, F.silu)][-2:]:
            experts(rows, chosen, shares, CausalLM.gate)
    counts = chosen.flatten().bincount(minlength=COUNT)
    assert all(torch.equal(found, counts.cumsum(0)) for found in ends) and len(ends) == 2
    with pytest.raises(host_reads.HostRead), host_reads.no_host_reads():
        next(forms(own, F.silu))(rows, chosen, shares, CausalLM.gate)


def test_groups_need_aligned_rows():
    assert expert_layers.can_group(torch.zeros(2, 8, 4))
    assert not expert_layers.can_group(torch.zeros(2, 8, 3)) and not expert_layers.can_group(torch.zeros(2, 3, 8))


def test_routers_of_the_families():
    torch.manual_seed(0)
    router = Router(Linear(torch.randn(COUNT, WIDTH)), 3, softmax_first=True, normalised=False)
    rows = torch.randn(9, WIDTH)
    shares = (rows @ router.scores.weight.T).softmax(-1)
    chosen, weights = router(rows)
    torch.testing.assert_close(weights, shares.topk(3).values)
    assert torch.equal(chosen, shares.topk(3).indices)
    _, normalised = replace(router, normalised=True)(rows)
    torch.testing.assert_close(normalised.sum(-1), torch.ones(9))
    _, among_chosen = replace(router, softmax_first=False)(rows)  # the same numbers by another way
    torch.testing.assert_close(among_chosen, normalised)


@pytest.mark.parametrize("tokens", [1, 2, 5, 64])
def test_expected_experts_under_uniform_routing(tokens):
    torch.manual_seed(0)
    draws = torch.rand(4000, tokens, COUNT).topk(2).indices.flatten(1)
    touched = F.one_hot(draws, COUNT).amax(1).sum(1).float().mean()
    assert expert_layers.expected_experts(COUNT, 2, tokens) == pytest.approx(float(touched), rel=0.02)


def test_bytes_of_a_pass_grow_with_its_tokens_to_those_of_all_experts():
    lm = CausalLM.from_hf(tiny("qwen2_moe", decoder_sparse_step=2))
    expert = 4 * 3 * 24 * 48  # bytes of gate, up and down
    assert sum(parameter.numel() for parameter in tiny("qwen2_moe", decoder_sparse_step=2).parameters()) * 4 == (
        pytest.approx(lm.weight_bytes, rel=0.02)
    ), "memory holds all experts; norms and biases are left out"
    sparse = 2  # layers 1 and 3 of five
    assert lm.weight_bytes - lm.pass_bytes(1) == pytest.approx(sparse * (6 - 2) * expert)
    assert lm.weight_bytes - lm.pass_bytes(2) == pytest.approx(sparse * 6 * (4 / 6) ** 2 * expert)
    assert lm.pass_bytes(200) == pytest.approx(lm.weight_bytes)
    fewer = lm.skip(mlp=[1])
    assert fewer.weight_bytes < lm.weight_bytes - 6 * expert
    assert fewer.weight_bytes - fewer.pass_bytes(1) == pytest.approx((6 - 2) * expert)
    dense = CausalLM.from_hf(tiny("llama"))
    assert dense.pass_bytes(1) == dense.weight_bytes


@pytest.mark.skipif(not blocks_usable(torch.device("cpu"), torch.bfloat16, BLOCK), reason="needs the C++ kernels")
def test_experts_of_4_bits_are_those_of_the_rounded_weights():
    own = some_weights(dtype=torch.bfloat16)
    experts = SeparateExperts(own, F.silu, "int4")
    assert {linear.form for linear in experts.products()} == {"int4"}
    plain = SeparateExperts(own, F.silu, "plain")
    for linear, same in zip(experts.products(), plain.products(), strict=True):
        same.weight = linear.dense
    rows, chosen, shares = some_rows(5, 2)
    found, wanted = (e(rows.bfloat16(), chosen, shares, CausalLM.gate).float() for e in (experts, plain))
    assert (found - wanted).norm() < 0.03 * wanted.norm()


def test_a_model_of_4_bits_routes_with_whole_numbers():
    if not blocks_usable(torch.device("cpu"), torch.bfloat16, BLOCK):
        pytest.skip("needs the C++ kernels")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
    model = tiny("qwen3_moe", **sizes).bfloat16()
    lm = CausalLM.from_hf(model, weights="int4", keep_hf=True)
    scores = lm.layers[0].mlp.router.scores
    assert torch.equal(scores.dense, model.model.layers[0].mlp.gate.weight)
    assert 0 < lm.int4_bytes < lm.weight_bytes
    assert lm.forward(torch.tensor([[3, 4, 5]]), None, lm.new_cache(1, 4)).logits.isfinite().all()

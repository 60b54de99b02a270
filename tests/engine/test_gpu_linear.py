"""Products with weights of 4 and 8 bits on a GPU: their twins on a CPU, and refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bench.contract import checks
from methods.engine.causal_lm import CausalLM
from methods.engine.gpu_linear import Float8Linear, Int4Linear, in_float8
from methods.engine.linear import Linear, dequantised, make_linear, quantised


@pytest.mark.parametrize(("kind", "error"), [(Int4Linear, 0.1), (Float8Linear, 0.04)])
def test_twins_of_the_products_on_a_gpu_are_near_the_whole_weight(kind: type[Linear], error: float) -> None:
    torch.manual_seed(0)
    weight, rows, bias = torch.randn(48, 64) * 0.1, torch.randn(5, 64), torch.randn(48)
    product = kind(weight, bias)
    whole = F.linear(rows, weight)
    assert (product(rows) - bias - whole).norm() < error * whole.norm()
    assert (product.dense - weight).norm() < error * weight.norm()
    assert product.nbytes < 0.3 * weight.numel() * 4 and kind(weight)(rows).shape == (5, 48)


def test_a_row_in_8_bits_reaches_the_end_of_its_range_and_zeros_stay() -> None:
    rows = torch.tensor([[1.0, -2.0, 0.5, 0.0], [0.0] * 4, [3e-4, 1e-4, -1e-4, 2e-4]])
    own, scale = in_float8(rows)
    assert own.dtype == torch.float8_e4m3fn and own.float().abs().amax(1).tolist() == [448.0, 0.0, 448.0]
    assert (own.float() * scale - rows).abs().max() < 0.07 * rows.abs().amax()
    assert torch.equal((own.float() * scale)[1], torch.zeros(4))


def test_4_bits_on_a_gpu_are_the_numbers_of_the_blocks_on_a_cpu() -> None:
    weight = torch.randn(16, 64)
    assert torch.equal(Int4Linear(weight).dense, dequantised(quantised(weight, 4), 4))


def test_weights_that_no_device_here_multiplies_are_refused_by_name() -> None:
    weight = torch.randn(32, 64)
    with pytest.raises(ValueError, match=r"weights=fp8 needs bfloat16 on an NVIDIA GPU of compute capability 9\.0 or"):
        make_linear([weight], [None], "fp8")
    with pytest.raises(ValueError, match=r"outputs are a multiple of 16 and inputs of 16, got 32 and 40\. Set model"):
        Float8Linear(torch.randn(32, 40))
    with pytest.raises(ValueError, match="weights=fp8 needs bfloat16 on an NVIDIA GPU"):
        CausalLM.from_hf(checks.tiny_target().hf.float(), weights="fp8")

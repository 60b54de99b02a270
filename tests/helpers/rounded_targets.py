"""Small targets whose layers can be rounded to 4 bits."""

from __future__ import annotations

import copy
from typing import Literal

from bench.contract import checks
from methods.engine.causal_lm import CausalLM
from tests.engine.test_causal_lm import tiny

BY = ("kernels", "operators")


def rounded_target(by: Literal["kernels", "operators"], layers: int) -> CausalLM:
    """A random Llama in 32 bit, whose layers the kernels run in one call, or one product at a time."""
    if by == "operators":
        return CausalLM.from_hf(copy.deepcopy(checks.tiny_target(layers=layers, seed=2).hf).float())  # type: ignore[union-attr]
    sizes = {"head_dim": 16, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 96}
    model = tiny("llama", num_hidden_layers=layers, **sizes)
    return CausalLM.from_hf(model.float(), linear="panels", keep_hf=True)

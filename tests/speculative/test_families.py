"""Methods over families with experts and with windows shorter than the text: their texts are greedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.engine.causal_layers import SPARSE
from methods.engine.causal_lm import CausalLM
from methods.engine.cuda_graphs import GraphedLM
from methods.engine.sampling import Sampling
from methods.speculative.eagle.training import begin
from methods.speculative.prompt_lookup import PromptLookup
from methods.speculative.self_speculative.decoder import SelfSpeculative
from methods.speculative.self_speculative.skip_objective import Calibration
from methods.speculative.token_recycling import TokenRecycling
from tests.engine.test_causal_lm import full, tiny
from tests.helpers.tiny_block_drafter import DSPARK, block_drafter
from tests.helpers.tiny_eagle import eagle, eagle_learner

LIMIT = 24
FAMILIES = ("gemma2", "gemma3_text", "glm4", *SPARSE)
METHODS: dict[str, Any] = {
    "autoregressive": Autoregressive,
    "prompt_lookup": PromptLookup,
    "token_recycling": lambda target, sampling: TokenRecycling(target, sampling, tree="small"),
    "self_speculative": lambda target, sampling: SelfSpeculative(
        target, sampling, gamma=3, skip_attention=[2], skip_mlp=[3, 4]
    ),
    "eagle": lambda target, sampling: eagle(target, sampling, 3, depth=3, top_k=3, nodes=8),
    "dspark": lambda target, sampling: block_drafter(target, sampling, sizes=DSPARK),
}


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> CausalLM:
    lm = CausalLM.from_hf(windowed(request.param), keep_hf=True)
    lm.eos_ids = ()
    assert (lm.window is None) == request.param.startswith("glm4")
    return lm


def windowed(family: str) -> Any:
    slides = (
        {} if family.startswith("glm4") else {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 3}
    )
    return tiny(family, **slides)


@pytest.fixture(scope="module")
def texts(target: CausalLM) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Prompts, and what transformers writes after them."""
    prompts = checks.prompts(target.vocab_size, (11, 3))
    return prompts, [greedy(target, prompt) for prompt in prompts]


def greedy(target: CausalLM, prompt: torch.Tensor) -> list[int]:
    """What transformers itself says, one token after the other."""
    ids = prompt.tolist()
    for _ in range(LIMIT):
        ids.append(int(full(target.hf, torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", METHODS)
def test_texts_are_the_greedy_ones_of_transformers(
    name: str, target: CausalLM, texts: tuple[list[torch.Tensor], list[list[int]]]
) -> None:
    prompts, wanted = texts
    for model in (target, GraphedLM.of(target, capture=False)):
        assert checks.outputs(METHODS[name](model, Sampling()), prompts, LIMIT) == wanted


def test_a_replay_of_skipped_layers_sees_windows(target: CausalLM) -> None:
    prompts, gamma, blocks = checks.prompts(target.vocab_size, (11, 4)), 3, 3
    calibration = Calibration.make(target, prompts, blocks, gamma)
    assert bool(calibration.replay(target).hits.all())
    rounds = calibration.replay(target.skip([2], [3, 4]))
    accepted = rounds.outcome(gamma, 0.0)[1].view(len(prompts), blocks)
    decoder = SelfSpeculative(
        target, Sampling(), gamma=gamma, confidence=0.0, acceptance=None, skip_attention=[2], skip_mlp=[3, 4]
    )
    for row, prompt in enumerate(prompts):
        for block in range(blocks):
            text = torch.cat([prompt, calibration.inputs[row, : block * gamma]])
            steps = decoder.decode([text], 40, torch.Generator().manual_seed(0))
            next(steps)
            assert next(steps).accepted[0] == accepted[row, block]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_network_begins_from_a_layer_of_any_family(family: str) -> None:
    target = CausalLM.from_hf(tiny(family))
    network = eagle_learner(target, 3).network
    begin(network, target)
    norm = target.layers[-1].mlp.norm
    if norm is not None:
        rows = torch.randn(3, target.hidden_size)
        torch.testing.assert_close(network.layer.post_attention_layernorm(rows), norm(rows), rtol=1e-3, atol=1e-4)
    assert all(parameter.isfinite().all() for parameter in network.parameters())

"""A language model as the network of ``hybrid``; networks that were trained are in the contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.decoder import generate
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.speculative.eagle.decoder import Eagle
from methods.speculative.heads.base import HeadsDecoder
from methods.speculative.hybrid import Hybrid

REPEATED = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return checks.tiny_target(vocab_size=61)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_reads_what_the_lookup_drafted(target: CausalLM, temperature: float) -> None:
    """The target drafts for itself: greedily all is kept, whoever drafted in the rounds before."""
    decoder = Hybrid(target, Sampling(temperature), draft_model=target, nodes=3, min_match=1, gamma=4)
    prompts, found = [torch.tensor(REPEATED)], [0, 0]
    with torch.inference_mode():
        for step in decoder.decode(prompts, 60, torch.Generator().manual_seed(1)):
            if step.draft_passes:
                found[0] += 1
                assert step.drafted == [3] and (temperature or step.accepted == [3])
            elif step.drafted[0]:
                found[1] += 1
    assert min(found) > 1, found
    rounds = decoder.stats()
    assert set(rounds) == {"rounds_by_lookup", "rounds_by_network"} and sum(rounds.values()) == pytest.approx(1.0)


def test_rows_whose_lookup_drafts_are_read_beside_rows_whose_model_drafts(target: CausalLM) -> None:
    decoder = Hybrid(target, Sampling(), draft_model=target, nodes=3, min_match=2, gamma=12)
    prompts = [torch.tensor(REPEATED), torch.tensor([9, 3, 4]), torch.tensor([11] * 30)]
    alone = Hybrid(target, Sampling(), draft_model=target, nodes=3, min_match=10_000)
    texts = []
    for each in (decoder, alone):
        rows: list[list[int]] = [[] for _ in prompts]
        for step in each.decode(prompts, 40, torch.Generator()):
            for row, new in zip(rows, step.tokens, strict=True):
                row += new
        texts.append([row[:40] for row in rows])
    assert texts[0] == texts[1]
    assert decoder.stats()["rounds_by_lookup"] > 0


@pytest.mark.parametrize(("alone", "names"), [(None, {"both", "network"}), (2, {"both", "network", "lookup"})])
def test_in_a_union_the_lookup_drafts_alone_after_a_long_match(
    target: CausalLM, alone: int | None, names: set[str]
) -> None:
    options = {"policy": "union", "min_match": 1, "gamma": 4, "nodes": 3}
    decoder = Hybrid(target, Sampling(), draft_model=target, alone=alone, **options)
    text = [9, 3, 4]
    for step in decoder.decode([torch.tensor(text)], 60, torch.Generator()):
        if alone is not None and step.drafted[0] and not step.draft_passes:
            pairs = [tuple(text[place - alone : place]) for place in range(alone, len(text))]
            assert tuple(text[-alone:]) in pairs, "the lookup drafted alone after a shorter match"
        text += step.tokens[0]
    assert {name.removeprefix("rounds_by_") for name in decoder.stats()} == names


def test_a_network_that_does_not_pay_sits_out_while_the_lookup_drafts(target: CausalLM) -> None:
    """Of the drafts of another model nothing is kept, and the greedy text repeats itself."""
    options = {"policy": "union", "min_match": 1, "gamma": 6, "nodes": 3, "costs": [[0, 0.2], [1, 1.0], [8, 1.3]]}
    decoder = Hybrid(target, Sampling(), draft_model=checks.tiny_target(vocab_size=61, seed=7), **options)
    prompt, limit = torch.tensor([9, 3, 4]), 200
    text, by = list[int](), {"lookup": 0, "network": 0}
    for step in decoder.decode([prompt], limit, torch.Generator()):
        text += step.tokens[0]
        by["network" if step.draft_passes else "lookup"] += bool(step.drafted[0])
    assert text[:limit] == checks.greedy_reference(target, prompt, limit)
    assert by["lookup"] > 3 * by["network"] > 0, by


@pytest.mark.parametrize("make", [Hybrid, Eagle])
def test_a_network_that_cannot_pay_is_not_asked_and_no_states_are_kept_for_it(make: Any) -> None:
    """With a pass over two nodes twice as long as over one, and drafting half a pass, no chain pays."""
    target = checks.tiny_target(layers=8)
    prompts = [torch.tensor(REPEATED)]
    decoder: HeadsDecoder = make(target, Sampling(), checkpoint="random:eagle3", costs="auto")

    def drafted() -> int:
        with torch.inference_mode():
            return sum(step.draft_passes for step in decoder.decode(prompts, 40, torch.Generator()))

    expected = generate(Autoregressive(target, Sampling()), prompts, 40)
    assert drafted() and decoder.states_read
    decoder.use_costs([[0, 0.5], [1, 1.0], [2, 2.0], [8, 8.0]])
    assert not drafted() and not decoder.states_read and generate(decoder, prompts, 40) == expected
    decoder.use_costs([[0, 0.1], [1, 1.0], [2, 1.1], [8, 1.5]])
    assert drafted() and decoder.states_read and generate(decoder, prompts, 40) == expected


@pytest.mark.parametrize("make", [Hybrid, Eagle])
def test_a_network_as_dear_as_a_pass_sits_out_texts_after_one_in_which_it_lost(make: Any) -> None:
    """Random weights guess nothing: it drafts in texts 1, 3, 6, 11, and in each of them where drafting costs little."""
    target, prompts = checks.tiny_target(layers=8), [torch.tensor([9, 3, 4])]
    decoder: HeadsDecoder = make(target, Sampling(), checkpoint="random:eagle3", costs="auto")

    def drafts() -> list[int]:
        with torch.inference_mode():
            texts = [list(decoder.decode(prompts, 20, torch.Generator())) for _ in range(12)]
        return [number for number, steps in enumerate(texts, 1) if sum(step.draft_passes for step in steps)]

    passes = [[1, 1.0], [2, 1.01], [8, 1.07]]
    decoder.use_costs([[0, 1.0], *passes])
    assert drafts() == [1, 3, 6, 11]
    decoder.forget_costs()
    decoder.use_costs([[0, 0.1], *passes])
    assert drafts() == list(range(1, 13))


def test_what_does_not_fit_is_refused(target: CausalLM) -> None:
    with pytest.raises(ValueError, match="nodes >= 1, and budget >= 1 or null, got .* nodes=0"):
        Hybrid(target, Sampling(), draft_model=target, nodes=0)
    with pytest.raises(ValueError, match=r"budget >= 1 or null, got .* budget=0"):
        Hybrid(target, Sampling(), draft_model=target, budget=0)
    with pytest.raises(ValueError, match=r"alone must be at least 1, or null, got 0"):
        Hybrid(target, Sampling(), draft_model=target, alone=0)
    assert Hybrid.needs_checkpoint({"draft_model": None, "checkpoint": None})
    assert not Hybrid.needs_checkpoint({"draft_model": "x", "checkpoint": None})

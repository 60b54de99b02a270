"""Rounds of one row whose drafts the C++ kernels make: the texts, and what each round says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.decoder import Step
from methods.engine import cpu_kernels
from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.speculative.guess_costs import measured_costs
from methods.speculative.heads.blockwise import Blockwise, Heads, Shape
from methods.speculative.ngram import Ngram
from methods.speculative.rest_datastore import Datastore
from tests.engine import test_causal_lm, test_seq2seq_lm

pytestmark = pytest.mark.skipif(cpu_kernels.library() is None, reason="the kernels cannot be compiled here")

GREEDY, LIMIT, K = Sampling(), 30, 4
TARGETS = {
    "float32": ("panels", torch.float32, "auto"),
    "bfloat16": ("panels", torch.bfloat16, "auto"),
    "int8": ("int8", torch.float32, "auto"),
    "int8_drafts": ("panels", torch.float32, "int8"),
}
PROMPTS = [torch.tensor(ids) for ids in ([3, 5, 7, 5, 3], [11, 2], [4, 4, 9, 8, 1, 2, 3], [21, 30, 17])]


@pytest.fixture(scope="module", params=[*TARGETS, "translation"])
def target(request: pytest.FixtureRequest) -> CausalLM:
    if request.param == "translation":
        model = test_seq2seq_lm.tiny("marian", **test_seq2seq_lm.WHOLE)
        return Seq2SeqLM.from_hf(model, linear="panels")
    form, dtype, drafts = TARGETS[request.param]
    model = test_causal_lm.tiny("llama", head_dim=16, hidden_size=96, intermediate_size=96).to(dtype)
    found = CausalLM.from_hf(model, linear=form)
    found.draft_weights = drafts
    return found


@pytest.fixture(scope="module")
def heads(target: CausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that change a state little, so that some of them are right where a token comes twice."""
    width, hidden, count = target.hidden_size, 24, K - 1
    rng = torch.Generator().manual_seed(2)
    first, second = (torch.randn(size, generator=rng) * 0.02 for size in ((hidden, width), (count * width, hidden)))
    first_bias, second_bias = torch.randn(hidden, generator=rng), torch.randn(count * width, generator=rng) * 0.02
    folder = tmp_path_factory.mktemp("heads")
    shape = Shape(K, hidden, width, target.n_layers, target.vocab_size)
    vocabulary = DraftVocabulary(torch.arange(1, target.vocab_size), target.vocab_size)
    Heads(shape, (first, first_bias), (second, second_bias), vocabulary).save(folder)
    return folder


@pytest.fixture(scope="module")
def datastore(target: CausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the target's own texts, and of others with the same tokens."""
    folder = tmp_path_factory.mktemp("datastore")
    written = checks.outputs(Autoregressive(target, GREEDY), PROMPTS, LIMIT)
    texts = [[*prompt.tolist()[-1:], *text] for prompt, text in zip(PROMPTS, written, strict=True)]
    Datastore.build([*texts * 3, *(text[::-1] for text in texts)], target.vocab_size).save(folder)
    return folder


def made(name: str, target: CausalLM, heads: Path, datastore: Path, sampling: Sampling = GREEDY) -> Blockwise | Ngram:
    if name == "blockwise":
        return Blockwise(target, sampling, checkpoint=heads)
    return Ngram(target, sampling, nodes=6, checkpoint=datastore)


def steps_of(decoder: Blockwise | Ngram, prompt: torch.Tensor) -> list[Step]:
    return list(decoder.decode([prompt], LIMIT, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("name", ["blockwise", "ngram"])
def test_texts_are_the_targets_in_few_calls(name: str, target: CausalLM, heads: Path, datastore: Path) -> None:
    decoder, calls, rounds = made(name, target, heads, datastore), [], target.rounds

    def noted(*given: Any, **options: Any) -> Any:
        calls.append(options["guessed"])
        return rounds(*given, **options)

    wanted = [checks.outputs(Autoregressive(target, GREEDY), [prompt], LIMIT)[0] for prompt in PROMPTS]
    count = accepted = 0
    with mock.patch.object(target, "rounds", noted):
        for prompt, text in zip(PROMPTS, wanted, strict=True):
            steps = steps_of(decoder, prompt)
            assert [token for step in steps for token in step.tokens[0]][: len(text)] == text
            count, accepted = count + len(steps), accepted + sum(step.accepted[0] for step in steps)
    assert 0 < len(calls) <= 3 * len(PROMPTS) < count and accepted, "and some drafts are right"
    assert decoder.stats()["nodes_per_round"] > 0


@pytest.mark.parametrize("name", ["blockwise", "ngram"])
def test_a_step_says_what_its_round_did(name: str, target: CausalLM, heads: Path, datastore: Path) -> None:
    for prompt in PROMPTS:
        first, *steps = steps_of(made(name, target, heads, datastore), prompt)
        ends = [step.at_ns for step in steps if step.at_ns is not None]  # not of the last one of a call
        assert first.drafted == [0] and len(ends) >= len(steps) - 3 and ends == sorted(ends)
        for step in steps:
            assert len(step.tokens[0]) - 1 <= step.accepted[0] <= len(step.tokens[0]), (
                "an end of the text is a guess, too"
            )
            assert step.accepted[0] <= step.depth[0] <= step.drafted[0] == step.nodes - 1  # type: ignore[operator]
            assert step.draft_ns >= 0 < step.pass_ns and step.layers == [1.0]


def without_times(steps: list[Step]) -> list[tuple[Any, ...]]:
    return [(step.tokens, step.drafted, step.accepted, step.depth, step.nodes, step.layers) for step in steps]


def test_heads_draft_in_the_kernels_what_they_draft_outside(target: CausalLM, heads: Path, datastore: Path) -> None:
    """Round by round, whatever the state before: its tokens, its draft, and what of that was kept."""
    decoder = made("blockwise", target, heads, datastore)
    together = [without_times(steps_of(decoder, prompt)) for prompt in PROMPTS]
    with mock.patch.object(type(decoder.drafter), "rounds_guesses", lambda drafter: None):
        alone = [without_times(steps_of(decoder, prompt)) for prompt in PROMPTS]
    for found, wanted in zip(together, alone, strict=True):
        texts = [[token for step in steps for token in step[0][0]] for steps in (found, wanted)]
        assert texts[0][:LIMIT] == texts[1][:LIMIT]
        assert found[: len(wanted) - 1] == wanted[:-1], "the last round may be cut at the limit"


@pytest.mark.parametrize("name", ["blockwise", "ngram"])
def test_rows_that_come_together_or_that_are_drawn_have_rounds_of_their_own(
    name: str, target: CausalLM, heads: Path, datastore: Path
) -> None:
    decoder = made(name, target, heads, datastore)
    with mock.patch.object(target, "rounds", side_effect=AssertionError("no rounds in one call")):
        together = checks.outputs(decoder, PROMPTS, 8)
        drawn = steps_of(made(name, target, heads, datastore, Sampling(temperature=1.0)), PROMPTS[0])
    assert len(drawn) > 1 and all(step.at_ns is None for step in drawn)
    assert together == [checks.outputs(decoder, [prompt], 8)[0] for prompt in PROMPTS]


def test_relaxed_criteria_judge_round_by_round(target: CausalLM, heads: Path) -> None:
    decoder = Blockwise(target, GREEDY, criterion="top_k", top=target.vocab_size - 1, checkpoint=heads)
    steps = steps_of(decoder, PROMPTS[0])
    assert all(step.accepted[0] >= K - 2 for step in steps[1:-1]), "nearly everything is kept"


def test_guesses_are_as_many_as_pay(target: CausalLM, datastore: Path) -> None:
    decoder = Ngram(target, GREEDY, nodes=6, checkpoint=datastore, costs="auto")
    dear, cheap = ([[0, 0.0], [1, 1.0], *([1 + n, 1.0 + each * n] for n in range(1, 7))] for each in (9.0, 0.01))
    wanted = checks.outputs(Autoregressive(target, GREEDY), PROMPTS[:1], LIMIT)
    nodes = []
    for costs in (dear, cheap):
        with mock.patch(
            "methods.speculative.ngram.measured_costs", lambda lm, count, own=costs: [c for _, c in own[1:]]
        ):
            decoder.use_costs(costs)
        assert checks.outputs(decoder, PROMPTS[:1], LIMIT) == wanted
        nodes.append(sum(step.drafted[0] for step in steps_of(decoder, PROMPTS[0])))
    assert nodes[0] == 0 < nodes[1]


def test_measured_costs_are_of_passes_and_never_fall(target: CausalLM) -> None:
    costs = measured_costs(target, 5)
    assert len(costs) == 6 and costs[0] == 1.0 and costs == sorted(costs)

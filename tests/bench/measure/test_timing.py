"""Which rows a decode computes: the decoder is sent those whose texts have ended, and they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from bench.contract import checks
from bench.measure.instruments import Instruments
from bench.measure.timing import Timed, timed_decode
from methods.autoregressive import Autoregressive
from methods.decoder import Decoder, Guarantee, Step
from methods.early_exit.free import Free
from methods.early_exit.static_depth import StaticDepth
from methods.engine.causal_lm import CausalLM
from methods.engine.cpu_kernels import reading_groups
from methods.engine.sampling import Sampling
from methods.speculative.prompt_lookup import PromptLookup
from tests.engine import test_cuda_graphs

LIMIT = 12
ARMS: dict[str, Callable[[CausalLM], Decoder]] = {
    "autoregressive": lambda target: Autoregressive(target, Sampling()),
    "prompt_lookup": lambda target: PromptLookup(target, Sampling()),
    "static_depth": lambda target: StaticDepth(target, Sampling(), depth=target.n_layers),
    "free": lambda target: Free(target, Sampling(), 2, 0.1, "verify", head="lens"),
}


def timed(decoder: Decoder, prompts: Sequence[Tensor], eos_ids: Sequence[int] = (), places: int | None = None) -> Timed:
    rng, instruments = Generator().manual_seed(0), Instruments(torch.device("cpu"))
    return timed_decode(decoder, list(prompts), LIMIT, eos_ids, rng, instruments, places)


def widths(target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every pass of the target from now on, prefills included."""
    seen: list[int] = []
    begin = target.begin

    def counted(tokens: Tensor, *rest: Any) -> Any:
        seen.append(len(tokens))
        return begin(tokens, *rest)

    monkeypatch.setattr(target, "begin", counted)
    return seen


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return checks.tiny_target()


def early(target: CausalLM) -> tuple[list[Tensor], list[list[int]], tuple[int, int]]:
    """Four prompts, their texts and two ids that end two of the texts with their first token, and a third later."""
    prompts = checks.prompts(target.vocab_size, (5, 1, 14, 8))
    texts = [checks.greedy_reference(target, prompt, LIMIT) for prompt in prompts]
    ends = (texts[0][0], texts[3][0])
    assert texts[1][0] not in ends and not set(texts[2]) & set(ends)
    return prompts, texts, ends


@pytest.mark.parametrize("arm", ARMS)
def test_passes_go_over_the_rows_that_are_left(arm: str, target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, texts, ends = early(target)
    seen = widths(target, monkeypatch)
    found = timed(ARMS[arm](target), prompts, ends)
    assert found.rows[2].ids == texts[2] and [len(row.ids) for row in found.rows][::3] == [1, 1]
    read = len(reading_groups([5, 1, 14, 8]))
    assert sum(seen[:read]) == 4 and max(seen[read:]) <= 2 and seen[-1] < 3, "two of four left behind the prefill"
    assert [step.rows for step in found.steps][:2] == [4, 2]
    assert {len(step.tokens) for step in found.steps} == {4}, "a step has an entry for every prompt"


def test_all_are_computed_while_three_quarters_are_left(target: CausalLM) -> None:
    prompts, texts, _ = early(target)
    assert texts[0][0] not in {*texts[1], *texts[2], *texts[3]}
    found = timed(Autoregressive(target, Sampling()), prompts, (texts[0][0],))
    assert {step.rows for step in found.steps} == {4}
    assert [row.ids for row in found.rows] == [texts[0][:1], *texts[1:]]
    assert not any(step.tokens[0] for step in found.steps[1:]), "nothing is committed behind an end"


@pytest.mark.parametrize("arm", ["autoregressive", "prompt_lookup"])
def test_rows_leave_once_no_prompt_waits(arm: str, target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, texts, ends = early(target)
    seen = widths(target, monkeypatch)
    found = timed(ARMS[arm](target), [*prompts, prompts[0]], ends, places=3)  # two end as soon as they were read
    assert [row.ids for row in found.rows][2:] == [texts[2], texts[3][:1], texts[0][:1]]
    assert [step.rows for step in found.steps][:4] == [3, 1, 1, 2]
    read = len(reading_groups([5, 1, 14]))
    assert sum(seen[:read]) == 3 and seen[read : read + 2] == [1, 1] and max(seen[read + 2 :]) == 2


def test_graphs_keep_all_rows() -> None:
    """A smaller batch has graphs of its own, which would be captured while the clock runs."""
    graphed = test_cuda_graphs.with_graphs()
    prompts, texts, ends = early(graphed)
    found = timed(Autoregressive(graphed, Sampling()), prompts, ends)
    assert {step.rows for step in found.steps} == {4} and found.rows[2].ids == texts[2]


class Deaf(Decoder):
    """Yields one token per row and reads nothing that is sent."""

    guarantee = Guarantee.EXACT

    def decode(self, prompts: list[Tensor], limit: int, rng: Generator) -> Iterator[Step]:
        for place in range(limit):
            yield Step.undrafted([[place] for _ in prompts])


class DeafIterator(Deaf):
    def decode(self, prompts: list[Tensor], limit: int, rng: Generator) -> Iterator[Step]:
        return iter([Step.undrafted([[place + row] for row, _ in enumerate(prompts)]) for place in range(limit)])


@pytest.mark.parametrize("decoder", [Deaf(), DeafIterator()], ids=["generator", "iterator"])
def test_a_decoder_may_ignore_what_it_is_sent(decoder: Decoder) -> None:
    found = timed(decoder, [torch.tensor([1]), torch.tensor([2])], (3,))
    assert [row.ids[-1] for row in found.rows] == [3, 3]

"""Answers that are known already: what the file keeps, for which limits they serve, and who takes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.contract import checks
from methods.engine.causal_lm import CausalLM
from methods.training import answers as own
from methods.training.answer_memo import AnswerMemo, Origin
from methods.training.answers import AnswerRecipe, known_answers, own_answers
from methods.training.interface import Example, TrainingContext

GREEDY = Origin("tiny", "r1", "ab", "float64", limit=6)
ROWS = [([5, 6], [1, 2, 3, 4, 5, 6]), ([6, 5], [7, 2]), ([5], [9])]


def test_a_file_gives_back_what_was_packed_whatever_the_order(tmp_path: Path) -> None:
    AnswerMemo.pack(GREEDY, [*ROWS, ([5], [8, 8])]).save(tmp_path / "a.npz")
    read = AnswerMemo.load(tmp_path / "a.npz")
    assert read.origin == GREEDY and len(read) == 3 and read.tokens == 9
    for prompt, answer in ROWS:
        assert read.get(prompt, 6, 0.0) == answer
    assert read.get([5, 5], 6, 0.0) is None and read.get([], 6, 0.0) is None
    read.save(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert read.sha256 == AnswerMemo.pack(GREEDY, ROWS).sha256
    assert read.sha256 != AnswerMemo.pack(replace(GREEDY, revision="r2"), ROWS).sha256


def test_the_file_has_no_prompt_and_two_bytes_an_id(tmp_path: Path) -> None:
    prompt = [40_000 + n for n in range(200)]
    memo = AnswerMemo.pack(replace(GREEDY, limit=300), [(prompt, [40_300])])
    assert memo.ids.itemsize == 2 and memo.ids.tolist() == [40_300]
    assert AnswerMemo.pack(GREEDY, [([1], [70_000])]).get([1], 6, 0.0) == [70_000]
    memo.save(tmp_path / "a.npz")
    assert (tmp_path / "a.npz").stat().st_size < 1500


@pytest.mark.parametrize(
    ("limit", "temperature", "found"),
    [
        (6, 0.0, [[1, 2, 3, 4, 5, 6], [7, 2]]),
        (4, 0.0, [[1, 2, 3, 4], [7, 2]]),
        (1, 0.0, [[1], [7]]),
        (7, 0.0, [None, [7, 2]]),
        (6, 0.5, [None, None]),
    ],
)
def test_a_greedy_answer_serves_smaller_limits(limit: int, temperature: float, found: list[list[int] | None]) -> None:
    memo = AnswerMemo.pack(GREEDY, ROWS)
    assert [memo.get(prompt, limit, temperature) for prompt, _ in ROWS[:2]] == found


def test_a_drawn_answer_serves_its_own_recipe_only() -> None:
    memo = AnswerMemo.pack(replace(GREEDY, temperature=0.7), ROWS)
    assert memo.get([6, 5], 6, 0.7) == [7, 2]
    assert memo.get([6, 5], 5, 0.7) is None and memo.get([6, 5], 6, 0.0) is None


def test_what_cannot_be_packed_or_read_is_refused(tmp_path: Path) -> None:
    for answer in ([], [1] * 7):
        with pytest.raises(ValueError, match=rf"must have 1 to 6 tokens, got {len(answer)}"):
            AnswerMemo.pack(GREEDY, [([1], answer)])
    with pytest.raises(ValueError, match="at least one answer, got none"):
        AnswerMemo.pack(GREEDY, [])
    for content in (b"", b"PK", b"{}"):
        (tmp_path / "a.npz").write_bytes(content)
        with pytest.raises(ValueError, match="must be a file of answers, got one that cannot be read"):
            AnswerMemo.load(tmp_path / "a.npz")


# ----------------------------------------------------------------------------------------------------------- training

RECIPE = AnswerRecipe(limit=8, longest_prompt=9, batch=2)


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return checks.tiny_target(seed=3)


def context(target: CausalLM, folder: Path, memo: AnswerMemo | None) -> TrainingContext:
    prompts = checks.prompts(target.vocab_size, [3 + (5 * n) % 7 for n in range(40)])
    corpus = [Example(prompt.tolist(), []) for prompt in prompts]
    return TrainingContext(output=folder, shared_cache=folder, model=target, examples=corpus, memo=memo)


def test_known_answers_are_taken_and_nothing_is_decoded(
    target: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = own_answers(context(target, tmp_path / "all", None), RECIPE)
    assert len(whole.rows) == 40
    memo = AnswerMemo.pack(replace(GREEDY, limit=8), [(row.prompt, row.answer) for row in whole.rows[::2]])
    monkeypatch.setattr(own, "answer", None)
    shop = context(target, tmp_path / "known", memo)
    found = own_answers(shop, RECIPE)
    assert len(found.rows) == 20 and list(found.rows) == known_answers(shop, RECIPE)
    wanted = {tuple(row.prompt): row.answer for row in whole.rows}
    assert all(row.answer == wanted[tuple(row.prompt)] for row in found.rows)
    assert own_answers(shop, replace(RECIPE, tokens=33)).rows == found.rows[:5]


def test_what_is_not_known_is_decoded_until_there_is_enough(
    target: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = own_answers(context(target, tmp_path / "all", None), RECIPE)
    memo = AnswerMemo.pack(replace(GREEDY, limit=8), [(row.prompt, row.answer) for row in whole.rows[:4]])
    shop, recipe = context(target, tmp_path / "some", memo), replace(RECIPE, tokens=100)
    asked: list[int] = []
    decode = own.answer
    monkeypatch.setattr(
        own, "answer", lambda lm, prompts, *more: (asked.append(len(prompts)), decode(lm, prompts, *more))[1]
    )
    found = own_answers(shop, recipe)
    assert asked == [16] and len(found.rows) == 20 and found.tokens >= 100
    wanted = {tuple(row.prompt): row.answer for row in whole.rows}
    assert all(row.answer == wanted[tuple(row.prompt)] for row in found.rows)
    assert own_answers(shop, recipe).rows == found.rows and asked == [16], "from the cache"
    assert own_answers(replace(shop, memo=None), recipe).folder != found.folder


def test_answers_of_another_recipe_are_not_taken(target: CausalLM, tmp_path: Path) -> None:
    shop = context(target, tmp_path, None)
    prompt = shop.examples[3].prompt
    memo = AnswerMemo.pack(replace(GREEDY, temperature=1.0), [(prompt, [1])])
    assert known_answers(replace(shop, memo=memo), RECIPE) == []
    assert torch.tensor(own_answers(replace(shop, memo=memo), replace(RECIPE, tokens=1)).rows[0].answer).numel() == 8

"""Tasks: which examples, which words, which scores. Real data where it is, our own files else."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.config import instantiate
from bench.config.schema import conf_dir
from bench.errors import UserError
from bench.tasks import (
    WMT14,
    CnnDailyMail,
    Demo,
    Example,
    Gsm8k,
    HumanEval,
    Jsonl,
    MTBench,
    NQOpen,
    SpecBench,
    Task,
    XSum,
)
from bench.tasks.base import choose
from bench.tasks.sources import Sources

ROWS: dict[str, list[dict[str, Any]]] = {
    "cnn_dailymail/test.jsonl": [{"id": "a1", "article": "Rain fell.", "highlights": "It rained."}],
    "wmt14_de_en/test.jsonl": [
        {"translation": {"de": "Der Hund schläft heute lange.", "en": "The dog is sleeping late today."}},
        {"translation": {"de": "Er kommt {morgen}.", "en": "He is coming tomorrow, I think."}},
    ],
    "gsm8k/test.jsonl": [{"question": "2+3?", "answer": "2+3=<<2+3=5>>5\n#### 5"}],
    "gsm8k/train.jsonl": [
        {"question": "1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2"},
        {"question": "9-1?", "answer": "#### 8"},
    ],
}
LINE = {"question_id": 7, "category": "chat", "turns": ["Hello!"]}


@pytest.fixture
def own(tmp_path: Path) -> Sources:
    """A data folder with a few rows of our own in the public form."""
    for name, rows in ROWS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Sources(tmp_path, tmp_path / "cache")


@pytest.fixture
def public(data_root: Path, tmp_path: Path) -> Sources:
    """The public data sets."""
    return Sources(data_root, tmp_path)


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def _right(example: Example) -> Any:
    """The reference of the first turn."""
    assert example.reference is not None
    return example.reference[0]


def examples_of(categories: str) -> list[Example]:
    return [Example(str(place), category, ("x",)) for place, category in enumerate(categories)]


# ------------------------------------------------------------------------------------------------------ choosing


@pytest.mark.parametrize(("limit", "counts"), [(1, [1, 0, 0]), (4, [2, 1, 1]), (7, [3, 3, 1]), (99, [5, 3, 1])])
def test_a_limit_is_spread_evenly_over_categories_in_order(limit: int, counts: list[int]) -> None:
    chosen = choose(examples_of("abacbabaa"), limit, "first", 0)
    assert [int(example.id) for example in chosen] == sorted(int(example.id) for example in chosen)
    assert [Counter(example.category for example in chosen)[name] for name in "abc"] == counts


@pytest.mark.parametrize("subset", ["first", "random", "stratified"])
def test_a_smaller_limit_takes_a_part_of_a_larger_one(subset: Any) -> None:
    examples = examples_of("abacbabaa" * 4)
    taken = [{example.id for example in choose(examples, limit, subset, 3)} for limit in range(1, 37)]
    assert [len(ids) for ids in taken] == list(range(1, 37))
    assert all(small < large for small, large in zip(taken, taken[1:], strict=False))


def test_random_subsets_follow_the_seed_alone() -> None:
    examples = examples_of("a" * 50)
    draws = {tuple(e.id for e in choose(examples, 5, "random", seed)) for seed in (1, 1, 2, 3)}
    assert len(draws) == 3
    assert [e.id for e in choose(examples, 5, "first", 1)] == list("01234")


def test_random_subsets_spread_over_categories_too() -> None:
    assert len({e.category for e in choose(examples_of("aaaaaaaabbbbbbbbc"), 3, "random", 5)}) == 3


@pytest.mark.parametrize("seed", range(5))
def test_stratified_subsets_keep_the_share_of_every_category(seed: int) -> None:
    """To within one, after every number of draws."""
    examples = examples_of("abacbaabab" * 6 + "a" * 24 + "b" * 12 + "c" * 4)
    sizes = Counter(example.category for example in examples)
    assert sizes == {"a": 54, "b": 36, "c": 10}
    for limit in range(1, len(examples) + 1):
        taken = Counter(example.category for example in choose(examples, limit, "stratified", seed))
        assert all(abs(taken[name] - limit * size / len(examples)) <= 1 for name, size in sizes.items())


def test_stratified_subsets_follow_the_seed_and_are_recorded() -> None:
    task = Demo(limit=5, subset="stratified", seed=3)
    chosen = task.load()
    assert task.revision | {"subset": "stratified", "seed": 3, "chosen": 5} == task.revision
    assert [example.id for example in Demo(limit=5, subset="stratified", seed=3).load()] == [e.id for e in chosen]
    assert any(
        {e.id for e in Demo(limit=5, subset="stratified", seed=seed).load()} != {e.id for e in chosen}
        for seed in range(4, 9)
    )
    whole = Demo(limit=5)
    whole.load()
    assert "subset" not in whole.revision


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"fill_to": 0}, "fill_to must be at least 1"),
        ({"limit": 0}, "limit must be at least 1, or null for all, got 0"),
        ({"categories": []}, "name at least one category, or be null for all, got"),
    ],
)
def test_arguments_that_leave_nothing_are_refused(kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Demo(**kwargs)


def test_an_unknown_category_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"'codings'.*Did you mean 'coding'.*summarization, rewriting"):
        Demo(categories=["codings"]).load()


def test_spare_examples_were_not_chosen_and_are_not_longer_than_usual() -> None:
    task = Demo(limit=5)
    measured = task.load()
    usual = sorted(len(example.turns[0]) for example in measured)[2]
    assert task.spare
    assert not {example.id for example in task.spare} & {example.id for example in measured}
    assert all(len(example.turns[0]) <= usual for example in task.spare)


def test_demo_covers_its_categories_and_has_no_two_equal_prompts() -> None:
    task = Demo()
    examples = task.load()
    assert len(examples) == len({example.turns for example in examples}) == 12
    assert set(Counter(e.category for e in examples)) == {"summarization", "rewriting", "coding", "qa", "chat"}
    assert (task.revision["available"], task.revision["chosen"], task.revision["warnings"]) == (12, 12, [])
    assert task.revision["files"][0]["origin"] == "bundled"
    assert task.score(examples[0], 0, "anything") == {}


def test_the_digest_of_a_choice_is_that_of_its_content(own: Sources) -> None:
    digests = []
    for limit in (1, 2, 2):
        task = WMT14(limit=limit)
        task.load(own)
        digests.append(task.revision["content"])
    assert digests[0] != digests[1] == digests[2]


# ------------------------------------------------------------------------------------------------------ wording


def test_a_later_turn_quotes_the_answers_before_it() -> None:
    task = Demo()
    example = next(example for example in task.load() if len(example.turns) == 2)
    said = task.messages(example, 1, ["An answer."])
    assert [message["role"] for message in said] == ["user", "assistant", "user"]
    assert [message["content"] for message in said] == [example.turns[0], "An answer.", example.turns[1]]
    assert len(task.messages(example, 0, [])) == 1


def test_gsm8k_shows_solved_problems_without_calculator_notes(own: Sources) -> None:
    task = Gsm8k(n_shot=2)
    (example,) = task.load(own)
    said = task.messages(example, 0, [])
    assert [message["role"] for message in said] == ["user", "assistant"] * 2 + ["user"]
    assert said[1]["content"] == "1+1=2\n#### 2"
    assert said[-1]["content"].startswith("2+3?") and "####" in said[-1]["content"]
    assert [file["file"] for file in task.revision["files"]] == ["gsm8k/test.jsonl", "gsm8k/train.jsonl"]


def test_prompts_hold_the_text_as_it_is(own: Sources) -> None:
    assert "Er kommt {morgen}." in WMT14().load(own)[1].turns[0]
    assert "Rain fell." in CnnDailyMail().load(own)[0].turns[0]


def test_humaneval_can_be_asked_plainly(public: Sources) -> None:
    (plain,), (chat,) = HumanEval(style="plain", limit=1).load(public), HumanEval(limit=1).load(public)
    assert plain.turns[0] == _right(plain)["prompt"]
    assert plain.turns[0] in chat.turns[0] and plain.turns[0] != chat.turns[0]
    assert "canonical_solution" not in _right(chat)


# ------------------------------------------------------------------------------------------------------- scores


def test_gsm8k_is_scored_by_its_final_number(own: Sources) -> None:
    task = Gsm8k()
    (example,) = task.load(own)
    right, unmarked = task.score(example, 0, "So it is\n#### 5"), task.score(example, 0, "It is 5.")
    assert (right["exact_match_strict"], right["exact_match_flexible"]) == (100, 100)
    assert (unmarked["exact_match_strict"], unmarked["exact_match_flexible"]) == (0, 100)


def test_a_corpus_score_is_that_of_the_corpus(own: Sources) -> None:
    task = WMT14()
    first, second = task.load(own)
    answers = ["The dog is sleeping late today.", "Something else entirely, is it not?"]
    corpus = task.aggregate([(first, 0, answers[0]), (second, 0, answers[1])])["bleu"]
    mean = sum(task.score(e, 0, text)["bleu"] for e, text in zip((first, second), answers, strict=True)) / 2
    assert task.aggregate([(e, 0, _right(e)) for e in (first, second)])["bleu"] == pytest.approx(100)
    assert 0 < corpus < 100 and corpus != pytest.approx(mean)


def test_turns_without_reference_are_not_scored(tmp_path: Path) -> None:
    rows = [{**LINE, "turns": ["a", "b"], "reference": ["a b c d", None]}, {**LINE, "question_id": 8}]
    task = Jsonl(write(tmp_path / "own.jsonl", *rows), scorer="rouge")
    scored, unscored = task.load()
    assert task.score(scored, 0, "a b c d")["rouge1"] == pytest.approx(100)
    answers = [(scored, 0, "a b c d"), (scored, 1, "x"), (unscored, 0, "x")]
    assert task.score(scored, 1, "a b c d") == task.score(unscored, 0, "a") == {}
    assert task.aggregate(answers)["rougeL"] == pytest.approx(100)
    assert task.scorers == ("rouge1", "rouge2", "rougeL")


# --------------------------------------------------------------------------------------------------- one's own file


def test_own_files_are_read_plain_and_gzipped(tmp_path: Path) -> None:
    plain = tmp_path / "own.jsonl"
    write(plain, LINE, "", {**LINE, "question_id": "x"})
    packed = tmp_path / "own.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    one, other = Jsonl(str(plain)), Jsonl(str(packed))
    assert [example.id for example in one.load()] == [example.id for example in other.load()] == ["7", "x"]
    assert one.revision["files"][0]["sha256"] == other.revision["files"][0]["sha256"]


# ------------------------------------------------------------------------------------------------------ real data


@pytest.mark.parametrize("limit", [10, 16])
def test_mtbench_holds_all_categories_whatever_the_limit(public: Sources, limit: int) -> None:
    task = MTBench(limit=limit)
    examples = task.load(public)
    assert len(examples) == limit
    assert len({example.category for example in examples}) == 8
    assert {len(example.turns) for example in examples} == {2}
    assert task.revision["warnings"] == []


def test_spec_bench_has_six_tasks_of_eighty_and_a_reference_per_turn(public: Sources) -> None:
    examples = SpecBench().load(public)
    assert set(Counter(example.category for example in examples).values()) == {80}
    by_task = {example.category: example for example in examples}
    assert len(by_task) == 6
    assert {type(text) for text in _right(by_task["rag"])} == {str}
    assert isinstance(_right(by_task["translation"]), str)
    assert by_task["qa"].reference is None
    assert len({e.meta["subcategory"] for e in examples if e.category == "mt_bench"}) == 8
    assert {len(e.turns) - len(e.reference) for e in examples if e.reference} == {0}


def test_spec_bench_scores_each_task_in_its_way(public: Sources) -> None:
    task = SpecBench(limit=6)
    metrics = {e.category: set(task.score(e, 0, "Some answer, 5.")) for e in task.load(public)}
    assert metrics == {
        "mt_bench": set(),
        "qa": set(),
        "translation": {"bleu", "chrf"},
        "summarization": {"rouge1", "rouge2", "rougeL"},
        "math_reasoning": {"exact_match_strict", "exact_match_flexible"},
        "rag": {"exact_match", "contains_answer"},
    }


@pytest.mark.parametrize("kind", [Gsm8k, NQOpen, XSum])
def test_a_reference_gets_full_marks_and_nonsense_none(public: Sources, kind: type[Task]) -> None:
    task = kind(limit=3)
    for example in task.load(public):
        accepted = _right(example)
        answer = accepted if isinstance(accepted, str) else accepted[0]
        assert all(value == pytest.approx(100) for value in task.score(example, 0, answer).values())
        assert set(task.score(example, 0, "zzz").values()) == {0}


@pytest.mark.parametrize("kind", [MTBench, SpecBench, Gsm8k, HumanEval, XSum, NQOpen])
def test_no_public_prompt_is_empty_and_no_id_stands_twice(public: Sources, kind: type[Task]) -> None:
    examples = kind().load(public)
    assert len({example.id for example in examples}) == len(examples) > 79
    assert all(turn.strip() for example in examples for turn in example.turns)


def test_humaneval_runs_nothing_unless_allowed(public: Sources, tmp_path: Path) -> None:
    task = HumanEval(limit=1)
    (example,) = task.load(public)
    assert task.score(example, 0, f"```python\nopen('{tmp_path}/ran', 'w')\n```") == {}
    assert not (tmp_path / "ran").exists()
    assert "allow_code_execution" in task.notes()["pass@1"]


def test_every_config_builds_the_task_it_names() -> None:
    for file in sorted((conf_dir() / "dataset").glob("*.yaml")):
        group = yaml.safe_load(file.read_text())
        needed = {"path": "own.jsonl", "name": "hub"}
        group |= {key: value for key, value in needed.items() if group.get(key) == "???"}
        task = instantiate.build_task(group)
        assert isinstance(task, Task)
        assert (task.name, group["name"]) == (file.stem, file.stem)
        assert task.kind in ("causal", "seq2seq") or (task.kind, task.name in ("jsonl", "hub")) == ("any", True)

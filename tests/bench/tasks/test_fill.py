"""Synthetic contexts: prompts of one length, of text that repeats nothing, and a record that says so."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.analysis import summary
from bench.config import compose
from bench.errors import UserError
from bench.measure import preconditions
from bench.tasks import Demo, Multi30k, XSum, prompts
from bench.tasks.sources import Sources


class Words:
    """A token for each word, and one for each line break."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [hash(word) for word in text.replace("\n", " \n ").split(" ") if word]}


def articles(count: int, words: int = 60) -> list[dict[str, str]]:
    draw = random.Random(0)
    paragraphs = [" ".join(f"w{draw.randrange(10_000)}" for _ in range(words)) for _ in range(3 * count)]
    return [
        {"id": str(place), "document": "\n".join(["Share this with your friends today.", *paragraphs[place::count]])}
        for place in range(count)
    ]


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    file = tmp_path / "xsum" / "validation_1000.jsonl"
    file.parent.mkdir()
    rows = [row | {"summary": "s"} for row in articles(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Sources(tmp_path, tmp_path / "cache", fetch=False)


def asked(task: Any, examples: Sequence[Any]) -> list[list[int]]:
    return [prompts.encode(Words(), task.messages(example, 0, [])) for example in examples]


@pytest.mark.parametrize("tokens", [100, 257, 1000])
def test_every_prompt_reaches_the_length_and_ends_with_its_request(
    sources: Sources, tokens: int, capsys: pytest.CaptureFixture[str]
) -> None:
    task, plain = Demo(fill_to=tokens), Demo().load()
    filled = task.filled(task.load(sources), Words())
    lengths = [len(ids) for ids in asked(task, filled)]
    longer = [len(prompts.encode(Words(), task.messages(each, 0, []))) >= tokens for each in plain]
    assert all(length == tokens or above for length, above in zip(lengths, longer, strict=True))
    assert [each.turns[0].rpartition("\n\n")[2] for each in filled] == [
        each.turns[0].rpartition("\n\n")[2] for each in plain
    ]
    assert {len(each.turns) for each in filled} == {1}, "a later turn would hold an answer"
    assert task.revision["fill"] | {"synthetic": True, "tokens": tokens, "longer": sum(longer)} == task.revision["fill"]
    told = f"warning: {sum(longer)} of 12 prompts have {tokens} tokens or more already" in capsys.readouterr().err
    assert told == any(longer)


def test_no_five_words_occur_twice(sources: Sources) -> None:
    """Each article begins with the same sentence, which one of them may keep."""
    task = Demo(fill_to=2000)
    for each in task.filled(task.load(sources), Words()):
        words = each.turns[0].lower().split()
        runs = [tuple(words[start : start + 5]) for start in range(len(words) - 4)]
        assert len(set(runs)) == len(runs)


def test_a_request_about_an_article_is_not_filled_with_it(sources: Sources) -> None:
    task = XSum(limit=3, fill_to=1500)
    for each in task.filled(task.load(sources), Words()):
        request = each.turns[0].rpartition("Summarize the article")[2]
        assert all(each.turns[0].count(line) == 1 for line in request.splitlines()[3:] if line)


def test_the_text_follows_the_seed_and_the_prompt(sources: Sources) -> None:
    def texts(seed: int) -> list[str]:
        task = Demo(fill_to=300, seed=seed, limit=4)
        return [each.turns[0] for each in task.filled(task.load(sources), Words())]

    assert texts(0) == texts(0) != texts(1)
    assert len({text[:40] for text in texts(0)}) > 1


def test_warm_up_prompts_are_filled_too(sources: Sources) -> None:
    task = Demo(fill_to=400, limit=4)
    task.filled(task.load(sources), Words())
    assert task.spare and {len(ids) for ids in asked(task, task.spare)} == {400}


def test_without_the_option_prompts_are_as_they_are(tmp_path: Path) -> None:
    task = Demo()
    examples = task.load(Sources(tmp_path, tmp_path / "cache", fetch=False))
    assert task.filled(examples, Words()) == examples and "fill" not in task.revision


def test_what_cannot_be_filled_is_one_message(sources: Sources, tmp_path: Path) -> None:
    task = Demo(fill_to=100_000)
    examples = task.load(sources)
    with pytest.raises(UserError, match="fill_to must be at most about"):
        task.filled(examples, Words())
    with pytest.raises(UserError, match="needs the articles of xsum"):
        Demo(fill_to=9).load(Sources(tmp_path / "xsum", tmp_path / "cache", fetch=False))
    with pytest.raises(UserError, match="needs prompts for a causal model"):
        Multi30k(source="en", target="de", fill_to=9)


def test_a_length_that_leaves_no_room_for_the_answer_is_refused_before_anything_is_loaded() -> None:
    words = ["model=smollm2", "dataset=mtbench", "max_new_tokens=128"]
    assert not preconditions.check(compose.compose([*words, "dataset.fill_to=8064"]))
    (found,) = preconditions.check(compose.compose([*words, "dataset.fill_to=8065"]))
    assert "need a context of 8,193 tokens, and model=smollm2 has 8,192. Lower dataset.fill_to to 8064" in found


def test_tables_name_filled_prompts_as_another_data_set() -> None:
    dataset: dict[str, Any] = {"name": "mtbench", "revision": {"content": "c"}}
    assert summary.data_set(dataset) == "mtbench"
    dataset["revision"]["fill"] = {"synthetic": True, "tokens": 4096}
    assert summary.data_set(dataset) == "mtbench, synthetic fill to 4,096 tokens"

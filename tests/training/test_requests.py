"""Requests that the model writes itself: which pass, and a killed run that goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.contract import checks
from methods.engine.causal_lm import CausalLM
from methods.training.interface import TrainingContext
from methods.training.ngrams import ngrams
from methods.training.requests import OPENINGS, OwnRequests, Sieve, user_header


def test_runs_of_words_do_not_cross_lines() -> None:
    assert ngrams("One, two; THREE's four\nfive six", 3) == {"one two three", "two three s", "three s four"}
    assert ngrams("one two", 3) == set()


LONG = "Write a story about an old man who lives by the cold sea with his dog"


@pytest.mark.parametrize(
    ("request_", "passes"),
    [
        ("Why is the sky so blue?", True),
        ("why is the sky so blue", False),
        ("Why is it?", False),
        ("What does 夕方 mean in my language?", False),
        ("Say this \ufffd word for me now", False),
        (LONG + " and cat", False),
        ("Write a story about an old man. It must be short, sad, and without any names at all.", True),
        ("- - - - - -", False),
    ],
)
def test_the_sieve(request_: str, passes: bool) -> None:
    sieve = Sieve()
    assert sieve.passes("Why is the sky so blue?!") and sieve.passes(LONG)
    assert sieve.passes(request_ if "blue?" not in request_ else "Why is the sea so blue?") is passes


class Letters:
    """A word per id, and a template of marks."""

    chat_template = "yes"

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
        assert not tokenize
        return f"<user>{messages[0]['content']}<end>"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert text.startswith("<user>") and not add_special_tokens
        return {"input_ids": [40 + sum(map(ord, word)) % 20 for word in text.split()]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(f" w{token}" for token in ids if token >= 6)


@pytest.fixture(scope="module")
def target() -> CausalLM:
    lm = checks.tiny_target(seed=3)
    lm.eos_ids = tuple(range(6))  # a tenth of what it draws
    return lm


def context(target: CausalLM, folder: Path, **more: Any) -> TrainingContext:
    folder.mkdir(parents=True, exist_ok=True)
    return TrainingContext(output=folder, shared_cache=folder, model=target, tokenizer=Letters(), **more)


SMALL = OwnRequests(count=30, limit=24, batch=16)


def prompts(folder: Path) -> list[str]:
    lines = (folder / "requests.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def test_requests_are_finished_distinct_and_of_their_seed(target: CausalLM, tmp_path: Path) -> None:
    facts = SMALL.fit(context(target, tmp_path / "a"))
    found = prompts(tmp_path / "a")
    assert facts["requests"] == len(found) == len(set(found)) == 30 and facts["batches"] >= 2
    opened = [text for text in found if text.startswith(OPENINGS)]
    assert 0 < len(opened) < 30 and all(len(text.split()) >= 5 for text in found)
    SMALL.fit(context(target, tmp_path / "b"))
    SMALL.fit(context(target, tmp_path / "c", seed=1))
    assert prompts(tmp_path / "b") == found != prompts(tmp_path / "c")
    bare = replace(SMALL, openings=0.0)
    bare.fit(context(target, tmp_path / "d"))
    assert all(text.startswith("w") for text in prompts(tmp_path / "d"))


def test_a_killed_run_goes_on_to_the_same_end(target: CausalLM, tmp_path: Path) -> None:
    SMALL.fit(context(target, tmp_path / "whole"))
    shown: list[int] = []

    def killed(stage: str, done: int, total: int) -> None:
        shown.append(done)
        if len(shown) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SMALL.fit(context(target, tmp_path / "cut", report_progress=killed))
    drawn = tmp_path / "cut" / "training_log" / "drawn.jsonl"
    drawn.write_bytes(drawn.read_bytes()[:-9])  # within a batch
    again: list[int] = []
    SMALL.fit(context(target, tmp_path / "cut", report_progress=lambda stage, done, total: again.append(done)))
    assert again[0] == shown[1] > 0, "whole batches are kept"
    assert prompts(tmp_path / "cut") == prompts(tmp_path / "whole")


def test_what_cannot_work_is_refused(target: CausalLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must write requests, got none in the last 320 texts and 0 in all"):
        replace(SMALL, shortest=40).fit(context(target, tmp_path))
    plain = Letters()
    plain.chat_template = ""
    with pytest.raises(ValueError, match="must have a chat template, got a tokenizer without one"):
        user_header(plain)
    for setting in ({"count": 0}, {"temperature": 0.0}, {"top_p": 1.5}, {"openings": 1.1}):
        with pytest.raises(ValueError, match=rf"^{next(iter(setting))} must be"):
            OwnRequests(**setting)  # type: ignore[arg-type]

"""Whatever words and lines come: a configuration or prompts, or one message; never another exception."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bench.config import compose
from bench.config.schema import RunConfig
from bench.errors import UserError
from bench.tasks import Jsonl, conversations

KEYS = (
    "seed", "batch_size", "max_new_tokens", "max_context", "method", "method.gamma", "method.max_ngram", "model",
    "model.name", "dataset", "dataset.limit", "dataset.path", "sampling", "sampling.temperature", "sampling.top_p",
    "measure.repeats", "measure.warmup", "hardware", "hardware.threads", "paths.results", "tracker", "hydra.run.dir",
)  # fmt: skip
TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
VALUES = st.one_of(
    TEXT, st.integers().map(str), st.floats().map(str), st.sampled_from(["null", "true", "[]", "{}", "[1,2]", "{a:1}"]),
    st.sampled_from(["???", "${seed}", "${nope}", "${oc.env:NOPE}", "glob(*)", "range(1,3)", "choice(a,b)", "'", '"']),
)  # fmt: skip
WORDS = st.one_of(
    TEXT,
    st.builds("{}{}={}".format, st.sampled_from(["", "+", "++", "~"]), st.sampled_from(KEYS), VALUES),
    st.builds("{}={}".format, TEXT, VALUES),
)


@given(st.lists(WORDS, max_size=3))
@settings(max_examples=60, deadline=None, derandomize=True)
@example(["=5"])
@example(["method=null"])
@example(["seed=" + "9" * 40])
@example(["seed=\ud800"])
@example(["x" * 100_000])
def test_words_compose_or_are_refused_in_words(words: list[str]) -> None:
    try:
        found = compose.compose(words)
    except UserError as error:
        assert str(error).strip()
    else:
        assert isinstance(found, RunConfig)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
_FIELDS = ("prompt", "text", "turns", "messages", "question_id", "category", "answer", "reference", "references")
ROWS = st.dictionaries(
    st.sampled_from(_FIELDS), JSON | st.lists(st.fixed_dictionaries({"role": TEXT, "content": JSON}), max_size=2)
)
LINES = st.one_of(
    ROWS.map(lambda row: json.dumps(row).encode()), JSON.map(lambda v: json.dumps(v).encode()), st.binary()
)


@given(st.lists(LINES, max_size=4), st.sampled_from(["a.jsonl", "a.txt", "a.jsonl.gz", "a"]))
@settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example([b'{"prompt": "half \\ud800"}'], "a.jsonl")
@example([b'{"prompt": "x", "deep": ' + b"[" * 100_000], "a.jsonl")
@example([b"\0" * 100], "a.txt")
def test_lines_are_prompts_or_are_refused_in_words(tmp_path: Path, lines: list[bytes], name: str) -> None:
    file = tmp_path / name
    file.write_bytes(b"\n".join(lines))
    try:
        found = conversations.examples(conversations.read_file(file)[0])
    except UserError as error:
        assert name in str(error)
    else:
        assert found and all(each.turns and all(isinstance(turn, str) for turn in each.turns) for each in found)
        assert len({each.id for each in found}) == len(found)
        json.dumps([each.id for each in found], ensure_ascii=False).encode()


@pytest.mark.parametrize("scorer", ["gsm8k", "nq", "rouge", "translation"])
@given(row=ROWS, answer=TEXT)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(row={"prompt": "x", "references": [5]}, answer="5")
@example(row={"prompt": "x", "references": [float("nan")]}, answer="")
@example(row={"prompt": "x", "references": [["a", 1]]}, answer="")
def test_references_are_refused_before_or_can_be_scored(
    tmp_path: Path, scorer: str, row: dict[str, Any], answer: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    try:
        task = Jsonl(path=str(file), scorer=scorer)
        examples = list(task.load())
    except UserError:
        return
    for each in examples:
        assert isinstance(task.score(each, 0, answer), dict)

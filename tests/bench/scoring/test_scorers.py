"""Scores: published figures where there are some, hand-made cases else, and what a faulty program may not do."""

from __future__ import annotations

import gzip
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from bench.errors import UserError
from bench.scoring import (
    SCORERS,
    Gsm8kScorer,
    HumanEvalScorer,
    NQScorer,
    RougeScorer,
    Scorer,
    TranslationScorer,
    sandbox,
    translation,
)
from bench.scoring.gsm8k import last_number, marked_number
from bench.scoring.humaneval import build_solution, extract_code
from bench.scoring.nq import normalise
from bench.tasks.sources import Sources

SENTENCE_END = re.compile(r"(?<=[.!?])\s+")  # the splitter behind the pinned ROUGE figures
QUICK = sandbox.Limits(cpu_s=1)
PROMPT = 'import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef area(r):\n    """Of a circle."""\n'
BODY = "    square = r * r\n    return math.pi * square\n"
PROBLEM = {
    "prompt": PROMPT,
    "entry_point": "area",
    "test": "def check(f):\n    assert abs(f(2) - 4 * math.pi) < 1e-9\n",
}


def refused() -> str:
    """Why no program can be executed here; empty if it can."""
    try:
        sandbox.isolation()
    except UserError as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(refused()), reason="this machine offers no sandbox")


@pytest.fixture
def public(data_root: Path, tmp_path: Path) -> Sources:
    return Sources(data_root, tmp_path)


def lines(file: Path) -> list[str]:
    return gzip.decompress(file.read_bytes()).decode().splitlines()


def rounded(scores: dict[str, float | None]) -> list[float]:
    return [round(value, 2) for value in scores.values() if value is not None]


# ------------------------------------------------------------------------------------------------ published figures


def test_rouge_of_first_sentences_of_xsum(public: Sources) -> None:
    rows = public.get("xsum").rows
    pairs = [(row["summary"], SENTENCE_END.split(row["document"].strip(), maxsplit=1)[0]) for row in rows]
    assert rounded(RougeScorer().aggregate(pairs)) == [16.31, 1.58, 12.08]


def test_rouge_of_three_sentences_of_cnn_dailymail(public: Sources) -> None:
    rows = [row for row in public.get("spec_bench").rows if row["category"] == "summarization"]
    articles = [row["turns"][0].removeprefix("Summarize:").strip() for row in rows]
    pairs = [
        (row["reference"][0], " ".join(SENTENCE_END.split(text)[:3])) for row, text in zip(rows, articles, strict=True)
    ]
    assert rounded(RougeScorer().aggregate(pairs)) == [41.37, 18.19, 25.99]


def test_bleu_of_english_copied_as_german(data_root: Path) -> None:
    folder = data_root / "multi30k"
    english, german = (lines(folder / f"test_2016_flickr.{language}.gz") for language in ("en", "de"))
    assert rounded(TranslationScorer().aggregate(list(zip(german, english, strict=True))))[0] == 0.48


@needs_sandbox
def test_canonical_solutions_of_humaneval_pass_and_empty_ones_do_not(public: Sources) -> None:
    rows = public.get("humaneval").rows
    scorer = HumanEvalScorer(allow_code_execution=True)
    solved = [(row, f"Here it is:\n```python\n{row['prompt']}{row['canonical_solution']}```\nDone.") for row in rows]
    assert sum(scorer.passes(*pair) for pair in solved[:8]) == 8
    assert scorer.aggregate([(row, row["canonical_solution"]) for row in rows]) == {"pass@1": 100.0}
    assert scorer.aggregate([(row, "    return None\n") for row in rows[:16]]) == {"pass@1": 0.0}


# ------------------------------------------------------------------------------------------------------ all scorers


@pytest.mark.parametrize(
    ("scorer", "reference", "right", "wrong"),
    [
        (Gsm8kScorer(), "2+3=<<2+3=5>>5\n#### 5", "It is\n#### 5", "#### 6"),
        (NQScorer(), ["Vienna", "Wien"], "wien.", "Graz"),
        (RougeScorer(), "The cat sat down.", "The cats sat down", "zzz"),
        (TranslationScorer(), "The dog is sleeping late today.", "The dog is sleeping late today.", "zzz"),
        pytest.param(HumanEvalScorer(True, QUICK), PROBLEM, BODY, "    return 0\n", marks=needs_sandbox),
    ],
    ids=["gsm8k", "nq", "rouge", "translation", "humaneval"],
)
def test_right_is_100_and_wrong_is_about_0(scorer: Scorer, reference: Any, right: str, wrong: str) -> None:
    assert set(scorer.score(reference, right)) == set(scorer.metrics)
    assert all(value == pytest.approx(100) for value in scorer.score(reference, right).values())
    assert all(value < 5 for value in scorer.score(reference, wrong).values())
    assert set(scorer.aggregate([(reference, right)])) == set(scorer.metrics)
    assert scorer.aggregate([]) == dict.fromkeys(scorer.metrics)
    assert set(scorer.notes()) == set(scorer.metrics)


def test_every_scorer_is_listed() -> None:
    assert set(SCORERS.values()) == set(Scorer.__subclasses__())


# ------------------------------------------------------------------------------------------------------------ gsm8k


@pytest.mark.parametrize(
    ("text", "marked", "last"),
    [
        ("So\n#### 18", "18", "18"),
        ("#### $1,200 in 3 years", "1200", "3"),
        ("#### -5\n\nQuestion: 7\n#### 8", "-5", "8"),
        ("It is **18.50**.", None, "18.5"),
        ("5-3", None, "3"),
        ("(2)-4 = -2", None, "-2"),
        ("worth 3,000,000.", None, "3000000"),
        ("0 or .5", None, "0.5"),
        ("#### eighteen", None, None),
        ("", None, None),
    ],
)
def test_numbers_are_found(text: str, marked: str | None, last: str | None) -> None:
    assert marked_number(text) == (marked and Decimal(marked))
    assert last_number(text) == (last and Decimal(last))


def test_a_reference_of_zero_is_a_number() -> None:
    assert Gsm8kScorer().score("5-5=<<5-5=0>>0\n#### 0", "#### 0.00")["exact_match_strict"] == 100
    assert Gsm8kScorer().score("#### 0", "nothing")["exact_match_flexible"] == 0


# ------------------------------------------------------------------------------------------- open questions, text


def test_normalisation_is_that_of_squad() -> None:
    assert normalise("  The  Beatles' an apple, a day!") == "beatles apple day"


@pytest.mark.parametrize(
    ("answer", "exact", "contained"),
    [
        ("The Beatles.", 100, 100),
        ("\n\nBeatles\nThey were from Liverpool.", 100, 100),
        ("It was the Beatles, of course.", 0, 100),
        ("Beatlesque", 0, 0),
        ("", 0, 0),
    ],
)
def test_open_questions(answer: str, exact: float, contained: float) -> None:
    expected = {"exact_match": exact, "contains_answer": contained}
    assert NQScorer().score(["The Beatles", "!"], answer) == expected


def test_bleu_of_a_corpus_is_no_mean_and_has_a_signature() -> None:
    scorer = TranslationScorer()
    pairs = [("The dog is sleeping late today.",) * 2, ("He comes tomorrow morning, I think.", "He is here tomorrow.")]
    mean = sum(scorer.score(*pair)["bleu"] for pair in pairs) / 2
    assert scorer.aggregate(pairs)["bleu"] != pytest.approx(mean, abs=1)
    assert re.search(r"nrefs:1\|.*tok:13a\|.*version:", scorer.notes()["bleu"])
    assert "nc:6" in scorer.notes()["chrf"]


def cut(texts: list[str], step: int) -> list[tuple[str, str]]:
    """Every text, and without each ``step``-th of its words."""
    return [(text, " ".join(word for place, word in enumerate(text.split()) if place % step)) for text in texts]


def test_the_change_of_bleu_is_that_of_a_paired_bootstrap(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against scores of resampled texts, and sacreBLEU's own test of the same difference."""
    german = lines(data_root / "multi30k" / "test_2016_flickr.de.gz")[:120]
    scorer, before, after = TranslationScorer(), cut(german, 5), cut(german, 7)
    scores = [scorer.aggregate(pairs)["bleu"] for pairs in (before, after)]
    found = scorer.change(before, after)["bleu"]
    assert found.value == pytest.approx(scores[1] - scores[0]) and found.n == 120
    assert 0 < found.low < found.value < found.high, "fewer words are missing"
    answers = [(name, [text for _, text in pairs]) for name, pairs in (("before", before), ("after", after))]
    judged = PairedTest(answers, {"BLEU": BLEU()}, [german], test_type="bs", n_samples=300)()[1]["BLEU"]
    assert judged[1].p_value < 0.01, "as the interval says, which does not hold 0"
    monkeypatch.setattr(translation, "_RESAMPLES", 30)
    drawn = np.random.default_rng(0).integers(120, size=(30, 120))
    changes = [
        scorer.aggregate([after[i] for i in lot])["bleu"] - scorer.aggregate([before[i] for i in lot])["bleu"]  # type: ignore[operator]
        for lot in drawn
    ]
    again = scorer.change(before, after)["bleu"]
    assert [again.low, again.high] == pytest.approx(np.percentile(changes, [2.5, 97.5]).tolist())


def test_changes_that_are_none_too_few_or_of_other_references() -> None:
    scorer, few = TranslationScorer(), cut(["one two three four five six"] * 19, 4)
    same = scorer.change([*few, *few], [*few, *few])["bleu"]
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    short = scorer.change(few, few)["bleu"]
    assert short.low is None and "19 segments are too few" in str(short.reason)
    assert scorer.change([], []) == {}
    poor = [("one two three four five six", "six four two one"), ("seven eight nine ten", "ten eight six seven")]
    smoothed = scorer.aggregate(poor)["bleu"]
    assert smoothed is not None and smoothed > 0, "no pair of words is right, and signatures say smooth:exp"
    assert scorer.change([(reference, "") for reference, _ in poor], poor)["bleu"].value == pytest.approx(smoothed)
    with pytest.raises(ValueError, match="19 and 38 answers to other references"):
        scorer.change(few, few * 2)


def test_a_translation_in_two_lines_is_one_segment() -> None:
    same = TranslationScorer().score("One two three four five", "One two\n three four five\n")
    assert same["bleu"] == pytest.approx(100)


# ---------------------------------------------------------------------------------------------------- code in answers


@needs_sandbox
@pytest.mark.parametrize(
    "answer",
    [
        BODY,
        BODY + "\n\nThis multiplies pi with the square.",
        BODY.strip(),
        "square = r * r\nreturn math.pi * square",
        f"```python\n{BODY}```",
        f"Sure!\n\n```python\n{PROMPT}{BODY}```\nIt uses `math`.",
        f"```\n{PROMPT}{BODY}",
        f"```bash\npip install nothing\n```\nthen\n```py\ndef area(r):\n{BODY}```",
        "1. Like so:\n   ```python\n   def area(r):\n       return math.pi * r * r\n   ```\n",
        f"def area(r):\n{BODY}",
    ],
    ids=[
        "body",
        "prose behind",
        "stripped",
        "dedented",
        "fenced body",
        "chat",
        "cut",
        "two blocks",
        "indented",
        "bare",
    ],
)
def test_code_is_found_in_an_answer(answer: str) -> None:
    assert HumanEvalScorer(True, QUICK).passes(PROBLEM, answer)


def test_a_whole_function_keeps_imports_and_helpers_of_the_prompt() -> None:
    solution = build_solution(PROMPT, "area", "def area(r):\n    return half(r)\n")
    assert solution.startswith("import math") and "def half" in solution and solution.count("def area") == 1
    assert extract_code("no code here", "area") == "no code here"


@needs_sandbox
@pytest.mark.parametrize(
    "answer", ["", "I cannot do that.", "```python\n```", "def area(:", "(" * 5000, "\x00", "\ud800"]
)
def test_answers_without_a_solution_fail_without_an_error(answer: str) -> None:
    assert HumanEvalScorer(True, QUICK).score(PROBLEM, answer) == {"pass@1": 0.0}


@needs_sandbox
def test_tests_see_the_helpers_of_the_prompt_and_not_those_of_the_answer() -> None:
    problem = PROBLEM | {"test": "def check(f):\n    assert half(f(2)) == 2 and area(0) == 0\n"}
    assert HumanEvalScorer(True, QUICK).passes(problem, "def area(r):\n    return 2 * r\n")
    own = "def half(x):\n    return 2\n\n\ndef area(r):\n    return 6 * r\n"
    assert not HumanEvalScorer(True, QUICK).passes(problem, own)


def test_nothing_runs_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "run", lambda *_: pytest.fail("a program was run"))
    scorer = HumanEvalScorer()
    assert scorer.score(PROBLEM, BODY) == {}
    assert scorer.aggregate([(PROBLEM, BODY)]) == {"pass@1": None}
    assert "allow_code_execution=true" in scorer.notes()["pass@1"]

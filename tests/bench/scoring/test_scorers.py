"""Scores: published figures where there are some, hand-made cases else, and what a faulty program may not do."""

from __future__ import annotations

import gzip
import os
import re
import resource
import sys
import tempfile
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

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
        (HumanEvalScorer(True, QUICK), PROBLEM, BODY, "    return 0\n"),
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


@pytest.mark.parametrize(
    "answer", ["", "I cannot do that.", "```python\n```", "def area(:", "(" * 5000, "\x00", "\ud800"]
)
def test_answers_without_a_solution_fail_without_an_error(answer: str) -> None:
    assert HumanEvalScorer(True, QUICK).score(PROBLEM, answer) == {"pass@1": 0.0}


def test_nothing_runs_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "run", lambda *_: pytest.fail("a program was run"))
    scorer = HumanEvalScorer()
    assert scorer.score(PROBLEM, BODY) == {}
    assert scorer.aggregate([(PROBLEM, BODY)]) == {"pass@1": None}
    assert "allow_code_execution=true" in scorer.notes()["pass@1"]


# ------------------------------------------------------------------------------------------------------ the sandbox


@pytest.mark.parametrize(
    ("program", "ends"),
    [
        ("x = 1", None),
        ("open('a', 'w').write('x'); import os; os.remove('a')", None),
        ("print('done'); assert False", "AssertionError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import os; os._exit(0)", "ended early with code 0"),
        (
            "import os\nfor d in range(3, 32):\n    try: os.write(d, b'done')\n    except OSError: pass\nos._exit(0)",
            "done",
        ),
        ("import ctypes; ctypes.CDLL(None)", "PermissionError"),
        ("while True: pass", "time limit"),
        ("try:\n    while True: pass\nexcept Exception: pass", "time limit"),
        ("x = bytearray(3 * 2**29)", "MemoryError"),  # which most machines would give
        ("x = [open('a', 'w') for _ in range(64)]", "OSError"),
        ("def f(): f()\nf()", "RecursionError"),
        ("open('a', 'w').write('x' * 10**7)", "OSError"),
        ("import os; os.fork()", "PermissionError"),
        ("import os; os.system('true')", "PermissionError"),
        ("import subprocess; subprocess.run(['true'])", "PermissionError"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "PermissionError"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
        ("syntax error", "SyntaxError"),
        ("input()", "EOFError"),
    ],
)
def test_a_program_ends_as_it_should(program: str, ends: str | None) -> None:
    assert sandbox.run(program, QUICK) == ends


def test_files_outside_the_working_folder_are_safe(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    for line in ("open(p, 'w')", "os.remove(p)", "os.rename(p, 'x')", "os.truncate(p, 0)", "shutil.rmtree(f)"):
        program = f"import os, shutil\np, f = {str(kept)!r}, {str(tmp_path)!r}\n{line}"
        assert sandbox.run(program, QUICK) == "PermissionError", line
    assert kept.read_text() == "mine"


def _landlock() -> bool:
    import ctypes

    return sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) > 0


@pytest.mark.skipif(not _landlock(), reason="this kernel has no Landlock")
@pytest.mark.parametrize(
    "line",
    [
        "d = os.open(f, os.O_RDONLY); os.open('kept', os.O_WRONLY | os.O_TRUNC, dir_fd=d)",
        "d = os.open(f, os.O_RDONLY); os.remove('kept', dir_fd=d)",
        "d = os.open(f, os.O_RDONLY); os.rename('kept', 'x', src_dir_fd=d)",
        "os.mkfifo(f + '/pipe')",
        "d = os.open(f, os.O_RDONLY); os.fchdir(d); os.remove('kept')",
    ],
)
def test_the_kernel_refuses_what_audit_events_do_not_show(line: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    assert sandbox.run(f"import os\nf = {str(tmp_path)!r}\n{line}", QUICK) == "PermissionError"
    assert kept.read_text() == "mine" and os.listdir(tmp_path) == ["kept"]


def test_a_program_that_sleeps_is_ended_by_the_clock_on_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_START_S", 0.0)
    assert sandbox.run("import time; time.sleep(60)", QUICK) == "time limit"


def test_a_program_that_calculates_is_ended_by_the_clock_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_START_S", 300.0)
    begin = time.monotonic()
    assert sandbox.run("while True: pass", QUICK) == "time limit"
    assert time.monotonic() - begin < 250, "it was ended by the clock on the wall"


def test_the_environment_stays_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    assert sandbox.run("import os; assert 'SOME_TOKEN' not in os.environ", QUICK) is None


def test_the_working_folder_is_empty_and_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert sandbox.run("import os; assert os.listdir() == []; open('left', 'w').close()", QUICK) is None
    assert os.listdir(tmp_path) == []


FLOOD = """
import os
for report in range(3, 32):
    try:
        while True:
            os.write(report, bytes(2**20))
    except OSError:
        pass
"""
DEEP = """
import os
at = os.open(".", os.O_RDONLY)
for _ in range(3000):
    os.mkdir("d", dir_fd=at)
    at, above = os.open("d", os.O_RDONLY, dir_fd=at), at
    os.close(above)
"""


@pytest.mark.parametrize(
    ("program", "ends"),
    [
        (FLOOD, "output"),
        ("for i in range(3000):\n  open(str(i), 'wb').write(b'x' * 2**20)\nwhile 1: pass", "disk"),
        ("for i in range(10**6):\n  open(str(i), 'w').close()", "disk"),
        (f"{DEEP}\nwhile 1: pass", "disk"),
    ],
    ids=["report", "bytes", "files", "depth"],
)  # fmt: skip
def test_a_program_that_floods_is_ended_and_leaves_nothing(
    program: str, ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sandbox.run(program) == f"{ends} limit"
    assert list(tmp_path.iterdir()) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024  # KiB


def test_a_deep_tree_of_a_program_that_ended_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sandbox, "_LOOK_S", 60.0)
    assert sandbox.run(DEEP) in (None, "disk limit")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not sandbox._isolation(), reason="this machine offers no namespaces")
def test_there_is_no_network_even_below_python() -> None:
    program = "assert [line for line in open('/proc/net/dev') if ':' in line and 'lo:' not in line] == []"
    assert sandbox.run(program, QUICK) is None


def test_a_machine_without_namespaces_still_runs_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_isolation", lambda: ())
    assert sandbox.run("x = 1", QUICK) is None
    assert sandbox.run("import socket; socket.socket()", QUICK) == "PermissionError"

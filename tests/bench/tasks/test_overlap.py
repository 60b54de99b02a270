"""Training texts that repeat evaluation prompts are found and left out; those that ship have none."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from bench.config.schema import PathsConfig
from bench.errors import UserError
from bench.models import loading
from bench.tasks import corpus, overlap, requests
from bench.tasks.overlap import Evaluated
from bench.tasks.sources import Sources, project_data
from bench.train.corpora import ANSWERS_FILE
from methods.training.answer_memo import AnswerMemo
from methods.training.ngrams import ngrams

ASKED = "Tell me how many tall ships left the old harbour on that day."
EVALUATED = Evaluated(frozenset(ngrams(ASKED, 8)), ("one",), ())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (ASKED, True),
        ("how MANY tall ships -- left the old, harbour on", True),
        ("many tall ships left the old harbour", False),
        ("how many tall ships left\nthe old harbour on that day", False),
        ("", False),
    ],
)
def test_eight_words_in_a_row_of_a_line_overlap(text: str, found: bool) -> None:
    assert EVALUATED.overlaps(text) is found and EVALUATED.overlaps("Nothing.", text) is found


def test_the_wording_of_a_set_does_not_count_and_missing_sets_are_named(tmp_path: Path) -> None:
    begin = "please answer the following question about a far away island"
    questions = [f"Question {n}: {begin}: {ASKED}" for n in range(9)]
    others = [f"Say nothing at all but the plain truth in your own number {n}" for n in range(10)]
    file = tmp_path / "datasets" / "mt_bench" / "question.jsonl"
    file.parent.mkdir(parents=True)
    rows = [{"question_id": n, "category": "x", "turns": [text]} for n, text in enumerate([*questions, *others])]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overlap._evaluation.cache_clear()
    found = overlap.evaluation(Sources(tmp_path, tmp_path))
    assert set(found.sets) == {"demo", "mtbench"} and "spec_bench" in found.missing
    assert found.warning and "was not compared with spec_bench gsm8k" in found.warning
    assert found.overlaps(ASKED) and found.overlaps(begin)
    assert not found.overlaps("Say nothing at all but the plain truth in your own"), "ten prompts begin so"
    assert Evaluated(frozenset(), ("a",), ()).warning is None


def test_overlapping_dialogues_are_left_out_before_any_are_drawn(tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {n}.", "answer": f"It is {n}."} for n in range(6)]
    rows[1]["prompt"] += ASKED
    rows[4]["answer"] = ASKED
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "plain.txt").write_text(ASKED)
    texts = corpus.read(f"{file}:4,{tmp_path}/plain.txt", evaluated=EVALUATED)
    assert [dialogue.said[0] for dialogue in texts.dialogues] == ["Say 0.", "Say 2.", "Say 3.", "Say 5.", ""]
    assert texts.left_out == {"own.jsonl": 2, "plain.txt": 0}
    assert corpus.read(str(file)).left_out is None and len(corpus.read(str(file)).dialogues) == 6


# ------------------------------------------------------------------------------------------- requests without answers


def test_a_line_without_an_answer_is_a_request_where_none_is_needed(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    rows = [
        {"prompt": "Why?"},
        {"turns": ["Who?", "And then?"]},
        {"prompt": "How?", "answer": "So."},
        {"text": "Plain."},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = corpus.read(str(file), unanswered=True)
    found = [(dialogue.said, dialogue.answer) for dialogue in texts.dialogues]
    assert found == [(("Why?",), ""), (("Who?",), ""), (("How?",), "So."), (("",), "Plain.")]
    with pytest.raises(UserError, match="line 1: a conversation to learn from must have one text as the answer"):
        corpus.read(str(file))
    for name in requests.REQUESTS:
        with pytest.raises(UserError, match=f"corpus={name} has requests without answers, and answers are needed here"):
            corpus.read(name)


SHIPPED = {
    "wikitext2_requests": (1101, "c3dac12cb3d99df06fa3ac18a3f9a918d8bacee4184ff4f8141c564531024583"),
    "wikitext2_passages": (808, "4957f7eb86b6d4cd8ab2eb5192639e34b674fc116faa9fe3974a1046398b1713"),
    "multi30k_requests": (2000, "41efc34e916ff5f16423a2ebf03ea93d8fe76d913433071421dabff70d5d62b0"),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_given_texts_with_a_task_are_those_whose_answers_ship(name: str, data_root: Path, tmp_path: Path) -> None:
    """Byte for byte: an answer is found by the ids of its prompt."""
    texts = corpus.read(name, sources=Sources(data_root, tmp_path), unanswered=True)
    said = [dialogue.said[0] for dialogue in texts.dialogues]
    assert not any(dialogue.answer for dialogue in texts.dialogues)
    assert (len(said), hashlib.sha256("\0".join(said).encode()).hexdigest()) == SHIPPED[name]
    if name.startswith("wikitext2"):
        assert not any(" @-@ " in text or " ," in text for text in said)


def test_a_passage_is_of_one_article_and_comes_with_two_tasks(data_root: Path, tmp_path: Path) -> None:
    lines = [
        *("= First =", "a " * 100, "= = Part = =", "b " * 90, "c " * 10),  # the last one is too short
        *("= Second =", "d " * 179, "e " * 400),  # the second paragraph makes it too long
        *("= Third @-@ place =", "f , " * 100),
        *("= <unk> of a title =", "g " * 200),
    ]
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "valid.txt").write_text("\n".join(f" {line} " for line in lines))
    found, _ = requests.passages(Sources(tmp_path, tmp_path / "cache"))
    assert len(found) == 4 == len(set(found))
    for first, second in (found[::2], found[1::2]):
        assert ("a a" in first) == ("a a" in second)
    of_first = [text for text in found if "a a" in text]
    assert len(of_first) == 2 and all("a\nb b" in text and "c" not in text.split("b b b")[1][:300] for text in of_first)
    assert all("f, f" in text for text in found if "a a" not in text)
    assert not any(letter * 2 in text.replace(" ", "") for text in found for letter in "deg")


# ------------------------------------------------------------------------------------------------- what really is there


@pytest.fixture(scope="module")
def evaluated(data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    found = overlap.evaluation(Sources(data_root, tmp_path_factory.mktemp("cache")))
    assert not found.missing
    return found


def test_counts_of_the_documentation(evaluated: Evaluated, data_root: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    wanted = {"dolly": 12, "gsm8k": 98, "own_requests": 0, "wikitext2_requests": 5}
    wanted |= {"wikitext2_passages": 8, "multi30k_requests": 0}
    for name, count in wanted.items():
        texts = corpus.read(name, sources=Sources(data_root, tmp_path), evaluated=evaluated, unanswered=True)
        assert texts.left_out == {name: count}
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert f"| {len(texts.dialogues):,} |" in row
    memo = AnswerMemo.load(project_data() / "corpora" / "smollm2" / ANSWERS_FILE)
    assert f"has {memo.tokens:,} tokens of greedy answers" in page


def test_no_shipped_request_or_answer_overlaps(
    evaluated: Evaluated, smollm2_dir: Path, cache_root: Path, data_root: Path
) -> None:
    own = requests.own(Sources(data_root, cache_root))[0]
    assert len(own) > 1000 and len(set(own)) == len(own)
    assert not [text for text in own if evaluated.overlaps(text)]
    hardware = {"device": "cpu", "dtype": "float32", "threads": 1}
    loaded = loading.load({"name": "smollm2"}, hardware, PathsConfig(cache=str(cache_root)))
    memo = AnswerMemo.load(project_data() / "corpora" / "smollm2" / ANSWERS_FILE)
    assert (memo.origin.revision, memo.origin.sha256) == (loaded.revision, loaded.sha256)
    texts = loaded.tokenizer.batch_decode(memo.answers(), skip_special_tokens=True)
    assert len(texts) > 400 and not [text for text in texts if evaluated.overlaps(text)]

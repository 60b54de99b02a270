"""Packing what a model wrote, and trainings that read it."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.config import compose
from bench.errors import UserError
from bench.models import loading
from bench.models.source import Loaded
from bench.tasks import prompts
from bench.train import command, corpora
from methods.training.answer_memo import AnswerMemo, Origin

SMALL = ["model=random", "model.layers=1", "hardware=cpu_fp32", "hardware.threads=1"]
REPEATED = "The ferry to Lindholm will not run between"  # of data/demo.jsonl


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder data/ of a project that ships nothing yet; and no data sets."""
    monkeypatch.setattr(corpora, "project_data", lambda: tmp_path / "data")
    monkeypatch.delenv("DECODEBENCH_DATA", raising=False)
    return tmp_path / "data"


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return [*SMALL, f"paths.cache={tmp_path / 'cache'}"]


@pytest.fixture
def loaded(words: list[str]) -> Loaded:
    cfg = compose.compose(words)
    return loading.load(cfg.model, asdict(cfg.hardware), cfg.paths)


def write(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def own_corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "own.jsonl", [{"prompt": f"Say {n} words."} for n in range(4)])


def answers_of(tmp_path: Path, loaded: Loaded) -> Path:
    """To three of four prompts of the corpus, one of which overlaps, and to another prompt."""
    said = ["Say 0 words.", "Say 1 words.", "Say 2 words.", "Say nothing."]
    texts = ["Two words.", REPEATED, "Three more words.", "Nothing."]
    ids = [prompts.encode(loaded.tokenizer, [{"role": "user", "content": text}]) for text in said]
    written = [loaded.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return write(tmp_path / "answers.jsonl", [list(row) for row in zip(ids, written, strict=True)])


def pack(words: list[str], tmp_path: Path, loaded: Loaded) -> list[str]:
    file = answers_of(tmp_path, loaded)
    return [*words, f"answers={file}", f"corpus={own_corpus(tmp_path)}", "limit=64"]


def test_requests_are_packed_without_those_alike_and_those_that_overlap(
    words: list[str], tmp_path: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ["Why is the sky so blue?", "why is the sky so blue", "Too short.", f"Continue: {REPEATED} ten and"]
    file = write(tmp_path / "requests.jsonl", [{"prompt": text} for text in said])
    assert corpora.main([*words, f"requests={file}"]) == 0
    out, err = capsys.readouterr()
    assert "1 requests of 4; 2 are like an earlier one or too short, 1 overlap with an evaluation set" in out
    assert "warning: the corpus was not compared with mtbench" in err
    packed = project / "corpora" / "random" / "requests.jsonl.gz"
    assert json.loads(gzip.decompress(packed.read_bytes())) == {"prompt": said[0]}


def test_answers_to_the_prompts_of_a_corpus_are_packed_and_found(
    words: list[str], tmp_path: Path, loaded: Loaded, capsys: pytest.CaptureFixture[str]
) -> None:
    assert corpora.memo_of(loaded) is None
    assert corpora.main(pack(words, tmp_path, loaded)) == 0
    out = capsys.readouterr().out
    assert "own.jsonl: 4 prompts, 3 answered, 1 of the answers overlap, 27 tokens packed" in out
    memo = corpora.memo_of(loaded)
    assert memo is not None and len(memo) == 2
    assert memo.origin == Origin("random", loaded.revision, loaded.sha256, "float32", 64, 0.0)
    ids = prompts.encode(loaded.tokenizer, [{"role": "user", "content": "Say 2 words."}])
    assert loaded.tokenizer.decode(memo.get(ids, 64, 0.0)) == "Three more words."


def test_a_training_takes_the_answers_of_its_model(
    words: list[str], tmp_path: Path, loaded: Loaded, capsys: pytest.CaptureFixture[str]
) -> None:
    assert corpora.main(pack(words, tmp_path, loaded)) == 0
    file = write(tmp_path / "asked.jsonl", [{"prompt": "Say 0 words."}, {"prompt": f"Is it true? {REPEATED}"}])
    train = ["method=rest", f"corpus={file}", f"out={tmp_path / 'out'}", *words]
    assert command.main(train) == 0, capsys.readouterr().err
    card = json.loads((tmp_path / "out" / "card.json").read_text())
    assert card["facts"]["answers"] == "own" and card["facts"]["documents"] == 1
    assert card["corpus"]["left_out"] == {"asked.jsonl": 1} and len(card["definition"]["answers"]) == 12
    assert "corpus=asked.jsonl: 1 dialogues overlap with an evaluation set and are left out" in capsys.readouterr().err
    assert command.main([*train, "train.documents=corpus"]) == 2
    assert "asked.jsonl, line 1: a conversation to learn from must have one text" in capsys.readouterr().err


def test_answers_of_other_weights_are_not_used(
    words: list[str], tmp_path: Path, loaded: Loaded, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = project / "corpora" / "random" / "answers.npz"
    AnswerMemo.pack(Origin("random", "other", loaded.sha256, "float32", 64), [([1], [2])]).save(file)
    assert corpora.memo_of(loaded) is None
    assert "has answers of revision other, and this is" in capsys.readouterr().err
    file.write_bytes(b"no zip")
    with pytest.raises(UserError, match="must be a file of answers"):
        corpora.memo_of(loaded)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "Either requests or answers must be named, got neither. Set answers=FILE.jsonl."),
        (["answers=nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["requests=nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["answer=a"], "Unknown setting 'answer'. Did you mean 'answers'?"),
        (["limit=x"], "limit must be a whole number, got 'x' (text)"),
        (["limit=8"], "An answer must have 1 to 8 tokens, got 10"),
    ],
    ids=str,
)
def test_bad_input_is_one_message(
    more: list[str], message: str, words: list[str], tmp_path: Path, loaded: Loaded, capsys: pytest.CaptureFixture[str]
) -> None:
    base = pack(words, tmp_path, loaded)[:-1] if more == ["limit=8"] else words
    assert corpora.main([*base, *more]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning")]
    assert len(err) == 1 and message in err[0]


def test_a_corpus_that_the_model_writes_reads_none(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["method=own_requests", "corpus=dolly", *words]) == 2
    assert "method=own_requests reads no corpus" in capsys.readouterr().err

"""One reader for prompts and for training data: every format both ways, and one message for every bad line."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bench import cli
from bench.config import compose, instantiate
from bench.errors import UserError
from bench.models.random_weights import byte_tokenizer
from bench.tasks import HubPrompts, Jsonl, base, corpus, prompts
from bench.tasks.base import Outline, digest
from bench.tasks.corpus import Dialogue
from bench.tasks.sources import Sources, sha256

LINE = {"question_id": 7, "category": "chat", "turns": ["Hello!"]}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "I."},
    {"role": "user", "content": "And who else?"},
]


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


# -------------------------------------------------------------------------------------------------------- as prompts


@pytest.mark.parametrize(
    ("line", "turns", "reference"),
    [
        ({"prompt": "Who?"}, ("Who?",), None),
        ({"text": "Who?", "other": 5}, ("Who?",), None),
        ({"turns": ["Who?", "Why?"]}, ("Who?", "Why?"), None),
        ({"messages": CHAT}, ("Who?", "And who else?"), ("I.", None)),
        ({"messages": CHAT, "references": ["Me.", "You."]}, ("Who?", "And who else?"), ("Me.", "You.")),
        ({"prompt": "Who?", "answer": "I."}, ("Who?",), ("I.",)),
        ({"prompt": "Who?", "reference": [["I", "me"]]}, ("Who?",), (["I", "me"],)),
        ({"turns": ["Who?", "Why?"], "reference": [None, "So."]}, ("Who?", "Why?"), (None, "So.")),
    ],
)
def test_a_line_is_a_prompt(line: Any, turns: tuple[str, ...], reference: Any, tmp_path: Path) -> None:
    (example,) = Jsonl(write(tmp_path / "own.jsonl", "", line)).load()
    assert (example.id, example.category) == ("2", "prompts"), "numbered by line, blank ones included"
    assert (example.turns, example.reference) == (turns, reference)


def test_a_system_message_is_kept_and_counts(tmp_path: Path) -> None:
    task = Jsonl(write(tmp_path / "own.jsonl", {"messages": CHAT}))
    (example,) = task.load()
    said = task.messages(example, 1, ["I am."])
    assert [message["role"] for message in said] == ["system", "user", "assistant", "user"]
    assert said[0]["content"] == "Be brief." and said[2]["content"] == "I am.", "the model's own answer, not the file's"
    (plain,) = Jsonl(write(tmp_path / "plain.jsonl", {"messages": CHAT[1:]})).load()
    assert digest([example]) != digest([plain])


def test_the_digest_of_a_file_without_system_messages_is_that_of_its_four_fields(tmp_path: Path) -> None:
    found = Jsonl(write(tmp_path / "own.jsonl", LINE)).load()
    assert digest(found) == sha256('[["7", "chat", ["Hello!"], null]]'), "records of earlier versions have it"


@pytest.mark.parametrize("name", ["own.txt", "own.txt.gz"])
def test_plain_text_has_a_prompt_on_each_line(name: str, tmp_path: Path) -> None:
    raw = "\ufeffWhat is a prime?\r\n\r\nName\u2028two.\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    found = Jsonl(str(tmp_path / name)).load()
    assert [(e.id, e.turns) for e in found] == [("1", ("What is a prime?",)), ("3", ("Name\u2028two.",))]


def test_json_lines_may_have_a_byte_order_mark_and_carriage_returns(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "a"}\r\n{"prompt": "\\u00e9"}')
    assert [example.turns for example in Jsonl(str(tmp_path / "own.jsonl")).load()] == [("a",), ("é",)]


# -------------------------------------------------------------------------------------------------------- as training


def test_the_same_file_is_prompts_and_training_data(tmp_path: Path) -> None:
    answered = [*CHAT, {"role": "assistant", "content": "You. "}]
    lines = [{"prompt": "What?", "reference": "That."}, {"messages": answered}, {"text": "A text."}]
    path = write(tmp_path / "own.jsonl", *lines)
    assert [len(example.turns) for example in Jsonl(path).load()] == [1, 2, 1]
    assert corpus.read(path).dialogues == (
        Dialogue(("What?",), "That."),
        Dialogue(("Who?",), "I.", "Be brief."),
        Dialogue(("Who?", "I.", "And who else?"), "You.", "Be brief."),
        Dialogue(("",), "A text."),
    )
    assert corpus.read(path).dialogues[1].messages[0] == CHAT[0]
    assert Dialogue(("Who?",), "I.").digest != Dialogue(("Who?",), "I.", "Be brief.").digest


def test_plain_text_is_text_to_learn(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_bytes(b"\xef\xbb\xbf One. \r\n\r\nTwo.")
    assert corpus.read(str(tmp_path / "own.txt")).dialogues == (Dialogue(("",), "One."), Dialogue(("",), "Two."))


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "What?"},
        {"prompt": "What?", "answer": " "},
        {"turns": ["a"], "reference": [["c"]]},
        {"turns": ["a", "b"], "reference": ["c", None]},
        {"messages": CHAT},
    ],
    ids=json.dumps,
)
def test_training_needs_an_answer_to_every_request(line: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", {"prompt": "What?", "answer": "That."}, line)
    with pytest.raises(
        UserError, match=r"own\.jsonl, line 2: .* must have one text as the answer to each request, got"
    ):
        corpus.read(path)


# -------------------------------------------------------------------------------------------------------- bad lines

BAD: list[tuple[Any, str]] = [
    ("{", "is no JSON"),
    ("[1]", "holds a list"),
    ("5", "holds a int"),
    ('{"prompt": "\\ud800"}', r"has half a character \(\\ud800\)"),
    ('{"\\uDFFF": 1, "prompt": "a"}', r"has half a character"),
    ("[" * 100_000 + "]" * 100_000, "is nested too deeply"),
    ({"question_id": 1}, "it must have one of prompt, text, turns, messages, got none"),
    ({"prompt": "a", "text": "b"}, "it must have one of .*, got prompt and text"),
    ({"prompt": None}, "prompt must be a text that is not empty, got nothing"),
    ({"prompt": " "}, "prompt must be a text that is not empty, got ' '"),
    ({"turns": "a"}, "turns must be a list of texts, got 'a'"),
    ({"turns": []}, r"turns must be a list of texts, got \[\]"),
    ({"turns": ["a", " "]}, "turn 2 must be a text that is not empty, got ' '"),
    ({"turns": ["a", 5]}, "turn 2 must be a text that is not empty, got 5"),
    ({"messages": []}, "messages must be a list of objects"),
    ({"messages": CHAT[:1]}, "messages must have one of the user, got none"),
    ({"messages": [CHAT[1], CHAT[0]]}, "messages must be a system message, if any, then .*, got system"),
    ({"messages": [CHAT[2], CHAT[1]]}, "messages must be .*, got assistant"),
    ({"messages": [*CHAT[:3], CHAT[2]]}, "messages must be .*, got assistant"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "message 1 must have a role of system, user, assistant"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "the content of message 1 must be a text"),
    ({**LINE, "question_id": None}, "question_id must be a printable text or a whole number, got nothing"),
    ({**LINE, "question_id": True}, "question_id must be .*, got True"),
    ({**LINE, "question_id": "\x1b[31m"}, "question_id must be a printable text"),
    ({**LINE, "category": 5}, "category must be a printable text, got 5"),
    ({**LINE, "reference": 5}, "reference must be a list with a text for each turn, got 5"),
    ({**LINE, "reference": [5]}, "an entry of reference must be a text, a list of accepted texts or null, got 5"),
    ({**LINE, "reference": [float("nan")]}, "an entry of reference must be .*, got nan"),
    ({**LINE, "reference": [["a", 5]]}, "an entry of reference must be"),
    ({**LINE, "reference": [[]]}, "an entry of reference must be"),
    ({**LINE, "references": ["a", "b"]}, "references must have one entry for each of 1 turns, got 2"),
    ({**LINE, "reference": "a", "answer": "b"}, "it must have one of .*, got answer and reference"),
    (LINE, r"question_id 7 is used twice, first in own\.jsonl, line 1"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "said"), BAD, ids=[said for _, said in BAD])
def test_a_bad_line_is_named_for_prompts_and_for_training(line: Any, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", LINE | {"answer": "Hello."}, line)
    for read in (Jsonl(path, scorer="nq").load, lambda: corpus.read(path)):
        with pytest.raises(UserError, match=rf"^own\.jsonl, line 2:? {said}") as refused:
            read()
        assert len(str(refused.value)) < 500 and "\n" not in str(refused.value)


def test_a_number_of_a_line_and_an_id_may_not_be_the_same(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"line 2: question_id 2 is used twice, first in own\.jsonl, line 1"):
        Jsonl(write(tmp_path / "own.jsonl", LINE | {"question_id": 2}, {"prompt": "a"})).load()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("own.jsonl", b"\n \r\n", r"own\.jsonl is empty\. A line must be like"),
        ("own.txt", b"\n", r"own\.txt is empty"),
        ("own.jsonl", b"\x7fELF\0\0", r"own\.jsonl must be text in UTF-8, got bytes of another kind"),
        ("own.txt", "a\n".encode("utf-16"), r"own\.txt must be text in UTF-8, got bytes of another kind"),
        ("own.txt", b"a\n\xe9\n", r"own\.txt, line 2 must be text in UTF-8, got the byte 0xe9"),
        ("own.jsonl", None, r"own\.jsonl cannot be read \(Is a directory\)"),
        ("own.jsonl.gz", b"no gzip", r"own\.jsonl\.gz cannot be read"),
    ],
)
def test_a_file_that_is_none_is_one_message(
    name: str, content: bytes | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=said):
        Jsonl(str(path)).load()
    assert cli.main(["dataset=jsonl", f"dataset.path={path}", "model=random", f"paths.results={tmp_path / 'r'}"]) == 2
    assert "Traceback" not in capsys.readouterr().err and not [*tmp_path.glob("r/*")]


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "own.jsonl")
    with pytest.raises(UserError, match=r"own\.jsonl cannot be read \(it is a pipe"):
        Jsonl(str(tmp_path / "own.jsonl")).load()


def test_several_accepted_answers_are_for_one_scorer(tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", LINE | {"reference": [["a", "b"]]})
    assert Jsonl(path, scorer="nq").load()[0].reference == (["a", "b"],)
    with pytest.raises(UserError, match=r"line 1: a reference must be one text with dataset\.scorer=rouge"):
        Jsonl(path, scorer="rouge").load()


# -------------------------------------------------------------------------------------------------------- the hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set as the hub has it: Parquet, with chats, questions and answers."""
    made = tmp_path / "set"
    made.mkdir()
    rows = [
        {"chat": CHAT, "question": "Who?", "right": ["I"]},
        {"chat": CHAT[1:2], "question": "Why?", "right": ["So"]},
    ]
    pd.DataFrame(rows).to_parquet(made / "train-00000-of-00001.parquet")
    return made


def test_prompts_come_from_a_column_of_a_folder(folder: Path) -> None:
    task = HubPrompts(str(folder), column="question", reference="right", scorer="nq")
    assert [(e.id, e.turns, e.reference) for e in task.load()] == [("1", ("Who?",), ("I",)), ("2", ("Why?",), ("So",))]
    chats = HubPrompts(str(folder), column="chat").load()
    assert [(e.turns, e.system) for e in chats] == [(("Who?", "And who else?"), "Be brief."), (("Who?",), "")]
    assert task.revision["files"][0]["file"] == "set" and task.revision["files"][0]["origin"] == "local"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"column": "prompt"}, r"must be columns of the data set, got 'prompt'. It has: chat, question, right"),
        ({"split": "test"}, r"set test cannot be read \(.*\)\. Correct dataset\.name"),
        ({}, r"set train, line 1: it must have one of prompt, text, turns, messages, got none"),
    ],
)
def test_a_data_set_that_does_not_fit_is_one_message(settings: dict[str, str], said: str, folder: Path) -> None:
    with pytest.raises(UserError, match=said):
        HubPrompts(str(folder), **settings).load()


def test_a_data_folder_has_sets_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "me--own" / "default").mkdir(parents=True)
    write(tmp_path / "me--own" / "default" / "train.jsonl", {"prompt": "Who?"})
    cfg = compose.compose(["dataset=hub", "dataset.name=me/own"])
    task = instantiate.build_task(cfg.dataset)
    assert [e.turns for e in task.load(Sources(tmp_path, tmp_path / "cache"))] == [("Who?",)]
    assert (task.name, task.kind) == ("me/own", "any")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('System role not supported') }}", "of system, user: System role not supported"),
        ("{% for %}", "of system, user: Expected"),
    ],
)
def test_a_chat_template_that_refuses_a_conversation_is_one_message(template: str, said: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=f"chat template refuses a conversation {said}.*set model.chat_template"):
        prompts.encode(tokenizer, CHAT[:2])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("subset", ["first", "random", "stratified"])
def test_a_limit_takes_from_a_file_what_it_takes_from_memory(tmp_path: Path, subset: str, packed: bool) -> None:
    """Of a long file only outlines are kept, and the chosen lines are read again."""
    rows = [{"question_id": f"q{i}", "prompt": f"{i} {'x' * (i % 7)}", "category": f"c{i % 3}"} for i in range(60)]
    raw = "\n\n".join(map(json.dumps, rows)).encode()
    (file := tmp_path / "p.jsonl").write_bytes(gzip.compress(raw) if packed else raw)
    streamed, held = Jsonl(path=str(file), limit=7, subset=subset), Jsonl(path=str(file))
    kept, _ = streamed.read(Sources())
    assert all(isinstance(each, Outline) for each in kept)
    every = held.load()
    assert streamed.load() == base.choose(every, 7, subset, 0)
    assert streamed.spare == base._spare(every, streamed.load())
    assert streamed.revision["files"] == held.revision["files"] and streamed.revision["available"] == 60


def test_a_file_that_changes_between_its_two_readings_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    task = Jsonl(path=str(file), limit=1)
    kept, _ = task.read(Sources())
    file.write_text('{"prompt": "one"}\n{"prompt": "three"}\n')
    with pytest.raises(UserError, match="was changed while it was read"):
        task.complete(kept)


def test_a_long_file_needs_little_memory(tmp_path: Path) -> None:
    """30 MB of prompts; the interpreter and its modules are counted before."""
    with (file := tmp_path / "p.jsonl").open("w") as out:
        out.writelines(json.dumps({"prompt": f"{i} {'word ' * 300}"}) + "\n" for i in range(20_000))
    code = (
        "import resource; from bench.tasks.chat import Jsonl\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"before = peak(); found = Jsonl(path={str(file)!r}, limit=3, subset='random').load()\n"
        "print(len(found), peak() - before)"
    )
    count, kib = map(int, subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.split())
    assert count == 3 and kib < 20 * 1024 < file.stat().st_size / 1024

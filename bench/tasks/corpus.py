"""Training data: dialogues of public train splits, or of the user's own files, as ids of the target.

The user's file has a format of ``bench.tasks.conversations``, with an answer to every request; a conversation of
several turns becomes one example per answer. Sentence pairs are dialogues too, of a source and its translation; so are
lines of plain text, with an empty request. Where the training lets the target answer, a line may be a request alone.
No test row may be used here: data/README.md says what the test sets share, and ``bench.tasks.overlap`` tests requests.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

from bench.config.typecheck import did_you_mean
from bench.errors import UserError
from bench.tasks import conversations, prompts
from bench.tasks.base import Message
from bench.tasks.conversations import Conversation
from bench.tasks.exercises import solved
from bench.tasks.overlap import Evaluated
from bench.tasks.requests import REQUESTS
from bench.tasks.seq2seq import read_multi30k
from bench.tasks.sources import Revision, Row, Sources
from methods.training.interface import Example


@dataclass(frozen=True, slots=True)
class Dialogue:
    """What was said, the user first and last, the answer to it, and the instruction before it all; or neither."""

    said: tuple[str, ...]
    answer: str
    system: str = ""

    @property
    def messages(self) -> list[Message]:
        roles = ("user", "assistant")
        said = [{"role": roles[place % 2], "content": text} for place, text in enumerate(self.said)]
        return [*([{"role": "system", "content": self.system}] if self.system else []), *said]

    @property
    def digest(self) -> bytes:
        """Identifies the text, wherever it came from."""
        content = [self.said, self.answer, *([self.system] if self.system else [])]
        return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).digest()


@dataclass(frozen=True)
class Texts:
    """Dialogues in the order of their files, before any tokenizer.

    Attributes:
        names: the corpora, as they were asked for; of a path its last part.
        revisions: what was read for each.
        asked: as it was asked for, counts included, so that the same can be read again.
        left_out: per corpus, dialogues that overlap with an evaluation set; None: they were not compared.
    """

    names: tuple[str, ...]
    dialogues: tuple[Dialogue, ...]
    revisions: tuple[Revision, ...]
    asked: str = field(default="", compare=False)
    left_out: dict[str, int] | None = field(default=None, compare=False)

    @cached_property
    def sha256(self) -> str:
        """Of all dialogues in their order; names and files do not enter."""
        return hashlib.sha256(b"".join(dialogue.digest for dialogue in self.dialogues)).hexdigest()


class Corpus(Sequence[Example]):
    """Dialogues as the target reads them, tokenised when they are first looked at and kept.

    A dialogue longer than the context loses the end of its answer, and then the beginning of its prompt; with ``apart``
    each of the two has the whole context, and loses its end.

    Args:
        texts: the dialogues.
        tokenizer: the target's; its chat template writes the prompts.
        end: id that ends an answer; None: the model declares none.
        context: most tokens of prompt and answer together.
        apart: the target is an encoder-decoder, which reads the one and writes the other.
    """

    def __init__(self, texts: Texts, tokenizer: Any, end: int | None, context: int, *, apart: bool = False) -> None:
        self.texts, self.tokenizer, self._apart = texts, tokenizer, apart
        self._end = [] if end is None else [end]
        self._context = context
        self._kept: list[tuple[array[int], array[int]] | None] = [None] * len(texts.dialogues)

    @property
    def sha256(self) -> str:
        """See ``Texts``."""
        return self.texts.sha256

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if (kept := self._kept[index]) is None:
            kept = self._kept[index] = self._encode(self.texts.dialogues[index])
        return Example(kept[0].tolist(), kept[1].tolist())

    def _encode(self, dialogue: Dialogue) -> tuple[array[int], array[int]]:
        """As arrays: a corpus as lists of Python's integers would take ten times the memory."""
        prompt = prompts.encode(self.tokenizer, dialogue.messages)
        if not dialogue.answer:
            return array("i", prompt[-self._context :]), array("i")
        answer = [*self.tokenizer(dialogue.answer, add_special_tokens=False)["input_ids"], *self._end]
        if self._apart:
            return array("i", prompt[: self._context]), array("i", answer[: self._context])
        answer = answer[: max(1, self._context - len(prompt))]
        return array("i", prompt[-(self._context - len(answer)) :]), array("i", answer)


# ------------------------------------------------------------------------------------------------------- reading


def read(
    wanted: str,
    limit: int | None = None,
    seed: int = 0,
    sources: Sources | None = None,
    *,
    evaluated: Evaluated | None = None,
    unanswered: bool = False,
) -> Texts:
    """The dialogues of some corpora, one after the other.

    Args:
        wanted: names of ``NAMES`` and files of JSON lines or of text, plain or gzipped, with commas between them;
            ``name:count`` takes at most so many of its dialogues, so that a large corpus does not outweigh the others.
            Which ones is drawn by ``seed`` and their text.
        limit: most dialogues, at least 1, drawn likewise, so that a smaller limit takes a subset of what a larger one
            takes. Their order stays. None: all.
        sources: where public sets lie; None: as the environment says.
        evaluated: dialogues that overlap with it are left out before any are drawn. Pairs and plain text are not
            compared.
        unanswered: requests without an answer are allowed.

    Raises:
        UserError: an unknown name, a file that cannot be read, a line without an answer.
    """
    asked = [_counted(name.strip()) for name in wanted.split(",")]
    names = [name for name, _ in asked]
    if not all(names) or len(set(names)) < len(names) or any(count == 0 for _, count in asked):
        raise UserError(
            "corpus must be different names with commas between them, each alone or as NAME:COUNT with a count of at "
            f"least 1, got '{wanted}'."
        )
    sources = sources or Sources()
    read = [_known(name, sources, unanswered) if name in NAMES else _own(name, unanswered) for name in names]
    shown = tuple(name if name in NAMES else Path(name).name for name in names)
    apart = [_apart(found, None if name in PAIRS else evaluated) for name, (found, _) in zip(names, read, strict=True)]
    drawn = [_draw(found, count, seed) for found, (_, count) in zip(apart, asked, strict=True)]
    dialogues = [dialogue for found in drawn for dialogue in found]
    revisions = tuple(revision for _, several in read for revision in several)
    counts = {name: len(found) - len(kept) for name, (found, _), kept in zip(shown, read, apart, strict=True)}
    left_out = None if evaluated is None else counts
    return Texts(shown, tuple(_draw(dialogues, limit, seed)), revisions, wanted, left_out)


def _apart(dialogues: list[Dialogue], evaluated: Evaluated | None) -> list[Dialogue]:
    """Those that do not overlap; plain text is left as it is."""
    if evaluated is None:
        return dialogues
    return [each for each in dialogues if not (each.said[0] and evaluated.overlaps(*each.said, each.answer))]


def _counted(name: str) -> tuple[str, int | None]:
    """``gsm8k:800`` is at most 800 dialogues of gsm8k; a file may have such a name."""
    before, colon, count = name.rpartition(":")
    if colon and count.isdecimal() and not Path(name).expanduser().is_file():
        return before, int(count)
    return name, None


def _draw(dialogues: Sequence[Dialogue], limit: int | None, seed: int) -> list[Dialogue]:
    if limit is None or limit >= len(dialogues):
        return list(dialogues)
    lots = [hashlib.sha256(f"{seed}\x1f".encode() + dialogue.digest).digest() for dialogue in dialogues]
    drawn = sorted(range(len(dialogues)), key=lots.__getitem__)[:limit]
    return [dialogues[place] for place in sorted(drawn)]


def pairs(texts: Texts) -> list[tuple[str, str]]:
    """What is asked and what is right, of dialogues of one turn.

    Raises:
        UserError: a dialogue of several turns, which no translation model can read.
    """
    if any(len(dialogue.said) > 1 for dialogue in texts.dialogues):
        raise UserError(
            f"corpus={','.join(texts.names)} has conversations of several turns; pairs of a source and its translation "
            "are needed. Name a corpus of pairs, such as multi30k."
        )
    return [(dialogue.said[0], dialogue.answer) for dialogue in texts.dialogues]


def validation_of(name: str) -> str | None:
    """The name of the pairs that go with a corpus for validation, if there are any."""
    found = f"{name}_val"
    return found if found in PAIRS else None


def languages(names: Iterable[str]) -> tuple[str, str] | None:
    """Source and target of the corpora; None where these are no pairs, or not of one kind."""
    found = {PAIRS[name][1:] if name in PAIRS else None for name in names}
    return found.pop() if len(found) == 1 else None


def _known(name: str, sources: Sources, unanswered: bool) -> tuple[list[Dialogue], list[Revision]]:
    if name in REQUESTS:
        if not unanswered:
            raise UserError(
                f"corpus={name} has requests without answers, and answers are needed here. Name another, such as "
                f"{', '.join(KNOWN)}."
            )
        texts, revision = REQUESTS[name](sources)
        return [Dialogue((text,), "") for text in texts], [revision]
    if name in TEXTS:
        table = sources.get(TEXTS[name])
        return _lines(row["text"] for row in table.rows), [table.revision]
    if name in PAIRS:
        found, revisions = read_multi30k(sources, *PAIRS[name])
        return [Dialogue((source,), target) for source, target in found if source.strip() and target.strip()], revisions
    data_set, to_dialogue = KNOWN[name]
    table = sources.get(data_set)
    dialogues = [to_dialogue(row) for row in table.rows]
    return [dialogue for dialogue in dialogues if dialogue.said[0].strip() and dialogue.answer], [table.revision]


def _dolly(row: Row) -> Dialogue:
    """The hub and the AlpaGasus selection name the same fields differently."""
    context = row["context"] if "context" in row else row["input"]
    answer = row["response"] if "response" in row else row["output"]
    asked = f"{row['instruction']}\n\n{context}" if context.strip() else row["instruction"]
    return Dialogue((asked.strip(),), answer.strip())


def _gsm8k(row: Row) -> Dialogue:
    """Asked as the benchmark asks, and answered without notes for a calculator."""
    asked, answered = solved(row)
    return Dialogue((asked["content"],), answered["content"])


KNOWN: dict[str, tuple[str, Callable[[Row], Dialogue]]] = {
    "dolly": ("dolly", _dolly),
    "dolly_15k": ("dolly_15k", _dolly),
    "gsm8k": ("gsm8k_train", _gsm8k),
}
TEXTS = {"wikitext2": "wikitext2_valid", "shakespeare": "shakespeare"}
PAIRS: dict[str, tuple[Literal["train", "val"], str, str]] = {
    "multi30k": ("train", "en", "de"),
    "multi30k_val": ("val", "en", "de"),
    "multi30k_de_en": ("train", "de", "en"),
    "multi30k_de_en_val": ("val", "de", "en"),
}
NAMES = [*KNOWN, *PAIRS, *TEXTS, *REQUESTS]


def _own(name: str, unanswered: bool) -> tuple[list[Dialogue], list[Revision]]:
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(
            f"Unknown corpus '{name}'.{did_you_mean(name, NAMES)} Known: {', '.join(NAMES)}; or "
            "name a file of JSON lines, or of text (.txt), plain or gzipped."
        )
    found, revision = conversations.read_file(path)
    return [dialogue for each in found for dialogue in _dialogues(each, unanswered)], [revision]


def _lines(lines: Iterable[str]) -> list[Dialogue]:
    """Plain text: every line that is not empty answers to nothing."""
    return [Dialogue(("",), line.strip()) for line in lines if line.strip()]


def _dialogues(found: Conversation, unanswered: bool) -> Iterator[Dialogue]:
    """One per answer; earlier answers are part of what was said. Of requests without any answer, the first one."""
    if unanswered and found.answers is None and not found.plain:
        yield Dialogue(found.turns[:1], "", found.system)
        return
    if found.plain and found.answers is None:
        yield from _lines(found.turns)
        return
    answers = found.answers or ()
    if len(answers) < len(found.turns) or not all(isinstance(text, str) and text.strip() for text in answers):
        raise UserError(
            f"{found.where}: a conversation to learn from must have one text as the answer to each request, got "
            f"{json.dumps(answers, ensure_ascii=False)[:60]}. {conversations.ALLOWED}. Correct or remove the line."
        )
    said: list[str] = []
    for request, answer in zip(found.turns, answers, strict=True):
        said.append(request)
        yield Dialogue(tuple(said), answer.strip(), found.system)
        said.append(answer)

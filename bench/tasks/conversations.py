"""The user's own text, read alike as prompts and as training data: plain lines, JSON lines, rows of the hub.

An object has one of four keys; ``text`` is a prompt, or a text to learn where there is no answer to it:

    {"prompt": "What is asked"}
    {"text": "What is asked"}
    {"turns": ["First request", "Second request"]}
    {"messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."}]}

``question_id`` (else the number of the line), ``category`` (else ``prompts``) and the answers, as ``answer``,
``reference`` or ``references``, are optional: one entry per turn, and a text will do for one turn. The answers of
``messages`` are those of the assistant. All other keys are ignored. docs/formats.md has examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import UserError
from bench.tasks.base import Example
from bench.tasks.sources import LinesOf, Revision, Row, numbered_lines, numbered_rows

CATEGORY = "prompts"
_KINDS = ("prompt", "text", "turns", "messages")
_ANSWERS = ("answer", "reference", "references")
_ROLES = ("system", "user", "assistant")
ALLOWED = (
    'A line must be like {"prompt": "..."}, {"text": "..."}, {"turns": ["...", "..."]} or {"messages": [{"role": '
    '"user", "content": "..."}]}, with an optional "question_id", "category" and "reference" (one entry per turn)'
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A line.

    Attributes:
        where: file and number of the line, for messages.
        line: that number.
        id: as given, else the number of the line.
        turns: what the user says.
        answers: one per turn: a text, a list of accepted texts, or None; None if there is none at all.
        system: instruction before the first turn; empty for none.
        plain: a text that need not be a request.
    """

    where: str
    line: int
    id: str
    category: str
    turns: tuple[str, ...]
    answers: tuple[Any, ...] | None = None
    system: str = ""
    plain: bool = False


class _Refused(Exception):
    """What keeps an object from being a conversation."""


def read_file(path: Path) -> tuple[list[Conversation], Revision]:
    """All conversations of a file, see ``of_file``."""
    lines = LinesOf(path)
    return list(of_file(lines)), Revision(path.name, lines.sha256, "local")


def of_file(lines: LinesOf) -> Iterator[Conversation]:
    """The conversations of a file: ``.txt`` has one prompt per line, any other one JSON object per line; or as .gz.

    Raises:
        UserError: a file that cannot be read or is empty, or a line that does not keep the format, by its number.
    """
    name = lines.path.name
    if name.removesuffix(".gz").endswith(".txt"):
        return of_rows(((number, {"text": line}) for number, line in numbered_lines(lines, name)), name)
    return of_rows(numbered_rows(lines, name), name)


def read_rows(numbered: Iterable[tuple[int, Row]], where: str) -> list[Conversation]:
    """All conversations of ``of_rows``."""
    return list(of_rows(numbered, where))


def of_rows(numbered: Iterable[tuple[int, Row]], where: str) -> Iterator[Conversation]:
    """Conversations from the objects of a file.

    Args:
        numbered: line number and content.
        where: name of the file, for messages.

    Raises:
        UserError: see ``of_file``.
    """
    found: dict[str, int] = {}
    for number, row in numbered:
        place = f"{where}, line {number}"
        try:
            made = _conversation(row, number, place)
        except _Refused as problem:
            raise UserError(f"{place}: {problem}. {ALLOWED}. Correct or remove the line.") from None
        if made.id in found:
            raise UserError(
                f"{place}: question_id {made.id} is used twice, first in {where}, line {found[made.id]}; ids must "
                "differ, and a line without one has its number. Rename one."
            )
        found[made.id] = number
        yield made
    if not found:
        raise UserError(f"{where} is empty. {ALLOWED}. Write at least one.")


def examples(conversations: Iterable[Conversation]) -> list[Example]:
    """As prompts."""
    return [Example(each.id, each.category, each.turns, each.answers, system=each.system) for each in conversations]


def _conversation(row: Row, number: int, where: str) -> Conversation:
    given = [key for key in _KINDS if key in row]
    if len(given) != 1:
        raise _Refused(f"it must have one of {', '.join(_KINDS)}, got {' and '.join(given) or 'none'}")
    kind = given[0]
    if kind == "messages":
        system, turns, said = _messages(row[kind])
    else:
        system, turns, said = "", _turns(row[kind], kind), None
    answers = _answers(row, len(turns)) or said
    name, category = _label(row, "question_id", number), _label(row, "category", CATEGORY)
    return Conversation(where, number, name, category, turns, answers, system, kind == "text")


def _turns(value: Any, kind: str) -> tuple[str, ...]:
    if kind != "turns":
        return (_text(value, kind),)
    if not isinstance(value, list) or not value:
        raise _Refused(f"turns must be a list of texts, got {_short(value)}")
    return tuple(_text(turn, f"turn {place}") for place, turn in enumerate(value, start=1))


def _messages(value: Any) -> tuple[str, tuple[str, ...], tuple[str | None, ...] | None]:
    """The system's message, what the user says, and the answers to that."""
    if not isinstance(value, list) or not value:
        raise _Refused(f"messages must be a list of objects, got {_short(value)}")
    said = [_message(message, place) for place, message in enumerate(value, start=1)]
    system = said.pop(0)[1] if said[0][0] == "system" else ""
    turns: list[str] = []
    answers: list[str | None] = []
    for role, content in said:
        if role == "user":
            turns.append(content)
            answers.append(None)
        elif role == "system" or not turns or answers[-1] is not None:
            raise _Refused(f"messages must be a system message, if any, then user and assistant in turn, got {role}")
        else:
            answers[-1] = content
    if not turns:
        raise _Refused("messages must have one of the user, got none")
    return system, tuple(turns), tuple(answers) if any(answers) else None


def _message(message: Any, place: int) -> tuple[str, str]:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise _Refused(f"message {place} must have a role of {', '.join(_ROLES)}, got {_short(message)}")
    return message["role"], _text(message.get("content"), f"the content of message {place}")


def _answers(row: Row, turns: int) -> tuple[Any, ...] | None:
    given = [key for key in _ANSWERS if row.get(key) not in (None, [])]
    if not given:
        return None
    if len(given) > 1:
        raise _Refused(f"it must have one of {', '.join(_ANSWERS)}, got {' and '.join(given)}")
    key, value = given[0], row[given[0]]
    if isinstance(value, str) and turns == 1:
        return (value,)
    if not isinstance(value, list):
        raise _Refused(f"{key} must be a list with a text for each turn, got {_short(value)}")
    if len(value) != turns:
        raise _Refused(f"{key} must have one entry for each of {turns} turns, got {len(value)}")
    for entry in value:
        texts = entry if isinstance(entry, list) and entry else [entry]
        if entry is not None and not all(isinstance(text, str) for text in texts):
            raise _Refused(f"an entry of {key} must be a text, a list of accepted texts or null, got {_short(entry)}")
    return tuple(value)


def _label(row: Row, key: str, default: str | int) -> str:
    """A name as short text; a default that is a number allows numbers."""
    value, kinds = row.get(key, default), (str, type(default))
    if isinstance(value, bool) or not isinstance(value, kinds) or value == "" or not str(value).isprintable():
        raise _Refused(f"{key} must be a printable text{' or a whole number' * (int in kinds)}, got {_short(value)}")
    return str(value)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _Refused(f"{what} must be a text that is not empty, got {_short(value)}")
    return value


def _short(value: Any) -> str:
    return "nothing" if value is None else repr(value)[:60]


def rows_of(table: Iterable[Row], column: str | None, reference: str | None) -> Iterator[tuple[int, Row]]:
    """Rows of a table, numbered from 1, as objects of the format.

    Args:
        column: of the prompts: texts, lists of texts or lists of messages; None: the rows have the format.
        reference: column of the answers; None: none with a ``column``.

    Raises:
        UserError: no such column.
    """
    for number, row in enumerate(table, start=1):
        for name in (column, reference):
            if name is not None and name not in row:
                raise UserError(
                    f"dataset.column and dataset.reference must be columns of the data set, got {name!r}. It has: "
                    f"{', '.join(map(str, row))}."
                )
        answers = {"reference": row[reference]} if reference else {}
        yield number, row if column is None else {_kind(row[column]): row[column]} | answers


def _kind(value: Any) -> str:
    if not isinstance(value, list):
        return "prompt"
    return "messages" if value and isinstance(value[0], dict) else "turns"

"""The line format of Spec-Bench and MT-bench: one JSON object per question.

    {"question_id": 81, "category": "writing", "turns": ["first request", "second request"], "reference": [...]}

``reference`` may be left out; else it has one entry per turn (with one turn, a text will do).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench.errors import UserError
from bench.tasks.base import Example
from bench.tasks.sources import Row

_EXPECTED = (
    'each line must be like {"question_id": 1, "category": "chat", "turns": ["What is asked"]}, with an optional '
    '"reference" of one entry per turn. Correct or remove the line.'
)


def read_lines(numbered: Iterable[tuple[int, Row]], where: str) -> list[Example]:
    """Examples from the objects of a file.

    Args:
        numbered: line number and content.
        where: name of the file, for messages.

    Raises:
        UserError: a line that does not keep the format, by its number; an id that is used twice; no line at all.
    """
    examples: dict[str, Example] = {}
    for number, row in numbered:
        if problem := _problem(row):
            raise UserError(f"{where}, line {number}: {problem}; {_EXPECTED}")
        example = _example(row)
        if example.id in examples:
            twice = f"question_id {example.id} is used twice"
            raise UserError(f"{where}, line {number}: {twice}; ids must differ. Rename one.")
        examples[example.id] = example
    if not examples:
        raise UserError(f"{where} is empty; {_EXPECTED.replace('Correct or remove the line', 'Write at least one')}")
    return list(examples.values())


def _example(row: Row) -> Example:
    reference = row.get("reference")
    entries = (reference,) if isinstance(reference, str) else tuple(reference or ())
    return Example(str(row["question_id"]), row["category"], tuple(row["turns"]), entries or None)


def _problem(row: Row) -> str:
    """What keeps an object from being an example; empty if nothing does."""
    identity, category, turns = row.get("question_id"), row.get("category"), row.get("turns")
    if isinstance(identity, bool) or not isinstance(identity, int | str) or identity == "":
        return f"question_id is {_show(row, 'question_id')}, not a number or text"
    if not isinstance(category, str) or not category:
        return f"category is {_show(row, 'category')}, not text"
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        return f"turns is {_show(row, 'turns')}, not a list of texts"
    if empty := [number for number, turn in enumerate(turns, start=1) if not turn.strip()]:
        return f"turn {empty[0]} is an empty prompt"
    return _reference_problem(row.get("reference"), len(turns))


def _reference_problem(reference: Any, turns: int) -> str:
    if reference is None or reference == [] or (isinstance(reference, str) and turns == 1):
        return ""
    if not isinstance(reference, list):
        return f"reference is a {type(reference).__name__}, not a list"
    return "" if len(reference) == turns else f"reference has {len(reference)} entries for {turns} turns"


def _show(row: Row, key: str) -> str:
    return repr(row[key])[:60] if key in row else "missing"

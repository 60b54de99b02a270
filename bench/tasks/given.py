"""Prompts that a Python program has in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.errors import UserError
from bench.tasks import conversations
from bench.tasks.base import Example, Task
from bench.tasks.sources import Revision, Row, Sources
from bench.utils.files import json_sha256

NAME = "prompts"
GROUP = {"name": NAME, "_target_": "bench.tasks.given.GivenPrompts"}


@dataclass(eq=False)
class GivenPrompts(Task):
    """Texts, lists of messages, or objects in the format of ``bench.tasks.conversations``.

    Records name them by their content, which the configuration does not hold.
    """

    name = NAME
    kind = "any"

    prompts: Sequence[Any] = ()

    def read(self, sources: Sources) -> tuple[list[Example], list[Revision]]:
        rows = [_row(prompt) for prompt in self.prompts]
        found = conversations.read_rows(enumerate(rows, start=1), NAME)
        return conversations.examples(found), [Revision(NAME, json_sha256(rows), "local")]


def _row(prompt: Any) -> Row:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, list):
        return {"messages": prompt}
    if isinstance(prompt, dict):
        return prompt
    raise UserError(f"A prompt must be a text or a list of messages, got {type(prompt).__name__}. Convert it first.")

"""Requests without answers, for trainings that let the target answer: its own ones, and paragraphs with a task.

``own_requests`` come with the project (data/corpora; methods/training/requests.py makes them). ``wikitext2_requests``
are the paragraphs of WikiText-2's validation set, from which the marks of its tokenizer are removed, each after a task
that its text draws.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

from bench.tasks import conversations
from bench.tasks.sources import Revision, Sources, project_data

OWN_FILE = "requests.jsonl.gz"
_OWN_MODEL = "smollm2"
_SHORTEST, _LONGEST = 40, 170  # words of a paragraph
_TASKS = (
    "Summarize the following text in two sentences.",
    "Rewrite the following text in simple words.",
    "List the most important facts of the following text.",
    "Write three questions about the following text and answer them.",
    "Correct the grammar of the following text and return it.",
    "Explain the following text to a child.",
    "Give the following text a title and shorten it to half its length.",
)


def own(sources: Sources) -> tuple[list[str], Revision]:
    """What the embedded model wrote."""
    found, revision = conversations.read_file(project_data() / "corpora" / _OWN_MODEL / OWN_FILE)
    return [each.turns[0] for each in found], revision


def wikitext2(sources: Sources) -> tuple[list[str], Revision]:
    """A task and a paragraph each."""
    table = sources.get("wikitext2_valid")
    lines = (row["text"].strip() for row in table.rows)
    paragraphs = [line for line in lines if _SHORTEST <= len(line.split()) <= _LONGEST and not line.startswith("=")]
    return [f"{_task(line)}\n\n{_cleaned(line)}" for line in paragraphs], table.revision


REQUESTS: dict[str, Callable[[Sources], tuple[list[str], Revision]]] = {
    "own_requests": own,
    "wikitext2_requests": wikitext2,
}


def _task(line: str) -> str:
    return _TASKS[int(hashlib.sha256(line.encode()).hexdigest(), 16) % len(_TASKS)]


def _cleaned(line: str) -> str:
    """Without the spaces and marks that the data set puts around hyphens, points and brackets."""
    for mark in "-,.":
        line = line.replace(f" @{mark}@ ", mark)
    line = re.sub(r" ([.,;:!?)\]'])", r"\1", line)
    line = re.sub(r"([(\[]) ", r"\1", line)
    return line.replace(" n't", "n't").replace('" ', '"')

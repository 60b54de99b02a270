"""Requests without answers, for trainings that let the target answer: its own ones, and given text with a task.

``own_requests`` come with the project (data/corpora; methods/training/requests.py makes them). ``wikitext2_requests``
are the paragraphs of WikiText-2's validation set, from which the marks of its tokenizer are removed, each after a task
that its text draws. ``wikitext2_passages`` are several paragraphs of one article, with a task or a question before or
after them. ``multi30k_requests`` ask for translations of sentences of Multi30k's train split.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence

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
_PASSAGE = (180, 520)  # words of a passage: it ends with the paragraph that reaches the first number
_OF_PASSAGES = (
    "Summarize: {text}",
    "Summarize the following text.\n\n{text}",
    "{text}\n\nSummarize the text above in one paragraph.",
    "{text}\n\nTL;DR:",
    "Read the text and answer the question.\n\n{text}\n\nQuestion: What does the text say about {title}?",
    "{text}\nWhat is {title} known for?",
    "Context: {text}\n\nName the most important events in the context above, in order.",
    "{text}\n\nWhich names and numbers does the text mention? List them with what they stand for.",
)
_SENTENCES = 2000  # of the first ones of Multi30k
_OF_SENTENCES = (
    "Translate German to English: {text}",
    "Translate the following sentence from German into English.\n\n{text}",
    'What does this mean in English? "{text}"',
    "Translate into English: {text}",
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
    return [f"{_drawn(_TASKS, line)}\n\n{_cleaned(line)}" for line in paragraphs], table.revision


def passages(sources: Sources) -> tuple[list[str], Revision]:
    """Several paragraphs of one article of WikiText-2's validation set, twice, each time with another task."""
    table = sources.get("wikitext2_valid")
    found = list(_passages([row["text"].strip() for row in table.rows]))
    half = len(_OF_PASSAGES) // 2
    tasks = (_OF_PASSAGES, _OF_PASSAGES[half:] + _OF_PASSAGES[:half])
    texts = [_drawn(each, text).format(text=text, title=title) for each in tasks for title, text in found]
    return texts, table.revision


def translations(sources: Sources) -> tuple[list[str], Revision]:
    """Sentences of Multi30k's train split that are to be translated into English."""
    table = sources.get("multi30k_train_de")
    sentences = [row["text"].strip() for row in table.rows[:_SENTENCES]]
    return [_drawn(_OF_SENTENCES, text).format(text=text) for text in sentences if text], table.revision


REQUESTS: dict[str, Callable[[Sources], tuple[list[str], Revision]]] = {
    "own_requests": own,
    "wikitext2_requests": wikitext2,
    "wikitext2_passages": passages,
    "multi30k_requests": translations,
}


def _drawn(choices: Sequence[str], text: str) -> str:
    """One of some choices, which the text draws."""
    return choices[int(hashlib.sha256(text.encode()).hexdigest(), 16) % len(choices)]


def _passages(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Title of an article and a passage of it, without headings; what is left of an article is dropped."""
    title, passage, words = "", list[str](), 0
    for line in lines:
        if re.fullmatch("= [^=].*[^=] =", line):
            title, passage, words = _cleaned(line.strip("= ")), [], 0
        elif line and not line.startswith("="):
            passage.append(_cleaned(line))
            words += len(line.split())
            if words >= _PASSAGE[0]:
                if words <= _PASSAGE[1] and "<unk>" not in title:
                    yield title, "\n".join(passage)
                passage, words = [], 0


def _cleaned(line: str) -> str:
    """Without the spaces and marks that the data set puts around hyphens, points and brackets."""
    for mark in "-,.":
        line = line.replace(f" @{mark}@ ", mark)
    line = re.sub(r" ([.,;:!?)\]'])", r"\1", line)
    line = re.sub(r"([(\[]) ", r"\1", line)
    return line.replace(" n't", "n't").replace('" ', '"')

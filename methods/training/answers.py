"""The target's own answers to the prompts of a corpus: the text that a draft head has to predict.

A head trained on other answers learns what the target would not say (EAGLE-3 trains on the target's own, Medusa calls
it self-distillation: arXiv 2401.10774, sec. 2.3.2). Answers that come with the project (``AnswerMemo``) are taken; the
others are decoded, several windows of prompts one after the other. Within a window a finished row takes the next
prompt. Each window is appended to a file: an interrupted training resumes there, and every head for the same model and
corpus shares them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from methods.engine.generation import answer
from methods.engine.sampling import Sampling
from methods.training.answer_memo import AnswerMemo
from methods.training.interface import Example, TrainingContext, require

__all__ = [
    "HEADS_CORPUS",
    "AnswerMemo",
    "AnswerRecipe",
    "Answers",
    "answer",
    "append",
    "known_answers",
    "locked",
    "own_answers",
    "read_lines",
]

HEADS_CORPUS = "dolly,gsm8k,own_requests,wikitext2_requests,wikitext2_passages,multi30k_requests"  # of many kinds
_TOKENS = 480_000  # of answers that have to be decoded
_WINDOW = 8  # times the batch: prompts that are decoded one after the other, by length


@dataclass(frozen=True)
class AnswerRecipe:
    """Which answers are generated.

    Attributes:
        tokens: of all answers together; the one that reaches it, or the window of those that are decoded, is the last.
            None: all that come with the project for this model and these prompts, else 480,000.
        limit: most tokens of one answer.
        longest_prompt: longer prompts are left out.
        batch: rows decoded together.
        temperature: 0 is greedy.
    """

    tokens: int | None = None
    limit: int = 256
    longest_prompt: int = 1024
    batch: int = 64
    temperature: float = 0.0

    def __post_init__(self) -> None:
        counts = {name: value for name, value in asdict(self).items() if name != "temperature"}
        require("at least 1", **counts)
        require("at least 0", temperature=self.temperature)

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Answers:
    """Dialogues whose answers the target wrote.

    Attributes:
        rows: prompt and answer of each.
        folder: of their file; features of the same texts go there too.
        sha256: of all ids.
    """

    rows: tuple[Example, ...]
    folder: Path
    sha256: str

    @property
    def tokens(self) -> int:
        """Of the answers."""
        return _tokens(self.rows)


def own_answers(context: TrainingContext, recipe: AnswerRecipe) -> Answers:
    """The target's answers to prompts of the corpus in an order that the seed decides.

    Those in the memo come first; others are decoded, or read from the cache, while ``recipe.tokens`` are not reached.

    Raises:
        ValueError: no prompt of the corpus is short enough.
    """
    name = f"answers-{recipe.digest}" + (f"-{context.memo.sha256[:8]}" if context.memo else "")
    folder = context.shared_cache / name
    folder.mkdir(parents=True, exist_ok=True)
    rows, unknown = _split(context, recipe)
    enough = recipe.tokens or (0 if rows else _TOKENS)
    with locked(folder):
        rows += _write(context, recipe, unknown, enough - _tokens(rows), folder / "answers.jsonl")
    if not rows:
        raise ValueError(
            f"The corpus must have a prompt of at most {recipe.longest_prompt} tokens, got none. Name a larger corpus, "
            "or allow longer prompts (train.answers.longest_prompt)."
        )
    content = json.dumps([[row.prompt, row.answer] for row in rows])
    return Answers(tuple(rows), folder, hashlib.sha256(content.encode()).hexdigest())


def known_answers(context: TrainingContext, recipe: AnswerRecipe) -> list[Example]:
    """The target's answers to prompts of the corpus that the memo has, up to ``recipe.tokens``; nothing is decoded."""
    return _split(context, recipe)[0]


def _split(context: TrainingContext, recipe: AnswerRecipe) -> tuple[list[Example], Iterator[Example]]:
    """Prompts with a known answer, as many as are wanted, and the other prompts; in the order of the seed."""
    prompts = _prompts(context, recipe)
    if context.memo is None:
        return [], prompts
    known: list[Example] = []
    unknown: list[Example] = []
    written = 0
    for done, example in enumerate(prompts, start=1):
        context.report_progress("known answers (prompts)", done, len(context.examples))
        found = context.memo.get(example.prompt, recipe.limit, recipe.temperature)
        if found is None:
            unknown.append(example)
            continue
        known.append(Example(example.prompt, found))
        written += len(found)
        if recipe.tokens is not None and written >= recipe.tokens:
            break
    return known, iter(unknown)


def _prompts(context: TrainingContext, recipe: AnswerRecipe) -> Iterator[Example]:
    """In an order that the seed decides, tokenised only as far as needed."""
    order = list(range(len(context.examples)))
    random.Random(context.seed).shuffle(order)
    examples = (context.examples[place] for place in order)
    return (example for example in examples if 1 <= len(example.prompt) <= recipe.longest_prompt)


def _write(
    context: TrainingContext, recipe: AnswerRecipe, unknown: Iterator[Example], tokens: int, file: Path
) -> list[Example]:
    """Append window after window to the whole windows in the file until there are enough tokens."""
    found = [Example(*line) for line in read_lines(file)] if tokens > 0 else []
    rows: list[Example] = []
    written = 0
    number = 0
    while written < tokens and (window := list(islice(unknown, _WINDOW * recipe.batch))):
        context.report_progress("answers (tokens)", written, tokens)
        window.sort(key=lambda example: len(example.prompt))
        new = found[len(rows) : len(rows) + len(window)]
        if len(new) < len(window):
            found = []
            new = _answer_window(context, recipe, window, number)
            append(file, [[row.prompt, row.answer] for row in new], keep=len(rows))
        rows += new
        written += _tokens(new)
        number += 1
    if rows:
        context.report_progress("answers (tokens)", tokens, tokens)
    return rows


def _tokens(rows: Sequence[Example]) -> int:
    return sum(len(row.answer) for row in rows)


def locked(folder: Path) -> FileLock:
    """Within it, no other process writes into this folder."""
    return FileLock(folder / ".lock")


def read_lines(file: Path) -> list[Any]:
    """The JSON values of whole lines: a killed process may leave an incomplete one."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def append(file: Path, values: Sequence[Any], keep: int) -> None:
    """Write JSON lines after the first ``keep`` lines, replacing others."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    if len(lines) > keep:
        file.write_bytes(b"".join(lines[:keep]))
    with file.open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(value, separators=(",", ":")) + "\n" for value in values)


def _answer_window(context: TrainingContext, recipe: AnswerRecipe, window: list[Example], number: int) -> list[Example]:
    target = context.target
    prompts = [torch.tensor(example.prompt, device=target.device) for example in window]
    rng = torch.Generator(target.device).manual_seed(context.seed * 1_000_003 + number)
    texts = answer(target, prompts, recipe.limit, Sampling(recipe.temperature), rng, recipe.batch)
    return [Example(example.prompt, text) for example, text in zip(window, texts, strict=True)]

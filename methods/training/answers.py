"""The target's own answers to the prompts of a corpus: the text that a draft head has to predict.

A head trained on other answers learns what the target would not say (EAGLE-3 trains on the target's own, Medusa calls
it self-distillation: arXiv 2401.10774, sec. 2.3.2). Answers are decoded in batches, from which finished rows are
dropped,
and appended to a file group by group: an interrupted training resumes there, and every head for the same model and
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
from methods.training.interface import Example, TrainingContext, require

__all__ = ["HEADS_CORPUS", "AnswerRecipe", "Answers", "answer", "append", "locked", "own_answers", "read_lines"]

HEADS_CORPUS = "dolly,gsm8k:800"  # requests of many kinds, and some mathematics
_WINDOW = 8  # groups sorted by length together


@dataclass(frozen=True)
class AnswerRecipe:
    """Which answers are generated.

    Attributes:
        tokens: of all answers together; the group that reaches it is the last one.
        limit: most tokens of one answer.
        longest_prompt: longer prompts are left out.
        batch: rows decoded together.
        temperature: 0 is greedy.
    """

    tokens: int = 480_000
    limit: int = 224
    longest_prompt: int = 256
    batch: int = 64
    temperature: float = 0.0

    def __post_init__(self) -> None:
        counts = {
            "tokens": self.tokens,
            "limit": self.limit,
            "longest_prompt": self.longest_prompt,
            "batch": self.batch,
        }
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
        return sum(len(row.answer) for row in self.rows)


def own_answers(context: TrainingContext, recipe: AnswerRecipe) -> Answers:
    """The target's answers to prompts of the corpus in an order that the seed decides; those in the cache are read.

    Raises:
        ValueError: no prompt of the corpus is short enough.
    """
    folder = context.shared_cache / f"answers-{recipe.digest}"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        rows = _write(context, recipe, folder / "answers.jsonl")
    if not rows:
        raise ValueError(
            f"The corpus must have a prompt of at most {recipe.longest_prompt} tokens, got none. Name a larger corpus, "
            "or allow longer prompts (train.answers.longest_prompt)."
        )
    content = json.dumps([[row.prompt, row.answer] for row in rows])
    return Answers(tuple(rows), folder, hashlib.sha256(content.encode()).hexdigest())


def _write(context: TrainingContext, recipe: AnswerRecipe, file: Path) -> list[Example]:
    """Append group after group to the whole groups in the file until there are enough tokens."""
    found = [Example(*line) for line in read_lines(file)]
    rows: list[Example] = []
    written = 0
    for number, group in enumerate(_groups(context, recipe)):
        if written >= recipe.tokens:
            break
        context.report_progress("answers (tokens)", written, recipe.tokens)
        new = found[len(rows) : len(rows) + len(group)]
        if len(new) < len(group):
            found = []
            new = _answer_group(context, recipe, group, number)
            append(file, [[row.prompt, row.answer] for row in new], keep=len(rows))
        rows += new
        written += sum(len(row.answer) for row in new)
    context.report_progress("answers (tokens)", recipe.tokens, recipe.tokens)
    return rows


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


def _answer_group(context: TrainingContext, recipe: AnswerRecipe, group: list[Example], number: int) -> list[Example]:
    target = context.target
    prompts = [torch.tensor(example.prompt, device=target.device) for example in group]
    rng = torch.Generator(target.device).manual_seed(context.seed * 1_000_003 + number)
    texts = answer(target, prompts, recipe.limit, Sampling(recipe.temperature), rng)
    return [Example(example.prompt, text) for example, text in zip(group, texts, strict=True)]


def _groups(context: TrainingContext, recipe: AnswerRecipe) -> Iterator[list[Example]]:
    """Prompts of similar length that are decoded together, in an order that the seed decides.

    The groups of a window are shuffled: otherwise the answers would end with long prompts missing.
    """
    order = list(range(len(context.examples)))
    random.Random(context.seed).shuffle(order)
    examples = (context.examples[place] for place in order)  # tokenised only as far as needed
    short = (example for example in examples if 1 <= len(example.prompt) <= recipe.longest_prompt)
    while window := list(islice(short, _WINDOW * recipe.batch)):
        ordered = sorted(window, key=lambda example: len(example.prompt))
        groups = [ordered[first : first + recipe.batch] for first in range(0, len(ordered), recipe.batch)]
        random.Random(context.seed).shuffle(groups)
        yield from groups

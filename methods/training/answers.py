"""What the target itself answers to the prompts of a corpus: the text that a draft head has to predict.

A head trained on other people's answers learns what the target would not say (EAGLE-3 trains on the target's own,
Medusa calls it self-distillation: arXiv 2401.10774, sec. 2.3.2). Answers are decoded in batches whose finished rows are
dropped as they end, and appended to a file group by group, so an interrupted preparation goes on where it stopped and
every head for the same model and corpus shares them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from methods.engine.generation import answer
from methods.engine.sampling import Sampling
from methods.training.interface import Example, Workshop

__all__ = ["HEADS_CORPUS", "AnswerRecipe", "Answers", "alone", "answer", "own_answers"]

HEADS_CORPUS = "dolly,gsm8k:800"  # what draft heads learn from: requests of many kinds, and some mathematics
_WINDOW = 8  # groups that are sorted by length together


@dataclass(frozen=True)
class AnswerRecipe:
    """Which answers are written.

    Attributes:
        tokens: of all answers together; the group that reaches it is the last one.
        limit: most tokens of one answer.
        longest_prompt: prompts of more tokens are left out.
        batch: rows decoded together.
        temperature: 0 is greedy.
    """

    tokens: int = 480_000
    limit: int = 224
    longest_prompt: int = 256
    batch: int = 64
    temperature: float = 0.0

    def __post_init__(self) -> None:
        least = min(self.tokens, self.limit, self.longest_prompt, self.batch)
        if least < 1 or self.temperature < 0:
            raise ValueError(f"{self} came; numbers of at least 1 and a temperature of at least 0 are allowed.")

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Answers:
    """Dialogues whose answers the target wrote.

    Attributes:
        rows: prompt and answer of each.
        folder: where they lie; features of the same texts go there too.
        sha256: of all ids.
    """

    rows: tuple[Example, ...]
    folder: Path
    sha256: str

    @property
    def tokens(self) -> int:
        """Of the answers."""
        return sum(len(row.answer) for row in self.rows)


def own_answers(workshop: Workshop, recipe: AnswerRecipe) -> Answers:
    """The target's answers to prompts of the corpus in an order that the seed decides, written unless they lie there.

    Raises:
        ValueError: no prompt of the corpus is short enough.
    """
    folder = workshop.common / f"answers-{recipe.digest}"
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        rows = _write(workshop, recipe, folder / "answers.jsonl")
    if not rows:
        raise ValueError(
            f"The corpus has no prompt of at most {recipe.longest_prompt} tokens. Name a larger corpus, or allow "
            "longer prompts (train.answers.longest_prompt)."
        )
    return Answers(tuple(rows), folder, _digest(rows))


def _write(workshop: Workshop, recipe: AnswerRecipe, file: Path) -> list[Example]:
    """Append group after group until there are enough tokens, behind the whole groups that are there already."""
    found = _read(file)
    rows: list[Example] = []
    written = 0
    for number, group in enumerate(_groups(workshop, recipe)):
        if written >= recipe.tokens:
            break
        workshop.progress("answers (tokens)", written, recipe.tokens)
        new = found[len(rows) : len(rows) + len(group)]
        if len(new) < len(group):
            found = []
            new = _answer_group(workshop, recipe, group, number)
            _append(file, new, keep=len(rows))
        rows += new
        written += sum(len(row.answer) for row in new)
    workshop.progress("answers (tokens)", recipe.tokens, recipe.tokens)
    return rows


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until no other process fills this folder."""
    with (folder / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _answer_group(workshop: Workshop, recipe: AnswerRecipe, group: list[Example], number: int) -> list[Example]:
    target = workshop.target
    prompts = [torch.tensor(example.prompt, device=target.device) for example in group]
    rng = torch.Generator(target.device).manual_seed(workshop.seed * 1_000_003 + number)
    texts = answer(target, prompts, recipe.limit, Sampling(recipe.temperature), rng)
    return [Example(example.prompt, text) for example, text in zip(group, texts, strict=True)]


def _groups(workshop: Workshop, recipe: AnswerRecipe) -> Iterator[list[Example]]:
    """Prompts to be decoded together: drawn by the seed, and of similar length."""
    order = list(range(len(workshop.corpus)))
    random.Random(workshop.seed).shuffle(order)
    window: list[Example] = []
    for place in order:
        example = workshop.corpus[place]
        if 1 <= len(example.prompt) <= recipe.longest_prompt:
            window.append(example)
        if len(window) == _WINDOW * recipe.batch:
            yield from _sorted_groups(window, recipe.batch, workshop.seed)
            window = []
    yield from _sorted_groups(window, recipe.batch, workshop.seed)


def _sorted_groups(window: list[Example], batch: int, seed: int) -> Iterator[list[Example]]:
    """Groups of one window in a random order: where the answers end, they must not end at short prompts."""
    ordered = sorted(window, key=lambda example: len(example.prompt))
    groups = [ordered[start : start + batch] for start in range(0, len(ordered), batch)]
    random.Random(seed).shuffle(groups)
    yield from groups


def _read(file: Path) -> list[Example]:
    """Rows of whole lines: a killed process may leave a torn one."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return [Example(*json.loads(line)) for line in lines if line.endswith(b"\n")]


def _append(file: Path, rows: Sequence[Example], keep: int) -> None:
    """Write rows behind the first ``keep`` lines, whatever stands there."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    if len(lines) > keep:
        file.write_bytes(b"".join(lines[:keep]))
    with file.open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps([row.prompt, row.answer], separators=(",", ":")) + "\n" for row in rows)


def _digest(rows: Sequence[Example]) -> str:
    return hashlib.sha256(json.dumps([[row.prompt, row.answer] for row in rows]).encode()).hexdigest()

"""What exits learn from: states of the target over its own answers, which all that is trained for a model share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from methods.engine.draft_vocabulary import DraftVocabulary
from methods.training.answers import HEADS_CORPUS, AnswerRecipe, Answers, own_answers
from methods.training.features import CachedFeatures, Features
from methods.training.head_trainer import Recipe
from methods.training.interface import Workshop

__all__ = ["HEADS_CORPUS", "AnswerRecipe", "DraftVocabulary", "Recipe", "States", "own_answers", "states_over_answers"]

_BATCH = 16  # dialogues read at once


@dataclass(frozen=True)
class States:
    """States of the target at N places from which it chooses a token of an answer.

    Attributes:
        tokens: what it chose.
        hidden: behind the whole model and its norm.
        hidden_layers: raw, by 0-based layer.
    """

    tokens: Int[Tensor, "N"]
    hidden: Float[Tensor, "N D"]
    hidden_layers: dict[int, Float[Tensor, "N D"]]


def states_over_answers(
    workshop: Workshop, hidden_layers: Sequence[int], recipe: AnswerRecipe, tokens: int, held_out: int
) -> tuple[States, States]:
    """States to learn from and states to judge by, of different dialogues that the seed draws.

    The files lie beside the answers; another preparation that wants as many tokens finds them there.

    Raises:
        ValueError: the corpus has too few prompts.
    """
    answers = own_answers(workshop, recipe)
    found = CachedFeatures.make(workshop, _some(answers, tokens, held_out, workshop.seed), hidden_layers)
    counts = [len(row.answer) for row in found.answers.rows]
    split, judged = len(counts), 0
    while split and judged < held_out:
        split -= 1
        judged += counts[split]
    if not split or not judged:
        raise ValueError(
            f"The answers to {len(answers.rows)} prompts came; some to learn from and others to judge by are needed. "
            "Name a larger corpus, or set train.tokens lower."
        )
    parts = (range(split), range(split, len(counts)))
    learnt, kept = (_read(found, rows, workshop.target.dtype) for rows in parts)
    return learnt, kept


def _some(answers: Answers, tokens: int, held_out: int, seed: int) -> Answers:
    """Whole dialogues of so many tokens of answers, or all there are; states of them lie in a folder of their own."""
    order = list(range(len(answers.rows)))
    random.Random(seed).shuffle(order)
    kept, count = [], 0
    for row in order:
        if count >= tokens + held_out:
            break
        kept.append(answers.rows[row])
        count += len(answers.rows[row].answer)
    folder = answers.folder / f"states-{tokens}-{held_out}"
    folder.mkdir(exist_ok=True)
    return Answers(tuple(kept), folder, answers.sha256)


def _read(found: Features, rows: Sequence[int], dtype: torch.dtype) -> States:
    tokens: list[Tensor] = []
    hidden: list[Tensor] = []
    hidden_layers: dict[int, list[Tensor]] = {}
    for start in range(0, len(rows), _BATCH):
        batch = found.batch(rows[start : start + _BATCH], dtype)
        labels, chosen = batch.shifted(1)
        tokens.append(labels[chosen])
        hidden.append(batch.hidden[chosen])
        for tap, states in batch.hidden_layers.items():
            hidden_layers.setdefault(tap, []).append(states[chosen])
    return States(torch.cat(tokens), torch.cat(hidden), {tap: torch.cat(parts) for tap, parts in hidden_layers.items()})

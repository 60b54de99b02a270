"""States of the target over its own answers, from which exits are trained; all exits of a model share them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from methods.training.answers import AnswerRecipe, Answers, own_answers
from methods.training.features import CachedFeatures, Features
from methods.training.interface import TrainingContext

_BATCH = 16  # dialogues read at once


@dataclass(frozen=True)
class TrainingStates:
    """States of the target at N places from which it chooses a token of an answer.

    Attributes:
        tokens: what it chose.
        hidden: after the whole model and its norm.
        hidden_layers: raw, by 0-based layer.
    """

    tokens: Int[Tensor, "N"]
    hidden: Float[Tensor, "N D"]
    hidden_layers: dict[int, Float[Tensor, "N D"]]


def states_over_answers(
    context: TrainingContext, hidden_layers: Sequence[int], recipe: AnswerRecipe, tokens: int, held_out: int
) -> tuple[TrainingStates, TrainingStates]:
    """States to learn from and states for evaluation, of different dialogues that the seed draws.

    Their files are in the shared cache, for other trainings with as many tokens.

    Raises:
        ValueError: the corpus has too few prompts.
    """
    answers = own_answers(context, recipe)
    found = CachedFeatures.make(context, _some(answers, tokens, held_out, context.seed), hidden_layers)
    counts = [len(row.answer) for row in found.answers.rows]
    split, judged = len(counts), 0
    while split and judged < held_out:
        split -= 1
        judged += counts[split]
    if not split or not judged:
        raise ValueError(
            f"At least two answers, one to learn from and one for evaluation, are needed, got {len(answers.rows)}. "
            "Name a larger corpus, or set train.tokens lower."
        )
    parts = (range(split), range(split, len(counts)))
    learnt, kept = (_read(found, rows, context.target.dtype) for rows in parts)
    return learnt, kept


def _some(answers: Answers, tokens: int, held_out: int, seed: int) -> Answers:
    """Whole dialogues of so many tokens of answers, or all; their states have a folder of their own."""
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


def _read(found: Features, rows: Sequence[int], dtype: torch.dtype) -> TrainingStates:
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
    return TrainingStates(
        torch.cat(tokens), torch.cat(hidden), {tap: torch.cat(parts) for tap, parts in hidden_layers.items()}
    )

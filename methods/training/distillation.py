"""Sequence-level distillation: a teacher's translations replace the references (Kim & Rush 2016, arXiv 1606.07947).

References of one sentence differ in ways that the source does not determine; a teacher is more consistent, so a student
with less capacity, or without a left context, can learn its texts. Translations are appended to a file in groups, so an
interrupted call resumes, and all students of one teacher share them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch
from torch import Tensor

from methods.engine.generation import translate
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.training.answers import append, read_lines
from methods.training.interface import TrainingContext, require

GROUP = 128  # sources of similar length, translated together
_PER_SOURCE, _EXTRA = 2, 20


def translations(context: TrainingContext, sources: Sequence[Sequence[int]], beams: int) -> list[list[int]]:
    """What the teacher writes for every source; what is in the shared cache is read.

    Args:
        context: its model is the teacher.
        sources: token ids.
        beams: 1 is greedy.

    Returns:
        Token ids in the order of the sources, without the end-of-sequence token; empty where the teacher did not end.

    Raises:
        ValueError: no beam.
    """
    require("at least 1", beams=beams)
    folder, teacher = context.shared_cache, context.target
    assert isinstance(teacher, Seq2SeqLM), "trainings check this"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"translations-beam{beams}-{digest(sources)[:12]}.jsonl"
    groups, found = _groups(sources), read_lines(file)
    for number, group in enumerate(groups):
        context.report_progress("translations (groups)", number, len(groups))
        if number == len(found):
            found.append(_write(teacher, [sources[place] for place in group], beams))
            append(file, found[-1:], keep=number)
    context.report_progress("translations (groups)", len(groups), len(groups))
    placed: dict[int, list[int]] = {}
    for group, texts in zip(groups, found, strict=True):
        placed |= zip(group, texts, strict=True)
    return [placed[place] for place in range(len(sources))]


def distilled_pairs(
    context: TrainingContext, sources: Sequence[Sequence[int]], beams: int, least: int = 1, longest: int | None = None
) -> list[tuple[list[int], list[int]]]:
    """Sources with the teacher's translations, end-of-sequence tokens included.

    Args:
        context, sources, beams: see ``translations``.
        least: fewest pairs.
        longest: most tokens of a translation. Longer ones, and those that the teacher did not end, are left out.

    Raises:
        ValueError: too few pairs are left.
    """
    end, written = context.target.eos_ids[:1], translations(context, sources, beams)
    pairs = [(list(source), [*text, *end]) for source, text in zip(sources, written, strict=True) if text]
    pairs = [pair for pair in pairs if longest is None or len(pair[1]) <= longest]
    if len(pairs) < least:
        raise ValueError(
            f"{context.target.name} must end at least {least} of its translations, got {len(pairs)} of {len(sources)}. "
            "Name a larger corpus, or a model that was trained to translate it."
        )
    return pairs


def digest(texts: Sequence[Sequence[int]]) -> str:
    """Identifies token ids in their order."""
    return hashlib.sha256(json.dumps([list(text) for text in texts]).encode()).hexdigest()


def most_tokens(sources: Sequence[Sequence[int] | Tensor], positions: int) -> int:
    """Where translations are cut: at twice the length of the longest source and 20 tokens more, or at the positions."""
    return min(positions, _PER_SOURCE * max(map(len, sources)) + _EXTRA)


def _write(teacher: Seq2SeqLM, sources: Sequence[Sequence[int]], beams: int) -> list[list[int]]:
    rows = [torch.tensor(source, dtype=torch.long, device=teacher.device) for source in sources]
    limit = most_tokens(sources, teacher.max_positions)
    texts = translate(teacher, rows, limit, beams)
    return [text[:-1] if text[-1] in teacher.eos_ids else [] for text in texts]


def _groups(sources: Sequence[Sequence[int]]) -> list[list[int]]:
    """Numbers of sources to be written together, the longest first: what does not fit into memory fails at once."""
    order = sorted(range(len(sources)), key=lambda place: -len(sources[place]))
    return [order[start : start + GROUP] for start in range(0, len(order), GROUP)]

"""A teacher's own texts in place of the references: what a student learns from (Kim & Rush 2016, arXiv 1606.07947).

References of one sentence differ in ways that the source does not decide; a teacher mostly says the same thing the same
way, which is what a student with less capacity, or without a left context, can learn. Texts are written in groups and
appended to a file, so that an interrupted call goes on, and all students of one teacher share them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Generator

from methods.engine.generation import answer, search
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM

_GROUP = 128  # sources written together, of similar length
_PER_SOURCE, _EXTRA = 2, 20  # a text is cut at so many times the tokens of its source, and so many more


def translations(
    teacher: Seq2SeqLM,
    sources: Sequence[Sequence[int]],
    beams: int,
    folder: Path,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> list[list[int]]:
    """What the teacher writes for every source, from the folder as far as it lies there.

    Args:
        sources: token ids.
        beams: 1 is greedy, by our own loop; more search with transformers, which must have been kept (``keep_hf``).
        folder: of this teacher; the file is named by the sources' hash.

    Returns:
        Token ids in the order of the sources, without the end-of-sequence token; empty where the teacher did not end.

    Raises:
        ValueError: no beam, or see ``methods.engine.generation.search``.
    """
    if beams < 1:
        raise ValueError(f"beams={beams} came; at least 1, which is greedy, is needed. Set it.")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"translations-beam{beams}-{digest(sources)[:12]}.jsonl"
    groups = _groups(sources)
    found = _read(file)
    for number, group in enumerate(groups):
        progress("translations (groups)", number, len(groups))
        if number == len(found):
            found.append(_write(teacher, [sources[place] for place in group], beams))
            with file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(found[-1], separators=(",", ":")) + "\n")
    progress("translations (groups)", len(groups), len(groups))
    placed: dict[int, list[int]] = {}
    for group, texts in zip(groups, found, strict=True):
        placed |= zip(group, texts, strict=True)
    return [placed[place] for place in range(len(sources))]


def digest(texts: Sequence[Sequence[int]]) -> str:
    """Identifies token ids in their order."""
    return hashlib.sha256(json.dumps([list(text) for text in texts]).encode()).hexdigest()


def _write(teacher: Seq2SeqLM, sources: Sequence[Sequence[int]], beams: int) -> list[list[int]]:
    rows = [torch.tensor(source, dtype=torch.long, device=teacher.device) for source in sources]
    limit = min(teacher.max_positions, _PER_SOURCE * max(map(len, sources)) + _EXTRA)
    if beams == 1:
        texts = answer(teacher, rows, limit, Sampling(), Generator(teacher.device))
    else:
        texts = search(teacher, rows, limit, beams)
    return [text[:-1] if text[-1] in teacher.eos_ids else [] for text in texts]


def _groups(sources: Sequence[Sequence[int]]) -> list[list[int]]:
    """Numbers of sources to be written together, the longest first: what does not fit into memory fails at once."""
    order = sorted(range(len(sources)), key=lambda place: -len(sources[place]))
    return [order[start : start + _GROUP] for start in range(0, len(order), _GROUP)]


def _read(file: Path) -> list[list[list[int]]]:
    """Whole groups; behind a torn line, which a killed process may leave, the file is cut."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    if len(whole) < len(lines):
        file.write_bytes(b"".join(whole))
    return [json.loads(line) for line in whole]

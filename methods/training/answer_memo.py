"""Answers of a model that are known already, by their prompts.

A prompt is known by the first 8 bytes of the sha256 of its ids, so a file of answers holds no text of anybody else's
prompts, and serves every corpus that has one of them, in any order. The file is compressed by numpy: ids of a small
vocabulary take about 1.3 bytes each.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt, UInt64

_KEY = np.dtype("<u8")


@dataclass(frozen=True)
class Origin:
    """Whose answers these are, and how they were decoded.

    Attributes:
        model, revision, sha256: as the model is identified; None where there is no such thing.
        dtype: of the weights, e.g. ``bfloat16``. Another one rounds otherwise and writes nearly the same texts.
        limit: most tokens of one answer.
        temperature: 0 is greedy.
    """

    model: str
    revision: str | None
    sha256: str | None
    dtype: str
    limit: int
    temperature: float = 0.0


class AnswerMemo:
    """Answers by prompt.

    Attributes:
        origin: of all of them.
        keys: [N] of the prompts, ascending.
        ids: [T] of all answers, one after the other, in the order in which they were packed.
    """

    def __init__(
        self, origin: Origin, keys: UInt64[np.ndarray, "N"], lengths: Int64[np.ndarray, "N"], ids: UInt[np.ndarray, "T"]
    ) -> None:
        """``keys`` and ``lengths`` in the order of ``ids``."""
        order = np.argsort(keys, kind="stable")
        self.origin, self.keys, self.ids = origin, keys[order], ids
        self._first = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])[:-1][order]
        self._lengths = lengths[order]

    @classmethod
    def pack(cls, origin: Origin, rows: Iterable[tuple[Sequence[int], Sequence[int]]]) -> AnswerMemo:
        """From prompts and answers as ids; of two answers to one prompt the first counts.

        Raises:
            ValueError: no answer at all, or one that is empty or longer than the limit.
        """
        known: dict[int, Sequence[int]] = {}
        for prompt, answer in rows:
            if not 1 <= len(answer) <= origin.limit:
                raise ValueError(
                    f"An answer must have 1 to {origin.limit} tokens, got {len(answer)}. Name the limit it was decoded "
                    "with."
                )
            known.setdefault(key_of(prompt), answer)
        if not known:
            raise ValueError("A memo must have at least one answer, got none. Name a file with some.")
        ids = np.concatenate([np.asarray(answer, np.int64) for answer in known.values()])
        kind = np.uint16 if int(ids.max()) <= np.iinfo(np.uint16).max else np.uint32
        lengths = np.array([len(answer) for answer in known.values()], np.int64)
        return cls(origin, np.array(list(known), _KEY), lengths, ids.astype(kind))

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return int(self._lengths.sum())

    def answers(self) -> list[list[int]]:
        """All of them, in the order of their keys."""
        places = zip(self._first.tolist(), self._lengths.tolist(), strict=True)
        return [self.ids[first : first + length].tolist() for first, length in places]

    @cached_property
    def sha256(self) -> str:
        """Of origin, keys and answers."""
        digest = hashlib.sha256(json.dumps(asdict(self.origin), sort_keys=True).encode())
        for array in (self.keys, self._lengths, self.ids):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def get(self, prompt: Sequence[int], limit: int, temperature: float) -> list[int] | None:
        """The answer to a prompt as if it were decoded with this limit; None: it is not known.

        A greedy answer to a smaller limit is the beginning of a longer one. An answer that ended by itself serves any
        limit, one that was cut only its own and smaller ones.
        """
        if temperature != self.origin.temperature or (temperature > 0 and limit != self.origin.limit):
            return None
        key = key_of(prompt)
        place = int(np.searchsorted(self.keys, np.uint64(key)))
        if place == len(self.keys) or int(self.keys[place]) != key:
            return None
        length = int(self._lengths[place])
        if length == self.origin.limit < limit:
            return None
        first = int(self._first[place])
        return [int(token) for token in self.ids[first : first + min(length, limit)].tolist()]

    def save(self, file: Path) -> None:
        """Write one file; the same answers give the same bytes."""
        order = np.argsort(self._first, kind="stable")  # answers in the order in which they were packed
        content = io.BytesIO()
        np.savez_compressed(
            content,
            origin=np.array(json.dumps(asdict(self.origin), sort_keys=True)),
            keys=self.keys[order],
            lengths=self._lengths[order].astype(np.uint32),
            ids=self.ids,
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f".{file.name}.tmp")
        draft.write_bytes(content.getvalue())
        draft.replace(file)

    @classmethod
    def load(cls, file: Path) -> AnswerMemo:
        """Read what ``save`` wrote.

        Raises:
            ValueError: it is no such file.
        """
        try:
            with np.load(file) as found:
                origin = Origin(**json.loads(str(found["origin"])))
                return cls(origin, found["keys"], found["lengths"].astype(np.int64), found["ids"])
        except Exception as error:  # zip, numpy and JSON each have errors of their own
            raise ValueError(
                f"{file} must be a file of answers, got one that cannot be read ({error!r}). Copy it again."
            ) from error


def key_of(prompt: Sequence[int]) -> int:
    """The first 8 bytes of the sha256 of a prompt's ids, each of them as four bytes, little-endian."""
    return int.from_bytes(hashlib.sha256(np.asarray(prompt, "<u4").tobytes()).digest()[:8], "little")

"""The tokens of a vocabulary as bytes, for two models that read different ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from methods.engine.causal_lm import CausalLM

_SPACE = "\u2581"  # what SentencePiece writes for a space
_PRINTABLE = (
    *range(33, 127),
    *range(161, 173),
    *range(174, 256),
)  # bytes that stand for themselves in GPT-2's alphabet


class Vocabulary:
    """What the ids of a tokenizer stand for.

    Args:
        pieces: bytes of every id; None for special tokens and for ids without a token.
        specials: ids of the special tokens, by name.
        encode: ids of a text, without special tokens around it.
        start: ids that every text begins with.
    """

    def __init__(
        self,
        pieces: Sequence[bytes | None],
        specials: Mapping[str, int],
        encode: Callable[[str], list[int]],
        start: Sequence[int] = (),
    ) -> None:
        self.pieces, self.specials, self.start = list(pieces), dict(specials), list(start)
        self._encode = encode
        self.ids: dict[bytes, int] = {}
        for id, piece in enumerate(self.pieces):
            if piece:
                self.ids.setdefault(piece, id)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
        """Read a tokenizer of transformers.

        Raises:
            ValueError: it is neither a byte-level one nor one of SentencePiece, or has no fast implementation.
        """
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        steps = (
            set() if backend is None or backend.decoder is None else _steps(json.loads(backend.decoder.__getstate__()))
        )
        if not steps & {"ByteLevel", "ByteFallback", "Metaspace", "Replace"}:
            raise ValueError(
                "A draft model with another vocabulary needs tokenizers that are byte-level or of SentencePiece, got "
                f"{type(tokenizer).__name__}. Choose a draft of the target's family."
            )
        to_bytes = _from_alphabet if "ByteLevel" in steps else _from_sentencepiece
        added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        special = {str(token.content): id for id, token in added.items() if token.special}
        found = tokenizer.get_vocab()
        pieces: list[bytes | None] = [None] * (max(found.values()) + 1)
        for token, id in sorted(found.items(), key=lambda item: (item[0].startswith("<0x"), item[1])):
            if token not in special:
                pieces[id] = token.encode() if id in added else to_bytes(token)

        def encode(text: str) -> list[int]:
            return list(backend.encode(text, add_special_tokens=False).ids)

        return cls(pieces, special, encode, list(backend.encode("", add_special_tokens=True).ids))

    def text(self, ids: Sequence[int]) -> bytes:
        """What ids stand for, special tokens left out."""
        return b"".join(self.piece(id) or b"" for id in ids)

    def piece(self, id: int) -> bytes | None:
        """What an id stands for; None for special tokens and padding of the output matrix."""
        return self.pieces[id] if id < len(self.pieces) else None

    def ending(self, ids: Sequence[int]) -> bytes:
        """The text of the ids after the last special token."""
        last = next((place for place in reversed(range(len(ids))) if self.piece(ids[place]) is None), -1)
        return self.text(ids[last + 1 :])

    def continuation(self, before: bytes, new: bytes) -> list[int]:
        """Ids of ``new`` as the tokenizer writes it after ``before``.

        Where a token would reach over the border, as it writes ``new`` alone; empty where it writes another text, for
        example with a space in front, or where the bytes are not whole characters.
        """
        for context in (_whole(before), b""):
            try:
                ids = self._encode((context + new).decode())
            except UnicodeDecodeError:
                continue
            written = self.text(ids)
            if not written.endswith(context + new) or len(written) > len(context + new) + 1:
                continue
            ends = [0, *accumulate(len(self.piece(id) or b"") for id in ids)]
            border = len(written) - len(new)
            if border in ends:
                return ids[len(ends) - 1 - ends[::-1].index(border) :]
        return []

    def spelled(self, before: bytes, new: bytes) -> list[int]:
        """As ``continuation``; what has none, byte by byte as far as there are tokens for that."""
        whole = _leading(new)
        ids = self.continuation(before, whole) if whole else []
        left = new[len(whole) :] if ids else new
        return ids + [self.ids[byte] for byte in (left[i : i + 1] for i in range(len(left))) if byte in self.ids]


@dataclass(frozen=True, slots=True)
class ForeignModel:
    """A draft model with a tokenizer of its own.

    Attributes:
        own: its vocabulary.
        target: that of the model it drafts for.
    """

    model: CausalLM
    own: Vocabulary
    target: Vocabulary

    def shared(self) -> dict[int, int]:
        """The intersection: ids of the target, and those of the draft model that stand for the same bytes or name.

        Without ids that the draft model has in its tokenizer alone.
        """
        both = {self.target.ids[piece]: id for piece, id in self.own.ids.items() if piece in self.target.ids}
        names = {id: self.own.specials[name] for name, id in self.target.specials.items() if name in self.own.specials}
        return {id: own for id, own in (both | names).items() if own < self.model.vocab_size}


def complete(before: bytes, new: bytes) -> bytes:
    """The beginning of ``new`` that ends, after ``before``, with a whole character."""
    context = _whole(before)
    return _leading(context + new)[len(context) :]


def _leading(text: bytes) -> bytes:
    """The text up to the first byte that is of no whole character."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start]
    return text


def _whole(text: bytes) -> bytes:
    """The text without the rest of a character at its beginning."""
    start = 0
    while start < len(text) and text[start] & 0xC0 == 0x80:
        start += 1
    return text[start:]


def _steps(decoder: Any) -> set[str]:
    """Kinds of the steps of a decoder."""
    nested = decoder.get("decoders") or []
    return {str(decoder.get("type"))} | {kind for step in nested for kind in _steps(step)}


_ALPHABET = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}


def _from_alphabet(token: str) -> bytes | None:
    """A token in GPT-2's alphabet, where every byte is a printable character."""
    return bytes(_ALPHABET[char] for char in token) if all(char in _ALPHABET for char in token) else None


def _from_sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE, " ").encode()

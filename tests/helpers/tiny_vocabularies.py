"""Two small models with different tokenizers over letters and pairs of letters."""

from __future__ import annotations

from itertools import product

from bench.contract import checks
from methods.engine.causal_lm import CausalLM
from methods.engine.vocabulary import ForeignModel, Vocabulary

LETTERS = [bytes([code]) for code in range(ord("a"), ord("z") + 1)]
END = "<end>"


def vocabulary(pieces: list[bytes], end: bool = True) -> Vocabulary:
    """One that writes the longest piece that fits; ``end``: with a special token after them."""
    ids = {piece: id for id, piece in enumerate(pieces)}

    def encode(text: str) -> list[int]:
        left, found = text.encode(), []
        while left:
            size = max(size for size in range(1, 4) if left[:size] in ids)
            found.append(ids[left[:size]])
            left = left[size:]
        return found

    return Vocabulary([*pieces, *([None] if end else [])], {END: len(pieces)} if end else {}, encode)


def pieces(size: int) -> list[bytes]:
    """Letters, then pairs of them."""
    letters = LETTERS[: max(2, size // 2)]
    return [*letters, *(first + second for first, second in product(letters, letters))][:size]


def pair(target: CausalLM, letters_only: bool = False, max_positions: int = 512) -> ForeignModel:
    """A draft model with another order of the tokens, other pairs, and one token more."""
    ours = pieces(target.vocab_size - 1)
    letters = [piece for piece in ours if len(piece) == 1]
    theirs = letters[::-1] if letters_only else [*letters[::-1], *(one + one + one for one in letters), ours[-1]]
    draft = checks.tiny_target(len(theirs) + 1, layers=2, seed=5)
    draft.max_positions = max_positions
    return ForeignModel(draft, vocabulary(theirs), vocabulary(ours))

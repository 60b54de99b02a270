"""Guesses for rounds of the C++ kernels: what followed the same tokens before, in the text and in a table of n-grams,
or what heads draft.

A table has the likeliest tokens after contexts of one to three tokens of other texts; a guess costs a look into sorted
arrays. Guesses become a tree, and one pass judges it, see ``FusedLayers.run_rounds``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from methods.engine.cpu_kernels import Matrix, library
from methods.engine.linear import KernelLinear

SOURCES = ("text", "table")
LONGEST, EACH = 3, 4  # tokens of a context, and after one; the kernels have them too
_BACKED_OFF = 4.0  # occurrences for which the shares after a context shorter by one token count
_LEAST = (2, 2, 3)  # occurrences of a context of 1, 2 and 3 tokens


class _Table(Structure):
    _fields_ = [
        ("keys", c_void_p * LONGEST),
        ("counts", c_int64 * LONGEST),
        ("tokens", c_void_p * LONGEST),
        ("shares", c_void_p * LONGEST),
        ("base", c_int64),
    ]


class GuessesNumbers(Structure):
    """As the kernels are given them."""

    _fields_ = [
        ("text", c_void_p),
        ("length", c_int64),
        ("table", c_void_p),
        ("wanted", c_int64),
        ("nodes", c_int64),
        ("costs", c_void_p),
        ("least", c_float),
        ("trust", c_void_p),
        ("passes", c_int64),
        ("spent", c_float),
        ("judged", c_void_p),
        ("heads", c_void_p),
    ]


class _Heads(Structure):
    _fields_ = [
        *((name, Matrix) for name in ("first", "second", "output")),
        ("vocabulary", c_void_p),
        ("count", c_int64),
        ("state", c_void_p),
    ]


@dataclass(frozen=True)
class HeadGuesses:
    """Heads whose chain is guessed, see ``methods.speculative.heads.blockwise``.

    Attributes:
        first, second, output: products of a state, of what of it is above zero, and of the state plus each update.
        vocabulary: ids of the outputs.
        count: of heads.
    """

    first: KernelLinear
    second: KernelLinear
    output: KernelLinear
    vocabulary: Int[Tensor, "v"]
    count: int

    def into(self, state: Float[Tensor, "D"]) -> _Heads:
        """As the kernels are given them; ``state`` chose the last token, and becomes that of the next chain."""
        assert state.is_contiguous() and state.dtype == self.first.panels.dtype
        products = (product.panels.matrix for product in (self.first, self.second, self.output))
        return _Heads(*products, self.vocabulary.data_ptr(), self.count, state.data_ptr())


@dataclass(frozen=True)
class _Order:
    """Contexts of one length."""

    keys: Int[np.ndarray, "C"]
    tokens: Int[np.ndarray, "C e"]
    shares: Float[np.ndarray, "C e"]

    def rows(self, keys: Int[np.ndarray, "Q"]) -> tuple[Int[np.ndarray, "Q e"], Float[np.ndarray, "Q e"]]:
        """What follows some contexts; after one that is not here nothing."""
        if not len(self.keys):
            return np.full((len(keys), EACH), -1), np.zeros((len(keys), EACH))
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        known = (self.keys[at] == keys)[:, None]
        return np.where(known, self.tokens[at], -1), np.where(known, self.shares[at], 0.0)


class NgramTable:
    """The likeliest tokens after contexts of 1 to ``LONGEST`` tokens, with their shares.

    A share is (c + b q) / (n + b): of n occurrences of the context c are followed by the token, whose share after the
    context without its first token is q; b is 4.

    Args:
        tokens: of all documents, with a number below 0 after each.
        vocab_size: ids are below it.
        least: occurrences of a context of each length; rarer ones are left out.
    """

    def __init__(self, tokens: Int[np.ndarray, "L"], vocab_size: int, least: Sequence[int] = _LEAST) -> None:
        self.vocab_size = vocab_size
        self._orders: list[_Order] = []
        for length in range(1, LONGEST + 1):
            below = self._orders[-1] if self._orders else None
            self._orders.append(_counted(np.asarray(tokens, np.int64), length, vocab_size, least[length - 1], below))
        self.numbers = _Table(
            (c_void_p * LONGEST)(*(order.keys.ctypes.data for order in self._orders)),
            (c_int64 * LONGEST)(*(len(order.keys) for order in self._orders)),
            (c_void_p * LONGEST)(*(order.tokens.ctypes.data for order in self._orders)),
            (c_void_p * LONGEST)(*(order.shares.ctypes.data for order in self._orders)),
            vocab_size,
        )

    @property
    def nbytes(self) -> int:
        """Memory of it."""
        return sum(part.nbytes for order in self._orders for part in (order.keys, order.tokens, order.shares))

    def following(self, text: Sequence[int]) -> dict[int, float]:
        """What follows the longest context of the table that a text ends with: tokens and their shares."""
        key, found = 0, dict[int, float]()
        for length, order in enumerate(self._orders[: len(text)]):
            key += text[-1 - length] * self.vocab_size**length
            tokens, shares = order.rows(np.array([key]))
            if tokens[0, 0] < 0:
                break
            found = {int(token): float(share) for token, share in zip(tokens[0], shares[0], strict=True) if token >= 0}
        return found


def _counted(tokens: Int[np.ndarray, "L"], length: int, base: int, least: int, below: _Order | None) -> _Order:
    """The contexts of a length in some documents, with what follows them; ``below``: those shorter by one token."""
    windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1) if len(tokens) > length else None
    if windows is None or not len(windows := windows[(windows >= 0).all(1)]):
        return _Order(np.empty(0, np.int64), np.empty((0, EACH), np.int32), np.empty((0, EACH), np.float32))
    keys, context = np.unique(windows[:, :-1] @ base ** np.arange(length - 1, -1, -1), return_inverse=True)
    grams, counts = np.unique(context * base + windows[:, -1], return_counts=True)  # as small as ids allow
    contexts, following = grams // base, grams % base
    starts = np.searchsorted(contexts, np.arange(len(keys)))
    totals = np.add.reduceat(counts, starts)
    often = totals >= least
    order = np.lexsort((-counts, contexts))  # of each context the most frequent tokens first
    places = starts[often][:, None] + np.arange(EACH)
    ends = np.append(starts[1:], len(grams))[often][:, None]
    chosen = order[np.minimum(places, len(order) - 1)]
    own = np.where(places < ends, following[chosen], -1)
    seen = np.where(places < ends, counts[chosen], 0)
    keys, totals = keys[often], totals[often][:, None]
    if below is None:
        return _best(keys, own, seen / (totals + _BACKED_OFF))
    other, likely = below.rows(keys % base ** (length - 1))
    same = (own[:, :, None] == other[:, None]) & (own >= 0)[:, :, None]
    shares = (seen + _BACKED_OFF * (same * likely[:, None]).sum(2)) / (totals + _BACKED_OFF)
    fresh = ~same.any(1) & (other >= 0)
    more = np.where(fresh, _BACKED_OFF * likely / (totals + _BACKED_OFF), 0.0)
    return _best(keys, np.hstack([own, np.where(fresh, other, -1)]), np.hstack([shares, more]))


def _best(keys: Int[np.ndarray, "C"], tokens: Int[np.ndarray, "C n"], shares: Float[np.ndarray, "C n"]) -> _Order:
    """Of each context the ``EACH`` likeliest."""
    chosen = np.argsort(-shares, axis=1, kind="stable")[:, :EACH]
    kept = np.take_along_axis(tokens, chosen, 1).astype(np.int32), np.take_along_axis(shares, chosen, 1)
    return _Order(keys, np.ascontiguousarray(kept[0]), np.ascontiguousarray(kept[1], np.float32))


class PassGuesses(NamedTuple):
    """What one of several rounds made of its guesses.

    Attributes:
        tokens: that it committed.
        kept: guesses that were right, an end of the text included.
        nodes: guesses that it judged.
        depth: of the longest path of these.
        guessing_ns: time in which they were made.
    """

    tokens: int
    kept: int
    nodes: int
    depth: int
    guessing_ns: int


class _Held(NamedTuple):
    """Arrays that numbers for the kernels point to."""

    text: ctypes.Array[c_int64]
    costs: ctypes.Array[c_float] | None
    judged: ctypes.Array[c_int64]
    heads: _Heads | None

    def passes(self, count: int) -> list[PassGuesses]:
        """What the first passes made of their guesses."""
        most = len(self.judged) // len(PassGuesses._fields)
        return [PassGuesses(*self.judged[at::most]) for at in range(count)]


class GuessedTree(NamedTuple):
    """Guesses after a text.

    Attributes:
        tokens: ids.
        parents: columns of their parents (-1: the root).
        gains: how likely each is right, with all before it.
        sources: which of ``SOURCES`` each comes from.
    """

    tokens: list[int]
    parents: list[int]
    gains: list[float]
    sources: list[str]


@dataclass
class Guesses:
    """How the kernels guess in the rounds of a text.

    Args:
        nodes: most of a tree.
        table: beside the text; None: there is none.
        costs: of passes over a root and 0 to ``nodes`` guesses; as many are judged as pay. None: all.
        least: likelihood below which nothing is guessed.
        heads: whose chain is guessed in the place of text and table, whatever it costs; None: there are none.
    """

    nodes: int
    table: NgramTable | None = None
    costs: Sequence[float] | None = None
    least: float = 0.02
    heads: HeadGuesses | None = None
    _trust: ctypes.Array[c_float] = field(default_factory=lambda: (c_float * 4)())

    def tree(self, text: Sequence[int]) -> GuessedTree:
        """The guesses after a text, parents first."""
        found = library()
        assert found is not None, "no kernels"
        numbers, _held = self.into(GuessedRounds(self, text, 0), 0)
        tokens, parents, sources = ((c_int64 * self.nodes)() for _ in range(3))
        gains = (c_float * self.nodes)()
        count = found.guess(byref(numbers), tokens, parents, gains, sources)
        return GuessedTree(tokens[:count], parents[:count], gains[:count], [SOURCES[at] for at in sources[:count]])

    def reset(self) -> None:
        """Forget how good guesses were."""
        self._trust = (c_float * 4)()

    def into(self, rounds: GuessedRounds, most: int) -> tuple[GuessesNumbers, _Held]:
        """As the kernels are given them, and what they point to; ``passes`` and ``spent`` come back in it.

        Args:
            most: tokens of all passes.
        """
        text = (c_int64 * len(rounds.text))(*rounds.text)
        costs = None if self.costs is None else (c_float * (1 + self.nodes))(*self.costs)
        table = None if self.table is None else ctypes.addressof(self.table.numbers)
        judged = (c_int64 * (len(PassGuesses._fields) * most))()
        heads = None
        if self.heads is not None:
            assert rounds.state is not None, "heads draft from a state"
            heads = self.heads.into(rounds.state)
        numbers = GuessesNumbers(
            ctypes.addressof(text), len(text), table, rounds.wanted, self.nodes,
            None if costs is None else ctypes.addressof(costs), self.least,
            ctypes.addressof(self._trust), 0, 0.0, ctypes.addressof(judged),
            None if heads is None else ctypes.addressof(heads),
        )  # fmt: skip
        return numbers, _Held(text, costs, judged, heads)


@dataclass(frozen=True)
class GuessedRounds:
    """Rounds with guesses.

    Attributes:
        guesses: how they are made.
        text: from which, with the token that the first round reads.
        wanted: tokens after which no further pass is run.
        state: with heads, the target's normed state that chose the last token of the text; rounds move it on.
    """

    guesses: Guesses
    text: Sequence[int]
    wanted: int
    state: Float[Tensor, "D"] | None = None

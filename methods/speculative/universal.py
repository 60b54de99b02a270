"""Drafts of a model with another vocabulary: by the tokens that both have (TLI), or through the text (SLEM).

Timor et al. 2025, arXiv 2502.05202. TLI (alg. 4) maps ids by the bytes they stand for, and special tokens by name. The
draft model drafts tokens of the intersection only: q is 0 elsewhere and renormalised, so the ordinary rejection rule is
exact for any pair. SLEM (alg. 2 and 3) lets the draft model write text and tokenises it as the target does, in a window
with the text before it, since a token may reach over the border. The last token is dropped if there are others, as more
text could have made a longer one of it. The target accepts what equals its own, greedy or drawn, token: exact as well.

The draft model reads what was committed in its own tokens. With TLI each token of the intersection is replaced by its
counterpart, and runs of other tokens are tokenised by the draft model's tokenizer; with SLEM all text is. Special
tokens that the draft model lacks are left out. If a text outgrows the draft model's positions, it reads the last half.

Published: up to 2.8x for SLEM and 1.7x for TLI over autoregressive decoding, with draft models of other families.
Differences: batched rows; drafts of SLEM are greedy also at a temperature, where a point mass is accepted more often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from methods.drafting import Context, Draft
from methods.engine.host_copies import from_host
from methods.engine.sampling import argmax
from methods.engine.vocabulary import ForeignModel, complete
from methods.rows import of_rows
from methods.speculative.draft_model import DraftModel

Way = Literal["tli", "slem"]

_WINDOW = 8  # tokens before a border that are tokenised with what follows
_ROOM = 64  # new ids of a row that are read together with those of others; more are read as a prompt is
_COVERED = 0.5  # of the target's tokens, from which on the intersection is preferred


def way_of(pair: ForeignModel) -> Way:
    """TLI where the draft model has at least half of the target's tokens, else SLEM."""
    known = sum(piece is not None for piece in pair.target.pieces)
    return "tli" if len(pair.shared()) >= _COVERED * known else "slem"


@dataclass(slots=True)
class _Text:
    """A row as the draft model reads it.

    Attributes:
        seen: tokens of the target that have been read.
        ids: what they are to the draft model.
        begin: place of the first id in the cache.
    """

    seen: int = 0
    ids: list[int] = field(default_factory=list)
    begin: int = 0


class Reader:
    """Committed tokens of the target as tokens of the draft model.

    Args:
        known: ids of the target that are one id of the draft model; other text is tokenised.
    """

    def __init__(self, pair: ForeignModel, known: Mapping[int, int]) -> None:
        self._own, self._target, self._known = pair.own, pair.target, known

    def read(self, ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Ids for ``tokens`` of the target, after ``ids``."""
        found, run = list(ids[-_WINDOW:]), b""
        window = len(found)
        for token in tokens:
            if token not in self._known:
                run += self._target.piece(token) or b""
                continue
            found += self._spelled(found, run)
            found.append(self._known[token])
            run = b""
        return (found + self._spelled(found, run))[window:]

    def _spelled(self, before: list[int], run: bytes) -> list[int]:
        return self._own.spelled(self._own.ending(before[-_WINDOW:]), run) if run else []


class ForeignDrafter(DraftModel):
    """A draft model that reads the text with its own tokenizer.

    Args:
        known: see ``Reader``.
    """

    def __init__(self, pair: ForeignModel, known: Mapping[int, int], gamma: int, confidence: float) -> None:
        super().__init__(pair.model, pair.model.vocab_size, gamma, confidence)
        self._start = pair.own.start
        self._reader = Reader(pair, known)
        self._texts: list[_Text] = []
        self._fed: list[Int[Tensor, "B"]] = []  # drafted ids in the cache
        self._most = 0  # ids that a row reads at once

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        self._fed = []
        self._texts = [self._begun(prompt) for prompt in prompts]
        longest = max(len(text.ids) for text in self._texts) + 4 * limit + 2 * (self.nodes + 1)
        self._most = min(self.model.max_positions, longest)
        self._cache = self.model.new_cache(len(prompts), self._most + _ROOM)

    def keep_rows(self, rows: Sequence[int]) -> None:
        assert self._cache is not None, "reset comes before keep_rows"
        self._texts, self._fed = of_rows(self._texts, rows), [ids[list(rows)] for ids in self._fed]
        self._cache.select(rows)

    def reset_rows(self, prompts: Mapping[int, list[int]]) -> None:
        assert self._cache is not None, "reset comes before reset_rows"
        for row, prompt in prompts.items():
            self._texts[row] = self._begun(prompt)
        self._cache.truncate([0 if row in prompts else length for row, length in enumerate(self._cache.lengths)])

    def _begun(self, prompt: list[int]) -> _Text:
        ids = self._reader.read([], prompt)
        missing = [] if ids[: len(self._start)] == self._start else self._start
        return _Text(len(prompt), [*missing, *ids] or [0])

    def _catch_up(self, context: Context) -> Float[Tensor, "B V"]:
        cache = self._cache
        assert cache is not None, "reset comes before propose"
        drafted = torch.stack(self._fed, dim=1).tolist() if self._fed else [[]] * len(self._texts)
        self._fed = []
        cache.truncate([self._advance(*row) for row in zip(self._texts, context.tokens, drafted, strict=True)])
        self._start_anew()
        windows = [text.ids[text.begin :] for text in self._texts]
        pending = [ids[length:] for ids, length in zip(windows, cache.lengths, strict=True)]
        width = max(map(len, pending))
        tokens = from_host([new + [0] * (width - len(new)) for new in pending], self.model.device)
        logits = self.model.forward(tokens, None, cache).logits
        cache.advance([len(new) for new in pending])
        last = from_host([len(new) - 1 for new in pending], self.model.device)
        return self._fit(logits[torch.arange(len(pending), device=self.model.device), last])

    def _advance(self, text: _Text, committed: list[int], drafted: list[int]) -> int:
        """Read what is new in a row; returns how many of its ids in the cache are still right, one less than all."""
        before = len(text.ids)
        text.ids += self._reader.read(text.ids, committed[text.seen :])
        text.seen = len(committed)
        right = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafted, text.ids[before:], strict=False))
        )
        return min(before + right, len(text.ids) - 1) - text.begin

    def _start_anew(self) -> None:
        """Read rows of which much is not in the cache, or that have outgrown the model."""
        cache, anew = self._cache, {}
        assert cache is not None
        for row, text in enumerate(self._texts):
            outgrown = len(text.ids) - text.begin + self.nodes > self._most
            if outgrown:
                text.begin = len(text.ids) - max(1, self._most // 2)
            ids = text.ids[text.begin : -1]
            if ids and (outgrown or not cache.lengths[row] or len(ids) - cache.lengths[row] >= _ROOM):
                anew[row] = torch.tensor(ids, device=self.model.device)
        if anew:
            self.model.prefill_rows(anew, cache)

    def _next(self, token: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        self._fed.append(token)
        return super()._next(token)


class SharedTokens(ForeignDrafter):
    """TLI: drafts tokens that both vocabularies have. Raises ValueError where there is none."""

    def __init__(self, pair: ForeignModel, vocab_size: int, gamma: int, confidence: float) -> None:
        known = pair.shared()
        if not known:
            raise ValueError(
                "method.vocabulary=tli needs tokens that both models have, got none. Set method.vocabulary=slem."
            )
        super().__init__(pair, known, gamma, confidence)
        device = pair.model.device
        self._size, self._theirs = vocab_size, torch.tensor(list(known), device=device)
        self._ours = torch.tensor(list(known.values()), device=device)
        self._own_id = torch.zeros(vocab_size, dtype=torch.long, device=device).index_copy_(0, self._theirs, self._ours)

    def _next(self, token: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        return super()._next(self._own_id[token])

    def _fit(self, logits: Float[Tensor, "B v"]) -> Float[Tensor, "B V"]:
        """Logits over the target's vocabulary, of the intersection only."""
        fitted = logits.new_full((len(logits), self._size), -torch.inf)
        fitted[:, self._theirs] = logits[:, self._ours]
        return fitted


class WrittenText(ForeignDrafter):
    """SLEM: drafts text, which the target's tokenizer turns into tokens."""

    def __init__(self, pair: ForeignModel, gamma: int, confidence: float) -> None:
        specials = {id: own for id, own in pair.shared().items() if pair.target.piece(id) is None}
        super().__init__(pair, specials, gamma, confidence)
        self._own, self._target = pair.own, pair.target
        self._special_of = {own: id for id, own in specials.items()}

    def propose(self, context: Context) -> Draft:
        logits = self._catch_up(context)
        written = [argmax(logits)]
        while len(written) < self.nodes and not self._unsure(logits):
            logits = self._next(written[-1])
            written.append(argmax(logits))
        rows = torch.stack(written, dim=1).tolist()
        chains = [self.as_targets(*row) for row in zip(context.tokens, rows, strict=True)]
        return replace(Draft.chains(chains, context.root.device), passes=len(written))

    def as_targets(self, committed: list[int], drafted: list[int]) -> list[int]:
        """The drafted text in tokens of the target, up to the first special token of the draft model."""
        end = next((place for place, id in enumerate(drafted) if self._own.piece(id) is None), len(drafted))
        before = self._target.ending(committed[-_WINDOW:])
        ids = self._target.continuation(before, complete(before, self._own.text(drafted[:end])))
        if end < len(drafted):
            ids += [self._special_of[drafted[end]]] if drafted[end] in self._special_of else []
        elif len(ids) > 1:
            ids.pop()
        return ids[: self.nodes]


def foreign_drafter(pair: ForeignModel, way: Way, vocab_size: int, gamma: int, confidence: float) -> ForeignDrafter:
    """The drafter of a way; ``vocab_size`` is the target's."""
    if way == "tli":
        return SharedTokens(pair, vocab_size, gamma, confidence)
    return WrittenText(pair, gamma, confidence)
